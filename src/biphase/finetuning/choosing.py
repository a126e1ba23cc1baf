"""Scores of a grid → the learning rate that validation chooses for each model on each task.

Only validation scores choose a rate. Each seed is tested at the rate that the other seeds choose, or, if there are
none, the other pretraining seeds: a seed that chose its own rate would carry its luck on validation into the test,
because both use the same weights. Draws of other validation examples and seeds show how far a test score depends on the
choice.

Letters: K rates, S seeds, N validation examples, B draws.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from biphase.errors import InputError, nearest, refuse_unknown
from biphase.finetuning.scores import Score, ScoreSet, join_examples, short_name
from biphase.tasks.spec import EvaluatedSplit

NUM_DRAWS = 10_000
MOST_EXAMPLES = 500
"""The most validation examples, evenly over the file, that measure how much the mean over all varies."""
REACH = 3.0
"""The difference of two means over the same N values from 0 to 1 has a standard error of at most 1/√N. Other examples
would not choose a rate that is more than this many errors behind."""


@dataclass(frozen=True)
class ChoiceNoise:
    """The dependence of a choice of rate on its validation examples and seeds."""

    shares: Mapping[float, float]
    """The probability of each possible rate under other examples and seeds."""
    variance: float
    """The variance of the mean test score over such choices; nan if it is unknown."""
    why_unknown: str = ""
    """The reason why the choices of other examples are unknown."""


@dataclass
class RateChoice:
    """The scores of a model on a task, from which validation chose."""

    by_rate: Mapping[float, Sequence[Score]]
    """The scores at each rate, without seeds that diverged."""
    metric: str
    noise: ChoiceNoise | None = None
    """The result of `draw_noise`, after its first call."""

    @property
    def num_rates(self) -> int:
        return len(self.by_rate)

    @property
    def num_examples(self) -> int:
        """The number of validation examples behind the choice; 0 for a single rate."""
        if self.num_rates == 1:
            return 0
        return min(score.num_examples.get("validation", 0) for scores in self.by_rate.values() for score in scores)

    @property
    def degrees(self) -> int:
        """The degrees of freedom of the spread over seeds or, without seeds, over examples."""
        return sum(len(scores) - 1 for scores in self.by_rate.values()) or self.num_examples - 1

    def draw_noise(self) -> ChoiceNoise:
        """Draw the choices of other validation examples and seeds, once."""
        if self.noise is None:
            self.noise = measure_noise(self)
        return self.noise

    def mean(self, rate: float, split: str) -> float:
        return float(np.mean([score.metrics[split][self.metric] for score in self.by_rate[rate]]))


def measure_noise(choice: RateChoice) -> ChoiceNoise:
    """Measure the noise of a choice, for `RateChoice.draw_noise`."""
    # 1. The rates, from the lowest, that other examples or seeds could choose.
    values_KS = [[score.metrics["validation"][choice.metric] for score in seeds] for seeds in choice.by_rate.values()]
    seed_variances = dict(zip(choice.by_rate, other_seeds(values_KS), strict=True))
    error = math.sqrt(2 * max(seed_variances.values())) + 1 / math.sqrt(max(choice.num_examples, 1))
    means = {rate: choice.mean(rate, "validation") for rate in sorted(choice.by_rate)}
    rivals = [rate for rate, mean in means.items() if mean >= max(means.values()) - REACH * error]
    if len(rivals) == 1:
        return ChoiceNoise({rivals[0]: 1.0}, variance=0.0)

    # 2. The variation of their means over seeds and, if predictions were kept, over examples.
    by_rate = {rate: choice.by_rate[rate] for rate in rivals}
    covariance_KK = np.diag([seed_variances[rate] for rate in rivals])
    over_examples_KK, why_unknown = vary_over_examples(by_rate, "validation")
    shares_K = draw_choices(np.array([means[rate] for rate in rivals]), covariance_KK + over_examples_KK)

    # 3. The spread of the test scores over these choices.
    scores_K = np.array([choice.mean(rate, "test") for rate in rivals])
    variance = spread_of_choices(shares_K, scores_K, vary_over_examples(by_rate, "test")[0])
    if why_unknown and not any(seed_variances.values()):
        variance = math.nan
    return ChoiceNoise(dict(zip(rivals, shares_K.tolist(), strict=True)), variance, why_unknown)


def vary_over_examples(by_rate: Mapping[float, Sequence[Score]], split: EvaluatedSplit) -> tuple[np.ndarray, str]:
    """Return the covariance, [K, K], of the rates' mean scores over the examples of a split, and ""; or zeros, and the
    reason why it is unknown."""
    none_KK = np.zeros((len(by_rate), len(by_rate)))
    scores = [score for of_rate in by_rate.values() for score in of_rate]
    num_examples = min(score.num_examples.get(split, 0) for score in scores)
    if num_examples < 2:
        return none_KK, f"fewer than two {split} examples"
    table = join_examples(scores, split, MOST_EXAMPLES)
    if table.why_unknown:
        return none_KK, table.why_unknown
    firsts = np.cumsum([len(of_rate) for of_rate in by_rate.values()])[:-1]
    values_KN = np.stack([values_SN.mean(axis=0) for values_SN in np.split(table.values_SN, firsts)])
    return np.cov(values_KN) / num_examples, ""


def spread_of_choices(shares_K: np.ndarray, scores_K: np.ndarray, covariance_KK: np.ndarray) -> float:
    """Return the variance of the true test score over choices that fall on the rates with these shares.

    Measured scores spread further than true ones, by the noise of the test examples, which the error over examples
    already counts. `covariance_KK` is that noise, and this function subtracts it. The noise of seeds stays: seeds that
    are lucky at a rate choose it for each other, so they share luck that their spread does not show.
    """
    spread = shares_K @ (scores_K - shares_K @ scores_K) ** 2
    spread -= shares_K @ np.diag(covariance_KK) - shares_K @ covariance_KK @ shares_K
    return max(float(spread), 0.0)


def other_seeds(values_KS: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each rate, [K], the variance of the mean of S - 1 other seeds around the mean of these seeds:
    σ² (1/S + 1/(S-1)), with one σ for the seeds of all rates. 0 if no rate has two seeds."""
    degrees = sum(len(values_S) - 1 for values_S in values_KS)
    variance = sum(float(np.var(values_S)) * len(values_S) for values_S in values_KS) / max(degrees, 1)
    return [variance * (1 / len(values_S) + 1 / max(len(values_S) - 1, 1)) for values_S in values_KS]


