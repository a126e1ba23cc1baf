"""The folder of a study: what of its plan is trained and scored there, what failed, what it took, what it declared.

OUT/  study.yaml  runs/NAME-HASH8/  trained/NAME.json  scores/MODEL/TASK-HASH16/  failed/UNIT.json
     hypotheses.json

A trained run has a record in `trained`; beside it the process that trains it holds `.NAME.lock`, and `.NAME.clock` is a
record of what training has taken so far. A scored cell its folder in `scores`. Both count only while they are what the
plan asks for: the record by a key of the recipe and of all recipes behind it, the cell by weights and settings. The
checkpoints of models whose cells are all scored may be deleted: nothing is trained again for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from biphase.config import read_yaml
from biphase.corpus.shards import read_shard_manifest
from biphase.engine.scheduler import Failure, read_failures
from biphase.errors import BusyError, InputError
from biphase.files import content_hash, is_locked, read_json, read_json_as, remove_folder, write_json, write_text
from biphase.finetuning.cells import identify
from biphase.finetuning.config import PLACEMENT, PROTOCOL, FinetuneConfig, settle_config
from biphase.finetuning.scores import Score, ScoreSet, read_scores
from biphase.report.grammar import AskedInequality
from biphase.report.results import MEAN_OF_FAMILIES
from biphase.run import Run, open_run, read_metrics, whole_steps
from biphase.study.plan import Plan, PlannedRun, StudyCell, train_name
from biphase.study.spec import EMBED, PretrainingSeeds, Study, scored_as
from biphase.tasks.spec import find_task

TRAINING = "train"
"""The kind of the units that are training runs; in place of a unit's name, all of them."""


@dataclass(frozen=True)
class TrainedRecord:
    """The record of a trained run: `trained/RUN.json`."""

    folder: str
    """Its name below runs/."""
    key: str
    seconds: float
    text: tuple[str, ...] | None = None
    """The fingerprints of its shard sets when it was trained; None where that was not recorded."""
    untimed: tuple[str, ...] = ()
    """Folders of runs that had begun before their time was kept: of these the seconds are not all."""
    models: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """The models that it gave, by step: their hashes, and how many tokens they have positions for. By these the scores
    of a checkpoint are known when it is gone."""

    @property
    def is_timed(self) -> bool:
        return self.folder not in self.untimed


def find_record(folder: Path, run: PlannedRun) -> TrainedRecord | None:
    """Read the record of a run, if it was trained as the plan wants it and is still there."""
    path = folder / "trained" / f"{run.name}.json"
    record = read_json_as(path, TrainedRecord) if path.exists() else None
    return record if record and record.key == run.key and Run(folder / "runs" / record.folder).is_done else None


def reach_step(folder: Path, run: PlannedRun, step: int) -> str:
    """Return `FOLDER@STEP` of a run that was trained as the plan wants it. Raises, where there is no such checkpoint,
    `BusyError` while another process is at the run, else `InputError`."""
    is_busy = False
    for _ in range(2):  # what was finished while the locks were looked at is there
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
    """Delete checkpoints that no run needs any more and that are no model; none when the folder is that of another plan
    by now: its runs may begin at them."""
    file = folder / "study.yaml"
    if not file.exists() or file.read_text(encoding="utf-8") != study_text(plan.study):
        return
    state = read_runs(plan, folder)
    for name, record in state.records.items():
        for step in {*plan.runs[name].stored_steps} - state.needed[name]:
            remove_folder(open_run(folder / "runs" / record.folder).steps / str(step))


def claim_study_folder(path: Path, study: Study) -> Path:
    """Write the study into its folder. Raises `InputError` when that is another study's."""
    file = path / "study.yaml"
    if file.exists() and (name := read_yaml(file).get("name")) != study.name:
        raise InputError(f"{path} is the folder of the study '{name}', not of '{study.name}'; choose another one")
    path.mkdir(parents=True, exist_ok=True)
    write_text(file, study_text(study))
    return path


def keep_order(study: Study, path: Path) -> Study:
    """Return the study as its folder `path` has it: where the file does not say whether pretraining seeds differ in the
    order of the data, several that were begun there go on as they began."""
    before = read_yaml(path / "study.yaml") if (path / "study.yaml").exists() else {}
    begun = {group["group"]: group.get("pretraining_seeds") for group in before.get("arms", ())}

    def settle(part: Any, seeds_before: dict[str, Any] | None) -> Any:
        """Settle the seeds of the study, or of a group of its arms, by those that its folder has."""
        seeds = part.pretraining_seeds
        if seeds is None or "order" in seeds.model_fields_set or not seeds_before or seeds_before["count"] < 2:
            return part
        settled = PretrainingSeeds(count=seeds.count, order=seeds_before["order"])
        return part.model_copy(update={"pretraining_seeds": settled})

    arms = tuple(settle(group, begun.get(group.group)) for group in study.arms)
    return settle(study, before.get("pretraining_seeds")).model_copy(update={"arms": arms})


