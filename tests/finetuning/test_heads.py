import copy
from itertools import pairwise

import numpy as np
import torch

from biphase.encoder.models import Encoder
from biphase.finetuning.encoding import Batch, TokenizedTexts, pack
from biphase.finetuning.heads import TaskNetwork, mean_pool

from .conftest import make_cell

BOUNDS = np.array([0, 1, 8, 13])


def packed(bounds: np.ndarray, change: int | None = None) -> Batch:
    """Some tokens between these bounds, one of them another one where it is named."""
    tokens = np.random.default_rng(0).integers(3, 250, bounds[-1])
    if change is not None:
        tokens[change] += 1
    return pack(TokenizedTexts(tokens, bounds, np.zeros(0, np.int64)), np.arange(len(bounds) - 1), make_cell("snli"))


def alone(batch: Batch, sample: int) -> Batch:
    return pack(batch.texts, np.array([sample]), make_cell("snli"))


def reference_mean_pool(hidden_TD: torch.Tensor, bounds_S1: torch.Tensor) -> torch.Tensor:
    """The slow twin of `mean_pool`."""
    return torch.stack([hidden_TD[a:b].float().mean(0) for a, b in pairwise(bounds_S1.tolist())])


def test_mean_pool_equals_its_slow_twin() -> None:
    hidden = torch.randn(13, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.randn(3, 6)
    bounds = torch.from_numpy(BOUNDS).int()
    results = []
    for pool in (mean_pool, reference_mean_pool):
        pooled = pool(hidden, bounds)
        results.append((pooled, *torch.autograd.grad((pooled * weights).sum(), hidden)))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(pooled[0], hidden[0])


def test_sequence_logits_packed_equal_alone(encoder: Encoder) -> None:
    model = TaskNetwork(copy.deepcopy(encoder.backbone), make_cell("snli")).eval()
    batch = packed(BOUNDS)
    logits = model(batch)
    assert logits.shape == (3, 3)
    for sample in range(3):
        torch.testing.assert_close(model(alone(batch, sample))[0], logits[sample])


def test_token_logits_packed_equal_alone_and_see_both_sides(encoder: Encoder) -> None:
    cell = make_cell("wnut17")
    model = TaskNetwork(copy.deepcopy(encoder.backbone), cell).eval()
    batch = packed(BOUNDS)
    logits = model(batch)
    assert logits.shape == (13, len(cell.task.classes))
    torch.testing.assert_close(model(alone(batch, 1)), logits[1:8])
    moved = (model(packed(BOUNDS, change=7)) - logits).abs().amax(1) > 0
    assert moved.tolist() == [False] + [True] * 7 + [False] * 5


def test_dropout_is_the_token_heads_alone(encoder: Encoder) -> None:
    batch = packed(BOUNDS)
    sequence = TaskNetwork(copy.deepcopy(encoder.backbone), make_cell("snli")).train()
    assert torch.equal(sequence(batch), sequence(batch))
    for cell in (make_cell("wnut17", head_dropout=0.5), make_cell("squad", qa_head="token", head_dropout=0.5)):
        token = TaskNetwork(copy.deepcopy(encoder.backbone), cell).train()
        assert not torch.equal(token(batch), token(batch))
    span = TaskNetwork(copy.deepcopy(encoder.backbone), make_cell("squad")).train()
    assert torch.equal(span(batch), span(batch))


def test_shapes_of_the_other_heads(encoder: Encoder) -> None:
    assert TaskNetwork(encoder.backbone, make_cell("squad"))(packed(BOUNDS)).shape == (13, 2)
    assert TaskNetwork(encoder.backbone, make_cell("squad_retrieval"))(packed(BOUNDS)).shape == (3, 32)
