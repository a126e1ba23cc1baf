"""Documents → token shards: each source file is read, split and tokenized to a folder of its own, here or in workers.

A folder appears when it is whole, so a call that was killed goes on where it stopped. What it holds depends on the
sources, the tokenizer and the options alone. The manifest comes last.
"""

import array
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import xxhash

from biphase import console
from biphase.config import parse_config
from biphase.corpus.shards import (
    FORMAT_VERSION,
    SHARD_SPLITS,
    Options,
    Shard,
    ShardManifest,
    ShardPart,
    ShardSplitName,
    SplitTotals,
    count_copies,
    read_shard_manifest,
    wrong_size,
)
from biphase.corpus.text import TextSource, find_text_sources, read_documents
from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer, special_ids, token_byte_lengths, tokenizer_hash
from biphase.engine.local import Engine, Unit, report_progress
from biphase.engine.scheduler import run_units
from biphase.errors import InputError
from biphase.files import (
    content_hash,
    file_hash,
    locked,
    read_json_as,
    refuse_links,
    whole_folder,
    write_hashed,
    write_json,
)
from biphase.machine import num_cores

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

MAX_SHARDS = 1024
"""More source files than this are tokenized several to a shard, so that a set never has too many files to map."""
NAMED_BY = 1
"""The way in which folders of shards are named."""
BATCH_BYTES = 2_000_000
"""Text handed to `tokenizers` at once, per core: enough to keep the cores busy, little enough to stay in memory."""
PIECE_CHARS = 200_000
"""A longer document is encoded in pieces: one call on a whole book would use one core, and about 100 bytes a token."""
CORES_PER_WORKER = 4
"""As many as one Python process feeds with ease: reading, taking ids out and writing cost it about a tenth of the
encoding. Fewer, larger workers load the tokenizer less often, and the last file is shared by more cores."""


@dataclass(frozen=True)
class ShardPlan:
    """The work behind one shard folder."""

    folder: Path
    """OUT/shards/NAME, absolute."""
    sources: tuple[TextSource, ...]
    split: ShardSplitName | None
    """The split of all its documents; None draws one for each document."""
    options: Options
    tokenizer_hash: str
    dtype: str
    eos_id: int
    copies: tuple[frozenset[int], ...]
    """The documents to leave out of each source, by their numbers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its sources on disk; those of the hub count as none."""
        return sum(source.num_bytes or 0 for source in self.sources)

    @property
    def is_done(self) -> bool:
        """True where the folder is whole. Sizes are checked too: a power cut can leave names without their data."""
        if not (self.folder / "shard.json").exists():
            return False
        parts = read_json_as(self.folder / "shard.json", Shard, f"delete {self.folder} and rerun").parts
        return set(parts) == set(SHARD_SPLITS) and all(
            wrong_size(self.folder, split, part, self.dtype) is None for split, part in parts.items()
        )


