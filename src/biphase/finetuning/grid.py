"""Models × tasks × rates × seeds → cells. Workers here or on a Ray cluster run the missing ones, each once.

Only workers load PyTorch.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from biphase.config import parse_config
from biphase.console import err
from biphase.encoder.models import identify
from biphase.engine.local import count_workers
from biphase.engine.scheduler import Failure, Forecast, Pace, failure_path, read_failure, run_batch, run_units
from biphase.engine.units import Engine, EngineKind, Unit
from biphase.errors import InputError, refuse_doubles
from biphase.files import read_json_as, refuse_filled, refuse_foreign
from biphase.finetuning.choosing import choose_rate, validation_by_rate
from biphase.finetuning.config import CellPlan, FinetuneConfig, plan_cell, plan_cells, resolve_precision
from biphase.finetuning.kept import RECORD, tell_trained
from biphase.finetuning.scores import Score, measure_trainings, read_score, read_scores, short_name
from biphase.finetuning.words import WORD_SCORES, read_word_scores, score_words, tell_word_score
from biphase.tasks.sources import HUB, DataDirs, find_task_sources
from biphase.tasks.spec import find_task

PAPER_LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
PAPER_SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Grid:
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    config: FinetuneConfig
    """The settings of all cells except rate and seed."""
    out: Path
    learning_rates: tuple[float, ...] = PAPER_LEARNING_RATES
    seeds: tuple[int, ...] = PAPER_SEEDS
    data_dirs: DataDirs = field(default_factory=dict)


def list_numbers(axis: str, numbers: Any) -> tuple[Any, ...]:
    """List the `learning_rates` or `seeds` of a grid, those of NumPy as Python's own. Raises `InputError` for what
    cannot be one."""
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise InputError(f"`{axis}` is {numbers!r}: give a list of numbers")
    key = axis.removesuffix("s")
    return tuple(getattr(parse_config(FinetuneConfig, {key: number}, origin=axis), key) for number in numbers)


SharedTraining = list[CellPlan]
"""The cells of one training, which tasks may share (`Task.trained_on`). They have one configuration."""


def plan_grid(grid: Grid, part: str | None = None) -> list[SharedTraining]:
    """Plan all trainings of a grid, finished or not. Hashes models and data, but loads neither.

    Args:
        part: `3/16` for every sixteenth training from index 3 on (the first has index 0), as in job arrays of Slurm.

    Raises `InputError` for an unknown task, a missing model or missing data, and for any duplicate.
    """
    names = tuple(find_task(task).name for task in grid.tasks)
    values = {"model": grid.models, "task": names, "rate": grid.learning_rates, "seed": grid.seeds}
    for axis, named in values.items():
        refuse_doubles(axis, named)
    for rate in grid.learning_rates:
        if not 0 < rate < math.inf:
            raise InputError(f"learning rate {rate} must be above 0 and finite")
    models = {model: identify(model) for model in grid.models}
    names_by_hash: dict[str, str] = {}
    for model, identity in models.items():
        twin = names_by_hash.setdefault(identity.hash, model)
        if twin != model:
            raise InputError(f"{twin} and {model} are the same model under two names")
    sources = {task: find_task_sources(task, grid.data_dirs) for task in grid.tasks}
    base = resolve_precision(grid.config)
    trainings: list[SharedTraining] = []
    for identity in models.values():
        shared: dict[tuple[str, FinetuneConfig], SharedTraining] = {}  # tasks of one training may settle differently
        for task, rate, seed in product(grid.tasks, grid.learning_rates, grid.seeds):
            cell = plan_cell(identity, *sources[task], base.model_copy(update={"learning_rate": rate, "seed": seed}))
            shared.setdefault((cell.train.hash, cell.config), []).append(cell)
        trainings += shared.values()
    if part is None:
        return trainings
    index, _, total = part.partition("/")
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", part) or int(index) >= int(total):
        raise InputError(f"part '{part}' must be NUMBER/TOTAL with NUMBER from 0 to TOTAL - 1, such as 0/16")
    return trainings[int(index) :: int(total)]


def missing_trainings(trainings: Iterable[SharedTraining], out: Path) -> list[SharedTraining]:
    """List the trainings with a cell that is not finished, each with its missing cells only."""
    missing = [[cell for cell in training if not cell.is_finished(out)] for training in trainings]
    return [cells for cells in missing if cells]


def resolve_for(config: FinetuneConfig, engine: Engine) -> FinetuneConfig:
    """Replace a `precision` of `auto` by its meaning on the machines that run units, because it is part of a cell's
    name. On a Ray cluster a unit finds it out, because this process may have no GPU. Raises `InputError` if the unit
    fails."""
    if engine.kind == "local" or config.precision != "auto":
        return resolve_precision(config)
    [outcome] = run_units([Unit("find out the precision", resolve_precision, {"config": config})], engine)
    if outcome.error is not None:
        raise InputError(f"{outcome.name}: {outcome.error}")
    return FinetuneConfig.model_validate(outcome.value)


def run_grid(grid: Grid, trainings: Sequence[SharedTraining], engine: Engine) -> list[Failure]:
    """Run the missing cells of a grid's trainings, except those that another process works on. Returns the failures."""
    missing = missing_trainings(trainings, grid.out)
    num_cells = sum(map(len, trainings))
    err.print(f"{num_cells:,} cells, {num_cells - sum(map(len, missing)):,} of them finished")
    units, spent = missing_units(grid, trainings, missing), measure_grid(grid, trainings)
    return run_batch(units, engine, grid.out, label="evaluate", things="cells", spent=spent)


