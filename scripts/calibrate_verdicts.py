"""How often equally good models are called different, and different ones are: the test of all verdicts
(`biphase.report.contrasts`) on simulated predictions of known accuracy.

    python scripts/calibrate_verdicts.py --trials 4000 --out benchmarks/results/DATE-verdicts.json

A model gets an example right where a number drawn for the example lies below the model's accuracy, 85 %. On a share of
the examples that number is drawn for each model alone (their errors are independent there), on the others for all
models together. Each fine-tuning seed moves the accuracy by noise, as does each pretraining seed, which also draws the
numbers of some examples anew. Where a rate is chosen on validation examples, equal rates of both models have the same
accuracy, and they choose for themselves, as `biphase.finetuning.choosing` does: each seed by the others, or a single
one by those of other pretrainings.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from biphase.finetuning.choosing import (
    ChoiceNoise,
    choose_for_each_seed,
    choose_rate,
    draw_choices,
    other_seeds,
    spread_of_choices,
)
from biphase.finetuning.scores import ExampleTable, KeptExamples
from biphase.report import contrasts
from biphase.report.contrasts import Contrast, difference
from biphase.report.results import ALL_TASKS, ReportArm, Result, ResultSet, with_cohorts
from biphase.report.statistics import SIGNIFICANCE, is_significant
from biphase.studies.describe import USUAL_NOISE, Design

MIXES = ((0.5, 0.2), (0.5, 0.5), (0.3, 0.5), (0.0, 0.5))
"""Share of examples on which the errors of two models are independent; noise of fine-tuning seeds in points."""

NUM_EXAMPLES = (300, 1_000, 10_000)
ACCURACY = 0.85


@dataclass(frozen=True)
class World:
    """Two models or recipes, and what chance makes of them."""

    num_examples: int
    independent: float
    seed_noise: float
    """Standard deviation over fine-tuning seeds, in points."""
    num_seeds: int = 5
    num_pretrainings: int = 1
    pretraining_noise: float = 0.0
    """Standard deviation over pretraining seeds, in points."""
    redrawn: float = 0.0
    """The share of examples that each pretraining seed draws anew."""
    disagreement: float = 0.0
    """The share of examples that each fine-tuning seed draws anew."""
    gap: float = 0.0
    """By how many points the first is better."""
    num_arms: int = 2
    """How many models there are with the same seeds: the two that are compared, and others that are alike."""
    is_paired: bool = True
    """Whether both have the same seeds."""
    other_seeds: int = 0
    """How many fine-tuning seeds the second has, where not as many."""
    other_noise: float = 0.0
    """Their standard deviation in points, where it is another one."""
    num_validation: int = 0
    """So many further examples choose each model's rate."""
    rates: tuple[float, ...] = (0.0,)
    """Points that each rate adds."""
    other_rates: tuple[float, ...] = ()
    """Those of the second, where they are others."""
    level_noise: float = 0.0
    """Standard deviation in points of a pretraining's level, the same at all rates."""
    loud: tuple[int, ...] = ()
    """The models whose seeds, of both kinds, are `loudness` times as noisy."""
    loudness: float = 1.0
    trunk_noise: float = 0.0
    """Standard deviation in points of a pretraining seed's level that all models of a trunk share."""
    second_trunk: tuple[int, ...] = ()
    """The models of a second trunk."""


@dataclass(frozen=True)
class KnownChoice:
    """What other validation examples would have chosen, where `RateChoice` would read them."""

    variance: float
    num_examples: int
    degrees: float
    num_rates: int = 1

    def draw_noise(self) -> ChoiceNoise:
        return ChoiceNoise({}, self.variance)


