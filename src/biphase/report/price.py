"""Results → what each curriculum pays for the score of MLM alone: shares of its compute, as a table and a sentence.

The baseline of a network is MLM alone at one masking ratio, with three budgets or more; every other arm is measured
against its ladder (`equivalents`).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from biphase.errors import InputError
from biphase.report.arms import reference_mask, short_steps, sizes_of
from biphase.report.averages import average
from biphase.report.equivalents import (
    AXES,
    Equivalent,
    compute_equivalent,
    shared_datasets,
    show_ends,
    show_multiple,
    show_point,
)
from biphase.report.formats import MISSING, csv_text, escape_latex, latex_text, markdown_text, show_noise, show_share
from biphase.report.panels import Mark, Panel, mark_mean, round_ticks
from biphase.report.results import ReportArm, ResultSet
from biphase.style import LOOKS, SERIES

LEAST_RUNGS = 3
"""So many budgets of MLM alone make a ladder worth reading shares off."""

LEAST_SAVING = 0.05
"""A share whose logarithm is nearer to zero saves or costs nothing that a task could carry."""

PRICE_COLUMNS = ("model", "steps", "score (%)")


@dataclass(frozen=True)
class Price:
    """What an arm pays for its score, as shares of what the baseline pays for the same."""

    mean: tuple[Equivalent, ...]
    """By the mean over all data sets: in FLOPs and in tokens, as far as these are known."""
    parts: Mapping[str, Equivalent]
    """By each family and each data set, where there are several; in the first kind of compute."""
    without: Mapping[str, Equivalent]
    """By the mean without each data set, untested."""

    @property
    def arm(self) -> ReportArm:
        return self.mean[0].arm


@dataclass(frozen=True)
class PriceList:
    """All arms of a network against the ladder of its baseline."""

    baseline: tuple[ReportArm, ...]
    """Least compute first."""
    half_widths: tuple[float, ...]
    """Half of the 95 % interval over seeds of each of its scores."""
    prices: tuple[Price, ...]
    """Most steps first, then the least share first: what is above all of the ladder before what lies on it."""
    datasets: tuple[str, ...]
    declared: tuple[str, ...] = ()
    """Arms that the study's hypotheses hold against this baseline."""

    @property
    def size(self) -> str:
        return self.baseline[0].size

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"compute-equivalents-{self.size}"

    @property
    def label(self) -> str:
        """`MLM 40 %`."""
        return f"MLM {self.baseline[0].mask_percent} %"

    @property
    def title(self) -> str:
        budgets = ", ".join(short_steps(arm.pretrain_steps) for arm in self.baseline)
        return f"Compute-equivalents, {self.size}: baseline {self.label} alone with {budgets} steps"

    @property
    def rule(self) -> str:
        noise = self.prices[0].mean[0].noise
        over = f", over {show_noise(noise)}" if noise else ""
        once = "" if "pretraining seeds" in noise else " Each model was pretrained once: this is about these models."
        where = f"the mean over {len(self.datasets)} data sets" if len(self.datasets) > 1 else self.datasets[0]
        return (
            f"The share of the baseline's compute at which it reaches the same score, on {where}: 0.6 saves 40 %. In "
            f"brackets its 95 % interval{over}, as “at most” or “at least” where the baseline's budgets end before it "
            f"does; with 1 in it, no saving is shown. What scores more or less than the baseline at all budgets is "
            f"above or below the ladder. Between two budgets it is a line against the logarithm of compute. Not "
            f"corrected for the number of models. ± is half of a score's 95 % interval over seeds.{once}"
        )

    @property
    def compared(self) -> tuple[Equivalent, ...]:
        """The arms of the largest budget above which the baseline has another one, the least share first: what is
        better than the baseline there still lies on the ladder. Without such a budget, those of the smallest."""
        top = self.baseline[-1].pretrain_steps
        budgets = sorted({price.arm.pretrain_steps for price in self.prices})
        chosen = max((steps for steps in budgets if steps < top), default=budgets[0])
        return tuple(price.mean[0] for price in self.prices if price.arm.pretrain_steps == chosen)

    @property
    def headline(self) -> tuple[Price, ...]:
        """What was declared before it was seen; else all that is compared."""
        compared = [found.arm.name for found in self.compared]
        return tuple(price for price in self.prices if price.arm.name in (self.declared or compared))


def list_prices(
    results: ResultSet, declared: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[PriceList], list[str]]:
    """One for each network that has a baseline and another arm, smallest first, by the primary metric; and why another
    network has none. What continues another arm is left out: its compute lies beyond the ladder.

    Args:
        declared: arms that hypotheses hold against a ladder → the arms of that.
    """
    if not results.results:
        return [], []
    decayed = [arm for arm in results.models if arm.setup != "efficiency"]
    trained = [arm for arm in decayed if arm.objective != "none" and not arm.cpt_steps]
    found, lacking = [], []
    for size in sizes_of(trained):
        own = [arm for arm in trained if arm.size == size]
        baseline = choose_baseline(own)
        others = [arm for arm in own if arm not in baseline]
        try:
            listed = list_network(results, baseline, others) if baseline else None
        except InputError as error:
            lacking.append(f"No compute-equivalents of {size}: {error}")
            continue
        if listed:
            names = {arm.name for arm in baseline}
            asked = tuple(arm for arm, ladder in (declared or {}).items() if names.issuperset(ladder))
            there = [price.arm.name for price in listed.prices]
            found.append(replace(listed, declared=tuple(name for name in asked if name in there)))
    return found, lacking


