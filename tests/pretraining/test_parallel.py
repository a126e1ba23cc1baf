"""Which blocks are compiled, and that they are: networks that one process trains after another, machines without a
compiler."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from biphase.device import missing_for_compile
from biphase.distributed import World
from biphase.encoder.attention import lay_out
from biphase.encoder.network import TokenIds, make_model
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError
from biphase.pretraining.optimizer import decide_compile, parallelize
from biphase.recipe import ComputeConfig

CUDA = torch.device("cuda")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}


@pytest.mark.slow
def test_each_of_many_shapes_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps 8 graphs of a code object, and runs the rest uncompiled."""
    traced = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: traced(self, backend="eager", **given))
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


@pytest.mark.parametrize(("device", "compiles"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_the_loss_is_compiled_with_the_blocks_on_a_gpu(device: str, compiles: bool) -> None:
    network = make_model("1m", SMALL, TokenIds(64, 4, 0, 2, None), 64, 0).to("meta")
    model: Any = parallelize(
        PackedModel(network), ComputeConfig(), World(0, 1, torch.device(device)), compiles=compiles
    )
    assert model.compiles_loss == (compiles and device == "cuda")


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
