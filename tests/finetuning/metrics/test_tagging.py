"""fixtures/tagging.json: what conlleval and the paper's code say; seqeval is asked here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seqeval.metrics import f1_score as seqeval_f1
from seqeval.metrics import precision_score, recall_score
from seqeval.scheme import IOB2
from sklearn.metrics import f1_score

from biphase.errors import InputError
from biphase.finetuning.metrics import Metrics, score_rows, tag_scores

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "tagging.json").read_text(encoding="utf-8"))
SETS = ["broken", "uner_en_ewt", "wnut17"]
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

Tags = Sequence[Sequence[str]]


def to_rows(gold: Tags, predicted: Tags) -> list[dict[str, Any]]:
    """Rows of predictions, as they are kept."""
    return [{"gold": [*a], "predicted": [*b]} for a, b in zip(gold, predicted, strict=True)]


def labels_of(gold: Tags, predicted: Tags) -> list[str]:
    """Return O, and the other labels that stand there."""
    return ["O", *sorted({label for tags in (*gold, *predicted) for label in tags} - {"O", ""})]


def entity_scores(gold: Tags, predicted: Tags) -> Metrics:
    return tag_scores(to_rows(gold, predicted), labels_of(gold, predicted))


def paper_score(gold: Tags, predicted: Tags) -> float:
    return score_rows(to_rows(gold, predicted), ("paper_f1",), labels_of(gold, predicted))["paper_f1"]


def read_set(name: str) -> tuple[list[list[str]], list[list[str]]]:
    return tuple([line.split() for line in FIXTURE[name][side]] for side in ("gold", "predicted"))


@pytest.mark.parametrize("name", SETS)
def test_entities_are_those_of_conlleval(name: str) -> None:
    counts = FIXTURE[name]["conlleval"]
    scores = entity_scores(*read_set(name))
    assert scores["precision"] == pytest.approx(counts["num_right"] / counts["num_predicted"], abs=1e-9)
    assert scores["recall"] == pytest.approx(counts["num_right"] / counts["num_gold"], abs=1e-9)
    f1 = 2 * counts["num_right"] / (counts["num_predicted"] + counts["num_gold"])
    assert scores["f1"] == pytest.approx(f1, abs=1e-9)


@pytest.mark.parametrize("name", SETS)
def test_entities_are_those_of_seqeval(name: str) -> None:
    gold, predicted = read_set(name)
    scores = entity_scores(gold, predicted)
    assert scores["precision"] == pytest.approx(precision_score(gold, predicted), abs=1e-9)
    assert scores["recall"] == pytest.approx(recall_score(gold, predicted), abs=1e-9)
    assert scores["f1"] == pytest.approx(seqeval_f1(gold, predicted), abs=1e-9)
    assert scores["strict_f1"] == pytest.approx(seqeval_f1(gold, predicted, mode="strict", scheme=IOB2), abs=1e-9)
    assert scores["strict_f1"] != pytest.approx(scores["f1"], abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_random_tags_as_seqeval(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = [[LABELS[i] for i in rng.integers(0, 5, length)] for length in rng.integers(1, 8, 60)]
    predicted = [[tag if rng.random() < 0.7 else LABELS[rng.integers(5)] for tag in tags] for tags in gold]
    scores = entity_scores(gold, predicted)
    assert scores["f1"] == pytest.approx(seqeval_f1(gold, predicted), abs=1e-12)
    assert scores["strict_f1"] == pytest.approx(seqeval_f1(gold, predicted, mode="strict", scheme=IOB2), abs=1e-12)


def test_entities_by_hand() -> None:
    """Of three entities the first is found, the second is predicted too long, the third with the wrong type."""
    gold = [["B-PER", "I-PER", "O", "B-LOC", "O"], ["B-LOC", "O"]]
    scores = entity_scores(gold, [["B-PER", "I-PER", "O", "B-LOC", "I-LOC"], ["B-PER", "O"]])
    expected = dict.fromkeys(("precision", "recall", "f1", "strict_f1"), 1 / 3) | {"accuracy": 5 / 7}
    assert scores == pytest.approx(expected | {"paper_f1": scores["paper_f1"]})
    scores = entity_scores(gold, [["B-PER", "I-PER", "O", "O", "O"], ["O", "O"]])
    assert [scores[name] for name in ("precision", "recall", "f1", "strict_f1")] == [1.0, 1 / 3, 0.5, 0.5]


@pytest.mark.parametrize(
    ("gold", "predicted", "f1", "strict_f1"),
    [
        ("O O", "O O", 0.0, 0.0),  # no entity anywhere: nothing to be right about
        ("O O", "B-PER O", 0.0, 0.0),
        ("B-PER O", "O O", 0.0, 0.0),
        ("B-PER I-PER", "I-PER I-PER", 1.0, 0.0),  # I- without B- begins an entity, or none
        ("B-PER I-PER", "B-PER I-LOC", 0.0, 0.0),  # the entity ends where the type changes
        ("B-PER B-PER", "B-PER I-PER", 0.0, 0.0),  # two entities are not one
        ("B-PER O B-LOC", "B-PER I-LOC B-LOC", 0.8, 1.0),  # a stray I-LOC is one too many, or nothing
        ("B-PER I-PER", "B-PER I-PER", 1.0, 1.0),
    ],
)
def test_broken_tags(gold: str, predicted: str, f1: float, strict_f1: float) -> None:
    scores = entity_scores([gold.split()], [predicted.split()])
    assert (scores["f1"], scores["strict_f1"]) == (f1, strict_f1)


def test_entities_end_with_their_sentence() -> None:
    scores = entity_scores([["B-PER"], ["I-PER"]], [["B-PER"], ["O"]])
    assert [scores[name] for name in ("precision", "recall", "f1", "strict_f1")] == [1.0, 0.5, 2 / 3, 1.0]


def test_labels_that_name_no_entity() -> None:
    with pytest.raises(InputError, match="'NOUN' is not O"):
        entity_scores([["O", "NOUN"]], [["O", "NOUN"]])


def test_a_sentence_has_words() -> None:
    with pytest.raises(ValueError, match="no word"):
        entity_scores([["O"], []], [["O"], []])


@pytest.mark.parametrize("name", SETS)
def test_paper_f1_is_that_of_the_original(name: str) -> None:
    assert paper_score(*read_set(name)) == pytest.approx(FIXTURE[name]["paper"], abs=1e-9)


def test_paper_f1_by_hand() -> None:
    """Of 21 words one is an entity and missed: F1 of O is 40/41, of the entity 0. The second sentence is all right."""
    gold, predicted = ["B-PER", *["O"] * 20], ["O"] * 21
    score = paper_score([gold, ["O", "B-LOC"]], [predicted, ["O", "B-LOC"]])
    assert score == pytest.approx(((40 / 41 + 0) / 2 + 1) / 2)


def test_paper_f1_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    pairs = [[[LABELS[i] for i in rng.integers(0, 5, length)] for _ in range(2)] for length in rng.integers(1, 12, 50)]
    slow = [f1_score(gold, predicted, average="macro") for gold, predicted in pairs]
    assert paper_score(*zip(*pairs, strict=True)) == pytest.approx(np.mean(slow), abs=1e-12)


def test_all_scores_of_entities() -> None:
    scores = entity_scores([["B-PER", "I-PER", "O"], ["B-LOC"]], [["B-PER", "I-PER", "O"], ["O"]])
    expected = {"precision": 1.0, "recall": 0.5, "f1": 2 / 3, "strict_f1": 2 / 3, "accuracy": 0.75, "paper_f1": 0.5}
    assert scores == pytest.approx(expected)
