"""Attention over flat packed tokens: one function for every transformers model, with sample bounds and a causal flag.

`lay_out` turns the bounds of a packed batch into a `PackedLayout`, once per microbatch. Every layer of the network
receives it as the keyword `layout` and passes it to the function registered here under the name `biphase`. Four
backends compute the same result: `varlen` (PyTorch's variable-length flash kernel; CUDA, 16 bits), `buckets` (batches
samples of similar length; any device and type), `sdpa` (PyTorch's kernel for batches, over neighbours of one length:
fastest on a CPU where no gradient is formed) and `reference` (the slow twin: one [T, T] mask).

Flash attention calls `bounds_F1` cu_seqlens; `max_seqlen` has the same name there.

Letters: T packed tokens, S samples, F samples with the padding sample, H query heads, G key-value heads, K head width,
B buckets, N samples of a bucket, L its length, P slots of all buckets.
"""

import inspect
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import AttentionInterface

from biphase.device import explain_dtype, to_device
from biphase.encoder.buckets import (
    EagerBucketAttention,
    OpenPlan,
    bucket_attention,
    open_plan,
    plan_buckets,
    visible,
)
from biphase.errors import InputError
from biphase.flops import KEPT_KEYS
from biphase.machine import name_bf16_cores

ATTENTION = "biphase"
Backend = Literal["varlen", "buckets", "sdpa", "reference"]

PAD_TO_MULTIPLE_OF = 32
"""The multiple to which training and evaluation pad the tokens of a batch, once, at its end, and in 16 bits the targets
of pretraining. So sizes recur: allocators find blocks that fit, and a CPU's bf16 products find code compiled for their
size."""

WIDEST_VARLEN = 256
"""The widest heads of flash attention."""

LEAST_CAPABILITY = (8, 0)
"""The least compute capability of NVIDIA GPUs for flash attention: Ampere. V100 is 7.0, T4 is 7.5."""

HAS_GROUPED_VARLEN = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Whether PyTorch has an argument for query heads that share key-value heads; its kernels support them in any
version."""


@dataclass(frozen=True)
class PackedLayout:
    """The positions of the samples in a packed batch, and the tokens that each token may see."""

    causal: bool
    backend: Backend
    max_seqlen: int
    """The length of the longest sample, the padding sample included."""
    bounds_S1: Tensor
    """cu_seqlens: the start of each sample and the end of the last one; int32, on the device of the tokens. Samples of
    7, 1 and 6 tokens have 0, 7, 8, 14."""
    bounds_F1: Tensor
    """cu_seqlens with the padding, if any, as a sample of its own at the end. Attention uses these."""
    num_padding: int
    """The number of tokens in the padding sample."""
    runs: list[tuple[int, int]]
    """For `sdpa`: number and length of neighbouring samples of one length, the padding included."""
    sizes_3B: Tensor
    """For `buckets`, on the CPU: samples, length and shortest sample of each bucket, one triple after the other."""
    plan_PS: Tensor
    """For `buckets`, end to end: the start of each slot's sample among the slots, the slot's position in the sample and
    the length of its bucket, with slots of tokens before slots of padding; then the sample lengths in bucket order. It
    is one flat tensor, because torch.compile may assume that a size is 1 or equals another, and compile again if that
    changes."""
    num_slots: int
    """For `buckets`: the number of slots, P."""
    num_scores: int
    """For `buckets`: the number of attention scores of one head, padding included."""
    opened: dict[tuple[int, int], OpenPlan] = field(default_factory=dict, compare=False, repr=False)
    """For `buckets`: the plan as eager layers read it, by the numbers of heads and of key-value heads."""
    bands: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """For `sdpa`: the pairs of positions that layers with a sliding window see, by window."""

    def open_for(self, q_THK: Tensor, k_TGK: Tensor) -> OpenPlan:
        """Open the plan for layers with so many heads, once."""
        num_heads, num_kv_heads = heads = q_THK.shape[1], k_TGK.shape[1]
        if heads not in self.opened:
            self.opened[heads] = open_plan(self.sizes_3B, self.plan_PS, len(q_THK), num_heads, num_kv_heads)
        return self.opened[heads]

    def band(self, window: int) -> Tensor:
        """Return which keys each query sees under a sliding window, as booleans [L, L] of the longest sample, made
        once. It depends only on distances, so that its corner is that of a shorter sample."""
        if window not in self.bands:
            ones_LL = torch.ones(self.max_seqlen, self.max_seqlen, dtype=torch.bool, device=self.bounds_F1.device)
            self.bands[window] = ones_LL.tril_(0 if self.causal else window).triu_(self.causal - window)
        return self.bands[window]


def lay_out(
    bounds_S1: np.ndarray,
    *,
    causal: bool,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    pad_to_multiple_of: int = 1,
) -> PackedLayout:
    """Lay out a packed batch by the offsets of its samples (S + 1 of them, from 0 to T).

    The default backend is the fastest one for the device and dtype. The layout pads T to a multiple of
    `pad_to_multiple_of`; `packed_hidden` adds this padding and removes it again.
    """
    device, num_tokens = torch.device(device), int(bounds_S1[-1])
    backend = backend or choose_backend(device, dtype)
    num_padding = -num_tokens % pad_to_multiple_of
    bounds_F1 = np.append(bounds_S1, num_tokens + num_padding) if num_padding else bounds_S1
    lengths_F = np.diff(bounds_F1)
    assert (lengths_F > 0).all(), "a sample without tokens"
    # `varlen` and `sdpa` need a plan too, for layers that they cannot compute.
    sizes_3B, plan_PS = plan_buckets(bounds_F1[:1] if backend == "reference" else bounds_F1, dtype.itemsize)
    return PackedLayout(
        causal=causal,
        backend=backend,
        max_seqlen=int(lengths_F.max()) if len(lengths_F) else 0,
        bounds_S1=to_device(bounds_S1.astype(np.int32), device),
        bounds_F1=to_device(bounds_F1.astype(np.int32), device),
        num_padding=num_padding,
        runs=[(len(list(run)), length) for length, run in groupby(lengths_F.tolist())] if backend == "sdpa" else [],
        sizes_3B=torch.from_numpy(sizes_3B),
        plan_PS=to_device(plan_PS, device),
        num_slots=int((sizes_3B[::3] * sizes_3B[1::3]).sum()),
        num_scores=int((sizes_3B[::3] * sizes_3B[1::3] ** 2).sum()),
    )


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Choose the fastest backend for a device and the type of the arithmetic."""
    if lacks_varlen(device, dtype):
        return "buckets"
    newest_flash(device)
    return "varlen"


