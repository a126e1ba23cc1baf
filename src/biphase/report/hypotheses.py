"""An inequality over names → inequalities over arms of a study, one for each place; with results, a claim.

Some terms are functions of several scores along an axis:

    mean    the mean over the arms
    trend   the change from the lowest to the highest value of the axis, along the straight line of least squares
    spread  a standard deviation, averaged over datasets. Over `rate`: of one arm's scores over fine-tuning rates and
            seeds (`stability_rates`, without diverged trainings). Over other axes: of several arms' means over seeds

All functions of one inequality use the values that they share on the axis. The interval of a spread comes from leaving
out one seed at a time (`contrasts.jackknife`). Letters: A operands, V values of the axis, S seeds.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from biphase.errors import InputError, clipped, refuse_unknown
from biphase.report.claims import Claim, Inequality, strongest
from biphase.report.contrasts import Contrast, contrast, have_one_seed, jackknife
from biphase.report.equivalents import contrast_at_share, refuse_gaps, tell_compute
from biphase.report.formats import show_count, show_estimate, show_list
from biphase.report.grammar import QUANTIFIERS, RATE, AskedInequality, Operand, find_quantifiers, parse_inequality
from biphase.report.results import FAMILY_CODES, LOSS, MEAN_OF_FAMILIES, ReportArm, Result, ResultSet, num_parameters
from biphase.report.statistics import GapUnit, stability_rates

Spot = tuple[str, int]
"""The model and the budget (steps) of an inequality; `""` and 0 for an open one."""

ArmsBySpot = Mapping[Spot, Mapping[str, str]]
"""Model and budget → the arms that a name means there, by their short names; one arm, or the members of a group."""


class WeighedArm(NamedTuple):
    """A term in a weighted sum of scores."""

    weight: float
    arm: ReportArm
    task: str


def show_spot(spot: Spot) -> str:
    """Show `1m, 1,200 steps`, or whichever part is not open."""
    model, budget = spot
    return ", ".join(filter(None, [model, f"{budget:,} steps" if budget else ""]))


def index_by_axis(arms: Sequence[ReportArm], axis: str) -> dict[float, ReportArm]:
    """Index arms by their values on an axis; without an axis, index the only arm by 0. Raises `InputError` for an arm
    without a value, or two arms with the same value."""
    by_value: dict[float, ReportArm] = {}
    for arm in arms:
        value = {"": 0, "budget": arm.budget, "mask": arm.mask_percent}.get(axis, arm.clm_share)
        if value is None or value in by_value:
            raise InputError(f"'{arm.name}' has no value of its own on the axis '{axis}'")
        by_value[value] = arm
    return by_value


def weigh_arms(terms: Sequence[Operand], arms: Mapping[str, ReportArm]) -> list[WeighedArm]:
    """Turn the terms into a weighted sum of arms. Raises `InputError` if a function has too few values on its axis."""
    indexed = [index_by_axis([arms[name] for name in term.arms], term.axis) for term in terms]
    shared: dict[str, set[float]] = {}
    for term, by_value in zip(terms, indexed, strict=True):
        shared[term.axis] = shared.get(term.axis, set(by_value)) & set(by_value)
    weighed = []
    for term, by_value in zip(terms, indexed, strict=True):
        values = np.array(sorted(shared[term.axis]), dtype=float)
        if len(values) < (2 if term.function == "trend" else 1):
            raise InputError(f"too few arms over {term.axis}")
        weights = np.full(len(values), 1 / len(values))
        if term.function == "trend":
            # The least-squares slope is a weighted sum of scores. Multiplied by the range of values, it is the change
            # along the straight line. For values 20, 30, 50 the weights are −0.86, −0.21, 1.07; they add up to zero.
            centred = values - values.mean()
            weights = centred / (centred**2).sum() * np.ptp(values)
        for weight, value in zip(weights.tolist(), values.tolist(), strict=True):
            weighed.append(WeighedArm(term.weight * weight, by_value[value], term.task))
    return weighed


def contrast_spreads(
    terms: Sequence[Operand], arms: Mapping[str, ReportArm], results: ResultSet
) -> tuple[Contrast, list[float]]:
    """Return the contrast of a weighted sum of spreads, averaged over datasets, and the values used on their axis.
    Raises `InputError` unless every seed has scores at two values or more."""
    axis, weights_A = terms[0].axis, np.array([term.weight for term in terms])
    tables, used, repeated = [], set[float](), set[tuple[int, ...]]()
    for dataset in list_datasets(terms[0].task, results):
        read = [read_along_axis(axis, [arms[name] for name in term.arms], dataset, results) for term in terms]
        values = sorted(set.intersection(*map(set, read)))
        if axis == RATE:
            values = stability_rates(values)
        samples = [[by_value[value][0] for value in values] for by_value in read]
        if len({len(seeds) for row in samples for seeds in row}) != 1:
            continue
        scores_AVS = np.array(samples)
        is_whole_V = ~np.isnan(scores_AVS).any(axis=(0, 2))
        if scores_AVS.shape[2] and is_whole_V.sum() > 1:
            tables.append(scores_AVS[:, is_whole_V])
            used |= set(np.array(values)[is_whole_V].tolist())
            repeated |= {by_value[value][1] for by_value in read for value in values}
    counts = {scores_AVS.shape[2] for scores_AVS in tables}
    if len(counts) != 1 or len(repeated) != 1 or len(next(iter(repeated))) not in (0, *counts):
        raise InputError(f"no scores of each seed at two values of {axis} or more")
    (num,), (seeds_S,) = counts, repeated

    def statistic(seeds: np.ndarray) -> float:
        spreads = []
        for scores_AVS in tables:
            means_AV1 = scores_AVS[:, :, seeds].mean(axis=2, keepdims=True)
            chosen_AVS = scores_AVS[:, :, seeds] if axis == RATE else means_AV1
            spreads.append(weights_A @ chosen_AVS.std(axis=(1, 2), ddof=1))
        return float(np.mean(spreads))

    largest = float(max(np.abs(scores_AVS).max() for scores_AVS in tables))
    unit: GapUnit = "nats" if terms[0].task == LOSS else "points"
    return replace(jackknife(statistic, num, largest, seeds_S), unit=unit), sorted(used)


def read_along_axis(
    axis: str, arms: Sequence[ReportArm], dataset: str, results: ResultSet
) -> dict[float, tuple[Sequence[float], tuple[int, ...]]]:
    """Return value on the axis → the score of each seed on the dataset, with the pretraining seed of each score; ()
    with a single pretraining."""
    scores = dict[float, tuple[Sequence[float], tuple[int, ...]]]()
    for value, arm in index_by_axis(arms, "" if axis == RATE else axis).items():
        if score := results.scores.get(arm.name, {}).get(dataset):
            seeds = tuple(score.pretraining_seeds) if score.num_pretrainings > 1 else ()
            by_value = {value: score.samples} if axis != RATE else score.by_rate or {}
            scores |= {position: (samples, seeds) for position, samples in by_value.items()}
    return scores


QUANTIFIED = re.compile(r"\b(?:every|some)\s+(?:'[^']*'|\"[^\"]*\"|[^\s()'\"]+)")


def bind(text: str, named_arms: Mapping[str, ArmsBySpot], tasks: Mapping[str, str]) -> list[list[AskedInequality]]:
    """Bind a line of text to arms at every place that it names. Return a group of inequalities for each choice of
    `every`; a group holds if one of its members does.

    Args:
        named_arms: known name → its arms.
        tasks: task of the study → the code of its family, such as TC.

    Raises `InputError` for a line outside the grammar; for an unknown arm, model or task, with the nearest or all
    known ones; and for names that share no model and budget.
    """
    try:
        asked = parse_inequality(text)
        for operand in asked.operands:
            check_name(operand, named_arms)
        return place_inequality(asked, named_arms, tasks)
    except InputError as error:
        raise InputError(f"'{clipped(text)}': {error}") from None


def place_inequality(
    asked: AskedInequality, named_arms: Mapping[str, ArmsBySpot], tasks: Mapping[str, str]
) -> list[list[AskedInequality]]:
    """Return the inequality at every place, in the groups of `bind`."""
    groups: dict[tuple[object, ...], list[AskedInequality]] = {}
    spots = find_spots(asked, named_arms)
    for task in expand_tasks(asked.place.get("tasks", (MEAN_OF_FAMILIES,)), tasks):
        for (model, budget), choices in spots:
            for chosen in itertools.product(*choices):
                terms, weights = [], defaultdict[object, float](float)
                for term in chosen:
                    (term_task,) = expand_tasks(term.place.get("tasks", (task,)), tasks)
                    terms.append(replace(term, task=term_task))
                    weights[term.function, term.axis, term.arms, term_task] += term.weight
                if not any(weights.values()):  # an arm minus itself
                    continue
                refuse_units(asked, {term.task for term in terms})
                # Inequalities form a group if they agree in every choice of `every` and in every named place.
                at = zip(find_quantifiers(asked.place), (task, budget, model), strict=True)
                every = [term.short_name for term in terms if term.quantifier == "every"]
                key = (*(value for word, value in at if word != "some"), *every)
                label = label_choice(asked, terms, task, (model, budget))
                baseline = find_baseline(asked, named_arms, model)
                groups.setdefault(key, []).append(replace(asked, operands=tuple(terms), label=label, baseline=baseline))
    if not groups:
        lack = "a second model or budget is needed, because here all names are one arm"
        raise InputError(lack + whole_names(asked, named_arms))
    return list(groups.values())


def refuse_units(asked: AskedInequality, tasks: Set[str]) -> None:
    """Raise `InputError` if an inequality about these tasks mixes losses and scores, or has the other one's unit."""
    is_loss = LOSS in tasks
    if is_loss and (len(tasks) > 1 or asked.is_equivalent):
        raise InputError("a loss can only be compared with losses, and has no compute equivalent")
    if asked.unit and asked.unit != ("nat" if is_loss else "point"):
        raise InputError(f"bounds on {LOSS} are in nats, and those on scores in points")


