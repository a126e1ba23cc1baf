"""Documents that are there more than once: exact copies by their hashes, near copies by MinHash."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from biphase.corpus.manifest import SHARD_SPLITS, Duplicates, Shard, ShardSplitName
from biphase.corpus.order import mix
from biphase.corpus.shards import ShardSet
from biphase.errors import InputError

HASHES_AT_ONCE = 1 << 26
"""Hashes of documents that are sorted in memory together: half a GB."""


def count_copies(folder: Path, shards: tuple[Shard, ...]) -> Duplicates:
    """How many documents of the shards below `folder` are copies, token for token.

    A set with many documents is gone through several times, each time for the hashes of one range of values.
    """
    parts = [part for shard in shards for part in shard.parts.values()]
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


COMPARED_DOCUMENTS = 20_000
SHINGLE_TOKENS, PERMUTATIONS, NEAR = 5, 128, 0.8
"""Documents are compared by their stretches of five tokens; two whose sets of these overlap by about 0.8 (Jaccard),
estimated from 128 permutations (MinHash, Broder 1997; thresholds as in common corpora), count as near copies."""


def count_near_copies(shards: ShardSet, limit: int = COMPARED_DOCUMENTS) -> str:
    """A line on the documents that are like an earlier one, of all or of `limit` that are drawn.

    In a part, pairs of which only one document is drawn are not found. Raises `InputError` where datasketch is missing.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise InputError("near copies are found with datasketch: pip install 'biphase[duplicates]'") from None
    drawn = np.arange(shards.num_documents)
    if len(drawn) > limit:
        drawn = np.sort(np.random.default_rng(0).choice(len(drawn), limit, replace=False))
    index = MinHashLSH(threshold=NEAR, num_perm=PERMUTATIONS)
    empty = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=int)
    num_near = 0
    for number in drawn.tolist():
        signature = empty.copy()
        signature.update_batch(shingles(shards.document(number)).tolist())
        num_near += bool(index.query(signature))
        index.insert(number, signature)
    total = f"{shards.num_documents:,} documents"
    part = total if len(drawn) == shards.num_documents else f"{len(drawn):,} drawn from {total}"
    return (
        f"near copies of an earlier document ({shards.split}): {num_near:,} of {part} (exact ones included; MinHash, "
        f"{SHINGLE_TOKENS} tokens, {PERMUTATIONS} permutations, overlap {NEAR})"
    )


def shingles(tokens_T: np.ndarray) -> np.ndarray:
    """The stretches of `SHINGLE_TOKENS` tokens of a document, each as a number below 2³², once; a short text is one."""
    size = min(SHINGLE_TOKENS, len(tokens_T))
    windows_NK = np.lib.stride_tricks.sliding_window_view(tokens_T.astype(np.uint64), size)
    hashed_N = mix(np.zeros(len(windows_NK), np.uint64))
    for column_N in windows_NK.T:
        hashed_N = mix(hashed_N ^ column_N)
    return np.unique(hashed_N >> np.uint64(32))
