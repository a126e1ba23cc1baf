"""Shapes and FLOPs equal those of real networks; devices are found by the names that they have."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, EuroBertConfig, EuroBertForMaskedLM, Gemma2Config, Gemma2ForCausalLM

from biphase.curriculum import Phase
from biphase.encoder.attention import ATTENTION
from biphase.encoder.buckets import visible
from biphase.encoder.network import TokenIds, make_model
from biphase.encoder.packed import count_flops
from biphase.errors import InputError
from biphase.flops import (
    LLAMA_SHAPED,
    PEAK_FLOPS,
    SampleLengths,
    flops_per_token,
    known_device,
    read_shape,
    shape_of,
    update_flops,
)
from biphase.presets import PRESETS
from biphase.pretraining.optimizer import make_optimizers
from biphase.recipe import Optimizer


@pytest.mark.parametrize(
    ("preset", "without_head", "with_head"),
    [("210m", 211.8, 310.3), ("610m", 607.9, 755.6), ("1b", 1187.9, 1409.5)],
)
def test_the_papers_parameter_counts(preset: str, without_head: float, with_head: float) -> None:
    """Table 1."""
    shape = shape_of(preset, {}, 128_256)
    assert round(shape.parameters_without_head / 1e6, 1) == without_head
    assert round(shape.parameters / 1e6, 1) == with_head


CHANGES: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 3, "num_key_value_heads": 2},
    {"tie_word_embeddings": True},
    {"head_dim": 48},
]


@pytest.mark.parametrize("preset", ["1m", "11m", "610m"])
@pytest.mark.parametrize("changes", CHANGES)
def test_parameters_equal_those_of_the_network(preset: str, changes: dict[str, Any]) -> None:
    settings = {"tie_word_embeddings": False, "pad_token_id": 0, **PRESETS[preset], **changes}
    with torch.device("meta"):
        network = EuroBertForMaskedLM(EuroBertConfig(vocab_size=1000, **settings))
    shape = shape_of(preset, changes, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == shape.parameters
    assert sum(parameter.numel() for parameter in network.model.parameters()) == shape.parameters_without_head


@pytest.mark.parametrize("objective", ["clm", "mlm", "mntp", "meap", "causal-mlm"])
def test_flops_equal_those_that_the_loop_counts(objective: Any) -> None:
    architecture = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    network = make_model("1m", architecture, TokenIds(500, 4, 1, 2, None), 64, seed=0)
    lengths_S = np.array([7, 64, 30, 12])
    phase = Phase(objective=objective, steps=1, mask_probability=0.25)
    tokens = int(lengths_S.sum())
    targets = tokens - len(lengths_S) if objective in ("clm", "meap") else tokens // 4
    causal = objective in ("clm", "meap", "causal-mlm")
    expected = count_flops(network).batch(lengths_S, targets, causal=causal)
    text = SampleLengths(float(lengths_S.mean()), float((lengths_S**2).sum() / tokens), "")
    found = flops_per_token(shape_of("1m", architecture, 500).flops, phase, text) * tokens
    assert found == pytest.approx(expected, rel=0.25 / tokens)  # the share of masked tokens is no whole number


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_keys_outside_of_a_window_cost_nothing(objective: Any) -> None:
    """The pairs are counted one by one. Causal attention counts half of a token's pair with itself."""
    sizes: dict[str, Any] = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8}
    flops = count_flops(Gemma2ForCausalLM._from_config(Gemma2Config(**sizes), attn_implementation=ATTENTION))
    phase, lengths_S, pairs = Phase(objective=objective, steps=1), np.array([3, 8, 9, 10, 40]), 0.0
    for length, window in product(lengths_S.tolist(), (0, 8)):
        positions_L = torch.arange(length)
        seen = visible(positions_L[:, None] - positions_L, phase.is_causal, window).sum()
        pairs += float(seen) - (length / 2 if phase.is_causal else 0)
    found = flops.batch(lengths_S, 0, phase.is_causal) - flops.per_token * 70
    assert found == pytest.approx(12 * 2 * 16 * pairs)
    planned = 40 * flops_per_token(flops, phase, SampleLengths(40, 40, ""))
    assert planned == pytest.approx(flops.batch(lengths_S[-1:], 39 if phase.is_causal else 16, phase.is_causal))


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_flops_of_an_update_are_those_that_pytorch_counts(name: Any) -> None:
    """Unequal heads and a wide feed-forward layer: matrices of four shapes."""
    architecture = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    network, settings = make_model("1m", architecture, TokenIds(500, 4, 1, 2, None), 64, seed=0), Optimizer(name=name)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counted:
        for optimizer in make_optimizers(settings, network):
            optimizer.step()
    assert update_flops(settings, shape_of("1m", architecture, 500).matrices) == counted.get_total_flops()
    assert (counted.get_total_flops() > 0) == (name == "muon")


def test_mixed_objectives_cost_the_mean_of_theirs() -> None:
    shape, text = shape_of("1m", {}, 500), SampleLengths(100, 150, "")
    clm, mlm = (flops_per_token(shape.flops, Phase(objective=name, steps=1), text) for name in ("clm", "mlm"))
    mixed = flops_per_token(shape.flops, Phase(objective="mlm", steps=1, clm_share=0.25), text)
    assert mixed == pytest.approx(0.25 * clm + 0.75 * mlm)
    falling = Phase(objective="mlm", steps=4, mask_probability={"from": 0.5, "to": 0.1})
    same = Phase(objective="mlm", steps=4, mask_probability=0.3)
    assert flops_per_token(shape.flops, falling, text) == pytest.approx(flops_per_token(shape.flops, same, text))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("AMD Instinct MI250", "MI250"),
        ("NVIDIA GeForce", None),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100X", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("Tesla T4", "T4"),
        ("Quadro RTX 4000", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", "CPU"),
        ("mycpu", None),
    ],
)
def test_devices_are_found_by_the_names_that_they_have(name: str, found: str | None) -> None:
    assert known_device(name) == found
    assert found is None or 6e10 < PEAK_FLOPS[found] < 3e15


@pytest.mark.parametrize("value", ["[/bold]", 0, True, None, 1.5, [0]])
@pytest.mark.parametrize("key", ["num_key_value_heads", "vocab_size"])
def test_a_size_that_is_none_is_named(key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"'{key}' is .*; it must be a whole number of 1 or more"):
        shape_of("1m", {key: value}, 300)


def test_a_head_is_tied_where_transformers_ties_it_unless_told_otherwise() -> None:
    """Files on the Hub leave out what is their type's default."""
    sizes = PRESETS["1m"] | {"vocab_size": 300}
    for model_type in LLAMA_SHAPED & {*CONFIG_MAPPING}:
        is_tied = CONFIG_MAPPING[model_type]().tie_word_embeddings
        assert read_shape(sizes | {"model_type": model_type}).is_tied == is_tied, model_type
        assert not read_shape(sizes | {"model_type": model_type, "tie_word_embeddings": False}).is_tied
