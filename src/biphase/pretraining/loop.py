"""The training loop, to be read from top to bottom. It does not know which objective it runs.

    recipe → processes, data, run folder, network → for each step: microbatches, one mean over targets, clipping, update

It writes metrics.jsonl and checkpoints into the run folder; a second call continues from the last whole checkpoint. The
stages of the loop follow it in order: batches, the lines about the start, the update, validation (always on the same
tokens and masks, through the code that trains), and the records for metrics.jsonl and `tracking`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from biphase.console import Send, Tracker, duration, err, open_tracking, plain_number, track
from biphase.corpus.packing import Batches, PackedSet, TrainingText, make_samples
from biphase.corpus.shards import ShardSet
from biphase.curriculum import Phase
from biphase.device import peak_flops, prefetch
from biphase.distributed import join_world
from biphase.encoder.attention import explain_computing
from biphase.encoder.proofs import prove_causality
from biphase.errors import InputError, StoppedError, first_of
from biphase.flops import CPU_EFFICIENCY, EFFICIENCY, FlopCount, SampleLengths, flops_between
from biphase.machine import stop_signals
from biphase.pretraining.job import Job, State, hold_run, load_state, open_job, refuse_other_weights, save_state
from biphase.pretraining.objectives import Microbatch, make_microbatches, make_steps
from biphase.pretraining.optimizer import autocast, set_rate, unwrap
from biphase.recipe import Recipe
from biphase.run import Run, whole_steps


def train(
    recipe: Recipe, root: Path = Path("runs"), text: TrainingText | None = None, model: Path | None = None
) -> Run:
    """Train as the recipe says, and return the run. Return a finished run at once if it has all checkpoints to keep.

    Args:
        text: the opened texts of the recipe's `data`, if the caller has them.
        model: the folder of the recipe's `init.model`, if the caller has it.

    Raises:
        InputError: for mistakes that the user can fix, and for a diverging loss.
        StoppedError: after a stop signal, once the state is saved.
    """
    with join_world(recipe.compute) as world:
        # 1. The run: its origin, and its folder, named by text, origin and recipe.
        job = open_job(recipe, root, world, text, model)
        run = job.run
        if find_rest(job) is None:
            err.print(f"{run.path} is already done")
            return run
        # 2. While these processes hold the folder: train the steps that are left.
        with hold_run(job):
            while rest := find_rest(job):
                if rest.begin and rest.is_logged:
                    err.print(f"resuming {run.path} at step {rest.begin}")
                if not rest.is_logged:
                    err.print(f"{run.path}: training steps {rest.begin} to {rest.stop} again, to keep a checkpoint")
                tokens_seen = train_steps(job, rest)
                if world.is_main and rest.is_logged:
                    run.mark_done({"step": job.origin.step + rest.stop, "tokens_seen": tokens_seen})
        return run


@dataclass(frozen=True)
class Rest:
    """The updates to make next: those after `begin`, which has a whole checkpoint or is 0, up to `stop`."""

    begin: int
    stop: int
    is_logged: bool
    """Whether metrics.jsonl gets their records; else an earlier call has written them."""


def find_rest(job: Job) -> Rest | None:
    """Find the updates to make next; None if all are done.

    An unfinished run continues to its last step. A finished run trains again, without records of the updates, up to
    each step of `checkpoints.keep` that has no whole checkpoint, because the step was added later or its checkpoint was
    lost.
    """
    recipe, run = job.recipe, job.run
    steps, is_done = job.world.broadcast((whole_steps(run), run.is_done))
    saved = {0, *(step - job.origin.step for step in steps)}
    lost = sorted({*recipe.checkpoints.keep} - saved)
    if is_done and not lost:
        return None
    stop = lost[0] if is_done else recipe.num_steps
    return Rest(max(step for step in saved if step <= stop), stop, not is_done)


def train_steps(job: Job, rest: Rest) -> int:
    """Make the updates of `rest`, and return the tokens seen in the end.

    If `rest` is logged, write records, validate and save checkpoints as the recipe says; otherwise validate and keep
    only the checkpoint at the end. Those on the way there serve a call that goes on after a kill.
    """
    recipe, world, stop = job.recipe, job.world, rest.stop
    # 3. Data: the batches of the steps, the held-out text, and the steps at which validation and checkpoints are due.
    batches, measure = open_batches(job)
    validates_at = due_steps(recipe.kept_steps, recipe.validation.every_steps, stop) if rest.is_logged else {stop}
    saves_at = due_steps(recipe.kept_steps if rest.is_logged else {stop}, recipe.checkpoints.every_steps, stop)
    # 4. Model and optimizers, in their state at the start.
    state = load_state(job, rest.begin)
    err.print(describe_start(job, state, batches))
    # While a step computes, a thread makes the batch of the next one.
    steps = prefetch(make_steps(job, batches, range(rest.begin, stop)))
    proved: set[tuple[int, str]] = set()
    with closing(steps), stop_signals(world.signals.append), open_log(job, batches, state.flops, rest) as log:
        since = time.perf_counter()
        for step in steps:
            waited = time.perf_counter() - since
            done = step.index + 1
            phase = recipe.curriculum[step.phase_index]
            # 5. Before the first step of a pure phase: prove, through the code that trains, that attention has the
            # right direction.
            if (step.phase_index, step.phase.objective) not in proved:
                packed: Any = unwrap(state.model)
                prove_causality(state.model, step.phase.is_causal, packed.network.base_model, world.device, world.dtype)
                proved.add((step.phase_index, step.phase.objective))
            # 6. One update. Its loss carries two votes: was any process asked to stop, and did any fail to log?
            made = update(
                job, state, step.microbatches, step.index, lambda: (bool(world.signals), log.failure is not None)
            )
            is_stopping, could_not_log = made.votes
            if step.index == rest.begin:
                world.on_first(partial(refuse_other_weights, job, rest.begin))
            state.tokens_seen += made.numbers["tokens"]
            seconds = time.perf_counter() - since
            since += seconds
            record = {"kind": "train", "step": done, "objective": step.phase.objective, **made.numbers}
            log.record_step(record | {"tokens_seen": state.tokens_seen}, made.flops, seconds, waited)
            # 7. Validation, a checkpoint, or neither. A record that cannot be written ends all processes, after the
            # next update at the latest.
            validates = measure is not None and done in validates_at
            saves = is_stopping or done in saves_at
            if measure is not None and validates:
                for pure, _ in phase.parts:
                    log.record_validation(done, pure, measure(state.model, pure.with_mask_at(1)))
            if validates or saves or could_not_log:
                with world.fail_together():
                    if log.failure is not None:
                        raise log.failure
            if saves:
                save_state(job, state, done, phase)
            if is_stopping and done < stop:
                progress = f"stopped at step {done} of {stop}; run the same command to continue"
                raise StoppedError(progress, *world.signals[:1])
            if validates or saves:  # the next step's time excludes these
                since = time.perf_counter()
    return state.tokens_seen


def open_batches(job: Job) -> tuple[Batches, Callable[[nn.Module, Phase], dict[str, float]] | None]:
    """Open the batches of a run, and make the function (model, phase) that validates, always on the same tokens.

    The function is None without validation text. Raises `InputError` for batches that are too small for the processes.
    """
    recipe, world, text = job.recipe, job.world, job.text
    held_out = ShardSet(text.main.folder, "validation", text.main.manifest)
    held_out_samples = make_samples(recipe.data, held_out)
    token_bytes_V = text.main.token_bytes().astype(np.int64) if held_out_samples.num_samples else None
    sets = []
    for index, shards in enumerate(text.sets):
        sets.append(PackedSet(shards, make_samples(recipe.data, shards), recipe.data.order_seed + index))
    batches = Batches(sets, job.tokens_before, text.shares, job.origin.data_position)
    # A batch grows or shrinks from its first to its last update.
    smallest = min(batches.batch_tokens(0), batches.batch_tokens(recipe.num_steps - 1))
    microbatches = -(-smallest // (world.size * recipe.compute.microbatch_tokens))
    if smallest // (world.size * microbatches) < recipe.data.max_sample_tokens:
        raise InputError(
            f"batch_tokens {smallest} over {world.size} processes and {microbatches} microbatches "
            f"is below a sample of {recipe.data.max_sample_tokens} tokens each; raise it or compute.microbatch_tokens"
        )
    if token_bytes_V is None:
        lack = "too little validation text for a sample" if held_out.num_documents else "no validation documents"
        err.print(f"{recipe.data.shards} has {lack}: training without validation")
        return batches, None
    tokens = min(recipe.validation.tokens, held_out_samples.num_tokens)
    measured = Batches([PackedSet(held_out, held_out_samples, seed=0)], lambda step: step * tokens)
    return batches, partial(validate, job, measured, torch.from_numpy(token_bytes_V).to(world.device))


def due_steps(kept: set[int], every: int, stop: int) -> set[int]:
    """Return the steps to keep and every `every`-th one up to `stop`; 0 adds none."""
    return kept | ({*range(every, stop + 1, every)} if every else set())


def describe_start(job: Job, state: State, batches: Batches) -> str:
    """Describe a training in two lines: the network and its curriculum, and how it is computed, with reasons."""
    recipe, world, compute, carried = job.recipe, job.world, job.recipe.compute, job.origin.carried
    network: Any = unwrap(state.model).network
    epochs = describe_epochs(job, state.num_tokens, batches)
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    num_trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    adapted = f" ({num_trained:,} of them trained, by LoRA)" if recipe.init.lora is not None else ""
    phases = " → ".join(f"{phase.steps:,} steps of {phase.words}" for phase in recipe.curriculum)
    left_out = f", {batches.left_out_tokens:,} tokens left out" if batches.left_out_tokens else ""
    of_samples = (
        f"; {batches.num_samples:,} samples in all" if recipe.data.mixture else f" of {batches.num_samples:,} samples"
    )
    carried_over = f"; taken over: {', '.join(carried)}" if carried else ""
    several = f"{world.size} processes, {compute.parallel} · " if world.size > 1 else ""
    return (
        f"{job.run.path}: {type(network).__name__} of {millions:.1f}M parameters{adapted}, {phases}, batches of "
        f"{recipe.batch_label} tokens, {epochs} epochs{of_samples}{left_out}{carried_over}\n"
        f"{several}{explain_computing(world.dtype, world.device, network.base_model)} · blocks {state.compiling}"
    )


def describe_epochs(job: Job, num_tokens: float, batches: Batches) -> str:
    """Describe how often a run reads its text (`12`), or each text of a mixture (`general 0.75, domain 25`). A text
    counts once for all its passes (`mask_passes`)."""
    curriculum = job.recipe.curriculum
    for phase, end in zip(curriculum, accumulate(phase.steps for phase in curriculum), strict=True):
        num_tokens -= (job.tokens_before(end) - job.tokens_before(end - phase.steps)) * (1 - 1 / phase.mask_passes)
    names = [f"{shards.folder.name} " if job.recipe.data.mixture else "" for shards in job.text.sets]
    sizes = [packed.samples.num_tokens for packed in batches.sets]
    parts = zip(names, batches.shares, sizes, strict=True)
    return ", ".join(f"{name}{plain_number(num_tokens * float(share) / size)}" for name, share, size in parts)


@dataclass(frozen=True)
class Update:
    """The result of an update."""

    numbers: dict[str, Any]
    """The fields that it adds to its record in metrics.jsonl."""
    flops: float
    votes: list[bool]
    """Whether any process has set each flag."""


def update(
    job: Job, state: State, microbatches: list[Microbatch], step: int, flags: Callable[[], Sequence[bool]] = tuple
) -> Update:
    """Update the weights by the microbatches of all processes, with one mean over the targets of the whole batch.

    Call `flags` after the backward passes. All processes learn which flags any of them has set.
    """
    world, recipe, model = job.world, job.recipe, state.model
    tokens, targets, work = world.sum(
        sum(len(m.inputs_T) for m in microbatches),
        sum(len(m.targets_N) for m in microbatches),
        sum(state.flops.batch(m.lengths_S, len(m.targets_N), m.layout.causal) for m in microbatches),
    )
    # Dropout, of the network or of adapters, is a function of the update and the process: a run resumes exactly.
    torch.manual_seed(int(np.random.SeedSequence((recipe.seed, step, world.rank)).generate_state(1)[0]))
    sums = []
    for index, m in enumerate(microbatches):
        # Processes do not exchange gradients before the last microbatch.
        is_last = index == len(microbatches) - 1
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        with autocast(world.device, world.dtype):
            loss_sum, _, _ = model(m.inputs_T, m.positions_T, m.layout, m.target_positions_N, m.targets_N)
        # DDP and FSDP average gradients over processes; the factor turns the average into a sum.
        (loss_sum * (world.size / max(targets, 1.0))).backward()
        sums.append(loss_sum.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.max_grad_norm)
    # Wait for the device once, for all numbers of this process, then sum them over processes in one collective.
    *local_sums, grad_norm = torch.stack([*sums, getattr(norm, "full_tensor", lambda: norm)()]).tolist()
    loss_sum, *votes = world.sum(sum(local_sums), *flags())
    loss = loss_sum / max(targets, 1.0)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        suspects = [m for m, value in zip(microbatches, local_sums, strict=True) if not math.isfinite(value)]
        samples = first_of([str(id) for m in suspects or microbatches for id in m.sample_ids_S], 8)
        saved = f"the last checkpoint is @{job.origin.step + state.saved_step}"
        checkpoint = saved if state.saved_step else "no checkpoint was written yet"
        event = f"{job.run.path.name}: loss {loss} and gradient norm {grad_norm} at step {step + 1}, samples {samples}"
        raise InputError(f"{event}; {checkpoint}; lower schedule.peak_lr or look at these samples")
    rate = set_rate(state.optimizers, recipe.schedule, step, recipe.num_steps)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    numbers = {"loss": loss, "grad_norm": grad_norm, "tokens": int(tokens), "targets": int(targets), "lr": rate}
    return Update(numbers, work + state.flops.per_update, [vote > 0 for vote in votes])


@torch.no_grad()
def validate(job: Job, batches: Batches, token_bytes_V: Tensor, model: nn.Module, phase: Phase) -> dict[str, float]:
    """Measure loss (nats per target), accuracy, and bits per byte of the targets' text."""
    model.eval()
    totals = np.zeros(4)
    for m in make_microbatches(job, batches, phase, 0):
        with autocast(job.world.device, job.world.dtype):
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


