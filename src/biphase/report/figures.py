"""Results → figures as SVG and PDF, and the scores that further figures need.

A row of `FIGURES` selects the arms of a figure, their series and their place on the axis; `words.yaml` has its texts. A
figure has a panel for each family, with series of marks and their intervals. The figures are those of the paper (2 to
12), for any study with the same comparisons.
"""

import math
import multiprocessing
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from operator import attrgetter, itemgetter
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from biphase.curriculum import OBJECTIVES, ObjectiveName
from biphase.machine import end_with_parent, grace, num_cores
from biphase.report.contrasts import difference
from biphase.report.formats import group_measures, show_list, show_steps
from biphase.report.results import FAMILY_NAMES, ReportArm, ResultSet, num_parameters, read_words
from biphase.report.statistics import Interval, rate_spread, stability_rates
from biphase.style import INK, LOOKS, PLOT_STYLE, SERIES, Look, plot_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PanelKind = Literal["lines", "bars", "points", "rings"]
"""The look of a panel: marks joined by `lines`; `bars` from zero, side by side in groups; spreads as `points`; hollow
`rings`."""


Mark = tuple[float, Interval, float]
"""A mark: its place on the x axis, its value with the interval, and the size of its marker in points (1/72 inch)."""
MARKER_SIZE = 5.0


@dataclass(frozen=True)
class Panel:
    """A panel of a figure, usually that of a family."""

    kind: PanelKind
    series: Sequence[tuple[str, Look, Sequence[Mark]]]
    """Each series: its name in the legend, its look and its marks."""
    settings: Mapping[str, Any]
    """The title, labels and ticks of its axes, as arguments of matplotlib's `Axes.set`."""
    distances: Sequence[tuple[float, float, float, Look]] = ()
    """Horizontal dotted lines: both ends, the height in percent, and the look of each."""
    is_share: bool = False
    """Whether values lie between 0 and 100 %, like accuracy and F1, unlike correlations and differences."""

    @property
    def says_something(self) -> bool:
        """Whether there is enough to compare: three marks, or two in a series."""
        sizes = [len(marks) for _, _, marks in self.series]
        return sum(sizes) > 2 or max(sizes, default=0) > 1


Arms = tuple[ReportArm, ...]
"""One arm, for its score; or two arms, for their difference."""
Plots = Sequence[Callable[["Axes"], object]]
"""The functions that draw the panels of a figure."""


@dataclass(frozen=True)
class FigureRow:
    """The arms, series and x axis of a figure."""

    choose: Callable[[ResultSet], Iterable[Arms]]
    """The function that chooses the arms of the marks, in the order of the legend."""
    series: Callable[[ReportArm], str]
    """The function that names an arm's series."""
    x: str
    """The field of an arm that gives its place on the x axis; bars and names are equally spaced."""
    kind: PanelKind = "lines"
    look: str = "objective"
    """The field of an arm that names the look of its series; if empty, series take looks without objective in turn."""
    by_size: bool = False
    """Whether sizes have series of their own."""
    is_logarithmic: bool = False
    dodge: float = 0.0
    """The distance between neighbouring series, which keeps intervals apart; on a logarithmic axis a share of x."""


def choose_objectives(results: ResultSet) -> list[Arms]:
    """Choose CLM, then MLM at the usual ratio: for each size, smallest first, the arms at the largest budget that has
    both. Among several arms with one objective choose the first plain one, or none."""
    compared = results.select(setup="objective")
    chosen: dict[str, list[Arms]] = {"clm": [], "mlm": []}
    for size in compared.sizes:
        budgets: dict[tuple[int, int], dict[str, list[ReportArm]]] = {}
        for arm in compared.arms:
            if arm.size == size and arm.mask_percent in (None, results.usual_mask):
                budgets.setdefault((arm.pretrain_steps, arm.cpt_steps), {}).setdefault(arm.objective, []).append(arm)
        complete = [budget for budget, by_objective in budgets.items() if by_objective.keys() >= {"clm", "mlm"}]
        if complete:
            usual = {}
            for objective, rivals in budgets[max(complete)].items():
                usual[objective] = [arm for arm in rivals if arm.is_plain][:1] or (rivals if len(rivals) == 1 else [])
            for clm, mlm in zip(usual["clm"], usual["mlm"], strict=False):
                chosen["clm"].append((clm,))
                chosen["mlm"].append((mlm,))
    return chosen["clm"] + chosen["mlm"]


