"""Scores of a baseline at several budgets → the share of its compute at which another arm reaches its score.

The baseline's ladder is a line through its scores against the logarithm of compute, made monotone; nothing is read off
beyond its ends. The interval is what the test of all verdicts (`contrasts`) leaves: the shares at which the arm and the
baseline, interpolated between two rungs, cannot be told apart. So it is over all noise that the scores show.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize

from biphase.errors import InputError
from biphase.report.averages import average
from biphase.report.contrasts import Contrast, Noise, Terms, combine, contrast
from biphase.report.results import ReportArm, ResultSet

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


Rungs = Sequence[tuple[float, Terms]]
"""Budgets of a baseline, least first: compute, and the score as a weighted sum."""


@dataclass(frozen=True)
class Equivalent:
    """The share of the baseline's compute at which an arm reaches the baseline's score."""

    arm: ReportArm
    axis: Compute
    """What compute is counted in."""
    share: float
    """The arm's compute over the baseline's for the same score: 0.6 saves 40 %."""
    beyond: Literal["", "above", "below"]
    """Whether the arm's score lies above or below the whole ladder, so that the share is that of the ladder's end."""
    low: float
    """Ends of the 95 % interval; 0 and infinity where the ladder ends before the interval does, nan without a test."""
    high: float
    noise: tuple[Noise, ...]
    """What the interval accounts for."""
    score: float
    half_width: float
    """Half of the 95 % interval of the score over seeds; nan where there is none."""
    compute: float
    ladder: tuple[tuple[float, float], ...]
    """Compute and score of the baseline, made monotone, least compute first."""
    scores: tuple[float, ...]
    """The scores of the baseline as measured."""
    datasets: tuple[str, ...]
    """What the score is the mean of."""

    @property
    def matching(self) -> float:
        """The baseline's compute for the arm's score."""
        return self.compute / self.share


def compute_equivalent(
    results: ResultSet,
    arm: ReportArm,
    baseline: Sequence[ReportArm],
    axis: Compute = "flops",
    datasets: Sequence[str] | None = None,
    *,
    is_tested: bool = True,
) -> Equivalent:
    """The equivalent of an arm on the ladder of a baseline, by the mean over data sets that all of them have; without
    its interval unless `is_tested`.

    Args:
        baseline: one recipe at several budgets.
        datasets: those that count; None: all that the arm and the whole ladder have scores on.

    Raises:
        InputError: fewer than two budgets, two that are too far apart, compute that is not known, or no data set in
            common.
    """
    names = shared_datasets(results, (arm, *baseline), datasets)
    terms, rungs = mean_score(results, arm, names), make_ladder(results, baseline, axis, names)
    compute, scores = compute_of(arm, axis), [value_of(rung) for _, rung in rungs]
    own = average([results.scores_of(arm)[name] for name in names])
    heights = optimize.isotonic_regression(scores).x
    log, beyond = read_off(np.log([spent for spent, _ in rungs]), heights, value_of(terms))
    low, high, noise = find_interval(terms, compute, rungs) if is_tested else (math.nan, math.nan, ())
    return Equivalent(
        arm=arm,
        axis=axis,
        share=compute / math.exp(log),
        beyond=beyond,
        low=low,
        high=high,
        noise=noise,
        score=own.mean,
        half_width=own.half_width,
        compute=compute,
        ladder=tuple((spent, float(height)) for (spent, _), height in zip(rungs, heights, strict=True)),
        scores=tuple(scores),
        datasets=names,
    )


def contrast_at_share(
    results: ResultSet,
    arm: ReportArm,
    baseline: Sequence[ReportArm],
    share: float,
    datasets: Sequence[str] | None = None,
) -> Contrast:
    """The arm's score minus the baseline's at the FLOPs of which the arm has this share: above zero, if the arm's
    equivalent is less than `share`. Raises `InputError` where the ladder does not reach there."""
    names = shared_datasets(results, (arm, *baseline), datasets)
    rungs = make_ladder(results, baseline, "flops", names)
    spent = compute_of(arm, "flops") / share
    if not rungs[0][0] <= spent <= rungs[-1][0]:
        raise InputError(f"the baseline's ladder does not reach {1 / share:.2g} of its compute")
    return contrast(combine((1, mean_score(results, arm, names)), (-1, interpolate(rungs, spent))))


def shared_datasets(results: ResultSet, arms: Sequence[ReportArm], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Raises `InputError` where a wanted one is missing, or none is shared."""
    by_arm = [results.scores_of(arm) for arm in arms]
    shared = set.intersection(*map(set, by_arm))
    if wanted is not None and (lost := sorted(set(wanted) - shared)):
        raise InputError(f"no scores of {', '.join(arm.name for arm in arms)} on {', '.join(lost)}; finish their cells")
    names = tuple(name for name in by_arm[0] if name in shared and (wanted is None or name in wanted))
    if not names:
        raise InputError(f"{', '.join(arm.name for arm in arms)} have no data set in common; evaluate them on the same")
    return names


def mean_score(results: ResultSet, arm: ReportArm, datasets: Sequence[str]) -> Terms:
    """The mean over data sets as a weighted sum."""
    return [(1 / len(datasets), score) for name, score in results.scores_of(arm).items() if name in datasets]


