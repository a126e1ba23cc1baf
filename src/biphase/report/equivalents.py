"""The share of a baseline's compute at which another arm reaches its score; for one arm, and for all as a table.

The baseline of a network is MLM alone at one masking ratio, with three budgets or more. Its ladder is a line through
its scores against the logarithm of compute, made monotone; nothing is read off beyond its ends. The interval is what
the test of all verdicts (`contrasts`) leaves: the shares at which the arm and the baseline, interpolated between two
rungs, cannot be told apart. So it is over all noise that the scores show.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
from scipy import optimize

from biphase.errors import InputError, first_of
from biphase.report.contrasts import Contrast, Noise, average, contrast
from biphase.report.figures import MARKER_SIZE, Panel, round_ticks
from biphase.report.formats import MISSING, show_estimate, show_list, show_noise, write_steps
from biphase.report.results import FAMILY_NAMES, ReportArm, Result, ResultSet, read_words, reference_mask
from biphase.report.tables import Cell, Row, Table, interval_cell
from biphase.style import LOOKS, SERIES

Compute = Literal["flops", "tokens"]
"""What compute is counted in: fields of `ReportArm`."""

AXES: dict[Compute, str] = {"flops": "FLOPs", "tokens": "tokens"}
"""In words; what comes first is preferred."""

MOST_APART = 4
"""By which factor two neighbouring rungs may differ: over a factor of 16, on a curve that bends, the interval covers
the truth in 0 to 29 % (docs/LOG.md)."""

POINTS_BETWEEN, HALVINGS = 10, 2
"""At how many places between two rungs the arm is tested against the baseline; and how often a gap between two of them
is halved where the verdict changes."""


LEVEL = 0.25
"""A stretch of a ladder is level if it rises at most this part as steeply as the whole. On simulated ladders that are
level, then rise, this hides three of four points or more; on straight and on bent ones, up to one of ten."""


Rungs = dict[float, Result]
"""The compute of each budget of a baseline → its mean score over data sets, least compute first."""


@dataclass(frozen=True)
class Equivalent:
    """The share of the baseline's compute at which an arm reaches the baseline's score."""

    axis: Compute
    """What compute is counted in."""
    score: Result
    """The arm's mean score over data sets, which are its `cells`."""
    compute: float
    """The compute of all the arm's training."""
    ladder: Rungs
    heights: tuple[float, ...]
    """The scores of the baseline, made monotone."""
    share: float
    """The arm's compute over the baseline's for the same score: 0.6 saves 40 %."""
    beyond: Literal["", "above", "below"]
    """Whether the arm's score lies above or below the whole ladder, so that the share is that of the ladder's end."""
    low: float
    """Ends of the 95 % interval; 0 and infinity where the ladder ends before the interval does, nan without a test."""
    high: float
    noise: tuple[Noise, ...]
    """What the interval accounts for."""

    @property
    def reach(self) -> tuple[float, float]:
        """The least and the most compute of the interval, as far as the ladder goes."""
        most = self.compute / self.low if self.low else math.inf
        return max(min(self.ladder), self.compute / self.high), min(max(self.ladder), most)

    @property
    def is_level(self) -> bool:
        """Whether the ladder is level somewhere between the interval's ends: a point read off there misleads."""
        if self.beyond or math.isnan(self.low):
            return False
        logs_K, (begin, end) = np.log([*self.ladder]), np.log(self.reach)
        is_within_K = (logs_K[1:] > begin + 1e-9) & (logs_K[:-1] < end - 1e-9)
        whole = (self.heights[-1] - self.heights[0]) / (logs_K[-1] - logs_K[0])
        return bool((np.diff(self.heights) / np.diff(logs_K) <= LEVEL * whole)[is_within_K].any())


