"""LoRA (Hu et al. 2021, by `peft`): a frozen network, adapters that train in its place, and the plain network of both.

    y = W x + lora_alpha / r · B A x        A [r, in] is random, B [out, r] is 0 at the start, W never changes

The adapters stand beside the linear layers of the blocks. In pretraining, tokens that the network does not know yet,
such as the mask of a decoder, have learned rows in its frozen embedding.

Letters: V vocabulary, K learned rows, D width.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from biphase.errors import InputError
from biphase.recipe import Lora


def adapt_network(network: Any, lora: Lora, tokens: Collection[int], seed: int) -> None:
    """Add adapters to a language model, and let the embeddings of some tokens learn, with the rows of a tied head. The
    `state_dict` of the network is then that of the plain network that computes the same.

    Raises `InputError` as `add_adapters` does.
    """
    add_adapters(network, lora, seed)
    weight = network.get_input_embeddings().weight
    learned = LearnedRows(weight, torch.tensor(sorted(tokens)))
    for module in [*network.modules()]:
        if getattr(module, "weight", None) is weight:
            parametrize.register_parametrization(module, "weight", learned)
    network.register_state_dict_post_hook(merge_state)


def add_adapters(network: nn.Module, lora: Lora, seed: int) -> None:
    """Freeze a network, and add adapters that change nothing yet to the linear layers of its blocks.

    Layers that are frozen already get none. Raises `InputError` without `peft`, and for `target_modules` that match no
    layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise InputError("lora needs peft: pip install 'biphase[lora]'") from None
    targets = find_targets(network, lora)
    network.requires_grad_(False)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=2 * lora.r if lora.lora_alpha is None else lora.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=isinstance(network.get_submodule(targets[0]), Conv1D),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, network)
    network.train(network.training)


def find_targets(network: nn.Module, lora: Lora) -> list[str]:
    """List the names of the layers to adapt: the linear layers inside the blocks, or those of `target_modules`."""
    inside = {module for block in transformer_blocks(network) for module in block.modules()}
    layers = [
        name
        for name, module in network.named_modules()
        if module in inside and isinstance(module, nn.Linear | Conv1D) and module.weight.requires_grad
    ]
    if not layers:
        raise InputError(f"lora: the blocks of {type(network).__name__} have no linear layers")
    if lora.target_modules == ("all-linear",):
        return layers
    for target in lora.target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise InputError(f"lora.target_modules: no linear layer of the blocks is called '{target}'; known: {known}")
    return [name for name in layers if any(f".{name}".endswith(f".{target}") for target in lora.target_modules)]


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the repeated layers of a transformers model: its longest list of `GradientCheckpointingLayer`s, else of any
    modules, and its other lists of layers of the same kinds (HRM-Text has two)."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    layers = [members for members in lists if all(isinstance(block, GradientCheckpointingLayer) for block in members)]
    kinds = {type(block) for block in max(layers or lists, key=len)}
    return [block for members in layers or lists if kinds.issuperset(map(type, members)) for block in members]


class LearnedRows(nn.Module):
    """Some rows of a frozen table, which learn from their present values."""

    ids_K: Tensor

    def __init__(self, weight_VD: Tensor, ids_K: Tensor) -> None:
        super().__init__()
        self.rows_KD = nn.Parameter(weight_VD.detach()[ids_K].clone())
        self.register_buffer("ids_K", ids_K, persistent=False)

    def forward(self, weight_VD: Tensor) -> Tensor:
        return weight_VD.index_copy(0, self.ids_K, self.rows_KD)


def has_adapters(network: nn.Module) -> bool:
    """Tell whether a network has adapters that are not merged."""
    return any(".lora_" in name for name, _ in network.named_parameters())


LAYER, TABLE = ".base_layer.weight", ".parametrizations.weight.original"
"""The ends of the names of frozen weights with adapters or learned rows."""


@torch.no_grad()
def merge_state(network: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Turn the state of a network with adapters into that of the plain network that computes the same. The network
    itself stays as it is; the weights that adapters change are copied to the CPU."""
    merged: dict[int, Tensor] = {}  # so that tied weights stay one tensor
    for name in [name for name in state if name.startswith(prefix)]:
        weight, place = state.pop(name), name.removeprefix(prefix)
        if ".lora_" in name or name.endswith(".rows_KD"):
            continue
        if name.endswith(LAYER):
            layer: Any = network.get_submodule(place.removesuffix(LAYER))
            weight = (layer.weight + layer.get_delta_weight("default")).cpu()
        elif name.endswith(TABLE):
            table: Any = network.get_submodule(place.removesuffix(TABLE))
            weight = merged.setdefault(weight.data_ptr(), table.weight.cpu())
        state[name.replace(".base_layer.", ".").replace(TABLE, ".weight")] = weight


@torch.no_grad()
def merge_adapters(network: nn.Module) -> None:
    """Make a network with adapters, but without learned rows, a plain one that computes the same."""
    for name, layer in [*network.named_modules()]:
        if hasattr(layer, "get_delta_weight"):
            merging: Any = layer
            merging.merge()
            network.set_submodule(name, merging.get_base_layer())
    vars(network).pop("peft_config", None)
