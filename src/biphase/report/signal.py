"""How far a task tells models apart, and what it would take to decide a difference."""

import bisect
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from biphase.report.contrasts import Contrast, SeedScores, difference, is_significant, mix_degrees
from biphase.report.formats import show_points
from biphase.report.statistics import SIGNIFICANCE

POWER = 0.8
"""With which probability what is named as enough decides a difference."""

MOST_SEEDS, MOST_EXAMPLES = 1_000, 1_000_000


@dataclass(frozen=True)
class Signal:
    """What a task says about several models."""

    spread: float
    noise: float
    """The standard error of such a mean beside another: that of a difference over √2, by the neighbours in rank."""
    needs: str
    """What would tell the best from the worst, of all pairs the widest; empty where the models cannot all be equally
    good, by an F test of the squared ratio."""

    @property
    def ratio(self) -> float:
        """About 1 where all models are equally good."""
        return self.spread / self.noise if self.noise > 0 else math.nan


def measure_signal(scores: Iterable[SeedScores | None]) -> Signal | None:
    """None for fewer than two models with a score, or where noise is not known."""
    ranked = sorted((score for score in scores if score is not None), key=lambda score: score.mean)
    neighbours = [difference(upper, lower) for lower, upper in itertools.pairwise(ranked)]
    errors = [each.error for each in neighbours]
    if np.isnan(errors).any() or not any(errors):
        return None
    spread = float(np.std([score.mean for score in ranked], ddof=1))
    noise = math.sqrt(float(np.mean(np.square(errors))) / 2)
    # Each model stands in the differences to two neighbours, but for the first and the last: k models of n seeds have
    # k (n - 1) degrees of freedom, their k - 1 differences 2 (n - 1) each.
    num = len(ranked)
    # Neighbours whose difference is the same for all seeds have none: they speak for no noise, and count for none.
    degrees = float(np.nansum([each.degrees for each in neighbours])) * num / (2 * (num - 1))
    decides = is_significant(float(special.fdtrc(num - 1, degrees, (spread / noise) ** 2)))
    level = SIGNIFICANCE / (num * (num - 1) // 2)
    needs = "" if decides else what_decides(difference(ranked[-1], ranked[0]), 0.0, level)
    return Signal(spread, noise, needs)


def what_decides(seen: Contrast, bound: float, level: float) -> str:
    """How many seeds, or else test examples, or else both, would put a contrast on one side of a bound at this level,
    if estimate and spreads are what these scores show."""
    if math.isnan(seen.against(bound).p_value) or not seen.error > 0:
        return "scores that differ between seeds, of two seeds or more" if seen.num > 1 else "two seeds or more"
    seeds = "pretraining seeds" if seen.num_pretrainings > 1 else "seeds"
    stay = "if the true difference and the spread are those seen here"
    more_seeds = range(seen.num + 1, MOST_SEEDS + 1)
    at = bisect.bisect_left(more_seeds, True, key=lambda num: is_enough(seen, bound, level, num / seen.num, 1))
    if at < len(more_seeds):
        return f"about {more_seeds[at]} {seeds} instead of {seen.num}, {stay}"
    if seen.num_examples:
        # In steps of 5 %: more examples alone, then of both.
        factors = [1.05**step for step in range(1, 1 + int(math.log(MOST_EXAMPLES / seen.num_examples, 1.05)))]
        for power in (0, 1):
            enough = [by for by in factors if is_enough(seen, bound, level, by**power, by)]
            if enough:
                about = float(f"{enough[0] * seen.num_examples:.2g}")
                both = f"{math.ceil(seen.num * enough[0])} {seeds} instead of {seen.num} and " if power else ""
                return f"about {both}{about:,.0f} test examples instead of {seen.num_examples:,}, {stay}"
    if is_enough(replace(seen, choice_variance=0.0), bound, level, MOST_SEEDS / seen.num, MOST_EXAMPLES):
        return "more validation examples, or fewer rates: others could choose other rates"
    ends = f"({show_points(seen.estimate)} points) is too close to the bound ({show_points(bound)})"
    return f"not even {MOST_SEEDS:,} {seeds}: with this spread, the estimate {ends}"


def is_enough(seen: Contrast, bound: float, level: float, times_seeds: float, times_examples: float) -> bool:
    """Whether so many times the seeds and the test examples decide with the power of this house."""
    of_examples = seen.example_variance / times_examples
    of_choice = seen.choice_variance  # neither makes that smaller
    of_seeds = max(seen.error**2 - seen.example_variance - of_choice, 0.0) / times_seeds
    num = seen.num * times_seeds
    if seen.num_examples or of_choice:
        of_all = [(of_examples, seen.num_examples * times_examples - 1), (of_choice, seen.choice_degrees)]
        degrees = mix_degrees([(of_seeds, num - 1), *of_all])
    else:
        degrees = seen.degrees * (num - 1) / (seen.num - 1)
    error = math.sqrt(of_seeds + of_examples + of_choice)
    needed = special.stdtrit(degrees, 1 - level / 2) + special.stdtrit(degrees, POWER)
    return bool(abs(seen.estimate - bound) / error >= needed)


USUAL_NOISE = {"networks of 210M and more": (0.005, 0.005), "networks of 1M on small tasks": (0.012, 0.018)}
"""How far pretraining seeds, and fine-tuning seeds, move a score, as standard deviations: the median of the paper's 600
scores over fine-tuning seeds (of pretraining it says nothing: as much is taken), and our own 1M networks."""

EXAMPLE_VARIANCE = 0.21
"""That of the difference of two models on one example: both are right on 70 %, with errors correlated by one half."""


def smallest_difference(num_pretrainings: int, num_seeds: int, num_examples: int, noise: tuple[float, float]) -> float:
    """The smallest difference between two models that so many seeds of pretraining, seeds of fine-tuning for each, and
    test examples find with the power of this house, asked alone; infinite where no more than one seed is there.

    With one pretraining the question is about two checkpoints, and its noise no part of the error.
    """
    several = num_pretrainings > 1
    num = num_pretrainings if several else num_seeds
    if num < 2:
        return math.inf
    of_pretraining, of_finetuning = noise
    of_seeds = 2 * (several * of_pretraining**2 + of_finetuning**2 / num_seeds) / num_pretrainings
    of_examples = EXAMPLE_VARIANCE / num_examples
    planned = Contrast(0.0, math.sqrt(of_seeds + of_examples), num - 1, 1.0, "paired t", num, num_pretrainings)
    planned = replace(planned, num_examples=num_examples, seed_variance=of_seeds, example_variance=of_examples)
    tenths = range(1, 1000)  # of a point
    at = bisect.bisect_left(
        tenths, True, key=lambda d: is_enough(replace(planned, estimate=d / 1000), 0.0, SIGNIFICANCE, 1, 1)
    )
    return tenths[at] / 1000 if at < len(tenths) else math.inf
