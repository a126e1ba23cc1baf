"""Who sees whom, proved by gradients; the fast path against the slow twin and an exact answer in fp64."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import biphase.encoder.attention as attention
from biphase.encoder import buckets
from biphase.encoder.attention import (
    Backend,
    attend,
    explain_backend,
    lay_out,
    newest_flash,
    packed_attention,
)
from biphase.encoder.buckets import bucket_attention, make_buckets, visible
from biphase.errors import InputError

LENGTHS = [17, 1, 40, 40, 33, 2, 1, 1, 64, 7, 61]
"""Odd lengths, equal neighbours, samples of one token, and lengths that share a bucket as well as ones that do not."""


def bounds_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def random_qkv(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + heads)
    shapes = [(tokens, heads, 16), (tokens, kv_heads, 16), (tokens, kv_heads, 16)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def each_sample_alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool, window: int) -> Tensor:
    """The textbook, one sample at a time, in the type of the inputs."""
    repeats = q.shape[1] // k.shape[1]
    outs, first = [], 0
    for length in lengths:
        part = slice(first, first + length)
        first += length
        q_HLK, k_HLK, v_HLK = (
            x[part].transpose(0, 1) for x in (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
        )
        sees = torch.tensor(
            [
                [(j <= i or not causal) and (not window or abs(i - j) < window + (not causal)) for j in range(length)]
                for i in range(length)
            ]
        )
        scores = (q_HLK @ k_HLK.transpose(1, 2)) / q.shape[-1] ** 0.5
        outs.append((scores.masked_fill(~sees, float("-inf")).softmax(-1) @ v_HLK).transpose(0, 1))
    return torch.cat(outs)


def run_with_gradients(function: Any, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of q, k, v, in fp64."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(0)
    grads = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator).to(dtype))
    return [x.detach().double() for x in (out, *grads)]


@pytest.mark.parametrize("backend", ["buckets", "sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_three_way(causal: bool, window: int, heads: int, kv_heads: int, dtype: torch.dtype, backend: Backend) -> None:
    """Forward and gradient are as near to the exact answer (fp64) as the textbook in the same type is."""
    bounds_S1 = bounds_of(LENGTHS)
    inputs = random_qkv(int(bounds_S1[-1]), heads, kv_heads, dtype)
    layout = lay_out(bounds_S1, causal=causal, backend=backend)

    def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return each_sample_alone(q, k, v, LENGTHS, causal, window)

    exact = run_with_gradients(textbook, inputs, torch.float64)
    plain = run_with_gradients(textbook, inputs, dtype)
    ours = run_with_gradients(lambda q, k, v: attend(q, k, v, layout, 16**-0.5, window), inputs, dtype)
    for name, x, p, e in zip(("out", "q", "k", "v"), ours, plain, exact, strict=True):
        if backend == "sdpa" and name != "out":
            continue  # only computes where no gradient is formed
        allowed = 2 * (p - e).abs().max() + 4 * torch.finfo(dtype).eps * e.abs().max()
        assert (x - e).abs().max() <= allowed, name


@pytest.mark.parametrize("causal", [True, False])
def test_packed_is_alone(causal: bool) -> None:
    """A sample's output does not depend on its neighbours, whichever bucket they put it in."""
    bounds_S1 = bounds_of(LENGTHS)
    q, k, v = random_qkv(int(bounds_S1[-1]), 4, 2)
    packed = attend(q, k, v, lay_out(bounds_S1, causal=causal), 0.25)
    for first, end in itertools.pairwise(bounds_S1):
        alone = lay_out(np.array([0, end - first]), causal=causal)
        torch.testing.assert_close(
            packed[first:end], attend(q[first:end], k[first:end], v[first:end], alone, 0.25), rtol=1e-5, atol=1e-6
        )


