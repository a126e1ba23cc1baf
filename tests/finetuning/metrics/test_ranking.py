"""fixtures/ranking.json: what the program trec_eval and the paper's code say."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from biphase.finetuning.metrics import TREC_MEASURES, judge_ranking, paper_ndcg_at_10, ranking_scores

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "ranking.json").read_text(encoding="utf-8"))


def slow_scores(grades: dict[str, int], scores: dict[str, float]) -> dict[str, float]:
    """The slow twin of one query: textbook formulas over the documents in trec_eval's order."""
    order = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
    gains = [max(0, grades.get(document, 0)) for document in order]
    ideal = sorted((max(0, grade) for grade in grades.values()), reverse=True)
    num_relevant = sum(gain > 0 for gain in ideal)
    if not num_relevant:
        return dict.fromkeys(TREC_MEASURES, 0.0)

    def discount(values: list[int]) -> float:
        return sum(value / math.log2(rank + 2) for rank, value in enumerate(values[:10]))

    found = [rank + 1 for rank, gain in enumerate(gains) if gain > 0]
    return {
        "ndcg_at_10": discount(gains) / discount(ideal),
        "map_at_100": sum((n + 1) / rank for n, rank in enumerate(found) if rank <= 100) / num_relevant,
        "recall_at_10": sum(rank <= 10 for rank in found) / num_relevant,
        "recall_at_100": sum(rank <= 100 for rank in found) / num_relevant,
        "mrr_at_10": 1 / found[0] if found and found[0] <= 10 else 0.0,
        "precision_at_10": sum(rank <= 10 for rank in found) / 10,
    }


@pytest.fixture(scope="module")
def scored() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    return ranking_scores(FIXTURE["relevance"], FIXTURE["ranked"])


def test_scores_are_those_of_trec_eval(scored: tuple[dict[str, float], dict[str, dict[str, float]]]) -> None:
    """To the four decimals that it prints. Its reciprocal rank has no cut: those of 0.1 and more are compared."""
    mean, per_query = scored
    for ours, theirs in TREC_MEASURES.items():
        if ours == "map_at_100":  # the official program ran without a cut
            theirs = "map"
        if ours == "recall_at_10":  # it was not asked for that; the slow twin was
            continue
        for query in FIXTURE["relevance"]:
            if ours == "map_at_100" and len(FIXTURE["ranked"].get(query, ())) > 100:
                continue
            official = FIXTURE["trec_eval"][query][theirs]
            if ours == "mrr_at_10" and official < 0.1:
                official = 0.0
            assert per_query[ours][query] == pytest.approx(official, abs=5.1e-5), (ours, query)
        if ours not in ("mrr_at_10", "map_at_100"):
            assert mean[ours] == pytest.approx(FIXTURE["trec_eval"]["all"][theirs], abs=5.1e-5)


def test_scores_are_those_of_the_slow_twin(scored: tuple[dict[str, float], dict[str, dict[str, float]]]) -> None:
    mean, per_query = scored
    slow = {
        query: slow_scores(grades, FIXTURE["ranked"].get(query, {})) for query, grades in FIXTURE["relevance"].items()
    }
    for name in TREC_MEASURES:
        expected = {query: scores[name] for query, scores in slow.items()}
        assert per_query[name] == pytest.approx(expected, abs=1e-9), name
        assert mean[name] == pytest.approx(sum(expected.values()) / len(expected), abs=1e-9)


def test_equal_scores_are_ordered_by_document_from_the_last() -> None:
    for names, rank in ((("d1", "d2", "d10"), 3), (("d9", "d2", "d10"), 1)):
        _, per_query = ranking_scores({"q": {names[0]: 1}}, {"q": dict.fromkeys(names, 0.5)})
        assert per_query["mrr_at_10"]["q"] == 1 / rank


def test_a_judged_query_without_results_counts_as_0() -> None:
    relevance = {"a": {"d1": 1}, "b": {"d1": 1}, "c": {"d1": 1}, "d": {"d1": 0}}
    mean, per_query = ranking_scores(relevance, {"a": {"d1": 1.0}, "b": {}, "d": {"d1": 1.0}, "e": {"d1": 1.0}})
    assert mean == {**dict.fromkeys(mean, 0.25), "precision_at_10": 0.1 / 4, "paper_ndcg_at_10": 1 / 3}
    assert all(list(per_query[name]) == ["a", "b", "c", "d"] for name in TREC_MEASURES)
    assert list(per_query["paper_ndcg_at_10"]) == ["a", "b", "c"]