def draw_models(world: World, rng: np.random.Generator, is_lucky: bool = False) -> tuple[Result, Result]:
    """Scores of two models at the rates that they choose, with what each example contributes."""
    num = world.num_validation + world.num_examples
    drawn_N = rng.random(num)
    trunks_2P = rng.normal(0, world.trunk_noise, (2, world.num_pretrainings)) if world.trunk_noise else np.zeros((2, 1))
    models = []
    for number in range(world.num_arms):
        sign = (0.5, -0.5)[number] if number < 2 else 0.0
        level_P = trunks_2P[int(number in world.second_trunk)] + draw_levels(world, rng, number)
        own_N = np.where(rng.random(num) < world.independent, rng.random(num), drawn_N)
        rates = world.other_rates or world.rates if number == 1 else world.rates
        level_P = level_P + sign * world.gap
        tuned = [draw_right(world, rng, own_N, number, level_P + points) for points in rates]
        best = tuned[0]
        choice: Any = KnownChoice(0.0, 0, np.nan)
        if world.num_validation:
            # Single fine-tuning seeds choose for each other over pretrainings, others within each.
            axis = 2 if world.num_seeds == 1 else 1
            pools = [choose_rates(world, right, is_lucky) for right in np.moveaxis(np.stack(tuned), axis, 0)]
            best = np.stack([right_SN for right_SN, _ in pools], axis=axis - 1)
            choice = pools[0][1] if len(pools) == 1 else None
        values_SN = best[..., world.num_validation :].reshape(-1, world.num_examples).astype(np.float64)
        pretraining, seeds = (axis.ravel().tolist() for axis in np.indices(best.shape[:2]))
        shift = 0 if world.is_paired else 100 * number
        arm = ReportArm(f"model {number}", "other", "1m", "mlm", 40, 1, 0, 1)
        models.append(
            Result(
                arm,
                "SC",
                "task",
                "standard",
                values_SN.mean(axis=1).tolist(),
                seeds=[seed + shift for seed in seeds],
                pretraining_seeds=[seed + shift for seed in pretraining],
                examples=KeptExamples((), ExampleTable("examples", values_SN)),
                choice=choice,
            )
        )
    first, second, *_ = with_cohorts(models)
    return first, second


def choose_rates(world: World, right_KSN: np.ndarray, is_lucky: bool) -> tuple[np.ndarray, KnownChoice]:
    """What a model gets right at the rates that validation chooses for seeds that choose for each other, [seeds,
    examples], and that choice. `is_lucky`: all seeds together choose one rate, at which they are tested too."""
    num = world.num_validation if len(right_KSN) > 1 else 0
    means_KS = right_KSN[..., : world.num_validation].mean(axis=2)
    by_rate = {float(rate): dict(enumerate(means_S.tolist())) for rate, means_S in enumerate(means_KS)}
    rates = choose_for_each_seed(by_rate, {})
    if is_lucky:
        rates = dict.fromkeys(rates, choose_rate({rate: [*by_seed.values()] for rate, by_seed in by_rate.items()}))
    best_SN = np.stack([right_KSN[int(rate), seed] for seed, rate in rates.items()])
    covariance_KK = np.diag(other_seeds(means_KS.tolist()))
    covariance_KK = covariance_KK + np.cov(right_KSN[..., : world.num_validation].mean(axis=1)) / world.num_validation
    shares_K = draw_choices(means_KS.mean(axis=1), covariance_KK)
    tested_KN = right_KSN[..., world.num_validation :].mean(axis=1)
    covariance_KK = np.cov(tested_KN) / world.num_examples if len(tested_KN) > 1 else np.zeros((1, 1))
    variance = spread_of_choices(shares_K, tested_KN.mean(axis=1), covariance_KK)
    return best_SN, KnownChoice(variance, num, means_KS.size - len(means_KS), len(means_KS))


def draw_levels(world: World, rng: np.random.Generator, number: int) -> np.ndarray | float:
    """The level of each pretraining of a model, in points, the same at all rates; 0 if there is none."""
    if not world.level_noise:
        return 0.0
    return rng.normal(0, world.level_noise * loudness(world, number), world.num_pretrainings)


def loudness(world: World, number: int) -> float:
    return world.loudness if number in world.loud else 1.0


