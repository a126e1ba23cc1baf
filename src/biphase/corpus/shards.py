"""A set of token shards: its record, and one split of it as a single stream of tokens.

On disk: manifest.json (written last, by `corpus.prepare`), tokenizer/, token_bytes.npy, and for each shard a folder
shards/NAME/ with shard.json and, for train and validation, SPLIT.tokens, SPLIT.ends and SPLIT.hashes. Tokens are
little-endian uint16, or uint32 where the vocabulary needs it, one end-of-text token after each document; ends are the
int64 offsets behind those, counted from the shard's first token; hashes are the XXH3 (64 bits) of the bytes of each
document's tokens.

The record says what the set holds, what it was made of and how. It holds a hash of itself, so that no number in it can
change unnoticed; each document is checked against its hash when it is touched. Hashes also tell exact copies of
documents.
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
from biphase.errors import InputError, nearest
from biphase.files import file_hash, read_hashed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


ShardSplitName = Literal["train", "validation"]
SHARD_SPLITS: tuple[ShardSplitName, ...] = get_args(ShardSplitName)


class SplitRecord(Strict):
    """The part of one split that one shard holds, with the hashes of its files, or that all shards hold, without."""

    later: ClassVar[frozenset[str]] = frozenset({"tokens_sha256", "ends_sha256", "hashes_sha256"})
    documents: Count
    tokens: Count
    text_bytes: Count
    """Bytes of UTF-8."""
    empty_texts: Count
    """Texts of white space only, which become no document."""
    tokens_sha256: str = ""
    ends_sha256: str = ""
    hashes_sha256: str = ""


class Shard(Strict):
    """One folder of a set: what was made of one source file, or of a few."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+-[0-9a-f]{12}$")]
    sources: tuple[str, ...]
    parts: dict[ShardSplitName, SplitRecord]


class Options(Strict):
    """What was asked for, besides the sources."""

    later: ClassVar[frozenset[str]] = frozenset({"drop_copies"})
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    seed: int = 0
    text_field: str = "text"
    id_field: str = "id"
    txt_documents: TxtDocuments = "file"
    drop_copies: bool = False
    """Whether a document with exactly the text of an earlier one is left out."""


Copies = dict[Literal["train", "validation", "in_both"], Count]
"""The numbers of documents that have exactly the tokens of another one before them; and of those for validation that
are also among those for training."""


class ShardManifest(Strict):
    """The record of a whole set, in manifest.json. What the shards tell is empty until they are there."""

    format_version: Literal[2] = 2
    fingerprint: str = ""
    """The hash of the content: the same for any path, number of workers and time of making."""
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


def read_shard_manifest(folder: Path) -> ShardManifest:
    """Read the manifest of the set in a folder. Raises `InputError` where there is none, or one that is not as made."""
    path = folder / "manifest.json"
    if not path.exists():
        raise InputError(f"{folder} is no shard set, or not finished ({path.name} is missing): run biphase prepare")
    return read_hashed(path, ShardManifest, "delete it and run biphase prepare again")


def wrong_size(folder: Path, split: ShardSplitName, part: SplitRecord, dtype: str) -> str | None:
    """Say what is wrong with the size of a shard's files for one split; None where it is right."""
    document_bytes = part.documents * 8
    token_bytes = part.tokens * np.dtype(dtype).itemsize
    expected = {"tokens": token_bytes, "ends": document_bytes, "hashes": document_bytes}
    for kind, num_bytes in expected.items():
        path = folder / f"{split}.{kind}"
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != num_bytes:
            return f"{path} has {path.stat().st_size:,} bytes, not {num_bytes:,}"
    return None


