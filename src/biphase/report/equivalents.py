"""Compute-equivalents: an arm's compute over the compute that the baseline needs for the same score.

The baseline of a network is MLM alone at one masking ratio, with three budgets or more. Its ladder is a monotone curve
through its scores against the logarithm of compute, without extrapolation. The interval contains every share at which
the test behind all verdicts (`contrasts`) finds no difference between the arm and the interpolated baseline, so it
covers all noise that the scores show.
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
from biphase.report.contrasts import Contrast, Noise, Terms, average, contrast
from biphase.report.figures import MARKER_SIZE, Panel, name_looks, name_training, round_ticks
from biphase.report.formats import MISSING, show_difference, show_estimate, show_list, show_noise, show_steps, with_unit
from biphase.report.results import AVERAGE, FAMILY_NAMES, LOSS, ReportArm, Result, ResultSet, read_words, reference_mask
from biphase.report.tables import RELATIVE, SIMILAR, Cell, Table, TableRow, interval_cell, relative_flops
from biphase.style import SERIES

Compute = Literal["flops", "tokens"]
"""A unit of compute, named as its field in `ReportArm`."""

AXES: dict[Compute, str] = {"flops": "FLOPs", "tokens": "tokens"}
"""Unit of compute → its name in text, the preferred unit first."""

MOST_APART = 4
"""The largest factor between neighbouring rungs. At a factor of 16, on a bent curve, the interval covers the true share
in 0 to 29 % of simulations (docs/LOG.md)."""

POINTS_BETWEEN, HALVINGS = 10, 6
"""The number of tested points from rung to rung, and the number of times that the search halves the gap between two
points with different verdicts."""

LEVEL = 0.25
"""The slope of a level stretch of a ladder, at most, as a fraction of the whole ladder's slope. On simulated ladders
that are level and then rise, this rule hides at least three shares in four; on straight and on bent ones, at most one
in ten."""

Rungs = dict[float, Result]
"""A ladder: compute of each of the baseline's budgets → its mean score over data sets, least compute first."""


@dataclass(frozen=True)
class Equivalent:
    """An arm's compute as a share of what the baseline needs for the same score."""

    axis: Compute
    score: Result
    """The arm's mean score over data sets; its `cells` are the scores on each data set."""
    compute: float
    """The compute of the arm's whole training."""
    ladder: Rungs
    heights: tuple[float, ...]
    """The baseline's scores, made monotone."""
    share: float
    """The arm's compute divided by the baseline's compute for the same score: 0.6 saves 40 %."""
    beyond: Literal["", "above", "below"]
    """`above` or `below` if the score lies beyond the whole ladder; `share` then refers to the nearer end."""
    low: float
    """The lower end of the 95 % interval: 0 if it lies beyond the ladder, nan without a test."""
    high: float
    """The upper end: infinity if it lies beyond the ladder, nan without a test."""
    noise: tuple[Noise, ...]
    """The sources of noise that the interval covers."""

    @property
    def rank(self) -> tuple[int, float, float]:
        """The sort key by share: what lies above the whole ladder comes first, what lies below it last."""
        return ("above", "", "below").index(self.beyond), self.share, -self.score.mean

    @property
    def reach(self) -> tuple[float, float]:
        """The least and the most baseline compute in the interval, cut to the ladder; without a test, that of the
        estimate."""
        if math.isnan(self.low):
            return self.compute / self.share, self.compute / self.share
        most = self.compute / self.low if self.low else math.inf
        return max(min(self.ladder), self.compute / self.high), min(max(self.ladder), most)

    @property
    def is_level(self) -> bool:
        """Whether the ladder is level somewhere within the interval, so that a single share would mislead."""
        if self.beyond:
            return False
        logs_K, (begin, end) = np.log([*self.ladder]), np.log(self.reach)
        inside = -1e-9 if math.isnan(self.low) else 1e-9  # an estimate may lie on a rung
        is_within_K = (logs_K[1:] > begin + inside) & (logs_K[:-1] < end - inside)
        whole = (self.heights[-1] - self.heights[0]) / (logs_K[-1] - logs_K[0])
        return bool((np.diff(self.heights) / np.diff(logs_K) <= LEVEL * whole)[is_within_K].any())


