"""What was published, what its models are called, and which of the paper's comparisons an arm belongs to."""

import csv
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from biphase.report.figures import choose_gaps, choose_undecayed
from biphase.report.paper import place_arms, read_findings, read_reference, stand_for
from biphase.report.results import (
    AVERAGE,
    ReportArm,
    Result,
    ResultSet,
    check_averages,
    list_gaps,
    reference_mask,
)
from biphase.report.tables import make_tables


def test_reference_is_what_was_published() -> None:
    reference = read_reference()
    assert len(reference.results) == 800
    assert len(reference.arms) == 50  # two models stand in three comparisons each
    assert len({arm.name for arm in reference.arms}) == 46
    path = resources.files("biphase") / "bundled" / "paper" / "paper_scores.csv"
    for row, result in zip(csv.DictReader(path.read_text().splitlines()), reference.results, strict=True):
        assert (result.family, result.dataset) == (row["family"], row["dataset"])
        assert (round(100 * result.mean, 2), round(100 * result.interval.half_width, 2)) == (
            float(row["mean"]),
            float(row["ci95"]),
        )
    assert reference.families == ["SC", "TC", "QA", "IR"]
    assert reference.datasets["IR"] == ["NQ", "MS MARCO", "MLDR"]
    assert reference.primary_metric == "paper"
    assert list_gaps(reference) == []


def test_reference_averages_agree() -> None:
    (summary,) = check_averages(read_reference())
    assert summary.endswith("averages equal the mean over their datasets, up to rounding.")
    average, other = read_reference().select("QA", AVERAGE).results[:2]
    wrong = ResultSet((*read_reference().select("QA").results[:3], replace(average, summary=other.summary)))
    _, line = check_averages(wrong)
    assert "610m" not in line and "210m-mlm20-42k" in line and "51.73" in line
    dataset = wrong.results[0]
    same = replace(average, summary=dataset.summary)
    assert check_averages(ResultSet((dataset, same))) == [], "nothing is averaged in families of one dataset"
    (line,) = check_averages(ResultSet((dataset, average)))
    assert "210m-mlm20-42k" in line and "the mean of its datasets is" in line


def test_published_names() -> None:
    """As the authors call them on the hub."""
    names = {arm.name: arm for arm in read_reference().arms}
    assert names["610m-clm-3k-mlm40-12k"].clm_share == 0.25
    assert names["610m-mlm40-42k-1000"].parent == "610m-mlm40-42k"
    assert names["610m-mlm40-dec42k-mlm40-54k"].parent == "610m-mlm40-42k"
    assert names["610m-clm-dec42k-mlm40-44k"].parent == "610m-clm-42k"
    assert {arm.parent for arm in names.values()} - {None} <= names.keys()
    assert read_reference().sizes == ["210M", "610M", "1B"]
    assert reference_mask(names.values()) == 40


def test_reference_flops_are_counted_as_plans_count() -> None:
    from biphase.curriculum import Phase
    from biphase.flops import SampleLengths, flops_per_token, shape_of

    high, low = 2048, 12  # samples of a stream cut at r, uniform in low..high - low, and high - r
    lengths = np.arange(low, high - low + 1)
    text = SampleLengths(high / 2, float((lengths**2 + (high - lengths) ** 2).mean() / high), "")
    for arm in read_reference().arms:
        shape = shape_of(arm.size.lower(), {}, 128_256)
        mask = (arm.mask_percent or 0) / 100
        flops = 0.0
        for objective, steps in (("clm", arm.clm_steps), ("mlm", arm.mlm_steps), ("mlm", arm.cpt_steps)):
            if steps:
                extra = {"mask_probability": mask} if objective == "mlm" else {}
                phase = Phase(objective=objective, steps=steps, **extra)
                flops += steps * 2_359_296 * flops_per_token(shape.flops, phase, text)
        assert arm.flops == pytest.approx(flops, rel=1e-4), arm.name


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


