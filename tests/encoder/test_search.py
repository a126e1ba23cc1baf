"""The nearest documents of a query, against those that all scores would give."""

import numpy as np
import pytest
import torch

from biphase.encoder.search import find_nearest, in_pieces
from biphase.finetuning.metrics import best_documents
from biphase.tasks.bm25 import fuse_rankings, fuse_with_words, index_bm25, searched_words


def test_ties_at_the_last_place_are_broken_as_trec_eval_does() -> None:
    """The documents that are kept are the first of all of them in the order of pytrec_eval's rule."""
    rng = np.random.default_rng(0)
    ids = [str(number) for number in rng.permutation(30)]
    names_N = np.argsort(np.argsort(np.array(ids, dtype=object)))
    scores, pieces = torch.from_numpy(rng.integers(0, 4, (50, 30)).astype(np.float32)), torch.eye(30).split(17)
    numbered = [(np.arange(17), pieces[0]), (np.arange(17, 30), pieces[1])]
    nearest = find_nearest(scores, numbered, 4, names_N=names_N)
    for row, hits in zip(scores.tolist(), nearest, strict=True):
        ranked = best_documents(dict(zip(ids, row, strict=True)), 4)
        assert {ids[document] for document, _ in hits} == {id for id, _ in ranked}
        assert [score for _, score in hits] == [score for _, score in ranked]


def test_fused_scores_are_the_mean_of_two_from_0_to_1() -> None:
    """A share of the best of words, a place between worst and best of embeddings; 0 for what a ranking lacks."""
    by_words, by_embeddings = [(4, 8.0), (2, 6.0)], [(2, 0.9), (7, 0.8), (1, 0.7)]
    fused = fuse_rankings(by_words, by_embeddings, lowest=0.0)
    assert [number for number, _ in fused] == [2, 4, 7, 1]
    np.testing.assert_allclose([score for _, score in fused], [0.875, 0.5, 0.25, 0.0], atol=1e-9)
    assert fuse_rankings([], by_embeddings, lowest=0.0)[0] == (2, 0.5) and fuse_rankings([], []) == []
    assert fuse_rankings([(1, 3.0)], [(0, 0.4)]) == [(0, 0.5), (1, 0.5)]  # all alike; the lowest number first


def test_a_fused_score_depends_on_nothing_but_the_query_and_the_document() -> None:
    """Not on the number of hits that are wanted, nor on other queries: against the formula over all documents."""
    pytest.importorskip("bm25s")
    rng = np.random.default_rng(3)
    documents = [" ".join(f"w{word}" for word in rng.zipf(1.3, 12) % 90) for _ in range(700)]
    queries, words = ["w1 w2 w7", "w40 w41", "no word of it"], index_bm25(documents)
    cosines_QN = rng.random((len(queries), len(documents)))
    right_Q = []
    for query, cosines_N in zip(queries, cosines_QN, strict=True):
        tokens = [word for word in query.split() if word in words.vocab_dict]
        by_words_N = words.get_scores(tokens) if tokens else np.zeros(len(documents))
        best, hundredth = cosines_N.max(), np.sort(cosines_N)[-100]
        near_N = np.clip((cosines_N - hundredth) / (best - hundredth), 0, None)
        fused_N = 0.5 * near_N + 0.5 * by_words_N / max(by_words_N.max(), 1e-9)
        order = np.lexsort((-cosines_N, -np.round(fused_N, 9)))
        right_Q.append([(row, fused_N[row]) for row in order])
    for top in (1, 10, 150, 700):
        nearest_Q = [[(row, cosines[row]) for row in np.argsort(-cosines)[: max(top, 100)]] for cosines in cosines_QN]
        for number in range(len(queries)):
            alone = slice(number, number + 1)
            [hits] = fuse_with_words(words, queries[alone], nearest_Q[alone], top, searched_words)
            assert hits == fuse_with_words(words, queries, nearest_Q, top, searched_words)[number]
            scores = [score for _, score in right_Q[number][:top]]
            np.testing.assert_allclose([score for _, score in hits], scores, atol=1e-6)
            fused = dict(right_Q[number])
            np.testing.assert_allclose([fused[row] for row, _ in hits], scores, atol=1e-6)
        zeros = [row for row, score in hits if score == 0]  # of the query without a word, beyond the hundredth
        assert zeros[1:] == [row for row, _ in right_Q[-1] if row in zeros][1:]


def test_only_documents_with_given_numbers_are_found() -> None:
    rows_ND = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    numbers_N = np.arange(1, 50, 3)
    hits_Q = find_nearest(rows_ND[:4], in_pieces(rows_ND, numbers_N), 5)
    for row_D, hits in zip(rows_ND, hits_Q, strict=False):
        scores_N = rows_ND.numpy()[numbers_N] @ row_D.numpy()
        assert [number for number, _ in hits] == numbers_N[np.argsort(-scores_N)[:5]].tolist()
