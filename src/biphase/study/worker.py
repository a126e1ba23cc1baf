"""What a worker does for a study: train a run, or fit a cell. PyTorch is loaded here only."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from biphase.console import duration, err
from biphase.errors import EXIT_BUSY, STOPPED, BusyError, InputError, StoppedError
from biphase.files import locked, read_json_as, write_json, write_text
from biphase.machine import grace, stop_signals
from biphase.recipe import Recipe
from biphase.run import Run, whole_steps
from biphase.study.folder import (
    StudyFolder,
    TrainedRecord,
    find_record,
    is_complete,
    needed_steps,
    reach_step,
    train_name,
)
from biphase.study.plan import Plan, StudyCell
from biphase.study.trunks import PlannedRun, start_from

TICK_SECONDS = 10.0
"""How much of its time a killed run loses at most."""


def train_unit(plan: Plan, run: str, folder: StudyFolder, processes: int) -> list[str]:
    """Train a run, or make the checkpoints that it still lacks, and record its folder.

    Raises `BusyError` when another process is at it.
    """
    with locked(folder.lock(run), busy=f"another process is at {train_name(run)}"):
        return train_run(plan, run, folder, processes)


def train_run(plan: Plan, run: str, folder: StudyFolder, processes: int) -> list[str]:
    planned = plan.runs[run]
    if is_complete(plan, folder, planned):
        return [f"{train_name(run)}: done by another process"]
    recipe = planned.recipe
    if planned.parent is not None:
        recipe = start_from(planned, reach_step(folder, plan.runs[planned.parent], planned.first))
    keep = tuple(step - planned.first for step in needed_steps(plan, folder, planned))
    recipe = recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"keep": keep})})
    clock = folder.clock(run)
    before = read_clock(folder, planned)
    with keep_time(clock, before) as so_far:
        path = train_here(recipe, folder) if processes == 1 else train_by_torchrun(recipe, folder, processes)
    record = replace(so_far(), folder=path.name, text=read_text(Run(path)))
    write_json(clock, asdict(record))
    clock.replace(folder.record(run))
    last = f", {duration(record.seconds - before.seconds)} of it since it went on" if before.seconds else ""
    return [f"{train_name(run)}: {recipe.num_steps:,} steps in {duration(record.seconds)}{last}"]


def read_text(run: Run) -> tuple[str, ...] | None:
    """The fingerprints of the shard sets that a run was trained on, as its last checkpoint says them."""
    from biphase.pretraining.checkpoint import read_checkpoint_manifest

    steps = whole_steps(run)
    history = read_checkpoint_manifest(run.steps / str(steps[-1]), check_files=False).data_history if steps else []
    return history[-1][1] if history else None


def read_clock(folder: StudyFolder, run: PlannedRun) -> TrainedRecord:
    """What training has taken before: by its clock, else by its record. A folder that has neither is untimed, and what
    a clock says of a run whose folder was removed counts no more."""
    begun = tuple(sorted(path.name for path in folder.runs.glob(f"{run.name}-????????")))
    clock = folder.clock(run.name)
    kept = read_json_as(clock, TrainedRecord) if clock.exists() and begun else None
    if kept is None or kept.key != run.key:
        kept = find_record(folder, run)
    return kept or TrainedRecord("", run.key, 0.0, untimed=begun)


@contextmanager
def keep_time(clock: Path, before: TrainedRecord) -> Iterator[Callable[[], TrainedRecord]]:
    """Add the time of the block to `before` in the file `clock`, every few seconds, for a kill gives no notice; the
    function says what it is so far, and after the block in all."""
    started = time.perf_counter()
    ended: list[float] = []
    over = threading.Event()

    def so_far() -> TrainedRecord:
        seconds = (ended or [time.perf_counter()])[0] - started
        return replace(before, seconds=round(before.seconds + seconds, 1))

    def note() -> None:
        with suppress(OSError):  # a full disk ends the training itself, and its error is to be seen
            write_json(clock, asdict(so_far()))

    def tick() -> None:
        while not over.wait(TICK_SECONDS):
            note()

    note()
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield so_far
    finally:
        ended.append(time.perf_counter())
        over.set()
        thread.join()
        note()


def train_here(recipe: Recipe, folder: StudyFolder) -> Path:
    from biphase.pretraining.loop import train

    return train(recipe, folder.runs).path


def train_by_torchrun(recipe: Recipe, folder: StudyFolder, processes: int) -> Path:
    """The same as `biphase pretrain` under torchrun; what it prints goes to runs/NAME.log. SIGTERM is passed on, and
    raises `StoppedError` when all its processes have ended."""
    folder.runs.mkdir(parents=True, exist_ok=True)
    recipe_file = folder.runs / f"{recipe.name}.yaml"
    write_text(recipe_file, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    command = [sys.executable, "-m", "biphase.distributed", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "biphase", "pretrain", str(recipe_file), "--runs", str(folder.runs)]
    log = folder.runs / f"{recipe.name}.log"
    asked: list[int] = []
    with open(log, "ab") as file:
        begin = file.tell()
        # It ends with this process, however that ends: BIPHASE_PARENT.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BIPHASE_PARENT": str(os.getpid())}
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

        def pass_on(number: int) -> None:
            if not asked:
                err.print(f"waiting up to {grace():.0f} s for {processes} processes to save their state", markup=False)
            asked.append(number)
            child.terminate()

        with stop_signals(pass_on):
            code = child.wait()
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    told = next((line for line in reversed(lines) if line.startswith("biphase: ")), (lines or [""])[-1])
    told = told.removeprefix("biphase: ")
    if asked or code == 128 + signal.SIGTERM:
        raise StoppedError(told or STOPPED, *asked[:1])
    if code == EXIT_BUSY:
        raise BusyError(told)
    if code:
        raise InputError(f"torchrun ended with exit code {code}: {told}; see {log}")
    said = {Path(line).name for line in lines}  # `pretrain` says the folder of its run
    done = [path for path in folder.runs.glob(f"{recipe.name}-????????") if path.name in said and Run(path).is_done]
    if len(done) != 1:
        raise InputError(f"torchrun ended well but did not say which run is done; see {log}")
    return done[0]


def score_unit(
    cell: StudyCell,
    run: PlannedRun,
    step: int,
    folder: StudyFolder,
    data_dirs: dict[str, str],
    embed: dict[str, Any] | None,
) -> list[str]:
    """Fit one cell of the model that a step of a run is, or make an embedding model of it as `embed` says."""
    from biphase.finetuning.fit import fit_cells

    reference = reach_step(folder, run, step)
    scores_dir = folder.scores(cell.model)
    if embed is not None:
        from biphase.embedding.embed import score_embedding

        scores = score_embedding(reference, cell.model, config=cell.config, out=scores_dir, **embed)
        shown = (f"{one.task} {one.metrics['test'][one.metric]:.2%}" for one in scores)
        return [f"{cell.name}: {'; '.join(shown)}"]
    scores = fit_cells(reference, cell.evaluates, cell.config, scores_dir, data_dirs, label=cell.model)
    return [f"{cell.name}: {'; '.join(score.headline() for score in scores)}"]
