"""Differences between the paper's models as weighted sums of scores, from which its claims are made."""

from collections.abc import Sequence

from biphase.report.claims import Terms
from biphase.report.results import FAMILY_NAMES, ReportArm, ResultSet

ON_PAR = 0.01
"""What "on par" and "closed" allow for: one point. The paper gives no number; this one is ours."""


def gap(results: ResultSet, a: ReportArm, b: ReportArm, family: str) -> Terms | None:
    """Score of `a` minus score of `b`; None where one is missing."""
    ours, theirs = results.find_average(a, family), results.find_average(b, family)
    return None if ours is None or theirs is None else [(1.0, ours), (-1.0, theirs)]


def gap_over_families(results: ResultSet, a: ReportArm, b: ReportArm) -> tuple[str, Terms | None]:
    """The mean of the gaps over those families that both arms have, and their names."""
    gaps = {family: terms for family in FAMILY_NAMES if (terms := gap(results, a, b, family))}
    return ", ".join(gaps) or "no family", mean_of(list(gaps.values()))


def add(*parts: Terms | None) -> Terms | None:
    """The sum of weighted sums; None where one is."""
    return None if None in parts else [term for part in parts for term in part or []]


def scale(terms: Terms | None, factor: float) -> Terms | None:
    return None if terms is None else [(factor * weight, result) for weight, result in terms]


def mean_of(parts: Sequence[Terms | None]) -> Terms | None:
    return scale(add(*parts), 1 / len(parts)) if parts else None
