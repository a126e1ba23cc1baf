"""One cell: (encoder, task, configuration with rate and seed) → one `Score` with per-example predictions.

The protocol is the paper's: 1,000 steps of 32 examples or one epoch, 10 % warm-up, linear decay, no early stopping.
What many cells share (weights on disk, encoded tasks) is loaded once per process and never changed; a cell trains a
copy. Tasks that are trained on another's pairs (NQ and MLDR on MS MARCO's) are scored after one training.
"""

import json
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from biphase import console
from biphase.device import choose_device, choose_dtype, describe_machine
from biphase.encoder.pretrained import fresh_backbone
from biphase.errors import BusyError, InputError
from biphase.files import locked, whole_folder, write_json
from biphase.finetuning.batches import CellContext, Runtime
from biphase.finetuning.cells import CellPlan, DataDirs, plan_cells
from biphase.finetuning.config import EVALUATED_SPLITS, PROTOCOL, FinetuneConfig
from biphase.finetuning.encoders import Encoder, copy_backbone, load_encoder
from biphase.finetuning.encoding import EncodedTask
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.families import FAMILIES
from biphase.finetuning.scores import Score, read_score
from biphase.finetuning.training import TrainingResult, train_network
from biphase.tasks.spec import find_task


def fit_cell(
    model: str, task: str, config: FinetuneConfig, out: Path | None = None, data_dir: str | Path | None = None
) -> Score:
    """Fine-tune `model` on a task of the table (or of a YAML file) and evaluate it.

    With `out`, the result appears as the folder `out/TASK-HASH` when it is finished, and a finished cell is read, not
    rerun. On a CPU the same cell gives the same scores to the last bit. Training that diverges is a result, not an
    error. Many cells in one process load the model and encode the task once. Prints one line.
    """
    plans = plan_cells(model, [task], config, {} if data_dir is None else {find_task(task).name: data_dir})
    was_there = out is not None and plans[0].is_finished(out)
    [score] = fit_plans(model, plans, out)
    console.out.print(score.headline() + (" · finished before" if was_there else ""), markup=False)
    return score


def fit_cells(
    model: str,
    tasks: Sequence[str],
    config: FinetuneConfig,
    out: Path | None = None,
    data_dirs: DataDirs | None = None,
    label: str | None = None,
) -> list[Score]:
    """As `fit_cell`, for several tasks with the same training (`Task.trained_on`): it happens once. Prints nothing.

    `label` is what the scores call the model, in place of `model`.

    Raises `BusyError` when another process is at work on one of the cells.
    """
    return fit_plans(model, plan_cells(model, tasks, config, data_dirs or {}), out, label)


def fit_plans(model: str, plans: Sequence[CellPlan], out: Path | None, label: str | None = None) -> list[Score]:
    """The scores of cells that share a training, read where they are finished."""
    if out is None:
        return [cell.score for cell in run_cells(model, plans, label)]
    missing = [plan for plan in plans if not plan.is_finished(out)]
    if missing:
        with cells_claimed(out, missing):
            missing = [plan for plan in missing if not plan.is_finished(out)]  # another process may have done some
            for plan, cell in zip(missing, run_cells(model, missing, label) if missing else (), strict=True):
                write_cell(plan.folder(out), cell)
    return [read_score(plan.folder(out)) for plan in plans]


@contextmanager
def cells_claimed(out: Path, plans: Sequence[CellPlan]) -> Iterator[None]:
    """Hold the names of cells against other processes; a killed one lets go."""
    locks = out / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        for plan in plans:
            try:
                held.enter_context(locked(locks / plan.folder(out).name))
            except BusyError:
                raise BusyError(f"{plan.folder(out)} is being made by another process") from None
        yield


@dataclass(frozen=True)
class FinishedCell:
    """A cell's result in memory."""

    score: Score
    losses: list[float]
    prediction_rows: dict[str, Iterator[dict[str, Any]]]
    """By split, to be consumed once; none when training diverged."""


