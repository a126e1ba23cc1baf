"""Packed attention for any device and type: samples of about one length are batched, and padding is masked.

`plan_buckets` decides once per microbatch which samples share a bucket. The operator is opaque, so that torch.compile
keeps a block in one graph although buckets differ in number and shape from batch to batch. A row is one token's vector
of one head; the rows of a bucket stand as [N, H, L, K], and buckets end to end.

Letters: T packed tokens, S samples, H query heads, G key-value heads, K head width, B buckets, N samples of a bucket,
L its length, P padded tokens of all buckets.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

BUCKET_WASTE = 2**13
"""A bucket takes shorter samples as long as padding adds no more scores per head: about what a further bucket costs."""
BUCKET_SCORES = 2**18
"""Most attention scores (N · L²) per head of one bucket: more leave the cache between one operation and the next."""
LENGTHS_STEP = 16
"""Buckets are as long as a multiple of this, so that sizes recur from batch to batch, as with `attention.FILLED_TO`,
and rows of scores fill a CPU's registers."""


def plan_buckets(bounds_S1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For samples between `bounds_S1`: `Layout.sizes_2B` and `Layout.plan_PS`."""
    lengths_S = np.diff(bounds_S1)
    padded_S = -(-lengths_S // LENGTHS_STEP) * LENGTHS_STEP
    buckets = make_buckets(padded_S)
    slots, sizes = [], []
    for members in buckets:
        longest = int(padded_S[members[0]])
        offsets_L = np.arange(longest)
        inside_NL = offsets_L < lengths_S[members, None]
        slots.append(np.where(inside_NL, bounds_S1[members, None] + offsets_L, -1).ravel())
        sizes.append((len(members), longest))
    plan_PS = np.concatenate([np.zeros(0, np.int64), *slots, *(lengths_S[members] for members in buckets)])
    return np.array(sizes, dtype=np.int64).ravel(), plan_PS


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


def visible(distance: Tensor, causal: bool, window: int) -> Tensor:
    """Whether a query may see a key that lies `distance` positions before it (negative: after it)."""
    sees = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return sees & (distance.abs() <= reach(causal, window)) if window else sees


def reach(causal: bool, window: int) -> int:
    """The farthest distance inside a window, as transformers counts: the token itself is one of a causal window's."""
    return window - 1 if causal else window


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
