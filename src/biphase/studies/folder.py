"""The folder of a study: which runs and cells of its plan are done there, which failed, and how long they took.

OUT/  study.yaml  runs/NAME-HASH8/  trained/NAME.json  scores/MODEL/TASK-HASH16/  failed/UNIT.json

A trained run has a record in `trained`. A process that trains it holds `.NAME.lock`, and records the time so far in
`.NAME.clock`. A scored cell has a folder in `scores`. Both count while they match the plan: a record by a key of its
recipe and of all recipes behind it, a cell by weights and settings. The checkpoints of models whose cells are all
scored may be deleted: nothing is trained again for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from biphase.config import read_yaml
from biphase.corpus.shards import read_shard_manifest
from biphase.encoder.models import identify
from biphase.engine.scheduler import Failure, read_failures
from biphase.errors import BusyError, InputError
from biphase.files import is_locked, read_hashed, remove_folder, write_text
from biphase.finetuning.config import PLACEMENT, PROTOCOL, FinetuneConfig, settle_config
from biphase.finetuning.scores import Score, ScoreSet, read_scores
from biphase.run import Run, open_run, read_metrics, whole_steps
from biphase.studies.plan import Plan, PlannedRun, StudyCell, train_name
from biphase.studies.spec import EMBED, Study, scored_as
from biphase.tasks.spec import find_task

TRAINING = "train"
"""The kind of training runs among the units; in place of a unit's name it means all of them."""


@dataclass(frozen=True)
class TrainedRecord:
    """The record of a trained run: `trained/RUN.json`."""

    folder: str
    """Its name below runs/."""
    key: str
    """The `key` of the run in its plan."""
    seconds: Annotated[float, Field(ge=0, le=1e10)]
    placeless_key: str
    """The `placeless_key` of the run in its plan."""
    text: tuple[str, ...] | None = None
    """The fingerprints of its shard sets when it was trained; None while it trains."""
    untimed: tuple[str, ...] = ()
    """Folders of runs that began without a clock: for these `seconds` is too small."""
    models: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Its models by step: their hashes, and the number of tokens that they have positions for. These identify the
    scores of a checkpoint that is gone."""

    @property
    def is_timed(self) -> bool:
        return self.folder not in self.untimed


def read_record(path: Path) -> TrainedRecord:
    """Read the record of a run, or its clock. Raises `InputError` for a damaged one."""
    remedy = "delete it, and the study's own command finds the run again, or trains it again"
    return read_hashed(path, TrainedRecord, remedy)


def find_record(folder: Path, run: PlannedRun) -> TrainedRecord | None:
    """Read the record of a run, if it matches the plan and the run is still there. Shard sets match by their places or
    by their contents."""
    path = folder / "trained" / f"{run.name}.json"
    record = read_record(path) if path.exists() else None
    if record is None or not Run(folder / "runs" / record.folder).is_done:
        return None
    if record.key == run.key:
        return record
    is_moved = record.placeless_key == run.placeless_key and record.text == tuple(map(find_text, run.recipe.data.sets))
    return record if is_moved else None


def find_text(shards: str) -> str | None:
    """Find the fingerprint of a shard set; None where it is not here."""
    is_here = (Path(shards) / "manifest.json").exists()
    return read_shard_manifest(Path(shards)).fingerprint if is_here else None


def reach_step(folder: Path, run: PlannedRun, step: int) -> str:
    """Return `FOLDER@STEP` of a run that matches the plan. Without such a checkpoint it raises `BusyError` while
    another process works on the run, else `InputError`."""
    is_busy = False
    for _ in range(2):  # a run may finish between the two looks
        record = find_record(folder, run)
        path = folder / "runs" / record.folder if record else None
        if path and step in whole_steps(Run(path)):
            return f"{path.resolve()}@{step}"
        locks = [folder / "trained" / f".{run.name}.lock", *folder.glob(f"runs/{run.name}-????????/.lock")]
        is_busy = is_busy or any(map(is_locked, locks))
    if is_busy:
        raise BusyError(f"another process makes {run.name}@{step}")
    raise InputError(f"{run.name}@{step} is no longer there; the same command makes it again")


def drop_checkpoints(folder: Path, plan: Plan) -> None:
    """Delete checkpoints that no run needs any more and that are no model; none if the folder has another plan by now,
    whose runs may begin at them."""
    file = folder / "study.yaml"
    if not file.exists() or file.read_text(encoding="utf-8") != study_text(plan.study):
        return
    state = read_runs(plan, folder)
    for name, record in state.records.items():
        for step in {*plan.runs[name].stored_steps} - state.needed[name]:
            remove_folder(open_run(folder / "runs" / record.folder).steps / str(step))


def claim_study_folder(path: Path, study: Study) -> Path:
    """Write the study into its folder. Raises `InputError` for the folder of another study."""
    file = path / "study.yaml"
    if file.exists() and (name := read_yaml(file).get("name")) != study.name:
        raise InputError(f"{path} is the folder of the study '{name}', not of '{study.name}'; choose another one")
    path.mkdir(parents=True, exist_ok=True)
    write_text(file, study_text(study))
    return path


def study_text(study: Study) -> str:
    """Write the text of `study.yaml` in a study's folder."""
    return yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# What is scored


