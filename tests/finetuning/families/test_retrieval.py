import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from biphase.encoder.models import Encoder
from biphase.finetuning.encoding import Batch, HashedTokenizer
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.families import pair_ranking, retrieval
from biphase.finetuning.families.retrieval import contrastive_loss, embed_all, no_negatives
from biphase.finetuning.heads import build_network
from biphase.tasks.examples import load_examples
from biphase.tasks.sources import find_source
from biphase.tasks.splits import Collection, own_documents

from ..conftest import make_cell, predict_split, with_pairs_of_roberta

Splits = dict[str, Any]


@pytest.fixture(scope="module")
def encoded(encoder: Encoder, data_dirs: dict[str, Path]) -> Splits:
    cell = make_cell("squad_retrieval")
    return load_encoded(find_source(cell.task, data_dirs["squad_retrieval"]), encoder, cell.config)[0]


def make_model(encoder: Encoder) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_network(encoder, make_cell("squad_retrieval"), [])


def test_texts_carry_their_prefixes(encoder: Encoder, encoded: Splits) -> None:
    decode = encoder.tokenizer.pretrained.decode
    queries, documents = encoded["test"].texts, encoded["test"].documents
    assert decode(queries.tokens_T[: queries.bounds_S1[1] - 1]).startswith("Query: ")
    assert decode(documents.tokens_T[: documents.bounds_S1[1] - 1]).startswith("Document: ")


def test_loss_by_hand() -> None:
    queries = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    documents = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    free = torch.zeros(2, 2, dtype=torch.bool)
    cosines = [[1.0, math.sqrt(0.5)], [0.0, math.sqrt(0.5)]]
    terms = [math.log(sum(math.exp(20 * c) for c in row)) - 20 * row[n] for n, row in enumerate(cosines)]
    assert contrastive_loss(queries, documents, free, 20.0).item() == pytest.approx(sum(terms) / 2, rel=1e-5)
    known = torch.tensor([[False, True], [False, False]])
    assert contrastive_loss(queries, documents, known, 20.0).item() == pytest.approx(terms[1] / 2, abs=1e-7)


def test_known_positives_are_no_negatives(encoded: Splits) -> None:
    """Two queries ask for each document: side by side in a batch, neither takes the other's document for wrong."""
    split = encoded["train"]
    queries, documents = split.queries_J[:4], split.documents_J[:4]
    wanted = (documents[:, None] == documents[None, :]) & ~np.eye(4, dtype=bool)
    assert wanted.any()
    assert (no_negatives(split, queries, documents) == wanted).all()


def test_gradient_caching_changes_memory_not_the_gradient(encoder: Encoder, encoded: Splits) -> None:
    results = []
    for budget in (65_536, 30, 1):
        model = make_model(encoder)
        cell = make_cell("squad_retrieval", microbatch_tokens=budget)
        split, items = encoded["train"], np.arange(9)
        loss = split.accumulate_gradients(model, items, split.pack_items(items, cell), cell)
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-4, atol=1e-6)


