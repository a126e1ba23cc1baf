from itertools import pairwise

import numpy as np
import pytest
from sklearn.metrics import f1_score

from biphase.finetuning.metrics import accuracy, entity_scores, sentence_macro_f1, sequence_metrics, token_metrics

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def test_accuracy() -> None:
    assert accuracy(np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2])) == 0.75
    assert sequence_metrics(np.array([1]), np.array([0])) == {"accuracy": 0.0}


def test_entities_by_hand() -> None:
    """Of three entities the first is found, the second is predicted too long, the third with the wrong type."""
    gold = [["B-PER", "I-PER", "O", "B-LOC", "O"], ["B-LOC", "O"]]
    predicted = [["B-PER", "I-PER", "O", "B-LOC", "I-LOC"], ["B-PER", "O"]]
    scores = entity_scores(gold, predicted)
    assert scores == pytest.approx({"precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3})
    scores = entity_scores(gold, [["B-PER", "I-PER", "O", "O", "O"], ["O", "O"]])
    assert scores == pytest.approx({"precision": 1.0, "recall": 1 / 3, "f1": 0.5})


@pytest.mark.parametrize(
    ("gold", "predicted", "f1"),
    [
        (["O", "O"], ["O", "O"], 0.0),  # no entity anywhere: nothing to be right about
        (["O", "O"], ["B-PER", "O"], 0.0),
        (["B-PER", "O"], ["O", "O"], 0.0),
        (["B-PER", "I-PER"], ["I-PER", "I-PER"], 0.0),  # I- without B- is no entity
        (["B-PER", "I-PER"], ["B-PER", "I-LOC"], 0.0),  # the entity ends where the type changes
        (["B-PER", "B-PER"], ["B-PER", "I-PER"], 0.0),  # two entities are not one
        (["B-PER", "O", "B-LOC"], ["B-PER", "I-LOC", "B-LOC"], 1.0),  # a stray I-LOC adds nothing
        (["B-PER", "I-PER"], ["B-PER", "I-PER"], 1.0),
    ],
)
def test_broken_tags(gold: list[str], predicted: list[str], f1: float) -> None:
    assert entity_scores([gold], [predicted])["f1"] == f1


def test_entities_end_with_their_sentence() -> None:
    assert entity_scores([["B-PER"], ["I-PER"]], [["B-PER"], ["O"]])["f1"] == 1.0


def test_paper_f1_by_hand() -> None:
    """Of 21 words one is an entity and missed: F1 of O is 40/41, of the entity 0. The second sentence is all right."""
    gold = np.array([1] + [0] * 20 + [0, 3])
    predicted = np.array([0] * 21 + [0, 3])
    bounds = np.array([0, 21, 23])
    assert sentence_macro_f1(gold, predicted, bounds, 5) == pytest.approx(((40 / 41 + 0) / 2 + 1) / 2)


def test_paper_f1_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    bounds = np.concatenate([[0], np.cumsum(rng.integers(1, 12, 50))])
    gold, predicted = rng.integers(0, 5, bounds[-1]), rng.integers(0, 5, bounds[-1])
    slow = [f1_score(gold[a:b], predicted[a:b], average="macro") for a, b in pairwise(bounds)]
    assert sentence_macro_f1(gold, predicted, bounds, 5) == pytest.approx(np.mean(slow), abs=1e-12)


def test_token_metrics() -> None:
    gold, predicted = np.array([1, 2, 0, 3]), np.array([1, 2, 0, 0])
    scores = token_metrics(gold, predicted, np.array([0, 3, 4]), LABELS)
    assert scores == pytest.approx({"precision": 1.0, "recall": 0.5, "f1": 2 / 3, "accuracy": 0.75, "paper_f1": 0.5})
