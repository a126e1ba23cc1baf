"""Which parameter is updated how: AdamW with the paper's settings, or Muon for the matrices inside the blocks.

Muon (Jordan et al. 2024) is momentum, made orthogonal. PyTorch's own always orthogonalises in bf16, which a CPU without
bf16 units emulates at a hundredth of its speed. This one takes the type as an argument and treats all matrices of one
shape in one batched product.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from biphase.errors import InputError
from biphase.flops import NEWTON_SCHULZ_ITERATIONS
from biphase.pretraining.parallel import transformer_blocks
from biphase.pretraining.schedule import learning_rate
from biphase.recipe import Optimizer, Schedule

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients that pull singular values into about 0.7..1.2 in five iterations."""


def make_optimizers(
    settings: Optimizer, model: nn.Module, *, dtype: torch.dtype = torch.float32, sharded: bool = False
) -> list[torch.optim.Optimizer]:
    """The optimizers of all trainable parameters, each parameter in exactly one.

    `dtype` is the type of the arithmetic. Every group carries `lr_scale`: its rate as a multiple of the schedule's.
    """
    everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = block_matrices(model) if settings.name == "muon" else []
    in_muon = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in everything if id(parameter) not in in_muon]
    assert len(rest) + len(matrices) == len(everything)
    adamw = torch.optim.AdamW(
        [{"params": rest, "lr_scale": 1.0}],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    if not matrices:
        return [adamw]
    if sharded:
        raise InputError("optimizer.name muon needs whole matrices; use compute.parallel=ddp or optimizer.name=adamw")
    groups = [{"params": matrices, "lr_scale": settings.muon_lr_scale}]
    decay = settings.weight_decay if settings.muon_weight_decay is None else settings.muon_weight_decay
    return [adamw, Muon(groups, weight_decay=decay, dtype=dtype)]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of the repeated layers: no embedding and no output layer is among them."""
    parameters = [parameter for block in transformer_blocks(model) for parameter in block.parameters()]
    return [parameter for parameter in parameters if parameter.ndim == 2 and parameter.requires_grad]


def set_rate(optimizers: list[torch.optim.Optimizer], schedule: Schedule, step: int, num_steps: int) -> float:
    """Set the rate of update `step` in every group, by its scale, and return what the schedule says."""
    rate = learning_rate(schedule, step, num_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
    return rate


class Muon(torch.optim.Optimizer):
    """Decoupled weight decay; updates are scaled to AdamW's root mean square (Liu et al. 2025), so rates carry over."""

    def __init__(
        self, params: Iterable[Any], *, momentum: float = 0.95, weight_decay: float = 0.1, dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": 1e-3, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self.step_together(parameters, group)

    def step_together(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape; what that makes is gone before the next ones (`memory.py` counts it)."""
        updates = orthogonalize(torch.stack([self.nesterov(p, group["momentum"]) for p in parameters]), self.dtype)
        scale = 0.2 * max(parameters[0].shape) ** 0.5
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)

    def nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        """The gradient after Nesterov momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum_buffer"], momentum)


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, A, B] → matrices with the same singular vectors and singular values near 1, by Newton–Schulz iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
