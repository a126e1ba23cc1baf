"""How far a task tells models apart, where the answer is known, and what would decide a difference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from biphase.finetuning.scores import ExampleTable, KeptExamples
from biphase.report.contrasts import (
    Contrast,
    difference,
    is_enough,
    measure_signal,
    mix_degrees,
    what_decides,
)
from biphase.report.results import ReportArm, Result, ResultSet
from biphase.report.tables import make_tables, show_signal, table_files
from biphase.studies.describe import Design


def model(name: str, values: list[float], **more: Any) -> Result:
    arm = ReportArm(name, "other", "1m", "mlm", 40, 100, 0, 100)
    return Result(arm, "SC", str(more.pop("dataset", "a")), "standard", tuple(values), **more)


def test_signal_of_known_noise() -> None:
    """Four models 0.1 apart, five seeds of noise 0.02: spread 0.129, standard error 0.02/√5, a ratio of about 14."""
    rng = np.random.default_rng(0)
    ratio, needs = measure_signal([model(str(at), rng.normal(0.5 + 0.1 * at, 0.02, 5).tolist()) for at in range(4)])
    assert needs == ""
    assert ratio == pytest.approx(0.129 / (0.02 / 5**0.5), rel=0.4)
    ratios, decided = [], 0
    for _ in range(60):
        ratio, needs = measure_signal([model(str(at), rng.normal(0.5, 0.02, 5).tolist()) for at in range(4)])
        ratios.append(ratio)
        decided += not needs
    assert 0.7 < np.median(ratios) < 1.5 and decided <= 8
    # Of many models with few seeds, no pair may be told apart, corrected for all pairs; that they differ is plain.
    ratio, needs = measure_signal([model(str(at), rng.normal(0.5 + 0.01 * at, 0.02, 3).tolist()) for at in range(18)])
    assert ratio > 0 and not needs
    for unknown in ([model("one", [0.5, 0.6])], [model("x", [0.5]), model("y", [0.6])]):  # one seed knows no noise
        ratio, needs = measure_signal(unknown)
        assert np.isnan(ratio) and not needs


def test_the_smallest_difference_that_a_plan_finds() -> None:
    """In simulations with noise of 0.5 points each, 4 points on 1,000 examples are found in 82 % of cases with one
    pretraining and three seeds, in 86 % with three pretrainings, in 30 % with two; 2 points on 5,000 in 94 % with one
    pretraining and five seeds."""
    usual = Design(1, 3, 1, 1000, 0.21, (0.005, 0.005))
    one, two, three = (replace(usual, num_pretrainings=num).smallest_difference for num in (1, 2, 3))
    assert 0.035 < one < 0.048 and 0.035 < three < 0.048 < 0.06 < two
    assert 0.013 < replace(usual, num_seeds=5, num_examples=5000).smallest_difference < 0.025
    alone = replace(usual, num_seeds=1)
    assert alone.smallest_difference == np.inf and alone.find_power(0.5) == 0
    few, many = (replace(alone, num_pretrainings=3, num_arms=arms).smallest_difference for arms in (2, 6))
    assert many < 0.92 * few
    assert replace(alone, num_pretrainings=3, num_arms=1).smallest_difference == few
    # Seeds that choose rates cost power, more rates more of it; so does a correction; steady examples do not.
    small = replace(alone, num_pretrainings=6, noise=(0.012, 0.018))
    found = [replace(small, num_rates=num).find_power(0.04) for num in (4, 3, 2, 1)]
    assert found == sorted({*found}) and found[-1] > found[0] + 0.1
    assert (
        replace(usual, level=0.01).smallest_difference
        > one
        > replace(usual, example_variance=0.009).smallest_difference
    )


@pytest.mark.parametrize(("num", "factor"), [(2, 2.0), (4, 1.5)])
def test_a_plan_expects_the_variance_that_the_test_will_have(num: int, factor: float) -> None:
    """The mean of the larger of a sum's own variance and the shrunk one, over draws, with six arms of equal noise."""
    own_T = np.random.default_rng(0).chisquare(num - 1, 1_000_000) / (num - 1)
    moderated_T = np.maximum(own_T, ((num - 1) * own_T + 3 * factor) / (num - 1 + 3))
    planned = Design(num, 1, 1, 1000, 0.0, (0.006, 0.008), num_arms=6).measure(0.04)
    assert planned.error**2 == pytest.approx(2 * 0.01**2 / num * moderated_T.mean(), rel=0.005)


