"""A table to which a loop of experiments adds a row for each run → keep a candidate, drop it, or run one more seed.

The table is the only state: its order of rows says how many ideas came before, and what was known at each look. So a
verdict of *keep* stays whatever is added below. Scores are in the table's own unit.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, Literal, NamedTuple

from scipy import special

from biphase.errors import InputError, refuse_unknown
from biphase.report.foreign import BudgetKey, ForeignScore, Scale, parse_rows, refuse_unlike_scales, tell_budget
from biphase.report.formats import show_count
from biphase.report.statistics import ROUNDING, SIGNIFICANCE, list_levels

CandidateVerdict = Literal["keep", "drop", "one more seed"]
"""The verdict on a candidate of a loop."""
EXIT_CODES: dict[CandidateVerdict, int] = {"keep": 0, "drop": 3, "one more seed": 4}
FUTILE = 0.05
"""A candidate is dropped early if the probability that its last seed would still have it kept is below this."""
MOST_SEEDS = 30


@dataclass(frozen=True)
class Ruling:
    """The verdict on a candidate, with the figures that led to it."""

    verdict: CandidateVerdict
    baseline: str
    candidate: str
    gain: float
    """The candidate's mean minus the baseline's; for losses the reverse. So more than 0 is better."""
    standard_error: float
    """The standard error of the gain: the spread times √(1 / seeds + 1 / baseline seeds)."""
    spread: float
    """The standard deviation over seeds: given, or that of all methods in the table so far."""
    degrees: float
    """The degrees of freedom of the spread; infinite if it is given."""
    num_seeds: int
    """The candidate's seeds at the look that decided."""
    num_baseline_seeds: int
    p_value: float
    """The p-value of the one-sided test of the hypothesis that the candidate is no better than the baseline."""
    level: float
    """The candidate is kept if the p-value is at most this."""
    idea: int
    """The place of the candidate among the methods that begin after the baseline, from 1."""
    chance: float
    """The probability that the candidate's last seed will have it kept, by its seeds so far; 1 if it is kept now."""

    def __str__(self) -> str:
        digits = max(1 - math.floor(math.log10(self.standard_error)), 0)
        seeds = f"{show_count(self.num_seeds, 'seed')} against {self.num_baseline_seeds}"
        noise = f"standard error {self.standard_error:.{digits}f}, {seeds}"
        # Both get more digits until they differ, so that the side of the level is seen.
        forms = ((f"{self.p_value:.{num}g}", f"{self.level:.{num}g}") for num in range(2, 18))
        p_value, level = next(form for form in forms if form[0] != form[1] or self.p_value == self.level)
        more = f"; more seeds would keep it with a chance of {self.chance:.0%}" * (self.verdict == "one more seed")
        return (
            f"{self.verdict}: the gain of {self.candidate} over {self.baseline} is {self.gain:+.{digits}f} ({noise}); "
            f"p = {p_value}, and idea {self.idea} needs at most {level}{more}"
        )

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


class SeedScore(NamedTuple):
    """A method's score with one seed at one budget: the mean over all tasks of the table."""

    method: str
    value: float
    compute: BudgetKey = ()


def average_tasks(scores: Sequence[ForeignScore]) -> list[SeedScore]:
    """Average each seed's scores at a budget over tasks; sort by the last row of each seed. Raises `InputError` if a
    seed lacks a task. The scores of several fine-tuning seeds of one pretraining count as one."""
    tasks = list(dict.fromkeys(score.task for score in scores))
    seeds = dict[tuple[str, BudgetKey, Any], dict[str, list[float]]]()
    for score in scores:
        key = score.method, score.compute, score.seeds[1] if score.seeds[0] is None else score.seeds[0]
        seeds[key] = seeds.pop(key, {})  # at the end again
        seeds[key].setdefault(score.task, []).append(score.value)
    for (method, compute, seed), by_task in seeds.items():
        if lacking := [task for task in tasks if task not in by_task]:
            told = "its only run" if seed is None else f"seed {seed}"
            told = " at ".join(filter(None, (told, tell_budget(compute))))
            raise InputError(f"{method} has no score on {lacking[0]} with {told}: add it, or drop these rows")
    means = ((key, fmean(map(fmean, by_task.values()))) for key, by_task in seeds.items())
    return [SeedScore(method, mean, compute) for (method, compute, _), mean in means]


