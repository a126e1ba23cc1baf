"""Contrasts against SciPy and cases worked by hand, their promise in simulation, and the one rule of all verdicts."""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from biphase.finetuning.scores import ExampleTable, KeptExamples
from biphase.report.contrasts import (
    Contrast,
    average,
    contrast,
    difference,
    judge_difference,
    mix_degrees,
    seed_interval,
    tell_carriers,
    with_averages,
)
from biphase.report.paper import read_reference
from biphase.report.results import AVERAGE, ReportArm, Result, ResultSet, with_cohorts
from biphase.report.statistics import Interval, interaction, is_significant

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from calibrate_verdicts import MIXES, KnownChoice, World, share_called_different

CLM = ReportArm("clm", "objective", "1m", "clm", None, 100, 100, 0)
MLM = ReportArm("mlm", "objective", "1m", "mlm", 40, 100, 0, 100)


def published(arm: ReportArm, mean: float, half_width: float, num: int = 5) -> Result:
    """A score of which the mean ± is known."""
    return Result(arm, "SC", "a", "paper", summary=Interval(mean, mean - half_width, mean + half_width, num=num))


def paired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Scores of the same seeds."""
    return difference(
        Result(CLM, "SC", "a", "standard", tuple(a)), Result(MLM, "SC", "a", "standard", tuple(b))
    ).against()


def unpaired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Scores of different seeds."""
    seeds = range(100, 100 + len(b))
    seen = difference(
        Result(CLM, "SC", "a", "standard", tuple(a)), Result(MLM, "SC", "a", "standard", tuple(b), seeds=seeds)
    )
    assert seen.test == "Welch"
    return seen.against()


def assert_rate(num_hits: int, num_trials: int, rate: float) -> None:
    """The number of hits is one that a coin of this rate gives with 99.9 %."""
    low, high = stats.binom.interval(0.999, num_trials, rate)
    assert low <= num_hits <= high, f"{num_hits} of {num_trials}, not {low:.0f} to {high:.0f}"


