"""Mean scores over fine-tuning seeds → a difference with its interval and test, and what such a test allows to say.

The only place that decides whether one score is above another: `--compare`, the marks of tables, claims and the demo
word differently what `contrast` measures and `judge_difference` says.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from biphase.report.statistics import SIGNIFICANCE, Difference, t_test


class SeedScores(Protocol):
    """Scores of one model, one for each fine-tuning seed; or their mean and spread alone, as published."""

    @property
    def mean(self) -> float: ...
    @property
    def std(self) -> float:
        """Over seeds (n-1); nan for a single one."""

    @property
    def num(self) -> int:
        """How many seeds."""

    @property
    def samples(self) -> tuple[float, ...]:
        """The score of each seed; () where only mean and spread are known."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Which seeds these are, in the same order."""


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of mean scores, such as a difference, with what is needed to test it."""

    estimate: float
    error: float
    """The standard error of the estimate; nan where one of the scores has no spread (one seed)."""
    degrees: float
    """The degrees of freedom of the t-distribution."""
    size: float
    """The size of the scores behind it, to tell a spread from rounding."""
    test: Literal["paired t", "Welch", "jackknife t"]
    num: int
    """How many seeds are behind each score, at least."""

    def against(self, bound: float = 0.0) -> Difference:
        """Estimate, 95 % interval, and two-sided p-value of "it equals `bound`"."""
        tested = t_test(self.estimate - bound, self.error, self.degrees, self.size)
        return replace(tested, mean=self.estimate, low=tested.low + bound, high=tested.high + bound)


def contrast(terms: Iterable[tuple[float, SeedScores]]) -> Contrast:
    """Σ weight · mean over the scores of different models.

    Paired by seed (Student's t over the sum of each seed) where the score of each seed is known and all have the same
    seeds. Else means count as independent, from their standard deviations alone (Welch 1947, with degrees of freedom by
    Satterthwaite).
    """
    weights, scores = zip(*terms, strict=True)
    num = min(score.num for score in scores)
    size = max(abs(score.mean) for score in scores)
    estimate = float(np.dot(weights, [score.mean for score in scores]))
    if scores[0].samples and all(score.samples and score.seeds == scores[0].seeds for score in scores):
        sums_S = np.dot(weights, np.array([score.samples for score in scores]))
        error = float(sums_S.std(ddof=1)) / math.sqrt(num) if num > 1 else math.nan
        return Contrast(estimate, error, num - 1, size, "paired t", num)
    if num < 2:
        return Contrast(estimate, math.nan, math.nan, size, "Welch", num)
    # The variance of each weighted mean; Satterthwaite weighs the degrees of freedom of each by its share of the sum.
    variances = [(weight * score.std) ** 2 / score.num for weight, score in zip(weights, scores, strict=True)]
    variance = sum(variances)
    denominator = sum(part**2 / (score.num - 1) for part, score in zip(variances, scores, strict=True))
    degrees = variance**2 / denominator if denominator else math.nan
    return Contrast(estimate, math.sqrt(variance), degrees, size, "Welch", num)


def difference(a: SeedScores, b: SeedScores) -> Contrast:
    """Mean of `a` minus mean of `b`."""
    return contrast([(1.0, a), (-1.0, b)])


def jackknife(statistic: Callable[[np.ndarray], float], num: int, size: float) -> Contrast:
    """A function of `num` seeds, with its standard error from leaving out one at a time (Tukey's pseudo-values)."""
    seeds_S = np.arange(num)
    seen = statistic(seeds_S)
    if num < 2:
        return Contrast(seen, math.nan, math.nan, size, "jackknife t", num)
    values_S = np.array([num * seen - (num - 1) * statistic(np.delete(seeds_S, seed)) for seed in seeds_S])
    return Contrast(seen, float(values_S.std(ddof=1)) / math.sqrt(num), num - 1, size, "jackknife t", num)


def is_significant(p_value: float) -> bool:
    """Whether a p-value, adjusted for all questions asked, is below the level of this house; nan is not."""
    return p_value < SIGNIFICANCE


def judge_difference(
    estimate: float, p_value: float, bound: float = 0.0
) -> Literal["above", "below", "within noise", "untested"]:
    """The rule of every verdict: on which side of `bound` the two-sided test of "it equals the bound" puts an estimate.

    "within noise" never means "equal": look at the interval. "untested": there is no p-value (one seed, no spread).
    """
    if math.isnan(p_value):
        return "untested"
    if not is_significant(p_value):
        return "within noise"
    return "above" if estimate > bound else "below"
