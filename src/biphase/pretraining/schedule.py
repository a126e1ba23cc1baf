"""What each step of a run has, as pure functions of its number: its objective and its learning rate.

A curriculum is a list of mixtures; a mixture gives each step one pure phase. A mixture is a phase as the recipe writes
it: one objective, or a masked one and CLM in turn (`clm_share`). A pure phase has one objective. The rate is
warmup-stable-decay (Table 1; Hu et al. 2024).
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import floor

from biphase.recipe import Phase, Schedule


def mixture_ends(curriculum: Sequence[Phase]) -> list[int]:
    """The number of updates that are done when each mixture ends."""
    return list(accumulate(mixture.steps for mixture in curriculum))


def mixture_number(curriculum: Sequence[Phase], run_step: int) -> int:
    """Which mixture update `run_step` (from 0) belongs to."""
    return bisect_right(mixture_ends(curriculum), run_step)


def phase_of_step(curriculum: Sequence[Phase], run_step: int, origin_step: int) -> Phase:
    """The pure phase of update `run_step` of a run that `origin_step` updates came before, its masking ratio fixed.

    A ratio that moves is, at step i of n, that of (i + ½) / n of the way: its mean is the mean of both ends, and a part
    of a phase (`Phase.between`) has the ratios of the whole.
    """
    number = mixture_number(curriculum, run_step)
    mixture = curriculum[number]
    step = run_step - (mixture_ends(curriculum)[number] - mixture.steps)
    return pure_phase(mixture, origin_step + run_step).with_mask_at((step + 0.5) / mixture.steps)


def pure_phase(mixture: Phase, step: int) -> Phase:
    """The pure phase of update `step`, counted from 0 over all parents, so that branches of a trunk agree."""
    share = Fraction(str(mixture.clm_share))
    # CLM falls where the running count of its steps grows: a share of 0.4 gives the steps 2, 4, 7, 9, 12 ...
    is_clm = floor((step + 1) * share) > floor(step * share)
    return mixture.parts[1 if is_clm else 0][0]


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