def test_an_arm_with_its_own_recipe_leaves_the_papers_comparisons_to_its_plain_twin() -> None:
    """As 25 % CLM with another optimizer beside 25 % CLM: finding F6 is about the latter."""
    plain = {
        "mlm": ReportArm("mlm", "", "1m", "mlm", 40, 100, 0, 100),
        "split": ReportArm("split", "", "1m", "clm+mlm", 40, 100, 25, 75),
        "clm": ReportArm("clm", "", "1m", "clm", None, 100, 100, 0),
        "later": ReportArm("later", "", "1m", "clm", 40, 100, 100, 0, cpt_steps=20, parent="clm"),
    }
    own = [replace(arm, name=f"own-{name}", is_plain=False) for name, arm in plain.items()]
    half = ReportArm("own-half", "", "1m", "clm+mlm", 40, 100, 50, 50, is_plain=False)
    placed: dict[str, set[str]] = {}
    for each in place_arms([*own, *plain.values(), half]):
        placed.setdefault(each.name, set()).add(each.setup)
    assert {name: placed[name] for name in plain} == {
        "mlm": {"objective", "ratio"},
        "split": {"ratio"},
        "clm": {"objective", "ratio", "cpt"},
        "later": {"cpt"},
    }
    assert placed["own-half"] == {"ratio"}, "it has no plain twin"
    assert {name: placed[f"own-{name}"] for name in plain} == {
        "mlm": {"objective"},
        "split": {"other"},
        "clm": {"objective"},
        "later": {"other"},
    }
    results = ResultSet(
        tuple(Result(arm, "SC", "SST-2", "standard", (0.5, 0.6)) for arm in place_arms([*own, *plain.values()]))
    )
    pairs = choose_gaps(results, "ratio", ("clm+mlm",))
    assert [[arm.name for arm in pair] for pair in pairs] == [["split", "mlm"]]


def test_reference_arms_find_the_papers_comparisons() -> None:
    """Placed by what they are, the paper's models stand in the tables in which it printed them."""
    published = [arm for arm in read_reference().arms]
    models = {arm.name: arm for arm in published}.values()
    placed = place_arms(replace(arm, setup="efficiency" if arm.setup == "efficiency" else "") for arm in models)
    assert {(arm.name, arm.setup) for arm in placed} == {(arm.name, arm.setup) for arm in published}


def test_checkpoints_of_continued_training_are_no_checkpoints_from_scratch() -> None:
    """Neither in finding F4 nor in the figure; the table of checkpoints counts their steps from the very beginning."""
    clm = ReportArm("clm-60", "efficiency", "1m", "clm", None, 60, 60, 0, parent="clm")
    mlm = replace(clm, name="mlm-60", objective="mlm", mask_percent=40, clm_steps=0, mlm_steps=60, parent="mlm")
    parents = [replace(arm, name=f"{arm.objective}-100", pretrain_steps=100, parent=None) for arm in (clm, mlm)]
    later = [replace(arm, name=f"{arm.name}-mlm-20", mask_percent=40, cpt_steps=20) for arm in parents]
    results = ResultSet([Result(arm, "SC", "a", "standard", (0.5, 0.6)) for arm in (clm, mlm, *parents, *later)])
    names = {name: stand_for(definition, results) for name, definition in read_findings()["names"].items()}
    for name in ("on the way", "from 20/42", "before 20/42"):
        assert {arm for of_spot in names[f"clm {name}"].values() for arm in of_spot.values()} <= {"clm-60", "clm-100"}
    assert [arm.name for (arm,) in choose_undecayed(results)] == ["clm-60", "clm-100", "mlm-60", "mlm-100"]
    (table,) = make_tables(results)
    steps = table.stub.index("steps")
    assert {row.stub[0]: row.stub[steps] for row in table.rows}["clm-100-mlm-20"] == "120"
