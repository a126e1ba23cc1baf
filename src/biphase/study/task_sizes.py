"""A task → how large it is, to say in advance what cells cost: as it says, as its data holds, or as is typical."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from biphase.corpus.readers import find_field, read_text_lines
from biphase.errors import InputError
from biphase.study.spec import EMBED, Evaluation, find_data_dirs, trainings
from biphase.tasks.drawing import TEST_SHARE, TRAIN_SHARE
from biphase.tasks.sources import HUB, PartName, TaskSource, dir_of, find_layout, own_name, read_rows
from biphase.tasks.spec import Family, Task, TaskSize, find_task, template_columns

TYPICAL_SIZES: dict[Family, TaskSize] = {
    "sequence_classification": TaskSize(train_examples=50_000, example_tokens=40, evaluated_tokens=1_000_000),
    "token_classification": TaskSize(train_examples=15_000, example_tokens=25, evaluated_tokens=200_000),
    "question_answering": TaskSize(train_examples=90_000, example_tokens=200, evaluated_tokens=3_000_000),
    "multiple_choice": TaskSize(train_examples=40_000, example_tokens=200, evaluated_tokens=2_000_000),
    "retrieval": TaskSize(train_examples=100_000, example_tokens=120, evaluated_tokens=1_000_000),
}
"""The sizes that are assumed of tasks that do not say theirs and whose data is not at hand."""

TOKEN_BYTES = 4
"""Bytes of text in a token, roughly, in any vocabulary."""
MOST_COUNTED = 100_000
"""So many rows of each part are looked at; of more, the bytes of its files up to there say about how many there are."""


@dataclass(frozen=True)
class SizedTask:
    size: TaskSize
    origin: Literal["published", "counted", "guessed"]
    """Where the size is from."""


def find_sizes(evaluation: Evaluation | None) -> dict[str, SizedTask]:
    """The sizes of the tasks that cells train on or evaluate, by what the study calls them."""
    if evaluation is None:
        return {}
    folders, found = find_data_dirs(evaluation), dict[str, SizedTask]()
    for name in itertools.chain.from_iterable((own, *tests) for own, tests in trainings(evaluation).items()):
        if name not in found and not name.startswith(EMBED):
            task = find_task(name)
            found[name] = find_size(task, dir_of(task, folders))
    return found


def find_size(task: Task, folder: str | None) -> SizedTask:
    if task.size is not None:
        return SizedTask(task.size, "published")
    counted = None if folder in (None, str(HUB)) else count_size(task, str(folder))
    return SizedTask(counted, "counted") if counted else SizedTask(TYPICAL_SIZES[task.family], "guessed")


@lru_cache
def count_size(task: Task, folder: str) -> TaskSize | None:
    """The size of a task by its files; None where they are not all there, or cannot be read, which training tells."""
    for layout in task.files:
        files = find_layout(task, layout, Path(folder))
        if all(files.values()):
            source = TaskSource(task, folder, "", layout, files)
            try:
                return sum_parts(task, {part: count_rows(source, part) for part in files})
            except InputError:
                return None
    return None


def count_rows(source: TaskSource, part: PartName) -> tuple[float, float]:
    """How many rows a part has, and the tokens of their texts; of many, by the first of them."""
    names = [own_name(source, name) for name in text_columns(source.task, part)]
    num, texts, last, rows = 0, 0, "", iter(read_rows(source, part))
    for place, row in itertools.islice(rows, MOST_COUNTED):
        last = place
        if row is not None:
            num += 1
            texts += sum(text_bytes(find_field(row, name)) for name in names)
    more = 1.0
    if next(rows, None) is not None:
        share = share_read(source.files[part], last)
        more = 1 / share if share else (num + 1 + sum(1 for _ in rows)) / num
    return more * num, more * texts / TOKEN_BYTES


def share_read(paths: Sequence[Path], place: str) -> float:
    """The share of files, by their bytes on disk, that ends with the row at a place (`x.tsv:12`, `x.parquet: row 3`); 0
    for a JSON file of a single value, all of whose rows are in memory with the first."""
    sizes = [sum(file.stat().st_size for file in path.glob("*.arrow")) or path.stat().st_size for path in paths]
    at = next(number for number, path in enumerate(paths) if place.startswith(str(path)))
    path, number = paths[at], int(re.search(r"\d*$", place)[0] or 0)  # type: ignore[index]
    if path.is_dir():
        from datasets import load_from_disk

        share = (number + 1) / len(load_from_disk(str(path)))
    elif path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        share = (number + 1) / ParquetFile(path).metadata.num_rows
    elif place != f"{path}:{number}":
        return 0.0
    else:
        share = next(itertools.islice(read_text_lines(path), number - 1, None))[2] / sizes[at]
    return (sum(sizes[:at]) + share * sizes[at]) / sum(sizes)


def text_columns(task: Task, part: PartName) -> tuple[str, ...]:
    """The columns whose texts the network reads, one as often as an example has it."""
    if task.family == "retrieval":
        return ("title", "text") if part in ("corpus", "queries") else ()
    if task.family == "token_classification":
        return (task.words,)
    others = tuple(name for name in template_columns(task.template) if name != "choice")
    return others * len(task.classes) + task.choices if task.choices else others


def text_bytes(value: Any) -> int:
    """The bytes of a text, or of all texts that a list or a mapping holds, each with a blank behind it."""
    if isinstance(value, str):
        return len(value.encode()) + 1
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(text_bytes, value)) if isinstance(value, list) else 0


def sum_parts(task: Task, parts: Mapping[str, tuple[float, float]]) -> TaskSize:
    """The size from (rows, tokens) of each part; splits without a file are drawn as `tasks.drawing` does."""
    if task.family == "retrieval":
        means = [tokens / max(num, 1) for num, tokens in (parts["corpus"], parts.get("queries", (1, 0)))]
        judged = parts["train"][0] if "train" in parts else parts["test"][0] / 2
        evaluated = sum(parts[part][1] for part in ("corpus", "queries") if part in parts)
        return make_size(0 if task.trained_on else judged, sum(means), evaluated)
    num, tokens = parts["train"]
    drawn = 1.0
    for split, kept in (("test", 1 - TEST_SHARE), ("validation", TRAIN_SHARE)):
        drawn *= 1.0 if split in parts else kept
    evaluated = tokens * (1 - drawn) + sum(parts[split][1] for split in ("validation", "test") if split in parts)
    return make_size(drawn * num, tokens / max(num, 1), evaluated)


def make_size(train_examples: float, example_tokens: float, evaluated_tokens: float) -> TaskSize:
    return TaskSize(
        train_examples=round(train_examples),
        example_tokens=max(round(example_tokens), 1),
        evaluated_tokens=round(evaluated_tokens),
    )
