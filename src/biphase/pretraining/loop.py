"""The training loop, readable top to bottom. It does not know which objective it runs.

    recipe → processes, data, run folder, network → for each step: microbatches, one global token mean, one update

Writes metrics.jsonl and checkpoints into the run folder; calling it again goes on where the last whole checkpoint is.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from biphase.config import Phase, Recipe
from biphase.console import track
from biphase.corpus.shards import ShardSet
from biphase.device import choose_dtype, describe_machine, peak_flops
from biphase.distributed import World, join_world
from biphase.encoder.attention import choose_backend
from biphase.encoder.packed import PackedModel, count_flops
from biphase.encoder.proofs import probe_causality
from biphase.errors import BusyError, InputError, StoppedError
from biphase.flops import FlopCount
from biphase.pretraining.batches import Microbatch, open_source, prefetch
from biphase.pretraining.checkpoint import CheckpointManifest, load_optimizer, save_checkpoint
from biphase.pretraining.curriculum import Start, find_start, load_network, phase_at, phase_ends, resume_start
from biphase.pretraining.metrics import MetricsLog, StepResult, describe_start, open_tensorboard
from biphase.pretraining.objectives import is_causal
from biphase.pretraining.optimizer import make_optimizers, set_rate
from biphase.pretraining.parallel import autocast, gradient_sync, parallelize, unwrap
from biphase.pretraining.schedule import decay_start, learning_rate
from biphase.pretraining.validation import make_validator
from biphase.run import Run, claim_run, drop_old, run_path, whole_steps


@dataclass(frozen=True)
class Job:
    """What stays the same while a run trains."""

    recipe: Recipe
    run: Run
    world: World
    dtype: torch.dtype
    shards: ShardSet
    origin: Start
    """Where the run began, however often it was resumed since."""
    again_to: int | None = None
    """Of a finished run: a step whose checkpoint is lost. Training goes there from the one before and logs nothing."""

    @property
    def last_step(self) -> int:
        return self.again_to or self.recipe.num_steps

    @property
    def kept_steps(self) -> set[int]:
        """Steps whose checkpoints stay: the ends of phases, the last before the decay, and those in the recipe."""
        recipe = self.recipe
        ends = phase_ends(recipe.curriculum)
        return {*ends, decay_start(recipe.schedule, recipe.num_steps), *recipe.checkpoints.keep} - {0}

    @property
    def lost_steps(self) -> list[int]:
        """Kept steps of a finished run without a whole checkpoint: named after it was done, or dropped since."""
        saved = {step - self.origin.step for step in whole_steps(self.run)}
        return sorted(set(self.recipe.checkpoints.keep) - saved) if self.run.is_done else []


def train(recipe: Recipe, root: Path = Path("runs")) -> Run:
    """Train as the recipe says and return the run; a finished run with all checkpoints to keep is returned at once.

    Raises:
        InputError: for what the user can mend, a diverging loss included.
        StoppedError: after SIGTERM or SIGINT, once the state is saved.
    """
    with join_world(recipe.compute.device) as world:
        shards = ShardSet.open(Path(recipe.data.shards), "train")
        origin = find_start(recipe, shards)
        dtype = choose_dtype(recipe.compute.precision, world.device)
        run = Run(run_path(root, recipe.name, recipe.identity(shards.fingerprint, origin.parent, str(dtype))))
        job = Job(recipe, run, world, dtype, shards, origin)
        if run.is_done and not job.lost_steps:
            world.tell(f"{run.path} is already done")
            return run
        with ExitStack() as held:
            hold_run(held, run, recipe, world)
            if not run.is_done:
                train_job(job)
            for step in job.lost_steps:
                train_job(replace(job, again_to=step))
        return run


def hold_run(held: ExitStack, run: Run, recipe: Recipe, world: World) -> None:
    """Claim the run folder for all processes; every one of them raises `InputError` when it is taken."""
    taken: InputError | None = None
    if world.is_main:
        environment = describe_machine(world.device) | {"processes": world.size}
        try:
            held.enter_context(claim_run(run, recipe.model_dump(mode="json"), environment))
        except InputError as error:
            taken = error
    if world.any(taken is not None):
        raise taken or BusyError(f"{run.path} is in use by another process")


def train_job(job: Job) -> None:
    recipe, world = job.recipe, job.world
    # 1. Where to go on.
    start = latest_start(job)
    # 2. Data: what each step is made of, and what it is measured on.
    source = open_source(recipe, job.shards, world, job.dtype, job.origin.data_position)
    validate = None if job.again_to else make_validator(recipe, world, job.dtype, source.vocabulary)
    # 3. Network and optimizer.
    network = load_network(recipe, start, job.shards)
    flops, peak = count_flops(network), peak_flops(world.device, job.dtype) * world.size
    steps = range(start.run_step, job.last_step)
    work = recipe.num_steps * recipe.batch_tokens * flops.per_token
    model = parallelize(PackedModel(network), recipe.compute, job.dtype, world, work=work)
    sharded = world.size > 1 and recipe.compute.parallel == "fsdp"
    optimizers = make_optimizers(recipe.optimizer, model, dtype=job.dtype, sharded=sharded)
    if start.optimizer_folder is not None:
        load_optimizer(start.optimizer_folder, unwrap(model), optimizers)
    world.tell(describe_start(job.run, recipe, network, source, job.origin.carried))
    # 4. Steps.
    tokens_seen, since = start.tokens_seen, time.perf_counter()
    proved: set[tuple[int, bool]] = set()
    is_new = not job.again_to
    board = open_tensorboard(job.run.path, recipe.tensorboard and world.is_main and is_new, start.run_step)
    with stop_signals() as stop_asked, track("pretrain", job.last_step, "steps") as progress:
        progress.advance(start.run_step, already_done=True)
        journal = MetricsLog(job.run, board, progress, is_main=world.is_main, is_new=is_new, peak=peak)
        for run_step, part, microbatches in prefetch(recipe, source, steps, job.origin.step):
            phase = phase_at(recipe.curriculum, run_step)
            if (switch := (id(phase), is_causal(part))) not in proved:
                prove_causality(model, part, job)
                proved.add(switch)
            set_rate(optimizers, learning_rate(recipe.schedule, run_step, recipe.num_steps))
            result = update(model, optimizers, microbatches, flops, run_step, job)
            tokens_seen += result.tokens
            done = run_step + 1
            seconds, since = time.perf_counter() - since, time.perf_counter()
            journal.record_step(done, part, optimizers[0].param_groups[0]["lr"], result, tokens_seen, seconds)
            if validate is not None and is_due(done, recipe.validation.every_steps, job):
                for pure, _ in phase.parts:
                    journal.record_validation(done, pure, validate(model, pure))
                since = time.perf_counter()
            world.raise_any(journal.failure, f"{job.run.metrics} could not be written; the first process says why")
            stopping = world.any(stop_asked())
            if stopping or is_due(done, recipe.checkpoints.every_steps, job):
                save(job, model, optimizers, done, phase, tokens_seen)
                since = time.perf_counter()
            if stopping and done < job.last_step:
                raise StoppedError(f"stopped at step {done} of {job.last_step}; run the same command to go on")
    # 5. Done.
    if world.is_main and is_new:
        job.run.mark_done({"step": job.origin.step + recipe.num_steps, "tokens_seen": tokens_seen})
    world.barrier()


def latest_start(job: Job) -> Start:
    """The run's last whole checkpoint before the step to reach, else its origin; what was logged after is forgotten."""
    saved = [step for step in whole_steps(job.run) if step - job.origin.step < job.last_step or not job.again_to]
    start = resume_start(job.run, saved[-1]) if saved else job.origin
    if job.again_to:
        job.world.tell(f"{job.run.path}: once more from step {start.run_step} to {job.again_to}, to be kept now")
    elif saved:
        job.world.tell(f"resuming {job.run.path} at step {start.run_step}")
    if job.world.is_main and not job.again_to:
        job.run.forget_after(start.run_step)
    return start


