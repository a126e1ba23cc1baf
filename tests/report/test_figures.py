"""Figures are drawn where there are scores, say what they lack, show intervals, and are the same every time."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from biphase import style
from biphase.report.contrasts import difference, with_averages
from biphase.report.figures import (
    FIGURES,
    Panel,
    choose_gaps,
    figure_pool,
    fill_panels,
    list_figures,
    look_of,
    plot_panel,
    round_ticks,
    save_figure,
    share_out_curves,
)
from biphase.report.paper import read_reference
from biphase.report.results import AVERAGE, ReportArm, Result, ResultSet
from biphase.style import CURVE_POINTS, LOOKS, SERIES, plot_losses, thin

LOSSES = {
    "clm-100": [{"kind": "train", "step": step, "objective": "clm", "loss": 9 - step / 20} for step in range(1, 101)],
    "clm-50-mlm-100": [
        *({"kind": "train", "step": s, "objective": "clm" if s <= 50 else "mlm", "loss": 9.0} for s in range(1, 101)),
        {"kind": "validation", "step": 100, "objective": "mlm", "loss": 8.5, "accuracy": 0.1},
    ],
}


@pytest.fixture(scope="module", autouse=True)
def quick_fonts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fonts that are not subset: half of the time."""
    quick = tmp_path_factory.mktemp("style") / "quick.mplstyle"
    quick.write_text(style.PLOT_STYLE.read_text().replace("pdf.fonttype: 42", "pdf.fonttype: 3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphase.report.figures.PLOT_STYLE", quick)
        yield


@pytest.fixture(scope="module")
def study() -> ResultSet:
    """The published means of two families as a study with scores by seed and rate, and with MLM after CLM too."""
    results = []
    for published in read_reference().results:
        if published.family not in ("SC", "QA") or published.dataset == AVERAGE:
            continue
        rng = np.random.default_rng(len(results))
        noise = 0.001 if published.arm.objective == "clm" else 0.003
        scores = {rate: tuple(published.mean + noise * rng.standard_normal(5)) for rate in (1e-5, 5e-5, 1e-4)}
        place = (published.family, published.dataset, published.metric)
        results.append(Result(published.arm, *place, scores[5e-5], scores))
        if published.arm.setup == "objective" and published.arm.size == "610M" and published.arm.objective == "mlm":
            after = replace(published.arm, name=f"610m-clm-40k-mlm{published.arm.mask_percent}-42k", setup="adapted")
            after = replace(after, objective="clm+mlm", clm_steps=40_000, mlm_steps=2_000)
            results.append(Result(after, *place, [0.01 + score for score in scores[5e-5]]))
    return with_averages(ResultSet(results))


@pytest.fixture(scope="module")
def drawn(study: ResultSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every figure."""
    folder = tmp_path_factory.mktemp("figures")
    plots, missing = list_figures(study, LOSSES)
    with figure_pool() as pool:
        list(pool.map(partial(save_figure, folder=folder), plots.keys(), plots.values()))
    assert missing == []
    assert list(plots) == [*FIGURES, "losses"]
    return folder


def test_no_process_that_draws_outlives_the_report() -> None:
    code = """
import os
from biphase.report.figures import figure_pool
pool = figure_pool()
print(pool.submit(os.getpid).result(), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -9 and done.stdout.strip(), "its pipe is closed when the last process has ended"


def test_losses_of_several_seeds_are_a_mean_and_a_band() -> None:
    """Over the steps that all of them have; of one seed, the line alone."""
    rows = [
        {"objective": "mlm", "kind": "train", "step": step, "loss": 5.0 + seed, "seed": seed}
        for seed in range(3)
        for step in range(1, 11)
    ]
    axes = Figure().add_subplot()
    plot_losses([*rows, rows[0] | {"step": 11}], LOOKS["mlm"], ("arm", None), axes)
    [line], [band] = axes.lines, axes.collections
    assert line.get_xdata().tolist() == [*range(1, 11)] and line.get_ydata().tolist() == [6.0] * 10
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max(), corners[:, 0].max()) == (5.0, 7.0, 10.0)
    alone = Figure().add_subplot()
    plot_losses(rows[:10], LOOKS["mlm"], ("arm", None), alone)
    assert len(alone.lines) == 1 and not alone.collections


def draw(panel: Panel) -> Any:
    axes = Figure().add_subplot()
    plot_panel(panel, axes)
    return axes


def test_all_are_drawn(drawn: Path) -> None:
    names = {*FIGURES, "losses"}
    assert {path.name for path in drawn.iterdir()} == {
        f"{name}{suffix}" for name in names for suffix in (".svg", ".pdf")
    }
    for name in names:
        svg = (drawn / f"{name}.svg").read_text()
        assert svg.count("<svg") == 1 and "NaN" not in svg
        assert (drawn / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_text_stays_text_and_axes_have_units(drawn: Path) -> None:
    words = {path.stem: re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text()) for path in drawn.glob("*.svg")}
    assert {"accuracy (%)", "F1 of token positions (%)", "parameters without the head", "MLM 40 %", "1B"} <= set(
        words["objective-by-size"]
    )
    assert {"pretraining steps, no decay", "1k", "40k"} <= set(words["score-by-steps"])
    assert {"ahead of MLM alone (points)", "25 % CLM, then MLM", "12k", "42k"} <= set(words["splits"])
    assert {"spread (points)"} <= set(words["rate-spread"])
    assert {"training FLOPs (×10²⁰)", "2", "5"} <= set(words["score-by-flops"])
    assert {"loss (nats per target)", "CLM", "MLM", "clm-50-mlm-100"} <= set(words["losses"])
    assert {"40k CLM, then 2k MLM", "MLM", "masked tokens (%)"} <= set(words["masking-after-clm"])


def test_the_same_every_time(tmp_path: Path) -> None:
    part = read_reference().select("QA", setup="ratio")
    for name in ("first", "second"):
        for figure, plots in list_figures(part)[0].items():
            save_figure(figure, plots, tmp_path / name)
    assert sorted(path.name for path in (tmp_path / "first").glob("*.svg")) == ["score-by-flops.svg", "splits.svg"]
    for one in (tmp_path / "first").iterdir():
        assert one.read_bytes() == (tmp_path / "second" / one.name).read_bytes()


def test_only_figures_whose_arms_are_there_can_lack_scores() -> None:
    """The paper has no scores by rate; and none of its arms was adapted, so that figure is not missed."""
    plots, lacking = list_figures(read_reference())
    assert lacking == ["“Spread over fine-tuning rates” needs test scores at every fine-tuning rate and seed"]
    assert "masking-after-clm" not in plots and "losses" not in plots


def test_a_figure_of_one_point_a_panel_is_left_out() -> None:
    """CLM and MLM of one size are two points, which a table says as well; those of three sizes are lines."""
    of_one = ResultSet(read_reference().select("SC", setup="objective", size="210M", mask_percent=None).results)
    assert list_figures(of_one) == ({}, [])
    two = read_reference().select("SC", setup="ratio", pretrain_steps=12_000).results
    pair = ResultSet([one for one in two if one.arm.clm_steps in (0, 3000) and one.arm.objective != "clm"])
    assert fill_panels("splits", pair) and list_figures(pair) == ({}, [])


def test_axes_of_shares_end_at_0_and_100_and_those_of_correlations_do_not() -> None:
    cells = []
    for (objective, mask, scores), size in itertools.product(
        (("clm", None, (0.0, 0.1)), ("mlm", 40, (0.9, 1.0))), ("1m", "3m")
    ):
        arm = ReportArm(f"{objective}-{size}", "objective", size, objective, mask, 9)  # type: ignore[arg-type]
        cells += [Result(arm, "SC", "a", "standard", scores, measure="mcc"), Result(arm, "TC", "b", "standard", scores)]
    correlation, f1 = map(draw, fill_panels("objective-by-size", with_averages(ResultSet(cells))))
    assert f1.get_ylim() == (0, 100) and correlation.get_ylim()[0] < -40 and correlation.get_ylim()[1] > 140


def test_points_are_the_scores_with_their_intervals() -> None:
    """CLM at 210M, 610M, 1B on SC: 82.80 ± 0.02, 83.58 ± 0.17, 82.68 ± 0.30."""
    axes = draw(fill_panels("objective-by-size", read_reference())[0])
    clm = next(c for c in axes.containers if isinstance(c, ErrorbarContainer) and c.get_label() == "CLM")
    line, _, (reach,) = clm
    assert line.get_ydata() == pytest.approx([82.80, 83.58, 82.68])
    low_high = np.array([segment[:, 1] for segment in reach.get_segments()])
    assert low_high == pytest.approx(np.array([[82.78, 82.82], [83.41, 83.75], [82.38, 82.98]]))


def test_bars_are_differences_from_zero() -> None:
    """On QA with 42k steps, 25 % CLM is at 67.77 ± 0.53 and CLM alone at 42.09, against 62.77 ± 1.86."""
    reference = read_reference()
    axes = draw(fill_panels("splits", reference)[2])
    by_label = {c.get_label(): c for c in axes.containers if isinstance(c, BarContainer)}
    shares = [f"{percent} % CLM, then MLM" for percent in (25, 50, 75)]
    assert [*by_label] == [*shares, "CLM alone"]
    bars = by_label[shares[0]]
    assert [bar.get_height() for bar in bars] == pytest.approx([43.77 - 41.51, 54.43 - 51.44, 67.77 - 62.77])
    assert by_label["CLM alone"][2].get_height() == pytest.approx(42.09 - 62.77)
    assert {bar.get_y() for bar in bars} == {0}
    ours, theirs = (
        reference.select("QA", AVERAGE, setup="ratio", pretrain_steps=42_000, clm_steps=steps).results[0]
        for steps in (10_000, 0)
    )
    reach = bars.errorbar[2][0].get_segments()[2][:, 1]
    gap = difference(ours, theirs).against()
    assert reach == pytest.approx([100 * gap.low, 100 * gap.high])


def test_one_seed_is_drawn_without_interval() -> None:
    results = [
        Result(r.arm, r.family, r.dataset, r.metric, (r.mean,))
        for r in read_reference().select("SC", setup="ratio").results
    ]
    axes = draw(fill_panels("splits", ResultSet(tuple(results)))[0])
    bars = next(c for c in axes.containers if isinstance(c, BarContainer))
    assert [len({end for _, end in segment}) for segment in bars.errorbar[2][0].get_segments()] == [1, 1, 1]


def test_every_panel_is_drawn_with_a_cell_missing(study: ResultSet) -> None:
    """Any arm may be unfinished in a partial study."""
    for arm in study.arms[::8]:
        part = ResultSet(tuple(r for r in study.results if r.arm != arm or r.family != "SC"))
        for name in FIGURES:
            if name not in ("masking-ratio", "rate-spread", "score-by-steps", "score-by-flops"):
                for panel in fill_panels(name, part)[:1]:
                    draw(panel)


def test_series_differ_without_colour() -> None:
    for looks in (LOOKS.values(), SERIES):
        for key in ("marker", "line", "hatch", "color"):
            values = [getattr(look, key) for look in looks]
            assert len(set(values)) == len(values), key


def test_colours_differ_from_each_other() -> None:
    for looks in (LOOKS.values(), SERIES):
        for one, other in itertools.combinations(looks, 2):
            assert np.abs(np.subtract(to_rgb(one.color), to_rgb(other.color))).max() > 0.2


def test_losses_have_axes_for_each_objective() -> None:
    axes = Figure().add_subplot()
    curves = list(share_out_curves(LOSSES, {}))
    assert len(curves) == 2
    curves[1](axes)
    assert axes.get_title(loc="left") == "MLM" or axes.get_title() == "MLM"
    train, validation = axes.lines
    assert (train.get_xdata()[0], train.get_xdata()[-1]) == (51, 100)
    assert validation.get_xydata().tolist() == [[100, 8.5]]
    assert train.get_label() == "clm-50-mlm-100"


def test_all_arms_share_a_panel_and_an_arm_has_one_look() -> None:
    """That of its objective, with a line of its own; ten arms to a panel at most, which begins at step 0."""
    losses = {f"run-{index}": LOSSES["clm-50-mlm-100"] for index in range(12)}
    losses["run-5"] = [row for row in losses["run-5"] if row["objective"] == "mlm"]
    arms = {name: ReportArm(name, objective="clm+mlm") for name in losses}
    arms["run-0"] = ReportArm("run-0", objective="mlm")
    arms["run-1"] = ReportArm("run-1", objective="clm+mlm", curriculum="MEAP → MLM", phases=(("MEAP", 5), ("MLM", 5)))
    del arms["run-2"]
    shown, looks = [], dict[str, set[tuple[Any, ...]]]()
    for plot in share_out_curves(losses, {name: arm.look for name, arm in arms.items()}):
        axes = Figure().add_subplot()
        plot(axes)
        assert axes.get_xlim()[0] == 0
        shown.append([text.get_text() for text in axes.get_legend().get_texts()])
        for line in axes.lines:
            if line.get_label() in losses:
                looks.setdefault(str(line.get_label()), set()).add((line.get_color(), line.get_linestyle()))
    names, with_clm = [*losses], [name for name in losses if name != "run-5"]
    assert shown == [with_clm[:10], with_clm[10:], names[:10], names[10:]]
    assert {len(of_arm) for of_arm in looks.values()} == {1}
    colors = {name: of_arm.pop()[0] for name, of_arm in looks.items()}
    kinds = {"run-0": LOOKS["mlm"], "run-1": LOOKS["meap"], "run-2": SERIES[0]}
    assert colors == {name: kinds.get(name, LOOKS["clm+mlm"]).color for name in losses}


@pytest.mark.parametrize("objective", ["", "curriculum", *LOOKS])
def test_several_series_of_an_objective_differ_in_black_and_white(objective: str) -> None:
    looks = [look_of(objective, rank) for rank in range(3)]
    for key in ("marker", "line", "hatch"):
        assert len({getattr(look, key) for look in looks}) == 3
    assert len({look.color for look in looks}) == (1 if objective in LOOKS else 3)


def test_long_curves_are_thinned_by_means() -> None:
    steps_N, losses_N = thin([(float(step), float(step % 2)) for step in range(2 * CURVE_POINTS)])
    assert len(steps_N) == CURVE_POINTS
    assert steps_N[:2].tolist() == [0.5, 2.5] and set(losses_N) == {0.5}
    assert len(thin([])[0]) == 0


def test_families_without_scores_have_no_panel(drawn: Path, study: ResultSet) -> None:
    assert study.families == ["SC", "QA"]
    text = (drawn / "objective-by-size.svg").read_text()
    assert "SC · sequence classification" in text and "IR · retrieval" not in text


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((2.19e12, 2.29e12), ["2", "2.5"]),
        ((2.3e12,), ["2.2", "2.4"]),
        ((1.02e6,), ["1", "1.1"]),
        ((1e3, 4e3), ["1", "1.5"]),
    ],
)
def test_an_axis_has_two_ticks_or_more(values: tuple[float, ...], labels: list[str]) -> None:
    ticks, shown, _ = round_ticks(values)
    assert shown[:2] == labels and min(values) / 1.1 <= ticks[0] < ticks[1] <= max(values) * 1.1


