"""A plan is done: its runs and cells are units, in the order of their needs, on whatever is free.

What the study's folder has is never done again (`study.folder`), so the same command goes on. Any number of processes
may work on one folder: each leaves alone what another one is at, and waits for it where it needs it. A worker trains a
run or fits a cell; PyTorch is loaded there only.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from biphase.console import duration, err
from biphase.corpus.shards import read_shard_manifest
from biphase.engine.local import Engine, Unit
from biphase.engine.scheduler import Failure, Forecast, read_failures, run_batch
from biphase.errors import EXIT_BUSY, STOPPED, BusyError, InputError, StoppedError
from biphase.files import locked, read_json_as, write_json, write_text
from biphase.finetuning.cells import plan_cells
from biphase.finetuning.scores import measure_trainings
from biphase.hub import refuse_missing
from biphase.machine import grace, stop_signals
from biphase.recipe import Recipe
from biphase.run import Run, whole_steps
from biphase.study.cost import cell_costs, measure_sizes
from biphase.study.folder import (
    StudyFolder,
    StudyState,
    TrainedRecord,
    drop_checkpoints,
    find_record,
    find_step,
    is_complete,
    list_sets,
    needed_steps,
    reach_step,
    read_state,
    refuse_other_text,
    train_name,
)
from biphase.study.hypotheses import declare
from biphase.study.plan import Plan, StudyCell
from biphase.study.spec import EMBED, EmbedEvaluation, find_data_dirs, scored_as
from biphase.study.trunks import PlannedRun
from biphase.tasks.sources import HUB, dir_of, find_source
from biphase.tasks.spec import find_task

TICK_SECONDS = 10.0
"""How much of its time a killed run loses at most."""


def train_unit(plan: Plan, run: str, folder: StudyFolder, processes: int) -> list[str]:
    """Train a run, or make the checkpoints that it still lacks, and record its folder.

    Raises `BusyError` when another process is at it.
    """
    planned, name, clock = plan.runs[run], train_name(run), folder.clock(run)
    with locked(folder.lock(run), busy=f"another process is at {name}"):
        if is_complete(plan, folder, planned):
            return [f"{name}: done by another process"]
        recipe = planned.recipe
        keep = tuple(step - planned.first for step in needed_steps(plan, folder, planned))
        changes: dict[str, Any] = {"checkpoints": recipe.checkpoints.model_copy(update={"keep": keep})}
        if planned.parent is not None:
            checkpoint = reach_step(folder, plan.runs[planned.parent], planned.first)
            changes["init"] = recipe.init.model_copy(update={"checkpoint": checkpoint})
        recipe = recipe.model_copy(update=changes)
        # What training has taken before: by its clock, else by its record. A folder that has neither is untimed, and
        # what a clock says of a run whose folder was removed counts no more.
        begun = tuple(sorted(path.name for path in folder.runs.glob(f"{run}-????????")))
        before = read_json_as(clock, TrainedRecord) if clock.exists() and begun else None
        if before is None or before.key != planned.key:
            before = find_record(folder, planned) or TrainedRecord("", planned.key, 0.0, untimed=begun)
        with keep_time(clock, before) as so_far:
            path = train_here(recipe, folder) if processes == 1 else train_by_torchrun(recipe, folder, processes)
        timed = so_far()
        from biphase.pretraining.checkpoint import read_checkpoint_manifest

        # The fingerprints of the shard sets that it was trained on, as its last checkpoint says them.
        steps = whole_steps(Run(path))
        manifest = read_checkpoint_manifest(Run(path).steps / str(steps[-1]), check_files=False) if steps else None
        text = manifest.data_history[-1][1] if manifest and manifest.data_history else None
        record = replace(timed, folder=path.name, text=text)
        write_json(clock, asdict(record))
        clock.replace(folder.record(run))
    last = f", {duration(record.seconds - before.seconds)} of it since it went on" if before.seconds else ""
    return [f"{name}: {recipe.num_steps:,} steps in {duration(record.seconds)}{last}"]


@contextmanager
def keep_time(clock: Path, before: TrainedRecord) -> Iterator[Callable[[], TrainedRecord]]:
    """Add the time of the block to `before` in the file `clock`, every few seconds, for a kill gives no notice; the
    function says what it is so far."""
    started = time.perf_counter()
    over = threading.Event()

    def so_far() -> TrainedRecord:
        return replace(before, seconds=round(before.seconds + time.perf_counter() - started, 1))

    def note() -> None:
        with suppress(OSError):  # a full disk ends the training itself, and its error is to be seen
            write_json(clock, asdict(so_far()))

    def tick() -> None:
        while not over.wait(TICK_SECONDS):
            note()

    note()
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield so_far
    finally:
        over.set()
        thread.join()
        note()


def train_here(recipe: Recipe, folder: StudyFolder) -> Path:
    from biphase.pretraining.loop import train

    return train(recipe, folder.runs).path


def train_by_torchrun(recipe: Recipe, folder: StudyFolder, processes: int) -> Path:
    """Train as `biphase pretrain` does under torchrun; what it prints goes to runs/NAME.log. SIGTERM is passed on, and
    raises `StoppedError` when all its processes have ended."""
    folder.runs.mkdir(parents=True, exist_ok=True)
    recipe_file, log = folder.runs / f"{recipe.name}.yaml", folder.runs / f"{recipe.name}.log"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    command = [sys.executable, "-m", "biphase.distributed", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "biphase", "pretrain", str(recipe_file), "--runs", str(folder.runs)]
    signals: list[int] = []
    with open(log, "ab") as file:
        begin = file.tell()
        # It ends with this process, however that ends: BIPHASE_PARENT.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BIPHASE_PARENT": str(os.getpid())}
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

        def pass_on(number: int) -> None:
            if not signals:
                err.print(f"waiting up to {grace():.0f} s for {processes} processes to save their state", markup=False)
            signals.append(number)
            child.terminate()

        with stop_signals(pass_on):
            code = child.wait()
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    last_words = next((line for line in reversed(lines) if line.startswith("biphase: ")), (lines or [""])[-1])
    last_words = last_words.removeprefix("biphase: ")
    if signals or code == 128 + signal.SIGTERM:
        raise StoppedError(last_words or STOPPED, *signals[:1])
    if code == EXIT_BUSY:
        raise BusyError(last_words)
    if code:
        raise InputError(f"torchrun ended with exit code {code}: {last_words}; see {log}")
    printed = {Path(line).name for line in lines}  # `pretrain` says the folder of its run
    done = [path for path in folder.runs.glob(f"{recipe.name}-????????") if path.name in printed and Run(path).is_done]
    if len(done) != 1:
        raise InputError(f"torchrun ended well but did not say which run is done; see {log}")
    return done[0]


def score_unit(
    cell: StudyCell,
    run: PlannedRun,
    step: int,
    folder: StudyFolder,
    data_dirs: dict[str, str],
    embed: EmbedEvaluation | None,
) -> list[str]:
    """Fit one cell of the model that a step of a run is, or make an embedding model of it as `embed` says."""
    reference, out = reach_step(folder, run, step), folder.scores(cell.model)
    if embed is None:
        from biphase.finetuning.fit import fit_cells

        scores = fit_cells(plan_cells(reference, cell.evaluates, cell.config, data_dirs, label=cell.model), out)
        return [f"{cell.name}: {'; '.join(score.headline() for score in scores)}"]
    from biphase.embedding.embed import score_embedding

    recipe = embed.model_dump(mode="json")["recipe"]
    scores = score_embedding(reference, cell.model, recipe, embed.tasks, embed.name, cell.config, out)
    shown = [f"{score.task} {score.metrics['test'][score.metric]:.2%}" for score in scores]
    return [f"{cell.name}: {'; '.join(shown)}"]


TRAINING = "train"
"""The kind of the units that are training runs; in place of a unit's name, all of them."""
CELLS = "cells"
"""In place of a unit's name, all cells of models that are trained."""


