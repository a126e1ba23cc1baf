"""Documents → token shards. This process or workers read, split and tokenize each source file into its own folder.

A folder appears once it is whole, so that the next call resumes where a killed call stopped. Its content depends only
on the sources, the tokenizer and the options. The manifest comes last.
"""

import array
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import numpy as np
import xxhash

from biphase import console, files
from biphase.config import AnyPath, OnCommandLine, parse_config
from biphase.corpus.rows import LONGEST_TEXT
from biphase.corpus.shards import (
    SHARD_SPLITS,
    Options,
    Shard,
    ShardManifest,
    ShardSplitName,
    SplitRecord,
    count_copies,
    read_shard_manifest,
    wrong_size,
)
from biphase.corpus.text import TextSource, TxtDocuments, find_text_sources, name_sources, read_documents
from biphase.corpus.tokenizer import (
    find_tokenizer,
    load_tokenizer,
    save_tokenizer,
    special_ids,
    token_byte_lengths,
    tokenizer_hash,
)
from biphase.engine.scheduler import run_units
from biphase.engine.units import Engine, EngineKind, Unit
from biphase.errors import InputError, refuse_doubles, told_as
from biphase.machine import environment_number, num_cores

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

MAX_SHARDS = 1024
"""The most shards of a set, to limit the number of mapped files: further source files share shards."""
NAMED_BY = 1
"""The version of the names of shard folders."""
BATCH_CHARACTERS = 2_000_000
"""The characters per core for one call of `tokenizers`: enough to keep the cores busy, little enough for the
memory."""
PIECE_CHARS = 200_000
"""The size from which a document is encoded in pieces: one call on a whole book would use one core, and about 100 bytes
per token."""
CORES_PER_WORKER = 4
"""The cores that one Python process easily feeds: reading, extracting ids and writing cost it about a tenth of the
encoding. Fewer, larger workers load the tokenizer less often, and share the last file among more cores."""


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one shard folder."""

    folder: Path
    """The folder OUT/shards/NAME, absolute."""
    sources: tuple[TextSource, ...]
    split: ShardSplitName | None
    """The split of all its documents; None: draw a split for each document."""
    draft: ShardManifest
    """The record of the set, still without shards."""
    num_bytes: int
    """The bytes of its sources on disk; 0 for the Hub's."""

    @property
    def is_done(self) -> bool:
        """Whether the folder is whole, by sizes too: a power cut can leave names without their data."""
        if not (self.folder / "shard.json").exists():
            return False
        parts = files.read_json_as(self.folder / "shard.json", Shard, f"delete {self.folder} and rerun").parts
        have_sizes = all(wrong_size(self.folder, split, parts[split], self.draft.dtype) is None for split in parts)
        return have_sizes and set(parts) == set(SHARD_SPLITS)


