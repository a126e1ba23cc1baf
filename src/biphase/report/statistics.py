"""Intervals, spreads, tests and corrected p-values: arrays in, numbers out. Random functions take a generator.

Letters: N values, S seeds, R learning rates or repetitions, B resamples.
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

SIGNIFICANCE = 0.05
"""The level of every test: an adjusted p-value below it means more than noise."""

GapUnit = Literal["points", "nats"]
"""The unit of a difference between scores, or between losses."""

TAILS = SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2

SpreadTerm = tuple[float, float]
"""A variance and its degrees of freedom."""

ROUNDING = 1e-12
"""The share of the values' size below which a spread counts as rounding error."""

STABILITY_RATES = (1e-5, 1e-4)
"""The lowest and the highest fine-tuning rate at which the paper measures the stability of scores, both included."""


@dataclass(frozen=True)
class Interval:
    """A mean, a difference or a standard deviation with its interval, of 95 % unless `level` says else; nan if
    unknown."""

    value: float
    low: float = np.nan
    high: float = np.nan
    p_value: float = np.nan
    """The two-sided p-value of the hypothesis that there is no difference."""
    num: int = 0
    """The number of values behind a mean or a spread."""
    level: float = SIGNIFICANCE
    """The probability that the interval misses the true value."""
    unit: GapUnit = "points"

    @property
    def half_width(self) -> float:
        return self.high - self.value


def mean_interval(values: ArrayLike, method: Literal["t", "normal"] = "t") -> Interval:
    """Return the mean of independent values and its 95 % interval, mean ± q·s/√n, with s the standard deviation (over
    n-1).

    `t`: q is Student's quantile with n-1 degrees of freedom (2.776 for five seeds). `normal`: q is the normal quantile
    (1.960), as in the paper; the interval is then too narrow for few values. For a single value, or equal values, the
    half-width is nan: their spread is unknown, not zero.
    """
    values_N = np.asarray(values, dtype=np.float64)
    num = len(values_N)
    if num < 2:
        return Interval(float(values_N[0]) if num else np.nan, num=num)
    mean, spread = float(values_N.mean()), values_N.std(ddof=1)
    if spread <= ROUNDING * np.abs(values_N).max():
        return Interval(mean, num=num)
    quantile = special.stdtrit(num - 1, TAILS[1]) if method == "t" else special.ndtri(TAILS[1])
    half_width = float(quantile * spread / np.sqrt(num))
    return Interval(mean, mean - half_width, mean + half_width, num=num)


def repetitions(samples: ArrayLike, pretraining_seeds: Sequence[int]) -> np.ndarray:
    """Reduce samples (one per row) to independent repetitions: the mean over each pretraining seed's samples, lowest
    seed first. With one pretraining, or one sample of each in this order, return the samples themselves."""
    samples_S, seeds = np.asarray(samples, dtype=np.float64), sorted({*pretraining_seeds})
    if len(seeds) < 2 or seeds == [*pretraining_seeds]:
        return samples_S
    is_of_RS = (np.array(pretraining_seeds) == np.array(seeds)[:, None]).astype(np.float64)
    return np.asarray(is_of_RS / is_of_RS.sum(axis=1, keepdims=True) @ samples_S)


def is_stability_rate(rate: float) -> bool:
    """Tell whether a fine-tuning rate lies within `STABILITY_RATES`, up to rounding errors."""
    low, high = STABILITY_RATES
    return low * (1 - 1e-9) <= rate <= high * (1 + 1e-9)


def stability_rates(rates: Sequence[float]) -> list[float]:
    """Return those of `rates` that are stability rates, or all of them if fewer than two are."""
    inside = [rate for rate in rates if is_stability_rate(rate)]
    return inside if len(inside) > 1 else list(rates)