def draw_right(world: World, rng: np.random.Generator, own_N: np.ndarray, number: int, points_P: Any) -> np.ndarray:
    """Which examples each repetition of a model gets right, [pretraining seeds, seeds, examples]. `points_P`: the level
    of each pretraining."""
    num, num_seeds, noise = len(own_N), world.num_seeds, world.seed_noise
    if number == 1:
        num_seeds, noise = world.other_seeds or num_seeds, world.other_noise or noise
    repeated = world.num_pretrainings, num_seeds
    levels_PSN = np.broadcast_to(own_N, (*repeated, num))
    if world.redrawn:
        anew_PN = np.where(rng.random((repeated[0], num)) < world.redrawn, rng.random((repeated[0], num)), own_N)
        levels_PSN = np.broadcast_to(anew_PN[:, None], (*repeated, num))
    if world.disagreement:
        is_anew = rng.random((*repeated, num)) < world.disagreement
        levels_PSN = np.where(is_anew, rng.random((*repeated, num)), levels_PSN)
    times = loudness(world, number)
    points_PS = points_P[:, None] + rng.normal(0, times * noise, repeated)
    points_PS = points_PS + rng.normal(0, times * world.pretraining_noise, (repeated[0], 1))
    return levels_PSN < ACCURACY + points_PS[:, :, None] / 100


def without_arms(*models: Result) -> Contrast:
    """The test as it would be if no other arms lent it degrees of freedom."""
    a, b = (replace(model, cohort={}) for model in models)
    return difference(a, b)


def by_rule(lent_factor: float, shared_choice: float, *models: Result) -> Contrast:
    """The test with other constants: the factor on the lenders' variance, and the share of a choice of rates that
    counts where pretrainings choose for each other."""
    with patch.multiple(contrasts, LENT_FACTOR=lent_factor, SHARED_CHOICE=shared_choice):
        return difference(*models)


def difference_of_seeds(a: Result, b: Result) -> Contrast:
    """The test as it would be without knowing what examples contribute: over seeds alone."""
    return without_arms(replace(a, examples=None, choice=None), replace(b, examples=None, choice=None))


RULES: dict[str, Callable[[Result, Result], Contrast]] = {
    "both": difference,
    "before": partial(by_rule, 2.0, 1.0),
    "arms_alone": without_arms,
    "seeds_only": difference_of_seeds,
    "rates_as_given": lambda a, b: difference(replace(a, choice=None), replace(b, choice=None)),
}
"""The test of all verdicts, and as it would be: with the constants before, without other arms, over seeds alone, or
without the choice of rates."""


def share_called_different(
    world: World, trials: int, seed: int = 0, rules: Sequence[str] = tuple(RULES)
) -> dict[str, float]:
    """In how many of so many trials each of these rules calls the two different; and so the test would, with rates that
    the tested seeds chose themselves (the same draws)."""
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    hits = Counter(dict.fromkeys([*rules, "rates_by_luck"], 0))
    for _ in range(trials):
        a, b = draw_models(world, rng)
        for name in rules:
            hits[name] += is_significant(RULES[name](a, b).against().p_value)
        if world.num_validation and world.num_seeds > 1:
            lucky = [replace(model, choice=None) for model in draw_models(world, again, is_lucky=True)]
            hits["rates_by_luck"] += is_significant(difference(*lucky).against().p_value)
    return {name: count / trials for name, count in hits.items()}


def list_worlds() -> Iterator[World]:
    """Equal models, then unequal ones."""
    for gap in (0.0, 0.5, 1.0, 2.0):
        for independent, noise in MIXES:
            for num in NUM_EXAMPLES:
                world = World(num, independent, noise, gap=gap)
                recipes = replace(world, num_seeds=2, num_pretrainings=3, pretraining_noise=0.5, redrawn=0.1)
                yield world
                yield recipes
                if not gap:
                    yield replace(world, num_seeds=3)
                    yield replace(world, num_seeds=3, is_paired=False)
                    yield replace(recipes, num_pretrainings=5)


