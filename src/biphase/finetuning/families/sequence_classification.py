"""Sequence classification, single texts and pairs: mean pooling → dense → GELU → linear.

One class by cross-entropy; by a task's `problem_type` a number (squared error) or a set of classes (binary
cross-entropy), as transformers has them.

Letters: S samples, C classes; 1 in place of C for a number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import (
    Batch,
    CellContext,
    EncodedSplit,
    EncodedTask,
    HashedTokenizer,
    backward_in_microbatches,
    encode_filled,
    predict_samples,
    targets_on_device,
)
from biphase.finetuning.heads import num_outputs
from biphase.finetuning.metrics import Judgement, multi_label_metrics, regression_metrics, sequence_metrics
from biphase.tasks.examples import LabelledText, TaskData
from biphase.tasks.spec import Task


@dataclass(frozen=True)
class LabelledSplit(EncodedSplit):
    labels_S: np.ndarray
    """The number of the class; or a number, fp64; or [S, C] 1 for each class of the set."""

    @property
    def strata(self) -> np.ndarray:
        return self.labels_S if self.labels_S.dtype == np.int64 else super().strata


split_kind = LabelledSplit


def encode_task(
    data: TaskData[LabelledText], tokenizer: HashedTokenizer, config: FinetuneConfig
) -> EncodedTask[LabelledSplit]:
    splits = {}
    for name, examples in data.splits.items():
        ids = [example.id for example in examples]
        columns = [example.columns for example in examples]
        texts = encode_filled(tokenizer, [example.text for example in examples], columns, config.max_length)
        labels_S = label_array(data.task, [example.label for example in examples])
        splits[name] = LabelledSplit(ids, texts, len(examples), len(texts.truncated), labels_S)
    return EncodedTask(splits, data.left_out)


def label_array(task: Task, labels: Sequence[Any]) -> np.ndarray:
    if task.problem_type != "multi_label_classification":
        return np.array(labels, dtype=np.int64 if task.problem_type is None else np.float64)
    labels_SC = np.zeros((len(labels), len(task.classes)))
    for row, numbers in zip(labels_SC, labels, strict=True):
        row[list(numbers)] = 1
    return labels_SC


def accumulate_gradients(model: nn.Module, split: LabelledSplit, items: np.ndarray, cell: CellContext) -> Tensor:
    def loss_of(logits_SC: Tensor, batch: Batch) -> Tensor:
        targets_S = targets_on_device(split.labels_S[batch.samples], cell)
        match cell.task.problem_type:
            case None:
                return cross_entropy(logits_SC, targets_S, reduction="sum") / len(items)
            case "regression":
                return mse_loss(logits_SC[:, 0], targets_S, reduction="sum") / len(items)
            case "multi_label_classification":
                loss = binary_cross_entropy_with_logits(logits_SC, targets_S, reduction="sum")
                return loss / (len(items) * logits_SC.shape[1])

    return backward_in_microbatches(model, split.texts, items, cell, loss_of)


def predict(model: nn.Module, split: LabelledSplit, cell: CellContext) -> np.ndarray:
    """The logits [S, C]."""
    return predict_samples(model, split.texts, num_outputs(cell.task), cell)


def judge_split(split: LabelledSplit, predictions: np.ndarray, cell: CellContext) -> Judgement:
    rows = label_rows(split, predictions, cell.task)
    match cell.task.problem_type:
        case None:
            return sequence_metrics(split.labels_S, predictions.argmax(-1), len(cell.task.classes)), rows
        case "regression":
            return regression_metrics(split.labels_S, predictions[:, 0]), rows
        case "multi_label_classification":
            return multi_label_metrics(split.labels_S.astype(np.int64), (predictions > 0).astype(np.int64)), rows


def label_rows(split: LabelledSplit, predictions: np.ndarray, task: Task) -> Iterator[dict[str, Any]]:
    """Labels are written as a name, a number, or a list of names."""
    golds = split.labels_S.tolist()
    if task.problem_type is None:
        golds = [task.classes[number] for number in golds]
    elif task.problem_type == "multi_label_classification":
        golds = [[task.classes[number] for number in np.flatnonzero(row)] for row in split.labels_S]
    for id, gold, found in zip(split.ids, golds, read_outputs(task, predictions), strict=True):
        score = {"score": float(gold == found["predicted"])} if task.problem_type != "regression" else {}
        if task.problem_type is None:
            found.pop("probabilities")
        yield {"id": id, "gold": gold, "predicted": found.pop("predicted")} | score | found


def read_outputs(task: Task, logits_SC: np.ndarray) -> Iterator[dict[str, Any]]:
    """What a network's outputs say of each sample: the number, or the class or classes with all probabilities."""
    if task.problem_type == "regression":
        yield from ({"predicted": number} for number in logits_SC[:, 0].tolist())
        return
    is_single = task.problem_type is None
    for row in (softmax(logits_SC, axis=-1) if is_single else expit(logits_SC)).tolist():
        yield labelled({name: value for name, value in zip(task.classes, row, strict=True)}, is_single)


def labelled(probabilities: Mapping[str, float], is_single: bool) -> dict[str, Any]:
    rounded = {label: round(value, 5) for label, value in probabilities.items()}
    if not is_single:
        chosen = [label for label, value in probabilities.items() if value > 0.5]
        return {"predicted": chosen, "probabilities": rounded}
    best = max(probabilities, key=lambda label: probabilities[label])
    return {"predicted": best, "probability": rounded[best], "probabilities": rounded}
