"""Write rows with predictions to a file: .jsonl, .parquet, .csv, .tsv or .xlsx."""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from functools import partial
from io import BytesIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from biphase import console
from biphase.corpus.forms import Row, TableForm
from biphase.corpus.rows import BYTE_ORDER_MARK
from biphase.errors import InputError, first_line, told_as
from biphase.machine import needs_extra

TABLE_FORMS = {".csv": TableForm(), ".tsv": TableForm("\t", csv.QUOTE_ALL)}
"""Ending → the form of a table, for rows that come from a file with another ending."""
ENDINGS = (".jsonl", ".parquet", *TABLE_FORMS, ".xlsx")
LONGEST_CELL = 32_767
"""The most characters that a cell of a spreadsheet holds."""
LONG_NUMBER = 10**15
"""The first number with more digits than a spreadsheet keeps; ids may have them."""
OTHER_FILE = "write a .jsonl file"


FORMULA = re.compile(r"[=@＝＠\t\r\n]|[-+－＋](?![\d\s.,()]*([eE][-+]?\d+)?$)")
"""The beginning of a text that a spreadsheet would compute, but not of a number, a telephone number or a dash."""


def as_inert(value: Any) -> Any:
    """Return the value of a table's field, with an apostrophe before a text that a spreadsheet would compute, as OWASP
    recommends."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def refuse_ending(path: Path) -> None:
    """Raise `InputError` for an unknown ending, or one that needs a missing package."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: name a {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]} file")
    if path.suffix.lower() == ".xlsx":
        with needs_extra("xlsx", f"{path}: .xlsx"):
            import openpyxl  # noqa: F401


def refuse_rows(rows: Iterable[Row], ending: str) -> None:
    """Raise `InputError` for rows that a file with this ending cannot hold."""
    if ending == ".parquet":
        arrow_table([*rows])
    elif ending == ".xlsx":
        write_sheet(rows, TextIOWrapper(BytesIO()))
    elif ending in TABLE_FORMS:
        for _ in flat_rows(rows):
            pass


def write_rows(rows: Iterable[Row], sink: TextIO, ending: str, form: TableForm | None) -> None:
    """Write rows in the form that an ending stands for; .csv and .tsv in `form` if one is given."""
    if ending in TABLE_FORMS:
        write_table(rows, sink, form or TABLE_FORMS[ending])
    elif ending == ".xlsx":
        write_sheet(rows, sink)
    elif ending == ".parquet":  # all at once, because the types of columns depend on all rows
        import pyarrow.parquet as pq

        pq.write_table(arrow_table([*rows]), sink.buffer)
    else:
        for row in rows:  # in ASCII on a terminal, because it obeys some control characters
            sink.write(json.dumps(row, ensure_ascii=sink.isatty(), default=str) + "\n")
        sink.flush()


def arrow_table(rows: Sequence[Row]) -> Any:
    """Make an Arrow table with all columns of the rows. Raises `InputError` for a column without a common type, or of a
    type that Parquet lacks, such as objects without fields."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
            pq.write_table(pa.table({name: columns[name][:0]}), BytesIO())
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(f"the column '{name}' does not fit one type ({first_line(error)}); {OTHER_FILE}") from None
    return pa.table(columns)


def flat_rows(rows: Iterable[Row]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the header and then each row as (its name for messages, its cells): probabilities in a column for each
    label, lists as JSON. Raises `InputError` for a column that the first row lacks, and for a row's own column with the
    name of one for a probability."""
    names: list[str] = []
    for number, row in enumerate(rows, start=1):
        flat = dict(row)
        if isinstance(row.get("probabilities"), dict):
            spread = {f"probability_{label}": value for label, value in flat.pop("probabilities").items()}
            if doubles := sorted(flat.keys() & spread.keys()):
                raise InputError(f"row {number}: the file has a column '{doubles[0]}' already; rename it")
            flat |= spread
        if not names:
            names = [*flat]
            yield "the header", names
        if further := flat.keys() - {*names}:
            raise InputError(f"row {number} has a column '{min(further)}' that the first row lacks; {OTHER_FILE}")
        values = [flat.get(name, "") for name in names]
        as_json = partial(json.dumps, ensure_ascii=False, default=str)
        yield f"row {number}", [as_json(value) if isinstance(value, dict | list) else value for value in values]


def write_sheet(rows: Iterable[Row], sink: TextIO) -> None:
    """Write rows as the only sheet of a workbook. Texts remain texts, whatever they begin with; a number with more
    digits than a sheet keeps is written as a text."""
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell

    book = Workbook(write_only=True)
    sheet = book.create_sheet("predictions")
    with closing(sheet):  # otherwise openpyxl raises a second error after one in this block
        for location, values in flat_rows(rows):
            cells = []
            with told_as(f"{location} does not fit a sheet", OTHER_FILE):
                for value in values:
                    if isinstance(value, int | Decimal) and not -LONG_NUMBER < value < LONG_NUMBER:
                        value = str(value)
                    if (is_text := isinstance(value, str)) and len(value) > LONGEST_CELL:
                        raise InputError(f"{location}: a text of more than {LONGEST_CELL:,} characters; {OTHER_FILE}")
                    is_no_number = isinstance(value, float) and not math.isfinite(value)
                    cells.append(WriteOnlyCell(sheet, None if is_no_number else value))
                    if is_text:
                        cells[-1].data_type = "s"  # otherwise a leading = would make the text a formula
                sheet.append(cells)
    content = BytesIO()  # on a full disk the workbook would try to write its end once more
    book.save(content)
    sink.buffer.write(content.getbuffer())


def write_table(rows: Iterable[Row], sink: TextIO, form: TableForm) -> None:
    """Write rows as .csv or .tsv, with texts as `as_inert` returns them."""
    quote, num_inert = None if form.quoting == csv.QUOTE_NONE else '"', 0
    shape: Any = {"delimiter": form.delimiter, "lineterminator": "\r\n", "quotechar": quote}  # also quotes a lone \r
    lines: Any = SimpleNamespace(write=lambda line: sink.write(line[:-2] + form.line_end))
    table = csv.writer(lines, quoting=form.quoting, **shape)
    sink.write(BYTE_ORDER_MARK if form.has_mark else "")
    for location, values in flat_rows(rows):
        cells = [show_cell(value, form) for value in values]
        num_inert += sum(cell == f"'{value}" for cell, value in zip(cells, values, strict=True))
        try:
            table.writerow(cells)
        except csv.Error as error:
            raise InputError(f"{location} does not fit the form of the table ({error}); {OTHER_FILE}") from None
    if num_inert:
        texts = "a text" if num_inert == 1 else f"{num_inert:,} texts"
        console.err.print(f"wrote an apostrophe before {texts} that a spreadsheet would compute")


def show_cell(value: Any, form: TableForm) -> Any:
    """Return a value as a cell of a .csv or .tsv table, with the table's decimal mark."""
    if isinstance(value, float):
        return str(value).replace(".", form.decimal)
    return as_inert(value)