def test_a_network_of_unknown_size_is_not_drawn_as_the_largest() -> None:
    reference = read_reference()
    sizes = {"1B": "dec"}
    renamed = [
        replace(one, arm=replace(one.arm, size=sizes.get(one.arm.size, one.arm.size))) for one in reference.results
    ]
    names = {one.arm.flops: one.arm.size for one in renamed}
    drawn = {
        names[x]: size
        for panel in fill_panels("score-by-flops", ResultSet(tuple(renamed)))
        for _, _, marks in panel.series
        for x, _, size in marks
    }
    assert drawn == {"210M": 3.5, "610M": 5.5, "dec": 5.0}


def test_arms_that_share_a_place_on_the_axis_are_series_of_their_own() -> None:
    """A line through checkpoints of two masks would go to and fro; where masks tell too little, parents do."""
    base = ReportArm("", "efficiency", "1m", "mlm")
    arms = [
        replace(base, name=f"mlm{mask}-{steps}", mask_percent=mask, pretrain_steps=steps, parent=f"mlm{mask}")
        for mask, steps in itertools.product((20, 40), (200, 400))
    ]

    def drawn_series(name: str, arms: list[ReportArm], own: float = 0.1) -> dict[str, list[float]]:
        scores = [Result(arm, "SC", "a", "standard", (0.5, 0.5 + own * index)) for index, arm in enumerate(arms)]
        (panel,) = fill_panels(name, with_averages(ResultSet(scores)))
        return {label: [round(100 * mark.value) for _, mark, _ in marks] for label, _, marks in panel.series}

    assert drawn_series("score-by-steps", arms[:2]) == {"MLM": [50, 55]}
    assert drawn_series("score-by-steps", arms) == {"MLM, 20 %": [50, 55], "MLM, 40 %": [60, 65]}
    twins = [replace(arm, mask_percent=40) for arm in arms]
    assert drawn_series("score-by-steps", twins) == {"MLM, mlm20": [50, 55], "MLM, mlm40": [60, 65]}
    between = [*arms[:2], replace(arms[2], pretrain_steps=300)]
    assert drawn_series("score-by-steps", between) == {"MLM, 20 %": [50, 55], "MLM, 40 %": [60]}
    third = replace(twins[0], name="mlm30-600", pretrain_steps=600, parent="mlm30")
    alone = drawn_series("score-by-steps", [*twins, third], 0.02)
    assert alone == {"MLM, mlm20": [50, 51], "MLM, mlm40": [52, 53], "MLM": [54]}