def compute_equivalent(
    results: ResultSet,
    arm: ReportArm,
    baseline: Sequence[ReportArm],
    axis: Compute = "flops",
    datasets: Sequence[str] | None = None,
) -> Equivalent:
    """Find the compute equivalent of an arm on a baseline's ladder, by the mean over their common data sets.

    Args:
        baseline: one recipe at several budgets.
        datasets: the data sets to average; None: all on which the arm and the whole baseline have scores.

    Raises:
        InputError: fewer than two budgets, budgets too far apart, unknown compute, or no common data set.
    """
    score, ladder = make_ladder(results, arm, baseline, axis, datasets)
    heights = optimize.isotonic_regression([step.mean for step in ladder.values()]).x
    mean, compute = score.mean, getattr(arm, axis)
    beyond: Literal["", "above", "below"] = "above" if mean > heights[-1] else "below" if mean < heights[0] else ""
    # The least compute at which the rising curve reaches the score, or the nearer end of the ladder. Among equal points
    # `interp` takes the last, so the arrays run from the highest score down.
    log = np.interp(-mean, -heights[::-1], np.log([*ladder])[::-1])
    share, (low, high, noise) = compute / math.exp(log), find_interval(score, compute, ladder)
    noise = ("tasks",) if noise and results.over == "tasks" else noise
    return Equivalent(axis, score, compute, ladder, tuple(heights.tolist()), share, beyond, low, high, noise)


def contrast_at_share(
    results: ResultSet, arm: ReportArm, baseline: Sequence[ReportArm], share: float, parts: Sequence[Sequence[str]]
) -> Contrast:
    """Contrast the arm's score with the baseline's score at the arm's FLOPs divided by `share`, by the mean over the
    means of `parts`, which are lists of data sets. The contrast is above zero if the arm's equivalent is less than
    `share`. Raises `InputError` if those FLOPs lie beyond the ladder."""
    compute, terms = (arm.flops or math.nan) / share, []
    for datasets in parts:
        score, ladder = make_ladder(results, arm, baseline, "flops", datasets)
        if not min(ladder) <= compute <= max(ladder):
            raise InputError(f"the baseline's ladder does not reach {show_estimate(1 / share)} times the arm's compute")
        terms += [(weight / len(parts), rung) for weight, rung in terms_at(score, ladder, compute)]
    return contrast(terms)


def tell_compute(results: ResultSet, terms: Terms, sign: float = 1.0) -> str:
    """Write how the two sides of a difference differ in FLOPs: ` at equal tokens (1.15 times the FLOPs; at equal FLOPs
    +3.88 points [+0.91, +6.85])`; empty if by at most `SIMILAR`, or if FLOPs are unknown. A side with several arms
    counts by their geometric mean, with their weights in the sum. `sign` is -1 if the terms are minus the difference
    that was written: then the words are about the side that was written first."""
    side = sum(max(weight, 0.0) for weight, _ in terms)
    if not side or abs(sum(weight for weight, _ in terms)) > 1e-9 * side:
        return ""
    flops, tokens = (
        sum(weight * math.log(getattr(score.arm, axis) or math.nan) for weight, score in terms) / side for axis in AXES
    )
    if not abs(flops) > math.log(1 + SIMILAR):
        return ""
    moved = contrast_equal_flops(results, [(sign * weight, score) for weight, score in terms])
    told = "" if moved is None else f"; at equal FLOPs {show_difference(moved.against())}"
    equal = "at equal tokens " if abs(tokens) <= math.log(1 + SIMILAR) else ""
    return f" {equal}({math.exp(sign * flops):.2f} times the FLOPs{told})"


