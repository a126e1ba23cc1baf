"""A row's label → a number: of a class that is given by name or by number, of several classes, or a score. A row's
answers or candidates → exact spans of their context."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from biphase.errors import InputError
from biphase.tasks.sources import shown
from biphase.tasks.spec import Scheme, Task

MULTI_HOT = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
"""What a list may say of each class: whether it applies."""


def label_number(task: Task, place: str, value: Any) -> int:
    """The number of a label given by name or, where no name is a number, by number: tables write it as text, pandas may
    write it as 1.0. Names that are numbers are compared by value. JSON's true and false, and pandas' True and False,
    are names in any case of their letters."""
    is_truth = isinstance(value, bool) or (value in ("True", "False") and value not in task.classes)
    names = tuple(name.lower() for name in task.classes) if is_truth else task.classes
    found = find_name(names, str(value).lower() if is_truth else value)
    if found is not None:
        return found
    number, has_numbers = number_of(value), any(one is not None for one in numbers_of(names))
    if number is not None and not has_numbers and number == int(number) and 0 <= number < len(names):
        return int(number)
    numbers = "" if has_numbers else f" (or 0 to {len(names) - 1})"
    raise InputError(f"{place}: label {value!r} is not one of task '{task.name}': {', '.join(task.classes)}{numbers}")


def find_name(names: tuple[str, ...], value: Any) -> int | None:
    """Where a label stands among names, as it is written or, of numbers, by value; None where it does not."""
    if str(value) in names and value is not None:
        return names.index(str(value))
    number, values = number_of(value), numbers_of(names)
    return values.index(number) if number is not None and values.count(number) == 1 else None


def right_choice(task: Task, place: str, names: tuple[str, ...], label: Any) -> int:
    """The number of the right choice by the row's own names of choices, else by the task's. A number is counted from 0
    only where choices are not called by numbers."""
    found = find_name(names, label)
    if found is not None:
        return found
    if number_of(label) is not None and any(one is not None for one in numbers_of(names)):
        raise InputError(f"{place}: label {label!r} is none of its choices: {', '.join(names)}")
    return label_number(task, place, label)


def number_of(value: Any) -> Decimal | None:
    """The number that a label is, or is written as: 1 for 1, 1.0 and "1.0"."""
    is_number = isinstance(value, str | int | float) and re.fullmatch(r"[+-]?\d+(\.\d*)?", str(value))
    return Decimal(str(value)) if is_number else None


@lru_cache
def numbers_of(names: tuple[str, ...]) -> list[Decimal | None]:
    return [number_of(name) for name in names]


def is_unlabelled(task: Task, label: Any) -> bool:
    """Whether a label says that nobody knows it: -1 also as -1.0."""
    number = number_of(label)
    return str(label) in task.unlabelled or (number is not None and number in numbers_of(task.unlabelled))


def score_number(place: str, name: str, value: Any) -> float:
    """A label that is a number, which tables write as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        remedy = "; write it with a point" if re.fullmatch(r"[+-]?\d+,\d+", str(value)) else ""
        raise InputError(f"{place}: '{name}' is {shown(value)}, not a number{remedy}")
    return number


def label_numbers(task: Task, place: str, value: Any) -> tuple[int, ...]:
    """The numbers of the classes in a list of labels, ascending."""
    labels = list_labels(value)
    if labels is None:
        raise InputError(f"{place}: '{task.label}' is {shown(value)}, not a list of labels (empty for none)")
    is_multi_hot = len(labels) == len(task.classes) and all(str(one).lower() in MULTI_HOT for one in labels)
    if is_multi_hot if task.multi_hot is None else task.multi_hot and not is_multi_hot:
        told = f"'{task.label}' is {shown(value)}, and task '{task.name}' has {len(task.classes)} classes"
        remedy = "say `multi_hot: true` where lists have a 0 or 1 for each class, `false` where they name classes"
        raise InputError(f"{place}: {told}; {remedy}")
    if task.multi_hot:
        return tuple(number for number, one in enumerate(labels) if MULTI_HOT[str(one).lower()])
    numbers = sorted(label_number(task, place, one) for one in labels)
    if len(set(numbers)) < len(numbers):
        raise InputError(
            f"{place}: '{task.label}' is {shown(value)}, which has a class twice: name each once, or "
            "give every row a 0 or 1 for each class and say `multi_hot: true`"
        )
    return tuple(numbers)


def list_labels(value: Any) -> list[Any] | None:
    """A list of labels; tables write it as text, with commas, semicolons or bars between. None for what is no list."""
    if isinstance(value, str):
        inside = value.strip("[] ")
        return [name.strip() for name in re.split("[,;|]", inside)] if inside else []
    return value if isinstance(value, list) else None


def is_missing(value: Any) -> bool:
    """Whether a field holds nothing: no value, a number that is none, or blanks."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def to_iob2(tags: Sequence[Any], scheme: Scheme, place: str) -> list[Any]:
    """The tags of a sentence in IOB2: every entity begins with B-. Broken ones of other schemes than IOB1 stay broken.

    IOB1 marks a beginning only where an entity follows another of its type, so IOB2 read as IOB1 is itself.
    """
    if scheme == "IOB2":
        return list(tags)
    known = {"IOB1": "BI", "BIOES": "BIES", "BILOU": "BILU"}[scheme]
    before = "O"
    made = []
    for tag in tags:
        if not isinstance(tag, str) or (tag != "O" and (tag[:1] not in known or tag[1:2] != "-")):
            raise InputError(f"{place}: tag {tag!r} is not of the scheme {scheme}")
        if tag != "O" and scheme in ("BIOES", "BILOU"):
            tag = {"S": "B", "E": "I", "U": "B", "L": "I"}.get(tag[0], tag[0]) + tag[1:]
        elif tag[:1] == "I" and before[1:] != tag[1:]:
            tag = "B" + tag[1:]
        made.append(tag)
        before = tag
    return made


@dataclass(frozen=True)
class Answer:
    """A span of the context: `context[start : start + len(text)] == text`."""

    text: str
    start: int


def read_spans(place: str, name: str, value: Any) -> list[tuple[str, int]]:
    """(text, start) pairs from lists of texts and starts, a list of mappings, or a list of texts alone (start 0)."""
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start", value.get("start"))
    elif isinstance(value, list):
        texts = [item.get("text") if isinstance(item, dict) else item for item in value]
        starts = [item.get("answer_start", item.get("start")) if isinstance(item, dict) else 0 for item in value]
    else:
        texts = starts = None
    is_right = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
    if not is_right or not all(isinstance(text, str) and text for text in texts or []):
        raise InputError(f"{place}: column '{name}' is {shown(value)}, not texts and where they start")
    if not all(isinstance(start, int) and not isinstance(start, bool) for start in starts or []):
        raise InputError(f"{place}: column '{name}' is {shown(value)}: a start is not a whole number")
    return list(zip(texts or [], starts or [], strict=True))


def find_answer(place: str, context: str, text: str, start: int) -> Answer:
    """The occurrence of `text` that is nearest to `start`: published starts are not all right."""
    start = min(max(start, 0), len(context))
    found = [at for at in (context.rfind(text, 0, start + len(text)), context.find(text, start)) if at >= 0]
    if not found:
        raise InputError(f"{place}: a context without its answer '{text[:40]}'")
    return Answer(text, min(found, key=lambda at: abs(at - start)))
