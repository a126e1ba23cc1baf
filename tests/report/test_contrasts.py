"""Contrasts against SciPy and cases worked by hand, their promise in simulation, and the one rule of all verdicts."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from biphase.paper.published import read_reference
from biphase.report.results import AVERAGE, ReportArm, Result, measured
from biphase.report.statistics import Difference, contrast, difference, is_significant, judge_difference

CLM = ReportArm("clm", "objective", "1m", "clm", None, 100, 100, 0)
MLM = ReportArm("mlm", "objective", "1m", "mlm", 40, 100, 0, 100)


def paired(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Scores of the same seeds."""
    return difference(measured(CLM, "SC", "a", "standard", a), measured(MLM, "SC", "a", "standard", b)).against()


def unpaired(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Scores of different seeds."""
    seeds = range(100, 100 + len(b))
    seen = difference(measured(CLM, "SC", "a", "standard", a), measured(MLM, "SC", "a", "standard", b, seeds=seeds))
    assert seen.test == "Welch"
    return seen.against()


def assert_rate(num_hits: int, num_trials: int, rate: float) -> None:
    """The number of hits is one that a coin of this rate gives with 99.9 %."""
    low, high = stats.binom.interval(0.999, num_trials, rate)
    assert low <= num_hits <= high, f"{num_hits} of {num_trials}, not {low:.0f} to {high:.0f}"


def test_paired_t_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, s = 1, t = 2√3 with 2 degrees, whose tail is (1 - t/√(t²+2))/2 = 0.037090."""
    test = paired([3, 5, 7], [2, 3, 4])
    assert test.mean == 2
    assert test.p_value == pytest.approx(1 - math.sqrt(12 / 14))
    assert test.high - test.mean == pytest.approx(4.3026527 / math.sqrt(3))


def test_t_tests_are_scipys() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(0.71, 0.02, 7), rng.normal(0.70, 0.03, 7), rng.normal(0.70, 0.05, 4)
    for ours, theirs in (
        (paired(a, b), stats.ttest_rel(a, b)),
        (unpaired(a, c), stats.ttest_ind(a, c, equal_var=False)),
    ):
        assert ours.p_value == pytest.approx(theirs.pvalue)
        assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval()))


def test_welch_by_hand() -> None:
    """Equal sizes and spreads make it Student's test: means 2 and 4, s = 1, error √(2/3), 4 degrees."""
    test = unpaired([1, 2, 3], [3, 4, 5])
    assert test.mean == -2
    assert test.mean - test.low == pytest.approx(2.7764451 * math.sqrt(2 / 3))


@pytest.mark.parametrize("test", [paired, unpaired])
def test_no_spread_no_verdict(test) -> None:
    """Equal differences say nothing about the next one, also where rounding makes them a little unequal."""
    constant = test([0.3, 0.3, 0.3], [0.1, 0.1, 0.1])
    assert constant.mean == pytest.approx(0.2) and math.isnan(constant.p_value) and math.isnan(constant.low)
    same = test([0.3, 0.3], [0.3, 0.3])
    assert same.mean == 0 and same.p_value == 1 and math.isnan(same.low)
    single = test([0.3], [0.1])
    assert math.isnan(single.p_value) and math.isnan(single.high)


def test_rounding_is_no_spread() -> None:
    """0.3 - 0.2, 0.4 - 0.3 and 0.8 - 0.7 differ in their last digits only."""
    assert len({0.3 - 0.2, 0.4 - 0.3, 0.8 - 0.7}) == 3
    assert math.isnan(paired([0.3, 0.4, 0.8], [0.2, 0.3, 0.7]).p_value)


