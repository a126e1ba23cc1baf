"""Plan → done: segments and cells in the order of their needs, on whatever is free; the same command goes on.

OUT/  study.yaml  runs/NAME-HASH8/  trained/NAME.json  scores/MODEL/TASK-HASH16/  failed/UNIT.json

A trained run has a record in `trained`, a scored cell its folder in `scores`; what has is never done again. Any number
of processes may work on one folder: each leaves alone what another one is at, and waits for it where it needs it.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from biphase import console
from biphase.config import Recipe, parse_config
from biphase.errors import BusyError, InputError
from biphase.execute import Engine, Outcome, Unit, run_units
from biphase.files import content_hash, read_json, write_json, write_text
from biphase.finetuning.score import PLACEMENT, PROTOCOL, FinetuneConfig, Score, settle_config
from biphase.finetuning.sources import absolute_dir
from biphase.finetuning.tasks import find_task
from biphase.report.scores import ScoreSet, read_scores
from biphase.run import Run, open_run, read_metrics, read_recipe
from biphase.study.plan import Cell as PlannedCell
from biphase.study.plan import Checkpoint, Model, Plan, PlannedRun, plan_study, start_from, weights_tree
from biphase.study.spec import Study

TRAINING = "train"
"""In place of a unit's name: all training runs."""
BUSY = "busy"
"""What a unit returns that another process is at."""
POLL_SECONDS = 10.0
"""How often to look again at what other processes are at."""


@dataclass(frozen=True)
class Failure:
    unit: str
    reason: str

    @property
    def is_blocked(self) -> bool:
        """Whether it did not begin, because something that it needs failed."""
        return self.reason.startswith("blocked: ")


@dataclass(frozen=True)
class Workplace:
    """The folder of a study."""

    path: Path

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def record(self, run: str) -> Path:
        return self.path / "trained" / f"{run}.json"

    def scores(self, model: str) -> Path:
        return self.path / "scores" / model

    def failure(self, unit: str) -> Path:
        return self.path / "failed" / (unit.replace("/", "-").replace(" ", "-") + ".json")


def claim_workplace(path: Path, study: Study) -> Workplace:
    """The folder, with the study in it. Raises `InputError` when it is another study's."""
    text = yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    kept = path / "study.yaml"
    if kept.exists():
        name = (yaml.safe_load(kept.read_text(encoding="utf-8")) or {}).get("name")
        if name != study.name:
            raise InputError(f"{path} is the folder of the study '{name}', not of '{study.name}'; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    write_text(kept, text)
    return Workplace(path)


def run_study(
    plan: Plan, place: Workplace, engine: Engine, processes: int = 1, only: str | None = None
) -> list[Failure]:
    """Do all that is missing, or `only` one unit or all of `train`; returns what failed. A failure blocks only what
    needs it.

    `processes` above 1 trains each run under torchrun, on so many devices of its machine.

    Raises `InputError` when `only` names no unit.
    """
    everything = {unit.name: unit for unit in make_units(plan, place, processes)}
    done = done_units(plan, place)
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
                settle(place, outcome, failures, progress)
                if outcome.error is None:
                    done.add(outcome.name)
                    if outcome.name in trainings:
                        drop_checkpoints(plan, place)
            if not is_busy:
                return list(failures.values())
            if not waiting:
                progress.say("waiting for units that other processes are at")
                waiting = True
            time.sleep(POLL_SECONDS)
            done = done_units(plan, place)


def settle(place: Workplace, outcome: Outcome, failures: dict[str, Failure], progress: console.Tracker) -> None:
    path = place.failure(outcome.name)
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


def make_units(plan: Plan, place: Workplace, processes: int = 1) -> list[Unit]:
    """One for each run and for each cell, by the names that `study status` and `--unit` know."""
    out = str(place.path.resolve())
    study = plan.study.model_dump(mode="json", exclude={"evaluation"})
    units = []
    for run in plan.runs.values():
        arguments = {"study": study, "run": run.name, "out": out, "processes": processes}
        needs = (train_name(run.parent),) if run.parent else ()
        units.append(Unit(train_name(run.name), train_unit, arguments, needs=needs))
    models = {model.name: model for model in plan.models}
    is_there = {
        name: find_step(place, model.run, plan.runs[model.run].key, model.step) for name, model in models.items()
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


def train_name(run: str) -> str:
    return f"train {run}"


# Units


def train_unit(study: dict[str, Any], run: str, out: str, processes: int) -> str:
    """Train a run, or make the checkpoints that it still lacks, and record its folder."""
    place, plan = Workplace(Path(out)), plan_study(parse_config(Study, study, origin="study.yaml"))
    planned = plan.runs[run]
    if is_complete(plan, place, planned):
        return "done by another process"
    recipe = planned.recipe
    if planned.parent is not None:
        begin = find_step(place, planned.parent, plan.runs[planned.parent].key, planned.first)
        if begin is None:  # another process is at it
            return BUSY
        recipe = start_from(planned, begin)
    keep = tuple(step - planned.first for step in needed_steps(plan, place, planned))
    recipe = recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"keep": keep})})
    before = find_record(place, run, planned.key)
    started = time.monotonic()
    try:
        path = train_here(recipe, place) if processes == 1 else train_by_torchrun(recipe, place, processes)
    except BusyError:
        return BUSY
    seconds = time.monotonic() - started
    spent = round(seconds + (before["seconds"] if before else 0.0), 1)
    place.record(run).parent.mkdir(parents=True, exist_ok=True)
    write_json(place.record(run), {"folder": path.name, "key": planned.key, "seconds": spent})
    return f"{recipe.num_steps:,} steps in {console.duration(seconds)}"


