"""Run a plan: its runs and cells become units. Any free worker takes a unit once the units that it needs are done.

Finished work in the study's folder is never repeated (`studies.folder`), so the same command continues. Any number of
processes may share a folder: each skips the units that others work on, and waits for those that it needs. A worker
trains a run or fits a cell. Only workers load PyTorch, but for the question of which precision `auto` means.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from biphase.console import duration, err
from biphase.corpus.shards import is_shard_set, read_shard_manifest
from biphase.embedding.pairs import check_sources
from biphase.encoder.models import identify
from biphase.engine.local import THREAD_VARIABLES
from biphase.engine.scheduler import Failure, Forecast, Pace, run_batch
from biphase.engine.units import Engine, Unit
from biphase.errors import EXIT_BUSY, STOPPED, BusyError, InputError, StoppedError
from biphase.files import content_hash, locked, write_hashed, write_text
from biphase.finetuning.grid import fit_unit, measure_cells, word_units
from biphase.hub import refuse_missing
from biphase.machine import STOPS, grace, python_process, stop_signals
from biphase.recipe import Recipe
from biphase.run import Run, find_model, keep_time, read_checkpoint_manifest, read_recipe, split_reference, whole_steps
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
    refuse_other_data,
    refuse_other_models,
    refuse_other_precision,
    refuse_other_text,
    refuse_unlike_validation,
)
from biphase.studies.plan import Plan, PlannedRun, StudyCell, train_name
from biphase.studies.spec import EMBED, Evaluation, find_data_dirs
from biphase.tasks.sources import HUB, dir_of, find_source
from biphase.tasks.spec import find_task


def train_unit(plan: Plan, run: str, folder: Path, processes: int, scored_models: Set[str] = frozenset()) -> list[str]:
    """Train a run, or only make its missing checkpoints, and write its record. Return the progress lines to print.

    `scored_models` of the plan need no checkpoints. Raises `BusyError` while another process trains the run.
    """
    planned, name, runs, trained = plan.runs[run], train_name(run), folder / "runs", folder / "trained"
    clock = trained / f".{run}.clock"
    with locked(trained / f".{run}.lock", busy=f"another process works on {name}"):
        state = replace(read_runs(plan, folder), scored_models=scored_models)
        if run in state.trained:
            return [f"{name}: done by another process"]
        from biphase.pretraining.loop import train

        recipe = planned.recipe
        keep = tuple(step - planned.first for step in sorted(state.needed[run]))
        changes: dict[str, Any] = {"checkpoints": recipe.checkpoints.model_copy(update={"keep": keep})}
        if planned.parent is not None:
            parent = plan.runs[planned.parent]
            checkpoint = reach_step(folder, parent, planned.first)
            changes["init"] = recipe.init.model_copy(update={"checkpoint": checkpoint})
            if recipe.data.max_sample_tokens == parent.recipe.data.max_sample_tokens:  # its model may have lowered it
                longest = read_recipe(Run(Path(split_reference(checkpoint)[0]))).data.max_sample_tokens
                changes["data"] = recipe.data.model_copy(update={"max_sample_tokens": longest})
        recipe = recipe.model_copy(update=changes)
        # The earlier training time, by the run's clock or else by its record. A run without either is untimed. A clock
        # does not count if the run's folder was removed.
        begun = tuple(sorted(path.name for path in runs.glob(f"{run}-????????")))
        before = read_record(clock) if clock.exists() and begun else None
        if before is None or before.key != planned.key:
            before = state.records.get(run) or TrainedRecord("", planned.key, 0.0, planned.placeless_key, untimed=begun)
        begin = replace(before, key=planned.key, placeless_key=planned.placeless_key)

        def write_clock(seconds: float) -> None:
            write_hashed(clock, to_jsonable_python(replace(begin, seconds=seconds)))

        with keep_time(write_clock, begin.seconds) as so_far:
            path = train(recipe, runs).path if processes == 1 else train_by_torchrun(recipe, runs, processes)
        seconds = so_far()
        # The last checkpoint's manifest has the fingerprints of the shard sets and of the starting model.
        steps = whole_steps(Run(path))
        manifest = read_checkpoint_manifest(Run(path).steps / str(steps[-1]), check_files=False) if steps else None
        found: dict[str, Any] = {}
        if manifest is not None:
            found = {"text": manifest.texts, "validation_text": manifest.validation_text, "parent": manifest.parent}
        models = dict(before.models) if before.folder == path.name else {}  # its checkpoints may have been deleted
        for model in plan.models:
            if model.run == run and model.step in steps:
                identity = identify(f"{path}@{model.step}")
                models[model.step] = identity.hash, identity.max_length
        record = replace(begin, folder=path.name, seconds=seconds, models=models, **found)
        write_hashed(clock, to_jsonable_python(record))
        clock.replace(trained / f"{run}.json")
    last = f", {duration(record.seconds - before.seconds)} of it since the restart" if before.seconds else ""
    return [f"{name}: {recipe.num_steps:,} steps in {duration(record.seconds)}{last}"]


def train_by_torchrun(recipe: Recipe, runs: Path, processes: int) -> Path:
    """Train by `biphase pretrain` under torchrun, with output to runs/NAME.log; return the run's folder. Pass stop
    signals on, and raise `StoppedError` when all processes have ended."""
    runs.mkdir(parents=True, exist_ok=True)
    recipe_file, log = runs / f"{recipe.name}.yaml", runs / f"{recipe.name}.log"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True), sort_keys=False))
    words = ["-m", "biphase.distributed", "--standalone", f"--nproc-per-node={processes}"]
    words += ["-m", "biphase", "pretrain", str(recipe_file), "--runs", str(runs)]
    signals: list[int] = []
    with open(log, "ab") as file:
        begin = file.tell()
        # One thread for each process, whatever this worker has. BIPHASE_PARENT makes the child end with this process.
        variables = dict.fromkeys(THREAD_VARIABLES, "1") | {"BIPHASE_PARENT": str(os.getpid())}
        launching = python_process(*words, **variables)
        child = subprocess.Popen(**launching, stdout=file, stderr=subprocess.STDOUT)

        def pass_on(number: int) -> None:
            if not signals:
                err.print(f"waiting up to {grace():.0f} s for {processes} processes to save their state")
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
    printed = {Path(line).name for line in lines}  # `pretrain` prints the folder of its run
    done = [path for path in runs.glob(f"{recipe.name}-????????") if path.name in printed and Run(path).is_done]
    if len(done) != 1:
        raise InputError(f"torchrun succeeded but did not print the folder of its run; see {log}")
    return done[0]


def score_unit(cell: StudyCell, run: PlannedRun, step: int, folder: Path, evaluation: Evaluation) -> list[str]:
    """Fit a cell: fine-tune the model at a step of a run, or turn it into an embedding model; then score it. Return the
    progress lines to print. Raises `BusyError` while another process works on the cell."""
    reference, out, embed = reach_step(folder, run, step), folder / "scores" / cell.model, evaluation.embed
    if embed is None or not cell.task.startswith(EMBED):
        data_dirs = find_data_dirs(evaluation)
        lines = fit_unit(reference, cell.evaluates, cell.config, out, data_dirs, label=cell.model)
    else:
        from biphase.embedding.training import score_embedding

        recipe = embed.model_dump(mode="json")["recipe"]
        lock = out / ".locks" / content_hash(cell.name)[:16]
        with locked(lock, busy=f"another process works on {cell.name}"):  # until it is scored
            scores = score_embedding(reference, cell.model, recipe, embed.tasks, embed.name, cell.config, out)
        lines = [f"{score.task} {score.metrics['test'][score.metric]:.2%}" for score in scores]
    return [f"{cell.name}: {'; '.join(lines)}"]


CELLS = "cells"
"""The word that stands for all cells of trained models in place of a unit's name."""