def choose_baseline(arms: Sequence[ReportArm]) -> tuple[ReportArm, ...]:
    """MLM alone at the masking ratio that has most budgets, at a tie the usual one; () with fewer than `LEAST_RUNGS` of
    them. A budget at which two arms are described alike does not count."""
    by_mask: dict[int, dict[int, list[ReportArm]]] = {}
    for arm in arms:
        if arm.objective == "mlm" and arm.is_plain and arm.mask_percent is not None:
            by_mask.setdefault(arm.mask_percent, {}).setdefault(arm.pretrain_steps, []).append(arm)
    ladders = {}
    for mask, by_steps in by_mask.items():
        ladders[mask] = tuple(by_steps[steps][0] for steps in sorted(by_steps) if len(by_steps[steps]) == 1)
    usual = reference_mask(arms)
    best = max(ladders, key=lambda mask: (len(ladders[mask]), mask == usual), default=None)
    return () if best is None or len(ladders[best]) < LEAST_RUNGS else ladders[best]


def list_network(results: ResultSet, baseline: Sequence[ReportArm], others: Sequence[ReportArm]) -> PriceList | None:
    """The prices of one network; None without an arm that is known as well as the baseline. Raises `InputError` where
    the baseline has no data set in common, or a gap."""
    axes = []
    for axis in AXES:
        spent = [0.0, *(getattr(arm, axis) or 0.0 for arm in baseline)]
        if all(before < after for before, after in itertools.pairwise(spent)):  # known of all, and more for more steps
            axes.append(axis)
    datasets = shared_datasets(results, baseline, None)
    parts = list_parts(results, baseline[0], datasets)
    prices = []
    for arm in others:
        known = [axis for axis in axes if getattr(arm, axis)]
        if known and results.scores_of(arm).keys() >= set(datasets):
            price_on = partial(compute_equivalent, results, arm, baseline)
            mean = tuple(price_on(axis, datasets) for axis in known)
            by_part = {part: price_on(known[0], names) for part, names in parts.items()}
            rest = {name: [one for one in datasets if one != name] for name in datasets if len(datasets) > 1}
            without = {name: price_on(known[0], names, is_tested=False) for name, names in rest.items()}
            prices.append(Price(mean, by_part, without))
    # Above all of the ladder costs less than it says, below all of it more.
    ranks = {"above": 0, "": 1, "below": 2}
    prices.sort(key=lambda p: (-p.arm.pretrain_steps, ranks[p.mean[0].beyond], p.mean[0].share, -p.mean[0].score))
    own = map(results.scores_of, baseline)
    half_widths = tuple(average([scores[name] for name in datasets]).half_width for scores in own)
    return PriceList(tuple(baseline), half_widths, tuple(prices), datasets) if prices else None


def list_parts(results: ResultSet, arm: ReportArm, datasets: Sequence[str]) -> dict[str, list[str]]:
    """What shares are looked at in parts: `TC mean` of several data sets and each data set → its data sets."""
    by_family: dict[str, list[str]] = {}
    for name, score in results.scores_of(arm).items():
        if name in datasets:
            by_family.setdefault(score.family, []).append(name)
    parts = dict[str, list[str]]()
    for family, names in by_family.items():
        if 1 < len(names) < len(datasets):
            parts[f"{family} mean"] = names
        parts |= {name: [name] for name in names if len(datasets) > 1}
    return parts


def price_sentence(listed: PriceList) -> str:
    """`A reaches the score of MLM alone (40 % masked) at 0.71 [0.62, 0.83] of its FLOPs, on average over 3 tasks.`

    Of several arms none is chosen by its share, which would flatter it: the sentence has the range.
    """
    chosen, alone = listed.headline, f"MLM alone ({listed.baseline[0].mask_percent} % masked)"
    found, last = chosen[0].mean[0], chosen[-1].mean[0]
    unit, ends = f"of its {AXES[found.axis]}", show_ends(found)
    where = f"on average over {len(found.datasets)} tasks" if len(found.datasets) > 1 else f"on {found.datasets[0]}"
    notes = [f"interval over {show_noise(found.noise)}"] if found.noise else ["no interval: one seed"]
    if listed.declared:
        notes.insert(0, "declared in the study's hypotheses")
    if "pretraining seeds" not in found.noise:
        notes.append("each model was pretrained once")
    if len(chosen) > 1:
        reach = f"{found.arm.name} {show_multiple(found)} to {last.arm.name} {show_multiple(last)}"
        told = f"{len(chosen)} models reach the score of {alone} at different shares {unit}: from {reach}"
    elif found.beyond:
        told = f"{found.arm.name} scores {found.beyond} {alone} at all of its budgets"
        told += f": {ends} {unit}" if ends.startswith("at ") else ""
    else:
        told = f"{found.arm.name} reaches the score of {alone} at {show_multiple(found)} {unit}"
    if len(chosen) == 1 and found.low <= 1 <= found.high:
        told += ", which is not shown to be cheaper" if found.share < 1 else ", which is not shown to cost more"
    return f"{told}, {where} ({'; '.join(notes)}).{tell_rest(chosen[0])}"


