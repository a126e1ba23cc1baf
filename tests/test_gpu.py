"""What only a GPU can show: the packed kernels and the whole path on CUDA beside the CPU. Skipped where there is none.

`BIPHASE_TEST_DEVICE=cpu` runs the same on the CPU: a test of these tests, not of a GPU.
"""

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from biphase.distributed import World
from biphase.encoder.attention import Backend, attend, choose_backend, lay_out
from biphase.encoder.network import TokenIds, make_model
from biphase.encoder.packed import PackedModel, language_model_loss, packed_hidden
from biphase.finetuning.heads import load_encoder, mean_pool
from biphase.flops import CHUNK_LOGITS, PART_LOGITS
from biphase.pretraining.loop import train
from biphase.pretraining.optimizer import fill_parts, outline_network, parallelize
from biphase.recipe import ComputeConfig, Recipe
from biphase.run import read_metrics

from .conftest import reference_loss

DEVICE = os.environ.get("BIPHASE_TEST_DEVICE", "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = np.cumsum([0, 7, 1, 130, 64, 33, 1100, 2])  # rows of more than 1,024 scores take another softmax kernel


def nearly(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """As near to the exact answer as the slow twin in the same type is, but for twice its rounding."""
    for x, p, e in zip(found, plain, exact, strict=True):
        allowed = 2 * (p.float() - e.float()).abs().max() + 2**-7 * e.float().abs().max()
        assert (x.float() - e.float()).abs().max() <= allowed


def with_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype, device: str = DEVICE
) -> list[Tensor]:
    """The result and the gradients, on the CPU."""
    leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, out.dtype)
    return [each.cpu() for each in (out.detach(), *torch.autograd.grad(out, leaves, weights))]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradient(causal: bool, heads: int, kv_heads: int, window: int, softcap: float) -> None:
    """Every backend that a GPU may take in bf16, against the slow twin in fp32 and in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((int(BOUNDS[-1]), count, 64) for count in (heads, kv_heads, kv_heads))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]

    def run(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
        layout = lay_out(BOUNDS, causal=causal, device=DEVICE, backend=backend)
        return with_gradients(lambda q, k, v: attend(q, k, v, layout, 0.125, window, softcap), inputs, dtype)

    exact, plain = run("reference", torch.float32), run("reference", torch.bfloat16)
    chosen = choose_backend(torch.device(DEVICE), torch.bfloat16)
    backends: set[Backend] = {"buckets"} if softcap else {"buckets", chosen}
    for backend in backends:
        nearly(run(backend, torch.bfloat16), plain, exact)


@pytest.mark.parametrize("causal", [True, False])
def test_sinks_and_their_gradient(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn((int(BOUNDS[-1]), 4, 64), generator=generator) for _ in range(3)]
    inputs.append(torch.tensor([-1.0, 0.0, 1.0, 3.0]))

    def run(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
        layout = lay_out(BOUNDS, causal=causal, device=DEVICE, backend=backend)
        return with_gradients(lambda q, k, v, s: attend(q, k, v, layout, 0.125, 0, 0.0, s), inputs, dtype)

    exact, plain = run("reference", torch.float32), run("reference", torch.bfloat16)
    nearly(run("buckets", torch.bfloat16), plain, exact)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_head_and_its_gradient(compiled: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of ten chunks of two parts, in bf16, against the slow twin in fp32 on the CPU."""
    monkeypatch.setitem(CHUNK_LOGITS, DEVICE, 100 * 20_000)
    monkeypatch.setitem(PART_LOGITS, DEVICE, 50 * 20_000)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1000, 64, generator=generator), torch.randn(20_000, 64, generator=generator) / 8]
    targets = torch.randint(0, 20_000, (1000,), generator=generator)

    def mean_loss(loss: Callable[..., Any], *leaves: Tensor) -> Tensor:
        out = loss(*leaves, None, targets.to(leaves[0].device), softcap)
        return (out[0] if isinstance(out, tuple) else out) / 1000

    ours = partial(mean_loss, partial(language_model_loss, compiles=compiled == "on"))
    exact = with_gradients(partial(mean_loss, reference_loss), inputs, torch.float32, "cpu")
    plain = with_gradients(partial(mean_loss, reference_loss), inputs, torch.bfloat16)
    nearly(with_gradients(ours, inputs, torch.bfloat16), plain, exact)


def test_mean_pooling_and_its_gradient() -> None:
    """Of bf16 rows, summed in fp32, against the mean of each sample alone."""
    inputs = [torch.randn(int(BOUNDS[-1]), 64, generator=torch.Generator().manual_seed(0)).bfloat16()]

    def each_alone(rows_TD: Tensor) -> Tensor:
        return torch.stack([rows_TD[first:end].float().mean(0) for first, end in itertools.pairwise(BOUNDS)])

    bounds_S1 = torch.from_numpy(BOUNDS.astype(np.int32)).to(DEVICE)
    found = with_gradients(lambda rows_TD: mean_pool(rows_TD, bounds_S1), inputs, torch.bfloat16)
    expected = with_gradients(each_alone, inputs, torch.bfloat16, "cpu")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-5)


