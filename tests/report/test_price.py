"""The list of prices: which arms it compares with which baseline, shares that are known, and what its files say."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from biphase.report.contrasts import with_averages
from biphase.report.equivalents import (
    AXES,
    PriceList,
    contrast_equal_flops,
    ladder_panel,
    list_prices,
    price_sentence,
    price_tables,
    tell_compute,
)
from biphase.report.figures import plot_panel
from biphase.report.paper import read_reference
from biphase.report.results import ReportArm, Result, ResultSet
from biphase.report.tables import table_files

NOISE = np.array([-0.004, 0.0, 0.004])
BASE = ReportArm("", "ratio", "1m", "mlm", 40, 100, 0, 100)


def make_arm(name: str, steps: int, **changes: object) -> ReportArm:
    """FLOPs are steps; tokens cost a tenth of that."""
    spent = {"flops": float(steps), "tokens": 10.0 * steps}
    return replace(BASE, name=name, pretrain_steps=steps, mlm_steps=steps, **{**spent, **changes})  # type: ignore[arg-type]


LADDER = {make_arm(f"mlm-{steps}", steps): 0.5 + 0.1 * at for at, steps in enumerate((100, 200, 400, 800))}
"""0.1 more with each doubling."""


def make_results(
    scores: dict[ReportArm, float], datasets: Sequence[str] = ("a", "b"), more: dict[str, float] | None = None
) -> ResultSet:
    """`more`: what arms other than the ladder's score above their mean on a data set."""
    rng = np.random.default_rng(0)
    found = []
    for arm, mean in scores.items():
        for number, dataset in enumerate(datasets):
            values = (
                mean
                + (0.0 if arm in LADDER else (more or {}).get(dataset, 0.0))
                + 0.02 * number
                - 0.01 * (len(datasets) - 1)
                + rng.permutation(NOISE)
            )
            found.append(Result(arm, "SC", dataset, "standard", values.tolist()))
    return ResultSet(tuple(found))


def only(results: ResultSet) -> PriceList:
    (listed,), lacking = list_prices(results)
    assert not lacking
    return listed


def names_of(listed: PriceList) -> list[str]:
    return [price.mean[0].score.arm.name for price in listed.prices]


def written(listed: PriceList, suffix: str) -> str:
    return next(text for name, text in table_files(price_tables(listed)).items() if name.endswith(suffix))


def test_known_shares_in_every_kind_of_compute() -> None:
    """0.75 is reached by the baseline at 2^0.5 of 400: a share of 0.707 for an arm of 400 steps, and by half of the
    tokens 0.354."""
    arm = make_arm("ours", 400, mask_percent=15, tokens=2000.0)
    results = make_results({**LADDER, arm: 0.75})
    listed = only(results)
    assert listed.baseline == tuple(LADDER) and names_of(listed) == ["ours"]
    shares = {found.axis: found for found in listed.prices[0].mean}
    assert list(shares) == list(AXES)
    assert shares["flops"].share == pytest.approx(2**-0.5, rel=0.01)
    assert shares["tokens"].share == pytest.approx(2**-1.5, rel=0.01)
    assert all(found.low < found.share < found.high for found in shares.values())
    sentence = price_sentence(listed)
    assert sentence.startswith("ours reaches the score of MLM alone (40 % masked) at 0.71 [0.")
    assert "of its FLOPs, on average over 2 tasks (interval over fine-tuning seeds only" in sentence