def compute_equivalent(
    results: ResultSet,
    arm: ReportArm,
    baseline: Sequence[ReportArm],
    axis: Compute = "flops",
    datasets: Sequence[str] | None = None,
) -> Equivalent:
    """Find the compute equivalent of an arm on the ladder of a baseline, by the mean over data sets that all of them
    have.

    Args:
        baseline: one recipe at several budgets.
        datasets: those that count; None: all that the arm and the whole ladder have scores on.

    Raises:
        InputError: fewer than two budgets, two that are too far apart, compute that is not known, or no data set in
            common.
    """
    score, ladder = make_ladder(results, arm, baseline, axis, datasets)
    heights = optimize.isotonic_regression([step.mean for step in ladder.values()]).x
    mean, compute = score.mean, getattr(arm, axis)
    beyond: Literal["", "above", "below"] = "above" if mean > heights[-1] else "below" if mean < heights[0] else ""
    # The least compute at which the rising line reaches the score, or the end that it lies beyond: read from above, for
    # where the line is level `interp` takes what comes last.
    log = np.interp(-mean, -heights[::-1], np.log([*ladder])[::-1])
    share, interval = compute / math.exp(log), find_interval(score, compute, ladder)
    return Equivalent(axis, score, compute, ladder, tuple(heights.tolist()), share, beyond, *interval)


def contrast_at_share(
    results: ResultSet, arm: ReportArm, baseline: Sequence[ReportArm], share: float, datasets: Sequence[str] | None
) -> Contrast:
    """Contrast the arm's score with the baseline's at the FLOPs of which the arm has this share: above zero if the
    arm's equivalent is less than `share`. Raises `InputError` where the ladder does not reach there."""
    score, ladder = make_ladder(results, arm, baseline, "flops", datasets)
    compute = (arm.flops or math.nan) / share
    if not min(ladder) <= compute <= max(ladder):
        raise InputError(f"the baseline's ladder does not reach {show_estimate(1 / share)} times the arm's compute")
    return contrast_at(score, ladder, compute)


def shared_datasets(results: ResultSet, arms: Sequence[ReportArm], required: Sequence[str] | None) -> tuple[str, ...]:
    """Return the data sets that all arms have, or those `required`. Raises `InputError` where a required one is
    missing, or none is shared."""
    by_arm = [results.scores.get(arm.name, {}) for arm in arms]
    shared = set(itertools.chain(*results.datasets.values())).intersection(*by_arm)
    if required is not None and (lost := sorted(set(required) - shared)):
        raise InputError(f"no scores of {', '.join(arm.name for arm in arms)} on {', '.join(lost)}; finish their cells")
    names = tuple(name for name in by_arm[0] if name in shared and (required is None or name in required))
    if not names:
        raise InputError(f"{', '.join(arm.name for arm in arms)} have no data set in common; evaluate them on the same")
    return names


def make_ladder(
    results: ResultSet, arm: ReportArm, baseline: Sequence[ReportArm], axis: Compute, datasets: Sequence[str] | None
) -> tuple[Result, Rungs]:
    """Return the mean score of an arm over data sets, and the ladder of a baseline by the same mean. Raises
    `InputError` as `compute_equivalent`."""
    names = shared_datasets(results, (arm, *baseline), datasets)
    means = {}
    for member in (*baseline, arm):
        if not getattr(member, axis):
            raise InputError(f"the {AXES[axis]} of {member.name} are not known; choose another axis")
        cells = tuple(score for name, score in results.scores[member.name].items() if name in names)
        means[member.name] = replace(average(cells), cells=cells)
    budgets = sorted((getattr(member, axis), member.name) for member in baseline)
    refuse_gaps(budgets)
    ladder = {compute: means[name] for compute, name in budgets}
    if len(ladder) < max(2, len(budgets)):
        raise InputError("a ladder needs two budgets of the baseline or more, each once")
    return means[arm.name], ladder


def refuse_gaps(rungs: Sequence[tuple[float, str]]) -> None:
    """Raises `InputError` for neighbouring budgets, given with the names of their arms, that are too far apart."""
    for (less, lower), (more, upper) in itertools.pairwise(sorted(rungs)):
        if more > 1.01 * MOST_APART * less:
            raise InputError(
                f"{lower} and {upper} are a factor of {more / less:.3g} apart, and a straight line between them would "
                f"mislead; give the baseline budgets between them, each at most {MOST_APART} times the one below"
            )