def contrast_equal_flops(results: ResultSet, terms: Terms) -> Contrast | None:
    """Contrast scores at equal FLOPs: each one minus the score of MLM alone at as many FLOPs. The weights must add up
    to zero. Return None for losses, which depend on the objective, if all arms are rungs (each one minus itself is 0),
    and unless a ladder of MLM alone reaches the FLOPs of all arms, with rungs close enough to interpolate."""
    sizes = {score.arm.size for _, score in terms}
    ladder = choose_baseline([arm for arm in final_arms(results) if arm.size in sizes]) if len(sizes) == 1 else ()
    if not ladder or all(score.arm in ladder for _, score in terms):
        return None
    moved = [*terms]
    for weight, score in terms:
        name = score.family if score.dataset == AVERAGE else score.dataset
        rungs = {arm.flops or math.nan: results.scores[arm.name].get(name) for arm in ladder}
        known = {compute: rung for compute, rung in rungs.items() if rung}
        if name == LOSS or len(known) < len(ladder) or not min(known) <= (score.arm.flops or 0) <= max(known):
            return None
        between = interpolate(known, score.arm.flops or 0)
        budgets = [rung.arm.flops or 0 for share, rung in between if share]
        if max(budgets) > 1.01 * MOST_APART * min(budgets):
            return None
        moved += [(-weight * share, rung) for share, rung in between]
    return contrast(moved)


def shared_datasets(results: ResultSet, arms: Sequence[ReportArm], required: Sequence[str] | None) -> tuple[str, ...]:
    """Return the data sets on which all arms have scores, or the `required` ones. Raises `InputError` if an arm lacks a
    required data set, or if the arms share none."""
    by_arm = [results.scores.get(arm.name, {}) for arm in arms]
    shared = set(itertools.chain(*results.datasets.values())).intersection(*by_arm)
    if required is not None and (lost := sorted(set(required) - shared)):
        raise InputError(f"no scores of {', '.join(arm.name for arm in arms)} on {', '.join(lost)}; finish their cells")
    names = tuple(name for name in by_arm[0] if name in shared and (required is None or name in required))
    if not names:
        raise InputError(f"{', '.join(arm.name for arm in arms)} share no data set; evaluate all on the same ones")
    return names


def make_ladder(
    results: ResultSet, arm: ReportArm, baseline: Sequence[ReportArm], axis: Compute, datasets: Sequence[str] | None
) -> tuple[Result, Rungs]:
    """Return an arm's mean score over data sets, and a baseline's ladder by the same mean. Raises `InputError` like
    `compute_equivalent`."""
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
        raise InputError("a ladder needs at least two budgets of the baseline, each only once")
    return means[arm.name], ladder


def refuse_gaps(rungs: Sequence[tuple[float, str]]) -> None:
    """Raise `InputError` if neighbouring rungs, (budget, name of the arm), are too far apart to interpolate."""
    for (less, lower), (more, upper) in itertools.pairwise(sorted(rungs)):
        if more > 1.01 * MOST_APART * less:
            remedy = f"give the baseline budgets between them, each at most {MOST_APART} times the one below"
            apart = f"{lower} and {upper} are a factor of {more / less:.3g} apart"
            raise InputError(f"{apart}, too far to interpolate; {remedy}")


def find_interval(score: Result, compute: float, ladder: Rungs) -> tuple[float, float, tuple[Noise, ...]]:
    """Return both ends of the interval of an arm's share, and the sources of noise in its test. The interval contains
    every share at which the test finds the arm neither above nor below the baseline."""
    # 1. Test the arm at points between the rungs, then between two points with different verdicts.
    between = [np.geomspace(*pair, POINTS_BETWEEN, endpoint=False) for pair in itertools.pairwise(ladder)]
    new = [*np.concatenate(between).tolist(), max(ladder)]
    gaps = dict[float, Contrast]()
    for _ in range(1 + HALVINGS):
        gaps |= {budget: contrast(terms_at(score, ladder, budget)) for budget in new}
        grid = sorted(gaps)
        new = [math.sqrt(less * more) for less, more in itertools.pairwise(grid) if gaps[less].side != gaps[more].side]
    sides, noise = [gaps[budget].side for budget in grid], gaps[grid[0]].noise
    if "untested" in sides:
        return math.nan, math.nan, noise
    # 2. From the first point where the arm is not ahead to the last where it is not behind, also if the ladder dips.
    not_ahead, not_behind = (
        [budget for budget, seen in zip(grid, sides, strict=True) if seen != side] for side in ("above", "below")
    )
    high = compute / (not_ahead or grid[-1:])[0] if sides[0] == "above" else math.inf
    low = compute / (not_behind or grid[:1])[-1] if sides[-1] == "below" else 0.0
    return min(low, high), max(low, high), noise  # if the baseline passes the arm between two points, `low` is larger


