"""Numbers → text: percent, points, intervals, p-values, sizes; and the metrics of a family in words."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence

from biphase.corpus.writing import as_inert
from biphase.report.results import AVERAGE, SCORE_DECIMALS, ResultSet, read_words
from biphase.report.statistics import SIGNIFICANCE, GapUnit, Interval
from biphase.tasks.families import KINDS

MISSING = "–"
"""The text for an unknown number."""


def show_share(share: float, decimals: int = SCORE_DECIMALS) -> str:
    """Show a share in percent: `81.20`."""
    return MISSING if math.isnan(share) else f"{100 * share:.{decimals}f}"


def with_unit(words: str, unit: str) -> str:
    """Name scores in this unit: `score (%)`, or `score` without one."""
    return f"{words} ({unit})" if unit else words


def show_points(value: float, unit: GapUnit = "points", decimals: int = SCORE_DECIMALS) -> str:
    """Show a difference of shares in percentage points with its sign, `+1.20`, or a difference of losses in nats,
    `−0.124`; `0.00` has no sign."""
    points = show_end(value, unit, decimals)
    return points if points.strip("+−0.") else points[1:]


def show_end(value: float, unit: GapUnit = "points", decimals: int = SCORE_DECIMALS) -> str:
    """Show an end of a difference's interval like `show_points`, but keep the sign of `−0.00`: it tells on which side
    of zero the end lies."""
    points = f"{100 * value:+.{decimals}f}" if unit == "points" else f"{value:+.3f}"
    return MISSING if math.isnan(value) else points.replace("-", "−")


def show_difference(gap: Interval) -> str:
    """Show `+1.20 points [+0.40, +2.00]`, or without an interval `+1.20 points`. An interval of another coverage than
    95 % names it: `[+0.10, +2.30; 99.17 %]`."""
    low, high = (show_end(end, gap.unit) for end in (gap.low, gap.high))
    coverage = f"; {100 * (1 - gap.level):.4g} %" if gap.level != SIGNIFICANCE else ""
    ends = "" if math.isnan(gap.low) else f" [{low}, {high}{coverage}]"
    return f"{show_points(gap.value, gap.unit)} {gap.unit}{ends}"


def show_estimate(value: float) -> str:
    """Round an estimate to two digits: `0.021`, `1.5`, `12`, `81,000`."""
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def show_superscript(text: str) -> str:
    """Show `7.25e14` as `7.25 × 10¹⁴`; return any other text unchanged."""
    return re.sub(r"^([\d.]+)e(\d+)$", lambda found: f"{found[1]} × 10{found[2].translate(SUPERSCRIPTS)}", text)


def show_gib(num_bytes: float) -> str:
    return f"{show_estimate(num_bytes / 2**30)} GiB"


def show_power(value: float) -> str:
    """Show `5e-5`, `640`, `1.15e16`, `2e18`."""
    return re.sub(r"e(-?)\+?0*", r"e\1", f"{value:.3g}")


def show_tokens(tokens: float) -> str:
    """Show `980,000`, `3.4M`, `26B`, `1.5T`."""
    rounded = float(f"{tokens:.3g}")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if rounded >= size:
            return f"{rounded / size:.3g}{unit}"
    return f"{rounded:,.0f}"


SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def show_p_value(p_value: float) -> str:
    """Show `0.031`, or `< 0.001`. Near `SIGNIFICANCE`, show more digits until the side is clear: `0.0496`."""
    if math.isnan(p_value):
        return MISSING
    if p_value < 0.001:
        return "< 0.001"
    forms = (f"{p_value:.{digits}f}" for digits in range(3, 18))
    return next(digits for digits in forms if (float(digits) < SIGNIFICANCE) == (p_value < SIGNIFICANCE))


def tell_p_value(p_value: float) -> str:
    """Write `p = 0.031`, or `p < 0.001`."""
    return f"p = {show_p_value(p_value)}".replace("= <", "<")


def show_spread(spread: Interval | None) -> str:
    """Show `1.20 [0.93, 1.41]`."""
    if spread is None or math.isnan(spread.value):
        return MISSING
    ends = "" if math.isnan(spread.low) else f" [{show_share(spread.low)}, {show_share(spread.high)}]"
    return show_share(spread.value) + ends


def write_steps(steps: int) -> str:
    """Write steps for the name of an arm: `42k`, `1200`."""
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def show_steps(steps: int) -> str:
    """Show steps to a reader: `42k`, `1,200`."""
    return f"{steps:,}" if steps % 1000 else write_steps(steps)


def show_list(words: Sequence[str]) -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def show_noise(noise: Sequence[str]) -> str:
    """Join sources of noise: `fine-tuning seeds only`, `pretraining seeds and test examples`."""
    return show_list(noise) + (" only" if len(noise) == 1 else "")


def show_count(number: int, noun: str, nouns: str = "") -> str:
    """Show `1 seed`, `2,000 seeds`, `2 inequalities`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or noun + 's'}"


def format_bytes(num_bytes: float) -> str:
    """Show `7 B`, `1.23 kB`, `30,000 TB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:{',.0f' if num_bytes >= 1000 else '.3g'}} {unit}"


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Write rows as CSV, with texts as `as_inert` returns them."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(map(as_inert, row) for row in rows)
    return file.getvalue()


def group_measures(results: ResultSet, family: str) -> dict[str, list[str]]:
    """Group the datasets of a family by their metric: metric in words → datasets. An unknown metric counts as the
    family's usual one."""
    metric = results.primary_metric
    kinds = [kind for kind in KINDS.values() if kind.code == family]
    measures = {name: measure.words for kind in kinds for name, measure in kind.metrics.items()}
    measures = measures or read_words()["measures"][family]
    datasets: dict[str, dict[str, None]] = {}
    for result in results.select(family, metric=metric).results:
        if result.dataset != AVERAGE:
            measure = result.measure or next(iter(measures))
            name = kinds[0].paper_measure.words if metric == "paper" else measures.get(measure, measure)
            datasets.setdefault(name, {})[result.dataset] = None
    return {name: list(names) for name, names in datasets.items()}


def tell_measures(results: ResultSet, family: str) -> str:
    """Write the metrics of a family: `accuracy`, or `accuracy on genre and Matthews correlation on cola, which averages
    mix`."""
    groups = group_measures(results, family)
    if len(groups) == 1:
        return next(iter(groups))
    told = [f"{words} on {show_list(names)}" for words, names in groups.items()]
    return f"{show_list(told)}, which averages mix"
