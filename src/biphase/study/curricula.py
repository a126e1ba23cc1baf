"""A curriculum as a study file writes it → the phases of a recipe.

    mlm   mlm30   mntp12.5       one objective for the whole budget; the number is the percentage of masked tokens
    25/75                        25 % of the budget CLM, then 75 % MLM
    5k+17k                       5,000 steps of CLM, then 17,000 of MLM: the budget is their sum
    mlm40-15                     a percentage that falls (or rises) linearly over its phase
    40k clm + 2k mlm20           any list of phases in steps ...
    40% mlm + 20% clm + 40% mlm  ... or in shares of the budget, which add up to 100 %

What these short forms cannot say has a name and a list of phases in the study's `curricula` (`NamedCurriculum`).
"""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Annotated, Any

from pydantic import Field

from biphase.config import PositiveCount, Strict, parse_config
from biphase.errors import InputError, nearest
from biphase.recipe import Phase

SHORT_OBJECTIVES = ("clm", "mlm", "mntp")
"""The words for objectives in the short forms: those of a recipe's phase."""

NUMBER = r"\d+(?:\.\d+)?"
SPLIT_IN_SHARES = re.compile(rf"({NUMBER})/({NUMBER})")
SPLIT_IN_STEPS = re.compile(rf"({NUMBER}k?)\+({NUMBER}k?)")
SHORT_PHASE = re.compile(
    rf"(?:(?P<amount>{NUMBER})(?P<unit>k|%|)\s+)?(?P<objective>[a-z]+)(?P<percent>{NUMBER})?(?:(?<=\d)-(?P<to>{NUMBER}))?"
)
"""`40k clm`, `25% mlm20`, `500 mntp`, `mlm`, `mlm40-15`."""


class NamedCurriculum(Strict):
    """A list of phases with a name, for what the short forms cannot say."""

    name: str
    phases: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    """Each has the keys of a recipe's phase, and `share` of the budget in place of `steps` where wanted."""
    repeat: Annotated[PositiveCount, Field(le=10_000)] = 1
    """How often the list is gone through: shares and steps are those of one round."""


PhaseTemplate = tuple[Phase, Fraction | None]
"""A phase with its own number of steps and None, or with a single step and its share of a budget not known yet."""


def read_steps(value: Any) -> Any:
    """`42k` → 42000. What is not written so is handed back, for the check that follows."""
    match = re.fullmatch(rf"({NUMBER})k", value) if isinstance(value, str) else None
    if match is None:
        return value
    steps = Fraction(match[1]) * 1000
    return int(steps) if steps.denominator == 1 else value


