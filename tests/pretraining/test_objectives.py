"""What is asked of the network: the right targets, masks at the promised rate, the same for any split."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from pydantic import ValidationError
from scipy import stats

from biphase.corpus.packing import PackedBatch
from biphase.curriculum import Phase
from biphase.pretraining.objectives import label_batch

MASK, EOS, PAD = 3, 1, 7
SHARDS: Any = SimpleNamespace(vocab_size=200, mask_id=MASK, special_ids=(EOS, MASK, PAD))
CHANCE = 1e-7
"""Of a right implementation to fail one of the statistical tests."""


def make_batch(lengths: list[int], first_sample: int = 0, epoch: int = 0) -> PackedBatch:
    """Random tokens; each sample ends with end-of-text and holds a few special tokens inside."""
    bounds_S1 = np.concatenate([[0], np.cumsum(lengths)])
    rng = np.random.default_rng(first_sample + len(lengths))
    tokens_T = rng.choice(np.setdiff1d(np.arange(200), SHARDS.special_ids), bounds_S1[-1])
    tokens_T[rng.random(bounds_S1[-1]) < 0.03] = PAD
    tokens_T[rng.random(bounds_S1[-1]) < 0.01] = MASK
    tokens_T[bounds_S1[1:] - 1] = EOS
    return PackedBatch(
        tokens_T=tokens_T,
        positions_T=np.arange(bounds_S1[-1]) - np.repeat(bounds_S1[:-1], lengths),
        bounds_S1=bounds_S1,
        sample_ids_S=np.arange(first_sample, first_sample + len(lengths)),
        epochs_S=np.full(len(lengths), epoch),
    )


def take(batch: PackedBatch, first: int, end: int) -> PackedBatch:
    """Samples `first` to `end` of a batch."""
    part = slice(batch.bounds_S1[first], batch.bounds_S1[end])
    return PackedBatch(
        batch.tokens_T[part],
        batch.positions_T[part],
        batch.bounds_S1[first : end + 1] - batch.bounds_S1[first],
        batch.sample_ids_S[first:end],
        batch.epochs_S[first:end],
    )


def within(count: int, num: int, probability: float) -> bool:
    """Whether a count lies inside the exact binomial bounds."""
    low, high = stats.binom.ppf([CHANCE / 2, 1 - CHANCE / 2], num, probability)
    return bool(low <= count <= high)


def chosen(phase: Phase, batch: PackedBatch, seed: int = 5) -> np.ndarray:
    """Boolean [T]: the tokens that are predicted."""
    _, positions_N, _ = label_batch(phase, batch, SHARDS, seed)
    chosen_T = np.zeros(len(batch.tokens_T), dtype=bool)
    chosen_T[positions_N + (phase.target == "next")] = True
    return chosen_T


@pytest.fixture(scope="module")
def large() -> PackedBatch:
    """1,200 samples of 128 tokens: 147,000 that may be masked."""
    return make_batch([128] * 1200)


def mlm(probability: float = 0.4, **settings: Any) -> Phase:
    return Phase(objective="mlm", steps=1, mask_probability=probability, **settings)


CLM, MNTP, MEAP, CAUSAL_MLM = (Phase(objective=name, steps=1) for name in ("clm", "mntp", "meap", "causal-mlm"))


def test_clm_predicts_each_next_token_of_the_same_sample() -> None:
    batch = make_batch([4, 1, 3, 2])
    inputs_T, positions_N, targets_N = label_batch(CLM, batch, SHARDS, seed=0)
    assert positions_N.tolist() == [0, 1, 2, 5, 6, 8]
    assert np.array_equal(targets_N, batch.tokens_T[[1, 2, 3, 6, 7, 9]])
    assert np.array_equal(inputs_T, batch.tokens_T)
    assert CLM.is_causal


def test_clm_of_one_token_samples_asks_nothing() -> None:
    _, _, targets_N = label_batch(CLM, make_batch([1, 1, 1]), SHARDS, seed=0)
    assert len(targets_N) == 0


@pytest.mark.parametrize("phase", [mlm(), mlm(mask_token_share=0.8, random_token_share=0.1)])
def test_mlm_predicts_in_place(phase: Phase) -> None:
    batch = make_batch([100] * 20)
    before = batch.tokens_T.copy()
    inputs_T, positions_N, targets_N = label_batch(phase, batch, SHARDS, seed=0)
    assert np.array_equal(targets_N, batch.tokens_T[positions_N])
    assert not phase.is_causal
    untouched = np.ones(2000, dtype=bool)
    untouched[positions_N] = False
    assert np.array_equal(inputs_T[untouched], batch.tokens_T[untouched])
    assert np.array_equal(batch.tokens_T, before), "the batch itself was changed"


def test_mlm_shows_the_mask_token_alone() -> None:
    inputs_T, positions_N, _ = label_batch(mlm(), make_batch([100] * 20), SHARDS, seed=0)
    assert (inputs_T[positions_N] == MASK).all()


def test_mntp_predicts_from_the_position_before() -> None:
    batch = make_batch([50] * 40)
    inputs_T, positions_N, targets_N = label_batch(MNTP, batch, SHARDS, seed=0)
    assert np.array_equal(targets_N, batch.tokens_T[positions_N + 1])
    assert (inputs_T[positions_N + 1] == MASK).all()
    assert (batch.positions_T[positions_N + 1] > 0).all(), "a target across samples"
    in_place = chosen(mlm(), batch)
    assert np.array_equal(chosen(MNTP, batch), in_place & (batch.positions_T > 0))


def test_meap_predicts_each_next_token_beside_masks() -> None:
    """The targets of CLM, the masks of MLM, also where a sample begins; single tokens have no target."""
    batch = make_batch([40, 1, 7] * 20)
    inputs_T, positions_N, targets_N = label_batch(MEAP, batch, SHARDS, seed=0)
    expected = label_batch(CLM, batch, SHARDS, seed=0)
    assert np.array_equal(positions_N, expected[1]) and np.array_equal(targets_N, expected[2])
    assert np.array_equal(inputs_T, label_batch(mlm(), batch, SHARDS, seed=0)[0])
    assert (inputs_T[batch.bounds_S1[:-1]] == MASK).any() and (inputs_T != batch.tokens_T).any()


def test_causal_mlm_asks_what_mlm_asks() -> None:
    batch = make_batch([40, 1, 7] * 20)
    for ours, theirs in zip(
        label_batch(CAUSAL_MLM, batch, SHARDS, 0), label_batch(mlm(), batch, SHARDS, 0), strict=True
    ):
        assert np.array_equal(ours, theirs)
    assert CAUSAL_MLM.is_causal and not mlm().is_causal


@pytest.mark.parametrize("probability", [0.2, 0.3, 0.4, 0.5])
def test_mask_rate(probability: float, large: PackedBatch) -> None:
    ordinary = ~np.isin(large.tokens_T, SHARDS.special_ids)
    assert ordinary.sum() > 1e5
    chosen_T = chosen(mlm(probability), large)
    assert within(int(chosen_T.sum()), int(ordinary.sum()), probability)


def test_passes_over_a_text_choose_other_tokens_at_the_same_rate(large: PackedBatch) -> None:
    phase, ordinary = mlm(0.3, mask_passes=3), ~np.isin(large.tokens_T, SHARDS.special_ids)
    passes = [label_batch(phase, large, SHARDS, seed=5, mask_pass=number)[1] for number in range(3)]
    assert np.array_equal(passes[0], np.flatnonzero(chosen(mlm(0.3), large))), "the first is that of a single pass"
    assert len(np.unique(np.concatenate(passes))) == sum(map(len, passes)), "a token is masked twice"
    assert all(within(len(positions), int(ordinary.sum()), 0.3) for positions in passes)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "clm"},
        {"objective": "meap"},
        {"objective": "mlm", "mask_probability": 0.6},
        {"objective": "mlm", "mask_probability": {"from": 0.4, "to": 0.1}},
        {"objective": "mlm", "clm_share": 0.5},
    ],
)
def test_passes_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="mask_passes"):
        Phase(steps=1, mask_passes=2, **settings)


@pytest.mark.parametrize("phase", [mlm(0.99), Phase(objective="mntp", steps=1, mask_probability=0.99)])
def test_special_tokens_are_never_chosen(phase: Phase, large: PackedBatch) -> None:
    special = np.isin(large.tokens_T, SHARDS.special_ids)
    assert special.sum() > 1000
    assert not (chosen(phase, large) & special).any()
    inputs_T, _, _ = label_batch(phase, large, SHARDS, seed=0)
    assert np.array_equal(inputs_T[special], large.tokens_T[special])


def test_masks_are_uniform_and_independent(large: PackedBatch) -> None:
    """Over positions, over token ids, and of the neighbour."""
    ordinary = ~np.isin(large.tokens_T, SHARDS.special_ids)
    chosen_T = chosen(mlm(), large)
    for groups in (large.positions_T, large.tokens_T, large.sample_ids_S.repeat(128)):
        num = np.bincount(groups[ordinary])
        hits = np.bincount(groups[chosen_T], minlength=len(num))
        used = num > 0
        chi2 = ((hits - 0.4 * num)[used] ** 2 / (0.24 * num[used])).sum()
        assert stats.chi2.sf(chi2, used.sum()) > CHANCE
        assert stats.chi2.cdf(chi2, used.sum()) > CHANCE
    both = ordinary[:-1] & ordinary[1:]
    assert within(int((chosen_T[:-1] & chosen_T[1:])[both].sum()), int(both.sum()), 0.16)


def test_masks_differ_by_seed_epoch_and_sample(large: PackedBatch) -> None:
    ordinary = ~np.isin(large.tokens_T, SHARDS.special_ids)
    first = chosen(mlm(), large, seed=5)
    others = {
        "seed": chosen(mlm(), large, seed=6),
        "epoch": chosen(mlm(), replace(large, epochs_S=large.epochs_S + 1)),
        "sample": chosen(mlm(), replace(large, sample_ids_S=large.sample_ids_S + 1)),
    }
    for name, other in others.items():
        assert within(int((first & other)[ordinary].sum()), int(ordinary.sum()), 0.16), name
    assert np.array_equal(first, chosen(mlm(), large, seed=5))


def test_masks_are_the_same_for_any_split() -> None:
    """Whichever process or microbatch a sample falls to, and whatever stands beside it."""
    batch = make_batch([37, 1, 64, 12, 100, 55, 20, 9])
    for phase in (CLM, mlm(), MNTP, MEAP, CAUSAL_MLM, mlm(mask_token_share=0.8, random_token_share=0.1)):
        whole = label_batch(phase, batch, SHARDS, seed=9)
        for cuts in ([0, 3, 8], [0, 1, 2, 5, 6, 8]):
            parts = []
            for first, end in itertools.pairwise(cuts):
                inputs_T, positions_N, targets_N = label_batch(phase, take(batch, first, end), SHARDS, seed=9)
                parts.append((inputs_T, positions_N + batch.bounds_S1[first], targets_N))
            for made, expected in zip(zip(*parts, strict=True), whole, strict=True):
                assert np.array_equal(np.concatenate(made), expected)


@pytest.mark.parametrize(("masked", "random"), [(0.8, 0.1), (0.5, 0.4)])
def test_eighty_ten_ten(masked: float, random: float, large: PackedBatch) -> None:
    phase = mlm(mask_token_share=masked, random_token_share=random)
    inputs_T, positions_N, targets_N = label_batch(phase, large, SHARDS, seed=5)
    shown_N = inputs_T[positions_N]
    num, ordinary = len(shown_N), 200 - len(SHARDS.special_ids)
    assert num > 5e4
    same_by_chance = random / ordinary
    assert within(int((shown_N == MASK).sum()), num, masked)
    assert within(int((shown_N == targets_N).sum()), num, 0.1 + same_by_chance)
    randoms_N = shown_N[(shown_N != MASK) & (shown_N != targets_N)]
    assert not np.isin(randoms_N, SHARDS.special_ids).any()
    counts = np.bincount(randoms_N, minlength=200)[np.setdiff1d(np.arange(200), SHARDS.special_ids)]
    assert stats.chisquare(counts).pvalue > CHANCE
    assert np.array_equal(chosen(phase, large), chosen(mlm(), large))


def test_masks_of_runs_that_exist_stay() -> None:
    """Pinned: which tokens are chosen, and what is shown in their place."""
    batch = replace(make_batch([100] * 20, first_sample=7, epoch=3), tokens_T=np.arange(2000) % 190 + 8)
    inputs_T, positions_N, _ = label_batch(mlm(mask_token_share=0.5, random_token_share=0.4), batch, SHARDS, seed=42)
    both = np.concatenate([positions_N, inputs_T])
    assert xxhash.xxh3_64_hexdigest(both.astype("<i8").tobytes()) == "d3b5837cc044ecea"


def test_only_random_tokens(large: PackedBatch) -> None:
    inputs_T, positions_N, _ = label_batch(mlm(mask_token_share=0.0, random_token_share=1.0), large, SHARDS, seed=5)
    assert not np.isin(inputs_T[positions_N], SHARDS.special_ids).any()


@pytest.mark.parametrize("phase", [mlm(), MNTP, CAUSAL_MLM])
def test_a_batch_of_special_tokens_asks_nothing(phase: Phase) -> None:
    batch = make_batch([5, 3])
    batch.tokens_T[:] = EOS
    inputs_T, positions_N, targets_N = label_batch(phase, batch, SHARDS, seed=0)
    assert len(targets_N) == len(positions_N) == 0
    assert np.array_equal(inputs_T, batch.tokens_T)
