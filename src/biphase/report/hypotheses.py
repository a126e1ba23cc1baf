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
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from biphase.errors import InputError, clipped, refuse_unknown
from biphase.report.claims import Claim, Inequality, strongest
from biphase.report.contrasts import Contrast, contrast, have_one_seed, jackknife
from biphase.report.equivalents import contrast_at_share, refuse_gaps
from biphase.report.formats import show_count, show_estimate, show_list
from biphase.report.grammar import QUANTIFIERS, RATE, AskedInequality, Operand, find_quantifiers, parse_inequality
from biphase.report.results import FAMILY_CODES, MEAN_OF_FAMILIES, ReportArm, Result, ResultSet, num_parameters
from biphase.report.statistics import stability_rates

Spot = tuple[str, int]
"""A model and a budget at which an inequality is to hold; `""` and 0 where it is asked about once."""

Ladder = Mapping[Spot, Mapping[str, str]]
"""The arms that a name in an inequality stands for, by model and budget: one arm, or the members of a group by their
short names."""


def show_spot(spot: Spot) -> str:
    """Show `1m, 1,200 steps`, without what is not named."""
    model, budget = spot
    return ", ".join(filter(None, [model, f"{budget:,} steps" if budget else ""]))


def line_up(arms: Sequence[ReportArm], axis: str) -> dict[float, ReportArm]:
    """Map values on an axis to arms; without an axis, 0 to the only arm. Raises `InputError` where an arm has no value,
    or that of another arm."""
    by_value: dict[float, ReportArm] = {}
    for arm in arms:
        value = {"": 0, "budget": arm.budget, "mask": arm.mask_percent}.get(axis, arm.clm_share)
        if value is None or value in by_value:
            raise InputError(f"'{arm.name}' has no place of its own on the axis '{axis}'")
        by_value[value] = arm
    return by_value


def weigh_arms(terms: Sequence[Operand], arms: Mapping[str, ReportArm]) -> list[tuple[float, ReportArm, str]]:
    """Write the terms as a weighted sum of arms, each with its task. Raises `InputError` where an axis has too few
    values for a function over it."""
    lines = [line_up([arms[name] for name in term.arms], term.axis) for term in terms]
    shared: dict[str, set[float]] = {}
    for term, line in zip(terms, lines, strict=True):
        shared[term.axis] = shared.get(term.axis, set(line)) & set(line)
    weighed = []
    for term, line in zip(terms, lines, strict=True):
        values = np.array(sorted(shared[term.axis]), dtype=float)
        if len(values) < (2 if term.function == "trend" else 1):
            raise InputError(f"too few arms over {term.axis}")
        weights = np.full(len(values), 1 / len(values))
        if term.function == "trend":
            # Least squares gives the line's slope as a weighted sum of scores; times the range of values it is the
            # change along the line. Values 20, 30, 50: weights −0.86, −0.21, 1.07 (they add up to nothing).
            centred = values - values.mean()
            weights = centred / (centred**2).sum() * np.ptp(values)
        for weight, value in zip(weights.tolist(), values.tolist(), strict=True):
            weighed.append((term.weight * weight, line[value], term.task))
    return weighed


def contrast_spreads(
    terms: Sequence[Operand], arms: Mapping[str, ReportArm], results: ResultSet
) -> tuple[Contrast, list[float]]:
    """Contrast spreads: their weighted sum, mean over datasets, and the values of the axis that they are over. Raises
    `InputError` where not every seed has a score at two values or more."""
    axis, weights_A = terms[0].axis, np.array([term.weight for term in terms])
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
            means_AV1 = scores_AVS[:, :, seeds].mean(axis=2, keepdims=True)
            chosen_AVS = scores_AVS[:, :, seeds] if axis == RATE else means_AV1
            spreads.append(weights_A @ chosen_AVS.std(axis=(1, 2), ddof=1))
        return float(np.mean(spreads))

    largest = float(max(np.abs(scores_AVS).max() for scores_AVS in tables))
    return jackknife(statistic, num, largest, seeds_S), sorted(used)


