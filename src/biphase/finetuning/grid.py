"""Models × tasks × rates × seeds → cells. The missing ones are run, by workers here or on a Ray cluster, none twice.

PyTorch is loaded by the workers only.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from biphase.console import err
from biphase.engine.local import Engine, Unit
from biphase.engine.scheduler import Failure, run_batch, run_units
from biphase.errors import InputError, refuse_doubles
from biphase.files import read_json_as, refuse_filled
from biphase.finetuning.cells import (
    CellPlan,
    DataDirs,
    find_task_sources,
    identify,
    plan_cell,
    plan_cells,
    resolve_precision,
)
from biphase.finetuning.choosing import choose_rate, validation_by_rate
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.kept import RECORD
from biphase.finetuning.scores import Score, measure_trainings, read_score, short_name
from biphase.tasks.spec import find_task

PAPER_LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
PAPER_SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Grid:
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    config: FinetuneConfig
    """The settings of all cells, apart from rate and seed."""
    out: Path
    learning_rates: tuple[float, ...] = PAPER_LEARNING_RATES
    seeds: tuple[int, ...] = PAPER_SEEDS
    data_dirs: DataDirs = field(default_factory=dict)


@dataclass(frozen=True)
class SharedTraining:
    """One training and the cells that it gives: several where tasks share it (`Task.trained_on`)."""

    model: str
    cells: tuple[CellPlan, ...]

    @property
    def config(self) -> FinetuneConfig:
        """The same for all cells: they are of one family."""
        return self.cells[0].config

    @property
    def name(self) -> str:
        tasks = ", ".join(cell.task.name for cell in self.cells)
        return f"{tasks} · {self.model} · lr {self.config.learning_rate!r} · seed {self.config.seed}"


def plan_grid(grid: Grid) -> list[SharedTraining]:
    """All trainings of a grid, finished or not. Reads models and data to hash them; loads neither.

    Raises `InputError` for an unknown task, a model or data that are not there, and for what is named twice.
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
    base, trainings = resolve_precision(grid.config), []
    for model, identity in models.items():
        shared: dict[tuple[str, FinetuneConfig], list[CellPlan]] = {}  # tasks of one training may settle differently
        for task, rate, seed in product(grid.tasks, grid.learning_rates, grid.seeds):
            config = base.model_copy(update={"learning_rate": rate, "seed": seed})
            cell = plan_cell(identity, *sources[task], config)
            shared.setdefault((cell.train.hash, cell.config), []).append(cell)
        trainings += [SharedTraining(model, tuple(cells)) for cells in shared.values()]
    return trainings


def missing_trainings(trainings: Iterable[SharedTraining], out: Path) -> list[SharedTraining]:
    """The trainings with a cell that is not finished, each with its missing cells only."""
    missing = []
    for training in trainings:
        cells = tuple(cell for cell in training.cells if not cell.is_finished(out))
        missing += [SharedTraining(training.model, cells)] if cells else []
    return missing


def read_finished(trainings: Iterable[SharedTraining], out: Path) -> list[Score]:
    return [read_score(cell.folder(out)) for training in trainings for cell in training.cells if cell.is_finished(out)]


def choose_part(trainings: Sequence[SharedTraining], part: str) -> list[SharedTraining]:
    """`3/16`: every sixteenth training, from the third (parts count from 0). For the arrays of Slurm and the like."""
    number, _, total = part.partition("/")
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", part) or int(number) >= int(total):
        raise InputError(f"part '{part}' must be NUMBER/TOTAL with NUMBER from 0 to TOTAL - 1, such as 0/16")
    return list(trainings[int(number) :: int(total)])


def resolve_for(config: FinetuneConfig, engine: Engine) -> FinetuneConfig:
    """The configuration with a `precision` of `auto` replaced by what it means where the engine's units run.

    A part of the cells' names, so it must be known before. A Ray cluster is asked, by a unit: this process may stand
    where there is no GPU. Raises `InputError` when it has no answer.
    """
    if engine.kind == "local" or config.precision != "auto":
        return resolve_precision(config)
    [outcome] = run_units([Unit("find out the precision", resolve_precision, {"config": config})], engine)
    if outcome.error is not None:
        raise InputError(f"{outcome.name}: {outcome.error}")
    return FinetuneConfig.model_validate(outcome.value)


