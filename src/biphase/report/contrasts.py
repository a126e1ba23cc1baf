"""Scores of several models → a difference between them and its test: all verdicts use this one test.

Four sources of noise make equally good models differ: the pretraining seed, the fine-tuning seed, the test examples,
and the validation examples and seeds that choose the learning rate. A test accounts for the sources that the scores
show, and names them. The same test gives averages their intervals, measures how well a task separates models, and
estimates how many seeds or examples would decide a difference.

Letters: R independent repetitions (pretraining seeds if there are several, else fine-tuning seeds), N examples or arms,
A arms of a sum, D datasets.
"""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special

from biphase.errors import first_of
from biphase.report.formats import show_difference, show_points, show_share
from biphase.report.results import ALL_TASKS, AVERAGE, NORMAL_QUANTILE, Metric, Over, ReportArm, Result, ResultSet
from biphase.report.statistics import (
    ROUNDING,
    SIGNIFICANCE,
    TAILS,
    GapUnit,
    Interval,
    SpreadTerm,
    add_overlapping,
    add_variances,
    interaction,
    is_significant,
    repetitions,
    t_test,
    variance,
)

Noise = Literal["pretraining seeds", "fine-tuning seeds", "test examples", "the choice of rates", "tasks"]
"""A source of differences between equally good models."""

Side = Literal["above", "below", "within noise", "untested"]

NOISY = "these arms are noisier than the others: up to 8 % of such equal arms are called different, not 5"
"""The note on a test with lent degrees of freedom or a choice of rates whose arms vary more than the others."""