def choose_arms(results: ResultSet, **fields: Any) -> list[Arms]:
    """Choose the arms with these fields: first CLM, then MLM, each from small to large."""
    arms = sorted(results.select(**fields).arms, key=lambda arm: (arm.objective, num_parameters(arm.size)))
    return [(arm,) for arm in arms]


def choose_masks_after_clm(results: ResultSet) -> list[Arms]:
    after = results.select(setup="adapted").arms
    budgets = {(arm.size, arm.pretrain_steps) for arm in after}
    alone = results.select(setup="objective", objective="mlm").arms
    return [(arm,) for arm in [*(arm for arm in alone if (arm.size, arm.pretrain_steps) in budgets), *after]]


def choose_gaps(results: ResultSet, setup: str, objectives: Sequence[str]) -> list[Arms]:
    """Pair the arms of these objectives in a comparison, from least CLM to most, with MLM of the same size and steps,
    from scratch and continued. Leave out arms that several such arms of MLM could be paired with."""
    training_of = attrgetter("size", "pretrain_steps", "cpt_steps")
    arms = sorted(results.select(setup=setup).arms, key=lambda arm: (clm_percent(arm), num_parameters(arm.size)))
    mlm = defaultdict[Any, Arms](tuple)
    for arm in arms:
        if arm.objective == "mlm":
            mlm[training_of(arm)] += (arm,)
    pairs = [(arm, *mlm[training_of(arm)]) for arm in arms if arm.objective in objectives]
    return [pair for pair in pairs if len(pair) == 2]


def choose_priced(results: ResultSet) -> list[Arms]:
    """Choose decayed arms with known FLOPs: CLM, then MLM, then CLM followed by MLM, at the usual masking ratio."""
    masks, objectives = (None, results.usual_mask), ("clm", "mlm", "clm+mlm")
    arms: dict[str, ReportArm] = {}
    for arm in results.arms:
        if arm.flops and arm.setup not in ("efficiency", "control", "other") and arm.mask_percent in masks:
            arms[arm.name] = arm
    return [(arm,) for arm in sorted(arms.values(), key=lambda arm: objectives.index(arm.whole_objective))]


def clm_percent(arm: ReportArm) -> int:
    """Return the share of CLM in percent, rounded to a multiple of 5: 5k of 22k counts as 25 %."""
    return 5 * round(20 * arm.clm_share)


def name_objective(arm: ReportArm) -> str:
    return arm.curriculum or {"clm+mlm": "CLM, then MLM"}.get(arm.whole_objective, arm.whole_objective.upper())


def name_share(arm: ReportArm) -> str:
    return f"{clm_percent(arm)} % CLM, then MLM" if arm.mlm_steps else "CLM alone"


def name_training(arm: ReportArm) -> str:
    """Return `40 % CLM, then MLM`, `CLM`, `MLM with 25 % CLM`; empty if only the arm's name is known."""
    if not arm.objective:
        return ""
    return name_share(arm) if arm.objective == "clm+mlm" and not arm.curriculum else name_objective(arm)


def name_split(arm: ReportArm) -> str:
    return f"{show_steps(arm.clm_steps)} CLM, then {show_steps(arm.mlm_steps)} MLM" if arm.clm_steps else "MLM"


