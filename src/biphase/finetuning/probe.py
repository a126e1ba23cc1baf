"""A frozen encoder → what it makes of a task's texts, computed once for all cells of a process: rates and seeds train
their layer on rows that are looked up.

Rows are made in blocks of neighbours, so that a row is the same to the last bit whichever cell asked for it first.

Letters: N rows (of texts, or of their tokens), M those of them that there is room for, D width.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from biphase.console import err
from biphase.encoder.packed import packed_hidden
from biphase.finetuning.batches import CellContext, evaluation_batches, predict_samples
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoders import Embedder, Encoder
from biphase.finetuning.encoding import EncodedTask, TokenizedTexts, encode_texts
from biphase.tasks.spec import Task

BLOCK = 64
"""Texts that are encoded together."""
NUM_KEPT = 8

kept: dict[tuple[Any, ...], "Features"] = {}
"""The features that were asked for last; they hold the texts by whose identity they are named."""

backbones: WeakValueDictionary[tuple[str, torch.device], nn.Module] = WeakValueDictionary()
"""Encoders on a GPU, one each, for as long as features are made of them."""


def place_backbone(encoder: Encoder, device: torch.device) -> nn.Module:
    """The encoder on the device: on a CPU itself, for nothing here changes it."""
    if device.type == "cpu":
        return encoder.backbone.eval()
    placed = backbones.get((encoder.hash, device))
    if placed is None:
        placed = backbones[encoder.hash, device] = copy.deepcopy(encoder.backbone).to(device).eval()
    return placed


class Features:
    """The rows of some texts, made when they are first looked up."""

    def __init__(self, encoder: Encoder, texts: TokenizedTexts, cell: CellContext) -> None:
        self.texts, self.cell = texts, cell
        self.is_of_tokens = cell.task.family == "token_classification"
        backbone = place_backbone(encoder, cell.device)
        self.model: Any = partial(packed_hidden, backbone) if self.is_of_tokens else Embedder(backbone)
        self.num = len(texts.tokens_T) if self.is_of_tokens else texts.num_samples
        width: int = encoder.backbone.config.hidden_size  # type: ignore[union-attr, assignment]
        self.rows_MD = torch.zeros(0, width, device=cell.device)
        self.places_N = np.full(self.num, -1)
        self.num_made = 0

    @torch.no_grad()
    def look_up(self, rows: np.ndarray) -> Tensor:
        missing = rows[self.places_N[rows] < 0]
        samples = np.searchsorted(self.texts.bounds_S1, missing, side="right") - 1 if self.is_of_tokens else missing
        for block in np.unique(samples // BLOCK):
            self.make(np.arange(block * BLOCK, min((block + 1) * BLOCK, self.texts.num_samples)))
        if self.num_made == self.num:
            self.model = None
        return self.rows_MD[torch.from_numpy(self.places_N[rows]).to(self.rows_MD.device)]

    def make(self, samples: np.ndarray) -> None:
        """Put the rows of some texts behind those that there are, in twice the room where it is full."""
        for batch, output in evaluation_batches(self.model, self.texts, samples, self.cell):
            first, end = self.num_made, self.num_made + len(output)
            if end > len(self.rows_MD):
                room = torch.zeros(min(2 * end, self.num), output.shape[1], device=output.device)
                room[:first] = self.rows_MD[:first]
                self.rows_MD = room
            self.rows_MD[first:end] = output.float()
            self.places_N[batch.indices_T if self.is_of_tokens else batch.samples] = np.arange(first, end)
            self.num_made = end


@torch.no_grad()
def encode_packed(encoder: Encoder, texts: Sequence[str], device: torch.device) -> np.ndarray:
    """The mean over each text's tokens, fp32, [texts, width]; of texts that have to be cut, a line tells."""
    backbone: Any = place_backbone(encoder, device)
    encoded = encode_texts(encoder.tokenizer, texts, encoder.max_length)
    if len(encoded.truncated):
        err.print(f"{len(encoded.truncated):,} of {len(texts):,} texts are cut at {encoder.max_length:,} tokens")
    task = Task.model_construct(name="encode", family="retrieval")
    cell = CellContext(task, FinetuneConfig(precision="fp32"), device, torch.float32)
    return predict_samples(Embedder(backbone).eval(), encoded, backbone.config.hidden_size, cell)


class FeatureTable(nn.Module):
    """It stands where the encoder would: numbers of rows in place of token ids → features."""

    def __init__(self, config: Any, parts: Sequence[Features]) -> None:
        super().__init__()
        self.config, self.parts = config, parts
        self.firsts = np.cumsum([0, *(part.num for part in parts)])

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        rows = input_ids[0].cpu().numpy()
        features_ND = torch.zeros(len(rows), self.config.hidden_size, device=input_ids.device)
        for part, first in zip(self.parts, self.firsts[:-1].tolist(), strict=True):
            own = np.flatnonzero((rows >= first) & (rows < first + part.num))
            if len(own):
                features_ND[torch.from_numpy(own).to(input_ids.device)] = part.look_up(rows[own] - first)
        return SimpleNamespace(last_hidden_state=features_ND[None])


def look_up_tasks(
    encoder: Encoder, tasks: Sequence[EncodedTask[Any]], cell: CellContext
) -> tuple[FeatureTable | None, Sequence[EncodedTask[Any]]]:
    """A table in place of a frozen encoder, and the tasks with numbers of its rows as tokens: one for each text, or for
    each token of texts to tag. Other cells keep their tasks, and those whose weights are their own or that find spans.
    """
    config, is_known = cell.config, cell.task.family not in ("question_answering", "retrieval")
    if not (config.frozen and is_known) or config.weights == "random" or config.weight_dtype == "bf16":
        return None, tasks
    parts: list[Features] = []
    made = []
    for encoded in tasks:
        splits = {}
        for name, split in encoded.splits.items():
            key = (encoder.hash, cell.device, cell.dtype, id(split.texts))
            part = kept.pop(key, None) or Features(encoder, split.texts, cell)
            kept[key] = part
            first = sum(one.num for one in parts)
            tokens = np.arange(first, first + part.num)
            bounds = split.texts.bounds_S1 if part.is_of_tokens else np.arange(part.num + 1)
            splits[name] = replace(split, texts=TokenizedTexts(tokens, bounds, split.texts.truncated))
            parts.append(part)
        made.append(EncodedTask(splits, encoded.left_out))
    while len(kept) > max(NUM_KEPT, len(parts)):
        del kept[next(iter(kept))]
    return FeatureTable(encoder.backbone.config, parts), made