def test_one_twin_leaves_the_line_of_the_other_arms() -> None:
    """On an axis of masks, and where continued training begins at a model without masks."""
    base = ReportArm("", "objective", "1m", "mlm", None, 400)
    arms = [replace(base, name=f"mlm{mask}", mask_percent=mask) for mask in (20, 30, 40)]
    arms.append(replace(arms[1], name="twin"))
    (panel,) = fill_panels("masking-ratio", with_averages(ResultSet([scored(arm) for arm in arms])))
    assert {label: len(marks) for label, _, marks in panel.series} == {"1m": 2, "1m, mlm30": 1, "1m, twin": 1}
    clm = ReportArm("clm", "cpt", "1m", "clm", None, 400)
    later = [
        replace(clm, name=f"clm-{mask}-{steps}", mask_percent=mask, cpt_steps=steps, parent="clm")
        for mask, steps in ((20, 100), (20, 200), (40, 150), (40, 200))
    ]
    (panel,) = fill_panels("continued-steps", with_averages(ResultSet(list(map(scored, [clm, *later[:2]])))))
    assert {label: len(marks) for label, _, marks in panel.series} == {"from CLM": 3}
    (panel,) = fill_panels("continued-steps", with_averages(ResultSet(list(map(scored, [clm, *later])))))
    told = {label: len(marks) for label, _, marks in panel.series}
    assert told == {"from CLM": 1, "from CLM, 20 %": 2, "from CLM, 40 %": 2}


