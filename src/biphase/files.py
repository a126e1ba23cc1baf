"""Files and folders that appear whole or not at all; locks, hashes; JSON and YAML of a known form.

A file for another stage is written beside its final name and then renamed. JSON and YAML values have bounded depth and
size, and no duplicate keys.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from biphase.console import err
from biphase.errors import BusyError, InputError, clipped, first_line, told_as

MAX_DEPTH = 100
"""The deepest nesting of a value. Python's own recursion over a value fails a few hundred levels deeper."""

MAX_YAML_CHARACTERS = 2_000_000
"""The longest YAML text. People write shorter ones, and PyYAML takes ten seconds for a megabyte."""

MAX_YAML_VALUES = 200_000
"""The most values in a YAML text, aliases expanded."""

DEEP = f"nested more than {MAX_DEPTH} deep"


def parse_json(text: str) -> Any:
    """Parse a JSON text. Raises `json.JSONDecodeError`, also for a value that other tools could not read."""
    try:
        value = READER.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value):
            raise RecursionError
        if "\\u" in text and "\\ud" in text.lower():  # half of a surrogate pair is not a character
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise json.JSONDecodeError(f"{half!r} is half of a surrogate pair, and no character", text, 0) from None
    except RecursionError:
        raise json.JSONDecodeError(DEEP, text, 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(first_line(error), text, 0) from None
    return value


def make_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(name, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key '{name}' occurs twice")
    return value


READER = json.JSONDecoder(object_pairs_hook=make_object)


def is_deep(value: Any) -> bool:
    """Return whether lists and mappings are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, list | dict)]
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, list | dict) for item in level)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text of one document as people mean it: `0100` and `1:30` are strings.

    Raises a one-line `yaml.YAMLError`.
    """
    if len(text) > MAX_YAML_CHARACTERS:
        raise yaml.YAMLError(f"it has more than {MAX_YAML_CHARACTERS:,} characters")
    loader = YamlLoader(text)
    loader.yaml_implicit_resolvers = YAML_TYPES
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        check_nodes(root)
        value = loader.construct_document(root)
        json.dumps(value, ensure_ascii=False, default=str).encode()
        if is_deep(value):
            raise RecursionError
    except RecursionError:
        raise yaml.YAMLError(DEEP) from None
    except yaml.YAMLError as error:
        raise yaml.YAMLError(clipped(" ".join(str(error).replace('in "<unicode string>", ', "at ").split()))) from None
    except (TypeError, ValueError) as error:
        raise yaml.YAMLError(f"a key or a text that JSON cannot hold: {first_line(error)}") from None
    return value


YAML_TYPES = {  # YAML 1.1 reads these as octal and sexagesimal numbers
    first: [("tag:yaml.org,2002:str", re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9_.]+)+)$")), *resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class YamlLoader(yaml.SafeLoader):
    """PyYAML's loader, whose errors name the line of an invalid value, such as `!!bool x` or a date in month 13."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            type_name = node.tag.rpartition(":")[2]
            line = f"line {node.start_mark.line + 1}: '{clipped(str(node.value), 40)}' is not a valid {type_name}"
            raise yaml.YAMLError(f"{line}; write a text in quotes") from None


def check_nodes(root: yaml.Node) -> None:
    """Raise `yaml.YAMLError` for a duplicate key in a mapping, and for more values than `MAX_YAML_VALUES`.

    Values are counted each time an alias repeats them: a few lines can expand to more values than fit in memory.
    """
    nodes = [root]
    for node in nodes:  # grows on the way
        if isinstance(node, yaml.MappingNode):
            counts = Counter(str(key.value) for key, _ in node.value)
            if len(counts) < len(node.value):
                [(name, _)] = counts.most_common(1)
                again = [key.start_mark.line for key, _ in node.value if str(key.value) == name][1]
                raise yaml.YAMLError(f"line {again + 1}: the key '{name}' occurs twice")
            nodes += chain.from_iterable(node.value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if len(nodes) > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it expands to more than {MAX_YAML_VALUES:,} values")


ANEW = "delete it and rerun the command that makes it"
"""The remedy for a file that biphase itself made."""

Stored = TypeVar("Stored")


def write_text(path: Path, text: str) -> None:
    """Write a file and rename it, so that a reader sees the old file or the whole new one, even after a power cut."""
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file for writing that takes its name only when the block ends without an error.

    The next writer of the same file overwrites a part that a killed process left.
    """
    part = path.with_name(f".{path.name}.part")
    with open(open_alone(part), "w", encoding="utf-8", newline="\n") as file:
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:  # Ctrl-C too leaves no half file
            part.unlink(missing_ok=True)
            raise


@contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """Open a `whole_file` that replaces nothing. If another program writes a file of this name meanwhile, this one gets
    another name, which the error tells.

    Raises:
        InputError: a file of this name exists, or another process is writing it.
    """
    refuse_existing(path)
    part = path.with_name(f".{path.name}.part")
    if is_locked(part):
        raise InputError(f"another process is writing {path}; choose another name")
    with whole_file(path) as file:
        refuse_existing(path)  # a process that held the lock has written it
        yield file
        if path.exists():
            other = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
            file.flush()
            os.replace(part, other)
            raise InputError(f"{path} was written by another program meanwhile, and stays; {other} is the new file")


def open_alone(path: Path, *, wait: bool = True) -> int:
    """Open and lock a file for writing, never through a link; create it if it is missing. Returns a file descriptor.

    Raises `BlockingIOError` when another process holds the lock and `wait` is off, and `OSError` on a file system
    without locks, after removing a new file.
    """
    while True:
        is_new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise
            if is_new:
                path.unlink(missing_ok=True)
            raise OSError(error.errno, f"no locks on its file system ({error.strerror})", str(path)) from error
        if is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # another process removed or renamed it in the meantime


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON (`write_text`), indented for people."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def reading(path: Path, remedy: str = ANEW) -> Iterator[None]:
    """Turn errors of the system or a library in the block into an `InputError` that names the file."""
    with told_as(f"{path} cannot be read", remedy):
        try:
            yield
        except FileNotFoundError:
            raise InputError(f"{path} does not exist") from None


def read_json(path: Path, remedy: str = ANEW) -> Any:
    """Read the value in a JSON file. Raises `InputError` naming the file when it is missing, or not JSON, with the
    remedy."""
    with reading(path):
        content = path.read_bytes()
    with told_as(f"{path} is not valid JSON", remedy):
        return parse_json(content.decode())


def read_json_as(path: Path, kind: type[Stored], remedy: str = ANEW) -> Stored:
    """Read the value in a JSON file as a dataclass, a pydantic model or a type such as `dict[str, int]`.

    Raises:
        InputError: as `read_json`; and for a missing or wrong key, with file, key and remedy.
    """
    record = read_json(path, remedy)
    return validate_record(path, record, kind, remedy)


make_adapter: Callable[[Any], TypeAdapter[Any]] = lru_cache(TypeAdapter)
"""A cached `TypeAdapter`, because making one takes longer than reading a record."""


def validate_record(path: Path, record: Any, kind: type[Stored], remedy: str) -> Stored:
    """Return a record of a file as `kind`; raises as `read_json_as` does."""
    try:
        return make_adapter(kind).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        kind_of_all = "a list" if first["type"] == "list_type" else "a mapping of keys"
        reason = f"{key}: {first['msg']}" if key else f"it holds {clipped(json.dumps(record), 40)}, not {kind_of_all}"
        raise InputError(f"{path} is damaged ({reason}); {remedy}") from None


RECORD_HASH = "record_hash"
"""The key of a record's hash over all its other keys."""


def write_hashed(path: Path, tree: dict[str, Any]) -> None:
    """Write a tree as JSON with its own hash, so that no change goes unnoticed."""
    write_json(path, tree | {RECORD_HASH: content_hash(tree)})


def read_hashed(path: Path, kind: type[Stored], remedy: str) -> Stored:
    """Read the record that `write_hashed` wrote, as `read_json_as` does, without the hash. Raises `InputError` also for
    a record that does not match its hash."""
    record = read_json_as(path, dict[str, Any], remedy)
    if record.pop(RECORD_HASH, None) != content_hash(record):
        raise InputError(f"{path} is damaged (it is not what was written, by its own hash); {remedy}")
    return validate_record(path, record, kind, remedy)


@contextmanager
def whole_folder(path: Path, *, is_lasting: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, which takes its name only if the block ends without an error.

    It replaces an existing folder at `path`. The next call clears what a killed process left, and puts back what it had
    moved aside. With `is_lasting`, all files are on the disk before the name changes, so that it survives a power cut.

    Raises:
        BusyError: another process writes a folder of this name.
        OSError: the disk is full or the like, even if a library wraps that error in its own.
    """
    path = path.resolve()
    old = path.with_name(f".{path.name}.old.part")
    with claimed(path) as part:
        put_back(old, path)
        try:
            yield part
            for file in files_below(part):
                if not file.is_symlink():  # safetensors ignores the umask and lets only the owner read its files
                    file.chmod(part.stat().st_mode & 0o666)
            for inside in (*files_below(part), *filter(Path.is_dir, part.rglob("*")), part) if is_lasting else ():
                sync(inside)
            if path.exists():
                os.replace(path, old)
            os.replace(part, path)
            if is_lasting:
                sync(path.parent)
        except Exception as error:  # `tokenizers` raises a bare Exception when the disk is full
            code = RUST_SYSTEM_ERROR.search(str(error))
            if isinstance(error, OSError | InputError) or code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        finally:
            put_back(old, path)


def put_back(old: Path, path: Path) -> None:
    """Give a folder that was moved aside its name back, or remove it if its successor has that name."""
    if old.exists() and not path.exists():
        os.replace(old, path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def claimed(path: Path, ending: str = "part") -> Iterator[Path]:
    """Claim the path of a future folder, and yield an empty folder beside it, which is removed at the end unless the
    block renamed it. A locked file beside both keeps other processes out, because NFS does not lock folders.

    Args:
        ending: the suffix of that folder's name; choose another one for work that ends with a `whole_folder` at `path`.

    Raises `BusyError` if another process holds the claim.
    """
    part, lock = (path.with_name(f".{path.name}.{suffix}") for suffix in (ending, f"lock.{ending}"))
    with locked(lock, busy=f"another process is writing {path}: wait for it, or give another place"):
        refuse_links(part)
        if part.exists():  # a killed process left it
            shutil.rmtree(part)
        part.mkdir()
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
            lock.unlink(missing_ok=True)


def forget_claim(path: Path) -> None:
    """Remove the lock that a process left beside a whole folder, if it was killed between its last two steps. The
    caller keeps other writers of the folder out."""
    path.with_name(f".{path.name}.lock.part").unlink(missing_ok=True)


RUST_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""The pattern by which `safetensors` and `tokenizers` report an error of the system."""


def remove_folder(path: Path) -> None:
    """Remove a folder of ours. A kill halfway leaves nothing under its name, only a `.part` for `sweep_parts`."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.replace(path, part)
    shutil.rmtree(part, ignore_errors=True)


def sweep_parts(folder: Path) -> None:
    """Remove the leftovers of killed writers in a folder of ours: all files and folders named `.ANYTHING.part`."""
    for part in folder.glob(".*.part"):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


MARK = ".biphase.json"
"""The file that marks a folder as ours, with its kind and the hashes of its files."""


@contextmanager
def own_folder(path: Path, kind: str) -> Iterator[Path]:
    """Make a `whole_folder` at a path that the user chose. It replaces only the output of an earlier call.

    Args:
        path: a folder that does not exist, is empty, or contains only unchanged files of an earlier call.
        kind: the kind of the folder, such as `tokenizer`, for its mark and for messages.

    Raises:
        InputError: for a file, and for a folder with any file that we did not write or that has changed since.
    """
    with whole_folder(path) as part:
        refuse_foreign(path, kind)  # now, while no other call can write there
        yield part
        mark_successor(part, path, kind)


@dataclass(frozen=True)
class FolderMark:
    """A folder's mark: its kind, and the hash of each file in it."""

    biphase: str
    files: dict[str, str]


def write_mark(folder: Path, kind: str) -> None:
    """Write the mark of a folder."""
    write_json(folder / MARK, asdict(FolderMark(kind, hash_below(folder))))


def mark_successor(part: Path, path: Path, kind: str) -> None:
    """Mark a finished folder that is to replace `path`. Raises `InputError` if somebody has written files there
    meanwhile, after giving the new folder another name, which the error tells."""
    write_mark(part, kind)
    try:
        refuse_foreign(path, kind)
    except InputError as error:
        other = part.with_name(f"{path.resolve().name}-{os.getpid()}")
        os.replace(part, other)
        raise InputError(f"{other} is the new {kind}, because its place has other files by now: {error}") from None


def hash_below(folder: Path) -> dict[str, str]:
    """Hash each file below a folder; return the hashes by relative path."""
    return {str(file.relative_to(folder)): file_hash(file) for file in files_below(folder)}


def refuse_damaged(folder: Path, remedy: str) -> None:
    """Raise `InputError` for a file that differs from its folder's mark. The card may differ, because people edit it.

    Accepts a folder without a mark; prints a line if biphase wrote that folder.
    """
    if (folder / MARK).exists():
        mark = read_json_as(folder / MARK, FolderMark, remedy)
        refuse_changed(folder, {name: mark.files[name] for name in mark.files if name != "README.md"}, remedy)
    elif folder.suffix != ".part":  # a folder that is being written gets its mark last
        tell_unmarked(folder)


@lru_cache
def tell_unmarked(folder: Path) -> None:
    """Print once that a folder of biphase, known by its card's tags or as a search index, has lost its mark."""
    card = folder / "README.md"
    head = card.read_bytes()[:2000].partition(b"\n---\n")[0] if card.is_file() else b""
    if b"\n- biphase\n" in head or (folder / "index.json").exists():
        remedy = "copy the folder again, with its hidden files"
        err.print(f"{folder} lacks {MARK}, the file with its hashes, so that damage goes unnoticed; {remedy}")


def refuse_changed(folder: Path, hashes: Mapping[str, str], remedy: str) -> None:
    """Raise `InputError` for a missing or changed file among those with a hash."""
    for name, digest in hashes.items():
        file = folder / name
        if not file.is_file():
            raise InputError(f"{file} is damaged (it is missing); {remedy}")
        if hash_path(file) != digest:
            raise InputError(f"{file} is damaged (it is not what was written, by its hash); {remedy}")


Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """Return a file's inode, size and modification time, which change when somebody writes or replaces it."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4096)
def hash_stamped(path: Path, _stamp: Stamp) -> str:
    """Hash a file once per stamp."""
    return file_hash(path)


def hash_path(path: Path) -> str:
    """Hash a file's bytes."""
    return hash_stamped(path, stamp_of(path))


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Make a file unless it exists. Raises `InputError` for an existing file whose hash has changed."""
    note = path.with_name(f".{path.name}.sha256")
    if not path.exists():
        part = path.with_name(f".{path.name}.part")
        make(part)
        write_json(note, file_hash(part))
        part.rename(path)
    elif note.exists():
        refuse_changed(path.parent, {path.name: read_json_as(note, str)}, ANEW)


def refuse_existing(path: Path) -> None:
    """Raise `InputError` for a file that exists, and for one in a missing folder."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists():
        raise InputError(f"{path} already exists; choose another name, or delete it first")


def refuse_filled(folder: Path) -> None:
    """Raise `InputError` for a file or a filled folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not an empty folder; choose another, or delete it first")


def refuse_foreign(path: Path, kind: str) -> None:
    """Raise `InputError` for a folder with any file that we did not write."""
    if path.is_file():
        raise InputError(f"{path} is a file; give a new or an empty folder for the {kind}")
    if not path.exists() or not any(path.iterdir()):
        return
    remedy = f"give a new or an empty folder for the {kind}, or delete this one first"
    if not (path / MARK).exists():
        raise InputError(f"{path} has files that biphase did not write; {remedy}")
    mark = read_json_as(path / MARK, FolderMark, remedy)
    if mark.biphase != kind:
        raise InputError(f"{path} is no {kind} that biphase wrote; {remedy}")
    for file in files_below(path):
        name = str(file.relative_to(path))
        if name != MARK and (file.is_symlink() or mark.files.get(name) != file_hash(file)):
            raise InputError(f"{file} is not as biphase wrote it; {remedy}")


def refuse_links(*paths: Path) -> None:
    """Raise `InputError` for a link in place of a file or folder of ours: it could lead to other files."""
    for path in paths:
        if path.is_symlink():
            raise InputError(f"{path} is a link, and biphase follows none there; remove it")


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems do not sync folders
            raise
    finally:
        os.close(descriptor)


def files_below(folder: Path) -> list[Path]:
    """List all files and links below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


@contextmanager
def locked(path: Path, *, wait: bool = False, busy: str = "") -> Iterator[None]:
    """Hold a lock on the file at `path`, never through a link; create the file and its folder if needed.

    The lock ends with its process, so that a killed one blocks nothing. When another process holds it, wait, or without
    `wait` raise a `BusyError` with the message `busy`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.name.startswith("."):  # a folder that is ours alone
        refuse_links(path.parent)
    try:
        descriptor = open_alone(path, wait=wait)
    except (BlockingIOError, FileNotFoundError):  # the latter if that process removes the folder at this moment
        raise BusyError(busy or f"{path} is held by another process") from None
    with open(descriptor, "w"):
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on the file at `path`."""
    with suppress(FileNotFoundError), open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that other askers do not count
        except BlockingIOError:
            return True
    return False


def content_hash(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
