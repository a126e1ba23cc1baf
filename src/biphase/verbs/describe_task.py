"""A file of data → what a task's description says of it: family, columns, classes, the files of its splits."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from biphase.corpus.readers import CODECS
from biphase.errors import InputError
from biphase.tasks.rows import Row, read_file
from biphase.tasks.spec import FileLayout, Task

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
    "label",
    "labels",
    "class",
    "category",
    "sentiment",
    "stars",
    "rating",
    "intent",
    "topic",
    "ner_tags",
    "tags",
)
WORD_NAMES = ("tokens", "words")
OTHER_SPLITS = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
MOST_CLASSES = 200
"""A column with more different values is hardly one of labels."""


def describe_data(data: Path, label: str | None) -> dict[str, Any]:
    """Keys of a task as the data shows them. Raises `InputError` where it does not show them, naming the option."""
    if (data / "corpus.jsonl").exists() or (data / "qrels").is_dir():
        named = {split: f"qrels/{name}" for split, name in find_splits(data / "qrels" / "train.tsv").items()}
        if "test" not in named:
            raise InputError(f"{data}: retrieval needs qrels/test.tsv, the judgements of its queries")
        return {"family": "retrieval", "files.0": named}
    rows = list(read_rows_of(data))
    if not rows:
        raise InputError(f"{data} has no rows; give the file to train on")
    columns = rows[0]
    check_columns(data, rows)
    splits: dict[str, Any] = {split: name for split, name in find_splits(data).items()}
    if {"question", "context"} <= set(columns):
        return {"family": "question_answering", "files.0": splits}
    if label is not None and label not in columns:
        raise InputError(f"label: {data} has no column '{label}'; its columns are: {', '.join(columns)}")
    label = label or next((name for name in LABEL_NAMES if name in columns), None)
    if label is None:
        raise InputError(f"which column of {data} is the label? Name it as label: {', '.join(columns)}")
    if isinstance(columns[label], list):
        words = next((name for name in WORD_NAMES if name in columns), None)
        if words is None:
            raise InputError(f"{data}: the tags in '{label}' need a list of words in a column 'tokens' or 'words'")
        if words != "tokens" or label != "label":
            splits["rename"] = {
                theirs: ours for theirs, ours in ((words, "tokens"), (label, "label")) if theirs != ours
            }
        types = sorted({tag[2:] for row in rows for tag in row[label] if isinstance(tag, str) and tag[1:2] == "-"})
        classes = ["O", *(f"{mark}-{name}" for name in types for mark in "BI")]
        return {"family": "token_classification", "classes": classes, "files.0": splits}
    texts = [name for name in columns if name != label and is_text([row[name] for row in rows])]
    texts = [name for name in texts if not says_label([row[name] for row in rows], [row[label] for row in rows])]
    if not texts:
        raise InputError(f"{data}: no column besides '{label}' has texts of several words")
    template = "\n".join(f"{{{name}}}" for name in texts)
    found = {"template": template, "label": label, "classes": label_names(data, label, [row[label] for row in rows])}
    return {"family": "sequence_classification", **found, "files.0": splits}


def check_columns(data: Path, rows: list[Row]) -> None:
    """Raises `InputError` where a row lacks a column that the first one has."""
    for number, row in enumerate(rows):
        if missing := rows[0].keys() - row.keys():
            raise InputError(f"{data}: row {number} has no '{min(missing)}', which the first row has")


def read_rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file in any form that tasks are read in."""
    reader = Task(name="data", family="token_classification", metric="f1", classes=("O", "B-x", "I-x"))
    return (row for _, row in read_file(reader, FileLayout(train=path.name), path, None) if row is not None)


def find_splits(train: Path) -> dict[str, str]:
    """The file and those beside it that are called as it is, with dev or test for train."""
    found = {"train": train.name} if train.exists() else {}
    for split, words in OTHER_SPLITS.items():
        names = (train.name.replace("train", word) for word in words)
        other = next((name for name in names if name != train.name and (train.parent / name).exists()), None)
        found |= {split: other} if other else {}
    return {split: without_codec(name) for split, name in found.items()}


def without_codec(name: str) -> str:
    """`train.csv` for `train.csv.gz`: a task names files as they are when opened."""
    return next((name.removesuffix(ending) for ending in CODECS if name.endswith(ending)), name)


def is_text(values: list[Any]) -> bool:
    """Whether a column has sentences: most values have a blank in them."""
    return (
        sum(isinstance(value, str) and " " in value.strip() for value in islice(values, 1000))
        > min(len(values), 1000) / 2
    )


def says_label(texts: list[Any], labels: list[Any]) -> bool:
    """Whether a column only says the label in other words ("1 star" for 1), and so must not be read by a model."""
    pairs = set(zip(map(str, texts), map(str, labels), strict=True))
    return len({text for text, _ in pairs}) == len({label for _, label in pairs}) == len(pairs) < len(texts)


def label_names(data: Path, label: str, values: list[Any]) -> list[str]:
    """The different labels, numbers in their order."""
    counts = Counter(
        str(int(value)) if isinstance(value, float) and value.is_integer() else str(value) for value in values
    )
    if not 2 <= len(counts) <= MOST_CLASSES:
        raise InputError(
            f"{data}: column '{label}' has {len(counts)} different values; name the one with classes as label"
        )
    return sorted(counts, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
