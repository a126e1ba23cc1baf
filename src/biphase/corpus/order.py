"""Seeded draws that are computed for the asked places alone: a permutation, and numbers between 0 and 1."""

from typing import Any

import numpy as np


def permute(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Tell which of n things stands at each place: a permutation of 0..n-1, computed for the asked places alone.

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
    """Draw a number in [0, 1) that depends on the seed and the words alone; words broadcast."""
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
