"""The tidy form: averages, spreads, and what is missing."""

import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from biphase.finetuning.scores import KeptExamples, ScoreSet, read_score, read_scores
from biphase.report import results
from biphase.report.contrasts import difference, with_averages
from biphase.report.figures import choose_objectives
from biphase.report.page import describe_results
from biphase.report.results import (
    ReportArm,
    Result,
    ResultSet,
    list_gaps,
    pool,
    select_rate,
)
from biphase.report.statistics import Interval
from biphase.studies.report import collect_model
from biphase.tasks import families

CLM = ReportArm("clm", "objective", "1m", "clm", None, 100, 100, 0)
MLM = ReportArm("mlm", "objective", "1m", "mlm", 40, 100, 0, 100)


def published(arm: ReportArm, mean: float, half_width: float, num: int = 5) -> Result:
    """A score of which the mean ± is known."""
    return Result(arm, "SC", "a", "paper", summary=Interval(mean, mean - half_width, mean + half_width, num=num))


def test_a_code_has_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a family's record does not rename the code that both share."""
    monkeypatch.setattr(families, "TASK_FAMILIES", (*families.TASK_FAMILIES, "ordinal"))
    monkeypatch.setitem(families.KINDS, "ordinal", families.SEQUENCE_CLASSIFICATION)  # type: ignore[misc]
    again = runpy.run_path(str(results.__file__), run_name=results.__name__)
    assert again["FAMILY_CODES"]["ordinal"] == "SC"
    assert again["FAMILY_NAMES"] == results.FAMILY_NAMES
    assert [*results.FAMILY_NAMES] == ["SC", "TC", "QA", "IR", "EM", "OT"]
    assert results.FAMILY_NAMES["SC"] == "sequence classification"


def test_published_spread() -> None:
    """±0.18 over five seeds is 1.96 · s / √5, so s = 0.2054 points; a printed 0.00 counts as 0.005."""
    result = published(CLM, 0.87, 0.0018)
    assert 100 * result.std == pytest.approx(0.18 * math.sqrt(5) / 1.96)
    assert 100 * published(CLM, 0.87, 0.0).std == pytest.approx(0.005 * math.sqrt(5) / 1.96)


def test_averages_go_seed_by_seed() -> None:
    """(0.5, 0.7) and (0.8, 0.6) average to 0.65 with both seeds: no spread at all, although each dataset has one.
    So no interval: two equal numbers tell nothing of a third."""
    cells = [Result(CLM, "SC", "a", "standard", (0.5, 0.7)), Result(CLM, "SC", "b", "standard", (0.8, 0.6))]
    average = with_averages(ResultSet(cells)).scores[CLM.name]["SC"]
    assert average.samples == pytest.approx((0.65, 0.65))
    assert math.isnan(average.interval.half_width) and not math.isnan(cells[0].interval.half_width)


def test_pretrainings_are_pooled() -> None:
    """Two pretraining seeds with two and three fine-tuning seeds: the interval is over the two means, 0.6 and 0.7."""
    parts = [
        Result(
            CLM,
            "SC",
            "a",
            "standard",
            scores,
            {1e-5: scores},
            seeds=range(len(scores)),
            pretraining_seeds=[seed] * len(scores),
        )
        for seed, scores in ((7, (0.5, 0.7)), (8, (0.6, 0.7, 0.8)))
    ]
    pooled = pool(parts)
    assert pooled.samples == (0.5, 0.7, 0.6, 0.7, 0.8) and pooled.num == 5 and pooled.num_pretrainings == 2
    assert (pooled.seeds, pooled.pretraining_seeds) == ((0, 1, 0, 1, 2), (7, 7, 8, 8, 8))
    assert pooled.by_rate == {1e-5: pooled.samples}
    assert pooled.mean == pytest.approx(0.65)
    # s/√2 of 0.6 and 0.7, one degree of freedom
    assert pooled.interval.half_width == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert pool(parts[:1]) is parts[0]
    told = describe_results(with_averages(ResultSet([pooled, Result(MLM, "SC", "a", "standard", (0.5, 0.7))])))
    assert dict(told)["repeats"] == "2 pretraining seeds, 2 fine-tuning seeds"