def test_a_difference_at_equal_flops_moves_each_arm_along_the_ladder() -> None:
    """CLM then MLM has 1.15 times the FLOPs and 5 points more than MLM with as many tokens, which gains 10 points with
    each doubling: 2.98 points are left, with the t interval of scipy over the seeds' own ladders. MNTP costs what MLM
    costs. Two arms that are no rungs are both moved."""
    clm = make_arm("clm-mlm", 200, objective="clm+mlm", flops=230.0, is_plain=False)
    mntp = make_arm("mntp", 200, flops=201.0, is_plain=False, curriculum="MNTP → MLM")
    results = make_results({**LADDER, clm: 0.65, mntp: 0.64}, ("a",))
    scores = {name: known["a"] for name, known in results.scores.items()}
    share = math.log2(1.15)
    mlm = (1 - share) * scores["mlm-200"].repeated + share * scores["mlm-400"].repeated
    for sign in (1, -1):
        terms = [(sign * 1.0, scores["clm-mlm"]), (sign * -1.0, scores["mlm-200"])]
        gap = contrast_equal_flops(results, terms)
        known = stats.ttest_1samp(sign * (scores["clm-mlm"].repeated - mlm), 0)
        assert gap and gap.estimate == pytest.approx(sign * (0.05 - 0.1 * share))
        low, high = known.confidence_interval()
        assert (gap.against().low, gap.against().high) == pytest.approx((low, high))
        assert gap.against().p_value == pytest.approx(known.pvalue)
        times = "1.15" if sign > 0 else "0.87"
        told = f" at equal tokens ({times} times the FLOPs; at equal FLOPs {'+' if sign > 0 else '−'}2.98 points ["
        assert tell_compute(results, terms).startswith(told)
    told = " at equal tokens (1.15 times the FLOPs; at equal FLOPs +2.98"
    assert tell_compute(results, terms, -1.0).startswith(told), "the sign of the difference that was written"
    both = contrast_equal_flops(results, [(1.0, scores["clm-mlm"]), (-1.0, scores["mntp"])])
    assert both and both.estimate == pytest.approx(0.01 - 0.1 * math.log2(230 / 201))
    assert tell_compute(results, [(1.0, scores["mntp"]), (-1.0, scores["mlm-200"])]) == "", "1.005 times the FLOPs"
    assert tell_compute(results, [(1.0, scores["mlm-400"]), (-1.0, scores["mlm-200"])]).startswith(" (2.00 times the")
    twice = [(1.0, scores["clm-mlm"]), (-2.0, scores["mntp"]), (1.0, scores["mlm-200"])]
    assert tell_compute(results, twice).startswith(f" at equal tokens ({(230 * 200) ** 0.5 / 201:.2f} times the FLOPs;")
    rise = contrast_equal_flops(results, [(1.0, scores["mlm-400"]), (-1.0, scores["mlm-200"])])
    assert rise is None, "a rung minus itself is zero"
    # Beyond the ladder, without one, or with unknown FLOPs nothing is moved.
    dear = make_arm("dear", 200, flops=900.0, is_plain=False)
    far = make_results({**LADDER, dear: 0.65}, ("a",))
    terms = [(1.0, far.scores["dear"]["a"]), (-1.0, far.scores["mlm-200"]["a"])]
    assert tell_compute(far, terms) == " at equal tokens (4.50 times the FLOPs)"
    unknown = make_results({make_arm("x", 200, flops=None): 0.6, make_arm("y", 200): 0.5}, ("a",))
    assert tell_compute(unknown, [(1.0, unknown.scores["x"]["a"]), (-1.0, unknown.scores["y"]["a"])]) == ""


def test_nothing_is_moved_across_a_gap_of_the_ladder() -> None:
    """A factor of 16 between two rungs is too far; beyond it the ladder is good, and a rung needs no other."""
    ladder = {make_arm(f"mlm-{steps}", steps): 0.5 + 0.1 * at for at, steps in enumerate((100, 1600, 3200))}
    arms = [make_arm(f"clm-{steps}", steps, objective="clm+mlm", is_plain=False) for steps in (230, 1840)]
    scores = make_results({**ladder, **dict.fromkeys(arms, 0.65)}, ("a",))
    for name, rung, is_moved in (("clm-230", "mlm-100", False), ("clm-1840", "mlm-1600", True)):
        terms = [(1.0, scores.scores[name]["a"]), (-1.0, scores.scores[rung]["a"])]
        assert (contrast_equal_flops(scores, terms) is not None) == is_moved


def test_losses_are_not_moved_along_a_ladder_of_another_objective() -> None:
    clm = {make_arm(f"clm-{steps}", steps, objective="clm", mask_percent=None): 4.7 for steps in (100, 200)}
    results = make_results({**dict.fromkeys(LADDER, 5.0), **clm}, ("loss",))
    losses = {name: known["loss"] for name, known in results.scores.items()}
    assert contrast_equal_flops(results, [(1.0, losses["clm-100"]), (-1.0, losses["clm-200"])]) is None


def test_a_rung_that_is_also_an_arm_has_its_spread_once() -> None:
    """Only means and spreads are known, as in the paper: equal scores on both sides cancel, spreads too."""
    results = with_averages(read_reference())
    scores = [results.scores[name]["SC"] for name in ("610m-clm-9k-mlm40-12k", "610m-mlm40-12k", "610m-mlm40-22k")]
    clm, low, high = scores
    share = math.log(clm.arm.flops / low.arm.flops) / math.log(high.arm.flops / low.arm.flops)  # type: ignore[operator]
    gap = contrast_equal_flops(results, [(1.0, clm), (-1.0, low)])
    weights = (1.0, 1 - share, share)
    known = sum((weight * score.std) ** 2 / score.num for weight, score in zip(weights, scores, strict=True))
    assert gap and gap.error == pytest.approx(math.sqrt(known))