def write_steps(steps: int) -> str:
    """42000 → `42k`."""
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def curriculum_label(text: str) -> str:
    """A curriculum as part of a name: `25/75` → `25-75`."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


def read_curriculum(
    text: str, named: Mapping[str, NamedCurriculum], mask_probability: float
) -> tuple[PhaseTemplate, ...]:
    """The phases of a name in `named` or of a short form; masked ones that say no percentage get `mask_probability`.

    Raises `InputError` for what is neither of the two, and for a phase that no recipe could have.
    """
    if text in named:
        return read_named_phases(named[text], mask_probability)
    long_form = text
    if split := SPLIT_IN_SHARES.fullmatch(text):
        long_form = f"{split[1]}% clm + {split[2]}% mlm"
    elif split := SPLIT_IN_STEPS.fullmatch(text):
        long_form = f"{split[1]} clm + {split[2]} mlm"
    templates = []
    for piece in long_form.split("+"):
        match = SHORT_PHASE.fullmatch(piece.strip())
        if match is None or match["objective"] not in SHORT_OBJECTIVES:
            raise InputError(
                f"unknown curriculum '{text}'{nearest(text, [*named, *SHORT_OBJECTIVES])}; short forms are such as "
                "mlm30, 25/75, 5k+17k and 40k clm + 2k mlm20"
            )
        where = f"curriculum '{text}'"
        amount, unit, objective, percent, to = match.group("amount", "unit", "objective", "percent", "to")
        settings: dict[str, Any] = {"objective": objective}
        if objective == "clm" and percent:
            raise InputError(f"{where}: clm masks nothing; write clm, not clm{percent}")
        if to:
            settings["mask_probability"] = {"from": float(percent) / 100, "to": float(to) / 100}
        elif objective != "clm":
            settings["mask_probability"] = float(percent) / 100 if percent else mask_probability
        # Without an amount, a phase has all of the budget.
        if amount is None or unit == "%":
            templates.append(make_template(settings, None, Fraction(amount or "100") / 100, where))
            continue
        steps = Fraction(amount) * (1000 if unit == "k" else 1)
        if steps.denominator != 1:
            raise InputError(f"{where}: {amount}{unit} is no whole number of steps")
        templates.append(make_template(settings, int(steps), None, where))
    return tuple(templates)


def read_named_phases(curriculum: NamedCurriculum, mask_probability: float) -> tuple[PhaseTemplate, ...]:
    """The phases of all rounds: a round's shares are of the budget of that round."""
    one_round = []
    for number, given in enumerate(curriculum.phases):
        where = f"curriculum '{curriculum.name}', phase {number}"
        if ("steps" in given) == ("share" in given):
            raise InputError(f"{where} needs either steps or share")
        settings = {key: value for key, value in given.items() if key not in ("steps", "share")}
        if settings.get("objective") != "clm":
            settings = {"mask_probability": mask_probability, **settings}
        if "steps" in given:
            one_round.append(make_template(settings, read_steps(given["steps"]), None, where))
            continue
        share = given["share"]
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InputError(f"{where}: share is {share!r}, not a number above 0 and up to 1")
        one_round.append(make_template(settings, None, Fraction(str(share)) / curriculum.repeat, where))
    return tuple(one_round) * curriculum.repeat


def make_template(settings: Mapping[str, Any], steps: Any, share: Fraction | None, where: str) -> PhaseTemplate:
    """The template of a phase in `steps` or of a `share`. Raises `InputError` for what a recipe would refuse."""
    tree = {**settings, "steps": steps if share is None else 1}
    return parse_config(Phase, tree, origin=where), share


def fill_budget(templates: tuple[PhaseTemplate, ...], budget: int | None, where: str) -> tuple[Phase, ...]:
    """The phases within a budget of steps. Shares round where each phase ends, so that the sum is the budget."""
    shares = [share for _, share in templates if share is not None]
    if shares and len(shares) < len(templates):
        raise InputError(f"{where} mixes steps and shares; use one of the two")
    if shares:
        # Ends of phases as shares of the budget: 1/4, 3/4 → 1/4, 1.
        reached = list(accumulate(shares))
        if abs(float(reached[-1]) - 1) > 1e-6:
            raise InputError(f"{where} is impossible: its shares add up to {float(reached[-1]):.4%}, not 100 %")
        if budget is None:
            raise InputError(f"{where} needs budgets, such as budgets: [12k]")
        ends = [round(share * budget) for share in reached]
        steps = [end - begin for begin, end in pairwise([0, *ends])]
    else:
        steps = [phase.steps for phase, _ in templates]
        if budget not in (None, sum(steps)):
            raise InputError(f"{where} has {sum(steps)} steps, which is not the budget of {budget}; leave budgets out")
    if min(steps) < 1:
        raise InputError(f"{where} gives one of its phases less than a step of {budget}")
    phases = []
    for (phase, _), count in zip(templates, steps, strict=True):
        phases.append(phase.model_copy(update={"steps": count}))
    return join_phases(phases)


def join_phases(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """The same training with as few phases as it takes: neighbours alike become one."""
    joined: list[Phase] = []
    for phase in phases:
        # Settings of masking mean nothing under CLM; without them, two CLM phases are alike.
        plain = Phase(objective="clm", steps=phase.steps) if phase.objective == "clm" else phase
        if joined and are_alike(joined[-1], plain) and not plain.is_ramped:
            plain = plain.model_copy(update={"steps": joined.pop().steps + plain.steps})
        joined.append(plain)
    return tuple(joined)


def are_alike(phase: Phase, other: Phase) -> bool:
    """Whether two phases differ in their steps at most, and the shorter one is how the longer one begins."""
    if phase.is_ramped and phase.steps != other.steps:
        return False
    return phase.model_copy(update={"steps": other.steps}) == other