def draw_choices(means_K: np.ndarray, covariance_KK: np.ndarray) -> np.ndarray:
    """Draw validation means, and return the share of draws in which each rate, from the lowest, is best, [K]."""
    drawn_BK = np.random.default_rng(0).multivariate_normal(means_K, covariance_KK, NUM_DRAWS, method="eigh")
    # Among equal rates take the lowest, as `choose_rate` does; a millionth is rounding.
    best_B = np.argmax(drawn_BK >= drawn_BK.max(axis=1, keepdims=True) - 1e-6, axis=1)
    return np.bincount(best_B, minlength=len(means_K)) / NUM_DRAWS


def find_scored_model(scores: ScoreSet, name: str) -> str:
    """Find a model by its whole name or the last part of its path, with its settings if it has some. Raises
    `InputError` for no match (naming the nearest) or several (naming all)."""
    model_name = name.rstrip("/")
    if model_name in scores.models:
        return model_name
    models = [model for model in scores.models if short_name(model) == model_name]
    if len(models) > 1:
        raise InputError(f"'{name}' could be any of {', '.join(map(repr, models))}; give the whole name")
    refuse_unknown("no scores of a model", model_name, {*scores.models, *map(short_name, scores.models)})
    return models[0]


def choose_rate(validation: Mapping[float, Sequence[float | None]]) -> float:
    """Choose the learning rate with the best mean validation score over its seeds; of equal ones the lowest.

    None means that a seed diverged. A rate with more diverged seeds ranks below every rate with fewer, because the
    mean of the survivors does not predict the next seed.

    Raises `InputError` if no seed of any rate survived.
    """
    ranks = {}
    for rate, values in validation.items():
        survivors = [value for value in values if value is not None]
        assert all(math.isfinite(value) for value in survivors)
        if survivors:
            # fsum is exact, so the order of the seeds breaks no tie.
            ranks[rate] = (len(survivors) - len(values), math.fsum(survivors) / len(survivors), -rate)
    if not ranks:
        raise InputError("training diverged at every learning rate with every seed; try lower rates")
    return max(ranks, key=lambda rate: ranks[rate])


def choose_for_each_seed(
    validation: Mapping[float, Mapping[int, float | None]], peers: Mapping[float, Sequence[float | None]]
) -> dict[int, float]:
    """Choose the learning rate at which each seed is tested: `choose_rate` takes it from all other seeds.

    If no other seed survived, the peers choose: the seeds of other pretrainings. Without peers, the seed chooses for
    itself, but no verdict follows from a single seed. `validation` has the scores by rate, then by seed; some seed
    has survived at some rate.
    """
    rates = {}
    for seed in sorted({seed for by_seed in validation.values() for seed in by_seed}):
        others = {rate: [scores[voter] for voter in scores if voter != seed] for rate, scores in validation.items()}
        itself = {rate: [by_seed[seed]] for rate, by_seed in validation.items() if seed in by_seed}
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
    """Return a score on validation, None if it diverged. Raises `InputError` if a split lacks the metric."""
    for values in score.metrics.values():
        if metric not in values:
            raise InputError(f"{score.folder} has no metric '{metric}'{nearest(metric, values)}")
    return None if score.diverged else score.metrics["validation"][metric]
