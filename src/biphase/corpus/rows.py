"""Files, data sets and values in memory → rows: lines and JSON (plain, .gz or .zst), tables, DataFrames.

This module reads pretraining texts, task data, pairs, and rows to predict; each `Format` has a reader. An unpacked
workbook has bounds. Errors are `InputError`s that name the file, and the line or row if there is one.
"""

import csv
import io
import itertools
import json
import math
import re
import unicodedata
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from biphase.config import Strict
from biphase.corpus.forms import UD_COLUMNS, Format, PlacedRow, Row, TableForm, mark_numbers, name_classes, unfold
from biphase.errors import InputError, clipped, refuse_doubles, told_as
from biphase.files import parse_json, reading

Delimiter = Annotated[str, Field(pattern=r'^[^"\r\n]$')]
CODECS = {".zst": "zstd", ".gz": "gzip"}
"""The endings of compressed files → pyarrow's names of their compression."""

QUOTE, DELIMITERS = '"', ",;\t|"
BYTE_ORDER_MARK, UTF_16_MARKS = "\ufeff", (b"\xff\xfe", b"\xfe\xff")
BUFFER_BYTES = 1 << 20
ABSENT = object()
"""The value of a missing field, because null is a value too."""
MAX_LINE_BYTES = 1 << 28
"""The longest line: a small compressed file may contain one of many gigabytes."""
BINARIES = {b"PK\x03\x04": "a zip archive", b"\xd0\xcf\x11\xe0": "an old workbook", b"BZh9": "bzip2", b"\xfd7zXZ": "xz"}
BINARIES |= {b"\x1f\x8b": "gzip (add the ending .gz)", b"\x28\xb5\x2f\xfd": "Zstandard (add the ending .zst)"}
"""The first bytes of files that are no text → their kind; workbooks and documents of Office are zip archives too."""
DAMAGED = "it is damaged, cut short or not what its ending says"
SHORT_ROW: Row = {}
"""The value of a row with too few fields, if the layout allows such rows."""

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".jl": "jsonl",
    ".tsv": "tsv",
    ".csv": "csv",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "parquet",
    ".xlsx": "xlsx",
    ".conllu": "conllu",
    ".qrels": "trec",
    ".trec": "trec",
}
"""The format of a file by its ending, unless its layout names one; other endings have columns."""

LONGEST_TEXT = 5_000_000
"""The most characters of a text, more than in a long novel: tokenizers need about a hundred bytes per character."""


class FileForm(Strict):
    """The form of a file of rows."""

    format: Format | None = None
    """The format of the files. By default, the ending decides; other endings have columns."""
    quotes: bool | None = None
    """Whether fields of a .tsv may be in quotes, as pandas and Excel write them; in a .csv they always may. By default,
    a quoted header decides, and doubt is an error. Tables of biphase's own tasks have no quotes."""
    delimiter: Delimiter | None = None
    """The character between fields. By default: tabs in a .tsv; in a .csv the first of comma, semicolon, tab and bar
    that the header has."""
    has_header: bool = True
    """Whether the first row of a .csv or .tsv names the columns. Without a header they are called 0, 1, … (see
    `rename`)."""
    columns: tuple[int, int] = (0, 1)
    """The columns of the word and of the tag, from 0, in a file of columns. In CoNLL-U, whose first column is a number,
    this default stands for 1 and 3."""
    has_short_rows: bool = False
    """Whether rows of a .tsv may have too few fields. Such rows are left out and counted; else they are an error."""


DEFAULT_FORM = FileForm()


def codec_of(path: Path) -> str | None:
    """Return pyarrow's name of a file's compression; None for a plain file."""
    return CODECS.get(path.suffix.lower())


def plain_path(path: Path) -> Path:
    """Return a path without its compression ending."""
    return path.with_suffix("") if codec_of(path) else path


def ending_of(path: Path) -> str:
    """Return a file's ending in lower case, without its compression ending."""
    return plain_path(path).suffix.lower()


def kind_of(path: Path) -> str | None:
    """Return the kind of a source of text, by its ending: `text`, `jsonl`, `csv` or `parquet`; None for other files."""
    kind = "text" if ending_of(path) in (".txt", ".md") else FORMATS.get(ending_of(path))
    is_source = kind in ("text", "jsonl", "csv") or (kind == "parquet" and codec_of(path) is None)
    return kind if is_source and ending_of(path) != ".jl" else None  # which programs in Julia have too


