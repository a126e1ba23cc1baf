"""A set of token shards: one split of it read as a single stream of tokens, each document checked when it is touched.

On disk: manifest.json (written last), tokenizer/, token_bytes.npy, and for each shard a folder shards/NAME/ with
shard.json and, for train and validation, SPLIT.tokens, SPLIT.ends and SPLIT.hashes. Tokens are little-endian uint16, or
uint32 where the vocabulary needs it, one end-of-text token after each document; ends are the int64 offsets behind
those, counted from the shard's first token; hashes are the XXH3 (64 bits) of the bytes of each document's tokens.
"""

import hashlib
from bisect import bisect_right
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from biphase.corpus.manifest import (
    SHARD_SPLITS,
    Shard,
    ShardManifest,
    ShardSplitName,
    read_shard_manifest,
    wrong_size,
)
from biphase.corpus.tokenizer import load_tokenizer, token_byte_lengths, tokenizer_hash
from biphase.errors import InputError, nearest
from biphase.files import file_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ShardTokens:
    """The tokens of one shard and split, memory-mapped, each document checked the first time that it is read."""

    def __init__(self, folder: Path, split: str, ends: np.ndarray, dtype: np.dtype) -> None:
        """`ends` are the document ends in the shard."""
        self.path = folder / f"{split}.tokens"
        self.tokens = np.asarray(np.memmap(self.path, dtype=dtype, mode="r"))
        self.ends = ends
        self.hashes = np.asarray(np.memmap(folder / f"{split}.hashes", dtype="<u8", mode="r"))
        self.is_checked = bytearray(len(ends) // 8 + 1)  # a bit for each document

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), a view of the file. Raises `InputError` when a document there is not as made."""
        if start < stop:
            first, last = np.searchsorted(self.ends, (start, stop - 1), side="right").tolist()
            for number in range(first, last + 1):
                if not self.is_checked[number >> 3] >> (number & 7) & 1:
                    self.check(number, int(self.hashes[number]))
        return self.tokens[start:stop]

    def check(self, number: int, expected: int) -> None:
        """Compare one document with its hash, and note that it was."""
        start = self.ends[number - 1] if number > 0 else 0
        if xxhash.xxh3_64_intdigest(self.tokens[start : self.ends[number]].data) != expected:
            raise InputError(
                f"{self.path} is damaged: document {number} (tokens {start:,} to {self.ends[number]:,}) is not as its "
                "hash says"
            )
        self.is_checked[number >> 3] |= 1 << (number & 7)


class ShardSet:
    """One split of a shard set as a single stream of tokens: the shards in the order of the manifest, memory-mapped.

    `fingerprint` names the content of the whole set.
    """

    def __init__(self, folder: Path, split: ShardSplitName, manifest: ShardManifest) -> None:
        self.folder, self.split, self.manifest = folder, split, manifest
        self.num_tokens = manifest.splits[split].tokens
        self.num_documents = manifest.splits[split].documents
        self.fingerprint = manifest.fingerprint
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        # Where each shard begins in the stream and among the documents, and where the last one ends.
        self.starts, self.first_documents = [0], [0]
        for shard in manifest.shards:
            self.starts.append(self.starts[-1] + shard.parts[split].tokens)
            self.first_documents.append(self.first_documents[-1] + shard.parts[split].documents)
        self.opened: dict[int, ShardTokens] = {}

    @classmethod
    def open(cls, folder: str | Path, split: str = "train") -> "ShardSet":
        """Raises `InputError` when the manifest is missing or damaged, or a file has not the size that it should
        have."""
        if split not in SHARD_SPLITS:
            raise InputError(f"split '{split}'{nearest(split, SHARD_SPLITS)}")
        manifest = read_shard_manifest(Path(folder))
        shards = cls(Path(folder), split, manifest)
        for shard in manifest.shards:
            wrong = wrong_size(shards.folder_of(shard), shards.split, shard.parts[shards.split], manifest.dtype)
            if wrong is not None:
                raise InputError(f"{wrong}: {shards.remedy(shard)}")
        return shards

    def folder_of(self, shard: Shard) -> Path:
        return self.folder / "shards" / shard.name

    def remedy(self, shard: Shard) -> str:
        return f"delete {self.folder_of(shard)} and run its biphase prepare again, with the same sources"

    @cached_property
    def document_ends(self) -> np.ndarray:
        """The offset in the stream after each document's end-of-text token, int64 [num_documents].

        Raises `InputError` naming a file that is not as made.
        """
        ends_D = np.empty(self.num_documents, np.int64)
        for number, shard in enumerate(self.manifest.shards):
            data = (self.folder_of(shard) / f"{self.split}.ends").read_bytes()
            if hashlib.sha256(data).hexdigest() != shard.parts[self.split].ends_sha256:
                raise self.damaged(shard, "ends")
            first, last = self.first_documents[number : number + 2]
            ends_D[first:last] = np.frombuffer(data, dtype="<i8")
            ends_D[first:last] += self.starts[number]
        return ends_D

    def damaged(self, shard: Shard, kind: str) -> InputError:
        path = self.folder_of(shard) / f"{self.split}.{kind}"
        return InputError(f"{path} is damaged (its SHA-256 is not the manifest's): {self.remedy(shard)}")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) of the stream, read-only where they lie in one shard (a view of the file).

        Raises `InputError` naming a file in which a document was changed that lies there.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        parts = []
        while start < stop:
            index = bisect_right(self.starts, start) - 1
            end = min(stop, self.starts[index + 1])
            shard, origin = self.manifest.shards[index], self.starts[index]
            try:
                if index not in self.opened:
                    ends = self.document_ends[slice(*self.first_documents[index : index + 2])] - origin
                    self.opened[index] = ShardTokens(self.folder_of(shard), self.split, ends, self.dtype)
                parts.append(self.opened[index].read(start - origin, end - origin))
            except InputError as error:
                raise InputError(f"{error}: {self.remedy(shard)}") from None
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document, its end-of-text token included."""
        start = int(self.document_ends[index - 1]) if index > 0 else 0
        return self.read(start, int(self.document_ends[index]))

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer that the set was made with. Raises `InputError` when its folder holds another one."""
        tokenizer = load_tokenizer(self.folder / "tokenizer")
        if tokenizer_hash(tokenizer) != self.manifest.tokenizer_hash:
            raise InputError(
                f"{self.folder / 'tokenizer'} is damaged or another tokenizer than the set was made with: put the one "
                f"of hash {self.manifest.tokenizer_hash[:16]} there, or prepare the text anew"
            )
        return tokenizer

    def token_bytes(self) -> np.ndarray:
        """`corpus.tokenizer.token_byte_lengths` of that tokenizer. Raises `InputError` when the file is not as made."""
        path = self.folder / "token_bytes.npy"
        remedy = "delete it and run the set's biphase prepare again, with the same sources"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise InputError(f"{path} is missing: {remedy}") from None
        if hashlib.sha256(data).hexdigest() != self.manifest.token_bytes_sha256:
            raise InputError(f"{path} is damaged: {remedy}")
        return np.load(BytesIO(data), allow_pickle=False)

    def verify(self) -> None:
        """Read every byte of the split and the tokenizer. Raises `InputError` naming a file that is not as made."""
        for shard in self.manifest.shards:
            part = shard.parts[self.split]
            for kind in ("tokens", "ends", "hashes"):
                if file_hash(self.folder_of(shard) / f"{self.split}.{kind}") != getattr(part, f"{kind}_sha256"):
                    raise self.damaged(shard, kind)
        if not np.array_equal(self.token_bytes(), token_byte_lengths(self.tokenizer())):
            raise InputError(f"{self.folder / 'token_bytes.npy'} is not that of the tokenizer: prepare the set anew")


def check_tokenizer(shards: ShardSet, expected_hash: str) -> None:
    """Raises `InputError` unless the set was made with the tokenizer of that hash."""
    made_with = shards.manifest.tokenizer_hash
    if made_with != expected_hash:
        raise InputError(
            f"{shards.folder} was made with tokenizer {made_with[:16]}, not with {expected_hash[:16]}: prepare the "
            f"text again with this tokenizer, or use the set's own ({shards.folder / 'tokenizer'})"
        )
