"""Gold and predicted labels or numbers of samples, or tags of words → scores: shares from 0 to 1, correlations from -1.

Letters: U units that carry a label (samples or words), S samples or sentences, L labels or tags, E entities.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from biphase.errors import InputError

Statistic = Callable[[np.ndarray], np.ndarray]
"""Sums of counts [..., C] → scores [...]."""


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
    """`accuracy`; `macro_f1`, the mean F1 of the labels that are in gold or predictions; `mcc`, Matthews' correlation,
    GLUE's score of CoLA; of two labels also `f1`, that of label 1, GLUE's score of QQP and MRPC beside the accuracy.
    """
    gold_SL, predicted_SL = (np.eye(num_labels, dtype=np.int64)[numbers_S] for numbers_S in (gold_S, predicted_S))
    scores = {"accuracy": accuracy(gold_S, predicted_S)}
    for name in ("macro_f1", "mcc", "f1") if num_labels == 2 else ("macro_f1", "mcc"):
        counts_SC, statistic = label_counts(name, gold_SL, predicted_SL)
        scores[name] = float(statistic(counts_SC.sum(axis=0)))
    return scores


def multi_label_metrics(gold_SL: np.ndarray, predicted_SL: np.ndarray) -> dict[str, float]:
    """`micro_f1` over all labels together; `macro_f1`, the mean F1 of all labels; `accuracy`, the share of samples with
    the whole set right."""
    scores = {}
    for name in ("micro_f1", "macro_f1"):
        counts_SC, statistic = label_counts(name, gold_SL, predicted_SL, is_multi=True)
        scores[name] = float(statistic(counts_SC.sum(axis=0)))
    return scores | {"accuracy": float((gold_SL == predicted_SL).all(axis=1).mean())}


def regression_metrics(gold_S: np.ndarray, predicted_S: np.ndarray) -> dict[str, float]:
    """The correlations `spearman` and `pearson`; 0 where all numbers of a side are the same."""
    scores = {}
    for name in ("spearman", "pearson"):
        products_SC, statistic = correlation_products(name, gold_S, predicted_S)
        scores[name] = float(statistic(products_SC.sum(axis=0)))
    return scores


def correlation_products(metric: str, gold_N: np.ndarray, predicted_N: np.ndarray) -> tuple[np.ndarray, Statistic]:
    """What each example contributes to a correlation, [N, 6] products, and what makes the score of their sums.

    Ranks are those among all examples.
    """
    from scipy.stats import rankdata  # it loads longer than all else that a report needs

    sides = []
    for numbers_N in (gold_N, predicted_N):
        x_N = rankdata(numbers_N) if metric == "spearman" else np.asarray(numbers_N, dtype=np.float64)
        x_N = x_N - x_N.mean()
        sides.append(x_N / (np.abs(x_N).max() or 1.0))  # so that sums of squares lose nothing
    x_N, y_N = sides
    return np.stack([np.ones(len(x_N)), x_N, y_N, x_N**2, y_N**2, x_N * y_N], axis=1), correlation


def correlation(products_C: np.ndarray) -> np.ndarray:
    """[..., 6] sums of 1, x, y, x², y² and xy → Pearson's correlation of x and y [...]; 0 where one does not vary."""
    num, x, y, xx, yy, xy = np.moveaxis(products_C, -1, 0)
    variances = np.maximum(num * xx - x**2, 0.0) * np.maximum(num * yy - y**2, 0.0)
    return (num * xy - x * y) / np.sqrt(np.where(variances > 0, variances, np.inf))


def label_counts(
    metric: str, gold_NL: np.ndarray, predicted_NL: np.ndarray, is_multi: bool = False
) -> tuple[np.ndarray, Statistic]:
    """What each example contributes to a metric, [N, C] counts, and what makes the score of their sums.

    Labels are 1 in their columns, elsewhere 0. The macro F1 of sets of labels (`is_multi`) is over all labels, as
    scikit-learn has it; of single ones over those that occur.
    """
    right_NL = gold_NL * predicted_NL
    if metric == "macro_f1":
        statistic = partial(macro_f1, of_all=True) if is_multi else macro_f1
        return np.concatenate([right_NL, predicted_NL + gold_NL], axis=1), statistic
    if metric == "micro_f1":
        return np.stack([each.sum(axis=1) for each in (right_NL, predicted_NL, gold_NL)], axis=1), micro_f1
    if metric == "mcc":
        return np.concatenate([right_NL.sum(axis=1, keepdims=True), predicted_NL, gold_NL], axis=1), matthews
    assert metric == "f1", metric
    return np.stack([right_NL[:, 1], predicted_NL[:, 1], gold_NL[:, 1]], axis=1), micro_f1


def micro_f1(counts_C: np.ndarray) -> np.ndarray:
    """[..., 3] labels or entities found, predicted and in gold → F1 [...]; 0 where there is none at all."""
    found, predicted, gold = np.moveaxis(counts_C, -1, 0)
    return 2 * found / np.maximum(predicted + gold, 1)


def macro_f1(counts_C: np.ndarray, of_all: bool = False) -> np.ndarray:
    """[..., 2L] how often each of L labels is right, then how often it is predicted plus how often gold → F1 [...].

    It is the mean over the labels that are predicted or gold at all, or `of_all`.
    """
    right_L, seen_L = np.split(counts_C, 2, axis=-1)
    f1_L = 2 * right_L / np.maximum(seen_L, 1)
    return f1_L.sum(axis=-1) / np.maximum(((seen_L > 0) | of_all).sum(axis=-1), 1)


def matthews(counts_C: np.ndarray) -> np.ndarray:
    """[..., 1 + 2L] how many are right, how often each of L labels is predicted, how often gold → Matthews' correlation
    of two labels, Gorodkin's R_K of more; 0 where all predictions, or all of gold, are one label."""
    counts_C = np.asarray(counts_C, dtype=np.float64)
    right, (predicted_L, gold_L) = counts_C[..., 0], np.split(counts_C[..., 1:], 2, axis=-1)
    num = gold_L.sum(axis=-1)
    spreads = [num**2 - (labels_L**2).sum(axis=-1) for labels_L in (predicted_L, gold_L)]
    product = spreads[0] * spreads[1]
    return (right * num - (predicted_L * gold_L).sum(axis=-1)) / np.sqrt(np.where(product > 0, product, np.inf))


def token_metrics(
    gold_U: np.ndarray, predicted_U: np.ndarray, unit_bounds_S1: np.ndarray, labels: Sequence[str]
) -> dict[str, float]:
    """Accuracy over words, and `macro_f1`, the mean F1 of the tags that are in gold or predictions; where tags are of
    entities (O comes first), scores over those, and the paper's score as `paper_f1`. A word without a prediction is -1.
    """
    scores = {"accuracy": accuracy(gold_U, predicted_U)}
    if labels[0] != "O":
        known_U = np.where(predicted_U < 0, len(labels), predicted_U)
        f1_L, is_seen_L = (each[:-1] for each in label_f1(gold_U, known_U, len(labels) + 1))
        return scores | {"macro_f1": float(f1_L[is_seen_L].mean())}
    return {
        **entity_scores(gold_U, predicted_U, unit_bounds_S1, labels),
        **scores,
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
