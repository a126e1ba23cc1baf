"""A network and a task → a fine-tuned network with its score; that network and rows → predictions."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TextIO

from biphase import console
from biphase.api.own_task import keep_rows, write_task
from biphase.config import parse_config
from biphase.console import err, track
from biphase.corpus.rows import PlacedRow, Row, rows_in_memory
from biphase.engine.scheduler import Failure
from biphase.errors import InputError
from biphase.files import refuse_filled, whole_file
from biphase.finetuning.cells import plan_cells
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.kept import RECORD, KeptModel, find_kept, open_rows
from biphase.finetuning.scores import Score
from biphase.tasks.spec import find_task

if TYPE_CHECKING:
    import pandas


OWN_TASKS = "data"
"""The folder beside scores in which tasks are kept that came as rows."""
OUT_ENDINGS = (".jsonl", ".csv")


def finetune(
    model: str | Path,
    task: str | None = None,
    *,
    data: Any = None,
    template: str | None = None,
    label: str | None = None,
    missing: Literal["refuse", "drop"] = "refuse",
    scores: str | Path = "scores",
    keep: str | Path | None = None,
    **settings: Any,
) -> Score:
    """Fine-tune one model on one task with one rate and seed, and score it on validation and test.

    Args:
        model: RUN[@STEP], a model folder, or a hub id (ID@REVISION).
        task: a name such as snli, or a YAML file that describes one; in Python, for rows, also a name for them.
        data: the folder with the task's data as published, in place of the hub; or, without such a task, rows to train
            on (a DataFrame, a `datasets.Dataset`, dictionaries, a file) or a mapping of `train`, `validation` and
            `test` to such. What is missing is drawn from train. The columns tell what the task is.
        template: columns in braces that make the input of rows, in place of all their columns of texts.
        label: the column of rows with the label, or with the list of tags, where its name does not tell.
        missing: `drop` leaves rows of data without label or text out; a task file has a key for it.
        scores: where finished cells are kept.
        keep: write the fine-tuned model to this folder, for transformers' pipelines, unless its training diverges.
        settings: changes to single keys of the cell, such as `learning_rate=1e-4, seed=3`.
    """
    if not isinstance(task, str | Path | None):
        raise InputError(
            f"the task is of type {type(task).__name__}: give its name or its YAML file; rows go to `data`"
        )
    config = parse_config(FinetuneConfig, settings, origin=str(task or "finetune"))
    if task is None and is_folder(data) and not Path(data).exists():
        raise InputError(f"{data} does not exist; give a file of rows as data")
    folder = data if is_folder(data) else None
    if folder is None and data is not None:
        task, folder = write_task(data, Path(scores) / OWN_TASKS, task, template, label, missing)
    if task is None:
        raise InputError("which task? Name one, such as snli, or a YAML file, or give rows as data")
    if keep is not None:
        refuse_filled(Path(keep), "keep")
    [plan] = plan_cells(str(model), [task], config, {} if folder is None else {find_task(task).name: folder})
    was_there = plan.is_finished(Path(scores))
    from biphase.finetuning.fit import fit_cells

    [score] = fit_cells(str(model), [plan], Path(scores), keep=None if keep is None else Path(keep))
    console.out.print(score.headline() + (" · finished before" if was_there else ""), markup=False)
    told = ""
    if keep is not None:
        told = f"; {keep}: the model" if (Path(keep) / RECORD).exists() else "; it diverged, and no model is kept"
    err.print(f"{score.folder}: scores and predictions{told}")
    return score


def is_folder(data: Any) -> bool:
    """Whether data is where a task's published files are (a folder, or `hub`), and not rows or a file of rows."""
    return isinstance(data, str | Path) and not Path(data).is_file()


def raise_failures(failures: Sequence[Failure]) -> None:
    """Raise `InputError` with the first of the units that failed, where there are some."""
    if not failures:
        return
    failed = [failure for failure in failures if not failure.is_blocked]
    first = (failed or failures)[0]
    waiting = f", {len(failures) - len(failed)} that need them were not run" if len(failed) < len(failures) else ""
    raise InputError(
        f"{len(failed)} failed{waiting}; the first: {first.unit}: {first.reason}; what is finished is kept, the same "
        "command runs the others again"
    )


def by_task(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping | None):
        raise InputError("`data` says it by task: give a mapping of names to folders or rows, such as {'mine': rows}")
    return data or {}