@contextmanager
def reading_rows(path: Path) -> Iterator[None]:
    """Turn errors in the block into an `InputError` that names the file. Raises it also for a pipe or a device."""
    refuse_pipe(path)
    with reading(path, DAMAGED):
        yield


def refuse_pipe(path: Path) -> None:
    """Raise `InputError` for a pipe or a device, because most files are read more than once."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path} is a pipe or a device; write its content to a file, and name that")


def read_text_lines(path: Path, *, keep_mark: bool = False) -> Iterator[tuple[int, str, int]]:
    """Yield each line of a file: its number (from 1), its text with the line end, and the bytes on disk read so far.

    Drops a byte order mark unless `keep_mark`. Raises `InputError` for a file that does not exist, is damaged or
    truncated, and for a line that is not UTF-8.
    """
    import pyarrow as pa  # unlike zstandard's streams, its streams notice a truncated file

    with reading_rows(path), pa.OSFile(str(path)) as file:
        stream = pa.CompressedInputStream(file, codec) if (codec := codec_of(path)) else file
        lines = iter(partial(io.BufferedReader(stream, BUFFER_BYTES).readline, MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"{path}:{number}: the line has more than {MAX_LINE_BYTES:,} bytes; split it")
            if number == 1 and (kind := next((name for mark, name in BINARIES.items() if line.startswith(mark)), "")):
                raise InputError(f"{path} is {kind}, not a text: unpack it, or save it as .xlsx or .csv")
            try:
                text = line.decode("utf-8-sig" if number == 1 and not keep_mark else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"byte {error.object[error.start]:#04x} at position {error.start} of the line"
                form = "cp1252"
                if number == 1 and line.startswith(UTF_16_MARKS):
                    reason, form = "UTF-16, Excel's Unicode text", "utf-16"
                raise InputError(f"{path}:{number}: not UTF-8 ({reason}); convert: iconv -f {form} -t utf-8") from None
            yield number, text, file.tell()


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Yield the line number, object and bytes read (as in `read_text_lines`) of each line of a file; skip blank lines.

    Raises `InputError` as `read_text_lines` does, for broken JSON, and for a line that is not an object.
    """
    for number, line, num_bytes in read_text_lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            reason = f"broken JSON ({error.msg}, column {error.colno}): one object per line"
            raise InputError(f"{path}:{number}: {reason}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: one JSON object per line is needed, here is {excerpt(row)}")
        yield number, row, num_bytes


def read_json_file(path: Path) -> Any:
    """Read one JSON value. Raises `InputError` as `read_text_lines`, or if broken."""
    try:
        return parse_json("".join(line for _, line, _ in read_text_lines(path)))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: broken JSON ({error.msg}, column {error.colno})") from None


TASK_REMEDY = "rename: {{THEIRS: {name}}} in the task, or the column of the file"


def column(location: str, row: Row, name: str, remedy: str = TASK_REMEDY) -> Any:
    """Return the value of a column. Raises `InputError` for a missing one, with the names of all columns and a
    remedy."""
    value = find_field(row, name, ABSENT)
    if value is ABSENT:
        columns = f"the columns are: {clipped(', '.join(field_names(row)))}"
        raise InputError(f"{location}: there is no column '{name}'; {columns}; {remedy.format(name=name)}")
    return value


def check_text(location: str, name: str, value: Any) -> str:
    """Return a field's value if it is a text. Raises `InputError` for another type and for half of a surrogate pair."""
    if not isinstance(value, str):
        raise InputError(f"{location}: column '{name}' is {excerpt(value)}, not a text: fix the row or remove it")
    with told_as(f"{location}: column '{name}' is not valid Unicode", "remove it"):
        value.encode()
    return value


def text_column(location: str, row: Row, name: str) -> str:
    """Return a column's text. A list of texts (PubMedQA) becomes one text."""
    text = column(location, row, name)
    if isinstance(text, list) and text and all(isinstance(item, str) for item in text):
        return " ".join(text)
    text = check_text(location, name, text)
    if len(text) > LONGEST_TEXT:
        size = f"{len(text):,} characters, more than {LONGEST_TEXT:,}"
        raise InputError(f"{location}: column '{name}' has {size}: cut it")
    return text


