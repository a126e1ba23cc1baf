"""Embeddings → the nearest documents of each query, by exact search over pieces of the documents.

Letters: Q queries, N documents of a piece or of all, D width, K documents kept per query.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

SEARCH_DOCUMENTS = 8192
"""The number of documents to embed and score at a time, and so the most scores of a query at once."""


def find_nearest(
    queries_QD: Tensor,
    pieces: Iterable[tuple[np.ndarray, Tensor]],
    top: int,
    similarity: Callable[[Tensor, Tensor], Tensor] = lambda queries_QD, rows_ND: queries_QD @ rows_ND.T,
    itself_Q: np.ndarray | None = None,
    names_N: np.ndarray | None = None,
) -> list[list[tuple[int, float]]]:
    """Return the indices and scores of each query's `top` documents, best first, by exact search.

    After each piece only the best documents so far stay, so that never more than one piece's scores exist.

    Args:
        pieces: indices of documents with their embeddings.
        similarity: the scores of queries and documents [Q, N]; the inner product unless it is given.
        itself_Q: for each query, the document to exclude because it is the query itself, or -1.
        names_N: the rank of each document's id in character order, which orders equal scores; by default, the
            indices.
    """
    best_scores = queries_QD.new_empty(len(queries_QD), 0)
    best_documents = torch.empty(len(queries_QD), 0, dtype=torch.long, device=queries_QD.device)
    for indices_N, rows_ND in pieces:
        scores = similarity(queries_QD, rows_ND.to(queries_QD.device))
        documents = torch.from_numpy(indices_N).to(scores.device).expand(len(scores), -1)
        if itself_Q is not None:
            is_itself = documents == torch.from_numpy(itself_Q)[:, None].to(scores.device)
            scores = scores.masked_fill(is_itself, float("-inf"))
        scores, documents = torch.cat([best_scores, scores], 1), torch.cat([best_documents, documents], 1)
        best_scores, order = scores.topk(min(top, scores.shape[1]), dim=1)
        # Among equal scores at the last place, the last names stay (trec_eval's rule).
        is_tied_Q = (scores >= best_scores[:, -1:]).sum(1) > best_scores.shape[1]
        if is_tied_Q.any():
            names = documents if names_N is None else torch.from_numpy(names_N).to(scores.device)[documents]
            by_name = names[is_tied_Q].argsort(dim=1, descending=True)
            by_score = scores[is_tied_Q].gather(1, by_name).argsort(dim=1, descending=True, stable=True)
            order[is_tied_Q] = by_name.gather(1, by_score[:, : best_scores.shape[1]])
        best_scores, best_documents = scores.gather(1, order), documents.gather(1, order)
    nearest = []
    for documents_K, scores_K in zip(best_documents.tolist(), best_scores.tolist(), strict=True):
        hits = zip(documents_K, scores_K, strict=True)
        nearest.append([(document, score) for document, score in hits if score > float("-inf")])
    return nearest


def in_pieces(rows_ND: Tensor, indices_N: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield indices and embeddings of documents, a piece at a time; all documents unless indices are given."""
    for begin in range(0, len(rows_ND if indices_N is None else indices_N), SEARCH_DOCUMENTS):
        if indices_N is None:
            piece_ND = rows_ND[begin : begin + SEARCH_DOCUMENTS]  # a view, not a copy
            yield np.arange(begin, begin + len(piece_ND)), piece_ND
        else:
            piece_N = indices_N[begin : begin + SEARCH_DOCUMENTS]
            yield piece_N, rows_ND[piece_N]
