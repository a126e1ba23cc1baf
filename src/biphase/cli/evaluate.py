"""Tasks are checked (`task check`); networks are fine-tuned (`finetune`), used (`predict`), compared (`evaluate`)."""

import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from biphase.api import finetuning
from biphase.api.grids import comparison_records, to_json
from biphase.api.networks import print_zero_shot, run_zero_shot, zero_shot_records
from biphase.api.own_task import by_commas
from biphase.cli.study import AddressOption, EngineOption, FormatOption, Overrides
from biphase.config import MOST_REPEATS, parse_config
from biphase.console import duration, out
from biphase.console import out as console
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
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
from biphase.tasks.splits import Collection

if TYPE_CHECKING:
    from biphase.api.grids import EvaluatedGrid
    from biphase.report.verdicts import TaskComparison


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


finetuning_app = typer.Typer()

ModelArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|KEY=VALUE",
        help="RUN[@STEP], model folders or hub ids (ID@REVISION); then changes to single settings of all cells. "
        "Without a model: what --out holds already.",
    ),
]
PairOption = Annotated[
    tuple[str, str] | None, typer.Option("--compare", help="Two models: who wins where, and is it more than noise?")
]
TasksOption = Annotated[
    str | None, typer.Option(help="Names or YAML files, by commas; `paper`, its twelve, unless given.")
]
DataDirsOption = Annotated[
    list[str] | None, typer.Option(help="TASK=FOLDER with the task's data as published; may be repeated.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say which cells are missing and how long they take.")]
KeepBestOption = Annotated[
    Path | None, typer.Option(help="Write the best fine-tuned model of each task, by validation, below here.")
]
ScoresOption = Annotated[Path, typer.Option("--out", help="Where finished cells are kept.")]


@finetuning_app.command("finetune")
def finetune_command(
    model: Annotated[str, typer.Argument(help="RUN[@STEP], a model folder, or a hub id (ID@REVISION).")],
    task: Annotated[str, typer.Argument(help="A name such as snli, or a YAML file that describes one.")],
    overrides: Overrides = None,
    scores: ScoresOption = Path("scores"),
    data_dir: Annotated[Path | None, typer.Option(help="The task's data as published, in place of the hub.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Write the fine-tuned model to this folder, for transformers' pipelines.")
    ] = None,
) -> None:
    """Fine-tune one model on one task with one rate and seed, and score it on validation and test.

    Example: `biphase finetune runs/tiny-1a2b3c4d snli learning_rate=1e-4 seed=3 --keep snli-model`
    """
    settings = parse_config(FinetuneConfig, {}, overrides or (), origin=task).model_dump(exclude_unset=True)
    finetuning.finetune(model, task, data=data_dir, scores=scores, keep=keep, **settings)


@finetuning_app.command("predict")
def predict_command(
    model: Annotated[str, typer.Argument(help="A folder that `finetune --keep` wrote, or a hub id with a head.")],
    file: Annotated[
        Path, typer.Argument(help="Rows: .jsonl, .csv, .tsv, .json, .parquet, columns; .txt: a text a line.")
    ],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="A .jsonl or .csv file; printed as JSONL unless given.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Columns in braces, for a model that does not say what its inputs are: {text}.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What computes.")] = "auto",
    form: FormatOption = "text",
) -> None:
    """Predict labels, spans or answers for every row of a file. Each row keeps its columns.

    Example: `biphase predict snli-model pairs.csv --out predicted.csv`
    """
    if form == "json" and out_file is None:
        console.print(to_json([*finetuning.open_prediction(model, file, template, device)[1]]))
        return
    finetuning.write_predictions(model, file, out_file or sys.stdout, template, device)
    if form == "json":
        console.print(to_json({"file": str(out_file)}))


