"""Documents → memory-mapped token shards with a manifest, and back.

`prepare` tokenizes each source file to a folder of its own, in worker processes; a folder appears when it is whole, so
a run that was killed goes on where it stopped. `ShardSet` reads one split as a single stream of tokens.

A set on disk: manifest.json (written last), tokenizer/, token_bytes.npy, and for each shard a folder shards/NAME/ with
shard.json and, for train and validation, SPLIT.tokens and SPLIT.ends. Tokens are little-endian uint16, or uint32 where
the vocabulary needs it, one end-of-text token after each document; ends are the int64 offsets behind those, counted
from the shard's first token.
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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from biphase import console
from biphase.corpus.text import Document, Source, TxtDocuments, check_txt_documents, find_sources, read_documents
from biphase.corpus.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    special_ids,
    token_byte_lengths,
    tokenizer_hash,
    vocabulary_size,
)
from biphase.errors import InputError, nearest
from biphase.files import content_hash, file_hash, read_json, whole_folder, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

FORMAT_VERSION = 1
MAX_SHARDS = 1024
"""More source files than this are tokenized several to a shard, so that a set never has too many files to map."""
BATCH_BYTES = 2_000_000
"""Text handed to `tokenizers` at once, per core: enough to keep the cores busy, little enough to stay in memory."""
PIECE_CHARS = 200_000
"""A longer document is encoded in pieces: one call on a whole book would use one core, and about 100 bytes a token."""
DEFAULT_VALIDATION_FRACTION = 0.01
LONG_TOKENS = 2048


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardPart(_Record):
    """What one shard holds of one split."""

    documents: int
    tokens: int
    text_bytes: int
    empty_texts: int
    tokens_sha256: str
    ends_sha256: str


class Shard(_Record):
    name: str
    sources: tuple[str, ...]
    parts: dict[SplitName, ShardPart]


class Split(_Record):
    """Totals. `text_bytes` counts UTF-8; `empty_texts` are texts of white space only, which become no document."""

    documents: int
    tokens: int
    text_bytes: int
    empty_texts: int


class Options(_Record):
    """What was asked for, besides the sources."""

    validation_fraction: float
    seed: int
    text_field: str
    id_field: str
    txt_documents: TxtDocuments


class Manifest(_Record):
    """`fingerprint` is the hash of the content: the same for any path, number of workers and time of making."""

    format_version: int
    fingerprint: str
    sources_hash: str
    tokenizer_hash: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    eos_id: int
    mask_id: int
    pad_id: int
    bos_id: int | None
    special_ids: tuple[int, ...]
    options: Options
    splits: dict[SplitName, Split]
    shards: tuple[Shard, ...]


class WorkerDiedError(InputError):
    """A worker process was killed from outside, most often for want of memory."""


# Making a set


@dataclass(frozen=True)
class _Unit:
    """The work behind one shard folder. `split` is where all its documents go; None draws it for each document."""

    folder: Path
    sources: tuple[Source, ...]
    split: SplitName | None
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
) -> Manifest:
    """Tokenize `sources` (see `corpus.text.find_sources`) into the shard set `out`; returns its manifest.

    A document is for validation when a hash of (seed, its id) falls below `validation_fraction` (0.01 unless given),
    or when it comes from `validation_sources`; give one of the two. Each source file is one unit of work: finished
    ones are skipped when the same command runs again. `workers` processes share the cores (unless given: one per file,
    as many as there are cores). The content does not depend on their number.

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
        _tokenize_missing(units, out / "tokenizer" / "tokenizer.json", workers or min(len(units), num_cores()))
        return _finish(out, units, facts)


