"""Gold and predicted IOB2 tags of words → scores over entities, words and sentences, shares between 0 and 1.

Letters: U words of all sentences, S sentences, L tags, E entities.
"""

from collections.abc import Sequence

import numpy as np

from biphase.errors import InputError
from biphase.finetuning.metrics.classification import accuracy, label_f1


def token_metrics(
    gold_U: np.ndarray, predicted_U: np.ndarray, unit_bounds_S1: np.ndarray, labels: Sequence[str]
) -> dict[str, float]:
    """Scores over entities, accuracy over words, and the paper's score as `paper_f1`."""
    return {
        **entity_scores(gold_U, predicted_U, unit_bounds_S1, labels),
        "accuracy": accuracy(gold_U, predicted_U),
        "paper_f1": sentence_macro_f1(gold_U, predicted_U, unit_bounds_S1, len(labels)),
    }


def entity_scores(
    gold_U: np.ndarray, predicted_U: np.ndarray, unit_bounds_S1: np.ndarray, labels: Sequence[str]
) -> dict[str, float]:
    """`precision`, `recall`, `f1` and `strict_f1` over entities, all types together; without any entity they are 0.

    An entity is right when its type and both its ends are. The two ways of counting differ where tags are broken: an
    I- tag that continues no entity of its type begins one for the first three scores, and belongs to none for
    `strict_f1`. `f1` is what CoNLL's own script, conlleval, and seqeval's default mode compute: published numbers of
    CoNLL-2003 are those, and a model whose tags are read one by one does break them. `strict_f1` is that of seqeval's
    strict mode for IOB2.
    """
    gold_E, is_gold_whole_E = find_entities(gold_U, unit_bounds_S1, labels)
    predicted_E, is_predicted_whole_E = find_entities(predicted_U, unit_bounds_S1, labels)
    precision, recall, f1 = overlap(gold_E, predicted_E)
    strict_f1 = overlap(gold_E[is_gold_whole_E], predicted_E[is_predicted_whole_E])[-1]
    return {"precision": precision, "recall": recall, "f1": f1, "strict_f1": strict_f1}


def find_entities(
    tags_U: np.ndarray, unit_bounds_S1: np.ndarray, labels: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Every entity as one number made of its first word, its last word and its type, and whether it begins with B-.

    Raises `InputError` for a label that is neither O nor B- or I- with a type.
    """
    check_sentences(tags_U, unit_bounds_S1)
    prefixes_L, types_L = split_labels(labels)
    prefixes_U, types_U = prefixes_L[tags_U], types_L[tags_U]
    continues_U = np.zeros(len(tags_U), dtype=bool)
    continues_U[1:] = (prefixes_U[1:] == "I") & (prefixes_U[:-1] != "O") & (types_U[1:] == types_U[:-1])
    continues_U[unit_bounds_S1[:-1]] = False
    is_inside_U = prefixes_U != "O"
    firsts_E = np.flatnonzero(is_inside_U & ~continues_U)
    lasts_E = np.flatnonzero(is_inside_U & ~np.append(continues_U[1:], False))
    return (firsts_E * len(tags_U) + lasts_E) * len(labels) + types_U[firsts_E], prefixes_U[firsts_E] == "B"


def split_labels(labels: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The first letter of each label [L], and its type as a number [L]."""
    parts = [label.partition("-") for label in labels]
    for label, (prefix, _, type_name) in zip(labels, parts, strict=True):
        if not (label == "O" or (prefix in ("B", "I") and type_name)):
            raise InputError(f"label '{label}' is not O, B-… or I-…; scores over entities need IOB2 labels")
    return np.array([prefix for prefix, _, _ in parts]), np.unique([name for *_, name in parts], return_inverse=True)[1]


def overlap(gold_E: np.ndarray, predicted_E: np.ndarray) -> tuple[float, float, float]:
    """Precision, recall and F1 of a set; a score without a denominator is 0."""
    num_right = len(np.intersect1d(gold_E, predicted_E, assume_unique=True))
    num_all = (len(predicted_E), len(gold_E), (len(predicted_E) + len(gold_E)) / 2)
    precision, recall, f1 = (num_right / num if num else 0.0 for num in num_all)
    return precision, recall, f1


def sentence_macro_f1(
    gold_U: np.ndarray, predicted_U: np.ndarray, unit_bounds_S1: np.ndarray, num_labels: int
) -> float:
    """The paper's score of token classification: the mean over sentences of the macro F1 over tags, O included.

    As scikit-learn's `f1_score(average="macro")` of each sentence: a tag counts where it is in gold or predictions.
    """
    check_sentences(gold_U, unit_bounds_S1)
    num_sentences = len(unit_bounds_S1) - 1
    shifts_U = np.repeat(np.arange(num_sentences) * num_labels, np.diff(unit_bounds_S1))
    f1, is_seen = label_f1(gold_U + shifts_U, predicted_U + shifts_U, num_sentences * num_labels)
    f1_SL, is_seen_SL = f1.reshape(-1, num_labels), is_seen.reshape(-1, num_labels)
    return float((f1_SL.sum(axis=1) / is_seen_SL.sum(axis=1)).mean())


def check_sentences(tags_U: np.ndarray, unit_bounds_S1: np.ndarray) -> None:
    assert unit_bounds_S1[0] == 0 and unit_bounds_S1[-1] == len(tags_U), "the bounds do not fit the words"
    assert len(unit_bounds_S1) > 1 and (np.diff(unit_bounds_S1) > 0).all(), "a sentence has no word"