def test_paired_t_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, s = 1, t = 2√3 with 2 degrees, whose tail is (1 - t/√(t²+2))/2 = 0.037090."""
    test = paired([3, 5, 7], [2, 3, 4])
    assert test.value == 2
    assert test.p_value == pytest.approx(1 - math.sqrt(12 / 14))
    assert test.half_width == pytest.approx(4.3026527 / math.sqrt(3))


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
    assert test.value == -2
    assert test.value - test.low == pytest.approx(2.7764451 * math.sqrt(2 / 3))


@pytest.mark.parametrize("test", [paired, unpaired])
def test_no_spread_no_verdict(test) -> None:
    """Equal differences say nothing about the next one, also where rounding makes them a little unequal."""
    constant = test([0.3, 0.3, 0.3], [0.1, 0.1, 0.1])
    assert constant.value == pytest.approx(0.2) and math.isnan(constant.p_value) and math.isnan(constant.low)
    same = test([0.3, 0.3], [0.3, 0.3])
    assert same.value == 0 and same.p_value == 1 and math.isnan(same.low)
    single = test([0.3], [0.1])
    assert math.isnan(single.p_value) and math.isnan(single.high)


def test_rounding_is_no_spread() -> None:
    """0.3 - 0.2, 0.4 - 0.3 and 0.8 - 0.7 differ in their last digits only."""
    assert len({0.3 - 0.2, 0.4 - 0.3, 0.8 - 0.7}) == 3
    assert math.isnan(paired([0.3, 0.4, 0.8], [0.2, 0.3, 0.7]).p_value)
    assert math.isnan(paired([-0.3, -0.4, -0.8], [-0.2, -0.3, -0.7]).p_value)


def test_t_tests_reject_the_truth_as_often_as_promised() -> None:
    rng = np.random.default_rng(1)
    shared, a, b = rng.normal(0, 2, (1500, 5)), rng.normal(0, 1, (1500, 5)), rng.normal(0, 1, (1500, 5))
    by_seed = [paired(x, y) for x, y in zip(shared + a, shared + b, strict=True)]
    assert_rate(sum(test.p_value < 0.05 for test in by_seed), 1500, 0.05)
    assert all((test.p_value < 0.05) == (test.low > 0 or test.high < 0) for test in by_seed)
    welch = [unpaired(rng.normal(0, 1, 12), rng.normal(0, 3, 8)) for _ in range(1500)]
    assert_rate(sum(test.low <= 0 <= test.high for test in welch), 1500, 0.95)


def test_one_seed_has_no_interval() -> None:
    cell = Result(CLM, "SC", "a", "standard", (0.5,))
    assert math.isnan(cell.interval.half_width) and math.isnan(cell.std)
    assert math.isnan(difference(cell, replace(cell, arm=MLM)).against().p_value)


def test_difference_by_seed_is_the_paired_test() -> None:
    a, b = (0.52, 0.55, 0.61, 0.50), (0.50, 0.54, 0.58, 0.51)
    seen = difference(Result(CLM, "SC", "a", "standard", tuple(a)), Result(MLM, "SC", "a", "standard", tuple(b)))
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
        published(replace(CLM, name=name), mean, 1.96 * 0.01, 4) for name, mean in (("x", 0.5), ("y", 0.6), ("z", 0.8))
    ]
    seen = contrast(zip((1.0, -2.0, 1.0), cells, strict=True))
    assert seen.estimate == pytest.approx(0.1)
    assert seen.error == pytest.approx(0.01 * math.sqrt(1 + 4 + 1))
    assert seen.degrees == pytest.approx(36 / ((1 + 16 + 1) / 3)) and seen.num == 4
    assert difference(cells[0], published(MLM, 0.5, 0.01, 9)).num == 4


def test_the_same_number_of_other_seeds_is_not_paired() -> None:
    """Each lost another seed: the first scores of both are not of one seed."""
    a = Result(CLM, "SC", "a", "standard", (0.5, 0.6), seeds=(0, 1), pretraining_seeds=(0, 0))
    b = Result(MLM, "SC", "a", "standard", (0.5, 0.6), seeds=(0, 2), pretraining_seeds=(0, 0))
    assert difference(a, b).test == "Welch" and difference(a, replace(b, seeds=(0, 1))).test == "paired t"
    # Where there are several pretraining seeds, they are what pairs.
    repeated = replace(a, pretraining_seeds=(0, 1))
    assert difference(a, replace(b, pretraining_seeds=(0, 1))).test == "Welch"
    assert difference(repeated, replace(b, pretraining_seeds=(0, 1))).test == "paired t"
    assert difference(repeated, replace(a, pretraining_seeds=(2, 3))).test == "Welch"


def test_a_missing_run_does_not_make_a_mean_over_tasks_sure() -> None:
    """Each task lacks another of five pretraining seeds, whose effect is in all tasks: without the covariance between
    tasks, a third of equal models are called different. Seeds of two arms that differ stay apart."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        means = []
        for arm in (CLM, MLM):
            scores_DR = 0.7 + rng.normal(0, 0.01, 5) + rng.normal(0, 0.003, (5, 5))
            seeds = [tuple(np.delete(range(5), lost).tolist()) for lost in range(5)]
            cells = [
                Result(arm, "SC", f"{lost}", "standard", tuple(scores_DR[lost, own]), None, own, own)
                for lost, own in enumerate(map(list, seeds))
            ]
            means.append(average(cells))
        seen = difference(*means)
        hits += seen.side != "within noise"
    assert hits <= stats.binom.isf(1e-3, 200, 0.06)
    assert (seen.num, seen.num_pretrainings) == (4, 4) and seen.degrees == pytest.approx(4)
    shown = means[0].interval
    assert shown.half_width == pytest.approx(seed_interval([(1.0, means[0])]).half_width)
    first, other = means[0].cells[:2]
    apart = difference(first, replace(other, arm=MLM))
    welch = stats.ttest_ind(first.samples, other.samples, equal_var=False)
    assert apart.against().p_value == pytest.approx(welch.pvalue)


