"""The objective of each step and its microbatches. `curriculum.OBJECTIVES` has the facts of each objective. Only in
this module does training depend on the objective.

A curriculum is a list of phases. A pure phase has one objective; a mixed phase (`clm_share`) has CLM steps between the
steps of its masked objective. Each step belongs to one pure phase.

Masks depend only on (seed, epoch, sample, position in the sample), so that they are the same for every run with that
seed, whatever the world size, the microbatch size and the number of workers. Targets are listed, not padded with -100,
so that the head computes no other logits.

Letters: T tokens, N targets, S samples, K streams of random numbers.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate
from math import floor

import numpy as np
from torch import Tensor

from biphase.corpus.packing import Batches, PackedBatch, uniform
from biphase.corpus.shards import ShardManifest
from biphase.curriculum import Phase
from biphase.device import to_device
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, lay_out
from biphase.pretraining.job import Job


def phase_of_step(curriculum: Sequence[Phase], run_step: int, origin_step: int) -> tuple[int, Phase]:
    """Return the index of the phase of update `run_step` (from 0), and the update's pure phase with a fixed ratio.

    The count of CLM steps in a mixed phase includes all parents, with their `origin_step` updates, so that branches of
    a trunk agree. At step i of n, a ramp has its value after (i + ½) / n of the phase. So its mean is the mean of both
    ends, and a part of a phase (`phases_between`) has the ratios of the whole.
    """
    ends = list(accumulate(phase.steps for phase in curriculum))
    index = bisect_right(ends, run_step)
    phase = curriculum[index]
    clm_share = Fraction(str(phase.clm_share))
    step = origin_step + run_step
    # A CLM step is one at which the running count of CLM steps grows: a share of 0.4 gives the steps 2, 4, 7, 9, 12 ...
    is_clm = floor((step + 1) * clm_share) > floor(step * clm_share)
    pure, _ = phase.parts[1 if is_clm else 0]
    step_in_phase = run_step - (ends[index] - phase.steps)
    return index, pure.with_mask_at((step_in_phase + 0.5) / phase.steps)


@dataclass(frozen=True)
class Microbatch:
    """The arguments of `PackedModel` for one forward pass, with the ids and lengths of the samples."""

    inputs_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    target_positions_N: Tensor
    targets_N: Tensor
    sample_ids_S: np.ndarray
    lengths_S: np.ndarray


@dataclass(frozen=True)
class Step:
    """An update to make: its index in the run (from 0), its pure phase, and this process's microbatches."""

    index: int
    phase_index: int
    """The index of its phase in the curriculum."""
    phase: Phase
    microbatches: list[Microbatch]


def make_steps(job: Job, batches: Batches, steps: range) -> Iterator[Step]:
    """Make the steps in order, with their microbatches on the device."""
    before = job.origin.step - job.pass_step
    for index in steps:
        phase_index, phase = phase_of_step(job.recipe.curriculum, index, job.origin.step)
        # A later pass reads the text of the first pass again, even if that was a parent's step.
        mask_pass = (before + index) % phase.mask_passes
        microbatches = make_microbatches(job, batches, phase, index - mask_pass, mask_pass)
        yield Step(index, phase_index, phase, microbatches)


