"""What a program has in memory becomes settings and tasks: a task is written once, with its data and a description,
under a name that ends in a hash of what it holds."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic_core import to_jsonable_python

from biphase.config import Strict, load_config, parse_config
from biphase.console import err
from biphase.corpus.rows import (
    PlacedRow,
    field_names,
    json_line,
    need_field,
    plain_path,
    plain_value,
    rows_in_memory,
    rows_of_file,
    shown,
)
from biphase.corpus.text import is_running_text
from biphase.errors import InputError, clipped
from biphase.files import content_hash, whole_folder, write_text
from biphase.tasks.examples import is_missing, list_labels
from biphase.tasks.spec import METRICS, TASK_SPLITS, Task, task_table

Settings = TypeVar("Settings", bound=Strict)

Changes = Mapping[str, Any] | Sequence[str]
"""Changes to single keys: `{"schedule.peak_lr": 1e-3}`, or as on the command line `["schedule.peak_lr=1e-3"]`."""


def read_settings(kind: type[Settings], given: Any, changes: Changes) -> Settings:
    """A checked configuration from a YAML file, a tree in memory or a configuration, after changes to single keys."""
    overrides = list_changes(changes)
    if isinstance(given, kind):
        given = given.model_dump(mode="json")
    if isinstance(given, Mapping):
        return parse_config(kind, dict(given), overrides, origin=kind.__name__)
    if not isinstance(given, str | Path):
        raise InputError(f"{given!r} is no {kind.__name__}: give a YAML file, a mapping of keys, or a {kind.__name__}")
    return load_config(kind, Path(given), overrides)


def list_changes(changes: Changes | None) -> list[str]:
    """Changes as the command line takes them."""
    if isinstance(changes, str):
        return [changes]
    if not isinstance(changes, Mapping):
        return list(changes or ())
    return [f"{key}={write_value(value)}" for key, value in changes.items()]


def write_value(value: Any) -> str:
    """A value as YAML in one line, with quotes where they are needed."""
    value = to_jsonable_python(value, fallback=plain_value)
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def listed_numbers(given: Any, name: str) -> tuple[Any, ...]:
    """Several numbers that are given as `name`."""
    numbers = tuple(given) if isinstance(given, Iterable) else ()
    if not numbers or not all(isinstance(number, Real) for number in numbers):
        raise InputError(f"`{name}` is {given!r}: give a list of numbers")
    return numbers


def by_commas(text: str) -> list[str]:
    """`snli, genre,` → ["snli", "genre"]."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InputError(f"'{text}' has nothing beside commas; leave the option out, or name something")
    return words


EXAMPLES = {
    "sequence_classification": "reviews",
    "token_classification": "prescriptions",
    "question_answering": "manuals",
    "retrieval": "handbook",
    "multiple_choice": "exams",
    "regression": "similarity",
    "multi_label_classification": "subjects",
}
"""The example of each family and problem type in `bundled/tasks`."""

LABEL_NAMES = (
    *("label", "labels", "class", "category", "sentiment", "stars", "rating", "intent", "topic", "topics", "genres"),
    *("ner_tags", "pos_tags", "tags", "score", "similarity", "answer", "answerKey"),
)
"""What the column with the label may be called, the first that is there."""
WORD_NAMES = ("tokens", "words")
CHOICE_LISTS = ("choices", "options", "endings")
CHOICE_COLUMN = re.compile(r"(choice|option|ending|answer|solution|sol)_?[0-9a-eA-E]|[A-E]")
"""The name of a column with one of several choices: `choice1`, `option_b`, `ending0`, `A`."""
QUESTION_TEMPLATE = "Question: {question}\nContext: {context}"
OTHER_SPLITS = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
MOST_CLASSES = 200
"""A column with more different values is hardly one of labels."""