def as_number(value: Any) -> float | None:
    """Read a number, or a text that is one, as in tables. An integer beyond floats is infinite, as such a text is. None
    for anything else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (ArithmeticError, TypeError, ValueError):
        return None


def read_number(location: str, name: str, value: Any) -> float:
    """Return a field's value if it is a finite number, or a text that is one. Raises `InputError` for anything else."""
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise InputError(f"{location}: '{name}' is {excerpt(value)}, not a number: fix the row or remove it")
    return number


def excerpt(value: Any) -> str:
    """Return the beginning of a value's JSON, for a message."""
    return json.dumps(value, ensure_ascii=False, default=str)[:40]


@lru_cache(maxsize=10_000)
def plain_name(name: str) -> str:
    """Return the name of a column without blanks around it, in Unicode's NFC; macOS writes NFD."""
    return unicodedata.normalize("NFC", name.strip())


def own_name(row: Mapping[str, Any], name: str) -> str:
    """Return a row's own spelling of the name of a column, or the name as it is if no single column has it."""
    alike = [own for own in row if plain_name(str(own)) == plain_name(name)] if name not in row else ()
    return alike[0] if len(alike) == 1 else name


def find_field(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Find a field of a row, by its `own_name`. Unless a field has that name, `meta.text` is the field `text` of the
    object `meta`."""
    name = name if name in row else own_name(row, name)
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    return find_field(row[outer], inner, default) if dot and isinstance(row.get(outer), Mapping) else default


def field_names(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a row's fields, and of the fields in its objects: `id`, `meta`, `meta.text`."""
    for name, value in row.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in field_names(value))


def renamed(row: Row, names: Mapping[str, str]) -> Row:
    """Return the renamed columns of a row. `names` maps the source's names to the new ones."""
    values = {name: find_field(row, source_name, ABSENT) for source_name, name in names.items()}
    return {name: value for name, value in values.items() if value is not ABSENT}


TABLE_ROWS = 256
"""The number of .parquet rows to read at a time; an .arrow file has its own batches."""

SPLITS = "dataset_dict.json"
"""The file that marks a folder of `datasets.DatasetDict.save_to_disk`, with a folder for each split."""
SAVED_STATE = "state.json"
"""The file that lists the files of a saved `datasets.Dataset`; cached files may lie beside them."""


def read_table(path: Path, names: Sequence[str] = (), further: Sequence[str] = ()) -> Iterator[tuple[int, Row, int]]:
    """Yield each row of a .parquet or .arrow file: its number (from 1), the row, and the bytes of the file read so far.

    Args:
        names: the columns to read; all columns if none is named or one does not exist. For `meta.text`, read the
            column `meta`.
        further: columns to read beside them, if they exist.

    Raises:
        InputError: the file is damaged, a text is not UTF-8, or two columns share a name.
    """
    number = before = 0
    with reading_rows(path):
        for batch, features, num_bytes in read_pieces(path, names, further):
            batch.validate(full=True)  # else Arrow follows a wrong offset out of its memory; also checks UTF-8
            for at, row in enumerate(name_classes(batch.to_pylist(), features), start=1):
                number += 1
                yield number, row, before + (num_bytes - before) * at // len(batch)
            before = num_bytes


def read_pieces(path: Path, names: Sequence[str], further: Sequence[str]) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Yield pieces of a table, each with the features of its columns and the bytes of its file read so far."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_bytes = path.stat().st_size
    if ending_of(path) == ".parquet":
        with pq.ParquetFile(path) as file:
            columns, features = choose_columns(path, file.schema_arrow, names, further)
            num_rows = 0
            for batch in file.iter_batches(batch_size=TABLE_ROWS, columns=columns):
                num_rows += len(batch)
                yield batch, features, num_bytes * num_rows // file.metadata.num_rows
        return
    with pa.OSFile(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        table = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
        with table:
            columns, features = choose_columns(path, table.schema, names, further)
            batches = table if is_stream else map(table.get_batch, range(table.num_record_batches))
            for batch in batches:
                yield batch.select(columns), features, file.tell() if is_stream else num_bytes


def choose_columns(
    path: Path, schema: Any, names: Sequence[str], further: Sequence[str]
) -> tuple[list[str], dict[str, Any]]:
    """Choose the columns to read, and read their features, which `datasets` stores in the file."""
    outer = [name if name in schema.names else name.partition(".")[0] for name in (*names, *further)]
    is_all = not names or not {*outer[: len(names)]} <= {*schema.names}
    columns = [name for name in schema.names if is_all or name in outer]
    refuse_doubles(f"{path}: the column", columns)
    written = {"huggingface": json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))}
    features = find_field(written, "huggingface.info.features")
    return columns, features if isinstance(features, dict) else {}