def losses_of(recipe: Recipe, folder: Path) -> Any:
    return [row["loss"] for row in read_metrics(train(recipe, folder), "train")]


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 2e-4), ("bf16", 5e-3)])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_thirty_steps_have_the_losses_of_the_cpu(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, precision: str, compiled: str, allowed: float
) -> None:
    # At three times the rate the first step with [MASK], whose embedding is untrained, magnifies any rounding.
    steps = 15 if torch.version.cuda else 5  # a simulated device computes as the CPU does, at a tenth of its pace
    phases = (
        f"curriculum=[{{objective: clm, steps: {steps}}}, {{objective: mlm, steps: {steps}}}]",
        "schedule.peak_lr=3e-3",
    )
    ours = (f"compute.device={DEVICE}", f"compute.precision={precision}", f"compute.compile={compiled}")
    expected = losses_of(tiny_recipe(*phases), tmp_path / "cpu")
    found = losses_of(tiny_recipe(*phases, *ours), tmp_path / "gpu")
    assert len(found) == len(expected) > 0
    np.testing.assert_allclose(found, expected, rtol=allowed)


def positions_of(bounds: Any) -> Tensor:
    return torch.cat([torch.arange(length) for length in np.diff(bounds).tolist()]).to(DEVICE)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    backend, device = ("nccl", torch.device("cuda", 0)) if DEVICE == "cuda" else ("gloo", None)
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


class LargerWorld(World):
    """One process that is told it is one of two, so that its network is parted as among many."""

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (1,))


def test_fsdp_of_one_process_is_the_network_itself(one_process: None) -> None:
    """Made without values, parted and filled."""
    network: Any = make_model("1m", {"num_hidden_layers": 2}, TokenIds(384, 4, 0, 2, None), 512, 0).to(DEVICE)
    ids = torch.randint(0, 384, (int(BOUNDS[-1]),), device=DEVICE)
    positions, targets = positions_of(BOUNDS), torch.arange(0, len(ids), 3, device=DEVICE)
    layout = lay_out(BOUNDS, causal=False, device=DEVICE)

    def step(model: Any) -> list[Tensor]:
        loss = model(ids, positions, layout, targets, ids[targets])[0]
        loss.backward()
        return [loss.detach(), *(getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters())]

    alone = [x.clone() for x in step(PackedModel(network))]
    network.zero_grad()
    world = LargerWorld(0, 2, torch.device(DEVICE))
    compute = ComputeConfig(parallel="fsdp", compile="off", precision="fp32")
    outline, whole = outline_network(lambda: network, world)
    parted = parallelize(PackedModel(outline), compute, world, compiles=False)
    fill_parts(parted, whole, world)
    for found, expected in zip(step(parted), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_an_export_computes_on_a_gpu_what_the_run_computes(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The exported folder in plain transformers, each text alone, against packed texts in biphase; fp32."""
    from transformers import AutoModel

    from biphase.exporting.model import export_checkpoint

    run = train(tiny_recipe(f"compute.device={DEVICE}"), tmp_path / "runs")
    folder = tmp_path / "encoder"
    export_checkpoint(str(run.path), folder)
    plain = AutoModel.from_pretrained(folder).to(DEVICE).eval()
    packed = load_encoder(str(folder)).backbone.to(DEVICE).eval()
    ids = torch.randint(5, 300, (60,), device=DEVICE)
    bounds = np.array([0, 9, 10, 60])
    with torch.no_grad():
        found = packed_hidden(packed, ids, positions_of(bounds), lay_out(bounds, causal=False, device=DEVICE))
        for first, end in itertools.pairwise(bounds):
            expected = plain(input_ids=ids[None, first:end]).last_hidden_state[0]
            torch.testing.assert_close(found[first:end], expected, rtol=1e-3, atol=1e-4)


def test_a_fine_tuning_is_that_of_the_cpu_and_is_kept(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """In fp32; what is kept is loaded by transformers' pipeline on the device where it was trained."""
    from transformers import pipeline

    from biphase.api.finetuning import finetune

    phases = ("curriculum=[{objective: mlm, steps: 2}]", "schedule.warmup_steps=0", "schedule.decay_steps=0")
    run = train(tiny_recipe(*phases), tmp_path / "runs")
    rows = [{"text": f"{name} saw {number} queens", "label": name} for name in ("Tip", "Ozma") for number in range(30)]
    scores, probabilities = [], []
    for folder, device in ((tmp_path / "gpu", DEVICE), (tmp_path / "cpu", "cpu")):
        settings = {"device": device, "precision": "fp32", "max_steps": 8, "learning_rate": 1e-3}
        scores.append(finetune(run.path, "mine", data=rows, scores=folder, keep=folder / "kept", **settings))
        classify = pipeline("text-classification", str(folder / "kept"), device=device)
        probabilities.append([row["score"] for row in classify([row["text"] for row in rows])])
    assert scores[0].final_loss == pytest.approx(scores[1].final_loss, rel=1e-3)
    np.testing.assert_allclose(*probabilities, atol=1e-3)
