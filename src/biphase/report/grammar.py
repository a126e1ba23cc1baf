"""A line of text that says what scores will show → an inequality over names of arms, tasks and budgets.

    25/75 - mlm40 > 0 on token_classification at every budget
    (mlm40 - clm on QA) - (mlm40 - clm on SC) > 0 for every model
    some 'equal budget' - mlm40 > 0 on every task
    trend(masking over mask) > 0 on retrieval
    compute_equivalent(stack, mlm40) < 0.6 at the largest budget

The grammar, in which a name is an arm or one arm at several budgets, or a group of them, quoted where it has spaces:

    inequality  sum ('<' | '>') number ['point' | 'points'] places
    sum         term (('+' | '-') term)*                       operators stand between blanks
    term        [number '*'] (arm | '(' sum ')') places
                or compute_equivalent '(' name ',' name ')', which stands alone on its side
    arm         ['every' | 'some'] name | ('mean' | 'trend' | 'spread') '(' name 'over' axis ')'
    axis        'budget' | 'mask' | 'share' | 'rate'
    places      ('on' task ('and' task)* | 'at' budget | 'for' model)*
    task        'average' | ('every' | 'some') ('family' | 'task') | a family | a task
    budget      ['every' | 'some' | 'the' ('largest' | 'smallest')] 'budget' | number 'steps'
    model       ['every' | 'some' | 'the' ('largest' | 'smallest')] 'model' | a name

A place on a term fixes it for that term; on the last one of a sum, or of a bracket, for all of it. Places behind the
number say where the inequality is to hold: at each of them, by default at every budget, for every model, on the average
over families. Where `some` is said, one is enough; `every` is chosen before `some`. The functions are those of
`report.hypotheses`. Nothing in the text is run.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from biphase.errors import InputError, clipped

NO_NAMES = ("", "(", ")", ",", "*", "<", ">", "+", "-", "on", "at", "for", "and")
QUANTIFIERS = ("every", "some")
FUNCTIONS = ("mean", "trend", "spread")
RATE = "rate"
GROUP_AXES = ("budget", "mask", "share", RATE)
EQUIVALENT = "compute_equivalent"
"""The share of a baseline's FLOPs at which an arm reaches its score (`report.equivalents`)."""
QUOTES = "'\""
TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|[(),*<>]|[^\s(),*<>'\"]+")
MOST_BRACKETS = 50
NUMBER_FORM = re.compile(r"-?\d{1,15}(?:\.\d+)?(?:e-?\d{1,2})?")


Place = Mapping[str, Any]
"""What an inequality or a term of it is about; what a place does not have is left open:

    tasks   a tuple of families, tasks, or `average`, or of one of `every family`, `some task` and the like
    budget  `every`, `some`, `largest`, `smallest`, or steps
    model   `every`, `some`, `largest`, `smallest`, or a name
"""


def find_quantifiers(place: Place) -> tuple[str, str, str]:
    """Return `every` or `some` for tasks, budget and model; empty where one is fixed or left open."""
    first, *_ = place.get("tasks", ("",))
    words = (first.partition(" ")[0], place.get("budget"), place.get("model"))
    task, budget, model = (str(word) if word in QUANTIFIERS else "" for word in words)
    return task, budget, model


@dataclass(frozen=True)
class Operand:
    """A name with its weight in the sum; once it is bound, the arms of a study that it stands for."""

    weight: float
    name: str
    place: Place = field(default_factory=dict)
    quantifier: str = ""
    """`every` or `some` of the arms that the name stands for."""
    function: str = ""
    axis: str = ""
    arms: tuple[str, ...] = ()
    """The arm, or all arms that the function is over."""
    kind: str = ""
    """What the arm is called in its group."""
    task: str = ""
    """A task, a family, or the average over families."""


@dataclass(frozen=True)
class AskedInequality:
    """The inequality of a line: about names, as it is parsed; about arms of a study at one place, once it is bound."""

    text: str
    operands: tuple[Operand, ...]
    """Once they are bound, those that are `placed`, each with its arms and its task."""
    is_equivalent: bool
    """Whether it is about the compute equivalent of the first operand, by the ladder of the second."""
    sign: float
    """1 where the sum is to lie above the bound, -1 where below."""
    bound: float
    """A share of scores, or of compute."""
    place: Place
    label: str = ""
    """The left side with the names of the arms that stand for `every` and `some`, and the place."""
    ladder: tuple[str, ...] = ()
    """For a compute equivalent: the arms of the baseline, smallest budget first."""

    @property
    def quantifiers(self) -> tuple[str, str, str]:
        """`every` or `some` for tasks, budget and model, as its place has them; empty where one is fixed or open."""
        return find_quantifiers(self.place)

    @property
    def placed(self) -> tuple[Operand, ...]:
        """The operands that must be there at each place: all, but for a baseline, whose whole ladder is asked."""
        return self.operands[:1] if self.is_equivalent else self.operands


class Parser:
    """A parser of a line of text, which it reads from left to right. Raises `InputError` with the place at which the
    line leaves the grammar."""

    def __init__(self, text: str) -> None:
        if text.count("(") > MOST_BRACKETS:
            raise InputError(f"more than {MOST_BRACKETS} brackets")
        if TOKEN.sub("", text).strip():
            raise InputError("a quote is not closed")
        self.text = text
        self.tokens = TOKEN.findall(text)
        """Words, signs, and names with their quotes: a word in quotes is a name."""
        self.at = 0
        self.trailing: Place = {}
        """The place behind the last term."""

    @property
    def next(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def refuse(self, expected: str) -> NoReturn:
        next_token = f"'{clipped(self.next.strip(QUOTES), 20)}'" if self.next else "the end"
        raise InputError(f"{expected} is wanted where {next_token} stands")

    def take(self, *tokens: str) -> str:
        """Take the next token, which must be one of these."""
        if self.next not in tokens:
            self.refuse(" or ".join(f"'{token}'" for token in tokens))
        self.at += 1
        return self.tokens[self.at - 1]

    def has(self, *words: str) -> bool:
        """Take these words if they come next, and tell whether they did."""
        if tuple(self.tokens[self.at : self.at + len(words)]) != words:
            return False
        self.at += len(words)
        return True

    def name(self, noun: str) -> str:
        if self.next in NO_NAMES:
            self.refuse(noun)
        self.at += 1
        return self.tokens[self.at - 1].strip(QUOTES)

    def number(self) -> float | None:
        """Take the next word as a number; None where it is none, or where it is a name such as 25/75."""
        if not NUMBER_FORM.fullmatch(self.next):
            return None
        self.at += 1
        return float(self.tokens[self.at - 1])

    def inequality(self) -> AskedInequality:
        is_equivalent = self.has(EQUIVALENT, "(")
        if is_equivalent:
            operands = [Operand(1.0, self.name("an arm"))]
            self.take(",")
            operands.append(Operand(-1.0, self.name("an arm")))
            self.take(")")
        else:
            operands = self.sum()
        sign = 1.0 if self.take("<", ">") == ">" else -1.0
        bound = self.number()
        if bound is None:
            self.refuse("a number")
        has_unit = self.has("points") or self.has("point")
        if has_unit and is_equivalent:
            raise InputError("a share of compute has no points; write it as a number, such as 0.6")
        if bound and not has_unit and not is_equivalent:
            raise InputError(f"{bound:g} of what? Write {bound:g} points, of 100")
        place = self.place()
        if self.at < len(self.tokens):
            self.refuse("'on', 'at', 'for' or the end")
        if is_equivalent and bound <= 0:
            raise InputError("a share of compute lies above 0")
        spreads = {term.function == "spread" and (term.axis, term.place.get("tasks")) for term in operands}
        if len(spreads) > 1:
            raise InputError("a spread stands beside spreads over the same axis on the same task only")
        scale = 1.0 if is_equivalent else 0.01
        return AskedInequality(self.text, tuple(operands), is_equivalent, sign, scale * bound, place)

    def sum(self) -> list[Operand]:
        operands = self.term(1.0)
        while self.next in ("+", "-"):
            operands += self.term(1.0 if self.take("+", "-") == "+" else -1.0)
        return [replace(term, place={**self.trailing, **term.place}) for term in operands]

    def term(self, sign: float) -> list[Operand]:
        start = self.at
        factor = self.number()
        if factor is None or not self.has("*"):
            self.at, factor = start, 1.0
        if self.has("("):
            operands = self.sum()
            self.take(")")
        elif self.has(EQUIVALENT):
            raise InputError(f"{EQUIVALENT}(arm, baseline) stands alone on the left")
        else:
            operands = [self.arm()]
        place = self.trailing = self.place()
        if any(find_quantifiers(place)) or len(place.get("tasks", ())) > 1:
            raise InputError("several places stand behind the number; a term has one")
        # What stands nearer to a name goes before what stands behind the bracket around it.
        scale = sign * factor
        return [replace(term, weight=scale * term.weight, place={**place, **term.place}) for term in operands]

    def arm(self) -> Operand:
        for function in FUNCTIONS:
            if self.has(function, "("):
                name = self.name("a group of arms")
                self.take("over")
                axis = self.take(*GROUP_AXES)
                if axis == RATE and function != "spread":
                    raise InputError(f"over rates there is a spread, no {function}")
                self.take(")")
                return Operand(1.0, name, function=function, axis=axis)
        quantifier = next((word for word in QUANTIFIERS if self.has(word)), "")
        return Operand(1.0, self.name("an arm"), quantifier=quantifier)

    def place(self) -> Place:
        place: dict[str, Any] = {}
        while True:
            if self.has("on"):
                tasks = [self.task()]
                while self.has("and"):
                    tasks.append(self.task())
                place["tasks"] = tuple(tasks)
            elif self.has("at"):
                place["budget"] = self.quantified("budget") or self.steps()
            elif self.has("for"):
                place["model"] = self.quantified("model") or self.name("a model")
            else:
                return place

    def task(self) -> str:
        for word, noun in itertools.product(QUANTIFIERS, ("family", "task")):
            if self.has(word, noun):
                return f"{word} {noun}"
        return self.name("a task or a family")

    def steps(self) -> int:
        steps = self.number()
        if steps is None or not self.has("steps"):
            self.refuse("'every budget', 'the largest' or 'the smallest budget', or a number of steps, as 400 steps,")
        return int(steps)

    def quantified(self, noun: str) -> str | None:
        for end in ("largest", "smallest"):
            if self.has("the", end, noun):
                return end
        return next((word for word in QUANTIFIERS if self.has(word, noun)), None)