def saved_tables(folder: Path) -> list[Path]:
    """List the files of a data set that `datasets` saved in a folder, in order; none for another folder.

    Raises `InputError` for a folder of several splits.
    """
    if (folder / SPLITS).is_file():
        splits = ", ".join(sorted(state.parent.name for state in folder.glob(f"*/{SAVED_STATE}")))
        raise InputError(f"{folder} holds several splits: name the folder of one ({splits})")
    state: Any = read_json_file(folder / SAVED_STATE) if (folder / SAVED_STATE).is_file() else None
    try:
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError):  # no such file, or one of another program
        return []


def rows_of_file(
    path: Path, layout: FileForm = DEFAULT_FORM, words: str = "tokens", label: str | None = "label"
) -> Iterator[PlacedRow]:
    """Yield the rows of one file, or of a folder that `datasets` saved, in the format of its layout or ending.

    `words` and `label` name the words and tags of a file of columns; without a label, tags are not read.
    """
    form: str = "saved" if path.is_dir() else layout.format or FORMATS.get(ending_of(path), "columns")
    values: Iterable[tuple[str, Any]]
    table = TableForm()
    match form:
        case "squad":
            values = [(str(path), read_json_file(path))]
        case "judgements":  # a .tsv is in TREC's form if it has no header and four fields
            fields = next(numbered_lines(path), (1, ""))[1].split("\t")
            is_trec = len(fields) == 4 and fields[-1].lstrip("-").isdecimal()
            values = read_trec(path) if is_trec else open_table(path, layout, is_csv=False)[1]
        case "tsv" | "csv":
            table, values = open_table(path, layout, is_csv=form == "csv")
        case "columns" | "conllu":
            values = read_columns(path, layout, words, label, is_conllu=form == "conllu")
        case "json":
            form, values = open_json(path)
        case "xlsx":
            values = read_sheet(path)
        case "trec":
            values = read_trec(path)
        case "parquet" | "saved":
            tables = [path] if form == "parquet" else saved_tables(path)
            if not tables:
                raise InputError(f"{path} is a folder; name a file of rows in it")
            rows = itertools.chain.from_iterable(map(read_table, tables))
            values = ((f"{path}: row {number}", row) for number, (_, row, _) in enumerate(rows))
        case _:
            values = ((f"{path}:{number}", row) for number, row, _ in read_json_lines(path))
    unfolded = unfold(mark_numbers(table, values), form)
    yield from list(unfolded) if isinstance(values, list) else unfolded  # what is in memory is refused at once


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line's number (from 1) and its text without its end."""
    return ((number, line.rstrip("\r\n")) for number, line, _ in read_text_lines(path))


def open_table(path: Path, layout: FileForm, *, is_csv: bool) -> tuple[TableForm, Iterator[PlacedRow]]:
    """Detect the form of a table with fields between commas, semicolons, tabs or bars, and return it with the rows.

    Reads a .csv as pandas, Excel and most other programs write it: quotes enclose a field with a delimiter or line end,
    and a quote inside is doubled. A .tsv has no quotes, like GLUE's and BEIR's, unless the layout says so. If the
    layout does not say, a quoted header means quoted fields. Without a quoted header, a quoted field is an error,
    because the quotes may belong to the text.
    """
    lines = (line for _, line, _ in read_text_lines(path, keep_mark=True))
    marked = next(lines, "")
    first = marked.removeprefix(BYTE_ORDER_MARK)
    starts_quoted = first.startswith(QUOTE)
    if not is_csv and layout.delimiter is None and layout.has_header and {*first} & {*DELIMITERS} and "\t" not in first:
        raise InputError(f"{path}:1: no tabs between its columns: save it as .csv, or name `delimiter` in a task file")
    is_quoted = is_csv or layout.quotes or (layout.quotes is None and starts_quoted)
    usual = next((sign for sign in DELIMITERS if sign in first), ",") if is_csv else "\t"
    form = TableForm(
        layout.delimiter or usual,
        csv.QUOTE_NONE if not is_quoted else csv.QUOTE_ALL if starts_quoted else csv.QUOTE_MINIMAL,
        has_mark=first != marked,
        line_end="\r\n" if first.endswith("\r\n") else "\n",
    )
    return form, read_separated(path, layout, form, itertools.chain([first], lines))


