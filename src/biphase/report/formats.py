"""Numbers as people read them: shares as percent, differences in points, intervals, p-values, counts."""

import math

from biphase.report.statistics import Difference, Interval, Spread

MISSING = "–"
"""What stands where a number is not known."""


def show_share(share: float) -> str:
    """A share as a percentage, two decimals as in the paper: `81.20`."""
    return MISSING if math.isnan(share) else f"{100 * share:.2f}"


def show_points(value: float) -> str:
    """A difference of shares in percentage points, signed: `+1.20`."""
    return MISSING if math.isnan(value) else f"{100 * value:+.2f}".replace("-", "−")


def show_p_value(p_value: float) -> str:
    """`0.031`, `< 0.001`."""
    if math.isnan(p_value):
        return MISSING
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def show_interval(interval: Interval) -> str:
    """`81.20 ± 0.93`; with a single value `81.20 ±    –`."""
    return MISSING if interval.num == 0 else f"{show_share(interval.mean)} ± {show_share(interval.half_width):>4}"


def show_difference(difference: Difference) -> str:
    """`+1.20 ± 0.93`, with the half-width of an interval by Student's t."""
    return f"{100 * difference.mean:+.2f} ± {show_share(difference.high - difference.mean):>4}"


def show_spread(spread: Spread | None) -> str:
    """`1.20 [0.93, 1.41]`."""
    if spread is None or math.isnan(spread.std):
        return MISSING
    ends = "" if math.isnan(spread.low) else f" [{show_share(spread.low)}, {show_share(spread.high)}]"
    return show_share(spread.std) + ends


def show_count(number: int, noun: str, nouns: str = "") -> str:
    """`1 seed`, `2,000 seeds`, `2 inequalities`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or noun + 's'}"
