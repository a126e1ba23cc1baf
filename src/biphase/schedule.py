"""The learning rate of each update: warm-up, stable, decay (WSD)."""

from typing import Annotated

from pydantic import Field

from biphase.config import Count, Strict


class Schedule(Strict):
    """Warmup-stable-decay: linear from 0, constant, linear to 0. Either end may have 0 steps."""

    peak_lr: Annotated[float, Field(gt=0, le=1000)] = 5e-4
    """The learning rate between warm-up and decay."""
    warmup_steps: Count = 2000
    """The first updates, in which the rate rises."""
    decay_steps: Count = 2000
    """The last updates, in which the rate falls."""

    def share_of_peak(self, step: int, num_steps: int) -> float:
        """Return the rate of update `step` (from 0) of `num_steps` as a share of the peak (Hu et al. 2024).

        Warm-up climbs in equal steps from 1 / warmup_steps to 1. Decay falls in equal steps from 1 to 1 / decay_steps:
        0 would come after the last update, so that no update is wasted on it.
        """
        assert 0 <= step < num_steps
        climbing = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        falling = (num_steps - step) / self.decay_steps if self.decay_steps else 1.0
        return min(climbing, 1.0, falling)