@dataclass(frozen=True)
class StudyState:
    """The progress of a plan in a study's folder, read once: every record, and every `score.json`."""

    plan: Plan
    folder: Path
    scores: dict[str, ScoreSet]
    """By model, the finished scores that match the study: the model's weights, this version's protocol, and the
    settings of one of its cells."""
    records: dict[str, TrainedRecord]
    """The records of trained runs."""
    trained: set[str]
    """Complete runs: they have every checkpoint that is still needed."""
    scored: set[str]
    """Names of the cells with all their scores."""
    begun: dict[str, int]
    """The logged steps of runs that have begun and are not complete."""
    steps: dict[str, set[int]] = field(default_factory=dict)
    """The checkpoints of each recorded run."""
    needed: dict[str, set[int]] = field(default_factory=dict)
    """The steps of each run whose checkpoints are models to be scored, or begin a run that is not complete."""

    @property
    def done(self) -> set[str]:
        return {train_name(run) for run in self.trained} | self.scored

    @property
    def kinds(self) -> dict[str, str]:
        """Every unit of the plan by its name → `train`, or the task that the cell is trained on."""
        kinds = {train_name(run): TRAINING for run in self.plan.runs}
        return kinds | {cell.name: scored_as(cell.task) for cell in self.plan.cells}

    def read_failures(self) -> list[Failure]:
        """Read which units failed last time and are still to be done. A unit that failed under an earlier version of
        the study file may be done by now, or gone from the plan."""
        left = self.kinds.keys() - self.done
        return [failure for failure in read_failures(self.folder) if failure.unit in left]

    def identify(self, run: str, step: int) -> tuple[str, int] | None:
        """Return the hash of a model and the number of tokens that it has positions for: from its checkpoint, or from
        the record where that is gone; None without either."""
        if step in self.steps.get(run, ()):
            model = identify(f"{(self.folder / 'runs' / self.records[run].folder).resolve()}@{step}")
            return model.hash, model.max_length
        return self.records[run].models.get(step) if run in self.records else None


def read_runs(plan: Plan, folder: Path) -> StudyState:
    """Read the state of a study's runs, without scores."""
    records, steps = dict[str, TrainedRecord](), dict[str, set[int]]()
    for name, run in plan.runs.items():
        if record := find_record(folder, run):
            records[name], steps[name] = record, {*whole_steps(Run(folder / "runs" / record.folder))}
    return find_needed(StudyState(plan, folder, {}, records, set(), set(), {}, steps))


