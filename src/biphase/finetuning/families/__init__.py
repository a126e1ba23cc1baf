"""The families of tasks. What a family is called and measured by is its record in `tasks/families.py`; here it is the
module of its name, and each offers the same three names:

    Split      a split of a task as token ids with its targets: its loss, what it predicts, how that is scored
    encode     (data, tokenizer, config) → the splits of a task by name
    predict    (kept model, network, tokenizer, rows) → what is predicted for rows of a user's file

Rankers of pairs (`ranking: pairs`) are a module of their own: they read the data of retrieval.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from biphase.corpus.rows import Row
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import CellContext, EncodedSplit, TokenizedTexts
from biphase.finetuning.heads import padded_logits
from biphase.finetuning.kept import KeptModel
from biphase.tasks.spec import Task


@dataclass(frozen=True)
class Predicted:
    """Predictions for rows, in their order."""

    rows: Sequence[Row]
    num_cut: int
    """The rows of which something was cut off."""


def family_module(task: Task, config: FinetuneConfig) -> Any:
    """Find the module of a task's family. `config` is settled."""
    return import_module(f"{__name__}.{'pair_ranking' if config.ranking == 'pairs' else task.family}")


def predict_inputs(model: KeptModel, network: Any, inputs: EncodedSplit | TokenizedTexts) -> Any:
    """Predict for encoded inputs, with a class of transformers with its head."""
    cell = CellContext(model.task, model.config, network.device, torch.float32, calibration=model.calibration)
    return inputs.predict(partial(padded_logits, network), cell)


def in_order_of_length(predict: Callable[[list[str]], list[Any]], texts: Sequence[str]) -> list[Any]:
    """Predict for texts, each in a batch with others of its length."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    by_index = dict(zip(order, predict([texts[index] for index in order]), strict=True))
    return [by_index[index] for index in range(len(texts))]
