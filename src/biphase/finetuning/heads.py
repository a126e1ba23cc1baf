"""A backbone and what stands on it for a family of tasks: packed tokens in, logits or embeddings out.

Letters: T tokens, S samples, D width, C classes.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from biphase.encoder.attention import PackedLayout
from biphase.encoder.packed import packed_hidden


class SequenceClassifier(nn.Module):
    """Mean over a sample's tokens, end-of-text included → dense → GELU → linear."""

    def __init__(self, backbone: nn.Module, num_labels: int) -> None:
        super().__init__()
        width = width_of(backbone)
        self.backbone = backbone
        self.dense = new_linear(backbone, width)
        self.out = new_linear(backbone, num_labels)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Logits [S, C], fp32."""
        hidden_TD = packed_hidden(self.backbone, tokens_T, positions_T, layout)
        pooled_SD = mean_pool(hidden_TD, layout.bounds_S1)
        return self.out(nn.functional.gelu(self.dense(pooled_SD.to(self.dense.weight.dtype)))).float()


class TokenClassifier(nn.Module):
    """Dropout → linear, for each token."""

    def __init__(self, backbone: nn.Module, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = nn.Dropout(dropout)
        self.out = new_linear(backbone, num_labels)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Logits [T, C], fp32."""
        hidden_TD = packed_hidden(self.backbone, tokens_T, positions_T, layout)
        return self.out(self.dropout(hidden_TD)).float()


class SpanFinder(nn.Module):
    """A linear layer for where an answer starts and where it ends, for each token."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.out = new_linear(backbone, 2)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Logits [T, 2], fp32."""
        return self.out(packed_hidden(self.backbone, tokens_T, positions_T, layout)).float()


class Embedder(nn.Module):
    """Mean over a sample's tokens."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Embeddings [S, D], fp32, not normalised."""
        return mean_pool(packed_hidden(self.backbone, tokens_T, positions_T, layout), layout.bounds_S1)


def new_linear(backbone: nn.Module, num_outputs: int) -> nn.Linear:
    """Normal weights with the standard deviation that the network itself was initialised with, biases 0."""
    layer = nn.Linear(width_of(backbone), num_outputs)
    nn.init.normal_(layer.weight, std=getattr(backbone.config, "initializer_range", 0.02))
    nn.init.zeros_(layer.bias)
    return layer


def width_of(backbone: nn.Module) -> int:
    config: Any = backbone.config
    return config.hidden_size


def mean_pool(hidden_TD: Tensor, bounds_S1: Tensor) -> Tensor:
    """The mean of each sample's rows, [S, D], summed in fp32."""
    return torch.segment_reduce(hidden_TD.float(), "mean", offsets=bounds_S1.long(), axis=0)


def reference_mean_pool(hidden_TD: Tensor, bounds_S1: Tensor) -> Tensor:
    """The slow twin of `mean_pool`."""
    bounds = bounds_S1.tolist()
    return torch.stack([hidden_TD[a:b].float().mean(0) for a, b in pairwise(bounds)])