def missing_units(grid: Grid, trainings: Iterable[SharedTraining], missing: Sequence[SharedTraining]) -> list[Unit]:
    """Make the units of the missing trainings, after those of words alone on the tasks of all trainings."""
    named = {find_task(task).name: task for task in grid.tasks}
    settings = [(named[cell.task.name], cell.config) for cell in chain(*trainings)]
    due = {cell.task.name for cell in chain(*missing)}
    units, words = grid_units(grid, missing), list[Unit]()
    readers = {unit.arguments["task"]: unit.name for unit in units if unit.function is encode_unit}
    for unit in word_units(settings, due, grid.out, grid.data_dirs):
        needs = [readers[task] for task in [unit.arguments["task"]] if task in readers]  # bad data are told once
        words.append(replace(unit, needs=tuple(needs)))
    return [*words, *units]


def tell_downloads(grid: Grid) -> None:
    """Print how many trainings a grid with data from the Hub has, before the download begins."""
    fetched = []
    for task in map(find_task, grid.tasks):
        place = grid.data_dirs.get(task.name, "biphase" if task.bundled else HUB)
        if task.hub is not None and Path(place) == HUB:
            fetched.append(task.name)
    if fetched:
        axes = [len(grid.models), len(grid.tasks), len(grid.learning_rates), len(grid.seeds)]
        shape = f"{math.prod(axes):,} trainings (models × tasks × rates × seeds: {' × '.join(map(str, axes))})"
        err.print(f"{shape}; the data of {', '.join(fetched)} comes from the Hub; --dry-run shows number and time")


@dataclass(frozen=True)
class MissingCells:
    """The missing cells of a grid, and a forecast of their time."""

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    cells: list[dict[str, Any]]
    """For each model and task, its number of `cells`, and how many of them are `finished` and `missing`."""
    workers: int
    seconds_of_one_worker: float | None
    """The time of the known trainings; None if none is known."""
    known_trainings: int
    """The number of missing trainings on tasks with a finished one, which allows a forecast of their time."""
    unknown_trainings: int
    failed: list[Failure]
    """The last failures of missing cells, with their present data, and of scores by words alone."""


def plan_missing(grid: Grid, trainings: Sequence[SharedTraining], engine: Engine) -> MissingCells:
    """Count the missing cells of a grid's trainings, and forecast their time."""
    missing = missing_trainings(trainings, grid.out)
    totals = Counter((cell.model.name, cell.task.name) for cell in chain(*trainings))
    lefts = Counter((cell.model.name, cell.task.name) for cell in chain(*missing))
    cells = []
    for model, task in product(grid.models, (find_task(task).name for task in grid.tasks)):
        total, left = totals[model, task], lefts[model, task]
        cells.append({"model": model, "task": task, "cells": total, "finished": total - left, "missing": left})
    spent = measure_grid(grid, trainings)
    units = missing_units(grid, trainings, missing)
    judgeable = [unit for unit in units if unit.kind in spent]
    failures = [read_failure(failure_path(grid.out, unit)) for unit in units]
    seconds = sum((Forecast(judgeable, spent).seconds_by_kind or {}).values())
    return MissingCells(
        grid.learning_rates,
        grid.seeds,
        cells,
        workers=count_workers(engine),
        seconds_of_one_worker=seconds if judgeable or not missing else None,
        known_trainings=len(judgeable),
        unknown_trainings=len(missing) - len(judgeable),
        failed=[failure for failure in failures if failure is not None],
    )