def run_cells(model: str, plans: Sequence[CellPlan], label: str | None = None) -> Iterator[FinishedCell]:
    """Train once, then evaluate each task."""
    assert len({plan.train.hash for plan in plans}) == 1, "these tasks do not share a training"
    assert len({plan.config for plan in plans}) == 1, "tasks of one training have one configuration"
    # 1. The encoder, and where it computes.
    encoder = load_encoder(model)
    device = choose_device(plans[0].config.device)
    config = plans[0].config.model_copy(update={"device": device.type})
    check_length(encoder, config)
    runtime = Runtime(device, choose_dtype(config.precision, device), config.microbatch_tokens)
    # 2. The data as token ids: of the task that is trained on, and of those that are evaluated.
    source = plans[0].train
    trained = load_encoded(source, encoder.tokenizer, config)
    evaluated = []
    for plan in plans:
        is_same = plan.evaluation.hash == source.hash
        evaluated.append(trained if is_same else load_encoded(plan.evaluation, encoder.tokenizer, config))
    # 3. A copy of the encoder with a new head, trained. Head and dropout draw from torch's generator, under the seed.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        cell = CellContext(source.task, config, runtime)
        network = build_network(encoder, cell, [trained, *evaluated]).to(device)
        training = train_network(network, trained, cell)
    # 4. Predictions and scores, task by task.
    for plan, encoded in zip(plans, evaluated, strict=True):
        cell = CellContext(plan.task, config, runtime)
        yield evaluate_cell(network, encoded, training, plan, cell, encoder, label or encoder.name)


def evaluate_cell(
    network: nn.Module,
    encoded: EncodedTask[Any],
    training: TrainingResult,
    plan: CellPlan,
    cell: CellContext,
    encoder: Encoder,
    label: str,
) -> FinishedCell:
    """Predict validation and test of one task, unless training diverged, and say how good that is."""
    family, device = FAMILIES[plan.task.family], cell.runtime.device
    started = time.perf_counter()
    metrics: dict[str, dict[str, float]] = {}
    rows: dict[str, Iterator[dict[str, Any]]] = {}
    network.eval()
    for name in EVALUATED_SPLITS if training.diverged_at is None else ():
        split = encoded.splits[name]
        with torch.no_grad():
            predictions = family.predict(network, split, cell)
        metrics[name] = family.compute_metrics(split, predictions, cell)
        rows[name] = family.prediction_rows(split, predictions, cell)
    seconds = {"train": training.seconds, "evaluate": time.perf_counter() - started}
    score = Score(
        protocol=PROTOCOL,
        cell=plan.hash,
        model=label,
        model_hash=encoder.hash,
        task=plan.task.name,
        trained_on=plan.train.task.name,
        source=plan.evaluation.name,
        data_hash=plan.evaluation.hash,
        metric=plan.task.metric,
        classes=plan.task.classes,
        config=cell.config,
        metrics=metrics,
        num_examples={name: split.num_examples for name, split in encoded.splits.items()},
        num_truncated={name: split.num_truncated for name, split in encoded.splits.items()},
        num_left_out=encoded.left_out,
        num_steps=training.num_steps,
        diverged=training.diverged_at is not None,
        diverged_at_step=training.diverged_at,
        final_loss=training.final_loss,
        seconds={name: round(value, 3) for name, value in seconds.items()},
        tokens_per_second={"train": round(training.num_tokens / training.seconds, 1)},
        peak_memory_bytes=peak_memory_bytes(device),
        machine=describe_machine(device),
    )
    return FinishedCell(score, training.losses, rows)


def write_cell(folder: Path, cell: FinishedCell) -> None:
    """The score and the predictions as files, all or nothing."""
    with whole_folder(folder) as part:
        for split, rows in cell.prediction_rows.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (part / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(part / "losses.json", cell.losses)
        write_json(part / "score.json", cell.score.model_dump(mode="json"))


def check_length(encoder: Encoder, config: FinetuneConfig) -> None:
    """Raises `InputError` where special tokens leave no room for a question and its context, or positions run out."""
    if config.max_length > encoder.max_length:
        raise InputError(
            f"max_length {config.max_length} is above the {encoder.max_length} tokens that {encoder.name} has "
            f"positions for: give max_length={encoder.max_length}"
        )
    least = len(encoder.tokenizer.opening) + 1 + 2
    if config.max_length < least:
        raise InputError(
            f"max_length {config.max_length} leaves no room for text: {encoder.name} needs {least} or more"
        )


def build_network(encoder: Encoder, cell: CellContext, tasks: Sequence[EncodedTask[Any]]) -> nn.Module:
    """A copy of the encoder for the texts of some tasks (none: for any text), with a new head.

    Random weights come from torch's generator.
    """
    backbone = fresh_backbone(encoder.backbone) if cell.config.weights == "random" else encoder.backbone
    texts = [texts for encoded in tasks for texts in encoded.all_texts]
    network = FAMILIES[cell.task.family].build_model(copy_backbone(backbone, texts), cell)
    return network.to(torch.bfloat16) if cell.config.weight_dtype == "bf16" else network


def peak_memory_bytes(device: torch.device) -> int:
    """Of the process on a CPU, of the cell on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