def whole_names(asked: AskedInequality, named_arms: Mapping[str, ArmsBySpot]) -> str:
    """Return the end of a message, which suggests whole names of arms: they can compare models or budgets."""
    spots = itertools.chain(*(named_arms[operand.name].values() for operand in asked.operands))
    arms = {arm for members in spots for arm in members.values()}
    return f"; other models or budgets have whole names, such as {show_list(sorted(arms)[-2:])}"


def check_name(operand: Operand, named_arms: Mapping[str, ArmsBySpot]) -> None:
    """Raise `InputError` if a name means no arm, or several arms where the operand needs one."""
    refuse_unknown("the line names an unknown arm", operand.name, named_arms)
    if not named_arms[operand.name]:
        raise InputError(f"no arm is '{operand.name}'")
    is_group = any(len(arms) > 1 for arms in named_arms[operand.name].values())
    if is_group and (operand.axis == RATE or not (operand.quantifier or operand.function)):
        remedy = "name one of them, or write every or some before it, or a function of them over an axis"
        raise InputError(f"'{operand.name}' names several arms of one model and budget; {remedy}")


def label_choice(asked: AskedInequality, terms: Sequence[Operand], task: str, spot: Spot) -> str:
    """Write the left side with its place, and with names of arms instead of `every` and `some`."""
    names = iter([term.short_name for term in terms if term.quantifier])
    left_side = re.split(r"[<>]| within (?=[\d.]+ )", asked.text, maxsplit=1)[0].strip()
    filled_in = QUANTIFIED.sub(lambda match: next(names, match[0]), left_side)
    is_open = any("tasks" not in operand.place for operand in asked.placed)
    return " ".join(filter(None, [filled_in, f"on {task}" if is_open else "", show_spot(spot)]))