def terms_at(score: Result, ladder: Rungs, compute: float) -> Terms:
    """Return an arm's score minus the baseline's at this compute, interpolated between the two nearest rungs."""
    return [(1.0, score), *((-share, rung) for share, rung in interpolate(ladder, compute))]


def interpolate(ladder: Rungs, compute: float) -> Terms:
    """Return the two rungs next to this compute, with their shares in the baseline's score there."""
    (less, lower), (more, upper) = next(pair for pair in itertools.pairwise(ladder.items()) if compute <= pair[1][0])
    fraction = math.log(compute / less) / math.log(more / less)
    return [(1 - fraction, lower), (fraction, upper)]


def show_multiple(equivalent: Equivalent) -> str:
    """Show `0.73 [0.61, 0.82]`, `0.64 (at most 1.17)` or `above the ladder (at most 0.52)`; on a level ladder only the
    interval: `at least 0.41 (level ladder)`."""
    ends = show_ends(equivalent)
    if equivalent.is_level:
        return f"{ends} (level ladder)" if ends else "no share (level ladder)"
    point = f"{equivalent.beyond} the ladder" if equivalent.beyond else f"{equivalent.share:.2f}"
    return point + (f" {ends}" if ends.startswith("[") else f" ({ends})" if ends else "")


def show_ends(equivalent: Equivalent) -> str:
    """Show the interval: `[0.61, 0.82]`, `at most 0.52`, `at least 0.61`, `no bound`; on a level ladder
    `between 0.61 and 0.82`; empty without a test."""
    low, high = equivalent.low, equivalent.high
    if math.isnan(low):
        return ""
    if not low:
        return "no bound" if math.isinf(high) else f"at most {high:.2f}"
    if math.isinf(high):
        return f"at least {low:.2f}"
    return f"between {low:.2f} and {high:.2f}" if equivalent.is_level else f"[{low:.2f}, {high:.2f}]"


LEAST_RUNGS = 3
"""The fewest budgets of MLM alone that make a ladder."""

LEAST_SAVING = 0.05
"""The smallest logarithm of a share, in absolute value, for which the text names a task that accounts for it."""


@dataclass(frozen=True)
class Price:
    """The compute equivalents of an arm."""

    mean: tuple[Equivalent, ...]
    """The equivalent by the mean over all data sets, in each known unit of compute."""
    by_part: Mapping[str, Equivalent]
    """Family or data set → its equivalent in the first of these units; empty with a single data set."""


