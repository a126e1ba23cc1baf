"""fixtures/answers.json: what the official scripts of SQuAD and ReCoRD and the paper's code say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphase.finetuning.metrics import (
    Metrics,
    answer_scores,
    exact_match,
    normalise,
    paper_answer_f1,
    token_f1,
)

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "answers.json").read_text(encoding="utf-8"))
SQUAD_2_NAMES = {
    "exact": "exact",
    "f1": "f1",
    "HasAns_exact": "has_answer_exact",
    "HasAns_f1": "has_answer_f1",
    "NoAns_exact": "no_answer_exact",
    "NoAns_f1": "no_answer_f1",
    "best_exact": "best_exact",
    "best_f1": "best_f1",
}


def score_by_id(
    predictions: dict[str, str], gold: dict[str, Any], no_answer_scores: dict[str, float] | None = None
) -> Metrics:
    """The scores of predictions by the ids of their questions, in the order of their no-answer scores."""
    assert predictions.keys() == gold.keys() == (no_answer_scores or gold).keys()
    ids = list(gold if no_answer_scores is None else no_answer_scores)
    surest = None if no_answer_scores is None else [*no_answer_scores.values()]
    return answer_scores([predictions[id] for id in ids], [gold[id] for id in ids], surest)


def test_squad_1_as_the_official_script() -> None:
    part = FIXTURE["squad_1"]
    official = {"exact": part["official"]["exact_match"] / 100, "f1": part["official"]["f1"] / 100}
    assert score_by_id(part["predictions"], part["gold"]) == pytest.approx(official, abs=1e-9)


def test_squad_2_as_the_official_script() -> None:
    part = FIXTURE["squad_2"]
    official = {ours: part["official"][theirs] / 100 for theirs, ours in SQUAD_2_NAMES.items()}
    scores = score_by_id(part["predictions"], part["gold"], part["no_answer_scores"])
    assert scores == pytest.approx(official, abs=1e-9)
    assert scores["best_f1"] > scores["f1"]
    without = {name: score for name, score in scores.items() if not name.startswith("best")}
    assert score_by_id(part["predictions"], part["gold"]) == without


def test_record_as_the_official_script() -> None:
    part = FIXTURE["record"]
    official = {"exact": part["official"]["exact_match"], "f1": part["official"]["f1"]}
    assert score_by_id(part["predictions"], part["gold"]) == pytest.approx(official, abs=1e-9)


@pytest.mark.parametrize(("name", "unit"), [("squad_1", 100), ("squad_2", 1), ("record", 1)])
def test_each_question_as_the_official_scripts(name: str, unit: int) -> None:
    part = FIXTURE[name]
    for id, (exact, f1) in part["per_question"].items():
        answers = part["gold"][id]
        if name == "squad_2":
            answers = [answer for answer in answers if normalise(answer)]
        scores = exact_match(part["predictions"][id], answers), token_f1(part["predictions"][id], answers)
        assert scores == pytest.approx((exact / unit, f1 / unit), abs=1e-9), id


def test_normalisation() -> None:
    assert normalise("  The  U.S.'s\tan-swer, a\u00a0the ") == "uss answer"
    assert normalise("Then another") == "then another"
    assert normalise("“Quoted”") == "“quoted”"


def test_the_best_answer_counts() -> None:
    assert token_f1("the big cat", ("a dog", "cat")) == pytest.approx(2 / 3)
    assert exact_match("the cat", ("a dog", "cat")) == 1
    assert token_f1("to be be be", ("to be or not to be",)) == pytest.approx(2 * 3 / (4 + 6))


def test_no_answer() -> None:
    assert exact_match("", ()) == token_f1("", ()) == 1
    assert exact_match("cat", ()) == token_f1("cat", ()) == 0
    assert exact_match("", ("cat",)) == token_f1("", ("cat",)) == 0


def test_an_answer_of_which_nothing_is_left() -> None:
    """Version 1.1 takes it: an empty prediction is exact and has F1 0. Version 2.0 passes over it."""
    gold = {"a": (".", "cat")}
    assert score_by_id({"a": ""}, gold) == {"exact": 1.0, "f1": 0.0}
    assert score_by_id({"a": "", "b": ""}, {**gold, "b": ()})["has_answer_exact"] == 0


def test_best_threshold_by_hand() -> None:
    """No answer for all is right for b and d; letting in a's text adds one, c's none, b's takes one away."""
    gold = {"a": ("cat",), "b": (), "c": ("dog",), "d": ()}
    predictions = {"a": "cat", "b": "mouse", "c": "cow", "d": ""}
    scores = score_by_id(predictions, gold, {"a": -3.0, "b": 5.0, "c": 0.0, "d": 7.0})
    assert scores == {
        "exact": 0.5,
        "f1": 0.5,
        "has_answer_exact": 0.5,
        "has_answer_f1": 0.5,
        "no_answer_exact": 0.5,
        "no_answer_f1": 0.5,
        "best_exact": 0.75,
        "best_f1": 0.75,
    }
    assert score_by_id(predictions, gold, {"a": 9.0, "b": -5.0, "c": 0.0, "d": 7.0})["best_exact"] == 0.5


def test_only_unanswerable_questions() -> None:
    scores = score_by_id({"a": "", "b": "x"}, {"a": (), "b": ()})
    assert scores == {"exact": 0.5, "f1": 0.5, "no_answer_exact": 0.5, "no_answer_f1": 0.5}


def test_every_question_needs_a_prediction() -> None:
    for predictions, surest in ((["x"], None), (["x", "y"], [0.0])):
        with pytest.raises(ValueError, match=r"^zip\(\)"):
            answer_scores(predictions, [("x",), ("y",)], surest)


def test_paper_f1_is_that_of_the_original() -> None:
    part = FIXTURE["paper"]
    assert paper_answer_f1(part["gold"], part["predicted"]) == pytest.approx(part["official"], abs=1e-9)
    for gold, predicted, score in zip(part["gold"], part["predicted"], part["per_question"], strict=True):
        assert paper_answer_f1([set(gold)], [np.array(predicted, dtype=int)]) == pytest.approx(score, abs=1e-9)


def test_paper_f1_by_hand() -> None:
    assert paper_answer_f1([set(), set(), {4, 5}], [set(), {0, 9}, {5, 6, 7}]) == pytest.approx((1 + 2 / 3 + 2 / 5) / 3)
    with pytest.raises(AssertionError, match="first token"):
        paper_answer_f1([{0, 1}], [{0, 1}])
