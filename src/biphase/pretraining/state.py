"""What training changes, weights and moments: loaded where a run starts, saved in checkpoints."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from biphase.config import Phase
from biphase.encoder.packed import PackedModel, count_flops
from biphase.flops import FlopCount
from biphase.pretraining.checkpoint import CheckpointManifest, load_optimizer, save_checkpoint
from biphase.pretraining.job import Job
from biphase.pretraining.objectives import is_causal
from biphase.pretraining.optimizer import make_optimizers
from biphase.pretraining.parallel import parallelize, unwrap
from biphase.pretraining.schedule import decay_start
from biphase.pretraining.start import Start, load_network
from biphase.run import drop_old, whole_steps


@dataclass(frozen=True)
class TrainState:
    """The model and its optimizers, which change in place, and what a step of them costs."""

    model: nn.Module
    """A `PackedModel`, wrapped for its processes."""
    optimizers: list[torch.optim.Optimizer]
    flops: FlopCount


def load_state(job: Job, start: Start) -> TrainState:
    """The model and the optimizers as they are at `start`. Every process must call it."""
    recipe, world = job.recipe, job.world
    network = load_network(recipe, start, job.shards)
    flops = count_flops(network)
    work = recipe.num_steps * recipe.batch_tokens * flops.per_token
    model = parallelize(PackedModel(network), recipe.compute, job.dtype, world, work=work)
    sharded = world.size > 1 and recipe.compute.parallel == "fsdp"
    optimizers = make_optimizers(recipe.optimizer, model, dtype=job.dtype, sharded=sharded)
    if start.optimizer_folder is not None:
        load_optimizer(start.optimizer_folder, unwrap(model), optimizers, world)
    return TrainState(model, optimizers, flops)


def save_state(job: Job, state: TrainState, done: int, mixture: Phase, tokens_seen: int) -> None:
    """Write the checkpoint after update `done`, and drop passing ones that are too old. Every process must call it."""
    origin, recipe = job.origin, job.recipe
    manifest = CheckpointManifest(
        step=origin.step + done,
        run_step=done,
        tokens_seen=tokens_seen,
        data_position=origin.data_position + done * recipe.batch_tokens,
        data_fingerprint=job.shards.fingerprint,
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