Terms = list[tuple[float, Result]]
"""Scores with their weights in a sum."""


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of mean scores, such as a difference, with its standard error and degrees of freedom."""

    estimate: float
    error: float
    """The standard error of the estimate; nan if a score has one seed."""
    degrees: float
    """The degrees of freedom of the t-distribution."""
    size: float
    """The largest score in the sum; a spread far smaller than it counts as rounding error."""
    test: Literal["paired t", "Welch", "jackknife t"]
    """`paired t` if all scores are paired by seed. Known test examples are always paired."""
    num: int
    """The fewest seeds of any score: pretraining seeds if there are several, else fine-tuning seeds."""
    num_pretrainings: int = 1
    """The fewest pretraining seeds of any score."""
    num_examples: int = 0
    """The number of test examples in the test; 0 if their contributions are unknown."""
    example_variance: float = 0.0
    """The part of the squared error that comes from the test examples."""
    choice_variance: float = 0.0
    """The part of the squared error that comes from the choice of rates."""
    choice_degrees: float = math.nan
    """The degrees of freedom of `choice_variance`; nan if the test leaves it out, or there was no choice."""
    lent: float = 0
    """The degrees of freedom of the spread over seeds beyond those of the fewest seeds: other arms lend them, or tasks
    with more seeds have them."""
    is_noisy: bool = False
    """Whether its arms vary more between seeds than the others (`are_noisier`), in a test where that matters."""
    has_one_seed: bool = False
    """Whether some score has a single fine-tuning seed for all its pretrainings."""
    by_seed: tuple[float, ...] = ()
    """The sum for each seed; () unless all scores are paired by seed."""
    unit: GapUnit = "points"

    @property
    def noise(self) -> tuple[Noise, ...]:
        """The sources of noise in the test."""
        sources: list[Noise] = ["pretraining seeds"] if self.num_pretrainings > 1 else []
        sources += ["fine-tuning seeds"] if self.num > 1 and not self.has_one_seed else []
        sources += ["test examples"] if self.num_examples else []
        sources += [] if math.isnan(self.choice_degrees) else ["the choice of rates"]
        return tuple(sources)

    def against(self, bound: float = 0.0, level: float = SIGNIFICANCE) -> Interval:
        """Return the estimate, its interval, which misses with probability `level`, and the two-sided p-value of the
        hypothesis "it equals `bound`"."""
        tested = t_test(self.estimate - bound, self.error, self.degrees, self.size, level)
        low, high = tested.low + bound, tested.high + bound
        return replace(tested, value=self.estimate, low=low, high=high, unit=self.unit)

    @cached_property
    def side(self) -> Side:
        """The side of zero on which the estimate lies (`judge_difference`)."""
        return judge_difference(self.estimate, self.against().p_value)

    def tell_seeds(self, bound: float = 0.0) -> str:
        """Write in how many seeds the sum lies above a bound, and whether its arms are noisier than those that lend to
        the test: `, positive in 11 of 12 seeds`; empty unless seeds are paired."""
        num_above = sum(value > bound + ROUNDING * self.size for value in self.by_seed)
        above = "above the bound" if bound else "positive"
        noisy = f" ({NOISY})" if self.is_noisy else ""
        return f", {above} in {num_above} of {self.num} seeds{noisy}" if len(self.by_seed) > 1 else ""

    def over_examples(self, level: float = SIGNIFICANCE) -> Interval:
        """Test the difference between these runs over test examples alone, without the noise of seeds."""
        error = math.sqrt(self.example_variance) if self.num_examples > 1 else math.nan
        return t_test(self.estimate, error, self.num_examples - 1, self.size, level)


def contrast(terms: Iterable[tuple[float, Result]]) -> Contrast:
    """Return Σ weight · mean over the scores of different models, with its error from seeds and test examples together.

    Scores with the same seeds are paired by seed; others count as independent, unless an arm's pretraining seeds
    overlap between tasks (`add_overlapping`). Test examples are paired. The squared error is a + b - c, and never below
    a or b: the variance of a mean over two crossed random factors. a is the variance of the sum over R repetitions
    (Student's, or Welch's for groups of seeds), b its variance over N examples, and c the part that both contain (seeds
    that differ on single examples). The variance of the choice of rates (`of_choices`) is added. Without that variance,
    other arms with the same seeds lend degrees of freedom to a (`moderate`). `mix_degrees` combines the degrees of
    freedom. If examples are unknown, this is the t test over seeds alone.
    """
    # An average counts as the scores behind it.
    terms = [(weight / len(mean.parts), score) for weight, mean in terms for score in mean.parts]
    groups = group_by_seeds(terms)
    choice_variance, choice_degrees = of_choices(terms)
    variances, num, estimate = over_seeds(terms, groups, lends=not choice_variance)
    lent = min(degrees for _, degrees in variances) - (num - 1)
    seed_variance, degrees = add_variances(variances)
    example_variance, shared, num_examples, example_degrees = 0.0, 0.0, 0, math.nan
    if groups is not None and (of_examples := over_test_sets(groups)):
        example_variances, shared = of_examples
        num_examples = min(num for _, num in example_variances) + 1
        example_variance, example_degrees = add_variances(example_variances)
    over_examples = max(example_variance - shared, 0.0), example_degrees
    paired = groups[0] if groups is not None and len(groups) == 1 else []
    # A single seed shows no spread, so the error is nan.
    total = max(seed_variance + example_variance - shared, seed_variance, example_variance) if num > 1 else math.nan
    return Contrast(
        estimate=float(estimate),
        error=math.sqrt(total + choice_variance),
        degrees=mix_degrees((seed_variance, degrees), over_examples, (choice_variance, choice_degrees)),
        size=max(abs(score.mean) for _, score in terms),
        test="paired t" if paired else "Welch",
        num=num,
        num_pretrainings=min(score.num_pretrainings for _, score in terms),
        num_examples=num_examples,
        example_variance=example_variance,
        choice_variance=choice_variance,
        choice_degrees=choice_degrees,
        lent=lent,
        is_noisy=(lent > 0 or choice_variance > 0) and bool(paired) and are_noisier(paired),
        has_one_seed=have_one_seed(score for _, score in terms),
        by_seed=tuple(np.sum([weight * score.repeated for weight, score in paired], axis=0).tolist() if paired else ()),
        unit=terms[0][1].unit,
    )


def have_one_seed(scores: Iterable[Result]) -> bool:
    """Tell whether any of these scores has a single fine-tuning seed."""
    return any(len({*part.seeds}) == 1 for score in scores for part in score.parts)


def seed_interval(terms: Iterable[tuple[float, Result]]) -> Interval:
    """Return Σ weight · mean with its 95 % interval over seeds alone, as every ± shows it. Verdicts also account for
    test examples (`contrast`)."""
    terms = [(weight / len(mean.parts), score) for weight, mean in terms for score in mean.parts]
    variances, _, estimate = over_seeds(terms, group_by_seeds(terms), lends=False)
    variance, degrees = add_variances(variances)
    return t_test(estimate, math.sqrt(variance), degrees, max(abs(score.mean) for _, score in terms))


def over_seeds(terms: Terms, groups: list[Terms] | None, lends: bool) -> tuple[list[SpreadTerm], int, float]:
    """Return, for each group of repetitions (overlapping ones count as one), the variance of the sum and its degrees
    of freedom; the fewest repetitions of a group; and the sum. `lends`: whether other arms lend degrees of freedom."""
    if groups is None:  # only means and spreads are known, as for published scores
        weights, once = defaultdict[int, float](float), {id(score): score for _, score in terms}
        for weight, score in terms:  # the same score may stand on both sides
            weights[id(score)] += weight
        known = [((weights[key] * score.std) ** 2 / score.num, score.num - 1.0) for key, score in once.items()]
        return known, min(score.num for _, score in terms), sum(weight * score.mean for weight, score in terms)
    rows = [np.sum([weight * score.repeated for weight, score in group], axis=0) for group in groups]
    variances = list[SpreadTerm]()
    for joined in join_overlapping(groups):
        scores = ((w, score.repeated, score.pretraining_seeds) for index in joined for w, score in groups[index])
        overlapping = add_overlapping(scores) if len(joined) > 1 else None
        group, rows_R = groups[joined[0]], rows[joined[0]]
        own, degrees = variance(rows_R), len(rows_R) - 1
        moderated, lent = moderate(own, degrees, group) if lends else (own, 0)
        variances.append(overlapping or (moderated / len(rows_R), degrees + lent))
    return variances, min(len(rows_R) for rows_R in rows), sum(float(rows_R.mean()) for rows_R in rows)


def join_overlapping(groups: list[Terms]) -> list[list[int]]:
    """Join the groups, by their indices, in which an arm has some of its pretraining seeds again, as where one task
    lacks a seed: a seed's effect on an arm is in all its tasks."""
    joined = list[tuple[set[tuple[str, int]], list[int]]]()
    for index, group in enumerate(groups):
        several = [score for _, score in group if len({*score.pretraining_seeds}) > 1]
        seeds, indices = {(score.arm.name, seed) for score in several for seed in score.pretraining_seeds}, [index]
        for other in [other for other in joined if other[0] & seeds]:
            joined.remove(other)
            seeds, indices = seeds | other[0], [*other[1], *indices]
        joined.append((seeds, indices))
    return [indices for _, indices in joined]


