"""Every token once per epoch, whatever the world size; nothing depends on what came before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import biphase.corpus.packing as packing_module
from biphase.corpus.packing import (
    Batches,
    PackedBatch,
    PackedSet,
    cut_documents,
    cut_stream,
    permute,
    uniform,
)
from biphase.errors import InputError


class Stream:
    """Shards whose token at offset i is i, so that a batch says where it comes from."""

    folder, split = "shards", "train"

    def __init__(self, lengths: list[int] | np.ndarray) -> None:
        self.document_ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        self.num_tokens = int(self.document_ends[-1]) if len(self.document_ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.uint32)


def random_lengths(seed: int, num: int = 60, longest: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest, num)


def document_batches(
    lengths: Any, batch_tokens: int = 500, *, seed: int = 7, position: int = 0, limits: tuple[int, int] = (12, 64)
) -> Batches:
    stream: Any = Stream(lengths)
    samples = cut_documents(stream.document_ends, *limits)
    return Batches([PackedSet(stream, samples, seed)], batch_tokens.__mul__, data_position=position)


def join_batches(batches: Sequence[PackedBatch]) -> PackedBatch:
    """Batches laid end to end."""
    lengths_S = np.concatenate([batch.lengths_S for batch in batches])
    names = ("tokens_T", "positions_T", "sample_ids_S", "epochs_S")
    joined = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in names}
    return PackedBatch(**joined, bounds_S1=np.cumsum([0, *lengths_S]))


def same(left: PackedBatch, right: PackedBatch) -> bool:
    return all(np.array_equal(getattr(left, key), getattr(right, key)) for key in vars(left))


# Cutting documents


@pytest.mark.parametrize(
    ("length", "pieces"),
    [
        (11, []),
        (12, [12]),
        (2047, [2047]),
        (2048, [2048]),
        (2049, [2037, 12]),
        (2059, [2047, 12]),
        (2060, [2048, 12]),
        (4096, [2048, 2048]),
        (4097, [2048, 2037, 12]),
        (4108, [2048, 2048, 12]),
        (6144, [2048, 2048, 2048]),
    ],
)
def test_long_documents_are_cut(length: int, pieces: list[int]) -> None:
    samples = cut_documents(np.array([100, 100 + length]), 12, 2048)
    starts, stops = samples.spans(np.arange(1, samples.num_samples))
    assert (stops - starts).tolist() == pieces
    assert starts.tolist() == [100 + sum(pieces[:i]) for i in range(len(pieces))]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limits", [(1, 2), (12, 24), (12, 25), (12, 64), (5, 400), (12, 2048)])
def test_every_token_of_a_long_enough_document_is_in_one_sample(seed: int, limits: tuple[int, int]) -> None:
    shortest, longest = limits
    lengths = random_lengths(seed, 200, 5 * longest)
    samples = cut_documents(np.cumsum(lengths), shortest, longest)
    starts, stops = samples.spans(np.arange(samples.num_samples))
    assert (stops - starts).min() >= shortest
    assert (stops - starts).max() <= longest
    covered = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
    long_enough = np.repeat(lengths >= shortest, lengths)
    assert np.array_equal(covered, np.flatnonzero(long_enough))
    assert samples.num_tokens == long_enough.sum()
    assert samples.left_out_tokens == (~long_enough).sum()
    document = np.repeat(np.arange(len(lengths)), lengths)
    assert np.array_equal(document[starts], document[stops - 1]), "a sample holds tokens of two documents"


def test_a_split_without_a_long_enough_document_is_refused() -> None:
    for lengths in ([], [3, 11]):
        with pytest.raises(InputError, match=r"^shards: split 'train' has no document that is long enough.*: lower"):
            document_batches(lengths)


# The paper's packer


def test_stream_packing() -> None:
    samples = cut_stream(2048 * 3000 + 700, 12, 2048, seed=1)
    starts, stops = samples.spans(np.arange(samples.num_samples))
    lengths = stops - starts
    assert starts[0] == 0
    assert np.array_equal(starts[1:], stops[:-1]), "a token is in no sample or in two"
    assert stops[-1] == samples.num_tokens == 2048 * 3000
    assert samples.left_out_tokens == 700
    assert lengths.min() >= 12
    assert lengths.max() <= 2048 - 12
    assert lengths.mean() == 1024
    firsts = lengths[::2]  # uniform on 12..2036: mean 1024, standard deviation 584.6
    assert abs(firsts.mean() - 1024) < 5 * 584.6 / 3000**0.5
    assert firsts.std() == pytest.approx(584.6, rel=0.05)
    assert firsts.min() < 20
    assert firsts.max() > 2028
    other = cut_stream(2048 * 3000, 12, 2048, seed=2)
    assert not np.array_equal(other.spans(np.arange(100)), samples.spans(np.arange(100)))
    assert np.array_equal(samples.spans(np.array([17, 5])), [starts[[17, 5]], stops[[17, 5]]])


def test_stream_batches_hold_every_token_once() -> None:
    stream: Any = Stream([10] * 1000)
    samples = cut_stream(stream.num_tokens, 12, 64, seed=3)
    batches = Batches([PackedSet(stream, samples, seed=3)], (640).__mul__)
    tokens = np.concatenate([batches.batch(step).tokens_T for step in range(9984 // 640 + 1)])
    assert np.array_equal(np.sort(tokens[:9984]), np.arange(9984))


# The order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4096, 65537])
def test_the_order_is_a_permutation(n: int) -> None:
    order = permute(np.arange(n), n, seed=11, epoch=2)
    assert np.array_equal(np.sort(order), np.arange(n))
    places = np.random.default_rng(n).integers(0, n, 50)
    assert np.array_equal(permute(places, n, 11, 2), order[places]), "a place depends on which others are asked"


def test_the_order_is_as_random_as_a_shuffle() -> None:
    n = 20_000
    order = permute(np.arange(n), n, seed=0, epoch=0)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / n**0.5
    assert (order == np.arange(n)).sum() < 10  # Poisson with mean 1
    for seed, epoch in ((0, 1), (1, 0), (-1, 0), (2**70, 3)):
        other = permute(np.arange(n), n, seed, epoch)
        assert (order == other).sum() < 10
        assert abs(np.corrcoef(order, other)[0, 1]) < 5 / n**0.5


def test_random_numbers_are_uniform_and_of_their_arguments_alone() -> None:
    numbers = uniform(3, 1, np.arange(100_000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * (2 * 99) ** 0.5
    assert np.array_equal(uniform(3, 1, np.array([40, 2])), numbers[[40, 2]])
    for other in (uniform(4, 1, np.arange(100_000)), uniform(3, 2, np.arange(100_000))):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 5 / 100_000**0.5


# Batches


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [4096, 5])
def test_every_token_once_per_epoch(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two and a half epochs, however few samples share a prefix sum."""
    monkeypatch.setattr(packing_module, "BLOCK_SAMPLES", block)
    lengths = random_lengths(seed)
    batches = document_batches(lengths, seed=seed)
    total = batches.num_tokens
    made = [batches.batch(step) for step in range(5 * total // 2 // 500 + 1)]
    expected = np.flatnonzero(np.repeat(lengths >= 12, lengths))
    whole = join_batches(made)
    epochs_T = np.repeat(whole.epochs_S, whole.lengths_S)
    for epoch in (0, 1):
        assert np.array_equal(np.sort(whole.tokens_T[epochs_T == epoch]), expected)
    assert not np.array_equal(whole.tokens_T[epochs_T == 0], whole.tokens_T[epochs_T == 1])
    assert (np.diff(whole.epochs_S) >= 0).all()
    for step, batch in enumerate(made):
        ends_at = np.cumsum([len(b.tokens_T) for b in made])[step]
        assert 0 <= ends_at - (step + 1) * 500 < 64, "a batch ends at the first sample that reaches its end"
        assert len(batch.tokens_T) == batch.bounds_S1[-1]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 7])
