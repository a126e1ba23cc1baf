"""The objective of each step, and what it makes of a batch, one step ahead: CLM and MLM differ here.

A curriculum is a list of mixtures; a mixture gives each step one pure phase. A mixture is a phase as the recipe writes
it: one objective, or a masked one and CLM in turn (`clm_share`). A pure phase has one objective. The batch of a step is
labelled and laid out on the device while the step before it computes.

Masks are drawn from (seed, epoch, sample, position in the sample): the same for any world size, microbatch size and
number of workers, and the same for every run with that seed. Targets are listed, not padded with -100, so the head
computes logits for them alone.

Letters: T tokens, N targets, S samples, K streams of random numbers.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import floor

import numpy as np
from torch import Tensor

from biphase.corpus.packing import Batches, PackedBatch, uniform
from biphase.corpus.shards import ShardManifest
from biphase.device import to_device
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, lay_out
from biphase.pretraining.job import Job
from biphase.recipe import Phase


def phase_of_step(curriculum: Sequence[Phase], run_step: int, origin_step: int) -> tuple[int, Phase]:
    """Find the number of the mixture that update `run_step` (from 0) of a run belongs to, and its pure phase, whose
    masking ratio is fixed.

    A share of CLM counts the updates from 0 over all parents, `origin_step` before this run, so that branches of a
    trunk agree. A ratio that moves is, at step i of n, that of (i + ½) / n of the way: its mean is the mean of both
    ends, and a part of a phase (`Phase.between`) has the ratios of the whole.
    """
    ends = list(accumulate(mixture.steps for mixture in curriculum))
    number = bisect_right(ends, run_step)
    mixture = curriculum[number]
    share, step = Fraction(str(mixture.clm_share)), origin_step + run_step
    # CLM falls where the running count of its steps grows: a share of 0.4 gives the steps 2, 4, 7, 9, 12 ...
    is_clm = floor((step + 1) * share) > floor(step * share)
    pure, _ = mixture.parts[1 if is_clm else 0]
    step_in_mixture = run_step - (ends[number] - mixture.steps)
    return number, pure.with_mask_at((step_in_mixture + 0.5) / mixture.steps)


@dataclass(frozen=True)
class Microbatch:
    """The arguments of `PackedModel` for a forward and backward pass, and what the accounts need."""

    inputs_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    target_positions_N: Tensor
    targets_N: Tensor
    sample_ids_S: np.ndarray
    lengths_S: np.ndarray


def prefetch(job: Job, batches: Batches, steps: range) -> Iterator[tuple[int, int, Phase, list[Microbatch]]]:
    """Yield each step, the number of its mixture, its pure phase and microbatches; those of the next step are made
    while the current one computes."""

    def make(step: int) -> tuple[int, int, Phase, list[Microbatch]]:
        number, phase = phase_of_step(job.recipe.curriculum, step, job.origin.step)
        # A later pass is over the text of the first one, which may have been a parent's, but not of another order.
        before = job.origin.step if job.origin.data_position else 0
        mask_pass = (before + step) % phase.mask_passes
        return step, number, phase, make_microbatches(job, batches, phase, step - mask_pass, mask_pass)

    if not steps:
        return
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(make, steps[0])
        for step in steps:
            ready = pending.result()
            if step + 1 in steps:
                pending = thread.submit(make, step + 1)
            yield ready


def make_microbatches(job: Job, batches: Batches, phase: Phase, step: int, mask_pass: int = 0) -> list[Microbatch]:
    """Make this process's parts of batch `step`: as many on every process, each about `microbatch_tokens` long."""
    world, device = job.world, job.world.device
    num = -(-batches.batch_tokens(step) // (world.size * job.recipe.compute.microbatch_tokens))
    manifest, causal, padding = job.text.main.manifest, phase.is_causal, PAD_TO_MULTIPLE_OF
    microbatches = []
    for part in range(world.rank * num, (world.rank + 1) * num):
        batch = batches.batch(step, part, world.size * num)
        if len(batch.sample_ids_S) == 0:
            # A part of a small validation set may hold no sample, but its process must take part in every layer, and
            # transformers cannot compute on no token: so one special token, which no objective asks for.
            zero = np.zeros(1, np.int64)
            batch = PackedBatch(np.array([manifest.mask_id]), zero, np.array([0, 1]), zero, zero)
        inputs_T, target_positions_N, targets_N = label_batch(phase, batch, manifest, job.recipe.seed, mask_pass)
        layout = lay_out(batch.bounds_S1, causal=causal, device=device, dtype=world.dtype, pad_to_multiple_of=padding)
        microbatches.append(
            Microbatch(
                inputs_T=to_device(inputs_T, device),
                positions_T=to_device(batch.positions_T, device),
                layout=layout,
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
    """Label a batch by a phase's objective: return the inputs [T], the positions [N] whose hidden states are to
    predict, and the tokens [N] that they must. The manifest of the shards knows the special tokens.

    A target is predicted in place, or from the position before it in its sample (`next`), as in a decoder. What looks
    back only and predicts the next token, masked or not (CLM; MEAP, Zhuang et al. 2025), has every token but the first
    of a sample as a target; else those that are masked are (MLM; MNTP, BehnamGhader et al. 2024).
    """
    facts, inputs_T = phase.facts, batch.tokens_T
    shift = 1 if facts.target == "next" else 0
    chosen_T = np.ones(len(inputs_T), dtype=bool)
    chosen_T[batch.bounds_S1[:-1]] = not shift  # no position of its sample is before a first token
    if facts.masks_input:
        may_T = ~np.isin(inputs_T, shards.special_ids) & (chosen_T | facts.is_dense)
        inputs_T, masked_T = mask_tokens(phase, batch, shards, may_T, seed, mask_pass)
        chosen_T = chosen_T if facts.is_dense else masked_T
    chosen_N = np.flatnonzero(chosen_T)
    return inputs_T, chosen_N - shift, batch.tokens_T[chosen_N]


def mask_tokens(
    phase: Phase, batch: PackedBatch, shards: ShardManifest, may_T: np.ndarray, seed: int, mask_pass: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose each token of `may_T` with `mask_probability`, in another pass over the same batch (`mask_passes`) other
    ones: return the inputs [T] that hide them, and which these are [T]."""
    assert not phase.is_ramped, "a masking ratio that moves has one value in each step"
    # Numbers of a token in [0, 1): one chooses it; two more say what hides it, where that is not always the mask token.
    # They are drawn from (seed, stream, epoch, sample, position).
    streams_K1 = np.arange(1 if phase.mask_token_share == 1 else 3)[:, None]
    epochs_T = np.repeat(batch.epochs_S, batch.lengths_S)
    samples_T = np.repeat(batch.sample_ids_S, batch.lengths_S)
    choice_T, *hiding_T = uniform(seed, streams_K1, epochs_T, samples_T, batch.positions_T)
    # With a ratio of 0.4, pass 0 takes the tokens with a number in [0, 0.4), pass 1 those after it.
    ratio = phase.mask_at(0)
    passed_T = choice_T - mask_pass * ratio
    chosen_T = may_T & (passed_T >= 0) & (passed_T < ratio)
    # Chosen ones become the mask token, a random ordinary token, or stay, by the phase's shares.
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
