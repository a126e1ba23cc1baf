"""Hidden states at target positions → (sum of losses, count): never logits for a position without a target.

The vocabulary is large (128,256), so targets are scored a chunk at a time: rows · V ≤ `CHUNK_LOGITS`. The logits of a
chunk become their gradients in place, part by part in fp32, and two products end the chunk: nothing of its size is kept
for backward.

Letters: N targets, D width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**29}
"""Logits held at once, in the type of the products: 64 MB in bf16 on a CPU, 1 GB on a GPU. Each chunk adds to a
gradient as large as the weights, so that small chunks cost more than they save."""
PART_LOGITS = {"cpu": 2**18, "cuda": 2**28}
"""Logits that are fp32 at once: on a CPU, what its caches hold from one operation to the next."""


def language_model_loss(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy of `targets_N` under softmax(hidden @ weight.T + bias), in nats.

    Products are formed in the type of `hidden_ND`, softmax and sums in fp32. No target at all is a loss of 0.

    Returns:
        The sum over targets (differentiable), the loss of each target [N], and, where no gradient is formed, whether
        each target has the highest score [N]; the last two carry no gradient.
    """
    # Inside of `forward` nobody can tell that gradients are off.
    with_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    return ChunkedLoss.apply(hidden_ND, weight_VD, bias_V, targets_N, softcap, with_grad)


def reference_loss(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, softcap: float | None = None
) -> Tensor:
    """The slow twin: the sum over targets, with all logits at once."""
    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD.to(hidden_ND.dtype), bias_V).float()
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum")


class ChunkedLoss(torch.autograd.Function):
    """Gradients in the forward pass: dL/dz = softmax(z) - onehot needs only the logits that are at hand.

    With z = h @ W.T they become dL/dh = dL/dz @ W, and dL/dW = the sum over chunks of dL/dz.T @ h.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        softcap: float | None,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        weight, device = weight_VD.to(hidden_ND.dtype), hidden_ND.device
        grad_hidden_ND = torch.empty_like(hidden_ND) if with_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if with_grad else None
        grad_bias_V = torch.zeros_like(bias_V) if with_grad and bias_V is not None else None
        losses_N = torch.empty(len(targets_N), dtype=torch.float32, device=device)
        correct_N = None if with_grad else torch.empty(len(targets_N), dtype=torch.bool, device=device)
        # A chunk bounds the memory of logits, a part of it that of their fp32 copies: with V = 128,256 on a CPU, 261
        # targets and 2. After the inner loop `logits` holds dL/dz; the chain rule for z = h @ W.T is two products.
        for chunk in slices(len(targets_N), CHUNK_LOGITS[device.type] // len(weight)):
            hidden, targets, losses = hidden_ND[chunk], targets_N[chunk], losses_N[chunk]
            logits = torch.nn.functional.linear(hidden, weight, bias_V)
            if correct_N is not None:
                correct_N[chunk] = logits.argmax(1) == targets
            for part in slices(len(targets), PART_LOGITS[device.type] // len(weight)):
                losses[part] = token_losses(logits[part], targets[part, None], softcap, with_grad)
            if grad_hidden_ND is not None and grad_weight_VD is not None:
                torch.mm(logits, weight, out=grad_hidden_ND[chunk])
                if grad_weight_VD.dtype == hidden.dtype:
                    grad_weight_VD.addmm_(logits.T, hidden)
                else:
                    grad_weight_VD += logits.T @ hidden
                if grad_bias_V is not None:
                    grad_bias_V += logits.sum(0)
            del logits  # else they would stand beside the next chunk's
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD, grad_bias_V)
        ctx.mark_non_differentiable(losses_N, *([] if correct_N is None else [correct_N]))
        return losses_N.sum(), losses_N, correct_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grads[0] for grad in ctx.saved_tensors]
        return scaled[0], scaled[1], scaled[2], None, None, None


def slices(num_rows: int, most: int) -> Iterator[slice]:
    """Rows 0 to `num_rows`, at most `most` at a time, and at least one."""
    step = max(1, most)
    return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


def token_losses(logits_RV: Tensor, targets_R1: Tensor, softcap: float | None, with_grad: bool) -> Tensor:
    """The losses [R] of some rows; with `with_grad`, the gradient of their sum takes the place of `logits_RV`.

    What is in 16 bits is read and written as such, and fp32 in between: on a GPU the head waits for its memory.
    """
    # loss = log Σ exp(z) - z[target], with the highest logit taken off first, so that no exp overflows.
    scores_RV, tanh_RV = logits_RV, None
    if softcap:
        tanh_RV = torch.tanh(logits_RV.float() / softcap)
        scores_RV = softcap * tanh_RV
    highest, target_scores = scores_RV.amax(1, keepdim=True).float(), scores_RV.gather(1, targets_R1).float()
    exps_RV = torch.sub(scores_RV, highest).exp_()
    total = exps_RV.sum(1, keepdim=True)
    losses_R = (total.log() + highest - target_scores).squeeze(1)
    if with_grad:
        # d loss / dz = softmax(z) - onehot(target); through the cap c · tanh(x / c), 1 - tanh² comes on top.
        at_targets = exps_RV.gather(1, targets_R1).div_(total).sub_(1)
        if tanh_RV is None:
            torch.div(exps_RV, total, out=logits_RV)
            logits_RV.scatter_(1, targets_R1, at_targets.to(logits_RV.dtype))
        else:
            torch.mul(exps_RV.div_(total).scatter_(1, targets_R1, at_targets), 1 - tanh_RV.square(), out=logits_RV)
    return losses_R