def grid_units(grid: Grid, trainings: Iterable[SharedTraining]) -> list[Unit]:
    """Make a unit of each training, and before them a unit for each (model, task) that encodes its texts. The cost of a
    training is the size of its model's weights."""
    named = {find_task(task).name: task for task in grid.tasks}  # a name, or a file
    encodings: dict[str, Unit] = {}
    units = []
    for cells in trainings:
        first = cells[0]
        tasks = [cell.task.name for cell in cells]
        model = first.model.name
        config = first.config
        trained_on = first.train.task.name
        shared = {"model": model, "config": config, "data_dirs": dict(grid.data_dirs)}
        encoded = tasks if first.task.part_of else [trained_on, *tasks]
        needs = {f"encode {task} for {model}": named.get(task, task) for task in encoded}
        for name, task in needs.items():
            if name not in encodings:
                encodings[name] = Unit(name, encode_unit, shared | {"task": task}, affinity=model, size=0)
        units.append(
            Unit(
                f"{', '.join(tasks)} · {model} · lr {config.learning_rate!r} · seed {config.seed}",
                fit_unit,
                shared | {"tasks": [named[task] for task in tasks], "out": grid.out},
                affinity=f"{model} {trained_on}",
                needs=tuple(needs),
                kind=trained_on,
                cost=float(sum(path.stat().st_size for path in first.model.folder.glob("*.safetensors"))),
                size=len(cells),
                file=first.folder(grid.out).name,
            )
        )
    return [*encodings.values(), *units]


def word_units(
    settings: Iterable[tuple[str, FinetuneConfig]], due: Collection[str], out: Path, data_dirs: DataDirs
) -> list[Unit]:
    """Make a unit that scores words alone for each task that has cells in `due`, or no such score below `out` yet.
    `settings`: the task, by name or file, and the configuration of every cell."""
    stored = {score.task for score in read_word_scores(out)}
    configs: dict[str, dict[FinetuneConfig, None]] = {}
    for task, config in settings:
        configs.setdefault(task, {})[config.model_copy(update={"learning_rate": 1.0})] = None
    units = []
    for task, different in configs.items():
        if find_task(task).kind.words and (find_task(task).name in due or find_task(task).name not in stored):
            arguments = {"task": task, "configs": [*different], "out": out / WORD_SCORES, "data_dirs": dict(data_dirs)}
            units.append(Unit(f"score words alone on {task}", words_unit, arguments, size=0))
    return units


def measure_grid(grid: Grid, trainings: Iterable[SharedTraining]) -> dict[str, Pace]:
    """Measure the finished trainings of a grid, as `measure_cells` does."""
    finished: list[SharedTraining] = []
    scores: list[Score] = []
    for training in trainings:
        folders = [cell.folder(grid.out) for cell in training if cell.is_finished(grid.out)]
        training_scores = [score for folder in folders for score in read_scores(folder).scores]
        scores += training_scores
        finished += [training] if training_scores else []
    return measure_cells(grid_units(grid, finished), scores)


def measure_cells(finished: Iterable[Unit], scores: Iterable[Score]) -> dict[str, Pace]:
    """Measure the pace of finished trainings by the task that they train on, for forecasts. `finished` are the units of
    these scores."""
    costs: dict[str, list[float]] = {}
    for unit in finished:
        costs.setdefault(unit.kind, []).append(unit.cost)
    paces = {}
    for task, spent in measure_trainings(scores).items():
        if sum(costs.get(task, ())):
            paces[task] = Pace(spent.seconds / spent.trainings * len(costs[task]), sum(costs[task]))
    return paces


# Work of a worker, which alone loads PyTorch


def encode_unit(model: str, task: str, config: FinetuneConfig, data_dirs: DataDirs) -> list[str]:
    from biphase.finetuning.encoding_cache import load_encoded
    from biphase.finetuning.heads import load_encoder

    encoder, evaluation = load_encoder(model), find_task_sources(task, data_dirs)[1]
    load_encoded(evaluation, encoder, config)
    return tell_trained(encoder, evaluation, config)


def words_unit(task: str, configs: Sequence[FinetuneConfig], out: Path, data_dirs: DataDirs) -> list[str]:
    return [*map(tell_word_score, score_words(*find_task_sources(task, data_dirs), configs, out))]


