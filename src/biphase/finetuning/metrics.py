"""Predictions → scores: shares from 0 to 1, correlations from -1. `Measure` in `tasks/families.py` words them.

Predictions are labels of samples, tags of words, answers, or ranked documents. Texts of answers are compared as the
official scripts of SQuAD 1.1, SQuAD 2.0 and ReCoRD do; the paper compares sets of tokens instead.

Letters: U units that carry a label (samples or words), S samples or sentences, L labels or tags, E entities, K the ten
best documents of a query.
"""

import heapq
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from biphase.errors import InputError

Rows = list[dict[str, Any]]
"""The prediction for each example, and its score."""
Metrics = dict[str, float]
"""Scores by name: shares from 0 to 1, correlations from -1."""
Judgement = tuple[Metrics, Rows]


Statistic = Callable[[np.ndarray], np.ndarray]
"""Sums of counts [..., C] → scores [...]."""
Contributions = tuple[np.ndarray, Statistic | None]
"""The contributions of examples to a score: [N] values with the score as their mean, or [N, C] counts and the statistic
that turns their sums into the score."""


ERRORS = ("mae", "rmse")
"""The mean absolute error and the root mean square error of numbers, in the unit of the labels. They are printed beside
the metrics of a task, and are none, because they have no highest value."""


def show_value(metric: str, value: float) -> str:
    """Show a score in percent, or an error in the unit of the labels, with four digits."""
    is_error = metric in ERRORS
    return np.format_float_positional(value, 4, fractional=False, trim="-") if is_error else f"{value:.2%}"


def score_rows(rows: Sequence[Mapping[str, Any]], metrics: Iterable[str], classes: Sequence[str]) -> Metrics:
    """Score rows of predictions by some metrics, each from the contributions of the rows."""
    return {metric: total_score(*contributions(rows, metric, classes)) for metric in metrics}


def total_score(values: np.ndarray, statistic: Statistic | None) -> float:
    """Compute the score from contributions."""
    return float(values.mean() if statistic is None else statistic(values.sum(axis=0)))


def correlation_products(metric: str, gold_N: np.ndarray, predicted_N: np.ndarray) -> Contributions:
    """Compute each example's contribution to a correlation, [N, 6] products. Ranks are over all examples."""
    from scipy.stats import rankdata  # slower to load than anything else in a report

    sides = []
    for numbers_N in (gold_N, predicted_N):
        x_N = rankdata(numbers_N) if metric == "spearman" else np.asarray(numbers_N, dtype=np.float64)
        x_N = x_N - x_N.mean()
        sides.append(x_N / (np.abs(x_N).max() or 1.0))  # sums of squares then lose no digits
    x_N, y_N = sides
    return np.stack([np.ones(len(x_N)), x_N, y_N, x_N**2, y_N**2, x_N * y_N], axis=1), correlation


def correlation(products_C: np.ndarray) -> np.ndarray:
    """Turn [..., 6] sums of 1, x, y, x², y² and xy into Pearson's correlation of x and y [...]; 0 if one does not
    vary."""
    num, x, y, xx, yy, xy = np.moveaxis(products_C, -1, 0)
    variances = np.maximum(num * xx - x**2, 0.0) * np.maximum(num * yy - y**2, 0.0)
    return (num * xy - x * y) / np.sqrt(np.where(variances > 0, variances, np.inf))


def label_counts(metric: str, gold: Sequence[Any], predicted: Sequence[Any], classes: Sequence[str]) -> Contributions:
    """Count each example's contribution to a metric of labels, [N, C]. The macro F1 of sets of labels averages all
    labels, as in scikit-learn; the macro F1 of single labels averages only labels that occur."""
    gold_NL, predicted_NL = one_hot(gold, classes), one_hot(predicted, classes)
    right_NL = gold_NL * predicted_NL
    if metric == "macro_f1":
        counts_NC = np.concatenate([right_NL, predicted_NL + gold_NL], axis=1)
        return counts_NC, macro_f1_of_all if isinstance(gold[0], list) else macro_f1
    if metric == "mcc":
        return np.concatenate([right_NL.sum(axis=1, keepdims=True), predicted_NL, gold_NL], axis=1), matthews
    counted = slice(1, 2) if metric == "f1" else slice(None)  # F1 scores the second class
    counts = [labels_NL[:, counted].sum(axis=1) for labels_NL in (right_NL, predicted_NL, gold_NL)]
    return np.stack(counts, axis=1), micro_f1