@dataclass
class MetricsLog:
    """The log of a run's updates, which the first process writes."""

    run: Run
    progress: Tracker
    peak: float
    """The peak FLOP/s of all devices together, for `share_of_peak`. A peak measured beside other work may be too low; a
    faster step raises it."""
    is_main: bool
    """Whether this is the first process, which alone writes records."""
    has_updates: bool
    """Whether updates get records. Validations always do."""
    work_left: Callable[[int], dict[str, float]]
    """The FLOPs that are left after a number of steps, by objective."""
    send: Send
    """The function that sends records to the recipe's `tracking`."""
    failure: OSError | None = None
    """The error of a record that could not be written, such as a full disk. The loop ends all processes with it."""
    worked: float = 0.0
    """The FLOPs of all steps but the first, which warms up."""
    began: float | None = None
    """The time when the first step ended."""

    def record_step(self, record: dict[str, Any], work: float, seconds: float, waited: float) -> None:
        """Write the record of an update of `work` FLOPs that took `seconds`, including `waited` seconds for its
        batch."""
        speed = work / seconds
        self.peak = max(self.peak, speed)
        record |= {
            "tokens_per_second": round(record["tokens"] / seconds, 1),
            "flops_per_second": round(speed),
            "share_of_peak": round(speed / self.peak, 4),
            "data_wait": round(waited / seconds, 4),
        }
        if self.has_updates:
            self.write(record)
        now, seconds_left = time.perf_counter(), None
        if self.began is None:
            self.began = now
        else:
            self.worked += work
            seconds_left = (now - self.began) / self.worked * sum(self.work_left(record["step"]).values())
        wait = f" · {waited / seconds:.0%} waiting for data" if waited / seconds >= 0.01 else ""
        self.progress.advance(
            1,
            f"{record['objective']} loss {record['loss']:.3f} · {record['tokens_per_second']:,.0f} tokens/s · "
            f"{record['share_of_peak']:.0%} of peak{wait}",
            seconds_left=seconds_left,
        )

    def record_validation(self, done: int, phase: Phase, metrics: dict[str, float]) -> None:
        self.write({"kind": "validation", "step": done, "objective": phase.objective, **metrics})
        err.print(
            f"step {done}: validation {phase.objective} loss {metrics['loss']:.3f} · accuracy "
            f"{metrics['accuracy']:.1%} · {metrics['bits_per_byte']:.3f} bits per byte"
        )

    def write(self, record: dict[str, Any]) -> None:
        if not self.is_main:
            return
        try:
            self.run.log(record)
            self.send(record)
        except OSError as error:
            self.failure = error


