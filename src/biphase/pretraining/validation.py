"""Held-out text → loss, accuracy at the targets, bits per byte: always the same tokens and masks."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from biphase.config import Phase, Recipe
from biphase.corpus.packing import Batches
from biphase.corpus.shards import ShardSet, read_shard_manifest
from biphase.distributed import World
from biphase.pretraining.batches import BatchLoader, make_samples
from biphase.pretraining.objectives import Vocabulary
from biphase.pretraining.parallel import autocast


def make_validator(
    recipe: Recipe, world: World, dtype: torch.dtype, vocabulary: Vocabulary
) -> Callable[[nn.Module, Phase], dict[str, float]] | None:
    """A function from (model, phase) to validation metrics, on the same tokens every time; None without such text."""
    folder = Path(recipe.data.shards)
    if read_shard_manifest(folder).splits["validation"].documents == 0:
        world.tell(f"{folder} has no validation documents: training without validation")
        return None
    shards = ShardSet.open(folder, "validation")
    samples = make_samples(recipe, shards)
    tokens = min(recipe.validation.tokens, samples.num_tokens)
    batches = Batches(shards, samples, tokens, seed=0)
    source = BatchLoader(batches, vocabulary, recipe.seed, world, dtype, recipe.compute.microbatch_tokens)
    token_bytes = torch.from_numpy(shards.token_bytes().astype(np.int64)).to(world.device)
    return partial(validate, source, token_bytes)


@torch.no_grad()
def validate(source: BatchLoader, token_bytes_V: Tensor, model: nn.Module, phase: Phase) -> dict[str, float]:
    """Loss (nats per target), accuracy at the targets, and bits per byte of the text that the targets stand for."""
    model.eval()
    totals = np.zeros(4)
    for microbatch in source.microbatches(phase, 0):
        with autocast(source.world.device, source.dtype):
            loss_sum, _, hits_N = model(*microbatch.arguments())
        num_bytes = token_bytes_V[microbatch.targets_N].sum()
        totals += [float(loss_sum), float(hits_N.sum()), len(microbatch.targets_N), float(num_bytes)]
    model.train()
    nats, hits, count, text_bytes = source.world.sum(*totals)
    return {
        "loss": nats / max(count, 1.0),
        "accuracy": hits / max(count, 1.0),
        "bits_per_byte": nats / math.log(2) / max(text_bytes, 1.0),
        "targets": count,
    }