@dataclass(frozen=True)
class PriceList:
    """The compute equivalents of all arms of a network."""

    baseline: tuple[ReportArm, ...]
    """The arms of the ladder, least compute first."""
    prices: tuple[Price, ...]
    """The prices of the other arms: most steps first, then the smallest share first. Within a budget, arms above the
    whole ladder come first and arms below it last."""
    compared: tuple[Equivalent, ...]
    """The arms of the largest budget below the baseline's largest, or else of the smallest budget; smallest share
    first."""
    declared: tuple[Equivalent, ...] = ()
    """The arms that the study's hypotheses compare with this baseline; the headline prefers them to `compared`."""
    without: Mapping[str, Equivalent] = field(default_factory=dict)
    """Data set → the equivalent of the headline's first arm without that data set; empty with a single data set."""
    decimals: int = 2
    """The decimals of scores in tables."""
    unit: str = "%"
    """The unit of scores, as in `ResultSet`."""
    over: str = "seeds"
    """The repetitions of all tests, as in `ResultSet`."""

    @property
    def label(self) -> str:
        """The baseline's name in tables: `MLM 40 %`, or the method's name."""
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
    """List the prices of each network that has a baseline and another arm, smallest network first, by the primary
    metric; and a sentence for each baseline that cannot price any arm. Leave out arms that continue another arm,
    because their compute lies beyond the ladder.

    Args:
        declared: arm of a hypothesis → the baseline arms that the hypothesis compares it with.
        method: the baseline's name in a table of results; empty: MLM alone (`choose_baseline`).
    """
    lists, lacking = [], []
    for size in results.sizes:
        arms = [arm for arm in final_arms(results) if arm.size == size]
        named = sorted((arm for arm in arms if arm.curriculum == method), key=lambda arm: arm.flops or arm.tokens or 0)
        baseline = tuple(named) if method else choose_baseline(arms)
        if not baseline:
            continue
        try:
            prices = price_arms(results, baseline, [arm for arm in arms if arm not in baseline])
        except InputError as error:
            lacking.append(f"{size or method} has no compute-equivalents: {error}")
            continue
        if prices:
            lists.append(head_prices(results, baseline, prices, declared or {}))
    return lists, lacking


def final_arms(results: ResultSet) -> list[ReportArm]:
    """Return the trained models after decay that do not continue another one."""
    trained = [arm for arm in results.models if arm.objective != "none" and not arm.cpt_steps]
    return [arm for arm in trained if arm.setup != "efficiency"]


def head_prices(
    results: ResultSet, baseline: tuple[ReportArm, ...], prices: list[Price], declared: Mapping[str, Sequence[str]]
) -> PriceList:
    """Choose the arms of the headline, and price the first of them again without each data set."""
    # 1. The arms of the largest budget below the baseline's largest.
    means = [price.mean[0] for price in prices]
    budgets = sorted({mean.score.arm.pretrain_steps for mean in means})
    steps = max((budget for budget in budgets if budget < baseline[-1].pretrain_steps), default=budgets[0])
    compared = tuple(mean for mean in means if mean.score.arm.pretrain_steps == steps)
    # 2. The arms that hypotheses compare with this baseline.
    rungs = {arm.name for arm in baseline}
    names = {name for name, ladder in declared.items() if rungs.issuperset(ladder)}
    chosen = tuple(mean for mean in means if mean.score.arm.name in names)
    # 3. The first of them without each data set.
    first = (chosen or compared)[0]
    datasets = [cell.dataset for cell in first.score.cells]
    without: dict[str, Equivalent] = {}
    for name in datasets if len(datasets) > 1 else ():
        rest = [dataset for dataset in datasets if dataset != name]
        without[name] = compute_equivalent(results, first.score.arm, baseline, first.axis, rest)
    return PriceList(baseline, tuple(prices), compared, chosen, without, results.decimals, results.unit, results.over)


def choose_baseline(arms: Sequence[ReportArm]) -> tuple[ReportArm, ...]:
    """Choose MLM alone at the masking ratio with the most budgets; the usual ratio wins a tie. Return () with fewer
    than `LEAST_RUNGS` budgets. A budget with two such arms does not count."""
    plain = [arm for arm in arms if arm.objective == "mlm" and arm.is_plain and arm.mask_percent is not None]
    counts = Counter((arm.mask_percent, arm.pretrain_steps) for arm in plain)
    ladders: dict[int | None, list[ReportArm]] = {reference_mask(arms): []}  # first, so that it wins a tie
    for arm in sorted(plain, key=lambda arm: arm.pretrain_steps):
        if counts[arm.mask_percent, arm.pretrain_steps] == 1:
            ladders.setdefault(arm.mask_percent, []).append(arm)
    longest = max(ladders.values(), key=len)
    return tuple(longest) if len(longest) >= LEAST_RUNGS else ()