def tell_rest(price: Price) -> str:
    """` Without genre it is 0.93.`: the share of an arm without the task that it rests on most, and whether more than
    half of it (by its logarithm) goes with that."""
    if not price.without:
        return ""
    whole = math.log(price.mean[0].share)
    task, rest = min(price.without.items(), key=lambda item: math.copysign(1, whole) * math.log(item[1].share))
    has_one = abs(whole) > LEAST_SAVING and math.log(rest.share) / whole < 0.5
    return f" {'One task carries this: w' if has_one else 'W'}ithout {task}, {price.arm.name} has {show_point(rest)}."


def ladder_panel(listed: PriceList) -> Panel:
    """The baseline's score against its compute as a line, and how far from it lie the arms that are compared."""
    compared = listed.compared[: len(SERIES)]
    ladder = compared[0].ladder
    rungs = []
    for (compute, height), half_width, score in zip(ladder, listed.half_widths, compared[0].scores, strict=True):
        reach = 0.0 if math.isnan(half_width) else half_width
        # Where the line was made monotone, the interval stays that of the score.
        down, up = max(height - (score - reach), 0.0), max(score + reach - height, 0.0)
        rungs.append(Mark(compute, 100 * height, 100 * down, 100 * up))
    series = [(f"{listed.label} alone", LOOKS["mlm"], rungs)]
    for found, look in zip(compared, SERIES, strict=False):
        label = f"{found.arm.name}: {show_point(found)}"
        mark = mark_mean(found.compute, found.score, found.half_width)
        series.append((label, look, [replace(mark, until=found.matching)]))
    ticks, labels, unit = round_ticks([compute for compute, _ in ladder] + [found.compute for found in compared])
    return Panel(
        kind="lines",
        series=series,
        title=listed.size,
        x_label=f"{AXES[compared[0].axis]} of training{unit}",
        y_label="mean over all tasks (%)" if len(listed.datasets) > 1 else f"{listed.datasets[0]} (%)",
        ticks=ticks,
        tick_labels=labels,
        is_logarithmic=True,
        height=3.2,
    )


# The table, as files


def price_tables(listed: PriceList) -> Iterator[tuple[str, str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Names, titles, headers and rows, a row for every arm: shares by the mean, and those by family and task."""
    shared = [axis for axis in AXES if any(axis == found.axis for price in listed.prices for found in price.mean)]
    rows, by_part = [], []
    for price in listed.prices:
        found, stub = price.mean[0], (price.arm.name, f"{price.arm.pretrain_steps:,}")
        shown = {one.axis: show_multiple(one) for one in price.mean}
        score = f"{show_share(found.score)} ± {show_share(found.half_width)}"
        rows.append((*stub, score, *(shown.get(axis, MISSING) for axis in shared)))
        by_part.append((*stub, *map(show_multiple, price.parts.values())))
    yield listed.name, listed.title, (*PRICE_COLUMNS, *(f"share of {AXES[axis]}" for axis in shared)), rows
    if parts := tuple(listed.prices[0].parts):
        title = f"{listed.title}. Share of {AXES[shared[0]]} by task"
        yield f"{listed.name}-by-task", title, (*PRICE_COLUMNS[:2], *parts), by_part


def price_files(lists: Sequence[PriceList]) -> dict[str, str]:
    """The names of the tables' files below the folder of a report, with their text."""
    files = {}
    for listed in lists:
        for name, title, header, rows in price_tables(listed):
            escaped = [[escape_latex(cell) for cell in row] for row in rows]
            files[f"tables/{name}.md"] = markdown_text(title, header, rows, 1, [listed.rule])
            files[f"tables/{name}.tex"] = latex_text(name, f"{title}. {listed.rule}", header, escaped, 1)
        files[f"tables/{listed.name}.csv"] = prices_csv(listed)
    return files


def prices_csv(listed: PriceList) -> str:
    """A line for each arm and kind of compute, and for each family and task; nothing where an end of the interval is
    open or not known."""
    columns = ("arm", "size", "baseline", "steps", "on", "score", "half_width", "counted_in", "compute", "beyond")
    rows: list[Sequence[object]] = [(*columns, "share", "low", "high", "noise")]
    for price in listed.prices:
        for part, found in [*(("mean", one) for one in price.mean), *price.parts.items()]:
            own = [price.arm.name, listed.size, listed.label, price.arm.pretrain_steps, part, show_share(found.score)]
            own.append(show_share(found.half_width).replace(MISSING, ""))
            ends = [f"{end:.4f}" if 0 < end < math.inf else "" for end in (found.low, found.high)]
            counted = [found.axis, f"{found.compute:.6g}", found.beyond, f"{found.share:.4f}"]
            rows.append([*own, *counted, *ends, "; ".join(found.noise)])
    return csv_text(rows)