FEW_DEGREES = 4
"""The fewest degrees of freedom with which a spread over seeds stands alone. With fewer it borrows from other arms, and
`mix_degrees` follows another rule."""

LENT_DEGREES = 3
"""The most degrees of freedom that the arms of a study lend to a difference."""

LENT_FACTOR, LENT_FACTOR_OF_TWO = 1.5, 2.0
"""The factor on the mean variance of arms that lend, and the same for two repetitions, whose own variance says too
little. In simulations the test calls at most 6 % of equal arms different, unless the compared arms are four times as
noisy as the others (`are_noisier`)."""


def count_lent(degrees: int, num_arms: int) -> int:
    """Return the degrees of freedom that `num_arms` arms lend to a difference with `degrees` of its own."""
    return max(min(LENT_DEGREES, (num_arms - 2) * degrees), 0) if degrees < FEW_DEGREES else 0


def find_lent_factor(degrees: int) -> float:
    """Return the factor on the variance of arms that lend to a difference with `degrees` of its own."""
    return LENT_FACTOR if degrees > 1 else LENT_FACTOR_OF_TWO


class Cohort(NamedTuple):
    """The arms of a sum beside all arms with the same seeds."""

    factors_A: np.ndarray
    """The factor of each arm of the sum."""
    rows_NR: np.ndarray
    """The scores of all arms, weighted over datasets as in the sum."""
    indices_A: list[int]
    """The rows of the sum's arms."""