def find_interval(score: Result, compute: float, ladder: Rungs) -> tuple[float, float, tuple[Noise, ...]]:
    """Find the ends of the interval for an arm of this compute: between the shares at which it is above the baseline
    and those at which it is below, by the test of all verdicts. Return them with the noise that the test accounts
    for."""
    ends = [*ladder]
    between = [np.linspace(*pair, POINTS_BETWEEN, endpoint=False) for pair in itertools.pairwise(np.log(ends))]
    inside = np.exp(np.concatenate(between)[1:])
    new = [ends[0], *map(float, inside), ends[-1]]  # exactly: the ladder's ends are on the ladder
    gaps = dict[float, Contrast]()
    for _ in range(1 + HALVINGS):
        gaps |= {budget: contrast_at(score, ladder, budget) for budget in new}
        grid = sorted(gaps)
        new = [math.sqrt(less * more) for less, more in itertools.pairwise(grid) if gaps[less].side != gaps[more].side]
    sides, noise = [gaps[budget].side for budget in grid], gaps[grid[0]].noise
    if "untested" in sides:
        return math.nan, math.nan, noise
    # The baseline's compute is more than where the arm is still above it, and less than where it is below.
    undecided = [budget for budget, side in zip(grid, sides, strict=True) if side == "within noise"]
    if sides[0] == "below":
        return compute / grid[0], math.inf, noise
    if sides[-1] == "above":
        return 0.0, compute / grid[-1], noise
    if not undecided:  # the scores leap from below to above between two budgets
        leap = sides.index("below")
        return compute / grid[leap], compute / grid[leap - 1], noise
    low = 0.0 if sides[-1] == "within noise" else compute / max(undecided)
    high = math.inf if sides[0] == "within noise" else compute / min(undecided)
    return low, high, noise


def contrast_at(score: Result, ladder: Rungs, compute: float) -> Contrast:
    """Contrast an arm's score with the baseline's at a compute within its ladder: a weighted sum of two budgets."""
    (less, lower), (more, upper) = next(pair for pair in itertools.pairwise(ladder.items()) if compute <= pair[1][0])
    part = math.log(compute / less) / math.log(more / less)
    return contrast([(1.0, score), (part - 1, lower), (-part, upper)])


def show_multiple(equivalent: Equivalent) -> str:
    """Show `0.73 [0.61, 0.82]`, `0.64 (at most 1.17)`, `above the ladder (at most 0.52)`; without a point that would
    mislead `at least 0.41 (level ladder)`."""
    ends = show_ends(equivalent)
    if equivalent.is_level:
        return f"{ends} (level ladder)"
    point = f"{equivalent.beyond} the ladder" if equivalent.beyond else f"{equivalent.share:.2f}"
    return point + (f" {ends}" if ends.startswith("[") else f" ({ends})" if ends else "")


def show_ends(equivalent: Equivalent) -> str:
    """Show the interval: `[0.61, 0.82]`, without a point `between 0.61 and 0.82`; `at most 0.52`, `at least 0.61`,
    `no bound`; nothing without a test."""
    low, high = equivalent.low, equivalent.high
    if math.isnan(low):
        return ""
    if not low:
        return "no bound" if math.isinf(high) else f"at most {high:.2f}"
    if math.isinf(high):
        return f"at least {low:.2f}"
    return f"between {low:.2f} and {high:.2f}" if equivalent.is_level else f"[{low:.2f}, {high:.2f}]"


LEAST_RUNGS = 3
"""So many budgets of MLM alone make a ladder worth reading shares off."""

LEAST_SAVING = 0.05
"""A share whose logarithm is nearer to zero saves or costs nothing that a task could carry."""