def run_study(plan: Plan, folder: Path, engine: Engine, processes: int = 1, only: str | None = None) -> list[Failure]:
    """Run all missing units, or only those that `only` names: one unit, all of `train`, or all `cells`. Return the
    failures. A failure blocks only the units that need the failed one.

    With `processes` above 1, torchrun trains each run on that number of devices of its machine. Raises `InputError`
    like `refuse_other_text`, `refuse_unlike_validation`, `refuse_other_models`, `refuse_other_precision` and
    `choose_units`, for changed data of tasks (`refuse_other_data`), and for missing shards and folders of models.
    """
    # 1. All units of the plan, and the units that are done.
    state = read_state(plan, folder)
    units, done = study_units(state, processes), state.done
    if plan.study.hypotheses:
        declare(plan, folder)
    refuse_other_text(state)
    refuse_unlike_validation(state)
    refuse_other_models(state)
    refuse_other_data(state)
    # 2. Check the data of all tasks and the name of the unit before hours of training.
    if only != TRAINING and len(units) > len(done):
        look_for_data(plan, {unit.kind for unit in units if unit.name not in done})
    chosen = units if only is None else choose_units(units, only, done)
    # 3. The remaining units. Check their precision, shards and models.
    drop_checkpoints(folder, plan)  # a killed process may have left some
    left = [unit for unit in chosen if unit.name not in done]
    refuse_other_precision(state, {unit.name for unit in left}, engine)
    recipes = [plan.runs[unit.arguments["run"]].recipe for unit in left if unit.kind == TRAINING]
    for path in {path for recipe in recipes for path in (recipe.data.shards, *recipe.data.sets)}:
        read_shard_manifest(Path(path))
    for model in {recipe.init.model for recipe in recipes if recipe.init.model is not None}:
        refuse_missing(model)
    # 4. Run these units, after those of words alone, and delete checkpoints after each training as soon as nothing
    # needs them.
    words = [] if only == TRAINING else study_words(plan, folder, {unit.kind for unit in left})
    return run_batch(
        [*words, *left],
        engine,
        folder,
        label="study",
        things="units",
        num_done=len(chosen) - len(left),
        waits_for_busy=True,
        on_done=lambda unit: drop_checkpoints(folder, plan) if unit.kind == TRAINING else None,
        spent=measure_units(state, units),
    )


