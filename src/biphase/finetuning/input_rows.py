"""A file of a user's → the rows to predict, under the names that the task has for their columns.

Files for training say how one that ends alike is read; a .txt is a text a line.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from biphase.corpus.readers import ABSENT, find_field, plain_path, read_text_lines
from biphase.errors import InputError
from biphase.tasks.rows import FORMATS, Row, read_file
from biphase.tasks.spec import FileLayout, Hub, Task, template_columns

TEXT = "text"
"""The column of running text, where no template names one."""

LOOKED_AT = 200
"""Lines of a .txt that tell whether it is of columns."""
CHANCE = 2
"""Texts that may stand together and have the same number of words."""

PlacedRow = tuple[str, Row]
"""A row with its place, for messages."""


def layout_to_predict(task: Task, file: Path) -> FileLayout:
    """How a file to predict is read: as one for training that ends alike; else columns as the task's files of columns
    have them, whatever these end in. CoNLL-U says itself where its words stand."""
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
    for place, row in read_file(task, layout, file, None, is_to_predict=True):
        if row is None:
            raise InputError(f"{place}: fewer fields than the header names")
        yield place, row


def input_columns(task: Task) -> tuple[str, ...]:
    """The columns of texts that an input is made of."""
    if task.family == "retrieval":
        return "query", "document"
    return (TEXT,) if task.family == "token_classification" else template_columns(task.template)


def has_text_lines(task: Task, layout: FileLayout, file: Path) -> bool:
    """Whether a .txt holds a text a line, and not what files of the task that end so hold."""
    if task.family == "sequence_classification":
        return True
    if layout.format not in (None, "columns"):
        return False
    return task.family != "token_classification" or not is_in_columns(task, file)


def is_in_columns(task: Task, file: Path) -> bool:
    """Whether a .txt to tag holds words in columns.

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


def renamed(form: FileLayout | Hub, row: Row) -> Row:
    """The columns of a row that a form of files has other names for, under the task's names."""
    found = {ours: find_field(row, theirs, ABSENT) for theirs, ours in form.rename.items()}
    return {ours: value for ours, value in found.items() if value is not ABSENT}
