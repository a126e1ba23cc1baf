"""The folder of a fine-tuned network and a user's file → rows to predict; the hashes of the rows that trained it.

Rows have the task's names of columns. A file is read like the task's training files with its ending; a .txt has a text
in each line. This module checks folder and file before PyTorch and the network load, which takes seconds.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from biphase.config import Strict
from biphase.corpus.forms import (
    FIRST_ROWS,
    PlacedRow,
    Row,
    TableForm,
    decimal_of,
    mark_numbers,
    number_columns,
    template_columns,
)
from biphase.corpus.rows import (
    FORMATS,
    column,
    ending_of,
    find_field,
    numbered_lines,
    open_table,
    renamed,
    rows_of_file,
)
from biphase.encoder.models import Encoder, Stamps, find_folder, stamp_model
from biphase.errors import InputError, clipped
from biphase.files import read_json_as, reading
from biphase.finetuning.calibration import Calibration
from biphase.finetuning.config import FinetuneConfig
from biphase.tasks.examples import LabelledText, classes_of, inputs_of, lacks_label, load_examples, make_examples
from biphase.tasks.families import KINDS
from biphase.tasks.sources import TaskSource, has_needed_quotes
from biphase.tasks.spec import EVALUATED_SPLITS, FileLayout, Task
from biphase.tasks.splits import TaskData

RECORD = "biphase.json"
"""The file of a kept folder that describes its inputs."""

TRAINED_ROWS = "trained_rows.u64"
"""The file of a kept folder with the hashes of the inputs that trained or validated it, or the kept model from which it
was fine-tuned, 8 bytes each (little endian); `push` does not send it."""

TEXT = "text"
"""The column of running text, unless a template names one."""


class KeptModel(Strict):
    """A fine-tuned network before it is loaded: the form of its inputs, and the way to read its outputs."""

    later: ClassVar[frozenset[str]] = frozenset({"part_of", "divides_text"})

    cell: str | None = None
    """The hash of its cell (`CellPlan.hash`)."""
    task: Task
    config: FinetuneConfig
    """The settings of its training; the defaults for a folder that `finetune --keep` did not write."""
    has_unanswerable: bool = False
    """Question answering: whether "no answer" may be predicted."""
    calibration: Calibration = Calibration()
    """`predict` applies its thresholds, which transformers' pipelines ignore. The temperature is in the weights."""
    part_of: str | None = None
    """`Task.part_of`, which the record of a task lacks."""
    divides_text: bool = False
    """Tagging: whether the words in training are those into which `WORD` divides their text. Then running text is
    divided, too."""

    # `find_kept` adds these fields; the stored record lacks them.
    folder: Path = Field(default=Path(), exclude=True)
    is_ours: bool = Field(default=True, exclude=True)
    """Whether `finetune --keep` wrote the folder."""
    stamps: Stamps = Field(default={}, exclude=True)
    """The stamps of the folder's files, from before one of them was read."""
    layout: FileLayout = Field(default=FileLayout(), exclude=True)
    """The layout for reading a file of rows."""


def read_task(folder: Path) -> Task:
    """Read the task that trained a kept model, with what only its splits need, which `find_kept` drops."""
    record = read_json_as(folder / RECORD, KeptModel)
    return record.task.model_copy(update={"part_of": record.part_of})


def hash_inputs(inputs: Iterable[Any]) -> np.ndarray:
    """Hash inputs, as `input_of` in `tasks/examples.py` returns them, to 8 bytes each."""
    texts = (json.dumps(value, ensure_ascii=False).encode() for value in inputs)
    return np.array([int.from_bytes(hashlib.sha256(text).digest()[:8], "little") for text in texts], dtype="<u8")


def read_trained(folder: Path) -> np.ndarray:
    """Read the hashes of the inputs that trained or validated a kept model; none for another folder, and for a copy
    from the Hub, which does not have them."""
    if not (folder / TRAINED_ROWS).exists():
        return np.zeros(0, dtype="<u8")
    with reading(folder / TRAINED_ROWS, "fine-tune it again with --keep"):
        return np.fromfile(folder / TRAINED_ROWS, dtype="<u8")


def count_trained(inputs: Iterable[Any], trained_hashes: np.ndarray) -> int:
    """Count the inputs whose hashes are among those of `read_trained`."""
    return int(np.isin(hash_inputs(inputs), trained_hashes).sum()) if len(trained_hashes) else 0


def trained_before(model: Encoder, config: FinetuneConfig) -> np.ndarray:
    """Read the hashes of the inputs that trained or validated the weights from which fine-tuning starts; random weights
    have none."""
    return read_trained(model.folder)[: None if config.weights == "pretrained" else 0]


