"""Rows of a program's own → a task: a folder with its data and the YAML file that describes it.

It is written once, under a name that ends in a hash of what it holds, so that the same rows are the same task.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml

from biphase.config import parse_config
from biphase.errors import InputError
from biphase.files import content_hash, file_hash, whole_folder, write_text
from biphase.tasks.labels import is_missing
from biphase.tasks.rows import Row, read_any_file
from biphase.tasks.spec import METRICS, TASK_SPLITS, Task, task_table
from biphase.verbs.describe_task import LABEL_NAMES, describe_rows, label_of
from biphase.verbs.memory import keep_rows, rows_in

OWN = "own"
"""What a task is called that nobody named."""

QUESTION_TEMPLATE = "Question: {question}\nContext: {context}"


def write_task(
    data: Any,
    folder: Path,
    name: str | None,
    template: str | None = None,
    label: str | None = None,
    missing: Literal["refuse", "drop"] = "refuse",
) -> tuple[str, str]:
    """The YAML file and the data folder of a task that rows describe by their columns (`describe_task`).

    Args:
        data: rows to train on, or a mapping of splits (`train`, `validation`, `test`) to rows: a DataFrame, a
            `datasets.Dataset`, a list of dictionaries, or a file in a form that tasks have. Missing splits are drawn.
        folder: where tasks of one's own are kept.
        template: columns in braces that make the input, in place of all columns of texts.
        label: the column with the label, or with the list of tags.
        missing: what becomes of rows without label or text, as the key of a task says.

    Raises:
        InputError: another split, columns that are no task, or the name of a task that biphase has.
    """
    name = name or OWN
    if name in task_table() or name.endswith((".yaml", ".yml")):
        raise InputError(f"'{name}' is a task that says what its data is: give its folder as data, or another name")
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in splits or not splits.keys() <= set(TASK_SPLITS):
        raise InputError(f"data has the splits {', '.join(map(repr, splits))}; name them train, validation and test")
    with TemporaryDirectory() as held:
        files, places = {}, {}
        for split, given in splits.items():
            placed = list(labelled_rows(given, split, label))
            places[split] = [place for place, _ in placed]
            files[split] = keep_rows((row for _, row in placed), Path(held), "rows")
            files[split] = files[split].rename(files[split].with_name(f"{split}.jsonl"))
        train = zip(places["train"], (row for _, row in read_any_file(files["train"])), strict=True)
        described = describe_rows(list(train), "train", label, template=template)
        for split, path in files.items():
            if label_of(described) not in next(read_any_file(path), ("", {}))[1]:
                raise InputError(f"{split}: its rows have no label: leave it out, or predict them")
        layout = {split: files[split].name for split in TASK_SPLITS if split in files} | described.pop("files.0")
        family = described["family"]
        asked = template or described.get("template") or (QUESTION_TEMPLATE if family == "question_answering" else "")
        metric = METRICS[described.get("problem_type", family)][0]
        tree = {"name": name, "metric": metric, **described, "template": asked, "files": [layout]}
        tree |= {} if missing == "refuse" else {"missing": missing}
        parse_config(Task, tree, origin=f"task {name}")
        hashes = {split: file_hash(path) for split, path in files.items()}
        place = folder / f"{name}-{content_hash([tree, hashes])[:12]}"
        if not (place / "task.yaml").exists():
            with whole_folder(place) as part:
                for path in files.values():
                    (part / path.name).write_bytes(path.read_bytes())
                write_text(part / "task.yaml", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return str(place / "task.yaml"), str(place)


def labelled_rows(given: Any, split: str, label: str | None) -> Iterator[tuple[str, Row]]:
    """The rows of a split, each with its place; a label that is a number or a truth value as the text that names it."""
    if isinstance(given, str | Path) and not Path(given).is_file():
        raise InputError(f"{split}: {given} is not a file of rows")
    names = LABEL_NAMES if label is None else (label,)
    in_memory = ((f"{split}: row {number}", row) for number, row in enumerate(rows_in(given, labels=names)))
    for place, row in read_any_file(Path(given)) if isinstance(given, str | Path) else in_memory:
        column = next((name for name in names if name in row), None)
        value = row[column] if column else ""
        if column and is_missing(value):
            row[column] = None
        elif column and isinstance(value, bool | int | float):
            row[column] = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        yield place, row