def price_arms(results: ResultSet, baseline: Sequence[ReportArm], priced: Sequence[ReportArm]) -> list[Price]:
    """Price the arms that have known compute and scores on all data sets of the baseline. Raises `InputError` if two
    budgets of the baseline are too far apart."""
    # 1. Units of compute that are known for every arm of the baseline, and grow with its steps.
    datasets = shared_datasets(results, baseline, None)
    axes = []
    for axis in AXES:
        spent = [0.0, *(getattr(arm, axis) or 0.0 for arm in baseline)]
        if all(before < after for before, after in itertools.pairwise(spent)):
            axes.append(axis)
    # 2. Families and single data sets.
    parts: dict[str, list[str]] = {}
    scores = results.scores[baseline[0].name]
    for family in dict.fromkeys(scores[name].family for name in datasets):
        names = [name for name in datasets if scores[name].family == family]
        if 1 < len(names) < len(datasets):
            parts[f"{family} mean"] = names
        parts |= {name: [name] for name in names if len(datasets) > 1}
    # 3. The prices.
    prices: list[Price] = []
    for arm in priced:
        known_axes = [axis for axis in axes if getattr(arm, axis)]
        if known_axes and results.scores.get(arm.name, {}).keys() >= set(datasets):
            price_on = partial(compute_equivalent, results, arm, baseline)
            mean = tuple(price_on(axis, datasets) for axis in known_axes)
            prices.append(Price(mean, {part: price_on(known_axes[0], names) for part, names in parts.items()}))
    return sorted(prices, key=lambda price: (-price.mean[0].score.arm.pretrain_steps, price.mean[0].rank))


def tell_kinds(price_list: PriceList) -> str:
    """Write the declared arms' shares for each kind of task, beside those of other arms with as many steps:
    `A has the score of MLM alone (40 % masked) at these shares of its FLOPs: on token classification 0.62 [0.55, 0.69],
    where B has 1.09 [0.96, 1.30]; on …`"""
    first, declared = price_list.declared[0], [mean.score.arm for mean in price_list.declared]
    prices = {price.mean[0].score.arm: price for price in price_list.prices}
    steps = {arm.pretrain_steps for arm in declared}
    controls = [arm for arm in prices if arm not in declared and arm.pretrain_steps in steps]
    datasets = {cell.family: cell.dataset for cell in first.score.cells}
    told_kinds = []
    for family, dataset in datasets.items():
        part = f"{family} mean" if f"{family} mean" in price_list.prices[0].by_part else dataset
        shares = {arm: show_multiple(price.by_part[part]) for arm, price in prices.items()}
        beside = first_of([f"{arm.name} has {shares[arm]}" for arm in controls])
        told = show_list([shares[arm] for arm in declared])
        told_kinds.append(f"on {FAMILY_NAMES[family]} {told}{beside and f', where {beside}'}")
    have = f"{show_list([arm.name for arm in declared])} {'have' if len(declared) > 1 else 'has'}"
    return f"{have} the score of {price_list.alone} at these shares of its {AXES[first.axis]}: {'; '.join(told_kinds)}"