choose_ratios = partial(choose_arms, setup="objective", objective="mlm")
choose_undecayed, choose_cpt = partial(choose_arms, setup="efficiency", cpt_steps=0), partial(choose_arms, setup="cpt")
choose_splits = partial(choose_gaps, setup="ratio", objectives=("clm+mlm", "clm"))
choose_continued = partial(choose_gaps, setup="cpt", objectives=("clm",))

FIGURES: dict[str, FigureRow] = {
    "objective-by-size": FigureRow(
        choose_objectives, lambda arm: f"MLM {arm.mask_percent} %" if arm.mask_percent else "CLM", "size", dodge=0.12
    ),
    "masking-ratio": FigureRow(choose_ratios, attrgetter("size"), "mask_percent", look="", dodge=0.5),
    "score-by-steps": FigureRow(
        choose_undecayed, name_objective, "pretrain_steps", by_size=True, is_logarithmic=True, dodge=-0.04
    ),
    "rate-spread": FigureRow(choose_objectives, name_objective, "size", "points", dodge=0.12),
    "splits": FigureRow(choose_splits, name_share, "pretrain_steps", "bars", "look", by_size=True),
    "masking-after-clm": FigureRow(choose_masks_after_clm, name_split, "mask_percent", by_size=True, dodge=0.5),
    "continued": FigureRow(choose_continued, lambda arm: f"{arm.size}, from CLM − from MLM", "cpt_steps", "bars", ""),
    "continued-steps": FigureRow(choose_cpt, lambda arm: f"from {arm.objective.upper()}", "cpt_steps", by_size=True),
    "score-by-flops": FigureRow(
        choose_priced, name_objective, "flops", "rings", "whole_objective", is_logarithmic=True
    ),
}
"""Name of a file → its figure, for all figures but loss curves."""


def figure_pool() -> Executor:
    """Return a pool that draws figures while other work goes on: forks of this process if it runs on Linux with a
    single thread, else a thread."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return ThreadPoolExecutor(1)
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(min(num_cores(), len(FIGURES)), fork, begin_drawing, (os.getpid(),))


def begin_drawing(parent: int) -> None:
    """Load matplotlib in a fork of the process with the id `parent`, and make the fork end when `parent` does."""
    end_with_parent(parent, grace())
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401


def list_figures(
    results: ResultSet, losses: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> tuple[dict[str, Plots], list[str]]:
    """Return the figures that have enough to compare, by the names of their files; and a sentence for each figure whose
    arms have no scores, with the scores that it needs.

    `losses`: run → records as in metrics.jsonl, with a `seed` if there are several pretraining seeds.
    """
    plots: dict[str, Plots] = {}
    lacking, words = [], read_words()["figures"]
    for name in FIGURES:
        panels = fill_panels(name, results)
        if told := [partial(plot_panel, panel) for panel in panels if panel.says_something]:
            plots[name] = told
        elif panels and not any(marks for panel in panels for _, _, marks in panel.series):
            lacking.append(f"“{words[name]['title']}” needs {words[name]['needs']}")
    objectives = {arm.name: arm.look for arm in results.arms}
    if curves := [*share_out_curves(losses or {}, objectives)]:
        plots["losses"] = curves
    return plots, lacking


def fill_panels(name: str, results: ResultSet) -> list[Panel]:
    """Make a figure's panel for each family, with a mark for each arm that has a score; no panel with too few arms."""
    row, words = FIGURES[name], read_words()["figures"][name]
    rows = list(row.choose(results))
    arms = [arm for arm, *_ in rows]
    values: list[Any] = list(dict.fromkeys(getattr(arm, row.x) for arm in arms))
    values.sort(key=lambda x: num_parameters(x) if isinstance(x, str) else x)
    has_names = row.kind == "bars" or isinstance(values[0] if values else None, str)
    if len(values) < (1 if has_names else 2):
        return []
    drawn = {arm.size for arm in arms if row.kind == "rings" and num_parameters(arm.size) < math.inf}
    sizes = [size for size in results.sizes if size in drawn]
    series = list_series(row, rows)

    def mark_arms(family: str, compared: Arms, aside: float) -> Mark | None:
        """Make the mark of an arm's score, or of the difference between two arms, `aside` from its place on the axis.
        Return None if a score is missing."""
        interval = measure_arms(row, results, family, compared)
        if interval is None:
            return None
        value = getattr(compared[0], row.x)
        x = values.index(value) if has_names else value
        size = compared[0].size
        marker = 3.5 + 2 * sizes.index(size) if size in sizes else MARKER_SIZE
        return x * (1 + aside) if row.is_logarithmic else x + aside, interval, marker

    panels = []
    for family in results.families:
        marked = []
        for index, (label, look, group) in enumerate(series):
            aside = row.dodge * (index - (len(series) - 1) / 2)
            marks = [mark for compared in group if (mark := mark_arms(family, compared, aside))]
            marked.append((label, look, sorted(marks, key=itemgetter(0))))
        measures = [measure.partition(",")[0] for measure in group_measures(results, family)]
        y_label = words.get("y") or f"{'mean of ' if len(measures) > 1 else ''}{show_list(measures)} (%)"
        title = f"{family} · {FAMILY_NAMES[family]}"
        settings = set_x_axis(row, values) | {"title": title, "ylabel": fill(y_label, 30)}
        settings["xlabel"] = words["x"] + settings["xlabel"]
        is_share = "y" not in words and family != "OT" and not any("correlation" in measure for measure in measures)
        panels.append(Panel(row.kind, marked, settings, is_share=is_share))
    return panels


