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
from typing import Any

import numpy as np

from biphase.errors import InputError, nearest
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

Term = tuple[Operand, Sequence[ReportArm]]
"""An operand with its arm, or all arms that its function is over."""


def line_up(arms: Sequence[ReportArm], axis: str) -> dict[float, ReportArm]:
    """Arms by their values on an axis. Raises `InputError` where one has none, or that of another."""
    found: dict[float, ReportArm] = {}
    for arm in arms:
        places = {"budget": arm.budget, "mask": arm.mask_percent}
        value = places.get(axis, arm.clm_share)
        if value is None or value in found:
            raise InputError(f"'{arm.name}' has no place of its own on the axis '{axis}'")
        found[value] = arm
    return found


def weigh_arms(terms: Sequence[Term]) -> list[list[tuple[float, ReportArm]]]:
    """Each term as a weighted sum of arms, without the operand's own weight. Raises `InputError` where the axis has
    too few values for it."""
    lines = [(operand.axis, line_up(arms, operand.axis) if operand.axis else {}) for operand, arms in terms]
    weighed = []
    for (operand, arms), (axis, line) in zip(terms, lines, strict=True):
        if not axis:
            weighed.append([(1.0, arms[0])])
            continue
        shared = set(line).intersection(*(other for own, other in lines if own == axis))
        values = np.array(sorted(shared), dtype=float)
        if len(values) < (2 if operand.function == "trend" else 1):
            raise InputError(f"too few arms over {axis}")
        weights = np.full(len(values), 1 / len(values))
        if operand.function == "trend":
            # Least squares gives the line's slope as a weighted sum of scores; times the range of values it is the
            # change along the line. Values 20, 30, 50: weights −0.86, −0.21, 1.07 (they add up to nothing).
            centred = values - values.mean()
            weights = centred / (centred**2).sum() * np.ptp(values)
        weighed.append([(weight, line[value]) for weight, value in zip(weights.tolist(), values.tolist(), strict=True)])
    return weighed


def contrast_spreads(
    terms: Sequence[Term], datasets: Sequence[str], results: ResultSet
) -> tuple[Contrast, list[float]]:
    """The weighted sum of spreads, mean over datasets, and the values of the axis that they are over. Raises
    `InputError` where not every seed has a score at two values or more."""
    weights_A = np.array([operand.weight for operand, _ in terms])
    is_over_rates = terms[0][0].axis == RATE
    tables, used, repeated = [], set[float](), set[tuple[int, ...]]()
    for dataset in datasets:
        lines = [read_line(operand.axis, arms, dataset, results) for operand, arms in terms]
        values = [value for value in sorted(lines[0]) if all(value in line for line in lines)]
        if is_over_rates:
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
        raise InputError(f"no scores of each seed at two values of {terms[0][0].axis} or more")
    (num,), (seeds_S,) = numbers, repeated

    def statistic(seeds: np.ndarray) -> float:
        spreads = []
        for scores_AVS in tables:
            chosen_AVS = scores_AVS[:, :, seeds]
            spread_A = (
                chosen_AVS.std(axis=(1, 2), ddof=1) if is_over_rates else chosen_AVS.mean(axis=2).std(axis=1, ddof=1)
            )
            spreads.append(weights_A @ spread_A)
        return float(np.mean(spreads))

    largest = float(max(np.abs(scores_AVS).max() for scores_AVS in tables))
    return jackknife(statistic, num, largest, seeds_S), sorted(used)


def read_line(
    axis: str, arms: Sequence[ReportArm], dataset: str, results: ResultSet
) -> dict[float, tuple[tuple[float, ...], tuple[int, ...]]]:
    """The scores of all seeds on a dataset at every value of an axis, and their pretraining seeds; () where all are of
    one pretraining."""
    if axis == RATE:
        found = results.scores_of(arms[0]).get(dataset)
        by_value = {} if found is None or found.by_rate is None else {r: (s, found) for r, s in found.by_rate.items()}
    else:
        scores = {value: results.scores_of(arm).get(dataset) for value, arm in line_up(arms, axis).items()}
        by_value = {value: (score.samples, score) for value, score in scores.items() if score is not None}
    return {
        value: (samples, score.pretraining_seeds if score.num_pretrainings > 1 else ())
        for value, (samples, score) in by_value.items()
    }