def test_what_is_compared_with_what() -> None:
    """The baseline is plain MLM at the ratio with most budgets; undecayed and continued arms, random weights and
    other networks are no part of it, nor is what lacks a data set."""
    others = {
        make_arm("falling-100", 100, setup="other", mask_percent=15, is_plain=False): 0.5,
        make_arm("falling-200", 200, setup="other", mask_percent=15, is_plain=False): 0.61,
        make_arm("falling-400", 400, setup="other", mask_percent=15, is_plain=False): 0.72,
        make_arm("falling-800", 800, setup="other", mask_percent=15, is_plain=False): 0.83,
        make_arm("hot-400", 400, setup="other", is_plain=False): 0.71,
        make_arm("mlm20-400", 400, mask_percent=20): 0.66,
        make_arm("clm-400", 400, objective="clm", mask_percent=None): 0.55,
    }
    left_out = {
        make_arm("way", 300, setup="efficiency"): 0.6,
        make_arm("more", 800, setup="cpt", cpt_steps=100): 0.85,
        make_arm("random", 0, setup="control", objective="none", flops=None, tokens=None): 0.3,
        make_arm("large", 400, size="3m"): 0.8,
    }
    results = make_results({**LADDER, **others, **left_out})
    partly = make_results({make_arm("partly", 400, objective="clm"): 0.7}, ["a"])
    listed = only(ResultSet((*results.results, *partly.results)))
    assert listed.baseline == tuple(LADDER)
    assert set(names_of(listed)) == {arm.name for arm in others}
    # At 800 steps what is better lies beyond the ladder, so those of 400 are compared.
    assert [one.score.arm.name for one in listed.compared] == ["falling-400", "hot-400", "mlm20-400", "clm-400"]
    assert names_of(listed)[0] == "falling-800" and listed.prices[0].mean[0].beyond == "above"
    assert list_prices(make_results({arm: LADDER[arm] for arm in list(LADDER)[:2]} | others)) == ([], []), "two budgets"
    assert list_prices(ResultSet(())) == list_prices(make_results(left_out)) == ([], [])


def test_the_headline_is_what_was_declared_and_never_the_least_of_many() -> None:
    arms = {make_arm(f"ours-{at}", 400, mask_percent=at): 0.7 + 0.01 * at for at in (1, 2, 3)}
    results, ladder = make_results({**LADDER, **arms}), [arm.name for arm in LADDER]
    told = price_sentence(only(results))
    assert told.startswith("For the same score as MLM alone (40 % masked), 3 models need shares of its FLOPs from")
    assert re.search(r"from 0\.8\d .+ for ours-3 to 0\.9\d .+ for ours-1", told)
    (listed,), _ = list_prices(results, {"ours-2": ladder, "absent": ladder, "ours-3": ["another"]})
    told = price_sentence(listed)
    assert told.startswith("ours-2 reaches the score of") and "(declared in the study's hypotheses; interval" in told


def test_the_range_of_several_budgets_is_that_of_all_shares() -> None:
    """0.65 is the score of 2^1.5 · 100 steps, and 0.52 that of 2^0.2 · 100: shares of 1.41, 0.71 and 0.87."""
    arms = {make_arm("ours-400", 400, mask_percent=15): 0.65, make_arm("ours-200", 200, mask_percent=15): 0.65}
    arms |= {make_arm("ours-100", 100, mask_percent=15): 0.52}
    ladder = [arm.name for arm in LADDER]
    (listed,), _ = list_prices(make_results({**LADDER, **arms}), dict.fromkeys((arm.name for arm in arms), ladder))
    told = price_sentence(listed)
    assert re.search(r"3 models need shares of its FLOPs from 0\.71 .+ for ours-200 to 1\.41 .+ for ours-400", told)