def num_cores() -> int:
    """Cores that this process may use (fewer than the machine has under taskset, Slurm or a container's cpuset)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fraction(given: float | None, validation_sources: Sequence[str | Path]) -> float:
    if given and validation_sources:
        raise InputError("validation_fraction and validation_sources are both given: choose one")
    if given is None:
        return 0.0 if validation_sources else DEFAULT_VALIDATION_FRACTION
    if not 0 <= given < 1:
        raise InputError(f"validation_fraction {given} is not in [0, 1)")
    return given


Found = list[tuple[SplitName | None, list[Source]]]


def _find_both(sources: Sequence[str | Path], validation_sources: Sequence[str | Path]) -> Found:
    if not validation_sources:
        return [(None, find_sources(sources))]
    train, validation = find_sources(sources), find_sources(validation_sources)
    shared = {source.fingerprint for source in train} & {source.fingerprint for source in validation}
    for source in train:
        if source.fingerprint in shared:
            raise InputError(f"{source.name} is given both for training and for validation")
    return [("train", train), ("validation", validation)]


def _facts(tokenizer: "PreTrainedTokenizerFast", found: Found, options: Options) -> dict[str, Any]:
    """The fields of the manifest that are known before the work."""
    vocab_size = vocabulary_size(tokenizer)
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


def _same_set(out: Path, facts: dict[str, Any]) -> Manifest:
    manifest = read_manifest(out)
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
    out: Path, sources: list[Source], split: SplitName | None, options: Options, facts: dict[str, Any]
) -> Iterator[_Unit]:
    per_unit = -(-len(sources) // MAX_SHARDS)
    for start in range(0, len(sources), per_unit):
        group = tuple(sources[start : start + per_unit])
        decides = [[source.fingerprint for source in group], split, options.model_dump(), facts["tokenizer_hash"]]
        stem = re.sub(r"[^\w.-]+", "-", Path(group[0].name).name)[:40].lstrip(".")
        name = f"{stem}-{content_hash([*decides, FORMAT_VERSION])[:12]}"
        yield _Unit(out / "shards" / name, group, split, options, facts["dtype"], facts["eos_id"])


def _finish(out: Path, units: list[_Unit], facts: dict[str, Any]) -> Manifest:
    shards = tuple(Shard.model_validate(read_json(unit.folder / "shard.json")) for unit in units)
    splits = {split: _total(shard.parts[split] for shard in shards) for split in SPLITS}
    if splits["train"].documents == 0:
        raise InputError("no document is left for training: every text is empty or went to validation")
    if splits["validation"].documents == 0 and facts["options"].validation_fraction > 0:
        console.err.print(
            f"no document fell into validation ({splits['train'].documents} in all): give validation sources, a higher "
            "fraction, or have .txt files split into paragraphs"
        )
    hashes = [
        [shard.parts[split].tokens_sha256, shard.parts[split].ends_sha256] for shard in shards for split in SPLITS
    ]
    fingerprint = content_hash([facts["tokenizer_hash"], facts["dtype"], facts["vocab_size"], hashes])
    manifest = Manifest(fingerprint=fingerprint, splits=splits, shards=shards, **facts)
    write_json(out / "manifest.json", manifest.model_dump(mode="json"))
    kept = {unit.folder.name for unit in units}
    for folder in (out / "shards").iterdir():
        if folder.name not in kept:
            shutil.rmtree(folder)  # of an unfinished call with other sources or options
    return manifest


def _total(parts: Iterable[ShardPart]) -> Split:
    listed = list(parts)
    return Split(**{name: sum(getattr(part, name) for part in listed) for name in Split.model_fields})


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """One `prepare` per set. Locks end with their process, so a killed one blocks nothing."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".claim", "w") as claim, open(out / ".workers", "w") as workers:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is preparing {out} at this moment: wait for it") from None
        fcntl.flock(workers, fcntl.LOCK_EX)  # workers of a killed call notice within a batch, and go
        fcntl.flock(workers, fcntl.LOCK_UN)
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


def _tokenize_missing(units: list[_Unit], tokenizer_file: Path, workers: int) -> None:
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
            _tokenize_here(missing, tokenizer_file, report)
        else:
            _tokenize_in_workers(missing, tokenizer_file, min(workers, len(missing)), report)


