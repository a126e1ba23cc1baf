"""A run that is being trained: what stays the same meanwhile, who holds its folder, what training changes, and the
microbatches of a step, packed, masked and laid out, one step ahead.

What changes is weights and moments: loaded where a run starts, saved in checkpoints. Letters: T tokens, N targets, S
samples.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase.corpus.packing import Batches, PackedBatch, TrainingText, make_batches, open_text
from biphase.corpus.shards import ShardSet
from biphase.device import choose_dtype, describe_machine, to_device
from biphase.distributed import World
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, choose_backend, lay_out
from biphase.encoder.network import load_model_config
from biphase.encoder.packed import PackedModel, count_flops
from biphase.errors import BusyError, InputError
from biphase.flops import FlopCount, SampleLengths, count_positions, flops_per_token, update_flops
from biphase.hub import fetch_model
from biphase.pretraining.checkpoint import CheckpointManifest, load_optimizer, save_checkpoint
from biphase.pretraining.objectives import decay_start, is_causal, label_batch, mixture_ends, phase_of_step
from biphase.pretraining.optimizer import (
    block_matrices,
    fill_parts,
    make_optimizers,
    outline_network,
    parallelize,
    unwrap,
)
from biphase.pretraining.start import Start, find_recorded, find_start, load_network, record_origin
from biphase.recipe import Phase, Recipe
from biphase.run import Run, claim_run, drop_old, run_path, whole_steps


@dataclass(frozen=True)
class Job:
    """What stays the same while a run trains."""

    recipe: Recipe
    run: Run
    world: World
    dtype: torch.dtype
    text: TrainingText
    origin: Start
    """Where the run began, however often it was resumed since."""

    @property
    def shards(self) -> ShardSet:
        """The set whose tokenizer is the run's."""
        return self.text.main

    @property
    def kept_steps(self) -> set[int]:
        """Steps whose checkpoints stay: the ends of mixtures, the last before the decay, and those in the recipe."""
        recipe = self.recipe
        decay = decay_start(recipe.schedule, recipe.num_steps)
        return {*mixture_ends(recipe.curriculum), decay, *recipe.checkpoints.keep} - {0}

    def tokens_before(self, run_step: int) -> int:
        """The tokens of all updates of this run before `run_step`."""
        origin = self.origin.step
        return self.recipe.tokens_before(origin + run_step) - self.recipe.tokens_before(origin)

    @property
    def lost_steps(self) -> list[int]:
        """Kept steps of a finished run without a whole checkpoint: named after it was done, or dropped since."""
        saved = {step - self.origin.step for step in whole_steps(self.run)}
        return sorted(set(self.recipe.checkpoints.keep) - saved) if self.run.is_done else []

    def is_due(self, done: int, every: int) -> bool:
        """Whether something that happens at kept steps, and after `every` updates (0: never), happens now."""
        return done in self.kept_steps or (every > 0 and done % every == 0)


def open_job(recipe: Recipe, root: Path, world: World) -> Job:
    """The recipe's run under `root`, named by what decides its weights. Writes nothing and loads no weights."""
    recipe = fit_samples(recipe)
    text = open_text(recipe.data)
    dtype = choose_dtype(recipe.compute.precision, world.device)

    def run_from(origin: Start) -> Run:
        return Run(run_path(root, recipe.name, recipe.identity(text.fingerprint, origin.parent, str(dtype))))

    def find_origin() -> Start:
        try:
            return find_start(recipe, text)
        except InputError:  # its parent may have dropped the checkpoint since
            recorded = find_recorded(recipe, root, run_from)
            if recorded is None:
                raise
            return recorded

    elsewhere = f"{recipe.init.checkpoint} cannot be taken over; the first process says why"
    # A model of the hub is in the cache of each machine.
    origin = find_origin() if recipe.init.checkpoint is None else world.decide(find_origin, elsewhere)
    return Job(recipe, run_from(origin), world, dtype, text, origin)


def fit_samples(recipe: Recipe) -> Recipe:
    """The recipe; where it does not say how long samples are, with those that `init.model` has positions for."""
    if recipe.init.model is None or "max_sample_tokens" in recipe.data.model_fields_set:
        return recipe
    positions = count_positions(load_model_config(fetch_model(recipe.init.model, recipe.init.revision)))
    fitting = {"max_sample_tokens": min(recipe.data.max_sample_tokens, positions)}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=fitting)})


