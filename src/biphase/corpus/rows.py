"""Files → rows: plain, .gz and .zst files, read line by line with the number of each; .parquet and .arrow (as
`datasets` saves it), piece by piece.

Texts to pretrain on and the data of tasks both come through here. Whatever is wrong with a file is an `InputError` that
names the file, and the line where there is one.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from biphase.errors import InputError, first_line
from biphase.files import parse_json, read_json

CODECS = {".zst": "zstd", ".gz": "gzip"}
"""The endings of compressed files, and what pyarrow calls their compression."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
BUFFER_BYTES = 1 << 20
ABSENT = object()
"""Stands for the value of a field that is not there, where null is a value too."""
MAX_LINE_BYTES = 1 << 28
"""A longer line is refused: a small compressed file may hold one of many gigabytes."""


def plain_path(path: Path) -> Path:
    """A path without the ending of its compression."""
    return path.with_suffix("") if path.suffix in CODECS else path


def read_text_lines(path: Path) -> Iterator[tuple[int, str, int]]:
    """Lines with their ends, each with its number (from 1) and how many bytes of the file on disk are read by then.

    A byte order mark is left out. Raises `InputError` for a file that does not exist, is damaged or cut short, and for
    a line that is not UTF-8.
    """
    import pyarrow as pa  # its streams, unlike zstandard's, notice a file that is cut short

    try:
        with pa.OSFile(str(path)) as file:
            stream = pa.CompressedInputStream(file, CODECS[path.suffix]) if path.suffix in CODECS else file
            lines = iter(partial(io.BufferedReader(stream, BUFFER_BYTES).readline, MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"{path}:{number}: the line has more than {MAX_LINE_BYTES:,} bytes; split it, or leave it out"
                    )
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    what = f"byte {error.object[error.start]:#04x} at position {error.start} of the line"
                    form = "cp1252"
                    if number == 1 and line.startswith(UTF_16_MARKS):
                        what, form = "UTF-16, Excel's Unicode text", "utf-16"
                    raise InputError(
                        f"{path}:{number}: not UTF-8 ({what}); convert the file, for example with iconv -f {form} "
                        "-t utf-8"
                    ) from None
                yield number, text, file.tell()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise damaged(path, error) from None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """The objects of a file that has one JSON object per line, with what `read_text_lines` says of the line of each.

    Blank lines are skipped. Raises `InputError` as `read_text_lines` does, for broken JSON, and for what is no object.
    """
    for number, line, num_bytes in read_text_lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            raise broken_json(f"{path}:{number}", error, "one object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: one JSON object per line is needed, here is a {json_kind(row)}")
        yield number, row, num_bytes


def read_json_file(path: Path) -> Any:
    """The one JSON value that a file holds, over any number of lines. Raises `InputError` as `read_json_lines` does."""
    try:
        return parse_json("".join(line for _, line, _ in read_text_lines(path)))
    except json.JSONDecodeError as error:
        raise broken_json(f"{path}:{error.lineno}", error) from None


def damaged(path: str | Path, error: Exception) -> InputError:
    return InputError(
        f"{path} cannot be read to its end ({first_line(error)}): it is damaged, cut short or not what its ending says"
    )


def broken_json(place: str, error: json.JSONDecodeError, needed: str = "") -> InputError:
    remedy = f": {needed}" if needed else ""
    return InputError(f"{place}: broken JSON ({error.msg}, column {error.colno}){remedy}")


def find_field(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A field of a row; where none has that very name, `meta.text` is the field `text` of the object `meta`."""
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    return find_field(row[outer], inner, default) if dot and isinstance(row.get(outer), Mapping) else default


def field_names(row: Mapping[str, Any]) -> Iterator[str]:
    """The names of a row's fields, and of the fields in its objects: `id`, `meta`, `meta.text`."""
    for name, value in row.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in field_names(value))


def json_kind(value: Any) -> str:
    """What JSON calls a value: null, object, list, string, boolean or number."""
    if value is None:
        return "null"
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), type(value).__name__)


TABLE_ROWS = 256
"""Rows of a .parquet file that are read at a time; an .arrow file says itself how many."""

SPLITS = "dataset_dict.json"
"""The file by which a folder is known that `datasets.DatasetDict.save_to_disk` wrote: a folder for each split."""
SAVED_STATE = "state.json"
"""The file that says which files of a folder are a saved `datasets.Dataset`: beside them may lie what was cached."""


class NoColumnError(Exception):
    """A table lacks a column; the arguments are the names of those that it has."""


def read_table(path: Path, needed: str, others: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Rows with the named columns, those of `others` only where they are there; each row with its number (from 1) and
    how many bytes of the file are read by then. `meta.text` is a column `text` inside a column `meta`.

    Raises:
        NoColumnError: there is no column `needed`.
        InputError: the file is damaged, a text is not UTF-8, or two columns have one of the names.
    """
    import pyarrow as pa

    number = before = 0
    try:
        for batch, num_bytes in read_pieces(path, needed, others):
            for place, row in enumerate(batch.to_pylist(), start=1):
                number += 1
                yield number, row, before + (num_bytes - before) * place // len(batch)
            before = num_bytes
    except UnicodeDecodeError:
        raise InputError(f"{path}: a text after row {number} is not UTF-8") from None
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:  # the last two: dates beyond Python's
        raise damaged(path, error) from None


def read_pieces(path: Path, needed: str, others: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Pieces of a table, each with how many bytes of its file are read by then."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_bytes = path.stat().st_size
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            columns = choose_columns(path, file.schema_arrow, needed, others)
            num_rows = 0
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(batch_size=TABLE_ROWS, row_groups=[group], columns=columns):
                    num_rows += len(batch)
                    yield batch, num_bytes * num_rows // file.metadata.num_rows
        return
    with pa.OSFile(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        table = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
        with table:
            columns = choose_columns(path, table.schema, needed, others)
            whole = [name if name in table.schema.names else name.partition(".")[0] for name in columns]
            batches = table if is_stream else map(table.get_batch, range(table.num_record_batches))
            for batch in batches:
                yield batch.select(sorted({*whole})), file.tell() if is_stream else num_bytes


def choose_columns(path: Path, schema: Any, needed: str, others: Sequence[str]) -> list[str]:
    """The named columns that a table has."""
    import pyarrow as pa

    def inside(field: Any, name: str) -> Iterator[str]:
        """The names of all that stands in a column."""
        if pa.types.is_struct(field.type):
            yield from (part for child in field.type for part in inside(child, f"{name}.{child.name}"))
        else:
            yield name

    names = dict.fromkeys([*schema.names, *(part for field in schema for part in inside(field, field.name))])
    if needed not in names:
        raise NoColumnError(*names)
    columns = [name for name in (needed, *others) if name in names]
    if twice := [name for name in columns if schema.names.count(name) > 1]:
        raise InputError(f"{path} has two columns '{twice[0]}': rename one, or take it out")
    return columns


def leftovers(state: Path) -> set[Path]:
    """The .arrow files beside the `SAVED_STATE` of a `datasets.Dataset` that are none of it."""
    tables = set(state.parent.glob("*.arrow"))
    found = read_json(state) if tables else None  # another's file, of which nothing is known
    files = found.get("_data_files") if isinstance(found, dict) else None
    return {path for path in tables if {"filename": path.name} not in files} if isinstance(files, list) else set()
