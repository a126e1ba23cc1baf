from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from biphase.finetuning.metrics import Metrics, correlation, correlation_products, score_rows, tag_scores
from biphase.tasks.families import KINDS


def score_labels(gold: Any, predicted: Any, num_labels: int) -> Metrics:
    """The scores of single labels by their numbers."""
    rows = [{"gold": str(a), "predicted": str(b), "score": float(a == b)} for a, b in zip(gold, predicted, strict=True)]
    metrics = [*KINDS["sequence_classification"].metrics][: 4 if num_labels == 2 else 3]
    return score_rows(rows, metrics, [str(number) for number in range(num_labels)])


def score_sets(gold: np.ndarray, predicted: np.ndarray) -> Metrics:
    """The scores of sets of labels, each of which is 1 in its column."""
    names = [str(number) for number in range(gold.shape[1])]
    rows = []
    for sides in zip(gold, predicted, strict=True):
        right, found = ([names[number] for number in np.flatnonzero(side)] for side in sides)
        rows.append({"gold": right, "predicted": found, "score": float(right == found), "probabilities": {}})
    return score_rows(rows, KINDS["multi_label_classification"].metrics, names)


def score_numbers(gold: np.ndarray, predicted: np.ndarray) -> Metrics:
    rows = [{"gold": a, "predicted": b} for a, b in zip(gold.tolist(), predicted.tolist(), strict=True)]
    return score_rows(rows, KINDS["regression"].metrics, ())


def test_labels_by_hand() -> None:
    """Label 0 is found once of twice, label 1 never, label 2 once with one too many; label 3 does not occur."""
    scores = score_labels([0, 0, 1, 2], [0, 2, 0, 2], 4)
    assert scores == pytest.approx({"accuracy": 0.5, "macro_f1": (1 / 2 + 0 + 2 / 3) / 3, "mcc": 2 / 80**0.5})


def test_two_labels_as_glue_reports_them() -> None:
    scores = score_labels([1, 1, 1, 0, 0], [1, 0, 0, 0, 1], 2)
    assert scores == pytest.approx({"accuracy": 0.4, "macro_f1": (0.4 + 0.4) / 2, "mcc": -1 / 6, "f1": 0.4})
    assert score_labels([0, 0], [0, 0], 2) == {"accuracy": 1.0, "macro_f1": 1.0, "mcc": 0.0, "f1": 0.0}


@pytest.mark.parametrize("num_labels", [2, 3, 7])
def test_f1_and_mcc_are_those_of_scikit_learn(num_labels: int) -> None:
    rng = np.random.default_rng(num_labels)
    gold, predicted = rng.integers(0, num_labels, 40), rng.integers(0, num_labels, 40)
    scores = score_labels(gold, predicted, num_labels)
    assert scores["macro_f1"] == pytest.approx(f1_score(gold, predicted, average="macro"), abs=1e-12)
    assert scores["mcc"] == pytest.approx(matthews_corrcoef(gold, predicted), abs=1e-12)
    if num_labels == 2:
        assert scores["f1"] == pytest.approx(f1_score(gold, predicted), abs=1e-12)


def test_sets_of_labels_are_scored_as_scikit_learn_scores_them() -> None:
    """One label is nowhere, and counts as 0 in the mean over all."""
    rng = np.random.default_rng(0)
    gold, predicted = (rng.integers(0, 2, (50, 4)) * [1, 1, 1, 0] for _ in range(2))
    predicted[:10] = gold[:10]
    expected = {f"{mean}_f1": f1_score(gold, predicted, average=mean, zero_division=0) for mean in ("micro", "macro")}
    assert score_sets(gold, predicted) == pytest.approx({**expected, "accuracy": accuracy_score(gold, predicted)})
    nothing = np.zeros((2, 3), dtype=int)
    assert score_sets(nothing, nothing) == {"micro_f1": 0, "macro_f1": 0, "accuracy": 1}


def test_correlations_are_those_of_scipy() -> None:
    """With equal numbers among them, and far from zero; 0 where one side does not vary."""
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 6, 60) + 1e6
    predicted = (gold - 1e6) ** 2 + rng.normal(0, 9, 60)
    assert score_numbers(gold, predicted) == pytest.approx(
        {"spearman": stats.spearmanr(gold, predicted).statistic, "pearson": stats.pearsonr(gold, predicted).statistic}
    )
    assert score_numbers(gold, -gold) == pytest.approx({"spearman": -1, "pearson": -1})
    constant = np.full(60, 0.1)
    for sides in ((gold, constant), (constant, gold), (constant * 0, constant * 0)):
        assert score_numbers(*sides) == {"spearman": 0, "pearson": 0}


def test_a_correlation_is_that_of_any_sums_of_products() -> None:
    """Of parts of the examples, whose means are not zero."""
    x, y = np.random.default_rng(0).random((2, 9))
    products_NC, statistic = correlation_products("pearson", x, y)
    assert statistic is correlation
    found = correlation(np.stack([products_NC[:5].sum(axis=0), products_NC[3:].sum(axis=0)]))
    assert found == pytest.approx([np.corrcoef(x[:5], y[:5])[0, 1], np.corrcoef(x[3:], y[3:])[0, 1]])


def test_tags_of_no_entities_are_scored_by_word() -> None:
    """A word without a prediction is wrong, and none of the tags; a tag that is nowhere does not count."""
    rng = np.random.default_rng(0)
    labels = ["ADJ", "NOUN", "VERB", "X"]
    gold, predicted = rng.integers(0, 3, 40), rng.integers(0, 3, 40)
    predicted[[3, 17]] = -1
    tags = [labels[number] if number >= 0 else "" for number in predicted]
    scores = tag_scores([{"gold": [labels[number] for number in gold], "predicted": tags}], labels)
    macro = f1_score(gold, predicted, labels=[0, 1, 2], average="macro")
    assert scores == pytest.approx({"accuracy": accuracy_score(gold, predicted), "macro_f1": macro})