def test_two_models_are_told_apart_by_the_paired_test() -> None:
    rng = np.random.default_rng(1)
    decided = []
    for a, b in rng.normal(0.5, 0.02, (80, 2, 3)) + np.array([[0.0], [0.05]]):
        ratio, needs = measure_signal([model("a", a.tolist()), model("b", b.tolist())])
        theirs = stats.ttest_rel(a, b)
        assert ratio == pytest.approx(abs(theirs.statistic))
        assert (needs == "") == (theirs.pvalue < 0.05)
        decided.append(needs == "")
    assert 20 < sum(decided) < 60


def test_several_models_are_told_apart_by_the_analysis_of_variance() -> None:
    """Four models of equal spreads with seeds of their own, closer and closer."""
    noise = np.array([-0.01, 0.002, 0.003, 0.005])
    decided = []
    for gap in np.linspace(0.0, 0.012, 41):
        values = [0.5 + gap * at + np.roll(noise, at) for at in range(4)]
        ratio, needs = measure_signal(
            [model(str(at), v.tolist(), seeds=range(9 * at, 9 * at + 4)) for at, v in enumerate(values)]
        )
        theirs = stats.f_oneway(*values)
        assert ratio**2 == pytest.approx(theirs.statistic, abs=1e-9)
        decided.append((needs == "", bool(theirs.pvalue < 0.05)))
    assert all(ours == right for ours, right in decided) and {ours for ours, _ in decided} == {True, False}


def test_models_that_differ_alike_in_all_seeds_hide_no_others() -> None:
    """The first two differ by 1/4 in each seed, the second and third by 1/2, 0 and 1/4: a squared error of 1/48."""
    first = [0.25, 0.5, 0.125]
    ratio, needs = measure_signal([model("a", first), model("b", [0.5, 0.75, 0.375]), model("c", [1.0, 0.75, 0.625])])
    assert ratio == pytest.approx(0.25 / (1 / 48 / 2 / 2) ** 0.5)
    widest = difference(model("c", [1.0, 0.75, 0.625]), model("a", first))
    assert needs == what_decides(widest, 0.0, 0.05 / 3), "of three pairs the widest"
    ratio, needs = measure_signal([model("a", first), model("b", [0.5, 0.75, 0.375]), model("c", [9.0, 8.75, 8.625])])
    assert ratio > 0 and not needs
    ratio, _ = measure_signal([model("a", first), model("b", [0.5, 0.75, 0.375])])
    assert np.isnan(ratio), "no noise at all"


def find_shift(degrees: float) -> float:
    """The true difference, in standard errors, that a two-sided t test at 5 % finds with 80 %."""
    quantile = stats.t.ppf(0.975, degrees)
    return float(optimize.brentq(lambda shift: stats.nct.sf(quantile, degrees, shift) - 0.8, 0.1, 50))


@pytest.mark.parametrize("source", ["seeds", "Welch", "examples", "seeds and examples", "validation"])
def test_what_is_enough_by_hand(source: str) -> None:
    """With one source of noise, so many times of it: the shift with which the noncentral t-distribution lies above
    Student's quantile of 97.5 % in 80 %, times the error."""
    squared, bound, times = 1e-4, 0.1, 3.0
    test: Any = "Welch" if source == "Welch" else "paired t"
    known: dict[str, Any] = {}
    if source.endswith("examples"):
        known = {"num_examples": 8, "example_variance": squared * (0.5 if "seeds" in source else 1)}
    if source == "validation":
        known = {"choice_degrees": 7, "choice_variance": squared}
    degrees = {"seeds": 5 * times - 1, "Welch": 8 * (5 * times - 1) / 4, "examples": 8 * times - 1, "validation": 7}
    degrees["seeds and examples"] = mix_degrees((0.5, degrees["seeds"]), (0.5, degrees["examples"]), (0, 0))
    error = (squared / (1 if source == "validation" else times)) ** 0.5
    needed = error * find_shift(degrees[source])
    for estimate, is_expected in ((bound - 0.999 * needed, False), (bound - 1.001 * needed, True)):
        seen = Contrast(estimate, 0.01, 8 if source == "Welch" else 4, 0.8, test, 5, **known)
        assert is_enough(seen, bound, 0.05, times, times) == is_expected


