"""A frozen encoder → what it makes of a task's texts, computed once for all cells of a process: rates and seeds train
their layer on rows that are looked up.

Rows are made in blocks of neighbours, so that a row is the same to the last bit whichever cell asked for it first.

Letters: N rows (of texts, or of their tokens), D width.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase.console import err
from biphase.encoder.packed import packed_hidden
from biphase.finetuning.batches import CellContext, evaluation_batches, predict_samples
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoders import Embedder, Encoder, copy_backbone
from biphase.finetuning.encoding import EncodedTask, TokenizedTexts, encode_texts
from biphase.tasks.spec import Task

BLOCK = 64
"""Texts that are encoded together."""
NUM_KEPT = 8

kept: dict[tuple[Any, ...], "Features"] = {}
"""The features that were asked for last; they hold the texts by whose identity they are named."""


class Features:
    """The rows of some texts, made when they are first looked up."""

    def __init__(self, encoder: Encoder, texts: TokenizedTexts, cell: CellContext) -> None:
        self.texts, self.cell = texts, cell
        self.is_of_tokens = cell.task.family == "token_classification"
        backbone = copy_backbone(encoder.backbone, [texts]).to(cell.device).eval()
        self.model: Any = partial(packed_hidden, backbone) if self.is_of_tokens else Embedder(backbone)
        self.num = len(texts.tokens_T) if self.is_of_tokens else texts.num_samples
        width: int = encoder.backbone.config.hidden_size  # type: ignore[union-attr, assignment]
        self.rows_ND = torch.zeros(self.num, width, device=cell.device)
        self.is_made = np.zeros(texts.num_samples // BLOCK + 1, dtype=bool)

    @torch.no_grad()
    def look_up(self, rows: np.ndarray) -> Tensor:
        samples = np.searchsorted(self.texts.bounds_S1, rows, side="right") - 1 if self.is_of_tokens else rows
        blocks = np.unique(samples // BLOCK)
        for block in blocks[~self.is_made[blocks]]:
            wanted = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.texts.num_samples))
            for batch, output in evaluation_batches(self.model, self.texts, wanted, self.cell):
                places = batch.indices_T if self.is_of_tokens else batch.samples
                self.rows_ND[torch.from_numpy(places).to(output.device)] = output.float()
            self.is_made[block] = True
        return self.rows_ND[torch.from_numpy(rows).to(self.rows_ND.device)]


@torch.no_grad()
def encode_packed(encoder: Encoder, texts: Sequence[str], device: torch.device) -> np.ndarray:
    """The mean over each text's tokens, fp32, [texts, width]; of texts that have to be cut, a line tells."""
    backbone: Any = encoder.backbone if device.type == "cpu" else copy.deepcopy(encoder.backbone).to(device)
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