def train_here(recipe: Recipe, place: Workplace) -> Path:
    from biphase.pretraining.loop import train

    return train(recipe, place.runs).path


def train_by_torchrun(recipe: Recipe, place: Workplace, processes: int) -> Path:
    """The same as `biphase pretrain` under torchrun; what it prints goes to runs/NAME.log. SIGTERM is passed on."""
    place.runs.mkdir(parents=True, exist_ok=True)
    recipe_file = place.runs / f"{recipe.name}.yaml"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "biphase", "pretrain", str(recipe_file), "--runs", str(place.runs)]
    log = place.runs / f"{recipe.name}.log"
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
    if "in use by another process" in told and code:
        raise BusyError(told)
    if code:
        raise InputError(f"torchrun ended with exit code {code}: {told.removeprefix('biphase: ')}; see {log}")
    finished = [run for path in place.runs.glob(f"{recipe.name}-????????") if (run := Run(path)).is_done]
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

    place = Workplace(Path(out))
    reference = find_step(place, run, key, step)
    if reference is None:  # another process is at it
        return BUSY
    try:
        scores = fit_cells(
            reference, tasks, FinetuneConfig.model_validate(config), place.scores(model), data_dirs, label=model
        )
    except BusyError:
        return BUSY
    return "; ".join(score.headline() for score in scores)


# What is done


def find_record(place: Workplace, run: str, key: str) -> dict[str, Any] | None:
    """What is recorded of a run, if it was trained as the plan wants it and is still there."""
    path = place.record(run)
    record = read_json(path) if path.exists() else {}
    return record if record.get("key") == key and Run(place.runs / record["folder"]).is_done else None


def find_step(place: Workplace, run: str, key: str, step: int) -> str | None:
    """`FOLDER@STEP` of a run that was trained as the plan wants it; None where there is no such checkpoint."""
    from biphase.pretraining.checkpoint import whole_steps

    record = find_record(place, run, key)
    if record is None or step not in whole_steps(Run(place.runs / record["folder"])):
        return None
    return f"{(place.runs / record['folder']).resolve()}@{step}"


