"""Gold and predicted labels of samples, or IOB2 tags of words → scores, shares between 0 and 1.

Letters: U units that carry a label (samples or words), S samples or sentences, L labels or tags, E entities.
"""

from collections.abc import Sequence

import numpy as np

from biphase.errors import InputError


def accuracy(gold_U: np.ndarray, predicted_U: np.ndarray) -> float:
    """Share of units whose label is right."""
    assert len(gold_U) == len(predicted_U) > 0
    return float((gold_U == predicted_U).mean())


def label_f1(gold_U: np.ndarray, predicted_U: np.ndarray, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """The F1 of each label against all others [L], and whether it is in gold or predictions at all [L]; if not, 0."""
    assert len(gold_U) == len(predicted_U)
    right_L = np.bincount(gold_U[gold_U == predicted_U], minlength=num_labels)
    seen_L = np.bincount(gold_U, minlength=num_labels) + np.bincount(predicted_U, minlength=num_labels)
    assert len(seen_L) == num_labels
    return 2 * right_L / np.maximum(seen_L, 1), seen_L > 0


def sequence_metrics(gold_S: np.ndarray, predicted_S: np.ndarray, num_labels: int) -> dict[str, float]:
    """`accuracy`; `macro_f1`, the mean F1 of the labels that are in gold or predictions; of two labels also `f1`.

    `f1` is that of label 1, which GLUE reports for QQP (its duplicates) and MRPC beside the accuracy.
    """
    f1_L, is_seen_L = label_f1(gold_S, predicted_S, num_labels)
    scores = {"accuracy": accuracy(gold_S, predicted_S), "macro_f1": float(f1_L[is_seen_L].mean())}
    return {**scores, "f1": float(f1_L[1])} if num_labels == 2 else scores


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
    # The first letter of each label, and its type as a number.
    prefixes, type_names = [], []
    for label in labels:
        prefix, _, type_name = label.partition("-")
        if not (label == "O" or (prefix in ("B", "I") and type_name)):
            raise InputError(f"label '{label}' is not O, B-… or I-…; scores over entities need IOB2 labels")
        prefixes.append(prefix)
        type_names.append(type_name)
    types_L = np.unique(type_names, return_inverse=True)[1]
    prefixes_U, types_U = np.array(prefixes)[tags_U], types_L[tags_U]
    # Where entities begin and end, within their sentences.
    continues_U = np.zeros(len(tags_U), dtype=bool)
    continues_U[1:] = (prefixes_U[1:] == "I") & (prefixes_U[:-1] != "O") & (types_U[1:] == types_U[:-1])
    continues_U[unit_bounds_S1[:-1]] = False
    is_inside_U = prefixes_U != "O"
    firsts_E = np.flatnonzero(is_inside_U & ~continues_U)
    lasts_E = np.flatnonzero(is_inside_U & ~np.append(continues_U[1:], False))
    return (firsts_E * len(tags_U) + lasts_E) * len(labels) + types_U[firsts_E], prefixes_U[firsts_E] == "B"


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
