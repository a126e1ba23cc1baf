"""An inequality over names → the same over arms that a study has, at every place where it is to hold; with results, a
claim."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from biphase.errors import InputError, nearest
from biphase.report.claims import Claim, Tested, make_claim, make_inequality
from biphase.report.contrasts import Contrast, Terms, contrast
from biphase.report.equivalents import contrast_at_share
from biphase.report.grammar import EQUIVALENT, MEAN_OF_FAMILIES, Operand, ParsedInequality
from biphase.report.results import FAMILY_CODES, FAMILY_NAMES, ReportArm, Result, ResultSet, num_parameters

Spot = tuple[str, int]
"""A model's name (a size) and a budget in steps."""
Ladder = Mapping[Spot, str]
"""What a name in an inequality stands for: the arm at every model and budget that it is there for."""


@dataclass(frozen=True)
class AskedInequality:
    """An inequality at one place, over arms that the study has."""

    line: ParsedInequality
    label: str
    terms: tuple[tuple[float, str, str], ...]
    """Weight, arm, and a task, a family, or the average over families."""
    ladder: tuple[str, ...] = ()
    """For a compute equivalent: the arms of the baseline, smallest budget first."""


def bind(line: ParsedInequality, ladders: Mapping[str, Ladder], tasks: Mapping[str, str]) -> list[AskedInequality]:
    """The inequality at every place that it names.

    Args:
        ladders: what each known name stands for.
        tasks: the tasks of the study → the code of their family, such as TC.

    Raises `InputError` for a name of an arm, a model or a task that is not known, with those that are, and where the
    names are nowhere there together.
    """
    for operand in line.operands:
        if operand.name not in ladders:
            hint = nearest(operand.name, ladders)
            told = hint if hint.startswith("; known") else f"{hint} known: {', '.join(sorted(ladders))}"
            raise InputError(f"'{line.text}': unknown arm '{operand.name}'{told}")
        if not ladders[operand.name]:
            raise InputError(
                f"'{line.text}': '{operand.name}' is that of several arms of one model and budget; name one"
            )
    spots = list(find_spots(line, ladders))
    if not spots:
        names = " and ".join(dict.fromkeys(f"'{operand.name}'" for operand in line.operands))
        known = []
        for name in dict.fromkeys(operand.name for operand in line.placed):
            known.append(f"{name} for {'; '.join(map(spot_label, sorted(ladders[name])))}")
        raise InputError(f"'{line.text}': {names} share no model and budget there; known: {', '.join(known)}")
    asked = []
    left_side = re.split(r"[<>]", line.text, maxsplit=1)[0].strip()
    is_open = any(operand.place.tasks is None for operand in line.placed)
    for task in expand_tasks(line.place.tasks or (MEAN_OF_FAMILIES,), tasks, line.text):
        for spot in spots:
            terms = []
            for operand in line.placed:
                (own,) = expand_tasks(operand.place.tasks, tasks, line.text) if operand.place.tasks else (task,)
                arm = find_arm(operand, ladders[operand.name], spot)
                assert arm is not None
                terms.append((operand.weight, arm, own))
            label = " ".join(filter(None, [left_side, f"on {task}" if is_open else "", spot_label(spot)]))
            asked.append(AskedInequality(line, label, tuple(terms), baseline_ladder(line, ladders, spot)))
    return asked


def spot_label(spot: Spot) -> str:
    model, budget = spot
    return ", ".join(filter(None, [model, f"{budget:,} steps" if budget else ""]))


def expand_tasks(wanted: Sequence[str], tasks: Mapping[str, str], text: str) -> list[str]:
    """Names of tasks, codes of families, or `average`."""
    by_words = {**{code: code for code in FAMILY_NAMES}, **FAMILY_CODES}
    there = list(dict.fromkeys(tasks.values()))
    found: list[str] = []
    for name in wanted:
        if name == "every family":
            found += there
        elif name == "every task":
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


def find_spots(line: ParsedInequality, ladders: Mapping[str, Ladder]) -> Iterator[Spot]:
    """Where the inequality is to hold: models and budgets at which every operand is there, or once, where each operand
    is a single arm or has places of its own."""
    known = [spot for operand in line.placed for spot in ladders[operand.name]]
    models = sorted(dict.fromkeys(model for model, _ in known), key=num_parameters)
    if line.place.model not in (None, "every", "largest", "smallest") and line.place.model not in models:
        raise InputError(f"'{line.text}': unknown model '{line.place.model}'; known: {', '.join(models)}")
    # An operand is fixed that is the same arm wherever it is asked about.
    fixed = True
    for operand in line.placed:
        ladder = ladders[operand.name]
        has_model = operand.place.model is not None or len({model for model, _ in ladder}) == 1
        fixed &= len(ladder) == 1 or (operand.place.budget is not None and has_model)
    budgets = sorted({budget for _, budget in known})
    candidates = [("", 0)] if fixed else [(model, budget) for model in models for budget in budgets]
    # Where all operands are the same arms as at an earlier place, nothing new is asked.
    arms = {
        spot: tuple(find_arm(operand, ladders[operand.name], spot) for operand in line.placed) for spot in candidates
    }
    first = {asked: spot for spot, asked in reversed(arms.items())}
    there = [spot for spot, asked in arms.items() if None not in asked and first[asked] == spot]
    whole = [model for model in models if any(model == own for own, _ in there)]
    for model, budget in there:
        own = sorted(b for m, b in there if m == model)
        is_model = line.place.model in (None, "every") or (whole and choose_among(line.place.model, whole) == model)
        if is_model and (line.place.budget in (None, "every") or choose_among(line.place.budget, own) == budget):
            yield model, budget


