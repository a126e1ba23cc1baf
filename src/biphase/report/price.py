"""Results → what each curriculum pays for the score of MLM alone: shares of its compute, as a table and a sentence.

The baseline of a network is MLM alone at one masking ratio, with three budgets or more; every other arm is measured
against its ladder (`equivalents`).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from biphase.errors import InputError
from biphase.report.arms import reference_mask, short_steps, sizes_of
from biphase.report.contrasts import seed_interval
from biphase.report.equivalents import (
    AXES,
    Equivalent,
    compute_equivalent,
    mean_score,
    recount,
    shared_datasets,
    show_multiple,
)
from biphase.report.formats import MISSING, csv_text, escape_latex, latex_text, markdown_text, show_noise, show_share
from biphase.report.panels import Mark, Panel, mark_mean, round_ticks
from biphase.report.results import ReportArm, ResultSet
from biphase.style import LOOKS, SERIES

LEAST_RUNGS = 3
"""So many budgets of MLM alone make a ladder worth reading shares off."""

PRICE_COLUMNS = ("model", "steps", "score (%)")


Price = tuple[Equivalent, ...]
"""What an arm pays for its score, as shares of what the baseline pays for the same: in FLOPs, in tokens and in device
hours, as far as these are known."""


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
        noise = self.prices[0][0].noise
        over = f", over {show_noise(noise)}" if noise else ""
        once = "" if "pretraining seeds" in noise else " Each model was pretrained once: this is about these models."
        where = f"the mean over {len(self.datasets)} data sets" if len(self.datasets) > 1 else self.datasets[0]
        return (
            f"The share of the baseline's compute at which it reaches the same score, on {where}: 0.6 saves 40 %. In "
            f"brackets its 95 % interval{over}; an open end (…) lies beyond the baseline's budgets, as does what is "
            f"bounded by “at most” or “at least”. Between two budgets the baseline is a line against the logarithm of "
            f"compute; not corrected for the number of models. ± is half of a score's 95 % interval over seeds.{once}"
        )

    @property
    def compared(self) -> tuple[Equivalent, ...]:
        """The arms of the largest budget above which the baseline has another one, the least share first: what is
        better than the baseline there still lies on the ladder. Without such a budget, those of the smallest."""
        top = self.baseline[-1].pretrain_steps
        budgets = sorted({price[0].arm.pretrain_steps for price in self.prices})
        chosen = max((steps for steps in budgets if steps < top), default=budgets[0])
        return tuple(price[0] for price in self.prices if price[0].arm.pretrain_steps == chosen)


def list_prices(results: ResultSet) -> list[PriceList]:
    """One for each network that has a baseline and another arm, smallest first; by the primary metric. What continues
    another arm is left out: its compute lies beyond the ladder."""
    if not results.results:
        return []
    decayed = [arm for arm in results.models if arm.setup != "efficiency"]
    trained = [arm for arm in decayed if arm.objective != "none" and not arm.cpt_steps]
    found = []
    for size in sizes_of(trained):
        own = [arm for arm in trained if arm.size == size]
        baseline = choose_baseline(own)
        others = [arm for arm in own if arm not in baseline]
        if baseline and (listed := list_network(results, baseline, others)):
            found.append(listed)
    return found


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
    """The prices of one network; None without a data set or a kind of compute that all of the baseline have."""
    axes = []
    for axis in AXES:
        spent = [0.0, *(getattr(arm, axis) or 0.0 for arm in baseline)]
        if all(before < after for before, after in itertools.pairwise(spent)):  # known of all, and more for more steps
            axes.append(axis)
    try:
        datasets = shared_datasets(results, baseline, None)
    except InputError:  # not evaluated yet
        return None
    prices = []
    for arm in others:
        known = [axis for axis in axes if getattr(arm, axis)]
        if known and results.scores_of(arm).keys() >= set(datasets):
            first = compute_equivalent(results, arm, baseline, known[0], datasets)
            prices.append((first, *(recount(first, baseline, axis) for axis in known[1:])))
    # Above all of the ladder costs less than it says, below all of it more.
    ranks = {"at most": 0, "": 1, "at least": 2}
    prices.sort(key=lambda p: (-p[0].arm.pretrain_steps, ranks[p[0].bound], p[0].share, -p[0].score))
    half_widths = tuple(seed_interval(mean_score(results, arm, datasets)).half_width for arm in baseline)
    return PriceList(tuple(baseline), half_widths, tuple(prices), datasets) if prices else None


def price_sentence(listed: PriceList) -> str:
    """`A reaches the score of MLM alone (40 % masked) at 0.71 [0.62, 0.83] of its FLOPs, on average over 3 tasks.`"""
    found, alone = listed.compared[0], f"MLM alone ({listed.baseline[0].mask_percent} % masked)"
    stands = {
        "": f"reaches the score of {alone} at",
        "at most": f"scores above {alone} at all of its budgets:",
        "at least": f"scores below {alone} at all of its budgets:",
    }
    where = f"on average over {len(found.datasets)} tasks" if len(found.datasets) > 1 else f"on {found.datasets[0]}"
    notes = [f"interval over {show_noise(found.noise)}"] if found.noise else ["no interval: one seed"]
    if "pretraining seeds" not in found.noise:
        notes.append("each model was pretrained once")
    if len(listed.compared) > 1:
        least = f"the least of {len(listed.compared)} models with {short_steps(found.arm.pretrain_steps)} steps"
        notes.append(f"{least}, not corrected for choosing it")
    stand = f"{stands[found.bound]} {show_multiple(found)} of its {AXES[found.axis]}"
    return f"{found.arm.name} {stand}, {where} ({'; '.join(notes)})."


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
        label = f"{found.arm.name}: {found.bound} {found.share:.2f}".replace(":  ", ": ")
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


def price_rows(listed: PriceList) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headers, and a row for every arm; compute that is known of none has no column."""
    known = {found.axis for price in listed.prices for found in price}
    axes = [axis for axis in AXES if axis in known]
    rows = []
    for price in listed.prices:
        score = f"{show_share(price[0].score)} ± {show_share(price[0].half_width)}"
        shown = {found.axis: show_multiple(found) for found in price}
        arm = price[0].arm
        rows.append((arm.name, f"{arm.pretrain_steps:,}", score, *(shown.get(axis, MISSING) for axis in axes)))
    return (*PRICE_COLUMNS, *(f"share of {AXES[axis]}" for axis in axes)), rows