def rate_spread(tables: Sequence[ArrayLike], rng: np.random.Generator, num_resamples: int = 10_000) -> Interval:
    """Measure how much a score depends on the fine-tuning's learning rate and seed: the paper's stability (finding F5).

    The spread is the standard deviation (over n-1) of all R·S scores of a model on a task, averaged over tasks. It
    leaves out nan (diverged or missing), which can make it too small. Its interval is percentiles over resampled seeds,
    at fixed rates; with fewer than ten seeds it is too narrow, and with one seed there is none.

    `tables`: the scores [R, S] on each task; all have the same seeds.
    """
    scores = [np.asarray(table, dtype=np.float64) for table in tables]
    assert all(scores_RS.ndim == 2 for scores_RS in scores)
    nums = [int((~np.isnan(scores_RS)).sum()) for scores_RS in scores]
    if min(nums) < 2:
        return Interval(np.nan, num=sum(nums))
    is_known_S = np.all([~np.isnan(scores_RS).all(axis=0) for scores_RS in scores], axis=0)
    known, num_seeds, low, high = [scores_RS[:, is_known_S] for scores_RS in scores], is_known_S.sum(), np.nan, np.nan
    if num_seeds > 1:
        drawn_BS = rng.integers(0, num_seeds, (num_resamples, num_seeds))
        spreads_B = np.mean([np.nanstd(known_RS[:, drawn_BS], axis=(0, 2), ddof=1) for known_RS in known], axis=0)
        low, high = np.quantile(spreads_B, TAILS)
    spread = float(np.mean([np.nanstd(scores_RS, ddof=1) for scores_RS in scores]))
    return Interval(spread, float(low), float(high), num=sum(nums))


def t_test(mean: float, error: float, degrees: float, size: float, level: float = SIGNIFICANCE) -> Interval:
    """Test a difference with its standard error against zero, by Student's t; its interval covers with 1 - `level`.

    Without a spread (unknown, or mere rounding of values of this `size`) there is no interval and no p-value, except
    that a difference of zero without spread has p = 1.
    """
    if not error > ROUNDING * size:
        is_zero = error >= 0 and abs(mean) <= ROUNDING * size
        return Interval(mean, p_value=1.0 if is_zero else np.nan, level=level)
    half_width = float(special.stdtrit(degrees, 1 - level / 2)) * error
    p_value = float(2 * special.stdtr(degrees, -abs(mean) / error))
    return Interval(mean, mean - half_width, mean + half_width, p_value, level=level)


def holm(p_values: ArrayLike) -> np.ndarray:
    """Adjust p-values for their number (Holm 1979), in the same order. If there is no true difference, the probability
    that any adjusted value is below t is at most t. A nan stays nan and does not count."""
    p_N = np.asarray(p_values, dtype=np.float64)
    adjusted_N = np.full(len(p_N), np.nan)
    indices = np.flatnonzero(~np.isnan(p_N))
    order = indices[np.argsort(p_N[indices], kind="stable")]
    factors = len(order) - np.arange(len(order))
    adjusted_N[order] = np.minimum(np.maximum.accumulate(p_N[order] * factors), 1)
    return adjusted_N


def holm_levels(p_values: Sequence[float]) -> list[float]:
    """Return the level at which Holm's method tests each hypothesis: 5 % divided by the number of hypotheses that are
    still open then, or that were open when the method stopped before it. So a p-value is below its level if and only if
    its adjusted value (`holm`) is below 5 %. A nan does not count among the others."""
    ranked = sorted(p_value for p_value in p_values if not math.isnan(p_value))
    num = len(ranked)
    stopped = (index for index, p_value in enumerate(ranked) if p_value >= SIGNIFICANCE / (num - index))
    last = next(stopped, num)
    num_closed = [-1 if math.isnan(p_value) else min(last, bisect.bisect_left(ranked, p_value)) for p_value in p_values]
    return [SIGNIFICANCE / (num - closed) for closed in num_closed]


def spend_error(looks: Sequence[int], last: int) -> float:
    """Return the level of the test at the last of several looks at growing data, so that all looks together find a
    difference between equals with probability `SIGNIFICANCE` (`list_levels`). Without any look, that is the level."""
    return [SIGNIFICANCE, *list_levels(looks, last)][-1]