def _is_done(unit: _Unit) -> bool:
    """Whether the folder is whole. Sizes are checked too: a power cut can leave names without their data."""
    if not (unit.folder / "shard.json").exists():
        return False
    shard = Shard.model_validate(read_json(unit.folder / "shard.json"))
    return all(_wrong_size(unit.folder, split, part, unit.dtype) is None for split, part in shard.parts.items())


def _tokenize_here(units: list[_Unit], tokenizer_file: Path, report: Report) -> None:
    encoder = _load_encoder(tokenizer_file)
    for unit in units:
        _tokenize(unit, encoder, num_cores(), report)


def _tokenize_in_workers(units: list[_Unit], tokenizer_file: Path, workers: int, report: Report) -> None:
    """A thread for each worker process hands it one unit after another, large ones first. A failure stops all."""
    waiting = sorted(units, key=lambda unit: sum(source.num_bytes or 0 for source in unit.sources))
    threads = max(1, num_cores() // workers)

    def feed(process: Any, connection: Connection) -> None:
        while waiting:
            _run_unit(waiting.pop(), process, connection, report)

    with ExitStack() as stack:
        feeders = stack.enter_context(ThreadPoolExecutor(workers))
        pool = [stack.enter_context(_worker(tokenizer_file, threads)) for _ in range(workers)]
        done, _ = wait([feeders.submit(feed, *worker) for worker in pool], return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


@contextmanager
def _worker(tokenizer_file: Path, threads: int) -> Iterator[tuple[Any, Connection]]:
    context = get_context("spawn")  # the threads of `tokenizers` do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, tokenizer_file, threads), daemon=True)
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


def _serve(connection: Connection, tokenizer_file: Path, threads: int) -> None:
    """A worker: units in; `Report` counts while one is worked on, then None or an error out. Ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["RAYON_NUM_THREADS"] = str(threads)

    def tell(message: object) -> None:
        try:
            connection.send(message)
        except BrokenPipeError:
            os._exit(1)  # the parent is gone; unwinding could touch folders that its successor already works on

    with open(tokenizer_file.parent.parent / ".workers", "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)
        encoder = _load_encoder(tokenizer_file)
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


def _load_encoder(tokenizer_file: Path) -> _Encoder:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer_file))
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
    split: SplitName
    is_last: bool


class _SplitWriter:
    """Appends documents to `SPLIT.tokens` and `SPLIT.ends` of a folder, hashing on the way."""

    def __init__(self, folder: Path, split: SplitName, dtype: str, eos_id: int) -> None:
        self.files: list[IO[bytes]] = [(folder / f"{split}.{kind}").open("wb") for kind in ("tokens", "ends")]
        self.hashes = [hashlib.sha256(), hashlib.sha256()]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.eos_id = eos_id
        self.documents = self.tokens = self.text_bytes = self.empty_texts = 0

    def write(self, pieces: list[_Piece], pieces_ids: list[list[int]]) -> None:
        rows = []
        lengths = []
        for piece, ids in zip(pieces, pieces_ids, strict=True):
            row = array.array("I", ids)
            if piece.is_last:
                row.append(self.eos_id)
            rows.append(np.frombuffer(row, dtype=np.uint32))
            lengths.append(len(row))
            self.text_bytes += len(piece.text.encode())
        is_last = np.array([piece.is_last for piece in pieces], dtype=bool)
        ends = (np.cumsum(lengths, dtype="<i8") + self.tokens)[is_last]
        for file, digest, values in zip(
            self.files, self.hashes, (np.concatenate(rows).astype(self.dtype), ends), strict=True
        ):
            digest.update(values.data)
            file.write(values.data)
        self.documents += len(ends)
        self.tokens += sum(lengths)

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


Writers = dict[SplitName, _SplitWriter]


def _tokenize(unit: _Unit, encoder: _Encoder, threads: int, report: Report) -> None:
    """Write the unit's folder. While `tokenizers` works on a batch, the next is read and the last one written."""
    with whole_folder(unit.folder) as folder, ExitStack() as stack:
        writers: Writers = {split: _SplitWriter(folder, split, unit.dtype, unit.eos_id) for split in SPLITS}
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


def _split_of(document: Document, unit: _Unit) -> SplitName:
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
    pairs = list(zip(pieces, encodings.result(), strict=True))
    before = [(writer.text_bytes, writer.tokens) for writer in writers.values()]
    for split, writer in writers.items():
        chosen = [(piece, encoding.ids) for piece, encoding in pairs if piece.split == split]
        if chosen:
            writer.write([piece for piece, _ in chosen], [ids for _, ids in chosen])
    after = [(writer.text_bytes, writer.tokens) for writer in writers.values()]
    text_bytes, tokens = np.subtract(after, before).sum(axis=0).tolist()
    report(num_bytes, text_bytes, tokens)


# Reading a set


def read_manifest(folder: Path) -> Manifest:
    path = folder / "manifest.json"
    if not path.exists():
        raise InputError(
            f"{folder} is no shard set, or one that was not finished ({path.name} is missing): run biphase prepare"
        )
    stored = read_json(path)
    version = stored.get("format_version") if isinstance(stored, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(f"{path} has format version {version}, this biphase reads {FORMAT_VERSION}: prepare it anew")
    try:
        return Manifest.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{path} is damaged ({place}: {first['msg']}): delete it and run biphase prepare again"
        ) from None


def _wrong_size(folder: Path, split: SplitName, part: ShardPart, dtype: str) -> str | None:
    expected = {"tokens": part.tokens * np.dtype(dtype).itemsize, "ends": part.documents * 8}
    for kind, num_bytes in expected.items():
        path = folder / f"{split}.{kind}"
        if not path.exists():
            return f"{path} is missing"
        if path.stat().st_size != num_bytes:
            return f"{path} has {path.stat().st_size:,} bytes, not {num_bytes:,}"
    return None


class ShardSet:
    """One split of a shard set as a single stream of tokens: the shards in the order of the manifest, memory-mapped.

    Pickles as its folder and split. `fingerprint` names the content of the whole set.
    """

    def __init__(self, folder: Path, split: SplitName, manifest: Manifest) -> None:
        self.folder, self.split, self.manifest = folder, split, manifest
        self.num_tokens = manifest.splits[split].tokens
        self.num_documents = manifest.splits[split].documents
        self.fingerprint = manifest.fingerprint
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._starts = [0]
        for shard in manifest.shards:
            self._starts.append(self._starts[-1] + shard.parts[split].tokens)
        self._maps: dict[int, np.ndarray] = {}

    @classmethod
    def open(cls, folder: str | Path, split: str = "train") -> "ShardSet":
        """Raises `InputError` when the manifest is missing or damaged, or a file has not the size it should have."""
        if split not in SPLITS:
            raise InputError(f"split '{split}'{nearest(split, SPLITS)}")
        shards = cls(Path(folder), split, read_manifest(Path(folder)))
        for shard in shards.manifest.shards:
            wrong = _wrong_size(
                shards._folder_of(shard), shards.split, shard.parts[shards.split], shards.manifest.dtype
            )
            if wrong is not None:
                raise InputError(f"{wrong}: {shards._remedy(shard)}")
        return shards

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSet.open, (self.folder, self.split)

    def _folder_of(self, shard: Shard) -> Path:
        return self.folder / "shards" / shard.name

    def _remedy(self, shard: Shard) -> str:
        return f"delete {self._folder_of(shard)} and {self.folder / 'manifest.json'} and run biphase prepare again"

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Offset in the stream after each document's end-of-text token, int64 [num_documents]."""
        ends = [
            np.fromfile(self._folder_of(shard) / f"{self.split}.ends", dtype="<i8") + start
            for shard, start in zip(self.manifest.shards, self._starts, strict=False)
        ]
        return np.concatenate(ends).astype(np.int64, copy=False)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) of the stream, read-only where they lie in one shard (a view of the file)."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        parts = []
        while start < stop:
            index = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[index + 1])
            parts.append(self._map(index)[start - self._starts[index] : end - self._starts[index]])
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def _map(self, index: int) -> np.ndarray:
        if index not in self._maps:
            path = self._folder_of(self.manifest.shards[index]) / f"{self.split}.tokens"
            self._maps[index] = np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))
        return self._maps[index]

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document, its end-of-text token included."""
        start = int(self.document_ends[index - 1]) if index > 0 else 0
        return self.read(start, int(self.document_ends[index]))

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer that the set was made with."""
        return load_tokenizer(self.folder / "tokenizer")

    def token_bytes(self) -> np.ndarray:
        """`corpus.tokenizer.token_byte_lengths` of that tokenizer."""
        return np.load(self.folder / "token_bytes.npy", allow_pickle=False)

    def verify(self) -> None:
        """Read every byte of the split and the tokenizer. Raises `InputError` naming a file that is not as made."""
        for shard in self.manifest.shards:
            part = shard.parts[self.split]
            for kind, expected in (("tokens", part.tokens_sha256), ("ends", part.ends_sha256)):
                path = self._folder_of(shard) / f"{self.split}.{kind}"
                if file_hash(path) != expected:
                    raise InputError(f"{path} is damaged (its SHA-256 is not the manifest's): {self._remedy(shard)}")
        tokenizer = self.tokenizer()
        check_tokenizer(self, tokenizer_hash(tokenizer))
        if not np.array_equal(self.token_bytes(), token_byte_lengths(tokenizer)):
            raise InputError(f"{self.folder / 'token_bytes.npy'} is damaged: delete the set and prepare it anew")