@pytest.mark.parametrize(("num", "limit"), [(2, 3), (3, 6)])
def test_many_seeds_do_not_make_up_for_few(num: int, limit: int) -> None:
    """Welch's test calls equally good models with ten and two seeds different in 10 % of cases at 5 %, as two seeds may
    fall together by chance. The many count for no more than twice the degrees of the few."""
    rng = np.random.default_rng(3)
    hits, degrees = 0, []
    for _ in range(1500):
        many, few = (rng.normal(0.7, 0.02, size) for size in (10, num))
        a = Result(CLM, "SC", "a", "standard", many.tolist())
        seen = difference(a, Result(MLM, "SC", "a", "standard", few.tolist(), seeds=range(90, 90 + num)))
        hits, degrees = hits + is_significant(seen.against().p_value), [*degrees, seen.degrees]
    assert hits <= stats.binom.isf(1e-3, 1500, 0.06)
    assert max(degrees) == limit


def test_one_rule_for_all_verdicts() -> None:
    sides = [judge_difference(0.02, p_value) for p_value in (0.049, 0.05, 1.0, math.nan)]
    assert sides == ["above", "within noise", "within noise", "untested"]
    assert judge_difference(-0.02, 0.0) == "below"
    assert not is_significant(math.nan)


# Test examples beside seeds


def with_examples(arm: ReportArm, values_SN: np.ndarray, **seeds: Any) -> Result:
    """Scores that are the means of these contributions."""
    examples = KeptExamples((), ExampleTable("examples", values_SN))
    return Result(arm, "SC", "a", "standard", values_SN.mean(axis=1).tolist(), examples=examples, **seeds)


def test_examples_and_seeds_by_hand() -> None:
    """The differences are 0 and 2 in one seed, 4 and 2 in the other. Seeds: means 1 and 3, s²/2 = 1. Examples: means 2
    and 2, no spread. What is left: ±1 everywhere, mean square 4, 4/4 = 1. So 1 + 0 - 1, but never below the 1."""
    seen = difference(with_examples(CLM, np.array([[0.0, 2], [4, 2]])), with_examples(MLM, np.zeros((2, 2))))
    assert (seen.estimate, seen.example_variance) == (2, 0)
    assert (seen.error, seen.degrees) == (1, 1)
    assert seen.noise == ("fine-tuning seeds", "test examples") and seen.num_examples == 2


def test_interaction_is_that_of_a_two_way_analysis_of_variance() -> None:
    """The residuals of a table, row and column means taken away, have (R - 1)(N - 1) degrees of freedom."""
    whole = np.random.default_rng(0).random((3, 7)) + np.array([[5], [6], [9]])
    for table, degrees in ((whole, 12), (whole[:2], 6), (whole[:, :2], 2)):
        left = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
        assert interaction(table) == pytest.approx((left**2).sum() / degrees)
    assert interaction(whole[:1]) == 0


def test_the_choice_of_rates_by_hand() -> None:
    """Two scores of a sum, with twice the weight of one: 4 · 0.3 and 1 · 0.2 beside the seeds' part. A score that was
    pretrained several times has it in its spread; where it is not known of one score, none counts."""
    rng = np.random.default_rng(0)
    choices: list[Any] = [KnownChoice(0.3, 50, 49), KnownChoice(0.2, 80, 79)]
    a, b = (
        Result(arm, "SC", "a", "standard", rng.random(4).tolist(), choice=choice)
        for arm, choice in zip((CLM, MLM), choices, strict=True)
    )
    seen, given = (contrast([(1, a), (1, one), (-1, b)]) for one in (a, replace(a, choice=None)))
    assert seen.choice_variance == pytest.approx(1.4) and seen.choice_degrees == 49
    assert seen.error**2 == pytest.approx(given.error**2 + 1.4)
    assert given.choice_variance == 0 and given.noise == ("fine-tuning seeds",)
    assert seen.noise == ("fine-tuning seeds", "the choice of rates") and given.degrees == 3
    assert seen.degrees == pytest.approx(mix_degrees((given.error**2, 3), (0, 0), (seen.choice_variance, 49)))
    one_rate: Any = KnownChoice(0.0, 0, 3)
    assert contrast([(1, a), (-1, replace(b, choice=one_rate))]).choice_degrees == 49
    several = Result(CLM, "SC", "a", "standard", (0.1, 0.2, 0.4), pretraining_seeds=(0, 1, 2))
    assert difference(several, b).choice_variance == pytest.approx(0.2)
    for num_rates, share in ((3, 0.5), (4, 1.0)):  # single seeds of several pretrainings that choose for each other
        shared: Any = KnownChoice(0.2, 80, 79, num_rates)
        pair = replace(several, choice=shared), replace(several, choice=shared, dataset="b")
        assert difference(*pair).choice_variance == pytest.approx(2 * share * 0.2)
    average = with_averages(ResultSet([a, replace(a, dataset="b")])).scores[CLM.name]["SC"]
    assert contrast([(1, average)]).choice_variance == pytest.approx(0.15)


