"""Attention over flat packed tokens: one function for every transformers model, with sample bounds and a causal flag.

`lay_out` turns the bounds of a packed batch into a `Layout`, once per microbatch; every layer of the network receives
it as the keyword `layout` and hands it to the function registered here under the name `biphase`. Three backends compute
the same thing: `varlen` (PyTorch's variable-length flash kernel; CUDA, 16 bits), `buckets` (samples of about one length
batched together; any device and type) and `reference` (the slow twin: one [T, T] mask).

Letters: T packed tokens, S samples, H query heads, G key-value heads, K head width, B buckets, N samples of a bucket,
L its length, P padded tokens of all buckets.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface

from biphase.errors import InputError

ATTENTION = "biphase"
Backend = Literal["varlen", "buckets", "reference"]

BUCKET_WASTE = 1.15
"""A bucket takes samples down to 1 / this of its longest: more would pay more in padding than it saves in calls."""
SHORT_SAMPLE = 32
"""Samples up to this length share one bucket whatever they waste: there a call costs more than the arithmetic."""
BUCKET_SCORES = 2**18
"""Most attention scores (N · L²) per head of one bucket: more leave the cache between one operation and the next."""


class NoLayoutError(InputError):
    """The caller gave no layout, or the network did not hand it on to its attention."""


@dataclass(frozen=True)
class Layout:
    """Where the samples of a packed batch lie, and what each token may see."""

    causal: bool
    backend: Backend
    max_len: int
    bounds_S1: Tensor
    """int32, on the device of the tokens."""
    sizes_2B: Tensor
    """For `buckets`, on the CPU: samples and length of each bucket, one pair after the other."""
    plan_PTS: Tensor
    """For `buckets`, end to end: the token in each slot of the padded buckets (0 where there is none), the slot of each
    token, and the sample lengths in bucket order. One flat tensor: each size of its own is one that torch.compile may
    take for 1, or for equal to another, and compile again when it is not."""


def lay_out(
    bounds_S1: np.ndarray, *, causal: bool, device: torch.device | str = "cpu", backend: Backend = "buckets"
) -> Layout:
    """The layout of a packed batch from the offsets of its samples (S + 1 of them, from 0 to T)."""
    lengths_S = np.diff(bounds_S1)
    assert (lengths_S > 0).all(), "a sample without tokens"
    buckets = make_buckets(lengths_S) if backend == "buckets" else []
    slots, sizes = [], []
    for members in buckets:
        longest = lengths_S[members].max()
        offsets_L = np.arange(longest)
        inside_NL = offsets_L < lengths_S[members, None]
        slots.append(np.where(inside_NL, bounds_S1[members, None] + offsets_L, -1).ravel())
        sizes.append((len(members), longest))
    empty = np.zeros(0, np.int64)
    slots_P = np.concatenate([empty, *slots])
    slot_of_T = np.empty(bounds_S1[-1] if buckets else 0, np.int64)
    slot_of_T[slots_P[slots_P >= 0]] = np.flatnonzero(slots_P >= 0)
    plan_PTS = np.concatenate([np.maximum(slots_P, 0), slot_of_T, lengths_S[np.concatenate([empty, *buckets])]])
    return Layout(
        causal=causal,
        backend=backend,
        max_len=int(lengths_S.max()) if len(lengths_S) else 0,
        bounds_S1=torch.from_numpy(bounds_S1.astype(np.int32)).to(device),
        sizes_2B=torch.from_numpy(np.array(sizes, dtype=np.int64).ravel()),
        plan_PTS=torch.from_numpy(plan_PTS).to(device),
    )


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend for a device and the type of the arithmetic."""
    return "varlen" if device.type == "cuda" and dtype != torch.float32 else "buckets"


