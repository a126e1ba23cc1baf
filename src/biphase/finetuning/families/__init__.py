"""The families of tasks, a module each. `tasks/families.py` has the facts about each, and `make_examples` in
`tasks/examples.py` makes their examples. A module offers three names:

    Split      a split of a task as token ids with its targets: its loss, its predictions and their scores
    encode     (data, tokenizer, config) → the splits of a task by name
    predict    (kept model, network, tokenizer, rows) → predictions for rows of a user's file

`pair_ranking` (`ranking: pairs`) reads the data of retrieval.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from biphase.corpus.forms import Row
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
    """The number of rows that were cut."""
    inputs: Sequence[Any] = ()
    """The input of each row, as `input_of` in `tasks/examples.py` returns it; () for running text that another's folder
    tags."""


def family_module(task: Task, config: FinetuneConfig) -> Any:
    """Find the module of a task's family. `config` is settled."""
    return import_module(f"{__name__}.{'pair_ranking' if config.ranking == 'pairs' else task.family}")


def predict_inputs(model: KeptModel, network: Any, inputs: EncodedSplit | TokenizedTexts) -> Any:
    """Predict encoded inputs by a class of transformers with its head."""
    cell = CellContext(model.task, model.config, network.device, torch.float32, calibration=model.calibration)
    return inputs.predict(partial(padded_logits, network), cell)


def in_order_of_length(predict: Callable[[list[str]], list[Any]], texts: Sequence[str]) -> list[Any]:
    """Predict texts in batches of similar length."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    by_index = dict(zip(order, predict([texts[index] for index in order]), strict=True))
    return [by_index[index] for index in range(len(texts))]
