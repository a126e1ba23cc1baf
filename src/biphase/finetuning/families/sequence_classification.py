"""Texts with labels: mean pooling → dense → GELU → linear.

A text or pair has one class (cross-entropy) or, by the task's `problem_type`, a number (squared error, in units of the
variance) or a set of classes (binary cross-entropy), as in transformers.

Letters: S samples, C classes or 1 for a number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import transformers
from scipy.special import expit, softmax
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from biphase.corpus.forms import PlacedRow, Row
from biphase.corpus.rows import find_field
from biphase.finetuning.calibration import Calibration, choose_thresholds, fit_temperature
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import NO_TEXTS, Batch, CellContext, EncodedSplit, HashedTokenizer
from biphase.finetuning.families import Predicted, in_order_of_length, predict_inputs
from biphase.finetuning.heads import NumberLayer
from biphase.finetuning.kept import KeptModel, input_columns
from biphase.finetuning.loss import balance_classes, cross_entropy, deviation_from
from biphase.finetuning.metrics import Judgement, score_rows
from biphase.tasks.examples import LabelledText, fill_row, input_of, lacks_text
from biphase.tasks.spec import Task, TaskSplit
from biphase.tasks.splits import TaskData


@dataclass(frozen=True)
class Split(EncodedSplit):
    labels_S: np.ndarray
    """The index of the class; or a number, fp64; or [S, C], 1 for each class of the set."""

    @property
    def strata(self) -> np.ndarray:
        return self.labels_S if self.labels_S.dtype == np.int64 else super().strata

    def balanced_weights(self, items: np.ndarray, cell: CellContext) -> np.ndarray:
        labels = self.labels_S[items]
        if cell.task.problem_type is None:
            return balance_classes(np.bincount(labels, minlength=len(cell.task.classes)))
        if cell.task.problem_type == "regression":
            return np.array([1 / deviation_from(labels, labels.mean())])
        counts_C = labels.sum(axis=0)  # sets: for each example with the class, the examples without it
        is_mixed_C = (counts_C > 0) & (counts_C < len(items))
        return np.where(is_mixed_C, (len(items) - counts_C) / np.maximum(counts_C, 1), 1.0)

    def set_unit(self, network: nn.Module, items: np.ndarray) -> None:
        """Let the last layer of a network for numbers learn the standardized labels of these items."""
        labels = self.labels_S[items]
        for layer in network.modules():
            if isinstance(layer, NumberLayer):
                layer.mean = 0.0 if layer.bias is None else float(labels.mean())
                layer.scale = deviation_from(labels, layer.mean)

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        targets_S, weights_C = cell.on_device(self.labels_S[batch.samples]), cell.class_weights_C
        match cell.task.problem_type:
            case None:
                return cross_entropy(cell, output, self.labels_S[batch.samples], self.labels_S[items])
            case "regression":
                assert weights_C is not None, "`weigh_classes` weighs every regression"
                return mse_loss(weights_C * output[:, 0], weights_C * targets_S, reduction="sum") / len(items)
            case "multi_label_classification":
                loss = binary_cross_entropy_with_logits(output, targets_S, pos_weight=weights_C, reduction="sum")
                return loss / (len(items) * output.shape[1])

    def classes_of(self, examples: np.ndarray) -> np.ndarray:
        return np.nonzero(self.labels_S[examples])[1] if self.labels_S.ndim == 2 else self.strata[examples]

    def calibrate(self, logits_SC: np.ndarray, cell: CellContext) -> Calibration:
        if cell.task.problem_type is None:
            return Calibration(temperature=fit_temperature(logits_SC, self.labels_S))
        return Calibration(thresholds=choose_thresholds(expit(logits_SC), self.labels_S, cell.task.metric))

    def judge(self, logits_SC: np.ndarray, cell: CellContext) -> Judgement:
        """Score the outputs. Labels in the rows are names, numbers, or lists of names."""
        task = cell.task
        rows = []
        outputs = read_outputs(task, logits_SC, cell.calibration.thresholds)
        for id, label, output in zip(self.ids, self.labels_S.tolist(), outputs, strict=True):
            row = {"id": id, "gold": label, "predicted": output.pop("predicted")}
            if task.problem_type is None:
                row["gold"] = task.classes[label]
                output.pop("probabilities")
            elif task.problem_type == "multi_label_classification":
                row["gold"] = [name for name, is_right in zip(task.classes, label, strict=True) if is_right]
            if task.problem_type != "regression":
                row["score"] = float(row["gold"] == row["predicted"])
            rows.append(row | output)
        metrics = [name for name in task.kind.metrics if name != "f1" or len(task.classes) == 2]
        return score_rows(rows, metrics, task.classes), rows


def encode(data: TaskData, tokenizer: HashedTokenizer, config: FinetuneConfig) -> dict[TaskSplit, Split]:
    return {name: encode_labelled(data.task, rows, tokenizer, config.max_length) for name, rows in data.splits.items()}


def encode_labelled(task: Task, examples: Sequence[LabelledText], tokenizer: HashedTokenizer, max_length: int) -> Split:
    texts = tokenizer.encode_filled([example.texts[0] for example in examples], max_length)
    return replace(label_split(task, examples), texts=texts, num_truncated=len(texts.truncated))


def label_split(task: Task, examples: Sequence[LabelledText]) -> Split:
    """Make a split of the labels, without the texts."""
    labels: Sequence[Any] = [example.label for example in examples]
    if task.problem_type == "multi_label_classification":
        labels_S = np.zeros((len(labels), len(task.classes)))
        for row, indices in zip(labels_S, labels, strict=True):
            row[list(indices)] = 1
    else:
        labels_S = np.array(labels, dtype=np.int64 if task.problem_type is None else np.float64)
    return Split([example.id for example in examples], NO_TEXTS, len(examples), 0, labels_S)


def read_outputs(task: Task, logits_SC: np.ndarray, thresholds: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Read the outputs of each sample: the number, or the class or classes with all probabilities."""
    if task.problem_type == "regression":
        for number in logits_SC[:, 0].tolist():
            yield {"predicted": number}
        return
    is_single = task.problem_type is None
    for row in (softmax(logits_SC, axis=-1) if is_single else expit(logits_SC)).tolist():
        yield labelled(dict(zip(task.classes, row, strict=True)), is_single, thresholds)