@pytest.mark.slow
@pytest.mark.minutes
def test_the_fewest_seeds_that_are_enough_are_named() -> None:
    def is_right(num: int, estimate: float) -> bool:
        return bool(estimate / (0.01 * (5 / num) ** 0.5) >= find_shift(num - 1))

    named = []
    for estimate in (0.0005, 0.001, 0.01, 0.034, 0.1):  # the last is decided already: one seed more will do
        fewest = next((num for num in range(6, 1001) if is_right(num, estimate)), None)
        text = what_decides(Contrast(estimate, 0.01, 4, 0.8, "paired t", 5), 0.0, 0.05)
        assert text.startswith(f"about {fewest} seeds instead of 5" if fewest else "even 1,000 seeds would not")
        named.append(fewest)
    assert named[0] is None and named[-2:] == [6, 6] and not is_right(5, 0.034)


def test_a_shift_for_which_scipy_has_no_number_is_enough() -> None:
    """509 seeds shift the difference by 3.05 · √(509 / 3) = 39.7 errors; six are enough."""
    pair = Contrast(0.0305, 0.01, 2, 0.7, "paired t", 3)
    assert what_decides(pair, 0.0, 0.025).startswith("about 6 seeds instead of 3")
    assert all(is_enough(pair, 0.0, 0.025, num / 3, 1) for num in range(6, 1001))


def test_what_decides_where_numbers_do_not() -> None:
    alone, alike = Contrast(0.1, np.nan, np.nan, 0.8, "Welch", 1), Contrast(0.1, 0.0, 4, 0.8, "paired t", 5)
    assert what_decides(alone, 0.0, 0.05) == "two seeds or more"
    assert what_decides(alike, 0.0, 0.05).startswith("two seeds or more with different scores")
    chosen = Contrast(0.01, 0.02, 4, 0.8, "paired t", 5, choice_variance=3.9e-4, choice_degrees=49)
    assert what_decides(chosen, 0.0, 0.05).startswith("more validation examples, or fewer rates")


def test_what_decides_has_the_power_it_promises() -> None:
    """Seeds where they suffice; examples where these are what is lacking; both where neither alone is enough."""
    seeds = Contrast(0.01, 0.01, 4, 0.8, "paired t", 5, 1, 2000, 0.1e-4)
    assert "seeds instead of 5" in what_decides(seeds, 0.0, 0.05)
    few = Contrast(0.01, 0.01, 900, 0.8, "paired t", 5, 1, 1000, 0.999e-4)
    text = what_decides(few, 0.0, 0.05)
    assert text.startswith("about ") and "test examples instead of 1,000" in text and "seeds instead" not in text
    named = int(text.split()[1].replace(",", ""))
    # The z test: (1.96 + 0.84)² times the squared error over the squared difference.
    assert named == pytest.approx(1000 * (stats.norm.isf(0.025) + stats.norm.isf(0.2)) ** 2, rel=0.08)
    both = Contrast(0.004, 0.02, 9, 0.8, "paired t", 5, 1, 1000, 2e-4)
    text = what_decides(both, 0.0, 0.05)
    assert "seeds instead of 5 and" in text and "test examples instead of 1,000" in text
    times = int(text.split()[1]) / 5
    assert is_enough(both, 0.0, 0.05, times, times)
    assert what_decides(Contrast(1e-9, 0.01, 4, 0.8, "Welch", 5), 0.0, 0.05).startswith("even 1,000 seeds would not")


def test_tables_say_which_tasks_decide() -> None:
    """Task a tells the two apart, b does not; in c one model says the same for every example."""
    kept = KeptExamples((), ExampleTable("c", np.array([[1.0, 0.0, 1.0, 1.0]] * 3), num_degenerate=3))
    cells = [
        *(model(name, [mean, mean + 0.01, mean + 0.02], dataset="a") for name, mean in (("x", 0.5), ("y", 0.7))),
        *(model(name, scores, dataset="b") for name, scores in (("x", [0.5, 0.6, 0.7]), ("y", [0.6, 0.55, 0.68]))),
    ]
    cells = [*cells[:1], model("y", [0.7, 0.712, 0.719], dataset="a"), *cells[2:]]
    cells += [model("x", [0.75] * 3, dataset="c", examples=kept), model("y", [0.76, 0.77, 0.75], dataset="c")]
    (table,) = make_tables(ResultSet(tuple(cells)))
    assert [not needs for _, needs in table.signals[:2]] == [True, False]
    assert show_signal(*table.signals[1]).startswith("(")
    text, latex = (table_files([table])[f"tables/{table.name}.{ending}"] for ending in ("md", "tex"))
    assert "| signal ÷ noise |" in text and "75.00†" in text and "b separates no models yet; needed: " in text
    assert r"signal $\div$ noise" in latex and r"75.00$\dagger$" in latex
