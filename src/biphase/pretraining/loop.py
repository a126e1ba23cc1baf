"""The training loop, readable top to bottom. It does not know which objective it runs.

    recipe → processes, data, run folder, network → for each step: microbatches, one global token mean, one update

Writes metrics.jsonl and checkpoints into the run folder; calling it again goes on where the last whole checkpoint is.
Behind the loop stand the proof before the first step in each direction, the measurement of held-out text, always of the
same tokens and masks on the path that trains, and the records for metrics.jsonl and `tracking`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase.console import Send, Tracker, open_tracking, track
from biphase.corpus.packing import Batches, PackedSet, TrainingText, make_samples
from biphase.corpus.shards import ShardSet
from biphase.device import peak_flops
from biphase.distributed import join_world
from biphase.encoder.attention import choose_backend, lay_out
from biphase.encoder.packed import explain_computing
from biphase.encoder.proofs import probe_causality
from biphase.errors import InputError, StoppedError, first_of, memory_told
from biphase.flops import FlopCount, SampleLengths
from biphase.machine import stop_signals
from biphase.pretraining.job import (
    Job,
    Microbatch,
    Start,
    hold_run,
    load_state,
    make_microbatches,
    open_batches,
    open_job,
    prefetch,
    resume_start,
    save_state,
    work_between,
)
from biphase.pretraining.objectives import decay_start, is_causal, mixture_ends
from biphase.pretraining.optimizer import autocast, decide_compile, gradient_sync, set_rate, unwrap
from biphase.recipe import Phase, Recipe
from biphase.run import Run, whole_steps


def train(
    recipe: Recipe, root: Path = Path("runs"), text: TrainingText | None = None, model: Path | None = None
) -> Run:
    """Train as the recipe says and return the run; a finished run with all checkpoints to keep is returned at once.

    Args:
        text, model: what the recipe's `data` and `init.model` name, where the caller has them open.

    Raises:
        InputError: for what the user can mend, a diverging loss included.
        StoppedError: after SIGTERM or SIGINT, once the state is saved.
    """
    with join_world(recipe.compute.device, recipe.compute.silence_seconds) as world:
        # 1. The run: where it begins, and the folder that its text, its beginning and the recipe name.
        job = open_job(recipe, root, world, text, model)
        recipe, run, origin = job.recipe, job.run, job.origin

        def list_lost() -> list[int]:
            """Steps to keep without a whole checkpoint: named after the run was done, or dropped since."""
            saved = {step - origin.step for step in whole_steps(run)}
            return world.share(sorted(set(recipe.checkpoints.keep) - saved))

        if world.share(run.is_done) and not list_lost():
            world.tell(f"{run.path} is already done")
            return run
        with hold_run(job), memory_told(memory_remedy(recipe, world.size)):
            # 2. To the last step, from the last whole checkpoint or the origin. What was logged later is dropped.
            if not world.share(run.is_done):
                saved, start = world.share(whole_steps(run)), origin
                if saved:
                    start = resume_start(job, saved[-1])
                    world.tell(f"resuming {run.path} at step {start.run_step}")
                if world.is_main:
                    run.forget_after(start.run_step)
                tokens_seen = train_steps(job, start, recipe.num_steps, is_logged=True)
                if world.is_main:
                    run.mark_done({"step": origin.step + recipe.num_steps, "tokens_seen": tokens_seen})
                world.barrier()
            # 3. Once more to each lost checkpoint, from the whole one before it; nothing is logged.
            for lost in list_lost():
                earlier = [step for step in world.share(whole_steps(run)) if step - origin.step < lost]
                start = resume_start(job, earlier[-1]) if earlier else origin
                world.tell(f"{run.path}: once more from step {start.run_step} to {lost}, to be kept now")
                train_steps(job, start, lost, is_logged=False)
                world.barrier()
        return run


def memory_remedy(recipe: Recipe, num_processes: int) -> str:
    compute = recipe.compute
    remedy = f"lower compute.microbatch_tokens ({compute.microbatch_tokens:,})"
    if not compute.activation_checkpointing:
        remedy += ", or say compute.activation_checkpointing=true"
    if num_processes > 1 and compute.parallel == "ddp":
        remedy += ", or compute.parallel=fsdp"
    return f"{remedy}; the result stays the same"


def train_steps(job: Job, start: Start, stop: int, *, is_logged: bool) -> int:
    """The updates from `start` to `stop`; returns the tokens seen in the end.

    With `is_logged`, metrics.jsonl tells of it, validation included, and checkpoints are written when the recipe says;
    without it, at the end alone.
    """
    recipe, world, tokens_seen = job.recipe, job.world, start.tokens_seen
    # 4. Data: what each step is made of, and what it is measured on. Which checkpoints stay, and what else is due when.
    batches = open_batches(job)
    validate = make_validator(job) if is_logged else None
    decay = decay_start(recipe.schedule, recipe.num_steps)
    kept_steps = {*mixture_ends(recipe.curriculum), decay, *recipe.checkpoints.keep} - {0}
    validation_steps = kept_steps | multiples(recipe.validation.every_steps, stop) if validate else set()
    checkpoint_steps = kept_steps | multiples(recipe.checkpoints.every_steps, stop) if is_logged else {stop}
    # 5. Model and optimizers, as they are at the start.
    model, optimizers, flops = load_state(job, start)
    world.tell(describe_start(job, model, flops, batches))
    proved: set[tuple[int, str]] = set()
    steps = range(start.run_step, stop)
    with stop_signals(world.asked.append), open_log(job, batches, flops, steps, is_logged=is_logged) as log:
        since = time.perf_counter()
        for step, number, phase, microbatches in prefetch(job, batches, steps):
            waited = time.perf_counter() - since
            done, mixture = step + 1, recipe.curriculum[number]
            # 6. At each switch of a mixture's direction: prove on the path that trains that it looks where it should.
            if (number, phase.objective) not in proved:
                prove_causality(model, phase, job)
                proved.add((number, phase.objective))
            # 7. One update. Whether any process is asked to stop, or could not log, travels with its loss.
            rate = set_rate(optimizers, recipe.schedule, step, recipe.num_steps)
            numbers, work, (is_stopping, could_not_log) = update(
                job, model, optimizers, flops, microbatches, step, lambda: (bool(world.asked), log.failure is not None)
            )
            tokens_seen += numbers["tokens"]
            seconds = time.perf_counter() - since
            since += seconds
            record = {"kind": "train", "step": done, "objective": phase.objective, **numbers}
            log.record_step(record | {"lr": rate, "tokens_seen": tokens_seen}, work, seconds, waited)
            # 8. Validation, a checkpoint, or neither. A line that cannot be written ends all processes, at the latest
            # with the next update.
            validates, saves = done in validation_steps, is_stopping or done in checkpoint_steps
            if validate is not None and validates:
                for part, _ in mixture.parts:
                    log.record_validation(done, part, validate(model, part.with_mask_at(1)))
            if validates or saves or could_not_log:
                world.raise_any(log.failure, f"{job.run.metrics} could not be written; the first process says why")
            if saves:
                save_state(job, model, optimizers, done, mixture, tokens_seen, kept_steps)
            if is_stopping and done < stop:
                told = f"stopped at step {done} of {stop}; run the same command to go on"
                raise StoppedError(told, *world.asked[:1])
            if validates or saves:  # whose time is no part of the next step's
                since = time.perf_counter()
    return tokens_seen


def multiples(every: int, stop: int) -> set[int]:
    """Each so many-th update up to `stop`; none for 0."""
    return {*range(every, stop + 1, every)} if every else set()


def update(
    job: Job,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    flops: FlopCount,
    microbatches: list[Microbatch],
    step: int,
    flags: Callable[[], Sequence[bool]] = tuple,
) -> tuple[dict[str, Any], float, list[bool]]:
    """One update from all microbatches of all processes: the mean over targets is taken once, over the whole batch.

    `flags` are asked for when the gradients are there.

    Returns:
        The numbers of the update for metrics.jsonl, its FLOPs, and whether any process has set each of the flags.
    """
    world = job.world
    tokens, targets, work = world.sum(
        sum(len(m.inputs_T) for m in microbatches),
        sum(len(m.targets_N) for m in microbatches),
        sum(flops.batch(m.lengths_S, len(m.targets_N), m.layout.causal) for m in microbatches),
    )
    sums = []
    for i, m in enumerate(microbatches):
        with gradient_sync(model, now=i == len(microbatches) - 1):
            with autocast(world.device, job.dtype):
                loss_sum, _, _ = model(m.inputs_T, m.positions_T, m.layout, m.target_positions_N, m.targets_N)
            # DDP and FSDP average gradients over processes; the factor makes a sum of that.
            (loss_sum * (world.size / max(targets, 1.0))).backward()
        sums.append(loss_sum.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), job.recipe.optimizer.max_grad_norm)
    # One wait for the device brings all numbers of this process, one collective those of the others.
    *local_sums, grad_norm = torch.stack([*sums, getattr(norm, "full_tensor", lambda: norm)()]).tolist()
    loss_sum, *votes = world.sum(sum(local_sums), *flags())
    loss = loss_sum / max(targets, 1.0)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise InputError(explain_divergence(job.run, step, loss, grad_norm, local_sums, microbatches))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    numbers = {"loss": loss, "grad_norm": grad_norm, "tokens": int(tokens), "targets": int(targets)}
    return numbers, work + flops.per_update, [vote > 0 for vote in votes]


def explain_divergence(
    run: Run, step: int, loss: float, norm: float, sums: list[float], microbatches: list[Microbatch]
) -> str:
    """A line that names the samples of a loss that is no number, and the checkpoint from which to go on."""
    suspects = [m for m, value in zip(microbatches, sums, strict=True) if not math.isfinite(value)] or microbatches
    named = first_of([str(number) for m in suspects for number in m.sample_ids_S], 8)
    steps = whole_steps(run)
    kept = f"the last checkpoint is @{steps[-1]}" if steps else "no checkpoint was written yet"
    return (
        f"{run.path.name}: loss {loss} and gradient norm {norm} at step {step + 1}, samples {named}; {kept}; lower "
        "schedule.peak_lr or look at these samples"
    )


# Proof and validation


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
    return partial(validate, job, batches, token_bytes)


@torch.no_grad()
def validate(job: Job, batches: Batches, token_bytes_V: Tensor, model: nn.Module, phase: Phase) -> dict[str, float]:
    """Loss (nats per target), accuracy at the targets, and bits per byte of the text that the targets stand for."""
    model.eval()
    totals = np.zeros(4)
    for m in make_microbatches(job, batches, phase, 0):
        with autocast(job.world.device, job.dtype):
            loss_sum, _, correct_N = model(m.inputs_T, m.positions_T, m.layout, m.target_positions_N, m.targets_N)
        num_bytes = token_bytes_V[m.targets_N].sum()
        totals += [float(loss_sum), float(correct_N.sum()), len(m.targets_N), float(num_bytes)]
    model.train()
    nats, correct, count, text_bytes = job.world.sum(*totals)
    return {
        "loss": nats / max(count, 1.0),
        "accuracy": correct / max(count, 1.0),
        "bits_per_byte": nats / math.log(2) / max(text_bytes, 1.0),
        "targets": count,
    }


# Lines for people, records for metrics.jsonl


def describe_start(job: Job, model: nn.Module, flops: FlopCount, batches: Batches) -> str:
    """A line on what is about to be trained, and one on how it is computed, and why so."""
    recipe, world, compute, carried = job.recipe, job.world, job.recipe.compute, job.origin.carried
    network: Any = unwrap(model).network
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    tokens = job.tokens_before(recipe.num_steps)
    phases = " → ".join(f"{phase.steps:,} steps of {phase.words}" for phase in recipe.curriculum)
    left_out = f", {batches.left_out_tokens:,} tokens left out" if batches.left_out_tokens else ""
    taken = f"; taken over: {', '.join(carried)}" if carried else ""
    several = f"{world.size} processes, {compute.parallel} · " if world.size > 1 else ""
    _, blocks = decide_compile(compute, world.device, job.dtype, tokens * flops.per_token)
    return (
        f"{job.run.path}: {type(network).__name__} of {millions:.1f}M parameters, {phases}, batches of "
        f"{recipe.batch_label} tokens, {tokens / batches.num_tokens:.2g} epochs of {batches.num_samples:,} samples"
        f"{left_out}{taken}\n"
        f"{several}{explain_computing(compute.precision, world.device, network.base_model)} · blocks {blocks}"
    )


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
    worked: float = 0.0
    """The FLOPs of all steps but the first, which makes ready."""
    began: float | None = None
    """The time at which the first step had ended."""

    def record_step(self, record: dict[str, Any], work: float, seconds: float, waited: float) -> None:
        """Write the record of an update of `work` FLOPs with its speeds; `waited` of its seconds were for its batch."""
        speed = work / seconds
        self.peak = max(self.peak, speed)
        record |= {
            "tokens_per_second": round(record["tokens"] / seconds, 1),
            "flops_per_second": round(speed),
            "share_of_peak": round(speed / self.peak, 4),
            "data_wait": round(waited / seconds, 4),
        }
        self.write(record)
        now, seconds_left = time.perf_counter(), None
        if self.began is None:
            self.began = now
        else:
            self.worked += work
            seconds_left = (now - self.began) / self.worked * self.work_left(record["step"])
        wait = f" · {waited / seconds:.0%} waiting for data" if waited / seconds >= 0.01 else ""
        self.progress.advance(
            1,
            f"{record['objective']} loss {record['loss']:.3f} · {record['tokens_per_second']:,.0f} tokens/s · "
            f"{record['share_of_peak']:.0%} of peak{wait}",
            seconds_left=seconds_left,
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
def open_log(job: Job, batches: Batches, flops: FlopCount, steps: range, *, is_logged: bool) -> Iterator[MetricsLog]:
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
        mean = batches.num_tokens / batches.num_samples
        lengths = SampleLengths(mean, mean, "all samples as long as the mean")
        work_left = partial(work_between, job, flops, lengths, stop=steps.stop)
        yield MetricsLog(job.run, progress, peak, is_written, work_left, send)