def prepare(
    sources: Annotated[Any, OnCommandLine(Sequence[str])],
    tokenizer: Annotated[str | Path, OnCommandLine(str)],
    out: AnyPath,
    *,
    validation: Annotated[Any, OnCommandLine(list[str] | None)] = None,
    validation_fraction: float | None = None,
    workers: int | None = None,
    engine: EngineKind = "local",
    address: str | None = None,
    text_field: str = "text",
    id_field: str = "id",
    txt_documents: TxtDocuments = "file",
    seed: int = 0,
    drop_copies: bool = False,
) -> Path:
    """Tokenize text into memory-mapped shards; return their folder. The same call continues where it was stopped.

    `sources` and `validation` may also be a `datasets.Dataset`, a DataFrame, texts or rows in memory, which are copied
    into `out`.

    Args:
        sources: Files (.txt, .md, .jsonl, .csv, .parquet, .arrow; texts also .gz and .zst), folders, globs or Hub data
            sets (ID:SUBSET).
        tokenizer: A tokenizer folder, a Hub id or a Llama 3 tokenizer.model file.
        out: The folder to write.
        validation: Use these sources as validation text.
        validation_fraction: Without --validation, draw this share of all documents for validation; 0.01 by default.
        workers: The number of processes; by default, one for every four cores.
        engine: Run on this machine (local) or on several (ray).
        address: The address of a Ray cluster; `auto` finds one that is running.
        text_field: The JSON field or column that holds the text, or a template of several, such as `{title}\\n{body}`.
        id_field: The JSON field or column that holds the document's name.
        txt_documents: What counts as a document in .txt and .md files: the whole file, a paragraph or a line.
        seed: The seed for drawing the validation split.
        drop_copies: Leave out exact copies of earlier documents; this reads the sources twice.

    Raises:
        InputError: bad input, no space left, a killed worker, or an `out` that holds a set made from something else.
            Finished files stay.
        BusyError: another process is making the set.
    """
    folder = Path(out)
    chosen = {"kind": engine, "address": address, "workers": workers, "device": "cpu"}
    engine_settings = parse_config(Engine, chosen, origin="prepare")
    held_out = [] if validation is None else name_sources(validation, folder, text_field)
    if validation_fraction and held_out:
        raise InputError("validation_fraction and validation sources are both given: choose one")
    if validation_fraction is None:
        validation_fraction = 0.0 if held_out else 0.01
    settings: dict[str, Any] = {"validation_fraction": validation_fraction, "seed": seed, "drop_copies": drop_copies}
    settings |= {"text_field": text_field, "id_field": id_field, "txt_documents": txt_documents}
    options = parse_config(Options, settings, origin="prepare")
    grouped = find_both(name_sources(sources, folder, text_field), held_out, folder)
    loaded = load_tokenizer(tokenizer)
    with files.locked(folder / ".claim", busy=f"another process is preparing {folder}: wait for it"):
        manifest = make_set(folder, grouped, loaded, options, engine_settings)
    print_totals(folder, manifest)
    return folder


def print_totals(out: Path, manifest: ShardManifest) -> None:
    """Print the size of a set, and the number of documents that copy others."""
    for name, split in manifest.splits.items():
        left_out = f", {split.empty_texts:,} empty texts left out" if split.empty_texts else ""
        console.out.print(f"{out} {name}: {split.documents:,} documents, {split.tokens:,} tokens{left_out}")
    if (copies := manifest.duplicates) and any(copies.values()):
        counts = f"{copies['train']:,} in train, {copies['validation']:,} in validation"
        in_both = f"validation documents that are also in train: {copies['in_both']:,}"
        remedy = "" if manifest.options.drop_copies else "; drop_copies (--drop-copies) leaves them out"
        console.out.print(f"{out}: exact copies of an earlier document: {counts}; {in_both}{remedy}")


Grouped = list[tuple[ShardSplitName | None, list[TextSource]]]
"""The source files by split; None: draw a split for each document."""


def find_both(sources: Sequence[str | Path], held_out: Sequence[str | Path], out: Path) -> Grouped:
    """Find the files of both splits. A Hub data set with shards in `out` keeps their commit, even if the set is
    unfinished. Raises `InputError` for a file in both splits, and if `out` is a tokenizer's folder."""
    if (out / "tokenizer.json").exists():
        raise InputError(f"{out} is the folder of a tokenizer: give the shards another one")
    recorded: set[str] = set()
    for path in sorted(out.glob("shards/*/shard.json")):
        with suppress(InputError):  # the code that uses a damaged file reports it
            recorded.update(files.read_json_as(path, Shard).sources)
    if not held_out:
        return [(None, find_text_sources(sources, recorded))]
    train, validation = find_text_sources(sources, recorded), find_text_sources(held_out, recorded)
    named = [source.path or source.name for source in (*train, *validation)]
    refuse_doubles("for training and for validation, the source", named)
    return [("train", train), ("validation", validation)]


