"""`biphase task check`: what would be read of a task's data, before anything is trained."""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from biphase.console import out
from biphase.tasks.collection import Collection
from biphase.tasks.examples import (
    AnyExample,
    ChoiceTexts,
    LabelledText,
    Question,
    TaskData,
    count_shared,
    input_of,
    load_examples,
)
from biphase.tasks.sources import TaskSource, find_source
from biphase.tasks.spec import find_task

MOST_LABELS = 12
"""Labels that are shown of a split, the most frequent ones."""


def check_task(name: str, data_dir: Path | None) -> None:
    """Read and check all data of a task, and print what there is. Raises `InputError` for whatever is wrong."""
    source = find_source(find_task(name), data_dir)
    data = load_examples(source, judged_only=False)
    out.print(f"{data.task.name}: {data.task.family.replace('_', ' ')}, from {data.source}", markup=False)
    for split, paths in source.files.items():
        out.print(f"{split}: {', '.join(str(path) for path in paths)}", markup=False)
    out.print(collection_table(data) if isinstance(data, Collection) else examples_table(source, data))
    if data.left_out:
        told = "queries of train without a relevant document" if isinstance(data, Collection) else "rows"
        out.print(f"left out: {data.left_out:,} {told}")
    for split, number in count_shared(data).items():
        if number:
            remedy = "" if split in source.splits else "; what stands twice in the data, take out"
            out.print(f"{number:,} inputs of {split} stand in train too: its scores may be too high{remedy}")


def examples_table(source: TaskSource, data: TaskData[Any]) -> Table:
    table = table_of("split", "examples", "twice", "median\ncharacters", "longest", "labels")
    for split, examples in data.splits.items():
        name = split if split in source.splits else f"{split} (drawn)"
        num_twice = len(examples) - len({input_of(example) for example in examples})
        labels = labels_of(examples, data.task.classes)
        table.add_row(
            name, f"{len(examples):,}", f"{num_twice:,}", *lengths([size_of(one) for one in examples]), labels
        )
    return table


def collection_table(data: Collection) -> Table:
    table = table_of("", "number", "judged", "median\ncharacters", "longest")
    table.add_row(
        "documents", f"{len(data.documents):,}", "", *lengths([len(text) for text in data.documents.values()])
    )
    queries: dict[str, list[str]] = {"train": list(dict.fromkeys(query for query, _ in data.train))}
    judged = {"train": len(data.train)}
    for split, judgements in data.relevance.items():
        queries[split], judged[split] = list(judgements), sum(map(len, judgements.values()))
    for name, ids in queries.items():
        sizes = lengths([len(data.queries[id]) for id in ids])
        table.add_row(f"queries of {name}", f"{len(ids):,}", f"{judged[name]:,}", *sizes)
    return table


def table_of(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name == "labels" else "right", overflow="fold")
    return table


def lengths(sizes: Sequence[int]) -> tuple[str, str]:
    """The median and the largest size; nothing where there are none."""
    return (f"{statistics.median(sizes):,.0f}", f"{max(sizes):,}") if sizes else ("", "")


def size_of(example: AnyExample) -> int:
    match example:
        case LabelledText():
            return len(example.text)
        case Question():
            return len(example.question) + len(example.context)
        case ChoiceTexts():
            return sum(len(choice.text) for choice in example.choices)
    return len(" ".join(example.words))


def labels_of(examples: Sequence[AnyExample], classes: Sequence[str]) -> str:
    """How often each label, tag or kind of question occurs, the most frequent ones first."""
    counts: Counter[str] = Counter()
    for example in examples:
        match example:
            case LabelledText(label=tuple() as numbers):
                counts.update(classes[number] for number in numbers)
            case LabelledText(label=int() as number):
                counts[classes[number]] += 1
            case LabelledText():
                counts["numbers"] += 1
            case Question():
                counts["answerable" if example.answers else "unanswerable"] += 1
            case ChoiceTexts():
                counts[classes[example.right]] += 1
            case _:
                counts.update(classes[tag] for tag in example.tags)
    shown = ", ".join(f"{label} {number:,}" for label, number in counts.most_common(MOST_LABELS))
    absent = [name for name in classes if name not in counts]
    more = f"; {len(counts) - MOST_LABELS} more" if len(counts) > MOST_LABELS else ""
    return shown + more + (f"; never: {', '.join(absent)}" if absent else "")
