"""The folder of a study: the runs and cells of its plan that are done or have failed, and their times.

OUT/  study.yaml  runs/NAME-HASH8/  trained/NAME.json  scores/MODEL/TASK-HASH16/  failed/UNIT.json

A trained run has a record in `trained`. A process that trains it holds `.NAME.lock` and writes the time so far into
`.NAME.clock`. A scored cell has a folder in `scores`. Records and scores count as long as they match the plan: a record
by a key over its recipe and the recipes of all its ancestors, a score by weights and settings. Checkpoints of models
whose cells are all scored may be deleted; they are not trained again.
"""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from biphase.config import read_yaml
from biphase.corpus.shards import is_shard_set, read_shard_manifest
from biphase.encoder.models import identify
from biphase.engine.scheduler import Failure, read_failures
from biphase.engine.units import Engine
from biphase.errors import BusyError, InputError
from biphase.files import Stamp, is_locked, read_hashed, read_json_as, refuse_links, remove_folder, stamp_of, write_text
from biphase.finetuning.config import LATER_PROTOCOLS, PLACEMENT, PROTOCOL, FinetuneConfig, settle_config
from biphase.finetuning.grid import resolve_for
from biphase.finetuning.scores import Score, ScoreSet, read_scores
from biphase.finetuning.words import WORD_SCORES
from biphase.hub import find_cached, model_fingerprint
from biphase.recipe import Init
from biphase.run import Run, open_run, read_checkpoint_manifest, read_metrics, read_recipe, whole_steps
from biphase.studies.plan import Plan, PlannedRun, StudyCell, train_name
from biphase.studies.spec import EMBED, Study, find_data_dirs
from biphase.tasks.sources import HUB, dir_of, find_source
from biphase.tasks.spec import find_task

TRAINING = "train"
"""The kind of training units. In place of a unit's name it stands for all of them."""