def list_tuned_worlds() -> Iterator[World]:
    """Equal models with six rates against one, two or six that are as good, of fine-tuning seeds whose noise is 2.5
    points, in one of them twice as much; then a rate that is better than the others. Pretrained 1 to 5 times."""
    alike = World(1_000, 0.3, 2.5, 3, redrawn=0.1, num_validation=500, rates=(0.0,) * 6)
    for num_pretrainings in range(1, 6):
        world = replace(alike, num_pretrainings=num_pretrainings, pretraining_noise=0.5 * (num_pretrainings > 1))
        for num_seeds in (1, 2, 3, 5)[num_pretrainings == 1 :]:
            yield replace(world, num_seeds=num_seeds, other_rates=(0.0,))
            yield replace(world, num_seeds=num_seeds, other_rates=(0.0, 0.0))
            yield replace(world, num_seeds=num_seeds, other_noise=5.0)
    for num_seeds in (3, 5):
        yield replace(alike, num_seeds=num_seeds, rates=(-3.0, -1.0, 0.0, -1.0, -4.0, -9.0), other_rates=(-1.0, 0.0))
        yield replace(alike, num_examples=10_000, independent=0.0, num_seeds=num_seeds)


def list_studies() -> Iterator[World]:
    """Six models with the same seeds, of which two are compared: equal ones, of which one's seeds may be two and three
    times as noisy, and unequal ones."""
    for num_examples in (1_000, 5_000):
        for num_pretrainings, num_seeds in ((1, 3), (1, 5), (2, 3), (3, 1), (3, 3), (5, 1), (12, 1)):
            alike = World(num_examples, 0.3, 0.7, num_seeds, num_pretrainings, disagreement=0.1, num_arms=6)
            if num_pretrainings > 1:
                alike = replace(alike, pretraining_noise=0.5, redrawn=0.1)
            yield alike
            yield replace(alike, other_noise=1.4)
            yield replace(alike, other_noise=2.1)
            yield replace(alike, gap=2.0)
            yield replace(alike, gap=4.0)


def list_odd_worlds() -> Iterator[World]:
    """Equal models with unequal numbers of seeds, and with rates that validation chose for each; of the latter also
    models that were pretrained several times, and unequal ones."""
    for num, other in ((5, 2), (5, 3), (10, 2)):
        for noise in (0.5, 1.0):
            # The errors are the same ones: only the seeds make a difference, where few of them weigh most.
            yield World(10_000, 0.0, 0.5, num_seeds=num, other_seeds=other, other_noise=noise, is_paired=False)
            yield World(1_000, 0.3, 0.5, num_seeds=num, other_seeds=other, other_noise=noise)
    for num_validation in (50, 100, 200, 500):
        # A flat optimum, a usual one, a steep one.
        for rates in ((-7.0, -5.0, -4.5, -6.0), (-9.0, -7.0, -5.0, -8.0), (-25.0, -13.0, -5.0, -15.0)):
            yield World(1_000, 0.4, 0.7, 3, redrawn=0.15, num_validation=num_validation, rates=rates)
    flat = World(1_000, 0.4, 0.7, 3, redrawn=0.15, num_validation=50, rates=(-7.0, -5.0, -4.5, -6.0))
    for num_pretrainings in (3, 5):
        yield replace(flat, num_pretrainings=num_pretrainings, pretraining_noise=0.5)
    for num_validation, gap in ((50, 4.0), (200, 4.0), (200, 2.0), (500, 2.0)):
        yield replace(flat, num_validation=num_validation, gap=gap)


