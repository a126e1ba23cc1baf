"""A plan is done: its runs and cells are units, in the order of their needs, on whatever is free.

What the study's folder has is never done again (`study.folder`), so the same command goes on. Any number of processes
may work on one folder: each leaves alone what another one is at, and waits for it where it needs it. A worker trains a
run or fits a cell; PyTorch is loaded there only.
"""

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from biphase.console import duration, err
from biphase.corpus.shards import read_shard_manifest
from biphase.encoder.models import identify
from biphase.engine.local import Engine, Unit
from biphase.engine.scheduler import Failure, Forecast, Pace, run_batch
from biphase.errors import EXIT_BUSY, STOPPED, BusyError, InputError, StoppedError
from biphase.files import locked, write_hashed, write_text
from biphase.finetuning.grid import fit_unit, measure_cells
from biphase.hub import refuse_missing
from biphase.machine import STOPS, grace, python_process, stop_signals
from biphase.recipe import Recipe
from biphase.run import Run, read_checkpoint_manifest, whole_steps
from biphase.studies.cost import cell_costs, measure_sizes, run_flops
from biphase.studies.declarations import declare
from biphase.studies.folder import (
    TRAINING,
    StudyState,
    TrainedRecord,
    drop_checkpoints,
    reach_step,
    read_record,
    read_runs,
    read_state,
    refuse_other_text,
)
from biphase.studies.plan import Plan, PlannedRun, StudyCell, train_name
from biphase.studies.spec import EMBED, Evaluation, find_data_dirs, scored_as
from biphase.tasks.sources import HUB, dir_of, find_source
from biphase.tasks.spec import find_task

TICK_SECONDS = 10.0
"""How much of its time a killed run loses at most."""


def train_unit(plan: Plan, run: str, folder: Path, processes: int) -> list[str]:
    """Train a run, or make the checkpoints that it still lacks, and record its folder.

    Raises `BusyError` when another process is at it.
    """
    planned, name, runs, trained = plan.runs[run], train_name(run), folder / "runs", folder / "trained"
    clock = trained / f".{run}.clock"
    with locked(trained / f".{run}.lock", busy=f"another process is at {name}"):
        state = read_runs(plan, folder)
        if run in state.trained:
            return [f"{name}: done by another process"]
        from biphase.pretraining.loop import train

        recipe = planned.recipe
        keep = tuple(step - planned.first for step in sorted(state.needed[run]))
        changes: dict[str, Any] = {"checkpoints": recipe.checkpoints.model_copy(update={"keep": keep})}
        if planned.parent is not None:
            checkpoint = reach_step(folder, plan.runs[planned.parent], planned.first)
            changes["init"] = recipe.init.model_copy(update={"checkpoint": checkpoint})
        recipe = recipe.model_copy(update=changes)
        # What training has taken before: by its clock, else by its record. A folder that has neither is untimed, and
        # what a clock says of a run whose folder was removed counts no more.
        begun = tuple(sorted(path.name for path in runs.glob(f"{run}-????????")))
        before = read_record(clock) if clock.exists() and begun else None
        if before is None or before.key != planned.key:
            before = state.records.get(run) or TrainedRecord("", planned.key, 0.0, planned.placeless_key, untimed=begun)
        before = replace(before, key=planned.key, placeless_key=planned.placeless_key)
        with keep_time(clock, before) as so_far:
            path = train(recipe, runs).path if processes == 1 else train_by_torchrun(recipe, runs, processes)
        timed = so_far()
        # The fingerprints of the shard sets that it was trained on, as its last checkpoint says them.
        steps = whole_steps(Run(path))
        manifest = read_checkpoint_manifest(Run(path).steps / str(steps[-1]), check_files=False) if steps else None
        text = manifest.texts if manifest else None
        models = {}
        for model in plan.models:
            if model.run == run and model.step in steps:
                identity = identify(f"{path}@{model.step}")
                models[model.step] = identity.hash, identity.max_length
        record = replace(timed, folder=path.name, text=text, models=models)
        write_hashed(clock, to_jsonable_python(record))
        clock.replace(trained / f"{run}.json")
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

    def tick() -> None:
        is_last = False
        while not is_last:
            is_last = over.is_set()
            with suppress(OSError):  # a full disk ends the training itself, and its error is to be seen
                write_hashed(clock, to_jsonable_python(so_far()))
            over.wait(TICK_SECONDS)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield so_far
    finally:
        over.set()
        thread.join()