@contextmanager
def hold_run(job: Job) -> Iterator[None]:
    """Claim the run folder for all processes; every one of them raises `InputError` when it is taken."""
    world, taken = job.world, None
    with ExitStack() as held:
        if world.is_main:
            environment = describe_machine(world.device) | {"processes": world.size}
            environment["precision"] = str(job.dtype).removeprefix("torch.")
            try:
                held.enter_context(claim_run(job.run, job.recipe.model_dump(mode="json"), environment))
                if job.recipe.init.checkpoint is not None and not job.run.is_done:
                    record_origin(job.run, job.origin)
            except InputError as error:
                taken = error
        if world.any(taken is not None):
            raise taken or BusyError(f"{job.run.path} is in use by another process")
        yield


@dataclass(frozen=True)
class TrainState:
    """The model and its optimizers, which change in place, and what a step of them costs."""

    model: nn.Module
    """A `PackedModel`, wrapped for its processes."""
    optimizers: list[torch.optim.Optimizer]
    flops: FlopCount


def total_work(job: Job, flops: FlopCount) -> float:
    """The FLOPs of the blocks in the whole run, resumed or not."""
    return job.tokens_before(job.recipe.num_steps) * flops.per_token


def work_between(job: Job, flops: FlopCount, lengths: SampleLengths, begin: int, stop: int) -> float:
    """The FLOPs of a run's updates from `begin` to `stop`: phases and batches that grow cost more or less a step."""
    total, first = 0.0, 0
    for phase in job.recipe.curriculum:
        low, high = max(begin, first), min(stop, first + phase.steps)
        if low < high:
            total += (job.tokens_before(high) - job.tokens_before(low)) * flops_per_token(flops, phase, lengths)
            total += (high - low) * flops.per_update
        first += phase.steps
    return total


def load_state(job: Job, start: Start) -> TrainState:
    """The model and the optimizers as they are at `start`. Every process must call it."""
    recipe, world = job.recipe, job.world
    load = partial(load_network, recipe, start, job.shards)
    sharded = world.size > 1 and recipe.compute.parallel == "fsdp"
    network, whole = outline_network(load, world) if sharded else (load(), None)
    counted: Any = whole if sharded else network  # an outline forms no products
    flops = world.decide(partial(count_flops, counted), "FLOPs are not counted; the first process says why")
    model = parallelize(PackedModel(network), recipe.compute, job.dtype, world, work=total_work(job, flops))
    if sharded:
        fill_parts(model, whole, world)
        del whole
    optimizers = make_optimizers(recipe.optimizer, model, dtype=job.dtype, sharded=sharded)
    if start.optimizer_folder is not None:
        load_optimizer(start.optimizer_folder, unwrap(model), optimizers, world)
    per_update = update_flops(recipe.optimizer, [matrix.shape for matrix in block_matrices(model)])
    return TrainState(model, optimizers, replace(flops, per_update=per_update))


def save_state(job: Job, state: TrainState, done: int, mixture: Phase, tokens_seen: int) -> None:
    """Write the checkpoint after update `done`, and drop passing ones that are too old. Every process must call it."""
    origin, recipe = job.origin, job.recipe
    manifest = CheckpointManifest(
        step=origin.step + done,
        run_step=done,
        tokens_seen=tokens_seen,
        data_position=origin.data_position + job.tokens_before(done),
        data_fingerprint=job.text.fingerprint,
        data_history=[(0, job.text.contents)],
        tokenizer_hash=job.shards.manifest.tokenizer_hash,
        objective=mixture.objective,
        is_decayed=done > decay_start(recipe.schedule, recipe.num_steps),
        parent=origin.parent,
        carried=list(origin.carried),
    )
    packed: Any = unwrap(state.model)
    if packed.network.config.model_type != "eurobert":  # so that transformers reloads a decoder as it looks now
        packed.network.config.is_causal = is_causal(mixture)
    save_checkpoint(job.run, manifest, packed, state.optimizers, job.shards.tokenizer(), job.world)
    if job.world.is_main:
        passing = [step for step in whole_steps(job.run) if step - origin.step not in job.kept_steps]
        drop_old(job.run, passing, recipe.checkpoints.keep_last)