def choose_among(wanted: Any, known: Sequence[Any]) -> Any:
    """`largest` or `smallest` of what is known, in its order; what is named otherwise is itself."""
    return {"largest": known[-1], "smallest": known[0]}.get(str(wanted), wanted)


def find_arm(operand: Operand, ladder: Ladder, spot: Spot) -> str | None:
    """The arm that an operand is at a place; None where it is not there."""
    if len(ladder) == 1:
        return next(iter(ladder.values()))
    model, budget = spot
    models = sorted(dict.fromkeys(own for own, _ in ladder), key=num_parameters)
    if operand.place.model is not None or (len(models) == 1 and not model):
        model = choose_among(operand.place.model or models[0], models)
    own = sorted(b for m, b in ladder if m == model)
    if operand.place.budget is not None and own:
        budget = int(choose_among(operand.place.budget, own))
    return ladder.get((model, budget))


def baseline_ladder(line: ParsedInequality, ladders: Mapping[str, Ladder], spot: Spot) -> tuple[str, ...]:
    """The arms of the baseline of a compute equivalent for the model at hand, smallest budget first."""
    if line.kind != EQUIVALENT:
        return ()
    ladder = ladders[line.operands[1].name]
    rungs = sorted((budget, arm) for (model, budget), arm in ladder.items() if model == spot[0] or not spot[0])
    if len(rungs) < 2:
        raise InputError(
            f"'{line.text}': '{line.operands[1].name}' has one budget; a baseline's ladder has two or more"
        )
    return tuple(arm for _, arm in rungs)


def make_line(asked: Sequence[AskedInequality], results: ResultSet) -> Claim:
    """A line at all its places as a claim: that a sum lies below a bound says that the contrary sum lies above its
    contrary; that a compute equivalent, in FLOPs, is below 0.6, that the arm is above the baseline's line at 1 / 0.6 of
    the arm's compute."""
    line, arms = asked[0].line, {arm.name: arm for arm in results.arms()}
    sign = 1.0 if line.relation == ">" else -1.0
    tests = list[Tested]()
    for one in asked:
        if line.kind == EQUIVALENT:
            seen, lack = at_share(one, results, arms)
            label, bound = one.label, 0.0
            if seen is not None:
                label += (
                    f": {'baseline − arm' if sign > 0 else 'arm − baseline'} at {1 / line.bound:.2g} of its compute"
                )
                seen = replace(seen, estimate=-sign * seen.estimate)
        else:
            terms = find_terms(one, results, arms)
            seen = contrast([(sign * weight, score) for weight, score in terms]) if terms else None
            label, bound, lack = one.label if sign > 0 else f"−({one.label})", sign * line.bound, "no scores"
        tests.append(f"{label} ({lack})" if seen is None else make_inequality(label, seen, bound))
    return make_claim(line.text, tests, "")


def at_share(asked: AskedInequality, results: ResultSet, arms: Mapping[str, ReportArm]) -> tuple[Contrast | None, str]:
    """The arm minus the baseline at the share of the line; None, and what is lacking, where it cannot be told."""
    [(_, arm, task)], share = asked.terms, asked.line.bound
    if not {arm, *asked.ladder} <= arms.keys():
        return None, "no scores"
    datasets = None
    if task != MEAN_OF_FAMILIES:
        datasets = results.datasets(task, results.primary_metric) if task in FAMILY_NAMES else [task]
    try:
        seen = contrast_at_share(results, arms[arm], [arms[name] for name in asked.ladder], share, datasets=datasets)
    except InputError as error:
        return None, str(error)
    return seen, f"the baseline's ladder does not reach {1 / share:.2g} of its compute"


def find_terms(asked: AskedInequality, results: ResultSet, arms: Mapping[str, ReportArm]) -> Terms | None:
    """The scores of all terms: of a task, the average of a family, or the mean of these; None where one is missing."""
    found: Terms = []
    for weight, name, task in asked.terms:
        scores: list[Result | None] = []
        if name in arms and (task == MEAN_OF_FAMILIES or task in FAMILY_NAMES):
            families = results.families if task == MEAN_OF_FAMILIES else [task]
            scores = [results.find_average(arms[name], family) for family in families]
        elif name in arms:
            own = [results.find(arms[name], family, task, results.primary_metric) for family in results.families]
            scores = [score for score in own if score is not None]
        known = [score for score in scores if score is not None]
        if not known or len(known) < len(scores):
            return None
        found += [(weight / len(known), score) for score in known]
    return found
