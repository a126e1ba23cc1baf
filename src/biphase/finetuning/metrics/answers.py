"""Predicted answers to questions on a text → exact match and F1, shares between 0 and 1.

Texts are compared as the official scripts of SQuAD 1.1, SQuAD 2.0 and ReCoRD compare them; the paper compares sets of
tokens instead.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@lru_cache(maxsize=1 << 16)
def normalise(text: str) -> str:
    """Lower case; without ASCII punctuation, then without a, an, the; words set apart by one space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 when the prediction is one of the answers after normalisation; without answers, when nothing is left of it."""
    return float(any(normalise(prediction) == normalise(answer) for answer in answers or ("",)))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the words (with repetitions) that the prediction shares with one of the answers.

    Sharing no word is 0, even where nothing is left of either. Without answers: 1 when nothing is left of the
    prediction.
    """
    if not answers:
        return exact_match(prediction, answers)
    predicted, best = normalise(prediction).split(), 0.0
    for answer in answers:
        gold = normalise(answer).split()
        if not set(predicted).isdisjoint(gold):
            num_shared = (Counter(predicted) & Counter(gold)).total()
            best = max(best, 2 * num_shared / (len(predicted) + len(gold)))
    return best


def counted_answers(gold: Sequence[Sequence[str]], is_version_2: bool | None = None) -> list[Sequence[str]]:
    """The answers to each question that count: in version 2.0 those of which normalisation leaves something.

    That version is meant, unless said otherwise, when a question has no answer.
    """
    if is_version_2 is None:
        is_version_2 = not all(gold)
    return [[answer for answer in answers if normalise(answer)] if is_version_2 else answers for answers in gold]


def answer_scores(
    predictions: Mapping[str, str],
    gold: Mapping[str, Sequence[str]],
    no_answer_scores: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """SQuAD's `exact` and `f1`, by the official script of version 1.1 or 2.0; ReCoRD's is that of 1.1.

    All three go by question id. `gold` holds the texts of all annotators, none for an unanswerable question; the
    prediction "" means no answer. Version 2.0 is meant when a question is unanswerable or `no_answer_scores` are
    given; it passes over answers of which normalisation leaves nothing, and adds `has_answer_…` and `no_answer_…`,
    the two scores over one kind of questions each (where there are any).

    `no_answer_scores` (higher: rather unanswerable; any scale) add `best_exact` and `best_f1`: the scores with "" for
    every question above the threshold that is best on these very questions. As in the script, a threshold may part
    questions of equal scores (in the order of `no_answer_scores`), and a prediction for an unanswerable question
    counts as wrong unless it is "" itself. The predictions are scored as they are for all other scores.
    """
    assert gold and predictions.keys() == gold.keys(), "one prediction for every question"
    has_answer = {id: bool(answers) for id, answers in gold.items()}
    is_version_2 = no_answer_scores is not None or not all(has_answer.values())
    gold = dict(zip(gold, counted_answers([*gold.values()], is_version_2), strict=True))
    exact = {id: exact_match(predictions[id], answers) for id, answers in gold.items()}
    f1 = {id: token_f1(predictions[id], answers) for id, answers in gold.items()}
    scores = {"exact": mean(exact.values()), "f1": mean(f1.values())}
    if is_version_2:
        for name, kind in (("has_answer", True), ("no_answer", False)):
            ids = [id for id in gold if has_answer[id] == kind]
            if ids:
                scores[f"{name}_exact"] = mean(exact[id] for id in ids)
                scores[f"{name}_f1"] = mean(f1[id] for id in ids)
    if no_answer_scores is not None:
        scores["best_exact"] = best_share(exact, predictions, has_answer, no_answer_scores)
        scores["best_f1"] = best_share(f1, predictions, has_answer, no_answer_scores)
    return scores


def best_share(
    scores: Mapping[str, float],
    predictions: Mapping[str, str],
    has_answer: Mapping[str, bool],
    no_answer_scores: Mapping[str, float],
) -> float:
    """The best mean over all thresholds: from "" for every question on, the predictions of the surest are let in."""
    assert no_answer_scores.keys() == scores.keys(), "one no-answer score for every question"
    order = sorted(no_answer_scores, key=lambda id: no_answer_scores[id])
    gains = [scores[id] if has_answer[id] else -float(predictions[id] != "") for id in order]
    num_unanswerable = sum(not answerable for answerable in has_answer.values())
    return float(np.cumsum([num_unanswerable, *gains]).max()) / len(scores)


def paper_answer_f1(
    gold: Sequence[Iterable[int]] | Sequence[np.ndarray], predicted: Sequence[Iterable[int]] | Sequence[np.ndarray]
) -> float:
    """The paper's score of question answering: the mean over questions of the F1 of two sets of token indices.

    `gold` are the tokens of the first answer only (none for an unanswerable question), `predicted` those labelled 1.
    Indices count from the first token of the input, and all of it takes part: question, context and end-of-text. An
    empty set stands for {0}: nothing found where there is nothing is 1, but so is the first token alone. The original
    also counts tokens labelled 1 in the padding, up to the longest input of the batch; here there is no padding, so
    that a model which labels it gets a higher score here, and all others the same.
    """
    assert len(gold) == len(predicted) > 0
    scores = []
    for right, found in zip(map(set, gold), map(set, predicted), strict=True):
        assert 0 not in right, "the first token of an input is never part of an answer"
        right, found = right or {0}, found or {0}
        scores.append(2 * len(right & found) / (len(right) + len(found)))
    return mean(scores)


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
