"""Flat packed tokens become hidden states and losses, through transformers' own networks.

`packed_hidden` calls a network without its head, `PackedModel` a language model. `count_flops` counts the cost of
training.

Only positions with a target have logits. Vocabularies are large (128,256), so the head scores targets in chunks of rows
· V ≤ `CHUNK_LOGITS`. The logits of a chunk become their gradients in place, part by part in fp32, and two products
finish the chunk. So the backward pass stores nothing of this size.

Letters: T packed tokens, N targets, D width, V vocabulary.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, lay_out
from biphase.flops import CHUNK_LOGITS, PART_LOGITS, FlopCount, training_flops
from biphase.hub import position_limit


def language_model_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    softcap: float | None = None,
    *,
    compiles: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the cross-entropy of `targets_N` under softmax(hidden @ weight.T + bias), in nats.

    Products are formed in the type of `hidden_ND`, softmax and sums in fp32. Rows of `hidden_ND` beyond the targets are
    padding. Without targets the loss is 0. With `compiles`, logits become losses and gradients in compiled code.

    Returns:
        The sum over targets (differentiable), the loss of each target [N], and, if no gradient is formed, whether each
        target has the highest score [N]; the last two carry no gradient.
    """
    # `forward` cannot see whether gradients are on.
    with_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    return ChunkedLoss.apply(hidden_ND, weight_VD, bias_V, targets_N, softcap, with_grad, compiles)


