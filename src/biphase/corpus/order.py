"""Which sample stands where: the endless order in which the samples of one set are trained on, also where it has grown.

An epoch walks through all samples in a seeded order of its own, laid end to end; which sample stands where is computed
for the asked places alone. Where the set grew, at some place of the order, the epoch that was going on ends there, and
one begins of what was left of it and of all that is new; after that, epochs are of the whole set. So what came before
stays what it was, nothing is seen again before everything was seen once, and the order is a function of the seed and of
where the set grew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

BLOCK_SAMPLES = 4096
"""Samples per stored prefix sum of an epoch's order: 100 million samples need 200 kB."""


class SampleSpans(Protocol):
    """Where the samples of a set lie. Those of a set that has grown come first, with the same numbers."""

    num_samples: int
    num_tokens: int

    def spans(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Growth:
    """A place in the order, in tokens, from which on samples are of the larger set, and how many there were before."""

    position: int
    num_samples: int


@dataclass(frozen=True)
class Epoch:
    """A stretch of the order in which each of some samples stands once."""

    number: int
    num_samples: int
    rest: "Epoch | None" = None
    """The epoch that was going on when the set grew; its places from `num_seen` on are among those of this one."""
    num_seen: int = 0
    num_known: int = 0
    """How many samples the set had then: those from there on are the new ones."""


@dataclass(frozen=True)
class Stretch:
    """The order between two places where the set grew: an epoch of what was left, then epochs of all samples."""

    start: int
    num_samples: int
    epoch_tokens: int
    opening: Epoch | None = None
    opening_tokens: int = 0
    next_number: int = 0
    """The number of the first epoch of all samples."""

    def find(self, position: int) -> tuple[Epoch, int, int]:
        """The epoch at a position, where it begins, and where it ends unless the set grows before."""
        offset = position - self.start - self.opening_tokens
        if offset < 0:
            assert self.opening is not None
            return self.opening, self.start, self.start + self.opening_tokens
        past = offset // self.epoch_tokens
        start = position - offset % self.epoch_tokens
        return Epoch(self.next_number + past, self.num_samples), start, start + self.epoch_tokens


class SampleOrder:
    """The order of a set's samples under a seed."""

    def __init__(self, samples: SampleSpans, seed: int, growth: Sequence[Growth] = ()) -> None:
        """`growth` in the order of positions: the set grew there."""
        self.samples, self.seed = samples, seed
        self.block_starts = lru_cache(maxsize=4)(self.sum_blocks)
        sizes = [*(step.num_samples for step in growth), samples.num_samples]
        self.stretches = [Stretch(0, sizes[0], self.epoch_tokens(sizes[0]))]
        for step, num_samples in zip(growth, sizes[1:], strict=True):
            self.stretches.append(self.grow(step, num_samples))

    def epoch_tokens(self, num_samples: int) -> int:
        """How many tokens the first samples of the set have together."""
        if num_samples == self.samples.num_samples:
            return self.samples.num_tokens
        return int(self.block_starts(Epoch(0, num_samples))[-1]) if num_samples else 0

    def grow(self, step: Growth, num_samples: int) -> Stretch:
        """The stretch that begins where the set grew to `num_samples`."""
        before, start, _ = self.stretches[-1].find(step.position)
        num_seen = len(self.samples_in(before, 0, step.position - start))
        num_left = before.num_samples - num_seen
        opening = Epoch(
            before.number + 1,
            num_left + num_samples - step.num_samples,
            rest=before,
            num_seen=num_seen,
            num_known=step.num_samples,
        )
        tokens = int(self.block_starts(opening)[-1])
        return Stretch(step.position, num_samples, self.epoch_tokens(num_samples), opening, tokens, before.number + 2)

    def between(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and epochs of the samples that begin in [first, end) of the order."""
        # With epochs of n = 700 tokens, the interval [600, 1500) is [600, 700) of epoch 0, all of epoch 1, and [0, 100)
        # of epoch 2. An empty interval is looked for in one epoch and finds nothing.
        ids, epochs = [], []
        for epoch, start, stop in self.epochs_between(first, end):
            found = self.samples_in(epoch, max(first - start, 0), min(end, stop) - start)
            ids.append(found)
            epochs.append(np.full(len(found), epoch.number))
        return np.concatenate(ids), np.concatenate(epochs)

    def epochs_between(self, first: int, end: int) -> Iterator[tuple[Epoch, int, int]]:
        """The epochs that [first, end) touches, each with where it begins and ends."""
        while True:
            number = max(i for i, stretch in enumerate(self.stretches) if stretch.start <= first)
            epoch, start, stop = self.stretches[number].find(first)
            if number + 1 < len(self.stretches):
                stop = min(stop, self.stretches[number + 1].start)
            yield epoch, start, stop
            if stop >= end:
                return
            first = stop

    def ids_at(self, epoch: Epoch, places: np.ndarray) -> np.ndarray:
        drawn = permute(places, epoch.num_samples, self.seed, epoch.number)
        if epoch.rest is None:
            return drawn
        # Of an epoch of 10 samples, 4 were seen when 5 more came. What is drawn from 0..10 stands for the places 4..9
        # of that epoch where it is below 6, and otherwise for the new samples 10..14.
        num_left = epoch.rest.num_samples - epoch.num_seen
        ids = drawn - num_left + epoch.num_known
        is_left = drawn < num_left
        ids[is_left] = self.ids_at(epoch.rest, drawn[is_left] + epoch.num_seen)
        return ids

    def samples_in(self, epoch: Epoch, first: int, end: int) -> np.ndarray:
        # Only where every 4,096th sample begins is known. So the blocks that the interval touches are laid out anew:
        # from the last one that begins at `first` or before it, up to the first that begins at `end` or behind it.
        # In there the lengths of the samples are summed up, and those that begin outside the interval are dropped.
        starts = self.block_starts(epoch)
        from_block = int(np.searchsorted(starts, first, side="right")) - 1
        to_block = int(np.searchsorted(starts, end, side="left"))
        places = np.arange(from_block * BLOCK_SAMPLES, min(to_block * BLOCK_SAMPLES, epoch.num_samples))
        ids = self.ids_at(epoch, places)
        begins, stops = self.samples.spans(ids)
        lengths = stops - begins
        offsets = starts[from_block] + np.cumsum(lengths) - lengths
        return ids[(offsets >= first) & (offsets < end)]

    def sum_blocks(self, epoch: Epoch) -> np.ndarray:
        """Where each block of an epoch's order begins, and where the last one ends, in tokens. Reads lengths only."""
        totals = [np.zeros(1, np.int64)]
        for begin in range(0, epoch.num_samples, 256 * BLOCK_SAMPLES):
            places = np.arange(begin, min(begin + 256 * BLOCK_SAMPLES, epoch.num_samples))
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