def scored(arm: ReportArm) -> Result:
    return Result(arm, "SC", "a", "standard", (0.5, 0.6))


def test_parents_of_several_budgets_are_compared_budget_by_budget() -> None:
    """CLM and MLM of 1200 steps with each other, and those of 400; of two MLM parents at one budget, with none."""
    arms = []
    for objective, mask, steps in (("clm", None, 1200), ("mlm", 40, 1200), ("clm", None, 400), ("mlm", 40, 400)):
        arm = ReportArm(f"{objective}-{steps}", "cpt", "1m", objective, mask, steps)  # type: ignore[arg-type]
        arms += [arm, replace(arm, name=f"{arm.name}-100", mask_percent=40, cpt_steps=100, parent=arm.name)]
    pairs = choose_gaps(ResultSet([Result(arm, "SC", "a", "standard", (0.5,)) for arm in arms]), "cpt", ("clm",))
    assert [(clm.name, mlm.name) for clm, mlm in pairs] == [
        (f"clm-{name}", f"mlm-{name}") for name in ("1200", "1200-100", "400", "400-100")
    ]
    means = {arm: 0.5 + 0.02 * index for index, arm in enumerate(arms)}
    results = with_averages(ResultSet([Result(arm, "SC", "a", "standard", (means[arm],)) for arm in arms]))
    (panel,) = fill_panels("continued", results)
    shown = {label: [round(100 * mark.value) for _, mark, _ in marks] for label, _, marks in panel.series}
    assert shown == {f"1m, from CLM − from MLM, clm-{steps}": [-4, -4] for steps in (1200, 400)}
    other = replace(arms[2], name="mlm20-1200", mask_percent=20)
    more = ResultSet([*results.results, Result(other, "SC", "a", "standard", (0.5,))])
    assert "clm-1200" not in {clm.name for clm, _ in choose_gaps(more, "cpt", ("clm",))}
