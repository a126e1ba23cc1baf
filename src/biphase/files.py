"""Files and folders that appear whole or not at all; locks, hashes; JSON and YAML of a known form.

A file that another stage reads is written beside its place and renamed. Texts of JSON and YAML become values that are
bounded in depth and size, with no key twice.
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
from contextlib import ExitStack, contextmanager, suppress
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
"""Nothing that biphase reads is nested deeper. Python's own walks through a value end some hundred levels further."""

MAX_YAML_CHARACTERS = 2_000_000
"""A file that people write is shorter. PyYAML reads a megabyte in ten seconds."""

MAX_YAML_VALUES = 200_000
"""Aliases may stand for this many values in all."""

DEEP = f"nested more than {MAX_DEPTH} deep"


def parse_json(text: str) -> Any:
    """Parse the value of a JSON text. Raises `json.JSONDecodeError`, also for what other tools could not read again."""
    try:
        value = READER.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value):
            raise RecursionError
        if "\\u" in text and "\\ud" in text.lower():  # half of a surrogate pair is no character
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(DEEP, text, 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(first_line(error), text, 0) from None
    return value


def make_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(name, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key '{name}' stands twice")
    return value


READER = json.JSONDecoder(object_pairs_hook=make_object)


def is_deep(value: Any) -> bool:
    """Tell whether lists and mappings stand in one another further than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, list | dict)]
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, list | dict) for item in level)


def parse_yaml(text: str) -> Any:
    """Parse the value of a YAML text of one document, as people write it: `0100` and `1:30` are texts.

    Raises `yaml.YAMLError` of one line.
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
        raise yaml.YAMLError(clipped(" ".join(str(error).split()))) from None
    except (TypeError, ValueError) as error:
        raise yaml.YAMLError(f"a key or a text that JSON cannot hold: {first_line(error)}") from None
    return value


YAML_TYPES = {  # YAML 1.1 reads numbers to the base of 8 and 60 here
    first: [("tag:yaml.org,2002:str", re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9_.]+)+)$")), *resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class YamlLoader(yaml.SafeLoader):
    """PyYAML's, with the line of a value that is not of its type, such as `!!bool x` or a date of month 13."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            kind = node.tag.rpartition(":")[2]
            line = f"line {node.start_mark.line + 1}: '{clipped(str(node.value), 40)}' is no valid {kind}"
            raise yaml.YAMLError(f"{line}; write a text in quotes") from None


def check_nodes(root: yaml.Node) -> None:
    """Raises `yaml.YAMLError` where a key stands twice in a mapping, and for more values than `MAX_YAML_VALUES`.

    What aliases repeat is counted each time: a few lines of them may stand for more values than any memory holds.
    """
    nodes = [root]
    for node in nodes:  # grows on the way
        if isinstance(node, yaml.MappingNode):
            counts = Counter(str(key.value) for key, _ in node.value)
            if len(counts) < len(node.value):
                [(name, _)] = counts.most_common(1)
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key '{name}' stands twice")
            nodes += chain.from_iterable(node.value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if len(nodes) > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it stands for more than {MAX_YAML_VALUES:,} values")


ANEW = "delete it and rerun what makes it"
"""The remedy for a file that biphase itself made."""

Stored = TypeVar("Stored")


def write_text(path: Path, text: str) -> None:
    """Write and rename: a reader sees the old file or the whole new one, also after a power cut."""
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file to write that takes its name only when the block ends without an error.

    What a killed process left of its writing is used up by the next one that writes the same file.
    """
    part = path.with_name(f".{path.name}.part")
    with open(open_alone(part), "w", encoding="utf-8", newline="\n") as file:
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:  # Ctrl-C too leaves no half file; the error itself goes on
            part.unlink(missing_ok=True)
            raise


def open_alone(path: Path, *, wait: bool = True) -> int:
    """Open a file for writing, made where it is not there, once no other process has it so; never through a link.

    Raises `BlockingIOError` where another one has it, and none is waited for; `OSError` on a file system without locks,
    where nothing stays.
    """
    while True:
        is_new = not path.exists()
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(number)
            if isinstance(error, BlockingIOError):
                raise
            if is_new:
                path.unlink(missing_ok=True)
            reason = f"no locks on its file system ({error.strerror})"
            raise OSError(error.errno, reason, str(path)) from error
        if is_at(number, path):
            return number
        os.close(number)  # another process removed it meanwhile, or gave it another name


def is_at(number: int, path: Path) -> bool:
    """Tell whether what is open under a number has this name still."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(number), os.lstat(path))
    return False


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON (`write_text`), indented for people."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def reading(path: Path, remedy: str = ANEW) -> Iterator[None]:
    """Turn what the system or a library raises over a file in the block into an `InputError` that names the file."""
    with told_as(f"{path} cannot be read", remedy):
        try:
            yield
        except FileNotFoundError:
            raise InputError(f"{path} does not exist") from None


def read_json(path: Path) -> Any:
    """Read the value in a JSON file. Raises `InputError` naming the file when it is missing or not JSON."""
    with reading(path):
        content = path.read_bytes()
    with told_as(f"{path} is not valid JSON", ANEW):
        return parse_json(content.decode())


def read_json_as(path: Path, kind: type[Stored], remedy: str = ANEW) -> Stored:
    """Read the value in a JSON file, as a dataclass, a pydantic model or a type such as `dict[str, int]`.

    Raises:
        InputError: as `read_json`; and naming the file, the first key that is missing or of another type, and the
            remedy.
    """
    return validate_record(path, read_json(path), kind, remedy)


make_adapter: Callable[[Any], TypeAdapter[Any]] = lru_cache(TypeAdapter)
"""Cached, for to make one takes longer than to read a record."""


def validate_record(path: Path, record: Any, kind: type[Stored], remedy: str) -> Stored:
    """Return a record that was read from a file, as `kind`; raises as `read_json_as` does."""
    try:
        return make_adapter(kind).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        kind_of_all = "a list" if first["type"] == "list_type" else "a mapping of keys"
        reason = f"{key}: {first['msg']}" if key else f"it holds {clipped(json.dumps(record), 40)}, not {kind_of_all}"
        raise InputError(f"{path} is damaged ({reason}); {remedy}") from None


RECORD_HASH = "record_hash"
"""The key of a record under which the hash of everything else in it stands."""


def write_hashed(path: Path, tree: dict[str, Any]) -> None:
    """Write a tree as JSON with its own hash, so that nothing in it can change unnoticed."""
    write_json(path, tree | {RECORD_HASH: content_hash(tree)})


def read_hashed(path: Path, kind: type[Stored], remedy: str) -> Stored:
    """Read the record that `write_hashed` wrote, without the hash; reads as `read_json_as` does.

    Raises:
        InputError: also where the record is not what was written, by its own hash.
    """
    record = read_json_as(path, dict[str, Any], remedy)
    if record.pop(RECORD_HASH, None) != content_hash(record):
        raise InputError(f"{path} is damaged (it is not what was written, by its own hash); {remedy}")
    return validate_record(path, record, kind, remedy)


@contextmanager
def whole_folder(path: Path, *, is_lasting: bool = False) -> Iterator[Path]:
    """Make a folder to fill that takes its name only when the block ends without an error.

    An existing folder at `path` is replaced. What a killed process left behind is cleared by the next call. One that
    `is_lasting` is on the disk, with all that is in it, before it takes its name: it is there after a power cut.

    Raises:
        BusyError: another process is at a folder of this name.
        OSError: the disk is full or the like, also where a library that writes says so in an error of its own.
    """
    path = path.resolve()
    old = path.with_name(f".{path.name}.old.part")
    with claimed(path) as part:
        shutil.rmtree(old, ignore_errors=True)
        try:
            yield part
            for file in files_below(part):
                if not file.is_symlink():  # safetensors leaves its files to their owner alone, whatever the umask says
                    file.chmod(part.stat().st_mode & 0o666)
            if is_lasting:
                for inside in (*files_below(part), *filter(Path.is_dir, part.rglob("*")), part):
                    sync(inside)
            if path.exists():
                os.replace(path, old)
            os.replace(part, path)
            if is_lasting:
                sync(path.parent)
        except Exception as error:  # `tokenizers` raises bare Exception where the disk is full; any other error goes on
            number = RUST_SYSTEM_ERROR.search(str(error))
            if isinstance(error, OSError | InputError) or number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        finally:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def claimed(path: Path, ending: str = "part") -> Iterator[Path]:
    """Hold the place of a folder to come, by an empty and locked folder beside it, which goes in the end unless it got
    another name. What a killed process left in it is cleared. NFS locks no folders: there nobody is held off.

    Args:
        ending: of that folder's name; another one for work at whose end a `whole_folder` takes the place.

    Raises `BusyError` where another process holds it.
    """
    part = path.with_name(f".{path.name}.{ending}")
    part.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        part.mkdir()
    busy = BusyError(f"another process is writing {path}: wait for it, or give another place")
    with ExitStack() as held:
        try:
            number = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            held.callback(os.close, number)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):  # the latter where that process ends at this moment
            raise busy from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if not is_at(number, part):
            raise busy
        for leftover in part.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        try:
            yield part
        finally:
            if is_at(number, part):
                shutil.rmtree(part, ignore_errors=True)


NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that do not lock folders; the first is that of NFS."""


RUST_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""The pattern by which `safetensors` and `tokenizers` report an error of the system."""


def remove_folder(path: Path) -> None:
    """Remove a folder of ours; a kill on the way leaves nothing under its name, only a `.part` to be swept."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.replace(path, part)
    shutil.rmtree(part, ignore_errors=True)


def sweep_parts(folder: Path) -> None:
    """Remove what killed writers left in a folder of ours: `.NAME.part` and `.NAME.PID.part`, nothing else."""
    for part in folder.glob(".*.part"):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


MARK = ".biphase.json"
"""The file by which a folder is known as ours: what we wrote there, with its hashes."""


@contextmanager
def own_folder(path: Path, kind: str) -> Iterator[Path]:
    """Make a `whole_folder` where the user chose the place: it replaces nothing but what an earlier call wrote there.

    Args:
        path: a folder that is not there, is empty, or holds only unchanged files of an earlier call.
        kind: what is written, such as `tokenizer`, for the mark and for messages.

    Raises:
        InputError: there is a file, or a folder with something that we did not write, or that was changed since.
    """
    with whole_folder(path) as part:
        refuse_foreign(path, kind)  # as long as nobody else writes there
        yield part
        write_mark(part, kind)


@dataclass(frozen=True)
class FolderMark:
    """The kind of a folder of ours, and the hash of each file in it."""

    biphase: str
    files: dict[str, str]


def write_mark(folder: Path, kind: str) -> None:
    """Write down what a folder is and the hash of each file in it."""
    write_json(folder / MARK, asdict(FolderMark(kind, hash_below(folder))))


def hash_below(folder: Path) -> dict[str, str]:
    """Return the hash of each file in a folder and the folders in it, by its path there."""
    return {str(file.relative_to(folder)): file_hash(file) for file in files_below(folder)}


def refuse_damaged(folder: Path, remedy: str) -> None:
    """Raise `InputError` where a file of a folder is not as its mark says, but for the card, which people edit. Without
    a mark a folder is taken as it is; where biphase wrote it, that is said."""
    if (folder / MARK).exists():
        mark = read_json_as(folder / MARK, FolderMark, remedy)
        refuse_changed(folder, {name: mark.files[name] for name in mark.files if name != "README.md"}, remedy)
    else:
        tell_unmarked(folder)


@lru_cache
def tell_unmarked(folder: Path) -> None:
    """Say, once, where a folder that biphase wrote, by the tags of its card or as a search index, has lost its mark."""
    card = folder / "README.md"
    head = card.read_bytes()[:2000].partition(b"\n---\n")[0] if card.is_file() else b""
    if b"\n- biphase\n" in head or (folder / "index.json").exists():
        remedy = "copy the folder again, with its hidden files"
        err.print(f"{folder} lacks {MARK}, the file with its hashes, so that damage goes unnoticed; {remedy}")


def refuse_changed(folder: Path, hashes: Mapping[str, str], remedy: str) -> None:
    """Raise `InputError` where one of these files of a folder is missing, or is not what was written."""
    for name, digest in hashes.items():
        file = folder / name
        if not file.is_file():
            raise InputError(f"{file} is damaged (it is missing); {remedy}")
        if hash_stamped(file, stamp_of(file)) != digest:
            raise InputError(f"{file} is damaged (it is not what was written, by its hash); {remedy}")


Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """Return what is another once a file was written or replaced: its inode, its size and the time of its change."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4096)
def hash_stamped(path: Path, _stamp: Stamp) -> str:
    """Return the hash of a file, once for each stamp."""
    return file_hash(path)


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Have a file made, once. Raises `InputError` where one that was made before is not as it was, by its hash."""
    note = path.with_name(f".{path.name}.sha256")
    if not path.exists():
        part = path.with_name(f".{path.name}.part")
        make(part)
        write_json(note, file_hash(part))
        part.rename(path)
    elif note.exists():
        refuse_changed(path.parent, {path.name: read_json_as(note, str)}, ANEW)


def refuse_existing(path: Path) -> None:
    """Refuse to write over a file, or into a folder that is not there."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists():
        raise InputError(f"{path} is there already; choose another name, or delete it first")


def refuse_filled(folder: Path) -> None:
    """Refuse to write into a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not an empty folder; choose another, or delete it first")


def refuse_foreign(path: Path, kind: str) -> None:
    """Refuse to replace what we did not write."""
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
    """Refuse to write, replace or clear anything through a link that someone put where a file or folder of ours is."""
    for path in paths:
        if path.is_symlink():
            raise InputError(f"{path} is a link, through which nothing is written; remove it")


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems sync no folders
            raise
    finally:
        os.close(number)


def files_below(folder: Path) -> list[Path]:
    """List all in a folder and the folders in it that is not a folder itself, links included; in order."""
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


@contextmanager
def locked(path: Path, *, wait: bool = False, busy: str = "") -> Iterator[None]:
    """Hold a lock on the file at `path` (made where it is not there, with its folder), which is never a link.

    The lock ends with its process, so a killed one blocks nothing. Another process that holds it is waited for with
    `wait`, and otherwise a `BusyError`, which says `busy`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.name.startswith("."):  # a folder that is ours alone
        refuse_links(path.parent)
    try:
        number = open_alone(path, wait=wait)
    except (BlockingIOError, FileNotFoundError):  # the latter where that process removes the folder at this moment
        raise BusyError(busy or f"{path} is held by another process") from None
    with open(number, "w"):
        yield


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock on the file at `path`."""
    try:
        number = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: who asks does not see others who ask
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


def content_hash(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of the bytes of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