@dataclass(frozen=True)
class TrainedRecord:
    """The record of a trained run: `trained/RUN.json`."""

    folder: Annotated[str, Field(pattern=r"^([^/]+-[0-9a-f]{8})?$")]
    """The name of the run's folder below runs/, NAME-HASH8; empty in a clock of the first training."""
    key: str
    """The `key` of the run in its plan."""
    seconds: Annotated[float, Field(ge=0, le=1e10)]
    placeless_key: str
    """The `placeless_key` of the run in its plan."""
    text: tuple[str, ...] | None = None
    """The fingerprints of the shard sets that it was trained on; None during the training."""
    validation_text: str = ""
    """The fingerprint of the set with its validation text; empty during the training, and in the records of earlier
    versions."""
    parent: str | None = None
    """The content hash of the checkpoint or model that it began with; None for random weights, during the training, and
    in the records of earlier versions."""
    untimed: tuple[str, ...] = ()
    """The folders of runs that began without a clock; their `seconds` are too few."""
    models: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Step → the hash and the number of positions of the model there. They identify the scores of a deleted
    checkpoint."""

    @property
    def is_timed(self) -> bool:
        return self.folder not in self.untimed


RECORD_REMEDY = "delete it: the study's own command then finds the run again, or trains it again"


def read_record(path: Path) -> TrainedRecord:
    """Read the record of a run, or its clock. Raises `InputError` for a damaged file."""
    return read_hashed(path, TrainedRecord, RECORD_REMEDY)


def find_record(folder: Path, run: PlannedRun) -> TrainedRecord | None:
    """Read the record of a run. Return None if there is none, if it does not match the plan, or if the run's folder is
    gone or not done. Shard sets match by path or by content. Raises `InputError` for a record that names the folder of
    another run."""
    path = folder / "trained" / f"{run.name}.json"
    record = read_record(path) if path.exists() else None
    if record is not None and record.folder.rpartition("-")[0] != run.name:
        raise InputError(f"{path} names '{record.folder}', which is no folder of {run.name}; {RECORD_REMEDY}")
    if record is None or not Run(folder / "runs" / record.folder).is_done:
        return None
    if record.key == run.key:
        return record
    is_moved = record.placeless_key == run.placeless_key and record.text == tuple(map(find_text, run.recipe.data.sets))
    return record if is_moved else None


def find_text(shards: str) -> str | None:
    """Return the fingerprint of a shard set, or None for a missing one."""
    return read_fingerprint(Path(shards), stamp_of(Path(shards, "manifest.json"))) if is_shard_set(shards) else None


@cache
def read_fingerprint(shards: Path, _stamp: Stamp) -> str:
    """Read the fingerprint of a shard set once per stamp, because the manifest of a large set has megabytes."""
    return read_shard_manifest(shards).fingerprint


def reach_step(folder: Path, run: PlannedRun, step: int) -> str:
    """Return `FOLDER@STEP` of a run that matches the plan. For a missing checkpoint, raise `BusyError` while another
    process works on the run, else `InputError`; likewise for the checkpoint of another run or step."""
    is_busy = False
    for _ in range(2):  # a run may finish between the look for its checkpoint and the look for its lock
        record = find_record(folder, run)
        path = folder / "runs" / record.folder if record else None
        if path and step in whole_steps(Run(path)):
            made = read_checkpoint_manifest(Run(path).steps / str(step), check_files=False).run
            if made != path.name:
                raise InputError(f"{path}@{step} is a checkpoint of {made}, not of {path.name}: delete it, and rerun")
            return f"{path.resolve()}@{step}"
        locks = [folder / "trained" / f".{run.name}.lock", *folder.glob(f"runs/{run.name}-????????/.lock")]
        is_busy = is_busy or any(map(is_locked, locks))
    if is_busy:
        raise BusyError(f"another process makes {run.name}@{step}")
    raise InputError(f"{run.name}@{step} no longer exists; the same command makes it again")


def drop_checkpoints(folder: Path, plan: Plan) -> None:
    """Delete the plan's checkpoints, and those of `every_steps`, that neither a run nor an unfinished cell needs any
    more; where the recipe sets `keep_last`, keep those of `every_steps`. Delete none if the folder now belongs to
    another plan, because that plan's runs may begin at them."""
    file = folder / "study.yaml"
    if not file.exists() or file.read_text(encoding="utf-8") != study_text(plan.study):
        return
    state = read_runs(plan, folder)
    for name, record in state.records.items():
        run, checkpoints = plan.runs[name], plan.runs[name].recipe.checkpoints
        dropped = {*run.stored_steps}
        # A run that lacks a needed checkpoint may be on its way there, from an `every_steps` one.
        if name in state.trained and checkpoints.every_steps and "keep_last" not in checkpoints.model_fields_set:
            dropped |= {*range(run.first, run.last + 1, checkpoints.every_steps)}
        for step in (state.steps[name] & dropped) - state.needed[name]:
            remove_folder(open_run(folder / "runs" / record.folder).steps / str(step))


MAKES_WANDB = re.compile(r"runs/[^/]+|scores/[^/]+/tracking/[^/]+")
"""The folders of a study in which W&B makes its own: those of runs, and of the tracking of cells."""


def refuse_links_in(folder: Path) -> None:
    """Raise `InputError` for a link anywhere in a study's folder, which may come from somebody else. Pass over the
    links that W&B makes inside its own folders, of runs and of cells: biphase neither reads nor deletes anything
    there."""
    parents = [folder]
    for parent in parents:  # grows on the way
        makes_wandb = MAKES_WANDB.fullmatch(parent.relative_to(folder).as_posix())
        with suppress(FileNotFoundError), os.scandir(parent) as entries:  # another process may remove it meanwhile
            for entry in entries:  # unlike a `Path`, it knows links without asking the file system
                if entry.is_symlink():
                    refuse_links(Path(entry))
                if entry.is_dir() and not (makes_wandb and entry.name == "wandb"):
                    parents.append(Path(entry))


def claim_study_folder(path: Path, study: Study) -> Path:
    """Write the study file into the study's folder, and return the folder. Raises `InputError` for another study's
    folder, and for a link in it."""
    refuse_links_in(path)
    file = path / "study.yaml"
    if file.exists() and (name := read_yaml(file).get("name")) != study.name:
        raise InputError(f"{path} is the folder of the study '{name}', not of '{study.name}'; choose another one")
    path.mkdir(parents=True, exist_ok=True)
    write_text(file, study_text(study))
    return path


