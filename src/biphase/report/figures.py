"""Results → figures, each as SVG and PDF: those for which there are scores, and what the others lack.

Panels become lines through means, bars of differences and points of spreads, all with their intervals.
"""

import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphase.machine import end_with_parent, grace, num_cores
from biphase.report import panels
from biphase.report.results import ResultSet
from biphase.style import INK, PLOT_STYLE, SERIES, plot_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure to be drawn: the name of its files, and what each of its panels draws."""

    name: str
    plots: Sequence[Callable[["Axes"], object]]
    row_height: float = 2.25
    """In inches."""


FIGURES: dict[str, tuple[str, str, str, Callable[[ResultSet], list[panels.Panel]] | None]] = {
    "objective-by-size": (
        "Objective by size",
        "CLM and MLM at the same size, data and steps.",
        "CLM and MLM of the same size and steps",
        panels.objective_by_size,
    ),
    "masking-ratio": (
        "Masking ratio",
        "MLM alone at several masking ratios.",
        "MLM alone at two masking ratios or more",
        panels.masking_ratio,
    ),
    "score-by-steps": (
        "Score against steps",
        "Undecayed checkpoints on the way; the axis of steps is logarithmic.",
        "undecayed checkpoints at two steps or more",
        panels.score_by_steps,
    ),
    "rate-spread": (
        "Spread over fine-tuning rates",
        "Standard deviation of test scores over fine-tuning rates and seeds, each dataset around its mean; bootstrap "
        "intervals over seeds.",
        "test scores at every fine-tuning rate and seed",
        panels.spread_over_rates,
    ),
    "splits": (
        "CLM then MLM at a fixed budget",
        "Difference to MLM alone with the same number of steps. CLM alone is in the tables.",
        "CLM then MLM, and MLM alone, at one budget",
        panels.splits,
    ),
    "masking-after-clm": (
        "Masking ratio after CLM",
        "MLM alone, and MLM after CLM with as many steps in all.",
        "MLM after CLM at two masking ratios or more",
        panels.masking_after_clm,
    ),
    "continued": (
        "Continued pretraining: which parent?",
        "Difference between continuing with MLM from the CLM model and from the MLM model; 0 steps are the parents.",
        "MLM continued from CLM and from MLM",
        panels.continued,
    ),
    "continued-steps": (
        "Continued pretraining over its steps",
        "Continued with MLM from the CLM model and from the MLM model; 0 steps are the parents.",
        "continued pretraining at two numbers of steps or more",
        panels.continued_steps,
    ),
    "score-by-flops": (
        "Score against FLOPs",
        "Decayed models; the larger the marker, the larger the model. CLM then MLM in one go or continued; of adapted "
        "models, the adaptation alone.",
        "FLOPs of two arms or more",
        panels.score_by_flops,
    ),
    "losses": (
        "Loss curves",
        "Training loss as lines (means of neighbouring steps), validation loss as markers; a branch begins at the "
        "step where it leaves its trunk.",
        "the metrics.jsonl of the runs",
        None,
    ),
}
"""Name → title, caption, what it needs, and its panels, a family each: none where what it needs is missing. Losses are
no results, and plotted by themselves."""


def figure_pool() -> Executor:
    """Where figures are drawn beside other work: copies of this process, which start with the first figure and load
    matplotlib, where a copy is safe (on Linux, while this process has a single thread); elsewhere a thread."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return ThreadPoolExecutor(1)
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(min(num_cores(), len(FIGURES)), fork, begin_drawing, (os.getpid(),))


def begin_drawing(parent: int) -> None:
    """A copy of the process `parent` loads matplotlib, and ends when `parent` does."""
    threading.Thread(target=end_with_parent, args=(parent, grace()), daemon=True).start()
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401


def list_figures(
    results: ResultSet,
    losses: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ladders: Sequence[panels.Panel] = (),
) -> tuple[list[Picture], list[tuple[str, str, str]], list[str]]:
    """Every figure for which there are scores.

    `losses`: run → records as in metrics.jsonl. `ladders`: panels that stand beside what they tell.

    Returns:
        The pictures to be drawn; name, title and caption of those that stand by themselves; and what the others lack.
    """
    shown, missing, pictures = [], [], list[Picture]()
    if ladders:
        drawn = [partial(plot_panel, panel) for panel in ladders]
        pictures.append(Picture("compute-equivalents", drawn, ladders[0].height))
    for name, (title, caption, needs, make_panels) in FIGURES.items():
        plots: list[Callable[[Axes], object]] = [*share_out_curves(losses or {})]
        if make_panels:
            plots = [partial(plot_panel, panel) for panel in make_panels(results)]
        if plots:
            pictures.append(Picture(name, plots))
            shown.append((name, title, caption))
        else:
            missing.append(f"{title}: needs {needs}")
    return pictures, shown, missing


def plot_panel(panel: panels.Panel, axes: "Axes") -> None:
    (plot_bars if panel.kind == "bars" else plot_marks)(panel, axes)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title)
    if panel.is_logarithmic:
        axes.set_xscale("log")
    axes.set_xticks(panel.ticks, panel.tick_labels)
    if panel.is_logarithmic:
        axes.minorticks_off()
    if panel.x_margin is not None:
        axes.set_xlim(min(panel.ticks) - panel.x_margin, max(panel.ticks) + panel.x_margin)


