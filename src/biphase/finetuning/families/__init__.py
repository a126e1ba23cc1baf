"""The families of tasks, and the protocol by which fine-tuning speaks with each: a family is a module.

A family knows what its examples look like as token ids, its loss, its predictions and their metrics. It knows neither
where data is from nor how training goes.
"""

from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import CellContext, EncodedSplit, EncodedTask, HashedTokenizer
from biphase.finetuning.families import (
    multiple_choice,
    pair_ranking,
    question_answering,
    retrieval,
    sequence_classification,
    token_classification,
)
from biphase.finetuning.metrics import Judgement
from biphase.tasks.spec import Family


class FamilyModule(Protocol):
    """A module of this folder, with splits and predictions of its own kinds."""

    @property
    def split_kind(self) -> type[EncodedSplit]:
        """The class of its splits."""

    def encode_task(self, data: Any, tokenizer: HashedTokenizer, config: FinetuneConfig) -> EncodedTask[Any]:
        """The examples of `tasks.examples` as token ids, with their targets."""

    def accumulate_gradients(self, model: nn.Module, split: Any, items: np.ndarray, cell: CellContext) -> Tensor:
        """The mean loss over some training items of a split, and its gradient added to that of the parameters."""

    def predict(self, model: nn.Module, split: Any, cell: CellContext) -> Any:
        """The predictions for all examples. Called under `torch.no_grad`, with a model in evaluation mode."""

    def judge_split(self, split: Any, predictions: Any, cell: CellContext) -> Judgement:
        """Every metric of the family by its name, as a share between 0 and 1; and a row for each example, as it is
        written to `test.jsonl`: its id, what was predicted, and its score."""


FAMILY_MODULES: dict[Family, FamilyModule] = {
    "sequence_classification": sequence_classification,
    "token_classification": token_classification,
    "question_answering": question_answering,
    "retrieval": retrieval,
    "multiple_choice": multiple_choice,
}


def module_of(family: Family, config: FinetuneConfig) -> FamilyModule:
    """The module by which a cell with this configuration is trained."""
    return pair_ranking if family == "retrieval" and config.ranking == "pairs" else FAMILY_MODULES[family]
