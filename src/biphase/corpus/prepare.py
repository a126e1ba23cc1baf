"""Documents → token shards: each source file is tokenized to a folder of its own, here or in worker processes.

A folder appears when it is whole, so a call that was killed goes on where it stopped. The manifest comes last.
"""

import array
import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from biphase import console
from biphase.corpus.shards import (
    FORMAT_VERSION,
    SHARD_SPLITS,
    Options,
    Shard,
    ShardManifest,
    ShardPart,
    ShardSplitName,
    SplitTotals,
    read_shard_manifest,
    wrong_size,
)
from biphase.corpus.text import (
    Document,
    TextSource,
    TxtDocuments,
    check_txt_documents,
    find_text_sources,
    read_documents,
)
from biphase.corpus.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    special_ids,
    token_byte_lengths,
    tokenizer_hash,
    tokenizer_vocab_size,
)
from biphase.errors import BusyError, InputError
from biphase.files import content_hash, locked, read_json, whole_folder, write_json
from biphase.machine import num_cores

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

MAX_SHARDS = 1024
"""More source files than this are tokenized several to a shard, so that a set never has too many files to map."""
BATCH_BYTES = 2_000_000
"""Text handed to `tokenizers` at once, per core: enough to keep the cores busy, little enough to stay in memory."""
PIECE_CHARS = 200_000
"""A longer document is encoded in pieces: one call on a whole book would use one core, and about 100 bytes a token."""
CORES_PER_WORKER = 4
"""As many as one Python process feeds with ease: reading, taking ids out and writing cost it about a tenth of the
encoding. Fewer, larger workers load the tokenizer less often, and the last file is shared by more cores."""
THREADS_OFF = ("", "off", "false", "f", "no", "n", "0")
DEFAULT_VALIDATION_FRACTION = 0.01


class WorkerDiedError(InputError):
    """A worker process was killed from outside, most often for want of memory."""


@dataclass(frozen=True)
class _Unit:
    """The work behind one shard folder. `split` is where all its documents go; None draws it for each document."""

    folder: Path
    sources: tuple[TextSource, ...]
    split: ShardSplitName | None
    options: Options
    dtype: str
    eos_id: int