def read_line(
    axis: str, arms: Sequence[ReportArm], dataset: str, results: ResultSet
) -> dict[float, tuple[Sequence[float], tuple[int, ...]]]:
    """Read the scores of all seeds on a dataset at every value of an axis, and their pretraining seeds; () where all
    are of one pretraining."""
    line: dict[float, tuple[Sequence[float], tuple[int, ...]]] = {}
    for value, arm in line_up(arms, "" if axis == RATE else axis).items():
        score = results.scores.get(arm.name, {}).get(dataset)
        if score is not None:
            seeds = tuple(score.pretraining_seeds) if score.num_pretrainings > 1 else ()
            by_value = {value: score.samples} if axis != RATE else score.by_rate or {}
            line |= {position: (samples, seeds) for position, samples in by_value.items()}
    return line


QUANTIFIED = re.compile(r"\b(?:every|some)\s+(?:'[^']*'|\"[^\"]*\"|[^\s()'\"]+)")


def bind(text: str, ladders: Mapping[str, Ladder], tasks: Mapping[str, str]) -> list[list[AskedInequality]]:
    """Bind the inequality of a line to arms at every place that it names: a group for each choice of `every`, within
    which one that holds is enough.

    Args:
        ladders: what each known name stands for.
        tasks: the tasks of the study → the code of their family, such as TC.

    Raises `InputError` for a line that leaves the grammar; for a name of an arm, a model or a task that is not known,
    with those that are; and where the names are nowhere there together.
    """
    try:
        line = parse_inequality(text)
        for operand in line.operands:
            check_name(operand, ladders)
        return place_inequality(line, ladders, tasks)
    except InputError as error:
        raise InputError(f"'{clipped(text)}': {error}") from None


def place_inequality(
    line: AskedInequality, ladders: Mapping[str, Ladder], tasks: Mapping[str, str]
) -> list[list[AskedInequality]]:
    """Write the inequality for every place, in groups as `bind` returns them."""
    groups: dict[tuple[object, ...], list[AskedInequality]] = {}
    spots = find_spots(line, ladders)
    for task in expand_tasks(line.place.get("tasks", (MEAN_OF_FAMILIES,)), tasks):
        for (model, budget), choices in spots:
            for chosen in itertools.product(*choices):
                terms, weights = [], defaultdict[object, float](float)
                for term in chosen:
                    (term_task,) = expand_tasks(term.place.get("tasks", (task,)), tasks)
                    terms.append(replace(term, task=term_task))
                    weights[term.function, term.axis, term.arms, term_task] += term.weight
                if not any(weights.values()):  # it compares an arm with itself
                    continue
                # Of those that differ in no `every` and in no named place, one is enough.
                at = zip(find_quantifiers(line.place), (task, budget, model), strict=True)
                every = [term.kind for term in terms if term.quantifier == "every"]
                key = (*(value for word, value in at if word != "some"), *every)
                label, ladder = label_choice(line, terms, task, (model, budget)), baseline_ladder(line, ladders, model)
                groups.setdefault(key, []).append(replace(line, operands=tuple(terms), label=label, ladder=ladder))
    if not groups:
        lack = "a second model or budget is needed, for here all names are one arm"
        raise InputError(lack + whole_names(line, ladders))
    return list(groups.values())


def whole_names(line: AskedInequality, ladders: Mapping[str, Ladder]) -> str:
    """Hint at whole names, by which an inequality can compare arms that differ in model or budget."""
    arms = set[str]()
    for operand in line.operands:
        arms.update(*(by_kind.values() for by_kind in ladders[operand.name].values()))
    return f"; other models or budgets have whole names, such as {show_list(sorted(arms)[-2:])}"


def check_name(operand: Operand, ladders: Mapping[str, Ladder]) -> None:
    """Raises `InputError` for a name that stands for no arm, or for several where one is wanted."""
    refuse_unknown("unknown arm", operand.name, ladders)
    if not ladders[operand.name]:
        raise InputError(f"no arm is '{operand.name}'")
    is_group = any(len(arms) > 1 for arms in ladders[operand.name].values())
    if is_group and (operand.axis == RATE or not (operand.quantifier or operand.function)):
        raise InputError(
            f"'{operand.name}' is that of several arms of one model and budget; name one, or say "
            "every, some, or which function of them over an axis"
        )


