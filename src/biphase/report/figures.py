"""Results → figures in the paper's form (its figures 2 to 12), each as SVG and PDF.

Functions that begin with `plot_` take results (or losses) and matplotlib axes, draw, and return the axes.
`draw_figures` writes those for which there are scores and says what the others lack. Every series has its colour (of
Okabe and Ito's palette, which colour-blind readers tell apart), marker, line and hatch, so that it survives
black-and-white print.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from biphase.report.results import (
    FAMILIES,
    MEASURES,
    Contrast,
    ReportArm,
    Result,
    ResultSet,
    arms_of,
    datasets_of,
    difference,
    families,
    family_score,
    find,
    objective_pairs,
    primary_metric,
    reference_mask,
    scores_by_rate,
    short_steps,
    sizes_of,
)
from biphase.report.statistics import rate_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#1a1a1a", "#dcdcdc"
"""Of text and axes, and of grid lines; a page replaces both where its background is dark."""

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "errorbar.capsize": 2.5,
    "hatch.linewidth": 0.7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Look:
    color: str
    marker: str
    line: str
    hatch: str


LOOKS = {
    "clm": Look("#0072B2", "o", "-", ""),
    "mlm": Look("#D55E00", "s", "--", "//"),
    "clm+mlm": Look("#009E73", "D", "-.", ".."),
    "mntp": Look("#CC79A7", "v", ":", "xx"),
}
SERIES = (
    Look("#0072B2", "o", "-", ""),
    Look("#E69F00", "s", "--", "//"),
    Look("#009E73", "D", "-.", ".."),
    Look("#CC79A7", "^", ":", "xx"),
    Look("#56B4E9", "v", (0, (5, 1)), "--"),  # type: ignore[arg-type]
)


@dataclass(frozen=True)
class Figure:
    """A drawn figure and its files."""

    name: str
    title: str
    caption: str
    svg: Path
    pdf: Path


@dataclass(frozen=True)
class Drawing:
    """How a figure is made, with axes for each family, and what it needs."""

    name: str
    title: str
    caption: str
    needs: str
    plot: Callable[[ResultSet, str, "Axes"], "Axes"]
    can_draw: Callable[[ResultSet], bool]


def plot_objective_by_size(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Test score of CLM and of MLM (at the reference ratio) for every size."""
    pairs = objective_pairs(results)
    for number, objective in enumerate(("clm", "mlm")):
        points = [(at, family_score(results, pair[number], family)) for at, pair in enumerate(pairs)]
        mask = f" {pairs[0][1].mask_percent} %" if objective == "mlm" else ""
        shift = 0.06 * (2 * number - 1)
        plot_scores(axes, points, LOOKS[objective], f"{objective.upper()}{mask}", shift)
    axes.set_xticks(range(len(pairs)), [clm.size for clm, _ in pairs])
    axes.set_xlim(-0.4, len(pairs) - 0.6)
    axes.set_xlabel("parameters without the head")
    return label_scores(results, family, axes)


