"""The first lines of a .csv or .tsv → how it is written, so that a table made of it can be written alike."""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

QUOTE = '"'
BYTE_ORDER_MARK = "\ufeff"
DECIMAL_COMMA = re.compile(r"-?\d+,(?!\d{3}$)\d+")
"""A number with a decimal comma; 1,000 may be a thousand."""
DECIMAL_POINT = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class TableForm:
    """How a table is written whose fields are divided by commas, semicolons or tabs."""

    delimiter: str = ","
    quoting: Literal[0, 1, 3] = csv.QUOTE_MINIMAL
    """As `csv` has it: quotes where they are needed, around all fields (as around the header), or nowhere."""
    has_mark: bool = False
    """Whether it begins with a byte order mark, by which Excel knows UTF-8."""
    line_end: str = "\n"
    decimal: str = "."


def form_of(first: str, delimiter: str | None, quotes: bool | None, *, is_csv: bool) -> TableForm:
    """Tell the form of a table by its first line, and by what its layout says (None: nothing)."""
    header = first.removeprefix(BYTE_ORDER_MARK)
    starts_quoted = header.startswith(QUOTE)
    is_quoted = is_csv or quotes or (quotes is None and starts_quoted)
    usual = (";" if ";" in header and "," not in header else ",") if is_csv else "\t"
    return TableForm(
        delimiter or usual,
        csv.QUOTE_NONE if not is_quoted else csv.QUOTE_ALL if starts_quoted else csv.QUOTE_MINIMAL,
        has_mark=header != first,
        line_end="\r\n" if first.endswith("\r\n") else "\n",
    )


def decimal_of(form: TableForm, rows: Iterable[Mapping[str, str]]) -> str:
    """Tell what stands before the decimals of numbers in a table, by its first rows. Semicolons with a byte order mark
    are Excel's where that is a comma."""
    if form.delimiter == ",":
        return "."
    fields = [field.strip() for row in rows for field in row.values()]
    if any(map(DECIMAL_POINT.fullmatch, fields)):
        return "."
    is_excel = form.delimiter == ";" and form.has_mark
    return "," if is_excel or any(map(DECIMAL_COMMA.fullmatch, fields)) else "."