def study_words(plan: Plan, folder: Path, kinds: Set[str]) -> list[Unit]:
    """Make the units that score words alone on the tasks of a study. `kinds`: those of the units left."""
    if plan.study.evaluation is None:
        return []
    scored = [cell for cell in plan.cells if not cell.task.startswith(EMBED)]
    settings = [(task, cell.config) for cell in scored for task in cell.evaluates]
    due = {find_task(task).name for cell in scored if cell.training in kinds for task in cell.evaluates}
    return word_units(settings, due, folder / "scores", find_data_dirs(plan.study.evaluation))


def choose_units(units: Sequence[Unit], only: str, done: Set[str]) -> list[Unit]:
    """Choose the units of all training runs, of all cells of trained models, or one unit by its name. Raises
    `InputError` for an unknown unit, and for a unit that needs an unfinished one."""
    if only == TRAINING:
        return [unit for unit in units if unit.kind == TRAINING]
    if only == CELLS:
        cells = [unit for unit in units if unit.kind != TRAINING]
        ready = [unit for unit in cells if unit.name in done or not unit.needs]
        if len(ready) < len(cells):
            err.print(f"{len(cells) - len(ready)} cells left out: their models are not trained")
        return ready
    by_name = {unit.name: unit for unit in units}
    if only not in by_name:
        close = get_close_matches(only, [TRAINING, CELLS, *by_name], 1)
        hint = f"did you mean '{close[0]}'?" if close else f"names look like '{units[0].name}'"
        raise InputError(f"no unit '{only}' in this study; {hint}")
    unit = by_name[only]
    if unit.needs and only not in done:
        raise InputError(f"'{only}' needs '{unit.needs[0]}', which is not done yet")
    return [unit]


def measure_units(state: StudyState, units: Sequence[Unit]) -> dict[str, Pace]:
    """Measure the pace of finished units by kind, so that a call has a forecast before its first unit is done."""
    records = {train_name(name): record for name, record in state.records.items() if name in state.trained}
    timed = {name: record.seconds for name, record in records.items() if record.is_timed}
    trained = sum(unit.cost for unit in units if unit.name in timed)
    spent = {TRAINING: Pace(sum(timed.values()), trained)} if trained else {}
    scored = [unit for unit in units if unit.name in state.scored]
    return spent | measure_cells(scored, [score for scores in state.scores.values() for score in scores.scores])


@dataclass(frozen=True)
class StudyStatus:
    """The progress of a study."""

    study: str
    folder: Path
    lines: list[dict[str, Any]]
    """A row for the training runs, and one for the cells of each task. `begun` units are not done, whether or not a
    process works on them now. `seconds_left` is the forecast for one worker, as in the bar of `study run`; None before
    anything is done."""
    seeds: list[str]
    """The progress of each pretraining seed, in words; [] with a single one."""
    notes: list[str]
    """Sentences about guessed times and missing shards."""
    failed: list[Failure]
    num_waiting: int
    """The number of units that need a failed one."""


