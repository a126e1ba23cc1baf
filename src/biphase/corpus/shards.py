"""A set of token shards: its manifest, and each split as a single stream of tokens.

On disk: manifest.json (written last, by `corpus.prepare`), tokenizer/, token_bytes.npy, and for each shard a folder
shards/NAME/ with shard.json and, for train and validation, SPLIT.tokens, SPLIT.ends and SPLIT.hashes. Tokens are
little-endian uint16, or uint32 where the vocabulary needs it, with one end-of-text token after each document. Ends are
the int64 offsets just after those tokens, counted from the shard's first token. Hashes are the XXH3 (64 bits) of the
bytes of each document's tokens.

The manifest records the content of the set, its sources and options, and its own hash, so that no change goes
unnoticed. The first read of a document checks its hash; equal hashes also reveal exact copies.
"""

from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

import numpy as np
import xxhash
from pydantic import Field

from biphase.config import Count, PositiveCount, Strict
from biphase.corpus.text import TxtDocuments
from biphase.corpus.tokenizer import find_tokenizer, token_byte_lengths, tokenizer_hash
from biphase.errors import InputError
from biphase.files import file_hash, read_hashed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


ShardSplitName = Literal["train", "validation"]
SHARD_SPLITS: tuple[ShardSplitName, ...] = get_args(ShardSplitName)


class SplitRecord(Strict):
    """The record of one split: in one shard, with the hashes of its files, or in the whole set, without hashes."""

    later: ClassVar[frozenset[str]] = frozenset({"tokens_sha256", "ends_sha256", "hashes_sha256"})
    documents: Count
    tokens: Count
    text_bytes: Count
    """The bytes of the texts in UTF-8."""
    empty_texts: Count
    """The number of texts with nothing but white space, which `prepare` leaves out."""
    tokens_sha256: str = ""
    ends_sha256: str = ""
    hashes_sha256: str = ""


class Shard(Strict):
    """One folder of a set, made from one source file or a few."""

    name: Annotated[str, Field(pattern=r"^[\w\p{No}.-]+-[0-9a-f]{12}$")]  # for Rust, \w lacks ²
    sources: tuple[str, ...]
    parts: dict[ShardSplitName, SplitRecord]


class Options(Strict):
    """The options of `prepare` that decide the content of a set."""

    later: ClassVar[frozenset[str]] = frozenset({"drop_copies"})
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    seed: int = 0
    text_field: str = "text"
    id_field: str = "id"
    txt_documents: TxtDocuments = "file"
    drop_copies: bool = False
    """Whether to leave out documents with exactly the text of an earlier one."""


Copies = dict[Literal["train", "validation", "in_both"], Count]
"""The number of documents with exactly the tokens of an earlier one, per split, and of validation documents that are
also in train."""


class ShardManifest(Strict):
    """The record of a whole set, manifest.json. Facts about its shards are empty until the shards exist."""

    format_version: Literal[2] = 2
    fingerprint: str = ""
    """The hash of the content, independent of path, number of workers and time."""
    sources_hash: str
    tokenizer_hash: str
    token_bytes_sha256: str = ""
    dtype: Literal["uint16", "uint32"]
    vocab_size: PositiveCount
    eos_id: Count
    mask_id: Count
    pad_id: Count
    bos_id: Count | None
    special_ids: tuple[Count, ...]
    options: Options
    splits: dict[ShardSplitName, SplitRecord] = Field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    duplicates: Copies | None = None


def is_shard_set(folder: str | Path) -> bool:
    """Tell whether a folder is a whole shard set, by its manifest."""
    return Path(folder, "manifest.json").exists()


def read_shard_manifest(folder: Path) -> ShardManifest:
    """Read the manifest of a set. Raises `InputError` if it is missing or damaged."""
    if not is_shard_set(folder):
        raise InputError(f"{folder} is not a shard set, or unfinished (manifest.json is missing): run biphase prepare")
    return read_hashed(folder / "manifest.json", ShardManifest, "delete it and run biphase prepare again")