def study_text(study: Study) -> str:
    """Return the text of `study.yaml` in a study's folder."""
    return yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# The state of a study


@dataclass(frozen=True)
class StudyState:
    """The progress of a plan in a study's folder."""

    plan: Plan
    folder: Path
    records: dict[str, TrainedRecord]
    """The records of trained runs."""
    steps: dict[str, set[int]] = field(default_factory=dict)
    """Recorded run → the steps of its checkpoints on disk."""
    scores: dict[str, ScoreSet] = field(default_factory=dict)
    """Model → its finished scores that match the study: the model's weights, this version's protocol, and the settings
    of one of the model's cells."""
    words: tuple[Score, ...] = ()
    """The scores by words alone."""
    scored: set[str] = field(default_factory=set)
    """The names of the cells that have all their scores."""
    scored_models: Set[str] = frozenset()
    """The models whose cells all have their scores. Without scores, every model counts as still to be scored."""
    begun: dict[str, int] = field(default_factory=dict)
    """Run that has begun and is not complete → its last logged step."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Recorded run → its `environment.json`: the machine and the software that trained it."""

    @cached_property
    def needed(self) -> dict[str, set[int]]:
        """Run → the steps whose checkpoints are models still to be scored, or the start of an incomplete run."""
        complete, needed = {*self.records}, {name: set[int]() for name in self.plan.runs}
        for (run, step), users in reversed(self.plan.checkpoints.items()):  # a run comes after its parent
            if not (self.scored_models >= {*users["models"]} and complete.issuperset(users["needed_by"])):
                needed[run].add(step)
                if step not in self.steps.get(run, ()):
                    complete.discard(run)
        return needed

    @cached_property
    def trained(self) -> set[str]:
        """The complete runs: those with a record and every checkpoint that is still needed."""
        return {name for name in self.records if self.needed[name] <= self.steps.get(name, set())}

    @property
    def done(self) -> set[str]:
        return {train_name(run) for run in self.trained} | self.scored

    @property
    def kinds(self) -> dict[str, str]:
        """Name of a unit → its kind: `train`, or the training task of a cell."""
        kinds = {train_name(run): TRAINING for run in self.plan.runs}
        return kinds | {cell.name: cell.training for cell in self.plan.cells}

    def read_failures(self) -> list[Failure]:
        """Read the failures of unfinished units that have not been made up for. A unit that failed under an earlier
        version of the study file may be done by now, or gone from the plan; so may one that blocked others."""
        left = self.kinds.keys() - self.done
        return [failure for failure in read_failures(self.folder) if {failure.unit, failure.cause} <= left]

    def identify(self, run: str, step: int) -> tuple[str, int] | None:
        """Return the hash and the number of positions of a model, from its checkpoint, or from its run's record if the
        checkpoint was deleted; None without either."""
        if step in self.steps.get(run, ()):
            model = identify(f"{(self.folder / 'runs' / self.records[run].folder).resolve()}@{step}")
            return model.hash, model.max_length
        return self.records[run].models.get(step) if run in self.records else None


def read_runs(plan: Plan, folder: Path) -> StudyState:
    """Read only the state of a study's runs, without scores. Raises `InputError` for a link in the folder."""
    refuse_links_in(folder)
    records = {name: record for name, run in plan.runs.items() if (record := find_record(folder, run))}
    steps = {name: {*whole_steps(Run(folder / "runs" / record.folder))} for name, record in records.items()}
    return StudyState(plan, folder, records, steps)