def status(state: StudyState) -> StudyStatus:
    """Describe the progress of a study."""
    plan = state.plan
    units = study_units(state)
    done = state.done
    left = [unit for unit in units if unit.name not in done]
    failures = state.read_failures()
    seconds_left = Forecast(left, measure_units(state, units)).seconds_by_kind
    lines = []
    for kind, total in Counter(unit.kind for unit in units).items():
        names_left = {unit.name for unit in left if unit.kind == kind}
        line: dict[str, Any] = {"name": kind, "done": total - len(names_left)}
        line["begun"] = len(state.begun) if kind == TRAINING else 0
        line["failed"] = len(names_left & {failure.unit for failure in failures})
        line["total"] = total
        line["seconds_left"] = None if seconds_left is None else seconds_left.get(kind, 0.0)
        lines.append(line)
    seeds = []
    for seed in range(plan.num_seeds) if plan.num_seeds > 1 else ():
        of_seed = {unit.name for unit in units if unit.wave == seed}
        progress = "done" if of_seed <= done else f"{len(of_seed & done)} of {len(of_seed)} units"
        seeds.append(f"pretraining seed {seed}: {progress}")
    unbegun = [line["name"] for line in lines if not line["done"]]
    notes = [*tell_guesses(plan, unbegun), *tell_absent_shards(state)]
    causes = [failure for failure in failures if not failure.is_blocked]
    num_waiting = len(failures) - len(causes)
    return StudyStatus(plan.study.name, state.folder, lines, seeds, sorted(notes), causes, num_waiting)


def tell_guesses(plan: Plan, unbegun: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each kind of unit whose time is a guess, among those of which none is done."""
    tasks = [find_task(task) for task in {cell.task for cell in plan.cells} if not task.startswith(EMBED)]
    for name in {task.name for task in tasks if task.size is None}.intersection(unbegun):
        yield f"the time for {name} is a guess until its first cell is done"


def tell_absent_shards(state: StudyState) -> Iterator[str]:
    """Yield a sentence for each missing shard set of an incomplete run."""
    runs = [run for name, run in state.plan.runs.items() if name not in state.trained]
    for path in {path for run in runs for path in (run.recipe.data.shards, *run.recipe.data.sets)}:
        if not is_shard_set(path):
            yield f"{path} has no shards: the remaining runs cannot begin"


def study_units(state: StudyState, processes: int = 1) -> list[Unit]:
    """Make a unit of each run and of each cell, with the names of `study status` and `--unit`. The needs of a unit are
    only units that are not done yet.

    The cost of a unit is its remaining FLOPs, or its tokens if the size of some network is unknown. Each pretraining
    seed is a wave, so that a stopped study has complete seeds.
    """
    plan, folder, evaluation = state.plan, state.folder, state.plan.study.evaluation
    sizes = measure_sizes(plan)
    has_flops = all(shape for shape, _ in sizes.values())
    trained = replace(plan, cells=())
    units = []
    for run in plan.runs.values():
        cost = sum(run_flops(run, sizes[run.name]).values()) if has_flops else float(run.tokens)
        cost *= max(run.steps - state.begun.get(run.name, 0), 1) / run.steps  # a missing checkpoint costs some steps
        needs = (train_name(run.parent),) if run.parent and run.parent not in state.trained else ()
        arguments = {"plan": trained, "run": run.name, "folder": folder, "processes": processes}
        arguments |= {"scored_models": state.scored_models}
        name, wave = train_name(run.name), plan.arms[run.name].seed
        units.append(Unit(name, train_unit, arguments, needs=needs, kind=TRAINING, cost=cost, wave=wave))
    if evaluation is None:
        return units
    models = {model.name: model for model in plan.models}
    for cell, (_, tokens, flops) in zip(plan.cells, cell_costs(plan, sizes), strict=True):
        model, run = models[cell.model], plan.runs[models[cell.model].run]
        arguments = {"cell": cell, "run": run, "step": model.step, "folder": folder, "evaluation": evaluation}
        needs = () if model.step in state.steps.get(model.run, ()) else (train_name(model.run),)
        affinity, kind, cost = f"{cell.model} {cell.task}", cell.training, flops if has_flops else tokens
        units.append(Unit(cell.name, score_unit, arguments, affinity, needs, kind, cost, wave=model.seed))
    return units


def look_for_data(plan: Plan, kinds: Set[str]) -> None:
    """Raise `InputError` for a task with missing data, before hours of training. `kinds`: those of the units left. Do
    not ask the Hub."""
    evaluation = plan.study.evaluation
    if evaluation is None:
        return
    folders = find_data_dirs(evaluation)
    if evaluation.embed is not None and evaluation.embed.name in kinds:
        for path in evaluation.embed.data:
            if not Path(path).exists():
                raise InputError(f"evaluation.embed: {path} does not exist")
        recipe = evaluation.embed.settle()
        check_sources(recipe)
        for teacher in {stage.teacher for stage in recipe.stages if stage.teacher is not None}:
            refuse_missing(find_model(teacher), "teacher")
    for name in dict.fromkeys([*evaluation.tasks, *(find_task(task).trained_on or task for task in evaluation.tasks)]):
        task = find_task(name)
        folder = dir_of(task, folders)
        if task.hub is None or folder not in (None, str(HUB)):
            find_source(task, folder)