def test_t_tests_reject_the_truth_as_often_as_promised() -> None:
    rng = np.random.default_rng(1)
    shared, a, b = rng.normal(0, 2, (1500, 5)), rng.normal(0, 1, (1500, 5)), rng.normal(0, 1, (1500, 5))
    by_seed = [paired(x, y) for x, y in zip(shared + a, shared + b, strict=True)]
    assert_rate(sum(test.p_value < 0.05 for test in by_seed), 1500, 0.05)
    assert all((test.p_value < 0.05) == (test.low > 0 or test.high < 0) for test in by_seed)
    welch = [unpaired(rng.normal(0, 1, 12), rng.normal(0, 3, 8)) for _ in range(1500)]
    assert_rate(sum(test.low <= 0 <= test.high for test in welch), 1500, 0.95)


def test_one_seed_has_no_interval() -> None:
    cell = measured(CLM, "SC", "a", "standard", (0.5,))
    assert math.isnan(cell.half_width) and math.isnan(cell.std)
    assert math.isnan(difference(cell, replace(cell, arm=MLM)).against().p_value)


def test_difference_by_seed_is_the_paired_test() -> None:
    a, b = (0.52, 0.55, 0.61, 0.50), (0.50, 0.54, 0.58, 0.51)
    seen = difference(measured(CLM, "SC", "a", "standard", a), measured(MLM, "SC", "a", "standard", b))
    theirs = stats.ttest_rel(a, b)
    assert (seen.test, seen.num) == ("paired t", 4)
    assert seen.against().p_value == pytest.approx(theirs.pvalue)
    interval = theirs.confidence_interval()
    assert (seen.against().low, seen.against().high) == pytest.approx((interval.low, interval.high))
    shifted = stats.ttest_rel(np.array(a) - 0.01, b)
    assert seen.against(0.01).p_value == pytest.approx(shifted.pvalue)
    assert seen.against(0.01).low == pytest.approx(interval.low)


def test_difference_of_published_means_is_welchs() -> None:
    """SC at 610M: 87.00 ± 0.18 against 83.58 ± 0.17."""
    reference = read_reference()
    ours, theirs = (
        reference.select("SC", AVERAGE, setup="objective", size="610M", objective=objective).results[at]
        for objective, at in (("mlm", 2), ("clm", 0))
    )
    seen = difference(ours, theirs)
    std = math.sqrt(5) / 1.96
    expected = stats.ttest_ind_from_stats(87.00, 0.18 * std, 5, 83.58, 0.17 * std, 5, equal_var=False)
    assert seen.test == "Welch"
    assert seen.against().p_value == pytest.approx(expected.pvalue, rel=1e-6)


def test_contrast_of_many_means() -> None:
    """Weights are squared in the variance, and Satterthwaite's degrees follow the parts."""
    cells = [
        Result(replace(CLM, name=name), "SC", "a", "paper", mean, 1.96 * 0.01, (), None, 4)
        for name, mean in (("x", 0.5), ("y", 0.6), ("z", 0.8))
    ]
    seen = contrast(zip((1.0, -2.0, 1.0), cells, strict=True))
    assert seen.estimate == pytest.approx(0.1)
    assert seen.error == pytest.approx(0.01 * math.sqrt(1 + 4 + 1))
    assert seen.degrees == pytest.approx(36 / ((1 + 16 + 1) / 3))


def test_the_same_number_of_other_seeds_is_not_paired() -> None:
    """Each lost another seed: the first scores of both are not of one seed."""
    a = measured(CLM, "SC", "a", "standard", (0.5, 0.6), seeds=(0, 1))
    b = measured(MLM, "SC", "a", "standard", (0.5, 0.6), seeds=(0, 2))
    assert difference(a, b).test == "Welch" and difference(a, replace(b, seeds=(0, 1))).test == "paired t"


def test_one_rule_for_all_verdicts() -> None:
    sides = [judge_difference(0.02, p_value) for p_value in (0.049, 0.05, 1.0, math.nan)]
    assert sides == ["above", "within noise", "within noise", "untested"]
    assert judge_difference(0.02, 0.049, bound=0.03) == "below" == judge_difference(-0.02, 0.0)
    assert not is_significant(math.nan)