def study_text(study: Study) -> str:
    """Write the text of `study.yaml` in a study's folder."""
    return yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# What is scored


@dataclass(frozen=True)
class StudyState:
    """The part of a plan that is done in a study's folder, read once: every record, and every `score.json`."""

    plan: Plan
    folder: Path
    scores: dict[str, ScoreSet]
    """By model, the finished scores that the study asks for: of the weights that the model's recipe gives, of this
    version's protocol, with the settings of one of its cells."""
    records: dict[str, TrainedRecord]
    """What is recorded of the runs that are trained."""
    trained: set[str]
    """Runs that are complete: they have every checkpoint that something still needs."""
    scored: set[str]
    """Names of the cells whose scores are all there."""
    begun: dict[str, int]
    """The steps, by their logs, of runs that have begun and are not complete."""
    steps: dict[str, set[int]] = field(default_factory=dict)
    """The checkpoints of each run that is recorded."""
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

    @property
    def failures(self) -> list[Failure]:
        """Units that failed last time and are still to be done: what failed as another version of the study file had it
        may be done as this one has it, or not asked for."""
        left = self.kinds.keys() - self.done
        return [failure for failure in read_failures(self.folder) if failure.unit in left]

    def identify(self, run: str, step: int) -> tuple[str, int] | None:
        """Return the hash of a model and how many tokens it has positions for: those of its checkpoint, or, where that
        is gone, those that its record has; None where neither is there."""
        if step in self.steps.get(run, ()):
            model = identify(f"{(self.folder / 'runs' / self.records[run].folder).resolve()}@{step}")
            return model.hash, model.max_length
        return self.records[run].models.get(step) if run in self.records else None


def read_runs(plan: Plan, folder: Path) -> StudyState:
    """Read the state of a study's runs alone: which are trained, which of their checkpoints are there and needed."""
    records, steps = dict[str, TrainedRecord](), dict[str, set[int]]()
    for name, run in plan.runs.items():
        if record := find_record(folder, run):
            records[name], steps[name] = record, {*whole_steps(Run(folder / "runs" / record.folder))}
    return find_needed(StudyState(plan, folder, {}, records, set(), set(), {}, steps))


def find_needed(state: StudyState, scored_models: set[str] | frozenset[str] = frozenset()) -> StudyState:
    """Return the state with the checkpoints that are needed, and the runs that have all of theirs. A model that is
    scored on all its tasks needs no checkpoint."""
    trained, needed = {*state.records}, {name: set[int]() for name in state.plan.runs}
    for (run, step), users in reversed(state.plan.checkpoints.items()):  # runs stand behind those that they start from
        if not scored_models.issuperset(users["models"]) or not trained.issuperset(users["needed_by"]):
            needed[run].add(step)
            if step not in state.steps.get(run, ()):
                trained.discard(run)
    return replace(state, trained=trained, needed=needed)


def read_state(plan: Plan, folder: Path) -> StudyState:
    state = read_runs(plan, folder)
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
        (model_hash, max_length), read = identity, read_scores(score_folder)
        keys = {cell.name: keys_of(cell.task, cell.evaluates, cell.config, max_length) for cell in cells[model.name]}
        all_keys, current, matched = set().union(*keys.values()), list[Score](), set[str]()
        for score in read.scores:
            # It may have been asked for with its precision, or with whatever the machine has units for.
            name = f"{score.trained_on} {score.task}" if score.trained_on.startswith(EMBED) else score.task
            configs = (score.config, score.config.model_copy(update={"precision": "auto"}))
            keys_of_score = {score_key(name, config) for config in configs}
            if (score.model_hash, score.protocol) == (model_hash, PROTOCOL) and keys_of_score & all_keys:
                current.append(score)
                matched |= keys_of_score
        scores[model.name] = ScoreSet(tuple(current), read.broken)
        scored_cells = {name for name, keys_of_scores in keys.items() if keys_of_scores <= matched}
        scored |= scored_cells
        if scored_cells == keys.keys():
            scored_models.add(model.name)
    state, begun = find_needed(state, scored_models), dict[str, int]()
    for name in plan.runs.keys() - state.trained:
        for path in folder.glob(f"runs/{name}-????????"):
            if (path / "config.yaml").exists() and (rows := read_metrics(open_run(path), "train")):
                begun[name] = max(rows[-1]["step"], begun.get(name, 0))
    return replace(state, scores=scores, scored=scored, begun=begun)


