"""A line of text that predicts scores → an inequality over names of arms, tasks and budgets.

    25/75 - mlm40 > 0 on token_classification at every budget
    (mlm40 - clm on QA) - (mlm40 - clm on SC) > 0 for every model
    some 'equal budget' - mlm40 > 0 on every task
    trend(masking over mask) > 0 on retrieval
    mntp - clm within 2 points on token_classification
    mntp - mlm40 < -0.05 nats on loss
    compute_equivalent(stack, mlm40) < 0.6 at the largest budget

The grammar is in `inequality.lark`. A name means an arm, an arm at several budgets, or a group of arms. A place after
a term applies to that term; after the last term of a sum, or after a bracket, it applies to the whole sum. A place
after the number applies to the inequality, which by default is about every budget, every model, and the average over
families. `loss` is the held-out loss in the end. `some` asks for at least one; `every` is chosen before `some`.
`report.hypotheses` documents the functions. Nothing executes the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from lark import Lark, Token, UnexpectedCharacters, UnexpectedToken

from biphase.errors import SOURCE, InputError, clipped
from biphase.report.results import read_words

QUANTIFIERS = ("every", "some")
RATE = "rate"
QUOTES = "'\""
MOST_BRACKETS = 50


Place = Mapping[str, Any]
"""The place of an inequality or of a term; missing keys are open:

    tasks   a tuple of families, tasks or `average`; or of one phrase such as `every family` or `some task`
    budget  `every`, `some`, `largest`, `smallest`, or steps
    model   `every`, `some`, `largest`, `smallest`, or a name
"""


def find_quantifiers(place: Place) -> tuple[str, str, str]:
    """Return `every` or `some` for the tasks, the budget and the model of a place; empty for fixed or open ones."""
    first, *_ = place.get("tasks", ("",))
    words = (first.partition(" ")[0], place.get("budget"), place.get("model"))
    task, budget, model = (str(word) if word in QUANTIFIERS else "" for word in words)
    return task, budget, model


@dataclass(frozen=True)
class Operand:
    """A name with its weight in the sum; once bound, also its arms."""

    weight: float
    name: str
    place: Place = field(default_factory=dict)
    quantifier: str = ""
    """`every` or `some`, if it stands before the name of a group."""
    function: str = ""
    axis: str = ""
    arms: tuple[str, ...] = ()
    """The arm, or all arms over which the function goes."""
    short_name: str = ""
    """The short name of the arm in its group."""
    task: str = ""
    """A task, a family, or the average over families."""


@dataclass(frozen=True)
class AskedInequality:
    """An inequality: about names as parsed, about arms of a study at one place once bound."""

    text: str
    operands: tuple[Operand, ...]
    """All operands as parsed; once bound, the `placed` ones, each with its arms and its task."""
    is_equivalent: bool
    """Whether it bounds the compute equivalent of the first operand, with the second operand as the baseline."""
    sign: float
    """1 for `>`, -1 for `<`."""
    bound: float
    """The right side: a difference of scores as a share, a difference of losses in nats, or a share of compute."""
    place: Place
    unit: str = ""
    """`point` or `nat`, if the bound has a unit."""
    is_equivalence: bool = False
    """Whether the sum lies between `-bound` and `bound`; its `sign` is 1."""
    label: str = ""
    """The left side with its place, and with names of arms instead of `every` and `some`."""
    baseline: tuple[str, ...] = ()
    """The arms of a compute equivalent's baseline, smallest budget first; () for other inequalities."""

    @property
    def placed(self) -> tuple[Operand, ...]:
        """The operands with a place: all but a baseline, which has all its budgets."""
        return self.operands[:1] if self.is_equivalent else self.operands


SyntaxTree = Any
"""A `lark.Tree`. Its `data` is the name of a rule; its `children` are trees, tokens, and None for an absent `[ ]`."""


@cache
def make_parser() -> Lark:
    grammar = (SOURCE / "report" / "inequality.lark").read_text("utf-8")
    return Lark(grammar, start="inequality", parser="lalr")


