"""The families of tasks, and the functions by which fine-tuning speaks with each.

A family knows what its examples look like as token ids, its loss, its predictions and their metrics. It knows neither
where data is from nor how training goes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import CellContext, EncodedSplit, EncodedTask, HashedTokenizer
from biphase.finetuning.families import question_answering as questions
from biphase.finetuning.families import retrieval
from biphase.finetuning.families import sequence_classification as texts
from biphase.finetuning.families import token_classification as tags
from biphase.finetuning.metrics import Judgement
from biphase.tasks.spec import Family


@dataclass(frozen=True)
class FamilyParts:
    split_kind: type[EncodedSplit]
    encode_task: Callable[[Any, HashedTokenizer, FinetuneConfig], EncodedTask[Any]]
    """It turns the examples of `tasks.examples` into token ids, with their targets."""
    accumulate_gradients: Callable[[nn.Module, Any, np.ndarray, CellContext], Tensor]
    """It returns the mean loss over some training items of a split, and adds its gradient to that of the parameters."""
    predict: Callable[[nn.Module, Any, CellContext], Any]
    """It predicts for all examples. Called under `torch.no_grad`, with a model in evaluation mode."""
    judge_split: Callable[[Any, Any, CellContext], Judgement]
    """It returns every metric of the family by its name, as a share between 0 and 1; and a row for each example, as it
    is written to `test.jsonl`: its id, what was predicted, and its score."""


FAMILY_PARTS: dict[Family, FamilyParts] = {
    "sequence_classification": FamilyParts(
        texts.LabelledSplit, texts.encode_labelled, texts.labels_loss, texts.predict_labels, texts.judge_labels
    ),
    "token_classification": FamilyParts(
        tags.TaggedSplit, tags.encode_tagged, tags.tags_loss, tags.predict_tags, tags.judge_tags
    ),
    "question_answering": FamilyParts(
        questions.QuestionSplit,
        questions.encode_all_questions,
        questions.answers_loss,
        questions.predict_answers,
        questions.judge_answers,
    ),
    "retrieval": FamilyParts(
        retrieval.JudgedSplit,
        retrieval.encode_collection,
        retrieval.pairs_loss,
        retrieval.search_documents,
        retrieval.judge_search,
    ),
    "multiple_choice": FamilyParts(
        texts.ChoiceSplit, texts.encode_choices, texts.choices_loss, texts.predict_labels, texts.judge_choices
    ),
}
PAIR_RANKING = FamilyParts(
    retrieval.CandidateSplit,
    retrieval.encode_candidates,
    texts.choices_loss,
    texts.predict_labels,
    retrieval.judge_candidates,
)


def parts_of(family: Family, config: FinetuneConfig) -> FamilyParts:
    """The functions by which a cell with this configuration is trained."""
    return PAIR_RANKING if family == "retrieval" and config.ranking == "pairs" else FAMILY_PARTS[family]