def tell_trained(model: Encoder, evaluation: TaskSource, config: FinetuneConfig) -> list[str]:
    """Say for validation and test how many of their inputs trained or validated the model that fine-tuning starts from;
    [] if none did, as for a model that was not kept, and for retrieval: its queries are no inputs of another task."""
    trained_hashes = trained_before(model, config)
    if evaluation.task.kind.is_search or not len(trained_hashes):
        return []
    lines, data = list[str](), load_examples(evaluation, bool(config.judged_only), config.max_eval_examples)
    for split in EVALUATED_SPLITS:
        inputs = inputs_of(data, split)
        if num_trained := count_trained(inputs, trained_hashes):
            told = f"{num_trained:,} of {len(inputs):,} inputs of {split} trained or validated {model.name}"
            lines.append(f"{evaluation.task.name}: {told}: the scores on {split} are probably too high")
    return lines


def find_kept(name: str, file: Path, template: str | None = None) -> KeptModel:
    """Find a model folder or Hub model that predicts, and the layout for a file of rows.

    Args:
        template: the input, with columns in braces, for a folder that does not describe its inputs. None: `{text}`.

    Raises:
        InputError: a folder without a head that predicts, or with unknown inputs.
    """
    folder = find_folder(name)
    stamps = stamp_model(folder)
    config = read_json_as(folder / "config.json", dict[str, Any])
    classes = [str(name) for name in config.get("architectures") or []]
    family = next((family for name in classes for family, kind in KINDS.items() if name.endswith(kind.head)), None)
    if family is None:
        described = " ".join(classes) or "of no named class"
        remedy = f"fine-tune it first: `biphase finetune {name} TASK --keep FOLDER`"
        if (folder / "modules.json").exists():
            remedy += f"; or search with its embeddings: `biphase search TEXT QUESTION --model {name}`"
        raise InputError(f"{name} is {described}, which has no head that predicts; {remedy}")
    if (folder / RECORD).exists():
        remedy = "fine-tune it again with --keep"
        model = read_json_as(folder / RECORD, KeptModel, remedy)
        task, labels = model.task.model_copy(update={"group": None}), config.get("id2label")
        expected = {str(index): label for index, label in enumerate(task.classes)}
        if labels and expected and task.kind.num_outputs is None and labels != expected:
            raise InputError(f"{folder}: {RECORD} names other classes than config.json (id2label); {remedy}")
        if len(model.calibration.thresholds) not in (0, len(task.classes)):
            raise InputError(f"{folder}: {RECORD} does not have one threshold for each of its classes; {remedy}")
        if template is not None:
            raise InputError(f"{name} was trained on inputs of the form {task.template!r}: leave `template` out")
    elif KINDS[family].is_answering:
        raise InputError(f"{name} does not say what its inputs are: answers need what `finetune --keep` wrote")
    else:
        task = Task.model_construct(name=name, family=family, template=template or "{" + TEXT + "}")
        try:
            template_columns(task.template)
        except ValueError as error:
            raise InputError(f"--{error}") from None
        model = KeptModel.model_construct(task=task, config=FinetuneConfig(), is_ours=False)
    found = {"folder": folder, "stamps": stamps, "task": task, "layout": layout_to_predict(task, file)}
    return model.model_copy(update=found)


def layout_to_predict(task: Task, file: Path) -> FileLayout:
    """Choose the layout of a file to predict: the layout of a training file with the same ending, else the columns of
    any training file in columns. CoNLL-U itself fixes the column of words. A file with another ending has the scheme of
    tags of the training data: IOB2 reads the same in every scheme."""
    endings = [(layout, ending_of(Path(layout.train))) for layout in task.files if layout.train]
    for layout, ending in endings:
        if ending == ending_of(file):
            return layout
    for layout, ending in endings if ending_of(file) != ".conllu" else ():
        if (layout.format or FORMATS.get(ending, "columns")) in ("columns", "conllu"):
            return FileLayout(columns=layout.columns, scheme=layout.scheme)
    return FileLayout(scheme=task.forms[0].scheme) if task.forms else FileLayout()


def input_columns(task: Task) -> tuple[str, ...]:
    """List the columns of an input's texts."""
    return task.kind.input_columns or template_columns(task.template)