def weigh_cohort(group: Terms) -> Cohort | None:
    """Return the cohort of a group's sum; None for a sum that cannot borrow (`moderate`)."""
    cohorts = {score.dataset: score.cohort for _, score in group}
    names = sorted(set.intersection(*map(set, cohorts.values())))
    arms, datasets = list(dict.fromkeys(score.arm.name for _, score in group)), list(cohorts)
    if not set(arms) <= set(names):
        return None
    weights_AD = np.zeros((len(arms), len(datasets)))
    for weight, score in group:
        weights_AD[arms.index(score.arm.name), datasets.index(score.dataset)] += weight
    pattern_D = weights_AD[np.abs(weights_AD).sum(axis=1).argmax()]
    factors_A = weights_AD @ pattern_D / max(pattern_D @ pattern_D, ROUNDING)
    if not np.allclose(weights_AD, np.outer(factors_A, pattern_D)) or abs(factors_A.sum()) >= 1e-9:
        return None
    rows_NR = np.tensordot(pattern_D, [[cohort[name] for name in names] for cohort in cohorts.values()], axes=1)
    return Cohort(factors_A, rows_NR, [names.index(arm) for arm in arms])


def moderate(own: float, degrees: int, group: Terms) -> tuple[float, int]:
    """Shrink the variance of a group's sum over repetitions towards that of all arms with the same seeds. Return it
    with the degrees of freedom that those arms lend. This is moderated variance (Smyth 2004) with a fixed prior.

    The prior is the larger of two variances: the mean variance of all arms' differences, and the mean variance of the
    differences between an arm of the sum and the others, because arms of one trunk vary less among themselves. The
    result is never below the sum's own variance, so noisy arms stay noisy. In the sum, all arms must have the same
    weights on the datasets up to a factor, and these factors must add up to zero, as they do in differences of scores
    and of averages: then a seed's effects on all arms cancel. Any other sum keeps its own variance, and so does a sum
    with an arm that a cohort leaves out.
    """
    cohort = weigh_cohort(group) if degrees < FEW_DEGREES else None
    lent = count_lent(degrees, len(cohort.rows_NR)) if cohort else 0
    if not (cohort and lent):
        return own, 0
    factors_A, rows_NR, indices_A = cohort
    gaps = [np.delete(rows_NR - rows_NR[index], index, axis=0) for index in indices_A]
    apart = [float(gap_NR.var(axis=1, ddof=1).mean()) for gap_NR in gaps]
    prior = float(factors_A @ factors_A) / 2 * max(interaction(rows_NR) * 2, *apart)
    drawn = (degrees * own + lent * find_lent_factor(degrees) * prior) / (degrees + lent)
    return max(own, drawn), lent


def are_noisier(group: Terms) -> bool:
    """Tell whether the arms of a group's sum vary more over repetitions than the other arms with the same seeds, by an
    F test. Then the variance that those lend is too small."""
    cohort = weigh_cohort(group)
    others_NR = np.delete(cohort.rows_NR, cohort.indices_A, axis=0) if cohort else np.zeros((0, 0))
    num_others, spread = len(others_NR), interaction(others_NR)
    if not (cohort and spread):
        return False
    off_AR = cohort.rows_NR[cohort.indices_A] - others_NR.mean(axis=0)
    ratio = off_AR.var(axis=1, ddof=1).mean() / (spread * (1 + 1 / num_others))
    degrees = off_AR.shape[1] - 1
    return float(special.fdtrc(len(off_AR) * degrees, (num_others - 1) * degrees, ratio)) < SIGNIFICANCE


