"""An inequality over names → the same over arms that a study has, wherever it is to hold; with results, a claim.

Some terms are functions of several scores along an axis:

    mean    of the arms
    trend   the change from the lowest to the highest value of the axis, along the straight line of least squares
    spread  the standard deviation: of an arm's scores over fine-tuning rates and seeds (`rate`; the rates are those of
            `stability_rates`, without those at which training diverged), or of the means over seeds of several arms,
            as the mean over datasets

Functions that stand in one line take the values of the axis that all of them have. Intervals of a spread leave out one
seed at a time (`contrasts.jackknife`). Letters: A operands, V values of the axis, S seeds.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from biphase.errors import InputError, clipped, nearest
from biphase.report.claims import Claim, Inequality, make_inequality, strongest
from biphase.report.contrasts import Contrast, contrast, jackknife
from biphase.report.equivalents import contrast_at_share, refuse_gaps
from biphase.report.formats import show_count, show_list
from biphase.report.grammar import MEAN_OF_FAMILIES, QUANTIFIERS, RATE, Operand, ParsedInequality
from biphase.report.results import (
    FAMILY_CODES,
    FAMILY_NAMES,
    ReportArm,
    Result,
    ResultSet,
    num_parameters,
    stability_rates,
)


class Spot(NamedTuple):
    """A model and a budget at which an inequality is to hold; neither is named where it is asked about once."""

    model: str = ""
    budget: int = 0

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.model, f"{self.budget:,} steps" if self.budget else ""]))


Ladder = Mapping[Spot, Mapping[str, str]]
"""What a name in an inequality stands for: the arm at every model and budget that it is there for; of a group all of
them, each under what it is called at every place."""


@dataclass(frozen=True)
class AskedTerm:
    """An operand with its arm at a spot, or all arms that its function is over."""

    operand: Operand
    arms: tuple[str, ...]
    kind: str = ""
    """What the arm is called in its group."""
    task: str = ""
    """A task, a family, or the average over families."""


@dataclass(frozen=True)
class AskedInequality:
    """An inequality at one place, over arms that the study has."""

    line: ParsedInequality
    label: str
    terms: tuple[AskedTerm, ...]
    ladder: tuple[str, ...] = ()
    """For a compute equivalent: the arms of the baseline, smallest budget first."""
    rivals: tuple["AskedInequality", ...] = ()
    """Where one of several is enough: the others."""


def line_up(arms: Sequence[ReportArm], axis: str) -> dict[float, ReportArm]:
    """Arms by their values on an axis; none without an axis. Raises `InputError` where one has no value, or that of
    another."""
    by_value: dict[float, ReportArm] = {}
    for arm in arms if axis else ():
        places = {"budget": arm.budget, "mask": arm.mask_percent}
        value = places.get(axis, arm.clm_share)
        if value is None or value in by_value:
            raise InputError(f"'{arm.name}' has no place of its own on the axis '{axis}'")
        by_value[value] = arm
    return by_value


def weigh_arms(terms: Sequence[AskedTerm], arms: Mapping[str, ReportArm]) -> list[tuple[float, ReportArm, str]]:
    """The terms as a weighted sum of arms, each with the task it is asked about. Raises `InputError` where an axis has
    too few values for a function over it."""
    lines = [line_up([arms[name] for name in term.arms], term.operand.axis) for term in terms]
    weighed = []
    for term, line in zip(terms, lines, strict=True):
        operand = term.operand
        if not operand.axis:
            weighed.append((operand.weight, arms[term.arms[0]], term.task))
            continue
        shared = set(line)
        for other, other_line in zip(terms, lines, strict=True):
            if other.operand.axis == operand.axis:
                shared &= set(other_line)
        values = np.array(sorted(shared), dtype=float)
        if len(values) < (2 if operand.function == "trend" else 1):
            raise InputError(f"too few arms over {operand.axis}")
        weights = np.full(len(values), 1 / len(values))
        if operand.function == "trend":
            # Least squares gives the line's slope as a weighted sum of scores; times the range of values it is the
            # change along the line. Values 20, 30, 50: weights −0.86, −0.21, 1.07 (they add up to nothing).
            centred = values - values.mean()
            weights = centred / (centred**2).sum() * np.ptp(values)
        for weight, value in zip(weights.tolist(), values.tolist(), strict=True):
            weighed.append((operand.weight * weight, line[value], term.task))
    return weighed


def contrast_spreads(
    terms: Sequence[AskedTerm], arms: Mapping[str, ReportArm], results: ResultSet
) -> tuple[Contrast, list[float]]:
    """The weighted sum of spreads, mean over datasets, and the values of the axis that they are over. Raises
    `InputError` where not every seed has a score at two values or more."""
    axis, weights_A = terms[0].operand.axis, np.array([term.operand.weight for term in terms])
    tables, used, repeated = [], set[float](), set[tuple[int, ...]]()
    for dataset in list_datasets(terms[0].task, results):
        lines = [read_line(axis, [arms[name] for name in term.arms], dataset, results) for term in terms]
        values = [value for value in sorted(lines[0]) if all(value in line for line in lines)]
        if axis == RATE:
            values = stability_rates(values)
        samples = [[line[value][0] for value in values] for line in lines]
        if len({len(seeds) for row in samples for seeds in row}) != 1:
            continue
        scores_AVS = np.array(samples)
        is_whole_V = ~np.isnan(scores_AVS).any(axis=(0, 2))
        if scores_AVS.shape[2] and is_whole_V.sum() > 1:
            tables.append(scores_AVS[:, is_whole_V])
            used |= set(np.array(values)[is_whole_V].tolist())
            repeated |= {line[value][1] for line in lines for value in values}
    numbers = {scores_AVS.shape[2] for scores_AVS in tables}
    if len(numbers) != 1 or len(repeated) != 1 or len(next(iter(repeated))) not in (0, *numbers):
        raise InputError(f"no scores of each seed at two values of {axis} or more")
    (num,), (seeds_S,) = numbers, repeated

    def statistic(seeds: np.ndarray) -> float:
        spreads = []
        for scores_AVS in tables:
            chosen_AVS = scores_AVS[:, :, seeds]
            spread_A = chosen_AVS.mean(axis=2).std(axis=1, ddof=1)
            if axis == RATE:
                spread_A = chosen_AVS.std(axis=(1, 2), ddof=1)
            spreads.append(weights_A @ spread_A)
        return float(np.mean(spreads))

    largest = float(max(np.abs(scores_AVS).max() for scores_AVS in tables))
    return jackknife(statistic, num, largest, seeds_S), sorted(used)


def read_line(
    axis: str, arms: Sequence[ReportArm], dataset: str, results: ResultSet
) -> dict[float, tuple[Sequence[float], tuple[int, ...]]]:
    """The scores of all seeds on a dataset at every value of an axis, and their pretraining seeds; () where all are of
    one pretraining."""
    if axis == RATE:
        score = results.scores_of(arms[0]).get(dataset)
        by_value = {} if score is None or score.by_rate is None else {r: (s, score) for r, s in score.by_rate.items()}
    else:
        scores = {value: results.scores_of(arm).get(dataset) for value, arm in line_up(arms, axis).items()}
        by_value = {value: (score.samples, score) for value, score in scores.items() if score is not None}
    return {
        value: (samples, score.pretraining_seeds if score.num_pretrainings > 1 else ())
        for value, (samples, score) in by_value.items()
    }


QUANTIFIED = re.compile(r"\b(?:every|some)\s+(?:'[^']*'|\"[^\"]*\"|[^\s()'\"]+)")


def bind(line: ParsedInequality, ladders: Mapping[str, Ladder], tasks: Mapping[str, str]) -> list[AskedInequality]:
    """The inequality at every place that it names.

    Args:
        ladders: what each known name stands for.
        tasks: the tasks of the study → the code of their family, such as TC.

    Raises `InputError` for a name of an arm, a model or a task that is not known, with those that are, and where the
    names are nowhere there together.
    """
    try:
        asked = place_inequality(line, ladders, tasks)
    except InputError as error:
        raise InputError(f"'{clipped(line.text)}': {error}") from None
    return [replace(first, rivals=tuple(rest)) for first, *rest in asked]


def place_inequality(
    line: ParsedInequality, ladders: Mapping[str, Ladder], tasks: Mapping[str, str]
) -> list[list[AskedInequality]]:
    """The inequality at every place; of each list one is enough."""
    check_names(line, ladders)
    spots = list(find_spots(line, ladders))
    if not spots:
        names = " and ".join(dict.fromkeys(f"'{operand.name}'" for operand in line.operands))
        known = []
        for name in dict.fromkeys(operand.name for operand in line.placed):
            known.append(f"{name} for {'; '.join(map(str, sorted(ladders[name])))}")
        told = f"{names} share no model and budget there; known: {', '.join(known)}"
        raise InputError(told + whole_names(line, ladders))
    asked: dict[tuple[object, ...], list[AskedInequality]] = {}
    for task in expand_tasks(line.place.tasks or (MEAN_OF_FAMILIES,), tasks):
        for spot, choices in spots:
            for chosen in itertools.product(*choices):
                terms, weights = [], defaultdict[object, float](float)
                for term in chosen:
                    (own,) = expand_tasks(term.operand.place.tasks or (task,), tasks)
                    terms.append(replace(term, task=own))
                    weights[term.operand.function, term.operand.axis, term.arms, own] += term.operand.weight
                if not any(weights.values()):  # it compares an arm with itself
                    continue
                label = label_choice(line, terms, task, spot)
                one = AskedInequality(line, label, tuple(terms), baseline_ladder(line, ladders, spot))
                # Of those that differ in no `every` and in no named place, one is enough.
                at = zip(line.place.quantifiers, (task, spot.budget, spot.model), strict=True)
                kinds = [term.kind for term in terms if term.operand.quantifier == "every"]
                key = (*(value for word, value in at if word != "some"), *kinds)
                asked.setdefault(key, []).append(one)
    if not asked:
        told = "a second model or budget is needed, for here all names are one arm"
        raise InputError(told + whole_names(line, ladders))
    return list(asked.values())


def whole_names(line: ParsedInequality, ladders: Mapping[str, Ladder]) -> str:
    """How arms are named that differ in model or budget, which an inequality over shorter names never compares."""
    arms = {arm for operand in line.operands for named in ladders[operand.name].values() for arm in named.values()}
    return f"; other models or budgets have whole names, such as {show_list(sorted(arms)[-2:])}"


def check_names(line: ParsedInequality, ladders: Mapping[str, Ladder]) -> None:
    """Raises `InputError` for a name that stands for no arm, or for several where one is wanted."""
    for operand in line.operands:
        if operand.name not in ladders:
            hint = nearest(operand.name, ladders)
            told = hint if hint.startswith("; known") else f"{hint} known: {', '.join(sorted(ladders))}"
            raise InputError(f"unknown arm '{operand.name}'{told}")
        if not ladders[operand.name]:
            raise InputError(f"no arm is '{operand.name}'")
        is_group = any(len(arms) > 1 for arms in ladders[operand.name].values())
        if is_group and (operand.axis == RATE or not (operand.quantifier or operand.function)):
            raise InputError(
                f"'{operand.name}' is that of several arms of one model and budget; name one, or say "
                "every, some, or which function of them over an axis"
            )


def label_choice(line: ParsedInequality, terms: Sequence[AskedTerm], task: str, spot: Spot) -> str:
    """The left side with the names of the arms that stand for `every` and `some`, and the place."""
    kinds = iter([term.kind for term in terms if term.operand.quantifier])
    left_side = re.split(r"[<>]", line.text, maxsplit=1)[0].strip()
    named = QUANTIFIED.sub(lambda match: next(kinds, match[0]), left_side)
    is_open = any(operand.place.tasks is None for operand in line.placed)
    return " ".join(filter(None, [named, f"on {task}" if is_open else "", str(spot)]))


def expand_tasks(wanted: Sequence[str], tasks: Mapping[str, str]) -> list[str]:
    """Names of tasks, codes of families, or `average`."""
    by_words = {**{code: code for code in FAMILY_NAMES}, **FAMILY_CODES}
    there = list(dict.fromkeys(tasks.values()))
    expanded: list[str] = []
    for name in wanted:
        if name in ("every family", "some family"):
            expanded += there
        elif name in ("every task", "some task"):
            expanded += tasks
        elif name == MEAN_OF_FAMILIES or name in tasks:
            expanded.append(name)
        elif by_words.get(name) in there:
            expanded.append(by_words[name])
        else:
            known = [*tasks, *there, *(word for word, code in by_words.items() if code in there)]
            known = list(dict.fromkeys([MEAN_OF_FAMILIES, "every family", "every task", *known]))
            raise InputError(f"unknown task or family '{name}'; known: {', '.join(known)}")
    return list(dict.fromkeys(expanded))


def find_spots(line: ParsedInequality, ladders: Mapping[str, Ladder]) -> Iterator[tuple[Spot, list[list[AskedTerm]]]]:
    """Where the inequality is to hold, and the choices of each operand there: models and budgets at which every operand
    is there, or once, where each operand is a single arm or has places of its own."""
    known = [spot for operand in line.placed for spot in ladders[operand.name]]
    models = sorted(dict.fromkeys(model for model, _ in known), key=num_parameters)
    if line.place.model not in (None, *QUANTIFIERS, "largest", "smallest", *models):
        raise InputError(f"unknown model '{line.place.model}'; known: {', '.join(models)}")
    varied = [operand for operand in line.placed if not is_one_arm(operand, ladders[operand.name])]
    is_at_budgets = any(operand.axis != "budget" and operand.place.budget is None for operand in varied)
    is_for_models = any(operand.place.model is None for operand in varied)
    candidates = [Spot()]
    if is_at_budgets or is_for_models:
        budgets = sorted({budget for _, budget in known}) if is_at_budgets else [0]
        candidates = [Spot(model, budget) for model, budget in itertools.product(models, budgets)]
    # What `the largest` on a term is chosen among.
    shared = set(known).intersection(*(ladders[operand.name] for operand in varied)) or set(known)
    # Where all operands are the same arms as at an earlier place, nothing new is asked.
    there: dict[Spot, list[list[AskedTerm]]] = {}
    for spot in candidates:
        choices = [find_arms(operand, ladders[operand.name], spot, shared) for operand in line.placed]
        if all(choices) and choices not in there.values():
            there[spot] = choices
    whole = [model for model in models if any(model == own for own, _ in there)]
    for spot, choices in there.items():
        budgets = sorted(budget for model, budget in there if model == spot.model)
        is_model = line.place.model in (None, *QUANTIFIERS) or choose_among(line.place.model, whole) == spot.model
        is_budget = line.place.budget in (None, *QUANTIFIERS) or choose_among(line.place.budget, budgets) == spot.budget
        if is_model and is_budget:
            yield spot, choices


def choose_among(wanted: Any, known: Sequence[Any]) -> Any:
    """`largest` or `smallest` of what is known, in its order; what is named otherwise is itself."""
    if wanted not in ("largest", "smallest"):
        return wanted
    return (known[-1] if wanted == "largest" else known[0]) if known else None


def is_one_arm(operand: Operand, ladder: Ladder) -> bool:
    """Whether a name is that of an arm, which is the same wherever it is asked about."""
    return len(ladder) == 1 and operand.name in next(iter(ladder.values())).values()


def find_arms(operand: Operand, ladder: Ladder, spot: Spot, shared: Set[Spot]) -> list[AskedTerm]:
    """What an operand may be at a place: its arm, each of its group, or all that its function is over; empty where
    it is not there."""
    (model, budget), place = spot, operand.place
    if is_one_arm(operand, ladder):
        (arms,) = ladder.values()
    else:
        if place.model is not None:
            model = choose_among(place.model, sorted({own for own, _ in shared}, key=num_parameters))
        if place.budget is not None and (own := sorted(b for m, b in shared if m == model)):
            budget = choose_among(place.budget, own)
        arms = ladder.get(Spot(model, budget), {})
        if operand.axis == "budget":
            of_model = [some.values() for (own, _), some in sorted(ladder.items()) if own == model]
            arms = {arm: arm for some in of_model for arm in some}
    if operand.function:
        return [AskedTerm(operand, tuple(arms.values()))] if arms else []
    return [AskedTerm(operand, (arm,), kind) for kind, arm in arms.items()]


def baseline_ladder(line: ParsedInequality, ladders: Mapping[str, Ladder], spot: Spot) -> tuple[str, ...]:
    """The arms of the baseline of a compute equivalent for the model at hand, smallest budget first."""
    if not line.is_equivalent:
        return ()
    ladder = ladders[line.operands[1].name]
    own = {budget: arms for (model, budget), arms in ladder.items() if model == spot[0] or not spot[0]}
    rungs = [(budget, arm) for budget in sorted(own) for arm in own[budget].values()]
    if len(rungs) < 2:
        raise InputError(f"'{line.operands[1].name}' has one budget; a baseline's ladder has two or more")
    refuse_gaps(rungs)
    return tuple(arm for _, arm in rungs)


@dataclass(frozen=True)
class AskedScores:
    """The scores that a study asks for. A verdict waits for those that it rests on."""

    families: Mapping[str, str] = field(default_factory=dict)
    """The tasks → the code of their family. An average over fewer of them is none."""
    num_runs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(arm, task) → how many fine-tunings there are to be, over all rates and seeds."""


