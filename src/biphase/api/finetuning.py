"""Fine-tune a model, predict, score, evaluate a grid, compare two models.

Records of plain data are the rows of DataFrames and of `--format json`. They hold shares, not percent; an unknown value
is None or NaN, and null in JSON.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, Unpack

import numpy as np
from pydantic_core import to_jsonable_python

from biphase import console
from biphase.api.networks import ZERO_SHOT, ZeroShot, run_zero_shot
from biphase.config import AnyPath, ModelName, OnCommandLine, PythonOnly, parse_config
from biphase.corpus.forms import PlacedRow, Row, TableForm
from biphase.corpus.rows import ending_of, excerpt
from biphase.corpus.text import as_file, name_data
from biphase.corpus.writing import TABLE_FORMS, refuse_ending, refuse_rows, write_rows
from biphase.engine.scheduler import Failure
from biphase.engine.units import Engine, EngineKind
from biphase.errors import InputError
from biphase.files import new_file, refuse_existing, refuse_filled
from biphase.finetuning.class_report import ClassReport, draw_confusion, print_report, read_report, report_classes
from biphase.finetuning.config import FinetuneConfig, FinetuneSettings, GridSettings, plan_cells
from biphase.finetuning.grid import (
    PAPER_LEARNING_RATES,
    PAPER_SEEDS,
    Grid,
    MissingCells,
    check_keep,
    keep_best_networks,
    list_numbers,
    plan_grid,
    plan_missing,
    refuse_keep,
    resolve_for,
    run_grid,
    tell_downloads,
)
from biphase.finetuning.kept import (
    RECORD,
    KeptModel,
    count_trained,
    find_kept,
    label_of,
    open_rows,
    read_labelled,
    read_task,
    read_trained,
    tell_trained,
)
from biphase.finetuning.metrics import ERRORS, Rows, contributions, score_rows, show_value
from biphase.finetuning.scores import KeptExamples, Score, ScoreSet, linearize, read_scores, tell_errors
from biphase.finetuning.words import WORD_SCORES, judge_words, read_word_scores, score_words, tell_word_score
from biphase.report import verdicts
from biphase.report.results import ReportArm, Result
from biphase.report.statistics import Interval, mean_interval
from biphase.style import check_picture
from biphase.tasks.examples import input_of
from biphase.tasks.own import write_task
from biphase.tasks.sources import find_source, name_data_dirs
from biphase.tasks.spec import PAPER_TASKS, find_task, name_tests
from biphase.tasks.splits import TaskData

if TYPE_CHECKING:
    import pandas

OWN_TASKS = "data"
"""The subfolder for tasks made from rows."""


def finetune(
    model: ModelName,
    task: str | None = None,
    *,
    data: Any = None,
    template: Annotated[str | None, PythonOnly] = None,
    label: Annotated[str | None, PythonOnly] = None,
    missing: Annotated[Literal["refuse", "drop"], PythonOnly] = "refuse",
    group: Annotated[str | None, PythonOnly] = None,
    scores: AnyPath = "scores",
    keep: AnyPath | None = None,
    **settings: Unpack[FinetuneSettings],
) -> Score:
    """Fine-tune one model on one task with one rate and seed, and score it on validation and test.

    `data` may also be the rows of a task of your own; `task` is then only its name. Give a DataFrame, a
    `datasets.Dataset`, dictionaries, a file, or a mapping of `train`, `validation` and `test` to these. The columns
    determine the kind of task. Missing splits are drawn from train.

    Args:
        model: RUN[@STEP], a model folder or a Hub id (ID@REVISION).
        task: The name of a task, such as snli, or a YAML file that describes one.
        data: The folder with the task's original data; without it, the package's or the Hub's.
        template: For rows: the input, with columns in braces; by default, all text columns.
        label: For rows: the column with the label or the list of tags, if its name does not show that.
        missing: For rows: `drop` leaves out rows without a label or text.
        group: For rows: the column whose equal values must stay in the same split.
        scores: The folder for finished cells (a cell is one model, task, learning rate and seed).
        keep: Save the fine-tuned model here for transformers' pipelines; nothing is saved if training diverges. If
            transformers' head for this model type differs from that of arXiv 2507.00994, transformers' head is used,
            and a message says so.
        settings: Settings to override, such as `learning_rate=1e-4, seed=3`. Without a rate, your own tasks except
            retrieval try three rates; without `epochs` and `max_steps`, they train 3 to 20 epochs.
    """
    if not isinstance(task, str | Path | None):
        raise InputError(f"`task` is a {type(task).__name__}: give a name or a file; rows go to `data`")
    config = parse_config(FinetuneConfig, {**settings}, origin=str(task or "finetune"))
    task, folders = place_task(task, data, Path(scores), template=template, label=label, missing=missing, group=group)
    if keep is not None:
        refuse_filled(Path(keep))
    [plan] = plan_cells(str(model), [task], config, folders)
    from biphase.finetuning.defaults import fill_in_length, fill_in_rate
    from biphase.finetuning.fit import fit_cells
    from biphase.finetuning.frozen import FROZEN_SCORES, score_frozen
    from biphase.finetuning.keeping import keep_anew, plan_to_keep

    out = Path(scores)
    plan = plan if keep is None else plan_to_keep(plan)
    with console.each_line_once():  # words alone, the encoding and the kept folder all read the rows
        plan = fill_in_length(plan, config.model_fields_set)  # which decides the examples that both read
        words = score_words(plan.train, plan.evaluation, [plan.config], out / WORD_SCORES)
        for line in (*tell_trained(plan.model, plan.evaluation, plan.config), *map(tell_word_score, words)):
            console.err.print(line)
        frozen = score_frozen(plan, words, out / FROZEN_SCORES)
        plan = fill_in_rate(plan, config.model_fields_set, out)
        is_old = plan.is_finished(out)
        [score] = fit_cells([plan], out) if keep is None else [keep_anew(plan, out, Path(keep))]
    tell_score(score, keep, is_old, words, frozen)
    return score


def place_task(task: str | None, data: Any, folder: Path, **how: Any) -> tuple[str, dict[str, Any]]:
    """Return a task, by name or file, and the folder of its data by name; {} for the package's or the Hub's. Rows are
    written below `folder`; `how` to read them, as `write_task` takes it, is an `InputError` for other data."""
    if data is not None and not is_folder(data):
        task, data = write_task(data, folder / OWN_TASKS, task, **how)
    elif given := [name for name, value in how.items() if value not in (None, "refuse")]:
        raise InputError(f"`{given[0]}` is for rows as data: write it into the task file, or leave it out")
    elif task is None:
        remedy = "rows as data" if data is None else f"a file of rows as data, which {data} is not"
        raise InputError(f"which task? Name one, such as snli, or a YAML file, or give {remedy}")
    return task, {} if data is None else {find_task(task).name: data}


def result_of(score: Score) -> Result:
    """Turn the score of a single cell into a result."""
    arm, samples, seeds = ReportArm("this model"), (score.metrics["test"][score.metric],), (score.config.seed,)
    kept = KeptExamples((score,))
    return Result(arm, "", score.task, "standard", samples, seeds=seeds, examples=kept, measure=score.metric)


def tell_score(score: Score, keep: Path | str | None, is_old: bool, *baselines: Sequence[Score]) -> None:
    """Print the score, overall, per class and beside both baselines, and the folders written."""
    console.out.print(score.headline() + (" · finished before" if is_old else ""))
    of_model = ""
    if keep is not None:
        of_model = f"; {keep}: the model" if (Path(keep) / RECORD).exists() else "; it diverged, and no model is kept"
    console.err.print(f"{score.folder}: scores and predictions{of_model}")
    if (report := read_report(score)) is not None:
        print_report(report, score.never_predicted.get("test", {}))
    for sentence in [] if score.diverged else [*tell_errors(score), *verdicts.tell_alone(result_of(score), *baselines)]:
        console.out.prose(sentence)


def is_folder(data: Any) -> bool:
    """Tell whether data names a folder of published files (or `hub`), rather than rows or a file of rows."""
    return isinstance(data, str | Path) and not Path(data).is_file()


def raise_failures(failures: Sequence[Failure]) -> None:
    """Raise `InputError` that names the first failed unit, if any."""
    if not failures:
        return
    failed = [failure for failure in failures if not failure.is_blocked]
    first = (failed or failures)[0]
    waiting = f", {len(failures) - len(failed)} that need them did not run" if len(failed) < len(failures) else ""
    reason = f"{len(failed)} failed{waiting}; the first: {first.unit}: {first.reason}"
    raise InputError(f"{reason}; run the same command again to retry: finished work is kept")


def by_task(data: Any) -> Mapping[str, Any]:
    """Check that `data` maps tasks to data, and return it; {} for None."""
    if not isinstance(data, Mapping | None):
        raise InputError("`data` must map names of tasks to folders or rows, such as {'mine': rows}")
    return data or {}


def place_data(data: Mapping[str, Any], tasks: list[str], scores: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Write the tasks that are given as rows. Return all tasks, and the data folder of each task in `data`."""
    folders = []
    for name, rows in data.items():
        folder = str(rows)
        if not is_folder(rows):
            file, folder = write_task(rows, scores / OWN_TASKS, name)
            tasks = [*(task for task in tasks if task != name), file]
        folders.append((name, folder))
    return tasks, folders


