"""Averages and cosines of weights by hand and by PyTorch; networks of another shape are refused."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from biphase.encoder.network import layer_cosines, merge_weights
from biphase.errors import InputError


class Network(nn.Module):
    """An embedding, two blocks of two matrices, a norm."""

    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 5), nn.Linear(5, width)) for _ in range(2))
        self.norm = nn.RMSNorm(width)


def test_the_average_has_the_share_of_the_network_before() -> None:
    network, before = Network(0), Network(1)
    pairs = list(zip(network.parameters(), before.parameters(), strict=True))
    expected = [0.75 * one + 0.25 * other for one, other in pairs]
    merge_weights(network, before, 0.25)
    torch.testing.assert_close(list(network.parameters()), expected)
    torch.testing.assert_close(list(before.parameters()), list(Network(1).parameters()))


def test_cosines_are_pytorchs_over_all_weights_of_a_layer() -> None:
    network, before = Network(0), Network(1)
    parts = {"embeddings": lambda net: net.embed_tokens, "rest": lambda net: net.norm}
    parts |= {str(at): lambda net, at=at: net.layers[at] for at in range(2)}
    cosines = layer_cosines(network, before)
    assert list(cosines) == ["embeddings", "0", "1", "rest"]
    for name, part in parts.items():
        one, other = (
            torch.cat([weight.detach().flatten() for weight in part(net).parameters()]) for net in (network, before)
        )
        assert cosines[name] == pytest.approx(float(cosine_similarity(one, other, dim=0)), abs=1e-6)
    assert cosines["rest"] == pytest.approx(1) and abs(cosines["0"]) < 0.9
    before.norm.weight.data.zero_()
    assert layer_cosines(network, before)["rest"] == 0


def test_a_network_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match=r"it cannot be merged: its weights embed_tokens\.weight, "):
        layer_cosines(Network(0), Network(1, width=4), "it")
    more = Network(1)
    more.head = nn.Linear(3, 1, bias=False)
    for network, other in ((Network(0), more), (more, Network(0))):
        with pytest.raises(InputError, match=r"its weights head\.weight differ"):
            layer_cosines(network, other, "it")
    with pytest.raises(InputError, match="cannot be merged: its"):
        layer_cosines(Network(0), nn.Linear(3, 3), "it")
