"""What scores allow to say: intervals, tests and spreads. Arrays in, numbers out; no files, no printing.

Whatever is random takes its generator: the same generator gives the same numbers. Resampling works in blocks of rows,
so that 10,000 resamples of 10,000 examples take about 100 MB. (SciPy's bootstrap gathers every resample of every column
and has no p-value.)

Letters: N pairs (seeds or examples), S seeds, R learning rates, C columns of counts, B resamples.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

SIGNIFICANCE = 0.05
"""The level of every test in this house: a p-value below it, adjusted for the questions asked, is more than noise."""

TAILS = SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2

STABILITY_RATES = (1e-5, 1e-4)
"""Between these fine-tuning rates, both included, the paper measures how much scores depend on rate and seed."""

BLOCK_CELLS = 2_000_000
"""How many cells of the matrix of resamples are in memory at a time."""

ROUNDING = 1e-12
"""A spread below this share of the values' size is the rounding of equal values, not a spread."""


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval; `num` values."""

    mean: float
    half_width: float
    num: int


@dataclass(frozen=True)
class Difference:
    """`a - b`: its estimate, its interval, and the two-sided p-value of "there is none"; nan where data cannot tell."""

    mean: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Spread:
    """A standard deviation and its interval; `num` scores, `num_left_out` cells without one."""

    std: float
    low: float
    high: float
    num: int
    num_left_out: int


def mean_interval(values: ArrayLike, method: Literal["t", "normal"] = "t") -> Interval:
    """The mean of independent values and its 95 % interval: q·s/√n with s over n-1.

    `t`: q is Student's with n-1 degrees of freedom (2.776 for five seeds). `normal`: q is the normal quantile (1.960),
    as in the paper; too narrow for few values. A single value has a half-width of nan: its spread is unknown, not zero.
    """
    values_N = np.asarray(values, dtype=np.float64)
    num = len(values_N)
    if num == 0:
        return Interval(np.nan, np.nan, 0)
    mean = float(values_N.mean())
    if num == 1:
        return Interval(mean, np.nan, 1)
    quantile = stats.t.ppf(TAILS[1], num - 1) if method == "t" else stats.norm.ppf(TAILS[1])
    return Interval(mean, float(quantile * values_N.std(ddof=1) / np.sqrt(num)), num)


def seed_means(samples: Sequence[float], pretraining_seeds: Sequence[int]) -> list[float]:
    """The mean of the samples of each pretraining seed, lowest seed first; the samples themselves where all are of one
    pretraining: what can be repeated independently, and so what an interval is over."""
    if len(set(pretraining_seeds)) < 2:
        return list(samples)
    by_seed: dict[int, list[float]] = {}
    for seed, sample in zip(pretraining_seeds, samples, strict=True):
        by_seed.setdefault(seed, []).append(sample)
    return [float(np.mean(by_seed[seed])) for seed in sorted(by_seed)]


def t_test(mean: float, error: float, degrees: float, size: float) -> Difference:
    """A difference with its standard error against zero, by Student's t with so many degrees of freedom.

    No spread (no more than what rounding makes of values of this `size`, or none that is known) leaves nothing to judge
    by: no interval and no p-value, except that a difference of zero without spread has p = 1.
    """
    if not error > ROUNDING * size:
        is_zero = error >= 0 and abs(mean) <= ROUNDING * size
        return Difference(0.0 if is_zero else mean, np.nan, np.nan, 1.0 if is_zero else np.nan)
    half_width = float(stats.t.ppf(TAILS[1], degrees)) * error
    p_value = float(2 * stats.t.sf(abs(mean) / error, degrees))
    return Difference(mean, mean - half_width, mean + half_width, p_value)


def bootstrap_difference(
    a: ArrayLike, b: ArrayLike, rng: np.random.Generator, num_resamples: int = 10_000
) -> Difference:
    """The mean difference of N paired examples, by drawing examples with replacement.

    The 95 % interval is that of percentiles. The p-value belongs to it: twice the share of resamples on the other side
    of zero (those at zero count), plus one in both counts. So p < 0.05 where the interval leaves zero out, up to the
    last resample. Not for fewer than about 20 examples, where it claims too much.
    """
    a_N, b_N = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    assert len(a_N) == len(b_N) > 0, f"{len(a_N)} and {len(b_N)} values are no pairs"
    differences_N = a_N - b_N
    means_B = resample_sums(differences_N[:, None], rng, num_resamples)[:, 0] / len(differences_N)
    return percentile_difference(float(differences_N.mean()), means_B, len(differences_N))


def bootstrap_statistic(
    counts_a_NSC: np.ndarray,
    counts_b_NSC: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
    num_resamples: int = 10_000,
) -> Difference:
    """As `bootstrap_difference`, for a score that is no mean over examples but a function of counts summed over them.

    Args:
        counts_a_NSC: C counts of each of N sentences under each of S seeds (those of `micro_f1`, for example).
        counts_b_NSC: those of the same N sentences; the number of seeds may differ.
        statistic: sums [..., C] → scores [...]; the score of a side is its mean over seeds.
    """
    num, num_seeds_a, num_counts = counts_a_NSC.shape
    assert counts_b_NSC.shape[0] == num and counts_b_NSC.shape[2] == num_counts
    # One row of weights draws the sentences of both sides: counts of all seeds of a, then of b, are columns of one
    # matrix. Sums come back as [B, seeds of both, C], and a score is made of each seed's sums.
    columns_NC = np.concatenate([counts_a_NSC.reshape(num, -1), counts_b_NSC.reshape(num, -1)], axis=1)

    def difference(sums_BC: np.ndarray) -> np.ndarray:
        sums_BSC = sums_BC.reshape(len(sums_BC), -1, num_counts)
        scores_BS = statistic(sums_BSC)
        return scores_BS[:, :num_seeds_a].mean(axis=1) - scores_BS[:, num_seeds_a:].mean(axis=1)

    seen = float(difference(columns_NC.sum(axis=0, keepdims=True))[0])
    return percentile_difference(seen, difference(resample_sums(columns_NC, rng, num_resamples)), num)


def holm(p_values: ArrayLike) -> np.ndarray:
    """p-values adjusted for having asked all these questions (Holm 1979), in the same order.

    At a threshold t, whoever calls adjusted values below t significant calls anything wrongly with probability below t.
    A nan stays nan and is not counted: it asked nothing.
    """
    p_N = np.asarray(p_values, dtype=np.float64)
    adjusted_N = np.full(len(p_N), np.nan)
    asked = np.flatnonzero(~np.isnan(p_N))
    order = asked[np.argsort(p_N[asked], kind="stable")]
    factors = len(order) - np.arange(len(order))
    adjusted_N[order] = np.minimum(np.maximum.accumulate(p_N[order] * factors), 1)
    return adjusted_N


def is_stability_rate(rate: float) -> bool:
    """Whether a fine-tuning rate lies within `STABILITY_RATES`, up to rounding."""
    low, high = STABILITY_RATES
    return low * (1 - 1e-9) <= rate <= high * (1 + 1e-9)


def rate_spread(scores_RS: ArrayLike, rng: np.random.Generator, num_resamples: int = 10_000) -> Spread:
    """How much a score depends on the fine-tuning's learning rate and seed: the paper's stability (its finding F5).

    The standard deviation (over n-1) of all R·S scores of a model on a task, taken together: every seed at every one of
    the rates given, which in the paper are those from 1e-5 to 1e-4. A nan (diverged or missing) is left out and
    counted: a spread with cells left out flatters.

    The interval is that of percentiles over resampled seeds; the rates stay as they are. With fewer than ten seeds it
    is too narrow. A single seed has none.
    """
    scores_RS = np.asarray(scores_RS, dtype=np.float64)
    assert scores_RS.ndim == 2
    is_there_RS = ~np.isnan(scores_RS)
    num, num_left_out = int(is_there_RS.sum()), int((~is_there_RS).sum())
    if num < 2:
        return Spread(np.nan, np.nan, np.nan, num, num_left_out)
    # A variance is a function of three sums over seeds: how many scores there are, their sum, and their squares' sum.
    # So a resample of seeds is a weighted sum of S rows. Squares are of values around zero: the sums do not cancel.
    values_RS = np.where(is_there_RS, scores_RS - scores_RS[is_there_RS].mean(), 0.0)
    sums_SC = np.stack([is_there_RS.sum(axis=0), values_RS.sum(axis=0), (values_RS**2).sum(axis=0)], axis=1)

    def std(sums_BC: np.ndarray) -> np.ndarray:
        num_B, sum_B, squares_B = sums_BC.T
        variance_B = (squares_B - sum_B**2 / np.maximum(num_B, 1)) / np.maximum(num_B - 1, 1)
        return np.where(num_B > 1, np.sqrt(np.maximum(variance_B, 0)), np.nan)

    seen = float(std(sums_SC.sum(axis=0, keepdims=True))[0])
    low = high = np.nan
    sums_SC = sums_SC[is_there_RS.any(axis=0)]
    if len(sums_SC) > 1:
        low, high = np.nanquantile(std(resample_sums(sums_SC, rng, num_resamples)), TAILS)
    return Spread(seen, float(low), float(high), num, num_left_out)


def resample_sums(columns_NC: np.ndarray, rng: np.random.Generator, num_resamples: int) -> np.ndarray:
    """[B, C] sums of the columns over N rows drawn with replacement: each draw as a row of weights, so no gathering."""
    num = len(columns_NC)
    columns_NC = columns_NC.astype(np.float64)
    # Draw `rows` resamples of N row numbers; shifted by N for each resample, one bincount tells how often each resample
    # drew each row. N = 3, draws (0, 0, 2) and (1, 2, 2): weights (2, 0, 1) and (0, 1, 2).
    made = []
    most = max(BLOCK_CELLS // num, 1)
    for begin in range(0, num_resamples, most):
        rows = min(most, num_resamples - begin)
        drawn_BN = rng.integers(0, num, (rows, num)) + np.arange(rows)[:, None] * num
        weights_BN = np.bincount(drawn_BN.ravel(), minlength=rows * num).reshape(rows, num)
        made.append(weights_BN.astype(np.float64) @ columns_NC)
    return np.concatenate(made)


def percentile_difference(seen: float, samples_B: np.ndarray, num: int) -> Difference:
    """The difference seen in `num` examples, with interval and p-value from its resamples."""
    if num < 2:
        return Difference(seen, np.nan, np.nan, np.nan)
    low, high = np.quantile(samples_B, TAILS)
    num_across = min(int((samples_B <= 0).sum()), int((samples_B >= 0).sum()))
    p_value = min(2 * (1 + num_across) / (1 + len(samples_B)), 1.0)
    return Difference(seen, float(low), float(high), p_value)


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