NOTHING_ASKED = AskedScores()
"""What is there is all there is."""


def make_line(asked: Sequence[AskedInequality], results: ResultSet, planned: AskedScores = NOTHING_ASKED) -> Claim:
    """A line at all its places as a claim: that a sum lies below a bound says that the contrary sum lies above its
    contrary; that a compute equivalent, in FLOPs, is below 0.6, that the arm is above the baseline's line at 1 / 0.6 of
    the arm's compute."""
    line, arms = asked[0].line, {arm.name: arm for arm in results.arms()}
    bound = 0.0 if line.is_equivalent or not line.bound else line.sign * line.bound
    inequalities, untested = [], []
    for one in asked:
        seen, lacks = [], []
        for way in (one, *one.rivals):
            try:
                seen.append(measure(way, results, arms, planned, bound))
            except InputError as error:
                lacks.append(f"{way.label} ({error})")
        if not seen:
            untested.append(lacks[0])
        else:
            best = strongest(seen) if line.has_some else seen[0]
            # That none holds is not known of those without scores.
            lacks_below = (*best.lacks_below, *(f"not tested: {lack}" for lack in lacks))
            inequalities.append(replace(best, lacks_below=lacks_below))
    return Claim(line.text, tuple(inequalities), tuple(untested))


def measure(
    asked: AskedInequality, results: ResultSet, arms: Mapping[str, ReportArm], planned: AskedScores, bound: float
) -> Inequality:
    """What is to lie above the bound, tested. Raises `InputError` with what is lacking where it is not known."""
    refuse_lacking(asked, results, arms, planned)
    line, first = asked.line, asked.terms[0]
    label = asked.label if line.sign > 0 else f"−({asked.label})"
    seen: Contrast | None = None
    if line.is_equivalent:
        arm, ladder, share = arms[first.arms[0]], [arms[name] for name in asked.ladder], line.bound
        wanted = None if first.task == MEAN_OF_FAMILIES else list_datasets(first.task, results)
        seen = contrast_at_share(results, arm, ladder, share, datasets=wanted)
        seen = replace(seen, estimate=-line.sign * seen.estimate)
        which = ("the arm’s", "the baseline’s")[:: -int(line.sign)]
        label = f"{asked.label}: {' score minus '.join(which)}, the baseline with {1 / share:.2g} times the arm’s FLOPs"
        sides = [(-line.sign, arm, first.task), *((line.sign, rung, first.task) for rung in ladder)]
    elif first.operand.function == "spread":
        seen, values = contrast_spreads(asked.terms, arms, results)
        seen = replace(seen, estimate=line.sign * seen.estimate)
        label = f"{label} ({first.operand.axis} {', '.join(f'{value:g}' for value in values)})"
        # A spread is over what did not diverge, by its definition: that counts on neither side.
        sides = [(0.0, arms[name], term.task) for term in asked.terms for name in term.arms]
    else:
        sides = [(line.sign * weight, arm, task) for weight, arm, task in weigh_arms(asked.terms, arms)]
    weighted: list[tuple[float, Result]] = []
    for weight, arm, task in sides:
        scores = find_scores(arm, task, results)
        weighted += [(weight / len(scores), score) for score in scores]
    return make_inequality(label, seen or contrast(weighted), bound, *find_lacks(weighted, planned))


