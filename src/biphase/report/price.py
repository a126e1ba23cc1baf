"""Results → what each curriculum pays for the score of MLM alone: shares of its compute, as a table and a sentence.

The baseline of a network is MLM alone at one masking ratio, with three budgets or more; every other arm is measured
against its ladder (`equivalents`).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from biphase.errors import InputError
from biphase.report.contrasts import contrast
from biphase.report.equivalents import (
    AXES,
    Compute,
    Equivalent,
    compute_equivalent,
    mean_score,
    recount,
    shared_datasets,
    show_multiple,
)
from biphase.report.formats import MISSING, csv_text, escape_latex, latex_text, markdown_text, show_noise, show_share
from biphase.report.panels import Mark, Panel, Span, mark_mean, round_ticks
from biphase.report.results import ReportArm, ResultSet, reference_mask, short_steps, sizes_of
from biphase.style import LOOKS, SERIES

LEAST_RUNGS = 3
"""So many budgets of MLM alone make a ladder worth reading shares off."""

PRICE_COLUMNS = ("model", "steps", "score (%)")


@dataclass(frozen=True)
class Price:
    """What an arm pays for its score, as shares of what the baseline pays for the same."""

    arm: ReportArm
    half_width: float
    """Half of the 95 % interval of its score, over all noise that the scores show; nan where there is none."""
    shares: dict[Compute, Equivalent]
    """By what compute is counted in: as far as that is known."""

    @property
    def main(self) -> Equivalent:
        """In FLOPs where they are known, else in tokens, else in device hours."""
        return next(iter(self.shares.values()))


@dataclass(frozen=True)
class PriceList:
    """All arms of a network against the ladder of its baseline."""

    baseline: tuple[ReportArm, ...]
    """Least compute first."""
    half_widths: tuple[float, ...]
    """Half of the 95 % interval of each of its scores."""
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
        noise = self.prices[0].main.noise
        over = f", over {show_noise(noise)}" if noise else ""
        once = "" if "pretraining seeds" in noise else " Each model was pretrained once: this is about these models."
        where = f"the mean over {len(self.datasets)} data sets" if len(self.datasets) > 1 else self.datasets[0]
        return (
            f"The share of the baseline's compute at which it reaches the same score, on {where}: 0.6 saves 40 %. In "
            f"brackets its 95 % interval{over}; an open end (…) lies beyond the baseline's budgets, as does what is "
            f"bounded by “at most” or “at least”. Between two budgets the baseline is a line against the logarithm of "
            f"compute; not corrected for the number of models.{once}"
        )

    @property
    def compared(self) -> tuple[Price, ...]:
        """The arms of the largest budget above which the baseline has another one, the least share first: what is
        better than the baseline there still lies on the ladder. Without such a budget, those of the smallest."""
        top = self.baseline[-1].pretrain_steps
        budgets = sorted({price.arm.pretrain_steps for price in self.prices})
        chosen = max((steps for steps in budgets if steps < top), default=budgets[0])
        return tuple(price for price in self.prices if price.arm.pretrain_steps == chosen)


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
            shares = {axis: recount(first, arm, baseline, (known[0], axis)) for axis in known}
            prices.append(Price(arm, measure_reach(results, arm, datasets), shares))
    # Above all of the ladder costs less than it says, below all of it more.
    ranks = {"at most": 0, "": 1, "at least": 2}
    prices.sort(key=lambda p: (-p.arm.pretrain_steps, ranks[p.main.bound], p.main.share, -p.main.score))
    reaches = tuple(measure_reach(results, arm, datasets) for arm in baseline)
    return PriceList(tuple(baseline), reaches, tuple(prices), datasets) if prices else None


def measure_reach(results: ResultSet, arm: ReportArm, datasets: Sequence[str]) -> float:
    """Half of the 95 % interval of an arm's score, over all noise that it shows."""
    return contrast(mean_score(results, arm, datasets)).against().half_width