@pytest.mark.slow
@pytest.mark.minutes
def test_chosen_rates_are_rarely_called_different() -> None:
    """50 examples choose among rates that lie apart: without the choice, in 12 % and more."""
    world = World(300, 0.4, 0.7, 3, redrawn=0.15, num_validation=50, rates=(-9.0, -7.0, -5.0, -8.0))
    found = share_called_different(world, trials=300)
    assert 300 * found["both"] <= stats.binom.isf(1e-3, 300, 0.06) and found["rates_as_given"] > found["both"]


def in_a_study(scores_ARD: np.ndarray) -> Any:
    """Results of arms with the same seeds, by arm, then by dataset, as a study has them."""
    arms = [replace(CLM, name=f"arm {number}") for number in range(len(scores_ARD))]
    cells = [
        Result(arm, "SC", dataset, "standard", tuple(scores_RD[:, number]))
        for arm, scores_RD in zip(arms, scores_ARD, strict=True)
        for number, dataset in enumerate("ab"[: scores_ARD.shape[2]])
    ]
    known = with_cohorts(cells)
    return [known[first : first + scores_ARD.shape[2]] for first in range(0, len(known), scores_ARD.shape[2])]


def test_other_arms_lend_degrees_of_freedom_by_hand() -> None:
    """Three seeds of five arms: the residuals of a two-way analysis of variance have 4 · 2 degrees of freedom, of which
    three are lent."""
    scores_ARD = np.random.default_rng(3).normal(0.7, 0.02, (5, 3, 1))
    first, second, *_ = (cells[0] for cells in in_a_study(scores_ARD))
    seen, alone = difference(first, second), difference(replace(first, cohort={}), replace(second, cohort={}))
    residuals_AR = scores_ARD[..., 0] - scores_ARD[..., 0].mean(axis=1, keepdims=True)
    residuals_AR = residuals_AR - residuals_AR.mean(axis=0)
    pooled = 2 * (residuals_AR**2).sum() / (4 * 2)
    own = np.var(scores_ARD[0, :, 0] - scores_ARD[1, :, 0], ddof=1)
    gaps = [[np.var(scores_ARD[a] - scores_ARD[c], ddof=1) for c in range(5) if c != a] for a in (0, 1)]
    drawn = max(own, (2 * own + 3 * 1.5 * max(pooled, *np.mean(gaps, axis=1))) / 5)
    assert (seen.estimate, seen.degrees, seen.lent) == (alone.estimate, 5, 3) and alone.degrees == 2
    assert seen.error**2 == pytest.approx(drawn / 3) and alone.error**2 == pytest.approx(own / 3)


def test_averages_and_differences_of_differences_borrow_too() -> None:
    """Each arm's mean over two datasets is one score by seed; four arms, two of them subtracted."""
    scores_ARD = np.random.default_rng(4).normal(0.7, 0.02, (6, 4, 2))
    cells = in_a_study(scores_ARD)
    means = [Result(of_arm[0].arm, "SC", AVERAGE, "standard", cells=tuple(of_arm)) for of_arm in cells]
    means = [
        replace(mean, samples=tuple(scores_RD.mean(axis=1))) for mean, scores_RD in zip(means, scores_ARD, strict=True)
    ]
    seen = contrast([(1, means[0]), (-1, means[1]), (-1, means[2]), (1, means[3])])
    mean_AR = scores_ARD.mean(axis=2)
    own = np.var(mean_AR[0] - mean_AR[1] - mean_AR[2] + mean_AR[3], ddof=1)
    gaps = [[np.var(mean_AR[a] - mean_AR[c], ddof=1) for c in range(6) if c != a] for a in range(4)]
    drawn = (3 * own + 3 * 1.5 * 4 / 2 * max(2 * interaction(mean_AR), *np.mean(gaps, axis=1))) / 6
    assert seen.lent == 3 and seen.error**2 == pytest.approx(max(own, drawn) / 4)