def test_single_seeds_are_tested_at_the_rate_that_other_pretrainings_choose(write_cell: Any) -> None:
    """Of three pretrainings with one fine-tuning seed the first is lucky at one rate, the others at the other: each is
    tested where the others send it. They chose for each other, so the test accounts for that choice."""
    scores = []
    for seed, values in enumerate(((0.9, 0.5), (0.5, 0.8), (0.6, 0.9))):
        both = dict(zip((1e-5, 2e-5), values, strict=True))
        scores.append([read_score(write_cell(f"m{seed}", rate=r, test=v, validation=v)) for r, v in both.items()])
    parts: list[Result] = []
    for seed, own in enumerate(scores):
        peers = [score for some in scores if some is not own for score in some]
        found = collect_model(CLM, seed, ScoreSet(tuple(own)), {"genre": "SC"}, peers)
        parts.append(next(one for one in found if one.metric == "standard"))
    pooled = pool(parts)
    assert pooled.samples == (0.5, 0.5, 0.6)
    assert pooled.choice and [len(some) for some in pooled.choice.by_rate.values()] == [3, 3]
    counted = difference(pooled, replace(pooled, choice=None)).choice_variance
    assert counted == pooled.choice.draw_noise().variance / 2 > 0, "pretrainings share the other half"
    assert (
        pool(
            [replace(one, samples=one.samples * 2, pretraining_seeds=one.pretraining_seeds * 2) for one in parts]
        ).choice
        is None
    ), "each chose for itself"


def test_a_rate_of_an_unfinished_grid_without_a_survivor_is_no_rival(write_cell: Any, scores_folder: Path) -> None:
    """One seed diverged at both rates; at the second, the other one is not there yet."""
    for rate, seed, score in ((1e-5, 0, 0.8), (1e-5, 1, None), (2e-5, 1, None)):
        write_cell("m", rate=rate, seed=seed, test=score, validation=0.8)
    chosen = select_rate(read_scores(scores_folder), "m", "genre")
    assert (chosen.samples, chosen.rate, chosen.num_diverged) == ((0.8,), 1e-5, 1)
    assert chosen.choice and [*chosen.choice.by_rate] == [1e-5] and chosen.choice.draw_noise().variance == 0


def test_predictions_that_contradict_their_score_are_missing(write_cell: Any) -> None:
    cells = [write_cell("m", seed=seed, test=0.5, lines=[{"id": "a", "score": 0.5}]) for seed in range(2)]
    result = Result(CLM, "SC", "a", "standard", (0.5, 0.5), examples=KeptExamples(tuple(map(read_score, cells))))
    assert list_gaps(ResultSet((result,))) == []
    (cells[1] / "test.jsonl").write_text('{"id": "a", "score": 1.0}\n')
    edited = replace(result, examples=KeptExamples(tuple(map(read_score, cells))))
    [line] = list_gaps(ResultSet((edited,)))
    assert line.startswith("clm on a: test examples are not accounted for") and "gives accuracy 1.0000 where" in line


def test_averages_of_unequal_seeds_are_independent() -> None:
    """Student's t, with Welch's degrees of freedom, of the two means over two and three seeds."""
    cells = [Result(CLM, "SC", "a", "standard", (0.5, 0.7)), Result(CLM, "SC", "b", "standard", (0.8, 0.6, 0.7))]
    average = with_averages(ResultSet(cells)).scores[CLM.name]["SC"]
    assert (average.mean, average.samples, average.num) == (pytest.approx(0.65), (), 2)
    welch = stats.ttest_ind((0.5, 0.7), (0.8, 0.6, 0.7), equal_var=False).confidence_interval()
    assert average.interval.half_width == pytest.approx((welch.high - welch.low) / 2 / 2)