def plot_marks(panel: panels.Panel, axes: "Axes") -> None:
    """The marks of each series with their intervals: along a line, or alone."""
    for label, look, marks in panel.series:
        for number, size in enumerate(dict.fromkeys(mark.size for mark in marks)):
            own = [mark for mark in marks if mark.size == size]
            axes.errorbar(
                [mark.x for mark in own],
                [mark.value for mark in own],
                [[mark.down for mark in own], [mark.up for mark in own]],
                color=look.color,
                marker=look.marker,
                linestyle=look.line if panel.kind == "lines" else "",
                markersize=size,
                markerfacecolor="none" if panel.kind == "rings" else look.color,
                elinewidth=0.9,
                label=None if number else label,
            )
    for _, look, marks in panel.series:
        for mark in marks:
            if mark.until is not None:
                axes.plot([mark.x, mark.until], [mark.value, mark.value], ":", color=look.color, linewidth=1.2)
    if panel.kind == "points":
        axes.set_ylim(bottom=0)


def plot_bars(panel: panels.Panel, axes: "Axes") -> None:
    """Bars from zero, side by side in each group."""
    width = 0.8 / max(len(panel.series), 1)
    for number, (label, look, marks) in enumerate(panel.series):
        # A third of the way to white, so that intervals are seen on it.
        channels = (int(look.color[at : at + 2], 16) for at in (1, 3, 5))
        lighter = "#" + "".join(f"{round(channel + (255 - channel) / 3):02x}" for channel in channels)
        shift = width * (number - (len(panel.series) - 1) / 2)
        axes.bar(
            [mark.x + shift for mark in marks],
            [mark.value for mark in marks],
            min(0.9 * width, 0.5),
            yerr=[mark.up for mark in marks],
            facecolor=lighter,
            edgecolor=INK,
            linewidth=0.6,
            hatch=look.hatch,
            label=label,
            error_kw={"elinewidth": 0.9, "ecolor": INK},
        )
        for mark in marks:
            if mark.dots:
                axes.plot([mark.x + shift for _ in mark.dots], mark.dots, ".", color=INK, markersize=4)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.margins(y=0.1)
    axes.grid(False, axis="x")


def share_out_curves(losses: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Callable[["Axes"], object]]:
    """A plot for every few runs of an objective: losses of different objectives are not on one scale."""
    for objective in dict.fromkeys(row["objective"] for rows in losses.values() for row in rows):
        chosen = {}
        for name, records in losses.items():
            if rows := [row for row in records if row["objective"] == objective]:
                chosen[name] = rows
        num_panels = math.ceil(len(chosen) / len(SERIES))
        for number in range(num_panels):
            # One run of each stretch of the plan: neighbours differ least, and stand in different panels.
            yield partial(plot_loss_curves, dict(list(chosen.items())[number::num_panels]), objective)


def plot_loss_curves(losses: Mapping[str, Sequence[Mapping[str, Any]]], objective: str, axes: "Axes") -> None:
    for (name, records), look in zip(losses.items(), SERIES, strict=False):
        plot_losses(records, look, (name, None), axes)
    axes.set_title(objective.upper())
    axes.legend(loc="upper right", fontsize="small")


def save_figure(picture: Picture, folder: Path) -> Path:
    """Write `NAME.svg` and `NAME.pdf`; returns the SVG. The same picture gives the same, to the byte."""
    from fontTools.subset import Options
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    folder.mkdir(parents=True, exist_ok=True)
    svg = folder / f"{picture.name}.svg"
    # A PDF's fonts are parts of DejaVu: rules of layout, most of the work of cutting it, are of no use to drawn glyphs.
    Options._drop_tables_default = list({*Options._drop_tables_default, "GPOS", "GSUB", "GDEF", "kern"})
    with plot_settings(picture.name):
        figure = arrange_panels(picture)
        # Each canvas draws once; `savefig` would draw everything twice, to find out what is rasterized.
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
        FigureCanvasPdf(figure).print_pdf(svg.with_suffix(".pdf"), metadata={"CreationDate": None})
    return svg


def plot_settings(name: str) -> AbstractContextManager[None]:
    """The house's style; `name` makes the ids inside an SVG the same every time."""
    import matplotlib

    return matplotlib.rc_context({**PLOT_STYLE, "svg.hashsalt": name})


LEFT, RIGHT, TITLE, LABELS, LINE = 0.66, 0.16, 0.3, 0.46, 0.19
"""The room in inches beside, above and below the axes of a panel, and that of a line of the legend. A layout engine
would draw everything once more to find it."""


def arrange_panels(picture: Picture) -> "Figure":
    """Panels in two columns under one legend, or one panel across."""
    from matplotlib.figure import Figure

    plots, figure = picture.plots, Figure()
    num_rows, num_columns = math.ceil(len(plots) / 2), min(len(plots), 2)
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, plot in zip(grid, plots, strict=False):
        plot(axes)
    for axes in grid[len(plots) :]:
        axes.set_axis_off()
    entries: dict[str, Any] = {}
    for axes in grid[: len(plots)]:
        for handle, label in () if axes.get_legend() else zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    num_fitting = 96 if num_columns > 1 else 72  # characters in a line
    columns = max(num_fitting // max(len(label) + 8 for label in ("", *entries)), 1)
    title = TITLE if any(axes.get_title(loc="left") for axes in grid) else RIGHT
    legend = LINE * math.ceil(len(entries) / columns) + (RIGHT if entries else 0)
    width, height = (6.7 if num_columns > 1 else 4.7), 0.4 + picture.row_height * num_rows
    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=LEFT / width,
        right=1 - RIGHT / width,
        bottom=LABELS / height,
        top=1 - (title + legend) / height,
        wspace=(LEFT + RIGHT) / (width / num_columns - LEFT - RIGHT),
        hspace=(title + LABELS) / ((height - legend) / num_rows - title - LABELS),
    )
    if entries:
        place: Any = {"loc": "upper center", "borderaxespad": 0.2}
        figure.legend(entries.values(), entries.keys(), ncols=min(columns, len(entries)), **place)
    return figure