@dataclass(frozen=True)
class Price:
    """What an arm pays for its score, as shares of what the baseline pays for the same."""

    mean: tuple[Equivalent, ...]
    """For the mean over all data sets, in FLOPs and in tokens, as far as these are known."""
    by_part: Mapping[str, Equivalent]
    """For each family and each data set, where there are several, in the first of these."""


@dataclass(frozen=True)
class PriceList:
    """Compute-equivalents of all arms of a network on the ladder of its baseline."""

    baseline: tuple[ReportArm, ...]
    """Least compute first."""
    prices: tuple[Price, ...]
    """Most steps first, then the least share first: what is above all of the ladder before what lies on it."""
    compared: tuple[Equivalent, ...]
    """The arms of the largest budget above which the baseline has another one, the least share first: what is better
    than the baseline there still lies on the ladder. Without such a budget, those of the smallest."""
    declared: tuple[Equivalent, ...] = ()
    """Those that the study's hypotheses hold against this baseline: they are told, not those that are compared."""
    without: Mapping[str, Equivalent] = field(default_factory=dict)
    """Each of several data sets → the share of the first arm that is told by the mean without it."""

    @property
    def label(self) -> str:
        """What the baseline is called: `MLM 40 %`, or the method's name."""
        first = self.baseline[0]
        return f"MLM {first.mask_percent} %" if first.objective else first.curriculum

    @property
    def alone(self) -> str:
        """The baseline in a sentence: `MLM alone (40 % masked)`, or the method's name."""
        first = self.baseline[0]
        return f"MLM alone ({first.mask_percent} % masked)" if first.objective else first.curriculum


def list_prices(
    results: ResultSet, declared: Mapping[str, Sequence[str]] | None = None, method: str = ""
) -> tuple[list[PriceList], list[str]]:
    """List the prices of each network that has a baseline and another arm, smallest first, by the primary metric; and
    why other networks have none. Arms that continue another arm are left out: their compute lies beyond the ladder.

    Args:
        declared: arms that hypotheses hold against a ladder → the arms of that.
        method: that of a table of results whose budgets are the baseline; empty: MLM alone, as `choose_baseline` says.
    """
    decayed = [arm for arm in results.models if arm.setup != "efficiency" and arm.objective != "none"]
    lists, lacking = [], []
    for size in results.sizes:
        arms = [arm for arm in decayed if arm.size == size and not arm.cpt_steps]
        named = sorted((arm for arm in arms if arm.curriculum == method), key=lambda arm: arm.flops or arm.tokens or 0)
        baseline = tuple(named) if method else choose_baseline(arms)
        if not baseline:
            continue
        try:
            prices = price_arms(results, baseline, [arm for arm in arms if arm not in baseline])
        except InputError as error:
            lacking.append(f"No compute-equivalents of {size}: {error}")
            continue
        if prices:
            lists.append(head_prices(results, baseline, prices, declared or {}))
    return lists, lacking


def head_prices(
    results: ResultSet, baseline: tuple[ReportArm, ...], prices: list[Price], declared: Mapping[str, Sequence[str]]
) -> PriceList:
    """Choose which prices a headline is about, and see what the first of them is without each data set."""
    means = [price.mean[0] for price in prices]
    budgets = sorted({mean.score.arm.pretrain_steps for mean in means})
    steps = max((budget for budget in budgets if budget < baseline[-1].pretrain_steps), default=budgets[0])
    compared = tuple(mean for mean in means if mean.score.arm.pretrain_steps == steps)
    rungs, by_name = {arm.name for arm in baseline}, {mean.score.arm.name: mean for mean in means}
    chosen = [mean for name, mean in by_name.items() if name in declared and rungs.issuperset(declared[name])]
    first = (chosen or compared)[0]
    datasets = [cell.dataset for cell in first.score.cells]
    without: dict[str, Equivalent] = {}
    for name in datasets if len(datasets) > 1 else ():
        rest = [dataset for dataset in datasets if dataset != name]
        without[name] = compute_equivalent(results, first.score.arm, baseline, first.axis, rest)
    return PriceList(baseline, tuple(prices), compared, tuple(chosen), without)


