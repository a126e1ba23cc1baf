"""Inequalities of which one is enough, against Student's t by hand; and what all tests of a report account for."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from biphase.report.claims import Claim, Finding, Inequality, judge_claims, name_noise, strongest, tell_finding
from biphase.report.contrasts import Contrast


def seen(estimate: float, error: float = 0.005, bound: float = 0.0, **more: int) -> Inequality:
    """Five seeds, four degrees of freedom."""
    return Inequality("one", Contrast(estimate, error, 4, 0.8, "paired t", 5, **more), bound)


def p_value(distance: float, error: float = 0.005) -> float:
    return float(2 * stats.t.sf(abs(distance) / error, 4))


def judge(*inequalities: Inequality) -> list[str]:
    (judged,) = judge_claims([finding(*inequalities)])
    return [one.verdict for one in judged.inequalities]


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


def finding(*inequalities: Inequality) -> Finding:
    return Finding("f", "so", "", (Claim("so", inequalities),))


def test_that_all_hold_is_one_question() -> None:
    """Seven hypotheses: one of six inequalities with p about 0.006 each, and six that are clear. That all six hold has
    the largest p-value of theirs, not the smallest times fifteen."""
    many, clear = finding(*[seen(0.027)] * 6), finding(seen(0.1))
    judged = judge_claims([many, *[clear] * 6])
    assert many.p_value == pytest.approx(p_value(0.027))
    assert {one.verdict for one in judged} == {"supported"}
    assert judge_claims([many, *[finding(seen(0.01))] * 8])[0].verdict == "undecided", (
        "nine findings are nine questions"
    )


def test_that_one_of_many_fails_is_corrected_for_all_that_could() -> None:
    """p is 0.018: enough for one inequality below its bound, not for one of three, any of which could contradict."""
    low, high = seen(-0.019), seen(0.1)
    assert judge(low) == ["contradicted"]
    assert judge(low, high, high) == ["undecided", "supported", "supported"]
    assert finding(low, high, high).p_value == pytest.approx(3 * p_value(0.019))
    assert judge(seen(-0.05), high, high)[0] == "contradicted"
    lacking = Finding("f", "so", "", (Claim("so", (high,), ("no scores",)),))
    assert lacking.p_value == 1 and math.isnan(finding(seen(0.1, np.nan)).p_value)


def test_what_a_test_says_by_itself_is_told_where_correction_hides_it() -> None:
    """p is 0.019, one of three inequalities; and not where it is shown, is not shown by itself, or lacks scores."""
    low, high, open_one = seen(-0.019), seen(0.1), seen(0.001)
    (judged,) = judge_claims([finding(low, high, open_one)])
    assert [one.alone for one in judged.inequalities] == ["contradicted when tested alone, p = 0.019", "", ""]
    (judged,) = judge_claims([finding(replace(low, lacks_below=("all fine-tunings",)), high, high)])
    assert judged.claims[0].inequalities[0].alone == ""


def test_an_interval_is_corrected_as_its_verdict_is() -> None:
    """So it contains the bound if and only if the difference is undecided, wherever scores are complete."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        asked = [finding(*[seen(estimate) for estimate in row]) for row in rng.normal(0.01, 0.015, (4, 2))]
        for one in [one for judged in judge_claims(asked) for one in judged.inequalities]:
            assert (one.interval.low < 0 < one.interval.high) == (one.verdict == "undecided")
    clear, close = judge_claims([finding(seen(0.1)), finding(seen(0.015))])
    assert tell_finding(clear).startswith("Supported for these checkpoints: so: +10.00 points [+8.25")
    half_width = stats.t.ppf(1 - 0.025 / 2, 4) * 0.5
    told = f"+10.00 points [+{10 - half_width:.2f}, +{10 + half_width:.2f}; 97.5 %], p < 0.001 after correction."
    assert tell_finding(clear).endswith(told)
    assert tell_finding(close).endswith("+1.50 points [+0.11, +2.89], p = 0.040.")


def test_an_equivalence_has_two_one_sided_tests() -> None:
    """Against both of them by hand. Outside its bounds a difference has the two-sided test of any other."""
    for estimate, verdict in (
        (0.004, "supported"),
        (-0.004, "supported"),
        (0.012, "undecided"),
        (0.04, "contradicted"),
    ):
        one = replace(seen(estimate, bound=math.copysign(0.02, estimate)), is_equivalence=True)
        by_side = stats.t.sf((0.02 - estimate) / 0.005, 4), stats.t.sf((0.02 + estimate) / 0.005, 4)
        if abs(estimate) < 0.02:
            assert one.sides == pytest.approx((max(by_side), 1.0))
        else:
            assert one.sides == pytest.approx((1.0, p_value(abs(estimate) - 0.02)))
        (judged,) = judge_claims([finding(one)])
        assert judged.verdict == verdict
        interval = next(judged.inequalities).interval
        assert (-0.02 < interval.low < interval.high < 0.02) == (verdict == "supported")
    both = judge_claims([finding(replace(seen(0.004, bound=0.02), is_equivalence=True)), finding(seen(0.1))])
    told = "+0.40 points [−0.67, +1.47; 90 %] within ±2.00, p = 0.016."
    assert tell_finding(both[0]).endswith(told), "the clear one is rejected first, so that it is tested at 5 %"


def test_parts_that_were_tested_are_counted() -> None:
    claims = [Claim("a", (seen(0.1),)), Claim("b", (), ("no scores",)), Claim("c", ())]
    assert Finding("F", "so", "", tuple(claims)).told_parts == "1 of 3 parts tested"
    assert finding(seen(0.1)).told_parts == ""


def test_noise_is_what_all_tests_account_for() -> None:
    def noise(*inequalities: Inequality) -> str:
        return name_noise([finding(*inequalities)])

    plain, wide = seen(0.1), seen(0.1, num_pretrainings=3, num_examples=50)
    once = "Verdicts hold for these checkpoints, each pretrained once, not for what another pretraining run would give"
    assert noise(plain, plain) == f"fine-tuning seeds only. {once}"
    some = "pretraining seeds (1 of 2 tests), fine-tuning seeds and test examples (1 of 2 tests)"
    assert noise(wide, plain) == noise(plain, wide) == f"{some}. {once}"
    told = "pretraining seeds, fine-tuning seeds and test examples. Verdicts hold for the recipes, not just for"
    assert noise(wide, seen(0.1, np.nan)) == f"{told} these checkpoints"
    assert noise(seen(0.1, np.nan)) == ""


def test_points_are_not_compared_with_nats() -> None:
    """The smallest difference is told for each unit, points first."""
    scores, loss = (seen(0.05), seen(0.2)), seen(0.03)
    nats = replace(loss, contrast=replace(loss.contrast, unit="nats"))
    (judged,) = judge_claims([finding(nats, *scores)])
    assert [[one.estimate for one in of_unit] for of_unit in judged.by_unit] == [[0.05, 0.2], [0.03]]
    smallest = ": +5.00 points [+3.61, +6.39] for the smaller of 2 differences, p < 0.001"
    assert tell_finding(judged).endswith(f"{smallest}; +0.030 nats [+0.016, +0.044], p = 0.004.")