def make_set(
    out: Path, grouped: Grouped, tokenizer: "PreTrainedTokenizerFast", options: Options, engine: Engine
) -> ShardManifest:
    """Make missing shards, then the manifest. Restores lost files of a finished set.

    A document belongs to validation if a hash of (seed, its id) falls below `validation_fraction`. Each shard is a unit
    of work, and the content does not depend on the number of workers.
    """
    inside = (out / "shards").iterdir() if (out / "shards").is_dir() else ()
    files.refuse_links(out / "tokenizer", out / "token_bytes.npy", out / "shards", out / ".locks", *inside)
    before = read_shard_manifest(out) if (out / "manifest.json").exists() else None
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    fingerprints = [[split, [source.fingerprint for source in group]] for split, group in grouped]
    draft = ShardManifest(
        sources_hash=files.content_hash(fingerprints),
        tokenizer_hash=tokenizer_hash(tokenizer),
        dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
        vocab_size=vocab_size,
        eos_id=tokenizer.eos_token_id,
        mask_id=tokenizer.mask_token_id,
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        special_ids=tuple(special_ids(tokenizer)),
        options=options,
    )
    if before is not None:
        names = ("sources_hash", "tokenizer_hash", "options")
        differing = [name.removesuffix("_hash") for name in names if getattr(before, name) != getattr(draft, name)]
        if differing:
            remedy = f"choose another folder, or delete {out / 'manifest.json'} to make it again (equal files stay)"
            raise InputError(f"{out} has a finished shard set with other {', '.join(differing)}: {remedy}")
    held = find_tokenizer(out / "tokenizer", str(out / "tokenizer")) if before is not None else None
    if held is None or tokenizer_hash(held) != draft.tokenizer_hash:
        save_tokenizer(tokenizer, out / "tokenizer")
    with files.whole_file(out / "token_bytes.npy") as file:
        np.save(file.buffer, token_byte_lengths(tokenizer))
    made = [out.resolve() / "shards" / shard.name for shard in (before.shards if before else ())]
    if options.drop_copies and not (made and all(ShardPlan(folder, (), None, draft, 0).is_done for folder in made)):
        leave_out_copies(grouped, options)
    plans = [plan for split, group in grouped for plan in plan_shards(out, group, split, draft)]
    keep_encoder(draft.tokenizer_hash, tokenizer.backend_tokenizer)
    missing = [plan for plan in plans if not plan.is_done]
    if before is not None:  # it does not name shards whose sources are now grouped in another way
        missing = [plan for plan in missing if plan.folder.name in {shard.name for shard in before.shards}]
    tokenize_missing(plans, missing, engine)
    return finish_set(out, plans, draft) if before is None else mend_set(out, before, missing)


def mend_set(out: Path, before: ShardManifest, lost: list[ShardPlan]) -> ShardManifest:
    """Check the restored shards. Raises `InputError` unless they match the manifest."""
    parts = {shard.name: shard.parts for shard in before.shards}
    for plan in lost:
        if files.read_json_as(plan.folder / "shard.json", Shard).parts != parts[plan.folder.name]:
            problem = f"{plan.folder} was made again from changed sources, and differs"
            raise InputError(f"{problem}: copy it from a whole set, or delete manifest.json to make the set again")
    console.err.print(f"{out} {'lacked files and has them again' if lost else 'is complete, nothing to do'}")
    shutil.rmtree(out / ".locks", ignore_errors=True)
    return before