def choose_baseline(arms: Sequence[ReportArm]) -> tuple[ReportArm, ...]:
    """MLM alone at the masking ratio that has most budgets, at a tie the usual one; () with fewer than `LEAST_RUNGS` of
    them. A budget at which two arms are described alike does not count."""
    plain = [arm for arm in arms if arm.objective == "mlm" and arm.is_plain and arm.mask_percent is not None]
    counts = Counter((arm.mask_percent, arm.pretrain_steps) for arm in plain)
    ladders: dict[int | None, list[ReportArm]] = {reference_mask(arms): []}  # first, so that it wins a tie
    for arm in sorted(plain, key=lambda arm: arm.pretrain_steps):
        if counts[arm.mask_percent, arm.pretrain_steps] == 1:
            ladders.setdefault(arm.mask_percent, []).append(arm)
    longest = max(ladders.values(), key=len)
    return tuple(longest) if len(longest) >= LEAST_RUNGS else ()


def price_arms(results: ResultSet, baseline: Sequence[ReportArm], priced: Sequence[ReportArm]) -> list[Price]:
    """Price those arms of a network that have compute and all of the baseline's data sets. Raises `InputError` where
    the baseline has a gap."""
    datasets = shared_datasets(results, baseline, None)
    axes = []
    for axis in AXES:
        spent = [0.0, *(getattr(arm, axis) or 0.0 for arm in baseline)]
        if all(before < after for before, after in itertools.pairwise(spent)):  # known of all, and more for more steps
            axes.append(axis)
    parts: dict[str, list[str]] = {}  # what shares are looked at in parts → its data sets
    scores = results.scores[baseline[0].name]
    for family in dict.fromkeys(scores[name].family for name in datasets):
        names = [name for name in datasets if scores[name].family == family]
        if 1 < len(names) < len(datasets):
            parts[f"{family} mean"] = names
        parts |= {name: [name] for name in names if len(datasets) > 1}
    prices: list[Price] = []
    for arm in priced:
        known_axes = [axis for axis in axes if getattr(arm, axis)]
        if known_axes and results.scores.get(arm.name, {}).keys() >= set(datasets):
            price_on = partial(compute_equivalent, results, arm, baseline)
            mean = tuple(price_on(axis, datasets) for axis in known_axes)
            prices.append(Price(mean, {part: price_on(known_axes[0], names) for part, names in parts.items()}))

    def rank(price: Price) -> tuple[float, ...]:
        """Sort key: what lies above all of the ladder costs less than its share says, what lies below more."""
        mean = price.mean[0]
        order = {"above": 0, "": 1, "below": 2}[mean.beyond]
        return -mean.score.arm.pretrain_steps, order, mean.share, -mean.score.mean

    return sorted(prices, key=rank)


def tell_kinds(price_list: PriceList, alone: str) -> str:
    """Say what the declared arms pay by kind of task, and beside them, as controls, the other arms of as many steps:
    `A has the score of MLM alone (40 % masked) at these shares of its FLOPs: on token classification 0.62 [0.55, 0.69],
    where B has 1.09 [0.96, 1.31]; on …`"""
    first, declared = price_list.declared[0], [mean.score.arm for mean in price_list.declared]
    prices = {price.mean[0].score.arm: price for price in price_list.prices}
    steps = {arm.pretrain_steps for arm in declared}
    controls = [arm for arm in prices if arm not in declared and arm.pretrain_steps in steps]
    datasets = {cell.family: cell.dataset for cell in first.score.cells}
    kinds = []
    for family, dataset in datasets.items():
        part = f"{family} mean" if f"{family} mean" in price_list.prices[0].by_part else dataset
        shares = {arm: show_multiple(price.by_part[part]) for arm, price in prices.items()}
        beside = first_of([f"{arm.name} has {shares[arm]}" for arm in controls])
        told = show_list([shares[arm] for arm in declared])
        kinds.append(f"on {FAMILY_NAMES[family]} {told}{beside and f', where {beside}'}")
    names, verb = show_list([arm.name for arm in declared]), "have" if len(declared) > 1 else "has"
    return f"{names} {verb} the score of {alone} at these shares of its {AXES[first.axis]}: {'; '.join(kinds)}"


