"""One source file, or a few small ones → one shard folder: read, split, encode, write.

A folder appears when it is whole. What it holds depends on the sources, the tokenizer and the options alone.
"""

import array
import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import xxhash

from biphase.console import err
from biphase.corpus.shards import SHARD_SPLITS, Options, Shard, ShardPart, ShardSplitName, SplitTotals, wrong_size
from biphase.corpus.text import Document, TextSource, read_documents
from biphase.engine.local import report_progress
from biphase.errors import InputError
from biphase.files import locked, read_json_as, whole_folder, write_json
from biphase.machine import num_cores

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

BATCH_BYTES = 2_000_000
"""Text handed to `tokenizers` at once, per core: enough to keep the cores busy, little enough to stay in memory."""
PIECE_CHARS = 200_000
"""A longer document is encoded in pieces: one call on a whole book would use one core, and about 100 bytes a token."""


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


@contextmanager
def tell_full_disk(out: Path) -> Iterator[None]:
    """Raises `InputError` in place of the system's error when there is no space left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"no space left for {out}: finished files are kept; make room and run the same command again"
        ) from None


# The tokenizer


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


# One shard


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

    def write(self, encoded: list[tuple[TextPiece, "Encoding"]]) -> None:
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
        before: tuple[list[TextPiece], int, Future] | None = None
        for pieces, num_bytes in read_batches(plan, cuts_at_lines, writers, BATCH_BYTES * threads):
            texts = [text for text, _, _ in pieces]
            encodings = helper.submit(backend.encode_batch_fast, texts, add_special_tokens=False)
            if before is not None:
                write_batch(*before, writers)
            before = pieces, num_bytes, encodings
        if before is not None:
            write_batch(*before, writers)
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
    for source, copies in zip(plan.sources, plan.copies, strict=True):
        reported = bytes_read = 0
        for number, (document, bytes_read) in enumerate(read_documents(source, *plan.options.reading)):
            if number in copies:
                continue
            split = choose_split(document, plan)
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
        for number, (document, _) in enumerate(read_documents(source, *options.reading)):
            key = xxhash.xxh3_64_intdigest(document.text.encode("utf-8", "surrogatepass"))
            if key in known and not document.text.isspace() and document.text:
                dropped.add(number)
            known.add(key)
        copies[source.fingerprint] = frozenset(dropped)
    err.print(f"{sum(map(len, copies.values())):,} documents have the text of an earlier one and are left out")
    return copies


def choose_split(document: Document, plan: ShardPlan) -> ShardSplitName:
    """The shard's split, or a draw that depends on nothing but the seed and the document's id."""
    if plan.split is not None:
        return plan.split
    key = f"{plan.options.seed}\0{document.id}".encode("utf-8", "surrogatepass")
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
    return "validation" if draw < plan.options.validation_fraction else "train"


LINE_START = re.compile(r"(?<=\n)(?=[^\W\d_])")


def cut_text(text: str, cuts_at_lines: bool) -> Iterator[tuple[str, bool]]:
    """The text in pieces of at least `PIECE_CHARS` (the last is smaller), each with whether it is the last."""
    start = 0
    while cuts_at_lines and (cut := LINE_START.search(text, start + PIECE_CHARS)):
        yield text[start : cut.start()], False
        start = cut.start()
    yield text[start:], True


def write_batch(pieces: list[TextPiece], num_bytes: int, encodings: Future, writers: Writers) -> None:
    encoded = list(zip(pieces, encodings.result(), strict=True))
    before = sum(writer.tokens for writer in writers.values())
    for split, writer in writers.items():
        if chosen := [pair for pair in encoded if pair[0][1] == split]:
            writer.write(chosen)
    report_progress((num_bytes, sum(writer.tokens for writer in writers.values()) - before))