def describe_data(data: Path, label: str | None, family: str | None = None) -> dict[str, Any]:
    """Keys of a task as a file of rows, or a folder in BEIR's layout, shows them, of the family or problem type where
    one is named.

    Raises `InputError` where the data does not show them, naming what to say.
    """
    if (data / "corpus.jsonl").exists() or (data / "qrels").is_dir():
        named = {split: f"qrels/{name}" for split, name in find_splits(data / "qrels" / "train.tsv").items()}
        if "test" not in named:
            raise InputError(f"{data}: retrieval needs qrels/test.tsv, the judgements of its queries")
        return {"family": "retrieval", "files.0": named}
    described, needed = describe_rows(list(rows_of_file(data)), str(data), label, family)
    return described | {"files.0": find_splits(data, needed) | described["files.0"]}


def describe_rows(
    placed: Sequence[PlacedRow], data: str, label: str | None, family: str | None = None, template: str | None = None
) -> tuple[dict[str, Any], str]:
    """Keys of a task as its rows show them, with the template that is given, or one of all columns of texts; and the
    column that every split needs.

    Errors call a row by its place, and all of them `data`. `files.0` has what is to be said beside the names of files.
    """
    if not placed:
        raise InputError(f"{data} has no rows; give some to train on")
    columns = placed[0][1]
    if label is None and {"question", "context", "answers"} <= columns.keys():
        return {"family": "question_answering", "template": QUESTION_TEMPLATE, "files.0": {}}, "answers"
    label = label or next((name for name in LABEL_NAMES if name in columns), None)
    if label is None:
        raise InputError(f"which column of {data} is the label? Name it as `label`: {', '.join(columns)}")
    may_be_empty = family == "multi_label_classification"
    filled = [pair for pair in placed if not is_missing(need_field(*pair, label, "name one as `label`"))]
    placed = placed if may_be_empty else filled
    if not placed:
        raise InputError(f"{data}: no row has a label in '{label}': name another column as `label`")
    labels = values_of(placed, label)
    words = next((name for name in WORD_NAMES if isinstance(placed[0][1].get(name), list)), None)
    if words is None or not isinstance(labels[0], list):
        return {**describe_texts(placed, data, label, labels, family, template), "files.0": {}}, label
    renamed = {theirs: ours for theirs, ours in ((words, "tokens"), (label, "label")) if theirs != ours}
    tags = {str(tag) for row in labels for tag in row}
    described: dict[str, Any] = {"family": "token_classification", "files.0": {"rename": renamed} if renamed else {}}
    if types := sorted({tag[2:] for tag in tags if tag[1:2] == "-"}):
        return described | {"classes": ["O", *(f"{mark}-{name}" for name in types for mark in "BI")]}, label
    return described | {"classes": sorted(tags), "metric": "accuracy"}, label


IN_A_FILE = "in a task file (`biphase init task --family FAMILY` writes one)"


def describe_texts(
    placed: Sequence[PlacedRow], data: str, label: str, labels: list[Any], family: str | None, template: str | None
) -> dict[str, Any]:
    """Keys of a task of texts or of multiple choice. Raises `InputError` for columns that look like one choice each."""
    columns = placed[0][1]
    single = [name for name in columns if name != label and CHOICE_COLUMN.fullmatch(name)]
    may_choose = family in (None, "multiple_choice")
    if may_choose and len(single) > 1 and single != ["A", "B"]:  # which are as often two texts to compare
        raise InputError(f"{data}: are {', '.join(single)} choices? Say it by `choices` and `classes` {IN_A_FILE}")
    choices = next((name for name in CHOICE_LISTS if may_choose and isinstance(columns.get(name), list | dict)), None)
    texts = []
    for name in columns:
        values = [row.get(name) for _, row in placed]
        if name not in (label, choices) and is_text(values) and not says_label(values, labels):
            texts.append(name)
    if choices:
        lists = [value.get("text", ()) if isinstance(value, dict) else value for value in values_of(placed, choices)]
        described = {"template": " ".join(f"{{{name}}}" for name in [*texts, "choice"]), "label": label}
        classes = list("ABCDEFGHIJ"[: max(map(len, lists))])
        return {"family": "multiple_choice", **described, "choices": [choices], "classes": classes}
    if not texts and not template:
        names = clipped(", ".join(field_names(columns)))
        told = f"{data}: no column besides '{label}' has texts of several words, or they only say the label"
        raise InputError(f"{told}; name them in a template; the columns are: {names}")
    if len(texts) > 2 and not template:
        err.print(f"template: {', '.join(texts)}: take out what says the answer, or is not known before it")
    described = {"template": template or "\n".join(f"{{{name}}}" for name in texts), "label": label}
    return {"family": "sequence_classification", **described, **describe_labels(data, label, labels, family, placed)}