def update(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    microbatches: list[Microbatch],
    flops: FlopCount,
    run_step: int,
    job: Job,
) -> StepResult:
    """One update from all microbatches of all processes: the mean over targets is taken once, over the whole batch."""
    world = job.world
    tokens, targets, work = world.sum(
        sum(len(m.inputs_T) for m in microbatches),
        sum(len(m.targets_N) for m in microbatches),
        sum(flops.batch(m.lengths_S, len(m.targets_N), m.layout.causal) for m in microbatches),
    )
    sums = []
    for i, microbatch in enumerate(microbatches):
        with gradient_sync(model, now=i == len(microbatches) - 1):
            with autocast(world.device, job.dtype):
                loss_sum, _, _ = model(*microbatch.arguments())
            # DDP and FSDP average gradients over processes; the factor makes a sum of that.
            (loss_sum * (world.size / max(targets, 1.0))).backward()
        sums.append(loss_sum.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), job.recipe.optimizer.max_grad_norm)
    grad_norm = float(getattr(norm, "full_tensor", lambda: norm)())
    local_sums = torch.stack(sums).tolist()
    loss = world.sum(sum(local_sums))[0] / max(targets, 1.0)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise InputError(explain_divergence(job.run, run_step, loss, grad_norm, local_sums, microbatches))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, grad_norm, int(tokens), int(targets), work)