def test_declared_shares_are_told_by_kind_of_task_beside_the_control() -> None:
    """0.85 on tagging, 0.65 on classification; the control of as many steps, about which nothing is declared, has 0.65
    on both."""
    ours, control = make_arm("ours", 400, objective="clm+mlm"), make_arm("twice", 400, is_plain=False)
    by_kind = {"SC": {ours: 0.65, control: 0.65}, "TC": {ours: 0.75, control: 0.65}}
    found = []
    for family, scores in by_kind.items():
        for result in make_results({**LADDER, **scores}, [family.lower()]).results:
            found.append(replace(result, family=family))  # type: ignore[arg-type]
    (listed,), _ = list_prices(ResultSet(found), {"ours": [arm.name for arm in LADDER]})
    told = price_sentence(listed)
    assert told.startswith("ours has the score of MLM alone (40 % masked) at these shares of its FLOPs: on sequence ")
    share = r"(\d\.\d\d) \[\d\.\d\d, \d\.\d\d\]"
    kinds = (rf"on {kind} classification {share}, where twice has {share}" for kind in ("sequence", "token"))
    shares = re.search("; ".join(kinds), told)
    assert shares and [float(group) for group in shares.groups()] == pytest.approx([1.41, 1.41, 0.71, 1.41], abs=0.05)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"a": 0.1, "b": -0.1}, "One task accounts for most of the difference: without a, the share of ours is 1.4"),
        ({"a": 0.0, "b": 0.0}, " Without b, the share of ours is 0.7"),
    ],
)
def test_a_share_by_task_says_whether_one_carries_it(more: dict[str, float], told: str) -> None:
    """0.75 on average, and by task 0.85 and 0.65: above the ladder, and at 2^(-1/2) of 400 steps' compute."""
    ours = make_arm("ours", 400, mask_percent=15)
    listed = only(make_results({**LADDER, ours: 0.75}, more=more))
    (price,) = listed.prices
    assert list(price.by_part) == ["a", "b"] and told in price_sentence(listed)
    is_one = bool(more["a"])
    assert price.by_part["a"].beyond == ("above" if is_one else "")
    assert price.by_part["b"].share == pytest.approx(2**0.5 if is_one else 2**-0.5, rel=0.02)
    rows = list(csv.DictReader(io.StringIO(written(listed, ".csv"))))
    assert [(row["on"], row["counted_in"]) for row in rows] == [
        *(("mean", axis) for axis in AXES),
        *((task, "flops") for task in "ab"),
    ]
    assert "| model | steps | relative FLOPs | a | b |" in written(listed, "-by-task.md")


def test_a_level_ladder_has_no_points_in_files_figure_and_headline() -> None:
    """0.5, 0.5, 0.6, 0.7 and an arm at 0.51 of 400 steps: a point on the first rise, an interval that is open below."""
    level = dict(zip(LADDER, (0.5, 0.5, 0.6, 0.7), strict=True))
    listed = only(make_results({**level, make_arm("ours", 400, objective="clm"): 0.502}))
    told = price_sentence(listed)
    bound = re.search(r"level: (at least \d\.\d\d) of its FLOPs, on average over 2 tasks", told)
    assert bound and told.startswith("ours reaches the score of MLM alone (40 % masked) where its ladder is level")
    assert f"| {bound[1]} (level ladder) |" in written(listed, "1m.md") and "One task" not in told
    assert "If the ladder is level within the interval" in written(listed, "1m.md")
    panel = ladder_panel(listed)
    assert panel.series[-1][0] == f"CLM (ours): {bound[1]} (level ladder)"
    ((begin, end, _, _),) = panel.distances
    assert begin == 100 and 200 < end < 300, "a line along the interval"
    row = next(csv.DictReader(io.StringIO(written(listed, ".csv"))))
    assert (row["beyond"], row["share"], row["high"]) == ("level", "", "") and float(row["low"]) > 1


def test_a_ladder_with_a_gap_is_not_read_and_the_page_says_why() -> None:
    far = {arm: score for arm, score in LADDER.items() if arm.pretrain_steps < 400} | {make_arm("mlm-3200", 3200): 0.9}
    listed, (told,) = list_prices(make_results({**far, make_arm("ours", 400, mask_percent=15): 0.75}))
    assert not listed and told.startswith(
        "1m has no compute-equivalents: mlm-200 and mlm-3200 are a factor of 16 apart"
    )


def test_bounds_are_said() -> None:
    for score, words, share in ((0.95, "scores above", "at most 0.25"), (0.3, "scores below", "at least 2.00")):
        steps = 200
        listed = only(make_results({**LADDER, make_arm("ours", steps, objective="clm", mask_percent=None): score}))
        sentence = price_sentence(listed)
        assert f"ours {words} MLM alone (40 % masked) at all of its budgets: {share} of its FLOPs" in sentence
        assert share in written(listed, ".md")
        ((_, end, _, _),) = ladder_panel(listed).distances
        assert end == pytest.approx(800 if score > 0.8 else 100), "the distance ends with the ladder"