def list_sharper_worlds() -> Iterator[World]:
    """Six models with the same seeds, of which two are compared: alike; one, both, half of them four times as noisy; on
    two trunks. Two models with three rates each, pretrained several times with one fine-tuning seed: alike; one louder,
    both louder; with a rate that is better. Equal models, then unequal ones."""
    for num_pretrainings, num_seeds in ((3, 3), (3, 1), (2, 3), (4, 1), (1, 3)):
        alike = World(1_000, 0.3, 0.7, num_seeds, num_pretrainings, disagreement=0.1, num_arms=6)
        if num_pretrainings > 1:
            alike = replace(alike, pretraining_noise=0.5, redrawn=0.1)
        yield alike
        yield replace(alike, loud=(1,), loudness=4.0)
        yield replace(alike, loud=(0, 1), loudness=4.0)
        yield replace(alike, loud=(0, 1, 2), loudness=4.0)
        if num_pretrainings > 1:
            yield replace(alike, trunk_noise=1.0, second_trunk=(1,))
            yield replace(alike, trunk_noise=1.0, second_trunk=(1, 3, 5))
        yield replace(alike, gap=2.0)
        yield replace(alike, gap=4.0)
    for num_pretrainings in (6, 4, 3, 2):
        alike = World(1_000, 0.3, 1.2, 1, num_pretrainings, level_noise=0.8, num_validation=1_000)
        alike = replace(alike, disagreement=0.1, redrawn=0.1, rates=(0.0, 0.0, 0.0))
        yield alike
        yield replace(alike, loud=(1,), loudness=2.5)
        yield replace(alike, loud=(0, 1), loudness=2.5)
        yield replace(alike, rates=(-2.0, 0.0, -2.0))
        yield replace(alike, rates=(-1.0, 0.0, -1.0), other_rates=(0.0,))
        yield replace(alike, gap=2.0)
        yield replace(alike, gap=4.0)


def list_designs() -> Iterator[Design]:
    """Plans of studies, whose smallest difference is promised to be found in 80 %."""
    small, large = USUAL_NOISE["networks of 1M on small tasks"], USUAL_NOISE["networks of 210M and more"]
    factorial = Design(6, 1, 3, 1_000, 0.21, small, num_arms=5)
    for level in (SIGNIFICANCE, SIGNIFICANCE / 6):
        yield replace(factorial, level=level)
        yield replace(factorial, num_rates=1, num_seeds=3, level=level)
        yield replace(factorial, num_pretrainings=4, level=level)
        yield replace(factorial, num_pretrainings=3, num_rates=1, num_seeds=3, level=level)
    yield replace(factorial, num_rates=6)
    yield replace(factorial, num_pretrainings=3, num_rates=1)
    yield replace(factorial, num_pretrainings=1, num_rates=1, num_seeds=5)
    yield replace(factorial, num_pretrainings=1, num_rates=3, num_seeds=5)
    yield replace(factorial, num_pretrainings=3, num_rates=3, num_seeds=3)
    yield replace(factorial, num_pretrainings=3, num_rates=1, num_seeds=3, noise=large, num_examples=5_000)
    yield replace(factorial, num_pretrainings=3, num_rates=1, num_seeds=3, example_variance=0.009)


def share_found(design: Design, trials: int, seed: int = 0) -> float:
    """In how many of so many studies with the noise of a plan the test finds the plan's smallest difference."""
    of_pretraining, of_finetuning = (100 * noise for noise in design.noise)
    world = World(
        num_examples=design.num_examples,
        independent=design.example_variance / (2 * ACCURACY * (1 - ACCURACY)),
        seed_noise=of_finetuning,
        num_seeds=design.num_seeds,
        num_pretrainings=design.num_pretrainings,
        level_noise=of_pretraining if design.num_pretrainings > 1 else 0.0,
        gap=100 * design.smallest_difference,
        num_arms=design.num_arms,
        num_validation=1_000 if design.num_rates > 1 else 0,
        rates=(0.0,) * design.num_rates,
    )
    rng = np.random.default_rng(seed)
    tested = (difference(*draw_models(world, rng)).against().p_value for _ in range(trials))
    return sum(p_value < design.level for p_value in tested) / trials


