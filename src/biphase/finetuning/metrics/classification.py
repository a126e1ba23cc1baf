"""Gold and predicted labels → accuracy and F1, shares between 0 and 1.

Letters: U units that carry a label (samples or words), S samples, L labels.
"""

import numpy as np


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
