"""Sequence classification, single texts and pairs: mean pooling → dense → GELU → linear, cross-entropy, accuracy.

Letters: S samples, C classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from biphase.finetuning.batches import Batch, backward_by_parts, evaluation_batches, on_device
from biphase.finetuning.cell import CellContext
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import KeyedTokenizer, Texts, encode
from biphase.finetuning.heads import SequenceClassifier
from biphase.finetuning.metrics.classification import sequence_metrics
from biphase.tasks.examples import LabelledText, TaskData
from biphase.tasks.spec import Task

ENCODING_SETTINGS: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    ids: tuple[str, ...]
    texts: Texts
    labels_S: np.ndarray

    @property
    def num_examples(self) -> int:
        return len(self.ids)

    @property
    def num_truncated(self) -> int:
        return len(self.texts.truncated)


@dataclass(frozen=True)
class Encoded:
    train: Split
    validation: Split
    test: Split
    left_out: int


def encode_task(data: TaskData, keyed: KeyedTokenizer, config: FinetuneConfig) -> Encoded:
    def split(examples: tuple[LabelledText, ...]) -> Split:
        texts = encode(keyed, [example.text for example in examples], config.max_length)
        labels = np.array([example.label for example in examples], dtype=np.int64)
        return Split(tuple(example.id for example in examples), texts, labels)

    return Encoded(split(data.train), split(data.validation), split(data.test), data.left_out)  # type: ignore[arg-type]


def training_items(encoded: Encoded) -> Texts:
    return encoded.train.texts


def build(backbone: nn.Module, task: Task, config: FinetuneConfig) -> nn.Module:
    return SequenceClassifier(backbone, len(task.classes))


def accumulate_gradients(model: nn.Module, encoded: Encoded, samples: np.ndarray, cell: CellContext) -> Tensor:
    """The mean loss over `samples`, and its gradient."""
    split = encoded.train

    def loss_of(batch: Batch) -> Tensor:
        logits_SC = model(batch.tokens_T, batch.positions_T, batch.layout)
        targets = on_device(split.labels_S[batch.samples], cell.compute)
        return cross_entropy(logits_SC, targets, reduction="sum") / len(samples)

    return backward_by_parts(split.texts, samples, cell.compute, loss_of)


def predict(model: nn.Module, encoded: Encoded, split_name: str, cell: CellContext) -> np.ndarray:
    """The label of each sample of a split."""
    split: Split = getattr(encoded, split_name)
    predicted_S = np.zeros(split.num_examples, dtype=np.int64)
    for batch, logits_SC in evaluation_batches(model, split.texts, np.arange(split.num_examples), cell.compute):
        predicted_S[batch.samples] = logits_SC.argmax(-1).cpu().numpy()
    return predicted_S


def measure(encoded: Encoded, split_name: str, predicted_S: np.ndarray, cell: CellContext) -> dict[str, float]:
    split: Split = getattr(encoded, split_name)
    return sequence_metrics(split.labels_S, predicted_S, len(cell.task.classes))


def records(encoded: Encoded, split_name: str, predicted_S: np.ndarray, cell: CellContext) -> Iterator[dict[str, Any]]:
    split: Split = getattr(encoded, split_name)
    for id, gold, predicted in zip(split.ids, split.labels_S.tolist(), predicted_S.tolist(), strict=True):
        yield {
            "id": id,
            "gold": cell.task.classes[gold],
            "predicted": cell.task.classes[predicted],
            "score": float(gold == predicted),
        }