def label_choice(line: AskedInequality, terms: Sequence[Operand], task: str, spot: Spot) -> str:
    """Write the left side with the names of the arms that stand for `every` and `some`, and the place."""
    kinds = iter([term.kind for term in terms if term.quantifier])
    left_side = re.split(r"[<>]", line.text, maxsplit=1)[0].strip()
    filled_in = QUANTIFIED.sub(lambda match: next(kinds, match[0]), left_side)
    is_open = any("tasks" not in operand.place for operand in line.placed)
    return " ".join(filter(None, [filled_in, f"on {task}" if is_open else "", show_spot(spot)]))


def expand_tasks(words: Sequence[str], tasks: Mapping[str, str]) -> list[str]:
    """Return the names of tasks and codes of families that `words` stand for, and `average` for itself."""
    families, task_names = list(dict.fromkeys(tasks.values())), [*tasks]
    names = {MEAN_OF_FAMILIES: [MEAN_OF_FAMILIES]} | {task: [task] for task in tasks}
    names |= dict.fromkeys(("every family", "some family"), families)
    names |= dict.fromkeys(("every task", "some task"), task_names)
    codes = {family: family for family in families} | FAMILY_CODES
    names |= {phrase: [code] for phrase, code in codes.items() if code in families and phrase not in tasks}
    expanded: list[str] = []
    for name in words:
        refuse_unknown("unknown task or family", name, names)
        expanded += names[name]
    return list(dict.fromkeys(expanded))


def find_spots(line: AskedInequality, ladders: Mapping[str, Ladder]) -> list[tuple[Spot, list[list[Operand]]]]:
    """List where the inequality is to hold, with the choices of each operand there: at models and budgets that every
    operand has, or once, where each operand is a single arm or has a place of its own. Raises `InputError` for an
    unknown model and where there is no such place."""
    spots = [spot for operand in line.placed for spot in ladders[operand.name]]
    models = sorted(dict.fromkeys(model for model, _ in spots), key=num_parameters)
    wanted_model, wanted_budget = line.place.get("model"), line.place.get("budget")
    if wanted_model not in (None, *QUANTIFIERS, "largest", "smallest", *models):
        raise InputError(f"unknown model '{wanted_model}'; known: {', '.join(models)}")
    varied = [operand for operand in line.placed if not is_one_arm(operand, ladders[operand.name])]
    is_at_budgets = any(operand.axis != "budget" and "budget" not in operand.place for operand in varied)
    is_for_models = any("model" not in operand.place for operand in varied)
    budgets = sorted({budget for _, budget in spots}) if is_at_budgets else [0]
    candidates = itertools.product(models if is_at_budgets or is_for_models else [""], budgets)
    # What `the largest` on a term is chosen among.
    shared = set(spots).intersection(*(ladders[operand.name] for operand in varied)) or set(spots)
    # Where all operands are the same arms as at an earlier place, nothing new is asked.
    by_spot: dict[Spot, list[list[Operand]]] = {}
    for spot in candidates:
        choices = [bind_operand(operand, ladders[operand.name], spot, shared) for operand in line.placed]
        if all(choices) and choices not in by_spot.values():
            by_spot[spot] = choices
    chosen_model = choose_among(wanted_model, [model for model, _ in by_spot])
    chosen = []
    for (model, budget), choices in by_spot.items():
        budgets = [of_model for name, of_model in by_spot if name == model]
        if chosen_model in (None, model) and choose_among(wanted_budget, budgets) in (None, budget):
            chosen.append(((model, budget), choices))
    if not chosen:
        names = " and ".join(dict.fromkeys(f"'{operand.name}'" for operand in line.operands))
        ladders_known = []
        for name in dict.fromkeys(operand.name for operand in line.placed):
            ladders_known.append(f"{name} for {'; '.join(map(show_spot, sorted(ladders[name])))}")
        message = f"{names} share no model and budget there; known: {', '.join(ladders_known)}"
        raise InputError(message + whole_names(line, ladders))
    return chosen