def price_sentence(price_list: PriceList) -> str:
    """Say `A reaches the score of MLM alone (40 % masked) at 0.71 [0.62, 0.83] of its FLOPs, on average over 3 tasks`.

    For several arms the sentence gives the range of their shares, because the best of several is biased. A second
    sentence leaves out the task whose omission moves the first arm's share furthest towards 1:
    ` Without genre, the share of A is 0.93.` It says so if that task accounts for more than half of the share's
    logarithm. Declared arms with several kinds of task get a share for each kind (`tell_kinds`).
    """
    chosen, alone = price_list.declared or price_list.compared, price_list.alone
    first, ranked = chosen[0], sorted(chosen, key=lambda mean: mean.rank)
    name, cells = first.score.arm.name, first.score.cells
    # 1. Units, tasks and notes.
    unit, ends = f"of its {AXES[first.axis]}", show_ends(first)
    where = f"on average over {len(cells)} tasks" if len(cells) > 1 else f"on {cells[0].dataset}"
    notes = ["declared in the study's hypotheses"] if price_list.declared else []
    single = f"one {price_list.over[:-1]}"
    notes.append(f"interval over {show_noise(first.noise)}" if first.noise else f"no interval: {single}")
    if price_list.over == "seeds" and "pretraining seeds" not in first.noise:
        notes.append("each model was pretrained once")
    if price_list.declared and len({cell.family for cell in cells}) > 1:
        return f"{tell_kinds(price_list)} ({'; '.join(notes)})."
    # 2. The share, or the range of several.
    if len(chosen) > 1:
        reach = " to ".join(f"{show_multiple(end)} for {end.score.arm.name}" for end in (ranked[0], ranked[-1]))
        sentence = f"For the same score as {alone}, {len(chosen)} models need shares {unit} from {reach}"
    elif first.beyond or first.is_level:
        sentence = f"{name} reaches the score of {alone} where its ladder is level"
        if first.beyond:
            is_so = len({rung.mean < first.score.mean for rung in first.ladder.values()}) == 1
            sentence = f"{name} lies {first.beyond} the ladder of {alone}, whose scores do not rise with each budget"
            sentence = f"{name} scores {first.beyond} {alone} at all of its budgets" if is_so else sentence
        sentence += f": {ends} {unit}" if ends not in ("", "no bound") else ""
    else:
        sentence = f"{name} reaches the score of {alone} at {show_multiple(first)} {unit}"
    sentence += f", {where} ({'; '.join(notes)})."
    if len(chosen) == 1 and first.low <= 1 <= first.high:
        sentence += f" The interval contains 1: {name} may cost as much as {alone}."
    # 3. The task that changes the share most.
    if not price_list.without:
        return sentence
    whole = math.log(first.share)
    sign = math.copysign(1, whole)
    task, remaining = min(price_list.without.items(), key=lambda item: sign * math.log(item[1].share))
    has_one = abs(whole) > LEAST_SAVING and math.log(remaining.share) / whole < 0.5
    has_one = has_one and not (first.is_level or remaining.is_level)
    without = f"{'One task accounts for most of the difference: w' if has_one else 'W'}ithout {task}"
    return f"{sentence} {without}, the share of {name} is {show_multiple(remaining)}."


def ladder_panel(price_list: PriceList) -> Panel:
    """Plot the baseline's score against its compute, and the distance of the compared arms to that ladder."""
    compared = price_list.compared[: len(SERIES)]
    first, marks, distances = compared[0], [], []
    for (compute, score), height in zip(first.ladder.items(), first.heights, strict=True):
        # Where the curve was made monotone, the interval is still that of the measured score.
        marks.append((compute, replace(score.interval, value=height), MARKER_SIZE))
    labels = [f"{price_list.label} alone", *(equivalent.score.arm.name for equivalent in compared)]
    objectives = [price_list.baseline[0].look or "mlm", *(equivalent.score.arm.look for equivalent in compared)]
    (named, own), *looks = name_looks(labels, objectives)
    series = [(named, own, marks)]
    for equivalent, (_, look) in zip(compared, looks, strict=True):
        compute, score = equivalent.compute, equivalent.score
        words, name = name_training(score.arm), score.arm.name
        label = f"{words} ({name}): {show_multiple(equivalent)}" if words else f"{name}: {show_multiple(equivalent)}"
        series.append((label, look, [(compute, score.interval, MARKER_SIZE)]))
        begin, end = equivalent.reach if equivalent.is_level else (compute, compute / equivalent.share)
        distances.append((begin, end, 100 * score.mean, look))
    ticks, labels, unit = round_ticks([*first.ladder, *(equivalent.compute for equivalent in compared)])
    cells = first.score.cells
    settings = {
        "title": price_list.baseline[0].size,
        "xscale": "log",
        "xlabel": f"{AXES[first.axis]} of training{unit}",
        "ylabel": with_unit("mean over all tasks" if len(cells) > 1 else cells[0].dataset, price_list.unit),
        "xticks": ticks,
        "xticklabels": labels,
    }
    return Panel("lines", series, settings, distances)