@contextmanager
def open_log(job: Job, batches: Batches, flops: FlopCount, rest: Rest) -> Iterator[MetricsLog]:
    """Open the progress bar of these updates and, if they are logged, metrics.jsonl and `tracking`."""
    tracking = job.recipe.tracking if rest.is_logged and job.world.is_main else None
    with (
        open_tracking(tracking, job.run.path, job.recipe.model_dump(mode="json")) as send,
        track("pretrain", rest.stop, "steps", rest.begin) as progress,
    ):
        if job.world.is_main:  # drop what these updates will log again, and a last line that was cut short
            job.run.forget_after(rest.begin if rest.is_logged else job.recipe.num_steps)
        peak = peak_flops(job.world.device, job.world.dtype) * job.world.size
        mean = batches.num_tokens / batches.num_samples
        lengths = SampleLengths(mean, mean, "all samples as long as the mean")
        work_left = partial(flops_between, job.recipe, flops, lengths, stop=rest.stop, origin_step=job.origin.step)
        efficiency = CPU_EFFICIENCY if job.world.device.type == "cpu" else EFFICIENCY
        work = sum(work_left(rest.begin).values())
        expected, speed = duration(work / (efficiency * peak)), f"{efficiency:.0%} of the peak of {peak / 1e9:,.0f}"
        err.print(f"{work:.2g} FLOPs: at least {expected}, at {speed} GFLOP/s")
        yield MetricsLog(job.run, progress, peak, job.world.is_main, rest.is_logged, work_left, send)
