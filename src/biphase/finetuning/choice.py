"""The choice of a learning rate by validation → what other validation examples and other seeds would have chosen, and
how far the test score hangs on that.

Letters: K rates, S seeds, N validation examples, B draws.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from biphase.errors import InputError
from biphase.finetuning.predictions import KeptExamples
from biphase.finetuning.scores import Score

NUM_DRAWS = 10_000
MOST_EXAMPLES = 500
"""So many of the validation examples, evenly over the file, show how much a mean over all of them varies."""
REACH = 3.0
"""A mean over N shares has a standard error of at most 1/√N beside another on the same examples: a rate that is more
than so many of these behind is not the one that other examples choose."""


@dataclass(frozen=True)
class RateChoice:
    """The scores of a model on a task among which validation chose; their validation predictions are read when first
    asked for."""

    by_rate: Mapping[float, Sequence[Score]]
    """The scores at each rate, of seeds that did not diverge."""
    metric: str

    @property
    def num_examples(self) -> int:
        """How many validation examples chose; 0 where there was one rate alone."""
        if len(self.by_rate) == 1:
            return 0
        return min(score.num_examples.get("validation", 0) for scores in self.by_rate.values() for score in scores)

    @property
    def degrees(self) -> int:
        """The degrees of freedom of the spread over seeds; without one, those of the spread over examples."""
        return sum(len(scores) - 1 for scores in self.by_rate.values()) or self.num_examples - 1

    @cached_property
    def seed_variances(self) -> dict[float, float]:
        """Those of `other_seeds`, by rate."""
        by_rate = {
            rate: [score.metrics["validation"][self.metric] for score in scores]
            for rate, scores in self.by_rate.items()
        }
        return dict(zip(by_rate, other_seeds([*by_rate.values()]), strict=True))

    @cached_property
    def rivals(self) -> list[float]:
        """The rates, from the lowest, that other examples or seeds could have chosen at all."""
        means = {rate: self.mean(rate, "validation") for rate in sorted(self.by_rate)}
        error = math.sqrt(2 * max(self.seed_variances.values())) + 1 / math.sqrt(max(self.num_examples, 1))
        return [rate for rate, mean in means.items() if mean >= max(means.values()) - REACH * error]

    @cached_property
    def values_KN(self) -> np.ndarray | InputError:
        """[K, N] what the validation examples contribute to the mean at each rival, or why that is not known."""
        if self.num_examples < 2:
            return InputError("no two validation examples chose")
        kept = KeptExamples(tuple(s for rate in self.rivals for s in self.by_rate[rate]), "validation", MOST_EXAMPLES)
        if isinstance(kept.found, InputError):
            return kept.found
        firsts = np.cumsum([len(self.by_rate[rate]) for rate in self.rivals])[:-1]
        return np.stack([values_SN.mean(axis=0) for values_SN in np.split(kept.found.values_SN, firsts)])

    @property
    def doubt(self) -> InputError | None:
        """Why it is not known what other examples would have chosen."""
        return self.values_KN if len(self.rivals) > 1 and isinstance(self.values_KN, InputError) else None

    @cached_property
    def shares(self) -> Mapping[float, float]:
        """With which probability each rate would be chosen on other examples by other seeds, where it can be at all."""
        if len(self.rivals) == 1:
            return {self.rivals[0]: 1.0}
        covariance_KK = np.diag([self.seed_variances[rate] for rate in self.rivals])
        if not isinstance(self.values_KN, InputError):
            covariance_KK = covariance_KK + np.cov(self.values_KN) / self.num_examples
        means_K = np.array([self.mean(rate, "validation") for rate in self.rivals])
        return dict(zip(self.rivals, draw_choices(means_K, covariance_KK).tolist(), strict=True))

    @cached_property
    def variance(self) -> float:
        """That of the mean test score over such choices; nan where nothing is known of them."""
        if self.doubt and not any(self.seed_variances.values()):
            return math.nan
        scores_K = np.array([self.mean(rate, "test") for rate in self.shares])
        return variance_of_choice(np.array([*self.shares.values()]), scores_K)

    def mean(self, rate: float, split: str) -> float:
        return float(np.mean([score.metrics[split][self.metric] for score in self.by_rate[rate]]))


def other_seeds(values_KS: Sequence[Sequence[float]]) -> list[float]:
    """[K] the variance of the mean of all other seeds but one around the mean of these seeds, at each rate:
    σ² (1/S + 1/(S-1)), with one σ for the seeds of all rates. 0 where no rate has two seeds."""
    degrees = sum(len(values_S) - 1 for values_S in values_KS)
    squares = sum(float(np.var(values_S)) * len(values_S) for values_S in values_KS)
    variance = squares / degrees if degrees else 0.0
    return [variance * (1 / len(values_S) + 1 / max(len(values_S) - 1, 1)) for values_S in values_KS]


def draw_choices(means_K: np.ndarray, covariance_KK: np.ndarray) -> np.ndarray:
    """[K] how often each rate, from the lowest, is best where its mean on validation varies so."""
    drawn_BK = np.random.default_rng(0).multivariate_normal(means_K, covariance_KK, NUM_DRAWS, method="eigh")
    # Of equal rates the lowest, as `choose_rate` has it; a millionth is rounding.
    best_B = np.argmax(drawn_BK >= drawn_BK.max(axis=1, keepdims=True) - 1e-6, axis=1)
    return np.bincount(best_B, minlength=len(means_K)) / NUM_DRAWS


def variance_of_choice(shares_K: np.ndarray, scores_K: np.ndarray) -> float:
    """That of a score which is `scores_K[k]` with the probability `shares_K[k]`."""
    return float(shares_K @ (scores_K - shares_K @ scores_K) ** 2)