def read_state(plan: Plan, folder: Path) -> StudyState:
    """Read the state of a study's folder: runs, scores, and the runs that have begun."""
    # 1. Runs.
    state = read_runs(plan, folder)
    # 2. The scores of each model that match a cell of the plan.
    cells: dict[str, list[StudyCell]] = {model.name: [] for model in plan.models}
    for cell in plan.cells:
        cells[cell.model].append(cell)
    scores, scored = {model.name: ScoreSet(()) for model in plan.models}, set[str]()
    keys_of = cache(keys_of_cell)  # all models share a few hundred settings
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
            is_embedded = score.trained_on.startswith(EMBED)
            # The plan may name a precision, or leave the choice to the machine (`auto`).
            name = f"{score.trained_on} {score.task}" if is_embedded else score.task
            configs = (score.config, score.config.model_copy(update={"precision": "auto"}))
            keys = {score_key(name, config) for config in configs}
            protocol = PROTOCOL if is_embedded else LATER_PROTOCOLS.get(score.metric, PROTOCOL)
            if (score.model_hash, score.protocol) == (model_hash, protocol) and keys & all_due:
                current.append(score)
                matched |= keys
        scores[model.name] = ScoreSet(tuple(current), read.broken)
        scored |= {name for name, keys in due.items() if keys <= matched}
    scored_models = {name for name, own in cells.items() if own and scored.issuperset(cell.name for cell in own)}
    runs = {name: folder / "runs" / record.folder for name, record in state.records.items()}
    environments = {name: read_json_as(run / "environment.json", dict[str, Any]) for name, run in runs.items()}
    place = folder / "scores" / WORD_SCORES
    words = read_scores(place).scores if place.is_dir() else ()
    state = replace(state, scores=scores, words=words, scored=scored, scored_models=scored_models)
    state = replace(state, environments=environments)
    # 3. The steps of runs that have begun.
    for name in plan.runs.keys() - state.trained:
        record = state.records.get(name)
        for path in folder.glob(f"runs/{name}-????????"):
            # A run that is done without a record had another recipe.
            is_other = Run(path).is_done and (record is None or path.name != record.folder)
            if not is_other and (path / "config.yaml").exists() and (rows := read_metrics(open_run(path), "train")):
                state.begun[name] = max(rows[-1]["step"], state.begun.get(name, 0))
    return state


@cache
def score_key(task: str, settled: FinetuneConfig) -> str:
    """Return a key that identifies a task and the settings that decide a score on it. Cached, because all models of a
    study share a few hundred settings."""
    return f"{task} {settled.model_dump_json(exclude=PLACEMENT)}"


def keys_of_cell(trained_on: str, evaluates: Sequence[str], config: FinetuneConfig, max_length: int) -> set[str]:
    """Return the keys of a cell's scores, one for each evaluated task. `max_length`: the number of positions of the
    network."""
    if trained_on.startswith(EMBED):
        return {score_key(f"{trained_on} {task}", config) for task in evaluates}
    return {score_key(task.name, settle_config(config, task, max_length)) for task in map(find_task, evaluates)}


def refuse_other_text(state: StudyState) -> None:
    """Raise `InputError` for a shard set whose text differs from the text that its run was trained or validated on. A
    missing shard set passes."""
    for name, record in state.records.items():
        data = state.plan.runs[name].recipe.data
        texts = [("trained", *pair) for pair in zip(data.sets, record.text or (), strict=False)]
        texts += [("validated", data.shards, record.validation_text)] if record.validation_text else []
        for made, path, content in texts:
            if content != (held := find_text(path) or content):
                unlike = f"run {name} was {made} on other text ({content[:8]}) than {path} has now ({held[:8]})"
                raise InputError(f"{unlike}: restore that text, or choose another folder for the study")


def refuse_unlike_validation(state: StudyState) -> None:
    """Raise `InputError` for a trained run whose held-out loss, which a hypothesis compares, was measured on another
    number of tokens than the plan's. Two numbers that the validation text does not exceed mean all of it, and pass if
    that text is here."""
    for name in sorted(state.plan.runs_compared_by_loss & state.records.keys()):
        record, recipe = state.records[name], state.plan.runs[name].recipe
        run, shards = Run(state.folder / "runs" / record.folder), recipe.data.shards
        made, planned = read_recipe(run).validation.tokens, recipe.validation.tokens
        if made == planned:
            continue
        manifest = read_shard_manifest(Path(shards)) if is_shard_set(shards) else None
        is_here = manifest is not None and manifest.fingerprint in (record.validation_text, *(record.text or ()))
        if not (manifest and is_here and min(made, planned) >= manifest.splits["validation"].tokens):
            unlike = (
                f"run {name} measured its loss on at most {made:,} validation tokens, and the study says {planned:,}"
            )
            remedy = f"say validation.tokens: {made} in its recipe, or delete {run.path} to train it again"
            raise InputError(f"{unlike}: {remedy}")