def train_by_torchrun(recipe: Recipe, runs: Path, processes: int) -> Path:
    """Train as `biphase pretrain` does under torchrun; what it prints goes to runs/NAME.log. SIGTERM is passed on, and
    raises `StoppedError` when all its processes have ended."""
    runs.mkdir(parents=True, exist_ok=True)
    recipe_file, log = runs / f"{recipe.name}.yaml", runs / f"{recipe.name}.log"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    words = ["-m", "biphase.distributed", "--standalone", f"--nproc-per-node={processes}"]
    words += ["-m", "biphase", "pretrain", str(recipe_file), "--runs", str(runs)]
    signals: list[int] = []
    with open(log, "ab") as file:
        begin = file.tell()
        # It ends with this process, however that ends: BIPHASE_PARENT.
        launching = python_process(*words, OMP_NUM_THREADS="1", BIPHASE_PARENT=str(os.getpid()))
        child = subprocess.Popen(**launching, stdout=file, stderr=subprocess.STDOUT)

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
    if signals or code in [128 + number for number in STOPS]:
        raise StoppedError(last_words or STOPPED, *signals[:1])
    if code == EXIT_BUSY:
        raise BusyError(last_words)
    if code:
        raise InputError(f"torchrun ended with exit code {code}: {last_words}; see {log}")
    printed = {Path(line).name for line in lines}  # `pretrain` says the folder of its run
    done = [path for path in runs.glob(f"{recipe.name}-????????") if path.name in printed and Run(path).is_done]
    if len(done) != 1:
        raise InputError(f"torchrun ended well but did not say which run is done; see {log}")
    return done[0]


def score_unit(cell: StudyCell, run: PlannedRun, step: int, folder: Path, evaluation: Evaluation) -> list[str]:
    """Fit one cell of the model that a step of a run is, or make an embedding model of it as the evaluation says."""
    reference, out, embed = reach_step(folder, run, step), folder / "scores" / cell.model, evaluation.embed
    if embed is None or not cell.task.startswith(EMBED):
        data_dirs = find_data_dirs(evaluation)
        lines = fit_unit(reference, cell.evaluates, cell.config, out, data_dirs, label=cell.model)
    else:
        from biphase.embedding.training import score_embedding

        recipe = embed.model_dump(mode="json")["recipe"]
        scores = score_embedding(reference, cell.model, recipe, embed.tasks, embed.name, cell.config, out)
        lines = [f"{score.task} {score.metrics['test'][score.metric]:.2%}" for score in scores]
    return [f"{cell.name}: {'; '.join(lines)}"]


CELLS = "cells"
"""In place of a unit's name, all cells of models that are trained."""


def run_study(plan: Plan, folder: Path, engine: Engine, processes: int = 1, only: str | None = None) -> list[Failure]:
    """Do all that is missing, or `only` one unit, all of `train` or the `cells`; returns what failed. A failure blocks
    only what needs it.

    `processes` above 1 trains each run under torchrun, on so many devices of its machine. Raises `InputError` as
    `refuse_other_text` and `choose_units` do, and for shards and folders of models that are not there.
    """
    # 1. All units of the plan, and which of them are done.
    state = read_state(plan, folder)
    units, done = study_units(state, processes), state.done
    if plan.study.hypotheses:
        declare(plan, folder)
    refuse_other_text(state)
    # 2. Before hours of training: is the data of all tasks here, and is there what is asked for?
    if only != TRAINING and len(units) > len(done):
        look_for_data(plan)
    chosen = units if only is None else choose_units(units, only, done)
    # 3. What is left, and what it needs.
    drop_checkpoints(folder, plan)  # also what a killed process was just removing
    left = [unit for unit in chosen if unit.name not in done]
    recipes = [plan.runs[unit.arguments["run"]].recipe for unit in left if unit.kind == TRAINING]
    for path in {path for recipe in recipes for path in recipe.data.sets}:
        read_shard_manifest(Path(path))
    for model in {recipe.init.model for recipe in recipes if recipe.init.model is not None}:
        refuse_missing(model)
    # 4. The engine does it, and checkpoints go as soon as nobody needs them.
    return run_batch(
        left,
        engine,
        folder,
        label="study",
        things="units",
        num_done=len(chosen) - len(left),
        waits_for_busy=True,
        on_done=lambda unit: drop_checkpoints(folder, plan) if unit.kind == TRAINING else None,
        spent=measure_units(state, units),
    )


def choose_units(units: Sequence[Unit], only: str, done: Set[str]) -> list[Unit]:
    """Choose all training runs, the cells that need none any more, or one unit by its name. Raises `InputError` where
    there is none, or something is to be done before it."""
    if only == TRAINING:
        return [unit for unit in units if unit.kind == TRAINING]
    if only == CELLS:
        cells = [unit for unit in units if unit.kind != TRAINING]
        ready = [unit for unit in cells if not unit.needs]
        if len(ready) < len(cells):
            err.print(f"{len(cells) - len(ready)} cells left out: their models are not trained")
        return ready
    by_name = {unit.name: unit for unit in units}
    if only not in by_name:
        close = get_close_matches(only, [TRAINING, CELLS, *by_name], 1)
        hint = f"did you mean '{close[0]}'?" if close else f"they are called such as '{units[0].name}'"
        raise InputError(f"no unit '{only}' in this study; {hint}")
    unit = by_name[only]
    if unit.needs and only not in done:
        raise InputError(f"'{only}' needs '{unit.needs[0]}', which is not done yet")
    return [unit]