def list_levels(
    looks: Sequence[int], last: int, error: float = SIGNIFICANCE, power: float | None = None
) -> Iterator[float]:
    """Yield the level of the two-sided test at each of several looks at growing data. At these levels, the tests at all
    looks together find a difference between equals with probability α = `error`.

    After n of at most `last` repetitions, the looks have spent α · ln(1 + (e - 1) · n / last): the function of Lan and
    DeMets (1983) that is like Pocock's constant level. One like O'Brien and Fleming's spends nearly nothing on the
    first looks, where Student's t with few degrees of freedom would find nothing. The distribution of the sum over
    repetitions, without sums that an earlier look found, follows by recursion (Armitage, McPherson and Rowe 1969),
    with normal repetitions.

    Args:
        looks: the number of repetitions at each look, growing, up to `last`.
        power: spend α · (n / last)^power instead (Kim and DeMets 1987): the larger, the more is left for the last look.
    """
    sums_G, step = np.linspace(-8, 8, 2001, retstep=True)
    sums_G, step, begin, spent = sums_G * math.sqrt(last), step * math.sqrt(last), 0, 0.0
    density_G = np.zeros(len(sums_G))
    density_G[len(sums_G) // 2] = 1.0  # a probability, until the first look
    for num in looks:
        added_G = np.exp(-(sums_G**2) / (2 * (num - begin))) / math.sqrt(2 * math.pi * (num - begin))
        density_G = np.convolve(density_G, added_G, "same") * (step if begin else 1.0)
        total = error * (math.log1p((math.e - 1) * num / last) if power is None else (num / last) ** power)
        above_G = np.cumsum(density_G[::-1]) * step  # the probability of a sum above each one, from the largest down
        bound = float(np.interp((total - spent) / 2, above_G, sums_G[::-1] - step / 2))
        density_G[np.abs(sums_G) > bound] = 0.0
        begin, spent = num, total
        yield 2 * float(special.ndtr(-bound / math.sqrt(num)))


def is_significant(p_value: float) -> bool:
    """Tell whether an adjusted p-value is below `SIGNIFICANCE`; False for nan."""
    return p_value < SIGNIFICANCE


def add_variances(variances: Sequence[SpreadTerm]) -> SpreadTerm:
    """Add independent variances, and find the degrees of freedom of the sum by Satterthwaite's rule (1946).

    In the upper limit of the degrees, none counts for more than twice the least: otherwise two seeds that are close by
    chance would count as exact beside ten.
    """
    total = sum(value for value, _ in variances)
    if math.isnan(total):
        return math.nan, math.nan
    denominator = sum(value**2 / degrees for value, degrees in variances)
    least = min(degrees for _, degrees in variances)
    most = sum(min(degrees, 2 * least) for _, degrees in variances)
    return total, min(total**2 / denominator, most) if denominator else math.nan


def add_overlapping(rows: Iterable[tuple[float, np.ndarray, Sequence[int]]]) -> SpreadTerm:
    """Return the variance of Σ weight · mean over rows of repetitions that share some of their seeds, and its degrees
    of freedom.

    Each mean's deviations are scaled so that their squares add up to its variance, and summed by seed before squaring,
    so the covariances of shared seeds are in (a cluster-robust variance). Degrees of freedom are Satterthwaite's for
    such a sum with independent rows (Bell and McCaffrey 2002). If all rows have the same seeds, this is the variance of
    their sum over repetitions, divided by their number, with one degree less than repetitions.

    Args:
        rows: weight, the value of each seed (`repetitions`), and these seeds in any order, also repeated.
    """
    rows = [*rows]
    seeds_R = sorted({seed for _, _, seeds in rows for seed in seeds})
    sums_R, covariance_RR = np.zeros(len(seeds_R)), np.zeros((len(seeds_R), len(seeds_R)))
    for weight, values, seeds in rows:
        scale, is_in_R = weight / math.sqrt(len(values) * (len(values) - 1)), np.isin(seeds_R, [*seeds])
        sums_R[is_in_R] += scale * (values - values.mean())
        covariance_RR += scale**2 * (np.diag(is_in_R) - np.outer(is_in_R, is_in_R) / len(values))
    return float(sums_R @ sums_R), float(np.trace(covariance_RR) ** 2 / (covariance_RR**2).sum())


def interaction(values_RN: np.ndarray) -> float:
    """Return the mean square of a table's residuals after subtracting the means of rows and columns; 0 with a single
    row or column."""
    num_rows, num_columns = values_RN.shape
    if min(num_rows, num_columns) < 2:
        return 0.0
    # Around the mean: squares of the residuals = all squares - squares of row means - squares of column means.
    centred_RN = values_RN - values_RN.mean()
    rows, columns = centred_RN.mean(axis=1), centred_RN.mean(axis=0)
    squares = (centred_RN**2).sum() - num_columns * (rows**2).sum() - num_rows * (columns**2).sum()
    return max(float(squares), 0.0) / ((num_rows - 1) * (num_columns - 1))


def variance(values: np.ndarray) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else math.nan