def place_data(data: Mapping[str, Any], tasks: list[str], scores: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """The tasks, those that came as rows by their files, and the folders of data."""
    folders = []
    for name, given in data.items():
        folder = str(given)
        if not is_folder(given):
            file, folder = write_task(given, scores / OWN_TASKS, name)
            tasks = [*(task for task in tasks if task != name), file]
        folders.append((name, folder))
    return tasks, folders


def predict(
    model: str | Path,
    data: Any,
    *,
    out: str | Path | None = None,
    template: str | None = None,
    device: str = "auto",
) -> "pandas.DataFrame | Path":
    """Predict labels, spans or answers for every row; the rows' own columns stay.

    Args:
        model: a folder that `finetune` kept, or a hub id with a head.
        data: a file of rows (.jsonl, .csv, .tsv, .json, .parquet, columns; .txt: a text a line); in Python also a
            DataFrame, a `datasets.Dataset`, texts, or rows as dictionaries.
        out: write a .jsonl or .csv file, row by row.
        template: columns in braces, for a model that does not say what its inputs are: `{text}`.
        device: auto, cpu or cuda.
    """
    import pandas

    with TemporaryDirectory() as folder:
        in_memory = not isinstance(data, str | Path)
        file = keep_rows(rows_in_memory(data), Path(folder), "rows") if in_memory else Path(data)
        if out is not None:
            write_predictions(str(model), file, Path(out), template, device)
            return Path(out)
        table = pandas.DataFrame(list(open_prediction(str(model), file, template, device)))
        return table.set_axis(data.index) if isinstance(data, pandas.DataFrame) else table


def open_prediction(model: str, file: Path, template: str | None, device: str) -> Iterator[Row]:
    """The rows of a file with what a model predicts. Raises `InputError` before the model is loaded."""
    if not file.exists():
        raise InputError(f"{file} does not exist")
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {device}: give auto, cpu or cuda")
    kept = find_kept(model, file, template)
    return predict_rows(kept, open_rows(kept, file), file.name, device)


def predict_rows(kept: KeptModel, rows: Iterator[PlacedRow], name: str, device: str) -> Iterator[Row]:
    """Each row with its prediction, as it is read."""
    from biphase.device import choose_device
    from biphase.finetuning.predict import predict_placed

    with track(f"predict {name}", None, "rows") as progress:
        num_rows = 0
        for row in predict_placed(kept, rows, name, choose_device(device)):
            num_rows += 1
            progress.advance(1)
            yield row
        progress.say(f"{name}: {num_rows:,} rows")


def write_predictions(model: str, file: Path, out: Path | TextIO, template: str | None, device: str) -> None:
    """The rows of a file with predictions, into a .jsonl or .csv file that appears when it is whole, or as JSONL."""
    if isinstance(out, Path):
        if out.suffix not in OUT_ENDINGS:
            raise InputError(f"{out}: name a {' or '.join(OUT_ENDINGS)} file")
        if out.exists():
            raise InputError(f"{out} is there already; choose another name, or delete it first")
        rows = open_prediction(model, file, template, device)
        with whole_file(out) as sink:
            write_csv(rows, sink) if out.suffix == ".csv" else write_lines(rows, sink)
    else:
        write_lines(open_prediction(model, file, template, device), out)


def write_lines(rows: Iterable[Row], sink: TextIO) -> None:
    """A JSON object a line; on a terminal with nothing in it that a terminal obeys."""
    for row in rows:
        sink.write(json.dumps(row, ensure_ascii=sink.isatty(), default=str) + "\n")
    sink.flush()


def write_csv(rows: Iterable[Row], sink: TextIO) -> None:
    """A table with the columns of the first row: one for each label's probability, lists as JSON."""
    table: Any = None
    for number, row in enumerate(rows, start=1):
        flat = {key: value for key, value in row.items() if not isinstance(value, dict) or key != "probabilities"}
        if isinstance(row.get("probabilities"), dict):
            flat |= {f"probability_{label}": value for label, value in row["probabilities"].items()}
        for key, value in flat.items():
            if isinstance(value, dict | list):
                flat[key] = json.dumps(value, ensure_ascii=False, default=str)
        if table is None:
            table = csv.DictWriter(sink, list(flat), lineterminator="\n")
            table.writeheader()
        extra = sorted(flat.keys() - set(table.fieldnames))
        if extra:
            raise InputError(f"row {number} has a column '{extra[0]}' that the first row has not; write a .jsonl file")
        table.writerow(flat)