@finetuning_app.command("evaluate")
def evaluate_command(
    models: ModelArguments = None,
    tasks: TasksOption = None,
    learning_rates: Annotated[str, typer.Option(help="Rates, by commas.")] = "1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4",
    seeds: Annotated[str, typer.Option(help="By commas, or ranges such as 0-4.")] = "0-4",
    scores: ScoresOption = Path("scores"),
    data_dir: DataDirsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Cells side by side; one per core or GPU unless given.")
    ] = None,
    workers_per_gpu: Annotated[int, typer.Option(min=1, help="Cells that share a GPU.")] = 1,
    part: Annotated[
        str | None, typer.Option(help="NUMBER/TOTAL: only this part of the cells, from 0/TOTAL on (a Slurm array).")
    ] = None,
    dry_run: DryRunOption = False,
    pair: PairOption = None,
    keep: KeepBestOption = None,
    form: FormatOption = "text",
) -> None:
    """Fine-tune and score models on tasks with every rate and seed; the rate is chosen on validation.

    Finished cells are never run again: the same command goes on after a kill, and adds what is new.

    Example: `biphase evaluate encoder --tasks snli,uner_en_ewt --learning-rates 1e-4,5e-4 --seeds 0-2`

    Example: `biphase evaluate --compare encoder-a encoder-b`
    """
    from biphase.api.grids import is_zero_shot, run_evaluation
    from biphase.report.verdicts import compare

    as_json, asked = form == "json", by_commas(tasks or "paper")
    names, settings = split_words(models or ())
    if names and is_zero_shot(asked):
        refused = {"dry_run": dry_run, "part": part, "compare": pair, "keep": keep, "settings": settings}
        found = run_zero_shot(names, asked, scores, **refused)
        console.print(to_json({"scores": zero_shot_records(found)})) if as_json else print_zero_shot(found)
        return
    evaluation = run_evaluation(
        names,
        asked,
        settings=parse_config(FinetuneConfig, {}, settings, origin="evaluate"),
        learning_rates=parse_rates(learning_rates),
        seeds=parse_seeds(seeds),
        out=scores,
        data_dirs=parse_data_dirs(data_dir or (), asked),
        engine={"kind": engine, "address": address, "workers": workers, "workers_per_gpu": workers_per_gpu},
        part=part,
        dry_run=dry_run,
        keep=keep,
    )
    compared = compare(evaluation.scores, *pair) if pair and not dry_run else None
    console.print(write_evaluation(evaluation, compared)) if as_json else print_evaluation(evaluation, compared)
    evaluation.raise_failures()


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Models, and settings of all cells."""
    from biphase.api.grids import refuse_axes

    settings = [word for word in words if re.match(r"[a-z_.0-9]+=", word)]
    names = [word for word in words if word not in settings]
    refuse_axes(setting.partition("=")[0] for setting in settings)
    if settings and not names:
        raise InputError(f"which model? Only settings are given: {' '.join(settings)}")
    return names, settings


def write_evaluation(evaluation: "EvaluatedGrid", compared: "Sequence[TaskComparison] | None") -> str:
    """The JSON of docs/reference/command_line.md."""
    if evaluation.planned:
        return to_json(evaluation.planned)
    left_out = [{"path": path, "reason": reason} for path, reason in evaluation.scores.broken.items()]
    tree = {"scores": evaluation.records, "left_out": left_out, "failed": evaluation.failures}
    return to_json(tree | ({} if compared is None else {"comparison": comparison_records(compared)}))


def print_evaluation(evaluation: "EvaluatedGrid", compared: "Sequence[TaskComparison] | None") -> None:
    from biphase.report.verdicts import print_comparison, print_summary

    if evaluation.planned:
        print_dry_run(evaluation.planned)
        return
    print_summary(evaluation.rows, evaluation.scores.broken)
    if evaluation.easier_searches:
        searches = ", ".join(evaluation.easier_searches)
        console.print(f"among judged documents only, which scores higher than among all: {searches}")
    if compared is not None:
        print_comparison(compared)


def print_dry_run(planned: dict[str, Any]) -> None:
    """A table of cells by model and task, and how long the missing ones take."""
    table = Table(title=f"{len(planned['rates'])} rates × {len(planned['seeds'])} seeds")
    for column in planned["cells"][0]:
        table.add_column(column, justify="left" if column in ("model", "task") else "right")
    for record in planned["cells"]:
        table.add_row(*(value if isinstance(value, str) else f"{value:,}" for value in record.values()))
    console.print(table)
    if planned["known_trainings"]:
        spent = duration(planned["seconds_of_one_worker"] / max(planned["workers"], 1))
        told = f"with {planned['workers']} workers" if planned["workers"] else "of one worker"
        console.print(f"about {spent} {told}, judged by finished cells")
    if number := planned["unknown_trainings"]:
        console.print(f"{number:,} trainings are of tasks without a finished cell to judge by: run one seed first")
    for failure in planned["failed"]:
        console.print(f"failed before: {failure.unit}: {failure.reason}")


def parse_rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"--learning-rates {text} must be numbers, separated by commas") from None


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0-4`, `0,1,5`, or `0-4,7`."""
    seeds: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if span is None:
            raise InputError(f"--seeds {text} must be numbers from 0 on, or ranges such as 0-4, separated by commas")
        first, last = int(span[1]), int(span[2] or span[1])
        if first > last:
            raise InputError(f"--seeds {text} has an empty range")
        if last - first >= MOST_REPEATS:
            raise InputError(f"--seeds {text} are more than {MOST_REPEATS:,} seeds, the most of a range")
        seeds += range(first, last + 1)
    return tuple(seeds)


def parse_data_dirs(pairs: Sequence[str], tasks: Sequence[str]) -> list[tuple[str, str]]:
    """`snli=path` → ("snli", "path")."""
    parts = []
    for pair in pairs:
        given, equals, folder = pair.partition("=")
        if not equals or not folder:
            raise InputError(f"--data-dir {pair} must be TASK=FOLDER, such as {find_task(tasks[0]).name}=data")
        parts.append((given, folder))
    return parts
