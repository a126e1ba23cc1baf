"""An inequality over names → the same over arms that a study has, at every place where it is to hold."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from biphase.errors import InputError, nearest
from biphase.report.grammar import EQUIVALENT, MEAN_OF_FAMILIES, Operand, ParsedInequality
from biphase.report.results import FAMILY_CODES, FAMILY_NAMES, num_parameters

Spot = tuple[str, int]
"""A model's name (a size) and a budget in steps."""
Ladder = Mapping[Spot, str]
"""What a name in an inequality stands for: the arm at every model and budget that it is there for."""


@dataclass(frozen=True)
class AskedTerm:
    """A weighted score: an arm on a task, a family, or the average over families."""

    weight: float
    arm: str
    task: str


@dataclass(frozen=True)
class AskedInequality:
    """An inequality at one place, over arms that the study has."""

    label: str
    terms: tuple[AskedTerm, ...]
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
            raise InputError(f"'{line.text}': unknown arm '{operand.name}'{nearest_of_all(operand.name, ladders)}")
        if not ladders[operand.name]:
            raise InputError(
                f"'{line.text}': '{operand.name}' is that of several arms of one model and budget; name one"
            )
    spots = list(find_spots(line, ladders))
    if not spots:
        names = " and ".join(dict.fromkeys(f"'{operand.name}'" for operand in line.operands))
        raise InputError(f"'{line.text}': {names} share no model and budget there; known: {known_spots(line, ladders)}")
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
                terms.append(AskedTerm(operand.weight, arm, own))
            label = " ".join(filter(None, [left_side, f"on {task}" if is_open else "", spot_label(spot)]))
            asked.append(AskedInequality(label, tuple(terms), baseline_ladder(line, ladders, spot)))
    return asked


def nearest_of_all(word: str, known: Mapping[str, object]) -> str:
    """The nearest name, and all that are known."""
    hint = nearest(word, known)
    return hint if hint.startswith("; known") else f"{hint} known: {', '.join(sorted(known))}"


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
    fixed = all(is_fixed(operand, ladders[operand.name]) for operand in line.placed)
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
        own = [b for m, b in there if m == model]
        at_budget = {"largest": max(own), "smallest": min(own)}.get(str(line.place.budget), line.place.budget)
        for_model = {"largest": whole[-1:], "smallest": whole[:1]}.get(str(line.place.model), [line.place.model])
        if at_budget in (None, "every", budget) and (for_model[:1] in ([], [None], ["every"]) or model in for_model):
            yield model, budget


def is_fixed(operand: Operand, ladder: Ladder) -> bool:
    """Whether it is the same arm wherever it is asked about."""
    has_model = operand.place.model is not None or len({model for model, _ in ladder}) == 1
    return len(ladder) == 1 or (operand.place.budget is not None and has_model)


def find_arm(operand: Operand, ladder: Ladder, spot: Spot) -> str | None:
    """The arm that an operand is at a place; None where it is not there."""
    if len(ladder) == 1:
        return next(iter(ladder.values()))
    model, budget = spot
    models = sorted(dict.fromkeys(own for own, _ in ladder), key=num_parameters)
    if operand.place.model is not None:
        model = {"largest": models[-1], "smallest": models[0]}.get(operand.place.model, operand.place.model)
    elif len(models) == 1 and not model:
        model = models[0]
    own = [b for m, b in ladder if m == model]
    if operand.place.budget is not None and own:
        chosen = {"largest": max(own), "smallest": min(own)}.get(str(operand.place.budget), operand.place.budget)
        budget = int(chosen)
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


def known_spots(line: ParsedInequality, ladders: Mapping[str, Ladder]) -> str:
    """Models and budgets of each operand, for an error."""
    lines = []
    for name in dict.fromkeys(operand.name for operand in line.placed):
        lines.append(f"{name} for {'; '.join(spot_label(spot) for spot in sorted(ladders[name]))}")
    return ", ".join(lines)