def plot_masking_ratio(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Test score of MLM against the masking ratio, a line for every size."""
    arms = arms_of(results, setup="objective", objective="mlm")
    sizes = sizes_of(arms)
    for number, (size, look) in enumerate(zip(sizes, itertools.cycle(SERIES), strict=False)):
        points = [(arm.mask_percent or 0, family_score(results, arm, family)) for arm in arms if arm.size == size]
        plot_scores(axes, points, look, size, 0.5 * (number - (len(sizes) - 1) / 2))
    axes.set_xticks(sorted({arm.mask_percent or 0 for arm in arms}))
    axes.set_xlabel("masked tokens (%)")
    return label_scores(results, family, axes)


def plot_steps(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Test score of undecayed checkpoints against the step, for CLM and MLM, on a logarithmic axis."""
    arms = arms_of(results, setup="efficiency")
    for number, (objective, size) in enumerate(itertools.product(("clm", "mlm"), sizes_of(arms))):
        chosen = [arm for arm in arms if (arm.objective, arm.size) == (objective, size)]
        nudge = 1 + 0.02 * (-1) ** number
        points = [(nudge * arm.pretrain_steps, family_score(results, arm, family)) for arm in chosen]
        label = objective.upper() + (f", {size}" if len(sizes_of(arms)) > 1 else "")
        plot_scores(axes, points, LOOKS[objective], label)
    mark_steps(axes, {arm.pretrain_steps for arm in arms})
    axes.set_xlabel("pretraining steps, no decay")
    return label_scores(results, family, axes)


def plot_rate_spread(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Standard deviation of test scores over fine-tuning rates and seeds, each dataset around its mean, with its
    interval."""
    pairs = objective_pairs(results)
    for number, objective in enumerate(("clm", "mlm")):
        look = LOOKS[objective]
        for at, pair in enumerate(pairs):
            scores_RS = spread_scores(results, pair[number], family)
            if scores_RS is None:
                continue
            spread = rate_spread(scores_RS, np.random.default_rng(0))
            place = at + 0.09 * (2 * number - 1)
            reach = [[100 * (spread.std - spread.low)], [100 * (spread.high - spread.std)]]
            axes.errorbar(
                place,
                100 * spread.std,
                yerr=None if math.isnan(spread.low) else np.maximum(reach, 0),
                fmt=look.marker,
                color=look.color,
                label=objective.upper() if at == 0 else None,
            )
    axes.set_xticks(range(len(pairs)), [clm.size for clm, _ in pairs])
    axes.set_xlim(-0.5, len(pairs) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters without the head")
    axes.set_ylabel("spread (points)")
    return title_family(family, axes)


def plot_splits(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """CLM→MLM minus MLM alone at every budget, a bar for every share of CLM, with the interval of the difference."""
    budgets = split_budgets(results)
    shares = sorted({round_share(arm) for arms in budgets.values() for arm in arms[1:]})
    series = []
    for share, look in zip(shares, itertools.cycle(SERIES), strict=False):
        bars = [
            (at, gap)
            for at, (alone, *arms) in enumerate(budgets.values())
            for arm in arms
            if round_share(arm) == share and (gap := score_gap(results, arm, alone, family)) is not None
        ]
        series.append((f"{share} % CLM, then MLM", look, bars))
    plot_gaps(axes, series, [short_steps(steps) for _, steps in budgets])
    axes.set_xlabel("pretraining steps")
    axes.set_ylabel("ahead of MLM alone (points)")
    return title_family(family, axes)


def plot_mask_after_clm(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Test score against the masking ratio, for MLM alone and for MLM after CLM at the same size and total steps."""
    groups = adapted_groups(results)
    for number, (label, arms) in enumerate(groups.items()):
        points = [(arm.mask_percent or 0, family_score(results, arm, family)) for arm in arms]
        look = LOOKS["clm+mlm"] if number == 1 else LOOKS["mlm"] if number == 0 else SERIES[number % len(SERIES)]
        plot_scores(axes, points, look, label, 0.3 * (2 * (number % 2) - 1))
    axes.set_xticks(sorted({arm.mask_percent or 0 for arms in groups.values() for arm in arms}))
    axes.set_xlabel("masked tokens (%)")
    return label_scores(results, family, axes)


def plot_continued_gap(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Continued from CLM minus continued from MLM after the same steps, a bar for each number of steps, with the
    interval."""
    arms = arms_of(results, setup="cpt")
    steps = sorted({arm.cpt_steps for arm in arms})
    series = []
    for size, look in zip(sizes_of(arms), itertools.cycle(SERIES), strict=False):
        by_place = {(arm.objective, arm.cpt_steps): arm for arm in arms if arm.size == size}
        bars = [
            (at, gap)
            for at, step in enumerate(steps)
            if ("clm", step) in by_place and ("mlm", step) in by_place
            for gap in [score_gap(results, by_place["clm", step], by_place["mlm", step], family)]
            if gap is not None
        ]
        series.append((f"{size}, from CLM − from MLM", look, bars))
    plot_gaps(axes, series, [short_steps(step) for step in steps])
    axes.set_xlabel("steps of MLM continued")
    axes.set_ylabel("CLM parent ahead (points)")
    return title_family(family, axes)


def plot_continued_steps(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Test score against the steps of continued MLM, from the CLM and from the MLM parent; 0 is the parent itself."""
    arms = arms_of(results, setup="cpt")
    sizes = sizes_of(arms)
    for objective, size in itertools.product(("clm", "mlm"), sizes):
        chosen = [arm for arm in arms if (arm.objective, arm.size) == (objective, size)]
        points = [(arm.cpt_steps, family_score(results, arm, family)) for arm in chosen]
        label = f"from {objective.upper()}" + (f", {size}" if len(sizes) > 1 else "")
        plot_scores(axes, points, LOOKS[objective], label)
    steps = sorted({arm.cpt_steps for arm in arms})
    axes.set_xticks(steps, [short_steps(step) for step in steps])
    axes.set_xlabel("steps of MLM continued")
    return label_scores(results, family, axes)


def plot_flops(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    """Test score against the floating-point operations of all training; the larger the model, the larger its marker."""
    arms = {arm.name: arm for arm in counted_arms(results)}
    sizes = sizes_of(arms.values())
    kinds = [
        ("CLM", "clm", [arm for arm in arms.values() if arm.objective == "clm" and not arm.cpt_steps]),
        ("MLM", "mlm", [arm for arm in arms.values() if arm.objective == "mlm"]),
        ("CLM, then MLM", "clm+mlm", [arm for arm in arms.values() if is_biphasic(arm)]),
    ]
    for label, objective, chosen in kinds:
        look = LOOKS[objective]
        scored = [(arm, score) for arm in chosen if (score := family_score(results, arm, family)) is not None]
        for number, (arm, score) in enumerate(scored):
            axes.errorbar(
                arm.flops or 0.0,
                100 * score.mean,
                yerr=reach_of(score),
                fmt=look.marker,
                color=look.color,
                markersize=3.5 + 2 * sizes.index(arm.size),
                markerfacecolor="none",
                elinewidth=0.9,
                label=label if number == 0 else None,
            )
    mark_flops(axes, [arm.flops or 0.0 for arm in arms.values()])
    return label_scores(results, family, axes)


def plot_losses(losses: Mapping[str, Sequence[Mapping[str, Any]]], objective: str, axes: "Axes") -> "Axes":
    """Loss against the step for one objective, a line for each run: training as a line, validation as markers.

    Args:
        losses: run → records as in metrics.jsonl: `kind` (train, validation), `step`, `objective`, `loss`.
        objective: losses of different objectives are not on one scale, so each has its own axes.
    """
    lines = itertools.cycle(look.line for look in SERIES[:4])
    for (name, records), look, line in zip(losses.items(), itertools.cycle(SERIES), lines, strict=False):
        for kind, linestyle, marker in (("train", line, ""), ("validation", "", look.marker)):
            chosen = [row for row in records if row["kind"] == kind and row["objective"] == objective]
            steps_N, losses_N = thin([(row["step"], row["loss"]) for row in chosen])
            if len(steps_N):
                axes.plot(
                    *(steps_N, losses_N),
                    color=look.color,
                    linestyle=linestyle,
                    marker=marker,
                    linewidth=1,
                    markersize=4,
                    label=name if kind == "train" else None,
                )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per target)")
    axes.set_title(objective.upper())
    return axes


CURVE_POINTS = 300


def thin(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """At most `CURVE_POINTS` points of a curve: each the mean of the same number of neighbours."""
    points_N2 = np.array(points, dtype=np.float64).reshape(-1, 2)
    each = math.ceil(len(points_N2) / CURVE_POINTS)
    parts = [points_N2[begin : begin + each].mean(axis=0) for begin in range(0, len(points_N2), max(each, 1))]
    return np.array([part[0] for part in parts]), np.array([part[1] for part in parts])


def plot_scores(
    axes: "Axes", points: Iterable[tuple[float, Result | None]], look: Look, label: str, shift: float = 0.0
) -> None:
    """A line through mean scores in percent, with their intervals; `shift` keeps intervals of several lines apart."""
    known = sorted(((at, score) for at, score in points if score is not None), key=lambda point: point[0])
    if not known:
        return
    axes.errorbar(
        [at + shift for at, _ in known],
        [100 * score.mean for _, score in known],
        yerr=np.concatenate([reach_of(score) for _, score in known], axis=1),
        color=look.color,
        marker=look.marker,
        linestyle=look.line,
        elinewidth=0.9,
        label=label,
    )


def plot_gaps(
    axes: "Axes", series: Sequence[tuple[str, Look, Sequence[tuple[int, Contrast]]]], groups: Sequence[str]
) -> None:
    """Bars from zero for differences in points, with their intervals, side by side in each group."""
    width = 0.8 / max(len(series), 1)
    for number, (label, look, bars) in enumerate(series):
        gaps = [gap.against() for _, gap in bars]
        axes.bar(
            [at + width * (number - (len(series) - 1) / 2) for at, _ in bars],
            [100 * gap.mean for gap in gaps],
            min(0.9 * width, 0.5),
            yerr=[0.0 if math.isnan(gap.low) else 100 * (gap.mean - gap.low) for gap in gaps],
            facecolor=lighten(look.color),
            edgecolor=INK,
            linewidth=0.6,
            hatch=look.hatch,
            label=label,
            error_kw={"elinewidth": 0.9, "ecolor": INK},
        )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.margins(y=0.1)
    axes.grid(False, axis="x")


def lighten(color: str) -> str:
    """A third of the way to white, so that intervals are seen on it."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) / 3):02x}" for part in parts)


def reach_of(score: Result) -> np.ndarray:
    """[2, 1] how far the interval goes down and up, in percent; nothing where it is not known."""
    return np.full((2, 1), 0.0 if math.isnan(score.half_width) else 100 * score.half_width)


def score_gap(results: ResultSet, a: ReportArm, b: ReportArm, family: str) -> Contrast | None:
    ours, theirs = family_score(results, a, family), family_score(results, b, family)
    return None if ours is None or theirs is None else difference(ours, theirs)


def label_scores(results: ResultSet, family: str, axes: "Axes") -> "Axes":
    measure = MEASURES[primary_metric(results)][family].partition(",")[0]
    axes.set_ylabel(f"{measure} (%)")
    return title_family(family, axes)


def title_family(family: str, axes: "Axes") -> "Axes":
    axes.set_title(f"{family} · {FAMILIES[family]}")
    return axes


def mark_steps(axes: "Axes", steps: Iterable[int]) -> None:
    """A logarithmic axis that names exactly these steps."""
    axes.set_xscale("log")
    chosen = sorted(steps)
    axes.set_xticks(chosen, [short_steps(step) for step in chosen])
    axes.minorticks_off()


def mark_flops(axes: "Axes", flops: Sequence[float]) -> None:
    """A logarithmic axis in units of a power of ten, with round numbers inside what is drawn."""
    unit = math.floor(math.log10(min(flops)))
    low, high = (edge(flops) / 10**unit for edge in (min, max))
    ticks = [
        step * 10**power for power in range(-1, 12) for step in (1, 2, 5) if low / 1.1 <= step * 10**power <= high * 1.1
    ]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer()]
    axes.set_xscale("log")
    axes.set_xticks([tick * 10.0**unit for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"training FLOPs (×10{str(unit).translate(SUPERSCRIPT)})")


SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def spread_scores(results: ResultSet, arm: ReportArm, family: str) -> np.ndarray | None:
    """[rates of all datasets, seeds]: test scores of an arm around the mean of their dataset; None where not known."""
    metric = primary_metric(results)
    parts = []
    for dataset in datasets_of(results, family, metric):
        scores_RS = scores_by_rate(find(results, arm, family, dataset, metric))
        if scores_RS is None or np.isnan(scores_RS).all():
            return None
        parts.append(scores_RS - np.nanmean(scores_RS))
    return np.concatenate(parts) if parts and len({part.shape[1] for part in parts}) == 1 else None


def split_budgets(results: ResultSet) -> dict[tuple[str, int], list[ReportArm]]:
    """(size, steps) → MLM alone, then CLM→MLM from little to much CLM; budgets that have both."""
    arms = sorted(arms_of(results, setup="ratio"), key=lambda arm: (arm.pretrain_steps, arm.clm_steps))
    groups: dict[tuple[str, int], list[ReportArm]] = {}
    for arm in arms:
        if arm.objective != "clm":
            groups.setdefault((arm.size, arm.pretrain_steps), []).append(arm)
    return {key: group for key, group in groups.items() if group[0].objective == "mlm" and len(group) > 1}


def round_share(arm: ReportArm) -> int:
    """The share of CLM in percent, to the next 5: 5k of 22k counts as 25 %."""
    return 5 * round(20 * arm.clm_share)


def adapted_groups(results: ResultSet) -> dict[str, list[ReportArm]]:
    """MLM alone first, then each CLM budget: arms at several masking ratios."""
    after = arms_of(results, setup="adapted")
    places = {(arm.size, arm.pretrain_steps) for arm in after}
    has_sizes = len({arm.size for arm in after}) > 1
    alone = [
        arm for arm in arms_of(results, setup="objective", objective="mlm") if (arm.size, arm.pretrain_steps) in places
    ]
    groups: dict[str, list[ReportArm]] = {}
    for arm in [*alone, *after]:
        label = f"{short_steps(arm.clm_steps)} CLM, then {short_steps(arm.mlm_steps)} MLM" if arm.clm_steps else "MLM"
        groups.setdefault(f"{arm.size}, {label}" if has_sizes else label, []).append(arm)
    return groups


def is_biphasic(arm: ReportArm) -> bool:
    """CLM, then MLM: in one go, or continued."""
    return arm.objective == "clm+mlm" or (arm.objective == "clm" and arm.cpt_steps > 0)


def counted_arms(results: ResultSet) -> list[ReportArm]:
    """Decayed arms whose FLOPs are known; with MLM those at the reference ratio."""
    mask = reference_mask(arms_of(results))
    return [
        arm
        for arm in arms_of(results)
        if arm.flops and arm.setup not in ("efficiency", "control", "other") and arm.mask_percent in (None, mask)
    ]


DRAWINGS = (
    Drawing(
        "objective-by-size",
        "Objective by size",
        "CLM and MLM at the same size, data and steps.",
        "CLM and MLM of the same size and steps",
        plot_objective_by_size,
        lambda results: bool(objective_pairs(results)),
    ),
    Drawing(
        "masking-ratio",
        "Masking ratio",
        "MLM alone at several masking ratios.",
        "MLM alone at two masking ratios or more",
        plot_masking_ratio,
        lambda results: len({a.mask_percent for a in arms_of(results, setup="objective", objective="mlm")}) > 1,
    ),
    Drawing(
        "score-by-steps",
        "Score against steps",
        "Undecayed checkpoints on the way; the axis of steps is logarithmic.",
        "undecayed checkpoints at two steps or more",
        plot_steps,
        lambda results: len({arm.pretrain_steps for arm in arms_of(results, setup="efficiency")}) > 1,
    ),
    Drawing(
        "rate-spread",
        "Spread over fine-tuning rates",
        "Standard deviation of test scores over fine-tuning rates and seeds, each dataset around its mean; bootstrap "
        "intervals over seeds.",
        "test scores at every fine-tuning rate and seed",
        plot_rate_spread,
        lambda results: any(
            spread_scores(results, arm, family) is not None
            for pair in objective_pairs(results)
            for arm in pair
            for family in families(results)
        ),
    ),
    Drawing(
        "splits",
        "CLM then MLM at a fixed budget",
        "Difference to MLM alone with the same number of steps. CLM alone is in the tables.",
        "CLM then MLM, and MLM alone, at one budget",
        plot_splits,
        lambda results: bool(split_budgets(results)),
    ),
    Drawing(
        "masking-after-clm",
        "Masking ratio after CLM",
        "MLM alone, and MLM after CLM with as many steps in all.",
        "MLM after CLM at two masking ratios or more",
        plot_mask_after_clm,
        lambda results: bool(arms_of(results, setup="adapted")),
    ),
    Drawing(
        "continued",
        "Continued pretraining: which parent?",
        "Difference between continuing with MLM from the CLM model and from the MLM model; 0 steps are the parents.",
        "MLM continued from CLM and from MLM",
        plot_continued_gap,
        lambda results: {"clm", "mlm"} <= {a.objective for a in arms_of(results, setup="cpt") if a.cpt_steps},
    ),
    Drawing(
        "continued-steps",
        "Continued pretraining over its steps",
        "Continued with MLM from the CLM model and from the MLM model; 0 steps are the parents.",
        "continued pretraining at two numbers of steps or more",
        plot_continued_steps,
        lambda results: len({arm.cpt_steps for arm in arms_of(results, setup="cpt")}) > 1,
    ),
    Drawing(
        "score-by-flops",
        "Score against FLOPs",
        "Decayed models; the larger the marker, the larger the model. CLM then MLM in one go or continued.",
        "FLOPs of two arms or more",
        plot_flops,
        lambda results: len(counted_arms(results)) > 1,
    ),
)

LOSSES = "losses"
LEGEND_SIGNS = 105
"""How many characters fit into a line of the legend."""


def draw_figures(
    results: ResultSet, folder: Path, losses: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> tuple[list[Figure], list[str]]:
    """Write every figure for which there are scores, as `NAME.svg` and `NAME.pdf`; and say what the others lack.

    The same results give the same SVG, to the byte.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn, missing = [], []
    there = families(results)
    for drawing in DRAWINGS:
        if drawing.can_draw(results):
            panels = [partial(drawing.plot, results, family) for family in there]
            drawn.append(draw_panels(folder, drawing.name, drawing.title, drawing.caption, panels))
        else:
            missing.append(f"{drawing.title}: needs {drawing.needs}")
    losses = losses or {}
    objectives = list(dict.fromkeys(row["objective"] for rows in losses.values() for row in rows))
    if objectives:
        panels = [partial(plot_losses, losses, objective) for objective in objectives]
        caption = "Training loss as lines (means of neighbouring steps), validation loss as markers."
        drawn.append(draw_panels(folder, LOSSES, "Loss curves", caption, panels))
    else:
        missing.append("Loss curves: needs the metrics.jsonl of the runs")
    return drawn, missing


def draw_panels(
    folder: Path, name: str, title: str, caption: str, panels: Sequence[Callable[["Axes"], "Axes"]]
) -> Figure:
    """Panels in two columns under one legend."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    rows = math.ceil(len(panels) / 2)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        canvas = Canvas(figsize=(6.7 if len(panels) > 1 else 4.2, 0.4 + 2.25 * rows), layout="constrained")
        canvas.get_layout_engine().set(w_pad=0.08, h_pad=0.06)  # type: ignore[call-arg, union-attr]
        grid = canvas.subplots(rows, min(len(panels), 2), squeeze=False).ravel()
        for axes, plot in zip(grid, panels, strict=False):
            plot(axes)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        entries: dict[str, Any] = {}
        for axes in grid[: len(panels)]:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        columns = max(LEGEND_SIGNS // max(len(label) + 8 for label in ("", *entries)), 1)
        canvas.legend(
            entries.values(), entries.keys(), loc="outside upper center", ncols=min(columns, len(entries) or 1)
        )
        svg, pdf = folder / f"{name}.svg", folder / f"{name}.pdf"
        canvas.savefig(svg, metadata={"Date": None})
        canvas.set_layout_engine("none")  # it is laid out; once is enough
        canvas.savefig(pdf, metadata={"CreationDate": None})
    return Figure(name, title, caption, svg, pdf)
