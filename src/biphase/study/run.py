"""Plan → done: segments and cells in the order of their needs, on whatever is free; the same command goes on.

What the study's folder has is never done again (`study.folder`). Any number of processes may work on one folder: each
leaves alone what another one is at, and waits for it where it needs it. What a worker does for a study, train a run or
fit a cell, stands at the end; PyTorch is loaded by the worker only.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from biphase.config import parse_config
from biphase.console import duration
from biphase.engine.local import Engine
from biphase.engine.scheduler import Failure, run_batch
from biphase.engine.units import Unit
from biphase.errors import EXIT_BUSY, BusyError, InputError
from biphase.files import write_json, write_text
from biphase.finetuning.config import FinetuneConfig
from biphase.recipe import Recipe
from biphase.run import Run, drop_step, open_run, read_recipe
from biphase.study.cost import cell_costs, measure_sizes
from biphase.study.folder import (
    StudyFolder,
    StudyState,
    find_record,
    find_step,
    is_complete,
    is_needed,
    logged_steps,
    measure_cells,
    needed_steps,
    read_state,
    train_name,
)
from biphase.study.plan import Plan, plan_study
from biphase.study.spec import EMBED, Study, find_data_dirs, scored_as
from biphase.study.trunks import start_from, weights_tree
from biphase.tasks.sources import HUB, find_source
from biphase.tasks.spec import find_task

TRAINING = "train"
"""The kind of the units that are training runs; in place of a unit's name, all of them."""


def run_study(
    plan: Plan, folder: StudyFolder, engine: Engine, processes: int = 1, only: str | None = None
) -> list[Failure]:
    """Do all that is missing, or `only` one unit or all of `train`; returns what failed. A failure blocks only what
    needs it.

    `processes` above 1 trains each run under torchrun, on so many devices of its machine.

    Raises `InputError` as `choose_units` does.
    """
    everything = {unit.name: unit for unit in study_units(plan, folder, processes)}
    state = read_state(plan, folder)
    done = state.done
    if only != TRAINING and everything.keys() - done:
        look_for_data(plan)
    if only is not None:
        everything = choose_units(everything, only, done)
    drop_checkpoints(plan, folder)  # also what a killed process was just removing
    left = []
    for unit in everything.values():
        if unit.name not in done:
            cost = unit.cost
            if unit.kind == TRAINING:  # of the steps left, or of one, where only a checkpoint is to be made
                run = plan.runs[unit.arguments["run"]]
                cost *= max(run.steps - logged_steps(folder, run.name), 1) / run.steps
            left.append(replace(unit, needs=tuple(set(unit.needs) - done), cost=cost))
    return run_batch(
        left,
        engine,
        folder.path,
        label="study",
        things="units",
        num_done=len(everything) - len(left),
        waits_for_busy=True,
        on_done=lambda unit: drop_checkpoints(plan, folder) if unit.kind == TRAINING else None,
        spent=measure_units(state, everything),
    )


def choose_units(units: Mapping[str, Unit], only: str, done: Set[str]) -> dict[str, Unit]:
    """All training runs, or one unit by its name. Raises `InputError` where there is none, or something is to be done
    before it."""
    if only == TRAINING:
        return {name: unit for name, unit in units.items() if unit.kind == TRAINING}
    if only not in units:
        close = get_close_matches(only, [TRAINING, *units], 1)
        raise InputError(f"no unit '{only}' in this study" + (f"; did you mean '{close[0]}'?" if close else ""))
    lacking = sorted(set(units[only].needs) - done)
    if only not in done and lacking:
        raise InputError(f"'{only}' needs '{lacking[0]}', which is not done yet")
    return {only: units[only]}


def measure_units(state: StudyState, units: Mapping[str, Unit]) -> dict[str, tuple[float, float]]:
    """Seconds and costs of what is done, by the kind of the units: what tells how long the rest takes, from the first
    unit of a sitting on."""
    trained = [name for name in state.trained if train_name(name) in units]
    seconds = sum(state.records[name].seconds for name in trained)
    spent = {TRAINING: (seconds, sum(units[train_name(name)].cost for name in trained))}
    costs: dict[str, list[float]] = {}
    for name in state.scored & units.keys():
        costs.setdefault(units[name].kind, []).append(units[name].cost)
    measured = measure_cells(state.scores)
    for kind in costs:
        if (name := scored_as(kind)) in measured:
            num, _, seconds = measured[name]
            spent[kind] = (seconds / num * len(costs[kind]), sum(costs[kind]))
    return {kind: values for kind, values in spent.items() if values[1]}


def study_units(plan: Plan, folder: StudyFolder, processes: int = 1) -> list[Unit]:
    """One for each run and for each cell, by the names that `study status` and `--unit` know.

    Each pretraining seed is a wave: a study that is stopped has whole seeds, as far as it came.
    """
    out = str(folder.path.resolve())
    costs = estimate_costs(plan)
    study = plan.study.model_dump(mode="json", exclude={"evaluation", "hypotheses"})
    units = []
    for run in plan.runs.values():
        arguments = {"study": study, "run": run.name, "out": out, "processes": processes}
        needs = (train_name(run.parent),) if run.parent else ()
        name = train_name(run.name)
        wave = plan.arms[run.name].seed
        units.append(Unit(name, train_unit, arguments, needs=needs, kind=TRAINING, cost=costs[name], wave=wave))
    models = {model.name: model for model in plan.models}
    is_there = {
        name: find_step(folder, model.run, plan.runs[model.run].key, model.step) for name, model in models.items()
    }
    data_dirs = {} if plan.study.evaluation is None else find_data_dirs(plan.study.evaluation)
    embed = resolve_embed(plan)
    for cell in plan.cells:
        model = models[cell.model]
        settings: dict[str, Any] = {
            "name": cell.name,
            "model": model.name,
            "run": model.run,
            "key": plan.runs[model.run].key,
            "step": model.step,
            "tasks": list(cell.evaluates),
            "config": cell.config.model_dump(mode="json"),
            "out": out,
            "data_dirs": data_dirs,
            "embed": embed if cell.task.startswith(EMBED) else None,
        }
        needs = () if is_there[model.name] else (train_name(model.run),)
        affinity = f"{cell.model} {cell.task}"
        cost = costs[cell.name]
        units.append(Unit(cell.name, score_unit, settings, affinity, needs, kind=cell.task, cost=cost, wave=model.seed))
    return units


