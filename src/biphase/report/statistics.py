"""Intervals, spreads and corrected p-values. Arrays in, numbers out; no files, no printing.

Whatever is random takes its generator: the same generator gives the same numbers.

Letters: N values, S seeds, R learning rates or repetitions, B resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

SIGNIFICANCE = 0.05
"""The level of every test in this house: a p-value below it, adjusted for the questions asked, is more than noise."""

TAILS = SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2

ROUNDING = 1e-12
"""A spread below this share of the values' size is the rounding of equal values, not a spread."""

STABILITY_RATES = (1e-5, 1e-4)
"""Between these fine-tuning rates, both included, the paper measures how much scores depend on rate and seed."""


@dataclass(frozen=True)
class Interval:
    """A mean, a difference or a standard deviation, and the ends of its 95 % interval; nan where data cannot tell."""

    value: float
    low: float = np.nan
    high: float = np.nan
    p_value: float = np.nan
    """The two-sided one of "there is no difference", where it is one."""
    num: int = 0
    """Number of values behind a mean or a spread."""

    @property
    def half_width(self) -> float:
        return self.high - self.value


def mean_interval(values: ArrayLike, method: Literal["t", "normal"] = "t") -> Interval:
    """Return the mean of independent values and its 95 % interval: q·s/√n with s over n-1.

    `t`: q is Student's with n-1 degrees of freedom (2.776 for five seeds). `normal`: q is the normal quantile (1.960),
    as in the paper; too narrow for few values. A single value has a half-width of nan: its spread is unknown, not zero.
    So have values that are all equal: that a few fell together says nothing of where the next one falls.
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
    """Reduce samples to independent repetitions, which an interval is over: the mean of each pretraining seed's
    samples, lowest seed first; the samples themselves where all are of one pretraining. `samples` has a row for
    each."""
    samples_S = np.asarray(samples, dtype=np.float64)
    if len(set(pretraining_seeds)) < 2:
        return samples_S
    is_of_RS = (np.array(pretraining_seeds) == np.unique(pretraining_seeds)[:, None]).astype(np.float64)
    return np.asarray(is_of_RS / is_of_RS.sum(axis=1, keepdims=True) @ samples_S)


def is_stability_rate(rate: float) -> bool:
    """Tell whether a fine-tuning rate lies within `STABILITY_RATES`, up to rounding."""
    low, high = STABILITY_RATES
    return low * (1 - 1e-9) <= rate <= high * (1 + 1e-9)


def stability_rates(rates: Sequence[float]) -> list[float]:
    """Return the rates among these over which stability is measured; all of them where fewer than two are."""
    inside = [rate for rate in rates if is_stability_rate(rate)]
    return inside if len(inside) > 1 else list(rates)


def rate_spread(scores_RS: ArrayLike, rng: np.random.Generator, num_resamples: int = 10_000) -> Interval:
    """Measure how much a score depends on the fine-tuning's learning rate and seed: the paper's stability (its finding
    F5).

    The standard deviation (over n-1) of all R·S scores of a model on a task, taken together: every seed at every one of
    the rates given, which in the paper are those from 1e-5 to 1e-4. A nan (diverged or missing) is left out: a spread
    with cells left out flatters.

    The interval is that of percentiles over resampled seeds; the rates stay as they are. With fewer than ten seeds it
    is too narrow. A single seed has none.
    """
    scores_RS = np.asarray(scores_RS, dtype=np.float64)
    assert scores_RS.ndim == 2
    scores_RS = scores_RS[:, ~np.isnan(scores_RS).all(axis=0)]  # seeds that have a score
    num, num_seeds = int((~np.isnan(scores_RS)).sum()), scores_RS.shape[1]
    if num < 2:
        return Interval(np.nan, num=num)
    low = high = np.nan
    if num_seeds > 1:
        drawn_BS = rng.integers(0, num_seeds, (num_resamples, num_seeds))
        low, high = np.quantile(np.nanstd(scores_RS[:, drawn_BS], axis=(0, 2), ddof=1), TAILS)
    return Interval(float(np.nanstd(scores_RS, ddof=1)), float(low), float(high), num=num)