def run_grid(grid: Grid, trainings: Sequence[SharedTraining], engine: Engine) -> list[Failure]:
    """Run the given trainings, after one unit for each (model, task) that turns the task's texts into token ids.

    Trainings on one task take time by the size of their model's weights. Returns what failed; cells that another
    process is at are left to it.
    """
    named = {find_task(task).name: task for task in grid.tasks}  # by its name, or by its file
    encodings: dict[str, Unit] = {}
    units = []
    for training in trainings:
        model, cells = training.model, training.cells
        trained_on = cells[0].train.task.name
        shared = {"model": model, "config": training.config, "data_dirs": dict(grid.data_dirs)}
        tasks = [cell.task.name for cell in cells]
        encoded = tasks if cells[0].task.part_of else [trained_on, *tasks]
        needs = {f"encode {task} for {model}": named.get(task, task) for task in encoded}
        for name, task in needs.items():
            if name not in encodings:
                encodings[name] = Unit(name, encode_unit, shared | {"task": task}, affinity=model, size=0)
        units.append(
            Unit(
                training.name,
                fit_unit,
                shared | {"tasks": [named[task] for task in tasks], "out": grid.out},
                affinity=f"{model} {trained_on}",
                needs=tuple(needs),
                kind=trained_on,
                cost=float(sum(path.stat().st_size for path in cells[0].model.folder.glob("*.safetensors"))),
                size=len(cells),
                file=cells[0].folder(grid.out).name,
            )
        )
    return run_batch([*encodings.values(), *units], engine, grid.out, label="evaluate", things="cells")


def estimate_seconds(trainings: Sequence[SharedTraining], finished: Iterable[Score]) -> tuple[float, int]:
    """Seconds of one worker for these trainings, as long as finished ones on the same task took on average with their
    evaluations; and how many trainings are on tasks of which none is finished."""
    measured = measure_trainings(finished)
    total, num_unknown = 0.0, 0
    for training in trainings:
        num, _, seconds = measured.get(training.cells[0].train.task.name, (0, 0, 0.0))
        if num:
            total += seconds / num
        else:
            num_unknown += 1
    return total, num_unknown


# What a worker does. PyTorch is loaded there only


def encode_unit(model: str, task: str, config: FinetuneConfig, data_dirs: DataDirs) -> list[str]:
    from biphase.finetuning.fit import load_encoded
    from biphase.finetuning.heads import check_length, load_encoder

    encoder = load_encoder(model)
    check_length(encoder, config)
    load_encoded(find_task_sources(task, data_dirs)[1], encoder.tokenizer, config)
    return []


def fit_unit(model: str, tasks: list[str], config: FinetuneConfig, out: Path, data_dirs: DataDirs) -> list[str]:
    from biphase.finetuning.fit import fit_cells

    plans = plan_cells(model, tasks, config, data_dirs)
    return [score.headline() for score in fit_cells(plans, out)]


# What is kept of a grid: the best fine-tuned network of each model and task

BestCells = dict[tuple[str, str], tuple[Path, list[CellPlan]]]
"""For each model and task, the folder to write and the cells to choose from."""


def check_keep(trainings: Iterable[SharedTraining], folder: Path) -> BestCells:
    """Each model and task is kept in `folder/MODEL-TASK`.

    Raises `InputError`, before anything is trained, for a folder of other things than a kept network, two models of
    one name, and a network that cannot be kept.
    """
    from biphase.finetuning.heads import open_encoder
    from biphase.finetuning.keep import check_keepable

    candidates: BestCells = {}
    for training in trainings:
        name = re.sub(r"[^\w.@-]", "-", short_name(training.model))
        for cell in training.cells:
            target = folder / f"{name}-{cell.task.name}"
            candidates.setdefault((training.model, cell.task.name), (target, []))[1].append(cell)
    [(target, times)] = Counter(target for target, _ in candidates.values()).most_common(1)
    if times > 1:
        raise InputError(f"`keep`: two models would be written to {target}; rename the folder of one")
    for target, cells in candidates.values():
        check_keepable(open_encoder(cells[0].model), cells[0].task, cells[0].config)
        if not (target / RECORD).is_file():
            refuse_filled(target, "keep")
    return candidates


def keep_best_networks(candidates: BestCells, out: Path) -> None:
    """Train the best cell of each model and task once more, and keep its network: at the rate that validation chooses
    over all seeds, the seed that is best on validation.

    One that is kept already stays, another one of ours is replaced. While cells are missing nothing is kept.
    """
    from biphase.finetuning.fit import fit_cells

    for (model, task), (target, cells) in candidates.items():
        num_missing = sum(not cell.is_finished(out) for cell in cells)
        if num_missing:
            err.print(f"{target}: not kept, {num_missing} of {len(cells)} cells of {model} on {task} are missing")
            continue
        scores = {cell.hash: read_score(cell.folder(out)) for cell in cells}
        by_rate = validation_by_rate(scores.values(), cells[0].task.metric)
        if all(score.diverged for score in scores.values()):
            err.print(f"{target}: not kept, every cell of {model} on {task} diverged")
            continue
        rate = choose_rate(by_rate)
        at_rate = [cell for cell in cells if cell.config.learning_rate == rate and not scores[cell.hash].diverged]
        best = max(at_rate, key=lambda cell: scores[cell.hash].metrics["validation"][cell.task.metric])
        if (target / RECORD).is_file() and read_json_as(target / RECORD, dict[str, Any]).get("cell") == best.hash:
            err.print(f"{target}: the best, as it was kept before")
            continue
        fit_cells([best], out, keep=target)
        err.print(f"{target}: kept, learning rate {rate:g}, seed {best.config.seed}")
