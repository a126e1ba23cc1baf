"""A set of token shards: its records, and one split of it read as a single stream of tokens.

On disk: manifest.json (written last), tokenizer/, token_bytes.npy, and for each shard a folder shards/NAME/ with
shard.json and, for train and validation, SPLIT.tokens and SPLIT.ends. Tokens are little-endian uint16, or uint32 where
the vocabulary needs it, one end-of-text token after each document; ends are the int64 offsets behind those, counted
from the shard's first token.
"""

from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from biphase.config import Strict
from biphase.corpus.text import TxtDocuments
from biphase.corpus.tokenizer import load_tokenizer, token_byte_lengths, tokenizer_hash
from biphase.errors import InputError, nearest
from biphase.files import file_hash, read_json, read_json_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ShardSplitName = Literal["train", "validation"]
SHARD_SPLITS: tuple[ShardSplitName, ...] = get_args(ShardSplitName)

FORMAT_VERSION = 1
LONG_TOKENS = 2048
"""Documents with more tokens than this are counted in a description."""


class SplitTotals(Strict):
    """What all shards hold of one split. `text_bytes` counts UTF-8; `empty_texts` are texts of white space only, which
    become no document."""

    documents: int
    tokens: int
    text_bytes: int
    empty_texts: int


class ShardPart(SplitTotals):
    """What one shard holds of one split."""

    tokens_sha256: str
    ends_sha256: str


class Shard(Strict):
    """One folder of a set: what was made of one source file, or of a few."""

    name: str
    sources: tuple[str, ...]
    parts: dict[ShardSplitName, ShardPart]


class Options(Strict):
    """What was asked for, besides the sources."""

    validation_fraction: float
    seed: int
    text_field: str
    id_field: str
    txt_documents: TxtDocuments


class ShardManifest(Strict):
    """The record of a whole set, in manifest.json."""

    format_version: int
    fingerprint: str
    """The hash of the content: the same for any path, number of workers and time of making."""
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
    splits: dict[ShardSplitName, SplitTotals]
    shards: tuple[Shard, ...]


def read_shard_manifest(folder: Path) -> ShardManifest:
    """The manifest of the set in a folder. Raises `InputError` where there is none, or one that is not as made."""
    path = folder / "manifest.json"
    if not path.exists():
        raise InputError(
            f"{folder} is no shard set, or one that was not finished ({path.name} is missing): run biphase prepare"
        )
    stored = read_json(path)
    version = stored.get("format_version") if isinstance(stored, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(f"{path} has format version {version}, this biphase reads {FORMAT_VERSION}: prepare it anew")
    return read_json_as(path, ShardManifest, remedy="delete it and run biphase prepare again")


def wrong_size(folder: Path, split: ShardSplitName, part: ShardPart, dtype: str) -> str | None:
    """What is wrong with the size of a shard's files for one split; None where it is right."""
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

    def __init__(self, folder: Path, split: ShardSplitName, manifest: ShardManifest) -> None:
        self.folder, self.split, self.manifest = folder, split, manifest
        self.num_tokens = manifest.splits[split].tokens
        self.num_documents = manifest.splits[split].documents
        self.fingerprint = manifest.fingerprint
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.starts = [0]  # where each shard begins in the stream, and where the last one ends
        for shard in manifest.shards:
            self.starts.append(self.starts[-1] + shard.parts[split].tokens)
        self.maps: dict[int, np.ndarray] = {}

    @classmethod
    def open(cls, folder: str | Path, split: str = "train") -> "ShardSet":
        """Raises `InputError` when the manifest is missing or damaged, or a file has not the size it should have."""
        if split not in SHARD_SPLITS:
            raise InputError(f"split '{split}'{nearest(split, SHARD_SPLITS)}")
        shards = cls(Path(folder), split, read_shard_manifest(Path(folder)))
        for shard in shards.manifest.shards:
            wrong = wrong_size(shards.folder_of(shard), shards.split, shard.parts[shards.split], shards.manifest.dtype)
            if wrong is not None:
                raise InputError(f"{wrong}: {shards.remedy(shard)}")
        return shards

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSet.open, (self.folder, self.split)

    def folder_of(self, shard: Shard) -> Path:
        return self.folder / "shards" / shard.name

    def remedy(self, shard: Shard) -> str:
        return f"delete {self.folder_of(shard)} and {self.folder / 'manifest.json'} and run biphase prepare again"

    @cached_property
    def document_ends(self) -> np.ndarray:
        """The offset in the stream after each document's end-of-text token, int64 [num_documents]."""
        ends = [
            np.fromfile(self.folder_of(shard) / f"{self.split}.ends", dtype="<i8") + start
            for shard, start in zip(self.manifest.shards, self.starts, strict=False)
        ]
        return np.concatenate(ends).astype(np.int64, copy=False)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) of the stream, read-only where they lie in one shard (a view of the file)."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        parts = []
        while start < stop:
            index = bisect_right(self.starts, start) - 1
            end = min(stop, self.starts[index + 1])
            if index not in self.maps:
                path = self.folder_of(self.manifest.shards[index]) / f"{self.split}.tokens"
                self.maps[index] = np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))
            parts.append(self.maps[index][start - self.starts[index] : end - self.starts[index]])
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

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
                path = self.folder_of(shard) / f"{self.split}.{kind}"
                if file_hash(path) != expected:
                    raise InputError(f"{path} is damaged (its SHA-256 is not the manifest's): {self.remedy(shard)}")
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


def describe_shards(folder: str | Path, num_documents: int = 2) -> str:
    """Counts, document lengths and the beginning of the first documents of each split, as lines of text."""
    sets = [ShardSet.open(folder, split) for split in SHARD_SPLITS]
    manifest = sets[0].manifest
    lines = [
        f"shard set {folder}",
        f"content {manifest.fingerprint[:16]} · tokenizer {manifest.tokenizer_hash[:16]} · vocabulary "
        f"{manifest.vocab_size:,} · {manifest.dtype} · {len(manifest.shards)} shards",
    ]
    for shards in sets:
        total = manifest.splits[shards.split]
        lines.append(
            f"{shards.split}: {total.documents:,} documents · {total.tokens:,} tokens · "
            f"{total.text_bytes / 1e6:,.1f} MB of text · {total.empty_texts:,} empty texts left out"
        )
        if shards.num_documents:
            lengths = np.diff(shards.document_ends, prepend=0)
            lines.append(
                f"  tokens per document: mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}, "
                f"{np.mean(lengths > LONG_TOKENS):.1%} longer than {LONG_TOKENS:,} · "
                f"{total.text_bytes / total.tokens:.2f} bytes per token"
            )
    tokenizer = sets[0].tokenizer()
    for shards in sets:
        for index in range(min(num_documents, shards.num_documents)):
            text = str(tokenizer.decode(shards.document(index)[:80]))
            lines.append(f"{shards.split} {index}: {' '.join(text.split())[:200]}")
    return "\n".join(lines)
