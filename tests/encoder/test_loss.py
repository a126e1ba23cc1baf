"""The chunked loss against its slow twin and an exact answer; no tensor larger than it promises."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import biphase.encoder.packed as loss
from biphase.encoder.packed import language_model_loss

from ..conftest import reference_loss

N, D, V = 37, 24, 101


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows at once, two of them in fp32: 37 targets are seven chunks and a shorter one."""
    monkeypatch.setattr(loss, "CHUNK_LOGITS", {"cpu": 5 * V + 3})
    monkeypatch.setattr(loss, "PART_LOGITS", {"cpu": 2 * V + 3})


def make_inputs(bias: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator) / 3
    return [hidden, weight, torch.randn(V, generator=generator) if bias else None]


def targets_N() -> Tensor:
    return torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))


def with_gradients(function: Any, inputs: list[Tensor | None], targets: Tensor, softcap: float | None) -> list[Tensor]:
    """The loss, scaled as a token mean is, and its gradients in the types of the inputs."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, targets, softcap)
    loss = (out[0] if isinstance(out, tuple) else out) * 0.25
    return [loss.detach(), *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_padding", [1, 9])
def test_rows_beyond_the_targets_change_nothing(
    small_chunks: None, num_padding: int, bias: bool, dtype: torch.dtype
) -> None:
    """Whether they end a chunk or fill chunks of their own."""
    inputs = make_inputs(bias, dtype)
    if bias and dtype == torch.bfloat16:
        inputs[2] = inputs[2].to(dtype)  # type: ignore[union-attr]
    hidden = inputs[0]
    assert hidden is not None
    plain = with_gradients(language_model_loss, inputs, targets_N(), None)
    padded = torch.cat([hidden, hidden[:num_padding]])
    found = with_gradients(language_model_loss, [padded, *inputs[1:]], targets_N(), None)
    assert not found[1][N:].any()
    found[1] = found[1][:N]
    torch.testing.assert_close(found, plain, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_three_way(small_chunks: None, bias: bool, softcap: float | None, dtype: torch.dtype) -> None:
    """As near to the exact answer (fp64) as the slow twin in the same type."""
    inputs = make_inputs(bias, dtype)
    if bias and dtype == torch.bfloat16:  # `linear` wants one type; the weights stay fp32 master weights
        inputs[2] = inputs[2].to(dtype)  # type: ignore[union-attr]
    exact_inputs = [None if x is None else x.double() for x in inputs]

    def exact_loss(hidden: Tensor, weight: Tensor, bias_V: Tensor | None, targets: Tensor, cap: float | None) -> Tensor:
        logits = hidden @ weight.T + (0 if bias_V is None else bias_V)
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return -(logits.log_softmax(-1)[torch.arange(N), targets]).sum()

    exact = with_gradients(exact_loss, exact_inputs, targets_N(), softcap)
    plain = with_gradients(reference_loss, inputs, targets_N(), softcap)
    ours = with_gradients(language_model_loss, inputs, targets_N(), softcap)
    for name, x, p, e in zip(("loss", "hidden", "weight", "bias"), ours, plain, exact, strict=False):
        assert x.dtype == p.dtype, name
        rounding = torch.finfo(dtype).eps * e.abs().max()
        assert (p - e).abs().max() <= 8 * rounding, name  # else the twin would allow anything
        allowed = 2 * (p - e).abs().max() + 8 * rounding
        assert (x - e).abs().max() <= allowed, name


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.minutes])]
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_compiled_it_is_one_graph_each_way(
    softcap: float | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it runs on a GPU, whatever the chunks: with gradients and without, and equal to what is not compiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0)) / 3
    for rows, num_targets in ((5, 37), (7, 16), (11, 40)):  # parts of 2 to 11 rows
        monkeypatch.setattr(loss, "CHUNK_LOGITS", {"cpu": rows * V})
        hidden, targets = torch.randn(num_targets, D).bfloat16(), torch.randint(0, V, (num_targets,))
        compiled = partial(language_model_loss, compiles=True)
        plain, found = (
            with_gradients(function, [hidden, weight, None], targets, softcap)
            for function in (language_model_loss, compiled)
        )
        for x, p in zip(found, plain, strict=True):
            torch.testing.assert_close(x, p, rtol=1e-2, atol=1e-3)  # a gradient may be rounded to the other side
        with torch.no_grad():
            losses = [
                function(hidden, weight, None, targets, softcap)[1] for function in (language_model_loss, compiled)
            ]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_loss_and_hit_of_each_target(small_chunks: None) -> None:
    hidden, weight, _ = make_inputs(bias=False)
    targets = (hidden @ weight.T).argmax(1)
    targets[::2] = targets_N()[::2]
    total, losses_N, correct_N = language_model_loss(hidden, weight, None, targets)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(losses_N, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, expected.sum())
    assert correct_N is not None
    assert correct_N[1::2].all()
    assert not correct_N[::2].all()
    _, losses_N, correct_N = language_model_loss(hidden.requires_grad_(), weight, None, targets)
    assert correct_N is None and not losses_N.requires_grad
    with torch.no_grad():
        assert language_model_loss(hidden, weight, None, targets)[2] is not None


def test_no_target_is_a_loss_of_zero(small_chunks: None) -> None:
    hidden, weight, bias = (x.requires_grad_() for x in make_inputs(bias=True))
    total, losses_N, _ = language_model_loss(hidden[:0], weight, bias, targets_N()[:0])
    total.backward()
    assert total == 0
    assert len(losses_N) == 0
    for leaf in (hidden, weight, bias):
        assert not leaf.grad.any()


def test_large_logits_do_not_overflow(small_chunks: None) -> None:
    hidden, weight, _ = make_inputs(bias=False)
    total, losses_N, _ = language_model_loss((hidden * 1e4).requires_grad_(), weight, None, targets_N())
    assert losses_N.isfinite().all()
    assert torch.autograd.grad(total, total) is not None


class LargestLogits(TorchDispatchMode):
    """Counts the rows of the largest tensor [rows, V] that any operation returns."""

    rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.ndim == 2 and leaf.shape[1] == V and leaf.shape[0] != D:
                self.rows = max(self.rows, leaf.shape[0])
        return out


def test_never_logits_for_all_targets(small_chunks: None) -> None:
    inputs = make_inputs(bias=True)
    with LargestLogits() as chunked:
        with_gradients(language_model_loss, inputs, targets_N(), None)
    with LargestLogits() as at_once:
        with_gradients(reference_loss, inputs, targets_N(), None)
    assert chunked.rows == 5
    assert at_once.rows == N
    inputs[0] = inputs[0].repeat(40, 1)  # type: ignore[union-attr]
    with LargestLogits() as many, torch.no_grad():
        language_model_loss(*inputs, targets_N().repeat(40))
    assert many.rows == 5