def mix_degrees(seeds: SpreadTerm, examples: SpreadTerm, choice: SpreadTerm) -> float:
    """Return the degrees of freedom of the sum of three variances; some variances may be 0.

    Satterthwaite's rule applies if seeds have at least `FEW_DEGREES` and there was no choice of rates. Otherwise the
    parts' 95 % quantiles of Student's t, averaged with their variances as weights, give the quantile of the result
    (Cochran and Cox 1950). Satterthwaite's rule would find too many differences if a part with few degrees dominates,
    or if seeds chose rates for each other.
    """
    spread = [(variance, degrees) for variance, degrees in (seeds, examples, choice) if variance > 0]
    total = sum(variance for variance, _ in spread)
    if len(spread) < 2:
        return spread[0][1] if spread else math.nan
    if seeds[1] >= FEW_DEGREES and not choice[0]:
        return total**2 / sum(variance**2 / degrees for variance, degrees in spread)
    quantile = sum(variance * float(special.stdtrit(degrees, TAILS[1])) for variance, degrees in spread) / total
    return float(special.stdtridf(TAILS[1], quantile))


def group_by_seeds(terms: Terms) -> list[Terms] | None:
    """Group the terms by their repetitions; the terms of a group are paired. Return None if samples are unknown."""
    groups: dict[tuple[int, ...], Terms] = {}
    for weight, score in terms:
        if not score.samples:
            return None
        # -1 keeps pretraining seeds apart from fine-tuning seeds with the same values.
        is_repeated = len(set(score.pretraining_seeds)) > 1
        seeds = tuple(score.seeds or range(len(score.samples)))
        key = (-1, *sorted(set(score.pretraining_seeds))) if is_repeated else seeds
        groups.setdefault(key, []).append((weight, score))
    return list(groups.values())


def over_test_sets(groups: list[Terms]) -> tuple[list[tuple[float, int]], float] | None:
    """Return, for each test set, the variance of the sum over its examples and the degrees of freedom; and the part
    that seeds and examples share. Return None unless all scores have the contributions of their examples."""
    tables = {id(score): score.examples and score.examples.read() for group in groups for _, score in group}
    usable = {key: table for key, table in tables.items() if table and table.values_SN.shape[1] > 1}
    if len(usable) < len(tables):
        return None
    variances, shared = [], 0.0
    for fingerprint in dict.fromkeys(table.fingerprint for table in usable.values()):
        means_N: Any = 0.0
        for group in groups:
            # The contribution of each example to the sum, for each repetition.
            sums_RN: Any = 0.0
            for weight, score in group:
                if usable[id(score)].fingerprint == fingerprint:
                    values_RN = repetitions(usable[id(score)].values_SN, score.pretraining_seeds)
                    sums_RN = sums_RN + weight * values_RN
            if np.ndim(sums_RN):
                means_N = means_N + sums_RN.mean(axis=0)
                shared += interaction(sums_RN) / sums_RN.size
        variances.append((variance(means_N) / len(means_N), len(means_N) - 1))
    return variances, shared


SHARED_CHOICE, FEW_RATES = 0.5, 3
"""The share of the variance of a choice that counts where single fine-tuning seeds of several pretrainings choose among
this many rates, or fewer, for each other: the spread over pretrainings contains the rest. With more rates the seeds
share more luck, and the whole variance counts."""


def of_choices(terms: Terms) -> tuple[float, float]:
    """Return the variance of the sum that comes from choosing rates by validation examples and seeds, and its least
    degrees of freedom. Each score counts as if it had its own validation examples.

    Return 0 and nan unless the variance is known for all scores of a single pretraining. If pretraining seeds chose
    their own rates, the spread over them already contains it.
    """
    weights: dict[int, float] = {}
    for weight, score in terms:
        weights[id(score)] = weights.get(id(score), 0.0) + weight
    choices = {id(score): score.choice for _, score in terms if score.num_pretrainings == 1 or score.choice}
    shared = {id(score) for _, score in terms if score.num_pretrainings > 1}
    variances = {}
    for key, choice in choices.items():
        if choice:
            counted = SHARED_CHOICE if key in shared and choice.num_rates <= FEW_RATES else 1.0
            variances[key] = counted * choice.draw_noise().variance
    if len(variances) < len(choices) or any(map(math.isnan, variances.values())):
        return 0.0, math.nan
    degrees = [choice.degrees for choice in choices.values() if choice and choice.num_examples]
    return sum(weights[key] ** 2 * value for key, value in variances.items()), min(degrees, default=math.nan)