def micro_f1(counts_C: np.ndarray) -> np.ndarray:
    """Turn [..., 3] labels or entities found, predicted and in gold into F1 [...]; 0 if there is none at all."""
    shared, predicted, gold = np.moveaxis(counts_C, -1, 0)
    return 2 * shared / np.maximum(predicted + gold, 1)


def macro_f1(counts_C: np.ndarray) -> np.ndarray:
    """Turn [..., 2L] counts into the mean F1 [...] of the labels that are predicted or gold at all. The counts are how
    often each of L labels is right, then how often it is predicted plus how often gold."""
    right_L, seen_L = np.split(counts_C, 2, axis=-1)
    f1_L = 2 * right_L / np.maximum(seen_L, 1)
    return f1_L.sum(axis=-1) / np.maximum((seen_L > 0).sum(axis=-1), 1)


def macro_f1_of_all(counts_C: np.ndarray) -> np.ndarray:
    """Compute `macro_f1` over all labels."""
    right_L, seen_L = np.split(counts_C, 2, axis=-1)
    return (2 * right_L / np.maximum(seen_L, 1)).sum(axis=-1) / right_L.shape[-1]


def share(counts_C: np.ndarray) -> np.ndarray:
    """Turn [..., 2] counts, of right units and of all, into the share that is right [...]."""
    return counts_C[..., 0] / counts_C[..., 1]


def root_mean(sums_C: np.ndarray) -> np.ndarray:
    """Turn [..., 2] sums, of squares and of 1, into the root of the mean square [...]."""
    return np.sqrt(share(sums_C))


def matthews(counts_C: np.ndarray) -> np.ndarray:
    """Turn [..., 1 + 2L] counts into Matthews' correlation of two labels, Gorodkin's R_K of more; 0 if all predictions,
    or all of gold, are one label. The counts are how many are right, how often each of L labels is predicted, and how
    often gold."""
    counts_C = np.asarray(counts_C, dtype=np.float64)
    right, (predicted_L, gold_L) = counts_C[..., 0], np.split(counts_C[..., 1:], 2, axis=-1)
    num = gold_L.sum(axis=-1)
    spreads = [num**2 - (labels_L**2).sum(axis=-1) for labels_L in (predicted_L, gold_L)]
    product = spreads[0] * spreads[1]
    return (right * num - (predicted_L * gold_L).sum(axis=-1)) / np.sqrt(np.where(product > 0, product, np.inf))


STATISTICS: dict[str, Statistic] = {
    statistic.__name__: statistic for statistic in (correlation, macro_f1, macro_f1_of_all, matthews, micro_f1, share)
}
"""Statistics by the names that cells store."""