def trained_folder(place: Workplace, run: str) -> Path:
    """Of a run that is trained."""
    return (place.runs / read_json(place.record(run))["folder"]).resolve()


def is_trained(place: Workplace, run: PlannedRun) -> bool:
    return find_record(place, run.name, run.key) is not None


def is_complete(plan: Plan, place: Workplace, run: PlannedRun) -> bool:
    """Whether a run is trained and has every checkpoint that a model or another run still needs."""
    from biphase.pretraining.checkpoint import whole_steps

    if not is_trained(place, run):
        return False
    return set(needed_steps(plan, place, run)) <= set(whole_steps(Run(trained_folder(place, run.name))))


def needed_steps(plan: Plan, place: Workplace, run: PlannedRun) -> list[int]:
    """Steps of a run whose checkpoints something still needs."""
    own = [checkpoint for checkpoint in plan.checkpoints if checkpoint.run == run.name]
    return [checkpoint.step for checkpoint in own if is_needed(plan, place, checkpoint)]


def is_needed(plan: Plan, place: Workplace, checkpoint: Checkpoint) -> bool:
    """A model is always; a branch point until all that begins there is complete."""
    return bool(checkpoint.models) or not all(
        is_complete(plan, place, plan.runs[name]) for name in checkpoint.needed_by
    )


def done_units(plan: Plan, place: Workplace) -> set[str]:
    trained = {train_name(name) for name, run in plan.runs.items() if is_complete(plan, place, run)}
    return trained | scored_units(plan, place)


def scored_units(plan: Plan, place: Workplace) -> set[str]:
    """Names of the cells whose scores are all there, whole, and of the model as it is now."""
    cells = cells_by_model(plan)
    done = set()
    for model in plan.models:
        reference = reference_of(plan, place, model)
        seen = {key for score in current_scores(plan, place, model).scores for key in keys_of_score(score)}
        if reference is not None and seen:
            done |= {cell.name for cell in cells[model.name] if keys_of_cell(cell, reference) <= seen}
    return done


def cells_by_model(plan: Plan) -> dict[str, list[PlannedCell]]:
    cells: dict[str, list[PlannedCell]] = {model.name: [] for model in plan.models}
    for cell in plan.cells:
        cells[cell.model].append(cell)
    return cells


ScoreKey = tuple[str, str]
"""A task, and a hash of what decides a result on it."""


def keys_of_cell(cell: PlannedCell, reference: str) -> set[ScoreKey]:
    """One for each task that the cell is evaluated on."""
    from biphase.finetuning.encoders import identify

    limit = identify(reference).max_length
    tasks = [find_task(task) for task in cell.evaluates]
    return {score_key(task.name, settle_config(cell.config, task, limit)) for task in tasks}


def keys_of_score(score: Score) -> set[ScoreKey]:
    """As a study may have asked for it: with this precision, or with whatever the machine has units for."""
    configs = (score.config, score.config.model_copy(update={"precision": "auto"}))
    return {score_key(score.task, config) for config in configs}


def score_key(task: str, settled: FinetuneConfig) -> ScoreKey:
    return task, content_hash(settled.model_dump(mode="json", exclude=PLACEMENT))


def current_scores(plan: Plan, place: Workplace, model: Model) -> ScoreSet:
    """The finished scores of a model that the study asks for: by the weights that its recipe gives, of this version's
    protocol, with the settings of one of its cells."""
    from biphase.finetuning.encoders import identify

    folder, reference = place.scores(model.name), reference_of(plan, place, model)
    if not folder.is_dir() or reference is None:
        return ScoreSet(())
    found, wanted = read_scores(folder), (identify(reference).hash, PROTOCOL)
    asked = {key for cell in plan.cells if cell.model == model.name for key in keys_of_cell(cell, reference)}
    current = [one for one in found.scores if (one.model_hash, one.protocol) == wanted and keys_of_score(one) & asked]
    return ScoreSet(tuple(current), found.broken)


