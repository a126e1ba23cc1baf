"""Results → what each figure shows of a family, as data: series of marks with their intervals, and the axes.

The figures are those of the paper (its figures 2 to 12), for any study in which these comparisons were made.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from biphase.report.contrasts import Contrast, difference
from biphase.report.results import (
    FAMILY_NAMES,
    MEASURES,
    ReportArm,
    Result,
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
class Series:
    """Marks of one look, with their name in the legend."""

    label: str
    look: Look
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Panel:
    """A family's part of a figure. `lines` go through the marks, `bars` stand on zero side by side in groups, and
    `points` stand alone; `rings` are hollow points."""

    kind: Literal["lines", "bars", "points", "rings"]
    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    ticks: Sequence[float]
    tick_labels: Sequence[str] | None = None
    is_logarithmic: bool = False
    """Whether the x axis is."""
    x_margin: float | None = None
    """The room on the x axis before the first tick and after the last; None: as the marks need it."""


def objective_by_size(results: ResultSet, family: str) -> Panel:
    """Test score of CLM and of MLM (at the reference ratio) for every size."""
    pairs = objective_pairs(results)
    series = []
    for number, objective in enumerate(("clm", "mlm")):
        mask = f" {pairs[0][1].mask_percent} %" if objective == "mlm" else ""
        shift = 0.06 * (2 * number - 1)
        scores = [(at + shift, results.find_average(pair[number], family)) for at, pair in enumerate(pairs)]
        series.append(Series(f"{objective.upper()}{mask}", LOOKS[objective], mark_scores(scores)))
    sizes = [clm.size for clm, _ in pairs]
    return Panel(
        kind="lines",
        series=series,
        title=title_of(family),
        x_label="parameters without the head",
        y_label=score_label(results, family),
        ticks=range(len(pairs)),
        tick_labels=sizes,
        x_margin=0.4,
    )


def masking_ratio(results: ResultSet, family: str) -> Panel:
    """Test score of MLM against the masking ratio, a line for every size."""
    arms = results.arms(setup="objective", objective="mlm")
    sizes = sizes_of(arms)
    series = []
    for number, (size, look) in enumerate(zip(sizes, itertools.cycle(SERIES), strict=False)):
        # The same ratios side by side, so that intervals of several lines do not hide each other.
        shift = 0.5 * (number - (len(sizes) - 1) / 2)
        scores = [
            ((arm.mask_percent or 0) + shift, results.find_average(arm, family)) for arm in arms if arm.size == size
        ]
        series.append(Series(size, look, mark_scores(scores)))
    return mask_panel(results, family, series, arms)


def masking_after_clm(results: ResultSet, family: str) -> Panel:
    """Test score against the masking ratio, for MLM alone and for MLM after CLM at the same size and total steps."""
    groups = adapted_groups(results)
    series = []
    for number, (label, arms) in enumerate(groups.items()):
        look = (LOOKS["mlm"], LOOKS["clm+mlm"])[number] if number < 2 else SERIES[number % len(SERIES)]
        shift = 0.3 * (2 * (number % 2) - 1)
        scores = [((arm.mask_percent or 0) + shift, results.find_average(arm, family)) for arm in arms]
        series.append(Series(label, look, mark_scores(scores)))
    return mask_panel(results, family, series, itertools.chain(*groups.values()))


def mask_panel(results: ResultSet, family: str, series: Sequence[Series], arms: Iterable[ReportArm]) -> Panel:
    return Panel(
        kind="lines",
        series=series,
        title=title_of(family),
        x_label="masked tokens (%)",
        y_label=score_label(results, family),
        ticks=sorted({arm.mask_percent or 0 for arm in arms}),
    )


def score_by_steps(results: ResultSet, family: str) -> Panel:
    """Test score of undecayed checkpoints against the step, for CLM and MLM, on a logarithmic axis."""
    arms = results.arms(setup="efficiency")
    sizes = sizes_of(arms)
    series = []
    for number, (objective, size) in enumerate(itertools.product(("clm", "mlm"), sizes)):
        nudge = 1 + 0.02 * (-1) ** number
        chosen = [arm for arm in arms if (arm.objective, arm.size) == (objective, size)]
        scores = [(nudge * arm.pretrain_steps, results.find_average(arm, family)) for arm in chosen]
        label = objective.upper() + (f", {size}" if len(sizes) > 1 else "")
        series.append(Series(label, LOOKS[objective], mark_scores(scores)))
    steps = sorted({arm.pretrain_steps for arm in arms})
    return Panel(
        kind="lines",
        series=series,
        title=title_of(family),
        x_label="pretraining steps, no decay",
        y_label=score_label(results, family),
        ticks=steps,
        tick_labels=[short_steps(step) for step in steps],
        is_logarithmic=True,
    )


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
        series.append(Series(objective.upper(), LOOKS[objective], marks))
    return Panel(
        kind="points",
        series=series,
        title=title_of(family),
        x_label="parameters without the head",
        y_label="spread (points)",
        ticks=range(len(pairs)),
        tick_labels=[clm.size for clm, _ in pairs],
        x_margin=0.5,
    )


def splits(results: ResultSet, family: str) -> Panel:
    """CLM→MLM minus MLM alone at every budget, a bar for every share of CLM, with the interval of the difference."""
    budgets = split_budgets(results)
    shares = sorted({round_share(arm) for arms in budgets.values() for arm in arms[1:]})
    series = []
    for share, look in zip(shares, itertools.cycle(SERIES), strict=False):
        gaps = []
        for at, (alone, *arms) in enumerate(budgets.values()):
            for arm in arms:
                if round_share(arm) == share:
                    gaps.append((at, score_gap(results, arm, alone, family)))
        series.append(Series(f"{share} % CLM, then MLM", look, mark_gaps(gaps)))
    return gap_panel(
        series, family, [steps for _, steps in budgets], "pretraining steps", "ahead of MLM alone (points)"
    )


def continued(results: ResultSet, family: str) -> Panel:
    """Continued from CLM minus continued from MLM after the same steps, a bar for each number of steps, with the
    interval."""
    arms = results.arms(setup="cpt")
    steps = sorted({arm.cpt_steps for arm in arms})
    series = []
    for size, look in zip(sizes_of(arms), itertools.cycle(SERIES), strict=False):
        parents = {(arm.objective, arm.cpt_steps): arm for arm in arms if arm.size == size}
        gaps = []
        for at, step in enumerate(steps):
            clm, mlm = parents.get(("clm", step)), parents.get(("mlm", step))
            if clm and mlm:
                gaps.append((at, score_gap(results, clm, mlm, family)))
        series.append(Series(f"{size}, from CLM − from MLM", look, mark_gaps(gaps)))
    return gap_panel(series, family, steps, "steps of MLM continued", "CLM parent ahead (points)")


def gap_panel(series: Sequence[Series], family: str, steps: Sequence[int], x_label: str, y_label: str) -> Panel:
    return Panel(
        kind="bars",
        series=series,
        title=title_of(family),
        x_label=x_label,
        y_label=y_label,
        ticks=range(len(steps)),
        tick_labels=[short_steps(step) for step in steps],
        x_margin=0.6,
    )


def continued_steps(results: ResultSet, family: str) -> Panel:
    """Test score against the steps of continued MLM, from the CLM and from the MLM parent; 0 is the parent itself."""
    arms = results.arms(setup="cpt")
    sizes = sizes_of(arms)
    series = []
    for objective, size in itertools.product(("clm", "mlm"), sizes):
        chosen = [arm for arm in arms if (arm.objective, arm.size) == (objective, size)]
        scores = [(float(arm.cpt_steps), results.find_average(arm, family)) for arm in chosen]
        label = f"from {objective.upper()}" + (f", {size}" if len(sizes) > 1 else "")
        series.append(Series(label, LOOKS[objective], mark_scores(scores)))
    steps = sorted({arm.cpt_steps for arm in arms})
    return Panel(
        kind="lines",
        series=series,
        title=title_of(family),
        x_label="steps of MLM continued",
        y_label=score_label(results, family),
        ticks=steps,
        tick_labels=[short_steps(step) for step in steps],
    )


def score_by_flops(results: ResultSet, family: str) -> Panel:
    """Test score against the floating-point operations of all training; the larger the model, the larger its marker."""
    arms = {arm.name: arm for arm in counted_arms(results)}
    sizes = sizes_of(arms.values())
    kinds = [
        ("CLM", "clm", [arm for arm in arms.values() if arm.objective == "clm" and not arm.cpt_steps]),
        ("MLM", "mlm", [arm for arm in arms.values() if arm.objective == "mlm"]),
        ("CLM, then MLM", "clm+mlm", [arm for arm in arms.values() if has_both_objectives(arm)]),
    ]
    series = []
    for label, objective, chosen in kinds:
        marks = []
        for arm in chosen:
            size = 3.5 + 2 * sizes.index(arm.size)
            marks += mark_scores([(arm.flops or 0.0, results.find_average(arm, family))], size)
        series.append(Series(label, LOOKS[objective], marks))
    ticks, unit = flops_ticks([arm.flops or 0.0 for arm in arms.values()])
    return Panel(
        kind="rings",
        series=series,
        title=title_of(family),
        x_label=f"training FLOPs (×10{str(unit).translate(SUPERSCRIPT)})",
        y_label=score_label(results, family),
        ticks=[tick * 10.0**unit for tick in ticks],
        tick_labels=[f"{tick:g}" for tick in ticks],
        is_logarithmic=True,
    )


SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def flops_ticks(flops: Sequence[float]) -> tuple[list[float], int]:
    """Round numbers inside what is drawn, in units of a power of ten, and this power: [2, 5, 10], 20."""
    unit = math.floor(math.log10(min(flops)))
    low, high = min(flops) / 10**unit, max(flops) / 10**unit
    round_numbers = [step * 10**power for power in range(-1, 12) for step in (1, 2, 5)]
    ticks = [tick for tick in round_numbers if low / 1.1 <= tick <= high * 1.1]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer()]
    return ticks, unit


def mark_scores(scores: Iterable[tuple[float, Result | None]], size: float = 5.0) -> list[Mark]:
    """Mean scores in percent with their intervals, from left to right; those that are not there are left out."""
    marks = []
    for x, score in scores:
        if score is not None:
            reach = 0.0 if math.isnan(score.half_width) else 100 * score.half_width
            marks.append(Mark(x, 100 * score.mean, reach, reach, size))
    return sorted(marks, key=lambda mark: mark.x)


def mark_gaps(gaps: Iterable[tuple[float, Contrast | None]]) -> list[Mark]:
    """Differences in points with their intervals; those that are not there are left out."""
    marks = []
    for x, gap in gaps:
        if gap is not None:
            seen = gap.against()
            reach = 0.0 if math.isnan(seen.low) else 100 * (seen.mean - seen.low)
            marks.append(Mark(x, 100 * seen.mean, reach, reach))
    return marks


def score_gap(results: ResultSet, a: ReportArm, b: ReportArm, family: str) -> Contrast | None:
    ours, theirs = results.find_average(a, family), results.find_average(b, family)
    return None if ours is None or theirs is None else difference(ours, theirs)


def score_label(results: ResultSet, family: str) -> str:
    """What the score of a family measures, with its unit: `accuracy (%)`."""
    return f"{MEASURES[results.primary_metric][family].partition(',')[0]} (%)"


def title_of(family: str) -> str:
    return f"{family} · {FAMILY_NAMES[family]}"


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


def round_share(arm: ReportArm) -> int:
    """The share of CLM in percent, to the next 5: 5k of 22k counts as 25 %."""
    return 5 * round(20 * arm.clm_share)


def adapted_groups(results: ResultSet) -> dict[str, list[ReportArm]]:
    """MLM alone first, then each CLM budget: arms at several masking ratios."""
    after = results.arms(setup="adapted")
    budgets = {(arm.size, arm.pretrain_steps) for arm in after}
    has_sizes = len({arm.size for arm in after}) > 1
    mlm_arms = results.arms(setup="objective", objective="mlm")
    alone = [arm for arm in mlm_arms if (arm.size, arm.pretrain_steps) in budgets]
    groups: dict[str, list[ReportArm]] = {}
    for arm in [*alone, *after]:
        label = f"{short_steps(arm.clm_steps)} CLM, then {short_steps(arm.mlm_steps)} MLM" if arm.clm_steps else "MLM"
        groups.setdefault(f"{arm.size}, {label}" if has_sizes else label, []).append(arm)
    return groups


def has_both_objectives(arm: ReportArm) -> bool:
    """CLM, then MLM: in one go, or continued."""
    return arm.objective == "clm+mlm" or (arm.objective == "clm" and arm.cpt_steps > 0)


def counted_arms(results: ResultSet) -> list[ReportArm]:
    """Decayed arms whose FLOPs are known; with MLM those at the reference ratio."""
    mask = reference_mask(results.arms())
    return [
        arm
        for arm in results.arms()
        if arm.flops and arm.setup not in ("efficiency", "control", "other") and arm.mask_percent in (None, mask)
    ]