def refuse_lacking(
    asked: AskedInequality, results: ResultSet, arms: Mapping[str, ReportArm], planned: AskedScores
) -> None:
    """Raises `InputError` where an arm lacks a score that is planned on what is asked about."""
    for term in asked.terms:
        for name in (*term.arms, *asked.ladder):
            if name not in arms:
                raise InputError("no scores")
            known = results.scores_of(arms[name])
            due = [one for one, family in planned.families.items() if term.task in (one, family, MEAN_OF_FAMILIES)]
            if lost := [one for one in due if one not in known]:
                raise InputError(f"no scores of {name} on {', '.join(lost)}")


def find_lacks(terms: Sequence[tuple[float, Result]], planned: AskedScores) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a weighted sum of scores lacks to be called above a bound, and what to be called below it: on both sides
    fine-tunings that are not there, as another rate or seed may change the score; on the side that a score speaks for,
    the seeds that diverged, as the mean is that of those that survived."""
    above, below = list[str](), list[str]()
    for weight, one in terms:
        for score in one.cells or (one,):
            where = f"{score.arm.name} on {score.dataset}"
            num_planned = planned.num_runs.get((score.arm.name, score.dataset), 0)
            if score.num_runs is not None and score.num_runs < num_planned:
                told = f"all fine-tunings of {where}: its score is by {score.num_runs} of {num_planned}"
                above.append(told)
                below.append(told)
            if score.num_diverged and weight:
                num_seeds = show_count(score.num_diverged + score.num, "seed")
                told = f"a score of {where} without divergence: it lost {score.num_diverged} of {num_seeds}"
                (above if weight > 0 else below).append(told)
    return tuple(dict.fromkeys(above)), tuple(dict.fromkeys(below))


def list_datasets(task: str, results: ResultSet) -> list[str]:
    """The datasets of a task, of a family, or of all."""
    if task != MEAN_OF_FAMILIES and task not in FAMILY_NAMES:
        return [task]
    families = results.families if task == MEAN_OF_FAMILIES else [task]
    return [name for family in families for name in results.datasets(family, results.primary_metric)]


def find_scores(arm: ReportArm, task: str, results: ResultSet) -> list[Result]:
    """The score on a task, the average of a family, or the averages of all. Raises `InputError` where one lacks."""
    families = results.families if task == MEAN_OF_FAMILIES else [task]
    is_family = families != [task] or task in FAMILY_NAMES
    scores = [results.find_average(arm, one) if is_family else results.scores_of(arm).get(task) for one in families]
    known = [score for score in scores if score is not None]
    if not known or len(known) < len(scores):
        raise InputError("no scores")
    return known
