"""Each statistic against a case worked by hand, a plain twin or SciPy, and its promise in simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.finetuning.predictions import macro_f1, micro_f1
from biphase.report.statistics import (
    bootstrap_difference,
    bootstrap_statistic,
    holm,
    mean_interval,
    rate_spread,
    resample_sums,
)


def assert_rate(num_hits: int, num_trials: int, rate: float) -> None:
    """The number of hits is one that a coin of this rate gives with 99.9 %."""
    low, high = stats.binom.interval(0.999, num_trials, rate)
    assert low <= num_hits <= high, f"{num_hits} of {num_trials}, not {low:.0f} to {high:.0f}"


def test_mean_interval_by_hand() -> None:
    """1..5: mean 3, s² = 10/4, s/√5 = √0.5; t(4) = 2.7764, normal 1.9600."""
    interval = mean_interval([1, 2, 3, 4, 5])
    assert (interval.mean, interval.num) == (3, 5)
    assert interval.half_width == pytest.approx(2.7764451 * math.sqrt(0.5))
    assert mean_interval([1, 2, 3, 4, 5], "normal").half_width == pytest.approx(1.96 * math.sqrt(0.5), rel=1e-4)


def test_mean_interval_is_the_published_one() -> None:
    """The paper's 610M MLM-40 model on MS MARCO: five seeds, published as 91.65 (0.45)."""
    interval = mean_interval([91.022, 91.536, 91.373, 91.997, 92.330], "normal")
    assert f"{interval.mean:.2f} ({interval.half_width:.2f})" == "91.65 (0.45)"


def test_one_value_has_no_interval() -> None:
    assert math.isnan(mean_interval([0.5]).half_width) and mean_interval([0.5]).mean == 0.5
    assert math.isnan(mean_interval([0.5], "normal").half_width)
    assert mean_interval([]).num == 0 and math.isnan(mean_interval([]).mean)


@pytest.mark.parametrize("num", [2, 5, 30])
def test_mean_interval_covers(num: int) -> None:
    rng = np.random.default_rng(num)
    intervals = [mean_interval(values) for values in rng.normal(0.7, 0.02, (2000, num))]
    assert_rate(sum(abs(interval.mean - 0.7) <= interval.half_width for interval in intervals), 2000, 0.95)


def test_resampling_is_drawing_rows() -> None:
    rows = np.random.default_rng(0).normal(size=(37, 2))
    drawn = np.random.default_rng(5).integers(0, 37, (200, 37))
    fast = resample_sums(rows, np.random.default_rng(5), 200)
    assert fast == pytest.approx(rows[drawn].sum(axis=1))


def test_resampling_in_parts_keeps_number_and_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred numbers at a time: three resamples of thirty rows, the last part being of one."""
    monkeypatch.setattr("biphase.report.statistics.BLOCK_CELLS", 100)
    sums = resample_sums(np.arange(30.0)[:, None], np.random.default_rng(0), 1000)[:, 0]
    assert len(sums) == 1000 and len(set(sums.tolist())) > 150
    assert sums.mean() == pytest.approx(30 * 14.5, abs=4 * math.sqrt(30 * 74.9 / 1000))
    more_than_a_part = resample_sums(np.ones((150, 1)), np.random.default_rng(0), 2)
    assert more_than_a_part.tolist() == [[150], [150]]


def test_bootstrap_by_hand() -> None:
    """Two examples, differences 0 and 1: a resample's mean is 0, ½, ½ or 1 with ¼ each, so p = 2·¼ and [0, 1]."""
    test = bootstrap_difference([1, 1], [1, 0], np.random.default_rng(0), num_resamples=4000)
    assert (test.mean, test.low, test.high) == (0.5, 0, 1)
    assert_rate(round(test.p_value / 2 * 4001) - 1, 4000, 0.25)


def test_bootstrap_without_a_difference_and_without_doubt() -> None:
    rng = np.random.default_rng(0)
    assert bootstrap_difference([1, 0, 1], [1, 0, 1], rng).p_value == 1
    sure = bootstrap_difference(np.ones(50), np.zeros(50), rng, num_resamples=999)
    assert sure.p_value == 2 / 1000 and (sure.low, sure.high) == (1, 1)
    assert math.isnan(bootstrap_difference([1], [0], rng).p_value)


def test_bootstrap_is_near_the_closed_form() -> None:
    """For many examples: the normal interval of the mean difference, and p of SciPy's sign-flip test."""
    rng = np.random.default_rng(2)
    a, b = rng.random(3000) < 0.72, rng.random(3000) < 0.70
    test = bootstrap_difference(a, b, rng)
    error = (a.astype(float) - b).std(ddof=1) / math.sqrt(3000)
    assert test.high - test.low == pytest.approx(2 * 1.96 * error, rel=0.04)
    assert test.p_value == pytest.approx(2 * stats.norm.sf(abs(test.mean) / error), abs=0.02)
    differences = a.astype(float) - b
    far = {"permutation_type": "samples", "alternative": "greater", "n_resamples": 2000, "rng": rng}
    flipped = stats.permutation_test((differences,), lambda x, axis: np.abs(np.mean(x, axis)), vectorized=True, **far)
    assert test.p_value == pytest.approx(flipped.pvalue, abs=0.04)