def wrong_size(folder: Path, split: ShardSplitName, record: SplitRecord, dtype: str) -> str | None:
    """Describe a file of a shard's split that is missing or has the wrong size; None if all are right."""
    document_bytes = record.documents * 8
    expected = {"tokens": record.tokens * np.dtype(dtype).itemsize, "ends": document_bytes, "hashes": document_bytes}
    for ending, num_bytes in expected.items():
        path = folder / f"{split}.{ending}"
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != num_bytes:
            return f"{path} has {path.stat().st_size:,} bytes, not {num_bytes:,}"
    return None


class ShardSet:
    """One split of a shard set as a single stream of tokens: its memory-mapped shards, in the order of the manifest.

    `fingerprint` identifies the content of the whole set.
    """

    def __init__(
        self, folder: str | Path, split: ShardSplitName = "train", manifest: ShardManifest | None = None
    ) -> None:
        """Open a set; read its manifest unless it is given.

        Raises `InputError` if the manifest is missing or damaged, and for a file of the wrong size.
        """
        manifest = manifest or read_shard_manifest(Path(folder))
        self.folder, self.split, self.manifest = Path(folder), split, manifest
        self.num_tokens = manifest.splits[split].tokens
        self.num_documents = manifest.splits[split].documents
        self.fingerprint = manifest.fingerprint
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        # The offset of each shard in the stream, the index of its first document, and both ends of the last shard.
        self.starts, self.first_documents = [0], [0]
        for shard in manifest.shards:
            wrong = wrong_size(self.folder_of(shard), split, shard.parts[split], manifest.dtype)
            if wrong is not None:
                raise InputError(f"{wrong}: {self.remedy(shard)}")
            self.starts.append(self.starts[-1] + shard.parts[split].tokens)
            self.first_documents.append(self.first_documents[-1] + shard.parts[split].documents)
        self.is_checked = np.zeros(self.num_documents, dtype=bool)
        self.opened: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """The memory-mapped tokens and document hashes of each shard, by its index, once it is read."""

    def folder_of(self, shard: Shard) -> Path:
        return self.folder / "shards" / shard.name

    def remedy(self, shard: Shard) -> str:
        return f"delete {self.folder_of(shard)} and run its biphase prepare again, with the same sources"

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Read the end of each document in the stream, after its end-of-text token, int64 [num_documents].

        Raises `InputError` naming a damaged file.
        """
        ends_D = np.empty(self.num_documents, np.int64)
        for index, shard in enumerate(self.manifest.shards):
            first, last = self.first_documents[index : index + 2]
            ends_D[first:last] = np.fromfile(self.checked_file(shard, "ends"), dtype="<i8") + self.starts[index]
        return ends_D

    def checked_file(self, shard: Shard, ending: str) -> Path:
        """Return a file of a shard. Raises `InputError` if it is damaged."""
        path = self.folder_of(shard) / f"{self.split}.{ending}"
        if file_hash(path) != getattr(shard.parts[self.split], f"{ending}_sha256"):
            raise InputError(f"{path} is damaged (its SHA-256 is not the manifest's): {self.remedy(shard)}")
        return path

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the token ids [start, stop) of the stream; inside one shard they are a read-only view of the file.

        Raises `InputError` that names the file of a damaged document.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        parts = []
        while start < stop:
            index = bisect_right(self.starts, start) - 1
            shard_start = self.starts[index]
            end = min(stop, self.starts[index + 1])
            self.check_documents(index, start, end)
            parts.append(self.opened[index][0][start - shard_start : end - shard_start])
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def check_documents(self, index: int, start: int, stop: int) -> None:
        """Check the hashes of the documents in [start, stop) of the stream, each on its first read.

        All of them are in the shard with this index. Raises `InputError` for a damaged one.
        """
        shard = self.manifest.shards[index]
        shard_start = self.starts[index]
        ends_D = self.document_ends
        folder = self.folder_of(shard)
        if index not in self.opened:
            tokens = np.memmap(folder / f"{self.split}.tokens", dtype=self.dtype, mode="r")
            hashes = np.memmap(self.checked_file(shard, "hashes"), dtype="<u8", mode="r")
            self.opened[index] = np.asarray(tokens), np.asarray(hashes)
        tokens_T, hashes_D = self.opened[index]
        first, last = np.searchsorted(ends_D, (start, stop - 1), side="right").tolist()
        for document in (first + np.flatnonzero(~self.is_checked[first : last + 1])).tolist():
            in_shard = document - self.first_documents[index]
            begin = int(ends_D[document - 1]) - shard_start if in_shard > 0 else 0
            end = int(ends_D[document]) - shard_start
            if xxhash.xxh3_64_intdigest(tokens_T[begin:end].data) != int(hashes_D[in_shard]):
                problem = f"{folder / self.split}.tokens is damaged: document {in_shard} does not match its hash"
                raise InputError(f"{problem}: {self.remedy(shard)}")
            self.is_checked[document] = True

    def document(self, index: int) -> np.ndarray:
        """Read the token ids of one document, end-of-text token included."""
        start = int(self.document_ends[index - 1]) if index > 0 else 0
        return self.read(start, int(self.document_ends[index]))

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Load the tokenizer of the set. Raises `InputError` if it is missing or another one."""
        folder = self.folder / "tokenizer"
        tokenizer = find_tokenizer(folder, str(folder))
        if tokenizer is None or tokenizer_hash(tokenizer) != self.manifest.tokenizer_hash:
            remedy = f"restore the one with hash {self.manifest.tokenizer_hash[:16]}, or delete the folder"
            remedy += " and run the same biphase prepare again"
            raise InputError(f"{folder} is damaged, or not the tokenizer of this set: {remedy}")
        return tokenizer

    def token_bytes(self) -> np.ndarray:
        """Read the tokenizer's `token_byte_lengths`. Raises `InputError` if the file is damaged."""
        path = self.folder / "token_bytes.npy"
        if not path.is_file() or file_hash(path) != self.manifest.token_bytes_sha256:
            raise InputError(f"{path} is damaged or missing: delete it and run the same biphase prepare again")
        return np.load(path, allow_pickle=False)

    def verify(self) -> None:
        """Check every byte of the split and the tokenizer. Raises `InputError` that names a damaged file."""
        for shard in self.manifest.shards:
            for ending in ("tokens", "ends", "hashes"):
                self.checked_file(shard, ending)
        if not np.array_equal(self.token_bytes(), token_byte_lengths(self.tokenizer)):
            raise InputError(f"{self.folder / 'token_bytes.npy'} is not the tokenizer's: prepare the set again")