def choose_inference_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Choose the fastest backend where no gradient is formed. Its outputs equal those of training but for rounding.

    In bf16, PyTorch's kernel for batches is the fastest on a CPU with matrix units (AMX). With AVX-512 alone it takes
    1.1 to 2 times as long as `buckets` (docs/LOG.md).
    """
    if not lacks_varlen(device, dtype):
        return choose_backend(device, dtype)
    has_vectors_alone = device.type == "cpu" and dtype == torch.bfloat16 and name_bf16_cores() == {"avx512_bf16"}
    return "buckets" if has_vectors_alone else "sdpa"


def lacks_varlen(device: torch.device, dtype: torch.dtype) -> str:
    """Name the device or type for which `varlen` does not exist, or return ""."""
    if device.type != "cuda":
        return device.type
    if dtype == torch.float32:
        return f"{device.type} in fp32"
    if torch.version.hip is not None:  # AMD numbers its capabilities differently
        return ""
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= LEAST_CAPABILITY else f"compute capability {capability[0]}.{capability[1]}"


@cache
def newest_flash(device: torch.device) -> str:
    """Name the flash attention of `varlen`, and activate it for the whole process: FA3 on a Hopper GPU with its kernels
    installed, else FA2, PyTorch's own."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    if activate is None or not is_hopper or find_spec("flash_attn_interface") is None:
        return "FA2"
    try:
        activate("FA3")
    except (ImportError, RuntimeError, ValueError) as error:  # built for another PyTorch, without a backward pass, …
        return f"FA2, because FA3 does not start: {error}"
    return "FA3"


