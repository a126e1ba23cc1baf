"""Embeddings → the nearest documents of each query, by exact search, a piece of the documents at a time; several
rankings → one.

Letters: Q queries, N documents of a piece or of all, D width, K documents kept per query.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

SEARCH_DOCUMENTS = 8192
"""Documents that are embedded and scored at a time: no more scores than this per query ever exist."""


def find_nearest(
    queries_QD: Tensor,
    pieces: Iterable[tuple[np.ndarray, Tensor]],
    top: int,
    similarity: Callable[[Tensor, Tensor], Tensor] = lambda queries_QD, rows_ND: queries_QD @ rows_ND.T,
    itself_Q: np.ndarray | None = None,
    names_N: np.ndarray | None = None,
) -> list[list[tuple[int, float]]]:
    """The numbers and scores of each query's `top` documents, best first, by exact search.

    Of each piece and of what was best before only the best stay: no more scores than those of a piece ever exist.

    Args:
        pieces: numbers of documents, with their embeddings.
        similarity: by the inner product, unless given.
        itself_Q: for each query the document that is the query itself, or -1: it is not to be found.
        names_N: the place of each document's id in the order of characters, for documents of equal scores; their
            numbers, where it is not given.
    """
    best_scores = queries_QD.new_empty(len(queries_QD), 0)
    best_documents = torch.empty(len(queries_QD), 0, dtype=torch.long, device=queries_QD.device)
    for numbers, rows_ND in pieces:
        scores = similarity(queries_QD, rows_ND.to(queries_QD.device))
        documents = torch.from_numpy(numbers).to(scores.device).expand(len(scores), -1)
        if itself_Q is not None:
            is_itself = documents == torch.from_numpy(itself_Q)[:, None].to(scores.device)
            scores = scores.masked_fill(is_itself, float("-inf"))
        scores, documents = torch.cat([best_scores, scores], 1), torch.cat([best_documents, documents], 1)
        best_scores, order = scores.topk(min(top, scores.shape[1]), dim=1)
        # Of equal scores at the last place, by trec_eval's rule, those stay whose names are last.
        is_tied_Q = (scores >= best_scores[:, -1:]).sum(1) > best_scores.shape[1]
        if is_tied_Q.any():
            names = documents if names_N is None else torch.from_numpy(names_N).to(scores.device)[documents]
            by_name = names[is_tied_Q].argsort(dim=1, descending=True)
            by_score = scores[is_tied_Q].gather(1, by_name).argsort(dim=1, descending=True, stable=True)
            order[is_tied_Q] = by_name.gather(1, by_score[:, : best_scores.shape[1]])
        best_scores, best_documents = scores.gather(1, order), documents.gather(1, order)
    nearest = []
    for numbers_K, scores_K in zip(best_documents.tolist(), best_scores.tolist(), strict=True):
        hits = zip(numbers_K, scores_K, strict=True)
        nearest.append([(number, score) for number, score in hits if score > float("-inf")])
    return nearest


def in_pieces(rows_ND: Tensor, numbers_N: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Embeddings of documents with their numbers, a piece at a time; of all documents unless numbers are given."""
    for begin in range(0, len(rows_ND if numbers_N is None else numbers_N), SEARCH_DOCUMENTS):
        if numbers_N is None:
            piece_ND = rows_ND[begin : begin + SEARCH_DOCUMENTS]
            yield np.arange(begin, begin + len(piece_ND)), piece_ND
        else:
            piece_N = numbers_N[begin : begin + SEARCH_DOCUMENTS]
            yield piece_N, rows_ND[piece_N]


def fuse_rankings(
    by_words: Sequence[tuple[int, float]], by_embeddings: Sequence[tuple[int, float]], top: int
) -> list[tuple[int, float]]:
    """Fuse BM25's ranking of one query and that of embeddings: a document scores half of each of its two scores, taken
    from 0 to 1 (a convex combination, Bruch et al. 2023, arXiv:2210.11934). Embeddings are taken between the worst
    score of their ranking and the best, words by their share of the best: a document without any of them has 0. The
    best come first, of equal ones that with the lowest number."""
    fused = defaultdict[int, float](float)
    for ranking, worst in ((by_words, 0.0), (by_embeddings, by_embeddings[-1][1] if by_embeddings else 0.0)):
        for number, score in ranking:
            best = ranking[0][1]
            fused[number] += 0.5 * ((score - worst) / (best - worst) if best > worst else 1.0)
    return sorted(fused.items(), key=lambda hit: (-hit[1], hit[0]))[:top]