@pytest.mark.parametrize(("first", "second"), [((0.85, 0.86), (0.8, 0.81)), ((0.85, 0.875), (0.8, 0.825))])
def test_two_equal_differences_borrow_whether_rounding_makes_them_unequal_or_not(
    first: tuple[float, ...], second: tuple[float, ...]
) -> None:
    """The own variance is 0, or of the size of rounding: both are drawn to the lent one. Alone, they say nothing."""
    others = np.random.default_rng(0).normal(0.7, 0.02, (4, 2))
    cells = [of_arm[0] for of_arm in in_a_study(np.array([first, second, *others])[..., None])]
    seen = difference(*cells[:2])
    assert (seen.degrees, seen.lent, seen.side) == (4, 3, "above")
    alone = difference(*(replace(cell, cohort={}) for cell in cells[:2]))
    assert alone.side == "untested" and alone.estimate == seen.estimate


@pytest.mark.parametrize("what", ["one score", "two arms", "other seeds", "unlike weights"])
def test_who_cannot_borrow_keeps_its_own_spread(what: str) -> None:
    scores_ARD = np.random.default_rng(5).normal(0.7, 0.02, (2 if what == "two arms" else 4, 3, 2))
    cells = in_a_study(scores_ARD)
    other = replace(cells[1][0], seeds=(7, 8, 9)) if what == "other seeds" else cells[1][0]
    terms = [(1.0, cells[0][0]), (-1.0, other)]
    terms = terms[:1] if what == "one score" else terms
    terms += [(0.5, cells[0][1]), (0.5, cells[1][1])] if what == "unlike weights" else []
    alone = contrast([(weight, replace(cell, cohort={})) for weight, cell in terms])
    assert repr(contrast(terms)) == repr(alone) and alone.lent == 0  # nan is nan there


@pytest.mark.parametrize("world", ["equal scores", "random weights"])
def test_arms_that_the_cohort_leaves_out_keep_their_own_spread(world: str) -> None:
    """Equal scores on a dataset, another one for each arm; or random weights of two sizes beside trained arms."""
    scores_ARD = np.random.default_rng(8).normal(0.7, 0.02, (5, 2, 2))
    if world == "equal scores":
        scores_ARD[0, :, 0], scores_ARD[1, :, 1] = 0.7, 0.8
    names = ["3m-random", "1m-random", "a", "b", "c"]
    objectives = ["none" if "random" in name and world == "random weights" else "clm" for name in names]
    arms = [replace(CLM, name=name, objective=kind) for name, kind in zip(names, objectives, strict=True)]
    cells = [
        Result(arm, "SC", dataset, "standard", tuple(scores_RD[:, number]), pretraining_seeds=(0, 1))
        for arm, scores_RD in zip(arms, scores_ARD, strict=True)
        for number, dataset in enumerate("ab")
    ]
    first, second, *_ = (known := with_averages(ResultSet(with_cohorts(cells))).scores)
    seen = difference(known[first]["SC"], known[second]["SC"])
    own = np.var((scores_ARD[0] - scores_ARD[1]).mean(axis=1), ddof=1)
    assert seen.error**2 == pytest.approx(own / 2) and (seen.degrees, seen.lent) == (1, 0)


def test_every_pair_of_a_study_in_the_papers_form_has_a_contrast() -> None:
    """12 tasks of 200 examples, two pretrainings, 8 arms: some arms have equal scores on a task, by chance."""
    rng, num_left_out = np.random.default_rng(9), 0
    arms = [replace(CLM, name=f"arm {number}") for number in range(8)]
    for _ in range(10):
        cells = []
        for task, arm in itertools.product("abcdefghijkl", arms):
            values_SN = (rng.random((2, 200)) < 0.7).astype(np.float64)
            examples = KeptExamples((), ExampleTable(task, values_SN))
            seeds = {"seeds": (0, 0), "pretraining_seeds": (0, 1), "examples": examples}
            cells.append(Result(arm, "SC", task, "standard", values_SN.mean(axis=1).tolist(), **seeds))
        known = with_averages(ResultSet(with_cohorts(cells))).scores
        varied = set.intersection(*({*cell.cohort} for of_arm in known.values() for cell in of_arm["SC"].cells))
        for a, b in itertools.combinations(arms, 2):
            seen = difference(known[a.name]["SC"], known[b.name]["SC"])
            is_whole = {a.name, b.name} <= varied and len(varied) > 2
            assert (seen.lent > 0) == is_whole and seen.error > 0
            num_left_out += not is_whole
    assert num_left_out > 100


