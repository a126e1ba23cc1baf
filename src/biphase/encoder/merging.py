"""Two networks of one shape → their weighted average, and how alike their weights are, layer by layer."""

import torch
from torch import nn

from biphase.errors import InputError


def check_mergeable(network: nn.Module, other: nn.Module, name: str) -> None:
    """Raise `InputError` where `other`, which is called `name`, has not the same weights by name and shape."""
    if type(network) is not type(other):
        raise InputError(f"{name} is a {type(other).__name__} and what was trained a {type(network).__name__}")
    ours, theirs = ({key: list(weight.shape) for key, weight in each.named_parameters()} for each in (network, other))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"{name} cannot be merged with: its weight '{key}' is {theirs.get(key, 'absent')}, and "
                f"{ours.get(key, 'absent')} in what was trained"
            )


@torch.no_grad()
def merge_weights(network: nn.Module, before: nn.Module, share: float) -> None:
    """Mix a share of the network before into the trained one, in place: against forgetting (BidirLM,
    arXiv:2604.02045)."""
    old = dict(before.named_parameters())
    for name, parameter in network.named_parameters():
        parameter.lerp_(old[name].to(parameter.device), share)


def layer_cosines(network: nn.Module, before: nn.Module) -> dict[str, float]:
    """The cosine between the weights after and before, for the embedding, each block and what is behind them."""
    groups: dict[str, list[float]] = {}
    old = dict(before.named_parameters())
    for name, parameter in network.named_parameters():
        one, other = (each.detach().double().cpu().flatten() for each in (parameter, old[name]))
        sums = groups.setdefault(layer_of(name), [0.0, 0.0, 0.0])
        for at, product in enumerate((one @ other, one @ one, other @ other)):
            sums[at] += float(product)
    return {group: dot / max((first * second) ** 0.5, 1e-30) for group, (dot, first, second) in groups.items()}


def layer_of(name: str) -> str:
    """`backbone.layers.3.mlp.up_proj.weight` → `3`; what has no number is `embeddings` or `rest`."""
    number = next((part for part in name.split(".") if part.isdigit()), None)
    return number or ("embeddings" if "embed" in name else "rest")
