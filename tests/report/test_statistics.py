"""Each statistic against a case worked by hand, a plain twin or SciPy, and its promise in simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.report.statistics import (
    SIGNIFICANCE,
    add_overlapping,
    holm,
    holm_levels,
    is_stability_rate,
    mean_interval,
    rate_spread,
    repetitions,
    spend_error,
)


def assert_rate(num_hits: int, num_trials: int, rate: float) -> None:
    """The number of hits is one that a coin of this rate gives with 99.9 %."""
    low, high = stats.binom.interval(0.999, num_trials, rate)
    assert low <= num_hits <= high, f"{num_hits} of {num_trials}, not {low:.0f} to {high:.0f}"


def test_mean_interval_by_hand() -> None:
    """1..5: mean 3, s² = 10/4, s/√5 = √0.5; t(4) = 2.7764, normal 1.9600."""
    interval = mean_interval([1, 2, 3, 4, 5])
    assert (interval.value, interval.num) == (3, 5)
    assert interval.half_width == pytest.approx(2.7764451 * math.sqrt(0.5)) == interval.value - interval.low
    assert mean_interval([1, 2, 3, 4, 5], "normal").half_width == pytest.approx(1.96 * math.sqrt(0.5), rel=1e-4)


def test_mean_interval_is_the_published_one() -> None:
    """The paper's 610M MLM-40 model on MS MARCO: five seeds, published as 91.65 (0.45)."""
    interval = mean_interval([91.022, 91.536, 91.373, 91.997, 92.330], "normal")
    assert f"{interval.value:.2f} ({interval.half_width:.2f})" == "91.65 (0.45)"


def test_one_value_has_no_interval() -> None:
    one = mean_interval([0.5])
    assert math.isnan(one.half_width) and (one.value, one.num) == (0.5, 1)
    assert math.isnan(mean_interval([0.5], "normal").half_width)
    assert mean_interval([]).num == 0 and math.isnan(mean_interval([]).value)


def test_equal_values_have_no_interval() -> None:
    """Up to rounding: 0.1 + 0.2 is not 0.3."""
    for values in ([0.7, 0.7], [0.1 + 0.2, 0.3, 0.3], [0.0, 0.0]):
        for method in ("t", "normal"):
            interval = mean_interval(values, method)  # type: ignore[arg-type]
            assert math.isnan(interval.half_width) and interval.num == len(values)
    assert mean_interval([0.7, 0.7 + 1e-9]).half_width > 0


def test_repetitions_by_hand() -> None:
    """Means by pretraining seed, also of two, of unequal numbers, wherever their samples stand; else the samples."""
    assert repetitions([1, 2, 3, 6], [8, 7, 8, 7]).tolist() == [4, 2]
    assert repetitions([[1, 10], [2, 20], [6, 60]], [0, 1, 1]).tolist() == [[1, 10], [4, 40]]
    assert repetitions([1, 2, 6], [0, 1, 2]).tolist() == repetitions([2, 6, 1], [1, 2, 0]).tolist() == [1, 2, 6]
    assert repetitions([1, 2], [7, 7]).tolist() == repetitions([1, 2], []).tolist() == [1, 2]


def test_rows_with_the_same_seeds_have_the_spread_of_their_sum() -> None:
    """Also where the seeds stand in another order in the list; a row alone has the variance of its mean."""
    a, b = np.random.default_rng(0).random((2, 4))
    found = add_overlapping([(1.0, a, (0, 1, 2, 3)), (-2.0, b, (3, 3, 1, 2, 0))])
    assert found == pytest.approx((np.var(a - 2 * b, ddof=1) / 4, 3))
    assert add_overlapping([(2.0, a, range(4))]) == pytest.approx((4 * np.var(a, ddof=1) / 4, 3))