def check_tokenizer(shards: ShardSet, expected_hash: str) -> None:
    """Raise `InputError` unless the set's tokenizer has this hash."""
    if (own_hash := shards.manifest.tokenizer_hash) != expected_hash:
        problem = f"{shards.folder} was made with tokenizer {own_hash[:16]}, not with {expected_hash[:16]}"
        raise InputError(f"{problem}: prepare the text again, or use the set's own ({shards.folder / 'tokenizer'})")


HASHES_AT_ONCE = 1 << 26
"""The most document hashes to sort in memory at once: half a GB."""


def count_copies(folder: Path, shards: tuple[Shard, ...]) -> Copies:
    """Count the documents below `folder` that copy an earlier one, token for token.

    For a large set, each pass over the hashes handles those with one remainder.
    """
    num_documents = sum(record.documents for shard in shards for record in shard.parts.values())
    num_passes = num_documents // HASHES_AT_ONCE + 1
    copies: Copies = {"train": 0, "validation": 0, "in_both": 0}
    for remainder in range(num_passes):
        hashes: dict[ShardSplitName, np.ndarray] = {}
        for split in SHARD_SPLITS:
            pieces = []
            for shard in shards:
                hashes_D = np.fromfile(folder / "shards" / shard.name / f"{split}.hashes", dtype="<u8")
                pieces.append(hashes_D[hashes_D % np.uint64(num_passes) == remainder])
            hashes[split] = np.concatenate(pieces)
            copies[split] += len(hashes[split]) - len(np.unique(hashes[split]))
        copies["in_both"] += int(np.isin(hashes["validation"], hashes["train"]).sum())
    return copies