def difference(a: Result, b: Result) -> Contrast:
    """Return the contrast of the mean of `a` minus the mean of `b`."""
    return contrast([(1.0, a), (-1.0, b)])


def jackknife(
    statistic: Callable[[np.ndarray], float], num: int, size: float, pretraining_seeds: Sequence[int] = ()
) -> Contrast:
    """Estimate a function of `num` samples, with its standard error by Tukey's jackknife. The jackknife leaves out one
    independent repetition at a time: a sample or, with several pretraining seeds, all samples of one of these seeds.

    Args:
        statistic: the function; its argument has the indices of the samples to use.
        pretraining_seeds: the pretraining seed of each sample, as in `Result`.
    """
    samples_S = np.arange(num)
    several = len(set(pretraining_seeds)) > 1
    seeds_S = np.array(pretraining_seeds) if several else samples_S
    estimate, left_out_R = statistic(samples_S), np.unique(seeds_S)
    num_left_out, num_pretrainings = len(left_out_R), len(left_out_R) if several else 1
    if num_left_out < 2:
        return Contrast(estimate, math.nan, math.nan, size, "jackknife t", num_left_out)
    without_R = np.array([statistic(samples_S[seeds_S != seed]) for seed in left_out_R])
    variance_of_mean = variance(num_left_out * estimate - (num_left_out - 1) * without_R) / num_left_out
    error, degrees = math.sqrt(variance_of_mean), num_left_out - 1
    return Contrast(estimate, error, degrees, size, "jackknife t", num_left_out, num_pretrainings)


def judge_difference(estimate: float, p_value: float) -> Side:
    """Return the side of zero on which an estimate lies by the two-sided test against zero: the rule of every verdict.

    "within noise" never means "equal": look at the interval. "untested": no p-value (one seed, no spread).
    """
    if math.isnan(p_value):
        return "untested"
    if not is_significant(p_value):
        return "within noise"
    return "above" if estimate > 0 else "below"


def say_difference(
    gap: Interval, first: tuple[str, float], second: tuple[str, float], *, is_ahead: bool, where: str = ""
) -> str:
    """Write the verdict on two models as a sentence, the better one first: `A is ahead of B on genre: 71.20 % against
    70.00 %, +1.20 points [+0.40, +2.00]`. `gap` is the first one's score minus the second one's."""
    if gap.value < 0:
        first, second = second, first
        gap = replace(gap, value=-gap.value, low=-gap.high, high=-gap.low)
    (name, score), (rival, rival_score) = first, second
    verb = "is ahead of" if is_ahead else "cannot be distinguished from"
    scores = f"{show_share(score)} % against {show_share(rival_score)} %"
    return f"{name} {verb} {rival}{where and f' {where}'}: {scores}, {show_difference(gap)}"


def tell_carriers(by_task: Mapping[str, Contrast], bound: float = 0.0, is_below: bool = False) -> str:
    """Write which tasks show a difference above (below) a bound when each is tested alone; empty if all do, or with one
    task.

    `When the tasks are tested separately, only a shows the difference: +15.63 points [+9.40, +21.86]. The other, b,
    does not: +1.75 points [−0.55, +4.05].`
    """
    tested = {task: alone.against(bound) for task, alone in by_task.items()}
    shown, others = list[tuple[str, str]](), list[tuple[str, str]]()
    side = "below" if is_below else "above"
    for task, gap in sorted(tested.items(), key=lambda item: -item[1].value if is_below else item[1].value):
        is_shown = judge_difference(gap.value - bound, gap.p_value) == side
        (shown if is_shown else others).append((task, show_difference(gap)))
    if not others or len(tested) == 1:
        return ""
    told = first_of([" ".join(other) for other in others])
    if not shown:
        return f"When tested separately, none of {len(tested)} tasks shows the difference: {told}."
    rest = f"The other, {others[0][0]}, does not: {others[0][1]}" if len(others) == 1 else f"The others do not: {told}"
    if len(shown) == 1:
        only = f"only {shown[0][0]} shows the difference: {shown[0][1]}"
        return f"When the tasks are tested separately, {only}. {rest}."
    return f"When tested separately, {len(shown)} of {len(tested)} tasks show the difference. {rest}."


