"""Results → what each figure shows of a family, as data: series of marks with their intervals, and the axes.

The figures are those of the paper (its figures 2 to 12), for any study in which these comparisons were made.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from biphase.report.contrasts import difference
from biphase.report.results import (
    FAMILY_NAMES,
    MEASURES,
    ReportArm,
    ResultSet,
    objective_pairs,
    reference_mask,
    scores_by_rate,
    short_steps,
    sizes_of,
)
from biphase.report.statistics import rate_spread
from biphase.style import LOOKS, SERIES, Look


@dataclass(frozen=True)
class Mark:
    """A value in percent or points, and how far its interval goes down and up (0 where it is not known)."""

    x: float
    value: float
    down: float
    up: float
    size: float = 5.0
    dots: Sequence[float] = ()
    """The single values behind it, where they are shown."""


@dataclass(frozen=True)
class Span:
    """A distance along the x axis at one height."""

    begin: float
    end: float
    value: float
    look: Look


@dataclass(frozen=True)
class Panel:
    """A family's part of a figure. `lines` go through the marks, `bars` stand on zero side by side in groups, and
    `points` stand alone; `rings` are hollow points; `rows` are points whose `x` is the row, with the value across."""

    kind: Literal["lines", "bars", "points", "rings", "rows"]
    series: Sequence[tuple[str, Look, Sequence[Mark]]]
    """The name in the legend, the look, and the marks of each series."""
    title: str
    x_label: str
    y_label: str
    ticks: Sequence[float]
    tick_labels: Sequence[str] | None = None
    is_logarithmic: bool = False
    """Whether the x axis is."""
    x_margin: float | None = None
    """The room on the x axis before the first tick and after the last; None: as the marks need it."""
    spans: Sequence[Span] = ()
    """Dotted, in panels of `lines`."""


def objective_by_size(results: ResultSet, family: str) -> Panel:
    """Test score of CLM and of MLM (at the reference ratio) for every size."""
    pairs = objective_pairs(results)
    series = []
    for number, objective in enumerate(("clm", "mlm")):
        mask = f" {pairs[0][1].mask_percent} %" if objective == "mlm" else ""
        shift = 0.06 * (2 * number - 1)
        marks = mark_scores(results, family, [(at + shift, pair[number]) for at, pair in enumerate(pairs)])
        series.append((f"{objective.upper()}{mask}", LOOKS[objective], marks))
    sizes = [clm.size for clm, _ in pairs]
    x_label = "parameters without the head"
    return score_panel(results, family, series, x_label, range(len(pairs)), tick_labels=sizes, x_margin=0.4)


def masking_ratio(results: ResultSet, family: str) -> Panel:
    """Test score of MLM against the masking ratio, a line for every size."""
    arms = results.arms(setup="objective", objective="mlm")
    sizes = sizes_of(arms)
    series = []
    for number, (size, look) in enumerate(zip(sizes, itertools.cycle(SERIES), strict=False)):
        # The same ratios side by side, so that intervals of several lines do not hide each other.
        shift = 0.5 * (number - (len(sizes) - 1) / 2)
        places = [((arm.mask_percent or 0) + shift, arm) for arm in arms if arm.size == size]
        series.append((size, look, mark_scores(results, family, places)))
    masks = sorted({arm.mask_percent or 0 for arm in arms})
    return score_panel(results, family, series, "masked tokens (%)", masks)


def masking_after_clm(results: ResultSet, family: str) -> Panel:
    """Test score against the masking ratio, for MLM alone and for MLM after CLM at the same size and total steps."""
    after = results.arms(setup="adapted")
    budgets = {(arm.size, arm.pretrain_steps) for arm in after}
    has_sizes = len({arm.size for arm in after}) > 1
    mlm_arms = results.arms(setup="objective", objective="mlm")
    alone = [arm for arm in mlm_arms if (arm.size, arm.pretrain_steps) in budgets]
    groups: dict[str, list[ReportArm]] = {}  # MLM alone first, then each CLM budget
    for arm in [*alone, *after]:
        label = f"{short_steps(arm.clm_steps)} CLM, then {short_steps(arm.mlm_steps)} MLM" if arm.clm_steps else "MLM"
        groups.setdefault(f"{arm.size}, {label}" if has_sizes else label, []).append(arm)
    series = []
    for number, (label, arms) in enumerate(groups.items()):
        look = (LOOKS["mlm"], LOOKS["clm+mlm"])[number] if number < 2 else SERIES[number % len(SERIES)]
        shift = 0.3 * (2 * (number % 2) - 1)
        places = [((arm.mask_percent or 0) + shift, arm) for arm in arms]
        series.append((label, look, mark_scores(results, family, places)))
    masks = sorted({arm.mask_percent or 0 for arm in [*alone, *after]})
    return score_panel(results, family, series, "masked tokens (%)", masks)


def score_by_steps(results: ResultSet, family: str) -> Panel:
    """Test score of undecayed checkpoints against the step, for CLM and MLM, on a logarithmic axis."""
    # Side by side, so that intervals do not hide each other.
    series = by_steps(
        results, family, "efficiency", "{}", lambda number, arm: arm.pretrain_steps * (1.02, 0.98)[number % 2]
    )
    steps = sorted({arm.pretrain_steps for arm in results.arms(setup="efficiency")})
    labels = [short_steps(step) for step in steps]
    x_label = "pretraining steps, no decay"
    return score_panel(results, family, series, x_label, steps, tick_labels=labels, is_logarithmic=True)


def continued_steps(results: ResultSet, family: str) -> Panel:
    """Test score against the steps of continued MLM, from the CLM and from the MLM parent; 0 is the parent itself."""
    series = by_steps(results, family, "cpt", "from {}", lambda _, arm: arm.cpt_steps)
    steps = sorted({arm.cpt_steps for arm in results.arms(setup="cpt")})
    labels = [short_steps(step) for step in steps]
    return score_panel(results, family, series, "steps of MLM continued", steps, tick_labels=labels)


def by_steps(
    results: ResultSet, family: str, setup: str, label: str, place: Callable[[int, ReportArm], float]
) -> list[tuple[str, Look, list[Mark]]]:
    """A series for each objective and size of a comparison; `place`: the number of a series and an arm → its x."""
    arms = results.arms(setup=setup)
    sizes, series = sizes_of(arms), []
    for number, (objective, size) in enumerate(itertools.product(("clm", "mlm"), sizes)):
        chosen = [arm for arm in arms if (arm.objective, arm.size) == (objective, size)]
        marks = mark_scores(results, family, [(place(number, arm), arm) for arm in chosen])
        name = label.format(objective.upper()) + (f", {size}" if len(sizes) > 1 else "")
        series.append((name, LOOKS[objective], marks))
    return series


def score_by_flops(results: ResultSet, family: str) -> Panel:
    """Test score against the floating-point operations of all training; the larger the model, the larger its marker."""
    arms = list({arm.name: arm for arm in counted_arms(results)}.values())
    sizes = sizes_of(arms)
    both = [arm for arm in arms if arm.objective == "clm+mlm" or (arm.objective == "clm" and arm.cpt_steps)]
    kinds = [
        ("CLM", "clm", [arm for arm in arms if arm.objective == "clm" and not arm.cpt_steps]),
        ("MLM", "mlm", [arm for arm in arms if arm.objective == "mlm"]),
        ("CLM, then MLM", "clm+mlm", both),  # in one go, or continued
    ]
    series = []
    for label, objective, chosen in kinds:
        marks = []
        for arm in chosen:
            marks += mark_scores(results, family, [(arm.flops or 0.0, arm)], 3.5 + 2 * sizes.index(arm.size))
        series.append((label, LOOKS[objective], marks))
    ticks, labels, unit = round_ticks([arm.flops or 0.0 for arm in arms])
    return score_panel(
        results,
        family,
        series,
        f"training FLOPs{unit}",
        ticks,
        tick_labels=labels,
        kind="rings",
        is_logarithmic=True,
    )


def round_ticks(values: Sequence[float]) -> tuple[list[float], list[str], str]:
    """Ticks of a logarithmic axis at round numbers inside what is drawn, their labels in units of a power of ten, such
    as 2, 5, 10 and 20, and that unit: ` (×10¹⁵)`."""
    unit = math.floor(math.log10(min(values)))
    low, high = min(values) / 10.0**unit, max(values) / 10.0**unit
    round_numbers = [step * 10**power for power in range(-1, 12) for step in (1, 2, 5)]
    ticks = [tick for tick in round_numbers if low / 1.1 <= tick <= high * 1.1]
    if len(ticks) < 3:
        ticks = [tick for tick in (1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20) if low / 1.1 <= tick <= high * 1.1]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer()]
    power = str(unit).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return [tick * 10.0**unit for tick in ticks], [f"{tick:g}" for tick in ticks], f" (×10{power})"


def score_panel(
    results: ResultSet,
    family: str,
    series: Sequence[tuple[str, Look, Sequence[Mark]]],
    x_label: str,
    ticks: Sequence[float],
    *,
    tick_labels: Sequence[str] | None = None,
    kind: Literal["lines", "rings"] = "lines",
    is_logarithmic: bool = False,
    x_margin: float | None = None,
) -> Panel:
    """A panel of test scores, by what they measure: `accuracy (%)`."""
    title = f"{family} · {FAMILY_NAMES[family]}"
    y_label = f"{MEASURES[results.primary_metric][family].partition(',')[0]} (%)"
    return Panel(kind, series, title, x_label, y_label, ticks, tick_labels, is_logarithmic, x_margin)


def mark_scores(
    results: ResultSet, family: str, places: Iterable[tuple[float, ReportArm]], size: float = 5.0
) -> list[Mark]:
    """Mean scores of arms in percent with their intervals, from left to right; those without a score are left out."""
    marks = []
    for x, arm in places:
        if (score := results.find_average(arm, family)) is not None:
            reach = 0.0 if math.isnan(score.half_width) else 100 * score.half_width
            marks.append(Mark(x, 100 * score.mean, reach, reach, size))
    return sorted(marks, key=lambda mark: mark.x)


def splits(results: ResultSet, family: str) -> Panel:
    """CLM→MLM minus MLM alone at every budget, a bar for every share of CLM, with the interval of the difference."""
    budgets = split_budgets(results)
    by_share: dict[int, list[tuple[int, ReportArm, ReportArm]]] = {}
    for at, (alone, *arms) in enumerate(budgets.values()):
        for arm in arms:
            share = 5 * round(20 * arm.clm_share)  # percent, to the next 5: 5k of 22k counts as 25 %
            by_share.setdefault(share, []).append((at, arm, alone))
    series = []
    for share, look in zip(sorted(by_share), itertools.cycle(SERIES), strict=False):
        series.append((f"{share} % CLM, then MLM", look, mark_gaps(results, family, by_share[share])))
    steps = [steps for _, steps in budgets]
    return gap_panel(series, family, steps, "pretraining steps", "ahead of MLM alone (points)")


def continued(results: ResultSet, family: str) -> Panel:
    """Continued from CLM minus continued from MLM after the same steps, a bar for each number of steps, with the
    interval."""
    arms = results.arms(setup="cpt")
    steps = sorted({arm.cpt_steps for arm in arms})
    series = []
    for size, look in zip(sizes_of(arms), itertools.cycle(SERIES), strict=False):
        parents = {(arm.objective, arm.cpt_steps): arm for arm in arms if arm.size == size}
        places = []
        for at, step in enumerate(steps):
            clm, mlm = parents.get(("clm", step)), parents.get(("mlm", step))
            if clm and mlm:
                places.append((at, clm, mlm))
        series.append((f"{size}, from CLM − from MLM", look, mark_gaps(results, family, places)))
    return gap_panel(series, family, steps, "steps of MLM continued", "CLM parent ahead (points)")


def gap_panel(
    series: Sequence[tuple[str, Look, Sequence[Mark]]], family: str, steps: Sequence[int], x_label: str, y_label: str
) -> Panel:
    title, labels = f"{family} · {FAMILY_NAMES[family]}", [short_steps(step) for step in steps]
    return Panel("bars", series, title, x_label, y_label, range(len(steps)), labels, x_margin=0.6)


def mark_gaps(results: ResultSet, family: str, places: Iterable[tuple[float, ReportArm, ReportArm]]) -> list[Mark]:
    """Differences (first arm minus second) in points with their intervals; those without scores are left out."""
    marks = []
    for x, arm, other in places:
        ours, theirs = results.find_average(arm, family), results.find_average(other, family)
        if ours is not None and theirs is not None:
            seen = difference(ours, theirs).against()
            reach = 0.0 if math.isnan(seen.low) else 100 * (seen.mean - seen.low)
            marks.append(Mark(x, 100 * seen.mean, reach, reach))
    return marks


def spread_over_rates(results: ResultSet, family: str) -> Panel:
    """Standard deviation of test scores over fine-tuning rates and seeds, each dataset around its mean, with its
    interval."""
    pairs = objective_pairs(results)
    series = []
    for number, objective in enumerate(("clm", "mlm")):
        marks = []
        for at, pair in enumerate(pairs):
            scores_RS = spread_scores(results, pair[number], family)
            if scores_RS is None:
                continue
            spread = rate_spread(scores_RS, np.random.default_rng(0))
            reach = (spread.std - spread.low, spread.high - spread.std)
            down, up = (0.0 if math.isnan(length) else max(100 * length, 0.0) for length in reach)
            marks.append(Mark(at + 0.09 * (2 * number - 1), 100 * spread.std, down, up))
        series.append((objective.upper(), LOOKS[objective], marks))
    return Panel(
        kind="points",
        series=series,
        title=f"{family} · {FAMILY_NAMES[family]}",
        x_label="parameters without the head",
        y_label="spread (points)",
        ticks=range(len(pairs)),
        tick_labels=[clm.size for clm, _ in pairs],
        x_margin=0.5,
    )


def spread_scores(results: ResultSet, arm: ReportArm, family: str) -> np.ndarray | None:
    """[rates of all datasets, seeds]: test scores of an arm around the mean of their dataset; None where not known."""
    metric = results.primary_metric
    tables = []
    for dataset in results.datasets(family, metric):
        scores_RS = scores_by_rate(results.find(arm, family, dataset, metric))
        if scores_RS is None or np.isnan(scores_RS).all():
            return None
        tables.append(scores_RS - np.nanmean(scores_RS))
    return np.concatenate(tables) if tables and len({table.shape[1] for table in tables}) == 1 else None


def split_budgets(results: ResultSet) -> dict[tuple[str, int], list[ReportArm]]:
    """(size, steps) → MLM alone, then CLM→MLM from little to much CLM; budgets that have both."""
    arms = sorted(results.arms(setup="ratio"), key=lambda arm: (arm.pretrain_steps, arm.clm_steps))
    groups: dict[tuple[str, int], list[ReportArm]] = {}
    for arm in arms:
        if arm.objective != "clm":
            groups.setdefault((arm.size, arm.pretrain_steps), []).append(arm)
    return {key: group for key, group in groups.items() if group[0].objective == "mlm" and len(group) > 1}


def counted_arms(results: ResultSet) -> list[ReportArm]:
    """Decayed arms whose FLOPs are known; with MLM those at the reference ratio."""
    mask = reference_mask(results.arms())
    return [
        arm
        for arm in results.arms()
        if arm.flops and arm.setup not in ("efficiency", "control", "other") and arm.mask_percent in (None, mask)
    ]
