"""Plan → done: segments and cells in the order of their needs, on whatever is free; the same command goes on.

What the study's folder has is never done again (`study.folder`). Any number of processes may work on one folder: each
leaves alone what another one is at, and waits for it where it needs it.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from biphase import console
from biphase.config import Recipe, parse_config
from biphase.engine.local import Engine
from biphase.engine.units import Outcome, Unit, run_units
from biphase.errors import EXIT_BUSY, BusyError, InputError
from biphase.files import write_json, write_text
from biphase.finetuning.config import FinetuneConfig
from biphase.run import Run, drop_step, open_run, read_recipe
from biphase.study.folder import (
    Failure,
    StudyFolder,
    find_record,
    find_step,
    is_complete,
    is_needed,
    is_trained,
    needed_steps,
    read_state,
    train_name,
    trained_folder,
)
from biphase.study.plan import Plan, plan_study, start_from, weights_tree
from biphase.study.spec import Study
from biphase.tasks.sources import absolute_dir

TRAINING = "train"
"""In folder of a unit's name: all training runs."""
BUSY = "busy"
"""What a unit returns that another process is at."""
POLL_SECONDS = 10.0
"""How often to look again at what other processes are at."""


def run_study(
    plan: Plan, folder: StudyFolder, engine: Engine, processes: int = 1, only: str | None = None
) -> list[Failure]:
    """Do all that is missing, or `only` one unit or all of `train`; returns what failed. A failure blocks only what
    needs it.

    `processes` above 1 trains each run under torchrun, on so many devices of its machine.

    Raises `InputError` when `only` names no unit.
    """
    everything = {unit.name: unit for unit in make_units(plan, folder, processes)}
    done = read_state(plan, folder).done
    if only == TRAINING:
        everything = {train_name(run): everything[train_name(run)] for run in plan.runs}
    elif only is not None:
        if only not in everything:
            close = get_close_matches(only, [TRAINING, *everything], 1)
            raise InputError(f"no unit '{only}' in this study" + (f"; did you mean '{close[0]}'?" if close else ""))
        everything = {only: everything[only]}
        if only not in done and (lacking := set(everything[only].needs) - done):
            raise InputError(f"'{only}' needs '{lacking.pop()}', which is not done yet")
    trainings = {train_name(run) for run in plan.runs}
    failures: dict[str, Failure] = {}
    waiting = False
    with console.track("study", len(everything), "units") as progress:
        progress.advance(len(done & everything.keys()), already_done=True)
        while True:
            left = [unit for name, unit in everything.items() if name not in done and name not in failures]
            is_busy = False
            for outcome in run_units([replace(unit, needs=tuple(set(unit.needs) - done)) for unit in left], engine):
                if outcome.value == BUSY:
                    is_busy = True
                    continue
                settle(folder, outcome, failures, progress)
                if outcome.error is None:
                    done.add(outcome.name)
                    if outcome.name in trainings:
                        drop_checkpoints(plan, folder)
            if not is_busy:
                return list(failures.values())
            if not waiting:
                progress.say("waiting for units that other processes are at")
                waiting = True
            time.sleep(POLL_SECONDS)
            done = read_state(plan, folder).done


def settle(folder: StudyFolder, outcome: Outcome, failures: dict[str, Failure], progress: console.Tracker) -> None:
    path = folder.failure(outcome.name)
    progress.advance(1, outcome.name)
    if outcome.error is None:
        path.unlink(missing_ok=True)
        progress.say(f"{outcome.name}: {outcome.value}")
        return
    failures[outcome.name] = Failure(outcome.name, outcome.error)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"unit": outcome.name, "error": outcome.error, "traceback": outcome.traceback})
    if not failures[outcome.name].is_blocked:
        progress.say(f"{outcome.name}: {outcome.error}")


def make_units(plan: Plan, folder: StudyFolder, processes: int = 1) -> list[Unit]:
    """One for each run and for each cell, by the names that `study status` and `--unit` know."""
    out = str(folder.path.resolve())
    study = plan.study.model_dump(mode="json", exclude={"evaluation"})
    units = []
    for run in plan.runs.values():
        arguments = {"study": study, "run": run.name, "out": out, "processes": processes}
        needs = (train_name(run.parent),) if run.parent else ()
        units.append(Unit(train_name(run.name), train_unit, arguments, needs=needs))
    models = {model.name: model for model in plan.models}
    is_there = {
        name: find_step(folder, model.run, plan.runs[model.run].key, model.step) for name, model in models.items()
    }
    data_dirs = {} if plan.study.evaluation is None else plan.study.evaluation.data_dirs
    resolved = {task: absolute_dir(folder) for task, folder in data_dirs.items()}
    for cell in plan.cells:
        model = models[cell.model]
        settings: dict[str, Any] = {
            "model": model.name,
            "run": model.run,
            "key": plan.runs[model.run].key,
            "step": model.step,
            "tasks": list(cell.evaluates),
            "config": cell.config.model_dump(mode="json"),
            "out": out,
            "data_dirs": resolved,
        }
        needs = () if is_there[model.name] else (train_name(model.run),)
        units.append(Unit(cell.name, score_unit, settings, f"{cell.model} {cell.task}", needs))
    return units


