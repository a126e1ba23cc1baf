"""The tidy form: what was published, averages, arms in their comparisons, and contrasts against scipy."""

import csv
import math
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from scipy import stats

from biphase.report.results import (
    AVERAGE,
    ReportArm,
    Result,
    ResultSet,
    arms_of,
    contrast,
    datasets_of,
    difference,
    disagreeing_averages,
    families,
    find,
    measured,
    missing_cells,
    place_arms,
    primary_metric,
    read_reference,
    reference_mask,
    select,
    sizes_of,
    with_averages,
)

CLM = ReportArm("clm", "objective", "1m", "clm", None, 100, 100, 0)
MLM = ReportArm("mlm", "objective", "1m", "mlm", 40, 100, 0, 100)


def test_reference_is_what_was_published() -> None:
    reference = read_reference()
    assert len(reference.results) == 800
    assert len(arms_of(reference)) == 50  # two models stand in three comparisons each
    assert len({arm.name for arm in arms_of(reference)}) == 46
    path = resources.files("biphase.report") / "reference" / "paper_scores.csv"
    for row, result in zip(csv.DictReader(path.read_text().splitlines()), reference.results, strict=True):
        assert (result.family, result.dataset) == (row["family"], row["dataset"])
        assert (round(100 * result.mean, 2), round(100 * result.half_width, 2)) == (
            float(row["mean"]),
            float(row["ci95"]),
        )
    assert families(reference) == ["SC", "TC", "QA", "IR"]
    assert datasets_of(reference, "IR", "paper") == ["NQ", "MS MARCO", "MLDR"]
    assert primary_metric(reference) == "paper"
    assert missing_cells(reference) == []


def test_reference_averages_agree() -> None:
    assert disagreeing_averages(read_reference()) == []
    average, other = select(read_reference(), "QA", AVERAGE).results[:2]
    wrong = ResultSet((*select(read_reference(), "QA").results[:3], replace(average, mean=other.mean)))
    (line,) = disagreeing_averages(wrong)
    assert "610m" not in line and "210m-mlm20-42k" in line and "51.73" in line


def test_published_names() -> None:
    """As the authors call them on the hub."""
    names = {arm.name: arm for arm in arms_of(read_reference())}
    assert names["610m-clm-3k-mlm40-12k"].clm_share == 0.25
    assert names["610m-mlm40-42k-1000"].parent == "610m-mlm40-42k"
    assert names["610m-mlm40-dec42k-mlm40-54k"].parent == "610m-mlm40-42k"
    assert names["610m-clm-dec42k-mlm40-44k"].parent == "610m-clm-42k"
    assert {arm.parent for arm in names.values()} - {None} <= names.keys()
    assert sizes_of(names.values()) == ["210M", "610M", "1B"]
    assert reference_mask(names.values()) == 40


def test_reference_flops_are_counted_as_plans_count() -> None:
    from biphase.config import Phase
    from biphase.encoder.presets import shape_of
    from biphase.flops import SampleLengths, flops_per_token

    high, low = 2048, 12  # samples of a stream cut at r, uniform in low..high - low, and high - r
    lengths = np.arange(low, high - low + 1)
    text = SampleLengths(high / 2, float((lengths**2 + (high - lengths) ** 2).mean() / high), "")
    for arm in arms_of(read_reference()):
        shape = shape_of(arm.size.lower(), {}, 128_256)
        mask = (arm.mask_percent or 0) / 100
        flops = 0.0
        for objective, steps in (("clm", arm.clm_steps), ("mlm", arm.mlm_steps), ("mlm", arm.cpt_steps)):
            if steps:
                extra = {"mask_probability": mask} if objective == "mlm" else {}
                phase = Phase(objective=objective, steps=steps, **extra)
                flops += steps * 2_359_296 * flops_per_token(shape, phase, text)
        assert arm.flops == pytest.approx(flops, rel=1e-4), arm.name


def test_published_spread() -> None:
    """±0.18 over five seeds is 1.96 · s / √5, so s = 0.2054 points; a printed 0.00 counts as 0.005."""
    result = Result(CLM, "SC", "SST-2", "paper", 0.87, 0.0018, (), None, 5)
    assert 100 * result.std == pytest.approx(0.18 * math.sqrt(5) / 1.96)
    assert 100 * replace(result, half_width=0.0).std == pytest.approx(0.005 * math.sqrt(5) / 1.96)


