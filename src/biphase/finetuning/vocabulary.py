"""A cell's copy of the network, with those rows of the embedding only that its texts use.

The other rows get no gradient and are looked up by nobody, so scores stay the same; but every step they would cost
their share of gradients, norm and optimizer: with a vocabulary of 128,256 and small batches, more than all else.

Letters: V vocabulary, U tokens in use, D width.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase.finetuning.encoding import Texts


class UsedEmbedding(nn.Embedding):
    """Some rows of an embedding, found by the numbers that the tokens have in the whole vocabulary."""

    row_of_V: Tensor

    def __init__(self, whole: nn.Embedding, used_U: Tensor) -> None:
        super().__init__(len(used_U), whole.embedding_dim, _weight=whole.weight.detach()[used_U])
        row_of_V = used_U.new_full((whole.num_embeddings,), len(used_U))  # no row: looking it up is an error
        row_of_V[used_U] = torch.arange(len(used_U), device=used_U.device)
        self.register_buffer("row_of_V", row_of_V, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.row_of_V[input])


def copy_for(backbone: Any, *encoded: Any) -> nn.Module:
    """A copy of `backbone` for the texts of these tasks; for any text, where none are given.

    The whole embedding stays where it is more than a table.
    """
    embedding = backbone.get_input_embeddings()
    if not encoded or not is_table(backbone, embedding):
        return copy.deepcopy(backbone)
    pad_id = getattr(backbone.config, "pad_token_id", None) or 0
    used_U = np.unique(np.concatenate([[pad_id], *(texts.used_U for task in encoded for texts in texts_in(task))]))
    return copy.deepcopy(backbone, {id(embedding): UsedEmbedding(embedding, torch.from_numpy(used_U))})


def is_table(backbone: nn.Module, embedding: nn.Module) -> bool:
    """Whether an embedding only looks rows up (Gemma's scales them), and nothing else has its weight."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.scale_grad_by_freq:
        return False
    owners = [module for module in backbone.modules() if getattr(module, "weight", None) is embedding.weight]
    return owners == [embedding]


def texts_in(record: Any) -> Iterator[Texts]:
    """All texts of an encoded task."""
    if isinstance(record, Texts):
        yield record
    elif dataclasses.is_dataclass(record):
        for item in dataclasses.fields(record):
            yield from texts_in(getattr(record, item.name))