def test_arms_of_one_trunk_say_little_of_another() -> None:
    """Five arms share nine tenths of their noise over three seeds, one has its own: equal ones are rarely called
    different."""
    rng, hits = np.random.default_rng(6), 0
    for _ in range(400):
        scores_AR = np.sqrt(0.1) * rng.normal(0, 1, (6, 3)) + np.sqrt(0.9) * rng.normal(0, 1, 3)
        scores_AR[0] = rng.normal(0, 1, 3)
        first, second, *_ = (cells[0] for cells in in_a_study(scores_AR[..., None]))
        hits += is_significant(difference(first, second).against().p_value)
    assert hits <= stats.binom.isf(1e-3, 400, 0.06)


def test_random_weights_lend_nothing() -> None:
    """Their scores hardly vary."""
    drawn = replace(CLM, name="random", objective="none")
    results = [Result(arm, "SC", "a", "standard", (0.5, 0.6)) for arm in (CLM, MLM, drawn)]
    assert [*with_cohorts(results)[2].cohort] == ["clm", "mlm"]


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("noisy", [False, True])
def test_arms_that_borrow_are_rarely_called_different(noisy: bool) -> None:
    """Six arms, three pretrainings: at most 6 % also where one of the two is twice as noisy; more is found."""
    world = World(1_000, 0.3, 0.7, 1, num_pretrainings=3, pretraining_noise=0.5, redrawn=0.1, num_arms=6)
    world = replace(world, other_noise=1.4) if noisy else world
    found = share_called_different(world, trials=400)
    assert 400 * found["both"] <= stats.binom.isf(1e-3, 400, 0.06)
    better = share_called_different(replace(world, gap=4.0), trials=150)
    assert better["both"] > better["arms_alone"] + 0.05


def test_arms_that_are_noisier_than_their_lenders_are_named() -> None:
    """Two of six arms, six times as noisy as the others, over three seeds: nearly always; alike: in at most 5 %."""
    rng, num_named = np.random.default_rng(11), {1.0: 0, 6.0: 0}
    for times, _ in itertools.product(num_named, range(200)):
        scores_AR = 0.7 + 0.01 * rng.normal(0, [[times], [times], [1], [1], [1], [1]], (6, 3))
        first, second, *_ = (cells[0] for cells in in_a_study(scores_AR[..., None]))
        seen = difference(first, second)
        num_named[times] += seen.is_noisy
        assert ("noisier than the others" in seen.tell_seeds()) == seen.is_noisy
        assert not difference(*(replace(cell, cohort={}) for cell in (first, second))).is_noisy  # nothing is lent
    assert num_named[1.0] <= stats.binom.isf(1e-3, 200, 0.05) and num_named[6.0] > 180


def test_scores_have_intervals_over_seeds_alone() -> None:
    """What stands behind ± is the same with and without known examples, and for an average as for its datasets."""
    rng = np.random.default_rng(4)
    cell = with_examples(CLM, rng.random((3, 20)))
    shown = seed_interval([(1.0, cell)])
    assert shown.half_width == pytest.approx(cell.interval.half_width)
    assert contrast([(1.0, cell)]).against().half_width > shown.half_width
    one_seed = seed_interval([(1.0, Result(CLM, "SC", "a", "standard", (0.5,)))])
    assert one_seed.value == 0.5 and math.isnan(one_seed.half_width)


def test_few_seeds_beside_many_examples_ask_for_more() -> None:
    """Half of the error from two degrees of freedom, half from very many: the quantile is (4.303 + 1.960)/2 = 3.131."""
    degrees = mix_degrees((0.5, 2), (0.5, 1e9), (0, 0))
    assert stats.t.ppf(0.975, degrees) == pytest.approx(3.1313, abs=1e-4) and 2 < degrees < 3.2
    assert mix_degrees((0.5, 2), (0.0, 99), (0, 0)) == 2
    assert math.isnan(mix_degrees((0.0, 2), (0.0, 99), (0, 0)))