def price_sentence(listed: PriceList) -> str:
    """`A reaches the score of MLM alone (40 % masked) at 0.71 [0.62, 0.83] of its FLOPs, on average over 3 tasks.`"""
    compared = listed.compared
    best = compared[0]
    found, axis, alone = best.main, next(iter(best.shares)), f"MLM alone ({listed.baseline[0].mask_percent} % masked)"
    stands = {
        "": f"reaches the score of {alone} at",
        "at most": f"scores above {alone} at all of its budgets:",
        "at least": f"scores below {alone} at all of its budgets:",
    }
    where = f"on average over {len(found.datasets)} tasks" if len(found.datasets) > 1 else f"on {found.datasets[0]}"
    notes = [f"interval over {show_noise(found.noise)}"] if found.noise else ["no interval: one seed"]
    if "pretraining seeds" not in found.noise:
        notes.append("each model was pretrained once")
    if len(compared) > 1:
        least = f"the least of {len(compared)} models with {short_steps(best.arm.pretrain_steps)} steps"
        notes.append(f"{least}, not corrected for choosing it")
    stand = f"{stands[found.bound]} {show_multiple(found)} of its {AXES[axis]}"
    return f"{best.arm.name} {stand}, {where} ({'; '.join(notes)})."


def ladder_panel(listed: PriceList) -> Panel:
    """The baseline's score against its compute as a line, and how far from it lie the arms that are compared."""
    compared = listed.compared[: len(SERIES)]
    axis = next(iter(compared[0].shares))
    ladder = compared[0].main.ladder
    rungs = []
    for (compute, height), arm_width, score in zip(ladder, listed.half_widths, compared[0].main.scores, strict=True):
        reach = 0.0 if math.isnan(arm_width) else arm_width
        # Where the line was made monotone, the interval stays that of the score.
        down, up = max(height - (score - reach), 0.0), max(score + reach - height, 0.0)
        rungs.append(Mark(compute, 100 * height, 100 * down, 100 * up))
    series, spans = [(f"{listed.label} alone", LOOKS["mlm"], rungs)], []
    for price, look in zip(compared, SERIES, strict=False):
        found = price.main
        label = f"{price.arm.name}: {found.bound} {found.share:.2f}".replace(":  ", ": ")
        series.append((label, look, [mark_mean(found.compute, found.score, price.half_width)]))
        spans.append(Span(found.compute, found.matching, 100 * found.score, look))
    ticks, labels, unit = round_ticks([compute for compute, _ in ladder] + [price.main.compute for price in compared])
    return Panel(
        kind="lines",
        series=series,
        title=listed.size,
        x_label=f"{AXES[axis]} of training{unit}",
        y_label="mean over all tasks (%)" if len(listed.datasets) > 1 else f"{listed.datasets[0]} (%)",
        ticks=ticks,
        tick_labels=labels,
        is_logarithmic=True,
        spans=spans,
    )


# The table, as files


def price_rows(listed: PriceList) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headers, and a row for every arm; compute that is known of none has no column."""
    axes = [axis for axis in AXES if any(axis in price.shares for price in listed.prices)]
    rows = []
    for price in listed.prices:
        score = f"{show_share(price.main.score)} ± {show_share(price.half_width)}"
        shares = [show_multiple(price.shares[axis]) if axis in price.shares else MISSING for axis in axes]
        rows.append((price.arm.name, f"{price.arm.pretrain_steps:,}", score, *shares))
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
    for price in listed.prices:
        own = [price.arm.name, listed.size, listed.label, price.arm.pretrain_steps, show_share(price.main.score)]
        own.append(show_share(price.half_width).replace(MISSING, ""))
        for axis, found in price.shares.items():
            ends = [f"{end:.4f}" if 0 < end < math.inf else "" for end in (found.low, found.high)]
            shown = [axis, f"{found.compute:.6g}", found.bound, f"{found.share:.4f}", *ends, "; ".join(found.noise)]
            rows.append([*own, *shown])
    return csv_text(rows)
