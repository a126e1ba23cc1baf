"""Inequalities of which one is enough, against Student's t by hand; and what all tests of a report account for."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.report.claims import Claim, Finding, Inequality, judge_claims, make_inequality, name_noise, strongest
from biphase.report.contrasts import Contrast


def seen(estimate: float, error: float = 0.005, bound: float = 0.0, **more: int) -> Inequality:
    """Five seeds, four degrees of freedom."""
    return make_inequality("one", Contrast(estimate, error, 4, 0.8, "paired t", 5, **more), bound)


def p_value(distance: float, error: float = 0.005) -> float:
    return float(2 * stats.t.sf(abs(distance) / error, 4))


def judge(*inequalities: Inequality) -> list[str]:
    (finding,) = judge_claims([Finding("f", "so", "", (Claim("so", inequalities),))])
    return [one.verdict for one in finding.inequalities]


def test_the_strongest_of_several_has_the_smallest_p_value() -> None:
    """Not the highest estimate; its p-value counts for all three. Where none lies above the bound, the highest."""
    best = strongest([seen(0.08, 0.05), seen(0.05), seen(-0.09, 0.001)])
    assert (best.estimate, best.num_asked) == (0.05, 3) and best.p_value == pytest.approx(3 * p_value(0.05))
    assert strongest([seen(-0.05, 0.001), seen(-0.02, 0.5)]).estimate == -0.02
    assert strongest([seen(0.0001, 0.5)] * 2).p_value == 1


def test_the_contrary_is_that_none_is_more_than_a_point_above() -> None:
    """The largest p-value of all; 1 where one is, or cannot be tested; nan where none can."""
    low, close, unknown = seen(0.06, bound=0.1), seen(0.09, bound=0.1), seen(0.05, math.nan, bound=0.1)
    for rivals, contrary in (
        ([low, close], p_value(0.02)),
        ([low, low], p_value(0.05)),
        ([low, seen(0.105, bound=0.1)], p_value(0.005)),
        ([low, seen(0.115, bound=0.1)], 1.0),
        ([low, unknown], 1.0),
        ([unknown, unknown], math.nan),
    ):
        assert strongest(rivals).p_contrary == pytest.approx(contrary, nan_ok=True)


def test_that_one_holds_is_contradicted_where_none_does() -> None:
    """All must be shown to be at most a point above the bound; that may one be whose estimate is above it."""
    assert judge(strongest([seen(-0.05), seen(-0.06)])) == ["contradicted"]
    assert judge(strongest([seen(0.002, 0.002), seen(-0.06)])) == ["contradicted"]
    assert judge(strongest([seen(0.002, 0.02), seen(-0.06)])) == ["undecided"]
    assert judge(strongest([seen(-0.05), seen(-0.06, math.nan)])) == ["undecided"]
    assert judge(seen(-0.05)) == ["contradicted"] and judge(strongest([seen(0.05), seen(-0.06)])) == ["supported"]


def test_noise_is_what_all_tests_account_for() -> None:
    def noise(*inequalities: Inequality) -> str:
        return name_noise([Finding("f", "so", "", (Claim("so", inequalities),))])

    plain, wide = seen(0.1), seen(0.1, num_pretrainings=3, num_examples=50)
    once = "about these checkpoints, each pretrained once, not about what another pretraining run would give"
    assert noise(plain, plain) == f"fine-tuning seeds only; {once}"
    some = "pretraining seeds (1 of 2 tests), fine-tuning seeds and test examples (1 of 2 tests)"
    assert noise(wide, plain) == noise(plain, wide) == f"{some}; {once}"
    assert noise(wide, seen(0.1, np.nan)) == "pretraining seeds, fine-tuning seeds and test examples; about recipes"
    assert noise(seen(0.1, np.nan)) == ""