def read_separated(path: Path, layout: FileForm, form: TableForm, lines: Iterator[str]) -> Iterator[PlacedRow]:
    """Yield the rows of a table in this form."""
    is_quoted = form.quoting != csv.QUOTE_NONE
    is_guessed = layout.quotes is None and not is_quoted
    if is_quoted:
        rows = quoted_fields(path, lines, form.delimiter)
    else:
        rows = ((number, line.rstrip("\r\n").split(form.delimiter)) for number, line in enumerate(lines, start=1))
    header: list[str] = []
    for number, fields in rows:
        location = f"{path}:{number}"
        if not header and fields in ([""], ["sep=", ""]):  # an empty line, or Excel's own, which names the delimiter
            continue
        if not header:
            header = fields if layout.has_header else [""] * len(fields)
            if not layout.has_header or header.count("") > 1:  # Excel leaves columns without names at the end
                header = [name or str(at) for at, name in enumerate(header)]
            refuse_doubles(f"{location}: the column", header)
            if layout.has_header:
                continue
        if fields == [""] and len(header) > 1 and not layout.has_short_rows:  # an empty line, as in a .csv
            continue
        fits = len(fields) == len(header)
        # Splitting would cut a quoted text with line ends or tabs, and leave only a part of it in the field.
        quoted = (field for field in fields if len(field) > 1 and field[0] == QUOTE)
        if is_guessed and any(field[-1] == QUOTE or not fits for field in quoted):
            remedy = "say `quotes: true` beside its name in the task file if they only enclose it, as in pandas, "
            remedy += "`quotes: false` if they belong to the text; or save the table as .csv"
            raise InputError(f"{location}: a field in quotes: {remedy}")
        if not fits and not (layout.has_short_rows and len(fields) < len(header)):
            counts = f"{len(fields)} fields where the header names {len(header)}, separated by {form.delimiter!r}"
            raise InputError(f"{location}: {counts}; correct it, or name `delimiter` in a task file")
        yield location, dict(zip(header, fields, strict=True)) if fits else SHORT_ROW