QUANTIFIED = re.compile(r"\b(?:every|some)\s+(?:'[^']*'|\"[^\"]*\"|[^\s()'\"]+)")

Spot = tuple[str, int]
"""A model's name (a size) and a budget in steps."""
Ladder = Mapping[Spot, Mapping[str, str]]
"""What a name in an inequality stands for: the arm at every model and budget that it is there for; of a group all of
them, each under what it is called at every place."""


Choice = tuple[str, tuple[str, ...]]
"""What an operand is at a place: the arm, with what it is called there, or all that its function is over."""
AskedTerm = tuple[Operand, tuple[str, ...], str]
"""An operand with its arm, or all that its function is over, and a task, a family, or the average over families."""


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


def bind(line: ParsedInequality, ladders: Mapping[str, Ladder], tasks: Mapping[str, str]) -> list[AskedInequality]:
    """The inequality at every place that it names.

    Args:
        ladders: what each known name stands for.
        tasks: the tasks of the study → the code of their family, such as TC.

    Raises `InputError` for a name of an arm, a model or a task that is not known, with those that are, and where the
    names are nowhere there together.
    """
    check_names(line, ladders)
    spots = list(find_spots(line, ladders))
    if not spots:
        names = " and ".join(dict.fromkeys(f"'{operand.name}'" for operand in line.operands))
        known = []
        for name in dict.fromkeys(operand.name for operand in line.placed):
            known.append(f"{name} for {'; '.join(map(spot_label, sorted(ladders[name])))}")
        told = f"{names} share no model and budget there; known: {', '.join(known)}"
        raise InputError(f"'{line.text}': {told}{whole_names(line, ladders)}")
    asked: dict[tuple[object, ...], list[AskedInequality]] = {}
    for task in expand_tasks(line.place.tasks or (MEAN_OF_FAMILIES,), tasks, line.text):
        for spot, choices in spots:
            for chosen in itertools.product(*choices):
                terms = make_terms(line, chosen, task, tasks)
                if terms:
                    label = label_choice(line, chosen, task, spot)
                    one = AskedInequality(line, label, terms, baseline_ladder(line, ladders, spot))
                    asked.setdefault(name_place(line, chosen, task, spot), []).append(one)
    if not asked:
        told = "a second model or budget is needed, for here all names are one arm"
        raise InputError(f"'{line.text}': {told}{whole_names(line, ladders)}")
    return [replace(first, rivals=tuple(rest)) for first, *rest in asked.values()]


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
            raise InputError(f"'{line.text}': unknown arm '{operand.name}'{told}")
        if not ladders[operand.name]:
            raise InputError(f"'{line.text}': no arm is '{operand.name}'")
        is_group = any(len(arms) > 1 for arms in ladders[operand.name].values())
        if is_group and (operand.axis == RATE or not (operand.quantifier or operand.function)):
            raise InputError(
                f"'{line.text}': '{operand.name}' is that of several arms of one model and budget; name one, or say "
                "every, some, or which function of them over an axis"
            )


def make_terms(
    line: ParsedInequality, chosen: Sequence[Choice], task: str, tasks: Mapping[str, str]
) -> tuple[AskedTerm, ...]:
    """The terms of an inequality at a place; none where it compares an arm with itself."""
    terms, weights = [], defaultdict[object, float](float)
    for operand, (_, arms) in zip(line.placed, chosen, strict=True):
        (own,) = expand_tasks(operand.place.tasks or (task,), tasks, line.text)
        terms.append((operand, arms, own))
        weights[operand.function, operand.axis, arms, own] += operand.weight
    return tuple(terms) if any(weights.values()) else ()


def label_choice(line: ParsedInequality, chosen: Sequence[Choice], task: str, spot: Spot) -> str:
    """The left side with the names of the arms that stand for `every` and `some`, and the place."""
    kinds = iter([kind for operand, (kind, _) in zip(line.placed, chosen, strict=True) if operand.quantifier])
    left_side = re.split(r"[<>]", line.text, maxsplit=1)[0].strip()
    named = QUANTIFIED.sub(lambda match: next(kinds, match[0]), left_side)
    is_open = any(operand.place.tasks is None for operand in line.placed)
    return " ".join(filter(None, [named, f"on {task}" if is_open else "", spot_label(spot)]))


