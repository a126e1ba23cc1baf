"""The families of tasks, and the protocol by which fine-tuning speaks with each: a family is a module.

A family knows what its examples look like as token ids, its loss, its predictions and their metrics. It knows neither
where data is from nor how training goes.
"""

from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor, nn

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import CellContext, EncodedTask, HashedTokenizer, Split
from biphase.finetuning.families import (
    multiple_choice,
    pair_ranking,
    question_answering,
    retrieval,
    sequence_classification,
    token_classification,
)
from biphase.finetuning.families.multiple_choice import ChoiceSplit
from biphase.finetuning.families.pair_ranking import CandidateSplit
from biphase.finetuning.families.question_answering import QuestionSplit, SpanPredictions
from biphase.finetuning.families.retrieval import JudgedSplit
from biphase.finetuning.families.sequence_classification import LabelledSplit
from biphase.finetuning.families.token_classification import TaggedSplit
from biphase.finetuning.metrics import Judgement, Ranked
from biphase.tasks.examples import ChoiceTexts, Collection, LabelledText, Question, TaggedWords, TaskData
from biphase.tasks.spec import Family

InputData = TypeVar("InputData", contravariant=True)
Predictions = TypeVar("Predictions")


class FamilyModule(Protocol[InputData, Split, Predictions]):
    """A module of this folder. `Predictions` are those for all examples of a split."""

    @property
    def split_kind(self) -> type[Split]:
        """The class of its splits."""

    def encode_task(self, data: InputData, tokenizer: HashedTokenizer, config: FinetuneConfig) -> EncodedTask[Split]:
        """The examples of `tasks.examples` as token ids, with their targets."""

    def accumulate_gradients(self, model: nn.Module, split: Split, items: np.ndarray, cell: CellContext) -> Tensor:
        """The mean loss over some training items of a split, and its gradient added to that of the parameters."""

    def predict(self, model: nn.Module, split: Split, cell: CellContext) -> Predictions:
        """The predictions for all examples. Called under `torch.no_grad`, with a model in evaluation mode."""

    def judge_split(self, split: Split, predictions: Predictions, cell: CellContext) -> Judgement:
        """Every metric of the family by its name, as a share between 0 and 1; and a row for each example, as it is
        written to `test.jsonl`: its id, what was predicted, and its score."""


# Each assignment makes the type checker hold a module against the protocol.
SEQUENCES: FamilyModule[TaskData[LabelledText], LabelledSplit, np.ndarray] = sequence_classification
TOKENS: FamilyModule[TaskData[TaggedWords], TaggedSplit, tuple[np.ndarray, np.ndarray]] = token_classification
QUESTIONS: FamilyModule[TaskData[Question], QuestionSplit, SpanPredictions] = question_answering
COLLECTIONS: FamilyModule[Collection, JudgedSplit, Ranked] = retrieval
CHOICES: FamilyModule[TaskData[ChoiceTexts], ChoiceSplit, np.ndarray] = multiple_choice
PAIRS: FamilyModule[Collection, CandidateSplit, np.ndarray] = pair_ranking

FAMILY_MODULES: dict[Family, FamilyModule[Any, Any, Any]] = {
    "sequence_classification": SEQUENCES,
    "token_classification": TOKENS,
    "question_answering": QUESTIONS,
    "retrieval": COLLECTIONS,
    "multiple_choice": CHOICES,
}


def module_of(family: Family, config: FinetuneConfig) -> FamilyModule[Any, Any, Any]:
    """The module by which a cell with this configuration is trained."""
    return PAIRS if family == "retrieval" and config.ranking == "pairs" else FAMILY_MODULES[family]
