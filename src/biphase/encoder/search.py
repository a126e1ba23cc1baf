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
RANK_OFFSET = 60
"""What is added to ranks where they are fused, as in the paper."""


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


def in_pieces(rows_ND: Tensor) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Embeddings of documents with their numbers, a piece at a time."""
    for begin in range(0, len(rows_ND), SEARCH_DOCUMENTS):
        piece_ND = rows_ND[begin : begin + SEARCH_DOCUMENTS]
        yield np.arange(begin, begin + len(piece_ND)), piece_ND


def fuse_rankings(rankings: Sequence[Sequence[tuple[int, float]]], top: int) -> list[tuple[int, float]]:
    """Fuse the rankings of one query by reciprocal ranks (Cormack et al. 2009): a document scores the sum of 1 / (60 +
    rank) over the rankings that have it. The best come first, of equal ones that with the lowest number."""
    scores = defaultdict[int, float](float)
    for ranking in rankings:
        for rank, (number, _) in enumerate(ranking, start=1):
            scores[number] += 1 / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:top]