def explain_divergence(
    run: Run, run_step: int, loss: float, norm: float, sums: list[float], microbatches: list[Microbatch]
) -> str:
    suspects = [m for m, value in zip(microbatches, sums, strict=True) if not math.isfinite(value)] or microbatches
    ids = [int(i) for m in suspects for i in m.sample_ids_S]
    named = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    steps = whole_steps(run)
    kept = f"the last checkpoint is @{steps[-1]}" if steps else "no checkpoint was written yet"
    return (
        f"{run.path.name}: loss {loss} and gradient norm {norm} at step {run_step + 1}, samples {named}; {kept}; lower "
        "schedule.peak_lr or look at these samples"
    )


def save(
    job: Job, model: nn.Module, optimizers: list[torch.optim.Optimizer], done: int, phase: Phase, tokens_seen: int
) -> None:
    """Write a checkpoint, and drop the passing ones that are too old."""
    origin, recipe = job.origin, job.recipe
    manifest = CheckpointManifest(
        step=origin.step + done,
        run_step=done,
        tokens_seen=tokens_seen,
        data_position=origin.data_position + done * recipe.batch_tokens,
        data_fingerprint=job.shards.fingerprint,
        tokenizer_hash=job.shards.manifest.tokenizer_hash,
        objective=phase.objective,
        is_decayed=done > decay_start(recipe.schedule, recipe.num_steps),
        parent=origin.parent,
        carried=list(origin.carried),
    )
    packed: Any = unwrap(model)
    mark_direction(packed.network, is_causal(phase))
    save_checkpoint(job.run, manifest, packed, optimizers, job.shards.tokenizer(), job.world)
    if job.world.is_main:
        passing = [step for step in whole_steps(job.run) if step - origin.step not in job.kept_steps]
        drop_old(job.run, passing, recipe.checkpoints.keep_last)


def prove_causality(model: nn.Module, phase: Phase, job: Job) -> None:
    """The probe on the path that trains: the same attention backend, the same type of the arithmetic."""
    network, device = unwrap(model), job.world.device
    name, vocab_size = type(network.network).__name__, job.shards.manifest.vocab_size
    model.eval()
    with autocast(device, job.dtype):
        probe_causality(model, is_causal(phase), vocab_size, device, name, choose_backend(device, job.dtype))
    model.train()


def mark_direction(network: Any, causal: bool) -> None:
    """Say in a decoder's configuration which way it looks, so that transformers reloads it so."""
    if network.config.model_type != "eurobert":
        network.config.is_causal = causal


def is_due(done: int, every: int, job: Job) -> bool:
    if job.again_to:
        return done == job.again_to
    return done in job.kept_steps or (every > 0 and done % every == 0)


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and SIGINT end the run after the current step; a second SIGINT ends it at once.

    A second SIGTERM does not: Slurm and torchrun may both send one.
    """
    asked: list[int] = []

    def note(signum: int, _: Any) -> None:
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