def test_grades_below_zero_are_not_relevant() -> None:
    """TREC's web tracks have -2 for junk, at which pytrec_eval ends the process."""
    rng = np.random.default_rng(0)
    relevance = {f"q{q}": {f"d{d}": int(rng.integers(-2, 3)) for d in range(12)} for q in range(30)}
    ranked = {query: {f"d{d}": float(rng.random()) for d in range(15)} for query in relevance}
    means, rows = ranking_scores(relevance, ranked)
    for query, grades in relevance.items():
        gains = [max(grades.get(name, 0), 0) for name in sorted(ranked[query], key=ranked[query].__getitem__)[::-1]]
        found, best = (
            sum(g / math.log2(2 + at) for at, g in enumerate(some[:10])) for some in (gains, sorted(gains)[::-1])
        )
        assert rows["ndcg_at_10"][query] == pytest.approx(found / best if best else 0.0)
    clipped = {query: {name: max(grade, 0) for name, grade in grades.items()} for query, grades in relevance.items()}
    assert ranking_scores(clipped, ranked) == (means, rows)


def test_a_row_has_the_ten_best_documents_of_a_query() -> None:
    """And what the query scores by the metric that is asked for."""
    ranked = {"q": {f"d{place:02}": place / 7 for place in range(12)}, "r": {"d00": 1.0}}
    relevance = {"q": {"d10": 1}, "r": {"d00": 1}}
    means, rows = judge_ranking(relevance, ranked, "mrr_at_10")
    assert means == ranking_scores(relevance, ranked)[0]
    first, second = rows
    assert first == {
        "id": "q",
        "predicted": [f"d{place:02}" for place in range(11, 1, -1)],
        "scores": [1.57143, 1.42857, 1.28571, 1.14286, 1.0, 0.85714, 0.71429, 0.57143, 0.42857, 0.28571],
        "score": 0.5,
    }
    assert second == {"id": "r", "predicted": ["d00"], "scores": [1.0], "score": 1.0}


def test_reciprocal_rank_ends_at_the_tenth_place() -> None:
    for rank in (10, 11):
        ranked = {f"d{place}": -float(place) for place in range(1, 20)}
        _, per_query = ranking_scores({"q": {f"d{rank}": 2}}, {"q": ranked})
        assert per_query["mrr_at_10"]["q"] == (0.1 if rank == 10 else 0)


def test_scores_of_numpy_and_not_a_number() -> None:
    mean, _ = ranking_scores({"q": {"d1": np.int64(2)}}, {"q": {"d1": np.float32(0.5), "d2": np.float32(0.25)}})
    assert mean["ndcg_at_10"] == 1
    with pytest.raises(AssertionError, match="not a number"):
        ranking_scores({"q": {"d1": 1}}, {"q": {"d1": math.nan}})
    with pytest.raises(AssertionError, match="no query"):
        ranking_scores({}, {})


def test_paper_ndcg_is_that_of_the_original() -> None:
    scores = paper_ndcg_at_10(FIXTURE["relevance"], FIXTURE["ranked"])
    compared = {query: score for query, score in FIXTURE["paper"].items() if score is not None}
    assert len(compared) > 25
    assert {query: scores[query] for query in compared} == pytest.approx(compared, abs=1e-9)


def test_paper_ndcg_by_hand() -> None:
    """One of two relevant documents is at the tenth place, the other is lost; the grade does not matter."""
    ranked = {f"d{place}": -float(place) for place in range(1, 20)}
    scores = paper_ndcg_at_10({"q": {"d10": 3, "d19": 1}, "r": {"d1": 1}}, {"q": ranked})
    assert scores == pytest.approx({"q": 1 / math.log2(11), "r": 0.0})
    mean, per_query = ranking_scores({"q": {"d10": 3}}, {"q": ranked})
    assert per_query["paper_ndcg_at_10"] == {"q": mean["paper_ndcg_at_10"]} == pytest.approx({"q": 1 / math.log2(11)})


def test_paper_ndcg_shares_gains_among_equal_scores() -> None:
    documents = [f"d{place}" for place in range(8)]
    scores, gains = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5], [0, 1, 0, 0, 0, 1, 0, 0]
    score = paper_ndcg_at_10(
        {"q": dict(zip(documents, gains, strict=True))}, {"q": dict(zip(documents, scores, strict=True))}
    )
    assert score["q"] == pytest.approx(ndcg_score([gains], [scores]), abs=1e-12)