def run_study(
    plan: Plan, folder: StudyFolder, engine: Engine, processes: int = 1, only: str | None = None
) -> list[Failure]:
    """Do all that is missing, or `only` one unit, all of `train` or the `cells`; returns what failed. A failure blocks
    only what needs it.

    `processes` above 1 trains each run under torchrun, on so many devices of its machine. Raises `InputError` as
    `refuse_other_text` and `choose_units` do, and for shards and folders of models that are not there.
    """
    # 1. All units of the plan, and which of them are done.
    units = {unit.name: unit for unit in study_units(plan, folder, processes)}
    costs = {name: unit.cost for name, unit in units.items()}
    state = read_state(plan, folder)
    done = state.done
    if plan.study.hypotheses:
        declare(plan, folder.path, len(done))
    refuse_other_text(state)
    # 2. Before hours of training: is the data of all tasks here, and is there what is asked for?
    if only != TRAINING and units.keys() - done:
        look_for_data(plan)
    if only is not None:
        units = choose_units(units, only, done)
    # 3. What is left: without needs that are done, and a run that has begun at the cost of its steps to come.
    drop_checkpoints(plan, folder)  # also what a killed process was just removing
    left = []
    for name, cost in costs_left(state, costs).items():
        if name in units:
            left.append(replace(units[name], needs=tuple(set(units[name].needs) - done), cost=cost))
    recipes = [plan.runs[unit.arguments["run"]].recipe for unit in left if unit.kind == TRAINING]
    for path in {path for recipe in recipes for path in list_sets(recipe.data)}:
        read_shard_manifest(Path(path))
    for model in {recipe.init.model for recipe in recipes if recipe.init.model is not None}:
        refuse_missing(model)
    # 4. The engine does it, and checkpoints go as soon as nobody needs them.
    return run_batch(
        left,
        engine,
        folder.path,
        label="study",
        things="units",
        num_done=len(units) - len(left),
        waits_for_busy=True,
        on_done=lambda unit: drop_checkpoints(plan, folder) if unit.kind == TRAINING else None,
        spent=measure_units(state, costs),
    )