def expand_tasks(words: Sequence[str], tasks: Mapping[str, str]) -> list[str]:
    """Replace words with the tasks and codes of families that they mean; `average` stays."""
    families, task_names = list(dict.fromkeys(tasks.values())), [*tasks]
    names = {name: [name] for name in (MEAN_OF_FAMILIES, LOSS)} | {task: [task] for task in tasks}
    names |= dict.fromkeys(("every family", "some family"), families)
    names |= dict.fromkeys(("every task", "some task"), task_names)
    codes = {family: family for family in families} | FAMILY_CODES
    names |= {phrase: [code] for phrase, code in codes.items() if code in families and phrase not in tasks}
    expanded: list[str] = []
    for name in words:
        refuse_unknown("unknown task or family", name, names)
        expanded += names[name]
    return list(dict.fromkeys(expanded))


def find_spots(asked: AskedInequality, named_arms: Mapping[str, ArmsBySpot]) -> list[tuple[Spot, list[list[Operand]]]]:
    """List the spots of the inequality, with the choices of each operand there: the models and budgets that all
    operands share, or a single spot if each operand is one arm or has its own place. Raises `InputError` for an unknown
    model, and if no spot is left."""
    spots = [spot for operand in asked.placed for spot in named_arms[operand.name]]
    models = sorted(dict.fromkeys(model for model, _ in spots), key=num_parameters)
    wanted_model = asked.place.get("model")
    wanted_budget = asked.place.get("budget")
    if wanted_model not in (None, *QUANTIFIERS, "largest", "smallest", *models):
        raise InputError(f"unknown model '{wanted_model}'; known: {', '.join(models)}")
    # 1. The models and budgets to look at; `""` and 0 if no operand is open.
    varied = [operand for operand in asked.placed if not is_one_arm(operand, named_arms[operand.name])]
    budgets = [0]
    if any(operand.axis != "budget" and "budget" not in operand.place for operand in varied):
        budgets = sorted({budget for _, budget in spots})
    elif all("model" in operand.place for operand in varied):
        models = [""]
    # 2. The choices at each spot. A spot with the same arms as an earlier one repeats the question.
    shared = set(spots).intersection(*(named_arms[operand.name] for operand in varied)) or set(spots)
    by_spot: dict[Spot, list[list[Operand]]] = {}
    for spot in itertools.product(models, budgets):
        choices = [bind_operand(operand, named_arms[operand.name], spot, shared) for operand in asked.placed]
        if all(choices) and choices not in by_spot.values():
            by_spot[spot] = choices
    # 3. The spots that the place of the inequality names.
    chosen = []
    model = choose_among(wanted_model, [model for model, _ in by_spot])
    for spot, choices in by_spot.items():
        budget = choose_among(wanted_budget, [budget for name, budget in by_spot if name == spot[0]])
        if model in (None, spot[0]) and budget in (None, spot[1]):
            chosen.append((spot, choices))
    if not chosen:
        names = " and ".join(dict.fromkeys(f"'{operand.name}'" for operand in asked.operands))
        placed = dict.fromkeys(operand.name for operand in asked.placed)
        known = ", ".join(f"{name} for {'; '.join(map(show_spot, sorted(named_arms[name])))}" for name in placed)
        message = f"{names} share no model and budget there; known: {known}"
        raise InputError(message + whole_names(asked, named_arms))
    return chosen


