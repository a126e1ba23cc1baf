import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from biphase.finetuning.metrics.classification import accuracy, sequence_metrics


def test_accuracy() -> None:
    assert accuracy(np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2])) == 0.75
    with pytest.raises(AssertionError):
        accuracy(np.array([], dtype=int), np.array([], dtype=int))


def test_sequence_metrics_by_hand() -> None:
    """Label 0 is found once of twice, label 1 never, label 2 once with one too many; label 3 does not occur."""
    scores = sequence_metrics(np.array([0, 0, 1, 2]), np.array([0, 2, 0, 2]), 4)
    assert scores == pytest.approx({"accuracy": 0.5, "macro_f1": (1 / 2 + 0 + 2 / 3) / 3, "mcc": 2 / 80**0.5})


def test_two_labels_as_glue_reports_them() -> None:
    scores = sequence_metrics(np.array([1, 1, 1, 0, 0]), np.array([1, 0, 0, 0, 1]), 2)
    assert scores == pytest.approx({"accuracy": 0.4, "macro_f1": (0.4 + 0.4) / 2, "mcc": -1 / 6, "f1": 0.4})
    scores = sequence_metrics(np.array([0, 0]), np.array([0, 0]), 2)
    assert scores == {"accuracy": 1.0, "macro_f1": 1.0, "mcc": 0.0, "f1": 0.0}


@pytest.mark.parametrize("num_labels", [2, 3, 7])
def test_f1_and_mcc_are_those_of_scikit_learn(num_labels: int) -> None:
    rng = np.random.default_rng(num_labels)
    gold, predicted = rng.integers(0, num_labels, 40), rng.integers(0, num_labels, 40)
    scores = sequence_metrics(gold, predicted, num_labels)
    assert scores["macro_f1"] == pytest.approx(f1_score(gold, predicted, average="macro"), abs=1e-12)
    assert scores["mcc"] == pytest.approx(matthews_corrcoef(gold, predicted), abs=1e-12)
    if num_labels == 2:
        assert scores["f1"] == pytest.approx(f1_score(gold, predicted), abs=1e-12)
