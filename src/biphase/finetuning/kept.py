"""A folder of a fine-tuned network and a file of rows → what is predicted for which inputs; without PyTorch.

What is wrong with either is said before the network is loaded, which takes seconds.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.config import Strict
from biphase.errors import InputError, clipped
from biphase.files import MARK, read_json_as, refuse_damaged
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.input_rows import TEXT, PlacedRow, file_rows, input_columns, layout_to_predict, with_task_names
from biphase.finetuning.models import find_folder
from biphase.tasks.rows import Row
from biphase.tasks.sources import TaskSource, column
from biphase.tasks.spec import Family, FileLayout, Task, template_columns

CHOICE = "choice"
"""What templates name that is no column."""

RECORD = "biphase.json"
"""The file of a kept folder that says what its inputs look like."""

HEADS: dict[str, Family] = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
}
"""What a folder is for, by how the class that it names ends."""


class KeptRecord(Strict):
    """What `biphase predict` must know of the training, to make inputs of rows as it did."""

    cell: str | None = None
    """The hash of all that decided the network, as `CellPlan` has it."""
    task: Task
    config: FinetuneConfig
    has_unanswerable: bool = False
    """Question answering: whether no answer may be predicted."""


@dataclass(frozen=True)
class KeptModel:
    """A folder that predicts, not yet loaded, and how rows are read for it."""

    name: str
    folder: Path
    family: Family
    """What its head is."""
    task: Task
    record: KeptRecord | None
    """None for a folder that `finetune --keep` did not write."""
    layout: FileLayout
    """How a file of rows is read."""

    @property
    def source(self) -> TaskSource:
        """The task, as the source of rows under its own names of columns."""
        return TaskSource(self.task, self.name, "", FileLayout(), {})


def find_kept(name: str, file: Path, template: str | None = None) -> KeptModel:
    """What a model folder or a hub model predicts for the rows of a file.

    Args:
        template: columns in braces, for a folder that does not say what its inputs look like. None: `{text}`.

    Raises:
        InputError: a folder without a head that predicts, or one whose inputs nobody knows.
    """
    folder = find_folder(name)
    family, record = family_of(name, folder), None
    if (folder / RECORD).exists():
        remedy = "fine-tune it again with --keep"
        refuse_damaged(folder, f"{remedy}, or delete {MARK} where you changed it yourself")
        record = read_json_as(folder / RECORD, KeptRecord, remedy)
        task = record.task
        labels = read_json_as(folder / "config.json", dict[str, Any]).get("id2label")
        classes = {str(number): name for number, name in enumerate(task.classes)}
        if labels and classes and task.family != "multiple_choice" and labels != classes:
            raise InputError(f"{folder}: {RECORD} names other classes than config.json (id2label); {remedy}")
        if template is not None:
            raise InputError(f"{name} says itself what its inputs look like ({task.template!r}): leave template out")
    elif family == "question_answering":
        raise InputError(
            f"{name} does not say what its inputs look like: answers are found by what `finetune --keep` wrote"
        )
    else:
        task = Task.model_construct(name=name, family=family, template=template or "{" + TEXT + "}")
        try:
            template_columns(task.template)
        except ValueError as error:
            raise InputError(f"--{error}") from None
    return KeptModel(name, folder, family, task, record, layout_to_predict(task, file))


def open_rows(kept: KeptModel, file: Path) -> Iterator[PlacedRow]:
    """The rows of a file. Raises `InputError` at once where there are none, or the first one lacks a column that inputs
    are made of."""
    rows = file_rows(kept.task, kept.layout, file)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{file} has no rows")
    place, row = first
    check_columns(kept, place, with_task_names(kept.task, kept.layout, row))
    return itertools.chain([first], rows)


def check_columns(kept: KeptModel, place: str, row: Row) -> None:
    """Raises `InputError` where a row has not what an input is made of."""
    if kept.task.family == "token_classification":
        words = f"'{kept.task.words}' (a list of words) or " if kept.record is not None else ""
        if TEXT not in row and not (words and kept.task.words in row):
            raise InputError(f"{place}: {words}'{TEXT}' is needed; the columns are: {clipped(', '.join(row))}")
        return
    for name in (*input_columns(kept.task), *kept.task.choices):
        if name != CHOICE:
            column(kept.source, place, row, name)


def family_of(name: str, folder: Path) -> Family:
    """What a folder predicts. Raises `InputError` where it is an embedding model, or an encoder alone."""
    names = read_json_as(folder / "config.json", dict[str, Any]).get("architectures") or []
    found = next((HEADS[end] for one in names for end in HEADS if str(one).endswith(end)), None)
    if found is not None:
        return found
    if (folder / "modules.json").exists():
        raise InputError(
            f"{name} gives embeddings, not predictions: ask it with `biphase search TEXT QUESTION --model {name}`"
        )
    raise InputError(
        f"{name} is {' '.join(map(str, names)) or 'of no named class'}, which has no head that predicts; fine-tune it "
        "with `biphase finetune MODEL TASK --keep DIR`"
    )
