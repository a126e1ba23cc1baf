"""Files, data sets and what is in memory → rows: lines and JSON (plain, .gz or .zst), .parquet and .arrow, DataFrames.

Texts to pretrain on, the data of tasks, pairs and rows to predict all come through here. Whatever is wrong is an
`InputError` that names the file, and the line or row where there is one.
"""

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from biphase.errors import InputError, clipped
from biphase.files import parse_json, read_json, reading

Row = dict[str, Any]
PlacedRow = tuple[str, Row]
"""A row with its place, such as `train.tsv:12`, for messages."""

CODECS = {".zst": "zstd", ".gz": "gzip"}
"""The endings of compressed files, and what pyarrow calls their compression."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
BUFFER_BYTES = 1 << 20
ABSENT = object()
"""Stands for the value of a field that is not there, where null is a value too."""
MAX_LINE_BYTES = 1 << 28
"""A longer line is refused: a small compressed file may hold one of many gigabytes."""
DAMAGED = "it is damaged, cut short or not what its ending says"


def plain_path(path: Path) -> Path:
    """A path without the ending of its compression."""
    return path.with_suffix("") if path.suffix in CODECS else path


def read_text_lines(path: Path) -> Iterator[tuple[int, str, int]]:
    """Lines with their ends, each with its number (from 1) and how many bytes of the file on disk are read by then.

    A byte order mark is left out. Raises `InputError` for a file that does not exist, is damaged or cut short, and for
    a line that is not UTF-8.
    """
    import pyarrow as pa  # its streams, unlike zstandard's, notice a file that is cut short

    with reading(path, DAMAGED), pa.OSFile(str(path)) as file:
        stream = pa.CompressedInputStream(file, CODECS[path.suffix]) if path.suffix in CODECS else file
        lines = iter(partial(io.BufferedReader(stream, BUFFER_BYTES).readline, MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"{path}:{number}: the line has more than {MAX_LINE_BYTES:,} bytes; split it")
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                what = f"byte {error.object[error.start]:#04x} at position {error.start} of the line"
                form = "cp1252"
                if number == 1 and line.startswith(UTF_16_MARKS):
                    what, form = "UTF-16, Excel's Unicode text", "utf-16"
                message = f"not UTF-8 ({what}); convert it: iconv -f {form} -t utf-8"
                raise InputError(f"{path}:{number}: {message}") from None
            yield number, text, file.tell()


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
            raise InputError(f"{path}:{number}: one JSON object per line is needed, here is {shown(row)}")
        yield number, row, num_bytes


def read_json_file(path: Path) -> Any:
    """The one JSON value that a file holds, over any number of lines. Raises `InputError` as `read_json_lines` does."""
    try:
        return parse_json("".join(line for _, line, _ in read_text_lines(path)))
    except json.JSONDecodeError as error:
        raise broken_json(f"{path}:{error.lineno}", error) from None


def broken_json(place: str, error: json.JSONDecodeError, needed: str = "") -> InputError:
    remedy = f": {needed}" if needed else ""
    return InputError(f"{place}: broken JSON ({error.msg}, column {error.colno}){remedy}")


def need_field(place: str, row: Row, name: str, remedy: str) -> Any:
    """The value of a field. Raises `InputError` with the names of all fields, and a remedy, where it is not there."""
    value = find_field(row, name, ABSENT)
    if value is ABSENT:
        columns = clipped(", ".join(field_names(row)))
        raise InputError(f"{place}: there is no column '{name}'; the columns are: {columns}; {remedy}")
    return value


def check_text(place: str, name: str, value: Any) -> str:
    """The value of a field as a text. Raises `InputError` for another type and for half of a surrogate pair."""
    if not isinstance(value, str):
        raise InputError(f"{place}: column '{name}' is {shown(value)}, not a text: mend the row or take it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"half of a surrogate pair at character {error.start}, which is no Unicode"
        raise InputError(f"{place}: column '{name}' has {message}: take it out") from None
    return value


def shown(value: Any) -> str:
    """A value as an error may quote it: the beginning of its JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)[:40]


