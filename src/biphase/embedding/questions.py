"""A search as a user writes it → questions and filters on columns (`--where`), checked before PyTorch is loaded."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any, Literal, get_args

from biphase.corpus.forms import COMMA_NUMBER, PlacedRow, Row, is_missing, rows_in_memory
from biphase.corpus.rows import as_number, column, ending_of, numbered_lines, rows_of_file
from biphase.encoder.models import find_ranker
from biphase.errors import InputError, clipped, nearest

By = Literal["both", "bm25", "embeddings"]
"""The ranking of passages: by BM25, by their embeddings, or by both."""

QUESTION_COLUMNS = ("question", "query", "text")
"""The columns in which to look for the question of a row, in order of preference."""
ANSWER_COLUMNS = ("question_id", "question", "by", "rank", "score", "id", "text")
"""The columns of an answer that do not come from its document. A document's own columns of these names are not
shown."""

PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
"""A number in a table. Others, such as 007 and 1e3, may be codes."""
SIGNS: dict[str, Callable[[Any, Any], bool]] = {">=": ge, "<=": le, "!=": ne, "=": eq, ">": gt, "<": lt}


@dataclass(frozen=True)
class Filter:
    """A filter on a column, such as `year>=2020`."""

    column: str
    sign: str
    value: str

    def holds(self, row: Row, *, has_cells: bool = False) -> bool:
        """Tell whether a row has the column and meets the filter. Compare two numbers as numbers, and anything else
        as texts, which can only be equal or not. A text that is a number equals another as a text, or in a table
        (`has_cells`) as a number if both are plain."""
        if self.column not in row:
            return False
        value = row[self.column]
        number = exact_number(value)
        # The columns of an index have decimal points (`other_columns` in `corpus/text.py`).
        is_comma = number is not None and COMMA_NUMBER.fullmatch(self.value)
        wanted = exact_number(self.value.replace(",", ".") if is_comma else self.value)
        is_equality = self.sign in ("=", "!=")
        written = (value, self.value.replace(",", ".")) if has_cells and isinstance(value, str) else ()
        is_text = isinstance(value, str) and not (
            written and all(PLAIN_NUMBER.fullmatch(each.strip()) for each in written)
        )
        if number is not None and wanted is not None and not (is_equality and is_text):
            return SIGNS[self.sign](number, wanted)
        is_truth = isinstance(value, bool)  # true or false, however it is written
        text, wanted_text = (str(value).lower(), self.value.lower()) if is_truth else (str(value), self.value)
        return is_equality and SIGNS[self.sign](text, wanted_text)


def exact_number(value: Any) -> float | None:
    """Read a number as `as_number` does, but an integer exactly, of which a float keeps about 16 digits."""
    number = as_number(value)
    if number is not None and isinstance(value, int | str):
        with suppress(ValueError):  # a text with a fraction
            return int(value)
    return number


@dataclass(frozen=True)
class UserQuestion:
    """A question of a user."""

    id: str
    """Its own id, or its number in the file; empty for a single question."""
    text: str


@dataclass(frozen=True)
class Request:
    """A search in an index."""

    questions: Sequence[UserQuestion]
    top: int
    """The number of passages, or of documents, for each question."""
    by: By | None
    """The ranking; None leaves the choice to the index."""
    filters: Sequence[Filter]
    """The filters that the document of a passage must meet."""
    ranker: str | None
    """The cross-encoder that reorders the best passages."""
    documents: bool = False
    """Whether to answer with each document once, by its best passage."""


def read_request(
    question: Any, questions: Any, top: int, by: By | None, where: Any, rerank: Any, documents: bool
) -> Request:
    """Check a search (the arguments of `api.networks.search`). Raises `InputError` for one that no index could
    answer."""
    if question is not None and questions is not None:
        raise InputError("a question and a file of questions are given: give one of them")
    if question is None and questions is None:
        raise InputError("no question is given: give one, or a file of them as questions (--questions)")
    asked = [UserQuestion("", question)] if questions is None else list(read_questions(questions))
    for item in asked:
        if not isinstance(item.text, str) or not item.text.strip() or re.search(r"[\ud800-\udfff]", item.text):
            raise InputError(f"the question {f'{item.id} ' if item.id else ''}is {item.text!r}: give a text")
    if not asked:
        raise InputError(f"{questions} has no question")
    if top < 1:
        raise InputError(f"top is {top}: give 1 or more")
    if by is not None and by not in get_args(By):
        raise InputError(f"by is '{by}'{nearest(by, get_args(By))}")
    filters = [parse_filter(text) for text in ([where] if isinstance(where, str) else where or ())]
    if rerank is not None:
        find_ranker(str(rerank))
    return Request(asked, top, by, filters, None if rerank is None else str(rerank), documents)


def read_questions(questions: Any) -> Iterator[UserQuestion]:
    """Yield the questions of a file, one for each line or row, or of rows or texts in memory."""
    rows: Iterable[PlacedRow]
    if not isinstance(questions, str | Path):
        rows = ((f"question {index}", row) for index, row in enumerate(rows_in_memory(questions, "question")))
    elif ending_of(Path(questions)) == ".txt":
        lines = ((at, line.strip()) for at, line in numbered_lines(Path(questions)))
        rows = ((f"{questions}:{at}", {"question": text}) for at, text in lines if text)
    else:
        rows = rows_of_file(Path(questions))
    for row_number, (location, row) in enumerate(rows, start=1):
        name = next((name for name in QUESTION_COLUMNS if name in row), "question")
        text = column(location, row, name, "give the column with the questions this name")
        ids = (row.get(name) for name in ("id", "_id"))
        yield UserQuestion(str(next((id for id in ids if not is_missing(id)), row_number)), text)


def parse_filter(text: str) -> Filter:
    """Parse `COLUMN=VALUE` or the like. Raises `InputError` for anything else, and for a size comparison with a value
    that is not a number."""
    first = re.search(f".({'|'.join(SIGNS)})", text.strip())  # a column has at least a character
    if first is None:
        raise InputError(f"where '{clipped(text)}': give a column and a value, such as year=2020 or year>=2020")
    sign = first[1]
    column, value = text.strip()[: first.start(1)].rstrip(), text.strip()[first.end(1) :].lstrip()
    if value[:1] in ("=", "<", ">"):
        raise InputError(f"where '{clipped(text)}': the signs are {', '.join(SIGNS)}; a value cannot begin with one")
    if sign not in ("=", "!=") and as_number(value) is None:
        raise InputError(f"where '{text}': {sign} compares numbers, and '{value}' is not one")
    return Filter(column, sign, value)