@cache
def score_key(task: str, settled: FinetuneConfig) -> str:
    """Name a task and all that decides a result on it. Cached, because all models of a study are evaluated with the
    same few hundred settings."""
    return f"{task} {settled.model_dump_json(exclude=PLACEMENT)}"


def keys_of_cell(trained_on: str, evaluates: Sequence[str], config: FinetuneConfig, max_length: int) -> set[str]:
    """List the keys of the scores that a cell makes, one for each task that it is evaluated on.

    Args:
        max_length: how many tokens the cell's network has positions for.
    """
    if trained_on.startswith(EMBED):
        return {score_key(f"{trained_on} {task}", config) for task in evaluates}
    return {score_key(task.name, settle_config(config, task, max_length)) for task in map(find_task, evaluates)}


# On what it was trained


def refuse_other_text(state: StudyState) -> None:
    """Raises `InputError` where a run was trained on other text than its shards hold; they may be gone."""
    fingerprints: dict[str, str] = {}
    for name, record in state.records.items():
        for path, content in zip(state.plan.runs[name].recipe.data.sets, record.text or (), strict=False):
            if path not in fingerprints and (Path(path) / "manifest.json").exists():
                fingerprints[path] = read_shard_manifest(Path(path)).fingerprint
            if content != fingerprints.get(path, content):
                raise InputError(
                    f"run {name} was trained on other text ({content[:8]}) than {path} holds now "
                    f"({fingerprints[path][:8]}): put that text back, or choose another folder for the study"
                )


# What was declared, and when


def hash_hypotheses(plan: Plan) -> tuple[str, str]:
    """Return two hashes of eight digits. The first is of what hypotheses say and of what that is about in this plan:
    which arms, at which budgets, on which tasks; a line of the paper is about all of them. The second is of what they
    say alone, which a folder of an earlier version recorded."""
    everything, about = [list(plan.of_first_seed.arms), list(plan.families)], list[list[Any]]()
    for lines in plan.hypotheses:
        about.append([everything if isinstance(line, str) else list_subjects(plan, line) for line in lines])
    words = content_hash([hypothesis.model_dump(mode="json") for hypothesis in plan.study.hypotheses])[:8]
    return content_hash([words, about])[:8], words


def list_subjects(plan: Plan, line: Sequence[Sequence[AskedInequality]]) -> list[Any]:
    """List what a line is about: of each first inequality the label, the arms and tasks of its terms, the baseline, and
    the same of its rivals."""
    subjects = []
    for first, *rivals in line:
        terms = []
        for term in first.operands:
            tasks = [name for name, family in plan.families.items() if term.task in (name, family, MEAN_OF_FAMILIES)]
            terms.append((term.arms, tasks))
        subjects.append([first.label, terms, first.ladder, list_subjects(plan, [[rival] for rival in rivals])])
    return subjects


def declare(plan: Plan, folder: Path, units_done: int) -> None:
    """Record in a study's folder what it declares, as it is about to run; a line for each change."""
    current, words = hash_hypotheses(plan)
    declared = read_declared(folder)
    if not declared or declared[-1]["hash"] != current:
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        entry = {"hash": current, "text": words, "when": when, "units_done": units_done}
        write_json(folder / "hypotheses.json", [*declared, entry])


def read_declared(folder: Path) -> list[dict[str, Any]]:
    """Read what was declared, each time with its `hash` and that of its `text` alone; earlier versions wrote the latter
    as `hash`."""
    path = folder / "hypotheses.json"
    return read_json(path) if path.exists() else []


def tell_declaration(plan: Plan, folder: Path) -> tuple[str, str]:
    """Return the hash of the hypotheses, and a sentence that tells whether they stood before the results did."""
    current, words = hash_hypotheses(plan)
    declared = read_declared(folder)
    if not declared:
        return current, f"Hypotheses {current}: not declared, for the study has not run with them."
    last, is_later = declared[-1], declared[-1]["units_done"]
    when = f"declared {last['when']}"
    when += f", when {is_later} units were done" if is_later else ", before anything was trained"
    worded = [entry for entry in declared if "text" not in entry]
    if last["hash"] not in (current, words):
        history = f"what they said or are about changed since the study last ran; it ran with {last['hash']}"
    elif last in worded:
        history = f"the same words were {when}; which arms and tasks they were about is not recorded"
    elif worded and {entry.get("text", entry["hash"]) for entry in declared} == {last["text"]}:
        since = f"the same words stood there since {worded[0]['when']}"
        history = f"{when}; {since}, about arms and tasks that were not recorded"
    elif len(declared) > 1:
        times = "once" if len(declared) == 2 else f"{len(declared) - 1} times"
        history = f"changed {times} since the first run; the current ones were {when}"
    else:
        history = f"{when}; unchanged since, in words, arms, budgets and tasks"
    return current, f"Hypotheses {current}: {history}."
