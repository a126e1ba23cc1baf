"""Scores of a grid give the learning rate that validation chooses for each model on each task, and the scores there.

The rate is chosen by a function that sees validation scores only. Each seed is tested at the rate that the other seeds
choose, or where there is none the other pretraining seeds: validation and test come from the same weights, so a seed
that chose its own rate would bring its luck along. How far a test score hangs on the choice is told by what other
validation examples and other seeds would have chosen.

Letters: K rates, S seeds, N validation examples, B draws.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from biphase.errors import InputError, nearest
from biphase.finetuning.scores import KeptExamples, Score, ScoreSet, short_name

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
        """Count the validation examples that chose: 0 where there was one rate alone."""
        if len(self.by_rate) == 1:
            return 0
        return min(score.num_examples.get("validation", 0) for scores in self.by_rate.values() for score in scores)

    @property
    def degrees(self) -> int:
        """The degrees of freedom of the spread over seeds; without one, those of the spread over examples."""
        return sum(len(scores) - 1 for scores in self.by_rate.values()) or self.num_examples - 1

    @cached_property
    def seed_variances(self) -> dict[float, float]:
        """Compute the variances of `other_seeds`, by rate."""
        values_KS = [[score.metrics["validation"][self.metric] for score in scores] for scores in self.by_rate.values()]
        return dict(zip(self.by_rate, other_seeds(values_KS), strict=True))

    @cached_property
    def rivals(self) -> list[float]:
        """List the rates, from the lowest, that other examples or seeds could have chosen at all."""
        means = {rate: self.mean(rate, "validation") for rate in sorted(self.by_rate)}
        error = math.sqrt(2 * max(self.seed_variances.values())) + 1 / math.sqrt(max(self.num_examples, 1))
        return [rate for rate, mean in means.items() if mean >= max(means.values()) - REACH * error]

    @cached_property
    def values_KN(self) -> np.ndarray | InputError:
        """[K, N] what the validation examples contribute to the mean at each rival, or why that is not known."""
        if self.num_examples < 2:
            return InputError("no two validation examples chose")
        scores = tuple(score for rate in self.rivals for score in self.by_rate[rate])
        table = KeptExamples(scores, "validation", MOST_EXAMPLES).found
        if isinstance(table, InputError):
            return table
        firsts = np.cumsum([len(self.by_rate[rate]) for rate in self.rivals])[:-1]
        return np.stack([values_SN.mean(axis=0) for values_SN in np.split(table.values_SN, firsts)])

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
        """Compute the variance of the mean test score over such choices; nan where nothing is known of them."""
        if self.doubt and not any(self.seed_variances.values()):
            return math.nan
        shares_K = np.array([*self.shares.values()])
        scores_K = np.array([self.mean(rate, "test") for rate in self.shares])
        return float(shares_K @ (scores_K - shares_K @ scores_K) ** 2)

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
    """Draw how often, [K], each rate, from the lowest, is best where its mean on validation varies so."""
    drawn_BK = np.random.default_rng(0).multivariate_normal(means_K, covariance_KK, NUM_DRAWS, method="eigh")
    # Of equal rates the lowest, as `choose_rate` has it; a millionth is rounding.
    best_B = np.argmax(drawn_BK >= drawn_BK.max(axis=1, keepdims=True) - 1e-6, axis=1)
    return np.bincount(best_B, minlength=len(means_K)) / NUM_DRAWS


def find_scored_model(scores: ScoreSet, name: str) -> str:
    """Find the model that a user means: by its whole name or the last part of its path, with its settings where it has
    some.

    Raises `InputError` when there is none (with the nearest) or more than one (with all).
    """
    model_name = name.rstrip("/")
    if model_name in scores.models:
        return model_name
    models = [model for model in scores.models if short_name(model) == model_name]
    if len(models) == 1:
        return models[0]
    if models:
        raise InputError(f"'{name}' could be any of {', '.join(map(repr, models))}; give the whole name")
    names = {*scores.models, *map(short_name, scores.models)}
    raise InputError(f"no scores of a model '{name}'{nearest(model_name, names)}")


def choose_rate(validation: Mapping[float, Sequence[float | None]]) -> float:
    """Choose the learning rate with the best mean validation score over its seeds; of equal ones the lowest.

    None stands for a seed that diverged. A rate with more diverged seeds ranks below every rate with fewer: the mean of
    those that survived is no estimate of what the next seed will do.

    Raises `InputError` when no seed of any rate survived.
    """
    ranks = {}
    for rate, values in validation.items():
        survivors = [value for value in values if value is not None]
        assert all(math.isfinite(value) for value in survivors)
        if survivors:
            # fsum is exact, so that the order of the seeds decides no tie.
            ranks[rate] = (len(survivors) - len(values), math.fsum(survivors) / len(survivors), -rate)
    if not ranks:
        raise InputError("training diverged at every learning rate with every seed; try lower rates")
    return max(ranks, key=lambda rate: ranks[rate])


def choose_for_each_seed(
    validation: Mapping[float, Mapping[int, float | None]], peers: Mapping[float, Sequence[float | None]]
) -> dict[int, float]:
    """Choose the learning rate at which each seed is tested: the one that `choose_rate` takes from all other seeds.

    For a seed without others that survived its peers choose, which are the seeds of other pretrainings; without any it
    chooses for itself, and no verdict follows from one seed alone. `validation` holds the scores by rate, then by seed;
    at some rate a seed has survived.
    """
    rates = {}
    for seed in sorted({seed for by_seed in validation.values() for seed in by_seed}):
        others: dict[float, Sequence[float | None]] = {}
        itself: dict[float, Sequence[float | None]] = {}
        for rate, by_seed in validation.items():
            others[rate] = [value for voter, value in by_seed.items() if voter != seed]
            if seed in by_seed:
                itself[rate] = [by_seed[seed]]
        elsewhere = {rate: peers[rate] for rate in itself if rate in peers}
        for voters in (others, elsewhere, itself):
            if any({*values} - {None} for values in voters.values()):
                rates[seed] = choose_rate(voters)
                break
    return rates


def validation_by_rate(scores: Iterable[Score], metric: str) -> dict[float, list[float | None]]:
    """List the validation scores at each rate; None for a training that diverged."""
    by_rate: dict[float, list[float | None]] = defaultdict(list)
    for score in scores:
        by_rate[score.config.learning_rate].append(validation_of(score, metric))
    return by_rate


def validation_of(score: Score, metric: str) -> float | None:
    """Return a score on validation, None if it diverged. Raises `InputError` where a split has no such metric."""
    for values in score.metrics.values():
        if metric not in values:
            raise InputError(f"{score.folder} has no metric '{metric}'{nearest(metric, values)}")
    return None if score.diverged else score.metrics["validation"][metric]
