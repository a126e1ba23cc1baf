"""What a run tells: records for metrics.jsonl and TensorBoard, and the lines that a person reads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from biphase.config import Phase
from biphase.console import Tracker, track
from biphase.device import peak_flops
from biphase.errors import InputError
from biphase.pretraining.batches import BatchLoader
from biphase.pretraining.job import Job
from biphase.pretraining.parallel import unwrap
from biphase.run import Run


@dataclass(frozen=True)
class StepResult:
    """What one update did, over all processes."""

    loss: float
    grad_norm: float
    tokens: int
    targets: int
    flops: float
    flags: list[bool]
    """Whether any process has set each of the flags that `update` was given."""


@dataclass
class MetricsLog:
    """Where the main process writes what happened; the others write nothing."""

    run: Run
    progress: Tracker
    peak: float
    """FLOP/s of all devices, to which the share of peak refers."""
    is_written: bool
    """Whether this process writes records: the main one does, unless they are there already from an earlier time."""
    write_scalars: Callable[[dict[str, Any]], None]
    """What `open_tensorboard` gives."""
    failure: OSError | None = None
    """Why a record could not be written, such as a full disk. The loop ends all processes with it."""
    since: float = field(default_factory=time.perf_counter)
    """When the last step ended, or what came after it."""

    def restart_clock(self) -> None:
        """Leave out of the next step's time what came after the last one, validation and checkpoints."""
        self.since = time.perf_counter()

    def record_step(self, done: int, phase: Phase, lr: float, result: StepResult, tokens_seen: int) -> None:
        seconds = time.perf_counter() - self.since
        self.restart_clock()
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
        self.progress.advance(
            1,
            f"{phase.objective} loss {result.loss:.3f} · {record['tokens_per_second']:,.0f} tokens/s · "
            f"{record['share_of_peak']:.0%} of peak",
        )

    def record_validation(self, done: int, phase: Phase, metrics: dict[str, float]) -> None:
        self.write({"kind": "validation", "step": done, "objective": phase.objective, **metrics})
        self.progress.say(
            f"step {done}: validation {phase.objective} loss {metrics['loss']:.3f} · accuracy "
            f"{metrics['accuracy']:.1%} · {metrics['bits_per_byte']:.3f} bits per byte"
        )

    def write(self, record: dict[str, Any]) -> None:
        if not self.is_written:
            return
        try:
            self.run.log(record)
            self.write_scalars(record)
        except OSError as error:
            self.failure = error


@contextmanager
def open_log(job: Job, steps: range, *, is_logged: bool) -> Iterator[MetricsLog]:
    """The log and the progress bar of these steps; without `is_logged`, the bar alone."""
    is_written = is_logged and job.world.is_main
    with track("pretrain", steps.stop, "steps") as progress:
        progress.advance(steps.start, already_done=True)
        peak = peak_flops(job.world.device, job.dtype) * job.world.size
        write_scalars = open_tensorboard(job.run.path, is_written and job.recipe.tensorboard, steps.start)
        yield MetricsLog(job.run, progress, peak, is_written, write_scalars)


def describe_start(job: Job, model: nn.Module, loader: BatchLoader) -> str:
    """One line on what is about to be trained."""
    run, recipe, carried, samples = job.run, job.recipe, job.origin.carried, loader.batches.samples
    network: Any = unwrap(model)
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    epochs = recipe.num_steps * recipe.batch_tokens / samples.num_tokens
    phases = " → ".join(f"{phase.label} {phase.steps}" for phase in recipe.curriculum)
    left_out = f", {samples.left_out_tokens:,} tokens left out" if samples.left_out_tokens else ""
    taken = f"; taken over: {', '.join(carried)}" if carried else ""
    return (
        f"{run.path}: {type(network.network).__name__} of {millions:.1f}M parameters, {phases} steps of "
        f"{recipe.batch_tokens:,} tokens, {epochs:.2g} epochs of {samples.num_samples:,} samples{left_out}{taken}"
    )


def open_tensorboard(folder: Path, wanted: bool, after_step: int) -> Callable[[dict[str, Any]], None]:
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