def plan_shards(
    out: Path, sources: list[TextSource], split: ShardSplitName | None, draft: ShardManifest
) -> Iterator[ShardPlan]:
    """Divide sources among the shards of a set."""
    per_unit = max(1, -(-len(sources) // MAX_SHARDS))
    for start in range(0, len(sources), per_unit):
        group = tuple(sources[start : start + per_unit])
        options = draft.options.model_dump()
        decides: list[Any] = [[source.fingerprint for source in group], split, options, draft.tokenizer_hash]
        if any(source.copies for source in group):
            decides.append([sorted(source.copies) for source in group])
        stem = re.sub(r"[^\w.-]+", "-", Path(group[0].name).name)[:40].lstrip(".")
        name = f"{stem}-{files.content_hash([*decides, NAMED_BY])[:12]}"
        num_bytes = sum(source.num_bytes or 0 for source in group)
        yield ShardPlan(out.resolve() / "shards" / name, group, split, draft, num_bytes)


def finish_set(out: Path, plans: list[ShardPlan], draft: ShardManifest) -> ShardManifest:
    """Complete the manifest once all shards are there, and write it."""
    shards = tuple(files.read_json_as(plan.folder / "shard.json", Shard) for plan in plans)
    splits: dict[ShardSplitName, SplitRecord] = {}
    for split in SHARD_SPLITS:
        records = [shard.parts[split] for shard in shards]
        splits[split] = SplitRecord(**{name: sum(getattr(record, name) for record in records) for name in COUNTS})
    count = splits["train"].documents
    if count == 0:
        raise InputError("no document is left for training: every text is empty or went to validation")
    if splits["validation"].documents == 0:
        if any(plan.split == "validation" for plan in plans):
            raise InputError("the validation sources hold no text: name others, or leave them out")
        if draft.options.validation_fraction > 0:
            remedy = "give validation sources or a higher fraction; a document without an id is drawn by its file name"
            remedy += ": have .txt files split into paragraphs, or rename files that share a name"
            console.err.print(f"no document fell into validation ({count} in all): {remedy}")
    hashes = []
    for shard in shards:
        hashes += [[shard.parts[split].tokens_sha256, shard.parts[split].ends_sha256] for split in SHARD_SPLITS]
    content: dict[str, Any] = {"splits": splits, "shards": shards, "duplicates": count_copies(out, shards)}
    content["fingerprint"] = files.content_hash([draft.tokenizer_hash, draft.dtype, draft.vocab_size, hashes])
    content["token_bytes_sha256"] = files.file_hash(out / "token_bytes.npy")
    manifest = draft.model_copy(update=content)
    files.write_hashed(out / "manifest.json", manifest.model_dump(mode="json"))
    names = {shard.name for shard in shards}
    files.sweep_parts(out / "shards")  # a worker that was stopped leaves its folder and the file that locked it
    for folder in (out / "shards").iterdir():
        if folder.name not in names and (folder / "shard.json").exists():
            shutil.rmtree(folder)  # left by an unfinished call with other sources or options
    shutil.rmtree(out / ".locks", ignore_errors=True)
    return manifest


def tokenize_missing(plans: list[ShardPlan], missing: list[ShardPlan], engine: Engine) -> None:
    """Make the missing shard folders; several workers start with the large ones. A failure stops all workers.

    The bar counts bytes on disk; its note counts tokens.
    """
    if not missing:
        return
    engine = choose_engine(engine, len(missing))
    if engine.workers != 0:
        missing = sorted(missing, key=lambda plan: -plan.num_bytes)
    units = [Unit(plan.folder.name, tokenize_unit, {"plan": plan}, cost=plan.num_bytes) for plan in missing]
    names = {plan.folder.name: ", ".join(source.name for source in plan.sources) for plan in missing}
    is_known = all(source.num_bytes is not None for plan in plans for source in plan.sources)
    num_bytes = sum(plan.num_bytes for plan in plans)
    num_done = num_bytes - sum(plan.num_bytes for plan in missing)
    tokens = 0
    with console.track("prepare", num_bytes / 1e6 if is_known else None, "MB", num_done / 1e6) as progress:

        def advance(unit: str, counts: tuple[int, int]) -> None:
            nonlocal tokens
            tokens += counts[1]
            progress.advance(counts[0] / 1e6, f"{tokens / 1e6:,.1f}M tokens")

        with closing(run_units(units, engine, folder=missing[0].folder.parent, on_progress=advance)) as outcomes:
            for outcome in outcomes:
                if outcome.worker_died:
                    remedy = "finished files are kept; run it again, with fewer workers if memory is short"
                    raise InputError(f"{names[outcome.name]}: {outcome.error}: {remedy}")
                if outcome.error is not None:
                    raise InputError(outcome.error)


def choose_engine(engine: Engine, num_shards: int) -> Engine:
    """Choose the workers that make shards. On this machine, a single worker is this process, because its tokenizer is
    loaded."""
    # Where TOKENIZERS_PARALLELISM turns the threads of `tokenizers` off, start one worker per core.
    switch = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower()
    cores = 1 if switch in ("", "off", "false", "f", "no", "n", "0") else CORES_PER_WORKER
    if engine.kind == "ray":
        return engine.model_copy(update={"devices_per_worker": cores})
    workers = min(num_shards, engine.workers or num_cores() // cores)
    return engine.model_copy(update={"workers": workers if workers > 1 else 0})


ENCODERS: dict[str, tuple["Tokenizer", bool]] = {}
"""The tokenizer of this process by its hash, kept because loading one takes as long as encoding a few MB of text; and
whether it encodes the same ids if a text is split before a letter that begins a line."""


def keep_encoder(hash: str, backend: "Tokenizer") -> None:
    """Keep a loaded tokenizer for the units of this process."""
    backend.encode_special_tokens = True  # `<|mask|>` in a document is these letters, not the token
    lines = ["a\n", "b", "B.\n\n", "b ,\r\n", "é \n", "b\t\n \n", "c12\n", "the\n"]

    def ids(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    cuts = all(ids(first + then) == ids(first) + ids(then) for first in lines if first != "b" for then in lines)
    ENCODERS.clear()
    ENCODERS[hash] = backend, cuts


def tokenize_unit(plan: ShardPlan) -> None:
    """Make a shard folder unless it exists. Reports bytes read from disk, and tokens, as it goes.

    It waits for the lock, because workers may outlive a killed process for a moment.
    """
    out = plan.folder.parents[1]
    remedy = "finished files are kept; fix this, and run it again"
    with told_as(f"{plan.folder} cannot be made", remedy), files.locked(out / ".locks" / plan.folder.name, wait=True):
        if not plan.is_done:
            if plan.draft.tokenizer_hash not in ENCODERS:
                from tokenizers import Tokenizer

                keep_encoder(plan.draft.tokenizer_hash, Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json")))
            tokenize_shard(plan, environment_number("RAYON_NUM_THREADS", 1, num_cores()))


COUNTS = ("documents", "tokens", "text_bytes", "empty_texts")
"""The counts of a `SplitWriter` for its `SplitRecord`."""

TextPiece = tuple[str, ShardSplitName, bool]
"""A document or a part of a long one, its split, and whether it is the last part."""


class SplitWriter:
    """A writer of `SPLIT.tokens`, `SPLIT.ends` and `SPLIT.hashes` that hashes what it writes."""

    endings = ("tokens", "ends", "hashes")

    def __init__(self, folder: Path, split: ShardSplitName, draft: ShardManifest) -> None:
        self.files: list[IO[bytes]] = [(folder / f"{split}.{ending}").open("wb") for ending in self.endings]
        self.digests = [hashlib.sha256() for _ in self.endings]
        self.document = xxhash.xxh3_64()  # the hash so far of the current document
        self.dtype = np.dtype(draft.dtype).newbyteorder("<")
        self.eos_id = draft.eos_id
        self.documents = self.tokens = self.text_bytes = self.empty_texts = 0

    def write(self, encoded: list[tuple[TextPiece, "Encoding"]]) -> int:
        """Append texts; return the number of their tokens."""
        tokens = array.array("I")
        ends = []  # offsets in `tokens`
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
            if len(hashes) < len(ends):  # else the document continues in the next call
                hashes.append(self.document.intdigest())
                self.document.reset()
        columns = tokens_T, np.array(ends, dtype="<i8") + self.tokens, np.array(hashes, dtype="<u8")
        for file, digest, values in zip(self.files, self.digests, columns, strict=True):
            digest.update(values.data)
            file.write(values.data)
        self.documents += len(ends)
        self.tokens += len(tokens)
        return len(tokens)

    def close(self) -> SplitRecord:
        for file in self.files:
            file.close()
        record: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        record |= {f"{name}_sha256": sha.hexdigest() for name, sha in zip(self.endings, self.digests, strict=True)}
        return SplitRecord(**record)


Writers = dict[ShardSplitName, SplitWriter]


def tokenize_shard(plan: ShardPlan, threads: int) -> None:
    """Write a shard's folder. While `tokenizers` encodes a batch, read the next one and write the last one."""
    backend, cuts_at_lines = ENCODERS[plan.draft.tokenizer_hash]
    with files.whole_folder(plan.folder) as folder, ExitStack() as stack:
        writers: Writers = {split: SplitWriter(folder, split, plan.draft) for split in SHARD_SPLITS}
        for writer in writers.values():
            stack.callback(writer.close)
        helper = stack.enter_context(ThreadPoolExecutor(1))

        def encode() -> "Iterator[tuple[list[TextPiece], int, Future[list[Encoding]]]]":
            for pieces, num_bytes in read_batches(plan, cuts_at_lines, writers, BATCH_CHARACTERS * threads):
                texts = [text for text, _, _ in pieces]
                yield pieces, num_bytes, helper.submit(backend.encode_batch_fast, texts, add_special_tokens=False)
            yield [], 0, Future()  # after the last batch

        for (pieces, num_bytes, encodings), _ in pairwise(encode()):  # by now the next batch is read and submitted
            encoded = list(zip(pieces, encodings.result(), strict=True))
            by_split = {split: [pair for pair in encoded if pair[0][1] == split] for split in writers}
            tokens = sum(writers[split].write(pairs) for split, pairs in by_split.items() if pairs)
            console.report_progress((num_bytes, tokens))
        names = tuple(source.record_name for source in plan.sources)
        parts = {split: writer.close() for split, writer in writers.items()}
        shard = Shard(name=plan.folder.name, sources=names, parts=parts)
        files.write_json(folder / "shard.json", shard.model_dump(mode="json"))


def read_batches(
    plan: ShardPlan, cuts_at_lines: bool, writers: Writers, batch_characters: int
) -> Iterator[tuple[list[TextPiece], int]]:
    """Yield batches of about `batch_characters` characters, with the bytes read for each; count empty texts."""
    pieces: list[TextPiece] = []
    held = 0
    options = plan.draft.options
    for source in plan.sources:
        reported = bytes_read = 0
        documents = read_documents(source, options.text_field, (options.id_field,), options.txt_documents)
        for index, document in enumerate(documents):
            bytes_read = document.num_bytes
            if index in source.copies:
                continue
            split = plan.split
            if split is None:  # the draw depends only on the seed and the document's id
                key = f"{options.seed}\0{document.id}".encode("utf-8", "surrogatepass")
                draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
                split = "validation" if draw < options.validation_fraction else "train"
            if not document.text or document.text.isspace():
                writers[split].empty_texts += 1
                continue
            for text, is_last in cut_text(document.text, cuts_at_lines):
                pieces.append((text, split, is_last))
                held += len(text)
                if held >= batch_characters:
                    yield pieces, bytes_read - reported
                    pieces, held, reported = [], 0, bytes_read
        yield pieces, (source.num_bytes or bytes_read) - reported
        pieces, held = [], 0


def leave_out_copies(grouped: Grouped, options: Options) -> None:
    """Leave out documents whose text occurs earlier in the sources, and print their number. Empty texts stay, to be
    counted as such."""
    hashes, blank, ends = array.array("Q"), set[int](), [0]
    for source in (source for _, sources in grouped for source in sources):
        for document in read_documents(source, options.text_field, (options.id_field,), options.txt_documents):
            hashes.append(xxhash.xxh3_64_intdigest(document.text.encode("utf-8", "surrogatepass")))
            if not document.text or document.text.isspace():
                blank.add(hashes[-1])
        ends.append(len(hashes))
    hashes_D = np.frombuffer(hashes, dtype=np.uint64)
    order_D = np.argsort(hashes_D, kind="stable")  # the first of equal texts remains the first
    sorted_D = hashes_D[order_D]
    is_copy_D = np.zeros(len(hashes_D), dtype=bool)
    is_copy_D[order_D[1:]] = sorted_D[1:] == sorted_D[:-1]
    is_copy_D &= ~np.isin(hashes_D, np.array([*blank], dtype=np.uint64))
    copies = iter(np.split(is_copy_D, ends[1:-1]))
    for _, sources in grouped:
        sources[:] = [replace(one, copies=frozenset(np.flatnonzero(next(copies)).tolist())) for one in sources]
    console.err.print(f"{is_copy_D.sum():,} documents have the text of an earlier one and are left out")


LINE_START = re.compile(r"(?<=\n)(?=[^\W\d_])")


def cut_text(text: str, cuts_at_lines: bool) -> Iterator[tuple[str, bool]]:
    """Cut a text into pieces of at least `PIECE_CHARS`, a smaller one last, each with whether it is the last.

    Pieces end before lines if that changes no token. Otherwise a piece ends at a blank, if there is one, and has at
    most `LONGEST_TEXT` characters, because a longer one would exhaust the memory.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        least, most = start + PIECE_CHARS, start + LONGEST_TEXT
        line = LINE_START.search(text, least, most) if cuts_at_lines else None
        if line is None and len(text) <= most:
            break
        end = line.start() if line else text.rfind(" ", least, most)
        end = end if end > 0 else most
        yield text[start:end], False
        start = end
    yield text[start:], True
