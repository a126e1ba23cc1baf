"""Tables of columns, .parquet and .arrow (as `datasets` saves it) → rows with a few of the columns, piece by piece."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from biphase.corpus.readers import damaged
from biphase.errors import InputError
from biphase.files import read_json

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
