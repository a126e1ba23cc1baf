"""Shards become packed batches. The tokens of a batch are a pure function of (shards, settings, step).

A *sample* is by default 12..2048 tokens of one document. The samples of an epoch have a seeded order. If they lie end
to end in this order, batch k has the samples whose first token falls into [k·B, (k+1)·B); if batches grow, the sums of
their sizes replace k·B. A part of a batch (for a rank, or a microbatch) is a part of that interval. So any rank of any
world size computes batch k without reading earlier batches, every objective sees the same samples in the same order,
and a run resumes with nothing but a step number. The text of a run is one shard set, or several with weights.

Letters: T tokens of a batch, S samples of a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor
from typing import Any

import numpy as np

from biphase.corpus.shards import ShardSet, check_tokenizer
from biphase.errors import InputError
from biphase.files import content_hash
from biphase.recipe import Data


@dataclass(frozen=True)
class PackedBatch:
    """Samples laid end to end: no padding, no batch axis.

    `bounds_S1` holds the S + 1 offsets of the samples in `tokens_T`; attention stays between two neighbouring offsets.
    `sample_ids_S` and `epochs_S` name the samples, for masks and error messages.
    """

    tokens_T: np.ndarray
    positions_T: np.ndarray
    bounds_S1: np.ndarray
    sample_ids_S: np.ndarray
    epochs_S: np.ndarray

    def __post_init__(self) -> None:
        assert len(self.tokens_T) == len(self.positions_T) == self.bounds_S1[-1]
        assert len(self.bounds_S1) - 1 == len(self.sample_ids_S) == len(self.epochs_S)

    @property
    def lengths_S(self) -> np.ndarray:
        return np.diff(self.bounds_S1)


@dataclass(frozen=True)
class Samples:
    """The samples of a text, numbered from 0. They are not stored: `spans` computes the position of each."""

    num_samples: int
    num_tokens: int
    left_out_tokens: int
    """The tokens of the text that are in no sample."""
    spans: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    """The function from sample ids to the first token and the end (exclusive) of each, as offsets into the stream of
    tokens."""


def cut_documents(document_ends: np.ndarray, min_tokens: int, max_tokens: int) -> Samples:
    """Cut each document into samples of at most `max_tokens`.

    A last piece shorter than `min_tokens` takes tokens from the piece before it. Skips documents shorter than
    `min_tokens`.
    """
    # An example, with samples of 12 to 64 tokens: documents of 5, 100 and 130 tokens have 0, 2 and 3 pieces, so
    # piece_ends is [0, 2, 5]. Samples 0 and 1 are of document 1, samples 2 to 4 of document 2, which lies at
    # 105..235 of the stream. Cut at every 64 tokens, its pieces would have 64, 64 and 2; the last is too short.
    document_lengths = np.diff(document_ends, prepend=0)
    is_long_enough = document_lengths >= min_tokens
    piece_ends = np.cumsum(np.where(is_long_enough, -(-document_lengths // max_tokens), 0))

    def spans(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        documents = np.searchsorted(piece_ends, ids, side="right")
        ends = document_ends[documents]
        starts = np.where(documents > 0, document_ends[documents - 1], 0)
        lengths = ends - starts
        # The index of each sample among its document's pieces: samples 2, 3, 4 are the pieces 0, 1, 2.
        num_pieces = -(-lengths // max_tokens)
        pieces = ids - (piece_ends[documents] - num_pieces)
        # Inside the document, plain pieces would begin at 0, 64 and 128. But every piece except the first begins at 130
        # - 12 = 118 at the latest, and every piece except the last ends there at the latest: [0, 64), [64, 118), [118,
        # 130). If the last piece is long enough, neither limit matters, and the pieces are the plain ones.
        first = np.minimum(pieces * max_tokens, np.where(pieces > 0, lengths - min_tokens, 0))
        last = np.minimum((pieces + 1) * max_tokens, lengths - min_tokens)
        last = np.where(pieces + 1 == num_pieces, lengths, last)
        return starts + first, starts + last

    num_samples = int(piece_ends[-1]) if len(piece_ends) else 0
    num_tokens = int(document_lengths[is_long_enough].sum())
    return Samples(num_samples, num_tokens, int(document_lengths.sum()) - num_tokens, spans)


def cut_stream(num_stream_tokens: int, min_tokens: int, max_tokens: int, seed: int) -> Samples:
    """Cut the stream of tokens at random, across documents: the paper's original packer, seeded.

    Each stretch of `max_tokens` tokens is cut once, at r ~ U{min..max - min}, into samples of r and max - r tokens: a
    mean of max / 2 (1,024 of 2,048). Documents inside a sample see each other. Skips tokens after the last whole
    stretch.
    """

    def spans(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Samples 2k and 2k + 1 are the two parts of the k-th stretch of max_tokens. With limits of 12 and 2048 there
        # are 2025 places to cut it at, 12..2036, so that both parts have 12 tokens or more; `uniform` draws one, the
        # same for both samples. Cut at 700, samples 0 and 1 are [0, 700) and [700, 2048).
        pairs = ids // 2
        choices = max_tokens - 2 * min_tokens + 1
        cuts = min_tokens + (uniform(seed, pairs) * choices).astype(np.int64)
        is_second = ids % 2 == 1
        starts = pairs * max_tokens
        return starts + np.where(is_second, cuts, 0), starts + np.where(is_second, max_tokens, cuts)

    num_pairs, left_out_tokens = divmod(num_stream_tokens, max_tokens)
    return Samples(2 * num_pairs, num_pairs * max_tokens, left_out_tokens, spans)


def make_samples(data: Data, shards: ShardSet) -> Samples:
    """Cut the shards' tokens into samples, as `data.packing` says."""
    if data.packing == "stream":
        return cut_stream(shards.num_tokens, data.min_sample_tokens, data.max_sample_tokens, data.order_seed)
    return cut_documents(shards.document_ends, data.min_sample_tokens, data.max_sample_tokens)