def choose_among(word: Any, ascending: Sequence[Any]) -> Any:
    """Resolve `largest` and `smallest` among values in ascending order; return any other value itself, and None for a
    quantifier."""
    if word in ("largest", "smallest") and ascending:
        return ascending[-1] if word == "largest" else ascending[0]
    return None if word in QUANTIFIERS else word


def is_one_arm(operand: Operand, ladder: Ladder) -> bool:
    """Tell whether a name is that of a single arm, which is the same at every spot."""
    return len(ladder) == 1 and operand.name in next(iter(ladder.values())).values()


def bind_operand(operand: Operand, ladder: Ladder, spot: Spot, shared: Set[Spot]) -> list[Operand]:
    """Return the operands that one with a name may become at a spot: with its arm, with each arm of its group, or with
    all arms that its function is over; none where it has no arm there."""
    (model, budget), place = spot, operand.place
    if is_one_arm(operand, ladder):
        (arms,) = ladder.values()
    else:
        if "model" in place:
            model = choose_among(place["model"], sorted({of_shared for of_shared, _ in shared}, key=num_parameters))
        if "budget" in place and (budgets := sorted(b for m, b in shared if m == model)):
            budget = choose_among(place["budget"], budgets)
        arms = ladder.get((model, budget), {})
        if operand.axis == "budget":
            of_model = [ladder[spot].values() for spot in sorted(ladder) if spot[0] == model]
            arms = {arm: arm for members in of_model for arm in members}
    if operand.function:
        return [replace(operand, arms=tuple(arms.values()))] if arms else []
    return [replace(operand, arms=(arm,), kind=kind) for kind, arm in arms.items()]


def baseline_ladder(line: AskedInequality, ladders: Mapping[str, Ladder], model: str) -> tuple[str, ...]:
    """Return the arms of a compute equivalent's baseline for a model, smallest budget first."""
    if not line.is_equivalent:
        return ()
    name = line.operands[1].name
    by_budget = {budget: arms for (size, budget), arms in ladders[name].items() if model in ("", size)}
    rungs = [(budget, arm) for budget in sorted(by_budget) for arm in by_budget[budget].values()]
    if len(rungs) < 2:
        raise InputError(f"'{name}' has one budget; a baseline's ladder has two or more")
    refuse_gaps(rungs)
    return tuple(arm for _, arm in rungs)


def make_line(groups: Sequence[Sequence[AskedInequality]], results: ResultSet) -> Claim:
    """Make a claim of a line at all its places; `groups` is that of `bind`.

    "The sum lies below the bound" becomes "minus the sum lies above minus the bound"; "a compute equivalent, in FLOPs,
    is below 0.6" becomes "the arm is above the baseline's line at 1 / 0.6 of the arm's compute".
    """
    line = groups[0][0]
    words = (*find_quantifiers(line.place), *(operand.quantifier for operand in line.operands))
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
            # That none holds is not known of those without scores.
            lacks_below = (*best.lacks_below, *(f"not tested: {lack}" for lack in lacks))
            inequalities.append(replace(best, lacks_below=lacks_below))
    return Claim(line.text, tuple(inequalities), tuple(untested))


