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
from biphase.tasks.sources import find_source
from biphase.tasks.spec import find_task

MOST_LABELS = 12
"""Labels that are shown of a split, the most frequent ones."""


def check_task(name: str, data_dir: Path | None) -> dict[str, Any]:
    """Read and check all data of a task; returns what there is. Raises `InputError` for whatever is wrong."""
    source = find_source(find_task(name), data_dir)
    data = load_examples(source, judged_only=False)
    return {
        "task": data.task.name,
        "family": data.task.family,
        "source": data.source,
        "files": {part: [str(path) for path in paths] for part, paths in source.files.items()},
        "drawn": [] if isinstance(data, Collection) else [split for split in data.splits if split not in source.splits],
        "rows": collection_rows(data) if isinstance(data, Collection) else examples_rows(data),
        "labels": {} if isinstance(data, Collection) else {split: count_labels(some) for split, some in named(data)},
        "classes": list(data.task.classes),
        "left_out": data.left_out,
        "also_in_train": count_shared(data),
    }


def show_task(facts: dict[str, Any]) -> None:
    """Print what `check_task` found."""
    out.prose(f"{facts['task']}: {facts['family'].replace('_', ' ')}, from {facts['source']}")
    for part, paths in facts["files"].items():
        out.prose(f"{part}: {', '.join(paths)}")
    table = Table()
    for column in facts["rows"][0]:
        table.add_column(
            column.replace("_", "\n", 1).replace("_", " "),
            justify="left" if column == "part" else "right",
            overflow="fold",
        )
    for row in facts["rows"]:
        drawn = " (drawn)" if row["part"] in facts["drawn"] else ""
        table.add_row(row["part"] + drawn, *("" if cell is None else f"{cell:,.0f}" for cell in [*row.values()][1:]))
    out.print(table)
    for part, counts in facts["labels"].items():
        out.prose(f"labels of {part}: {tell_labels(counts, facts['classes'])}")
    if facts["left_out"]:
        told = "queries of train without a relevant document" if facts["family"] == "retrieval" else "rows"
        out.prose(f"left out: {facts['left_out']:,} {told}")
    for part, number in facts["also_in_train"].items():
        if number:
            remedy = "; remove duplicates from the data" if part in facts["drawn"] else ""
            stands = "input of {} stands" if number == 1 else "inputs of {} stand"
            told = f"{number:,} {stands.format(part)} in train too"
            out.prose(f"{told}: the scores on {part} may be too high{remedy}")


def named(data: TaskData[Any]) -> list[tuple[str, list[str]]]:
    """The label, tags or kind of question of each example, by split."""
    classes = data.task.classes
    return [(split, [name for one in some for name in labels_of(one, classes)]) for split, some in data.splits.items()]


def examples_rows(data: TaskData[Any]) -> list[dict[str, Any]]:
    rows = []
    for split, examples in data.splits.items():
        num_copies = len(examples) - len({input_of(example) for example in examples})
        sizes = lengths([size_of(one) for one in examples])
        rows.append({"part": split, "examples": len(examples), "copies_within": num_copies, **sizes})
    return rows


def collection_rows(data: Collection) -> list[dict[str, Any]]:
    sizes = lengths([len(text) for text in data.documents.values()])
    rows = [{"part": "documents", "number": len(data.documents), "judged": None, **sizes}]
    queries: dict[str, list[str]] = {"train": list(dict.fromkeys(query for query, _ in data.train))}
    judged = {"train": len(data.train)}
    for split, judgements in data.relevance.items():
        queries[split], judged[split] = list(judgements), sum(map(len, judgements.values()))
    for name, ids in queries.items():
        sizes = lengths([len(data.queries[id]) for id in ids])
        rows.append({"part": f"queries of {name}", "number": len(ids), "judged": judged[name], **sizes})
    return rows


def lengths(sizes: Sequence[int]) -> dict[str, float | None]:
    """The median and the largest size; None where there are none."""
    return {"median_characters": statistics.median(sizes) if sizes else None, "longest": max(sizes, default=None)}


def size_of(example: AnyExample) -> int:
    match example:
        case LabelledText():
            return len(example.text)
        case Question():
            return len(example.question) + len(example.context)
        case ChoiceTexts():
            return sum(len(choice.text) for choice in example.choices)
    return len(" ".join(example.words))


def labels_of(example: AnyExample, classes: Sequence[str]) -> list[str]:
    match example:
        case LabelledText(label=tuple() as numbers):
            return [classes[number] for number in numbers]
        case LabelledText(label=int() as number):
            return [classes[number]]
        case LabelledText():
            return ["numbers"]
        case Question():
            return ["answerable" if example.answers else "unanswerable"]
        case ChoiceTexts():
            return [classes[example.right]]
    return [classes[tag] for tag in example.tags]


def count_labels(labels: Sequence[str]) -> dict[str, int]:
    """How often each occurs, the most frequent ones first."""
    return dict(Counter(labels).most_common())


def tell_labels(counts: dict[str, int], classes: Sequence[str]) -> str:
    shown = ", ".join(f"{label} {number:,}" for label, number in [*counts.items()][:MOST_LABELS])
    absent = [name for name in classes if name not in counts]
    more = f"; {len(counts) - MOST_LABELS} more" if len(counts) > MOST_LABELS else ""
    return shown + more + (f"; never: {', '.join(absent)}" if absent else "")
