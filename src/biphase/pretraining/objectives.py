"""The objective and the rate of each step, and what the objective makes of a batch: CLM and MLM differ here.

A curriculum is a list of mixtures; a mixture gives each step one pure phase. A mixture is a phase as the recipe writes
it: one objective, or a masked one and CLM in turn (`clm_share`). A pure phase has one objective. The rate is
warmup-stable-decay (Table 1; Hu et al. 2024).

Masks are drawn from (seed, epoch, sample, position in the sample): the same for any world size, microbatch size and
number of workers, and the same for every run with that seed. Targets are listed, not padded with -100, so the head
computes logits for them alone.

Letters: T tokens, N targets, V vocabulary.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import floor

import numpy as np

from biphase.corpus.order import uniform
from biphase.corpus.packing import PackedBatch
from biphase.corpus.shards import ShardManifest
from biphase.recipe import Phase, Schedule


def mixture_ends(curriculum: Sequence[Phase]) -> list[int]:
    """The number of updates that are done when each mixture ends."""
    return list(accumulate(mixture.steps for mixture in curriculum))


def phase_of_step(curriculum: Sequence[Phase], run_step: int, origin_step: int) -> tuple[int, Phase]:
    """The number of the mixture that update `run_step` (from 0) of a run belongs to, and its pure phase, whose masking
    ratio is fixed.

    A share of CLM counts the updates from 0 over all parents, `origin_step` before this run, so that branches of a
    trunk agree. A ratio that moves is, at step i of n, that of (i + ½) / n of the way: its mean is the mean of both
    ends, and a part of a phase (`Phase.between`) has the ratios of the whole.
    """
    ends = mixture_ends(curriculum)
    number = bisect_right(ends, run_step)
    mixture = curriculum[number]
    share, step = Fraction(str(mixture.clm_share)), origin_step + run_step
    # CLM falls where the running count of its steps grows: a share of 0.4 gives the steps 2, 4, 7, 9, 12 ...
    is_clm = floor((step + 1) * share) > floor(step * share)
    pure, _ = mixture.parts[1 if is_clm else 0]
    step_in_mixture = run_step - (ends[number] - mixture.steps)
    return number, pure.with_mask_at((step_in_mixture + 0.5) / mixture.steps)


def learning_rate(schedule: Schedule, step: int, num_steps: int) -> float:
    """The rate of update `step` (from 0) of `num_steps`.

    Warm-up climbs in equal steps from peak / warmup_steps to the peak; decay falls in equal steps from the peak to
    peak / decay_steps, so that 0 would come after the last update and no update is wasted on it.
    """
    assert 0 <= step < num_steps
    climbing = (step + 1) / schedule.warmup_steps if schedule.warmup_steps else 1.0
    falling = (num_steps - step) / schedule.decay_steps if schedule.decay_steps else 1.0
    return schedule.peak_lr * min(climbing, 1.0, falling)


def decay_start(schedule: Schedule, num_steps: int) -> int:
    """Updates before the decay: the last checkpoint from which other runs can branch at full rate."""
    return num_steps - schedule.decay_steps


CHOOSE, REPLACE, RANDOM_TOKEN = range(3)
"""The numbers of the independent random streams of a token."""


@dataclass(frozen=True)
class LabelledBatch:
    """Inputs and targets of a batch: the hidden state at `target_positions_N[i]` must predict `targets_N[i]`."""

    inputs_T: np.ndarray
    target_positions_N: np.ndarray
    targets_N: np.ndarray
    causal: bool


def is_causal(phase: Phase) -> bool:
    """Whether the objective looks back only; a mixture looks as its masked objective does."""
    return phase.objective == "clm"


def label_batch(
    phase: Phase, batch: PackedBatch, shards: ShardManifest, seed: int, mask_pass: int = 0
) -> LabelledBatch:
    """Label a batch by a phase's objective; the manifest of the shards knows the special tokens.

    clm: every position but a sample's last predicts the token after it.
    mlm: each non-special token is chosen with `mask_probability`, and is predicted in place; in another pass over the
    same batch (`mask_passes`), other tokens are chosen.
    mntp: the same choice, but the position before the chosen token predicts it, as in a decoder (LLM2Vec); the first
    token of a sample is never chosen.
    """
    if phase.objective == "clm":
        is_last_T = np.zeros(len(batch.tokens_T), dtype=bool)
        is_last_T[batch.bounds_S1[1:] - 1] = True
        positions_N = np.flatnonzero(~is_last_T)
        return LabelledBatch(batch.tokens_T, positions_N, batch.tokens_T[positions_N + 1], causal=True)
    assert not phase.is_ramped, "a masking ratio that moves has one value in each step"
    may_T = ~np.isin(batch.tokens_T, shards.special_ids)
    if phase.objective == "mntp":
        may_T &= batch.positions_T > 0
    # A token's number lies in [0, 1). With a ratio of 0.4, pass 0 takes the numbers in [0, 0.4), pass 1 those after it.
    ratio = phase.mask_at(0)
    passed_T = random_per_token(batch, seed, CHOOSE) - mask_pass * ratio
    chosen_T = may_T & (passed_T >= 0) & (passed_T < ratio)
    positions_N = np.flatnonzero(chosen_T)
    targets_N = batch.tokens_T[positions_N]
    inputs_T = hide_tokens(phase, batch, chosen_T, shards, seed)
    shift = 1 if phase.objective == "mntp" else 0
    return LabelledBatch(inputs_T, positions_N - shift, targets_N, causal=False)


def hide_tokens(phase: Phase, batch: PackedBatch, chosen_T: np.ndarray, shards: ShardManifest, seed: int) -> np.ndarray:
    """The input tokens: chosen ones become the mask token, a random ordinary token, or stay, by the phase's shares."""
    inputs_T = batch.tokens_T.copy()
    if phase.mask_token_share == 1:
        inputs_T[chosen_T] = shards.mask_id
        return inputs_T
    draw_T = random_per_token(batch, seed, REPLACE)
    masked_T = chosen_T & (draw_T < phase.mask_token_share)
    takes_random_T = (draw_T >= phase.mask_token_share) & (draw_T < phase.mask_token_share + phase.random_token_share)
    ordinary = np.setdiff1d(np.arange(shards.vocab_size), shards.special_ids)
    randoms_T = ordinary[(random_per_token(batch, seed, RANDOM_TOKEN) * len(ordinary)).astype(np.int64)]
    inputs_T[masked_T] = shards.mask_id
    return np.where(chosen_T & takes_random_T, randoms_T, inputs_T)


def random_per_token(batch: PackedBatch, seed: int, stream: int) -> np.ndarray:
    """A number in [0, 1) for each token, from (seed, stream, epoch, sample, position)."""
    epochs_T = np.repeat(batch.epochs_S, batch.lengths_S)
    samples_T = np.repeat(batch.sample_ids_S, batch.lengths_S)
    return uniform(seed, stream, epochs_T, samples_T, batch.positions_T)