def choose_units(units: Mapping[str, Unit], only: str, done: Set[str]) -> dict[str, Unit]:
    """Choose all training runs, the cells that need none any more, or one unit by its name. Raises `InputError` where
    there is none, or something is to be done before it."""
    if only == TRAINING:
        return {name: unit for name, unit in units.items() if unit.kind == TRAINING}
    if only == CELLS:
        cells = {name: unit for name, unit in units.items() if unit.kind != TRAINING}
        ready = {name: unit for name, unit in cells.items() if not set(unit.needs) - done}
        if len(ready) < len(cells):
            err.print(f"{len(cells) - len(ready)} cells left out: their models are not trained")
        return ready
    if only not in units:
        close = get_close_matches(only, [TRAINING, CELLS, *units], 1)
        hint = f"did you mean '{close[0]}'?" if close else f"they are called such as '{next(iter(units))}'"
        raise InputError(f"no unit '{only}' in this study; {hint}")
    lacking = sorted(set(units[only].needs) - done)
    if only not in done and lacking:
        raise InputError(f"'{only}' needs '{lacking[0]}', which is not done yet")
    return {only: units[only]}


def measure_units(state: StudyState, costs: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Add up seconds and costs of what is done, by the kind of the units: what tells how long the rest takes, from the
    first unit of a sitting on."""
    timed = {name: state.records[name].seconds for name in state.trained if state.records[name].is_timed}
    spent = {TRAINING: (sum(timed.values()), sum(costs[train_name(name)] for name in timed))}
    costs_of_tasks: dict[str, list[float]] = {}
    for cell in state.plan.cells:
        if cell.name in state.scored:
            costs_of_tasks.setdefault(cell.task, []).append(costs[cell.name])
    measured = measure_trainings(score for scores in state.scores.values() for score in scores.scores)
    for task, of_task in costs_of_tasks.items():
        if (name := scored_as(task)) in measured:
            num, _, seconds = measured[name]
            spent[task] = (seconds / num * len(of_task), sum(of_task))
    return {kind: values for kind, values in spent.items() if values[1]}


def costs_left(state: StudyState, costs: Mapping[str, float]) -> dict[str, float]:
    """Count what the units that are not done have yet to compute, by their names, in the order of the plan."""
    left = {}
    for run in state.plan.runs.values():
        if run.name not in state.trained:  # one step at least, where only a checkpoint is to be made
            steps = max(run.steps - state.begun.get(run.name, 0), 1)
            left[train_name(run.name)] = costs[train_name(run.name)] * steps / run.steps
    return left | {cell.name: costs[cell.name] for cell in state.plan.cells if cell.name not in state.scored}


@dataclass(frozen=True)
class StatusLine:
    """One line of `study status`: the runs, or the cells of a task."""

    name: str
    done: int
    running: int
    """Begun and not done; whether a process is at it now is not looked for."""
    failed: int
    total: int
    seconds_left: float | None
    """How long one worker needs, as the bar of `study run` tells it; None before anything is done."""


def status(state: StudyState) -> dict[str, Any]:
    """Tell how far a study is (`OpenStudy.progress`)."""
    plan, done_units = state.plan, state.done
    kinds = {train_name(name): TRAINING for name in plan.runs} | {cell.name: cell.task for cell in plan.cells}
    # What failed as another version of the study file had it may be done as this one has it, or not asked for.
    failures = [failure for failure in read_failures(state.folder.path) if failure.unit in kinds.keys() - done_units]
    costs = estimate_costs(plan)
    forecast = Forecast((), measure_units(state, costs))
    for name, cost in costs_left(state, costs).items():
        forecast.left[kinds[name]] += cost
    seconds_left, lines, notes = forecast.seconds_by_kind, [], []
    done = Counter(kinds[name] for name in done_units)
    failed = Counter(kinds[name] for name in {failure.unit for failure in failures})
    for kind, total in Counter(kinds.values()).items():
        left = None if seconds_left is None else seconds_left.get(kind, 0.0)
        running = len(state.begun) if kind == TRAINING else 0
        name = kind if kind == TRAINING else scored_as(kind)
        lines.append(StatusLine(name, done[kind], running, failed[kind], total, left))
        if kind != TRAINING and not kind.startswith(EMBED) and not done[kind] and find_task(kind).size is None:
            notes.append(f"how long {name} takes is a guess until its first cell is done")
    units_of_seeds: list[set[str]] = [set() for _ in range(plan.num_seeds)]
    for name in plan.runs:
        units_of_seeds[plan.arms[name].seed].add(train_name(name))
    seed_of = {model.name: model.seed for model in plan.models}
    for cell in plan.cells:
        units_of_seeds[seed_of[cell.model]].add(cell.name)
    seeds = []
    for seed, units in enumerate(units_of_seeds):
        told = "done" if units <= done_units else f"{len(units & done_units)} of {len(units)} units"
        seeds.append(f"pretraining seed {seed}: {told}")
    causes = [failure for failure in failures if not failure.is_blocked]
    return {
        "lines": lines,
        "seeds": seeds if plan.num_seeds > 1 else [],
        "notes": sorted(notes),
        "failed": causes,
        "num_waiting": len(failures) - len(causes),
    }


def study_units(plan: Plan, folder: StudyFolder, processes: int = 1) -> list[Unit]:
    """Make a unit of each run and of each cell, by the names that `study status` and `--unit` know.

    Each pretraining seed is a wave: a study that is stopped has whole seeds, as far as it came.
    """
    costs, evaluation = estimate_costs(plan), plan.study.evaluation
    trained = replace(plan, cells=())
    units = []
    for run in plan.runs.values():
        name, wave = train_name(run.name), plan.arms[run.name].seed
        arguments = {"plan": trained, "run": run.name, "folder": folder, "processes": processes}
        needs = (train_name(run.parent),) if run.parent else ()
        units.append(Unit(name, train_unit, arguments, needs=needs, kind=TRAINING, cost=costs[name], wave=wave))
    if evaluation is None:
        return units
    models = {model.name: model for model in plan.models}
    is_there = {name: find_step(folder, plan.runs[model.run], model.step) for name, model in models.items()}
    shared = {"folder": folder, "data_dirs": find_data_dirs(evaluation)}
    for cell in plan.cells:
        model, embed = models[cell.model], evaluation.embed if cell.task.startswith(EMBED) else None
        arguments = {"cell": cell, "run": plan.runs[model.run], "step": model.step, "embed": embed, **shared}
        needs = () if is_there[model.name] else (train_name(model.run),)
        affinity, cost = f"{cell.model} {cell.task}", costs[cell.name]
        units.append(Unit(cell.name, score_unit, arguments, affinity, needs, cell.task, cost, wave=model.seed))
    return units


def look_for_data(plan: Plan) -> None:
    """Raises `InputError` for a task whose data are not here, before hours of training; the hub is not asked."""
    evaluation = plan.study.evaluation
    if evaluation is None:
        return
    folders = find_data_dirs(evaluation)
    for path in () if evaluation.embed is None else evaluation.embed.data:
        if not Path(path).exists():
            raise InputError(f"evaluation.embed: {path} does not exist")
    for name in dict.fromkeys([*evaluation.tasks, *(find_task(task).trained_on or task for task in evaluation.tasks)]):
        task = find_task(name)
        folder = dir_of(task, folders)
        if folder is not None and folder != str(HUB):
            find_source(task, Path(folder))
        elif task.hub is None:
            find_source(task, None if folder is None else HUB)


def estimate_costs(plan: Plan) -> dict[str, float]:
    """Estimate what each unit computes, by its name: FLOPs, or tokens where the size of a network is not known."""
    try:
        sizes = measure_sizes(plan)
    except InputError:  # cells do without the shards, which say how large the vocabulary is
        sizes = None
    has_flops = sizes is not None and None not in sizes.shapes.values()
    costs: dict[str, float] = {}
    for run in plan.runs.values():
        flops = sum(sizes.flops(run).values()) if sizes is not None else 0.0
        costs[train_name(run.name)] = flops if has_flops else float(run.tokens)
    for cell, (_, tokens, flops) in zip(plan.cells, cell_costs(plan, sizes), strict=True):
        costs[cell.name] = flops if has_flops else tokens
    return costs