def find_needed(state: StudyState, scored_models: set[str] | frozenset[str] = frozenset()) -> StudyState:
    """Return the state with the needed checkpoints, and the runs that have all of theirs. A model in `scored_models`
    needs no checkpoint."""
    trained, needed = {*state.records}, {name: set[int]() for name in state.plan.runs}
    for (run, step), users in reversed(
        state.plan.checkpoints.items()
    ):  # a run comes behind the run that it starts from
        if not scored_models.issuperset(users["models"]) or not trained.issuperset(users["needed_by"]):
            needed[run].add(step)
            if step not in state.steps.get(run, ()):
                trained.discard(run)
    return replace(state, trained=trained, needed=needed)


def read_state(plan: Plan, folder: Path) -> StudyState:
    """Read the state of a study's folder: runs, scores, and the runs that have begun."""
    # 1. Runs.
    state = read_runs(plan, folder)
    # 2. The scores of each model that match a cell of the plan.
    cells: dict[str, list[StudyCell]] = {model.name: [] for model in plan.models}
    for cell in plan.cells:
        cells[cell.model].append(cell)
    scores = {model.name: ScoreSet(()) for model in plan.models}
    scored, scored_models = set[str](), set[str]()
    keys_of = cache(keys_of_cell)  # models share the same few hundred cells
    for model in plan.models:
        identity = state.identify(model.run, model.step)
        score_folder = folder / "scores" / model.name
        if identity is None or not score_folder.is_dir():
            continue
        model_hash, max_length = identity
        due = {cell.name: keys_of(cell.task, cell.evaluates, cell.config, max_length) for cell in cells[model.name]}
        all_due = set().union(*due.values())
        read = read_scores(score_folder)
        current, matched = list[Score](), set[str]()
        for score in read.scores:
            # The plan may name its precision, or leave the choice to the machine.
            name = f"{score.trained_on} {score.task}" if score.trained_on.startswith(EMBED) else score.task
            configs = (score.config, score.config.model_copy(update={"precision": "auto"}))
            keys = {score_key(name, config) for config in configs}
            if (score.model_hash, score.protocol) == (model_hash, PROTOCOL) and keys & all_due:
                current.append(score)
                matched |= keys
        scores[model.name] = ScoreSet(tuple(current), read.broken)
        scored_cells = {name for name, keys in due.items() if keys <= matched}
        scored |= scored_cells
        if scored_cells == due.keys():
            scored_models.add(model.name)
    # 3. Needed checkpoints, which follow from both, and the steps of runs that have begun.
    state = find_needed(state, scored_models)
    begun = dict[str, int]()
    for name in plan.runs.keys() - state.trained:
        for path in folder.glob(f"runs/{name}-????????"):
            if (path / "config.yaml").exists() and (rows := read_metrics(open_run(path), "train")):
                begun[name] = max(rows[-1]["step"], begun.get(name, 0))
    return replace(state, scores=scores, scored=scored, begun=begun)


@cache
def score_key(task: str, settled: FinetuneConfig) -> str:
    """Name a task and the settings that decide a result on it. Cached: all models of a study share the same few hundred
    settings."""
    return f"{task} {settled.model_dump_json(exclude=PLACEMENT)}"


def keys_of_cell(trained_on: str, evaluates: Sequence[str], config: FinetuneConfig, max_length: int) -> set[str]:
    """List the keys of a cell's scores, one for each task that it is evaluated on. `max_length` is the number of tokens
    that its network has positions for."""
    if trained_on.startswith(EMBED):
        return {score_key(f"{trained_on} {task}", config) for task in evaluates}
    return {score_key(task.name, settle_config(config, task, max_length)) for task in map(find_task, evaluates)}


# Text of its training


def refuse_other_text(state: StudyState) -> None:
    """Raise `InputError` where a shard set holds other text than its run was trained on. It may be gone."""
    text_of = cache(find_text)
    for name, record in state.records.items():
        for path, content in zip(state.plan.runs[name].recipe.data.sets, record.text or (), strict=False):
            if content != (held := text_of(path) or content):
                raise InputError(
                    f"run {name} was trained on other text ({content[:8]}) than {path} holds now "
                    f"({held[:8]}): put that text back, or choose another folder for the study"
                )
