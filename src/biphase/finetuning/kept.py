"""A folder of a fine-tuned network and a file of a user's rows → what is predicted for which inputs; without PyTorch.

Rows stand under the names that the task has for their columns. Files for training say how one that ends alike is read;
a .txt is a text a line. What is wrong with folder or file is said before the network is loaded, which takes seconds.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.config import Strict
from biphase.corpus.rows import PlacedRow, Row, plain_path, read_text_lines
from biphase.errors import InputError, clipped
from biphase.files import read_json_as
from biphase.finetuning.cells import find_folder
from biphase.finetuning.config import FinetuneConfig
from biphase.tasks.sources import FORMATS, column, renamed, rows_of_file
from biphase.tasks.spec import Family, FileLayout, Hub, Task, template_columns

TEXT = "text"
"""The column of running text, where no template names one."""

LOOKED_AT = 200
"""Lines of a .txt that tell whether it is of columns."""
CHANCE = 2
"""Texts that may stand together and have the same number of words."""


def layout_to_predict(task: Task, file: Path) -> FileLayout:
    """Choose how a file to predict is read: as one for training that ends alike; else columns as the task's files
    of columns have them, whatever these end in. CoNLL-U says itself where its words stand."""
    files = [(one, Path(one.train)) for one in task.files if one.train]
    ending = plain_path(file).suffix
    alike = next((one for one, path in files if plain_path(path).suffix == ending), None)
    if alike is not None:
        return alike
    if ending == ".conllu":
        return FileLayout()
    forms = [(one, one.format or FORMATS.get(plain_path(path).suffix, "columns")) for one, path in files]
    return FileLayout(columns=next((one.columns for one, form in forms if form in ("columns", "conllu")), (0, 1)))


def file_rows(task: Task, layout: FileLayout, file: Path) -> Iterator[PlacedRow]:
    """The rows of a file of any form that tasks have; of a .txt for one column, a text a line."""
    if plain_path(file).suffix == ".txt" and has_text_lines(task, layout, file):
        columns = input_columns(task)
        if len(columns) > 1:
            raise InputError(f"{file}: a line is one text, but {task.name} needs {' and '.join(columns)}")
        for number, line, _ in read_text_lines(file):
            yield f"{file}:{number}", {columns[0]: line.rstrip("\r\n")}
        return
    yield from rows_of_file(file, layout, task.words, label=None)


def input_columns(task: Task) -> tuple[str, ...]:
    """The columns of texts that an input is made of."""
    if task.family == "retrieval":
        return "query", "document"
    return (TEXT,) if task.family == "token_classification" else template_columns(task.template)


def has_text_lines(task: Task, layout: FileLayout, file: Path) -> bool:
    """Tell whether a .txt holds a text a line, and not what files of the task that end so hold."""
    if task.family == "sequence_classification":
        return True
    if layout.format not in (None, "columns"):
        return False
    return task.family != "token_classification" or not is_in_columns(task, file)


def is_in_columns(task: Task, file: Path) -> bool:
    """Tell whether a .txt to tag holds words in columns.

    Its first lines tell: of columns all have one number of fields, with tabs between them, or empty lines between
    sentences, or more such lines than texts of one length stand together by chance. Only the files of a task that was
    trained on .txt may be so; raises `InputError` for others.
    """
    lines = [line.strip() for _, line, _ in itertools.islice(read_text_lines(file), LOOKED_AT)]
    text = "\n".join(lines).strip()
    filled = [line for line in lines if line]
    widths = {len(line.split()) for line in filled}
    is_table = len(widths) == 1 and ("\t" in text or "\n\n" in text or (widths != {1} and len(filled) > CHANCE))
    trained = any(plain_path(Path(one.train)).suffix == ".txt" for one in task.files if one.train)
    if is_table and not trained:
        raise InputError(
            f"{file}: words in columns, or a text a line? Name columns .conll, or give texts as a column '{TEXT}'"
        )
    return is_table


def with_task_names(task: Task, layout: FileLayout, row: Row) -> Row:
    """A row with the task's columns, whether it has these, those of the files of its kind, which go first, or those
    of other files that the task names, or of the hub's data."""
    forms: list[FileLayout | Hub] = [*task.files, *([task.hub] if task.hub else [])]
    others: Row = {}
    for form in reversed(forms):
        others |= renamed(form, row)
    return others | row | renamed(layout, row)


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
    """The family that its head is for."""
    task: Task
    record: KeptRecord | None
    """None for a folder that `finetune --keep` did not write."""
    layout: FileLayout
    """The layout by which a file of rows is read."""


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
            column(place, row, name)


def family_of(name: str, folder: Path) -> Family:
    """Return the family that a folder predicts for. Raises `InputError` for an embedding model, or an encoder alone."""
    names = read_json_as(folder / "config.json", dict[str, Any]).get("architectures") or []
    family = next((HEADS[end] for one in names for end in HEADS if str(one).endswith(end)), None)
    if family is not None:
        return family
    if (folder / "modules.json").exists():
        raise InputError(
            f"{name} gives embeddings, not predictions: ask it with `biphase search TEXT QUESTION --model {name}`"
        )
    raise InputError(
        f"{name} is {' '.join(map(str, names)) or 'of no named class'}, which has no head that predicts; fine-tune it "
        "with `biphase finetune MODEL TASK --keep DIR`"
    )