def test_overlapping_rows_by_hand() -> None:
    """Deviations (-1, 0, 1)/√6 of seeds 0, 1, 2 and (-1, 1)/√2 of seeds 1, 2. Their covariance matrices are
    [2 -1 -1; -1 2 -1; -1 -1 2]/18 and [1 -1; -1 1]/4: the sum has the trace 5/6 and squares of 17/36."""
    found = add_overlapping([(1.0, np.array([4.0, 5, 6]), (0, 1, 2)), (1.0, np.array([1.0, 3]), (1, 2))])
    sums = np.array([-1 / math.sqrt(6), -1 / math.sqrt(2), 1 / math.sqrt(6) + 1 / math.sqrt(2)])
    assert found == pytest.approx((sums @ sums, 25 / 17))


def test_the_papers_rates_of_stability() -> None:
    """From 1e-5 to 1e-4, both included, also where a computed rate is the next number beyond."""
    rates = [0.9e-5, math.nextafter(1e-5, 0), 5e-5, math.nextafter(1e-4, 1), 1.1e-4]
    assert [is_stability_rate(rate) for rate in rates] == [False, True, True, True, False]


@pytest.mark.parametrize("num", [2, 5, 30])
def test_mean_interval_covers(num: int) -> None:
    rng = np.random.default_rng(num)
    intervals = [mean_interval(values) for values in rng.normal(0.7, 0.02, (2000, num))]
    assert_rate(sum(abs(interval.value - 0.7) <= interval.half_width for interval in intervals), 2000, 0.95)


def test_holm_by_hand() -> None:
    """0.005·4, 0.01·3, 0.03·2, and 0.04·1 raised to the 0.06 before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]).tolist() == [1, 1]
    assert holm([]).tolist() == []


def test_holm_does_not_count_what_was_not_asked() -> None:
    adjusted = holm([0.03, math.nan, 0.01])
    assert adjusted[[0, 2]] == pytest.approx([0.03, 0.02]) and math.isnan(adjusted[1])


def test_the_level_of_a_test_is_what_its_adjusted_p_value_says() -> None:
    """A p-value is below its level if and only if its adjusted value is below 5 %, and a nan does not count. By hand:
    of 0.001, 0.03, 0.04 the first is tested at a third of 5 %; the second, at a half, does not pass, so the third is
    not tested at 5 %."""
    assert holm_levels([0.001, 0.03, 0.04]) == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2])
    assert holm_levels([0.03, 0.001, 0.002])[0] == holm_levels([0.9])[0] == 0.05
    rng = np.random.default_rng(0)
    for num in (1, 2, 6):
        for p_values in rng.beta(0.3, 3, (300, num)):
            assert ((p_values < holm_levels(p_values)) == (holm(p_values) < 0.05)).all()
    assert holm_levels([0.04, math.nan, 0.001, 0.03, 0.03]) == pytest.approx([0.05 / n for n in (3, 5, 4, 3, 3)])


def test_holm_keeps_its_promise() -> None:
    """Of ten true nulls at once, in 5 % of all studies at least one is called false."""
    p_values = np.random.default_rng(0).random((2000, 10))
    assert_rate(sum(bool((holm(row) < 0.05).any()) for row in p_values), 2000, 1 - 0.995**10)


def test_spread_by_hand() -> None:
    """Two rates, two seeds: 1, 2, 3, 4 have s² = 5/3. One diverged: 1, 2, 3 have s² = 1."""
    rng = np.random.default_rng(0)
    spread = rate_spread([[[1, 2], [3, 4]]], rng)
    assert spread.value == pytest.approx(math.sqrt(5 / 3)) and spread.num == 4
    assert rate_spread([np.array([[1, 2], [3, 4]]) + 1e9], rng).value == pytest.approx(math.sqrt(5 / 3))
    spread = rate_spread([[[1, 2], [3, np.nan]]], rng)
    assert spread.value == pytest.approx(1) and spread.num == 3


def test_spread_of_resampled_seeds() -> None:
    """Twin: draw the columns, and take the standard deviation of what is there."""
    scores = np.random.default_rng(0).normal(0.8, 0.05, (4, 5))
    scores[3, 2] = np.nan
    spread = rate_spread([scores], np.random.default_rng(2), num_resamples=800)
    draws = np.random.default_rng(2).integers(0, 5, (800, 5))
    twin = [np.nanstd(scores[:, columns], ddof=1) for columns in draws]
    assert (spread.low, spread.high) == pytest.approx(tuple(np.quantile(twin, [0.025, 0.975])))
    assert spread.value == pytest.approx(np.nanstd(scores, ddof=1))


def test_spread_is_the_mean_over_tasks_whatever_their_number() -> None:
    """Not that of all scores around the means of their tasks, which would lose a degree of freedom a task."""
    tables = np.random.default_rng(0).normal(0.8, 0.05, (12, 3, 5))
    spread = rate_spread([*tables], np.random.default_rng(2), num_resamples=800)
    assert spread.value == pytest.approx(np.mean([np.std(table, ddof=1) for table in tables])) and spread.num == 180
    draws = np.random.default_rng(2).integers(0, 5, (800, 5))
    twin = [np.mean([np.std(table[:, columns], ddof=1) for table in tables]) for columns in draws]
    assert (spread.low, spread.high) == pytest.approx(tuple(np.quantile(twin, [0.025, 0.975])))


def test_spread_needs_seeds() -> None:
    rng = np.random.default_rng(0)
    one_seed = rate_spread([[[0.5], [0.7]]], rng)
    assert one_seed.value == pytest.approx(math.sqrt(0.02)) and math.isnan(one_seed.low)
    assert math.isnan(rate_spread([[[0.5, np.nan], [0.7, np.nan]]], rng).high)
    assert math.isnan(rate_spread([[[0.5, np.nan]]], rng).value)
    assert math.isnan(rate_spread([[[np.nan, np.nan]]], rng).value)


def test_spread_covers_with_many_seeds() -> None:
    rng = np.random.default_rng(6)
    spreads = [rate_spread([rng.normal(0.8, 0.03, (4, 60))], rng, num_resamples=500) for _ in range(400)]
    assert_rate(sum(spread.low <= 0.03 <= spread.high for spread in spreads), 400, 0.95)


@pytest.mark.parametrize(
    ("last", "bounds"), [(2, (2.157, 2.201)), (5, (2.438, 2.427, 2.410, 2.397, 2.386))], ids=["two looks", "five looks"]
)
def test_levels_of_looks_are_the_published_ones(last: int, bounds: tuple[float, ...]) -> None:
    """Normal bounds of two-sided tests at equally spaced looks, by the spending function that is like Pocock's."""
    levels = [spend_error(range(1, num + 1), last) for num in range(1, last + 1)]
    assert stats.norm.isf(np.array(levels) / 2) == pytest.approx(bounds, abs=3e-3)