def measure_units(state: StudyState, units: Sequence[Unit]) -> dict[str, Pace]:
    """Add up what is done, by the kind of the units: it tells how long the rest takes, from the first unit of a sitting
    on."""
    records = {train_name(name): record for name, record in state.records.items() if name in state.trained}
    timed = {name: record.seconds for name, record in records.items() if record.is_timed}
    trained = sum(unit.cost for unit in units if unit.name in timed)
    spent = {TRAINING: Pace(sum(timed.values()), trained)} if trained else {}
    scored = [unit for unit in units if unit.name in state.scored]
    return spent | measure_cells(scored, [score for scores in state.scores.values() for score in scores.scores])


@dataclass(frozen=True)
class StudyStatus:
    """How far a study is."""

    study: str
    folder: Path
    lines: list[dict[str, Any]]
    """A row for the training runs, and one for the cells of each task: `begun` are not done, and no
    process may be at them now; `seconds_left` is what one worker needs, as the bar of `study run` tells it, None
    before anything is done."""
    seeds: list[str]
    """How far each of several seeds of pretraining is."""
    notes: list[str]
    """Which times are guesses."""
    failed: list[Failure]
    num_waiting: int
    """How many units need one that failed."""


def status(state: StudyState) -> StudyStatus:
    """Tell how far a study is."""
    plan, units, done, failures = state.plan, study_units(state), state.done, state.read_failures()
    left, failed = [unit for unit in units if unit.name not in done], {failure.unit for failure in failures}
    seconds_left = Forecast(left, measure_units(state, units)).seconds_by_kind
    tasks = [find_task(task) for task in {cell.task for cell in plan.cells} if not task.startswith(EMBED)]
    guessed = {task.name for task in tasks if task.size is None}
    lines, notes = [], []
    for kind, total in Counter(unit.kind for unit in units).items():
        names_left = {unit.name for unit in left if unit.kind == kind}
        num_left, num_begun = len(names_left), len(state.begun) if kind == TRAINING else 0
        line = {"name": kind, "done": total - num_left, "begun": num_begun, "failed": len(names_left & failed)}
        left_of_kind = None if seconds_left is None else seconds_left.get(kind, 0.0)
        lines.append(line | {"total": total, "seconds_left": left_of_kind})
        if num_left == total and kind in guessed:
            notes.append(f"how long {kind} takes is a guess until its first cell is done")
    texts = {path for run in plan.runs if run not in state.trained for path in plan.runs[run].recipe.data.sets}
    absent = [path for path in texts if not Path(path, "manifest.json").exists()]
    notes += [f"{path} holds no shards: what is left to train cannot begin" for path in absent]
    seeds = []
    for seed in range(plan.num_seeds) if plan.num_seeds > 1 else ():
        of_seed = {unit.name for unit in units if unit.wave == seed}
        progress = "done" if of_seed <= done else f"{len(of_seed & done)} of {len(of_seed)} units"
        seeds.append(f"pretraining seed {seed}: {progress}")
    causes = [failure for failure in failures if not failure.is_blocked]
    num_waiting = len(failures) - len(causes)
    return StudyStatus(plan.study.name, state.folder, lines, seeds, sorted(notes), causes, num_waiting)


def study_units(state: StudyState, processes: int = 1) -> list[Unit]:
    """Make a unit of each run and of each cell, by the names that `study status` and `--unit` know; it needs what is
    not done yet.

    It costs what it computes, or computes yet where a run has begun: FLOPs, or tokens where the size of a network is
    not known. Each pretraining seed is a wave: a study that is stopped has whole seeds, as far as it came.
    """
    plan, folder, evaluation = state.plan, state.folder, state.plan.study.evaluation
    sizes = measure_sizes(plan)
    has_flops = all(shape for shape, _ in sizes.values())
    trained = replace(plan, cells=())
    units = []
    for run in plan.runs.values():
        cost = sum(run_flops(run, sizes[run.name]).values()) if has_flops else float(run.tokens)
        cost *= max(run.steps - state.begun.get(run.name, 0), 1) / run.steps  # a step where a checkpoint is to be made
        needs = (train_name(run.parent),) if run.parent and run.parent not in state.trained else ()
        arguments = {"plan": trained, "run": run.name, "folder": folder, "processes": processes}
        name, wave = train_name(run.name), plan.arms[run.name].seed
        units.append(Unit(name, train_unit, arguments, needs=needs, kind=TRAINING, cost=cost, wave=wave))
    if evaluation is None:
        return units
    models = {model.name: model for model in plan.models}
    for cell, (_, tokens, flops) in zip(plan.cells, cell_costs(plan, sizes), strict=True):
        model, run = models[cell.model], plan.runs[models[cell.model].run]
        arguments = {"cell": cell, "run": run, "step": model.step, "folder": folder, "evaluation": evaluation}
        needs = () if model.step in state.steps.get(model.run, ()) else (train_name(model.run),)
        affinity, kind, cost = f"{cell.model} {cell.task}", scored_as(cell.task), flops if has_flops else tokens
        units.append(Unit(cell.name, score_unit, arguments, affinity, needs, kind, cost, wave=model.seed))
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
        if task.hub is None or folder not in (None, str(HUB)):
            find_source(task, folder)
