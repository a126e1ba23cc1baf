import copy
from itertools import pairwise

import numpy as np
import torch

from biphase.encoder.attention import lay_out
from biphase.finetuning.heads import (
    Embedder,
    Encoder,
    SequenceClassifier,
    TokenClassifier,
    mean_pool,
    reference_mean_pool,
)

BOUNDS = np.array([0, 1, 8, 13])


def inputs(bounds: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 250, bounds[-1]))
    return tokens, torch.from_numpy(np.concatenate([np.arange(n) for n in np.diff(bounds)]))


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
    model = SequenceClassifier(copy.deepcopy(encoder.backbone), 3).eval()
    tokens, positions = inputs(BOUNDS)
    packed = model(tokens, positions, lay_out(BOUNDS, causal=False))
    assert packed.shape == (3, 3)
    for n, (begin, end) in enumerate(pairwise(BOUNDS)):
        layout = lay_out(np.array([0, end - begin]), causal=False)
        torch.testing.assert_close(model(tokens[begin:end], positions[begin:end], layout)[0], packed[n])


def test_token_logits_packed_equal_alone_and_see_both_sides(encoder: Encoder) -> None:
    model = TokenClassifier(copy.deepcopy(encoder.backbone), 5, dropout=0.1).eval()
    tokens, positions = inputs(BOUNDS)
    packed = model(tokens, positions, lay_out(BOUNDS, causal=False))
    assert packed.shape == (13, 5)
    alone = model(tokens[1:8], positions[1:8], lay_out(np.array([0, 7]), causal=False))
    torch.testing.assert_close(alone, packed[1:8])
    changed = tokens.clone()
    changed[7] += 1
    moved = (model(changed, positions, lay_out(BOUNDS, causal=False)) - packed).abs().amax(1) > 0
    assert moved.tolist() == [False] + [True] * 7 + [False] * 5


def test_dropout_is_the_token_heads_alone(encoder: Encoder) -> None:
    tokens, positions = inputs(BOUNDS)
    layout = lay_out(BOUNDS, causal=False)
    sequence = SequenceClassifier(copy.deepcopy(encoder.backbone), 3).train()
    assert torch.equal(sequence(tokens, positions, layout), sequence(tokens, positions, layout))
    token = TokenClassifier(copy.deepcopy(encoder.backbone), 3, dropout=0.5).train()
    assert not torch.equal(token(tokens, positions, layout), token(tokens, positions, layout))


def test_shapes_of_the_other_heads(encoder: Encoder) -> None:
    tokens, positions = inputs(BOUNDS)
    layout = lay_out(BOUNDS, causal=False)
    assert TokenClassifier(encoder.backbone, 2, dropout=0.0)(tokens, positions, layout).shape == (13, 2)
    assert Embedder(encoder.backbone)(tokens, positions, layout).shape == (3, 32)
