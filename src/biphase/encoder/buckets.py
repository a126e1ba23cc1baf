"""Packed attention for any device and type: samples of about one length are batched, and padding is masked.

The trick, for samples of 5, 15, 14 and 200 tokens:

    lengths rounded up to 16s     16  16  16  208
    sorted, grouped by length     [208] and [16 16 16]: two buckets, each [N, H, L, K], two batched products each
    slots                         one for each token, and one for each that a sample lacks to the length of its bucket
    rows                          gathered from [T·H, K] by slot, computed bucket by bucket, scattered back
    scores                        [N, H, L, L] a bucket: 208² + 3 · 16² a head, instead of 234²

`plan_buckets` assigns samples to buckets and tokens to slots once per microbatch, on the CPU, so that no layer reads a
number from the device. The operator is opaque, so that torch.compile keeps a block in one graph although buckets differ
in number and shape from batch to batch. A row is one token's vector of one head; the rows of a bucket are laid out as
[N, H, L, K], and buckets end to end.

Letters: T packed tokens, S samples, H query heads, G key-value heads, K head width, B buckets, N samples of a bucket,
L its length, P slots of all buckets, V width of a value's head (K in most networks), Q queries
of a block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biphase.flops import BLOCK_BYTES, BUCKET_BYTES

BUCKET_WASTE = 2**13
"""The most scores per head that padding may add to a bucket with shorter samples: about the cost of another bucket."""
LENGTHS_STEP = 16
"""The step between lengths of buckets: they are multiples of it, so that sizes recur, and rows of scores fill a CPU's
registers."""


def plan_buckets(bounds_S1: np.ndarray, score_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute `sizes_3B` and `plan_PS` of a `PackedLayout` for the samples between `bounds_S1`, whose scores have so
    many bytes each."""
    lengths_S = np.diff(bounds_S1)
    padded_S = -(-lengths_S // LENGTHS_STEP) * LENGTHS_STEP
    buckets = make_buckets(padded_S, BUCKET_BYTES // score_bytes)
    sizes = [(len(members), padded_S[members[0]], lengths_S[members].min()) for members in buckets]
    order = np.concatenate([np.zeros(0, np.int64), *buckets])
    widths_S, starts_S = np.zeros_like(lengths_S), np.zeros_like(lengths_S)
    widths_S[order] = np.repeat([length for _, length, _ in sizes], [num for num, _, _ in sizes])
    starts_S[order] = np.cumsum(widths_S[order]) - widths_S[order]
    # Samples of 3 and 2 tokens in a bucket of length 4 begin at the slots 0 and 4. First the slots of tokens, then
    # those of padding:  starts 0 0 0 4 4, 0 4 4  ·  offsets 0 1 2 0 1, 3 2 3
    counts = np.concatenate([lengths_S, widths_S - lengths_S])
    firsts = np.concatenate([np.zeros_like(lengths_S), lengths_S])
    offsets_P = np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
    starts_P, widths_P = np.repeat(np.tile(starts_S, 2), counts), np.repeat(np.tile(widths_S, 2), counts)
    plan_PS = np.concatenate([starts_P, offsets_P, widths_P, lengths_S[order]])
    return np.array(sizes, dtype=np.int64).ravel(), plan_PS


def make_buckets(lengths_S: np.ndarray, most_scores: int) -> list[np.ndarray]:
    """Group the indices of samples by about equal length, longest first; `most_scores` per head of a bucket."""
    order = np.argsort(-lengths_S, kind="stable")
    squares = lengths_S[order].astype(np.int64) ** 2
    buckets: list[np.ndarray] = []
    begin = 0
    while begin < len(order):
        # The longest one left sets the bucket's length L. Shorter ones join it, longest first, until padding has added
        # BUCKET_WASTE scores a head (a sample of length l adds L² - l²), or until N · L² would pass `most_scores`.
        most = max(1, most_scores // int(squares[begin]))
        waste = np.cumsum(squares[begin] - squares[begin : begin + most])
        end = begin + int(np.searchsorted(waste, BUCKET_WASTE, side="right"))
        buckets.append(order[begin:end])
        begin = end
    return buckets


def visible(distance: Tensor, causal: bool, window: int) -> Tensor:
    """Tell whether a query may see a key that lies `distance` positions before it (negative: after it).

    Windows are as wide as transformers counts them: a causal one includes the token itself.
    """
    sees = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return sees & (distance.abs() <= window - causal) if window else sees


def attend_in_buckets(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    plan: "OpenPlan",
    num_kept: int,
    causal: bool,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs [T, H, V] for queries that are scaled already, and what the backward pass reads: the softmax
    weights of all buckets end to end, and the rows of q, k and v in the order of the buckets.

    `num_kept` is the number of weights to return, 0 or all. With `softcap` c a score s becomes c · tanh(s / c). A sink
    is a further key for each query of its head, with that score and without a value.
    """
    buckets, queries, keys = plan
    q, k, v = queries.gather(q_THK), keys.gather(k_TGK), keys.gather(v_TGK)
    out, kept_weights = q.new_empty(len(q), v.shape[1]), q.new_empty(num_kept)
    parts = zip(queries.by_bucket(q), keys.by_bucket(k), keys.by_bucket(v), queries.by_bucket(out), strict=True)
    stored = queries.by_bucket(kept_weights) if num_kept else [None] * len(buckets)
    for bucket, (q_part, k_part, v_part, out_part), into in zip(buckets, parts, stored, strict=True):
        for positions, some, some_out in query_blocks(bucket, into, q_part, out_part):
            some = some.flatten(1, -2)
            weights, _ = attention_weights(bucket, positions, some, k_part, causal, window, softcap, sinks_H, into)
            write_product(some_out, weights, v_part)
    return queries.scatter(out), kept_weights, q, k, v


def gradients_in_buckets(
    grad_THK: Tensor,
    kept_weights: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: "OpenPlan",
    causal: bool,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and the sinks. With P = softmax(S), S = q kᵀ, out = P v, in each bucket:

    dv = Pᵀ dout, dP = dout vᵀ, dS = P ∘ (dP - rowsum(P ∘ dP)), dq = dS k, dk = dSᵀ q.

    A cap on S multiplies dS by 1 - tanh². A sink with the weight p takes part in the softmax as a key with the value 0:
    the formulas stay, with rows of P that sum to 1 - p, and the sink's gradient is -p · rowsum(P ∘ dP).
    """
    buckets, queries, keys = plan
    grad = queries.gather(grad_THK).index_fill_(0, queries.padding, 0)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_sinks_H = q.new_zeros(0 if sinks_H is None else len(sinks_H), dtype=torch.float32)
    of_queries = zip(queries.by_bucket(q), queries.by_bucket(grad), queries.by_bucket(grad_q), strict=True)
    of_keys = zip(*map(keys.by_bucket, (k, v, grad_k, grad_v)), strict=True)
    stored = queries.by_bucket(kept_weights) if len(kept_weights) else [None] * len(buckets)
    for bucket, (q_part, dout_part, dq_part), (k_part, v_part, dk_part, dv_part), kept in zip(
        buckets, of_queries, of_keys, stored, strict=True
    ):
        dk, dv = KeySum(dk_part), KeySum(dv_part)
        for positions, some, dout, dq in query_blocks(bucket, kept, q_part, dout_part, dq_part):
            weights, sunk, is_whole = kept, None, len(positions) == bucket[0]
            some, dout = some.flatten(1, -2), dout.flatten(1, -2)
            if weights is None:
                weights, sunk = attention_weights(bucket, positions, some, k_part, causal, window, softcap, sinks_H)
            dv.add(weights.transpose(1, 2), dout, is_whole)
            grad_weights = dout @ v_part.transpose(1, 2)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            if sunk is not None:
                sums = (weights.float() * grad_weights.float()).sum(-1, keepdim=True)
                grad_sinks_H -= (sunk * sums).view(-1, len(grad_sinks_H), len(positions)).sum((0, 2))
            if softcap:
                capped = torch.bmm(some, k_part.transpose(1, 2)).div_(softcap).tanh_()
                grad_scores *= 1 - capped.square_()
            write_product(dq, grad_scores, k_part)
            dk.add(grad_scores.transpose(1, 2), some, is_whole)
        dk.finish()
        dv.finish()
    return queries.scatter(grad_q), keys.scatter(grad_k), keys.scatter(grad_v), grad_sinks_H


Bucket = tuple[int, int, Tensor]
"""N samples of about one length: the bucket's length L, the length of the shortest sample, and all lengths [N]."""


@dataclass(frozen=True)
class RowMap:
    """A map between the vectors of some heads (H of queries, G of keys) in [T, H, K] and the rows of all buckets."""

    buckets: list[Bucket]
    num_heads: int
    num_kv_heads: int
    sources: Tensor
    """For each row of the buckets, the row of [T·H, K] that fills it; any row for padding."""
    targets: Tensor
    """For each row of [T·H, K], the row of the buckets that it fills."""
    padding: Tensor
    """The rows of the buckets that are padding."""

    def gather(self, x_THK: Tensor) -> Tensor:
        return x_THK.reshape(-1, x_THK.shape[2]).index_select(0, self.sources)

    def scatter(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.targets).view(-1, self.num_heads, rows.shape[1])

    def by_bucket(self, rows: Tensor) -> list[Tensor]:
        """View the rows of each bucket as one matrix for each sample and key-value head.

        Keys become [N·G, L, K]. The query heads of a key-value head are stacked: queries become [N·G, H/G·L, K].
        Scores, which are one flat row, become [N·G, H/G·L, L].
        """
        shapes = []
        for length, _, lengths_N in self.buckets:
            width = length if rows.dim() == 1 else rows.shape[1]
            num_matrices = len(lengths_N) * self.num_kv_heads
            shapes.append((num_matrices, self.num_heads // self.num_kv_heads * length, width))
        parts = rows.view(-1).split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def query_blocks(bucket: Bucket, kept: Tensor | None, *parts: Tensor) -> Iterator[Any]:
    """Divide the queries of a bucket, so that scores that nothing keeps stay below `BLOCK_BYTES`: the memory of long
    samples then grows with their length, not with its square.

    Yields the positions of some queries, and these queries in each of the parts [N·G, H/G·L, …]: the parts themselves
    for all queries, else views [N·G, H/G, positions, …].
    """
    (length, *_), (num_matrices, num_rows, _) = bucket, parts[0].shape
    most = max(1, BLOCK_BYTES // (num_matrices * num_rows * parts[0].element_size()))
    if kept is not None or most >= length:
        yield range(length), *parts
        return
    for first in range(0, length, most):
        positions = range(length)[first : first + most]
        yield (
            positions,
            *(part.view(num_matrices, -1, length, part.shape[2])[:, :, first : first + most] for part in parts),
        )


def write_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Write a batched product into some rows of a part, as `query_blocks` yields them."""
    if into.dim() == 3:
        torch.bmm(left, right, out=into)
    else:
        into.copy_(torch.bmm(left, right).view_as(into))


class KeySum:
    """The gradient of a bucket's keys or values: the sum over blocks of queries, in fp32 if there are several."""

    def __init__(self, into: Tensor) -> None:
        self.into = into
        self.total: Tensor | None = None

    def add(self, left: Tensor, right: Tensor, is_whole: bool) -> None:
        """Add a batched product, which is the whole sum if there is one block."""
        if is_whole:
            torch.bmm(left, right, out=self.into)
        elif self.total is None:
            self.total = torch.bmm(left, right).float()
        else:
            self.total += torch.bmm(left, right)

    def finish(self) -> None:
        """Write a sum over several blocks."""
        if self.total is not None:
            self.into.copy_(self.total)


def attention_weights(
    bucket: Bucket,
    positions: range,
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of the scores of queries at some positions, with -inf for hidden keys, and the weight of the
    sinks, if any.

    PyTorch sums scores of 16 bits in fp32. Padded queries may see any keys, but must see at least one.
    """
    scores = torch.bmm(q, k.transpose(1, 2), out=into)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    length, _, lengths_N = bucket
    hide(scores.view(len(lengths_N), -1, len(positions), length), bucket, positions, causal, window)
    sunk = None
    if sinks_H is not None:  # softmax with the sink = softmax without it · (1 - the sink's weight)
        total = scores.float().logsumexp(-1, keepdim=True)
        by_head_NHL1 = total.view(len(lengths_N), -1, len(positions), 1)
        sunk = (sinks_H.float().view(-1, 1, 1) - by_head_NHL1).sigmoid_().view_as(total)
    weights = torch.ops.aten._softmax.out(scores, -1, False, out=scores)
    return (weights if sunk is None else weights.mul_((1 - sunk).to(weights.dtype))), sunk


def hide(scores_NHQL: Tensor, bucket: Bucket, positions: range, causal: bool, window: int) -> None:
    """Write -inf over the scores of keys that the queries at some positions must not see."""
    length, shortest, lengths_N = bucket
    # 1. The objective hides keys in the same way for all samples: later ones when causal, those outside of the window.
    indices_L = torch.arange(length, device=scores_NHQL.device)
    indices_Q1 = indices_L[positions.start : positions.stop, None]
    if causal or window:
        sees_QL = visible(indices_Q1 - indices_L, causal, window)
        scores_NHQL += scores_NHQL.new_zeros(sees_QL.shape).masked_fill_(~sees_QL, float("-inf"))
    # 2. Padded keys come after each sample's own length, so after the length of the shortest one. With a causal
    # objective, they are later than every key that a token may see.
    if not causal and shortest < length:
        behind = indices_L[shortest:]
        padded_N11L = (behind >= lengths_N[:, None])[:, None, None, :]
        if window:  # padded queries whose window is only padding see themselves
            padded_N11L = padded_N11L & (indices_Q1 != behind)
        scores_NHQL[..., shortest:].masked_fill_(padded_N11L, float("-inf"))


OpenPlan = tuple[list[Bucket], RowMap, RowMap]
"""The buckets, the map of the queries' rows and that of the keys'."""


def open_plan(sizes_3B: Tensor, plan_PS: Tensor, num_tokens: int, num_heads: int, num_kv_heads: int) -> OpenPlan:
    """Read the buckets of a `PackedLayout`, and map the rows of queries and those of keys."""
    sizes = sizes_3B.view(-1, 3).tolist()
    num_slots = sum(num * length for num, length, _ in sizes)
    slots_3P, lengths_S = plan_PS[: 3 * num_slots].view(3, num_slots), plan_PS[3 * num_slots :]
    samples = lengths_S.split([num for num, _, _ in sizes])
    buckets = [(length, shortest, lengths_N) for (_, length, shortest), lengths_N in zip(sizes, samples, strict=True)]
    queries = RowMap(buckets, num_heads, num_kv_heads, *map_rows(slots_3P, num_tokens, num_heads))
    if num_kv_heads == num_heads:
        return buckets, queries, queries
    return buckets, queries, RowMap(buckets, num_kv_heads, num_kv_heads, *map_rows(slots_3P, num_tokens, num_kv_heads))


def map_rows(slots_3P: Tensor, num_tokens: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Map slots, one for each token, to rows, one for each token and head. Returns `sources`, `targets` and `padding`
    of a `RowMap`.

    With H = 2, a sample of 2 tokens that begins at slot 4, in a bucket of length 4, has the rows 8, 9 (10, 11 are
    padding) of its first head and 12, 13 of its second: start · H + offset, plus the length for each further head.
    """
    starts_P, offsets_P, lengths_P = slots_3P
    heads_H = torch.arange(num_heads, device=slots_3P.device)
    rows_PH = (starts_P * num_heads + offsets_P)[:, None] + lengths_P[:, None] * heads_H
    targets, padding = rows_PH[:num_tokens].flatten(), rows_PH[num_tokens:].flatten()
    sources = torch.zeros_like(rows_PH).flatten()  # padding is filled from anywhere
    sources[targets] = torch.arange(len(targets), device=slots_3P.device)
    return sources, targets, padding


@torch.library.custom_op("biphase::bucket_attention", mutates_args=())
def bucket_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    sizes_3B: Tensor,
    plan_PS: Tensor,
    num_slots: int,
    num_kept: int,
    causal: bool,
    window: int,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `attend_in_buckets` as an operator. `sizes_3B`, `plan_PS` and `num_slots` come from the
    `PackedLayout`."""
    plan = open_plan(sizes_3B, plan_PS, len(q_THK), q_THK.shape[1], k_TGK.shape[1])
    return attend_in_buckets(q_THK, k_TGK, v_TGK, plan, num_kept, causal, window, softcap, sinks_H)


@torch.library.custom_op("biphase::bucket_attention_backward", mutates_args=())
def bucket_attention_backward(
    grad_THK: Tensor,
    kept_weights: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes_3B: Tensor,
    plan_PS: Tensor,
    num_kv_heads: int,
    causal: bool,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `gradients_in_buckets` as an operator."""
    plan = open_plan(sizes_3B, plan_PS, len(grad_THK), grad_THK.shape[1], num_kv_heads)
    return gradients_in_buckets(grad_THK, kept_weights, q, k, v, plan, causal, window, softcap, sinks_H)


@bucket_attention.register_fake
def _(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, sizes: Tensor, plan: Tensor, num_slots: int, num_kept: int, *_: Any
) -> Any:
    rows = [x.new_empty(num_slots * x.shape[1], x.shape[2]) for x in (q_THK, k_TGK, v_TGK)]
    return q_THK.new_empty(*q_THK.shape[:2], v_TGK.shape[2]), q_THK.new_empty(num_kept), *rows


@bucket_attention_backward.register_fake
def _(grad_THK: Tensor, kept_weights: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Any:
    (num_tokens, num_heads, _), num_kv_heads = grad_THK.shape, settings[2]
    num_sinks = 0 if settings[-1] is None else len(settings[-1])
    shapes = (num_heads, q.shape[1]), (num_kv_heads, k.shape[1]), (num_kv_heads, v.shape[1])
    return *(q.new_empty(num_tokens, *shape) for shape in shapes), q.new_empty(num_sinks, dtype=torch.float32)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the softmax weights, the rows of q, k and v, the plan and the sinks for the backward pass."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else PyTorch would make as many zeros as there are weights
    *settings, sinks_H = inputs[7:]
    ctx.save_for_backward(*output[1:], *inputs[3:5], sinks_H)
    ctx.settings = inputs[1].shape[1], *settings


def bucket_gradients(ctx: Any, grad_THK: Tensor, *_: Any) -> tuple[Any, ...]:
    """Return the gradients of `bucket_attention`'s eleven arguments: three tensors, seven arguments without a gradient,
    the sinks."""
    *saved, sinks_H = ctx.saved_tensors
    *grads, grad_sinks_H = bucket_attention_backward(grad_THK.contiguous(), *saved, *ctx.settings, sinks_H)
    return *grads, *[None] * 7, None if sinks_H is None else grad_sinks_H.to(sinks_H.dtype)


bucket_attention.register_autograd(bucket_gradients, setup_context=keep_for_backward)


class EagerBucketAttention(torch.autograd.Function):
    """The outputs of `bucket_attention`, with gradients, where nothing is compiled.

    On a CPU, PyTorch needs most of a millisecond per layer and update to call operators that are written in Python. In
    an update of a few hundred tokens, that is a tenth of the time. This function needs no such call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        sinks_H: Tensor | None,
        plan: "OpenPlan",
        num_kept: int,
        causal: bool,
        window: int,
        softcap: float,
    ) -> Tensor:
        settings = causal, window, softcap
        out_THV, *saved = attend_in_buckets(q_THK, k_TGK, v_TGK, plan, num_kept, *settings, sinks_H)
        ctx.save_for_backward(*saved, sinks_H)
        ctx.settings = plan, *settings
        return out_THV

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept_weights, q, k, v, sinks_H = ctx.saved_tensors
        of_plan = (kept_weights, q, k, v, *ctx.settings, sinks_H)
        *found, grad_sinks_H = gradients_in_buckets(grads[0], *of_plan)
        return *found, None if sinks_H is None else grad_sinks_H.to(sinks_H.dtype), *[None] * 5