def test_buckets_hold_every_sample_once_and_waste_little() -> None:
    lengths_S = np.random.default_rng(0).integers(1, 2049, 300)
    lengths_S[:40] = np.arange(1, 41)
    found = make_buckets(lengths_S, 2**18)
    assert sorted(np.concatenate(found)) == list(range(300))
    for members in found:
        longest = lengths_S[members].max()
        assert (longest**2 - lengths_S[members] ** 2).sum() <= buckets.BUCKET_WASTE
        assert len(members) == 1 or len(members) * longest**2 <= 2**18
    assert len(make_buckets(lengths_S // 20 + 1, 2**18)) < 20
    assert all(len(members) == 1 for members in make_buckets(lengths_S, 1))
    long_ones = bounds_of([512] * 4)
    assert [len(lay_out(long_ones, causal=True, dtype=each).sizes_3B) for each in (torch.float32, torch.bfloat16)] == [
        3 * 4,
        3 * 2,
    ]


@pytest.mark.parametrize("lengths", [[5, 3, 17], [16, 16], [33], [31, 1]])
def test_sizes_recur(lengths: list[int]) -> None:
    """Filler is a sample of its own, and buckets have few lengths."""
    layout = lay_out(bounds_of(lengths), causal=False, pad_to_multiple_of=32)
    assert layout.bounds_S1.tolist() == bounds_of(lengths).tolist()
    padding = [layout.num_padding] if layout.num_padding else []
    assert layout.bounds_F1.tolist() == bounds_of([*lengths, *padding]).tolist()
    assert layout.bounds_F1[-1] % 32 == 0 and layout.num_padding < 32
    assert (layout.sizes_3B[1::3] % buckets.LENGTHS_STEP == 0).all()


def attend_with_gradients(bounds_S1: np.ndarray, causal: bool, window: int) -> list[Tensor]:
    inputs = random_qkv(int(bounds_S1[-1]), 4, 2)
    layout = lay_out(bounds_S1, causal=causal)
    return run_with_gradients(lambda q, k, v: attend(q, k, v, layout, 0.25, window), inputs, torch.float32)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_small_buckets_change_nothing(causal: bool, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds_S1 = bounds_of(LENGTHS)
    once = attend_with_gradients(bounds_S1, causal, window)
    assert len(lay_out(bounds_S1, causal=causal).sizes_3B) == 3 * 2
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 3000)
    monkeypatch.setattr(buckets, "BUCKET_WASTE", 400)
    assert len(lay_out(bounds_S1, causal=causal).sizes_3B) == 3 * 7
    torch.testing.assert_close(attend_with_gradients(bounds_S1, causal, window), once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_weights_formed_again_are_the_ones_not_kept(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds_S1 = bounds_of(LENGTHS)
    kept = attend_with_gradients(bounds_S1, causal, 0)
    monkeypatch.setattr(attention, "KEPT_KEYS", 0)
    torch.testing.assert_close(attend_with_gradients(bounds_S1, causal, 0), kept, rtol=0, atol=0)


@pytest.mark.parametrize("most_keys", [0, 512])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (2.0, True)])
def test_compiled_layers_call_an_operator_that_computes_the_same(
    softcap: float, with_sinks: bool, most_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, outputs and gradients, whether the softmax weights are kept or formed again."""
    bounds_S1 = bounds_of(LENGTHS)
    layout = lay_out(bounds_S1, causal=False)
    inputs = [*random_qkv(int(bounds_S1[-1]), 4, 2), torch.tensor([-1.0, 0.0, 1.0, 3.0])]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor) -> Tensor:
        out = attend(q, k, v, layout, 0.25, 0, softcap, sinks_H if with_sinks else None)
        return out + 0 * sinks_H.sum()

    monkeypatch.setattr(attention, "KEPT_KEYS", most_keys)
    eager = run_with_gradients(run, inputs, torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with NamedOperations() as noted:
        compiled = run_with_gradients(run, inputs, torch.float32)
    assert {"bucket_attention", "bucket_attention_backward"} <= noted.names
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (False, 5), (True, 5)])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (2.0, True)])
def test_long_samples_are_computed_in_blocks_of_queries(
    softcap: float, with_sinks: bool, causal: bool, window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 7 and fewer queries give what all queries at once give, gradients of sinks too."""
    bounds_S1 = bounds_of(LENGTHS)
    layout = lay_out(bounds_S1, causal=causal)
    inputs = [*random_qkv(int(bounds_S1[-1]), 4, 2, dtype), torch.tensor([-1.0, 0.0, 1.0, 3.0]).to(dtype)]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor) -> Tensor:
        out = attend(q, k, v, layout, 0.25, window, softcap, sinks_H if with_sinks else None)
        return out + 0 * sinks_H.sum()

    monkeypatch.setattr(attention, "KEPT_KEYS", 0)
    whole = run_with_gradients(run, inputs, dtype)
    longest = int(layout.sizes_3B[1])
    monkeypatch.setattr(buckets, "BLOCK_BYTES", 7 * 4 * longest * dtype.itemsize)
    for once, blocks in zip(whole, run_with_gradients(run, inputs, dtype), strict=True):
        assert (once - blocks).abs().max() <= 8 * torch.finfo(dtype).eps * once.abs().max()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_band_is_what_is_visible_and_made_once(window: int, causal: bool) -> None:
    """Also where the window is wider than a sample. All layers of a batch share it."""
    layout = lay_out(bounds_of(LENGTHS), causal=causal, backend="sdpa", pad_to_multiple_of=32)
    q, k, v = random_qkv(int(layout.bounds_F1[-1]), 4, 2)
    attend(q, k, v, layout, 0.25, window)
    made, positions_L = layout.bands[window], torch.arange(max(LENGTHS))
    assert torch.equal(made, visible(positions_L[:, None] - positions_L, causal, window))
    attend(q, k, v, layout, 0.25, window)
    attend(q, k, v, layout, 0.25)
    assert [*layout.bands] == [window] and layout.bands[window] is made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_samples(dtype: torch.dtype) -> None:
    """Their softmax, which is written over its scores, takes other code of PyTorch's than a few keys do."""
    bounds_S1 = bounds_of([700, 1300, 650])
    inputs = random_qkv(2650, 2, 2)
    layouts = [lay_out(bounds_S1, causal=False, backend=backend) for backend in ("buckets", "sdpa", "reference")]
    results = [run_with_gradients(partial(attend, layout=each, scale=0.25), inputs, dtype) for each in layouts]
    for *ours, plain in zip(*results, strict=True):
        for one in ours:
            torch.testing.assert_close(one, plain, rtol=1e-2, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("is_kept", [True, False])
def test_operator_is_what_torch_compile_believes(is_kept: bool) -> None:
    layout = lay_out(bounds_of([3, 1, 5]), causal=True)
    q, k, v = random_qkv(9, 4, 2)
    arguments = (layout.sizes_3B, layout.plan_PS, layout.num_slots, 4 * layout.num_scores * is_kept, True, 0)
    shaped = () if is_kept else (2.0, torch.zeros(4, requires_grad=True))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(bucket_attention, (q, k, v, *arguments, *shaped), test_utils=checks)


@pytest.mark.parametrize("backend", ["buckets", "sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (False, 5)])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(2.0, False), (0.0, True), (2.0, True)])
def test_softcap_and_sinks(
    softcap: float, with_sinks: bool, causal: bool, window: int, dtype: torch.dtype, backend: Backend
) -> None:
    """Forward and gradients, those of the sinks too, beside the textbook; keys and values of different widths."""
    bounds_S1 = bounds_of(LENGTHS)
    q, k, v = random_qkv(int(bounds_S1[-1]), 4, 2, dtype)
    inputs = [q, k, v[..., :8], torch.tensor([-1.0, 0.0, 1.0, 3.0]).to(dtype)]
    layout = lay_out(bounds_S1, causal=causal, backend=backend)

    def textbook(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor) -> Tensor:
        outs, repeats = [], q.shape[1] // k.shape[1]
        for first, end in itertools.pairwise(bounds_S1):
            part, length = slice(first, end), end - first
            q_HLK, k_HLK, v_HLK = (
                x[part].transpose(0, 1) for x in (q, *(y.repeat_interleave(repeats, 1) for y in (k, v)))
            )
            scores = q_HLK @ k_HLK.transpose(1, 2) / 4
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            distance = torch.arange(length)[:, None] - torch.arange(length)
            sees = (distance >= 0) | torch.tensor(not causal)
            sees &= (distance.abs() <= window) | torch.tensor(not window)
            scores = scores.masked_fill(~sees, float("-inf"))
            if with_sinks:
                scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, length, 1)], -1)
            outs.append((scores.softmax(-1)[..., :length] @ v_HLK).transpose(0, 1))
        return torch.cat(outs) + 0 * sinks_H.sum()

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor) -> Tensor:
        out = attend(q, k, v, layout, 0.25, window, softcap, sinks_H if with_sinks else None)
        return out + 0 * sinks_H.sum()

    exact = run_with_gradients(textbook, inputs, torch.float64)
    plain = run_with_gradients(textbook, inputs, dtype)
    found = run_with_gradients(ours, inputs, dtype)
    for name, x, p, e in zip(("out", "q", "k", "v", "sinks"), found, plain, exact, strict=True):
        allowed = 2 * (p - e).abs().max() + 8 * torch.finfo(dtype).eps * e.abs().max() + 1e-12
        assert (x - e).abs().max() <= allowed, name


def test_what_is_not_supported_is_refused() -> None:
    q, k, v = (x.transpose(0, 1)[None] for x in random_qkv(4, 4, 4))
    module = torch.nn.Identity()
    layout = lay_out(np.array([0, 4]), causal=True)
    with pytest.raises(InputError, match="dropout"):
        packed_attention(module, q, k, v, None, layout=layout, dropout=0.1)
    with pytest.raises(InputError, match="packed batches only"):
        packed_attention(module, q, k, v, None)


def test_rotated_queries_follow_the_type_of_the_values() -> None:
    """Under autocast, rotary embeddings return fp32."""
    q, k, v = (x.transpose(0, 1)[None] for x in random_qkv(4, 4, 4))
    layout = lay_out(np.array([0, 4]), causal=True)
    out, _ = packed_attention(torch.nn.Identity(), q, k, v.bfloat16(), None, layout=layout)
    assert out.dtype == torch.bfloat16
    assert out.shape == (1, 4, 4, 16)


class NamedOperations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_gradients_pass_the_batch_axis_without_a_copy() -> None:
    """The gradient of an index is a tensor of zeros, into which the values are copied; on a GPU this is traffic."""
    leaves = [x.requires_grad_() for x in random_qkv(41, 4, 2)]
    layout = lay_out(np.array([0, 3, 40, 41]), causal=False)
    weights = torch.randn(41, 4, 16)
    out, _ = packed_attention(
        torch.nn.Identity(), *(x.transpose(0, 1).unsqueeze(0) for x in leaves), None, layout=layout
    )
    with NamedOperations() as noted:
        found = torch.autograd.grad((out.squeeze(0) * weights).sum(), leaves)
    plain = torch.autograd.grad((attend(*leaves, layout, 0.25) * weights).sum(), leaves)
    assert "_softmax_backward_data" in noted.names  # what is inside of attention is seen
    assert noted.names.isdisjoint({"select_backward", "zeros", "copy_", "clone"})
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


@pytest.mark.parametrize(
    ("capability", "is_installed", "failure", "expected"),
    [(9, True, None, "FA3"), (9, False, None, "FA2"), (8, True, None, "FA2"), (9, True, ImportError("abi"), "abi")],
)
def test_the_newest_flash_attention_that_starts_is_taken(
    monkeypatch: pytest.MonkeyPatch, capability: int, is_installed: bool, failure: Exception | None, expected: str
) -> None:
    activated = []

    def activate(name: str) -> None:
        activated.append(name)
        if failure:
            raise failure

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr("biphase.encoder.attention.find_spec", lambda name: is_installed or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    device = torch.device("cuda", 0)
    newest_flash.cache_clear()
    assert expected in newest_flash(device) and expected in explain_backend(device, torch.bfloat16)
    assert activated == (["FA3"] if is_installed and capability == 9 else []), "once"
    newest_flash.cache_clear()