def test_averages_go_seed_by_seed() -> None:
    """(0.5, 0.7) and (0.8, 0.6) average to 0.65 with both seeds: no spread at all, although each dataset has one."""
    cells = [measured(CLM, "SC", "a", "standard", (0.5, 0.7)), measured(CLM, "SC", "b", "standard", (0.8, 0.6))]
    average = find(with_averages(cells), CLM, "SC", AVERAGE, "standard")
    assert average is not None
    assert average.samples == pytest.approx((0.65, 0.65))
    assert average.half_width == pytest.approx(0)


def test_averages_of_unequal_seeds_are_independent() -> None:
    cells = [measured(CLM, "SC", "a", "standard", (0.5, 0.7)), measured(CLM, "SC", "b", "standard", (0.8, 0.6, 0.7))]
    average = find(with_averages(cells), CLM, "SC", AVERAGE, "standard")
    assert average is not None
    assert (average.mean, average.samples, average.num) == (pytest.approx(0.65), (), 2)
    error = math.sqrt(0.02 / 2 + 0.01 / 3) / 2
    assert average.half_width == pytest.approx(1.96 * error)


def test_no_average_of_a_part() -> None:
    cells = [measured(CLM, "SC", name, "standard", (0.5, 0.7)) for name in "ab"]
    cells.append(measured(MLM, "SC", "a", "standard", (0.5, 0.7)))
    results = with_averages(cells)
    assert find(results, MLM, "SC", AVERAGE, "standard") is None
    assert missing_cells(results) == ["objective and masking ratio · mlm · SC: b (standard metric)"]
    assert with_averages(results.results) == results


def test_a_cell_stands_once() -> None:
    cell = measured(CLM, "SC", "a", "standard", (0.5, 0.7))
    with pytest.raises(AssertionError, match="twice"):
        ResultSet((cell, cell))


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
        select(reference, "SC", AVERAGE, setup="objective", size="610M", objective=objective).results[at]
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


def test_arms_find_their_comparisons() -> None:
    def arm(name: str, objective: str, clm: int, mlm: int, mask: int | None = 40, **more: object) -> ReportArm:
        return ReportArm(name, str(more.pop("setup", "")), "1m", objective, mask, clm + mlm, clm, mlm, **more)  # type: ignore[arg-type]

    arms = [
        arm("clm", "clm", 100, 0, None),
        arm("mlm", "mlm", 0, 100),
        arm("mlm20", "mlm", 0, 100, 20),
        arm("short-clm", "clm", 50, 0, None),
        arm("short-mlm", "mlm", 0, 50),
        arm("short-lonely", "mlm", 0, 30),
        arm("split", "clm+mlm", 25, 75),
        arm("short-split", "clm+mlm", 25, 25),
        arm("split20", "clm+mlm", 25, 75, 20),
        arm("continued", "clm", 100, 0, cpt_steps=20, parent="clm"),
        arm("on the way", "clm", 10, 0, None, setup="efficiency", parent="clm"),
        arm("detour", "clm+mlm", 50, 50, setup="other"),
    ]
    placed: dict[str, set[str]] = {}
    for each in place_arms(arms):
        placed.setdefault(each.name, set()).add(each.setup)
    assert placed == {
        "clm": {"objective", "ratio", "cpt"},
        "mlm": {"objective", "ratio"},
        "mlm20": {"objective"},
        "short-clm": {"ratio"},
        "short-mlm": {"ratio"},
        "short-lonely": {"other"},
        "split": {"ratio", "adapted"},
        "short-split": {"ratio"},
        "split20": {"adapted"},
        "continued": {"cpt"},
        "on the way": {"efficiency"},
        "detour": {"other"},
    }


def test_reference_arms_find_the_papers_comparisons() -> None:
    """Placed by what they are, the paper's models stand in the tables in which it printed them."""
    published = [arm for arm in arms_of(read_reference())]
    models = {arm.name: arm for arm in published}.values()
    placed = place_arms(replace(arm, setup="efficiency" if arm.setup == "efficiency" else "") for arm in models)
    assert {(arm.name, arm.setup) for arm in placed} == {(arm.name, arm.setup) for arm in published}