def labelled(probabilities: Mapping[str, float], is_single: bool, thresholds: tuple[float, ...] = ()) -> dict[str, Any]:
    """Name the label with the highest probability, or the labels above their thresholds (() for 0.5 each)."""
    rounded = {label: round(value, 5) for label, value in probabilities.items()}
    if not is_single:
        least = thresholds or (0.5,) * len(probabilities)
        above = [value > threshold for value, threshold in zip(probabilities.values(), least, strict=True)]
        return {"predicted": [*compress(probabilities, above)], "probabilities": rounded}
    best = max(probabilities, key=lambda label: probabilities[label])
    return {"predicted": best, "probability": rounded[best], "probabilities": rounded}


def predict(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Predict a label with the probability of each, labels, or a number. Pairs are cut as in training. A row without a
    text has the same columns without values."""
    task = model.task
    blank = dict.fromkeys(input_columns(task), "")
    texts = [{name: find_field(row, name) for name in blank} for _, row in rows]
    is_empty = [lacks_text([*fields.values()]) for fields in texts]
    no_label = () if task.problem_type == "multi_label_classification" else 0
    inputs = []
    for (location, _), fields, empty in zip(rows, texts, is_empty, strict=True):
        inputs.append(LabelledText(location, (fill_row(task, location, blank if empty else fields),), no_label))
    if not model.is_ours:
        predictions, num_cut = classify_as_pipeline(network, tokenizer.pretrained, [*map(input_of, inputs)])
    else:
        split = encode_labelled(task, inputs, tokenizer, model.config.max_length)
        logits_SC = predict_inputs(model, network, split)
        predictions, num_cut = [*read_outputs(task, logits_SC, model.calibration.thresholds)], split.num_truncated
    for index in np.flatnonzero(is_empty):
        values = predictions[index].items()
        predictions[index] = {key: dict.fromkeys(value) if isinstance(value, dict) else None for key, value in values}
    return Predicted(predictions, num_cut, [*map(input_of, inputs)])


def classify_as_pipeline(network: Any, tokenizer: Any, texts: Sequence[str]) -> tuple[list[Row], int]:
    """Classify texts by transformers' pipeline. Returns the predictions, and how many texts were cut."""
    lengths = map(len, tokenizer(texts, truncation=False, verbose=False)["input_ids"])
    pipe = transformers.pipeline("text-classification", network, tokenizer=tokenizer, device=network.device)
    is_single = network.config.problem_type != "multi_label_classification"
    predictions: list[Row] = []
    for scores in in_order_of_length(lambda some: pipe(some, top_k=None, truncation=True, batch_size=32), texts):
        if len(scores) == 1:  # a number, with no class
            predictions.append({"predicted": scores[0]["score"]})
        else:
            predictions.append(labelled({label["label"]: label["score"] for label in scores}, is_single))
    return predictions, sum(length > tokenizer.model_max_length for length in lengths)
