"""Documents that are there more than once: exact copies by their hashes."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from biphase.corpus.manifest import SHARD_SPLITS, Duplicates, Shard, ShardSplitName

HASHES_AT_ONCE = 1 << 26
"""Hashes of documents that are sorted in memory together: half a GB."""


def count_copies(folder: Path, shards: tuple[Shard, ...]) -> Duplicates | None:
    """How many documents of the shards below `folder` are copies, token for token; None where a shard has no hashes.

    A set with many documents is gone through several times, each time for the hashes of one range of values.
    """
    parts = [part for shard in shards for part in shard.parts.values()]
    if any(part.hashes_sha256 is None for part in parts):
        return None
    num_ranges = sum(part.documents for part in parts) // HASHES_AT_ONCE + 1
    edges = [(number << 64) // num_ranges for number in range(num_ranges + 1)]
    train = validation = in_both = 0
    for low, high in pairwise(edges):
        found = {split: hashes_between(folder, shards, split, low, high - 1) for split in SHARD_SPLITS}
        known = np.unique(found["train"])
        train += len(found["train"]) - len(known)
        validation += len(found["validation"]) - len(np.unique(found["validation"]))
        in_both += int(np.isin(found["validation"], known).sum())
    return Duplicates(train=train, validation=validation, in_both=in_both)


def hashes_between(folder: Path, shards: Iterable[Shard], split: ShardSplitName, low: int, high: int) -> np.ndarray:
    """The hashes of the documents of a split that lie in low..high, in their order, uint64."""
    found = [np.empty(0, np.uint64)]
    for shard in shards:
        hashes_D = np.fromfile(folder / "shards" / shard.name / f"{split}.hashes", dtype="<u8")
        found.append(hashes_D[(hashes_D >= np.uint64(low)) & (hashes_D <= np.uint64(high))])
    return np.concatenate(found)


def describe_copies(found: Duplicates) -> str:
    return (
        f"exact copies of an earlier document: {found.train:,} for training, {found.validation:,} for validation; "
        f"{found.in_both:,} documents for validation are also among those for training"
    )
