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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from biphase import console
from biphase.config import Recipe, parse_config
from biphase.errors import BusyError, InputError, nearest
from biphase.execute import Engine, Outcome, Unit, run_units
from biphase.files import content_hash, read_json, write_json, write_text
from biphase.finetuning.score import PLACEMENT, PROTOCOL, FinetuneConfig, settle_config
from biphase.finetuning.sources import absolute_dir
from biphase.finetuning.tasks import find_task
from biphase.report.scores import ScoreSet, read_scores
from biphase.run import open_run, read_metrics
from biphase.study.plan import Checkpoint, Model, Plan, PlannedRun
from biphase.study.spec import Study

if TYPE_CHECKING:  # brings torch, which looking at a plan does without
    from biphase.finetuning.encoders import Identity

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
            raise InputError(f"no unit '{only}' in this study{nearest(only, everything)}")
        everything = {only: everything[only]}
    if only in everything and only not in done and (lacking := set(everything[only].needs) - done):
        raise InputError(f"'{only}' needs '{lacking.pop()}', which is not done yet")
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
                    drop_checkpoints(plan, place)
            if not is_busy:
                return list(failures.values())
            if not waiting:
                progress.say("waiting for units that other processes are at")
                waiting = True
            time.sleep(POLL_SECONDS)
            done |= done_units(plan, place)


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
    progress.say(f"{outcome.name}: {outcome.error}")


def make_units(plan: Plan, place: Workplace, processes: int = 1) -> list[Unit]:
    """One for each run and for each cell, by the names that `study status` and `--unit` know."""
    out = str(place.path.resolve())
    units = []
    for run in plan.runs.values():
        recipe = run.recipe.model_dump(mode="json")
        recipe["checkpoints"]["keep"] = [step - run.first for step in needed_steps(plan, place, run)]
        arguments = {
            "recipe": recipe,
            "parent": run.parent,
            "first": run.first,
            "out": out,
            "processes": processes,
        }
        needs = (train_name(run.parent),) if run.parent else ()
        units.append(Unit(train_name(run.name), train_unit, arguments, needs=needs))
    models = {model.name: model for model in plan.models}
    data_dirs = {} if plan.study.evaluation is None else plan.study.evaluation.data_dirs
    resolved = {task: absolute_dir(folder) for task, folder in data_dirs.items()}
    for cell in plan.cells:
        model = models[cell.model]
        settings: dict[str, Any] = {
            "model": model.name,
            "run": model.run,
            "step": model.step,
            "tasks": list(cell.evaluates),
            "config": cell.config.model_dump(mode="json"),
            "out": out,
            "data_dirs": resolved,
        }
        needs = (train_name(model.run),)
        units.append(Unit(cell.name, score_unit, settings, f"{cell.model} {cell.task}", needs))
    return units


def train_name(run: str) -> str:
    return f"train {run}"


# Units


def train_unit(recipe: dict[str, Any], parent: str | None, first: int, out: str, processes: int) -> str:
    """Train a run and record its folder."""
    place = Workplace(Path(out))
    given = recipe
    if parent is not None:
        if not place.record(parent).exists():  # another process is at it
            return BUSY
        folder = trained_folder(place, parent)
        given = recipe | {"init": recipe["init"] | {"checkpoint": f"{folder}@{first}"}}
    checked = parse_config(Recipe, given, origin=recipe["name"])
    started = time.monotonic()
    try:
        path = train_here(checked, place) if processes == 1 else train_by_torchrun(checked, place, processes)
    except BusyError:
        return BUSY
    seconds = time.monotonic() - started
    record = {"folder": path.name, "recipe": recipe_hash(recipe), "seconds": round(seconds, 1)}
    place.record(recipe["name"]).parent.mkdir(parents=True, exist_ok=True)
    write_json(place.record(recipe["name"]), record)
    return f"{checked.num_steps:,} steps in {console.duration(seconds)}"


def train_here(recipe: Recipe, place: Workplace) -> Path:
    from biphase.pretraining.loop import train

    return train(recipe, place.runs).path


def train_by_torchrun(recipe: Recipe, place: Workplace, processes: int) -> Path:
    """The same as `biphase pretrain` under torchrun; what it prints goes to runs/NAME.log. SIGTERM is passed on."""
    place.runs.mkdir(parents=True, exist_ok=True)
    recipe_file = place.runs / f"{recipe.name}.yaml"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    before = set(place.runs.glob(f"{recipe.name}-????????"))
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
    finished = [path for path in place.runs.glob(f"{recipe.name}-????????") if (path / "done.json").exists()]
    fresh = [path for path in finished if path not in before] or finished
    return max(fresh, key=lambda path: (path / "done.json").stat().st_mtime)


