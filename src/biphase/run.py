"""A run folder, claimed by one process at a time, with configuration and environment written first and the done mark
last; and its checkpoints, by their names and manifests.

runs/NAME-HASH8/  config.yaml  environment.json  metrics.jsonl  done.json
                  steps/STEP/{model/, optimizer.safetensors, manifest.json}
"""

import glob
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, FiniteFloat, ValidationError

from biphase import files
from biphase.config import Count, load_config
from biphase.console import err
from biphase.curriculum import OBJECTIVES, ObjectiveName
from biphase.errors import InputError
from biphase.recipe import Recipe


@dataclass(frozen=True)
class Run:
    path: Path

    @property
    def steps(self) -> Path:
        return self.path / "steps"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def is_done(self) -> bool:
        return (self.path / "done.json").exists()

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the records after the step from which the run continues, because they will be logged again."""
        if self.metrics.exists():
            records = [record for record in read_records(self.metrics) if record["step"] <= step]
            files.write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def mark_done(self, summary: dict[str, Any]) -> None:
        files.write_json(self.path / "done.json", summary)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log, without a last line that a killed process cut short.

    Bytes that are not text, which a power cut may leave, spoil only their own line; a printed line says so.
    """
    with files.reading(path):
        lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        record: Any = None
        with suppress(json.JSONDecodeError):
            record = files.parse_json(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record
        elif line.strip() and number < len(lines):
            tell_once(f"{path}:{number}: no record of a step; it is left out")


@contextmanager
def claim_run(run: Run, config: dict[str, Any], environment: dict[str, Any]) -> Iterator[None]:
    """Hold the folder for training, after removing the half-written files of killed processes.

    If the start fails before any work is done, remove a new folder again. Raises `BusyError` if another process holds
    it.
    """
    path, is_new = run.path, not run.path.exists()
    with files.locked(path / ".lock", busy=f"{path} is in use by another process; wait for it, or stop it first"):
        try:
            for folder in (path, run.steps):
                files.sweep_parts(folder)
            if not run.is_done:  # else only a lost checkpoint is made again
                files.write_text(path / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
                files.write_json(run.environment, add_earlier(run, environment | {"run": path.name}))
            yield
        except BaseException:  # Ctrl-C too, because an empty folder would pass for a run
            if is_new and not (run.is_done or run.metrics.exists() or whole_steps(run)):
                files.remove_folder(path)
            raise


TICK_SECONDS = 10.0
"""The most training time that a kill leaves uncounted."""


@contextmanager
def keep_time(write: Callable[[float], None], before: float) -> Iterator[Callable[[], float]]:
    """Add the seconds that the block takes to those `before`, and pass the sum to `write` every few seconds, because a
    kill gives no notice. Yield a function that returns the sum so far."""
    started, over = time.perf_counter(), threading.Event()

    def so_far() -> float:
        return round(before + time.perf_counter() - started, 1)

    def write_sum() -> None:
        with suppress(OSError):  # on a full disk the training itself fails; the user must see that error
            write(so_far())

    def tick() -> None:
        while not over.wait(TICK_SECONDS):
            write_sum()

    write_sum()
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield so_far
    finally:
        over.set()
        thread.join()
        write_sum()


def add_earlier(run: Run, environment: dict[str, Any]) -> dict[str, Any]:
    """Add the environments in which a run was trained before, if they differ from this one, under `earlier`."""
    before: dict[str, Any] = {}
    if run.environment.exists() and run.metrics.exists():  # else nothing was trained there
        before = files.read_json_as(run.environment, dict[str, Any], "delete it, and rerun")
    sessions = [*before.pop("earlier", ()), before]
    earlier = [session for session in sessions if session not in ({}, environment)]
    return environment | ({"earlier": earlier} if earlier else {})


def is_run_folder(path: Path) -> bool:
    """Tell whether a folder is a run. A model folder may have a config.yaml of its own beside its config.json."""
    return (path / "config.yaml").exists() and not (path / "config.json").exists()


def open_run(path: Path) -> Run:
    """Open an existing run for reading. Raises `InputError` for another folder."""
    if not (path / "config.yaml").exists():
        meant = sorted(Path("runs").glob(f"{glob.escape(path.name)}-*")) if path == Path(path.name) else []
        hint = f"; write {' or '.join(map(str, meant))}" if meant else ""
        raise InputError(f"{path} is not a run folder (it has no config.yaml){hint}")
    return Run(path)


class MetricsRow(BaseModel):
    """The keys of every record in metrics.jsonl that readers need."""

    step: Count
    objective: ObjectiveName
    loss: FiniteFloat


class TrainingRow(MetricsRow):
    """The further keys of an update's record."""

    tokens_seen: Count
    flops_per_second: FiniteFloat


class ValidationRow(MetricsRow):
    """The further keys of a validation's record."""

    accuracy: FiniteFloat
    bits_per_byte: FiniteFloat


def read_metrics(run: Run, kind: Literal["train", "validation"]) -> list[dict[str, Any]]:
    """Read the records of one kind in metrics.jsonl, in the order of their steps: a checkpoint may be made, and
    validated, after those of later steps. Of several records of a step and an objective, the first counts. Leave out a
    record with a missing or wrong number, and print a line."""
    rows, form = dict[tuple[int, str], dict[str, Any]](), TrainingRow if kind == "train" else ValidationRow
    for record in read_records(run.metrics):
        if record.get("kind") == kind:
            try:
                form.model_validate(record, strict=True)
                rows.setdefault((record["step"], record["objective"]), record)
            except ValidationError as error:
                key, reason = error.errors()[0]["loc"][0], error.errors()[0]["msg"]
                tell_once(f"{run.metrics}: the {kind} record of step {record['step']} is left out ({key}: {reason})")
    return sorted(rows.values(), key=itemgetter("step"))


@cache
def tell_once(line: str) -> None:
    """Print a line once in this process."""
    err.print(line)


def read_recipe(run: Run) -> Recipe:
    """Read a run's resolved recipe. Raises `InputError` naming config.yaml when it is damaged."""
    try:
        return load_config(Recipe, run.path / "config.yaml")
    except InputError as error:
        raise InputError(f"{error}; delete it and done.json, and run the run's own command to write it again") from None


def read_own_name(run: Run) -> str:
    """Read the name that a run had when it began, whatever its folder is called now: its recipe's name, and the
    beginning of the hash of everything that decides its weights. Its checkpoints record it too."""
    if not run.environment.exists():
        return run.path.name
    return str(files.read_json_as(run.environment, dict[str, Any], "delete it, and rerun").get("run"))


def read_done(run: Run) -> dict[str, int] | None:
    """Read the record that the run wrote at its end; None for an unfinished run."""
    return files.read_json_as(run.path / "done.json", dict[str, int]) if run.is_done else None


# Its checkpoints


@dataclass(frozen=True)
class CheckpointManifest:
    """The record of a checkpoint and of its run's origin."""

    step: int
    """The updates since random weights (or since the foreign model), over all parents."""
    run_step: int
    """The updates of this run, as its metrics.jsonl counts them."""
    tokens_seen: int
    data_position: int
    """The tokens of the data order before the next batch."""
    data_fingerprint: str
    tokenizer_hash: str
    objective: ObjectiveName
    is_decayed: bool
    """Whether the learning rate has begun to fall, so that a branch from here does not start at the full rate."""
    parent: str | None
    """The content hash of the checkpoint or model that the run began with."""
    carried: list[str]
    """The parts that the run took over from there: weights, optimizer, data position."""
    texts: tuple[str, ...]
    """The fingerprint of each shard set that the run trains on."""
    run: str
    """The run's own name (`read_own_name`)."""
    files: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each file."""
    order_step: int = 0
    """The step, over all parents, at which the data order of this run began; 0 in the records of earlier versions."""
    pass_step: int | None = None
    """The step, over all parents, from which passes over the text (`mask_passes`) count; None in the records of earlier
    versions."""
    pass_position: int = 0
    """The tokens of the data order before that step."""
    validation_text: str = ""
    """The fingerprint of the shard set with the run's validation text; empty in the records of earlier versions."""

    @property
    def is_causal(self) -> bool:
        """Whether its last objective is causal."""
        return OBJECTIVES[self.objective].is_causal

    @property
    def content(self) -> str:
        """The hash of the weights: equal hashes mean equal models."""
        return files.content_hash({name: digest for name, digest in self.files.items() if name.startswith("model/")})


def whole_steps(run: Run) -> list[int]:
    """List the steps with a whole checkpoint, ascending."""
    if not run.steps.is_dir():
        return []
    return sorted(int(p.name) for p in run.steps.iterdir() if p.name.isdecimal() and (p / "manifest.json").exists())


def split_reference(reference: str) -> tuple[str, str]:
    """Split `RUN@STEP` → (RUN, STEP), `RUN` → (RUN, ""). Folders above the run may have an @ in their names."""
    path, at, step = reference.rpartition("@")
    return (path, step) if at and "/" not in step else (reference, "")


def name_run(reference: str) -> str:
    """Find the `RUN[@STEP]` for a recipe's name or the beginning of a folder's name: `first` → `runs/first-c8c132fd`.

    Among several runs of one name, take the one that was trained last. An existing folder stands for itself. Raises
    `InputError` if runs of several names begin like this.
    """
    path, at = split_reference(reference)
    folder = Path(path)
    if folder.exists():
        return reference
    runs = Path("runs") if folder == Path(folder.name) else folder.parent
    began = [Run(candidate) for candidate in runs.glob(f"{glob.escape(folder.name)}*") if whole_steps(Run(candidate))]
    named = [run for run in began if run.path.name.rpartition("-")[0] == folder.name] or began
    if len({run.path.name.rpartition("-")[0] for run in named}) > 1:
        raise InputError(f"{path} is the beginning of {', '.join(sorted(str(run.path) for run in named))}: name one")
    if not named:
        return reference
    last = max(named, key=lambda run: run.metrics.stat().st_mtime if run.metrics.exists() else 0.0)
    others = f", the last trained of {len(named)} runs of this name" if len(named) > 1 else ""
    err.print(f"{path}: {last.path}{others}")
    return f"{last.path}@{at}" if at else str(last.path)


def find_checkpoint(reference: str) -> Path:
    """Find the folder behind `RUN` (its last step) or `RUN@STEP`.

    Raises `InputError` if there is none, if a finished run lacks its last step, and for the checkpoint of another run
    or step.
    """
    path, step = split_reference(reference)
    run = open_run(Path(path))
    steps = whole_steps(run)
    if not steps and (run.path / "stages").is_dir():
        raise InputError(f"{path} is a run of biphase embed: give its model, the folder `out` in its config.yaml")
    if not steps:
        raise InputError(f"{path} has no whole checkpoint yet")
    if not step:
        done = read_done(run)
        if done is not None and done.get("step") != steps[-1]:
            reason = f"{path} is done at step {done.get('step')}, whose checkpoint is damaged or was removed"
            remedy = f"say {path}@{steps[-1]} for that, or delete done.json and run the run's own command again"
            raise InputError(f"{reason}; the last whole one is @{steps[-1]}: {remedy}")
        step = str(steps[-1])
    elif not step.isdecimal() or int(step) not in steps:
        raise InputError(f"{path} has no checkpoint '@{step}'; it has {', '.join(f'@{whole}' for whole in steps)}")
    read_checkpoint_manifest(run.steps / step, check_files=False)
    return run.steps / step


def read_checkpoint_manifest(folder: Path, *, check_files: bool = True) -> CheckpointManifest:
    """Read the manifest of a checkpoint and, with `check_files`, check that all its files are there and unchanged.

    Raises `InputError` for a damaged checkpoint, and for one of another run or step than its folder says.
    """
    remedy = "delete the folder and rerun"
    manifest = files.read_hashed(folder / "manifest.json", CheckpointManifest, remedy)
    run = Run(folder.parent.parent)
    if folder.parent == run.steps and (run.path / "config.yaml").exists():  # else it was copied out of its run
        name = read_own_name(run)
        if manifest.run != name or str(manifest.step) != folder.name:
            made, own = f"step {manifest.step} of {manifest.run}", f"step {folder.name} of {name}"
            raise InputError(f"{folder} is {made}, not {own}: put its own back, or {remedy}")
    if check_files:
        files.refuse_changed(folder, manifest.files, remedy)
    return manifest


def find_model(reference: str) -> str:
    """Return a name that transformers can load: the model folder of `RUN[@STEP]`, else the reference itself."""
    if is_run_folder(Path(split_reference(reference)[0])):
        return str(find_checkpoint(reference) / "model")
    return reference
