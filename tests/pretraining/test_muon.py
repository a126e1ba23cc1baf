"""Muon against PyTorch's own, and its orthogonal updates."""

import pytest
import torch

from biphase.pretraining.muon import Muon, orthogonalize


def test_updates_equal_those_of_pytorch_within_bf16_rounding() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((16, 8), (8, 24), (16, 8))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer = Muon(ours, weight_decay=0.1, dtype=torch.bfloat16)
    twin = torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for each in (optimizer, twin):
        each.param_groups[0]["lr"] = 0.01
    before = [parameter.detach().clone() for parameter in ours]
    for _ in range(5):
        for parameter, other in zip(ours, theirs, strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        optimizer.step()
        twin.step()
    for parameter, other, start in zip(ours, theirs, before, strict=True):
        moved = (parameter - start).detach().norm()
        assert (parameter - other).detach().norm() < 0.03 * moved


@pytest.mark.parametrize("shape", [(2, 12, 12), (3, 8, 20), (1, 30, 6)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(shape)
    result = orthogonalize(matrices, torch.float32)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    rotated = u.mT @ result @ vh.mT
    values = rotated.diagonal(dim1=1, dim2=2)
    assert (rotated - torch.diag_embed(values)).abs().max() < 1e-3, "singular vectors have turned"
    assert values.min() > 0.5 and values.max() < 1.3