class ChunkedLoss(torch.autograd.Function):
    """A loss that forms its gradients in the forward pass: dL/dz = softmax(z) - onehot needs only the present logits.

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
        compiles: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        weight, device = weight_VD.to(hidden_ND.dtype), hidden_ND.device
        score = torch.compile(token_losses, dynamic=True) if compiles else token_losses
        grad_hidden_ND = torch.empty_like(hidden_ND) if with_grad else None
        learns = with_grad and ctx.needs_input_grad[1]
        grad_weight_VD: Any = None  # of the chunks so far, in fp32
        grad_bias_V = torch.zeros_like(bias_V) if with_grad and bias_V is not None else None
        losses_N = torch.empty(len(targets_N), dtype=torch.float32, device=device)
        correct_N = None if with_grad else torch.empty(len(targets_N), dtype=torch.bool, device=device)
        # A chunk bounds the memory for logits, and a part of it the memory for their fp32 copies: with V = 128,256 on a
        # CPU, 261 and 8 targets. After the inner loop `logits` holds dL/dz; the chain rule for z = h @ W.T is two
        # products.
        for chunk in slices(len(hidden_ND), CHUNK_LOGITS[device.type] // len(weight)):
            hidden, targets, losses = hidden_ND[chunk], targets_N[chunk], losses_N[chunk]
            logits = torch.nn.functional.linear(hidden, weight, bias_V)
            if correct_N is not None:
                correct_N[chunk] = logits[: len(targets)].argmax(1) == targets
            for part in slices(len(targets), PART_LOGITS[device.type] // len(weight)):
                losses[part] = score(logits[part], targets[part, None], softcap, with_grad)
            if grad_hidden_ND is not None:
                logits[len(targets) :] = 0
                torch.mm(logits, weight, out=grad_hidden_ND[chunk])
                if learns and grad_weight_VD is None:
                    grad_weight_VD = (logits.T @ hidden).float()
                elif learns and grad_weight_VD.dtype == hidden.dtype:
                    grad_weight_VD.addmm_(logits.T, hidden)
                elif learns:
                    grad_weight_VD += logits.T @ hidden
                if grad_bias_V is not None:
                    grad_bias_V += logits.sum(0)
            del logits  # else they would stay in memory beside the next chunk's
        if learns:
            grad_weight_VD = (
                torch.zeros_like(weight_VD) if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
            )
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD, grad_bias_V)
        ctx.mark_non_differentiable(losses_N, *([] if correct_N is None else [correct_N]))
        return losses_N.sum(), losses_N, correct_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grads[0] for grad in ctx.saved_tensors]
        return scaled[0], scaled[1], scaled[2], None, None, None, None


def slices(num_rows: int, most: int) -> Iterator[slice]:
    """Cut rows 0 to `num_rows` into slices of at most `most`, and at least one."""
    step = max(1, most)
    return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


def token_losses(logits_RV: Tensor, targets_R1: Tensor, softcap: float | None, with_grad: bool) -> Tensor:
    """Compute the losses [R] of some rows; with `with_grad`, the gradient of their sum replaces `logits_RV`.

    It reads and writes 16-bit tensors as such, with fp32 in between, because memory bandwidth limits the head's speed
    on a GPU. Compiled there, this is two kernels, which read the logits three times and write them once.
    """
    # loss = log Σ exp(z) - z[target]; subtract the highest logit first, so that no exp overflows.
    scores_RV, tanh_RV = logits_RV, None
    if softcap:
        tanh_RV = torch.tanh(logits_RV.float() / softcap)
        scores_RV = softcap * tanh_RV
    highest, target_scores = scores_RV.amax(1, keepdim=True).float(), scores_RV.gather(1, targets_R1).float()
    exps_RV = torch.sub(scores_RV, highest).exp_()
    total = exps_RV.sum(1, keepdim=True)
    losses_R = (total.log() + highest - target_scores).squeeze(1)
    if with_grad and torch.compiler.is_compiling():  # a scatter would not fuse, and would need a copy
        is_target_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == targets_R1
        slope_RV = 1.0 if tanh_RV is None else 1 - tanh_RV.square()
        logits_RV.copy_((exps_RV / total - is_target_RV.float()) * slope_RV)
    elif with_grad:
        # d loss / dz = softmax(z) - onehot(target); the cap c · tanh(x / c) adds the factor 1 - tanh².
        at_targets = exps_RV.gather(1, targets_R1).div_(total).sub_(1)
        if tanh_RV is None:
            torch.div(exps_RV, total, out=logits_RV)
            logits_RV.scatter_(1, targets_R1, at_targets.to(logits_RV.dtype))
        else:
            torch.mul(exps_RV.div_(total).scatter_(1, targets_R1, at_targets), 1 - tanh_RV.square(), out=logits_RV)
    return losses_R


COUNTED_TOKENS = 16
"""The length of the text for counting FLOPs."""


def packed_hidden(backbone: nn.Module, inputs_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
    """Compute the last hidden states [T, D] of a transformers base model. Positions count from 0 in every sample."""
    num_tokens = len(inputs_T)
    positions_T = positions_T + getattr(backbone, "first_position", 0)
    if layout.num_padding:
        # The padding is a sample of its own that nothing reads, so any tokens and positions will do.
        inputs_T = torch.cat([inputs_T, inputs_T[-1:].expand(layout.num_padding)])
        positions_T = torch.cat([positions_T, positions_T[-1:].expand(layout.num_padding)])
    output = backbone(input_ids=inputs_T[None], position_ids=positions_T[None], layout=layout, use_cache=False)
    return output.last_hidden_state.squeeze(0)[:num_tokens]


class PackedModel(nn.Module):
    """A transformers language model whose forward pass is a packed batch's loss, for DDP and FSDP to wrap."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network
        self.head = LanguageModelHead(network)
        self.compiles_loss = False
        """Whether the loss after the logits is compiled."""

    def forward(
        self,
        inputs_T: Tensor,
        positions_T: Tensor,
        layout: PackedLayout,
        target_positions_N: Tensor | None = None,
        targets_N: Tensor | None = None,
    ) -> Any:
        """Return what `language_model_loss` does: the sum of the losses in nats, the loss of each target [N], and
        whether each is predicted correctly [N] if no gradient is formed.

        Without targets: the last hidden states [T, D].
        """
        hidden_TD = packed_hidden(self.network.base_model, inputs_T, positions_T, layout)
        if target_positions_N is None or targets_N is None:
            return hidden_TD
        is_autocast = torch.is_autocast_enabled(hidden_TD.device.type)
        if is_autocast:  # a CPU compiles its 16-bit products for each number of rows that it meets
            num_padding = -len(target_positions_N) % PAD_TO_MULTIPLE_OF
            target_positions_N = nn.functional.pad(target_positions_N, (0, num_padding))
        hidden_ND = self.head(hidden_TD.index_select(0, target_positions_N))
        if is_autocast:  # the last norm leaves fp32
            hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
        return language_model_loss(
            hidden_ND, *self.head.weights(), targets_N, self.head.softcap, compiles=self.compiles_loss
        )