def value_of(terms: Terms) -> float:
    return sum(weight * score.mean for weight, score in terms)


def compute_of(arm: ReportArm, axis: Compute) -> float:
    """Raises `InputError` where it is not known."""
    value: float | None = getattr(arm, axis)
    if not value:
        raise InputError(f"the {axis.replace('_', ' ')} of {arm.name} are not known; choose another axis")
    return value


def make_ladder(results: ResultSet, baseline: Sequence[ReportArm], axis: Compute, datasets: Sequence[str]) -> Rungs:
    """Raises `InputError` with fewer than two budgets, or as `refuse_gaps`."""
    refuse_gaps([(compute_of(arm, axis), arm.name) for arm in baseline])
    rungs = [(compute_of(arm, axis), mean_score(results, arm, datasets)) for arm in baseline]
    if len({compute for compute, _ in rungs}) < max(2, len(rungs)):
        raise InputError("a ladder needs two budgets of the baseline or more, each once")
    return sorted(rungs, key=lambda rung: rung[0])


def refuse_gaps(rungs: Sequence[tuple[float, str]]) -> None:
    """Raises `InputError` for neighbouring budgets, given with the names of their arms, that are too far apart."""
    for (less, lower), (more, upper) in itertools.pairwise(sorted(rungs)):
        if more > 1.01 * MOST_APART * less:
            raise InputError(
                f"{lower} and {upper} are a factor of {more / less:.3g} apart, and a straight line between them would "
                f"mislead; give the baseline budgets between them, each at most {MOST_APART} times the one below"
            )


def read_off(logs: np.ndarray, scores: np.ndarray, score: float) -> tuple[float, Literal["", "above", "below"]]:
    """The log of the least compute at which a rising line reaches a score, or the end that it lies beyond."""
    if score > scores[-1]:
        return float(logs[-1]), "above"
    if score < scores[0]:
        return float(logs[0]), "below"
    at = int(np.searchsorted(scores, score))  # scores[at - 1] < score <= scores[at]
    if at == 0:
        return float(logs[0]), ""
    part = (score - scores[at - 1]) / (scores[at] - scores[at - 1])
    return float(logs[at - 1] + part * (logs[at] - logs[at - 1])), ""


def find_interval(terms: Terms, compute: float, rungs: Rungs) -> tuple[float, float, tuple[Noise, ...]]:
    """The shares between those at which the arm is above the baseline and those at which it is below, by the test of
    all verdicts; and what that accounts for."""
    logs = np.log([spent for spent, _ in rungs])
    places = [np.linspace(*ends, POINTS_BETWEEN, endpoint=False) for ends in itertools.pairwise(logs)]
    inside = np.exp(np.concatenate(places)[1:])
    new = [rungs[0][0], *map(float, inside), rungs[-1][0]]  # exactly: the ladder's ends are on the ladder
    seen = dict[float, Contrast]()
    for _ in range(1 + HALVINGS):
        seen |= {place: contrast(combine((1, terms), (-1, interpolate(rungs, place)))) for place in new}
        grid = sorted(seen)
        new = [math.sqrt(less * more) for less, more in itertools.pairwise(grid) if seen[less].side != seen[more].side]
    sides, noise = [seen[place].side for place in grid], seen[grid[0]].noise
    if "untested" in sides:
        return math.nan, math.nan, noise
    # The baseline's compute is more than where the arm is still above it, and less than where it is below.
    open_places = [place for place, side in zip(grid, sides, strict=True) if side == "within noise"]
    if sides[0] == "below":
        return compute / grid[0], math.inf, noise
    if sides[-1] == "above":
        return 0.0, compute / grid[-1], noise
    if not open_places:  # the scores leap from below to above between two places
        leap = sides.index("below")
        return compute / grid[leap], compute / grid[leap - 1], noise
    low = 0.0 if sides[-1] == "within noise" else compute / max(open_places)
    high = math.inf if sides[0] == "within noise" else compute / min(open_places)
    return low, high, noise


def interpolate(rungs: Rungs, compute: float) -> Terms:
    """The baseline's score at a compute within its ladder, as a weighted sum."""
    (less, lower), (more, upper) = next(pair for pair in itertools.pairwise(rungs) if compute <= pair[1][0])
    part = math.log(compute / less) / math.log(more / less)
    return combine((1 - part, lower), (part, upper))


def show_multiple(found: Equivalent) -> str:
    """`0.73 [0.61, 0.82]`, `0.64 (at most 1.17)`, `above the ladder (at most 0.52)`."""
    ends = show_ends(found)
    return show_point(found) + (f" {ends}" if ends.startswith("[") else f" ({ends})" if ends else "")


def show_point(found: Equivalent) -> str:
    return f"{found.beyond} the ladder" if found.beyond else f"{found.share:.2f}"


def show_ends(found: Equivalent) -> str:
    """The interval: `[0.61, 0.82]`, `at most 0.52`, `at least 0.61`, `no bound`; nothing without a test."""
    if math.isnan(found.low):
        return ""
    if not found.low:
        return "no bound" if math.isinf(found.high) else f"at most {found.high:.2f}"
    return f"at least {found.low:.2f}" if math.isinf(found.high) else f"[{found.low:.2f}, {found.high:.2f}]"