def set_x_axis(row: FigureRow, values: Sequence[Any]) -> dict[str, Any]:
    """Return ticks, limits and scale of the x axis for these ascending values, as arguments of `Axes.set`; `xlabel` has
    only the unit."""
    scale = {"xscale": "log"} if row.is_logarithmic else {}
    if row.kind == "rings":
        ticks, labels, unit = round_ticks(values)
        return scale | {"xticks": ticks, "xticklabels": labels, "xlabel": unit}
    labels = [show_steps(value) if isinstance(value, int) else str(value) for value in values]
    if row.kind != "bars" and not isinstance(values[0], str):
        return scale | {"xticks": values, "xticklabels": labels, "xlabel": ""}
    margin = 0.6 if row.kind == "bars" else 0.4
    ends = (-margin, len(values) - 1 + margin)
    return scale | {"xticks": range(len(values)), "xticklabels": labels, "xlabel": "", "xlim": ends}


def list_series(row: FigureRow, rows: Sequence[Arms]) -> list[tuple[str, Look, list[Arms]]]:
    """Return the name, the look and the arms of each series."""
    has_sizes = row.by_size and len({arm.size for arm, *_ in rows}) > 1
    groups: dict[str, list[Arms]] = {}
    for arm, *baseline in rows:
        name = row.series(arm) + (f", {arm.size}" if has_sizes else "")
        groups.setdefault(name, []).append((arm, *baseline))
    groups = {name: part for whole, group in groups.items() for name, part in split_series(row, whole, group).items()}
    objectives = [getattr(group[0][0], row.look) if row.look else "" for group in groups.values()]
    return [(*item, group) for item, group in zip(name_looks(groups, objectives), groups.values(), strict=True)]


