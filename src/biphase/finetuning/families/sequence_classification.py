"""Texts with labels, and questions with choices: mean pooling → dense → GELU → linear.

Single texts and pairs have one class by cross-entropy; by a task's `problem_type` a number (squared error) or a set of
classes (binary cross-entropy), as transformers has them. Of multiple choice each choice is a text of its own with one
output, its score; the loss is cross-entropy over the choices of a question, and questions may have unlike numbers of
them.

Letters: S samples, M samples of a batch, C classes or 1 for a number, Q questions, whose choices are samples end to
end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import AdditiveSplit, Batch, CellContext, HashedTokenizer, count_touched, to_bounds
from biphase.finetuning.families.question_answering import segment_logsumexp
from biphase.finetuning.metrics import Judgement, score_rows
from biphase.tasks.examples import LabelledText
from biphase.tasks.spec import METRICS, Task


@dataclass(frozen=True)
class LabelledSplit(AdditiveSplit):
    labels_S: np.ndarray
    """The number of the class; or a number, fp64; or [S, C] 1 for each class of the set."""

    @property
    def strata(self) -> np.ndarray:
        return self.labels_S if self.labels_S.dtype == np.int64 else super().strata

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        targets_S = cell.on_device(self.labels_S[batch.samples])
        match cell.task.problem_type:
            case None:
                return cross_entropy(output, targets_S, reduction="sum") / len(items)
            case "regression":
                return mse_loss(output[:, 0], targets_S, reduction="sum") / len(items)
            case "multi_label_classification":
                loss = binary_cross_entropy_with_logits(output, targets_S, reduction="sum")
                return loss / (len(items) * output.shape[1])

    def judge(self, logits_SC: np.ndarray, cell: CellContext) -> Judgement:
        """In the rows a label is a name, a number, or a list of names."""
        task, rows = cell.task, []
        for id, label, output in zip(self.ids, self.labels_S.tolist(), read_outputs(task, logits_SC), strict=True):
            row = {"id": id, "gold": label, "predicted": output.pop("predicted")}
            if task.problem_type is None:
                row["gold"] = task.classes[label]
                output.pop("probabilities")
            elif task.problem_type == "multi_label_classification":
                row["gold"] = [name for name, is_right in zip(task.classes, label, strict=True) if is_right]
            if task.problem_type != "regression":
                row["score"] = float(row["gold"] == row["predicted"])
            rows.append(row | output)
        metrics = METRICS[task.problem_type or task.family]
        if task.problem_type is None and len(task.classes) > 2:
            metrics = tuple(name for name in metrics if name != "f1")
        return score_rows(rows, metrics, task.classes), rows


def encode_labelled(
    task: Task, examples: Sequence[LabelledText], tokenizer: HashedTokenizer, config: FinetuneConfig
) -> LabelledSplit:
    texts = tokenizer.encode_filled([example.texts[0] for example in examples], config.max_length)
    labels: Sequence[Any] = [example.label for example in examples]
    if task.problem_type == "multi_label_classification":
        labels_S = np.zeros((len(labels), len(task.classes)))
        for row, numbers in zip(labels_S, labels, strict=True):
            row[list(numbers)] = 1
    else:
        labels_S = np.array(labels, dtype=np.int64 if task.problem_type is None else np.float64)
    return LabelledSplit([example.id for example in examples], texts, len(examples), len(texts.truncated), labels_S)


def read_outputs(task: Task, logits_SC: np.ndarray) -> Iterator[dict[str, Any]]:
    """Read what a network's outputs say of each sample: the number, or the class or classes with all probabilities."""
    if task.problem_type == "regression":
        for number in logits_SC[:, 0].tolist():
            yield {"predicted": number}
        return
    is_single = task.problem_type is None
    for row in (softmax(logits_SC, axis=-1) if is_single else expit(logits_SC)).tolist():
        yield labelled(dict(zip(task.classes, row, strict=True)), is_single)


def labelled(probabilities: Mapping[str, float], is_single: bool) -> dict[str, Any]:
    rounded = {label: round(value, 5) for label, value in probabilities.items()}
    if not is_single:
        chosen = [label for label, value in probabilities.items() if value > 0.5]
        return {"predicted": chosen, "probabilities": rounded}
    best = max(probabilities, key=lambda label: probabilities[label])
    return {"predicted": best, "probability": rounded[best], "probabilities": rounded}


@dataclass(frozen=True)
class ChoiceSplit(AdditiveSplit):
    bounds_Q1: np.ndarray
    """Where the choices of each question lie in the samples."""
    right_Q: np.ndarray
    """The right choice, counted from the first of its question."""

    @cached_property
    def lengths_I(self) -> np.ndarray:
        return np.diff(self.texts.bounds_S1[self.bounds_Q1])

    def samples_of(self, items: np.ndarray) -> np.ndarray:
        return np.concatenate([np.arange(self.bounds_Q1[item], self.bounds_Q1[item + 1]) for item in items])

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        """The cross-entropy over the choices of each question, its mean over questions."""
        # A question's choices are neighbours in the batch: where the next begins, a sample is of another question.
        questions_M = np.searchsorted(self.bounds_Q1, batch.samples, side="right") - 1
        firsts = np.flatnonzero(np.diff(questions_M, prepend=-1))
        bounds = torch.from_numpy(np.append(firsts, len(questions_M))).to(output.device)
        right = cell.on_device(firsts + self.right_Q[questions_M[firsts]])
        return (segment_logsumexp(output, bounds)[:, 0] - output[right, 0]).sum() / len(items)

    def judge(self, scores_S1: np.ndarray, cell: CellContext) -> Judgement:
        parts = np.split(scores_S1[:, 0], self.bounds_Q1[1:-1])
        rows = []
        for id, right, part in zip(self.ids, self.right_Q, parts, strict=True):
            gold, best = cell.task.classes[right], best_choice(part, cell.task.classes)
            row = {"id": id, "gold": gold, "predicted": best["predicted"], "score": float(gold == best["predicted"])}
            rows.append(row | {"probability": best["probability"]})
        return score_rows(rows, ("accuracy",), cell.task.classes), rows


def encode_choices(
    _task: Task, examples: Sequence[LabelledText], tokenizer: HashedTokenizer, config: FinetuneConfig
) -> ChoiceSplit:
    choices = [choice for example in examples for choice in example.texts]
    texts = tokenizer.encode_filled(choices, config.max_length)
    bounds_Q1 = to_bounds([len(example.texts) for example in examples])
    right_Q = np.array([example.label for example in examples], dtype=np.int64)
    num_cut = count_touched(bounds_Q1, texts.truncated)
    return ChoiceSplit([example.id for example in examples], texts, len(examples), num_cut, bounds_Q1, right_Q)


def best_choice(scores: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """The best of some choices with these scores, and the probability of each; there may be more names."""
    return labelled(dict(zip(names, softmax(scores.astype(np.float64)).tolist(), strict=False)), is_single=True)