def price_sentence(price_list: PriceList) -> str:
    """Say: `A reaches the score of MLM alone (40 % masked) at 0.71 [0.62, 0.83] of its FLOPs, on average over 3 tasks.`

    Of several arms none is chosen by its share, which would flatter it: the sentence has the range. Behind it stands
    the share of the first without the task that it rests on most, and whether more than half of it (by its logarithm)
    goes with that: ` Without genre, A has 0.93.` Declared arms are told by kind of task, where there are several.
    """
    chosen = price_list.declared or price_list.compared
    alone = price_list.alone
    first, last = chosen[0], chosen[-1]
    name, cells = first.score.arm.name, first.score.cells
    unit, ends = f"of its {AXES[first.axis]}", show_ends(first)
    where = f"on average over {len(cells)} tasks" if len(cells) > 1 else f"on {cells[0].dataset}"
    notes = ["declared in the study's hypotheses"] if price_list.declared else []
    notes.append(f"interval over {show_noise(first.noise)}" if first.noise else "no interval: one seed")
    if "pretraining seeds" not in first.noise:
        notes.append("each model was pretrained once")
    if price_list.declared and len({cell.family for cell in cells}) > 1:
        return f"{tell_kinds(price_list, alone)} ({'; '.join(notes)})."
    if len(chosen) > 1:
        reach = f"{name} {show_multiple(first)} to {last.score.arm.name} {show_multiple(last)}"
        sentence = f"{len(chosen)} models reach the score of {alone} at different shares {unit}: from {reach}"
    elif first.beyond or first.is_level:
        sentence = f"{name} reaches the score of {alone} where its ladder is level"
        sentence = f"{name} scores {first.beyond} {alone} at all of its budgets" if first.beyond else sentence
        sentence += f": {ends} {unit}" if ends not in ("", "no bound") else ""
    else:
        sentence = f"{name} reaches the score of {alone} at {show_multiple(first)} {unit}"
    if len(chosen) == 1 and first.low <= 1 <= first.high:
        is_less = first.is_level or first.share < 1
        sentence += f", which is not shown to {'be cheaper' if is_less else 'cost more'}"
    sentence += f", {where} ({'; '.join(notes)})."
    if not price_list.without:
        return sentence
    whole = math.log(first.share)
    sign = math.copysign(1, whole)
    task, remaining = min(price_list.without.items(), key=lambda item: sign * math.log(item[1].share))
    has_one = abs(whole) > LEAST_SAVING and math.log(remaining.share) / whole < 0.5
    has_one = has_one and not (first.is_level or remaining.is_level)
    without = f"{'One task carries this: w' if has_one else 'W'}ithout {task}"
    return f"{sentence} {without}, {name} has {show_multiple(remaining)}."


def ladder_panel(price_list: PriceList) -> Panel:
    """Draw the baseline's score against its compute as a line, and how far from it the compared arms lie."""
    compared = price_list.compared[: len(SERIES)]
    first = compared[0]
    marks, distances = [], []
    for (compute, score), height in zip(first.ladder.items(), first.heights, strict=True):
        # Where the line was made monotone, the interval stays that of the score.
        marks.append((compute, replace(score.interval, value=height), MARKER_SIZE))
    series = [(f"{price_list.label} alone", LOOKS["mlm"], marks)]
    for equivalent, look in zip(compared, SERIES, strict=False):
        label = f"{equivalent.score.arm.name}: {show_multiple(equivalent)}"
        compute, score = equivalent.compute, equivalent.score
        series.append((label, look, [(compute, score.interval, MARKER_SIZE)]))
        begin, end = equivalent.reach if equivalent.is_level else (compute, compute / equivalent.share)
        distances.append((begin, end, 100 * score.mean, look))
    ticks, labels, unit = round_ticks([*first.ladder, *(equivalent.compute for equivalent in compared)])
    cells = first.score.cells
    settings = {
        "title": price_list.baseline[0].size,
        "xscale": "log",
        "xlabel": f"{AXES[first.axis]} of training{unit}",
        "ylabel": "mean over all tasks (%)" if len(cells) > 1 else f"{cells[0].dataset} (%)",
        "xticks": ticks,
        "xticklabels": labels,
    }
    return Panel("lines", series, settings, distances)