# Units


def train_unit(study: dict[str, Any], run: str, out: str, processes: int) -> str:
    """Train a run, or make the checkpoints that it still lacks, and record its folder."""
    folder, plan = StudyFolder(Path(out)), plan_study(parse_config(Study, study, origin="study.yaml"))
    planned = plan.runs[run]
    if is_complete(plan, folder, planned):
        return "done by another process"
    recipe = planned.recipe
    if planned.parent is not None:
        begin = find_step(folder, planned.parent, plan.runs[planned.parent].key, planned.first)
        if begin is None:  # another process is at it
            return BUSY
        recipe = start_from(planned, begin)
    keep = tuple(step - planned.first for step in needed_steps(plan, folder, planned))
    recipe = recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"keep": keep})})
    before = find_record(folder, run, planned.key)
    started = time.monotonic()
    try:
        path = train_here(recipe, folder) if processes == 1 else train_by_torchrun(recipe, folder, processes)
    except BusyError:
        return BUSY
    seconds = time.monotonic() - started
    spent = round(seconds + (before["seconds"] if before else 0.0), 1)
    folder.record(run).parent.mkdir(parents=True, exist_ok=True)
    write_json(folder.record(run), {"folder": path.name, "key": planned.key, "seconds": spent})
    return f"{recipe.num_steps:,} steps in {console.duration(seconds)}"


def train_here(recipe: Recipe, folder: StudyFolder) -> Path:
    from biphase.pretraining.loop import train

    return train(recipe, folder.runs).path


def train_by_torchrun(recipe: Recipe, folder: StudyFolder, processes: int) -> Path:
    """The same as `biphase pretrain` under torchrun; what it prints goes to runs/NAME.log. SIGTERM is passed on."""
    folder.runs.mkdir(parents=True, exist_ok=True)
    recipe_file = folder.runs / f"{recipe.name}.yaml"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    command = [sys.executable, "-m", "biphase.pretraining.launch", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "biphase", "pretrain", str(recipe_file), "--runs", str(folder.runs)]
    log = folder.runs / f"{recipe.name}.log"
    with open(log, "a", encoding="utf-8") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        previous = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
    lines = log.read_text(encoding="utf-8").splitlines() or [""]
    told = next((line for line in reversed(lines) if line.startswith("biphase: ")), lines[-1])
    if code == EXIT_BUSY:
        raise BusyError(told.removeprefix("biphase: "))
    if code:
        raise InputError(f"torchrun ended with exit code {code}: {told.removeprefix('biphase: ')}; see {log}")
    finished = [run for path in folder.runs.glob(f"{recipe.name}-????????") if (run := Run(path)).is_done]
    own = [run.path for run in finished if weights_tree(read_recipe(run)) == weights_tree(recipe)]
    return max(own, key=lambda path: (path / "done.json").stat().st_mtime)


def score_unit(
    model: str,
    run: str,
    key: str,
    step: int,
    tasks: list[str],
    config: dict[str, Any],
    out: str,
    data_dirs: dict[str, str],
) -> str:
    """Fit one cell of a model."""
    from biphase.finetuning.fit import fit_cells

    folder = StudyFolder(Path(out))
    reference = find_step(folder, run, key, step)
    if reference is None:  # another process is at it
        return BUSY
    try:
        scores = fit_cells(
            reference, tasks, FinetuneConfig.model_validate(config), folder.scores(model), data_dirs, label=model
        )
    except BusyError:
        return BUSY
    return "; ".join(score.headline() for score in scores)


def drop_checkpoints(plan: Plan, folder: StudyFolder) -> None:
    """Delete checkpoints that no run needs any more and that are no model."""
    for checkpoint in plan.checkpoints:
        run = plan.runs[checkpoint.run]
        if is_trained(folder, run) and not is_needed(plan, folder, checkpoint):
            drop_step(open_run(trained_folder(folder, run.name)), checkpoint.step)
