"""Results → figures, each as SVG and PDF: those for which there are scores, and what the others lack."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphase.report import panels
from biphase.report.plots import plot_panel
from biphase.report.results import ResultSet, objective_pairs
from biphase.style import PLOT_STYLE, SERIES, Look, plot_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class DrawnFigure:
    """A drawn figure and its files."""

    name: str
    title: str
    caption: str
    svg: Path
    pdf: Path


@dataclass(frozen=True)
class FigureSpec:
    """What a figure shows, with a panel for each family, and what it needs."""

    name: str
    title: str
    caption: str
    needs: str
    make_panel: Callable[[ResultSet, str], panels.Panel]
    can_draw: Callable[[ResultSet], bool]


def has_spreads(results: ResultSet) -> bool:
    """Whether any arm that is compared has its scores at every rate and seed."""
    for arm in itertools.chain(*objective_pairs(results)):
        if any(panels.spread_scores(results, arm, family) is not None for family in results.families):
            return True
    return False


FIGURES = (
    FigureSpec(
        "objective-by-size",
        "Objective by size",
        "CLM and MLM at the same size, data and steps.",
        "CLM and MLM of the same size and steps",
        panels.objective_by_size,
        lambda results: bool(objective_pairs(results)),
    ),
    FigureSpec(
        "masking-ratio",
        "Masking ratio",
        "MLM alone at several masking ratios.",
        "MLM alone at two masking ratios or more",
        panels.masking_ratio,
        lambda results: len({a.mask_percent for a in results.arms(setup="objective", objective="mlm")}) > 1,
    ),
    FigureSpec(
        "score-by-steps",
        "Score against steps",
        "Undecayed checkpoints on the way; the axis of steps is logarithmic.",
        "undecayed checkpoints at two steps or more",
        panels.score_by_steps,
        lambda results: len({arm.pretrain_steps for arm in results.arms(setup="efficiency")}) > 1,
    ),
    FigureSpec(
        "rate-spread",
        "Spread over fine-tuning rates",
        "Standard deviation of test scores over fine-tuning rates and seeds, each dataset around its mean; bootstrap "
        "intervals over seeds.",
        "test scores at every fine-tuning rate and seed",
        panels.spread_over_rates,
        has_spreads,
    ),
    FigureSpec(
        "splits",
        "CLM then MLM at a fixed budget",
        "Difference to MLM alone with the same number of steps. CLM alone is in the tables.",
        "CLM then MLM, and MLM alone, at one budget",
        panels.splits,
        lambda results: bool(panels.split_budgets(results)),
    ),
    FigureSpec(
        "masking-after-clm",
        "Masking ratio after CLM",
        "MLM alone, and MLM after CLM with as many steps in all.",
        "MLM after CLM at two masking ratios or more",
        panels.masking_after_clm,
        lambda results: bool(results.arms(setup="adapted")),
    ),
    FigureSpec(
        "continued",
        "Continued pretraining: which parent?",
        "Difference between continuing with MLM from the CLM model and from the MLM model; 0 steps are the parents.",
        "MLM continued from CLM and from MLM",
        panels.continued,
        lambda results: {"clm", "mlm"} <= {a.objective for a in results.arms(setup="cpt") if a.cpt_steps},
    ),
    FigureSpec(
        "continued-steps",
        "Continued pretraining over its steps",
        "Continued with MLM from the CLM model and from the MLM model; 0 steps are the parents.",
        "continued pretraining at two numbers of steps or more",
        panels.continued_steps,
        lambda results: len({arm.cpt_steps for arm in results.arms(setup="cpt")}) > 1,
    ),
    FigureSpec(
        "score-by-flops",
        "Score against FLOPs",
        "Decayed models; the larger the marker, the larger the model. CLM then MLM in one go or continued.",
        "FLOPs of two arms or more",
        panels.score_by_flops,
        lambda results: len(panels.counted_arms(results)) > 1,
    ),
)

LOSS_FIGURE = "losses"
LEGEND_SIGNS = 105
"""How many characters fit into a line of the legend."""


def draw_figures(
    results: ResultSet, folder: Path, losses: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> tuple[list[DrawnFigure], list[str]]:
    """Write every figure for which there are scores, as `NAME.svg` and `NAME.pdf`; and say what the others lack.

    The same results give the same SVG, to the byte. `losses`: run → records as in metrics.jsonl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn, missing = [], []
    for spec in FIGURES:
        if spec.can_draw(results):
            made = [spec.make_panel(results, family) for family in results.families]
            plots = [partial(plot_panel, panel) for panel in made]
            drawn.append(draw_panels(folder, spec.name, spec.title, spec.caption, plots))
        else:
            missing.append(f"{spec.title}: needs {spec.needs}")
    losses = losses or {}
    objectives = list(dict.fromkeys(row["objective"] for rows in losses.values() for row in rows))
    if objectives:
        caption = "Training loss as lines (means of neighbouring steps), validation loss as markers."
        curves = [partial(plot_loss_curves, losses, objective) for objective in objectives]
        drawn.append(draw_panels(folder, LOSS_FIGURE, "Loss curves", caption, curves))
    else:
        missing.append("Loss curves: needs the metrics.jsonl of the runs")
    return drawn, missing


def plot_loss_curves(losses: Mapping[str, Sequence[Mapping[str, Any]]], objective: str, axes: "Axes") -> None:
    """The losses of every run for one objective: those of different objectives are not on one scale."""
    # Five colours and four lines in turn: twenty runs before two of them look alike.
    colors, lines = itertools.cycle(SERIES), itertools.cycle(SERIES[:4])
    for (name, records), color, line in zip(losses.items(), colors, lines, strict=False):
        look = Look(color.color, color.marker, line.line, color.hatch)
        plot_losses([row for row in records if row["objective"] == objective], look, (name, None), axes)
    axes.set_title(objective.upper())


def draw_panels(
    folder: Path, name: str, title: str, caption: str, plots: Sequence[Callable[["Axes"], object]]
) -> DrawnFigure:
    """Write `NAME.svg` and `NAME.pdf` with what each of `plots` draws on its axes."""
    with plot_settings(name):
        figure = arrange_panels(plots)
        svg, pdf = folder / f"{name}.svg", folder / f"{name}.pdf"
        figure.savefig(svg, metadata={"Date": None})
        figure.set_layout_engine("none")  # it is laid out; once is enough
        figure.savefig(pdf, metadata={"CreationDate": None})
    return DrawnFigure(name, title, caption, svg, pdf)


def plot_settings(name: str) -> AbstractContextManager[None]:
    """The house's style; `name` makes the ids inside an SVG the same every time."""
    import matplotlib

    return matplotlib.rc_context({**PLOT_STYLE, "svg.hashsalt": name})


def arrange_panels(plots: Sequence[Callable[["Axes"], object]]) -> "Figure":
    """Panels in two columns under one legend; each of `plots` draws on the axes that it is given."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(plots) / 2)
    figure = Figure(figsize=(6.7 if len(plots) > 1 else 4.2, 0.4 + 2.25 * rows), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)  # type: ignore[call-arg, union-attr]
    grid = figure.subplots(rows, min(len(plots), 2), squeeze=False).ravel()
    for axes, plot in zip(grid, plots, strict=False):
        plot(axes)
    for axes in grid[len(plots) :]:
        axes.set_axis_off()
    entries: dict[str, Any] = {}
    for axes in grid[: len(plots)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    columns = max(LEGEND_SIGNS // max(len(label) + 8 for label in ("", *entries)), 1)
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=min(columns, len(entries) or 1))
    return figure