def name_place(line: ParsedInequality, chosen: Sequence[Choice], task: str, spot: Spot) -> tuple[object, ...]:
    """What tells inequalities apart that are to hold each; of those with the same, one is enough."""
    model, budget = spot
    at = zip(line.place.quantifiers, (task, budget, model), strict=True)
    kinds = [kind for operand, (kind, _) in zip(line.placed, chosen, strict=True) if operand.quantifier == "every"]
    return (*(value for word, value in at if word != "some"), *kinds)


def spot_label(spot: Spot) -> str:
    model, budget = spot
    return ", ".join(filter(None, [model, f"{budget:,} steps" if budget else ""]))


def expand_tasks(wanted: Sequence[str], tasks: Mapping[str, str], text: str) -> list[str]:
    """Names of tasks, codes of families, or `average`."""
    by_words = {**{code: code for code in FAMILY_NAMES}, **FAMILY_CODES}
    there = list(dict.fromkeys(tasks.values()))
    found: list[str] = []
    for name in wanted:
        if name in ("every family", "some family"):
            found += there
        elif name in ("every task", "some task"):
            found += tasks
        elif name == MEAN_OF_FAMILIES or name in tasks:
            found.append(name)
        elif by_words.get(name) in there:
            found.append(by_words[name])
        else:
            known = [*tasks, *there, *(word for word, code in by_words.items() if code in there)]
            known = list(dict.fromkeys([MEAN_OF_FAMILIES, "every family", "every task", *known]))
            raise InputError(f"'{text}': unknown task or family '{name}'; known: {', '.join(known)}")
    return list(dict.fromkeys(found))


def find_spots(line: ParsedInequality, ladders: Mapping[str, Ladder]) -> Iterator[tuple[Spot, list[list[Choice]]]]:
    """Where the inequality is to hold, and the choices of each operand there: models and budgets at which every operand
    is there, or once, where each operand is a single arm or has places of its own."""
    known = [spot for operand in line.placed for spot in ladders[operand.name]]
    models = sorted(dict.fromkeys(model for model, _ in known), key=num_parameters)
    if line.place.model not in (None, *QUANTIFIERS, "largest", "smallest", *models):
        raise InputError(f"'{line.text}': unknown model '{line.place.model}'; known: {', '.join(models)}")
    varied = [operand for operand in line.placed if not is_one_arm(operand, ladders[operand.name])]
    is_at_budgets = any(operand.axis != "budget" and operand.place.budget is None for operand in varied)
    is_for_models = any(operand.place.model is None for operand in varied)
    candidates = [("", 0)]
    if is_at_budgets or is_for_models:
        budgets = sorted({budget for _, budget in known}) if is_at_budgets else [0]
        candidates = list(itertools.product(models, budgets))
    # What `the largest` on a term is chosen among.
    shared = set(known).intersection(*(ladders[operand.name] for operand in varied)) or set(known)
    # Where all operands are the same arms as at an earlier place, nothing new is asked.
    there: dict[Spot, list[list[Choice]]] = {}
    for spot in candidates:
        choices = [find_arms(operand, ladders[operand.name], spot, shared) for operand in line.placed]
        if all(choices) and choices not in there.values():
            there[spot] = choices
    whole = [model for model in models if any(model == own for own, _ in there)]
    for (model, budget), choices in there.items():
        own = sorted(b for m, b in there if m == model)
        is_model = line.place.model in (None, *QUANTIFIERS) or (
            whole and choose_among(line.place.model, whole) == model
        )
        if is_model and (line.place.budget in (None, *QUANTIFIERS) or choose_among(line.place.budget, own) == budget):
            yield (model, budget), choices


def choose_among(wanted: Any, known: Sequence[Any]) -> Any:
    """`largest` or `smallest` of what is known, in its order; what is named otherwise is itself."""
    return {"largest": known[-1], "smallest": known[0]}.get(str(wanted), wanted)


def is_one_arm(operand: Operand, ladder: Ladder) -> bool:
    """Whether a name is that of an arm, which is the same wherever it is asked about."""
    return len(ladder) == 1 and operand.name in next(iter(ladder.values())).values()