def test_what_lies_above_the_ladder_is_named_first_and_what_lies_below_last() -> None:
    """At 400 steps: above all budgets, on the ladder for few FLOPs (a share of 150 / 400), below it."""
    arms = {
        make_arm("on", 400, mask_percent=15, flops=150.0): 0.7,
        make_arm("below", 400, objective="clm", mask_percent=None, flops=20.0): 0.4,
        make_arm("above", 400, objective="clm+mlm"): 0.9,
    }
    assert [one.score.arm.name for one in only(make_results({**LADDER, **arms})).compared] == ["above", "on", "below"]


def test_unknown_compute_has_no_column() -> None:
    """Tokens of an arm that are not known, and FLOPs of a baseline that are not."""
    ours = make_arm("ours", 400, objective="clm", tokens=None)
    assert [one.axis for one in only(make_results({**LADDER, ours: 0.7})).prices[0].mean] == ["flops"]
    odd = {replace(arm, flops=None): score for arm, score in LADDER.items()}
    listed = only(make_results({**odd, make_arm("ours", 400, objective="clm"): 0.7}))
    assert [found.axis for found in listed.prices[0].mean] == ["tokens"]
    assert "share of tokens |\n" in written(listed, ".md") and "of its tokens" in price_sentence(listed)


def test_distances_end_on_the_line() -> None:
    """Also where the baseline dips: its line is made monotone, its intervals stay those of its scores."""
    scores = dict(zip(LADDER, (0.5, 0.7, 0.6, 0.8), strict=True))
    listed = only(make_results({**scores, make_arm("ours", 200, objective="clm"): 0.75}))
    panel = ladder_panel(listed)
    (_, _, line), (label, _, (point,)) = panel.series
    ((begin, end, height, _),) = panel.distances
    assert begin == point[0] and height == pytest.approx(75, abs=0.01)
    assert [round(100 * interval.value) for _, interval, _ in line] == [50, 65, 65, 80]
    assert label.startswith("CLM (ours): 0.3")
    reach = [*listed.compared[0].ladder.values()][1].interval.half_width
    assert 100 * line[1][1].high == pytest.approx(70 + 100 * reach, abs=0.1)
    logs = np.log([x for x, _, _ in line])
    assert np.interp(math.log(end), logs, [100 * interval.value for _, interval, _ in line]) == pytest.approx(height)
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plot_panel(panel, axes)
    assert axes.get_xscale() == "log" and any(line.get_linestyle() == ":" for line in axes.lines)


def test_published_prices_and_their_files() -> None:
    """The known shares by tokens, 0.79 and 0.78, and what the intervals are over."""
    listed = only(read_reference())
    means = [price.mean for price in listed.prices]
    by_name = {first.score.arm.name: {found.axis: found for found in (first, *rest)} for first, *rest in means}
    assert [arm.pretrain_steps for arm in listed.baseline] == [12_000, 22_000, 42_000]
    assert by_name["610m-clm-11k-mlm40-22k"]["tokens"].share == pytest.approx(0.79, abs=0.005)
    assert by_name["610m-clm-3k-mlm40-12k"]["tokens"].share == pytest.approx(0.78, abs=0.005)
    assert by_name["610m-clm-10k-mlm40-42k"]["flops"].beyond == "above"
    files = table_files(price_tables(listed))
    suffixes = (".md", ".tex", ".csv", "-by-task.md", "-by-task.tex")
    names = {f"tables/compute-equivalents-610M{suffix}" for suffix in suffixes}
    assert set(files) == names | {"tables/document.tex"}
    assert (
        "One task accounts for most of the difference: without ReCoRD, the share of 610m-clm-11k-mlm40-22k is 0.93 [0."
        in price_sentence(listed)
    )
    markdown, latex = (files[f"tables/compute-equivalents-610M{suffix}"] for suffix in (".md", ".tex"))
    assert "over fine-tuning seeds only" in markdown and "Each model was pretrained once" in markdown
    assert "…" not in latex and "“" not in latex and latex.count(r"\\") == 1 + len(listed.prices)
    rows = list(csv.DictReader(io.StringIO(written(listed, ".csv"))))
    assert len(rows) == (2 + 4 + 12) * len(listed.prices), "tokens, FLOPs, families and tasks"
    ours = next(row for row in rows if row["arm"] == "610m-clm-11k-mlm40-22k" and row["counted_in"] == "tokens")
    assert (ours["beyond"], ours["noise"]) == ("", "fine-tuning seeds")
    assert 0.67 < float(ours["low"]) < float(ours["share"]) < float(ours["high"]) < 0.92