def prepare(
    sources: Sequence[str | Path],
    tokenizer_source: str | Path,
    out: Path,
    *,
    validation_fraction: float | None = None,
    validation_sources: Sequence[str | Path] = (),
    workers: int | None = None,
    seed: int = 0,
    text_field: str = "text",
    id_field: str = "id",
    txt_documents: TxtDocuments = "file",
) -> ShardManifest:
    """Tokenize `sources` (see `corpus.text.find_text_sources`) into the shard set `out`; returns its manifest.

    A document is for validation when a hash of (seed, its id) falls below `validation_fraction` (0.01 unless given),
    or when it comes from `validation_sources`; give one of the two. Each source file is one unit of work: finished
    ones are skipped when the same command runs again. `workers` processes share the cores (unless given: one for every
    four cores, at most one per file). The content does not depend on their number.

    Raises `InputError` (one line: file, line, remedy) for bad input, no space left, a killed worker
    (`WorkerDiedError`), or an `out` that holds a set made from something else. What is finished stays.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers {workers} is less than 1")
    check_txt_documents(txt_documents)
    options = Options(
        validation_fraction=_fraction(validation_fraction, validation_sources),
        seed=seed,
        text_field=text_field,
        id_field=id_field,
        txt_documents=txt_documents,
    )
    found = _find_both(sources, validation_sources)
    tokenizer = load_tokenizer(tokenizer_source)
    with _space_left(out), _claimed(out):
        facts = _facts(tokenizer, found, options)
        if (out / "manifest.json").exists():
            return _same_set(out, facts)
        save_tokenizer(tokenizer, out / "tokenizer")
        np.save(out / "token_bytes.npy", token_byte_lengths(tokenizer))
        units = [unit for split, group in found for unit in _units(out, group, split, options, facts)]
        _tokenize_missing(units, tokenizer.backend_tokenizer, out, workers or _num_workers(len(units)))
        return _finish(out, units, facts)


def _fraction(given: float | None, validation_sources: Sequence[str | Path]) -> float:
    if given and validation_sources:
        raise InputError("validation_fraction and validation_sources are both given: choose one")
    if given is None:
        return 0.0 if validation_sources else DEFAULT_VALIDATION_FRACTION
    if not 0 <= given < 1:
        raise InputError(f"validation_fraction {given} is not in [0, 1)")
    return given


def _num_workers(num_units: int) -> int:
    """Where TOKENIZERS_PARALLELISM turns the threads of `tokenizers` off, one for each core."""
    has_threads = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in THREADS_OFF
    return max(1, min(num_units, num_cores() // (CORES_PER_WORKER if has_threads else 1)))


Found = list[tuple[ShardSplitName | None, list[TextSource]]]


def _find_both(sources: Sequence[str | Path], validation_sources: Sequence[str | Path]) -> Found:
    if not validation_sources:
        return [(None, find_text_sources(sources))]
    train, validation = find_text_sources(sources), find_text_sources(validation_sources)
    shared = {source.fingerprint for source in train} & {source.fingerprint for source in validation}
    for source in train:
        if source.fingerprint in shared:
            raise InputError(f"{source.name} is given both for training and for validation")
    return [("train", train), ("validation", validation)]


def _facts(tokenizer: "PreTrainedTokenizerFast", found: Found, options: Options) -> dict[str, Any]:
    """The fields of the manifest that are known before the work."""
    vocab_size = tokenizer_vocab_size(tokenizer)
    return {
        "format_version": FORMAT_VERSION,
        "sources_hash": content_hash([[split, [source.fingerprint for source in group]] for split, group in found]),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtype": "uint16" if vocab_size <= 1 << 16 else "uint32",
        "vocab_size": vocab_size,
        "eos_id": tokenizer.eos_token_id,
        "mask_id": tokenizer.mask_token_id,
        "pad_id": tokenizer.pad_token_id,
        "bos_id": tokenizer.bos_token_id,
        "special_ids": tuple(special_ids(tokenizer)),
        "options": options,
    }


def _same_set(out: Path, facts: dict[str, Any]) -> ShardManifest:
    manifest = read_shard_manifest(out)
    differing = [
        name for name in ("sources_hash", "tokenizer_hash", "options") if getattr(manifest, name) != facts[name]
    ]
    if differing:
        what = ", ".join(name.removesuffix("_hash") for name in differing)
        raise InputError(
            f"{out} holds a finished shard set of other {what}: choose another folder, or delete "
            f"{out / 'manifest.json'} to make it anew (files that are still the same are not tokenized again)"
        )
    console.err.print(f"{out} is complete, nothing to do")
    return manifest


def _units(
    out: Path, sources: list[TextSource], split: ShardSplitName | None, options: Options, facts: dict[str, Any]
) -> Iterator[_Unit]:
    per_unit = -(-len(sources) // MAX_SHARDS)
    for start in range(0, len(sources), per_unit):
        group = tuple(sources[start : start + per_unit])
        decides = [[source.fingerprint for source in group], split, options.model_dump(), facts["tokenizer_hash"]]
        stem = re.sub(r"[^\w.-]+", "-", Path(group[0].name).name)[:40].lstrip(".")
        name = f"{stem}-{content_hash([*decides, FORMAT_VERSION])[:12]}"
        yield _Unit(out / "shards" / name, group, split, options, facts["dtype"], facts["eos_id"])


def _finish(out: Path, units: list[_Unit], facts: dict[str, Any]) -> ShardManifest:
    shards = tuple(Shard.model_validate(read_json(unit.folder / "shard.json")) for unit in units)
    splits = {split: _total(shard.parts[split] for shard in shards) for split in SHARD_SPLITS}
    if splits["train"].documents == 0:
        raise InputError("no document is left for training: every text is empty or went to validation")
    if splits["validation"].documents == 0 and facts["options"].validation_fraction > 0:
        console.err.print(
            f"no document fell into validation ({splits['train'].documents} in all): give validation sources, a higher "
            "fraction, or have .txt files split into paragraphs"
        )
    hashes = [
        [shard.parts[split].tokens_sha256, shard.parts[split].ends_sha256] for shard in shards for split in SHARD_SPLITS
    ]
    fingerprint = content_hash([facts["tokenizer_hash"], facts["dtype"], facts["vocab_size"], hashes])
    manifest = ShardManifest(fingerprint=fingerprint, splits=splits, shards=shards, **facts)
    write_json(out / "manifest.json", manifest.model_dump(mode="json"))
    kept = {unit.folder.name for unit in units}
    for folder in (out / "shards").iterdir():
        is_ours = (folder / "shard.json").exists() or folder.name.endswith(".part")
        if folder.name not in kept and is_ours:
            shutil.rmtree(folder)  # of an unfinished call with other sources or options
    return manifest


def _total(parts: Iterable[ShardPart]) -> SplitTotals:
    listed = list(parts)
    return SplitTotals(**{name: sum(getattr(part, name) for part in listed) for name in SplitTotals.model_fields})


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """One `prepare` per set. Locks end with their process, so a killed one blocks nothing."""
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(locked(out / ".claim"))
        except BusyError:
            raise InputError(f"another process is preparing {out} at this moment: wait for it") from None
        with locked(out / ".workers", wait=True):  # workers of a killed call notice within a batch, and go
            pass
        yield


@contextmanager
def _space_left(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"no space left for {out}: finished files are kept; make room and run the same command again"
        ) from None


# Tokenizing the units: in this process, or in workers that stay for many units

Report = Callable[[int, int, int], None]
"""Called with the bytes read from disk, the bytes of text and the tokens written since the last call."""


def _tokenize_missing(units: list[_Unit], backend: "Tokenizer", out: Path, workers: int) -> None:
    missing = [unit for unit in units if not _is_done(unit)]
    sizes = {unit.folder: sum(source.num_bytes or 0 for source in unit.sources) for unit in units}
    is_known = all(source.num_bytes is not None for unit in units for source in unit.sources)
    with console.track("prepare", sum(sizes.values()) / 1e6 if is_known else None, "MB") as progress:
        for folder in sizes.keys() - {unit.folder for unit in missing}:
            progress.advance(sizes[folder] / 1e6, already_done=True)
        lock = threading.Lock()
        started = time.monotonic()
        text_bytes = tokens = 0

        def report(num_bytes: int, num_text_bytes: int, num_tokens: int) -> None:
            nonlocal text_bytes, tokens
            with lock:
                text_bytes += num_text_bytes
                tokens += num_tokens
                rate = text_bytes / 1e6 / (time.monotonic() - started)
                progress.advance(num_bytes / 1e6, f"{rate:.1f} MB/s of text, {tokens / 1e6:,.1f}M tokens")

        if min(workers, len(missing)) <= 1:
            _tokenize_here(missing, backend, report)
        else:
            _tokenize_in_workers(missing, out, min(workers, len(missing)), report)


def _is_done(unit: _Unit) -> bool:
    """Whether the folder is whole. Sizes are checked too: a power cut can leave names without their data."""
    if not (unit.folder / "shard.json").exists():
        return False
    shard = Shard.model_validate(read_json(unit.folder / "shard.json"))
    return all(wrong_size(unit.folder, split, part, unit.dtype) is None for split, part in shard.parts.items())


def _tokenize_here(units: list[_Unit], backend: "Tokenizer", report: Report) -> None:
    encoder = _encoder(backend)
    for unit in units:
        _tokenize(unit, encoder, num_cores(), report)


def _tokenize_in_workers(units: list[_Unit], out: Path, workers: int, report: Report) -> None:
    """A thread for each worker process hands it one unit after another, large ones first. A failure stops all."""
    waiting = sorted(units, key=lambda unit: sum(source.num_bytes or 0 for source in unit.sources))
    threads = -(-num_cores() // workers)

    def feed(process: Any, connection: Connection) -> None:
        while waiting:
            _run_unit(waiting.pop(), process, connection, report)

    with ExitStack() as stack:
        feeders = stack.enter_context(ThreadPoolExecutor(workers))
        pool = [stack.enter_context(_worker(out, threads)) for _ in range(workers)]
        done, _ = wait([feeders.submit(feed, *worker) for worker in pool], return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


@contextmanager
def _worker(out: Path, threads: int) -> Iterator[tuple[Any, Connection]]:
    context = get_context("spawn")  # the threads of `tokenizers` do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, out, threads), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.terminate()
        process.join()
        ours.close()


def _run_unit(unit: _Unit, process: Any, connection: Connection, report: Report) -> None:
    try:
        connection.send(unit)
        while (message := connection.recv()) is not None:
            if isinstance(message, Exception):
                raise message
            report(*message)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        process.join()
        names = ", ".join(source.name for source in unit.sources)
        raise WorkerDiedError(
            f"the worker on {names} was killed (exit code {process.exitcode}; out of memory?): finished files are "
            "kept, run the same command again, with fewer workers if memory is short"
        ) from None


def _serve(connection: Connection, out: Path, threads: int) -> None:
    """A worker: units in; `Report` counts while one is worked on, then None or an error out. Ends with its parent."""
    from tokenizers import Tokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}

    def tell(message: object) -> None:
        try:
            connection.send(message)
        except BrokenPipeError:
            os._exit(1)  # the parent is gone; unwinding could touch folders that its successor already works on

    with open(out / ".workers", "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)
        encoder = _encoder(Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json")))
        while (unit := _next_unit(connection)) is not None:
            try:
                _tokenize(unit, encoder, threads, lambda *counts: tell(counts))
            except (InputError, OSError) as error:
                tell(error)
            else:
                tell(None)


def _next_unit(connection: Connection) -> _Unit | None:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return None


@dataclass(frozen=True)
class _Encoder:
    """`cuts_at_lines`: a text may be cut before a letter that begins a line, and its parts be encoded alone."""

    backend: "Tokenizer"
    cuts_at_lines: bool


def _encoder(backend: "Tokenizer") -> _Encoder:
    backend.encode_special_tokens = True  # a document that spells out `<|mask|>` holds these letters, not the token
    lines = ["a\n", "b", "B.\n\n", "b ,\r\n", "é \n", "b\t\n \n", "c12\n", "the\n"]

    def ids(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    cuts = all(ids(first + then) == ids(first) + ids(then) for first in lines if first != "b" for then in lines)
    return _Encoder(backend, cuts)


# One unit


@dataclass(frozen=True)
class _Piece:
    """A document, or a part of a long one."""

    text: str
    split: ShardSplitName
    is_last: bool


class _SplitWriter:
    """Appends documents to `SPLIT.tokens` and `SPLIT.ends` of a folder, hashing on the way."""

    def __init__(self, folder: Path, split: ShardSplitName, dtype: str, eos_id: int) -> None:
        self.files: list[IO[bytes]] = [(folder / f"{split}.{kind}").open("wb") for kind in ("tokens", "ends")]
        self.hashes = [hashlib.sha256(), hashlib.sha256()]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.eos_id = eos_id
        self.documents = self.tokens = self.text_bytes = self.empty_texts = 0

    def write(self, encoded: list[tuple[_Piece, "Encoding"]]) -> None:
        tokens = array.array("I")
        ends = []
        for piece, encoding in encoded:
            tokens.fromlist(encoding.ids)
            if piece.is_last:
                tokens.append(self.eos_id)
                ends.append(self.tokens + len(tokens))
            self.text_bytes += len(piece.text.encode())
        columns = np.frombuffer(tokens, dtype=np.uint32).astype(self.dtype, copy=False), np.array(ends, dtype="<i8")
        for file, digest, values in zip(self.files, self.hashes, columns, strict=True):
            digest.update(values.data)
            file.write(values.data)
        self.documents += len(ends)
        self.tokens += len(tokens)

    def close(self) -> ShardPart:
        for file in self.files:
            file.close()
        tokens_sha256, ends_sha256 = (digest.hexdigest() for digest in self.hashes)
        return ShardPart(
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            empty_texts=self.empty_texts,
            tokens_sha256=tokens_sha256,
            ends_sha256=ends_sha256,
        )


Writers = dict[ShardSplitName, _SplitWriter]


def _tokenize(unit: _Unit, encoder: _Encoder, threads: int, report: Report) -> None:
    """Write the unit's folder. While `tokenizers` works on a batch, the next is read and the last one written."""
    with whole_folder(unit.folder) as folder, ExitStack() as stack:
        writers: Writers = {split: _SplitWriter(folder, split, unit.dtype, unit.eos_id) for split in SHARD_SPLITS}
        for writer in writers.values():
            stack.callback(writer.close)
        helper = stack.enter_context(ThreadPoolExecutor(1))
        before: tuple[list[_Piece], int, Future] | None = None
        for pieces, num_bytes in _batches(unit, encoder.cuts_at_lines, writers, BATCH_BYTES * threads):
            texts = [piece.text for piece in pieces]
            encodings = helper.submit(encoder.backend.encode_batch_fast, texts, add_special_tokens=False)
            if before is not None:
                _write(*before, writers, report)
            before = pieces, num_bytes, encodings
        if before is not None:
            _write(*before, writers, report)
        names = tuple(Path(source.name).name for source in unit.sources)
        parts = {split: writer.close() for split, writer in writers.items()}
        shard = Shard(name=unit.folder.name, sources=names, parts=parts)
        write_json(folder / "shard.json", shard.model_dump(mode="json"))