def test_levels_of_looks_add_up_by_the_multivariate_normal() -> None:
    """Some number within its bound at each of looks at 3, 4, 6 and 8 seeds: 95 %. One look at the end: 5 %."""
    looks = np.array([3, 4, 6, 8])
    bounds = stats.norm.isf(np.array([spend_error(looks[:num].tolist(), 8) for num in (1, 2, 3, 4)]) / 2)
    correlated = np.sqrt(np.minimum.outer(looks, looks) / np.maximum.outer(looks, looks))
    within = stats.multivariate_normal(np.zeros(4), correlated).cdf(bounds, lower_limit=-bounds)
    assert within == pytest.approx(1 - SIGNIFICANCE, abs=1e-3)
    assert spend_error([8], 8) == pytest.approx(SIGNIFICANCE, abs=2e-4) and spend_error([], 0) == SIGNIFICANCE


def test_looks_that_share_the_level_find_few_equals_different() -> None:
    """Student's t after 3 to 8 seeds, of which one finds a difference: 14.5 % at 5 % each, at most 6 % at shared
    levels."""
    scores_TS = np.random.default_rng(0).normal(size=(40_000, 8))
    found = {name: np.zeros(40_000, bool) for name in ("each", "shared")}
    for num in range(3, 9):
        p_T = stats.ttest_1samp(scores_TS[:, :num], 0, axis=1).pvalue
        found["each"] |= p_T < SIGNIFICANCE
        found["shared"] |= p_T < spend_error(range(3, num + 1), 8)
    assert found["each"].mean() == pytest.approx(0.145, abs=0.006) and 0.045 < found["shared"].mean() < 0.06