def price_files(lists: Sequence[PriceList]) -> dict[str, str]:
    """The names of the tables' files below the folder of a report, with their text."""
    files = {}
    for listed in lists:
        header, rows = price_rows(listed)
        escaped = [[escape_latex(cell) for cell in row] for row in rows]
        name = f"tables/{listed.name}"
        files[f"{name}.md"] = markdown_text(listed.title, header, rows, 1, [listed.rule])
        files[f"{name}.tex"] = latex_text(listed.name, f"{listed.title}. {listed.rule}", header, escaped, 1)
        files[f"{name}.csv"] = prices_csv(listed)
    return files


def prices_csv(listed: PriceList) -> str:
    """A line for each arm and kind of compute; nothing where an end of the interval is open or not known."""
    columns = ("arm", "size", "baseline", "steps", "score", "half_width", "counted_in", "compute", "bound", "share")
    rows: list[Sequence[object]] = [(*columns, "low", "high", "noise")]
    for found in itertools.chain.from_iterable(listed.prices):
        own = [found.arm.name, listed.size, listed.label, found.arm.pretrain_steps, show_share(found.score)]
        own.append(show_share(found.half_width).replace(MISSING, ""))
        ends = [f"{end:.4f}" if 0 < end < math.inf else "" for end in (found.low, found.high)]
        shown = [found.axis, f"{found.compute:.6g}", found.bound, f"{found.share:.4f}", *ends, "; ".join(found.noise)]
        rows.append([*own, *shown])
    return csv_text(rows)