def test_averages_without_a_cell_stay_over_pretraining_seeds() -> None:
    """Three pretraining seeds, two fine-tuning seeds, two tasks of which one lacks a cell: interval and test are those
    over three means, whose fine-tuning seeds agree here, as with all cells."""

    def average_of(arm: ReportArm, levels: tuple[float, ...], num_lacking: int) -> Result:
        cells = []
        for dataset, lacking in (("a", num_lacking), ("b", 0)):
            points = [(seed, level) for seed, level in enumerate(levels) for _ in range(2)][lacking:]
            seeds = [at % 2 for at in range(6)][lacking:]
            scores = [level for _, level in points]
            pretraining = [seed for seed, _ in points]
            cells.append(Result(arm, "SC", dataset, "standard", scores, seeds=seeds, pretraining_seeds=pretraining))
        return with_averages(ResultSet(cells)).scores[arm.name]["SC"]

    whole, part = (average_of(CLM, (0.50, 0.52, 0.57), num) for num in (0, 1))
    assert part.samples == () and part.num_pretrainings == 3
    assert part.interval.half_width == pytest.approx(whole.interval.half_width) and whole.interval.half_width > 0.08
    other = average_of(MLM, (0.49, 0.53, 0.52), 0)
    assert difference(part, other).against().p_value == pytest.approx(difference(whole, other).against().p_value)
    assert difference(part, other).noise == ("pretraining seeds", "fine-tuning seeds")


def test_no_average_of_a_part() -> None:
    cells = [Result(CLM, "SC", name, "standard", (0.5, 0.7)) for name in "ab"]
    cells.append(Result(MLM, "SC", "a", "standard", (0.5, 0.7)))
    results = with_averages(ResultSet(cells))
    assert "SC" not in results.scores[MLM.name]
    assert list_gaps(results) == ["objective and masking ratio · mlm · SC: b (standard metric)"]
    assert with_averages(results) == results


def pairs(*arms: ReportArm) -> list[tuple[str, str]]:
    """The arms with CLM and with MLM that a figure sets beside each other."""
    results = ResultSet(tuple(Result(arm, "SC", "a", "standard", (0.5, 0.7)) for arm in arms))
    names = [arm.name for (arm,) in choose_objectives(results)]
    return [*zip(names[: len(names) // 2], names[len(names) // 2 :], strict=True)]


def test_objectives_are_compared_under_one_recipe() -> None:
    """Of two MLM arms of one size and budget the one with the recipe of most arms, wherever it stands; of two with
    recipes of their own neither."""
    tuned, other = (replace(MLM, name=name, is_plain=False) for name in ("tuned", "other"))

    assert pairs(CLM, MLM, tuned) == pairs(tuned, MLM, CLM) == [("clm", "mlm")]
    assert pairs(CLM, tuned) == [("clm", "tuned")]
    assert pairs(CLM, tuned, other) == pairs(MLM) == []


def test_objectives_are_compared_at_one_budget() -> None:
    """The largest that both have, in whatever order the arms stand; none where they share none."""
    clm, mlm = (replace(arm, name=f"{arm.name}-short", pretrain_steps=10) for arm in (CLM, MLM))

    assert pairs(clm, CLM, mlm, MLM) == pairs(clm, CLM, MLM) == pairs(MLM, mlm, CLM) == [("clm", "mlm")]
    assert pairs(clm, CLM, mlm) == [("clm-short", "mlm-short")]
    assert pairs(clm, MLM) == []


def test_a_cell_stands_once() -> None:
    cell = Result(CLM, "SC", "a", "standard", (0.5, 0.7))
    with pytest.raises(AssertionError, match="twice"):
        with_averages(ResultSet((cell, cell)))
