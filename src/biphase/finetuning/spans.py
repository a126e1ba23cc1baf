"""Scores of tokens → the best span of each question, and the sums over windows that the loss of spans needs.

Letters: K context tokens of all questions, Q questions, T tokens, S segments of them, C columns.
"""

from itertools import pairwise

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

LOWEST = -1e4
"""A logit, in place of minus infinity, which differences and sums would turn into no number."""


def margin_sums(margins_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end scores whose sum is the sum of a span's margins (log-odds of being in the answer)."""
    ends_K = np.cumsum(margins_K)
    return margins_K - ends_K, ends_K


def best_spans(
    starts_K: np.ndarray, ends_K: np.ndarray, bounds_Q1: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The span of at most `max_tokens` context tokens with the highest start + end, [Q, 2] from and up to, and [Q] its
    score. Ties: the shortest, then the first."""
    # For each token as the start, the best end: all starts at once, with spans that grow by one token.
    last_K = np.repeat(bounds_Q1[1:] - 1, np.diff(bounds_Q1))
    best_K = np.full(len(starts_K), -np.inf)
    extra_K = np.zeros(len(starts_K), dtype=np.int64)
    indices_K = np.arange(len(starts_K))
    for extra in range(max_tokens):
        is_inside = indices_K + extra <= last_K
        scores = np.where(is_inside, starts_K + ends_K[np.minimum(indices_K + extra, len(ends_K) - 1)], -np.inf)
        is_better = scores > best_K
        best_K[is_better], extra_K[is_better] = scores[is_better], extra
    # For each question, the best start.
    spans, scores_Q = [], []
    for begin, end in pairwise(bounds_Q1.tolist()):
        if begin == end:  # a context of which the tokenizer leaves nothing
            spans.append((begin, begin))
            scores_Q.append(LOWEST)
            continue
        start = begin + int(best_K[begin:end].argmax())
        spans.append((start, start + int(extra_K[start]) + 1))
        scores_Q.append(best_K[start])
    return np.array(spans, dtype=np.int64), np.array(scores_Q)


def reference_best_span(starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> tuple[int, int]:
    """The slow twin of `best_spans`, for one question."""
    pairs = [(i, j) for i in range(len(starts)) for j in range(i, min(i + max_tokens, len(starts)))]
    start, last = max(pairs, key=lambda pair: (starts[pair[0]] + ends[pair[1]], pair[0] - pair[1], -pair[0]))
    return start, last + 1


def span_probabilities(
    starts_K: np.ndarray, ends_K: np.ndarray, bounds_Q1: np.ndarray, scores_Q: np.ndarray
) -> np.ndarray:
    """The probability of each question's span among those of its context [Q]: that of its start times that of its
    end."""
    sums_Q = np.zeros(len(scores_Q))
    for number, (begin, end) in enumerate(pairwise(bounds_Q1.tolist())):
        sums_Q[number] = logsumexp(starts_K[begin:end]) + logsumexp(ends_K[begin:end]) if begin < end else 0.0
    return np.exp(np.minimum(scores_Q - sums_Q, 0.0))


def segment_logsumexp(logits_TC: Tensor, bounds_S1: Tensor) -> Tensor:
    """[S, C], over the rows of each segment."""
    segments_T = torch.repeat_interleave(torch.arange(len(bounds_S1) - 1, device=logits_TC.device), bounds_S1.diff())
    index_TC = segments_T[:, None].expand_as(logits_TC)
    highest = logits_TC.new_full((len(bounds_S1) - 1, logits_TC.shape[1]), float("-inf"))
    highest = highest.scatter_reduce(0, index_TC, logits_TC.detach(), "amax")
    sums = torch.zeros_like(highest).index_add(0, segments_T, (logits_TC - highest[segments_T]).exp())
    return sums.log() + highest
