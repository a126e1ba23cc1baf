"""Multiple choice: each choice is a text of its own, the network gives it one score, softmax over those of a question.

The network is that of a sequence classification with one output; questions may have unlike numbers of choices.

Letters: Q questions, S samples (the choices of all questions, end to end), M samples of a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor, nn

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import (
    Batch,
    CellContext,
    EncodedSplit,
    EncodedTask,
    HashedTokenizer,
    backward_in_microbatches,
    bounds_of_lengths,
    count_touched,
    encode_filled,
    predict_samples,
    targets_on_device,
)
from biphase.finetuning.families.question_answering import segment_logsumexp
from biphase.finetuning.families.sequence_classification import labelled
from biphase.finetuning.metrics import Judgement, accuracy
from biphase.tasks.examples import ChoiceTexts, TaskData


@dataclass(frozen=True)
class ChoiceSplit(EncodedSplit):
    bounds_Q1: np.ndarray
    """Where the choices of each question lie in the samples."""
    right_Q: np.ndarray
    """The right choice, counted from the first of its question."""

    def count_tokens(self, items: np.ndarray) -> int:
        tokens_Q1 = self.texts.bounds_S1[self.bounds_Q1]
        return int((tokens_Q1[items + 1] - tokens_Q1[items]).sum())


split_kind = ChoiceSplit


def encode_task(
    data: TaskData[ChoiceTexts], tokenizer: HashedTokenizer, config: FinetuneConfig
) -> EncodedTask[ChoiceSplit]:
    splits = {}
    for name, examples in data.splits.items():
        choices = [choice for example in examples for choice in example.choices]
        columns = [choice.columns for choice in choices]
        texts = encode_filled(tokenizer, [choice.text for choice in choices], columns, config.max_length)
        bounds_Q1 = bounds_of_lengths([len(example.choices) for example in examples])
        num_truncated = count_touched(bounds_Q1, texts.truncated)
        right_Q = np.array([example.right for example in examples], dtype=np.int64)
        ids = [example.id for example in examples]
        splits[name] = ChoiceSplit(ids, texts, len(examples), num_truncated, bounds_Q1, right_Q)
    return EncodedTask(splits, data.left_out)


def accumulate_gradients(model: nn.Module, split: ChoiceSplit, items: np.ndarray, cell: CellContext) -> Tensor:
    """The mean over questions of the cross-entropy over their choices, and its gradient."""

    def loss_of(scores_M1: Tensor, batch: Batch) -> Tensor:
        # A question's choices are neighbours in the batch: where the next one begins, a sample is of another question.
        questions_M = np.searchsorted(split.bounds_Q1, batch.samples, side="right") - 1
        firsts = np.flatnonzero(np.diff(questions_M, prepend=-1))
        bounds = torch.from_numpy(np.append(firsts, len(questions_M))).to(scores_M1.device)
        right = targets_on_device(firsts + split.right_Q[questions_M[firsts]], cell)
        return (segment_logsumexp(scores_M1, bounds)[:, 0] - scores_M1[right, 0]).sum() / len(items)

    return backward_in_microbatches(model, split.texts, items, cell, loss_of, split.bounds_Q1)


def predict(model: nn.Module, split: ChoiceSplit, cell: CellContext) -> np.ndarray:
    """The scores [S]."""
    return predict_samples(model, split.texts, 1, cell)[:, 0]


def judge_split(split: ChoiceSplit, predictions: np.ndarray, cell: CellContext) -> Judgement:
    parts = np.split(predictions, split.bounds_Q1[1:-1])
    metrics = {"accuracy": accuracy(split.right_Q, np.array([part.argmax() for part in parts]))}
    return metrics, choice_rows(split, parts, cell.task.classes)


def choice_rows(split: ChoiceSplit, parts: Sequence[np.ndarray], classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    for id, right, part in zip(split.ids, split.right_Q, parts, strict=True):
        said, gold = best_choice(part, classes), classes[right]
        score = float(said["predicted"] == gold)
        yield {
            "id": id,
            "gold": gold,
            "predicted": said["predicted"],
            "score": score,
            "probability": said["probability"],
        }


def best_choice(scores: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """The best of some choices with these scores, and the probability of each; there may be more names."""
    return labelled(dict(zip(names, softmax(scores.astype(np.float64)).tolist(), strict=False)), is_single=True)
