"""What a program has in memory (texts, rows, a DataFrame, a `datasets.Dataset`; settings) → what all else reads: files
that are named by what they hold, so that the same call finds what an earlier one made of them; checked configurations.
"""

import json
import math
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic_core import to_jsonable_python

from biphase.config import Strict, load_config, parse_config
from biphase.console import err
from biphase.corpus.text import kind_of
from biphase.errors import InputError
from biphase.files import file_hash, whole_file
from biphase.tasks.rows import Row, check_header, rows_of_dataset

Settings = TypeVar("Settings", bound=Strict)

Changes = Mapping[str, Any] | Sequence[str]
"""Changes to single keys: `{"schedule.peak_lr": 1e-3}`, or as on the command line `["schedule.peak_lr=1e-3"]`."""


def are_names(sources: Any) -> bool:
    """Whether sources are names of files, folders or data sets, and not what is in memory.

    One string always is, and so are several, unless some of them are running text and none is a path that exists or
    ends as a file of text does: then they are texts.
    """
    if isinstance(sources, str | Path):
        return True
    if not isinstance(sources, list | tuple) or not all(isinstance(one, str | Path) for one in sources):
        return False
    has_texts = any(is_running_text(str(one)) for one in sources)
    if len(sources) < 2 or not has_texts:
        return True
    return any(isinstance(one, Path) or os.path.exists(one) or kind_of(Path(one)) is not None for one in sources)


def is_running_text(text: str) -> bool:
    """Whether there are several words in a text, or letters without case: Chinese, Japanese and Thai have no blanks."""
    return len(text.split()) > 1 or any(unicodedata.category(letter) == "Lo" for letter in text)


def name_sources(sources: Any, folder: Path, text_field: str) -> list[str | Path]:
    """The names of sources, after what is in memory has become a file of the folder."""
    if isinstance(sources, str | Path):
        return [sources]
    if are_names(sources):
        return list(sources)
    path = keep_rows(rows_in(sources, text_field), folder, "texts")
    err.print(f"texts in memory are kept as {path}")
    return [path]


def rows_in(given: Any, text_field: str = "text", labels: Sequence[str] = ("label",)) -> Iterator[Row]:
    """The rows of a DataFrame, a `datasets.Dataset` (labels that it names come as names), or of anything that can be
    gone through: dictionaries, or texts. What a DataFrame lacks is None; arrays, as pandas has the lists of a parquet
    file, come as lists."""
    if isinstance(given, Mapping):
        raise InputError(f"a mapping of {', '.join(map(str, given))} is given where rows are: give one of them")
    if not isinstance(given, Iterable):
        raise InputError(f"{given!r} is given where texts or rows are")
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")
    if pandas is not None and isinstance(given, pandas.DataFrame):
        if given.columns.nlevels > 1:
            raise InputError("the columns of the DataFrame have names of several levels: give each one name")
        given = given.set_axis([str(name) for name in given.columns], axis=1)
        check_header("DataFrame", [*given.columns])
        given = given.astype(object).where(given.notna(), None).to_dict("records")
    elif datasets is not None and isinstance(given, datasets.Dataset):
        label = next((name for name in labels if name in given.column_names), labels[0])
        given = (row for _, row in rows_of_dataset(given, label, "Dataset"))
    for number, row in enumerate(given):
        if not isinstance(row, str | Mapping):
            raise InputError(f"row {number} is of type {type(row).__name__}: give texts, or rows as dictionaries")
        yield {text_field: row} if isinstance(row, str) else {name: without_arrays(one) for name, one in row.items()}


def without_arrays(value: Any) -> Any:
    """A value with lists in place of the arrays in it."""
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        value = value.tolist()
    return [without_arrays(one) for one in value] if isinstance(value, list) else value


def plain_value(value: Any) -> Any:
    """What JSON and YAML can hold of a value of NumPy, of a range, of a path or of a date."""
    if isinstance(value, range):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def keep_rows(rows: Iterable[Row], folder: Path, stem: str) -> Path:
    """The rows as `folder/STEM-HASH.jsonl`; a file that is there is the same one and stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{stem}.jsonl"
    with whole_file(part) as file:
        for number, row in enumerate(rows):
            try:
                file.write(json.dumps(row, ensure_ascii=False, default=plain_value) + "\n")
            except UnicodeEncodeError:
                raise InputError(f"row {number} holds half of a surrogate pair, which is no Unicode") from None
    path = folder / f"{stem}-{file_hash(part)[:12]}.jsonl"
    if path.exists():
        part.unlink()
    else:
        os.replace(part, path)
    return path


def read_settings(kind: type[Settings], given: Any, changes: Changes) -> Settings:
    """A checked configuration from a YAML file, a tree in memory or a configuration, after changes to single keys."""
    overrides = list_changes(changes)
    if isinstance(given, kind):
        given = given.model_dump(mode="json")
    if isinstance(given, Mapping):
        return parse_config(kind, dict(given), overrides, origin=kind.__name__)
    if not isinstance(given, str | Path):
        raise InputError(f"{given!r} is no {kind.__name__}: give a YAML file, a mapping of keys, or a {kind.__name__}")
    return load_config(kind, Path(given), overrides)


def list_changes(changes: Changes | None) -> list[str]:
    """Changes as the command line takes them."""
    if isinstance(changes, str):
        return [changes]
    if not isinstance(changes, Mapping):
        return list(changes or ())
    return [f"{key}={write_value(value)}" for key, value in changes.items()]


def write_value(value: Any) -> str:
    """A value as YAML in one line, with quotes where they are needed."""
    value = to_jsonable_python(value, fallback=plain_value)
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def listed_numbers(given: Any, name: str) -> tuple[Any, ...]:
    """Several numbers that are given as `name`."""
    numbers = tuple(given) if isinstance(given, Iterable) else ()
    if not numbers or not all(isinstance(number, Real) for number in numbers):
        raise InputError(f"`{name}` is {given!r}: give a list of numbers")
    return numbers


def by_commas(text: str) -> list[str]:
    """`snli, genre,` → ["snli", "genre"]."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InputError(f"'{text}' has nothing beside commas; leave the option out, or name something")
    return words
