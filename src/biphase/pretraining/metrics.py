"""Measurements, proofs and lines of a run while it trains.

Held-out text → loss, accuracy at the targets, bits per byte, always of the same tokens and masks, on the path that
trains; before the first step in each direction the proof that the network looks where its objective says; and records
for metrics.jsonl and `tracking`, with the lines that a person reads.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase.console import Send, Tracker, open_tracking, track
from biphase.corpus.packing import Batches, PackedSet, make_samples
from biphase.corpus.shards import ShardSet
from biphase.device import peak_flops
from biphase.encoder.attention import choose_backend, lay_out
from biphase.encoder.packed import explain_computing
from biphase.encoder.proofs import probe_causality
from biphase.flops import FlopCount, SampleLengths
from biphase.pretraining.job import BatchLoader, Job, TrainState, total_work, work_between
from biphase.pretraining.objectives import is_causal
from biphase.pretraining.optimizer import autocast, decide_compile, unwrap
from biphase.recipe import Phase
from biphase.run import Run


def make_validator(job: Job) -> Callable[[nn.Module, Phase], dict[str, float]] | None:
    """A function from (model, phase) to validation metrics, on the same tokens every time; None without such text."""
    data, world = job.recipe.data, job.world
    shards = ShardSet.open(data.shards, "validation")
    if shards.num_documents == 0:
        world.tell(f"{data.shards} has no validation documents: training without validation")
        return None
    samples = make_samples(data, shards)
    tokens = min(job.recipe.validation.tokens, samples.num_tokens)
    batches = Batches([PackedSet(shards, samples, seed=0)], lambda step: step * tokens)
    token_bytes = torch.from_numpy(shards.token_bytes().astype(np.int64)).to(world.device)
    return partial(validate, BatchLoader(batches, job), token_bytes)


@torch.no_grad()
def validate(loader: BatchLoader, token_bytes_V: Tensor, model: nn.Module, phase: Phase) -> dict[str, float]:
    """Loss (nats per target), accuracy at the targets, and bits per byte of the text that the targets stand for."""
    model.eval()
    totals = np.zeros(4)
    for microbatch in loader.microbatches(phase, 0):
        with autocast(loader.job.world.device, loader.job.dtype):
            loss_sum, _, correct_N = model(*microbatch.arguments())
        num_bytes = token_bytes_V[microbatch.targets_N].sum()
        totals += [float(loss_sum), float(correct_N.sum()), len(microbatch.targets_N), float(num_bytes)]
    model.train()
    nats, correct, count, text_bytes = loader.job.world.sum(*totals)
    return {
        "loss": nats / max(count, 1.0),
        "accuracy": correct / max(count, 1.0),
        "bits_per_byte": nats / math.log(2) / max(text_bytes, 1.0),
        "targets": count,
    }


def prove_causality(model: nn.Module, phase: Phase, job: Job) -> None:
    """The probe, with the attention backend and the type of the arithmetic that train.

    Raises:
        FailedProofError: the network looks elsewhere than the phase's objective says.
    """
    packed: Any = unwrap(model)
    device = job.world.device
    model.eval()
    with autocast(device, job.dtype):
        backend = choose_backend(device, job.dtype)

        def read_singly(tokens_T: Tensor) -> Any:  # each a sample of its own: an embedding may be kept in parts
            layout = lay_out(np.arange(len(tokens_T) + 1), causal=True, device=device, backend=backend)
            return model(tokens_T, torch.zeros_like(tokens_T), layout)

        probe_causality(model, is_causal(phase), packed.network.base_model, read_singly, device, backend)
    model.train()


@dataclass(frozen=True)
class StepResult:
    """The numbers of one update, over all processes."""

    loss: float
    grad_norm: float
    tokens: int
    targets: int
    flops: float
    flags: list[bool]
    """Whether any process has set each of the flags that `update` was given."""


@dataclass
class MetricsLog:
    """The records of a run, which the main process writes; the others write nothing."""

    run: Run
    progress: Tracker
    peak: float
    """FLOP/s of all devices, to which the share of peak refers. It may be measured too low, beside other work: a faster
    step raises it."""
    is_written: bool
    """Whether this process writes records: the main one does, unless they are there already from an earlier time."""
    work_left: Callable[[int], float]
    """The FLOPs of what is left after so many steps."""
    send: Send
    """The function that sends records to what the recipe's `tracking` names."""
    failure: OSError | None = None
    """The error with which a record could not be written, such as a full disk. The loop ends all processes with it."""
    since: float = field(default_factory=time.perf_counter)
    """The time at which the last step ended, or what came after it."""
    started: float = field(default_factory=time.perf_counter)
    worked: float | None = None
    """The FLOPs since then; None before the first step, which makes ready."""
    waited: float = 0.0
    """The seconds of the current step that had passed when its batch was there."""

    def note_batch(self) -> None:
        """The batch of the next step is there; what has passed since the last one was waiting for it."""
        self.waited = time.perf_counter() - self.since

    def restart_clock(self) -> None:
        """Leave out of the next step's time what came after the last one, validation and checkpoints."""
        self.since = time.perf_counter()

    def record_step(self, done: int, phase: Phase, lr: float, result: StepResult, tokens_seen: int) -> None:
        seconds = time.perf_counter() - self.since
        self.restart_clock()
        speed = result.flops / seconds
        self.peak = max(self.peak, speed)
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
            "flops_per_second": round(speed),
            "share_of_peak": round(speed / self.peak, 4),
            "data_wait": round(self.waited / seconds, 4),
        }
        self.write(record)
        if self.worked is None:
            self.started, self.worked = self.since, 0.0
        else:
            self.worked += result.flops
        wait = self.waited / seconds
        self.progress.advance(
            1,
            f"{phase.objective} loss {result.loss:.3f} · {record['tokens_per_second']:,.0f} tokens/s · "
            f"{record['share_of_peak']:.0%} of peak" + (f" · {wait:.0%} waiting for data" if wait >= 0.01 else ""),
            seconds_left=(self.since - self.started) / self.worked * self.work_left(done) if self.worked else None,
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
            self.send(record)
        except OSError as error:
            self.failure = error


@contextmanager
def open_log(job: Job, loader: BatchLoader, flops: FlopCount, steps: range, *, is_logged: bool) -> Iterator[MetricsLog]:
    """The log and the progress bar of these steps; without `is_logged`, the bar alone."""
    is_written = is_logged and job.world.is_main
    tracking = job.recipe.tracking if is_written else None
    settings = job.recipe.model_dump(mode="json")
    with (
        open_tracking(tracking, job.run.path, settings, steps.start + 1) as send,
        track("pretrain", steps.stop, "steps") as progress,
    ):
        progress.advance(steps.start, already_done=True)
        peak = peak_flops(job.world.device, job.dtype) * job.world.size
        mean = loader.batches.num_tokens / loader.batches.num_samples
        lengths = SampleLengths(mean, mean, "all samples as long as the mean")

        def work_left(done: int) -> float:
            return work_between(job, flops, lengths, done, steps.stop)

        yield MetricsLog(job.run, progress, peak, is_written, work_left, send)


def describe_start(job: Job, state: TrainState, loader: BatchLoader) -> str:
    """A line on what is about to be trained, and one on how it is computed, and why so."""
    run, recipe, carried, batches = job.run, job.recipe, job.origin.carried, loader.batches
    world, compute = job.world, recipe.compute
    network: Any = unwrap(state.model).network
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    epochs = job.tokens_before(recipe.num_steps) / batches.num_tokens
    phases = " → ".join(f"{phase.steps:,} steps of {phase.words}" for phase in recipe.curriculum)
    left_out = f", {batches.left_out_tokens:,} tokens left out" if batches.left_out_tokens else ""
    taken = f"; taken over: {', '.join(carried)}" if carried else ""
    several = f"{world.size} processes, {compute.parallel} · " if world.size > 1 else ""
    _, blocks = decide_compile(compute, world.device, job.dtype, total_work(job, state.flops))
    return (
        f"{run.path}: {type(network).__name__} of {millions:.1f}M parameters, {phases}, batches of "
        f"{recipe.batch_label} tokens, {epochs:.2g} epochs of {batches.num_samples:,} samples{left_out}{taken}\n"
        f"{several}{explain_computing(compute.precision, world.device, network.base_model)} · blocks {blocks}"
    )
