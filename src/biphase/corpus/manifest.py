"""The record of a shard set: what it holds, what it was made of and how, and by which hashes all of it is known.

manifest.json is written last, by `corpus.prepare`; it holds a hash of itself, so that no number in it can change
unnoticed.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field

from biphase.config import Count, Grown, PositiveCount, Strict
from biphase.corpus.text import TxtDocuments
from biphase.errors import InputError
from biphase.files import content_hash, read_hashed, read_json

ShardSplitName = Literal["train", "validation"]
SHARD_SPLITS: tuple[ShardSplitName, ...] = get_args(ShardSplitName)

FORMAT_VERSION = 2


class SplitTotals(Strict):
    """What all shards hold of one split. `text_bytes` counts UTF-8; `empty_texts` are texts of white space only, which
    become no document."""

    documents: Count
    tokens: Count
    text_bytes: Count
    empty_texts: Count


class ShardPart(SplitTotals):
    """What one shard holds of one split."""

    tokens_sha256: str
    ends_sha256: str
    hashes_sha256: str


class Shard(Strict):
    """One folder of a set: what was made of one source file, or of a few."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+-[0-9a-f]{12}$")]
    sources: tuple[str, ...]
    source_hashes: tuple[str, ...] = ()
    place_hashes: tuple[str, ...] = ()
    """Earlier versions wrote these two; nothing reads them."""
    parts: dict[ShardSplitName, ShardPart]


class Options(Grown):
    """What was asked for, besides the sources."""

    later: ClassVar[frozenset[str]] = frozenset({"drop_copies"})
    validation_fraction: float
    seed: int
    text_field: str
    id_field: str
    txt_documents: TxtDocuments
    drop_copies: bool = False
    """Whether a document with exactly the text of an earlier one is left out."""


class Duplicates(Strict):
    """How many documents have exactly the tokens of another one before them."""

    train: Count
    validation: Count
    in_both: Count
    """Documents for validation that are also among those for training."""

    @property
    def line(self) -> str:
        return (
            f"exact copies of an earlier document: {self.train:,} for training, {self.validation:,} for validation; "
            f"{self.in_both:,} documents for validation are also among those for training"
        )


class ShardManifest(Strict):
    """The record of a whole set, in manifest.json."""

    format_version: int
    fingerprint: str
    """The hash of the content: the same for any path, number of workers and time of making."""
    sources_hash: str
    tokenizer_hash: str
    token_bytes_sha256: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: PositiveCount
    eos_id: Count
    mask_id: Count
    pad_id: Count
    bos_id: Count | None
    special_ids: tuple[Count, ...]
    options: Options
    splits: dict[ShardSplitName, SplitTotals]
    shards: tuple[Shard, ...]
    earlier: tuple[Any, ...] = ()
    """Empty; in a set to which an earlier version added text, what it was before."""
    duplicates: Duplicates | None = None


def sum_splits(shards: tuple[Shard, ...]) -> dict[ShardSplitName, SplitTotals]:
    splits = {}
    for split in SHARD_SPLITS:
        parts = [shard.parts[split] for shard in shards]
        splits[split] = SplitTotals(**{name: sum(getattr(p, name) for p in parts) for name in SplitTotals.model_fields})
    return splits


def set_fingerprint(tokenizer_hash: str, dtype: str, vocab_size: int, shards: tuple[Shard, ...]) -> str:
    hashes = [
        [shard.parts[split].tokens_sha256, shard.parts[split].ends_sha256] for shard in shards for split in SHARD_SPLITS
    ]
    return content_hash([tokenizer_hash, dtype, vocab_size, hashes])


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
    remedy = "delete it and run biphase prepare again"
    manifest = read_hashed(path, ShardManifest, remedy)
    if wrong := wrong_facts(manifest):
        raise InputError(f"{path} is damaged ({wrong}); {remedy}")
    return manifest


def wrong_facts(manifest: ShardManifest) -> str | None:
    """What in a manifest contradicts the rest of it; None where all of it fits together."""
    ids = [manifest.eos_id, manifest.mask_id, manifest.pad_id, manifest.bos_id or 0, *manifest.special_ids]
    if max(ids) >= manifest.vocab_size:
        return f"a special token's id is not among the {manifest.vocab_size} of the vocabulary"
    if any(set(shard.parts) != set(SHARD_SPLITS) for shard in manifest.shards):
        return "a shard is not described in both splits"
    if len({shard.name for shard in manifest.shards}) != len(manifest.shards):
        return "a shard is named twice"
    if manifest.splits != sum_splits(manifest.shards):
        return "its totals are not the sums over its shards"
    known_by = manifest.tokenizer_hash, manifest.dtype, manifest.vocab_size
    if manifest.fingerprint != set_fingerprint(*known_by, manifest.shards):
        return "its fingerprint is not that of its shards"
    return None


def wrong_size(folder: Path, split: ShardSplitName, part: ShardPart, dtype: str) -> str | None:
    """What is wrong with the size of a shard's files for one split; None where it is right."""
    expected = {
        "tokens": part.tokens * np.dtype(dtype).itemsize,
        "ends": part.documents * 8,
        "hashes": part.documents * 8,
    }
    for kind, num_bytes in expected.items():
        path = folder / f"{split}.{kind}"
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != num_bytes:
            return f"{path} has {path.stat().st_size:,} bytes, not {num_bytes:,}"
    return None
