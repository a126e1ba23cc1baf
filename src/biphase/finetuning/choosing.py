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

import numpy as np

from biphase.errors import InputError, nearest
from biphase.finetuning.scores import Score, ScoreSet, join_examples, short_name
from biphase.tasks.spec import EvaluatedSplit

NUM_DRAWS = 10_000
MOST_EXAMPLES = 500
"""So many of the validation examples, evenly over the file, show how much a mean over all of them varies."""
REACH = 3.0
"""A mean over N shares has a standard error of at most 1/√N beside another on the same examples: a rate that is more
than so many of these behind is not the one that other examples choose."""


@dataclass(frozen=True)
class ChoiceNoise:
    """How far a choice of rate hangs on the validation examples and seeds that made it."""

    shares: Mapping[float, float]
    """With which probability each rate would be chosen on other examples by other seeds, where it can be at all."""
    variance: float
    """The variance of the mean test score over such choices; nan where nothing is known of them."""
    why_unknown: str = ""
    """Why it is not known what other examples would have chosen."""


@dataclass
class RateChoice:
    """The scores of a model on a task among which validation chose."""

    by_rate: Mapping[float, Sequence[Score]]
    """The scores at each rate, of seeds that did not diverge."""
    metric: str
    noise: ChoiceNoise | None = None
    """What `draw_noise` returns, once it was called."""

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

    def draw_noise(self) -> ChoiceNoise:
        """Draw what other validation examples and seeds would have chosen. Predictions are read, and choices drawn,
        once."""
        if self.noise is None:
            self.noise = measure_noise(self)
        return self.noise

    def mean(self, rate: float, split: str) -> float:
        return float(np.mean([score.metrics[split][self.metric] for score in self.by_rate[rate]]))


def measure_noise(choice: RateChoice) -> ChoiceNoise:
    """Draw the noise of a choice, as `RateChoice.draw_noise` returns it."""
    # 1. The rates, from the lowest, that other examples or seeds could have chosen at all.
    values_KS = [[score.metrics["validation"][choice.metric] for score in seeds] for seeds in choice.by_rate.values()]
    seed_variances = dict(zip(choice.by_rate, other_seeds(values_KS), strict=True))
    error = math.sqrt(2 * max(seed_variances.values())) + 1 / math.sqrt(max(choice.num_examples, 1))
    means = {rate: choice.mean(rate, "validation") for rate in sorted(choice.by_rate)}
    rivals = [rate for rate, mean in means.items() if mean >= max(means.values()) - REACH * error]
    if len(rivals) == 1:
        return ChoiceNoise({rivals[0]: 1.0}, variance=0.0)

    # 2. How their means vary over seeds and, where predictions were kept, over examples.
    by_rate = {rate: choice.by_rate[rate] for rate in rivals}
    covariance_KK = np.diag([seed_variances[rate] for rate in rivals])
    over_examples_KK, why_unknown = vary_over_examples(by_rate, "validation")
    shares_K = draw_choices(np.array([means[rate] for rate in rivals]), covariance_KK + over_examples_KK)

    # 3. How far the test scores lie apart where these choices fall.
    scores_K = np.array([choice.mean(rate, "test") for rate in rivals])
    variance = spread_of_choices(shares_K, scores_K, vary_over_examples(by_rate, "test")[0])
    if why_unknown and not any(seed_variances.values()):
        variance = math.nan
    return ChoiceNoise(dict(zip(rivals, shares_K.tolist(), strict=True)), variance, why_unknown)


def vary_over_examples(by_rate: Mapping[float, Sequence[Score]], split: EvaluatedSplit) -> tuple[np.ndarray, str]:
    """Return the covariance, [K, K], of the rates' mean scores over the examples of a split; and why nothing is known
    of it, where it is zero for that."""
    none_KK = np.zeros((len(by_rate), len(by_rate)))
    scores = [score for of_rate in by_rate.values() for score in of_rate]
    num_examples = min(score.num_examples.get(split, 0) for score in scores)
    if num_examples < 2:
        return none_KK, f"no two {split} examples chose"
    table = join_examples(scores, split, MOST_EXAMPLES)
    if table.why_unknown:
        return none_KK, table.why_unknown
    firsts = np.cumsum([len(of_rate) for of_rate in by_rate.values()])[:-1]
    values_KN = np.stack([values_SN.mean(axis=0) for values_SN in np.split(table.values_SN, firsts)])
    return np.cov(values_KN) / num_examples, ""


def spread_of_choices(shares_K: np.ndarray, scores_K: np.ndarray, covariance_KK: np.ndarray) -> float:
    """Return the variance of the true test score over choices that fall on the rates with these shares.

    The measured scores lie further apart than the true ones: by what the test examples make of each, which is no matter
    of the choice and stands in the error over examples already. That part, known from `covariance_KK`, is taken off.
    The noise of seeds stays: the seeds that are lucky at a rate choose it for each other, so that their scores have in
    common what their spread does not show.
    """
    spread = shares_K @ (scores_K - shares_K @ scores_K) ** 2
    of_examples = shares_K @ np.diag(covariance_KK) - shares_K @ covariance_KK @ shares_K
    return max(float(spread - of_examples), 0.0)


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
