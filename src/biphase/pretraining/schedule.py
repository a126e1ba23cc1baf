"""Warmup-stable-decay as a pure function of the step (Table 1; Hu et al. 2024)."""

from biphase.config import Schedule


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