def measure(line: AskedInequality, results: ResultSet) -> Inequality:
    """Measure the sum that is to lie above the bound. Raises `InputError` that says which scores are lacking."""
    refuse_lacking(line, results)
    first, sign, arms = line.operands[0], line.sign, {arm.name: arm for arm in results.arms}
    label, beside = line.label if sign > 0 else f"−({line.label})", ""
    gap: Contrast | None = None
    datasets = list_datasets(first.task, results)

    def contrast_ladder(names: Sequence[str]) -> Contrast:
        at_share = contrast_at_share(results, arms[first.arms[0]], ladder, line.bound, names)
        by_seed = tuple(-sign * value for value in at_share.by_seed)
        return replace(at_share, estimate=-sign * at_share.estimate, by_seed=by_seed)

    if line.is_equivalent:
        ladder = [arms[name] for name in line.ladder]
        gap = contrast_ladder(datasets)
        sides = [(-sign, arms[first.arms[0]], first.task), *((sign, rung, first.task) for rung in ladder)]
        owners = ("the arm’s", "the baseline’s")[:: -int(sign)]
        beside = f"the baseline with {show_estimate(1 / line.bound)} times the arm’s FLOPs"
        label = f"{line.label}: {' score minus '.join(owners)}, {beside}"
    elif first.function == "spread":
        gap, values = contrast_spreads(line.operands, arms, results)
        gap = replace(gap, estimate=sign * gap.estimate)
        label = f"{label} ({first.axis} {', '.join(f'{value:g}' for value in values)})"
        # A spread is over what did not diverge, by its definition: that counts on neither side.
        sides = [(0.0, arms[name], term.task) for term in line.operands for name in term.arms]
    else:
        sides = [(sign * weight, arm, task) for weight, arm, task in weigh_arms(line.operands, arms)]
    weighted: list[tuple[float, Result]] = []
    for weight, arm, task in sides:
        parts = list_parts(task, results)
        weighted += [(weight / len(parts), results.scores[arm.name][part]) for part in parts]
    bound = 0.0 if line.is_equivalent or not line.bound else sign * line.bound
    by_task: dict[str, Contrast] = {}
    if first.function != "spread" and len({task for *_, task in sides}) == 1:  # it is about one mean over tasks
        for name in datasets:
            on_task = [(weight, results.scores[arm.name][name]) for weight, arm, _ in sides]
            by_task[name] = contrast_ladder([name]) if line.is_equivalent else contrast(on_task)
    gap = replace(gap, has_one_seed=have_one_seed(score for _, score in weighted)) if gap else contrast(weighted)
    lacks = find_lacks(weighted, results.planned_runs)
    compared = frozenset(arm.name for _, arm, _ in sides)
    return Inequality(label, gap, bound, *lacks, by_task=by_task, arms=compared, beside=beside)


def refuse_lacking(line: AskedInequality, results: ResultSet) -> None:
    """Raises `InputError` where an arm lacks a score, also one that is planned, on a task, in a family, or on
    average."""
    for term in line.operands:
        tasks, parts = results.planned_tasks.items(), list_parts(term.task, results)
        due = [name for name, family in tasks if term.task in (name, family, MEAN_OF_FAMILIES)]
        for arm in (*term.arms, *line.ladder):
            scores = results.scores.get(arm, {})
            lost = [name for name in due if name not in scores]
            if scores and lost:
                raise InputError(f"no scores of {arm} on {', '.join(lost)}")
            if not parts or any(part not in scores for part in parts):
                raise InputError("no scores")


def list_parts(task: str, results: ResultSet) -> Sequence[str]:
    """List what a term's score is the mean of: all families, or the one task or family itself."""
    return results.families if task == MEAN_OF_FAMILIES else [task]


def find_lacks(
    terms: Sequence[tuple[float, Result]], planned_runs: Mapping[tuple[str, str], int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List what a weighted sum of scores lacks to be called above a bound, and what to be called below it.

    Both lists have the fine-tunings that are not there, as another rate or seed may change the score. Seeds that
    diverged are lacking on the side that their score speaks for, as its mean is that of the survivors.
    """
    above, below = dict[str, None](), dict[str, None]()
    for weight, mean in terms:
        for score in mean.parts:
            where = f"{score.arm.name} on {score.dataset}"
            num_planned = planned_runs.get((score.arm.name, score.dataset), 0)
            if score.num_runs is not None and score.num_runs < num_planned:
                lack = f"all fine-tunings of {where}: its score is by {score.num_runs} of {num_planned}"
                above[lack] = below[lack] = None
            if score.num_diverged and weight:
                num_seeds = show_count(score.num_diverged + score.num, "seed")
                lack = f"a score of {where} without divergence: it lost {score.num_diverged} of {num_seeds}"
                (above if weight > 0 else below)[lack] = None
    return tuple(above), tuple(below)


def list_datasets(task: str, results: ResultSet) -> list[str]:
    """Return the datasets of a task, of a family, or of all families."""
    return [name for part in list_parts(task, results) for name in results.datasets.get(part, ())] or [task]