class ShardSet:
    """One split of a shard set as a single stream of tokens: the shards in the order of the manifest, memory-mapped.

    `fingerprint` names the content of the whole set.
    """

    def __init__(self, folder: str | Path, split: str = "train", manifest: ShardManifest | None = None) -> None:
        """Open a set; its manifest is read unless it is given.

        Raises `InputError` where that is missing or damaged, or a file has not the size that it should have.
        """
        if split not in SHARD_SPLITS:
            raise InputError(f"split '{split}'{nearest(split, SHARD_SPLITS)}")
        manifest = manifest or read_shard_manifest(Path(folder))
        self.folder, self.split, self.manifest = Path(folder), split, manifest
        self.num_tokens = manifest.splits[split].tokens
        self.num_documents = manifest.splits[split].documents
        self.fingerprint = manifest.fingerprint
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        # Where each shard begins in the stream and among the documents, and where the last one ends.
        self.starts, self.first_documents = [0], [0]
        for shard in manifest.shards:
            wrong = wrong_size(self.folder_of(shard), split, shard.parts[split], manifest.dtype)
            if wrong is not None:
                raise InputError(f"{wrong}: {self.remedy(shard)}")
            self.starts.append(self.starts[-1] + shard.parts[split].tokens)
            self.first_documents.append(self.first_documents[-1] + shard.parts[split].documents)
        self.is_checked = np.zeros(self.num_documents, dtype=bool)
        self.opened: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """The tokens and the hashes of the documents of each shard that was read from, memory-mapped."""

    def folder_of(self, shard: Shard) -> Path:
        return self.folder / "shards" / shard.name

    def remedy(self, shard: Shard) -> str:
        return f"delete {self.folder_of(shard)} and run its biphase prepare again, with the same sources"

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Read where in the stream each document ends, behind its end-of-text token, int64 [num_documents].

        Raises `InputError` naming a file that is not as made.
        """
        ends_D = np.empty(self.num_documents, np.int64)
        for number, shard in enumerate(self.manifest.shards):
            first, last = self.first_documents[number : number + 2]
            ends_D[first:last] = np.fromfile(self.checked_file(shard, "ends"), dtype="<i8") + self.starts[number]
        return ends_D

    def checked_file(self, shard: Shard, kind: str) -> Path:
        """Return a file of a shard. Raises `InputError` where it is not as made."""
        path = self.folder_of(shard) / f"{self.split}.{kind}"
        if file_hash(path) != getattr(shard.parts[self.split], f"{kind}_sha256"):
            raise InputError(f"{path} is damaged (its SHA-256 is not the manifest's): {self.remedy(shard)}")
        return path

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the token ids [start, stop) of the stream, read-only where they lie in one shard (a view of the file).

        Raises `InputError` naming a file in which a document was changed that lies there.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        parts = []
        while start < stop:
            index = bisect_right(self.starts, start) - 1
            origin, end = self.starts[index], min(stop, self.starts[index + 1])
            self.check_documents(index, start, end)
            parts.append(self.opened[index][0][start - origin : end - origin])
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def check_documents(self, index: int, start: int, stop: int) -> None:
        """Compare each document that lies in [start, stop) of the stream, all in one shard, with its hash, the first
        time that it is read. Raises `InputError` where one is not as made."""
        shard, origin, ends_D = self.manifest.shards[index], self.starts[index], self.document_ends
        folder = self.folder_of(shard)
        if index not in self.opened:
            tokens = np.memmap(folder / f"{self.split}.tokens", dtype=self.dtype, mode="r")
            hashes = np.memmap(self.checked_file(shard, "hashes"), dtype="<u8", mode="r")
            self.opened[index] = np.asarray(tokens), np.asarray(hashes)
        tokens_T, hashes_D = self.opened[index]
        first, last = np.searchsorted(ends_D, (start, stop - 1), side="right").tolist()
        for document in (first + np.flatnonzero(~self.is_checked[first : last + 1])).tolist():
            number = document - self.first_documents[index]
            begin = int(ends_D[document - 1]) - origin if number > 0 else 0
            end = int(ends_D[document]) - origin
            if xxhash.xxh3_64_intdigest(tokens_T[begin:end].data) != int(hashes_D[number]):
                reason = f"document {number} (tokens {begin:,} to {end:,}) is not as its hash says"
                raise InputError(f"{folder / self.split}.tokens is damaged: {reason}: {self.remedy(shard)}")
            self.is_checked[document] = True

    def document(self, index: int) -> np.ndarray:
        """Read the token ids of one document, its end-of-text token included."""
        start = int(self.document_ends[index - 1]) if index > 0 else 0
        return self.read(start, int(self.document_ends[index]))

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Load the tokenizer of the set. Raises `InputError` where its folder holds another one, or none."""
        folder = self.folder / "tokenizer"
        tokenizer = find_tokenizer(folder, str(folder))
        if tokenizer is None or tokenizer_hash(tokenizer) != self.manifest.tokenizer_hash:
            remedy = f"put the one of hash {self.manifest.tokenizer_hash[:16]} there, or prepare the text anew"
            raise InputError(f"{folder} is damaged or another tokenizer than the set was made with: {remedy}")
        return tokenizer

    def token_bytes(self) -> np.ndarray:
        """Read `corpus.tokenizer.token_byte_lengths` of that tokenizer. Raises `InputError` when the file is not as
        made."""
        path = self.folder / "token_bytes.npy"
        if not path.is_file() or file_hash(path) != self.manifest.token_bytes_sha256:
            raise InputError(f"{path} is damaged or missing: delete it and run the same biphase prepare again")
        return np.load(path, allow_pickle=False)

    def verify(self) -> None:
        """Read every byte of the split and the tokenizer. Raises `InputError` naming a file that is not as made."""
        for shard in self.manifest.shards:
            for kind in ("tokens", "ends", "hashes"):
                self.checked_file(shard, kind)
        if not np.array_equal(self.token_bytes(), token_byte_lengths(self.tokenizer)):
            raise InputError(f"{self.folder / 'token_bytes.npy'} is not that of the tokenizer: prepare the set anew")


def check_tokenizer(shards: ShardSet, expected_hash: str) -> None:
    """Raises `InputError` unless the set was made with the tokenizer of that hash."""
    made_with = shards.manifest.tokenizer_hash
    if made_with != expected_hash:
        hashes = f"tokenizer {made_with[:16]}, not with {expected_hash[:16]}"
        remedy = f"prepare the text again with this tokenizer, or use the set's own ({shards.folder / 'tokenizer'})"
        raise InputError(f"{shards.folder} was made with {hashes}: {remedy}")


HASHES_AT_ONCE = 1 << 26
"""Hashes of documents that are sorted in memory together: half a GB."""


def count_copies(folder: Path, shards: tuple[Shard, ...]) -> Copies:
    """Count the documents of the shards below `folder` that are copies of another one, token for token.

    A set with many documents is read several times, each time for the hashes that leave one remainder.
    """
    num_documents = sum(part.documents for shard in shards for part in shard.parts.values())
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
