import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from biphase.encoder.lora import adapt_network, add_adapters, merge_adapters, transformer_blocks
from biphase.recipe import Lora

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_network(kind: str) -> Any:
    """A tiny network; its rows of zeros are drawn too."""
    torch.manual_seed(0)
    networks = {
        "tied": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, **SIZES)),
        "untied": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=50, **SIZES)),
        "biased": lambda: BertForMaskedLM(BertConfig(vocab_size=50, **SIZES)),
        "transposed": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)),
    }
    network = networks[kind]().eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return network


def draw_adapters(network: Any) -> None:
    torch.manual_seed(1)
    for weight in network.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)


@torch.no_grad()
def logits_of(network: Any) -> torch.Tensor:
    return network(input_ids=torch.arange(50)[None]).logits


@pytest.mark.parametrize("kind", ["tied", "untied", "biased", "transposed"])
def test_the_merged_network_computes_the_same(kind: str) -> None:
    network = make_network(kind)
    before, plain = logits_of(network), copy.deepcopy(network)
    adapt_network(network, Lora(r=4), {3, 49}, seed=0)
    torch.testing.assert_close(logits_of(network), before, rtol=0, atol=0)
    frozen = {name: weight.clone() for name, weight in network.named_parameters() if not weight.requires_grad}
    num_rows = 2 * 32
    linear = [
        m for name, m in plain.named_modules() if name.count(".") > 1 and type(m).__name__ in ("Linear", "Conv1D")
    ]
    inside = [layer for layer in linear if layer.weight.shape != (50, 32) and layer is not head_transform(plain)]
    num_adapters = sum(4 * sum(layer.weight.shape) for layer in inside)
    assert sum(weight.numel() for weight in network.parameters() if weight.requires_grad) == num_rows + num_adapters

    draw_adapters(network)
    computed = logits_of(network)
    assert float((computed - before).abs().max()) > 0.3 * float(before.std())
    state = network.state_dict()
    assert {*state} == {*plain.state_dict()}
    plain.load_state_dict(state)
    torch.testing.assert_close(logits_of(plain), computed, rtol=1e-5, atol=2e-6 * float(computed.abs().max()))
    torch.testing.assert_close(logits_of(network), computed, rtol=0, atol=0)
    assert all(torch.equal(weight, frozen[name]) for name, weight in network.named_parameters() if name in frozen)


def head_transform(network: Any) -> Any:
    """BERT's linear layer between blocks and output, which is no part of a block."""
    return network.cls.predictions.transform.dense if hasattr(network, "cls") else None


@pytest.mark.parametrize("kind", ["tied", "biased", "transposed"])
def test_merging_in_place_leaves_a_plain_network(kind: str) -> None:
    network = make_network(kind)
    names = {*network.state_dict()}
    add_adapters(network, Lora(r=4, lora_alpha=3, lora_dropout=0.5), seed=0)
    draw_adapters(network)
    computed = logits_of(network)
    merge_adapters(network)
    assert {*network.state_dict()} == names
    torch.testing.assert_close(logits_of(network), computed, rtol=1e-5, atol=2e-6 * float(computed.abs().max()))


def test_the_scale_is_twice_the_rank_by_default() -> None:
    for lora, scale in ((Lora(r=4), 2.0), (Lora(r=4, lora_alpha=1), 0.25)):
        network = make_network("untied")
        adapt_network(network, lora, {0}, seed=0)
        layer: Any = network.model.layers[0].mlp.up_proj
        draw_adapters(network)
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        merged = network.state_dict()["model.layers.0.mlp.up_proj.weight"]
        torch.testing.assert_close(merged, layer.base_layer.weight.detach() + scale * product.detach())


def test_layers_are_known_by_what_they_are() -> None:
    """Not by how long their list is: Gemma 3n has more of another kind."""

    class Layer(GradientCheckpointingLayer):
        pass

    model = nn.Module()
    model.projections = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    assert transformer_blocks(model) == list(model.layers)
    model.second = nn.ModuleDict({"layers": nn.ModuleList([Layer()])})
    assert transformer_blocks(model) == [*model.layers, *model.second["layers"]]
    del model.second
    del model.layers
    assert transformer_blocks(model) == list(model.projections)
