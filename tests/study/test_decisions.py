"""Decision accuracy with a known answer: each seed decides, the other seeds say what is true. Leads against scipy."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from biphase.report.results import ReportArm, Result

script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "decision_accuracy.py"))
judge_decisions, compare_curricula = script["judge_decisions"], script["compare_curricula"]


def test_each_seed_decides_and_the_others_judge() -> None:
    """By seed 0 the third of three curricula is best, by the others the second: 1 of its 3 pairs is in their order, and
    its choice is 4 points behind. Seed 1 is judged by a mean in which seed 0 is one of two."""
    small = np.array([[1.0, 1.0, 1.0], [2.0, 3.0, 3.0], [3.0, 2.0, 2.0]])
    large = np.array([[50.0, 51.0, 51.0], [54.0, 54.0, 54.0], [70.0, 50.0, 50.0]])
    judged = judge_decisions(small, large)
    assert judged["chosen"] == [2, 1, 1]
    # The truth of seed 0: 51, 54, 50. Of the two others: 50.5, 54, 60.
    assert judged["by_seed"] == pytest.approx([1 / 3, 2 / 3, 2 / 3]) and judged["accuracy"] == pytest.approx(5 / 9)
    assert judged["loss"] == pytest.approx((4 + 6 + 6) / 3)


def test_the_best_leads_with_the_interval_of_a_paired_test() -> None:
    """And what it loses on the way to a budget at which another one is best."""

    def score(*values: float) -> Result:
        return Result(ReportArm("m"), "SC", "genre", "standard", values, pretraining_seeds=(0, 1, 2))

    here = {"clm": score(0.60, 0.63, 0.61), "mlm": score(0.55, 0.56, 0.58), "50/50": score(0.59, 0.58, 0.62)}
    there = {"clm": score(0.70, 0.69, 0.71), "mlm": score(0.66, 0.67, 0.69), "50/50": score(0.72, 0.74, 0.71)}
    compared = compare_curricula(here, there)
    assert compared["best"] == "clm" and compared["leads"].keys() == {"mlm", "50/50"}
    early, late = (100 * np.subtract(of["clm"].samples, of["50/50"].samples) for of in (here, there))
    for told, paired in ((compared["leads"]["50/50"], early), (compared["turn"], early - late)):
        interval = stats.ttest_1samp(paired, 0).confidence_interval()
        assert told == pytest.approx([paired.mean(), interval.low, interval.high])
    assert compare_curricula(there, there)["turn"] is None