def pool_spread(groups: Collection[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation over seeds around the mean of each group, a method at one budget, taken as equal
    for all groups, and its degrees of freedom. It is nan if no group has two different scores."""
    degrees, squares = 0, 0.0
    for values in groups:
        mean = fmean(values)
        degrees += len(values) - 1
        squares += sum((value - mean) ** 2 for value in values)
    size = max(abs(value) for values in groups for value in values)
    spread = math.sqrt(squares / max(degrees, 1))
    return (spread if spread > ROUNDING * size else math.nan), degrees


def idea_level(idea: int) -> float:
    """Return the level at which an idea is tested, if `idea` is its number since the last discovery, from 1.

    This is LORD (levels based on recent discovery; Javanmard and Montanari 2015, arXiv 1502.06197, and 2018, Annals of
    Statistics 46, 526-554) with the weights 1 / √t - 1 / √(t + 1), whose sum over all t is 1. A discovery is a kept
    candidate: it becomes the next baseline, and the count begins anew. The levels of all ideas that are tested against
    one baseline add up to at most `SIGNIFICANCE`. So if none of them is better, the probability that any is kept is at
    most 5 %, even though their tests depend on each other through the baseline's seeds. Over a night, the expected
    number of candidates that are wrongly kept is at most 5 % of one more than the expected number of those kept.
    """
    return SIGNIFICANCE * (1 / math.sqrt(idea) - 1 / math.sqrt(idea + 1))


@cache
def look_levels(up_to: int, idea: int) -> list[float]:
    """Return the levels of the one-sided tests after each of at most `up_to` seeds of a candidate: half of those of the
    two-sided tests with twice the error. After a quarter of the seeds, the looks have spent a sixteenth of it.

    The levels are those of a baseline whose mean is known. If it has few seeds itself, all looks share its noise, which
    makes them more alike and lowers the probability that any of them errs (Slepian 1962).
    """
    return [level / 2 for level in list_levels(range(1, up_to + 1), up_to, 2 * idea_level(idea), power=2)]


def list_looks(
    seeds: Sequence[SeedScore], baseline: str, candidate: str, idea: int, up_to: int, spread: float | None = None
) -> Iterator[Ruling]:
    """Yield the ruling after each of the candidate's seeds, up to the last one allowed, by what stands above it. While
    the spread is unknown, or the baseline has no seed, there is no look. Baseline and candidate have one budget."""
    budgets = {seed.method: seed.compute for seed in seeds}
    groups = defaultdict[tuple[str, BudgetKey], list[float]](list)
    for method, value, compute in seeds:
        groups[method, compute].append(value)
        of_baseline, of_candidate = (groups.get((name, budgets[name]), []) for name in (baseline, candidate))
        if method != candidate or not of_baseline or len(of_candidate) > up_to:
            continue
        known, degrees = pool_spread(groups.values()) if spread is None else (spread, math.inf)
        if math.isnan(known):
            continue
        num, num_baseline = len(of_candidate), len(of_baseline)
        error = known * math.sqrt(1 / num + 1 / num_baseline)
        gain = fmean(of_candidate) - fmean(of_baseline)
        p_value, level = float(special.stdtr(degrees, -gain / error)), look_levels(up_to, idea)[num - 1]
        chance = float(p_value <= level)
        if num < up_to and not chance:
            # The predictive probability (Spiegelhalter, Freedman and Blackburn 1986) that the mean over all seeds will
            # pass. It assumes nothing about the gain beforehand.
            quantile = -special.stdtrit(degrees + up_to - num, look_levels(up_to, idea)[-1])
            missing = quantile * known * math.sqrt(1 / up_to + 1 / num_baseline) - gain
            chance = float(special.stdtr(degrees, -missing / (known * math.sqrt(1 / num - 1 / up_to))))
        verdict: CandidateVerdict = "drop" if chance < FUTILE else "one more seed" if p_value > level else "keep"
        facts = (gain, error, known, degrees, num, num_baseline, p_value, level, idea, chance)
        yield Ruling(verdict, baseline, candidate, *facts)


def judge_candidate(
    table: Any,
    baseline: str,
    candidate: str,
    spread: float | None,
    up_to: int,
    lower_is_better: bool,
    scale: Scale | None,
    rename: Mapping[str, str],
) -> Ruling:
    """Judge a candidate, with the arguments of `biphase.judge`: by the first look that keeps it, or else by the last
    look."""
    if not 1 <= up_to <= MOST_SEEDS:
        raise InputError(f"`up_to` is {up_to}: give a number of seeds from 1 to {MOST_SEEDS}")
    if spread is not None and not 0 < spread < math.inf:
        raise InputError(f"`spread` is {spread:g}: give a standard deviation above 0, or leave it out")
    scores, _ = parse_rows(table, rename)
    methods = list(dict.fromkeys(score.method for score in scores))
    for role, name in (("baseline", baseline), ("candidate", candidate)):
        refuse_unknown(role, name, methods)
        if len({score.compute for score in scores if score.method == name}) > 1:
            raise InputError(f"{name} has scores at several budgets: keep the rows of one")
    idea = methods.index(candidate) - methods.index(baseline)
    if idea < 1:
        remedy = "add each run at the end, and give a candidate that is tried again a new name"
        raise InputError(f"{candidate} does not begin below the baseline {baseline} in the table: {remedy}")
    if lower_is_better:
        scores = [score._replace(value=-score.value) for score in scores]
    elif scale is None:
        refuse_unlike_scales([score for score in scores if score.method in (baseline, candidate)])
    rulings = list(list_looks(average_tasks(scores), baseline, candidate, idea, up_to, spread))
    if not rulings:
        remedy = f"add seeds of {baseline} above {candidate}, or give `spread`"
        raise InputError(f"no method has two seeds with different scores, so their spread is unknown: {remedy}")
    return next((ruling for ruling in rulings if ruling.verdict == "keep"), rulings[-1])