LACKING: dict[str, tuple[int, int, int, Callable[[int, int, int], bool]]] = {
    "complete": (2, 6, 6, lambda task, seed, arm: False),
    "a run of one arm": (2, 6, 6, lambda task, seed, arm: task == seed == arm == 0),
    "one task without one seed": (2, 6, 6, lambda task, seed, arm: task == seed == 0),
    "half of the tasks without one seed": (2, 6, 6, lambda task, seed, arm: task < 3 and seed == 0),
    "each task without another seed": (2, 6, 6, lambda task, seed, arm: seed == task),
    "4 arms, complete": (4, 4, 4, lambda task, seed, arm: False),
    "4 arms, one task without one seed": (4, 4, 4, lambda task, seed, arm: task == seed == 3),
    "4 arms, two tasks without one seed": (4, 4, 4, lambda task, seed, arm: task > 1 and seed == 3),
    "4 arms, each task without another seed": (4, 4, 4, lambda task, seed, arm: seed == task),
    "4 arms, 3 seeds, a run of one arm": (4, 4, 3, lambda task, seed, arm: task == seed == arm == 0),
    "10 seeds, one task with only 3": (2, 4, 10, lambda task, seed, arm: task == 0 and seed > 2),
}
"""World → the numbers of arms, tasks and pretraining seeds, and whether a run is missing."""


def measure_lacking(name: str, trials: int) -> dict[str, Any]:
    """How often the means over tasks of equal arms are called different, how often ± covers the truth, and how often a
    gap of 2 (six or more seeds) or 2.5 to 4 points is found. A seed moves all tasks of an arm by 1 point, and each task
    by 0.3 points alone."""
    (num_arms, num_tasks, num_seeds, lacks), rng, counts = LACKING[name], np.random.default_rng(1), Counter[str]()
    arm = ReportArm("m0", "other", "1m", "mlm", 40, 100, 0, 100)
    found_gap = {3: 0.04, 4: 0.025}.get(num_seeds, 0.02)
    for gap in (0.0, found_gap) * trials:
        results = []
        for number in range(num_arms):
            effects = rng.normal(0.7 + gap * (number == 0), 0.01, num_seeds)
            for task in range(num_tasks):
                seeds = [seed for seed in range(num_seeds) if not lacks(task, seed, number)]
                scores = (effects[seeds] + rng.normal(0, 0.003, len(seeds))).tolist()
                named = replace(arm, name=f"m{number}")
                result = Result(named, "SC", f"t{task}", "standard", scores, seeds=seeds, pretraining_seeds=seeds)
                results.append(result)
        means = contrasts.with_averages(ResultSet(tuple(with_cohorts(results)))).scores
        first, second = (means[f"m{number}"][ALL_TASKS] for number in (0, 1))
        side = difference(first, second).side
        if gap:
            counts["found"] += side == "above"
        else:
            counts["false"] += side in ("above", "below")
            counts["covered"] += first.interval.low <= 0.7 <= first.interval.high
    return {"world": name, "trials": trials, "gap": found_gap} | {key: num / trials for key, num in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument(
        "--worlds",
        choices=("all", "odd", "tuned", "studies", "sharper", "plans", "lacking"),
        default="all",
        help="odd: unequal seeds and chosen rates; studies: of six models; sharper: loud models, trunks, single seeds "
        "that choose for each other; plans: what `study plan` promises; lacking: means over tasks that lack runs",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    kinds = {"usual": list_worlds, "odd": list_odd_worlds, "tuned": list_tuned_worlds, "studies": list_studies}
    kinds["sharper"] = list_sharper_worlds
    wanted = {"all": [*kinds], "odd": ["odd", "tuned"], "plans": [], "lacking": []}.get(
        arguments.worlds, [arguments.worlds]
    )
    for name in LACKING if arguments.worlds in ("all", "lacking") else ():
        rows.append(measure_lacking(name, arguments.trials))
        print(json.dumps(rows[-1]), flush=True)
    for design in list_designs() if arguments.worlds in ("all", "plans") else ():
        trials = arguments.trials // 2
        found = share_found(design, trials)
        rows.append(asdict(design) | {"trials": trials, "promised": design.smallest_difference, "found": found})
        print(json.dumps(rows[-1]), flush=True)
    for world in itertools.chain(*(kinds[kind]() for kind in wanted)):
        trials = arguments.trials // (5 if world.gap else 1)
        rows.append(asdict(world) | {"trials": trials} | share_called_different(world, trials))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
