"""Which parameter is updated how: AdamW with the paper's settings, or Muon for the matrices inside the blocks."""

import torch
from torch import nn

from biphase.config import Optimizer, Schedule
from biphase.errors import InputError
from biphase.pretraining.muon import Muon
from biphase.pretraining.parallel import transformer_blocks
from biphase.pretraining.schedule import learning_rate


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
    return [adamw, Muon(groups, weight_decay=settings.weight_decay, dtype=dtype)]


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
