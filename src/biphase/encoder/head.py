"""Hidden states at target positions → (sum of losses, count): never logits for a position without a target.

The vocabulary is large (128,256), so rows are scored a few at a time: the largest tensor is [rows, V] with
rows · V ≤ `CHUNK_LOGITS`, and gradients are formed in the same pass, so nothing of that size is kept for backward.

Letters: N targets, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**29}
"""Logits held at once: 64 MB in fp32 on a CPU, 2 GB on a GPU. Each chunk adds to a gradient as large as the weights, so
that small chunks cost more than they save."""


def language_model_loss(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of `targets_N` under softmax(hidden @ weight.T + bias), in nats.

    Products are formed in the type of `hidden_ND`, softmax and sums in fp32. No target at all is a loss of 0.

    Returns:
        The sum over targets (differentiable), the loss of each target [N], and whether each target has the highest
        score [N]; the last two carry no gradient.
    """
    return ChunkedLoss.apply(hidden_ND, weight_VD, bias_V, targets_N, softcap)


def reference_loss(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, softcap: float | None = None
) -> Tensor:
    """The slow twin: the sum over targets, with all logits at once."""
    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD.to(hidden_ND.dtype), bias_V).float()
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum")


class ChunkedLoss(torch.autograd.Function):
    """Gradients in the forward pass: softmax(z) - onehot needs only the logits that are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight = weight_VD.to(hidden_ND.dtype)
        wanted = any(ctx.needs_input_grad)
        grad_hidden_ND = torch.empty_like(hidden_ND) if wanted else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wanted else None
        grad_bias_V = torch.zeros_like(bias_V) if wanted and bias_V is not None else None
        losses_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        hits_N = torch.empty(len(targets_N), dtype=torch.bool, device=hidden_ND.device)
        rows = max(1, CHUNK_LOGITS[hidden_ND.device.type] // len(weight))
        for begin in range(0, len(targets_N), rows):
            chunk = slice(begin, begin + rows)
            hidden, targets = hidden_ND[chunk], targets_N[chunk, None]
            logits = torch.nn.functional.linear(hidden, weight, bias_V).float()
            slope = None
            if softcap:
                tanh = torch.tanh(logits / softcap)
                logits, slope = softcap * tanh, 1 - tanh.square()
            target_logits = logits.gather(1, targets)
            highest, at = logits.max(1, keepdim=True)
            hits_N[chunk] = (at == targets).squeeze(1)
            logits.sub_(highest).exp_()
            total = logits.sum(1, keepdim=True)
            losses_N[chunk] = (total.log() + highest - target_logits).squeeze(1)
            if grad_hidden_ND is None or grad_weight_VD is None:
                continue
            logits.div_(total).scatter_add_(1, targets, torch.full_like(total, -1.0))
            if slope is not None:
                logits *= slope
            grad_logits = logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden_ND[chunk])
            if grad_weight_VD.dtype == hidden.dtype:
                grad_weight_VD.addmm_(grad_logits.T, hidden)
            else:
                grad_weight_VD += grad_logits.T @ hidden
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(0)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD, grad_bias_V)
        ctx.mark_non_differentiable(losses_N, hits_N)
        return losses_N.sum(), losses_N, hits_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grads[0] for grad in ctx.saved_tensors]
        return scaled[0], scaled[1], scaled[2], None, None
