"""Step number → microbatches of this process, on its device: packed, masked and laid out, one step ahead.

Letters: T tokens, N targets, S samples.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from biphase.corpus.mixture import make_batches
from biphase.corpus.packing import Batches, PackedBatch
from biphase.device import to_device
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, choose_backend, lay_out
from biphase.errors import InputError
from biphase.pretraining.job import Job
from biphase.pretraining.objectives import label_batch
from biphase.pretraining.schedule import phase_of_step
from biphase.recipe import Phase


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

    def microbatches(self, phase: Phase, step: int) -> list[Microbatch]:
        """This process's parts of batch `step`: as many on every process, each about `microbatch_tokens` long."""
        size, rank = self.job.world.size, self.job.world.rank
        num = -(-self.batches.batch_tokens(step) // (size * self.job.recipe.compute.microbatch_tokens))
        return [self.microbatch(phase, step, rank * num + i, size * num) for i in range(num)]

    def microbatch(self, phase: Phase, step: int, part: int, num_parts: int) -> Microbatch:
        """Part `part` of `num_parts` of batch `step`, labelled for the phase and laid out on the device."""
        device, manifest = self.job.world.device, self.job.shards.manifest
        batch = self.batches.batch(step, part, num_parts)
        if len(batch.sample_ids_S) == 0:
            # A part of a small validation set may hold no sample, but its process must take part in every layer, and
            # transformers cannot compute on no token: so one special token, which no objective asks for.
            zero = np.zeros(1, np.int64)
            batch = PackedBatch(np.array([manifest.mask_id]), zero, np.array([0, 1]), zero, zero)
        labelled = label_batch(phase, batch, manifest, self.job.recipe.seed)
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
        phase = phase_of_step(loader.job.recipe.curriculum, number, loader.job.origin.step)
        return number, phase, loader.microbatches(phase, number)

    if not steps:
        return
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(make, steps[0])
        for number in steps:
            ready = pending.result()
            if number + 1 in steps:
                pending = thread.submit(make, number + 1)
            yield ready