def make_buckets(lengths_S: np.ndarray) -> list[np.ndarray]:
    """Sample numbers grouped by about equal length, longest first."""
    order = np.argsort(-lengths_S, kind="stable")
    buckets: list[np.ndarray] = []
    begin = 0
    while begin < len(order):
        longest = lengths_S[order[begin]]
        shortest = 0 if longest <= SHORT_SAMPLE else longest / BUCKET_WASTE
        fits = int(np.searchsorted(-lengths_S[order], -shortest, side="right"))
        end = max(begin + 1, min(fits, begin + BUCKET_SCORES // int(longest) ** 2))
        buckets.append(order[begin:end])
        begin = end
    return buckets


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; q is [1, H, T, K], k and v are [1, G, T, K].

    Returns [1, T, H, K]. A sliding window of w keeps positions at a distance below w to the left when causal, and up
    to w to both sides when not, as transformers does.
    """
    if layout is None:
        raise NoLayoutError("this model attends over packed batches only: call it through biphase, or export it first")
    unsupported = {"dropout": dropout, "softcap": softcap, "attention sinks": s_aux is not None}
    if any(unsupported.values()):
        names = ", ".join(name for name, used in unsupported.items() if used)
        raise InputError(f"{type(module).__name__} uses {names} in attention, which packed training does not support")
    # Rotary embeddings leave q and k in fp32 under autocast; v carries the type of the computation.
    q_THK, k_TGK, v_TGK = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    scale = q_THK.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if window and not layout.causal:
        # ModernBERT passes one more, which flash kernels take off again; transformers' own masks go by the config.
        window = min(window, getattr(getattr(module, "config", None), "sliding_window", None) or window)
    out_THK = attend(q_THK, k_TGK, v_TGK, layout, scale, window)
    return out_THK.unsqueeze(0), None


AttentionInterface.register(ATTENTION, packed_attention)


def attend(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, layout: Layout, scale: float, window: int = 0) -> Tensor:
    """Softmax attention inside each sample, [T, H, K]. `window` 0 means no limit on the distance."""
    if layout.backend == "varlen":
        return varlen_attention(q_THK, k_TGK, v_TGK, layout, scale, window)
    if layout.backend == "reference":
        return reference_attention(q_THK, k_TGK, v_TGK, layout, scale, window)
    return bucket_attention(q_THK, k_TGK, v_TGK, layout.sizes_2B, layout.plan_PTS, layout.causal, window, scale)


def reference_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, layout: Layout, scale: float, window: int
) -> Tensor:
    """The slow twin: every pair of tokens is scored, and a mask says which may meet."""
    places_T = torch.arange(len(q_THK), device=q_THK.device)
    sample_T = torch.searchsorted(layout.bounds_S1.long(), places_T, right=True)
    sees_TT = (sample_T[:, None] == sample_T) & visible(places_T[:, None] - places_T, layout.causal, window)
    repeats = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THK = k_TGK.repeat_interleave(repeats, 1), v_TGK.repeat_interleave(repeats, 1)
    scores_HTT = torch.einsum("thk,shk->hts", q_THK.float(), k_THK.float()) * scale
    weights_HTT = scores_HTT.masked_fill(~sees_TT, float("-inf")).softmax(-1)
    return torch.einsum("hts,shk->thk", weights_HTT, v_THK.float()).to(v_TGK.dtype)


def visible(distance: Tensor, causal: bool, window: int) -> Tensor:
    """Whether a query may see a key that lies `distance` positions before it (negative: after it)."""
    sees = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return sees & (distance.abs() <= reach(causal, window)) if window else sees


def reach(causal: bool, window: int) -> int:
    """The farthest distance inside a window, as transformers counts: the token itself is one of a causal window's."""
    return window - 1 if causal else window


def varlen_attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, layout: Layout, scale: float, window: int) -> Tensor:
    """PyTorch's packed flash attention."""
    grouped: dict[str, Any] = {}
    if q_THK.shape[1] != k_TGK.shape[1]:
        if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
            grouped["enable_gqa"] = True
        else:
            repeats = q_THK.shape[1] // k_TGK.shape[1]
            k_TGK, v_TGK = k_TGK.repeat_interleave(repeats, 1), v_TGK.repeat_interleave(repeats, 1)
    side = reach(layout.causal, window) if window else -1
    out_THK: Any = varlen.varlen_attn(
        q_THK.contiguous(),
        k_TGK.contiguous(),
        v_TGK.contiguous(),
        layout.bounds_S1,
        layout.bounds_S1,
        layout.max_len,
        layout.max_len,
        scale=scale,
        window_size=(side, 0 if layout.causal else side),
        **grouped,
    )
    return out_THK


# `buckets` is an opaque operator, so that torch.compile keeps a block in one graph although buckets differ in number
# and shape from batch to batch. Its backward recomputes the weights: a stored [H, L, L] costs more than it saves.


@torch.library.custom_op("biphase::bucket_attention", mutates_args=())
def bucket_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    sizes_2B: Tensor,
    plan_PTS: Tensor,
    causal: bool,
    window: int,
    scale: float,
) -> Tensor:
    slots_P, slot_of_T, lengths_S = open_plan(sizes_2B, plan_PTS)
    outs = []
    for q, k, v, hidden in bucket_views(q_THK, k_TGK, v_TGK, sizes_2B, slots_P, lengths_S, causal, window):
        weights = bucket_weights(q, k, hidden, scale)
        outs.append(join_heads(weights @ v, q_THK.shape[1]))
    return torch.cat(outs).index_select(0, slot_of_T)