def test_from_four_degrees_on_satterthwaites_rule_holds() -> None:
    """(0.5 + 0.5)² / (0.5²/4 + 0.5²/16) = 12.8; rates that were a choice ask for the mean of the quantiles."""
    assert mix_degrees((0.5, 4), (0.5, 16), (0, 0)) == pytest.approx(12.8)
    chosen = stats.t.ppf(0.975, mix_degrees((0.25, 4), (0.5, 16), (0.25, 16)))
    assert chosen == pytest.approx(0.25 * stats.t.ppf(0.975, 4) + 0.75 * stats.t.ppf(0.975, 16))


def test_without_noise_of_seeds_it_is_the_paired_test_over_examples() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 50))
    seen = difference(with_examples(CLM, np.stack([a, a, a])), with_examples(MLM, np.stack([b, b, b])))
    theirs = stats.ttest_rel(a, b)
    assert seen.against().p_value == pytest.approx(theirs.pvalue)
    assert seen.against().low == pytest.approx(theirs.confidence_interval().low)
    assert seen.over_examples().p_value == pytest.approx(theirs.pvalue)


def test_error_is_the_spread_of_repeated_studies() -> None:
    """Seeds, examples and both together in known amounts: the squared error is right on average, paired and not."""
    rng = np.random.default_rng(1)
    errors: dict[str, list[float]] = {"paired t": [], "Welch": []}
    estimates = []
    for _ in range(800):
        examples_N = rng.normal(0, 1, 40)
        values = [
            examples_N + rng.normal(0, 1.5, 40) + rng.normal(0, 0.3, (4, 1)) + rng.normal(0, 2, (4, 40))
            for _ in range(2)
        ]
        a = with_examples(CLM, values[0])
        for shift, test in ((0, "paired t"), (9, "Welch")):
            seen = difference(a, with_examples(MLM, values[1], seeds=range(shift, shift + 4)))
            assert seen.test == test
            errors[test].append(seen.error**2)
        estimates.append(seen.estimate)
    true = 2 * (1.5**2 / 40 + 0.3**2 / 4 + 2**2 / 160)
    assert np.var(estimates) == pytest.approx(true, rel=0.15)
    for test, squares in errors.items():
        assert np.mean(squares) == pytest.approx(true, rel=0.07), test


def test_pretraining_seeds_are_what_is_repeated() -> None:
    """Two fine-tuning seeds of each of three pretrainings: Student's test of the three differences of means."""
    a, b = np.random.default_rng(0).random((2, 6))
    seeds: dict[str, Any] = {"seeds": [0, 1] * 3, "pretraining_seeds": [0, 0, 1, 1, 2, 2]}
    ours = Result(CLM, "SC", "a", "standard", a.tolist(), **seeds)
    seen = difference(ours, Result(MLM, "SC", "a", "standard", b.tolist(), **seeds))
    theirs = stats.ttest_rel(a.reshape(3, 2).mean(axis=1), b.reshape(3, 2).mean(axis=1))
    assert (seen.num, seen.num_pretrainings, seen.test) == (3, 3, "paired t")
    assert seen.against().p_value == pytest.approx(theirs.pvalue)
    assert seen.noise == ("pretraining seeds", "fine-tuning seeds")
    for seeds["seeds"], noise in (([0] * 6, ("pretraining seeds",)), (range(6), seen.noise)):
        alone = replace(ours, **seeds)
        assert difference(alone, replace(alone, arm=MLM, samples=b.tolist())).noise == noise
    # Beside a model that was pretrained once: Welch's, three means against two scores, and no word on a recipe.
    mixed = difference(ours, Result(MLM, "SC", "a", "standard", b[:2].tolist(), pretraining_seeds=[0, 0]))
    assert (mixed.num, mixed.num_pretrainings, mixed.test) == (2, 1, "Welch")
    welch = stats.ttest_ind(a.reshape(3, 2).mean(axis=1), b[:2], equal_var=False)
    assert mixed.against().p_value == pytest.approx(welch.pvalue)