def values_of(placed: Sequence[PlacedRow], name: str) -> list[Any]:
    """The values of a column. Raises `InputError` where a row has nothing there, or in a list there, or neither list
    nor text where the first row has a list."""
    values = [need_field(place, row, name, "give all rows the same columns") for place, row in placed]
    for (place, _), value in zip(placed, values, strict=True):
        is_other = isinstance(values[0], list) and not isinstance(value, list | str)
        if value is None or is_other or (isinstance(value, list) and None in value):
            raise InputError(f"{place}: '{name}' is {shown(value)}, unlike the first row: mend it or take it out")
    return values


def describe_labels(
    data: str, label: str, values: list[Any], family: str | None, placed: Sequence[PlacedRow]
) -> dict[str, Any]:
    """Say, unless `family` does, whether labels of texts are numbers, sets of classes or classes; and which classes."""
    family = family or guess_problem(data, label, values)
    if family == "regression":
        return {"problem_type": family}
    is_several = family == "multi_label_classification"
    classes: set[str] = set()
    for (place, _), value in zip(placed, values, strict=True):
        names = part_names(value) if is_several else [plain_label(value)]
        if len(set(names)) < len(names):
            raise InputError(f"{place}: '{label}' has a class twice: name each once, or `multi_hot: true` {IN_A_FILE}")
        classes.update(names)
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise InputError(f"{data}: '{label}' has {len(classes)} different values; name a column of classes as `label`")
    ordered = sorted(classes, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    return {"problem_type": family, "classes": ordered} if is_several else {"classes": ordered, "stratified": True}


def guess_problem(data: str, label: str, values: list[Any]) -> str | None:
    """Regression of numbers that are no whole ones, or too many; several labels where they are lists; else None, which
    is classes. Raises `InputError` for texts that list several things: only a task file says what they are."""
    if isinstance(values[0], list):
        return "multi_label_classification"
    names = {plain_label(value) for value in values}
    with suppress(ValueError):
        numbers = [float(name) for name in names]
        if len(names) > MOST_CLASSES or not all(map(float.is_integer, numbers)):
            return "regression"
    listed = next((value for value in values if len(part_names(value)) > 1), None)
    if listed is not None:
        question = f"is '{listed}' in '{label}' one class, several, or a number?"
        raise InputError(f"{data}: {question} Say it by `problem_type`, `multi_hot` or `classes` {IN_A_FILE}")
    return None


def find_splits(train: Path, needed: str | None = None) -> dict[str, str]:
    """The file and those beside it that are called as it is, with dev or test for train; `train.csv` for
    `train.csv.gz`, as a task names files. One without the column that is needed, as benchmarks publish tests, is left
    out, and told."""
    splits = {"train": train.name} if train.exists() else {}
    for split, words in OTHER_SPLITS.items():
        names = (train.name.replace("train", word) for word in words)
        other = next((name for name in names if name != train.name and (train.parent / name).exists()), None)
        if other and needed and needed not in next(rows_of_file(train.parent / other), ("", {}))[1]:
            err.print(f"{train.parent / other} has no '{needed}': {split} is drawn from train instead")
        elif other:
            splits[split] = other
    return {split: plain_path(Path(name)).name for split, name in splits.items()}


def is_text(values: list[Any]) -> bool:
    """Tell whether a column has sentences, or lists of them, by most of its first values."""
    are_texts = []
    for value in islice(values, 1000):
        parts = value if isinstance(value, list) and value else [value]
        are_texts.append(all(isinstance(part, str) and is_running_text(part) for part in parts))
    return sum(are_texts) > len(are_texts) / 2


def says_label(texts: list[Any], labels: list[Any]) -> bool:
    """Tell whether a column only says the label in other words ("1 star" for 1), and so must not be read by a model."""
    pairs = set(zip(map(str, texts), map(str, labels), strict=True))
    return len({text for text, _ in pairs}) == len({label for _, label in pairs}) == len(pairs) < len(texts)


def part_names(value: Any) -> list[str]:
    """The labels of a list, as `make_text` reads it; of another value its own."""
    labels = list_labels(value)
    return [name for name in map(plain_label, [value] if labels is None else labels) if name]


def plain_label(value: Any) -> str:
    """A label as the text that names it: 1 for 1.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def write_task(
    data: Any,
    folder: Path,
    name: str | None,
    template: str | None = None,
    label: str | None = None,
    missing: Literal["refuse", "drop"] = "refuse",
) -> tuple[str, str]:
    """The YAML file and the data folder of a task that rows describe by their columns (`describe_rows`).

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
    name = name or "own"
    if name in task_table() or name.endswith((".yaml", ".yml")):
        raise InputError(f"'{name}' is a task that says what its data is: give its folder as data, or another name")
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in splits or not splits.keys() <= set(TASK_SPLITS):
        raise InputError(f"data has the splits {', '.join(map(repr, splits))}; name them train, validation and test")
    placed: dict[str, list[PlacedRow]] = {}
    contents: dict[str, str] = {}
    for split, given in splits.items():
        placed[split], lines = [], list[str]()
        for place, row in labelled_rows(given, split, label):
            lines.append(json_line(place, row))
            placed[split].append((place, json.loads(lines[-1])))
        contents[split] = "".join(lines)
    described, needed = describe_rows(placed["train"], "train", label, template=template)
    for split, rows in placed.items():
        if not rows or needed not in rows[0][1]:
            raise InputError(f"{split}: its rows have no label: leave it out, or predict them")
    layout = {split: f"{split}.jsonl" for split in TASK_SPLITS if split in contents} | described.pop("files.0")
    metric = METRICS[described.get("problem_type", described["family"])][0]
    filled = template or described.get("template", "")
    tree = {"name": name, "metric": metric, **described, "template": filled, "files": [layout]}
    tree |= {} if missing == "refuse" else {"missing": missing}
    parse_config(Task, tree, origin=f"task {name}")
    hashes = {split: hashlib.sha256(content.encode()).hexdigest() for split, content in contents.items()}
    target = folder / f"{name}-{content_hash([tree, hashes])[:12]}"
    if not (target / "task.yaml").exists():
        with whole_folder(target) as part:
            for split, content in contents.items():
                write_text(part / f"{split}.jsonl", content)
            write_text(part / "task.yaml", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return str(target / "task.yaml"), str(target)


def labelled_rows(data: Any, split: str, label: str | None) -> Iterator[PlacedRow]:
    """The rows of a split, each with its place; a label that is a number or a truth value as the text that names it."""
    if isinstance(data, str | Path):
        if not Path(data).is_file():
            raise InputError(f"{split}: {data} is not a file of rows")
        rows = rows_of_file(Path(data))
    else:
        rows = ((f"{split}: row {number}", row) for number, row in enumerate(rows_in_memory(data)))
    for place, row in rows:
        column = label or next((name for name in LABEL_NAMES if name in row), "label")
        value = row.get(column, "none")
        if is_missing(value):
            row[column] = None
        elif isinstance(value, bool | int | float):
            row[column] = plain_label(value)
        yield place, row
