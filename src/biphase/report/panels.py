"""Results → what each figure shows, a panel for each family, as data: series of marks with their intervals, and axes.

The figures are those of the paper (its figures 2 to 12), for any study in which these comparisons were made. Each is a
function of results that gives its panels, or none where the scores that it needs are not there; `figures.FIGURES` says
what each shows.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from biphase.report.contrasts import difference
from biphase.report.formats import label_measures
from biphase.report.results import (
    FAMILY_NAMES,
    ReportArm,
    ResultSet,
    num_parameters,
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
    until: float | None = None
    """Where a dotted line from it along the x axis ends, in panels of `lines`."""


@dataclass(frozen=True)
class Panel:
    """A family's part of a figure. `lines` go through the marks, `bars` stand on zero side by side in groups, and
    `points` stand alone; `rings` are hollow points."""

    kind: Literal["lines", "bars", "points", "rings"]
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
    height: float = 2.25
    """In inches."""


PlacedArms = tuple[str, Look, Iterable[tuple[float, Sequence[ReportArm]]]]
"""A series before its scores are known: the name, the look, and for each mark its `x` and the arm that it is of, or the
two arms whose difference it is."""


def objective_by_size(results: ResultSet) -> list[Panel]:
    pairs = objective_pairs(results)
    names = ["CLM", *(f"MLM {mlm.mask_percent} %" for _, mlm in pairs[:1])]
    return fill_by_size(results, pairs, names, 0.06, x_margin=0.4)


def spread_over_rates(results: ResultSet) -> list[Panel]:
    axes = {"kind": "points", "y_label": "spread (points)", "x_margin": 0.5}
    made = fill_by_size(results, objective_pairs(results), ["CLM", "MLM"], 0.09, **axes)
    return made if any(marks for panel in made for _, _, marks in panel.series) else []


def fill_by_size(
    results: ResultSet, pairs: Sequence[tuple[ReportArm, ReportArm]], names: Sequence[str], shift: float, **axes: Any
) -> list[Panel]:
    """Panels with CLM a little to the left of each size, MLM to the right."""
    series: list[PlacedArms] = []
    for number, (name, objective) in enumerate(zip(names, ("clm", "mlm"), strict=False)):
        places = [(at + shift * (2 * number - 1), [pair[number]]) for at, pair in enumerate(pairs)]
        series.append((name, LOOKS[objective], places))
    axes |= {"tick_labels": [clm.size for clm, _ in pairs]}
    return fill_panels(results, series, "parameters without the head", range(len(pairs)), **axes)


def masking_ratio(results: ResultSet) -> list[Panel]:
    arms = results.arms(setup="objective", objective="mlm")
    sizes = sizes_of(arms)
    series: list[PlacedArms] = []
    for number, (size, look) in enumerate(zip(sizes, itertools.cycle(SERIES), strict=False)):
        # The same ratios side by side, so that intervals of several lines do not hide each other.
        shift = 0.5 * (number - (len(sizes) - 1) / 2)
        series.append((size, look, [((arm.mask_percent or 0) + shift, [arm]) for arm in arms if arm.size == size]))
    masks = sorted({arm.mask_percent or 0 for arm in arms})
    return fill_panels(results, series, "masked tokens (%)", masks) if len(masks) > 1 else []


def masking_after_clm(results: ResultSet) -> list[Panel]:
    after = results.arms(setup="adapted")
    budgets = {(arm.size, arm.pretrain_steps) for arm in after}
    has_sizes = len({arm.size for arm in after}) > 1
    mlm_arms = results.arms(setup="objective", objective="mlm")
    alone = [arm for arm in mlm_arms if (arm.size, arm.pretrain_steps) in budgets]
    groups: dict[str, list[ReportArm]] = {}  # MLM alone first, then each CLM budget
    for arm in [*alone, *after]:
        label = f"{short_steps(arm.clm_steps)} CLM, then {short_steps(arm.mlm_steps)} MLM" if arm.clm_steps else "MLM"
        groups.setdefault(f"{arm.size}, {label}" if has_sizes else label, []).append(arm)
    series: list[PlacedArms] = []
    for number, (label, arms) in enumerate(groups.items()):
        look = (LOOKS["mlm"], LOOKS["clm+mlm"])[number] if number < 2 else SERIES[number % len(SERIES)]
        shift = 0.3 * (2 * (number % 2) - 1)
        series.append((label, look, [((arm.mask_percent or 0) + shift, [arm]) for arm in arms]))
    masks = sorted({arm.mask_percent or 0 for arm in [*alone, *after]})
    return fill_panels(results, series, "masked tokens (%)", masks)


def score_by_steps(results: ResultSet) -> list[Panel]:
    # Side by side, so that intervals do not hide each other.
    return along_steps(
        results,
        "efficiency",
        "{}",
        "pretraining steps, no decay",
        lambda arm: arm.pretrain_steps,
        shifts=(1.02, 0.98),
        is_logarithmic=True,
    )


def continued_steps(results: ResultSet) -> list[Panel]:
    return along_steps(results, "cpt", "from {}", "steps of MLM continued", lambda arm: arm.cpt_steps)


def along_steps(
    results: ResultSet,
    setup: str,
    label: str,
    x_label: str,
    steps_of: Callable[[ReportArm], int],
    shifts: tuple[float, float] = (1.0, 1.0),
    **axes: Any,
) -> list[Panel]:
    """A line for each objective and size of a comparison against some steps; `shifts`: factors for neighbours."""
    arms = results.arms(setup=setup)
    sizes, ticks = sizes_of(arms), sorted({steps_of(arm) for arm in arms})
    series: list[PlacedArms] = []
    for number, (objective, size) in enumerate(itertools.product(("clm", "mlm"), sizes)):
        chosen = [arm for arm in arms if (arm.objective, arm.size) == (objective, size)]
        name = label.format(objective.upper()) + (f", {size}" if len(sizes) > 1 else "")
        series.append((name, LOOKS[objective], [(steps_of(arm) * shifts[number % 2], [arm]) for arm in chosen]))
    labels = [short_steps(step) for step in ticks]
    return fill_panels(results, series, x_label, ticks, tick_labels=labels, **axes) if len(ticks) > 1 else []


def score_by_flops(results: ResultSet) -> list[Panel]:
    """Test score of decayed arms, with MLM at the reference ratio, against the floating-point operations of all their
    training; the larger the model, the larger its marker."""
    mask = reference_mask(results.arms())
    arms: dict[str, ReportArm] = {}
    for arm in results.arms():
        if arm.flops and arm.setup not in ("efficiency", "control", "other") and arm.mask_percent in (None, mask):
            arms[arm.name] = arm
    if len(arms) < 2:
        return []
    series: list[PlacedArms] = []
    for label, objective in (("CLM", "clm"), ("MLM", "mlm"), ("CLM, then MLM", "clm+mlm")):  # in one go, or continued
        own = [arm for arm in arms.values() if arm.whole_objective == objective]
        series.append((label, LOOKS[objective], [(arm.flops or 0.0, [arm]) for arm in own]))
    ticks, labels, unit = round_ticks([arm.flops or 0.0 for arm in arms.values()])
    axes: dict[str, Any] = {"tick_labels": labels, "kind": "rings", "is_logarithmic": True}
    sizes = [size for size in sizes_of(arms.values()) if num_parameters(size) < math.inf]  # no other name says one
    return fill_panels(results, series, f"training FLOPs{unit}", ticks, sizes=sizes, **axes)


def splits(results: ResultSet) -> list[Panel]:
    """CLM→MLM minus MLM alone at every budget that has both, a bar for every share of CLM, with the interval of the
    difference."""
    budgets: dict[tuple[str, int], list[ReportArm]] = {}  # by size and steps: MLM alone, then from little to much CLM
    for arm in sorted(results.arms(setup="ratio"), key=lambda arm: (arm.pretrain_steps, arm.clm_steps)):
        if arm.objective != "clm":
            budgets.setdefault((arm.size, arm.pretrain_steps), []).append(arm)
    budgets = {key: arms for key, arms in budgets.items() if arms[0].objective == "mlm" and len(arms) > 1}
    by_share: dict[int, list[tuple[float, Sequence[ReportArm]]]] = {}
    for at, (alone, *arms) in enumerate(budgets.values()):
        for arm in arms:
            share = 5 * round(20 * arm.clm_share)  # percent, to the next 5: 5k of 22k counts as 25 %
            by_share.setdefault(share, []).append((at, [arm, alone]))
    series: list[PlacedArms] = []
    for share, look in zip(sorted(by_share), itertools.cycle(SERIES), strict=False):
        series.append((f"{share} % CLM, then MLM", look, by_share[share]))
    steps = [steps for _, steps in budgets]
    return fill_bars(results, series, steps, "pretraining steps", "ahead of MLM alone (points)")


def continued(results: ResultSet) -> list[Panel]:
    arms = results.arms(setup="cpt")
    if not {"clm", "mlm"} <= {arm.objective for arm in arms if arm.cpt_steps}:
        return []
    steps = sorted({arm.cpt_steps for arm in arms})
    series: list[PlacedArms] = []
    for size, look in zip(sizes_of(arms), itertools.cycle(SERIES), strict=False):
        own = {(arm.objective, arm.cpt_steps): arm for arm in arms if arm.size == size}
        pairs = [
            (at, [own[key] for key in (("clm", step), ("mlm", step)) if key in own]) for at, step in enumerate(steps)
        ]
        series.append((f"{size}, from CLM − from MLM", look, [(at, pair) for at, pair in pairs if len(pair) == 2]))
    return fill_bars(results, series, steps, "steps of MLM continued", "CLM parent ahead (points)")


def fill_bars(
    results: ResultSet, series: Sequence[PlacedArms], steps: Sequence[int], x_label: str, y_label: str
) -> list[Panel]:
    """Panels of differences at some numbers of steps."""
    axes: dict[str, Any] = {
        "kind": "bars",
        "y_label": y_label,
        "tick_labels": [short_steps(step) for step in steps],
        "x_margin": 0.6,
    }
    return fill_panels(results, series, x_label, range(len(steps)), **axes)


def fill_panels(
    results: ResultSet,
    series: Sequence[PlacedArms],
    x_label: str,
    ticks: Sequence[float],
    *,
    sizes: Sequence[str] = (),
    **axes: Any,
) -> list[Panel]:
    """A panel for each family, with the marks of those arms that have a score there, from left to right.

    Args:
        sizes: those of networks, smallest first, where larger ones have larger marks.
        axes: further fields of `Panel`; `y_label` is by default what the family's score measures: `accuracy (%)`.
    """
    made = []
    for family in results.families if ticks else ():
        filled = []
        for name, look, places in series:
            marks = []
            for x, arms in places:
                scores = [score for arm in arms if (score := results.find_average(arm, family))]
                if axes.get("kind") == "points":
                    marks += mark_spread(results, family, x, arms[0])
                elif len(scores) == len(arms):
                    size = 3.5 + 2 * sizes.index(arms[0].size) if arms[0].size in sizes else 5.0
                    mean, half_width = scores[0].mean, scores[0].half_width
                    if len(scores) > 1:
                        gap = difference(*scores).against()
                        mean, half_width = gap.value, gap.half_width
                    marks.append(mark_mean(x, mean, half_width, size))
            filled.append((name, look, sorted(marks, key=lambda mark: mark.x)))
        measure = label_measures(results, family, results.primary_metric)
        given = {"kind": "lines", "y_label": measure, **axes}
        made.append(
            Panel(series=filled, title=f"{family} · {FAMILY_NAMES[family]}", x_label=x_label, ticks=ticks, **given)
        )
    return made


def mark_mean(x: float, mean: float, half_width: float, size: float = 5.0) -> Mark:
    """A share as a mark, with as much of an interval as is known."""
    reach = 0.0 if math.isnan(half_width) else 100 * half_width
    return Mark(x, 100 * mean, reach, reach, size)


def mark_spread(results: ResultSet, family: str, x: float, arm: ReportArm) -> list[Mark]:
    """The spread of all test scores of an arm, each around the mean of its dataset; none where not all are known."""
    metric = results.primary_metric
    tables = []
    for dataset in results.datasets(family, metric):
        scores_RS = scores_by_rate(results.find(arm, family, dataset, metric))
        if scores_RS is None or np.isnan(scores_RS).all():
            return []
        tables.append(scores_RS - np.nanmean(scores_RS))
    if not tables or len({table.shape[1] for table in tables}) > 1:
        return []
    spread = rate_spread(np.concatenate(tables), np.random.default_rng(0))
    reach = (spread.value - spread.low, spread.high - spread.value)
    down, up = (0.0 if math.isnan(length) else max(100 * length, 0.0) for length in reach)
    return [Mark(x, 100 * spread.value, down, up)]


def round_ticks(values: Sequence[float]) -> tuple[list[float], list[str], str]:
    """Ticks of a logarithmic axis at round numbers inside what is drawn, their labels in units of a power of ten, such
    as 2, 5, 10 and 20, and that unit: ` (×10¹⁵)`."""
    unit = math.floor(math.log10(min(values)))
    low, high = min(values) / 10.0**unit, max(values) / 10.0**unit
    round_numbers = [step * 10**power for power in range(-1, 12) for step in (1, 2, 5)]
    ticks = [tick for tick in round_numbers if low / 1.1 <= tick <= high * 1.1]
    if len(ticks) < 3:
        ticks = [tick for tick in (1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20) if low / 1.1 <= tick <= high * 1.1]
    for parts in (2, 5, 10):  # as 2.2 and 2.4, where all lies close together
        if len(ticks) < 2:
            ticks = [at / parts for at in range(parts, 10 * parts + 1) if low / 1.1 <= at / parts <= high * 1.1]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer()]
    power = str(unit).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return [tick * 10.0**unit for tick in ticks], [f"{tick:g}" for tick in ticks], f" (×10{power})"