def make_microbatches(job: Job, batches: Batches, phase: Phase, step: int, mask_pass: int = 0) -> list[Microbatch]:
    """Make this process's parts of batch `step`: the same number on every process, each of about
    `microbatch_tokens`."""
    world, device, manifest = job.world, job.world.device, job.text.main.manifest
    num = -(-batches.batch_tokens(step) // (world.size * job.recipe.compute.microbatch_tokens))
    lay = partial(lay_out, causal=phase.is_causal, device=device, pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    microbatches = []
    for part in range(world.rank * num, (world.rank + 1) * num):
        batch = batches.batch(step, part, world.size * num)
        if len(batch.sample_ids_S) == 0:
            # A part of a small validation set may have no sample. Its process must still take part in every layer, and
            # transformers needs a token. So the part gets one special token, which is never a target.
            zero = np.zeros(1, np.int64)
            batch = PackedBatch(np.array([manifest.mask_id]), zero, np.array([0, 1]), zero, zero)
        inputs_T, target_positions_N, targets_N = label_batch(phase, batch, manifest, job.recipe.seed, mask_pass)
        microbatches.append(
            Microbatch(
                inputs_T=to_device(inputs_T, device),
                positions_T=to_device(batch.positions_T, device),
                layout=lay(batch.bounds_S1, dtype=world.dtype),
                target_positions_N=to_device(target_positions_N, device),
                targets_N=to_device(targets_N, device),
                sample_ids_S=batch.sample_ids_S,
                lengths_S=batch.lengths_S,
            )
        )
    return microbatches


def label_batch(
    phase: Phase, batch: PackedBatch, shards: ShardManifest, seed: int, mask_pass: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Label a batch for a phase's objective. Returns the inputs [T], the positions [N] whose hidden states predict, and
    the tokens [N] to predict. The manifest of the shards lists the special tokens.

    A target is predicted in place, or from the position before it in its sample (`next`), as in a decoder. In causal
    objectives that predict the next token (CLM; MEAP, Zhuang et al. 2025), every token but the first of a sample is a
    target. In all others, the masked tokens are (MLM; MNTP, BehnamGhader et al. 2024).
    """
    facts, inputs_T = phase.facts, batch.tokens_T
    shift = 1 if facts.target == "next" else 0
    chosen_T = np.ones(len(inputs_T), dtype=bool)
    chosen_T[batch.bounds_S1[:-1]] = not shift  # no position of its sample precedes a first token
    if facts.masks_input:
        may_T = ~np.isin(inputs_T, shards.special_ids) & (chosen_T | facts.is_dense)
        inputs_T, masked_T = mask_tokens(phase, batch, shards, may_T, seed, mask_pass)
        chosen_T = chosen_T if facts.is_dense else masked_T
    chosen_N = np.flatnonzero(chosen_T)
    return inputs_T, chosen_N - shift, batch.tokens_T[chosen_N]


def mask_tokens(
    phase: Phase, batch: PackedBatch, shards: ShardManifest, may_T: np.ndarray, seed: int, mask_pass: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose each token of `may_T` with `mask_probability`, different tokens in each pass over a batch (`mask_passes`).

    Returns the inputs [T] with the chosen tokens hidden, and whether each token [T] is chosen.
    """
    assert not phase.is_ramped, "a masking ratio that moves has one value in each step"
    # Each token has a number in [0, 1) that decides whether it is chosen. If the mask token does not always hide it,
    # two more numbers decide how. All are drawn from (seed, stream, epoch, sample, position).
    streams_K1 = np.arange(1 if phase.mask_token_share == 1 else 3)[:, None]
    epochs_T = np.repeat(batch.epochs_S, batch.lengths_S)
    samples_T = np.repeat(batch.sample_ids_S, batch.lengths_S)
    choice_T, *hiding_T = uniform(seed, streams_K1, epochs_T, samples_T, batch.positions_T)
    # With a ratio of 0.4, pass 0 takes the tokens with a number in [0, 0.4), pass 1 those after it.
    ratio = phase.mask_at(0)
    passed_T = choice_T - mask_pass * ratio
    chosen_T = may_T & (passed_T >= 0) & (passed_T < ratio)
    # Chosen tokens become the mask token or a random ordinary token, or stay, by the phase's shares.
    inputs_T, masked_T = batch.tokens_T.copy(), chosen_T
    if hiding_T:
        draw_T, token_T = hiding_T
        masked_T = chosen_T & (draw_T < phase.mask_token_share)
        random_from = phase.mask_token_share
        takes_random_T = chosen_T & (draw_T >= random_from) & (draw_T < random_from + phase.random_token_share)
        ordinary = np.setdiff1d(np.arange(shards.vocab_size), shards.special_ids)
        inputs_T[takes_random_T] = ordinary[(token_T * len(ordinary)).astype(np.int64)][takes_random_T]
    inputs_T[masked_T] = shards.mask_id
    return inputs_T, chosen_T
