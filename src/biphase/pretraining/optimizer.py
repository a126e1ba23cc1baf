"""Which parameter is updated how: AdamW with the paper's settings, or Muon for the matrices inside the blocks."""

import torch
from torch import nn

from biphase.config import Optimizer
from biphase.errors import InputError


def make_optimizers(settings: Optimizer, model: nn.Module, *, sharded: bool = False) -> list[torch.optim.Optimizer]:
    """The optimizers of all trainable parameters, each parameter in exactly one.

    Every group carries `lr_scale`: its rate as a multiple of the schedule's.
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
    muon = torch.optim.Muon(
        [{"params": matrices, "lr_scale": settings.muon_lr_scale}],
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [adamw, muon]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Matrices that are neither embeddings nor output layers."""
    outside = {id(p) for name, p in model.named_parameters() if any(part in name for part in ("embed", "lm_head"))}
    return [p for p in model.parameters() if p.ndim == 2 and p.requires_grad and id(p) not in outside]


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