def refuse_other_models(state: StudyState) -> None:
    """Raise `InputError` for a starting model with other weights than a run of the study began with: in another run, or
    here if a run is still to begin with it. For a model of the Hub, the message names the commit that the first run
    began with. A missing model passes."""
    runs, begun = state.plan.runs, defaultdict[str, dict[str, str]](dict)
    for name, record in state.records.items():
        if (model := runs[name].recipe.init.reference) and record.parent:
            begun[model].setdefault(record.parent, name)
    inits = [run.recipe.init for name, run in runs.items() if name not in state.trained]
    for model, init in {init.reference: init for init in inits}.items():
        if model and model in begun and (held := find_weights(init)):
            begun[model].setdefault(held, "")
    for model, weights in begun.items():
        if len(weights) > 1:
            changes = [f"run {by} began with" if by else "now it has" for by in weights.values()]
            told = ", ".join(f"{change} {content[:8]}" for change, content in zip(changes, weights, strict=True))
            first = next(iter(weights.values()))
            commit = None
            if not Path(runs[first].recipe.init.model or "").is_dir():
                commit = read_recipe(Run(state.folder / "runs" / state.records[first].folder)).init.revision
            is_known = commit is not None and re.fullmatch("[0-9a-f]{40}", commit)
            remedy = f"say revision: {commit} for the model" if is_known else "restore the first ones"
            remedy += ", or choose another folder for the study"
            raise InputError(f"the weights of {model} changed ({told}): {remedy}")


def find_weights(init: Init) -> str | None:
    """Return the fingerprint of a starting model in a folder or in the Hub's cache; None if it is not here."""
    source = init.model or ""
    folder = Path(source) if Path(source).is_dir() else None
    if folder is None:
        id, _, revision = (init.reference or "").partition("@")
        with suppress(ValueError):  # the path of a missing folder is no Hub id
            folder = find_cached(id, revision or None)
    return model_fingerprint(source, folder) if folder else None


def refuse_other_data(state: StudyState) -> None:
    """Raise `InputError` for a task with a folder of data whose content, or whose definition, changed since the task
    was scored. Missing data pass."""
    evaluation = state.plan.study.evaluation
    folders = find_data_dirs(evaluation) if evaluation else {}
    scores = [score for own in state.scores.values() for score in own.scores]
    for task in map(find_task, evaluation.tasks if evaluation else ()):
        place, of_hub = dir_of(task, folders), f"{task.hub.id}@" if task.hub else "@"
        made = {score.data_hash for score in scores if score.task == task.name and not score.source.startswith(of_hub)}
        held = ""
        if made and place not in (None, str(HUB)):
            with suppress(InputError):
                held = find_source(task, place).hash
        if held and (others := made - {held}):
            since = f"since its scores were made ({min(others)[:8]}, and {held[:8]} now)"
            remedy = f"restore them, delete these scores below {state.folder / 'scores'}, or choose another folder"
            raise InputError(f"{task.name}: its definition or its data in {place} changed {since}; {remedy}")


def refuse_other_precision(state: StudyState, left: Set[str], engine: Engine) -> None:
    """Raise `InputError` if a cell among the units `left` is to be scored in another precision than its model's other
    scores on the same task, because `auto` means another one for this engine than it meant for those."""
    evaluation = state.plan.study.evaluation
    names = {task: find_task(task).name for task in (evaluation.tasks if evaluation else ())}
    made = {(model, score.task): score.config.precision for model, own in state.scores.items() for score in own.scores}
    begun = {
        (cell.model, task): cell.config
        for cell in state.plan.cells
        if cell.name in left and cell.config.precision == "auto" and not cell.task.startswith(EMBED)
        for task in cell.evaluates
        if (cell.model, names[task]) in made
    }
    here = resolve_for(next(iter(begun.values())), engine).precision if begun else ""
    for model, task in begun:
        if (precision := made[model, names[task]]) != here:
            remedy = f"say evaluation.finetune.precision={precision}, or continue on a device like the first"
            raise InputError(f"{model} was scored on {task} in {precision}, and auto means {here} here: {remedy}")
