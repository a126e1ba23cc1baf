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

BUCKET_WASTE = 2**13
"""A bucket takes shorter samples as long as padding adds no more scores per head: about what a further bucket costs."""
BUCKET_SCORES = 2**18
"""Most attention scores (N · L²) per head of one bucket: more leave the cache between one operation and the next."""
KEPT_KEYS = 512
"""Backward finds the softmax weights kept where a token meets no more keys than this, on average: more of them would
outweigh all else that a block keeps. Otherwise it forms them again."""


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
    plan_PS: Tensor
    """For `buckets`, end to end: the token in each slot of the padded buckets (-1 where there is none) and the sample
    lengths in bucket order. One flat tensor: each size of its own is one that torch.compile may take for 1, or for
    equal to another, and compile again when it is not."""
    num_scores: int
    """For `buckets`: attention scores of one head, padding included."""


def lay_out(
    bounds_S1: np.ndarray, *, causal: bool, device: torch.device | str = "cpu", backend: Backend = "buckets"
) -> Layout:
    """The layout of a packed batch from the offsets of its samples (S + 1 of them, from 0 to T)."""
    lengths_S = np.diff(bounds_S1)
    assert (lengths_S > 0).all(), "a sample without tokens"
    buckets = make_buckets(lengths_S) if backend == "buckets" else []
    slots, sizes = [], []
    for members in buckets:
        longest = int(lengths_S[members].max())
        offsets_L = np.arange(longest)
        inside_NL = offsets_L < lengths_S[members, None]
        slots.append(np.where(inside_NL, bounds_S1[members, None] + offsets_L, -1).ravel())
        sizes.append((len(members), longest))
    plan_PS = np.concatenate([np.zeros(0, np.int64), *slots, *(lengths_S[members] for members in buckets)])
    return Layout(
        causal=causal,
        backend=backend,
        max_len=int(lengths_S.max()) if len(lengths_S) else 0,
        bounds_S1=torch.from_numpy(bounds_S1.astype(np.int32)).to(device),
        sizes_2B=torch.from_numpy(np.array(sizes, dtype=np.int64).ravel()),
        plan_PS=torch.from_numpy(plan_PS).to(device),
        num_scores=sum(num * length**2 for num, length in sizes),
    )


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend for a device and the type of the arithmetic."""
    return "varlen" if device.type == "cuda" and dtype != torch.float32 else "buckets"


def make_buckets(lengths_S: np.ndarray) -> list[np.ndarray]:
    """Sample numbers grouped by about equal length, longest first."""
    order = np.argsort(-lengths_S, kind="stable")
    squares = lengths_S[order].astype(np.int64) ** 2
    buckets: list[np.ndarray] = []
    begin = 0
    while begin < len(order):
        most = max(1, BUCKET_SCORES // int(squares[begin]))
        waste = np.cumsum(squares[begin] - squares[begin : begin + most])
        end = begin + int(np.searchsorted(waste, BUCKET_WASTE, side="right"))
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
    is_kept = torch.is_grad_enabled() and layout.num_scores <= KEPT_KEYS * q_THK.shape[0]
    num_kept = layout.num_scores * q_THK.shape[1] if is_kept else 0
    plan = (layout.sizes_2B, layout.plan_PS, num_kept)
    return bucket_attention(q_THK, k_TGK, v_TGK, *plan, layout.causal, window, scale)[0]


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
# and shape from batch to batch. A row is one token's vector of one head; those of a bucket stand as [N, H, L, K], and
# buckets end to end.


@torch.library.custom_op("biphase::bucket_attention", mutates_args=())
def bucket_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    sizes_2B: Tensor,
    plan_PS: Tensor,
    num_kept: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The outputs [T, H, K], and the softmax weights of all buckets end to end where backward is to have them."""
    buckets, rows, kv_rows = open_plan(sizes_2B, plan_PS, q_THK.shape[1], k_TGK.shape[1])
    q, k, v = rows.gather(q_THK).mul_(scale), kv_rows.gather(k_TGK), kv_rows.gather(v_TGK)
    out, kept = torch.empty_like(q), q.new_empty(num_kept)
    for bucket in buckets:
        weights = bucket.weigh(q, k, causal, window, bucket.of_scores(kept) if num_kept else None)
        torch.bmm(weights, bucket.of_keys(v), out=bucket.of_queries(out))
    return rows.scatter(out, q_THK.shape), kept


