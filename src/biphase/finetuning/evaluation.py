"""A trained network → predictions for validation and test of one task, and its `Score`."""

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from biphase.device import describe_machine
from biphase.finetuning.batches import CellContext
from biphase.finetuning.cells import CellPlan
from biphase.finetuning.config import EVALUATED_SPLITS, PROTOCOL
from biphase.finetuning.encoders import Encoder
from biphase.finetuning.encoding import EncodedTask
from biphase.finetuning.families import FAMILY_MODULES
from biphase.finetuning.scores import Score
from biphase.finetuning.training import TrainingResult


@dataclass(frozen=True)
class FinishedCell:
    """A cell's result in memory."""

    score: Score
    losses: list[float]
    prediction_rows: dict[str, Iterator[dict[str, Any]]]
    """The rows of each split's predictions, to be consumed once; no split when training diverged."""


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
    family, device = FAMILY_MODULES[plan.task.family], cell.runtime.device
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


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was in use: by the process on a CPU, by the cell on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