def parse_inequality(text: str) -> AskedInequality:
    """Parse a line of text. Raises `InputError` with the first word that is not in the grammar."""
    if text.count("(") > MOST_BRACKETS:
        raise InputError(f"more than {MOST_BRACKETS} brackets")
    line = " ".join(text.split())
    try:
        tree: SyntaxTree = make_parser().parse(line)
    except UnexpectedToken as error:
        expected = [words for terminal, words in read_words()["terminals"].items() if terminal in error.accepts]
        next_token = f"'{clipped(error.token.strip(QUOTES), 20)}'" if error.token else "the end"
        raise InputError(f"expected {' or '.join(expected)} instead of {next_token}") from None
    except UnexpectedCharacters as error:
        rest = clipped(line[error.pos_in_stream :], 20)
        raise InputError(f"'{rest}' is not in the grammar; perhaps a quote is not closed") from None
    left, sign, number, *places = tree.children
    bound, is_equivalent, is_equivalence = float(number), left.data == "equivalent", sign == "within"
    unit = "" if is_equivalent else str(places.pop(0) or "").rstrip("s")
    if is_equivalent:
        arm, baseline = left.children
        operands = [Operand(1.0, arm.strip(QUOTES)), Operand(-1.0, baseline.strip(QUOTES))]
    else:
        operands = read_sum(left)
    spreads = {term.function == "spread" and (term.axis, term.place.get("tasks")) for term in operands}
    if len(spreads) > 1:
        raise InputError("a spread can only be compared with spreads over the same axis on the same task")
    place = read_places(places)
    if is_equivalence and bound <= 0:
        raise InputError("scores lie within a number of points above 0 of each other")
    if is_equivalence and "some" in (*find_quantifiers(place), *(operand.quantifier for operand in operands)):
        raise InputError("'some' asks which difference is the strongest; name the arms and places of an equivalence")
    bound *= 0.01 if unit == "point" else 1.0
    direction = -1.0 if sign == "<" else 1.0
    return AskedInequality(text, tuple(operands), is_equivalent, direction, bound, place, unit, is_equivalence)


def read_sum(tree: SyntaxTree) -> list[Operand]:
    """Read the operands of a sum, each with its weight and its place."""
    operands: list[Operand] = []
    place: Place = {}
    sign = 1.0
    for child in tree.children:
        if isinstance(child, Token):
            sign = 1.0 if child == "+" else -1.0
            continue
        factor, content, *places = child.children
        place = read_places(places)
        if any(find_quantifiers(place)) or len(place.get("tasks", ())) > 1:
            raise InputError("a term has one place; write several after the number")
        scale = sign * float(factor or 1)
        # A place next to a name overrides the place after the bracket around it.
        for operand in read_sum(content) if content.data == "sum" else [read_arm(content)]:
            operands.append(replace(operand, weight=scale * operand.weight, place={**place, **operand.place}))
    return [replace(operand, place={**place, **operand.place}) for operand in operands]


def read_arm(tree: SyntaxTree) -> Operand:
    """Read an arm, or a function of arms over an axis, as an operand of weight 1."""
    if tree.data == "arm":
        quantifier, name = tree.children
        return Operand(1.0, name.strip(QUOTES), quantifier=str(quantifier or ""))
    function, name, axis = map(str, tree.children)
    return Operand(1.0, name.strip(QUOTES), function=function, axis=axis)


def read_places(trees: Sequence[SyntaxTree]) -> Place:
    """Read the tasks, the budget and the model that a place names."""
    place: dict[str, Any] = {}
    for tree in trees:
        first = tree.children[0]
        if tree.data == "tasks":
            place["tasks"] = tuple(name.strip(QUOTES) for name in tree.children)
        elif first.type == "STEPS":
            place["budget"] = int(float(first.split()[0]))
        elif first.type == "NAME":
            place["model"] = first.strip(QUOTES)
        else:  # `every model` → `every`, `the largest budget` → `largest`
            place[tree.data] = first.split()[-2]
    return place