@torch.library.custom_op("biphase::bucket_attention_backward", mutates_args=())
def bucket_attention_backward(
    grad_THK: Tensor,
    kept: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    sizes_2B: Tensor,
    plan_PS: Tensor,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    buckets, rows, kv_rows = open_plan(sizes_2B, plan_PS, q_THK.shape[1], k_TGK.shape[1])
    q, k, v = rows.gather(q_THK).mul_(scale), kv_rows.gather(k_TGK), kv_rows.gather(v_TGK)
    grad = rows.gather(grad_THK).index_fill_(0, rows.padding, 0)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for bucket in buckets:
        weights = bucket.of_scores(kept) if len(kept) else bucket.weigh(q, k, causal, window)
        grad_out = bucket.of_queries(grad)
        torch.bmm(weights.transpose(1, 2), grad_out, out=bucket.of_keys(grad_v))
        grad_weights = grad_out @ bucket.of_keys(v).transpose(1, 2)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        torch.bmm(grad_scores, bucket.of_keys(k), out=bucket.of_queries(grad_q))
        torch.bmm(grad_scores.transpose(1, 2), bucket.of_queries(q), out=bucket.of_keys(grad_k))
    grad_q.mul_(scale)
    return (
        rows.scatter(grad_q, q_THK.shape),
        kv_rows.scatter(grad_k, k_TGK.shape),
        kv_rows.scatter(grad_v, v_TGK.shape),
    )


@dataclass(frozen=True)
class Rows:
    """How the rows of all buckets are filled from [T, H, K], and back."""

    sources: Tensor
    """Of each row of the buckets, its row in [T·H, K]; of padding, any."""
    places: Tensor
    """Of each row in [T·H, K], its row in the buckets."""
    padding: Tensor
    """The rows of the buckets that are padding."""

    def gather(self, x_THK: Tensor) -> Tensor:
        return x_THK.reshape(-1, x_THK.shape[2]).index_select(0, self.sources)

    def scatter(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.index_select(0, self.places).view(shape)


@dataclass(frozen=True)
class Bucket:
    """N samples of about one length L: where their rows and scores are among those of all buckets."""

    num: int
    length: int
    first_slot: int
    first_score: int
    """Of one head."""
    num_heads: int
    num_kv_heads: int
    lengths_N: Tensor

    def of_queries(self, rows: Tensor) -> Tensor:
        """[N·G, H/G·L, K]: the query heads of a key-value head stand below each other."""
        return self.cut(rows, self.first_slot, self.num * self.length, self.num_heads, rows.shape[1])

    def of_keys(self, rows: Tensor) -> Tensor:
        """[N·G, L, K]."""
        return self.cut(rows, self.first_slot, self.num * self.length, self.num_kv_heads, rows.shape[1])

    def of_scores(self, scores: Tensor) -> Tensor:
        """[N·G, H/G·L, L]."""
        return self.cut(scores, self.first_score, self.num * self.length**2, self.num_heads, self.length)

    def cut(self, x: Tensor, first: int, num: int, num_heads: int, width: int) -> Tensor:
        return x[first * num_heads : (first + num) * num_heads].view(self.num * self.num_kv_heads, -1, width)

    def weigh(self, q: Tensor, k: Tensor, causal: bool, window: int, into: Tensor | None = None) -> Tensor:
        """Softmax of the scores; PyTorch sums those of 16 bits in fp32."""
        scores = torch.bmm(self.of_queries(q), self.of_keys(k).transpose(1, 2), out=into)
        self.hide(scores.view(self.num, self.num_heads, self.length, self.length), causal, window)
        return torch.ops.aten._softmax.out(scores, -1, False, out=scores)

    def hide(self, scores_NHLL: Tensor, causal: bool, window: int) -> None:
        """-inf where a query must not see a key. What padded queries see does not matter, but it must be something."""
        places_L = torch.arange(self.length, device=scores_NHLL.device)
        if causal or window:
            sees_LL = visible(places_L[:, None] - places_L, causal, window)
            scores_NHLL += scores_NHLL.new_zeros(sees_LL.shape).masked_fill_(~sees_LL, float("-inf"))
        shortest = int(self.lengths_N.min())
        if causal or shortest == self.length:  # when causal, padding is behind all that a token may see
            return
        padded_N11L = (places_L[shortest:] >= self.lengths_N[:, None])[:, None, None, :]
        if window:  # padded queries whose window is all padding see themselves
            padded_N11L = padded_N11L & (places_L[:, None] != places_L[shortest:])
        scores_NHLL[..., shortest:].masked_fill_(padded_N11L, float("-inf"))


def open_plan(sizes_2B: Tensor, plan_PS: Tensor, num_heads: int, num_kv_heads: int) -> tuple[list[Bucket], Rows, Rows]:
    """The buckets of a `Layout`, and where the rows of queries and those of keys go."""
    sizes = sizes_2B.view(-1, 2).tolist()
    num_slots = sum(num * length for num, length in sizes)
    slots_P, lengths_S = plan_PS[:num_slots], plan_PS[num_slots:]
    buckets: list[Bucket] = []
    slot = score = sample = 0
    for num, length in sizes:
        lengths_N = lengths_S[sample : sample + num]
        buckets.append(Bucket(num, length, slot, score, num_heads, num_kv_heads, lengths_N))
        slot, score, sample = slot + num * length, score + num * length**2, sample + num
    rows = make_rows(buckets, slots_P, num_heads)
    return buckets, rows, rows if num_kv_heads == num_heads else make_rows(buckets, slots_P, num_kv_heads)


def make_rows(buckets: list[Bucket], slots_P: Tensor, num_heads: int) -> Rows:
    heads_H1 = torch.arange(num_heads, device=slots_P.device)[:, None]
    parts = [slots_P.new_empty(0)]
    for bucket in buckets:
        slots_N1L = slots_P[bucket.first_slot :][: bucket.num * bucket.length].view(bucket.num, 1, bucket.length)
        parts.append((slots_N1L * num_heads + heads_H1).flatten())
    sources = torch.cat(parts)  # padding is below 0
    is_padding = sources < 0
    real = (~is_padding).nonzero().squeeze(1)
    places = torch.empty_like(real)
    places[sources[real]] = real
    return Rows(sources.clamp_(min=0), places, is_padding.nonzero().squeeze(1))


@bucket_attention.register_fake
def _(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, sizes_2B: Tensor, plan_PS: Tensor, num_kept: int, *_: Any) -> Any:
    return q_THK.new_empty(q_THK.shape), q_THK.new_empty(num_kept)


@bucket_attention_backward.register_fake
def _(grad_THK: Tensor, kept: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *_: Any) -> Any:
    return q_THK.new_empty(q_THK.shape), k_TGK.new_empty(k_TGK.shape), v_TGK.new_empty(v_TGK.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else as many zeros as there are weights
    ctx.save_for_backward(output[1], *inputs[:5])
    ctx.settings = inputs[6:]


def _bucket_gradients(ctx: Any, grad_THK: Tensor, _: Tensor) -> tuple[Any, ...]:
    grads = bucket_attention_backward(grad_THK.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return (*grads, *[None] * 6)


bucket_attention.register_autograd(_bucket_gradients, setup_context=_keep_inputs)