def test_both_passes_of_gradient_caching_drop_the_same(
    encoder: Encoder, encoded: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As adapters with dropout need: otherwise the gradient would belong to other embeddings than the loss."""
    outputs, compute = list[torch.Tensor](), Batch.compute

    def noted(*given: Any) -> torch.Tensor:
        output = torch.nn.functional.dropout(compute(*given), 0.5)
        outputs.append(output.detach())
        return output

    monkeypatch.setattr(Batch, "compute", noted)
    cell, split, items = make_cell("squad_retrieval", microbatch_tokens=30), encoded["train"], np.arange(9)
    split.accumulate_gradients(make_model(encoder), items, split.pack_items(items, cell), cell)
    half = len(outputs) // 2
    assert half > 1 and (outputs[0] == 0).any()
    assert all(torch.equal(first, second) for first, second in zip(outputs[:half], outputs[half:], strict=True))


def test_search_is_exact(encoder: Encoder, encoded: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "SEARCH_DOCUMENTS", 4)
    monkeypatch.setattr(retrieval, "TOP", 5)
    model, split = make_model(encoder).eval(), encoded["test"]
    for judged_only in (True, False):
        cell = make_cell("squad_retrieval", judged_only=judged_only)
        ranked = predict_split(model, split, cell)
        queries = np.unique(split.queries_J)
        everything = np.arange(split.documents.num_samples)
        documents = np.unique(split.documents_J) if judged_only else everything
        with torch.no_grad():
            scores = embed_all(model, split.texts, queries, cell) @ embed_all(model, split.documents, documents, cell).T
        best = scores.topk(5, dim=1)
        assert list(ranked) == [split.ids[query] for query in queries] and len(ranked) == split.num_examples
        found = [list(scores.values()) for scores in ranked.values()]
        np.testing.assert_allclose(found, best.values.numpy(), rtol=1e-4)
        assert set().union(*ranked.values()) <= {split.document_ids[number] for number in documents}


def test_no_query_finds_itself(encoder: Encoder) -> None:
    """A document is the query by id and text, not by a number alone, and not where it is judged relevant."""
    texts = {"a": "the dog runs", "b": "the cat sees", "c": "a boy sees", "1": "a tree is here", "2": "the house"}
    documents = texts | {"a": "A title  the dog runs", "1": "another", "d": "the paper"}
    judged = {"a": {"d": 1}, "b": {"a": 1}, "c": {"c": 1}, "1": {"d": 1}, "2": {"2": 0, "d": 1}}
    assert own_documents(texts, documents, judged) == {"a", "b", "2"}
    cell = make_cell("squad_retrieval", judged_only=False)
    splits: dict[Any, Any] = {"validation": judged, "test": judged}
    named: dict[Any, Any] = {"validation": tuple(documents), "test": tuple(documents)}
    data = Collection(cell.task, documents, texts, (("a", "d"),), splits, named, 0)
    split = retrieval.encode(data, encoder.tokenizer, cell.config)["test"]
    ranked = predict_split(make_model(encoder).eval(), split, cell)
    left_out = {query: documents.keys() - found.keys() for query, found in ranked.items()}
    assert left_out == {"a": {"a"}, "b": {"b"}, "c": set(), "1": set(), "2": {"2"}}


def test_no_query_is_trained_away_from_itself(encoder: Encoder) -> None:
    """Pairs (a, b) and (c, a): document a is query a, and no negative of it; nor is it drawn for a cross-encoder."""
    texts = {name: f"the dog runs {name * 3}" for name in "abc"}
    judged: dict[Any, Any] = {split: {"c": {"b": 1}} for split in ("validation", "test")}
    named: dict[Any, Any] = dict.fromkeys(("validation", "test"), tuple(texts))
    cell = make_cell("squad_retrieval", judged_only=False)
    data = Collection(cell.task, texts, texts, (("a", "b"), ("c", "a")), judged, named, 0)
    split = retrieval.encode(data, encoder.tokenizer, cell.config)["train"]
    assert no_negatives(split, split.queries_J, split.documents_J).tolist() == [[False, True], [False, False]]
    pytest.importorskip("bm25s")
    train = pair_ranking.encode(data, encoder.tokenizer, cell.config)["train"]
    groups = np.split(np.array(train.documents_S), train.bounds_Q1[1:-1])
    assert [group.tolist() for group in groups] == [["b", "c"], ["a", "b"]]


def test_no_query_is_a_candidate_of_its_own(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    monkeypatch.setattr(pair_ranking, "CANDIDATES", 3)
    texts = {name: f"the dog runs {name * 3}" for name in "abcde"}
    judged = {"a": {"b": 1}, "b": {"a": 1}}
    cell = make_cell("squad_retrieval", judged_only=False)
    queries = {name: texts[name] for name in judged}
    splits: dict[Any, Any] = {"validation": judged, "test": judged}
    named: dict[Any, Any] = {"validation": tuple(texts), "test": tuple(texts)}
    data = Collection(cell.task, texts, queries, (("a", "b"),), splits, named, 0)
    split = pair_ranking.encode(data, encoder.tokenizer, cell.config)["test"]
    found = pair_ranking.order_candidates(split, np.arange(len(split.documents_S), dtype=np.float64))
    assert [len(documents) for documents in found.values()] == [3, 3]
    assert all(query not in documents for query, documents in found.items())


def test_documents_are_indexed_once_for_all_splits(
    encoder: Encoder, data_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once for BM25's own scores."""
    pytest.importorskip("bm25s")
    cell = make_cell("squad_retrieval", judged_only=False, ranking="pairs")
    data: Any = load_examples(find_source(cell.task, data_dirs["squad_retrieval"]), judged_only=False)
    calls, index = list[int](), pair_ranking.index_bm25
    monkeypatch.setattr(pair_ranking, "index_bm25", lambda texts: calls.append(1) or index(texts))
    pair_ranking.encode(data, encoder.tokenizer, cell.config)
    assert len(calls) == 1
    assert pair_ranking.judge_bm25(data, cell).keys() == {"validation", "test"} and len(calls) == 2


def test_pairs_are_those_of_the_tokenizer(encoder: Encoder) -> None:
    """Two separators stand between the texts of RoBERTa's pairs, also of a pair that transformers cuts."""
    tokenizer = with_pairs_of_roberta(copy.deepcopy(encoder.tokenizer.pretrained))
    pairs = [("dog", "the cat"), ("dog cat tree " * 3, "a boy near a house " * 5), ("a", "the cat sees " * 9)]
    texts = pair_ranking.encode_pairs(HashedTokenizer(tokenizer), pairs, 20)
    theirs = [tokenizer(*pair, truncation="longest_first", max_length=20)["input_ids"] for pair in pairs]
    assert theirs[0].count(tokenizer.sep_token_id) == 3 and texts.truncated.tolist() == [1, 2]
    assert [part.tolist() for part in np.split(texts.tokens_T, texts.bounds_S1[1:-1])] == theirs


def test_a_perfect_ranking_scores_one(encoded: Splits) -> None:
    judged, cell = encoded["test"], make_cell("squad_retrieval")
    for shift, score in ((0, 1.0), (1, 0.0)):
        pairs = zip(judged.queries_J, judged.documents_J + shift, strict=True)
        ranked = {judged.ids[query]: {judged.document_ids[document]: 1.0} for query, document in pairs}
        metrics, rows = judged.judge(ranked, cell)
        assert metrics["ndcg_at_10"] == score and {row["score"] for row in rows} == {score}


@pytest.mark.parametrize("judged_only", [True, False])
def test_a_part_of_the_queries_is_searched_for_among_the_same_documents(
    encoder: Encoder, data_dirs: dict[str, Path], judged_only: bool
) -> None:
    """So the score of a query does not depend on which others are drawn."""
    whole, part = {}, {}
    model = make_model(encoder).eval()
    for limit, found in ((None, whole), (7, part)):
        cell = make_cell("squad_retrieval", judged_only=judged_only, max_eval_examples=limit)
        source = find_source(cell.task, data_dirs["squad_retrieval"])
        split = load_encoded(source, encoder, cell.config)[0]["test"]
        ranked = predict_split(model, split, cell)
        assert len(ranked) == split.num_examples
        _, rows = split.judge(ranked, cell)
        for (query, documents), row in zip(ranked.items(), rows, strict=True):
            assert query == row["id"]
            found[query] = set(documents), row["score"]
    assert len(part) == 7 < len(whole)
    for id, (documents, score) in part.items():
        assert documents == whole[id][0] and score == pytest.approx(whole[id][1])