def choose_among(asked: Any, ascending: Sequence[Any]) -> Any:
    """Resolve `largest` and `smallest` among values in ascending order. Return None for `every` and `some`, and other
    values unchanged."""
    if asked in ("largest", "smallest") and ascending:
        return ascending[-1] if asked == "largest" else ascending[0]
    return None if asked in QUANTIFIERS else asked


def is_one_arm(operand: Operand, arms_by_spot: ArmsBySpot) -> bool:
    """Tell whether an operand has the whole name of a single arm, which is then the same at every spot."""
    return len(arms_by_spot) == 1 and operand.name in next(iter(arms_by_spot.values())).values()


def bind_operand(operand: Operand, arms_by_spot: ArmsBySpot, spot: Spot, shared: Set[Spot]) -> list[Operand]:
    """List the operand's choices at a spot: one with its arm, one for each arm of its group, or one with all arms of
    its function; none if it has no arm there."""
    (model, budget), place = spot, operand.place
    if is_one_arm(operand, arms_by_spot):
        (arms,) = arms_by_spot.values()
    else:
        if "model" in place:
            model = choose_among(place["model"], sorted({of_shared for of_shared, _ in shared}, key=num_parameters))
        if "budget" in place and (budgets := sorted(b for m, b in shared if m == model)):
            budget = choose_among(place["budget"], budgets)
        arms = arms_by_spot.get((model, budget), {})
        if operand.axis == "budget":
            of_model = [arms_by_spot[spot].values() for spot in sorted(arms_by_spot) if spot[0] == model]
            arms = {arm: arm for members in of_model for arm in members}
    if operand.function:
        return [replace(operand, arms=tuple(arms.values()))] if arms else []
    return [replace(operand, arms=(arm,), short_name=name) for name, arm in arms.items()]


