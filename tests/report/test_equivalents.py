"""The share of a baseline's compute, on ladders whose answer is known and on the published scores."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from biphase.errors import InputError
from biphase.report.contrasts import with_averages
from biphase.report.equivalents import compute_equivalent, contrast_at_share, show_multiple
from biphase.report.formats import show_noise
from biphase.report.paper import read_reference
from biphase.report.results import ALL_TASKS, ReportArm, Result, ResultSet

BASE = ReportArm("mlm", "other", "1m", "mlm", 40, 100, 0, 100)
NOISE = np.array([-0.01, 0.0, 0.01])


def make_arm(name: str, flops: float) -> ReportArm:
    return replace(BASE, name=name, flops=flops)


def make_results(scores: dict[ReportArm, Sequence[float]], **seeds: Any) -> ResultSet:
    return ResultSet(tuple(Result(arm, "SC", "a", "standard", values, **seeds) for arm, values in scores.items()))


def ladder_of(means: Sequence[float], noise: float = 0.1) -> dict[ReportArm, Sequence[float]]:
    """Budgets 1, 2, 4, …; seeds differ between rungs by a little."""
    rng = np.random.default_rng(0)
    return {
        make_arm(f"mlm-{number}", 2.0**number): (mean + noise * (NOISE + rng.normal(0, 0.002, 3))).tolist()
        for number, mean in enumerate(means)
    }


def test_known_share() -> None:
    """A score that grows by 0.1 with each doubling: 0.65 at budget 1 is the baseline's at 2^1.5, a share of 0.354."""
    ladder = ladder_of([0.5, 0.6, 0.7])
    arm = make_arm("ours", 1.0)
    results = make_results({**ladder, arm: (0.65 + 0.1 * NOISE[::-1]).tolist()})
    found = compute_equivalent(results, arm, list(ladder))
    assert found.share == pytest.approx(2**-1.5, rel=0.01) and found.compute == 1
    assert 0.3 < found.low < found.share < found.high < 0.4 and found.beyond == ""
    assert [cell.dataset for cell in found.score.cells] == ["a"]
    assert found.noise == ("fine-tuning seeds",)
    assert show_multiple(found).startswith("0.35 [0.3") and show_noise(found.noise) == "fine-tuning seeds only"
    # The interval is where the test of a share turns: inside it, within noise; outside, above or below.
    sides = []
    for share in (found.low * 0.97, found.low * 1.03, found.high * 0.97, found.high * 1.03):
        seen = contrast_at_share(results, arm, list(ladder), share, [["a"]])
        tested = seen.against()
        sides.append("below" if tested.high < 0 else "above" if tested.low > 0 else "within")
    assert sides == ["below", "within", "within", "above"]
    for share, baseline in ((1.0, 0.5), (0.25, 0.7)):  # the ends of the ladder are on it
        assert contrast_at_share(results, arm, list(ladder), share, [["a"]]).estimate == pytest.approx(
            0.65 - baseline, abs=1e-3
        )
    with pytest.raises(InputError, match="the baseline's ladder does not reach 10 times the arm's compute"):
        contrast_at_share(results, arm, list(ladder), 0.1, [["a"]])


def test_nothing_is_read_off_beyond_the_ladder() -> None:
    ladder = ladder_of([0.5, 0.6, 0.7])
    high, low = make_arm("high", 1.0), make_arm("low", 4.0)
    results = make_results({**ladder, high: [0.8, 0.801, 0.802], low: [0.4, 0.401, 0.402]})
    best = compute_equivalent(results, high, list(ladder))
    assert (best.beyond, best.share, best.low, best.high) == ("above", 0.25, 0.0, 0.25)
    assert show_multiple(best) == "above the ladder (at most 0.25)"
    worst = compute_equivalent(results, low, list(ladder))
    assert (worst.beyond, worst.share, worst.low, worst.high) == ("below", 4.0, 4.0, math.inf)
    assert show_multiple(worst) == "below the ladder (at least 4.00)"
    # A score just above the ladder bounds nothing by itself: what is said is where the interval ends.
    (near,) = (make_arm("near", 1.0),)
    seen = compute_equivalent(make_results({**ladder, near: (0.702 + 0.1 * NOISE[::-1]).tolist()}), near, list(ladder))
    assert seen.beyond == "above" and seen.high > seen.share
    assert show_multiple(seen) == f"above the ladder (at most {seen.high:.2f})"


def test_an_interval_is_open_where_the_ladder_ends_within_noise() -> None:
    ladder = ladder_of([0.5, 0.6])
    high, low = make_arm("high", 1.0), make_arm("low", 1.0)
    results = make_results(
        {**ladder, high: (0.599 + 0.1 * NOISE[::-1]).tolist(), low: (0.501 + 0.1 * NOISE[::-1]).tolist()}
    )
    ends = [compute_equivalent(results, arm, list(ladder)) for arm in (high, low)]
    assert ends[0].low == 0.0 and 0.5 < ends[0].high < 0.6
    assert 0.9 < ends[1].low < 1.0 and ends[1].high == math.inf
    assert show_multiple(ends[0]) == f"0.50 (at most {ends[0].high:.2f})"
    assert show_multiple(ends[1]) == f"0.99 (at least {ends[1].low:.2f})"
    assert show_multiple(replace(ends[0], high=math.inf)) == "0.50 (no bound)"