def test_bootstrap_repeats_under_its_generator() -> None:
    a, b = np.random.default_rng(0).random((2, 40))
    first, again, other = (bootstrap_difference(a, b, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert first == again != other


def test_bootstrap_covers() -> None:
    rng = np.random.default_rng(4)
    tests = [bootstrap_difference(*rng.normal(0, 1, (2, 150)), rng, num_resamples=600) for _ in range(500)]
    assert_rate(sum(test.low <= 0 <= test.high for test in tests), 500, 0.95)
    assert_rate(sum(test.p_value < 0.05 for test in tests), 500, 0.05)


def test_micro_f1_by_hand() -> None:
    """Two of three predicted entities are right, four are in gold: F1 = 2·2/(3+4). None anywhere: 0."""
    assert micro_f1(np.array([[2, 3, 4], [0, 0, 0]])).tolist() == [4 / 7, 0]


def test_macro_f1_is_that_of_scikit_learn() -> None:
    """Of each resample; a label that is nowhere does not count."""
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(0)
    for num_labels in (2, 3, 6):
        gold, predicted = rng.integers(0, num_labels, (2, 5))
        onehot = np.eye(num_labels, dtype=int)
        counts = np.concatenate([onehot[gold] * onehot[predicted], onehot[gold] + onehot[predicted]], axis=1)
        theirs = f1_score(gold, predicted, average="macro")
        assert macro_f1(counts.sum(axis=0)) == pytest.approx(theirs)
        assert macro_f1(np.stack([counts.sum(axis=0)] * 2)[None]).shape == (1, 2)


def test_bootstrap_of_counts_is_that_of_sentences() -> None:
    """Twin: draw the sentences, add up their counts, take F1 of each seed."""
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 4, 60)
    a, b = ((gold[:, None] * rng.random((60, seeds)) + 0.5).astype(int) for seeds in (3, 2))
    counts_a, counts_b = (np.stack([x, x + 1, np.repeat(gold[:, None], x.shape[1], 1)], -1) for x in (a, b))
    test = bootstrap_statistic(counts_a, counts_b, micro_f1, np.random.default_rng(9), num_resamples=500)

    def f1(counts: np.ndarray, rows: np.ndarray) -> float:
        sums = [counts[rows, seed].sum(axis=0) for seed in range(counts.shape[1])]
        return float(np.mean([2 * found / (predicted + gold) for found, predicted, gold in sums]))

    draws = np.random.default_rng(9).integers(0, 60, (500, 60))
    twin = [f1(counts_a, rows) - f1(counts_b, rows) for rows in draws]
    assert test.mean == pytest.approx(f1(counts_a, np.arange(60)) - f1(counts_b, np.arange(60)))
    assert (test.low, test.high) == pytest.approx(tuple(np.quantile(twin, [0.025, 0.975])))


def test_bootstrap_of_counts_equals_that_of_means_for_a_mean() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 80))
    of_counts = bootstrap_statistic(
        a[:, None, None], b[:, None, None], lambda sums: sums[..., 0] / 80, np.random.default_rng(1), 400
    )
    of_means = bootstrap_difference(a, b, np.random.default_rng(1), 400)
    assert (of_counts.low, of_counts.high) == pytest.approx((of_means.low, of_means.high))


def test_holm_by_hand() -> None:
    """0.005·4, 0.01·3, 0.03·2, and 0.04·1 raised to the 0.06 before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]).tolist() == [1, 1]
    assert holm([]).tolist() == []


def test_holm_does_not_count_what_was_not_asked() -> None:
    adjusted = holm([0.03, math.nan, 0.01])
    assert adjusted[[0, 2]] == pytest.approx([0.03, 0.02]) and math.isnan(adjusted[1])


def test_holm_keeps_its_promise() -> None:
    """Of ten true nulls at once, in 5 % of all studies at least one is called false."""
    p_values = np.random.default_rng(0).random((2000, 10))
    assert_rate(sum(bool((holm(row) < 0.05).any()) for row in p_values), 2000, 1 - 0.995**10)


def test_spread_by_hand() -> None:
    """Two rates, two seeds: 1, 2, 3, 4 have s² = 5/3. One diverged: 1, 2, 3 have s² = 1."""
    rng = np.random.default_rng(0)
    spread = rate_spread([[1, 2], [3, 4]], rng)
    assert spread.std == pytest.approx(math.sqrt(5 / 3)) and (spread.num, spread.num_left_out) == (4, 0)
    spread = rate_spread([[1, 2], [3, np.nan]], rng)
    assert spread.std == pytest.approx(1) and (spread.num, spread.num_left_out) == (3, 1)


def test_spread_of_resampled_seeds() -> None:
    """Twin: draw the columns, and take the standard deviation of what is there."""
    scores = np.random.default_rng(0).normal(0.8, 0.05, (4, 5))
    scores[3, 2] = np.nan
    spread = rate_spread(scores, np.random.default_rng(2), num_resamples=800)
    draws = np.random.default_rng(2).integers(0, 5, (800, 5))
    twin = [np.nanstd(scores[:, columns], ddof=1) for columns in draws]
    assert (spread.low, spread.high) == pytest.approx(tuple(np.quantile(twin, [0.025, 0.975])))
    assert spread.std == pytest.approx(np.nanstd(scores, ddof=1))


def test_spread_needs_seeds() -> None:
    rng = np.random.default_rng(0)
    one_seed = rate_spread([[0.5], [0.7]], rng)
    assert one_seed.std == pytest.approx(math.sqrt(0.02)) and math.isnan(one_seed.low)
    assert math.isnan(rate_spread([[0.5, np.nan], [0.7, np.nan]], rng).high)
    assert math.isnan(rate_spread([[0.5, np.nan]], rng).std)


def test_spread_covers_with_many_seeds() -> None:
    rng = np.random.default_rng(6)
    spreads = [rate_spread(rng.normal(0.8, 0.03, (4, 60)), rng, num_resamples=500) for _ in range(400)]
    assert_rate(sum(spread.low <= 0.03 <= spread.high for spread in spreads), 400, 0.95)