@torch.library.custom_op("biphase::bucket_attention_backward", mutates_args=())
def bucket_attention_backward(
    grad_THK: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    sizes_2B: Tensor,
    plan_PTS: Tensor,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    slots_P, slot_of_T, lengths_S = open_plan(sizes_2B, plan_PTS)
    grad_PHK = grad_THK.new_zeros(len(slots_P), *grad_THK.shape[1:]).index_copy_(0, slot_of_T, grad_THK)
    num_heads, num_kv_heads = q_THK.shape[1], k_TGK.shape[1]
    grads_q, grads_k, grads_v = [], [], []
    first = 0
    for q, k, v, hidden in bucket_views(q_THK, k_TGK, v_TGK, sizes_2B, slots_P, lengths_S, causal, window):
        num, length = q.shape[0], k.shape[2]
        grad = split_heads(grad_PHK[first : first + num * length], num, num_kv_heads)
        first += num * length
        weights = bucket_weights(q, k, hidden, scale)
        grads_v.append(join_heads(weights.transpose(-1, -2) @ grad, num_kv_heads))
        grad_weights = grad @ v.transpose(-1, -2)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_scores *= scale
        grads_q.append(join_heads(grad_scores @ k, num_heads))
        grads_k.append(join_heads(grad_scores.transpose(-1, -2) @ q, num_kv_heads))
    gather = [torch.cat(grads).index_select(0, slot_of_T) for grads in (grads_q, grads_k, grads_v)]
    return gather[0], gather[1], gather[2]


def open_plan(sizes_2B: Tensor, plan_PTS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three lists of `Layout.plan_PTS`: slots [P], slot of each token [T], lengths [S]."""
    num_samples, num_slots = int(sizes_2B[::2].sum()), int((sizes_2B[::2] * sizes_2B[1::2]).sum())
    parts = plan_PTS.split([num_slots, len(plan_PTS) - num_slots - num_samples, num_samples])
    return parts[0], parts[1], parts[2]


def bucket_views(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    sizes_2B: Tensor,
    slots_P: Tensor,
    lengths_S: Tensor,
    causal: bool,
    window: int,
) -> Any:
    """Yields q [N, G, H/G·L, K], k and v [N, G, L, K] and the mask of what is hidden (None if nothing) per bucket."""
    q_PHK, k_PGK, v_PGK = (tensor.index_select(0, slots_P) for tensor in (q_THK, k_TGK, v_TGK))
    num_kv_heads = k_TGK.shape[1]
    first_slot = first_sample = 0
    for num, length in sizes_2B.view(-1, 2).tolist():
        slots = slice(first_slot, first_slot + num * length)
        q, k, v = (split_heads(tensor[slots], num, num_kv_heads) for tensor in (q_PHK, k_PGK, v_PGK))
        lengths_N = lengths_S[first_sample : first_sample + num]
        yield q, k, v, hidden_mask(lengths_N, length, q.shape[2] // length, causal, window)
        first_slot, first_sample = first_slot + num * length, first_sample + num


def hidden_mask(lengths_N: Tensor, length: int, repeats: int, causal: bool, window: int) -> Tensor | None:
    """Boolean [N or 1, 1, H/G·L or 1, L]: the keys a query must not see. Padded queries see what they like."""
    places_L = torch.arange(length, device=lengths_N.device)
    hidden = None
    if causal or window:
        hidden = ~visible(places_L[:, None] - places_L, causal, window).repeat(repeats, 1)[None, None]
    if int(lengths_N.min()) < length:
        padded = (places_L >= lengths_N[:, None])[:, None, None, :]
        if window:
            # A padded query whose whole window is padding must see something, or its weights are NaN.
            padded = padded & ~torch.eye(length, dtype=torch.bool, device=padded.device).repeat(repeats, 1)
        hidden = padded if hidden is None else hidden | padded
    return hidden


def bucket_weights(q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Softmax of the scores of one bucket, [N, G, H/G·L, L]; PyTorch sums those of 16 bits in fp32."""
    scores = (q * scale) @ k.transpose(-1, -2)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


def split_heads(x_PHK: Tensor, num: int, num_kv_heads: int) -> Tensor:
    """[N·L, H, K] → [N, G, H/G·L, K]: the query heads of a key-value head stand below each other."""
    x = x_PHK.view(num, -1, num_kv_heads, x_PHK.shape[1] // num_kv_heads, x_PHK.shape[2])
    return x.permute(0, 2, 3, 1, 4).reshape(num, num_kv_heads, -1, x_PHK.shape[2])


def join_heads(x: Tensor, num_heads: int) -> Tensor:
    """[N, G, H/G·L, K] → [N·L, H, K]."""
    num, num_kv_heads, _, width = x.shape
    x = x.reshape(num, num_kv_heads, num_heads // num_kv_heads, -1, width)
    return x.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, width)


@bucket_attention.register_fake
def _(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *_: Any) -> Tensor:
    return q_THK.new_empty(q_THK.shape)


@bucket_attention_backward.register_fake
def _(grad_THK: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q_THK.new_empty(q_THK.shape), k_TGK.new_empty(k_TGK.shape), v_TGK.new_empty(v_TGK.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _bucket_gradients(ctx: Any, grad_THK: Tensor) -> tuple[Any, ...]:
    grads = bucket_attention_backward(grad_THK.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return (*grads, *[None] * 5)


bucket_attention.register_autograd(_bucket_gradients, setup_context=_keep_inputs)