def reference_of(plan: Plan, place: Workplace, model: Model) -> str | None:
    return find_step(place, model.run, plan.runs[model.run].key, model.step)


def drop_checkpoints(plan: Plan, place: Workplace) -> None:
    """Delete checkpoints that no run needs any more and that are no model."""
    from biphase.pretraining.checkpoint import drop_step

    for checkpoint in plan.checkpoints:
        run = plan.runs[checkpoint.run]
        if is_trained(place, run) and not is_needed(plan, place, checkpoint):
            drop_step(open_run(trained_folder(place, run.name)), checkpoint.step)


# Status


@dataclass(frozen=True)
class Progress:
    """One line of `study status`: runs, or the cells of a task."""

    name: str
    done: int
    running: int
    failed: int
    total: int
    seconds_left: float | None
    """Of one worker; None where nothing of the kind is done yet."""


def status(plan: Plan, place: Workplace) -> tuple[list[Progress], list[Failure]]:
    """How far a study is, and what failed last time."""
    failures = list(read_failures(place))
    failed = {failure.unit for failure in failures}
    trained = {name for name, run in plan.runs.items() if is_complete(plan, place, run)}
    started = {name: logged_steps(place, name) for name in plan.runs if name not in trained}
    steps_left = sum(run.steps - started.get(name, 0) for name, run in plan.runs.items() if name not in trained)
    spent = [(read_json(place.record(name))["seconds"], plan.runs[name].steps) for name in trained]
    per_step = sum(seconds for seconds, _ in spent) / max(sum(steps for _, steps in spent), 1) if spent else None
    lines = [
        Progress(
            "train",
            len(trained),
            sum(steps > 0 for steps in started.values()),
            sum(train_name(name) in failed for name in plan.runs),
            len(plan.runs),
            None if per_step is None else per_step * steps_left,
        )
    ]
    scored = scored_units(plan, place)
    costs = measure_cells({model.name: current_scores(plan, place, model) for model in plan.models})
    seconds = {task: sum(cell.seconds for cell in cells) / len(cells) for task, cells in costs.items()}
    totals = Counter(cell.task for cell in plan.cells)
    for task, total in totals.items():
        names = [cell.name for cell in plan.cells if cell.task == task]
        num_done = sum(name in scored for name in names)
        left = seconds[task] * (total - num_done) if task in seconds else None
        lines.append(Progress(task, num_done, 0, sum(name in failed for name in names), total, left))
    return lines, failures


def read_failures(place: Workplace) -> Iterator[Failure]:
    for path in sorted((place.path / "failed").glob("*.json")):
        content = read_json(path)
        yield Failure(content["unit"], content["error"])


def logged_steps(place: Workplace, run: str) -> int:
    """Steps of a run that is not finished, by its log; 0 when it has not begun."""
    folders = [path for path in place.runs.glob(f"{run}-????????") if (path / "config.yaml").exists()]
    records = [read_metrics(open_run(path), "train") for path in folders]
    return max((rows[-1]["step"] for rows in records if rows), default=0)


@dataclass(frozen=True)
class CellCost:
    """One training and all its evaluations."""

    steps: int
    seconds: float


def measure_cells(scores: Mapping[str, ScoreSet]) -> dict[str, list[CellCost]]:
    """What finished cells took, by the task that they are trained on; `scores` by model."""
    spent: dict[str, dict[tuple[str, float, int], CellCost]] = {}
    for model, found in scores.items():
        for score in found.scores:
            cells = spent.setdefault(score.trained_on, {})
            key = (model, score.config.learning_rate, score.config.seed)
            trained = cells.get(key, CellCost(score.num_steps, score.seconds["train"]))
            cells[key] = replace(trained, seconds=trained.seconds + score.seconds["evaluate"])
    return {task: list(cells.values()) for task, cells in spent.items()}