def predict(
    model: ModelName,
    data: Annotated[Any, OnCommandLine(Path)],
    *,
    out: AnyPath | None = None,
    template: str | None = None,
    least: float | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> "pandas.DataFrame | Path":
    """Predict labels, spans or answers for every row, alongside the original columns.

    `data` may also be a DataFrame, a `datasets.Dataset`, texts, or rows as dictionaries.

    Args:
        model: A folder that `finetune --keep` wrote, or the Hub id of a model with a task head.
        data: A file of rows (.jsonl, .csv, .tsv, .xlsx, .json, .parquet, CoNLL) or of texts, one per line (.txt).
        out: Write this .jsonl, .csv, .tsv, .xlsx or .parquet file. If input and output are both .csv, or both .tsv, the
            input's delimiter and quoting are kept.
        template: The input template, with columns in braces, such as `{text}`; needed if the model does not store a
            template.
        least: Leave `predicted` empty, for a person to decide, where the predicted class has a lower probability than
            this. Only for texts with one class each.
        device: The device; auto uses a GPU if there is one.
    """
    import pandas

    with as_file(data) as file:
        if out is not None:
            write_predictions(str(model), file, Path(out), template, device, least)
            return Path(out)
        table = pandas.DataFrame(list(predict_rows(str(model), file, template, device, least)[1]))
        return table.set_axis(data.index) if isinstance(data, pandas.DataFrame | pandas.Series) else table


@dataclass(frozen=True)
class FileScore:
    """The score of a fine-tuned model on the rows of a file."""

    model: str
    file: str
    task: str
    metric: str
    """The task's primary metric."""
    metrics: dict[str, Interval]
    """Metric, or error of numbers → its value with the 95 % interval over examples, whose ends are nan if unknown."""
    num_examples: int
    num_left_out: int
    """The number of rows without a label."""
    num_truncated: int
    num_trained: int
    """The number of examples whose inputs trained or validated the model."""
    classes: ClassReport | None
    """The scores per class; None for a task without classes."""
    words: verdicts.WordsRow | None = None
    """The comparison with words alone; None without `train`."""

    def __repr__(self) -> str:
        counts = f"{self.num_examples:,} examples, {self.num_left_out:,} left out, {self.num_truncated:,} truncated"
        counts += f", {self.num_trained:,} trained or validated the model" if self.num_trained else ""
        others = " · ".join(self.show(name).partition(" [")[0] for name in self.metrics if name != self.metric)
        return f"{self.task} · {self.model} · {self.file}\n{self.show(self.metric)}\n{others}\n{counts}"

    def show(self, metric: str) -> str:
        """Show a metric as `accuracy 81.20% [79.90%, 82.50%]`."""
        interval = self.metrics[metric]
        value, *ends = (show_value(metric, end) for end in (interval.value, interval.low, interval.high))
        return f"{metric} {value}" if np.isnan(interval.low) else f"{metric} {value} [{', '.join(ends)}]"


def score(
    model: ModelName,
    data: Annotated[Any, OnCommandLine(Path)],
    *,
    train: AnyPath | None = None,
    picture: AnyPath | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> FileScore:
    """Score a fine-tuned model on labelled rows: overall, with confidence intervals, and per class.

    `data` may also be a DataFrame, a `datasets.Dataset`, or rows as dictionaries.

    Args:
        model: A folder that `finetune --keep` wrote.
        data: A file of labelled rows, in any format that tasks accept.
        train: The folder with the model's training data, to compare it with words alone, trained on the same rows.
        picture: Save the confusion matrix to this .png, .svg or .pdf file.
        device: The device; auto uses a GPU if there is one.
    """
    if picture is not None:
        check_picture(Path(picture))
    with as_file(data) as file:
        kept = find_kept(str(model), file)
        test = read_labelled(kept, file)
    if picture is not None and (not kept.task.classes or kept.task.kind.has_label_sets):
        raise InputError(f"picture: {kept.task.name} does not have one class per example or word; leave picture out")
    by_words = None if train is None else predict_by_words(kept, test, Path(train))
    from biphase.device import choose_device
    from biphase.finetuning.predict import judge_test

    num_trained = count_trained(map(input_of, test.test), read_trained(kept.folder))
    metrics, rows, num_truncated = judge_test(kept, test, choose_device(device))
    task, measures = kept.task, dict[str, Interval]()
    for name, value in (metrics | score_rows(rows, ERRORS * task.kind.has_label_numbers, ())).items():
        measures[name] = Interval(value)
        if name in ERRORS or (name in task.kind.metrics and (name == task.metric or not task.kind.is_answering)):
            measures[name] = mean_interval(linearize(*contributions(rows, name, task.classes)))
    report = report_classes(rows, task.classes) if task.classes else None
    if num_trained:
        share = f"{num_trained:,} of {len(rows):,} examples trained or validated this model"
        console.err.print(f"{name_data(file)}: {share}: the score is probably too high for new ones")
    if picture is not None:
        draw_confusion(report, Path(picture))
    return FileScore(
        model=str(model),
        file=name_data(file),
        task=task.name,
        metric=task.metric,
        metrics=measures,
        num_examples=len(rows),
        num_left_out=test.left_out,
        num_truncated=num_truncated,
        num_trained=num_trained,
        classes=report,
        words=None if by_words is None else verdicts.compare_rows(task, rows, by_words),
    )


def predict_by_words(kept: KeptModel, test: TaskData, train: Path) -> Rows:
    """Predict test examples by words alone, trained on the rows in the folder `train` that trained a kept model. Raises
    `InputError` for other rows."""
    task = read_task(kept.folder)
    if not task.kind.words:
        raise InputError(f"train: {task.name} is {task.family.replace('_', ' ')}, which has no baseline by words alone")
    by_words, inputs = judge_words(kept.config, find_source(task, train), test.test)
    hashes = read_trained(kept.folder)
    if len(hashes) and count_trained(inputs, hashes) < len(inputs):
        raise InputError(f"{train} has other rows than those that trained {kept.folder}: give the folder of its data")
    return by_words


def predict_rows(
    model: str, file: Path, template: str | None, device: str, least: float | None = None, ending: str = ".jsonl"
) -> tuple[TableForm | None, Iterator[Row]]:
    """Return the form for writing a table, and an iterator over rows with predictions. Raises `InputError` before
    loading the model, also for rows that no file with this `ending` can hold."""
    network = find_kept(model, file, template)
    if least is not None and not (network.task.kind.has_strata and 0 <= least <= 1):
        reason = f"{least:g} is not from 0 to 1" if network.task.kind.has_strata else f"not for {network.task.name}"
        raise InputError(f"least: {reason}; it is a probability, for texts with one class each")
    if ending != ".jsonl":
        refuse_rows((row for _, row in open_rows(network, file)[1]), ending)
    name, (form, rows) = name_data(file), open_rows(network, file)
    predicted = track_predictions(network, rows, name, device)
    return form, predicted if least is None else leave_to_people(predicted, name, least)


def leave_to_people(rows: Iterator[Row], name: str, least: float) -> Iterator[Row]:
    """Yield rows, without the predicted class if its probability is below `least`; print how many those are. Raises
    `InputError` for rows without such a probability."""
    num_rows = num_left = 0
    for row in rows:
        if "probability" not in row:
            raise InputError(f"least: {name}: this model gives no probability of one class; leave least out")
        is_left = row["probability"] is not None and row["probability"] < least
        num_rows, num_left = num_rows + 1, num_left + is_left
        yield row | {"predicted": None} if is_left else row
    share = f"{num_left:,} of {num_rows:,} rows ({num_left / max(num_rows, 1):.0%})"
    console.err.print(f"{name}: {share} are left to a person: no class reaches a probability of {least:g}")


def track_predictions(network: KeptModel, rows: Iterator[PlacedRow], name: str, device: str) -> Iterator[Row]:
    from biphase.device import choose_device
    from biphase.finetuning.predict import predict_placed

    with console.track(f"predict {name}", None, "rows") as progress:
        num_rows = num_without = num_unknown = 0
        labelled, first_unknown = Rows(), None
        for row in predict_placed(network, rows, name, choose_device(device)):
            num_rows += 1
            progress.advance(1)
            label, given = label_of(network, row)
            num_without += given is None
            if label is None and given is not None:
                num_unknown, first_unknown = num_unknown + 1, first_unknown if num_unknown else given
            if label is not None and row.get("predicted") is not None:
                read = ("predicted", "probabilities" if isinstance(label, list) else "probability")
                labelled.append({"gold": label} | {key: row[key] for key in read})
            yield row
        console.err.print(f"{name}: {num_rows:,} {'row' if num_rows == 1 else 'rows'}")
    if labelled:
        counted = f"{len(labelled):,} known to the model, {num_without:,} missing, {num_unknown:,} unknown"
        console.err.print(f"labels: {counted}{f' (the first: {excerpt(first_unknown)})' if num_unknown else ''}")
        print_report(report_classes(labelled, network.task.classes), {}, console.err)


def write_predictions(
    model: str, file: Path, out: Path | TextIO, template: str | None, device: str, least: float | None = None
) -> None:
    """Write rows with predictions to a `new_file`, or to a stream as JSONL. A table keeps the input's form if both have
    the same ending."""
    ending = ".jsonl"
    if isinstance(out, Path):
        ending = out.suffix.lower()
        refuse_ending(out)
        refuse_existing(out)
    form, rows = predict_rows(model, file, template, device, least, ending)
    if form is not None and ending != ending_of(file):
        form = replace(TABLE_FORMS.get(ending, form), has_mark=form.has_mark)
    with new_file(out) if isinstance(out, Path) else nullcontext(out) as sink:
        write_rows(rows, sink, ending, form)


def fields_of(record: object, names: str) -> dict[str, Any]:
    """Return the fields of a record with these names, separated by spaces."""
    return {name: getattr(record, name) for name in names.split()}


def summary_records(rows: Iterable[verdicts.SummaryRow]) -> list[dict[str, Any]]:
    """Make a record for each row, in the same order."""
    records = []
    for row in rows:
        score = row.score
        record: dict[str, Any] = {"model": score.arm.name, "task": score.dataset, "metric": score.measure}
        record |= {"rate": score.rate, "mean": score.mean, "half_width": score.interval.half_width}
        record |= {"paper_half_width": row.paper_interval.half_width, "seeds": list(score.seeds)}
        record |= {"num_cells": score.num_runs, "num_diverged": len(row.diverged), "num_missing": len(row.missing)}
        record |= {"num_degenerate": score.count_degenerate(), "never_predicted": row.never_predicted}
        record |= {"spread": row.spread.value if row.spread else None}
        records.append(record)
    return records


def comparison_records(comparisons: Iterable[verdicts.TaskComparison]) -> list[dict[str, Any]]:
    """Make a record for each task. Differences are A minus B."""
    records = []
    for pair in comparisons:
        a, b = pair.a, pair.b
        record: dict[str, Any] = {"task": a.dataset, "metric": a.measure or b.measure}
        record |= {"model_a": a.arm.name, "model_b": b.arm.name}
        record |= {"mean_a": a.mean if a.samples else None, "mean_b": b.mean if b.samples else None}
        gap = pair.difference
        record |= dict.fromkeys(("difference", "low", "high", "level"))
        if gap is not None:
            record |= {"difference": gap.value, "low": gap.low, "high": gap.high, "level": gap.level}
        records.append(record | fields_of(pair, "p_value num_tasks verdict") | {"notes": list(pair.notes)})
    return records


def to_json(value: Any, indent: int | None = 2) -> str:
    """Write plain data and records for `--format json`: UTF-8 without NaN or terminal control characters, indented, or
    without an `indent` on one line."""
    tree = to_jsonable_python(value, inf_nan_mode="null")
    text = json.dumps(tree, indent=indent, ensure_ascii=False, allow_nan=False)
    return console.UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def evaluate(
    models: str | Path | Iterable[str | Path] = (),
    tasks: str | Iterable[str] | None = None,
    *,
    learning_rates: Iterable[float] = PAPER_LEARNING_RATES,
    seeds: Iterable[int] = PAPER_SEEDS,
    scores: AnyPath = "scores",
    data: Mapping[str, Any] | None = None,
    engine: EngineKind = "local",
    address: str | None = None,
    workers: int | None = None,
    workers_per_gpu: int = 1,
    part: str | None = None,
    dry_run: bool = False,
    keep: AnyPath | None = None,
    **settings: Unpack[GridSettings],
) -> "pandas.DataFrame":
    """Fine-tune and score models on tasks with every learning rate and seed; the rate is chosen on validation data.
    Finished cells are not run again.

    Args:
        models: RUN[@STEP], model folders or Hub ids (ID@REVISION); for zero-shot:FOLDER also search indexes. Without a
            model, summarize the folder `scores`.
        tasks: Names or YAML files; zero-shot:FOLDER or mteb:NAME. By default the tasks of `data`, or else the paper's
            twelve, `paper`.
        learning_rates: The learning rates to try.
        seeds: The seeds for each learning rate.
        scores: The folder for finished cells (a cell is one model, task, learning rate and seed).
        data: Task → the folder with its original data files or, for your own tasks, rows as `finetune` takes them.
        engine: Run on this machine (local) or on several (ray).
        address: The address of a Ray cluster; `auto` finds one that is running.
        workers: The number of cells that run side by side; one per core or GPU by default.
        workers_per_gpu: The number of cells that share a GPU.
        part: NUMBER/TOTAL: run only this part of the cells, counted from 0 (for a Slurm array).
        dry_run: Count the missing cells and estimate their time; train nothing.
        keep: For each model and task, train the best seed at the chosen rate again, and save that model in a subfolder
            of this folder.
        settings: Settings of all cells, such as `max_steps=200`.

    Returns: a row for each model on each task in `scores`: `rate`, the `mean` of its test scores with its 95 %
    interval, …; shares from 0 to 1. Below the models of a task, a row shows what words alone reach, unless `words` is
    False. For a dry run, the numbers of cells and of missing cells.
    """
    import pandas

    rows = by_task(data)
    names, folders = place_data(rows, list_names(tasks or list(rows) or "paper"), Path(scores))
    axes = list_numbers("learning_rates", learning_rates), list_numbers("seeds", seeds)
    config = parse_config(FinetuneConfig, {**settings}, origin="evaluate")
    grid = Grid(tuple(list_names(models)), tuple(names), config, Path(scores), *axes)
    chosen: Any = {"engine": engine, "address": address, "workers": workers, "workers_per_gpu": workers_per_gpu}
    answer = run_evaluation(grid, folders, part=part, dry_run=dry_run, keep=keep, **chosen)
    if isinstance(answer, ScoreSummary):
        raise_failures(answer.failures)
    return pandas.DataFrame(answer.cells if isinstance(answer, MissingCells) else evaluation_json(answer)["scores"])


def compare(model_a: str | Path, model_b: str | Path, *, scores: str | Path = "scores") -> "pandas.DataFrame":
    """Compare two models that `evaluate` scored: which wins on each task, and is the difference more than noise?

    Returns: a row for each task: both means, their `difference` (A minus B), the p-value adjusted for the number of
    tasks (Holm), an interval that is adjusted likewise and misses with probability `level`, the `verdict` and `notes`.
    """
    import pandas

    return pandas.DataFrame(comparison_records(verdicts.compare(read_scores(Path(scores)), str(model_a), str(model_b))))


def list_names(names: str | Path | Iterable[str | Path]) -> list[str]:
    """Return one name or several as a list."""
    return [str(name) for name in ([names] if isinstance(names, str | Path) else names)]


@dataclass(frozen=True)
class ScoreSummary:
    """The scores in a folder after running missing cells."""

    scores: ScoreSet
    rows: list[verdicts.SummaryRow]
    """The models on each task, the best mean first, and then words alone."""
    comparison: list[verdicts.TaskComparison]
    """The comparison of two models, task by task; [] without one."""
    failures: Sequence[Failure]
    """The units that failed in this call."""


def run_evaluation(
    grid: Grid,
    data_dirs: Sequence[tuple[str, str]],
    *,
    part: str | None,
    dry_run: bool,
    keep: Path | str | None,
    engine: EngineKind,
    pair: tuple[str, str] | None = None,
    **workers: Any,
) -> ZeroShot | MissingCells | ScoreSummary:
    """Run the missing cells of a grid, whose tasks have the names that the user gave, and summarize its folder of
    scores. In a dry run, only count the missing cells. Zero-shot tasks train nothing."""
    given = grid.config.model_fields_set
    for key in {"learning_rate", "seed"} & given:
        raise InputError(f"{key} varies in a grid: give `{key}s`")
    if grid.models and any(task.startswith(ZERO_SHOT) for task in grid.tasks):
        refused: dict[str, Any] = {"dry_run": dry_run, "part": part, "compare": pair, "keep": keep, "settings": given}
        return run_zero_shot(grid.models, grid.tasks, grid.out, **refused)
    if keep is not None:
        refuse_keep(grid, part, engine)
    failures: Sequence[Failure] = ()
    if grid.models:
        names = tuple(name for task in grid.tasks for name in (PAPER_TASKS if task == "paper" else name_tests(task)))
        chosen = parse_config(Engine, {"kind": engine, "device": grid.config.device, **workers}, origin="evaluate")
        folders, config = name_data_dirs(data_dirs, names, "`data`"), resolve_for(grid.config, chosen)
        grid = replace(grid, tasks=names, config=config, data_dirs=folders)
        if not dry_run:
            tell_downloads(grid)
        trainings = plan_grid(grid, part)
        if dry_run:
            return plan_missing(grid, trainings, chosen)
        best = {} if keep is None else check_keep(trainings, Path(keep))
        failures = run_grid(grid, trainings, chosen)
        keep_best_networks(best, grid.out)
    scores = read_scores(grid.out)
    comparison = verdicts.compare(scores, *pair) if pair else []
    rows = verdicts.add_words(verdicts.summarize(scores), read_word_scores(grid.out) if grid.config.words else ())
    return ScoreSummary(scores, rows, comparison, failures)


def evaluation_json(answer: ZeroShot | MissingCells | ScoreSummary) -> dict[str, Any]:
    """Return the tree of the JSON that docs/reference/command_line.md describes."""
    if isinstance(answer, MissingCells):
        return vars(answer)
    if isinstance(answer, ScoreSummary):
        left_out = [{"path": path, "reason": reason} for path, reason in answer.scores.broken.items()]
        tree = {"scores": summary_records(answer.rows), "left_out": left_out, "failed": answer.failures}
        words = [row.words for row in answer.rows if row.words]
        tree |= {"words": words} if words else {}
        return tree | ({"comparison": comparison_records(answer.comparison)} if answer.comparison else {})
    pairs = ((task, *pair) for task, by_model in answer.items() for pair in by_model.items())
    return {"scores": [{"model": model, "task": task, **values} for task, model, values in pairs]}
