"""Outputs on validation → a temperature for honest probabilities, or thresholds for better sets of labels.

Letters: N examples, C classes or choices, B bins.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from scipy.special import logsumexp

from biphase.config import Strict
from biphase.finetuning.metrics import macro_f1_of_all, micro_f1


class Calibration(Strict):
    """The way to read a network's outputs. The defaults change nothing."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The divisor of the logits before their softmax, which changes no label. The weights of a kept head already
    include it."""
    thresholds: tuple[float, ...] = ()
    """For sets of classes, the probability above which each class is predicted; () for 0.5 each."""
    on_test: tuple[float, float] | None = None
    """The calibration error on test, or the task's metric for sets of classes: before and after."""


AS_THEY_ARE = Calibration()


def tell_calibration(calibration: Calibration, metric: str) -> str:
    """Write what a calibration changes on test, in words for the task's metric; nothing if that was not measured."""
    if calibration.on_test is None:
        return ""
    before, after = calibration.on_test
    if calibration.thresholds:
        return f"{metric} on test {before:.1%}; with a threshold for each class, by validation, {after:.1%}"
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


def choose_thresholds(probabilities_NC: np.ndarray, gold_NC: np.ndarray, metric: str) -> tuple[float, ...]:
    """Choose for each class its `best_threshold`, those with the largest gain first. A class keeps 0.5 if the task's
    metric would fall: the best F1 of a class that a network has not learned may be that of predicting it for all."""
    columns = zip(probabilities_NC.T.astype(np.float64), gold_NC.T, strict=True)
    thresholds_C, gains_C = np.array([best_threshold(*column) for column in columns]).T
    predicted_NC = probabilities_NC > 0.5
    score = score_sets(predicted_NC, gold_NC, metric)
    for index in np.argsort(-gains_C, kind="stable"):
        with_it_NC = predicted_NC.copy()
        with_it_NC[:, index] = probabilities_NC[:, index] > thresholds_C[index]
        score_with_it = score_sets(with_it_NC, gold_NC, metric)
        if score_with_it >= score:
            predicted_NC, score = with_it_NC, score_with_it
        else:
            thresholds_C[index] = 0.5
    return tuple(thresholds_C.tolist())


def best_threshold(probability_N: np.ndarray, is_gold_N: np.ndarray) -> tuple[float, float]:
    """Find the threshold with the highest F1 of a class, between two probabilities; of equal ones the nearest to 0.5.
    Returns also how much higher that F1 is than at 0.5."""
    # A threshold between the n-th highest probability and the next predicts the class for n examples.
    order = np.argsort(-probability_N, kind="stable")
    high_N = probability_N[order]
    low_N = np.append(high_N[1:], 0.0)
    f1_N = 2 * np.cumsum(is_gold_N[order]) / (np.arange(len(order)) + 1 + is_gold_N.sum())
    f1_N[low_N == high_N] = 0.0  # no threshold separates equal probabilities
    is_half_N = (low_N <= 0.5) & (high_N > 0.5)
    thresholds_N = np.where(is_half_N, 0.5, (low_N + high_N) / 2)
    best = np.flatnonzero(f1_N == f1_N.max())
    nearest = float(thresholds_N[best][np.abs(thresholds_N[best] - 0.5).argmin()])
    return (nearest if f1_N.max() else 0.5), float(f1_N.max() - f1_N[is_half_N].sum())


def score_sets(predicted_NC: np.ndarray, gold_NC: np.ndarray, metric: str) -> float:
    """Score sets of classes by a metric of their kind of tasks."""
    if metric == "accuracy":
        return float((predicted_NC == gold_NC).all(axis=1).mean())
    right_C, seen_2C = (predicted_NC * gold_NC).sum(axis=0), np.stack([predicted_NC.sum(axis=0), gold_NC.sum(axis=0)])
    if metric == "micro_f1":
        return float(micro_f1(np.array([right_C.sum(), *seen_2C.sum(axis=1)])))
    return float(macro_f1_of_all(np.concatenate([right_C, seen_2C.sum(axis=0)])))
