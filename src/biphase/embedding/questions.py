"""What a user asks of an index → questions, conditions on columns, and who ranks; checked before PyTorch is loaded."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any, Literal, get_args

from biphase.corpus.rows import PlacedRow, Row, column, ending_of, read_text_lines, rows_in_memory, rows_of_file
from biphase.corpus.text import are_names
from biphase.encoder.models import find_ranker
from biphase.errors import InputError, nearest

By = Literal["both", "bm25", "embeddings"]
"""What ranks passages: BM25, their embeddings, or both."""

QUESTION_COLUMNS = ("question", "query", "text")
"""Columns in which a row may have its question; the first that is there is taken."""

SIGNS: dict[str, Callable[[Any, Any], bool]] = {">=": ge, "<=": le, "!=": ne, "=": eq, ">": gt, "<": lt}


@dataclass(frozen=True)
class Condition:
    """A condition on a column, such as `year>=2020`."""

    column: str
    sign: str
    value: str

    def holds(self, row: Row) -> bool:
        """Tell whether a row has the column and meets the condition: by numbers where both sides are, else by texts,
        which can only be equal or not."""
        if self.column not in row:
            return False
        value, number, other = row[self.column], as_number(row[self.column]), as_number(self.value)
        if number is not None and other is not None:
            return SIGNS[self.sign](number, other)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return self.sign in ("=", "!=") and SIGNS[self.sign](text, self.value)


@dataclass(frozen=True)
class UserQuestion:
    """A question; the id that it came with or its number in its file, empty for one that is asked alone."""

    id: str
    text: str


@dataclass(frozen=True)
class Request:
    """What is asked of an index."""

    questions: Sequence[UserQuestion]
    top: int
    """Passages that answer a question."""
    by: By | None
    """Who ranks; None leaves it to the index."""
    conditions: Sequence[Condition]
    """Conditions, all of which a passage's document meets."""
    ranker: str | None
    """The cross-encoder that orders the best passages anew."""


def read_request(question: Any, questions: Any, top: int, by: By | None, where: Any, rerank: Any) -> Request:
    """Check what a user asks (`api.networks.search`). Raises `InputError` for what cannot be answered by any index."""
    if question is not None and questions is not None:
        raise InputError("a question and a file of questions are given: give one of them")
    if question is None and questions is None:
        raise InputError("no question is given: give one, or a file of them as questions (--questions)")
    asked = [UserQuestion("", question)] if questions is None else list(read_questions(questions))
    for one in asked:
        if not isinstance(one.text, str) or not one.text.strip() or re.search(r"[\ud800-\udfff]", one.text):
            raise InputError(f"the question {f'{one.id} ' if one.id else ''}is {one.text!r}: give a text")
    if not asked:
        raise InputError(f"{questions} has no question")
    if top < 1:
        raise InputError(f"top is {top}: give 1 or more")
    if by is not None and by not in get_args(By):
        raise InputError(f"by is '{by}'{nearest(by, get_args(By))}")
    conditions = [parse_condition(text) for text in ([where] if isinstance(where, str) else where or ())]
    if rerank is not None:
        find_ranker(str(rerank))
    return Request(asked, top, by, conditions, None if rerank is None else str(rerank))


def read_questions(questions: Any) -> Iterator[UserQuestion]:
    """Yield the questions of a file, a line each or in rows, or of rows or texts in memory."""
    rows: Iterable[PlacedRow]
    if not are_names(questions):
        rows = (
            (f"question {line_number}", row) for line_number, row in enumerate(rows_in_memory(questions, "question"))
        )
    elif ending_of(Path(questions)) == ".txt":
        lines = read_text_lines(Path(questions))
        rows = (
            (f"{questions}:{line_number}", {"question": line.strip()}) for line_number, line, _ in lines if line.strip()
        )
    else:
        rows = rows_of_file(Path(questions))
    for row_number, (location, row) in enumerate(rows, start=1):
        name = next((name for name in QUESTION_COLUMNS if name in row), "question")
        text = column(location, row, name, "give the column with the questions this name")
        yield UserQuestion(str(row.get("id", row.get("_id", row_number))) or str(row_number), text)


def parse_condition(text: str) -> Condition:
    """Parse `COLUMN=VALUE` or the like. Raises `InputError` where it is none, or compares with what is no number."""
    match = re.fullmatch(r"\s*(.+?)\s*(>=|<=|!=|=|>|<)\s*(.*?)\s*", text)
    if match is None:
        raise InputError(f"where '{text}': give a column and a value, such as year=2020 or year>=2020")
    condition = Condition(*match.groups())
    if condition.sign not in ("=", "!=") and as_number(condition.value) is None:
        raise InputError(f"where '{text}': {condition.sign} compares numbers, and '{condition.value}' is none")
    return condition


def as_number(value: Any) -> float | None:
    """Return a number, or a text that is one, as a number; None for anything else."""
    with suppress(TypeError, ValueError):
        return None if isinstance(value, bool) else float(value)
    return None
