"""A backbone and what stands on it for a family of tasks: packed tokens in, logits out, (sum, count) of the loss.

Letters: T tokens, S samples, D width, C classes.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from biphase.encoder.attention import Layout
from biphase.encoder.backbone import packed_hidden
from biphase.finetuning.batches import IGNORED


class SequenceClassifier(nn.Module):
    """Mean over a sample's tokens, end-of-text included → dense → GELU → linear."""

    def __init__(self, backbone: PreTrainedModel, num_labels: int) -> None:
        super().__init__()
        width = backbone.config.hidden_size
        self.backbone = backbone
        self.dense = new_linear(backbone, width)
        self.out = new_linear(backbone, num_labels)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Logits [S, C], fp32."""
        hidden_TD = packed_hidden(self.backbone, tokens_T, positions_T, layout)
        pooled_SD = mean_pool(hidden_TD, layout.bounds_S1)
        return self.out(nn.functional.gelu(self.dense(pooled_SD))).float()


class TokenClassifier(nn.Module):
    """Dropout → linear, for each token."""

    def __init__(self, backbone: PreTrainedModel, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = nn.Dropout(dropout)
        self.out = new_linear(backbone, num_labels)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Logits [T, C], fp32."""
        hidden_TD = packed_hidden(self.backbone, tokens_T, positions_T, layout)
        return self.out(self.dropout(hidden_TD)).float()


def new_linear(backbone: PreTrainedModel, num_outputs: int) -> nn.Linear:
    """Normal weights with the standard deviation that the network itself was initialised with, biases 0."""
    layer = nn.Linear(backbone.config.hidden_size, num_outputs)
    nn.init.normal_(layer.weight, std=getattr(backbone.config, "initializer_range", 0.02))
    nn.init.zeros_(layer.bias)
    return layer


def mean_pool(hidden_TD: Tensor, bounds_S1: Tensor) -> Tensor:
    """The mean of each sample's rows, [S, D], summed in fp32."""
    return torch.segment_reduce(hidden_TD.float(), "mean", offsets=bounds_S1.long(), axis=0)


def reference_mean_pool(hidden_TD: Tensor, bounds_S1: Tensor) -> Tensor:
    """The slow twin of `mean_pool`."""
    bounds = bounds_S1.tolist()
    return torch.stack([hidden_TD[a:b].float().mean(0) for a, b in pairwise(bounds)])


def classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies in nats, over samples or over tokens; `IGNORED` targets add nothing."""
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
