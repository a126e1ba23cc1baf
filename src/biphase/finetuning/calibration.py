"""Outputs on validation → a temperature for honest probabilities, or thresholds for better sets of labels.

Letters: N examples, C classes or choices, B bins.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from scipy.special import logsumexp

from biphase.config import Strict


class Calibration(Strict):
    """The way to read a network's outputs. The defaults change nothing."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The divisor of the logits before their softmax, which changes no label. The weights of a kept head already
    include it."""
    thresholds: tuple[float, ...] = ()
    """For sets of classes, the probability above which each class is predicted; () for 0.5 each."""
    on_test: tuple[float, float] | None = None
    """The calibration error on test, or the macro F1 for sets of classes: before and after."""


AS_THEY_ARE = Calibration()


def tell_calibration(calibration: Calibration) -> str:
    """Write what a calibration changes on test; nothing if that was not measured."""
    if calibration.on_test is None:
        return ""
    before, after = calibration.on_test
    if calibration.thresholds:
        return f"macro F1 on test {before:.1%}; with a threshold for each class, by validation, {after:.1%}"
    if calibration.temperature == 1:
        effect = "temperature scaling does not clearly help on validation, so none is applied"
    else:
        effect = f"with a temperature of {calibration.temperature:.2f}, by validation, {after:.1%}"
    return f"calibration error on test {before:.1%}; {effect}"


NUM_BINS = 15
LEAST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0
SIGNIFICANT_RATIO = 3.841
"""The 95 % quantile of χ² with one degree of freedom, the law of twice a log likelihood ratio if a temperature is
right."""


def calibration_error(rows: Iterable[Mapping[str, Any]]) -> float:
    """Compute the expected calibration error of rows of predictions (Guo et al. 2017, 15 bins of equal width): the mean
    distance between the probability of the predicted label and the accuracy."""
    pairs_N2 = np.array([(row["probability"], row["gold"] == row["predicted"]) for row in rows], dtype=np.float64)
    confidence_N, is_right_N = pairs_N2.T
    bins_N = np.ceil(confidence_N * NUM_BINS).astype(np.int64)  # a bin includes its upper end
    gaps_B = np.bincount(bins_N, weights=is_right_N - confidence_N)
    return float(np.abs(gaps_B).sum() / len(pairs_N2))


def fit_temperature(logits_NC: np.ndarray, gold_N: np.ndarray) -> float:
    """Find the temperature with the lowest negative log-likelihood (Guo et al. 2017).

    It stays 1 unless a likelihood-ratio test rejects 1: otherwise it would follow the noise of these examples. It stays
    1 too if that test does not reject the lowest temperature, as for a network that has learned nothing, and if every
    example is right: the examples then give no temperature. A high one only makes a network less sure. Choices that a
    question lacks are -inf.
    """
    from scipy.optimize import minimize_scalar

    if (logits_NC.argmax(axis=1) == gold_N).all():
        return 1.0
    logits_NC = logits_NC.astype(np.float64)

    def mean_loss(log_temperature: float) -> float:
        scaled_NC = logits_NC / np.exp(log_temperature)
        return float((logsumexp(scaled_NC, axis=1) - scaled_NC[np.arange(len(gold_N)), gold_N]).mean())

    ends = np.log([LEAST_TEMPERATURE, HIGHEST_TEMPERATURE])
    best = minimize_scalar(mean_loss, bounds=ends, method="bounded")
    ratios = [2 * len(gold_N) * (mean_loss(other) - best.fun) for other in (0.0, ends[0])]
    return float(np.exp(best.x)) if min(ratios) > SIGNIFICANT_RATIO else 1.0


def choose_thresholds(probabilities_NC: np.ndarray, gold_NC: np.ndarray) -> tuple[float, ...]:
    """Choose for each class the threshold with the highest F1, between two probabilities; of equal ones the
    nearest to 0.5."""
    thresholds = []
    for probability_N, is_gold_N in zip(probabilities_NC.T.astype(np.float64), gold_NC.T, strict=True):
        # A threshold between the n-th highest probability and the next predicts the class for n examples.
        order = np.argsort(-probability_N, kind="stable")
        high_N = probability_N[order]
        low_N = np.append(high_N[1:], 0.0)
        f1_N = 2 * np.cumsum(is_gold_N[order]) / (np.arange(len(order)) + 1 + is_gold_N.sum())
        f1_N[low_N == high_N] = 0.0  # no threshold separates equal probabilities
        thresholds_N = np.where((low_N <= 0.5) & (high_N > 0.5), 0.5, (low_N + high_N) / 2)
        best = np.flatnonzero(f1_N == f1_N.max())
        nearest = float(thresholds_N[best][np.abs(thresholds_N[best] - 0.5).argmin()])
        thresholds.append(nearest if f1_N.max() else 0.5)
    return tuple(thresholds)