BLOCK_SAMPLES = 4096
"""The samples per stored prefix sum of an epoch's order: 100 million samples need 200 kB."""


class PackedSet:
    """The samples of one shard set in their endless order: epochs laid end to end, each in a seeded order of its own.

    Samples are computed only for the requested part of the order.
    """

    def __init__(self, shards: ShardSet, samples: Samples, seed: int) -> None:
        if samples.num_samples == 0:
            lack = f"split '{shards.split}' has no document that is long enough for a sample, or too few tokens for one"
            remedy = "lower data.min_sample_tokens or, with packing: stream, data.max_sample_tokens"
            raise InputError(f"{shards.folder}: {lack}: {remedy}")
        self.shards, self.samples, self.seed = shards, samples, seed
        self.block_starts = lru_cache(maxsize=4)(self.sum_blocks)

    def samples_between(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and epochs of the samples that begin in [first, end) of the order."""
        # With epochs of n = 700 tokens, the interval [600, 1500) is [600, 700) of epoch 0, all of epoch 1, and [0, 100)
        # of epoch 2. For an empty interval, the search in one epoch finds nothing.
        epoch_tokens = self.samples.num_tokens
        ids, epochs = [], []
        for epoch in range(first // epoch_tokens, max(first, end - 1) // epoch_tokens + 1):
            start = epoch * epoch_tokens
            drawn = self.samples_in(epoch, max(first - start, 0), min(end - start, epoch_tokens))
            ids.append(drawn)
            epochs.append(np.full(len(drawn), epoch))
        return np.concatenate(ids), np.concatenate(epochs)

    def samples_in(self, epoch: int, first: int, end: int) -> np.ndarray:
        """Return the ids of the samples that begin in [first, end) of one epoch."""
        # Only the offset of every 4,096th sample is known. So lay out again the blocks that the interval touches: from
        # the last one that begins at `first` or before, up to the first one that begins at `end` or after it. Sums of
        # lengths give the offset of each of their samples; drop those outside the interval.
        starts = self.block_starts(epoch)
        from_block = int(np.searchsorted(starts, first, side="right")) - 1
        to_block = int(np.searchsorted(starts, end, side="left"))
        ids, lengths = self.lay_out(epoch, from_block, to_block)
        offsets = starts[from_block] + np.cumsum(lengths) - lengths
        return ids[(offsets >= first) & (offsets < end)]

    def sum_blocks(self, epoch: int) -> np.ndarray:
        """Return the offset of each block in an epoch's order, and the end of the last one, in tokens."""
        totals = [np.zeros(1, np.int64)]
        for block in range(0, -(-self.samples.num_samples // BLOCK_SAMPLES), 256):
            _, lengths = self.lay_out(epoch, block, block + 256)
            totals.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK_SAMPLES)))
        return np.cumsum(np.concatenate(totals))

    def lay_out(self, epoch: int, from_block: int, to_block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and lengths of the samples in some blocks, in the order of the epoch."""
        num_samples = self.samples.num_samples
        places = np.arange(from_block * BLOCK_SAMPLES, min(to_block * BLOCK_SAMPLES, num_samples))
        ids = permute(places, num_samples, self.seed, epoch)
        begins, ends = self.samples.spans(ids)
        return ids, ends - begins


class Batches:
    """The batches of a run: `batch(step, part, num_parts)` depends only on its arguments.

    Each set contributes its share of every batch, in its own order.
    """

    def __init__(
        self,
        sets: Sequence[PackedSet],
        tokens_before: Callable[[int], int],
        shares: Sequence[Fraction] = (Fraction(1),),
        data_position: int = 0,
    ) -> None:
        """
        Args:
            tokens_before: the tokens of this run's batches before a step.
            shares: each set's share of the tokens; they sum up to 1.
            data_position: the tokens of the data order before batch 0.
        """
        assert sum(shares) == 1 and len(sets) == len(shares)
        self.sets, self.shares = sets, shares
        self.tokens_before, self.data_position = tokens_before, data_position
        self.num_samples = sum(packed.samples.num_samples for packed in sets)
        self.num_tokens = sum(packed.samples.num_tokens for packed in sets)
        self.left_out_tokens = sum(packed.samples.left_out_tokens for packed in sets)

    def batch_tokens(self, step: int) -> int:
        """Return the tokens of batch `step`, not counting what its last samples overhang."""
        return self.tokens_before(step + 1) - self.tokens_before(step)

    def batch(self, step: int, part: int = 0, num_parts: int = 1) -> PackedBatch:
        """Return one of the `num_parts` parts of batch `step`; in order, the parts make up the batch.

        Steps count from 0; negative steps are the batches before `data_position`. The id of a sample is its index in
        its set plus 2⁴⁰ times the index of the set, so that masks differ.
        """
        assert 0 <= part < num_parts and self.data_position + self.tokens_before(step) >= 0
        # With shares of 0.3 and 0.7 and 1,000 tokens a batch, batch 2 is [600, 900) of the first set's order, and
        # [1400, 2100) of the second's. Laid end to end they are 1,000 places, and each part takes a stretch of them:
        # three parts take [0, 333), [333, 666) and [666, 1000). Every sample begins in exactly one stretch and belongs
        # to it as a whole. So a part may end after its stretch, and the next part then begins that much after its own
        # start.
        first = self.data_position + self.tokens_before(step)
        end = first + self.batch_tokens(step)
        intervals = [(floor(first * share), floor(end * share)) for share in self.shares]
        tokens = sum(stop - start for start, stop in intervals)
        low, high = part * tokens // num_parts, (part + 1) * tokens // num_parts
        pieces: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        epochs: list[np.ndarray] = []
        offset = 0  # of the set's interval among the places
        for index, (packed, (start, stop)) in enumerate(zip(self.sets, intervals, strict=True)):
            begin, until = max(low - offset, 0), min(high - offset, stop - start)
            if begin < until or index == len(intervals) - 1:  # the last set gives an array to every part
                ids_S, epochs_S = packed.samples_between(start + begin, start + max(begin, until))
                spans = zip(*packed.samples.spans(ids_S), strict=True)
                pieces += [packed.shards.read(first_token, last) for first_token, last in spans]
                ids.append(ids_S + (index << 40))
                epochs.append(epochs_S)
            offset += stop - start
        lengths_S = np.array([len(piece) for piece in pieces], dtype=np.int64)
        bounds_S1 = np.concatenate([[0], np.cumsum(lengths_S)])
        return PackedBatch(
            tokens_T=np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64),
            positions_T=np.arange(bounds_S1[-1]) - np.repeat(bounds_S1[:-1], lengths_S),  # 0 1 2, 0 1, 0 1 2 3
            bounds_S1=bounds_S1,
            sample_ids_S=np.concatenate(ids),
            epochs_S=np.concatenate(epochs),
        )


@dataclass(frozen=True)
class TrainingText:
    """The opened text of a run."""

    main: ShardSet
    """The set of `data.shards`, with the run's tokenizer and validation text."""
    sets: tuple[ShardSet, ...]
    """The sets to train on."""
    shares: tuple[Fraction, ...]
    """Each set's share of the tokens."""
    contents: tuple[str, ...]
    """The fingerprint of each set."""
    fingerprint: str
    """The fingerprint of a single set, else a hash of all sets' fingerprints and shares."""


def open_text(data: Data) -> TrainingText:
    """Open the shard sets of a recipe. Raises `InputError` for a damaged set, and for one with another tokenizer than
    `data.shards`."""
    main = ShardSet(data.shards, "train")
    sets = tuple(ShardSet(member.path, "train") for member in data.mixture or ()) or (main,)
    for shards in sets:
        check_tokenizer(shards, main.manifest.tokenizer_hash)
    contents = tuple(shards.fingerprint for shards in sets)
    if len(set(contents)) < len(sets):
        raise InputError("data.mixture names a text twice: give it once, with the sum of the weights")
    shared = [[content, str(share)] for content, share in zip(contents, data.shares, strict=True)]
    fingerprint = content_hash(shared) if len(shared) > 1 else main.fingerprint
    return TrainingText(main, sets, data.shares, contents, fingerprint)


# Random draws, computed only for the requested places


def permute(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the value of a random permutation of 0..n-1 at each of these places.

    A four-round Feistel network on the smallest even number of bits that holds n. Values of n or more go through the
    network again until they fall below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    # n = 1,000 needs 10 bits, so each half has 5. A round swaps the halves and adds (by xor) to one a hash of the
    # other: left, right = right, left ^ hash(right). Any such round can be undone, whatever the hash, so the network is
    # a permutation of 0..1023. A value of 1,000 or more goes through it again. That ends, because the cycle leads back
    # to the place, which is below 1,000; and no two places meet on the way.
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
    """Draw numbers in [0, 1) that depend only on the seed and the words; words broadcast."""
    with np.errstate(over="ignore"):
        state = mix(np.uint64(seed % 2**64))
        for word in words:
            state = mix(state ^ mix(np.asarray(word).astype(np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(bits: Any) -> Any:
    """Apply SplitMix64's output function (Steele, Lea and Flood 2014): every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        bits = np.asarray(bits, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))
