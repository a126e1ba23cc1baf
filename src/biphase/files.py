"""Files that appear whole or not at all, locks on them, and the hashes that name what is in them."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from biphase.errors import BusyError, InputError

Stored = TypeVar("Stored")


def write_text(path: Path, text: str) -> None:
    """Write and rename: a reader sees the old file or the whole new one, also after a power cut."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value as JSON, indented for people."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises `InputError` naming the file when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); delete it and rerun what makes it") from None


def read_json_as(path: Path, kind: type[Stored], remedy: str = "delete it and rerun what makes it") -> Stored:
    """What a JSON file holds, as a dataclass, a pydantic model or a type such as `dict[str, int]`.

    Raises:
        InputError: as `read_json`; and naming the file, the first key that is missing or of another type, and the
            remedy.
    """
    try:
        return TypeAdapter(kind).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise InputError(f"{path} is damaged ({reason}); {remedy}") from None


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that takes its name only when the block ends without an error.

    An existing folder at `path` is replaced. What a killed process left behind is cleared by the next call.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        if path.exists():
            shutil.rmtree(path)
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock on the file at `path` (made where it is not there).

    The lock ends with its process, so a killed one blocks nothing. Another process that holds it is waited for with
    `wait`, and otherwise a `BusyError`.
    """
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{path} is a link, through which nothing is written; remove it") from None
        raise
    with open(number, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BusyError(f"{path} is held by another process") from None
        yield


def content_hash(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of the bytes of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
