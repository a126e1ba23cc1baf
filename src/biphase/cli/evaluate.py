"""`biphase evaluate`: the command line's words → a grid, run; what its folder holds; two models compared."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from biphase.cli.embed import is_zero_shot, run_zero_shot
from biphase.config import parse_config
from biphase.console import duration, err
from biphase.console import out as console
from biphase.engine.local import Engine
from biphase.engine.scheduler import Failure, read_failures
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.grid import (
    Grid,
    SharedTraining,
    choose_part,
    estimate_seconds,
    missing_trainings,
    plan_grid,
    read_finished,
    resolve_for,
    run_grid,
)
from biphase.finetuning.scores import Score, read_scores
from biphase.machine import num_cores, visible_gpus
from biphase.report.comparison import compare, summarize
from biphase.report.printing import print_comparison, print_summary
from biphase.tasks.sources import name_data_dirs
from biphase.tasks.spec import METRICS, PAPER_TASKS, find_task

Number = TypeVar("Number", int, float)


def run_evaluation(
    words: Sequence[str],
    *,
    tasks: str,
    learning_rates: str,
    seeds: str,
    out: Path,
    data_dirs: Sequence[str],
    engine: dict[str, Any],
    part: str | None,
    dry_run: bool,
    pair: tuple[str, str] | None,
    keep: Path | None = None,
) -> None:
    """Run what is missing of the grid, then print what `out` holds, and the comparison of a pair of models. With
    `keep`, the best network of each model on each task is written below it.

    Raises `InputError` for what the words do not say right, and when cells failed: how many, and the first reason.
    """
    settings = [word for word in words if re.match(r"[a-z_.0-9]+=", word)]
    models = tuple(word for word in words if word not in settings)
    for key in ("learning_rate", "seed"):
        if any(setting.startswith(f"{key}=") for setting in settings):
            raise InputError(f"{key} is one of a grid: give --{key.replace('_', '-')}s")
    if keep is not None and (not models or is_zero_shot(tasks) or part is not None):
        raise InputError("--keep is for models that are fine-tuned on tasks, without --part")
    if models and is_zero_shot(tasks):
        run_zero_shot(models, tasks, out)
        return
    failures: list[Failure] = []
    if models:
        names = PAPER_TASKS if tasks == "paper" else tuple(tasks.split(","))
        config = parse_config(FinetuneConfig, {}, settings, origin="evaluate")
        grid = Grid(
            models=models,
            tasks=names,
            config=config,
            out=out,
            learning_rates=parse_numbers(learning_rates, float, "--learning-rates"),
            seeds=parse_seeds(seeds),
            data_dirs=parse_data_dirs(data_dirs, names),
        )
        where = parse_config(Engine, engine | {"device": config.device}, origin="evaluate")
        failures = run_and_keep(grid, where, part, dry_run, keep)
        if dry_run:
            return
    elif settings:
        raise InputError(f"which model? Only settings are given: {' '.join(settings)}")
    scores = read_scores(out)
    print_summary(summarize(scores), scores.broken)
    judged = sorted({score.task for score in scores.scores if is_easier_search(score)})
    if judged:
        console.print(f"among judged documents only, which scores higher than among all: {', '.join(judged)}")
    if pair is not None:
        print_comparison(compare(scores, *pair))
    if failures:
        raise told_together(failures)


def told_together(failures: Sequence[Failure]) -> InputError:
    """How many cells failed, and the most frequent reason."""
    reasons = Counter(failure.reason for failure in failures if not failure.is_blocked)
    num_blocked = len(failures) - reasons.total()
    waiting = f", {num_blocked} that need them were not run" if num_blocked else ""
    return InputError(
        f"{reasons.total()} failed{waiting}; most often: {reasons.most_common(1)[0][0]}; finished cells are kept, "
        "the same command runs the others again"
    )


def run_and_keep(grid: Grid, engine: Engine, part: str | None, dry_run: bool, keep: Path | None) -> list[Failure]:
    if keep is None or dry_run:
        return run_missing(grid, engine, part, dry_run)
    from biphase.cli.best import check_kept, keep_best_networks

    kept = check_kept(grid, resolve_for(grid.config, engine), keep)
    failures = run_missing(grid, engine, part, dry_run)
    keep_best_networks(kept, grid.out)
    return failures


def is_easier_search(score: Score) -> bool:
    return score.metric in METRICS["retrieval"] and bool(score.config.judged_only)


def run_missing(grid: Grid, engine: Engine, part: str | None, dry_run: bool) -> list[Failure]:
    grid = replace(grid, config=resolve_for(grid.config, engine))
    trainings = plan_grid(grid)
    chosen = trainings if part is None else choose_part(trainings, part)
    missing = missing_trainings(chosen, grid.out)
    if dry_run:
        print_dry_run(grid, chosen, missing, engine)
        return []
    num_cells, num_missing = (sum(len(training.cells) for training in some) for some in (chosen, missing))
    err.print(f"{num_cells:,} cells, {num_cells - num_missing:,} of them finished")
    return run_grid(grid, missing, engine) if missing else []


def print_dry_run(
    grid: Grid, chosen: Sequence[SharedTraining], missing: Sequence[SharedTraining], engine: Engine
) -> None:
    """A table of cells by model and task, and how long the missing ones take."""
    table = Table(title=f"{len(grid.learning_rates)} rates × {len(grid.seeds)} seeds")
    for column in ("model", "task", "cells", "finished", "missing"):
        table.add_column(column, justify="left" if column in ("model", "task") else "right")
    totals, lefts = (
        Counter((training.model, cell.task.name) for training in some for cell in training.cells)
        for some in (chosen, missing)
    )
    for model in grid.models:
        for task in grid.tasks:
            name = find_task(task).name
            total, left = totals[model, name], lefts[model, name]
            table.add_row(model, name, f"{total:,}", f"{total - left:,}", f"{left:,}")
    console.print(table)
    seconds, num_unknown = estimate_seconds(missing, read_finished(chosen, grid.out))
    workers = count_workers(engine)
    if num_unknown < len(missing):
        spent = duration(seconds / max(workers, 1))
        told = f"with {workers} workers" if workers else "of one worker"
        console.print(f"about {spent} {told}, judged by finished cells")
    if num_unknown:
        console.print(f"{num_unknown:,} trainings are of tasks without a finished cell to judge by: run one seed first")
    for failure in read_failures(grid.out):
        console.print(f"failed before: {failure.unit}: {failure.reason}", markup=False)


def count_workers(engine: Engine) -> int:
    """How many cells run side by side; 0 where only a Ray cluster knows."""
    if engine.workers is not None:
        return max(engine.workers, 1)
    if engine.kind == "ray":
        return 0
    num_gpus = len(visible_gpus()) if engine.device != "cpu" else 0
    return engine.workers_per_gpu * num_gpus or num_cores()


def parse_numbers(text: str, kind: Callable[[str], Number], option: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text} must be numbers, separated by commas") from None


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0-4`, or `0,1,5`."""
    if span := re.fullmatch(r"(\d+)-(\d+)", text):
        if int(span[1]) > int(span[2]):
            raise InputError(f"--seeds {text} is an empty range")
        return tuple(range(int(span[1]), int(span[2]) + 1))
    if "-" in text:
        raise InputError(f"--seeds {text} must be numbers from 0 on, or a range such as 0-4")
    return parse_numbers(text, int, "--seeds")


def parse_data_dirs(pairs: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """`snli=path` → {"snli": "path"}; for these tasks (names or YAML files), by name or file, and what they share."""
    parts = []
    for pair in pairs:
        given, equals, folder = pair.partition("=")
        if not equals or not folder:
            raise InputError(f"--data-dir {pair} must be TASK=FOLDER, such as {find_task(tasks[0]).name}=data")
        parts.append((given, folder))
    return name_data_dirs(parts, tasks, "--data-dir")