def test_a_line_over_more_than_a_factor_of_four_is_refused() -> None:
    """On a curve that bends, a straight line between far budgets covers the truth in no more than 29 %."""
    far = {make_arm("mlm-small", 1.0): [0.5, 0.51], make_arm("mlm-large", 16.0): [0.7, 0.71]}
    arm = make_arm("ours", 4.0)
    results = make_results({**far, arm: [0.6, 0.61]})
    told = "mlm-small and mlm-large are a factor of 16 apart, .* give the baseline budgets between them"
    for ask in (compute_equivalent, lambda *own: contrast_at_share(*own, 1.0, [["a"]])):
        with pytest.raises(InputError, match=told):
            ask(results, arm, list(far))
    between = make_arm("mlm-middle", 4.0)
    results = ResultSet((*results.results, *make_results({between: [0.62, 0.63]}).results))
    assert compute_equivalent(results, arm, [*far, between]).share > 1


def test_without_noise_the_interval_is_as_wide_as_the_places_that_are_tested() -> None:
    """Of 640 places within a doubling, the share 2^-(328.5 / 640) lies between the 328th and the 329th."""
    ladder = ladder_of([0.5, 0.6], noise=1e-6)
    arm = make_arm("ours", 1.0)
    found = compute_equivalent(
        make_results({**ladder, arm: (0.5 + 0.1 * 328.5 / 640 + 1e-6 * NOISE[::-1]).tolist()}), arm, list(ladder)
    )
    assert (found.low, found.high) == (pytest.approx(2 ** -(329 / 640)), pytest.approx(2 ** -(328 / 640)))


def test_a_ladder_that_dips_is_made_monotone() -> None:
    """0.5, 0.7, 0.6 count as 0.5, 0.65, 0.65: 0.64 is reached before the second budget, at 2^(14/15)."""
    ladder = ladder_of([0.5, 0.7, 0.6], noise=0.0)
    arm = make_arm("ours", 1.0)
    found = compute_equivalent(make_results({**ladder, arm: [0.64, 0.64, 0.64]}), arm, list(ladder))
    assert [round(height, 3) for height in found.heights] == [0.5, 0.65, 0.65]
    assert found.share == pytest.approx(2 ** -(14 / 15))


@pytest.mark.parametrize(
    ("means", "score"),
    [((0.5, 0.7, 0.6), 0.63), ((0.5, 0.7, 0.6), 0.68), ((0.7, 0.5, 0.9), 0.61), ((0.7, 0.5, 0.9), 0.55)],
)
def test_on_a_ladder_that_dips_the_interval_has_the_point_and_every_share_within_noise(
    means: tuple[float, ...], score: float
) -> None:
    ladder, arm = ladder_of(means), make_arm("ours", 1.0)
    results = make_results({**ladder, arm: (score + 0.1 * NOISE[::-1]).tolist()})
    found = compute_equivalent(results, arm, list(ladder))
    assert found.low <= found.share <= found.high
    for share in np.geomspace(0.25, 1, 30)[1:-1]:
        side = contrast_at_share(results, arm, list(ladder), share, [["a"]]).side
        assert found.low <= share <= found.high or side == ("above" if share > found.high else "below")
    assert (found.low == 0) == (means[1] > means[0]) == (found.high < 1)


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (0.502, r"at least 0\.\d\d \(level ladder\)"),  # on a stretch that rises by 0.005, then by 0.1
        (0.56, r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]"),  # well within what rises
        (0.7, r"above the ladder \(at most 0\.\d\d\)"),
    ],
)
def test_no_point_is_read_off_where_the_ladder_is_level(score: float, told: str) -> None:
    ladder, arm = ladder_of([0.5, 0.505, 0.605], noise=0.2), make_arm("ours", 1.0)
    found = compute_equivalent(make_results({**ladder, arm: (score + 0.2 * NOISE[::-1]).tolist()}), arm, list(ladder))
    assert re.fullmatch(told, show_multiple(found)) and found.is_level == ("level" in told)
    begin, end = found.reach
    assert 1 <= begin <= end <= 4 and (begin == 1) == found.is_level
    closed = replace(found, beyond="", low=0.3, high=0.9)
    assert show_multiple(closed) == "between 0.30 and 0.90 (level ladder)", "from 1.1 to 3.3 of 1, 2 and 4"
    assert not replace(closed, low=0.3, high=0.5).is_level, "from 2, where it begins to rise"
    # Without an interval, the estimate decides; a ladder where nothing was learned is level everywhere.
    alone = replace(closed, low=math.nan, high=math.nan, share=1 / 1.5)
    assert alone.is_level and show_multiple(alone) == "no share (level ladder)"
    assert not replace(alone, share=1 / 3).is_level
    assert replace(alone, share=0.25, heights=(0.0, 0.0, 0.0)).is_level