def explain_backend(device: torch.device, dtype: torch.dtype, beyond: str = "") -> str:
    """Name the backend of `choose_backend`, or of layers with a property `beyond` varlen, and the reason."""
    if lack := lacks_varlen(device, dtype):
        needs = "CUDA, compute capability 8.0 and bf16"
        return f"buckets, samples of similar length in a batch (varlen needs {needs}; here: {lack})"
    if beyond:
        return f"buckets, samples of similar length in a batch, for layers with {beyond}, which varlen does not know"
    return f"varlen, PyTorch's packed flash attention (CUDA, 16 bits; {newest_flash(device)})"


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer: the width of Gemma 4's heads differs from layer to layer."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def explain_computing(dtype: torch.dtype, device: torch.device, network: nn.Module) -> str:
    """Name the device, the type of the arithmetic and the attention kernel of a headless network, with reasons."""
    attention = "its own, on padded batches"
    config: Any = network.config
    if config._attn_implementation == ATTENTION:
        has_sinks = any(name.rpartition(".")[2].startswith("sink") for name, _ in network.named_parameters())
        softcap = getattr(config, "attn_logit_softcapping", None)
        beyond = []
        for layer in layer_configs(config):
            width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
            if getattr(layer, "kv_lora_rank", None):  # DeepSeek's attention, whose queries are wider than its values
                width = layer.qk_nope_head_dim + layer.qk_rope_head_dim
            beyond.append(beyond_varlen(softcap, has_sinks, width))
        attention = explain_backend(device, dtype, max(beyond))
    return f"{device}, {explain_dtype(dtype, device)} · attention: {attention}"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend, called by transformers in every layer: q is [1, H, T, K], k and v are [1, G, T, K].

    Returns [1, T, H, K]. As in transformers, a sliding window of w keeps positions at a distance below w to the left
    when causal, else up to w to both sides.
    """
    if layout is None:
        raise InputError("this model attends over packed batches only: call it through biphase, or export it")
    if dropout:
        raise InputError(f"{type(module).__name__} uses dropout in attention, which packed training does not support")
    # Under autocast, rotary embeddings leave q and k in fp32; v has the type of the computation.
    q_THK, k_TGK = query.squeeze(0).transpose(0, 1).to(value.dtype), key.squeeze(0).transpose(0, 1).to(value.dtype)
    v_TGK = value.squeeze(0).transpose(0, 1)
    scale = q_THK.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if window and not layout.causal:
        # ModernBERT passes one more, which flash kernels subtract again; transformers' own masks follow the config.
        window = min(window, layer_window(module) or window)
        config: Any = getattr(module, "config", None)
        # Published embedding models like Gemma 3 count the token itself on both sides; transformers' switch does not.
        # Gemma, Gemma 2 and Gemma 4 have that key too, and masks that ignore it.
        counts_itself = getattr(config, "model_type", "") == "gemma3_text" and config.use_bidirectional_attention
        window -= bool(counts_itself and getattr(config, "is_causal", True))
    out_THK = attend(q_THK, k_TGK, v_TGK, layout, scale, window, softcap or 0.0, s_aux)
    return out_THK.unsqueeze(0), None


AttentionInterface.register(ATTENTION, packed_attention)


def layer_window(module: Any) -> int | None:
    """Return the window that the configuration gives to the layer of an attention module, if it gives one.

    A heterogeneous configuration makes that of a layer anew at each reading, so the module keeps the window.
    """
    if not hasattr(module, "configured_window"):
        config: Any = getattr(module, "config", None)
        layer = config.per_layer_config[module.layer_idx] if getattr(config, "is_heterogeneous", False) else config
        module.configured_window = getattr(layer, "sliding_window", None)
    return module.configured_window


def attend(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention inside each sample, [T, H, K]. `window` 0 means no limit on the distance.

    With `softcap` c a score s becomes c · tanh(s / c). A sink is a further key of each head, with that score and
    without a value. `buckets` computes the layers that `varlen` and `sdpa` cannot.
    """
    if layout.backend == "sdpa" and not softcap and sinks_H is None:
        return sdpa_attention(q_THK, k_TGK, v_TGK, layout, scale, window)
    if layout.backend == "varlen" and not beyond_varlen(softcap, sinks_H is not None, q_THK.shape[2]):
        return varlen_attention(q_THK, k_TGK, v_TGK, layout, scale, window)
    if layout.backend == "reference":
        return reference_attention(q_THK, k_TGK, v_TGK, layout, scale, window, softcap, sinks_H)
    # If the softmax weights are kept, the backward pass reads them; else it recomputes them.
    is_kept = torch.is_grad_enabled() and layout.num_scores <= KEPT_KEYS * q_THK.shape[0]
    is_kept = is_kept and not softcap and sinks_H is None  # gradients with a cap or sinks need more than the weights
    num_kept = layout.num_scores * q_THK.shape[1] if is_kept else 0
    rows, settings = (q_THK * scale, k_TGK, v_TGK), (num_kept, layout.causal, window, softcap)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        opened = layout.open_for(q_THK, k_TGK)
        return EagerBucketAttention.apply(*rows, sinks_H, opened, *settings)
    return bucket_attention(*rows, layout.sizes_3B, layout.plan_PS, layout.num_slots, *settings, sinks_H)[0]