def check_header(place: str, names: Sequence[str]) -> None:
    """Raises `InputError` where a table has two columns of one name: only one of them would be read."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{place}: the header names a column twice ('{twice[0]}'): rename one")


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


TABLE_ROWS = 256
"""Rows of a .parquet file that are read at a time; an .arrow file says itself how many."""

SPLITS = "dataset_dict.json"
"""The file by which a folder is known that `datasets.DatasetDict.save_to_disk` wrote: a folder for each split."""
SAVED_STATE = "state.json"
"""The file that says which files of a folder are a saved `datasets.Dataset`: beside them may lie what was cached."""


def read_table(path: Path, wanted: Sequence[str] = ()) -> Iterator[tuple[int, Row, int]]:
    """Rows of a .parquet or .arrow file, each with its number (from 1) and how many bytes of the file are read by then.

    Args:
        wanted: the columns to read, as far as they are there; all columns where the first of them is not, or none is
            named. `meta.text` stands for the column `meta`.

    Raises:
        InputError: the file is damaged, a text is not UTF-8, or two columns have one name.
    """
    number = before = 0
    with reading(path, DAMAGED):
        try:
            for batch, features, num_bytes in read_pieces(path, wanted):
                for place, row in enumerate(name_classes(batch.to_pylist(), features), start=1):
                    number += 1
                    yield number, row, before + (num_bytes - before) * place // len(batch)
                before = num_bytes
        except UnicodeDecodeError:
            raise InputError(f"{path}: a text after row {number} is not UTF-8") from None


def read_pieces(path: Path, wanted: Sequence[str]) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Pieces of a table, each with the features of its columns and how many bytes of its file are read by then."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_bytes = path.stat().st_size
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            columns, features = choose_columns(path, file.schema_arrow, wanted)
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
            columns, features = choose_columns(path, table.schema, wanted)
            batches = table if is_stream else map(table.get_batch, range(table.num_record_batches))
            for batch in batches:
                yield batch.select(columns), features, file.tell() if is_stream else num_bytes


def choose_columns(path: Path, schema: Any, wanted: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The columns of a table that are read, and what `datasets`, where it wrote the table, says of them."""
    outer = [name if name in schema.names else name.partition(".")[0] for name in wanted]
    is_all = not outer or outer[0] not in schema.names
    columns = [name for name in schema.names if is_all or name in outer]
    check_header(str(path), columns)
    written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return columns, written.get("info", {}).get("features") or {}


def name_classes(rows: Iterable[Row], features: dict[str, Any]) -> Iterator[Row]:
    """Rows of a data set, with the names of classes in place of their numbers wherever its features name classes."""
    named = [name for name, feature in features.items() if "ClassLabel" in json.dumps(feature)]
    for row in rows:
        for name in named:
            if name in row:
                row[name] = with_names(row[name], features[name])
        yield row


def with_names(value: Any, feature: Any) -> Any:
    """A value with names of classes in place of numbers, by its feature, which may be of a list or an object."""
    if isinstance(feature, list):  # an older form of lists
        feature = {"feature": feature[0]}
    if isinstance(value, list):
        return [with_names(item, feature.get("feature") or {}) for item in value]
    if isinstance(value, dict):
        return {name: with_names(inner, feature.get(name) or {}) for name, inner in value.items()}
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    return names[value] if names and isinstance(value, int) and 0 <= value < len(names) else value


def read_dataset(table: Any) -> Iterator[Row]:
    """The rows of a `datasets.Dataset`, with names of classes in place of their numbers."""
    features = table.features.to_dict()
    for batch in table.with_format("arrow").iter(batch_size=1000):
        yield from name_classes(batch.to_pylist(), features)


def saved_tables(folder: Path) -> list[Path]:
    """The files of the data set that `datasets` saved in a folder, in order; none where it saved none there.

    Raises `InputError` where it saved several splits.
    """
    if (folder / SPLITS).is_file():
        splits = ", ".join(sorted(state.parent.name for state in folder.glob(f"*/{SAVED_STATE}")))
        raise InputError(f"{folder} holds several splits: name the folder of one ({splits})")
    state: Any = read_json(folder / SAVED_STATE) if (folder / SAVED_STATE).is_file() else None
    try:
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError):  # no such file, or that of another program
        return []


def is_saved(folder: Path) -> bool:
    """Tell whether a folder was written by `save_to_disk` of a `datasets.Dataset`, or of several by name."""
    return (folder / SAVED_STATE).is_file() or (folder / SPLITS).is_file()


def rows_in_memory(data: Any, text_field: str = "text") -> Iterator[Row]:
    """The rows of a DataFrame, a `datasets.Dataset`, or of anything that can be gone through: dictionaries, or texts.

    What a DataFrame lacks is None; arrays, as pandas has the lists of a parquet file, come as lists.
    """
    if isinstance(data, Mapping):
        raise InputError(f"a mapping of {', '.join(map(str, data))} is given where rows are: give one of them")
    if not isinstance(data, Iterable):
        raise InputError(f"{data!r} is given where texts or rows are")
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        data = data.set_axis([str(name) for name in data.columns], axis=1)
        check_header("DataFrame", [*data.columns])
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    elif datasets is not None and isinstance(data, datasets.Dataset):
        data = read_dataset(data)
    for number, row in enumerate(data):
        if isinstance(row, str):
            yield {text_field: row}
        elif isinstance(row, Mapping):
            yield {name: without_arrays(value) for name, value in row.items()}
        else:
            raise InputError(f"row {number} is of type {type(row).__name__}: give texts, or rows as dictionaries")


def without_arrays(value: Any) -> Any:
    """A value with lists in place of the arrays in it."""
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        value = value.tolist()
    return [without_arrays(item) for item in value] if isinstance(value, list) else value