def find_arms(operand: Operand, ladder: Ladder, spot: Spot, shared: Set[Spot]) -> list[Choice]:
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
        arms = ladder.get((model, budget), {})
        if operand.axis == "budget":
            of_model = [some.values() for (own, _), some in sorted(ladder.items()) if own == model]
            arms = {arm: arm for some in of_model for arm in some}
    if operand.function:
        return [("", tuple(arms.values()))] if arms else []
    return [(kind, (arm,)) for kind, arm in arms.items()]


def baseline_ladder(line: ParsedInequality, ladders: Mapping[str, Ladder], spot: Spot) -> tuple[str, ...]:
    """The arms of the baseline of a compute equivalent for the model at hand, smallest budget first."""
    if not line.is_equivalent:
        return ()
    ladder = ladders[line.operands[1].name]
    own = {budget: arms for (model, budget), arms in ladder.items() if model == spot[0] or not spot[0]}
    rungs = [(budget, arm) for budget in sorted(own) for arm in own[budget].values()]
    if len(rungs) < 2:
        raise InputError(
            f"'{line.text}': '{line.operands[1].name}' has one budget; a baseline's ladder has two or more"
        )
    try:
        refuse_gaps(rungs)
    except InputError as error:
        raise InputError(f"'{line.text}': {error}") from None
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
    line = asked.line
    terms: list[Term] = [
        (replace(operand, weight=line.sign * operand.weight), [arms[name] for name in names])
        for operand, names, _ in asked.terms
    ]
    tasks = [task for _, _, task in asked.terms]
    datasets = list_datasets(tasks[0], results)
    if line.is_equivalent:
        [(_, [arm])], share, ladder = terms, line.bound, [arms[name] for name in asked.ladder]
        wanted = None if tasks[0] == MEAN_OF_FAMILIES else datasets
        between = contrast_at_share(results, arm, ladder, share, datasets=wanted)
        which = ("the arm’s", "the baseline’s")[:: -int(line.sign)]
        label = f"{asked.label}: {' score minus '.join(which)}, the baseline with {1 / share:.2g} times the arm’s FLOPs"
        sides = [(-line.sign, arm), *((line.sign, rung) for rung in ladder)]
        lacks = find_lacks(weigh_scores(sides, datasets, results), planned)
        return make_inequality(label, replace(between, estimate=-line.sign * between.estimate), bound, *lacks)
    label = asked.label if line.sign > 0 else f"−({asked.label})"
    if terms[0][0].function == "spread":
        seen, values = contrast_spreads(terms, datasets, results)
        # A spread is over what did not diverge, by its definition: that counts on neither side.
        sides = [(0, arm) for _, some in terms for arm in some]
        lacks = find_lacks(weigh_scores(sides, datasets, results), planned)
        label = f"{label} ({terms[0][0].axis} {', '.join(f'{value:g}' for value in values)})"
        return make_inequality(label, seen, bound, *lacks)
    weighted: list[tuple[float, Result]] = []
    for (operand, _), task, members in zip(terms, tasks, weigh_arms(terms), strict=True):
        for weight, arm in members:
            scores = find_scores(arm, task, results)
            weighted += [(operand.weight * weight / len(scores), score) for score in scores]
    return make_inequality(label, contrast(weighted), bound, *find_lacks(weighted, planned))


def refuse_lacking(
    asked: AskedInequality, results: ResultSet, arms: Mapping[str, ReportArm], planned: AskedScores
) -> None:
    """Raises `InputError` where an arm lacks a score that is planned on what is asked about."""
    if not {*asked.ladder, *(name for _, names, _ in asked.terms for name in names)} <= arms.keys():
        raise InputError("no scores")
    for _, names, task in asked.terms:
        for name in (*names, *asked.ladder):
            known = results.scores_of(arms[name])
            due = [one for one, family in planned.families.items() if task in (one, family, MEAN_OF_FAMILIES)]
            if lost := [one for one in due if one not in known]:
                raise InputError(f"no scores of {name} on {', '.join(lost)}")


def weigh_scores(
    sides: Sequence[tuple[float, ReportArm]], datasets: Sequence[str], results: ResultSet
) -> list[tuple[float, Result]]:
    """The scores of arms on datasets, each with the weight of its arm."""
    scores = [(side, score) for side, arm in sides for score in results.scores_of(arm).values()]
    return [(side, score) for side, score in scores if score.dataset in datasets]


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