@dataclass(frozen=True)
class Microbatch:
    """One forward and backward pass: the arguments of `PackedModel`, and what the accounts need."""

    inputs_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    target_positions_N: Tensor
    targets_N: Tensor
    sample_ids_S: np.ndarray
    lengths_S: np.ndarray

    def arguments(self) -> tuple[Tensor, Tensor, PackedLayout, Tensor, Tensor]:
        return self.inputs_T, self.positions_T, self.layout, self.target_positions_N, self.targets_N


@dataclass(frozen=True)
class BatchLoader:
    """Everything that turns a step number into microbatches for this process."""

    batches: Batches
    job: Job

    def microbatches(self, phase: Phase, step: int, mask_pass: int = 0) -> list[Microbatch]:
        """This process's parts of batch `step`: as many on every process, each about `microbatch_tokens` long."""
        size, rank = self.job.world.size, self.job.world.rank
        num = -(-self.batches.batch_tokens(step) // (size * self.job.recipe.compute.microbatch_tokens))
        return [self.microbatch(phase, step, rank * num + i, size * num, mask_pass) for i in range(num)]

    def microbatch(self, phase: Phase, step: int, part: int, num_parts: int, mask_pass: int = 0) -> Microbatch:
        """Part `part` of `num_parts` of batch `step`, labelled for the phase and laid out on the device."""
        device, manifest = self.job.world.device, self.job.shards.manifest
        batch = self.batches.batch(step, part, num_parts)
        if len(batch.sample_ids_S) == 0:
            # A part of a small validation set may hold no sample, but its process must take part in every layer, and
            # transformers cannot compute on no token: so one special token, which no objective asks for.
            zero = np.zeros(1, np.int64)
            batch = PackedBatch(np.array([manifest.mask_id]), zero, np.array([0, 1]), zero, zero)
        labelled = label_batch(phase, batch, manifest, self.job.recipe.seed, mask_pass)
        layout = lay_out(
            batch.bounds_S1,
            causal=labelled.causal,
            device=device,
            backend=choose_backend(device, self.job.dtype),
            pad_to_multiple_of=PAD_TO_MULTIPLE_OF,
        )
        return Microbatch(
            inputs_T=to_device(labelled.inputs_T, device),
            positions_T=to_device(batch.positions_T, device),
            layout=layout,
            target_positions_N=to_device(labelled.target_positions_N, device),
            targets_N=to_device(labelled.targets_N, device),
            sample_ids_S=batch.sample_ids_S,
            lengths_S=batch.lengths_S,
        )


def open_loader(job: Job) -> BatchLoader:
    """The batches of a run for this process. Raises `InputError` where they are too small for its processes."""
    recipe, world, origin = job.recipe, job.world, job.origin
    batches = make_batches(recipe.data, job.text, job.tokens_before, origin=origin.data_position)
    # A batch grows or shrinks from its first to its last update.
    smallest = min(batches.batch_tokens(0), batches.batch_tokens(recipe.num_steps - 1))
    microbatches = -(-smallest // (world.size * recipe.compute.microbatch_tokens))
    if smallest // (world.size * microbatches) < recipe.data.max_sample_tokens:
        raise InputError(
            f"batch_tokens {smallest} over {world.size} processes and {microbatches} microbatches leaves "
            f"less than one sample of {recipe.data.max_sample_tokens} tokens each; raise one of the two"
        )
    return BatchLoader(batches, job)


def prefetch(loader: BatchLoader, steps: range) -> Iterator[tuple[int, Phase, list[Microbatch]]]:
    """Each step's number, pure phase and microbatches; the next step's are made while the current one computes."""

    def make(number: int) -> tuple[int, Phase, list[Microbatch]]:
        origin = loader.job.origin
        phase = phase_of_step(loader.job.recipe.curriculum, number, origin.step)
        # A later pass is over the text of the first one, which may have been a parent's, but not of another order.
        before = origin.step if origin.data_position else 0
        mask_pass = (before + number) % phase.mask_passes
        return number, phase, loader.microbatches(phase, number - mask_pass, mask_pass)

    if not steps:
        return
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(make, steps[0])
        for number in steps:
            ready = pending.result()
            if number + 1 in steps:
                pending = thread.submit(make, number + 1)
            yield ready