def fit_unit(
    model: str, tasks: Sequence[str], config: FinetuneConfig, out: Path, data_dirs: DataDirs, label: str | None = None
) -> list[str]:
    from biphase.finetuning.fit import fit_cells

    return [score.headline() for score in fit_cells(plan_cells(model, tasks, config, data_dirs, label), out)]


# The best fine-tuned network of each model and task

BestCells = dict[Path, list[CellPlan]]
"""The cells of one model and task, by the folder for the best of them."""

OTHER_GRID = "holds a network of other settings or data"


def refuse_keep(grid: Grid, part: str | None, engine: EngineKind) -> None:
    """Raise `InputError` for a command that cannot keep networks, or would train them on another machine than cells."""
    if not grid.models or part is not None:
        raise InputError("`keep` needs a model to fine-tune, and does not go with `part`")
    if engine == "ray":
        remedy = "run the grid without `keep` first; then, on the machine that shall train the kept networks, run"
        same = "the same command without `engine` and with the cells' precision=…"
        raise InputError(f"`keep` would train on this machine, not on the cluster: {remedy} {same}")


def check_keep(trainings: Iterable[SharedTraining], folder: Path) -> BestCells:
    """Group the cells by their folder `folder/MODEL-TASK`. Raises `InputError`, before anything trains, for a folder
    with other contents than a kept network or with that of another grid, two models of one name, and a network that
    cannot be kept."""
    from biphase.finetuning.heads import open_encoder
    from biphase.finetuning.keeping import check_keepable

    candidates: BestCells = {}
    for cell in chain(*trainings):
        name = re.sub(r"[^\w.@-]", "-", short_name(cell.model.name))
        target = folder / f"{name}-{cell.task.name}"
        cells = candidates.setdefault(target, [])
        cells.append(cell)
        if cell.model != cells[0].model:
            raise InputError(f"`keep`: two models would be written to {target}; rename the folder of one")
    for target, cells in candidates.items():
        check_keepable(open_encoder(cells[0].model), cells[0].task, cells[0].config)
        if not (target / RECORD).is_file():
            refuse_filled(target)
        if read_kept_cell(target) not in (None, *(cell.hash for cell in cells)):
            raise InputError(f"{target} {OTHER_GRID}: give `keep` another folder, or remove it")
    return candidates


def keep_best_networks(candidates: BestCells, out: Path) -> None:
    """Train the best cell of each model and task again, and keep its network: the seed with the best validation score
    at the rate that validation chooses over all seeds.

    Leave a folder with that network as it is, and one in which another command has kept a network of none of these
    cells meanwhile; replace a network of another of these cells, unless somebody changed its files. Keep nothing while
    cells of the model and task are missing.
    """
    from biphase.finetuning.keeping import fit_and_keep

    for target, cells in candidates.items():
        model, task = cells[0].model.name, cells[0].task
        num_missing = sum(not cell.is_finished(out) for cell in cells)
        if num_missing:
            err.print(f"{target}: not kept, {num_missing} of {len(cells)} cells of {model} on {task.name} are missing")
            continue
        scores = {cell.hash: read_score(cell.folder(out)) for cell in cells}
        if all(score.diverged for score in scores.values()):
            err.print(f"{target}: not kept, every cell of {model} on {task.name} diverged")
            continue
        rate = choose_rate(validation_by_rate(scores.values(), task.metric))
        at_rate = [cell for cell in cells if cell.config.learning_rate == rate and not scores[cell.hash].diverged]
        best = max(at_rate, key=lambda cell: scores[cell.hash].metrics["validation"][task.metric])
        kept = read_kept_cell(target)
        if kept == best.hash:
            err.print(f"{target}: already holds the best network")
            continue
        if kept is not None and kept not in scores:
            err.print(f"{target}: not replaced, it {OTHER_GRID}; give --keep another folder")
            continue
        refuse_foreign(target, "fine-tuned model")  # before a training that could not be kept there
        fit_and_keep(best, out, target)
        if read_kept_cell(target) == best.hash:
            err.print(f"{target}: kept, learning rate {rate:g}, seed {best.config.seed}")
        else:
            err.print(f"{target}: not kept, the best cell diverged when it trained again")


def read_kept_cell(folder: Path) -> str | None:
    """Read the hash of the cell whose network a folder holds; "" if it does not say so, None without a network."""
    path = folder / RECORD
    return str(read_json_as(path, dict[str, Any]).get("cell") or "") if path.is_file() else None
