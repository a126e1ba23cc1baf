"""Which parameter gets which update; Muon against PyTorch's own, and its orthogonal updates."""

import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, EsmConfig, EsmForMaskedLM, GPT2Config

from biphase.device import missing_for_compile
from biphase.distributed import World
from biphase.encoder.attention import ATTENTION, lay_out
from biphase.encoder.network import TokenIds, load_model, make_model
from biphase.encoder.packed import PackedModel
from biphase.encoder.proofs import freeze_unreached
from biphase.errors import InputError
from biphase.pretraining.optimizer import (
    STATE_KEYS,
    Muon,
    block_matrices,
    decide_compile,
    make_optimizers,
    orthogonalize,
    outline_network,
    parallelize,
    set_rate,
)
from biphase.recipe import MATRIX_UPDATES, ComputeConfig, Optimizer
from biphase.schedule import Schedule


def constant(rate: float) -> Schedule:
    return Schedule(peak_lr=rate, warmup_steps=0, decay_steps=0)


def tiny() -> PackedModel:
    return PackedModel(make_model("1m", {"num_hidden_layers": 2}, TokenIds(300, 1, 0, 2, None), 64, seed=0))


def all_ids(optimizers: list[torch.optim.Optimizer]) -> list[int]:
    return [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def test_adamw_has_the_papers_settings_for_every_parameter() -> None:
    model = tiny()
    (adamw,) = make_optimizers(Optimizer(), model)
    (group,) = adamw.param_groups
    assert isinstance(adamw, torch.optim.AdamW)
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-5, 0.1)
    assert sorted(all_ids([adamw])) == sorted(map(id, model.parameters()))


def test_adamw_known_answer() -> None:
    """One update by hand (Loshchilov and Hutter 2019): decay first, then m̂ / (√v̂ + eps)."""
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    module = torch.nn.Module()
    module.weight = weight
    optimizers = make_optimizers(Optimizer(), module)
    assert set_rate(optimizers, constant(0.1), 0, 1) == 0.1
    weight.grad = torch.tensor([3e-5])
    optimizers[0].step()
    assert weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.1) - 0.1 * 3e-5 / (3e-5 + 1e-5), rel=1e-6)


def test_muon_takes_the_matrices_inside_the_blocks() -> None:
    model = tiny()
    optimizers = make_optimizers(Optimizer(name="muon", muon_lr_scale=2.0), model)
    assert sorted(all_ids(optimizers)) == sorted(map(id, model.parameters()))
    in_muon = {name for name, p in model.named_parameters() if id(p) in all_ids(optimizers[1:])}
    projections = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert in_muon == {f"network.model.layers.{i}.{part}.weight" for i in (0, 1) for part in projections}
    set_rate(optimizers, constant(0.5), 0, 1)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.5, 1.0]
    decays = [optimizer.param_groups[0]["weight_decay"] for optimizer in optimizers]
    own = make_optimizers(Optimizer(name="muon", muon_weight_decay=0.0), model)
    assert (decays, [optimizer.param_groups[0]["weight_decay"] for optimizer in own]) == ([0.1, 0.1], [0.1, 0.0])


def test_embeddings_are_not_matrices_inside_the_blocks() -> None:
    """GPT-2 calls its token and position embeddings wte and wpe."""
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = PackedModel(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[2] for p in block_matrices(model)} == {"h"}
    assert len(block_matrices(model)) == 2 * 4


def test_muon_refuses_shards() -> None:
    with pytest.raises(InputError, match=r"muon needs whole matrices; use compute.parallel=ddp"):
        make_optimizers(Optimizer(name="muon"), tiny(), sharded=True)