def split_series(row: FigureRow, name: str, group: Sequence[Arms]) -> dict[str, list[Arms]]:
    """Split a series by masking ratio, unless that is the x axis, so that no line joins several. Then part the arms
    that share a place on the axis with others: by parent, or else by name. Rings stay together, because no line joins
    them. Return the parts by their names."""
    if row.kind == "rings":
        return {name: [*group]}
    # An arm at 0 steps has no training of its own, so its ratio splits nothing.
    mask_of = {arm: f"{arm.told_masks} %" if arm.mask_percent else "" for arm, *_ in group}
    ratios = {mask for arm, mask in mask_of.items() if getattr(arm, row.x)} - {""}
    parts = defaultdict[str, list[Arms]](list)
    for arms in group:
        mask = mask_of[arms[0]] if row.x != "mask_percent" and len(ratios) > 1 else ""
        parts[", ".join(filter(None, (name, mask)))].append(arms)
    for owner_of in (lambda arm: arm.parent or arm.name, lambda arm: arm.name):
        finer = defaultdict[str, list[Arms]](list)
        for whole, of_whole in parts.items():
            owners = defaultdict[Any, set[str]](set)
            for arm, *_ in of_whole:
                owners[getattr(arm, row.x)].add(owner_of(arm))
            apart = {owner for sharing in owners.values() if len(sharing) > 1 for owner in sharing}
            for arms in of_whole:
                owner = owner_of(arms[0])
                finer[f"{whole}, {owner}" if owner in apart else whole].append(arms)
        parts = finer
    return parts


def look_of(objective: str, rank: int = 0) -> Look:
    """Return the look of the series number `rank` of an objective: its colour, with another marker, line and hatch for
    each further series. Colours change too if the objective is `curriculum`, a mixture of several, or unknown."""
    own = LOOKS.get(objective)
    if own is None:
        others = [LOOKS[name] for name in ("mntp", "meap", "causal-mlm")] if objective == "curriculum" else [*SERIES]
    else:
        others = [own, *(replace(look, color=own.color) for look in SERIES if look.marker != own.marker)]
    return others[rank % len(others)]


def name_looks(names: Iterable[str], objectives: Iterable[str]) -> Iterator[tuple[str, Look]]:
    """Give each series the look of its objective, and tell those of one objective apart."""
    used = Counter[str]()
    for name, objective in zip(names, objectives, strict=True):
        yield name, look_of(objective, used[objective])
        used[objective] += 1


def measure_arms(row: FigureRow, results: ResultSet, family: str, arms: Arms) -> Interval | None:
    """Return an arm's score on a family, or the difference between two arms; None if a score is missing. For `points`
    return the spread of the test scores on a dataset, averaged over datasets; None if some are unknown."""
    if row.kind != "points":
        scores = [score for arm in arms if (score := results.scores.get(arm.name, {}).get(family))]
        if len(scores) < len(arms):
            return None
        return scores[0].interval if len(scores) == 1 else difference(*scores).against()
    tables = []
    for dataset in results.datasets[family]:
        score = results.scores.get(arms[0].name, {}).get(dataset)
        by_rate = score.by_rate or {} if score else {}
        rows = [by_rate[rate] for rate in stability_rates(sorted(by_rate))]
        if len({len(seeds) for seeds in rows}) != 1 or np.isnan(rows).all():
            return None
        tables.append(np.array(rows, dtype=np.float64))
    if not tables or len({table.shape[1] for table in tables}) > 1:
        return None
    return rate_spread(tables, np.random.default_rng(0))


def round_ticks(values: Sequence[float]) -> tuple[list[float], list[str], str]:
    """Choose ticks at round numbers for a logarithmic axis. Return the ticks, their labels in units of a power of ten,
    such as 2, 5, 10 and 20, and that unit: ` (×10¹⁵)`."""
    unit = math.floor(math.log10(min(values)))
    low, high = min(values) / 10.0**unit, max(values) / 10.0**unit
    decades = [step * 10**power for power in range(-1, 12) for step in (1, 2, 5)]
    # Finer steps, for values that lie close together, such as 2.2 and 2.4.
    finer = [[step / divisor for step in range(divisor, 10 * divisor + 1)] for divisor in (2, 5, 10)]
    fewest = 3
    for steps in (decades, (1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20), *finer):
        ticks = [step for step in steps if low / 1.1 <= step <= high * 1.1]
        if len(ticks) >= fewest:
            break
        fewest = 2
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer()]
    power = str(unit).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return [tick * 10.0**unit for tick in ticks], [f"{tick:g}" for tick in ticks], f" (×10{power})"


