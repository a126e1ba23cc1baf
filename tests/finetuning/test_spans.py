from itertools import pairwise

import numpy as np
import pytest
import torch

from biphase.finetuning.families.question_answering import best_spans
from biphase.finetuning.loss import segment_logsumexp


def reference_best_span(starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> tuple[int, int]:
    """The slow twin of `best_spans`, for one question."""
    pairs = [(i, j) for i in range(len(starts)) for j in range(i, min(i + max_tokens, len(starts)))]
    start, last = max(pairs, key=lambda pair: (starts[pair[0]] + ends[pair[1]], pair[0] - pair[1], -pair[0]))
    return start, last + 1


def test_best_spans_equal_their_slow_twin() -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 30, 2]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    starts, ends = rng.normal(size=(2, bounds[-1])).round(1)
    for max_tokens in (1, 4, 30):
        spans, scores = best_spans(starts, ends, bounds, max_tokens)
        for number, (a, b) in enumerate(pairwise(bounds)):
            begin, end = reference_best_span(starts[a:b], ends[a:b], max_tokens)
            assert scores[number] == pytest.approx(starts[a:b][begin] + ends[a:b][end - 1])
            assert end - begin <= max_tokens
            assert starts[spans[number, 0]] + ends[spans[number, 1] - 1] == pytest.approx(scores[number])


def test_segment_logsumexp() -> None:
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    bounds = torch.tensor([0, 1, 5, 7])
    found = segment_logsumexp(logits, bounds)
    wanted = torch.stack([logits[a:b].logsumexp(0) for a, b in pairwise(bounds.tolist())])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (found, wanted)))
