"""Any pretrained transformers network → a bidirectional backbone for packed batches, proved by its own forward pass.

Nearly all networks attend through the function of `encoder.attention` once asked to. Whether one really does, and from
which number its positions count, is seen by comparison; one that does not runs on padded batches behind the same
interface.

Letters: T packed tokens, F samples with the filler, L longest sample, D width.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from biphase import console
from biphase.encoder.attention import ATTENTION, PackedLayout
from biphase.encoder.backbone import (
    ALIEN_ERRORS,
    check_causality,
    find_first_position,
    load_model_config,
    load_weights,
    refuse_encoder_decoder,
    train_padding_row,
)
from biphase.errors import InputError, first_line
from biphase.hub import refuse_pickles


class PaddedBackbone(nn.Module):
    """A network that knows only padded batches, called with packed tokens like any other."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network
        self.config = network.config

    def forward(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout, use_cache: bool = False) -> Any:
        """`last_hidden_state` [1, T, D] of tokens [1, T]; the network numbers the positions itself."""
        lengths_F = layout.bounds_F1.diff()
        places_L = torch.arange(layout.max_len, device=input_ids.device)
        is_token_FL = places_L < lengths_F[:, None]
        tokens_FL = input_ids.new_full(is_token_FL.shape, getattr(self.config, "pad_token_id", None) or 0)
        tokens_FL[is_token_FL] = input_ids[0]
        output = self.network(input_ids=tokens_FL, attention_mask=is_token_FL.long())
        return SimpleNamespace(last_hidden_state=output.last_hidden_state[is_token_FL][None])

    def get_input_embeddings(self) -> nn.Module:
        return self.network.get_input_embeddings()


def load_backbone(source: str | Path, revision: str | None = None) -> nn.Module:
    """A network without a head from a folder or the hub, fp32, no dropout, for `packed_hidden` with any layout.

    A decoder comes out bidirectional. Raises `InputError` for a folder without safetensors weights, for an
    encoder-decoder, and for a network that cannot be made bidirectional.
    """
    config = load_model_config(source, revision)
    refuse_pickles(source)
    refuse_encoder_decoder(config, source)
    config.is_causal = False
    network = load_network(source, revision, config, ATTENTION)
    if find_first_position(network, causal=False):
        return network
    # Loaded anew: a network that ignores the switch of its attention may still make its masks by the name of it.
    padded = PaddedBackbone(load_network(source, revision, load_model_config(source, revision), "eager"))
    try:
        check_causality(padded, causal=False, vocab_size=config.vocab_size)
    except (AssertionError, *ALIEN_ERRORS) as error:
        raise InputError(f"{source} cannot be made a bidirectional encoder: {first_line(error)}") from None
    kind = type(padded.network).__name__
    console.err.print(f"{source}: {kind} attends over padded batches only, which is slower", markup=False)
    return padded


def load_network(source: str | Path, revision: str | None, config: PretrainedConfig, attention: str) -> PreTrainedModel:
    network: Any = load_weights(AutoModel, source, revision, config, attention)
    if getattr(network, "pooler", None) is not None:
        network.pooler = None  # of next sentence prediction: nothing here uses it
    train_padding_row(network)
    return network.eval()


def fresh_backbone(backbone: nn.Module) -> nn.Module:
    """The same network with random weights from torch's generator."""
    if isinstance(backbone, PaddedBackbone):
        return PaddedBackbone(fresh_network(backbone.network))
    network = fresh_network(backbone)
    network.first_position = backbone.first_position
    return network


def fresh_network(network: Any) -> PreTrainedModel:
    fresh: Any = type(network)(copy.deepcopy(network.config))
    if getattr(fresh, "pooler", None) is not None:
        fresh.pooler = None
    train_padding_row(fresh)
    return fresh
