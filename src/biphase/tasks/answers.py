"""A row's answers or candidates → exact spans of their context."""

from dataclasses import dataclass
from typing import Any

from biphase.errors import InputError
from biphase.tasks.sources import shown


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