def with_averages(results: ResultSet) -> ResultSet:
    """Add the average over the datasets of each family, and the mean over all tasks, for arms with all these datasets.
    Keep averages that exist already."""
    groups: dict[tuple[ReportArm, Metric], dict[tuple[str, str], Result]] = {}
    for result in results.results:
        cells = groups.setdefault((result.arm, result.metric), {})
        assert (result.family, result.dataset) not in cells, "a cell is there twice"
        cells[result.family, result.dataset] = result
    averages: list[Result] = []
    datasets = {metric: results.select(metric=metric).datasets for metric in results.metrics}
    for (_, metric), cells in groups.items():
        behind = {(family, AVERAGE): [(family, name) for name in names] for family, names in datasets[metric].items()}
        behind["", ALL_TASKS] = [*itertools.chain(*behind.values())]
        for (family, dataset), columns in behind.items():
            if columns and (family, dataset) not in cells and cells.keys() >= set(columns):
                averages.append(average([cells[column] for column in columns], family, dataset))
    return replace(results, results=(*results.results, *averages))


def average(cells: Sequence[Result], family: str = "", dataset: str = ALL_TASKS) -> Result:
    """Average an arm's results on several datasets.

    With the same seeds on all datasets, the average has a sample for each seed. With different seeds it has no samples,
    only an interval (`seed_interval`). Published means count as independent.
    """
    first = cells[0]
    mean_result = Result(first.arm, family, dataset, first.metric, cells=tuple(cells) if first.samples else ())
    repeated = {(len(cell.samples), tuple(cell.seeds), tuple(cell.pretraining_seeds)) for cell in cells}
    # 1. The same seeds on all datasets.
    if first.samples and len(repeated) == 1:
        samples = np.mean([cell.samples for cell in cells], axis=0).tolist()
        return replace(mean_result, samples=samples, seeds=first.seeds, pretraining_seeds=first.pretraining_seeds)
    # 2. Different seeds.
    num = min(cell.num for cell in cells)
    if all(cell.samples for cell in cells):
        return replace(mean_result, summary=replace(seed_interval((1 / len(cells), cell) for cell in cells), num=num))
    # 3. Published means and half-widths.
    mean = float(np.mean([cell.mean for cell in cells]))
    half_width = NORMAL_QUANTILE * math.sqrt(sum(cell.std**2 / cell.num for cell in cells)) / len(cells)
    return replace(mean_result, summary=Interval(mean, mean - half_width, mean + half_width, num=num), cells=())


POWER = 0.8
"""The probability of a decision from which a number of seeds or examples counts as enough."""

MOST_SEEDS, MOST_EXAMPLES = 1_000, 1_000_000


