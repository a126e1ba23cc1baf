"""The choice of a learning rate by validation → what other validation examples would have chosen, and how far the test
score hangs on that.

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

    @cached_property
    def shares(self) -> Mapping[float, float] | InputError:
        """With which probability each rate would be chosen on other examples, where it can be at all; or why that is
        not known."""
        means = {rate: self.mean(rate, "validation") for rate in sorted(self.by_rate)}
        if self.num_examples < 2:
            return dict.fromkeys(means, 1.0) if len(means) == 1 else InputError("no two validation examples chose")
        within = REACH / math.sqrt(self.num_examples)
        rates = [rate for rate, mean in means.items() if mean >= max(means.values()) - within]
        if len(rates) == 1:
            return {rates[0]: 1.0}
        kept = KeptExamples(tuple(s for rate in rates for s in self.by_rate[rate]), "validation", MOST_EXAMPLES).found
        if isinstance(kept, InputError):
            return kept
        firsts = np.cumsum([len(self.by_rate[rate]) for rate in rates])[:-1]
        values_KN = np.stack([values_SN.mean(axis=0) for values_SN in np.split(kept.values_SN, firsts)])
        shares_K = draw_choices(np.array([means[rate] for rate in rates]), values_KN, self.num_examples)
        return dict(zip(rates, shares_K.tolist(), strict=True))

    @cached_property
    def variance(self) -> float:
        """That of the mean test score over such choices; nan where it is not known."""
        if isinstance(self.shares, InputError):
            return math.nan
        scores_K = np.array([self.mean(rate, "test") for rate in self.shares])
        return variance_of_choice(np.array([*self.shares.values()]), scores_K)

    def mean(self, rate: float, split: str) -> float:
        return float(np.mean([score.metrics[split][self.metric] for score in self.by_rate[rate]]))


def draw_choices(means_K: np.ndarray, values_KN: np.ndarray, num_examples: int) -> np.ndarray:
    """[K] how often each rate, from the lowest, is best where means vary as those over so many examples do.

    Args:
        means_K: what the rates score on validation.
        values_KN: what some of its examples contribute.
    """
    covariance_KK = np.cov(values_KN) / num_examples
    drawn_BK = np.random.default_rng(0).multivariate_normal(means_K, covariance_KK, NUM_DRAWS, method="eigh")
    # Of equal rates the lowest, as `choose_rate` has it; a millionth is rounding.
    best_B = np.argmax(drawn_BK >= drawn_BK.max(axis=1, keepdims=True) - 1e-6, axis=1)
    return np.bincount(best_B, minlength=len(means_K)) / NUM_DRAWS


def variance_of_choice(shares_K: np.ndarray, scores_K: np.ndarray) -> float:
    """That of a score which is `scores_K[k]` with the probability `shares_K[k]`."""
    return float(shares_K @ (scores_K - shares_K @ scores_K) ** 2)