def beyond_varlen(softcap: float | None, has_sinks: bool, width: int) -> str:
    """Name a property that PyTorch's packed flash attention cannot compute, or return ""."""
    if softcap:
        return "a cap on the scores"
    if has_sinks:
        return "sinks"
    return f"heads of width {width}" if width > WIDEST_VARLEN or width % 8 else ""


def reference_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Score every pair of tokens, and mask those that may not meet: the slow twin."""
    indices_T = torch.arange(len(q_THK), device=q_THK.device)
    # Bounds 0, 7, 8, 14 put token 6 into sample 1, token 7 into sample 2, token 8 into sample 3.
    sample_T = torch.searchsorted(layout.bounds_F1.long(), indices_T, right=True)
    sees_TT = (sample_T[:, None] == sample_T) & visible(indices_T[:, None] - indices_T, layout.causal, window)
    repeats = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THK = k_TGK.repeat_interleave(repeats, 1), v_TGK.repeat_interleave(repeats, 1)
    scores_HTT = torch.einsum("thk,shk->hts", q_THK.float(), k_THK.float()) * scale
    if softcap:
        scores_HTT = softcap * torch.tanh(scores_HTT / softcap)
    scores_HTT = scores_HTT.masked_fill(~sees_TT, float("-inf"))
    if sinks_H is not None:
        sinks_HT1 = sinks_H.float()[:, None, None].expand(-1, len(q_THK), 1)
        scores_HTT = torch.cat([scores_HTT, sinks_HT1], -1)
    weights_HTT = scores_HTT.softmax(-1)[..., : len(q_THK)]
    return torch.einsum("hts,shk->thk", weights_HTT, v_THK.float()).to(v_TGK.dtype)


def sdpa_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, layout: PackedLayout, scale: float, window: int
) -> Tensor:
    """Attend by PyTorch's `scaled_dot_product_attention`. Neighbouring samples of one length are a view [N, H, L, K] of
    the tokens, so nothing is padded, and nothing is moved where samples come sorted by length."""
    settings: Any = {"scale": scale, "enable_gqa": q_THK.shape[1] != k_TGK.shape[1]}
    settings["is_causal"] = layout.causal and not window
    sizes = [num * length for num, length in layout.runs]
    outputs = []
    for (num, length), *rows in zip(layout.runs, *(x.split(sizes) for x in (q_THK, k_TGK, v_TGK)), strict=True):
        q, k, v = (part.unflatten(0, (num, length)).transpose(1, 2) for part in rows)
        sees_LL: Any = layout.band(window)[:length, :length] if window else None
        out_NHLV = nn.functional.scaled_dot_product_attention(q, k, v, sees_LL, **settings)
        outputs.append(out_NHLV.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def varlen_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, layout: PackedLayout, scale: float, window: int
) -> Tensor:
    """Attend by PyTorch's packed flash attention."""
    grouped: dict[str, Any] = {"enable_gqa": True} if HAS_GROUPED_VARLEN else {}
    # The kernel counts the keys to the left and right of a query, without itself; -1 is no limit.
    side = window - layout.causal if window else -1
    width = v_TGK.shape[2]
    if width != q_THK.shape[2]:  # the kernel needs heads of one width
        v_TGK = nn.functional.pad(v_TGK, (0, q_THK.shape[2] - width))
    out_THK: Any = varlen.varlen_attn(
        q_THK.contiguous(),
        k_TGK.contiguous(),
        v_TGK.contiguous(),
        layout.bounds_F1,
        layout.bounds_F1,
        layout.max_seqlen,
        layout.max_seqlen,
        scale=scale,
        window_size=(side, 0 if layout.causal else side),
        **grouped,
    )
    return out_THK[..., :width]
