"""Which sample stands where: the endless order in which the samples of one set are trained on.

An epoch walks through all samples in a seeded order of its own, laid end to end; which sample stands where is computed
for the asked places alone.
"""

from functools import lru_cache
from typing import Any, Protocol

import numpy as np

BLOCK_SAMPLES = 4096
"""Samples per stored prefix sum of an epoch's order: 100 million samples need 200 kB."""


class SampleSpans(Protocol):
    """Where the samples of a set lie."""

    num_samples: int
    num_tokens: int

    def spans(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


class SampleOrder:
    """The order of a set's samples under a seed."""

    def __init__(self, samples: SampleSpans, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self.block_starts = lru_cache(maxsize=4)(self.sum_blocks)

    def between(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and epochs of the samples that begin in [first, end) of the order."""
        # With epochs of n = 700 tokens, the interval [600, 1500) is [600, 700) of epoch 0, all of epoch 1, and [0, 100)
        # of epoch 2. An empty interval is looked for in one epoch and finds nothing.
        epoch_tokens = self.samples.num_tokens
        ids, epochs = [], []
        for epoch in range(first // epoch_tokens, max(first, end - 1) // epoch_tokens + 1):
            start = epoch * epoch_tokens
            found = self.samples_in(epoch, max(first - start, 0), min(end - start, epoch_tokens))
            ids.append(found)
            epochs.append(np.full(len(found), epoch))
        return np.concatenate(ids), np.concatenate(epochs)

    def ids_at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return permute(places, self.samples.num_samples, self.seed, epoch)

    def samples_in(self, epoch: int, first: int, end: int) -> np.ndarray:
        # Only where every 4,096th sample begins is known. So the blocks that the interval touches are laid out anew:
        # from the last one that begins at `first` or before it, up to the first that begins at `end` or behind it.
        # In there the lengths of the samples are summed up, and those that begin outside the interval are dropped.
        starts = self.block_starts(epoch)
        from_block = int(np.searchsorted(starts, first, side="right")) - 1
        to_block = int(np.searchsorted(starts, end, side="left"))
        places = np.arange(from_block * BLOCK_SAMPLES, min(to_block * BLOCK_SAMPLES, self.samples.num_samples))
        ids = self.ids_at(epoch, places)
        begins, stops = self.samples.spans(ids)
        lengths = stops - begins
        offsets = starts[from_block] + np.cumsum(lengths) - lengths
        return ids[(offsets >= first) & (offsets < end)]

    def sum_blocks(self, epoch: int) -> np.ndarray:
        """Where each block of an epoch's order begins, and where the last one ends, in tokens. Reads lengths only."""
        totals = [np.zeros(1, np.int64)]
        for begin in range(0, self.samples.num_samples, 256 * BLOCK_SAMPLES):
            places = np.arange(begin, min(begin + 256 * BLOCK_SAMPLES, self.samples.num_samples))
            begins, stops = self.samples.spans(self.ids_at(epoch, places))
            totals.append(np.add.reduceat(stops - begins, np.arange(0, len(places), BLOCK_SAMPLES)))
        return np.cumsum(np.concatenate(totals))


def permute(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Which of n things stands at each place: a permutation of 0..n-1, computed for the asked places alone.

    A four-round Feistel network on the smallest even number of bits that holds n; results past n walk on through the
    same network until they fall inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    # n = 1,000 needs 10 bits, so each half has 5. A round swaps the halves and adds (by xor) to the one a hash of the
    # other: left, right = right, left ^ hash(right). Any such round can be undone, whatever the hash, so the network
    # is a permutation of 0..1023. A place whose number is 1,000 or more goes through it again: along its cycle the
    # place itself, which is below 1,000, comes in the end, and no two places meet on the way.
    half = max(1, (int(n - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)  # as a mask, the bits of the right half
    keys = mix(np.arange(4, dtype=np.uint64) + mix(np.uint64(seed % 2**64)) + np.uint64(epoch * 4 + 1))

    def network(values: np.ndarray) -> np.ndarray:
        left, right = values >> np.uint64(half), values & low
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & low)
        return (left << np.uint64(half)) | right

    values = network(places.astype(np.uint64))
    outside = values >= n
    while outside.any():
        values[outside] = network(values[outside])
        outside = values >= n
    return values.astype(np.int64)


def uniform(seed: int, *words: np.ndarray | int) -> np.ndarray:
    """A number in [0, 1) that depends on the seed and the words alone; words broadcast."""
    with np.errstate(over="ignore"):
        state = mix(np.uint64(seed % 2**64))
        for word in words:
            state = mix(state ^ mix(np.asarray(word).astype(np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(word: Any) -> Any:
    """SplitMix64's output function (Steele, Lea and Flood 2014): every input bit moves every output bit."""
    with np.errstate(over="ignore"):
        word = np.asarray(word, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))
