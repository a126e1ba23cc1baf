"""The folder of a study: what of its plan is trained and scored there, what failed, and what it took.

OUT/  study.yaml  runs/NAME-HASH8/  trained/NAME.json  scores/MODEL/TASK-HASH16/  failed/UNIT.json

A trained run has a record in `trained`, a scored cell its folder in `scores`. Both count only while they are what the
plan asks for: the record by a key of the recipe and of all recipes behind it, the cell by weights and settings.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from biphase.errors import InputError
from biphase.files import content_hash, read_json, write_text
from biphase.finetuning.config import PLACEMENT, PROTOCOL, FinetuneConfig, settle_config
from biphase.finetuning.models import identify
from biphase.finetuning.scores import Score, ScoreSet, read_scores
from biphase.run import Run, open_run, read_metrics, whole_steps
from biphase.study.plan import Checkpoint, EvaluatedModel, Plan, StudyCell
from biphase.study.spec import Study
from biphase.study.trunks import PlannedRun
from biphase.tasks.spec import find_task


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


def train_name(run: str) -> str:
    return f"train {run}"


# What is done


def find_record(place: Workplace, run: str, key: str) -> dict[str, Any] | None:
    """What is recorded of a run, if it was trained as the plan wants it and is still there."""
    path = place.record(run)
    record = read_json(path) if path.exists() else {}
    return record if record.get("key") == key and Run(place.runs / record["folder"]).is_done else None


def find_step(place: Workplace, run: str, key: str, step: int) -> str | None:
    """`FOLDER@STEP` of a run that was trained as the plan wants it; None where there is no such checkpoint."""
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


def cells_by_model(plan: Plan) -> dict[str, list[StudyCell]]:
    cells: dict[str, list[StudyCell]] = {model.name: [] for model in plan.models}
    for cell in plan.cells:
        cells[cell.model].append(cell)
    return cells


ScoreKey = tuple[str, str]
"""A task, and a hash of what decides a result on it."""


def keys_of_cell(cell: StudyCell, reference: str) -> set[ScoreKey]:
    """One for each task that the cell is evaluated on."""
    limit = identify(reference).max_length
    tasks = [find_task(task) for task in cell.evaluates]
    return {score_key(task.name, settle_config(cell.config, task, limit)) for task in tasks}


def keys_of_score(score: Score) -> set[ScoreKey]:
    """As a study may have asked for it: with this precision, or with whatever the machine has units for."""
    configs = (score.config, score.config.model_copy(update={"precision": "auto"}))
    return {score_key(score.task, config) for config in configs}


def score_key(task: str, settled: FinetuneConfig) -> ScoreKey:
    return task, content_hash(settled.model_dump(mode="json", exclude=PLACEMENT))


def current_scores(plan: Plan, place: Workplace, model: EvaluatedModel) -> ScoreSet:
    """The finished scores of a model that the study asks for: by the weights that its recipe gives, of this version's
    protocol, with the settings of one of its cells."""
    folder, reference = place.scores(model.name), reference_of(plan, place, model)
    if not folder.is_dir() or reference is None:
        return ScoreSet(())
    found, wanted = read_scores(folder), (identify(reference).hash, PROTOCOL)
    asked = {key for cell in plan.cells if cell.model == model.name for key in keys_of_cell(cell, reference)}
    current = [one for one in found.scores if (one.model_hash, one.protocol) == wanted and keys_of_score(one) & asked]
    return ScoreSet(tuple(current), found.broken)


def reference_of(plan: Plan, place: Workplace, model: EvaluatedModel) -> str | None:
    return find_step(place, model.run, plan.runs[model.run].key, model.step)


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
