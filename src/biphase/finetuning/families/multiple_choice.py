"""Questions with choices: each choice is a text with one output, its score.

The loss is cross-entropy over the choices of a question. Questions may have different numbers of choices.

Letters: S samples, M samples of a batch, Q questions, whose choices are samples end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import softmax
from torch import Tensor

from biphase.corpus.forms import PlacedRow
from biphase.errors import InputError
from biphase.finetuning.calibration import Calibration, fit_temperature
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import Batch, CellContext, EncodedSplit, HashedTokenizer, to_bounds
from biphase.finetuning.families import Predicted, predict_inputs
from biphase.finetuning.families.sequence_classification import labelled
from biphase.finetuning.kept import KeptModel
from biphase.finetuning.loss import segment_logsumexp
from biphase.finetuning.metrics import Judgement, score_rows
from biphase.tasks.examples import LabelledText, input_of, read_choices
from biphase.tasks.spec import TaskSplit
from biphase.tasks.splits import TaskData


@dataclass(frozen=True)
class Split(EncodedSplit):
    bounds_Q1: np.ndarray
    """The bounds of each question's choices in the samples."""
    right_Q: np.ndarray
    """The right choice, counted from the first of its question."""

    @cached_property
    def lengths_I(self) -> np.ndarray:
        return np.diff(self.texts.bounds_S1[self.bounds_Q1])

    def samples_of(self, items: np.ndarray) -> np.ndarray:
        return np.concatenate([np.arange(self.bounds_Q1[item], self.bounds_Q1[item + 1]) for item in items])

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        """Compute the cross-entropy over the choices of each question, averaged over questions."""
        # A question's choices are neighbours in the batch.
        questions_M = np.searchsorted(self.bounds_Q1, batch.samples, side="right") - 1
        firsts = np.flatnonzero(np.diff(questions_M, prepend=-1))
        bounds = cell.on_device(np.append(firsts, len(questions_M)))
        right = cell.on_device(firsts + self.right_Q[questions_M[firsts]])
        return (segment_logsumexp(output, bounds)[:, 0] - output[right, 0]).sum() / len(items)

    def classes_of(self, examples: np.ndarray) -> np.ndarray:
        return self.right_Q[examples]

    def calibrate(self, scores_S1: np.ndarray, cell: CellContext) -> Calibration:
        sizes_Q = np.diff(self.bounds_Q1)
        logits_QC = np.full((len(sizes_Q), sizes_Q.max()), -np.inf)
        logits_QC[np.arange(sizes_Q.max()) < sizes_Q[:, None]] = scores_S1[:, 0]
        return Calibration(temperature=fit_temperature(logits_QC, self.right_Q))

    def judge(self, scores_S1: np.ndarray, cell: CellContext) -> Judgement:
        by_question = np.split(scores_S1[:, 0], self.bounds_Q1[1:-1])
        rows = []
        for id, right, scores in zip(self.ids, self.right_Q, by_question, strict=True):
            gold, best = cell.task.classes[right], best_choice(scores, cell.task.classes)
            row = {"id": id, "gold": gold, "predicted": best["predicted"], "score": float(gold == best["predicted"])}
            rows.append(row | {"probability": best["probability"]})
        return score_rows(rows, ("accuracy",), cell.task.classes), rows


def encode(data: TaskData, tokenizer: HashedTokenizer, config: FinetuneConfig) -> dict[TaskSplit, Split]:
    return {name: encode_choices(examples, tokenizer, config) for name, examples in data.splits.items()}


def encode_choices(examples: Sequence[LabelledText], tokenizer: HashedTokenizer, config: FinetuneConfig) -> Split:
    texts = tokenizer.encode_filled([choice for example in examples for choice in example.texts], config.max_length)
    bounds_Q1 = to_bounds([len(example.texts) for example in examples])
    right_Q = np.array([example.label for example in examples], dtype=np.int64)
    num_cut = texts.count_cut(bounds_Q1)
    return Split([example.id for example in examples], texts, len(examples), num_cut, bounds_Q1, right_Q)


def best_choice(scores: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Name the choice with the highest score, and the probability of each. There may be more names than choices."""
    return labelled(dict(zip(names, softmax(scores.astype(np.float64)).tolist(), strict=False)), is_single=True)


def predict(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Name the best choice, by the row's own names if they differ, and the probability of each."""
    task = model.task
    names, inputs = [], []
    for location, row in rows:
        choices, labels = read_choices(task, location, row)
        names.append(labels if labels and len({*labels}) == len(labels) else task.classes)
        if len(choices) > len(names[-1]):
            raise InputError(f"{location}: {len(choices)} choices, where task '{task.name}' names {len(task.classes)}")
        inputs.append(LabelledText(location, choices, 0))
    split = encode_choices(inputs, tokenizer, model.config)
    asked = zip(np.split(predict_inputs(model, network, split)[:, 0], split.bounds_Q1[1:-1]), names, strict=True)
    answers = [best_choice(*question) for question in asked]
    return Predicted(answers, split.num_truncated, [*map(input_of, inputs)])