def find_baseline(asked: AskedInequality, named_arms: Mapping[str, ArmsBySpot], model: str) -> tuple[str, ...]:
    """Find the arms of a compute equivalent's baseline for a model, smallest budget first; () for other inequalities.
    Raises `InputError` if the baseline has one budget, or budgets too far apart."""
    if not asked.is_equivalent:
        return ()
    name, of_arm = asked.operands[1].name, {size for size, _ in named_arms[asked.operands[0].name]}
    model = model or (of_arm.pop() if len(of_arm) == 1 else "")
    by_budget = {budget: arms for (size, budget), arms in named_arms[name].items() if model in ("", size)}
    rungs = [(budget, arm) for budget in sorted(by_budget) for arm in by_budget[budget].values()]
    if not rungs:
        raise InputError(f"'{name}' has no arm of the network {model}: a ladder has that of the arm")
    if len(rungs) < 2:
        raise InputError(f"'{name}' has one budget; a baseline's ladder has two or more")
    refuse_gaps(rungs)
    return tuple(arm for _, arm in rungs)


def measure_claim(groups: Sequence[Sequence[AskedInequality]], results: ResultSet) -> Claim:
    """Measure a line's claim at all its places; `groups` come from `bind`.

    "A compute equivalent, in FLOPs, is below 0.6" becomes "the arm is above the baseline's curve at 1 / 0.6 of its
    compute".
    """
    asked = groups[0][0]
    words = (*find_quantifiers(asked.place), *(operand.quantifier for operand in asked.operands))
    inequalities, untested = [], []
    for rivals in groups:
        measured, lacks = [], []
        for rival in rivals:
            try:
                measured.append(measure(rival, results))
            except InputError as error:
                lacks.append(f"{rival.label} ({error})")
        if not measured:
            untested.append(lacks[0])
        else:
            best = strongest(measured) if "some" in words else measured[0]
            # An inequality without scores may hold, so the claim cannot be contradicted.
            lacks_below = (*best.lacks_below, *(f"not tested: {lack}" for lack in lacks))
            inequalities.append(replace(best, lacks_below=lacks_below))
    return Claim(asked.text, tuple(inequalities), tuple(untested))


def measure(asked: AskedInequality, results: ResultSet) -> Inequality:
    """Measure the inequality. Raises `InputError` that names the missing scores."""
    refuse_lacking(asked, results)
    arms = {arm.name: arm for arm in results.arms}
    first, sign = asked.operands[0], asked.sign
    datasets = list_datasets(first.task, results)
    baseline = [arms[name] for name in asked.baseline]
    label, beside = asked.label, ""
    bound = 0.0 if asked.is_equivalent or not asked.bound else sign * asked.bound
    gap: Contrast | None = None

    def contrast_baseline(parts: Sequence[Sequence[str]]) -> Contrast:
        at_share = contrast_at_share(results, arms[first.arms[0]], baseline, asked.bound, parts)
        return negate(at_share) if sign > 0 else at_share

    # 1. The arms with their weights; and the contrast, unless it is a weighted sum of scores.
    if asked.is_equivalent:
        gap = contrast_baseline([list_datasets(part, results) for part in list_parts(first.task, results)])
        sides = [WeighedArm(-sign, arms[first.arms[0]], first.task)]
        sides += [WeighedArm(sign, rung, first.task) for rung in baseline]
        owners = ("the arm’s", "the baseline’s")[:: -int(sign)]
        beside = f"the baseline with {show_estimate(1 / asked.bound)} times the arm’s FLOPs"
        label = f"{asked.label}: {' score minus '.join(owners)}, {beside}"
    elif first.function == "spread":
        gap, values = contrast_spreads(asked.operands, arms, results)
        gap = replace(gap, estimate=sign * gap.estimate)
        label = f"{label} ({first.axis} {', '.join(f'{value:g}' for value in values)})"
        # A spread leaves out diverged trainings, so a lost seed favours neither side.
        sides = [WeighedArm(0.0, arms[name], term.task) for term in asked.operands for name in term.arms]
    else:
        sides = [side._replace(weight=sign * side.weight) for side in weigh_arms(asked.operands, arms)]
    # 2. The scores of the arms, and the contrast of a weighted sum, at the arms' own FLOPs.
    weighted: list[tuple[float, Result]] = []
    for weight, arm, task in sides:
        parts = list_parts(task, results)
        weighted += [(weight / len(parts), results.scores[arm.name][part]) for part in parts]
    compute = "" if gap else tell_compute(results, weighted, sign)
    gap = replace(gap, has_one_seed=have_one_seed(score for _, score in weighted)) if gap else contrast(weighted)
    # 3. Each task alone, for a mean over tasks.
    by_task: dict[str, Contrast] = {}
    if first.function != "spread" and len({side.task for side in sides}) == 1:
        for name in datasets:
            on_task = [(side.weight, results.scores[side.arm.name][name]) for side in sides]
            by_task[name] = contrast_baseline([[name]]) if asked.is_equivalent else contrast(on_task)
    lacks = find_lacks(weighted, results.planned_runs)
    if asked.is_equivalence:  # a lost seed of either arm may move the sum between the bounds, or out of them
        of_both = tuple(dict.fromkeys(lacks[0] + lacks[1]))
        lacks = of_both, of_both
    compared = frozenset(side.arm.name for side in sides)
    bound = -bound if asked.is_equivalence and gap.estimate < 0 else bound
    # 4. A sum that is claimed to lie below its bound is shown as it was asked for.
    is_below = sign < 0 and not asked.is_equivalent
    if is_below:
        gap, bound = negate(gap), -bound
        by_task = {name: negate(alone) for name, alone in by_task.items()}
    measured = Inequality(label, gap, bound, *lacks, by_task=by_task, arms=compared, beside=beside)
    return replace(measured, compute=compute, is_equivalence=asked.is_equivalence, is_below=is_below)