def price_tables(price_list: PriceList) -> list[Table]:
    """Make a table of shares by the mean, with a row for each arm; and a table of shares by family and task."""
    baseline, label = price_list.baseline, price_list.label
    counted = {equivalent.axis for price in price_list.prices for equivalent in price.mean}
    axes = [axis for axis in AXES if axis in counted]
    parts = [*price_list.prices[0].by_part]
    has_steps, mask = bool(baseline[0].objective), baseline[0].mask_percent
    # 1. A row for each arm in both tables, and a CSV record for each of the arm's shares.
    rows, rows_by_part = [], []
    records: list[Sequence[object]] = [PRICE_COLUMNS]
    for price in price_list.prices:
        score = price.mean[0].score
        shares = {mean.axis: show_multiple(mean) for mean in price.mean}
        steps = [f"{score.arm.pretrain_steps:,}", relative_flops(score.arm, baseline, mask)] if has_steps else []
        mean, told = interval_cell(score.interval, price_list.decimals), (shares.get(axis, MISSING) for axis in axes)
        cells = (*map(Cell, steps), mean, *map(Cell, told))
        rows.append(TableRow((score.arm.name,), cells, arm=score.arm))
        cells = (*map(Cell, steps), *(Cell(show_multiple(price.by_part[part])) for part in parts))
        rows_by_part.append(TableRow((score.arm.name,), cells, arm=score.arm))
        for part, equivalent in [*(("mean", mean) for mean in price.mean), *price.by_part.items()]:
            records.append(price_record(price_list, part, equivalent))
    # 2. The note below both tables.
    compared = price_list.compared[0]
    scored, noise = compared.score.cells, compared.noise
    where = f"the mean over {len(scored)} data sets of equal weight" if len(scored) > 1 else scored[0].dataset
    over = f", over {show_noise(noise)}" if noise else ""
    once = " Each model was pretrained once, so the shares hold for these checkpoints only."
    rule = read_words()["prices_rule"].format(where=where, over=over, repeats=price_list.over)
    rule += once * (price_list.over == "seeds" and "pretraining seeds" not in noise)
    # 3. The tables.
    name = f"compute-equivalents-{baseline[0].size or 'methods'}"
    title = f"Compute-equivalents: baseline {label} with {len(baseline)} budgets"
    if has_steps:
        budgets = show_list([show_steps(arm.pretrain_steps) for arm in baseline])
        title = f"Compute-equivalents, {baseline[0].size}: baseline {label} alone with {budgets} steps"
    known = ("steps", RELATIVE) if has_steps else ()
    rule += f" {read_words()['flops_rule']}" if has_steps else ""
    heads = (*known, with_unit("score", price_list.unit), *(f"share of {AXES[axis]}" for axis in axes))
    tables = [Table(name, title, ("model",), heads, tuple(rows), (rule,), records)]
    if parts:
        title = f"{title}. Share of {AXES[axes[0]]} by task"
        tables.append(Table(f"{name}-by-task", title, ("model",), (*known, *parts), tuple(rows_by_part), (rule,)))
    return tables


PRICE_COLUMNS = (
    *("arm", "size", "baseline", "steps", "on", "score", "half_width", "counted_in", "compute", "beyond", "share"),
    *("low", "high", "noise"),
)
"""The columns of the CSV file. It has a record for each arm's mean in each unit of compute, and for each family and
task. An open or unknown end of the interval is empty; on a level ladder the share is empty too."""


def price_record(price_list: PriceList, part: str, equivalent: Equivalent) -> Sequence[object]:
    """Return the CSV record of an equivalent; `part` is `mean`, a family or a data set."""
    score, mean = equivalent.score, interval_cell(equivalent.score.interval, price_list.decimals)
    point = ("level", "") if equivalent.is_level else (equivalent.beyond, f"{equivalent.share:.4f}")
    ends = [f"{end:.4f}" if 0 < end < math.inf else "" for end in (equivalent.low, equivalent.high)]
    return (
        *(score.arm.name, price_list.baseline[0].size, price_list.label, score.arm.pretrain_steps, part),
        *(mean.text, mean.reach.replace(MISSING, ""), equivalent.axis, f"{equivalent.compute:.6g}"),
        *(*point, *ends, "; ".join(equivalent.noise)),
    )
