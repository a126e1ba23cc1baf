"""What scores allow to say: intervals, tests and spreads. Arrays in, numbers out; no files, no printing.

Whatever is random takes its generator: the same generator gives the same numbers. Resampling works in parts, so that
10,000 resamples of 10,000 examples take about 100 MB.

Letters: N pairs (seeds or examples), S seeds, R learning rates, C columns of counts, B resamples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

PART_CELLS = 2_000_000
"""Of the matrix of resamples that is in memory at a time."""

ROUNDING = 1e-12
"""A spread below this share of the values' size is the rounding of equal values, not a spread."""


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval; `num` values."""

    mean: float
    half_width: float
    num: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


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


def mean_interval(values: ArrayLike, method: Literal["t", "normal"] = "t", confidence: float = 0.95) -> Interval:
    """The mean of independent values and its interval: q·s/√n with s over n-1.

    `t`: q is Student's with n-1 degrees of freedom (2.776 for five seeds). `normal`: q is the normal quantile (1.960),
    as in the paper; too narrow for few values. A single value has a half-width of nan: its spread is unknown, not zero.
    """
    values_N = as_vector(values)
    num = len(values_N)
    if num == 0:
        return Interval(np.nan, np.nan, 0)
    mean = float(values_N.mean())
    if num == 1:
        return Interval(mean, np.nan, 1)
    quantile = t_quantile(confidence, num - 1) if method == "t" else stats.norm.ppf((1 + confidence) / 2)
    return Interval(mean, float(quantile * values_N.std(ddof=1) / np.sqrt(num)), num)


def paired_t_test(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> Difference:
    """Student's t over the differences of N pairs, with N-1 degrees of freedom.

    One pair, or differences that are all the same, leave no spread to judge by: no interval and no p-value, except that
    differences that are all zero have p = 1.
    """
    a_N, b_N = as_pairs(a, b)
    num = len(a_N)
    std = float((a_N - b_N).std(ddof=1)) if num > 1 else np.nan
    return t_test(float((a_N - b_N).mean()), std / np.sqrt(num), num - 1, confidence, size_of(a_N, b_N))


def welch_t_test(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> Difference:
    """Means of two independent groups of unequal spread and size (Welch 1947). No spread at all: as `paired_t_test`."""
    a_N, b_N = as_vector(a), as_vector(b)
    assert len(a_N) and len(b_N)
    mean, size = float(a_N.mean() - b_N.mean()), size_of(a_N, b_N)
    if min(len(a_N), len(b_N)) < 2:
        return Difference(mean, np.nan, np.nan, np.nan)
    return welch_from_moments(
        *(a_N.mean(), a_N.std(ddof=1), len(a_N)), *(b_N.mean(), b_N.std(ddof=1), len(b_N)), confidence, size
    )


def welch_from_moments(
    mean_a: float,
    std_a: float,
    num_a: int,
    mean_b: float,
    std_b: float,
    num_b: int,
    confidence: float = 0.95,
    size: float = 0.0,
) -> Difference:
    """`welch_t_test` where only means, standard deviations (over n-1) and numbers are known; each number at least 2.

    `size` is that of the values behind the means, to tell a spread from rounding; by default that of the means.
    """
    assert min(num_a, num_b) > 1
    share_a, share_b = std_a**2 / num_a, std_b**2 / num_b
    error = float(np.sqrt(share_a + share_b))
    degrees = np.nan
    if error > 0:
        weight_a, weight_b = share_a / (share_a + share_b), share_b / (share_a + share_b)
        degrees = 1 / (weight_a**2 / (num_a - 1) + weight_b**2 / (num_b - 1))
    return t_test(float(mean_a - mean_b), error, degrees, confidence, size or max(abs(mean_a), abs(mean_b)))


def t_test(mean: float, error: float, degrees: float, confidence: float, size: float) -> Difference:
    """A difference with its standard error against zero."""
    if not error > ROUNDING * size:
        is_zero = error >= 0 and abs(mean) <= ROUNDING * size
        return Difference(0.0 if is_zero else mean, np.nan, np.nan, 1.0 if is_zero else np.nan)
    half_width = t_quantile(confidence, degrees) * error
    p_value = float(2 * stats.t.sf(abs(mean) / error, degrees))
    return Difference(mean, mean - half_width, mean + half_width, p_value)


def paired_permutation_test(a: ArrayLike, b: ArrayLike, rng: np.random.Generator, num_resamples: int = 10_000) -> float:
    """The two-sided p-value of "each pair could as well be the other way round": sign flips of the N differences.

    The share of sign patterns whose mean is at least as far from zero as the one seen. All 2^N patterns where they are
    at most `num_resamples` (then nothing is random); else that many random ones, the one seen counted with them. Few
    pairs cannot give a small p: at best 2/2^N, 0.0625 for five seeds.
    """
    differences_N = np.subtract(*as_pairs(a, b))
    num = len(differences_N)
    # Sums of the same numbers in another order differ in the last digits; they count as equally far.
    bound = abs(differences_N.sum()) - 1e-9 * np.abs(differences_N).sum()
    if 2**num <= num_resamples:
        patterns_BN = np.arange(2**num)[:, None] >> np.arange(num) & 1
        return float((np.abs((1 - 2 * patterns_BN) @ differences_N) >= bound).mean())
    num_far = 0
    for rows in parts(num_resamples, num):
        signs_BN = 1.0 - 2.0 * rng.integers(0, 2, (rows, num), dtype=np.int8)
        num_far += int((np.abs(signs_BN @ differences_N) >= bound).sum())
    return (1 + num_far) / (1 + num_resamples)


def bootstrap_difference(
    a: ArrayLike, b: ArrayLike, rng: np.random.Generator, num_resamples: int = 10_000, confidence: float = 0.95
) -> Difference:
    """The mean difference of N paired examples, by drawing examples with replacement.

    The interval is that of percentiles. The p-value belongs to it: twice the share of resamples on the other side of
    zero (those at zero count), plus one in both counts. So p < 0.05 where the 95 % interval leaves zero out, up to the
    last resample. Not for fewer than about 20 examples, where it claims too much.
    """
    differences_N = np.subtract(*as_pairs(a, b))
    means_B = resample_sums(differences_N[:, None], rng, num_resamples)[:, 0] / len(differences_N)
    return percentiles(float(differences_N.mean()), means_B, confidence, len(differences_N))


def bootstrap_statistic(
    counts_a_NSC: np.ndarray,
    counts_b_NSC: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
) -> Difference:
    """As `bootstrap_difference`, for a score that is no mean over examples but a function of counts summed over them.

    Args:
        counts_a_NSC: of each of N sentences, under each of S seeds, C counts (what `micro_f1` says, for example).
        counts_b_NSC: of the same N sentences; the number of seeds may differ.
        statistic: sums [..., C] → scores [...]; the score of a side is its mean over seeds.
    """
    num, num_seeds_a, num_counts = counts_a_NSC.shape
    assert counts_b_NSC.shape[0] == num and counts_b_NSC.shape[2] == num_counts
    columns_NC = np.concatenate([counts_a_NSC.reshape(num, -1), counts_b_NSC.reshape(num, -1)], axis=1)

    def difference(sums_BC: np.ndarray) -> np.ndarray:
        sums_BSC = sums_BC.reshape(len(sums_BC), -1, num_counts)
        scores_BS = statistic(sums_BSC)
        return scores_BS[:, :num_seeds_a].mean(axis=1) - scores_BS[:, num_seeds_a:].mean(axis=1)

    seen = float(difference(columns_NC.sum(axis=0, keepdims=True))[0])
    return percentiles(seen, difference(resample_sums(columns_NC, rng, num_resamples)), confidence, num)


def holm(p_values: ArrayLike) -> np.ndarray:
    """p-values adjusted for having asked all these questions (Holm 1979), in the same order.

    At a threshold t, whoever calls adjusted values below t significant calls anything wrongly with probability below t.
    A nan stays nan and is not counted: it asked nothing.
    """
    p_N = as_vector(p_values)
    adjusted_N = np.full(len(p_N), np.nan)
    asked = np.flatnonzero(~np.isnan(p_N))
    order = asked[np.argsort(p_N[asked], kind="stable")]
    factors = len(order) - np.arange(len(order))
    adjusted_N[order] = np.minimum(np.maximum.accumulate(p_N[order] * factors), 1)
    return adjusted_N


def rate_spread(
    scores_RS: ArrayLike, rng: np.random.Generator, num_resamples: int = 10_000, confidence: float = 0.95
) -> Spread:
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
    # Squares of values around zero: the sums below do not cancel.
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
        low, high = np.nanquantile(std(resample_sums(sums_SC, rng, num_resamples)), tails(confidence))
    return Spread(seen, float(low), float(high), num, num_left_out)


def resample_sums(columns_NC: np.ndarray, rng: np.random.Generator, num_resamples: int) -> np.ndarray:
    """[B, C] sums of the columns over N rows drawn with replacement: each draw as a row of weights, so no gathering."""
    num = len(columns_NC)
    columns_NC = columns_NC.astype(np.float64)
    made = []
    for rows in parts(num_resamples, num):
        drawn_BN = rng.integers(0, num, (rows, num)) + np.arange(rows)[:, None] * num
        weights_BN = np.bincount(drawn_BN.ravel(), minlength=rows * num).reshape(rows, num)
        made.append(weights_BN.astype(np.float64) @ columns_NC)
    return np.concatenate(made)


def parts(num_rows: int, row_cells: int) -> Iterator[int]:
    """Numbers of rows that add up to `num_rows`, each small enough to be in memory."""
    most = max(PART_CELLS // row_cells, 1)
    for begin in range(0, num_rows, most):
        yield min(most, num_rows - begin)


def percentiles(seen: float, samples_B: np.ndarray, confidence: float, num: int) -> Difference:
    if num < 2:
        return Difference(seen, np.nan, np.nan, np.nan)
    low, high = np.quantile(samples_B, tails(confidence))
    num_across = min(int((samples_B <= 0).sum()), int((samples_B >= 0).sum()))
    p_value = min(2 * (1 + num_across) / (1 + len(samples_B)), 1.0)
    return Difference(seen, float(low), float(high), p_value)


def tails(confidence: float) -> Sequence[float]:
    return (1 - confidence) / 2, (1 + confidence) / 2


def t_quantile(confidence: float, degrees: float) -> float:
    return float(stats.t.ppf((1 + confidence) / 2, degrees))


def size_of(a_N: np.ndarray, b_N: np.ndarray) -> float:
    return float(max(np.abs(a_N).max(), np.abs(b_N).max()))


def as_vector(values: ArrayLike) -> np.ndarray:
    values_N = np.asarray(values, dtype=np.float64)
    assert values_N.ndim == 1
    return values_N


def as_pairs(a: ArrayLike, b: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    a_N, b_N = as_vector(a), as_vector(b)
    assert len(a_N) == len(b_N) > 0, f"{len(a_N)} and {len(b_N)} values are no pairs"
    return a_N, b_N