class LanguageModelHead:
    """The head of a language model: what it does to hidden states, apart from the product with its output embeddings.

    It calls a copy of the network, with the same weights, whose backbone returns the states that it is given, and whose
    output embeddings change nothing. So it needs no list of classes; `proofs.check_head` proves it.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        output: Any = network.get_output_embeddings()
        owner_name, owner = next((name, owner) for name, owner in network.named_modules() if output in owner.children())
        # The innermost, because OPT calls the decoder inside its backbone.
        *_, backbone = (module for module in network.base_model.modules() if isinstance(module, PreTrainedModel))
        bare: Any = with_parts(network, {backbone: GivenStates(), output: nn.Identity()})
        bare.config = copy.copy(network.config)
        # The loss applies the cap, and adds a bias that lies beside the output embeddings, such as ESM's.
        vars(bare.config)["final_logit_softcapping"] = None
        vars(bare.get_submodule(owner_name))["bias"] = 0.0
        self.bare, self.output, self.biased = bare, output, owner if output.bias is None else output
        self.softcap = getattr(network.config, "final_logit_softcapping", None)

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """Transform hidden states as the head does before the product, and scale them as it does after it."""
        return self.bare(inputs_embeds=hidden_ND[None]).logits[0]

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the output embeddings [V, D] and the bias [V]. FSDP exchanges parameters, so ask in each pass."""
        return self.output.weight, getattr(self.biased, "bias", None)


class GivenStates(nn.Module):
    """A backbone that returns the hidden states that it is given as `inputs_embeds`."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return GivenOutput([inputs_embeds])


class GivenOutput(list):
    """Hidden states as the output of a backbone that returns nothing else."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def with_parts(module: nn.Module, parts: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module and its parts, except those that `parts` replaces. The copies share all weights with them."""
    if module in parts:
        return parts[module]
    copied = copy.copy(module)
    copied._modules = {name: child and with_parts(child, parts) for name, child in module._modules.items()}
    return copied


LEFT_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_grouped_mm": 0, "grouped_mm_fallback": 0}
"""PyTorch's and transformers' products → the index of their left factor among the arguments."""


class ProductCounter(TorchDispatchMode):
    """A counter of the multiplications with weights, and of attention, while a network runs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage()._cdata for weight in network.parameters()}
        self.with_weights = 0
        self.attention_width = 0.0
        """The sum of the widths of all heads of all layers; if keys and values differ in width, their mean counts."""
        self.widths = defaultdict[int, float](float)
        """Sliding window, or 0 for none → the sum for the layers that have it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name == "bucket_attention":
            q_THK, _, v_TGK, *_, window = args[:9]
            width = q_THK.shape[1] * (q_THK.shape[2] + v_TGK.shape[2]) / 2
            self.attention_width += width
            self.widths[window] += width
        elif name in LEFT_FACTOR:
            left, right = args[LEFT_FACTOR[name] :][:2]
            if self.weights & {left.untyped_storage()._cdata, right.untyped_storage()._cdata}:
                self.with_weights += left.numel() * right.shape[-1]
        return result


@torch.no_grad()
def count_flops(model: PreTrainedModel) -> FlopCount:
    """Count the FLOPs of training a language model from the products that it computes for a short text.

    So shared layers, experts and unequal heads count as often as they are used. If the number of experts differs by
    token (LongCat), the count is an estimate.
    """
    device, is_training = model.device, model.training
    num_tokens = min(COUNTED_TOKENS, position_limit(model) or COUNTED_TOKENS)
    positions_T = torch.arange(num_tokens, device=device)
    layout = lay_out(np.array([0, num_tokens]), causal=False, device=device)
    with ProductCounter(model) as counted:
        hidden_TD = packed_hidden(
            model.eval().base_model, positions_T * 7 % model.config.vocab_size, positions_T, layout
        )
    assert counted.with_weights and counted.attention_width, "products that are formed otherwise than is known here"
    head = LanguageModelHead(model)
    with ProductCounter(model) as of_head:
        head(hidden_TD)
    model.train(is_training)
    flops = training_flops(
        block_weights=counted.with_weights / num_tokens,
        attention_width=counted.attention_width,
        head_weights=of_head.with_weights // num_tokens + head.output.weight.numel(),
    )
    shares = ((window, width / counted.attention_width) for window, width in sorted(counted.widths.items()) if window)
    return replace(flops, windows=tuple(shares))