def test_points_stay_on_ladders_that_rise_and_go_where_they_mislead() -> None:
    """Twelve seeds, the true share 0.62: of straight and bent ladders nearly all points stay, of one that is level to
    its middle a few."""
    rng, shown = np.random.default_rng(5), {}
    budgets = [600.0, 1200.0, 1800.0, 2400.0]
    curves = {
        "straight": [0.6, 0.64, 0.663, 0.68],
        "bent": [0.6, 0.65, 0.668, 0.678],
        "level": [0.67, 0.67, 0.685, 0.72],
    }
    for name, curve in curves.items():
        hits = 0
        for _ in range(25):
            ladder = {
                make_arm(f"mlm-{at:g}", at): rng.normal(mean, 0.015, 12).tolist()
                for at, mean in zip(budgets, curve, strict=True)
            }
            arm, mean = make_arm("ours", 900.0), np.interp(np.log(900 / 0.62), np.log(budgets), curve)
            results = make_results({**ladder, arm: rng.normal(mean, 0.015, 12).tolist()}, pretraining_seeds=range(12))
            found = compute_equivalent(results, arm, list(ladder))
            hits += not (found.is_level or found.beyond)
        shown[name] = hits / 25
    assert shown["straight"] > 0.9 and shown["bent"] > 0.75 and shown["level"] < 0.5


def test_interval_covers_the_true_share() -> None:
    """Simulated studies over pretraining seeds: the true share lies in 95 % of the intervals, or a little more."""
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        scores: dict[ReportArm, Sequence[float]] = {
            make_arm(f"mlm-{number}", 2.0**number): rng.normal(0.5 + 0.1 * number, 0.01, 5).tolist()
            for number in range(3)
        }
        ladder, arm = list(scores), make_arm("ours", 1.0)
        scores[arm] = rng.normal(0.6, 0.01, 5).tolist()
        found = compute_equivalent(make_results(scores, seeds=[0] * 5, pretraining_seeds=range(5)), arm, ladder)
        assert found.noise == ("pretraining seeds",), "one fine-tuning seed says nothing about others"
        hits += found.low <= 0.5 <= found.high
    assert hits >= 52


def test_what_cannot_be_asked() -> None:
    ladder = ladder_of([0.5, 0.6])
    arm = make_arm("ours", 1.0)
    results = make_results({**ladder, arm: [0.55]})
    alone = compute_equivalent(results, arm, list(ladder))
    assert math.isnan(alone.low) and show_multiple(alone) == "0.71", "a single seed has no interval"
    with pytest.raises(InputError, match="two budgets"):
        compute_equivalent(results, arm, list(ladder)[:1])
    with pytest.raises(InputError, match="tokens of mlm-0 are not known"):
        compute_equivalent(results, arm, list(ladder), "tokens")
    with pytest.raises(InputError, match="no scores of ours, mlm-0, mlm-1 on b"):
        compute_equivalent(results, arm, list(ladder), datasets=["b"])
    with pytest.raises(InputError, match="share no data set"):
        compute_equivalent(results, make_arm("absent", 1.0), list(ladder))


@pytest.mark.parametrize(
    ("name", "share", "low", "high"),
    [
        ("610m-clm-3k-mlm40-12k", 0.78, 0.76, 0.82),
        ("610m-clm-11k-mlm40-22k", 0.79, 0.68, 0.92),
        ("610m-clm-10k-mlm40-42k", 1.0, None, None),
    ],
)
def test_published_shares(name: str, share: float, low: float | None, high: float | None) -> None:
    """The paper's best splits against MLM at 40 %, by the mean of its twelve data sets. What one of 42,000 steps scores
    lies above the whole ladder: "at most"."""
    reference = ResultSet(tuple(r for r in read_reference().results if r.arm.size == "610M"))
    arms = {arm.name: arm for arm in reference.arms}
    ladder = [arms[f"610m-mlm40-{budget}"] for budget in ("12k", "22k", "42k")]
    found = compute_equivalent(reference, arms[name], ladder, "tokens")
    assert found.share == pytest.approx(share, abs=0.005) and len(found.score.cells) == 12
    assert found.noise == ("fine-tuning seeds",)
    if low is None or high is None:
        assert found.beyond == "above"
    else:
        assert (found.low, found.high) == (pytest.approx(low, abs=0.015), pytest.approx(high, abs=0.025))


def test_a_model_has_one_score_on_a_page() -> None:
    """80.295 by one order of adding and less by another: 80.30 beside the 80.29 of the table."""
    results = with_averages(read_reference())
    means = {name: scores[ALL_TASKS] for name, scores in results.scores.items() if ALL_TASKS in scores}
    ladder = [means[f"610m-mlm40-{budget}"].arm for budget in ("12k", "22k", "42k")]
    mean = means["610m-clm-32k-mlm40-42k"]
    found = compute_equivalent(results, mean.arm, ladder)
    assert (found.score.mean, found.score.interval.half_width) == (mean.mean, mean.interval.half_width)
