"""Judged and ranked documents of queries → retrieval scores between 0 and 1, in all and per query.

Letters: K the ten best documents of a query.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from biphase.finetuning.metrics import Judgement

Relevance = Mapping[str, Mapping[str, int]]
"""Grades by query, then by document: 1 and more is relevant."""
Ranked = Mapping[str, Mapping[str, float]]
"""Scores of what was found by query, then by document: higher is better."""

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
"""What BM25 scores where a model does, in that model's own scores."""


def ranking_scores(relevance: Relevance, ranked: Ranked) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The mean of each measure over all judged queries, and `{measure: {query: score}}`.

    A grade is the gain of NDCG as it stands; a document without one, or with one below 0, is not relevant. What is not
    in `ranked` was not found, so `map_at_100` and `recall_at_100` need a hundred results. A judged query without
    results, or without a relevant document, counts as 0 (`trec_eval -c`); results of other queries are ignored.

    The measures are trec_eval's: it orders by score, as a 32-bit float, and equal scores by document id, from the last
    in the order of characters to the first. `mrr_at_10` is its reciprocal rank, 0 beyond the tenth place.
    `paper_ndcg_at_10` is beside them, over its own queries.
    """
    import pytrec_eval

    assert relevance, "no query is judged"
    # A grade below -1 reads outside of pytrec_eval's memory, and may end the process.
    known = {query: {name: max(int(grade), 0) for name, grade in grades.items()} for query, grades in relevance.items()}
    evaluator = pytrec_eval.RelevanceEvaluator(
        known,
        {"ndcg_cut.10", "map_cut.100", "recall.10,100", "recip_rank", "P.10"},
    )
    evaluated = evaluator.evaluate(
        {
            query: {document: float(score) for document, score in documents.items()}
            for query, documents in ranked.items()
            if query in relevance and documents
        }
    )
    per_query = {
        ours: {query: evaluated.get(query, {}).get(theirs, 0.0) for query in relevance}
        for ours, theirs in TREC_MEASURES.items()
    }
    per_query["mrr_at_10"] = {q: score if score >= 1 / 10 else 0.0 for q, score in per_query["mrr_at_10"].items()}
    per_query["paper_ndcg_at_10"] = paper_ndcg_at_10(relevance, ranked)
    return {name: sum(scores.values()) / max(len(scores), 1) for name, scores in per_query.items()}, per_query


def judge_ranking(relevance: Relevance, ranked: Ranked, metric: str) -> Judgement:
    """The mean of each measure, and a row of predictions for each query of `ranked`: its ten best documents, and what
    it scores by one of them."""
    means, per_query = ranking_scores(relevance, ranked)

    def rows() -> Iterator[dict[str, Any]]:
        for query, documents in ranked.items():
            best = best_documents(documents, 10)
            found = {"predicted": [id for id, _ in best], "scores": [round(score, 5) for _, score in best]}
            yield {"id": query, **found, "score": per_query[metric][query]}

    return means, rows()


def paper_ndcg_at_10(relevance: Relevance, ranked: Ranked) -> dict[str, float]:
    """The paper's score of retrieval, per query: NDCG whose ideal order is that of the ten retrieved documents.

    So relevant documents that were not retrieved cost nothing, and one at the tenth place alone is 0.29. A grade of 1
    or more is a gain of 1. Documents of equal scores share their mean gain (scikit-learn's `ndcg_score`); which of them
    are among the ten is left to the sort in the original, and is trec_eval's choice here. Queries without any relevant
    document are left out; where none of the ten is relevant, the score is 0.
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
    """The `num` documents with the highest scores, best first; of equal scores, the last id in order first."""
    values = np.fromiter(scores.values(), dtype=np.float64, count=len(scores))
    assert not np.isnan(values).any(), "a score is not a number"
    floor = np.partition(values, -num)[-num] if len(values) > num else -np.inf
    names = list(scores)
    best = [(names[place], float(values[place])) for place in np.flatnonzero(values >= floor)]
    return sorted(best, key=lambda pair: (pair[1], pair[0]), reverse=True)[:num]
