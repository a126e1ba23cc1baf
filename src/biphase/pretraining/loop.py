"""The training loop, readable top to bottom. It does not know which objective it runs.

    recipe → processes, data, run folder, network → for each step: microbatches, one global token mean, one update

Writes metrics.jsonl and checkpoints into the run folder; calling it again goes on where the last whole checkpoint is.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from biphase.corpus.packing import TrainingText
from biphase.distributed import join_world
from biphase.errors import InputError, StoppedError, first_of, memory_told
from biphase.machine import stop_signals
from biphase.pretraining.job import (
    Job,
    Microbatch,
    Start,
    TrainState,
    hold_run,
    load_state,
    open_job,
    open_loader,
    prefetch,
    resume_start,
    save_state,
)
from biphase.pretraining.metrics import StepResult, describe_start, make_validator, open_log, prove_causality
from biphase.pretraining.objectives import mixture_number
from biphase.pretraining.optimizer import autocast, gradient_sync, set_rate
from biphase.recipe import Recipe
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
                    start = resume_start(run, saved[-1], world)
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
                start = resume_start(run, earlier[-1], world) if earlier else origin
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
    recipe, world = job.recipe, job.world
    # 4. Data: what each step is made of, and what it is measured on.
    loader = open_loader(job)
    validate = make_validator(job) if is_logged else None
    # 5. Model and optimizers, as they are at the start.
    state = load_state(job, start)
    world.tell(describe_start(job, state, loader))
    tokens_seen = start.tokens_seen
    proved: set[tuple[int, str]] = set()
    steps = range(start.run_step, stop)
    with stop_signals(world.asked.append), open_log(job, loader, state.flops, steps, is_logged=is_logged) as log:
        for step, phase, microbatches in prefetch(loader, steps):
            log.note_batch()
            done, number = step + 1, mixture_number(recipe.curriculum, step)
            mixture = recipe.curriculum[number]
            # 6. At each switch of a mixture's direction: prove on the path that trains that it looks where it should.
            if (number, phase.objective) not in proved:
                prove_causality(state.model, phase, job)
                proved.add((number, phase.objective))
            # 7. One update. Whether any process is asked to stop, or could not log, travels with its loss.
            rate = set_rate(state.optimizers, recipe.schedule, step, recipe.num_steps)
            result = update(state, microbatches, step, job, lambda: (bool(world.asked), log.failure is not None))
            is_stopping, could_not_log = result.flags
            tokens_seen += result.tokens
            log.record_step(done, phase, rate, result, tokens_seen)
            # 8. Validation, a checkpoint, or neither. A line that cannot be written ends all processes, at the latest
            # with the next update.
            validates = is_logged and job.is_due(done, recipe.validation.every_steps)
            is_due = job.is_due(done, recipe.checkpoints.every_steps) if is_logged else done == stop
            saves = is_stopping or is_due
            if validate is not None and validates:
                for part, _ in mixture.parts:
                    log.record_validation(done, part, validate(state.model, part.with_mask_at(1)))
            if validates or saves or could_not_log:
                world.raise_any(log.failure, f"{job.run.metrics} could not be written; the first process says why")
            if saves:
                save_state(job, state, done, mixture, tokens_seen)
            if is_stopping and done < stop:
                told = f"stopped at step {done} of {stop}; run the same command to go on"
                raise StoppedError(told, *world.asked[:1])
            if validates or saves:
                log.restart_clock()
    return tokens_seen


def update(
    state: TrainState,
    microbatches: list[Microbatch],
    run_step: int,
    job: Job,
    flags: Callable[[], Sequence[bool]] = tuple,
) -> StepResult:
    """One update from all microbatches of all processes: the mean over targets is taken once, over the whole batch.

    `flags` are asked for when the gradients are there; the result says of each whether any process has it set.
    """
    world, model = job.world, state.model
    tokens, targets, work = world.sum(
        sum(len(m.inputs_T) for m in microbatches),
        sum(len(m.targets_N) for m in microbatches),
        sum(state.flops.batch(m.lengths_S, len(m.targets_N), m.layout.causal) for m in microbatches),
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
    # One wait for the device brings all numbers of this process, one collective those of the others.
    *local_sums, grad_norm = torch.stack([*sums, getattr(norm, "full_tensor", lambda: norm)()]).tolist()
    loss_sum, *votes = world.sum(sum(local_sums), *flags())
    loss = loss_sum / max(targets, 1.0)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise InputError(explain_divergence(job.run, run_step, loss, grad_norm, local_sums, microbatches))
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    work += state.flops.per_update
    return StepResult(loss, grad_norm, int(tokens), int(targets), work, [vote > 0 for vote in votes])


def explain_divergence(
    run: Run, run_step: int, loss: float, norm: float, sums: list[float], microbatches: list[Microbatch]
) -> str:
    """A line that names the samples of a loss that is no number, and the checkpoint from which to go on."""
    suspects = [m for m, value in zip(microbatches, sums, strict=True) if not math.isfinite(value)] or microbatches
    named = first_of([str(number) for m in suspects for number in m.sample_ids_S], 8)
    steps = whole_steps(run)
    kept = f"the last checkpoint is @{steps[-1]}" if steps else "no checkpoint was written yet"
    return (
        f"{run.path.name}: loss {loss} and gradient norm {norm} at step {run_step + 1}, samples {named}; {kept}; lower "
        "schedule.peak_lr or look at these samples"
    )