def test_parts_laid_end_to_end_are_the_batch(num_parts: int) -> None:
    """So the order is the same for any world size and any number of microbatches."""
    batches = document_batches(random_lengths(1))
    for step in (0, 3, 11, 40):
        parts = [batches.batch(step, part, num_parts) for part in range(num_parts)]
        assert same(join_batches(parts), batches.batch(step))


def test_a_part_without_a_sample_is_empty() -> None:
    batches = document_batches([50] * 10, 100, limits=(12, 64))
    for num_parts in (4, 130):  # parts shorter than a sample, and parts of no token at all
        parts = [batches.batch(0, part, num_parts) for part in range(num_parts)]
        assert sum(not len(part.tokens_T) for part in parts) == num_parts - 2
        assert same(join_batches(parts), batches.batch(0))
        assert all(len(part.bounds_S1) == len(part.sample_ids_S) + 1 for part in parts)


def test_a_batch_does_not_depend_on_the_ones_before_it() -> None:
    lengths = random_lengths(2)
    walked = document_batches(lengths)
    in_order = [walked.batch(step) for step in range(30)]
    for step in (29, 0, 13):
        assert same(document_batches(lengths).batch(step), in_order[step])


def test_a_position_shifts_the_order() -> None:
    lengths = random_lengths(3)
    assert same(document_batches(lengths, position=1500).batch(2), document_batches(lengths).batch(5))
    half = document_batches(lengths, 250, position=1500)
    assert same(join_batches([half.batch(0), half.batch(1)]), document_batches(lengths).batch(3))


def test_positions_and_bounds() -> None:
    batch = document_batches(random_lengths(4)).batch(2)
    for first, end in zip(batch.bounds_S1[:-1], batch.bounds_S1[1:], strict=True):
        assert batch.positions_T[first:end].tolist() == list(range(end - first))
        tokens = batch.tokens_T[first:end]
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens))), "a sample is one stretch of text"


def test_another_seed_is_another_order_of_the_same_samples() -> None:
    lengths = random_lengths(5)
    left, right = document_batches(lengths, seed=1).batch(0), document_batches(lengths, seed=2).batch(0)
    assert not np.array_equal(left.sample_ids_S, right.sample_ids_S)
    whole = document_batches(lengths, 10**6, seed=1), document_batches(lengths, 10**6, seed=2)
    ids = [batches.batch(0).sample_ids_S[: batches.num_samples] for batches in whole]
    assert np.array_equal(np.sort(ids[0]), np.sort(ids[1]))