def open_rows(model: KeptModel, file: Path, tags: str | None = None) -> tuple[TableForm | None, Iterator[PlacedRow]]:
    """Open the rows of a file in any form of tasks, or of a .txt with a text in each line. Returns also the form of a
    table. `tags` names the tags of a file of columns; None: they are not read. Raises `InputError` at once for a file
    without rows, or a first row that lacks a column of the input."""
    task = model.task
    columns = input_columns(task)
    rows: Iterator[PlacedRow]
    table: TableForm | None = None
    form = model.layout.format or FORMATS.get(ending_of(file))
    if ending_of(file) == ".txt" and has_text_lines(task, model.layout, file):
        if len(columns) > 1:
            raise InputError(f"{file}: a line is one text, but {task.name} needs {' and '.join(columns)}")
        rows = ((f"{file}:{line_number}", {columns[0]: line}) for line_number, line in numbered_lines(file))
    elif form in ("csv", "tsv") and not file.is_dir():
        is_quoted = form == "tsv" and model.layout.quotes is None and has_needed_quotes(file, model.layout)
        layout = model.layout.model_copy(update={"quotes": True}) if is_quoted else model.layout
        table, rows = open_table(file, layout, is_csv=form == "csv")
        rows = mark_numbers(table, rows)
    else:
        rows = rows_of_file(file, model.layout, task.words, label=tags)
    begin = list(islice(rows, FIRST_ROWS if table else 1))
    if not begin:
        raise InputError(f"{file} has no rows")
    if table:
        table = replace(table, decimal=decimal_of(table, chain.from_iterable(number_columns(begin).values())))
    location, row = begin[0][0], with_task_names(task, model.layout, begin[0][1])
    if task.kind.is_tagging:
        words = f"'{task.words}' (a list of words) or " if model.is_ours else ""
        if TEXT not in row and not (words and task.words in row):
            raise InputError(f"{location}: {words}'{TEXT}' is needed; the columns are: {clipped(', '.join(row))}")
    else:
        for name in (*columns, *task.choices):
            if name != "choice":  # templates have it, but it is not a column
                column(location, row, name, "rename the column that the model should read")
    return table, chain(begin, rows)


def label_of(model: KeptModel, row: Row) -> tuple[str | list[str] | None, Any]:
    """Read the label, labels or tags of a row, and return them also as the row has them. None for labels that the model
    does not know; twice None for a row that is no example, which has no label or no text, and for multiple choice,
    whose rows name their own choices."""
    task = model.task
    named = with_task_names(task, model.layout, row)
    given = find_field(named, task.label)
    has_classes = model.is_ours and task.kind.has_classes and not task.kind.has_choices
    if not has_classes or lacks_label(task, given):
        return None, None
    try:
        examples, _ = make_examples(task, model.layout.scheme, [("", named)], defaultdict(list))
    except InputError:  # the file's column of this name may hold something else
        return None, given
    if not examples:
        return None, None
    labels = [task.classes[index] for index in classes_of(examples[0])]
    return labels[0] if task.kind.has_strata else labels, given


def read_labelled(model: KeptModel, file: Path) -> TaskData:
    """Read the labelled rows of a file as test examples, and count the others. Raises `InputError` for an unknown
    label, for a file without any, and for one number alone, which has no correlation."""
    if not model.is_ours or model.task.kind.is_search:
        raise InputError(f"{model.folder}: only a classifier or an answerer that `finetune --keep` wrote can be scored")
    task = model.task
    labelled: list[PlacedRow] = []
    num_rows = 0
    for location, row in open_rows(model, file, task.label)[1]:
        named = with_task_names(task, model.layout, row)
        num_rows += 1
        if task.kind.is_answering or not lacks_label(task, find_field(named, task.label)):
            labelled.append((location, named))
    examples, _ = make_examples(task, model.layout.scheme, labelled, defaultdict(list))
    if not examples:
        raise InputError(f"{file}: no row has a label in a column '{task.label}'; `biphase predict` needs none")
    labels = {example.label for example in examples if isinstance(example, LabelledText)}
    if task.kind.has_label_numbers and len(labels) == 1:
        raise InputError(f"{file}: every '{task.label}' is {labels.pop()}: a correlation needs different numbers")
    return TaskData(task, train=(), validation=(), test=tuple(examples), left_out=num_rows - len(examples))


LINES_READ = 200
"""The number of lines of a .txt to read to see whether it has columns."""
CHANCE = 2
"""The number of texts that may have the same number of words by chance."""


def has_text_lines(task: Task, layout: FileLayout, file: Path) -> bool:
    """Tell whether each line of a .txt is a text, not a row of a training file with this ending or words in
    columns.

    Lines of columns all have the same number of fields, and tabs between fields, empty lines between sentences, or more
    lines than have one length by chance. Raises `InputError` for columns in the .txt of a task that has no .txt.
    """
    if task.kind.is_of_texts or layout.format not in (None, "columns"):
        return task.kind.is_of_texts
    if not task.kind.is_tagging:
        return True
    text = "\n".join(line.strip() for _, line in islice(numbered_lines(file), LINES_READ)).strip()
    filled = [line for line in text.split("\n") if line]
    widths = {len(line.split()) for line in filled}
    is_table = len(widths) == 1 and ("\t" in text or "\n\n" in text or (widths != {1} and len(filled) > CHANCE))
    if is_table and all(ending_of(Path(form.train)) != ".txt" for form in task.files if form.train):
        raise InputError(f"{file}: words in columns, or a text a line? Name columns .conll, or give a column '{TEXT}'")
    return not is_table


def with_task_names(task: Task, layout: FileLayout, row: Row) -> Row:
    """Rename a row's columns to the task's. The names in files of this layout win over the row's own; those in other
    files and on the Hub come last."""
    others: Row = {}
    for form in reversed(task.forms):
        others |= renamed(row, form.rename)
    return others | row | renamed(row, layout.rename)
