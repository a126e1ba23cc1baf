"""The nearest documents of a query, against those that all scores would give."""

import numpy as np
import torch

from biphase.embedding.index import fuse_rankings
from biphase.encoder.search import find_nearest, in_pieces
from biphase.finetuning.metrics import best_documents


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
    fused = fuse_rankings(by_words, by_embeddings, 10, lowest=0.0)
    assert [number for number, _ in fused] == [2, 4, 7, 1]
    np.testing.assert_allclose([score for _, score in fused], [0.875, 0.5, 0.25, 0.0], atol=1e-9)
    assert fuse_rankings([], by_embeddings, 1, lowest=0.0) == [(2, 0.5)] and fuse_rankings([], [], 3) == []
    assert fuse_rankings([(1, 3.0)], [(0, 0.4)], 3) == [(0, 0.5), (1, 0.5)]  # all alike; the lowest number first


def test_only_documents_with_given_numbers_are_found() -> None:
    rows_ND = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    numbers_N = np.arange(1, 50, 3)
    hits_Q = find_nearest(rows_ND[:4], in_pieces(rows_ND, numbers_N), 5)
    for row_D, hits in zip(rows_ND, hits_Q, strict=False):
        scores_N = rows_ND.numpy()[numbers_N] @ row_D.numpy()
        assert [number for number, _ in hits] == numbers_N[np.argsort(-scores_N)[:5]].tolist()