def plot_panel(panel: Panel, axes: "Axes") -> None:
    (plot_bars if panel.kind == "bars" else plot_marks)(panel, axes)
    axes.set(**panel.settings)
    if "xscale" in panel.settings:
        axes.minorticks_off()


def measure_reaches(intervals: Sequence[Interval]) -> np.ndarray:
    """Return the lengths [2, N] of intervals below and above their values, in percent; 0 if unknown."""
    ends = [(interval.value - interval.low, interval.high - interval.value) for interval in intervals]
    return 100 * np.fmax(np.array(ends).reshape(-1, 2), 0.0).T


def plot_marks(panel: Panel, axes: "Axes") -> None:
    """Draw the marks of each series with their intervals; `lines` join them."""
    for label, look, marks in panel.series:
        for number, size in enumerate(dict.fromkeys(size for _, _, size in marks)):
            of_size = [(x, interval) for x, interval, own_size in marks if own_size == size]
            axes.errorbar(
                [x for x, _ in of_size],
                [100 * interval.value for _, interval in of_size],
                measure_reaches([interval for _, interval in of_size]),
                color=look.color,
                marker=look.marker,
                linestyle=look.line if panel.kind == "lines" else "",
                markersize=size,
                markerfacecolor="none" if panel.kind == "rings" else look.color,
                elinewidth=0.9,
                label=None if number else label,
            )
    for begin, end, height, look in panel.distances:
        axes.plot([begin, end], [height, height], ":", color=look.color, linewidth=1.2)
    if panel.kind == "points":
        axes.set_ylim(bottom=0)
    if panel.is_share:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0), min(high, 100))


def plot_bars(panel: Panel, axes: "Axes") -> None:
    """Draw bars from zero, side by side in each group."""
    from matplotlib.colors import to_rgb

    width = 0.8 / max(len(panel.series), 1)
    for number, (label, look, marks) in enumerate(panel.series):
        # A third of the way to white, so that intervals stand out.
        lighter = [1 / 3 + 2 / 3 * channel for channel in to_rgb(look.color)]
        shift = width * (number - (len(panel.series) - 1) / 2)
        axes.bar(
            [x + shift for x, _, _ in marks],
            [100 * interval.value for _, interval, _ in marks],
            min(0.9 * width, 0.5),
            yerr=measure_reaches([interval for _, interval, _ in marks])[1],
            facecolor=lighter,
            edgecolor=INK,
            linewidth=0.6,
            hatch=look.hatch,
            label=label,
            error_kw={"elinewidth": 0.9, "ecolor": INK},
        )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.margins(y=0.1)
    axes.grid(False, axis="x")


MOST_CURVES = 10


def share_out_curves(
    losses: Mapping[str, Sequence[Mapping[str, Any]]], objectives: Mapping[str, str]
) -> Iterator[Callable[["Axes"], object]]:
    """Yield a plot of all arms for each objective, because losses of different objectives differ in scale; several, if
    it has more than `MOST_CURVES`. An arm has the same look in all plots, by its `ReportArm.look` in `objectives`."""
    looks = dict(name_looks(losses, [objectives.get(name, "") for name in losses]))
    for objective in dict.fromkeys(row["objective"] for rows in losses.values() for row in rows):
        logged = {name: [row for row in rows if row["objective"] == objective] for name, rows in losses.items()}
        curves = [(name, rows, looks[name]) for name, rows in logged.items() if rows]
        for begin in range(0, len(curves), MOST_CURVES):
            yield partial(plot_loss_curves, curves[begin : begin + MOST_CURVES], objective)


