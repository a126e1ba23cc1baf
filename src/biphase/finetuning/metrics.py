"""Gold labels and predictions → scores between 0 and 1. Pure functions; the paper's own definitions are named `paper_`.

Letters: U units that carry a label (samples or words), S samples, L labels.
"""

from collections.abc import Sequence

import numpy as np


def accuracy(gold_U: np.ndarray, predicted_U: np.ndarray) -> float:
    """Share of units whose label is right."""
    return float((gold_U == predicted_U).mean())


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 over entities, all types together: right are those with the right type and both ends.

    seqeval's strict mode for IOB2: an I- tag that continues no entity of its type starts none. A score without a
    denominator (no entity at all) is 0.
    """
    from seqeval.metrics.v1 import precision_recall_fscore_support  # brings scikit-learn: 2 s that others need not wait
    from seqeval.scheme import IOB2

    precision, recall, f1, _ = precision_recall_fscore_support(
        [list(tags) for tags in gold],
        [list(tags) for tags in predicted],
        average="micro",
        scheme=IOB2,
        zero_division=0,
    )
    return {"precision": float(precision), "recall": float(recall), "f1": float(f1)}


def sentence_macro_f1(
    gold_U: np.ndarray, predicted_U: np.ndarray, unit_bounds_S1: np.ndarray, num_labels: int
) -> float:
    """The paper's score of token classification: the mean over sentences of the macro F1 over tags, O included.

    As scikit-learn's `f1_score(average="macro")` of each sentence: a tag counts where it is in gold or predictions.
    """
    num_sentences = len(unit_bounds_S1) - 1
    sentences_U = np.repeat(np.arange(num_sentences), np.diff(unit_bounds_S1))

    def count(labels: np.ndarray, sentences: np.ndarray) -> np.ndarray:
        counts = np.bincount(sentences * num_labels + labels, minlength=num_sentences * num_labels)
        return counts.reshape(num_sentences, num_labels)

    is_right = gold_U == predicted_U
    right_SL = count(gold_U[is_right], sentences_U[is_right])
    seen_SL = count(gold_U, sentences_U) + count(predicted_U, sentences_U)
    f1_SL = 2 * right_SL / np.maximum(seen_SL, 1)
    return float((f1_SL.sum(axis=1) / (seen_SL > 0).sum(axis=1)).mean())


def sequence_metrics(gold_U: np.ndarray, predicted_U: np.ndarray) -> dict[str, float]:
    return {"accuracy": accuracy(gold_U, predicted_U)}


def token_metrics(
    gold_U: np.ndarray, predicted_U: np.ndarray, unit_bounds_S1: np.ndarray, labels: Sequence[str]
) -> dict[str, float]:
    """Entity precision, recall and F1, accuracy over words, and the paper's score."""
    inner = unit_bounds_S1[1:-1]
    names = np.array(labels, dtype=object)
    gold = [names[part].tolist() for part in np.split(gold_U, inner)]
    predicted = [names[part].tolist() for part in np.split(predicted_U, inner)]
    return {
        **entity_scores(gold, predicted),
        "accuracy": accuracy(gold_U, predicted_U),
        "paper_f1": sentence_macro_f1(gold_U, predicted_U, unit_bounds_S1, len(labels)),
    }