def test_seeds_that_agree_are_counted() -> None:
    """Better by 0.1 with two seeds, equal with one (up to rounding), worse with one; others have no such count."""
    seen = difference(
        Result(CLM, "SC", "a", "standard", (0.5, 0.6, 0.1 + 0.2, 0.4)),
        Result(MLM, "SC", "a", "standard", (0.4, 0.5, 0.3, 0.5)),
    )
    assert [seen.tell_seeds(bound) for bound in (0.0, -0.2)] == [
        ", positive in 2 of 4 seeds",
        ", above the bound in 4 of 4 seeds",
    ]
    assert seen.by_seed == pytest.approx((0.1, 0.1, 0, -0.1))
    apart = difference(published(CLM, 0.5, 0.1), published(MLM, 0.4, 0.1))
    assert (apart.by_seed, apart.tell_seeds()) == ((), "")


def test_averages_are_their_datasets() -> None:
    """The error of a mean over two test sets is that of independent examples, and of seeds that are paired."""
    rng = np.random.default_rng(2)
    sums, variances = 0.0, 0.0
    cells: dict[ReportArm, list[Result]] = {CLM: [], MLM: []}
    for name, num in (("a", 30), ("b", 50)):
        values = {arm: rng.random((3, num)) for arm in cells}
        for arm, values_SN in values.items():
            examples = KeptExamples((), ExampleTable(name, values_SN))
            cells[arm].append(Result(arm, "SC", name, "standard", values_SN.mean(axis=1).tolist(), examples=examples))
        gap_SN = values[CLM] - values[MLM]
        sums, variances = sums + gap_SN.mean(axis=1) / 2, variances + gap_SN.mean(axis=0).var(ddof=1) / num / 4
    results = with_averages(ResultSet([*cells[CLM], *cells[MLM]]))
    clm, mlm = (results.scores[arm.name]["SC"] for arm in cells)
    seen = difference(clm, mlm)
    over_seeds = difference(replace(clm, cells=()), replace(mlm, cells=()))
    assert over_seeds.error**2 == pytest.approx(np.var(sums, ddof=1) / 3)
    assert seen.example_variance == pytest.approx(variances) and seen.num_examples == 30


@pytest.mark.parametrize(("independent", "noise"), MIXES)
def test_equal_models_are_rarely_called_different(independent: float, noise: float) -> None:
    """300 examples, five seeds: at most as often as 6 % gives in so many trials; a test over seeds alone, without
    knowing the examples, in 40 % and more where errors are independent. All sizes: scripts/calibrate_verdicts.py."""
    found = share_called_different(World(300, independent, noise), trials=250)
    assert 250 * found["both"] <= stats.binom.isf(1e-3, 250, 0.06)
    assert independent == 0 or found["seeds_only"] > 0.4
    assert share_called_different(World(1000, 0.5, 0.2, gap=10), trials=5)["both"] == 1


def test_equal_recipes_are_rarely_called_different() -> None:
    world = World(300, 0.5, 0.5, num_seeds=2, num_pretrainings=3, pretraining_noise=0.5, redrawn=0.1)
    assert 300 * share_called_different(world, trials=300)["both"] <= stats.binom.isf(1e-3, 300, 0.06)


@pytest.mark.parametrize(
    ("estimates", "told"),
    [
        ({"a": 0.05}, ""),
        ({"a": 0.05, "b": 0.04}, ""),
        (
            {"a": 0.05, "b": 0.01},
            "When the tasks are tested separately, only a shows the difference: +5.00 points [+3.04, +6.96]. "
            "The other, b, does not: +1.00",
        ),
        (
            {"a": 0.05, "b": 0.04, "c": -0.03},
            "When tested separately, 2 of 3 tasks show the difference. The other, c, does not: −3.00 points [−4.96",
        ),
        (
            {"a": 0.01, "b": 0.0, "c": 0.012, "d": 0.011},
            "When tested separately, none of 4 tasks shows the difference: b 0.00 points",
        ),
    ],
)
def test_a_mean_says_which_tasks_do_not_carry_it(estimates: dict[str, float], told: str) -> None:
    """The most contrary first, and at most three by name."""
    by_task = {task: Contrast(estimate, 0.01, 1e6, 1.0, "paired t", 5) for task, estimate in estimates.items()}
    said = tell_carriers(by_task)
    assert said.startswith(told) and bool(said) == bool(told)
    assert said.endswith(" and 1 more.") == (len(estimates) == 4)
    assert not tell_carriers(by_task, -0.1), "each is above another bound"