def measure_signal(scores: Iterable[Result], over: Over = "seeds") -> tuple[float, str]:
    """Measure how clearly a task separates several models.

    Return the standard deviation of their means divided by the standard error of one mean: about 1 if all models are
    equally good; nan with fewer than two models, or with unknown noise. The standard error is that of a difference
    divided by √2, averaged over neighbours in rank. Return also what would separate the best model from the worst;
    empty if an F test of the squared ratio already finds that models differ.
    """
    ranked = sorted(scores, key=lambda score: score.mean)
    neighbours = [difference(upper, lower) for lower, upper in itertools.pairwise(ranked)]
    errors = [gap.error for gap in neighbours]
    if np.isnan(errors).any() or not any(errors):
        return math.nan, ""
    spread, noise = np.std([score.mean for score in ranked], ddof=1), math.sqrt(float(np.mean(np.square(errors))) / 2)
    ratio = float(spread) / noise
    # k models with n seeds each have k (n - 1) degrees of freedom. Their k - 1 differences between neighbours have
    # 2 (n - 1) each, so the sum over these is scaled by k / (2 (k - 1)).
    num = len(ranked)
    # Neighbours whose difference is the same for all seeds show no noise and have no degrees of freedom.
    degrees = float(np.nansum([gap.degrees for gap in neighbours])) * num / (2 * (num - 1))
    decides = is_significant(float(special.fdtrc(num - 1, degrees, ratio**2)))
    level = SIGNIFICANCE / (num * (num - 1) // 2)
    return ratio, "" if decides else what_decides(difference(ranked[-1], ranked[0]), 0.0, level, over)


def what_decides(pair: Contrast, bound: float, level: float, over: Over = "seeds") -> str:
    """Write how many seeds (or tasks, `over`), test examples or both would put a contrast on one side of a bound at
    this level if the estimate and the spreads stayed as measured."""
    if math.isnan(pair.against(bound).p_value) or not pair.error > 0:
        return f"two {over} or more with different scores" if pair.num > 1 else f"two {over} or more"
    seeds = "pretraining seeds" if pair.num_pretrainings > 1 else over
    stay = "if the true difference and the spread are those seen here"
    more_seeds = range(pair.num + 1, MOST_SEEDS + 1)
    index = bisect.bisect_left(more_seeds, True, key=lambda num: is_enough(pair, bound, level, num / pair.num, 1))
    if index < len(more_seeds):
        return f"about {more_seeds[index]} {seeds} instead of {pair.num}, {stay}"
    if pair.num_examples:
        # In steps of 5 %: first more examples alone, then more examples and seeds.
        factors = [1.05**step for step in range(1, 1 + int(math.log(MOST_EXAMPLES / pair.num_examples, 1.05)))]
        for power in (0, 1):
            enough = [factor for factor in factors if is_enough(pair, bound, level, factor**power, factor)]
            if enough:
                about = float(f"{enough[0] * pair.num_examples:.2g}")
                with_seeds = f"{math.ceil(pair.num * enough[0])} {seeds} instead of {pair.num} and " if power else ""
                return f"about {with_seeds}{about:,.0f} test examples instead of {pair.num_examples:,}, {stay}"
    if is_enough(replace(pair, choice_variance=0.0), bound, level, MOST_SEEDS / pair.num, MOST_EXAMPLES):
        return "more validation examples, or fewer rates to choose from: with other examples, other rates might be best"
    estimate, border = (show_points(value, pair.unit) for value in (pair.estimate, bound))
    ends = f"({estimate} {pair.unit}) is too close to the bound ({border})"
    return f"even {MOST_SEEDS:,} {seeds} would not decide it: with this spread, the estimate {ends}"


def is_enough(pair: Contrast, bound: float, level: float, times_seeds: float, times_examples: float) -> bool:
    """Tell whether these multiples of seeds and test examples would decide the contrast with probability `POWER`."""
    return find_power(pair, bound, level, times_seeds, times_examples) >= POWER


def find_power(
    pair: Contrast, bound: float, level: float, times_seeds: float = 1.0, times_examples: float = 1.0
) -> float:
    """Return the probability that these multiples of seeds and test examples would decide the contrast at this level if
    its estimate is the true difference."""
    of_examples = pair.example_variance / times_examples
    of_choice = pair.choice_variance  # neither more seeds nor more test examples change it
    of_seeds = max(pair.error**2 - pair.example_variance - of_choice, 0.0) / times_seeds
    num = pair.num * times_seeds
    if pair.num_examples or of_choice:
        over_examples = of_examples, pair.num_examples * times_examples - 1
        known = max(num - 1, pair.num - 1 + pair.lent)
        degrees = mix_degrees((of_seeds, known), over_examples, (of_choice, pair.choice_degrees))
    else:
        degrees = pair.degrees * max((num - 1) / (pair.num - 1 + pair.lent), 1.0)
    error = math.sqrt(of_seeds + of_examples + of_choice)
    shift = min(abs(pair.estimate - bound) / error, 100.0)  # of the noncentral t-distribution
    missed = special.nctdtr(degrees, shift, special.stdtrit(degrees, 1 - level / 2))
    return 1.0 - float(np.nan_to_num(missed))  # SciPy gives nan for some shifts beyond 35, far above the quantile
