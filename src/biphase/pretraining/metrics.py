"""What a run tells: records for metrics.jsonl and TensorBoard, and the lines that a person reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.config import Phase, Recipe
from biphase.console import Tracker
from biphase.errors import InputError
from biphase.pretraining.batches import BatchLoader
from biphase.run import Run

Board = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class StepResult:
    """What one update did, over all processes."""

    loss: float
    grad_norm: float
    tokens: int
    targets: int
    flops: float


@dataclass
class MetricsLog:
    """Where the main process writes what happened; the others write nothing."""

    run: Run
    board: Board
    progress: Tracker
    is_main: bool
    is_new: bool
    """False when steps are trained once more: they are logged already."""
    peak: float
    """FLOP/s of all devices, to which the share of peak refers."""
    failure: OSError | None = None
    """Why a record could not be written, such as a full disk. The loop ends all processes with it."""

    def record_step(
        self, done: int, phase: Phase, lr: float, result: StepResult, tokens_seen: int, seconds: float
    ) -> None:
        record = {
            "kind": "train",
            "step": done,
            "objective": phase.objective,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": result.tokens,
            "targets": result.targets,
            "tokens_seen": tokens_seen,
            "tokens_per_second": round(result.tokens / seconds, 1),
            "flops_per_second": round(result.flops / seconds),
            "share_of_peak": round(result.flops / seconds / self.peak, 4),
        }
        self.write(record)
        if self.is_main:
            self.progress.advance(
                1,
                f"{phase.objective} loss {result.loss:.3f} · {record['tokens_per_second']:,.0f} tokens/s · "
                f"{record['share_of_peak']:.0%} of peak",
            )

    def record_validation(self, done: int, phase: Phase, metrics: dict[str, float]) -> None:
        self.write({"kind": "validation", "step": done, "objective": phase.objective, **metrics})
        if self.is_main:
            self.progress.say(
                f"step {done}: validation {phase.objective} loss {metrics['loss']:.3f} · accuracy "
                f"{metrics['accuracy']:.1%} · {metrics['bits_per_byte']:.3f} bits per byte"
            )

    def write(self, record: dict[str, Any]) -> None:
        if not (self.is_main and self.is_new):
            return
        try:
            self.run.log(record)
            self.board(record)
        except OSError as error:
            self.failure = error


def describe_start(run: Run, recipe: Recipe, network: Any, source: BatchLoader, carried: Sequence[str]) -> str:
    samples = source.batches.samples
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    epochs = recipe.num_steps * recipe.batch_tokens / samples.num_tokens
    phases = " → ".join(f"{phase.label} {phase.steps}" for phase in recipe.curriculum)
    left_out = f", {samples.left_out_tokens:,} tokens left out" if samples.left_out_tokens else ""
    taken = f"; taken over: {', '.join(carried)}" if carried else ""
    return (
        f"{run.path}: {type(network).__name__} of {millions:.1f}M parameters, {phases} steps of "
        f"{recipe.batch_tokens:,} tokens, {epochs:.2g} epochs of {samples.num_samples:,} samples{left_out}{taken}"
    )


def open_tensorboard(folder: Path, wanted: bool, after_step: int) -> Board:
    """A function that writes a record's numbers as TensorBoard scalars, or one that does nothing.

    What an earlier process wrote after `after_step` is purged: it will be written again.
    """
    if not wanted:
        return lambda record: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("tensorboard: true needs TensorBoard; pip install tensorboard") from None
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)

    def write(record: dict[str, Any]) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and key != "step":
                writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    return write