def score_unit(
    model: str, run: str, step: int, tasks: list[str], config: dict[str, Any], out: str, data_dirs: dict[str, str]
) -> str:
    """Fit one cell of a model."""
    from biphase.finetuning.fit import fit_cells

    place = Workplace(Path(out))
    if not place.record(run).exists():
        return BUSY
    reference = f"{trained_folder(place, run)}@{step}"
    try:
        scores = fit_cells(
            reference, tasks, FinetuneConfig.model_validate(config), place.scores(model), data_dirs, label=model
        )
    except BusyError:
        return BUSY
    return "; ".join(score.headline() for score in scores)


def trained_folder(place: Workplace, run: str) -> Path:
    return (place.runs / read_json(place.record(run))["folder"]).resolve()


def recipe_hash(recipe: dict[str, Any]) -> str:
    """Of what decides the weights: as long as it stays, a study may grow without training a run anew."""
    aside = ("validation", "checkpoints", "tensorboard", "compute")
    return content_hash({key: value for key, value in recipe.items() if key not in aside})


# What is done


def is_trained(place: Workplace, run: PlannedRun) -> bool:
    """Whether the run is recorded as trained by this very recipe and still there."""
    record = place.record(run.name)
    if not record.exists():
        return False
    found = read_json(record)
    return (
        found["recipe"] == recipe_hash(run.recipe.model_dump(mode="json"))
        and (place.runs / found["folder"] / "done.json").exists()
    )


def lacks_checkpoint(plan: Plan, place: Workplace, run: PlannedRun) -> bool:
    """Whether a trained run has lost, or never kept, a checkpoint that a model or another run still needs."""
    from biphase.pretraining.checkpoint import whole_steps

    saved = whole_steps(open_run(trained_folder(place, run.name)))
    return not set(needed_steps(plan, place, run)) <= set(saved)


def needed_steps(plan: Plan, place: Workplace, run: PlannedRun) -> list[int]:
    """Steps of a run whose checkpoints something still needs."""
    own = [checkpoint for checkpoint in plan.checkpoints if checkpoint.run == run.name]
    return [checkpoint.step for checkpoint in own if is_needed(plan, place, checkpoint)]


def is_needed(plan: Plan, place: Workplace, checkpoint: Checkpoint) -> bool:
    """A model is always; a branch point until all that begins there is trained."""
    return bool(checkpoint.models) or not all(is_trained(place, plan.runs[name]) for name in checkpoint.needed_by)


def done_units(plan: Plan, place: Workplace) -> set[str]:
    trained = {
        train_name(name)
        for name, run in plan.runs.items()
        if is_trained(place, run) and not lacks_checkpoint(plan, place, run)
    }
    return trained | scored_units(plan, place)


def scored_units(plan: Plan, place: Workplace) -> set[str]:
    """Names of the cells whose scores are all there, whole, and of the model as it is now."""
    done = set()
    for model in plan.models:
        found = current_scores(plan, place, model).scores
        if not found:
            continue
        limit = identity_of(place, model).max_length
        seen = {key_of(score.task, score.config) for score in found}
        for cell in (cell for cell in plan.cells if cell.model == model.name):
            tasks = [find_task(task) for task in cell.evaluates]
            if all(key_of(task.name, settle_config(cell.config, task, limit)) in seen for task in tasks):
                done.add(cell.name)
    return done


def key_of(task: str, settled: FinetuneConfig) -> tuple[str, str]:
    """A task and a hash of what decides a result on it; what only the machine decides is left out."""
    return task, content_hash(settled.model_dump(mode="json", exclude=PLACEMENT | {"precision"}))


def current_scores(plan: Plan, place: Workplace, model: Model) -> ScoreSet:
    """The finished scores of a model, of the weights that its recipe gives and of this version's protocol."""
    folder = place.scores(model.name)
    if not folder.is_dir() or not is_trained(place, plan.runs[model.run]):
        return ScoreSet(())
    found, wanted = read_scores(folder), (identity_of(place, model).hash, PROTOCOL)
    return ScoreSet(tuple(one for one in found.scores if (one.model_hash, one.protocol) == wanted), found.broken)


def identity_of(place: Workplace, model: Model) -> "Identity":
    from biphase.finetuning.encoders import identify

    return identify(reference_of(place, model))


def reference_of(place: Workplace, model: Model) -> str:
    return f"{trained_folder(place, model.run)}@{model.step}"


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
    trained = {name for name, run in plan.runs.items() if is_trained(place, run)}
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
    seconds = seconds_by_task(plan, place)
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


def seconds_by_task(plan: Plan, place: Workplace) -> dict[str, float]:
    """Mean seconds of a finished cell, one training and all its evaluations, by the task that it is trained on."""
    cells: dict[str, dict[tuple[str, float, int], float]] = {}
    for model in plan.models:
        for score in current_scores(plan, place, model).scores:
            own = cells.setdefault(score.trained_on, {})
            key = (model.name, score.config.learning_rate, score.config.seed)
            own[key] = own.get(key, score.seconds["train"]) + score.seconds["evaluate"]
    return {task: sum(own.values()) / len(own) for task, own in cells.items()}