def test_updates_equal_those_of_pytorch_within_bf16_rounding() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((16, 8), (8, 24), (16, 8))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer = Muon(ours, weight_decay=0.1, dtype=torch.bfloat16)
    twin = torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for each in (optimizer, twin):
        each.param_groups[0]["lr"] = 0.01
    before = [parameter.detach().clone() for parameter in ours]
    for _ in range(5):
        for parameter, other in zip(ours, theirs, strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        optimizer.step()
        twin.step()
    for parameter, other, start in zip(ours, theirs, before, strict=True):
        moved = (parameter - start).detach().norm()
        assert (parameter - other).detach().norm() < 0.03 * moved


@pytest.mark.parametrize("shape", [(2, 12, 12), (3, 8, 20), (1, 30, 6)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(shape)
    result = orthogonalize(matrices, torch.float32)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    rotated = u.mT @ result @ vh.mT
    values = rotated.diagonal(dim1=1, dim2=2)
    assert (rotated - torch.diag_embed(values)).abs().max() < 1e-3, "singular vectors have turned"
    assert values.min() > 0.5 and values.max() < 1.3


def test_what_no_loss_reaches_is_not_trained(tmp_path: Path) -> None:
    """ESM's head for contacts: a resumed run asks for the moments of what is trained, and DDP for its gradients."""
    sizes = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = EsmConfig(**sizes, intermediate_size=64, pad_token_id=1, mask_token_id=4, token_dropout=False)
    EsmForMaskedLM(config).save_pretrained(tmp_path)
    network = load_model(tmp_path)
    freeze_unreached(network)
    frozen = [name for name, weight in network.named_parameters() if not weight.requires_grad]
    assert frozen and all("contact_head" in name for name in frozen)
    model = PackedModel(network).train()
    tokens = torch.arange(8) + 5
    model(tokens, torch.arange(8), lay_out(np.array([0, 8]), causal=False), torch.arange(8), tokens)[0].backward()
    trained = {id(weight) for weight in model.parameters() if weight.grad is not None}
    assert {*all_ids(make_optimizers(Optimizer(), model))} == trained
    outline, _ = outline_network(lambda: network, World(0, 1, torch.device("cpu")))
    assert all(weight.is_meta for weight in outline.parameters())
    assert [name for name, weight in outline.named_parameters() if not weight.requires_grad] == frozen


@pytest.mark.parametrize("name", get_args(Optimizer.model_fields["name"].annotation))
def test_an_optimizer_keeps_the_moments_that_plans_count(name: str) -> None:
    model = tiny()
    optimizers = make_optimizers(Optimizer(name=name), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    for optimizer in optimizers:
        optimizer.step()
        kept |= optimizer.state
        assert all(state.keys() == STATE_KEYS[type(optimizer)] for state in optimizer.state.values())
    for parameter in model.parameters():
        moments = {key for key, tensor in kept[parameter].items() if tensor.shape == parameter.shape}
        is_in_block = any(parameter is matrix for matrix in block_matrices(model))
        assert moments == {*MATRIX_UPDATES[name if is_in_block else "adamw"].moments}


CUDA = torch.device("cuda")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}


def test_a_run_of_minutes_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the speed of processors with bf16 units; more threads have done the work earlier."""
    monkeypatch.setattr("biphase.pretraining.optimizer.missing_for_compile", lambda device: "")
    for threads in (1, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for seconds, compiles in ((145, False), (155, True)):
            work = seconds * 2e11 * threads
            assert decide_compile(ComputeConfig(), torch.device("cpu"), torch.bfloat16, work)[0] is compiles
            assert not decide_compile(ComputeConfig(), torch.device("cpu"), torch.float32, work)[0]


@pytest.mark.slow
@pytest.mark.minutes
def test_each_of_many_shapes_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps 8 graphs of a code object, and runs the rest uncompiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("biphase.pretraining.optimizer.missing_for_compile", lambda device: "")
    compute, world = ComputeConfig(compile="on", precision="fp32"), World(0, 1, torch.device("cpu"))
    ids = torch.arange(3)
    for width in range(8, 44, 4):
        network = make_model("1m", SMALL | {"hidden_size": width}, TokenIds(64, 4, 0, 2, None), 64, 0)
        compiles, _ = decide_compile(compute, world.device, world.dtype, 0.0)
        model = parallelize(PackedModel(network), compute, world, compiles=compiles)
        counters.clear()
        model(ids, ids, lay_out(np.array([0, 3]), causal=True), ids, ids)
        assert counters["stats"]["unique_graphs"] > 0, f"width {width}"


@pytest.mark.parametrize("compiles", [True, False])
def test_the_loss_is_compiled_with_the_blocks(compiles: bool) -> None:
    network = make_model("1m", SMALL, TokenIds(64, 4, 0, 2, None), 64, 0).to("meta")
    model: Any = parallelize(PackedModel(network), ComputeConfig(), World(0, 1, torch.device("cpu")), compiles=compiles)
    assert model.compiles_loss == compiles


@pytest.fixture
def equipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with all that Triton needs: a folder of programs and headers, for tests to take from."""
    for name in ("gcc", "Python.h"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr("biphase.device.find_spec", lambda name: name)
    return tmp_path


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ("gcc", "there is no C compiler; install gcc"),
        ("Python.h", "Python.h; install python3-dev"),
        ("triton", "Triton"),
    ],
)
def test_without_a_compiler_a_gpu_trains_uncompiled(
    lacks: str, told: str, equipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decide_compile(ComputeConfig(), CUDA, torch.bfloat16, 0.0) == (True, "compiled (CUDA)")
    if lacks == "triton":
        monkeypatch.setattr("biphase.device.find_spec", lambda name: None)
    else:
        (equipped / lacks).unlink()
    assert told in missing_for_compile(CUDA)
    compiles, reason = decide_compile(ComputeConfig(), CUDA, torch.bfloat16, 0.0)
    assert not compiles and told in reason
    with pytest.raises(InputError, match=r"compute\.compile is on, but there is no .*; install .* or use"):
        decide_compile(ComputeConfig(compile="on"), CUDA, torch.bfloat16, 0.0)
    assert not decide_compile(ComputeConfig(compile="off"), CUDA, torch.bfloat16, 0.0)[0]


def test_triton_takes_the_compiler_that_it_is_told(equipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (equipped / "gcc").rename(equipped / "icx")
    assert missing_for_compile(CUDA)
    monkeypatch.setenv("CC", str(equipped / "icx"))
    assert not missing_for_compile(CUDA)
