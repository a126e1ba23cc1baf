"""What `task check` finds in a task's data, and how that and the results of `evaluate` are shown."""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphase.api.finetuning import comparison_records, to_json
from biphase.api.networks import print_zero_shot
from biphase.console import duration, out, print_rows
from biphase.errors import InputError
from biphase.tasks.examples import (
    AnyExample,
    ChoiceTexts,
    LabelledText,
    Question,
    TaggedWords,
    TaskData,
    classes_of,
    count_shared,
    input_of,
    load_examples,
)
from biphase.tasks.sources import find_source
from biphase.tasks.spec import find_task
from biphase.tasks.splits import Collection

if TYPE_CHECKING:
    from biphase.api.finetuning import EvaluatedGrid


MOST_LABELS = 12
"""Labels that are shown of a split, the most frequent ones."""


def check_task(task: str, data_dir: Path | None = None) -> dict[str, Any]:
    """Read and check all data of a task; returns what there is. Raises `InputError` for whatever is wrong.

    Args:
        task: a name such as snli, or a YAML file that describes one.
        data_dir: the task's data as published, in place of the hub.
    """
    source = find_source(find_task(task), data_dir)
    data = load_examples(source, judged_only=False)
    drawn: list[str] = []
    labels: dict[str, dict[str, int]] = {}
    if isinstance(data, Collection):
        rows = collection_rows(data)
    else:
        rows = examples_rows(data)
        drawn = [split for split in data.splits if split not in source.splits]
        for split, examples in data.splits.items():
            counts = Counter(label for example in examples for label in labels_of(example, data.task.classes))
            labels[split] = dict(counts.most_common())
    return {
        "task": data.task.name,
        "family": data.task.family,
        "source": data.source,
        "files": {part: [str(path) for path in paths] for part, paths in source.files.items()},
        "drawn": drawn,
        "rows": rows,
        "labels": labels,
        "classes": list(data.task.classes),
        "left_out": data.left_out,
        "also_in_train": count_shared(data),
    }


def show_task(facts: dict[str, Any]) -> None:
    """Print what `check_task` found."""
    out.prose(f"{facts['task']}: {facts['family'].replace('_', ' ')}, from {facts['source']}")
    for part, paths in facts["files"].items():
        out.prose(f"{part}: {', '.join(paths)}")
    rows = []
    for row in facts["rows"]:
        drawn = " (drawn)" if row["part"] in facts["drawn"] else ""
        rows.append([row["part"] + drawn, *("" if cell is None else f"{cell:,.0f}" for cell in [*row.values()][1:])])
    heads = [column.replace("_", "\n", 1).replace("_", " ") for column in facts["rows"][0]]
    print_rows(heads, rows)
    for part, counts in facts["labels"].items():
        labels = [f"{label} {number:,}" for label, number in counts.items()]
        more = f"; {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
        absent = [name for name in facts["classes"] if name not in counts]
        never = f"; never: {', '.join(absent)}" if absent else ""
        out.prose(f"labels of {part}: {', '.join(labels[:MOST_LABELS])}{more}{never}")
    if facts["left_out"]:
        told = "queries of train without a relevant document" if facts["family"] == "retrieval" else "rows"
        out.prose(f"left out: {facts['left_out']:,} {told}")
    for part, number in facts["also_in_train"].items():
        if number:
            remedy = "; remove duplicates from the data" if part in facts["drawn"] else ""
            stands = "input of {} stands" if number == 1 else "inputs of {} stand"
            told = f"{number:,} {stands.format(part)} in train too"
            out.prose(f"{told}: the scores on {part} may be too high{remedy}")


def examples_rows(data: TaskData) -> list[dict[str, Any]]:
    rows = []
    for split, examples in data.splits.items():
        num_copies = len(examples) - len({input_of(example) for example in examples})
        sizes = lengths([size_of(example) for example in examples])
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
    text = " ".join(example.words) if isinstance(example, TaggedWords) else input_of(example)
    return len(text) if isinstance(text, str) else sum(map(len, text))


def labels_of(example: AnyExample, classes: Sequence[str]) -> list[str]:
    """The labels, tags or the kind of question of an example."""
    match example:
        case LabelledText(label=float()):
            return ["numbers"]
        case Question():
            return ["answerable" if example.answers else "unanswerable"]
        case ChoiceTexts():
            return [classes[example.right]]
    return [classes[number] for number in classes_of(example)]


def write_evaluation(evaluation: "EvaluatedGrid") -> str:
    """The JSON of docs/reference/command_line.md."""
    if evaluation.planned:
        return to_json(evaluation.planned)
    tree: dict[str, Any] = {"scores": evaluation.records}
    if evaluation.zero_shot is None:
        tree["left_out"] = [{"path": path, "reason": reason} for path, reason in evaluation.scores.broken.items()]
        tree["failed"] = evaluation.failures
    if evaluation.compared is not None:
        tree["comparison"] = comparison_records(evaluation.compared)
    return to_json(tree)


def print_evaluation(evaluation: "EvaluatedGrid") -> None:
    from biphase.report.verdicts import print_comparison, print_summary

    if evaluation.zero_shot is not None:
        print_zero_shot(evaluation.zero_shot)
        return
    if evaluation.planned:
        print_dry_run(evaluation.planned)
        return
    print_summary(evaluation.rows, evaluation.scores.broken)
    if evaluation.easier_searches:
        searches = ", ".join(evaluation.easier_searches)
        out.print(f"among judged documents only, which scores higher than among all: {searches}")
    if evaluation.compared is not None:
        print_comparison(evaluation.compared)


def print_dry_run(planned: dict[str, Any]) -> None:
    """A table of cells by model and task, and how long the missing ones take."""
    rows = []
    for record in planned["cells"]:
        rows.append([value if isinstance(value, str) else f"{value:,}" for value in record.values()])
    title = f"{len(planned['rates'])} rates × {len(planned['seeds'])} seeds"
    print_rows(list(planned["cells"][0]), rows, title)
    if planned["known_trainings"]:
        spent = duration(planned["seconds_of_one_worker"] / max(planned["workers"], 1))
        told = f"with {planned['workers']} workers" if planned["workers"] else "of one worker"
        out.print(f"about {spent} {told}, judged by finished cells")
    if number := planned["unknown_trainings"]:
        out.print(f"{number:,} trainings are of tasks without a finished cell to judge by: run one seed first")
    for failure in planned["failed"]:
        out.print(f"failed before: {failure.unit}: {failure.reason}")


def parse_data_dirs(pairs: Sequence[str]) -> list[tuple[str, str]]:
    """`snli=path` → ("snli", "path")."""
    parts = []
    for pair in pairs:
        task, _, folder = pair.partition("=")
        if not folder:
            raise InputError(f"--data-dir {pair} must be TASK=FOLDER, such as snli=data")
        parts.append((task, folder))
    return parts