def resolve_embed(plan: Plan) -> dict[str, Any] | None:
    """The study's `evaluation.embed` with absolute paths, as `score_embedding` takes it."""
    if plan.study.evaluation is None or plan.study.evaluation.embed is None:
        return None
    embed = plan.study.evaluation.embed
    recipe = embed.model_dump(mode="json")["recipe"]
    for source in (source for stage in recipe["stages"] for source in stage["data"]):
        here = {key: Path(source[key]) for key in ("path", "from_text") if source.get(key)}
        source |= {key: str(path.resolve()) for key, path in here.items() if path.exists()}
    judged = {name: str(Path(path).resolve()) for name, path in embed.tasks.items()}
    return {"trained_on": embed.name, "recipe": recipe, "judged": judged}


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
        folder = folders.get(task.name, folders.get(task.part_of or task.name))
        if folder is not None and folder != str(HUB):
            find_source(task, Path(folder))
        elif task.hub is None:
            find_source(task, None if folder is None else HUB)


def estimate_costs(plan: Plan) -> dict[str, float]:
    """What each unit computes, by its name: FLOPs, or tokens where the size of a network is not known."""
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


def drop_checkpoints(plan: Plan, folder: StudyFolder) -> None:
    """Delete checkpoints that no run needs any more and that are no model."""
    for checkpoint in plan.checkpoints:
        record = find_record(folder, checkpoint.run, plan.runs[checkpoint.run].key)
        if record and not is_needed(plan, folder, checkpoint):
            drop_step(open_run(folder.runs / record.folder), checkpoint.step)


# What a worker does


def train_unit(study: dict[str, Any], run: str, out: str, processes: int) -> list[str]:
    """Train a run, or make the checkpoints that it still lacks, and record its folder."""
    folder, plan = StudyFolder(Path(out)), plan_study(parse_config(Study, study, origin="study.yaml"))
    planned = plan.runs[run]
    if is_complete(plan, folder, planned):
        return [f"{train_name(run)}: done by another process"]
    recipe = planned.recipe
    if planned.parent is not None:
        begin = find_step(folder, planned.parent, plan.runs[planned.parent].key, planned.first)
        if begin is None:
            raise BusyError(f"another process makes {planned.parent}@{planned.first}, in which {run} begins")
        recipe = start_from(planned, begin)
    keep = tuple(step - planned.first for step in needed_steps(plan, folder, planned))
    recipe = recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"keep": keep})})
    before = find_record(folder, run, planned.key)
    started = time.monotonic()
    path = train_here(recipe, folder) if processes == 1 else train_by_torchrun(recipe, folder, processes)
    seconds = time.monotonic() - started
    spent, device_spent = (before.seconds, 3600 * before.device_hours) if before else (0.0, 0.0)
    record = {
        "folder": path.name,
        "key": planned.key,
        "seconds": round(spent + seconds, 1),
        "device_seconds": round(device_spent + seconds * processes, 1),
    }
    folder.record(run).parent.mkdir(parents=True, exist_ok=True)
    write_json(folder.record(run), record)
    return [f"{train_name(run)}: {recipe.num_steps:,} steps in {duration(seconds)}"]


def train_here(recipe: Recipe, folder: StudyFolder) -> Path:
    from biphase.pretraining.loop import train

    return train(recipe, folder.runs).path


def train_by_torchrun(recipe: Recipe, folder: StudyFolder, processes: int) -> Path:
    """The same as `biphase pretrain` under torchrun; what it prints goes to runs/NAME.log. SIGTERM is passed on."""
    folder.runs.mkdir(parents=True, exist_ok=True)
    recipe_file = folder.runs / f"{recipe.name}.yaml"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    command = [sys.executable, "-m", "biphase.distributed", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "biphase", "pretrain", str(recipe_file), "--runs", str(folder.runs)]
    log = folder.runs / f"{recipe.name}.log"
    with open(log, "a", encoding="utf-8") as file:
        # It ends with this process, however that ends: BIPHASE_PARENT.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BIPHASE_PARENT": str(os.getpid())}
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
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
    name: str,
    model: str,
    run: str,
    key: str,
    step: int,
    tasks: list[str],
    config: dict[str, Any],
    out: str,
    data_dirs: dict[str, str],
    embed: dict[str, Any] | None = None,
) -> list[str]:
    """Fit one cell of a model, or make an embedding model of it."""
    from biphase.finetuning.fit import fit_cells

    folder = StudyFolder(Path(out))
    reference = find_step(folder, run, key, step)
    if reference is None:
        raise BusyError(f"another process makes {run}@{step}")
    settings = FinetuneConfig.model_validate(config)
    if embed is not None:
        from biphase.embedding.zero_shot import score_embedding

        scores = score_embedding(reference, model, config=settings, out=folder.scores(model), **embed)
        shown = (f"{one.task} {one.metrics['test'][one.metric]:.2%}" for one in scores)
        return [f"{name}: {'; '.join(shown)}"]
    scores = fit_cells(reference, tasks, settings, folder.scores(model), data_dirs, label=model)
    return [f"{name}: {'; '.join(score.headline() for score in scores)}"]
