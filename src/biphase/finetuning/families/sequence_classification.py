"""Sequence classification, single texts and pairs: mean pooling → dense → GELU → linear, cross-entropy, accuracy.

With `head: transformers`, the head is that of the network's class in transformers.

Letters: S samples, C classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from biphase.finetuning.batches import (
    Batch,
    CellContext,
    backward_in_microbatches,
    evaluation_batches,
    targets_on_device,
)
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoders import SequenceClassifier, with_transformers_head
from biphase.finetuning.encoding import EncodedSplit, EncodedTask, HashedTokenizer, encode_filled
from biphase.finetuning.metrics.classification import sequence_metrics
from biphase.tasks.examples import LabelledText, TaskData


@dataclass(frozen=True)
class LabelledSplit(EncodedSplit):
    labels_S: np.ndarray


split_kind = LabelledSplit


def encode_task(
    data: TaskData[LabelledText], tokenizer: HashedTokenizer, config: FinetuneConfig
) -> EncodedTask[LabelledSplit]:
    splits = {}
    for name, examples in data.splits.items():
        ids = [example.id for example in examples]
        columns = [example.columns for example in examples]
        texts = encode_filled(tokenizer, [example.text for example in examples], columns, config.max_length)
        labels_S = np.array([example.label for example in examples], dtype=np.int64)
        splits[name] = LabelledSplit(ids, texts, len(examples), len(texts.truncated), labels_S)
    return EncodedTask(splits, data.left_out)


def build_model(backbone: nn.Module, cell: CellContext) -> nn.Module:
    if cell.config.head == "transformers":
        return with_transformers_head(backbone, AutoModelForSequenceClassification, len(cell.task.classes))
    return SequenceClassifier(backbone, len(cell.task.classes))


def accumulate_gradients(model: nn.Module, split: LabelledSplit, items: np.ndarray, cell: CellContext) -> Tensor:
    def loss_of(batch: Batch) -> Tensor:
        logits_SC = model(batch.tokens_T, batch.positions_T, batch.layout)
        targets_S = targets_on_device(split.labels_S[batch.samples], cell)
        return cross_entropy(logits_SC, targets_S, reduction="sum") / len(items)

    return backward_in_microbatches(split.texts, items, cell, loss_of)


def predict(model: nn.Module, split: LabelledSplit, cell: CellContext) -> np.ndarray:
    """The logits [S, C]."""
    predicted_SC = np.zeros((split.num_examples, len(cell.task.classes)), dtype=np.float32)
    for batch, logits_SC in evaluation_batches(model, split.texts, np.arange(split.num_examples), cell):
        predicted_SC[batch.samples] = logits_SC.cpu().numpy()
    return predicted_SC


def compute_metrics(split: LabelledSplit, predictions: np.ndarray, cell: CellContext) -> dict[str, float]:
    return sequence_metrics(split.labels_S, predictions.argmax(-1), len(cell.task.classes))


def prediction_rows(split: LabelledSplit, predictions: np.ndarray, cell: CellContext) -> Iterator[dict[str, Any]]:
    columns = (split.labels_S.tolist(), predictions.argmax(-1).tolist(), softmax(predictions, axis=-1).max(-1).tolist())
    for id, gold, predicted, probability in zip(split.ids, *columns, strict=True):
        yield {
            "id": id,
            "gold": cell.task.classes[gold],
            "predicted": cell.task.classes[predicted],
            "score": float(gold == predicted),
            "probability": round(probability, 5),
        }