def prepare(
    sources: Sequence[str | Path],
    tokenizer_source: str | Path,
    out: Path,
    *,
    validation_sources: Sequence[str | Path] = (),
    workers: int | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> ShardManifest:
    """Tokenize `sources` (see `corpus.text.find_text_sources`) into the shard set `out`; returns its manifest.

    `options` are keys of `Options`. A document is for validation when a hash of (seed, its id) falls below
    `validation_fraction`, which is 0.01 unless that or `validation_sources` are given. Each source file is a unit of
    work, of this machine or of a Ray cluster where `engine` is one; the content does not depend on how many work. With
    `drop_copies`, only the first of several equal texts is taken. A finished set that lacks files gets them again by
    the call that made it.

    Raises `InputError` for bad input, no space left, a killed worker, or an `out` that holds a set made from something
    else; `BusyError` while another process makes it. What is finished stays.
    """
    if options.get("validation_fraction") and validation_sources:
        raise InputError("validation_fraction and validation_sources are both given: choose one")
    if options.get("validation_fraction") is None:
        options["validation_fraction"] = 0.0 if validation_sources else 0.01
    chosen = parse_config(Options, options, origin="prepare")
    grouped = find_both(sources, validation_sources, out)
    if (out / "tokenizer.json").exists():
        raise InputError(f"{out} is the folder of a tokenizer: give the shards another one")
    tokenizer = load_tokenizer(tokenizer_source)
    with tell_full_disk(out), locked(out / ".claim", busy=f"another process is preparing {out}: wait for it"):
        inside = (out / "shards").iterdir() if (out / "shards").is_dir() else ()
        refuse_links(out / "tokenizer", out / "token_bytes.npy", out / "shards", out / ".locks", *inside)
        before = read_shard_manifest(out) if (out / "manifest.json").exists() else None
        sources_hash = content_hash([[split, [source.fingerprint for source in group]] for split, group in grouped])
        facts = known_facts(tokenizer) | {"sources_hash": sources_hash, "options": chosen}
        names = ("sources_hash", "tokenizer_hash", "options")
        if what := [name.removesuffix("_hash") for name in names if before and getattr(before, name) != facts[name]]:
            remedy = f"choose another folder, or delete {out / 'manifest.json'} to make it anew (equal files stay)"
            raise InputError(f"{out} holds a finished shard set of other {', '.join(what)}: {remedy}")
        if before is None:
            save_tokenizer(tokenizer, out / "tokenizer")
        part = out / ".token_bytes.part.npy"
        part.unlink(missing_ok=True)
        np.save(part, token_byte_lengths(tokenizer))
        facts["token_bytes_sha256"] = file_hash(part)
        os.replace(part, out / "token_bytes.npy")
        copies = find_copies((one for _, group in grouped for one in group), chosen) if chosen.drop_copies else {}
        plans = [plan for split, group in grouped for plan in plan_shards(out, group, split, facts, copies)]
        keep_encoder(facts["tokenizer_hash"], tokenizer.backend_tokenizer)
        missing = [plan for plan in plans if not plan.is_done]
        if before is not None:
            known = {shard.name for shard in before.shards}  # others are of sources that were grouped in another way
            missing = [plan for plan in missing if plan.folder.name in known]
        tokenize_missing(plans, missing, workers, engine)
        return finish_set(out, plans, facts) if before is None else mend_set(out, before, missing)


Grouped = list[tuple[ShardSplitName | None, list[TextSource]]]
"""The source files, by the split that they are for; None: drawn for each document."""


def find_both(sources: Sequence[str | Path], validation_sources: Sequence[str | Path], out: Path) -> Grouped:
    """The files of both splits. A hub data set of which shards are in `out`, be the set finished or not, is taken at
    their commit. Raises `InputError` where a file is in both."""
    known: set[str] = set()
    for path in sorted(out.glob("shards/*/shard.json")):
        with suppress(InputError):  # a damaged one is told where it is used
            known.update(read_json_as(path, Shard).sources)
    if not validation_sources:
        return [(None, find_text_sources(sources, known))]
    train, validation = find_text_sources(sources, known), find_text_sources(validation_sources, known)
    fingerprints = {source.fingerprint for source in validation}
    for source in train:
        if source.fingerprint in fingerprints:
            raise InputError(f"{source.name} is given both for training and for validation")
    return [("train", train), ("validation", validation)]


def known_facts(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtype": "uint16" if vocab_size <= 1 << 16 else "uint32",
        "vocab_size": vocab_size,
        "eos_id": tokenizer.eos_token_id,
        "mask_id": tokenizer.mask_token_id,
        "pad_id": tokenizer.pad_token_id,
        "bos_id": tokenizer.bos_token_id,
        "special_ids": tuple(special_ids(tokenizer)),
    }


def mend_set(out: Path, before: ShardManifest, lost: list[ShardPlan]) -> ShardManifest:
    """Raises `InputError` unless the shards that were lost and made again hold what the manifest says."""
    parts = {shard.name: shard.parts for shard in before.shards}
    for plan in lost:
        if read_json_as(plan.folder / "shard.json", Shard).parts != parts[plan.folder.name]:
            remedy = "take it from a copy of the set, or delete manifest.json to make the set anew"
            raise InputError(f"{plan.folder} came out otherwise than it was, of sources of the same size: {remedy}")
    console.err.print(f"{out} {'lacked files and has them again' if lost else 'is complete, nothing to do'}")
    shutil.rmtree(out / ".locks", ignore_errors=True)
    return before


def plan_shards(
    out: Path,
    sources: list[TextSource],
    split: ShardSplitName | None,
    facts: dict[str, Any],
    copies: Mapping[str, frozenset[int]],
) -> Iterator[ShardPlan]:
    options = facts["options"]
    per_unit = max(1, -(-len(sources) // MAX_SHARDS))
    for start in range(0, len(sources), per_unit):
        group = tuple(sources[start : start + per_unit])
        decides = [[source.fingerprint for source in group], split, options.model_dump(), facts["tokenizer_hash"]]
        dropped = tuple(copies.get(source.fingerprint, frozenset()) for source in group)
        if any(dropped):
            decides.append([sorted(numbers) for numbers in dropped])
        stem = re.sub(r"[^\w.-]+", "-", Path(group[0].name).name)[:40].lstrip(".")
        name = f"{stem}-{content_hash([*decides, NAMED_BY])[:12]}"
        known = {key: facts[key] for key in ("tokenizer_hash", "dtype", "eos_id")}
        yield ShardPlan(out.resolve() / "shards" / name, group, split, options, **known, copies=dropped)


def finish_set(out: Path, plans: list[ShardPlan], facts: dict[str, Any]) -> ShardManifest:
    """Write the manifest of the shards that are there."""
    shards = tuple(read_json_as(plan.folder / "shard.json", Shard) for plan in plans)
    splits: dict[ShardSplitName, SplitTotals] = {}
    for split in SHARD_SPLITS:
        parts = [shard.parts[split] for shard in shards]
        totals = {name: sum(getattr(part, name) for part in parts) for name in SplitTotals.model_fields}
        splits[split] = SplitTotals.model_validate(totals)
    count = splits["train"].documents
    if count == 0:
        raise InputError("no document is left for training: every text is empty or went to validation")
    if splits["validation"].documents == 0:
        if any(plan.split == "validation" for plan in plans):
            raise InputError("the validation sources hold no text: name others, or leave them out")
        if facts["options"].validation_fraction > 0:
            remedy = "give validation sources or a higher fraction; documents without an id are drawn by the name of "
            remedy += "their file: have .txt files split into paragraphs, or give files of one name names of their own"
            console.err.print(f"no document fell into validation ({count} in all): {remedy}", markup=False)
    hashes = []
    for shard in shards:
        hashes += [[shard.parts[split].tokens_sha256, shard.parts[split].ends_sha256] for split in SHARD_SPLITS]
    manifest = ShardManifest(
        fingerprint=content_hash([facts["tokenizer_hash"], facts["dtype"], facts["vocab_size"], hashes]),
        splits=splits,
        shards=shards,
        duplicates=count_copies(out, shards),
        **facts,
    )
    write_hashed(out / "manifest.json", manifest.model_dump(mode="json"))
    kept = {shard.name for shard in shards}
    for folder in (out / "shards").iterdir():
        is_ours = (folder / "shard.json").exists() or folder.name.endswith(".part")
        if folder.name not in kept and is_ours:
            shutil.rmtree(folder)  # of an unfinished call with other sources or options
    shutil.rmtree(out / ".locks", ignore_errors=True)
    return manifest


def tokenize_missing(
    plans: list[ShardPlan], missing: list[ShardPlan], workers: int | None, engine: Engine | None
) -> None:
    """Make the shard folders that are missing, large ones first where there are several workers. A failure stops all.

    The bar counts bytes on disk; its note tells how many tokens they make.
    """
    if not missing:
        return
    where = choose_engine(engine, workers, len(missing))
    if where.workers != 0:
        missing = sorted(missing, key=lambda plan: -plan.num_bytes)
    units = [Unit(plan.folder.name, tokenize_unit, {"plan": plan}, cost=plan.num_bytes) for plan in missing]
    names = {plan.folder.name: ", ".join(source.name for source in plan.sources) for plan in missing}
    is_known = all(source.num_bytes is not None for plan in plans for source in plan.sources)
    num_bytes = sum(plan.num_bytes for plan in plans)
    tokens = 0
    with console.track("prepare", num_bytes / 1e6 if is_known else None, "MB") as progress:

        def advance(unit: str, counts: tuple[int, int]) -> None:
            nonlocal tokens
            tokens += counts[1]
            progress.advance(counts[0] / 1e6, f"{tokens / 1e6:,.1f}M tokens")

        if num_done := num_bytes - sum(plan.num_bytes for plan in missing):
            progress.advance(num_done / 1e6, already_done=True)
        with closing(run_units(units, where, folder=missing[0].folder.parent, on_progress=advance)) as outcomes:
            for outcome in outcomes:
                if outcome.worker_died:
                    remedy = "finished files are kept, run it again, with fewer workers if memory is short"
                    raise InputError(f"{names[outcome.name]}: {outcome.error}: {remedy}")
                if outcome.error is not None:
                    raise InputError(outcome.error)


def choose_engine(engine: Engine | None, workers: int | None, num_shards: int) -> Engine:
    """Choose where shards are made. Here a single worker is this process: its tokenizer is loaded already."""
    # Where TOKENIZERS_PARALLELISM turns the threads of `tokenizers` off, there is a worker for each core.
    switch = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower()
    cores = 1 if switch in ("", "off", "false", "f", "no", "n", "0") else CORES_PER_WORKER
    if engine is not None and engine.kind == "ray":
        return engine.model_copy(update={"workers": workers, "device": "cpu", "devices_per_worker": cores})
    number = min(num_shards, workers or num_cores() // cores)
    return Engine(workers=number if number > 1 else 0, device="cpu")


@contextmanager
def tell_full_disk(out: Path) -> Iterator[None]:
    """Raises `InputError` in place of the system's error when there is no space left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"no space left for {out}: finished files are kept; make room and run it again") from None


ENCODERS: dict[str, tuple["Tokenizer", bool]] = {}
"""The tokenizer of this process, by its hash: loading one takes as long as a few MB of text. With it, whether texts may
be cut before a letter that begins a line, and its parts be encoded alone."""


def keep_encoder(hash: str, backend: "Tokenizer") -> None:
    """Use a tokenizer that is loaded already, in this process."""
    backend.encode_special_tokens = True  # a document that spells out `<|mask|>` holds these letters, not the token
    lines = ["a\n", "b", "B.\n\n", "b ,\r\n", "é \n", "b\t\n \n", "c12\n", "the\n"]

    def ids(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    cuts = all(ids(first + then) == ids(first) + ids(then) for first in lines if first != "b" for then in lines)
    ENCODERS.clear()
    ENCODERS[hash] = backend, cuts


def tokenize_unit(plan: ShardPlan) -> None:
    """Make a shard folder that is not there yet. Reports bytes read from disk and tokens on the way.

    Its lock is waited for: where the process that started them was killed, workers may live for another moment.
    """
    out = plan.folder.parents[1]
    with tell_full_disk(out), locked(out / ".locks" / plan.folder.name, wait=True):
        if not plan.is_done:
            if plan.tokenizer_hash not in ENCODERS:
                from tokenizers import Tokenizer

                keep_encoder(plan.tokenizer_hash, Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json")))
            threads = int(os.environ.get("RAYON_NUM_THREADS") or num_cores())
            tokenize_shard(plan, threads)


TextPiece = tuple[str, ShardSplitName, bool]
"""A document or a part of a long one, its split, and whether it is the last part."""


class SplitWriter:
    """Appends documents to `SPLIT.tokens`, `SPLIT.ends` and `SPLIT.hashes` of a folder, hashing on the way."""

    kinds = ("tokens", "ends", "hashes")

    def __init__(self, folder: Path, split: ShardSplitName, dtype: str, eos_id: int) -> None:
        self.files: list[IO[bytes]] = [(folder / f"{split}.{kind}").open("wb") for kind in self.kinds]
        self.digests = [hashlib.sha256() for _ in self.kinds]
        self.document = xxhash.xxh3_64()  # of the tokens so far of the document that is being written
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.eos_id = eos_id
        self.documents = self.tokens = self.text_bytes = self.empty_texts = 0

    def write(self, encoded: list[tuple[TextPiece, "Encoding"]]) -> int:
        """Append texts; returns how many tokens they are."""
        tokens = array.array("I")
        ends = []  # in `tokens`
        for (text, _, is_last), encoding in encoded:
            tokens.fromlist(encoding.ids)
            if is_last:
                tokens.append(self.eos_id)
                ends.append(len(tokens))
            self.text_bytes += len(text.encode())
        tokens_T = np.frombuffer(tokens, dtype=np.uint32).astype(self.dtype, copy=False)
        hashes: list[int] = []
        for start, end in zip([0, *ends], [*ends, len(tokens)], strict=True):
            self.document.update(tokens_T[start:end].data)
            if len(hashes) < len(ends):  # else the document goes on in the next lot
                hashes.append(self.document.intdigest())
                self.document.reset()
        columns = tokens_T, np.array(ends, dtype="<i8") + self.tokens, np.array(hashes, dtype="<u8")
        for file, digest, values in zip(self.files, self.digests, columns, strict=True):
            digest.update(values.data)
            file.write(values.data)
        self.documents += len(ends)
        self.tokens += len(tokens)
        return len(tokens)

    def close(self) -> ShardPart:
        for file in self.files:
            file.close()
        hashes = {f"{kind}_sha256": digest.hexdigest() for kind, digest in zip(self.kinds, self.digests, strict=True)}
        totals = {name: getattr(self, name) for name in SplitTotals.model_fields}
        return ShardPart.model_validate(totals | hashes)


Writers = dict[ShardSplitName, SplitWriter]


def tokenize_shard(plan: ShardPlan, threads: int) -> None:
    """Write the shard's folder. While `tokenizers` works on a batch, the next is read and the last one written."""
    backend, cuts_at_lines = ENCODERS[plan.tokenizer_hash]
    with whole_folder(plan.folder) as folder, ExitStack() as stack:
        writers: Writers = {split: SplitWriter(folder, split, plan.dtype, plan.eos_id) for split in SHARD_SPLITS}
        for writer in writers.values():
            stack.callback(writer.close)
        helper = stack.enter_context(ThreadPoolExecutor(1))

        def write(pieces: list[TextPiece], num_bytes: int, encodings: "Future[list[Encoding]]") -> None:
            encoded = list(zip(pieces, encodings.result(), strict=True))
            tokens = 0
            for split, writer in writers.items():
                if chosen := [pair for pair in encoded if pair[0][1] == split]:
                    tokens += writer.write(chosen)
            report_progress((num_bytes, tokens))

        unwritten: list[tuple[list[TextPiece], int, Future[list[Encoding]]]] = []
        for pieces, num_bytes in read_batches(plan, cuts_at_lines, writers, BATCH_BYTES * threads):
            texts = [text for text, _, _ in pieces]
            encodings = helper.submit(backend.encode_batch_fast, texts, add_special_tokens=False)
            unwritten.append((pieces, num_bytes, encodings))
            if len(unwritten) > 1:
                write(*unwritten.pop(0))
        for batch in unwritten:
            write(*batch)
        names = tuple(source.record_name for source in plan.sources)
        parts = {split: writer.close() for split, writer in writers.items()}
        shard = Shard(name=plan.folder.name, sources=names, parts=parts)
        write_json(folder / "shard.json", shard.model_dump(mode="json"))


def read_batches(
    plan: ShardPlan, cuts_at_lines: bool, writers: Writers, batch_bytes: int
) -> Iterator[tuple[list[TextPiece], int]]:
    """Pieces in lots of about `batch_bytes`, each with the bytes read for it. Empty texts are counted here."""
    pieces: list[TextPiece] = []
    held = 0
    options = plan.options
    for source, copies in zip(plan.sources, plan.copies, strict=True):
        reported = bytes_read = 0
        documents = read_documents(source, options.text_field, options.id_field, options.txt_documents)
        for number, (document, bytes_read) in enumerate(documents):
            if number in copies:
                continue
            split = plan.split
            if split is None:  # a draw that depends on nothing but the seed and the document's id
                key = f"{options.seed}\0{document.id}".encode("utf-8", "surrogatepass")
                draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
                split = "validation" if draw < options.validation_fraction else "train"
            if not document.text or document.text.isspace():
                writers[split].empty_texts += 1
                continue
            for text, is_last in cut_text(document.text, cuts_at_lines):
                pieces.append((text, split, is_last))
                held += len(text)
                if held >= batch_bytes:
                    yield pieces, bytes_read - reported
                    pieces, held, reported = [], 0, bytes_read
        yield pieces, (source.num_bytes or bytes_read) - reported
        pieces, held = [], 0


def find_copies(sources: Iterable[TextSource], options: Options) -> dict[str, frozenset[int]]:
    """The numbers of the documents whose text stands earlier in the sources, by the fingerprint of their source."""
    known: set[int] = set()
    copies = {}
    for source in sources:
        dropped = set()
        documents = read_documents(source, options.text_field, options.id_field, options.txt_documents)
        for number, (document, _) in enumerate(documents):
            key = xxhash.xxh3_64_intdigest(document.text.encode("utf-8", "surrogatepass"))
            if key in known and not document.text.isspace() and document.text:
                dropped.add(number)
            known.add(key)
        copies[source.fingerprint] = frozenset(dropped)
    console.err.print(f"{sum(map(len, copies.values())):,} documents have the text of an earlier one and are left out")
    return copies


LINE_START = re.compile(r"(?<=\n)(?=[^\W\d_])")


def cut_text(text: str, cuts_at_lines: bool) -> Iterator[tuple[str, bool]]:
    """The text in pieces of at least `PIECE_CHARS` (the last is smaller), each with whether it is the last."""
    start = 0
    while cuts_at_lines and (cut := LINE_START.search(text, start + PIECE_CHARS)):
        yield text[start : cut.start()], False
        start = cut.start()
    yield text[start:], True