def _batches(
    unit: _Unit, cuts_at_lines: bool, writers: Writers, batch_bytes: int
) -> Iterator[tuple[list[_Piece], int]]:
    """Pieces in lots of about `batch_bytes`, each with the bytes read for it. Empty texts are counted here."""
    pieces: list[_Piece] = []
    held = 0
    for source in unit.sources:
        reader = read_documents(source, unit.options.text_field, unit.options.id_field, unit.options.txt_documents)
        reported = 0
        for document in reader:
            split = _split_of(document, unit)
            if not document.text or document.text.isspace():
                writers[split].empty_texts += 1
                continue
            for text, is_last in _cut(document.text, cuts_at_lines):
                pieces.append(_Piece(text, split, is_last))
                held += len(text)
                if held >= batch_bytes:
                    yield pieces, reader.bytes_read - reported
                    pieces, held, reported = [], 0, reader.bytes_read
        yield pieces, (source.num_bytes or reader.bytes_read) - reported
        pieces, held = [], 0


def _split_of(document: Document, unit: _Unit) -> ShardSplitName:
    """The unit's split, or a draw that depends on nothing but the seed and the document's id."""
    if unit.split is not None:
        return unit.split
    key = f"{unit.options.seed}\0{document.id}".encode("utf-8", "surrogatepass")
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
    return "validation" if draw < unit.options.validation_fraction else "train"


LINE_START = re.compile(r"(?<=\n)(?=[^\W\d_])")


def _cut(text: str, cuts_at_lines: bool) -> Iterator[tuple[str, bool]]:
    """The text in pieces of at least `PIECE_CHARS` (the last is smaller), each with whether it is the last."""
    start = 0
    while cuts_at_lines and (cut := LINE_START.search(text, start + PIECE_CHARS)):
        yield text[start : cut.start()], False
        start = cut.start()
    yield text[start:], True


def _write(pieces: list[_Piece], num_bytes: int, encodings: Future, writers: Writers, report: Report) -> None:
    encoded = list(zip(pieces, encodings.result(), strict=True))
    before = [(writer.text_bytes, writer.tokens) for writer in writers.values()]
    for split, writer in writers.items():
        if chosen := [pair for pair in encoded if pair[0].split == split]:
            writer.write(chosen)
    after = [(writer.text_bytes, writer.tokens) for writer in writers.values()]
    text_bytes, tokens = np.subtract(after, before).sum(axis=0).tolist()
    report(num_bytes, text_bytes, tokens)