def quoted_fields(path: Path, lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty: its first line's number, and its fields."""
    csv.field_size_limit(MAX_LINE_BYTES)  # else an open quote consumes a file of any size
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    before = 0  # the number of lines in earlier rows
    try:
        for fields in reader:
            if fields:
                yield before + 1, fields
            before = reader.line_num
    except csv.Error as error:
        remedy = "double a quote inside quotes, and end a line in \\n"
        raise InputError(f"{path}:{before + 1}: broken table ({error}); {remedy}") from None


MOST_SHEET_BYTES, MOST_SHEET_ROWS = 1 << 30, 1 << 20
"""The most bytes of an unpacked workbook, and the most rows of a sheet, which no spreadsheet program exceeds."""
MOST_PACKED, LEAST_SUSPECT = 100, 1 << 24
"""How many times larger than packed a part of a workbook may be, if it has more than so many bytes. Tables reach 30."""


def read_sheet(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of the first sheet of an .xlsx workbook, whose first row names the columns.

    Formulas yield their saved values, and empty cells None. Raises `InputError` without openpyxl, and for a sheet that
    is not a table.
    """
    try:
        from openpyxl import load_workbook
    except ModuleNotFoundError:
        raise InputError(f"{path}: .xlsx needs openpyxl: pip install 'biphase[xlsx]', or save it as .csv") from None
    warnings.filterwarnings("ignore", module="openpyxl")  # it warns about styles that it drops
    header: list[str] = []
    with reading_rows(path), zipfile.ZipFile(path) as parts:
        if sum(part.file_size for part in parts.infolist()) > MOST_SHEET_BYTES:
            raise InputError(f"{path}: unpacked it has more than {MOST_SHEET_BYTES:,} bytes; save it as .csv")
        if any(part.file_size > max(MOST_PACKED * part.compress_size, LEAST_SUSPECT) for part in parts.infolist()):
            raise InputError(f"{path}: unpacked a part of it is more than {MOST_PACKED} times larger; save it as .csv")
        sheet = load_workbook(path, read_only=True, data_only=True, keep_links=False).worksheets[0]
        sheet.reset_dimensions()  # some programs write wrong ones
        for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
            location, width = f"{path}:{number}", len(cells)
            while width and cells[width - 1] is None:
                width -= 1
            if number > MOST_SHEET_ROWS or width > len(header) > 0 or (not header and None in cells[:width]):
                raise InputError(f"{location}: a row beyond {MOST_SHEET_ROWS:,}, or a cell in a column without a name")
            if not header:
                header = [str(name) for name in cells[:width]]
                refuse_doubles(f"{location}: the column", header)
            elif width:
                yield location, dict(itertools.zip_longest(header, cells[:width]))
        sheet.parent.close()


COMMENT = re.compile(r"# (id |newdoc|newpar|.+ =( |$))")
"""The beginning of a comment in CoNLL-U, such as `# text = …`, or of `# id …`; words with tags never have it."""


def split_fields(line: str) -> list[str]:
    """Split a line of a file of columns at its tabs or, without any, at its spaces."""
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def read_columns(
    path: Path, layout: FileForm, words_name: str, tags_name: str | None, is_conllu: bool
) -> Iterator[PlacedRow]:
    """Read CoNLL's form: a word and its tag per line, an empty line or -DOCSTART- between sentences.

    A word may contain any character except tabs and spaces, even no-break spaces. If the first column numbers the
    words, a line that begins with `#` is a comment; else it is a word, unless `COMMENT` matches. In CoNLL-U, skips
    lines with numbers such as 3-4 (a contraction of 3 and 4) and 3.1 (an unwritten word).
    """
    is_default = layout.columns == DEFAULT_FORM.columns
    word_at, tag_at = UD_COLUMNS if is_conllu and is_default else layout.columns
    is_numbered, last = word_at > 0, word_at if tags_name is None else max(word_at, tag_at)
    words: list[str] = []
    tags: list[str] = []
    row: Row = {}
    first = 0
    for number, line in itertools.chain(numbered_lines(path), [(0, "")]):
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            if words:
                yield f"{path}:{first}", row | {words_name: words} | ({tags_name: tags} if tags_name else {})
            words, tags, row = [], [], {}
        elif line.startswith("#") and (is_numbered or COMMENT.match(line)):
            key, _, value = line[1:].partition("=")
            row |= {"id": value.strip()} if key.strip() == "sent_id" else {}
        else:
            fields = split_fields(line)
            if len(fields) <= last:
                lacks = "a tag" if tags_name else f"a word in column {word_at} (from 0), where training had it"
                raise InputError(f"{path}:{number}: a line without {lacks}: '{line[:40]}'")
            if is_conllu and not fields[0].isdecimal():
                continue
            first = first if words else number
            words.append(fields[word_at])
            tags.append(fields[tag_at].strip() if tags_name else "")


def read_trec(path: Path) -> Iterator[PlacedRow]:
    """Read TREC's judgements: query, an unused number, document and grade, with blanks between them."""
    for number, line in numbered_lines(path):
        fields = line.split()
        if len(fields) == 4:
            yield f"{path}:{number}", {"query-id": fields[0], "corpus-id": fields[2], "score": fields[3]}
        elif fields:
            raise InputError(f"{path}:{number}: {len(fields)} fields where TREC has query, 0, document and grade")


def open_json(path: Path) -> tuple[str, Iterable[tuple[str, Any]]]:
    """Open a JSON file: a list of objects, objects by id, one object or one per line, or SQuAD's form. Returns the name
    of the form for `unfold`, and the values, each with its location."""
    lines = (line.lstrip() for _, line, _ in read_text_lines(path) if line.strip())
    first = next(lines, "")
    with suppress(json.JSONDecodeError):
        if first.startswith("{") and next(lines, None) is not None and parse_json(first):
            return "json", ((f"{path}:{number}", row) for number, row, _ in read_json_lines(path))
    content = read_json_file(path)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        return "squad", [(str(path), content)]
    values = [*content.values()] if isinstance(content, dict) else [None]
    if not values or 2 * sum(isinstance(row, dict) for row in values) > len(values):  # a single row may have one too
        named = {id: {"id": id} | row if isinstance(row, dict) else row for id, row in content.items()}
    else:
        named = dict(enumerate(content if isinstance(content, list) else [content]))
    return "jsonl", [(f"{path}: row {id}", value) for id, value in named.items()]