def negate(gap: Contrast) -> Contrast:
    """Return minus a sum."""
    return replace(gap, estimate=-gap.estimate, by_seed=tuple(-value for value in gap.by_seed))


def refuse_lacking(asked: AskedInequality, results: ResultSet) -> None:
    """Raise `InputError` if an arm lacks a score that the inequality or the study's plan needs."""
    for term in asked.operands:
        tasks, parts = results.planned_tasks.items(), list_parts(term.task, results)
        due = [name for name, family in tasks if term.task in (name, family, MEAN_OF_FAMILIES)]
        for arm in (*term.arms, *asked.baseline):
            scores = results.scores.get(arm, {})
            lost = [name for name in due if name not in scores]
            if scores and lost:
                raise InputError(f"no scores of {arm} on {', '.join(lost)}")
            if not parts or any(part not in scores for part in parts):
                raise InputError("no scores")


def list_parts(task: str, results: ResultSet) -> list[str]:
    """List the parts of a term's mean: all families, or the one task or family itself."""
    return [*results.datasets] if task == MEAN_OF_FAMILIES else [task]


def find_lacks(
    terms: Sequence[tuple[float, Result]], planned_runs: Mapping[tuple[str, str], int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List the missing scores that prevent the verdict "above the bound", and those that prevent "below the bound".

    Both lists contain unfinished fine-tunings, because another rate or seed may change the score. A score that lost
    seeds is the mean of the surviving ones, so it stands in the list of the side that it favours.
    """
    above, below = dict[str, None](), dict[str, None]()
    for weight, mean in terms:
        for score in mean.parts:
            where = f"{score.arm.name} on {score.dataset}"
            num_planned = planned_runs.get((score.arm.name, score.dataset), 0)
            if score.num_runs is not None and score.num_runs < num_planned:
                lack = f"all trainings of {where}: its score comes from {score.num_runs} of {num_planned}"
                above[lack] = below[lack] = None
            if score.num_diverged and weight:
                num_seeds = show_count(score.num_diverged + score.num, "seed")
                lack = f"a score of {where} without divergence: it lost {score.num_diverged} of {num_seeds}"
                (above if weight > 0 else below)[lack] = None
    return tuple(above), tuple(below)


def list_datasets(task: str, results: ResultSet) -> list[str]:
    """Return the datasets of a task, of a family, or of all families."""
    return [name for part in list_parts(task, results) for name in results.datasets.get(part, ())] or [task]