def plot_loss_curves(
    curves: Sequence[tuple[str, Sequence[Mapping[str, Any]], Look]], objective: ObjectiveName, axes: "Axes"
) -> None:
    for name, records, look in curves:
        plot_losses(records, look, (name, None), axes)
    axes.set_title(OBJECTIVES[objective].title)
    axes.set_xlim(left=0)
    axes.legend(loc="upper right", fontsize="small", ncols=1 + len(curves) // 6)


@dataclass(frozen=True)
class FigurePart:
    """A part of a figure, which the page arranges."""

    kind: Literal["whole", "legend", "panel"]
    svg: str


def save_figure(name: str, plots: Plots, folder: Path) -> list[FigurePart]:
    """Write `NAME.svg` and `NAME.pdf` into a folder, and return the figure in parts. Equal plots give equal bytes."""
    import matplotlib
    from fontTools.subset import Options
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    folder.mkdir(parents=True, exist_ok=True)
    svg = folder / f"{name}.svg"
    # Subsetting a PDF's fonts spends most of its time on layout tables, which drawn glyphs do not need.
    Options._drop_tables_default = list({*Options._drop_tables_default, "GPOS", "GSUB", "GDEF", "kern"})
    # The salt makes the ids in an SVG the same every time.
    with matplotlib.rc_context({"svg.hashsalt": name}, PLOT_STYLE):
        figure = arrange_panels(plots)
        # Each canvas draws once; `savefig` would draw everything twice.
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
        figure.set_layout_engine("none")
        FigureCanvasPdf(figure).print_pdf(svg.with_suffix(".pdf"), metadata={"CreationDate": None})
        return [*draw_parts(figure, name)] if len(plots) > 1 else [FigurePart("whole", svg.read_text(encoding="utf-8"))]


def draw_parts(figure: "Figure", name: str) -> Iterator[FigurePart]:
    """Draw the legend and each panel of a figure separately, each with its own ids. All panels have the same margins
    around their axes, so the axes stay aligned."""
    import matplotlib
    from matplotlib.transforms import Bbox

    panels: list[Any] = [axes for axes in figure.axes if axes.axison]
    frames = np.array([axes.bbox.extents for axes in panels])
    rooms = np.array([axes.get_tightbbox().extents for axes in panels]) - frames
    room = [*rooms.min(axis=0)[:2], *rooms.max(axis=0)[2:]]
    boxes = [legend.get_window_extent() for legend in figure.legends]
    boxes += [Bbox.from_extents(frame + room) for frame in frames]
    artists = [*figure.legends, *panels]
    for number, (artist, box) in enumerate(zip(artists, boxes, strict=True)):
        for other in artists:
            other.set_visible(other is artist)
        file = StringIO()
        inches = box.transformed(figure.dpi_scale_trans.inverted())
        with matplotlib.rc_context({"svg.hashsalt": f"{name} {number}"}):
            figure.savefig(file, format="svg", bbox_inches=inches, metadata={"Date": None})
        yield FigurePart("legend" if artist in figure.legends else "panel", file.getvalue())


def arrange_panels(plots: Plots) -> "Figure":
    """Arrange panels in two columns below one legend; a single panel takes the full width."""
    from matplotlib.figure import Figure

    num_rows, num_columns = math.ceil(len(plots) / 2), min(len(plots), 2)
    width, row_height = (6.7, 2.25) if num_columns > 1 else (4.7, 3.2)  # inches
    figure = Figure((width, 0.4 + row_height * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    entries: dict[str, Any] = {}
    for axes, plot in zip(grid, plots, strict=False):
        plot(axes)
        for handle, label in () if axes.get_legend() else zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    for axes in grid[len(plots) :]:
        axes.set_axis_off()
    if entries:
        columns = max(int(14.5 * width) // max(len(label) + 8 for label in entries), 1)  # by characters in a line
        figure.legend(entries.values(), entries.keys(), ncols=min(columns, len(entries)), loc="outside upper center")
    return figure