def tag_scores(rows: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> Metrics:
    """Score tags: accuracy over words, and `macro_f1`, the mean F1 of the tags in gold or predictions. If tags are of
    entities (O comes first), score entities of all types together, and the paper's score as `paper_f1`.

    An entity is right if its type and both ends are; without any entity `precision`, `recall`, `f1` and `strict_f1` are
    0. They differ for broken tags, which a model that predicts tags one by one can make: an I- tag that continues no
    entity of its type begins one in the first three scores, and belongs to none in `strict_f1`. `f1` equals that of
    CoNLL's script conlleval and of seqeval's default mode, as published for CoNLL-2003; `strict_f1` equals that of
    seqeval's strict mode for IOB2.
    """
    if classes[0] != "O":
        return score_rows(rows, ("accuracy", "macro_f1"), classes)
    shared, predicted, gold = count_tags(rows, "f1", classes)[0].sum(axis=0).tolist()
    scores = {"precision": shared / max(predicted, 1), "recall": shared / max(gold, 1)}
    return scores | score_rows(rows, ("f1", "strict_f1", "accuracy", "paper_f1"), classes)


def count_entities(
    gold_U: np.ndarray, predicted_U: np.ndarray, bounds_S1: np.ndarray, labels: Sequence[str], is_strict: bool = False
) -> np.ndarray:
    """Count the entities of each sentence, [S, 3]: right in type and both ends, predicted, and in gold. `is_strict`
    counts only those that begin with B-."""
    # `find_entities` encodes each entity as one number: its first word, its last word and its type. Right entities are
    # the numbers that both sides share. Division by the number of last words and types gives the first word, and so the
    # sentence.
    sides = []
    for tags_U in (gold_U, predicted_U):
        entities_E, is_whole_E = find_entities(tags_U, bounds_S1, labels)
        sides.append(entities_E[is_whole_E] if is_strict else entities_E)
    gold_E, predicted_E = sides
    entities_per_word = bounds_S1[-1] * len(labels)
    columns = []
    for entities_E in (np.intersect1d(gold_E, predicted_E), predicted_E, gold_E):
        sentences_E = np.searchsorted(bounds_S1, entities_E // entities_per_word, side="right") - 1
        columns.append(np.bincount(sentences_E, minlength=len(bounds_S1) - 1))
    return np.stack(columns, axis=1)


def find_entities(tags_U: np.ndarray, bounds_S1: np.ndarray, labels: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Find entities: for each, one number that encodes its first word, its last word and its type, and whether it
    begins with B-. Raises `InputError` for a label that is neither O nor B- or I- with a type."""
    for label in labels:
        if not re.fullmatch("O|[BI]-.+", label, re.DOTALL):
            raise InputError(f"label '{label}' is not O, B-… or I-…; scores over entities need IOB2 labels")
    # The first letter of each label, and its type as a number.
    prefixes_L, type_names_L = np.array([label[:1] for label in labels]), [label[2:] for label in labels]
    types_L = np.unique(type_names_L, return_inverse=True)[1]
    prefixes_U, types_U = prefixes_L[tags_U], types_L[tags_U]
    # The first and last words of entities, within their sentences.
    continues_U = np.zeros(len(tags_U), dtype=bool)
    continues_U[1:] = (prefixes_U[1:] == "I") & (prefixes_U[:-1] != "O") & (types_U[1:] == types_U[:-1])
    continues_U[bounds_S1[:-1]] = False
    is_inside_U = prefixes_U != "O"
    firsts_E = np.flatnonzero(is_inside_U & ~continues_U)
    lasts_E = np.flatnonzero(is_inside_U & ~np.append(continues_U[1:], False))
    return (firsts_E * len(tags_U) + lasts_E) * len(labels) + types_U[firsts_E], prefixes_U[firsts_E] == "B"


def count_labels(gold_U: np.ndarray, predicted_U: np.ndarray, bounds_S1: np.ndarray, num_labels: int) -> np.ndarray:
    """Count how often each label is right in each sentence, then how often predicted plus how often gold, [S, 2L]. A
    word without a prediction has the index L."""
    columns_LL = np.eye(num_labels + 1, num_labels, dtype=np.int64)  # the last row, for no prediction, is empty
    gold_UL, predicted_UL = columns_LL[gold_U], columns_LL[predicted_U]
    return np.add.reduceat(np.concatenate([gold_UL * predicted_UL, gold_UL + predicted_UL], axis=1), bounds_S1[:-1])


PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@lru_cache(maxsize=1 << 16)
def normalise(text: str) -> str:
    """Lower the case, remove ASCII punctuation, then a, an, the, and put one space between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the prediction equals an answer after normalisation or, without answers, if normalisation leaves
    nothing of it."""
    return float(any(normalise(prediction) == normalise(answer) for answer in answers or ("",)))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the best F1 over the words (with repetitions) that the prediction shares with an answer.

    Without a common word it is 0, even if normalisation leaves nothing of either. Without answers it is 1 if
    normalisation leaves nothing of the prediction.
    """
    if not answers:
        return exact_match(prediction, answers)
    predicted, best = normalise(prediction).split(), 0.0
    for answer in answers:
        gold = normalise(answer).split()
        if not set(predicted).isdisjoint(gold):
            best = max(best, 2 * (Counter(predicted) & Counter(gold)).total() / (len(predicted) + len(gold)))
    return best


def counted_answers(gold: Sequence[Sequence[str]], is_version_2: bool | None = None) -> list[Sequence[str]]:
    """List the answers to each question that count: in version 2.0 those that normalisation does not empty. By default,
    the version is 2.0 if a question has no answer."""
    if is_version_2 is None:
        is_version_2 = not all(gold)
    return [[answer for answer in answers if normalise(answer)] if is_version_2 else answers for answers in gold]


def answer_scores(
    predictions: Sequence[str], gold: Sequence[Sequence[str]], no_answer_scores: Sequence[float] | None = None
) -> Metrics:
    """Compute SQuAD's `exact` and `f1`, by the official script of version 1.1 or 2.0; ReCoRD uses 1.1.

    `gold` has the texts of all annotators for each question, none for an unanswerable one; the prediction "" means no
    answer. The version is 2.0 if a question is unanswerable or `no_answer_scores` are given. It ignores answers that
    normalisation empties, and adds both scores over answerable questions (`has_answer_…`) and over unanswerable ones
    (`no_answer_…`), if there are any.

    `no_answer_scores` (on any scale; higher for unanswerable) add `best_exact` and `best_f1`: the scores with "" for
    every question above the threshold that is best on these questions. As in the script, a threshold may separate
    questions of equal scores, and a prediction for an unanswerable question is wrong unless it is "". All other scores
    take the predictions as they are.
    """
    has_answer = [bool(answers) for answers in gold]
    is_version_2 = no_answer_scores is not None or not all(has_answer)
    pairs = list(zip(predictions, counted_answers(gold, is_version_2), strict=True))
    values = {"exact": [exact_match(*pair) for pair in pairs], "f1": [token_f1(*pair) for pair in pairs]}
    scores = {metric: sum(per_question) / len(per_question) for metric, per_question in values.items()}
    for name, has in (("has_answer", True), ("no_answer", False)) if is_version_2 else ():
        for metric, per_question in values.items():
            chosen = [value for value, answerable in zip(per_question, has_answer, strict=True) if answerable == has]
            scores |= {f"{name}_{metric}": sum(chosen) / len(chosen)} if chosen else {}
    if no_answer_scores is not None:
        for metric, per_question in values.items():
            scores[f"best_{metric}"] = best_share(per_question, predictions, has_answer, no_answer_scores)
    return scores


def best_share(
    scores: Sequence[float], predictions: Sequence[str], has_answer: Sequence[bool], no_answer_scores: Sequence[float]
) -> float:
    """Return the best mean over all thresholds: start with "" for all questions, and admit the surest predictions."""
    questions = zip(no_answer_scores, scores, predictions, has_answer, strict=True)
    gains = []
    for _, score, prediction, answerable in sorted(questions, key=lambda question: question[0]):
        gains.append(score if answerable else -float(prediction != ""))
    return float(np.cumsum([has_answer.count(False), *gains]).max()) / len(scores)


def paper_answer_f1(gold: Sequence[Iterable[int]], predicted: Sequence[Iterable[int]]) -> float:
    """Compute the paper's score of question answering: the mean over questions of the F1 of two sets of token indices.

    `gold` are the tokens of the first answer only (none for an unanswerable question), `predicted` those labelled 1.
    Indices count from the first token of the input, and the whole input counts: question, context and end-of-text. An
    empty set counts as {0}: finding nothing where there is nothing scores 1, but so does finding the first token alone.
    The original also counts padding tokens labelled 1, up to the longest input of the batch. Here there is no padding,
    so a model that labels padding scores higher here, and all others the same.
    """
    assert len(gold) == len(predicted) > 0
    scores = []
    for right, labelled in zip(map(set, gold), map(set, predicted), strict=True):
        assert 0 not in right, "the first token of an input is never part of an answer"
        right, labelled = right or {0}, labelled or {0}
        scores.append(2 * len(right & labelled) / (len(right) + len(labelled)))
    return sum(scores) / len(scores)


Relevance = Mapping[str, Mapping[str, int]]
"""Grades by query, then by document: 1 and more is relevant."""
Ranked = Mapping[str, Mapping[str, float]]
"""Scores of retrieved documents by query, then by document: higher is better."""

TREC_MEASURES = {
    "ndcg_at_10": "ndcg_cut_10",
    "map_at_100": "map_cut_100",
    "recall_at_10": "recall_10",
    "recall_at_100": "recall_100",
    "mrr_at_10": "recip_rank",
    "precision_at_10": "P_10",
}
"""Our names → trec_eval's."""
BM25 = "bm25_ndcg_at_10"
"""The name of BM25's score among a model's scores."""


def ranking_scores(relevance: Relevance, ranked: Ranked) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Compute the mean of each measure over all judged queries, and `{measure: {query: score}}`.

    A grade is the gain in NDCG; a document without a grade, or with one below 0, is not relevant. `map_at_100` and
    `recall_at_100` need a hundred results in `ranked`. A judged query without results, or without a relevant document,
    counts as 0 (`trec_eval -c`); results of other queries are ignored.

    The measures are trec_eval's: it orders by score, as a 32-bit float, and equal scores by document id, from the last
    in the order of characters to the first. `mrr_at_10` is its reciprocal rank, 0 beyond the tenth place. The function
    adds `paper_ndcg_at_10`, over its own queries.
    """
    import pytrec_eval

    assert relevance, "no query is judged"
    grades_of, results = {}, {}
    for query, grades in relevance.items():
        # A grade below -1 makes pytrec_eval read outside of its memory, which may end the process.
        grades_of[query] = {document: max(int(grade), 0) for document, grade in grades.items()}
        if ranked.get(query):
            results[query] = {document: float(score) for document, score in ranked[query].items()}
    evaluated = pytrec_eval.RelevanceEvaluator(grades_of, {*TREC_MEASURES.values()}).evaluate(results)
    per_query = {}
    for name, trec_name in TREC_MEASURES.items():
        per_query[name] = {query: evaluated.get(query, {}).get(trec_name, 0.0) for query in relevance}
    per_query["mrr_at_10"] = {q: score if score >= 1 / 10 else 0.0 for q, score in per_query["mrr_at_10"].items()}
    per_query["paper_ndcg_at_10"] = paper_ndcg_at_10(relevance, ranked)
    return {name: sum(scores.values()) / max(len(scores), 1) for name, scores in per_query.items()}, per_query


def judge_ranking(relevance: Relevance, ranked: Ranked, metric: str) -> Judgement:
    """Compute the mean of each measure, and a row for each query of `ranked`: its ten best documents and its score."""
    means, per_query = ranking_scores(relevance, ranked)
    rows = []
    for query, documents in ranked.items():
        best = best_documents(documents, 10)
        row = {"id": query, "predicted": [id for id, _ in best], "scores": [round(score, 5) for _, score in best]}
        rows.append(row | {"score": per_query[metric][query]})
    return means, rows


def paper_ndcg_at_10(relevance: Relevance, ranked: Ranked) -> dict[str, float]:
    """Compute the paper's score of retrieval, per query: NDCG whose ideal order is over the ten retrieved documents
    alone.

    So relevant documents that were not retrieved cost nothing, and a single one at the tenth place is worth 0.29. A
    grade of 1 or more is a gain of 1. Documents of equal scores share their mean gain (scikit-learn's `ndcg_score`). If
    such documents compete for the tenth place, the original leaves the choice to its sort; here trec_eval's order
    decides. Queries without a relevant document are left out; if none of the ten is relevant, the score is 0.
    """
    discounts_K = 1 / np.log2(np.arange(10) + 2)
    per_query = {query: 0.0 for query, grades in relevance.items() if any(grade >= 1 for grade in grades.values())}
    for query in per_query:
        grades = relevance[query]
        best = best_documents(ranked.get(query, {}), 10)
        gains_K = np.array([grades.get(document, 0) >= 1 for document, _ in best], dtype=float)
        if gains_K.any():
            _, groups_K, sizes = np.unique([score for _, score in best], return_inverse=True, return_counts=True)
            shared_K = (np.bincount(groups_K, weights=gains_K) / sizes)[groups_K]
            discounts = discounts_K[: len(best)]
            per_query[query] = float((shared_K @ discounts) / (np.sort(gains_K)[::-1] @ discounts))
    return per_query


def best_documents(scores: Mapping[str, float], num: int) -> list[tuple[str, float]]:
    """Find the `num` documents with the highest scores, best first; of equal scores, the last id in order first."""
    assert not any(map(math.isnan, scores.values())), "a score is not a number"
    return heapq.nlargest(num, scores.items(), key=lambda pair: (pair[1], pair[0]))


# Stored rows of predictions → their contributions to a score


def contributions(rows: Sequence[Mapping[str, Any]], metric: str, classes: Sequence[str]) -> Contributions:
    """Compute the contribution of each row to a metric that may choose a rate (`Kind.metrics`), to the paper's score of
    tags, or to an error of numbers."""
    if "score" not in rows[0] and is_sentence(rows[0]):
        return count_tags(rows, metric, classes)
    gold = [row.get("gold") for row in rows]
    predicted = [row.get("predicted") for row in rows]
    if metric in ("spearman", "pearson"):
        return correlation_products(metric, np.array(gold, np.float64), np.array(predicted, np.float64))
    if metric in ERRORS:
        errors_N = np.abs(np.array(predicted, np.float64) - np.array(gold, np.float64))
        return (errors_N, None) if metric == "mae" else (np.stack([errors_N**2, np.ones_like(errors_N)], 1), root_mean)
    if metric == "exact":
        answers = counted_answers([row["gold"] for row in rows])
        return np.array([exact_match(row["predicted"], right) for row, right in zip(rows, answers, strict=True)]), None
    if metric in ("micro_f1", "macro_f1", "mcc") or (metric == "f1" and isinstance(gold[0], str)):
        return label_counts(metric, gold, predicted, classes)
    return np.array([float(row["score"]) for row in rows]), None


def one_hot(labels: Sequence[Any], classes: Sequence[str]) -> np.ndarray:
    """Write the label or labels of each example as ones in a row of zeros, [N, L]."""
    indices = {name: index for index, name in enumerate(classes)}
    rows_NL = np.zeros((len(labels), len(classes)), dtype=np.int64)
    for row_L, label in zip(rows_NL, labels, strict=True):
        row_L[[indices[name] for name in (label if isinstance(label, list) else [label])]] = 1
    return rows_NL


def count_tags(rows: Sequence[Mapping[str, Any]], metric: str, classes: Sequence[str]) -> Contributions:
    """Compute the contribution of each sentence to a metric of tags. Words that were cut off have the tag "".

    `paper_f1`, the paper's score of token classification, is the mean over sentences of scikit-learn's
    `f1_score(average="macro")`, O included.
    """
    gold_U, predicted_U, bounds_S1, labels = index_tags(rows, classes)
    if metric == "accuracy":
        right_S = np.add.reduceat((gold_U == predicted_U).astype(np.int64), bounds_S1[:-1])
        return np.stack([right_S, np.diff(bounds_S1)], axis=1), share
    if metric == "macro_f1":
        return count_labels(gold_U, predicted_U, bounds_S1, len(labels)), macro_f1
    if metric == "paper_f1":
        return macro_f1(count_labels(gold_U, predicted_U, bounds_S1, len(labels))), None
    return count_entities(gold_U, predicted_U, bounds_S1, labels, metric == "strict_f1"), micro_f1


def index_tags(
    rows: Iterable[Mapping[str, Any]], classes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Lay the gold and predicted tags of sentences end to end, as indices of the returned labels. An unknown tag
    becomes another label; "" has the index after the last label."""
    gold: list[str] = []
    predicted: list[str] = []
    bounds = [0]
    for row in rows:
        if not row["gold"] or len(row["gold"]) != len(row["predicted"]):
            raise ValueError("a sentence has no word, or not a tag for each")
        gold += row["gold"]
        predicted += row["predicted"]
        bounds.append(len(gold))
    labels = list(dict.fromkeys([*classes, *gold, *filter(None, predicted)]))
    indices = {label: index for index, label in enumerate([*labels, ""])}
    gold_U, predicted_U = (np.array([indices[tag] for tag in tags]) for tags in (gold, predicted))
    return gold_U, predicted_U, np.array(bounds), labels


def is_one_for_all(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether all predictions (for tags, all tags) are the same although the gold labels are not. Numbers are the
    same if they differ by at most a thousandth of the range of gold."""
    if rows and isinstance(rows[0].get("predicted"), float):
        ranges = [float(np.ptp([row[key] for row in rows])) for key in ("predicted", "gold")]
        return 1000 * ranges[0] <= ranges[1] > 0
    predicted, gold = set[str](), set[str]()
    for row in rows:
        predicted |= set(row["predicted"]) if is_sentence(row) else {str(row.get("predicted"))}
        gold |= set(row.get("gold", ())) if is_sentence(row) else {str(row.get("gold"))}
        if len(predicted) > 1:
            return False
    return len(gold) > 1 and predicted != {"None"}


def is_sentence(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is a sentence with a tag for each word. A set of labels is a list too, but has probabilities
    by label."""
    return isinstance(row.get("predicted"), list) and not isinstance(row.get("probabilities"), dict)