def price_tables(price_list: PriceList) -> list[Table]:
    """Make a table with a row for every arm, of shares by the mean; and another one of shares by family and task."""
    counted = {equivalent.axis for price in price_list.prices for equivalent in price.mean}
    shared = [axis for axis in AXES if axis in counted]
    parts = [*price_list.prices[0].by_part]
    size, label = price_list.baseline[0].size, price_list.label
    known = ("steps",) if price_list.baseline[0].objective else ()
    rows, by_part = [], []
    records: list[Sequence[object]] = [PRICE_COLUMNS]
    for price in price_list.prices:
        first, shares = price.mean[0], {mean.axis: show_multiple(mean) for mean in price.mean}
        arm = first.score.arm
        steps, score = [Cell(f"{arm.pretrain_steps:,}")][: len(known)], interval_cell(first.score.interval)
        rows.append(Row((arm.name,), (*steps, score, *(Cell(shares.get(axis, MISSING)) for axis in shared))))
        by_part.append(Row((arm.name,), (*steps, *(Cell(show_multiple(price.by_part[part])) for part in parts))))
        for part, equivalent in [*(("mean", mean) for mean in price.mean), *price.by_part.items()]:
            facts = (arm.name, size, label, arm.pretrain_steps, part)
            mean = interval_cell(equivalent.score.interval)
            point = ("level", "") if equivalent.is_level else (equivalent.beyond, f"{equivalent.share:.4f}")
            share = (equivalent.axis, f"{equivalent.compute:.6g}", *point)
            ends = [f"{end:.4f}" if 0 < end < math.inf else "" for end in (equivalent.low, equivalent.high)]
            noises = "; ".join(equivalent.noise)
            records.append((*facts, mean.text, mean.reach.replace(MISSING, ""), *share, *ends, noises))
    cells, noise = price_list.compared[0].score.cells, price_list.compared[0].noise
    where = f"the mean over {len(cells)} data sets" if len(cells) > 1 else cells[0].dataset
    over = f", over {show_noise(noise)}" if noise else ""
    once = "" if "pretraining seeds" in noise else " Each model was pretrained once: this is about these models."
    rule = read_words()["prices_rule"].format(where=where, over=over) + once
    name = f"compute-equivalents-{size or 'methods'}"
    heads = (*known, "score (%)", *(f"share of {AXES[axis]}" for axis in shared))
    budgets = ", ".join(write_steps(arm.pretrain_steps) for arm in price_list.baseline)
    title = f"Compute-equivalents, {size}: baseline {label} alone with {budgets} steps"
    if not known:
        title = f"Compute-equivalents: baseline {label} with {len(price_list.baseline)} budgets"
    tables = [Table(name, title, ("model",), heads, tuple(rows), (rule,), records)]
    if parts:
        title, heads = f"{title}. Share of {AXES[shared[0]]} by task", (*known, *parts)
        tables.append(Table(f"{name}-by-task", title, ("model",), heads, tuple(by_part), (rule,)))
    return tables


PRICE_COLUMNS = (
    *("arm", "size", "baseline", "steps", "on", "score", "half_width", "counted_in", "compute", "beyond", "share"),
    *("low", "high", "noise"),
)
"""A line for each arm and kind of compute, and for each family and task; nothing where an end of the interval is open
or not known, or a point would mislead."""