def check_tokenizer(shards: ShardSet, expected_hash: str) -> None:
    """Raises `InputError` unless the set was made with the tokenizer of that hash."""
    made_with = shards.manifest.tokenizer_hash
    if made_with != expected_hash:
        raise InputError(
            f"{shards.folder} was made with tokenizer {made_with[:16]}, not with {expected_hash[:16]}: prepare the "
            f"text again with this tokenizer, or use the set's own ({shards.folder / 'tokenizer'})"
        )


def describe(folder: str | Path, num_documents: int = 2) -> str:
    """Counts, document lengths and the beginning of the first documents of each split, as lines of text."""
    sets = [ShardSet.open(folder, split) for split in SPLITS]
    manifest = sets[0].manifest
    lines = [
        f"shard set {folder}",
        f"content {manifest.fingerprint[:16]} · tokenizer {manifest.tokenizer_hash[:16]} · vocabulary "
        f"{manifest.vocab_size:,} · {manifest.dtype} · {len(manifest.shards)} shards",
    ]
    for shards in sets:
        lines += _describe_split(shards)
    tokenizer = sets[0].tokenizer()
    for shards in sets:
        for index in range(min(num_documents, shards.num_documents)):
            text = str(tokenizer.decode(shards.document(index)[:80]))
            lines.append(f"{shards.split} {index}: {' '.join(text.split())[:200]}")
    return "\n".join(lines)


def _describe_split(shards: ShardSet) -> list[str]:
    total = shards.manifest.splits[shards.split]
    counts = (
        f"{shards.split}: {total.documents:,} documents · {total.tokens:,} tokens · {total.text_bytes / 1e6:,.1f} MB"
    )
    lines = [counts + f" of text · {total.empty_texts:,} empty texts left out"]
    if shards.num_documents:
        lengths = np.diff(shards.document_ends, prepend=0)
        lines.append(
            f"  tokens per document: mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}, "
            f"{np.mean(lengths > LONG_TOKENS):.1%} longer than {LONG_TOKENS:,} · "
            f"{total.text_bytes / total.tokens:.2f} bytes per token"
        )
    return lines
