"""A task → where its rows come from (a folder, the package, the hub) and what they hash to → the rows, unchecked.

Rows of files are read in `rows.py`; code of a hub repository is never run.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from biphase.config import BUNDLED
from biphase.corpus.rows import ABSENT, CODECS, field_names, find_field
from biphase.errors import InputError, clipped, nearest
from biphase.files import content_hash, file_hash
from biphase.hub import load_rows, pin_commit
from biphase.tasks.rows import Row, Rows, is_saved, read_file, read_mldr, rows_of_dataset
from biphase.tasks.spec import TASK_SPLITS, FileLayout, Hub, Task, TaskSplit, find_task, named_splits, test_names

LONGEST_TEXT = 5_000_000
"""Characters of a text, more than long novels have: tokenizers need some hundred bytes for each."""
HUB = Path("hub")
"""A `data_dir` of this name stands for the hub's data, also for a task that comes with the package."""

PartName = TaskSplit | Literal["corpus", "queries"]
Dir = TypeVar("Dir", bound=str | Path)


@dataclass(frozen=True)
class TaskSource:
    """Where a task's data is. Equal sources hold the same data for the same use of it."""

    task: Task = field(compare=False)
    name: str
    """The folder, `biphase`, or `hub-id@revision`: for messages."""
    hash: str
    """SHA-256 of what decides the examples: the task's definition and the files' bytes, or the hub id and commit."""
    form: FileLayout | Hub = field(compare=False)
    files: dict[PartName, tuple[Path, ...]] = field(compare=False)
    """Empty for the hub."""

    @property
    def splits(self) -> tuple[TaskSplit, ...]:
        """Those that stand there; the others are drawn."""
        return tuple(named_splits(self.form.splits if isinstance(self.form, Hub) else self.form))


def find_source(task: Task, data_dir: Path | None) -> TaskSource:
    """The files in `data_dir`, or in the package for a bundled task, or else the hub's data, not yet read or parsed.

    In `data_dir` may be any layout that the task lists: the first that is complete. `hub` as its name stands for the
    hub.

    Raises:
        InputError: a folder without the files (naming what is needed), a task without a source, a hub repository
            whose commit cannot be found out.
    """
    if tests := test_names(task):
        raise InputError(
            f"task '{task.name}' has several tests: name one behind its file, such as FILE.yaml:{tests[0]}"
        )
    if data_dir is not None and data_dir != HUB:
        if not data_dir.is_dir():
            raise InputError(f"{data_dir} is not a folder with the data of task '{task.name}'")
        for layout in task.files:
            files = find_layout(task, layout, data_dir)
            if all(files.values()):
                return source_of_files(task, str(data_dir), layout, files)
        if not task.files:
            raise InputError(f"task '{task.name}' does not say what files a folder holds: give them as files")
        needed = " or ".join(" + ".join(parts_of(task, layout).values()) for layout in task.files)
        raise InputError(f"{data_dir}: task '{task.name}' needs {needed} there")
    if data_dir is None and task.bundled:
        train, validation, test = (f"{task.name}-{split}.jsonl" for split in TASK_SPLITS)
        layout = FileLayout(train=train, validation=validation, test=test)
        return source_of_files(task, "biphase", layout, find_layout(task, layout, BUNDLED / "tasks"))
    if task.hub is None:
        where = "is not on the hub" if data_dir == HUB else "comes neither with biphase nor from the hub"
        raise InputError(
            f"task '{task.name}' {where}: give the folder with its data as `data`, in a study as evaluation.data_dirs"
        )
    hub = task.hub.model_copy(update={"revision": pin_commit(task.hub.id, task.hub.revision)})
    digest = content_hash([definition(task), hub.model_dump(mode="json")])
    return TaskSource(task, f"{hub.id}@{hub.revision}", digest, hub, {})


def name_data_dirs(pairs: Iterable[tuple[str, str]], tasks: Iterable[str], origin: str) -> dict[str, str]:
    """Folders of data by the names of their tasks.

    Args:
        pairs: a task, by its name or its YAML file, and its folder.
        tasks: names or YAML files; what these are trained on may have a folder too.
        origin: what to call the pairs in a message.

    Raises `InputError` for any other task, and for one that is given twice.
    """
    found: dict[str, str] = {}
    asked = [find_task(task) for task in tasks]
    known = {name for task in asked for name in (task.name, task.trained_on, task.part_of) if name}
    for given, folder in pairs:
        name = find_task(given).name if given.endswith((".yaml", ".yml")) else given
        if name not in known:
            raise InputError(f"{origin}: '{given}' is none of the tasks{nearest(name, known)}")
        if name in found:
            raise InputError(f"{origin}: {name} has {found[name]} already")
        found[name] = folder
    return found


def dir_of(task: Task, data_dirs: Mapping[str, Dir]) -> Dir | None:
    """The folder with a task's data; of one of several tests, that of the task."""
    return data_dirs.get(task.name, data_dirs.get(task.part_of or task.name))


def absolute_dir(data_dir: str | Path) -> str:
    """A `data_dir` for a process that may stand in another folder."""
    return str(data_dir if Path(data_dir) == HUB else Path(data_dir).resolve())


def source_of_files(task: Task, name: str, layout: FileLayout, files: dict[PartName, tuple[Path, ...]]) -> TaskSource:
    hashes: dict[PartName, list[str]] = {}
    for part, paths in files.items():
        hashes[part] = [hash_part(path) for path in paths]
    form = layout.model_dump(mode="json", exclude={*TASK_SPLITS, "corpus", "queries"})
    return TaskSource(task, name, content_hash([definition(task), form, hashes]), layout, files)


def training_source(source: TaskSource) -> TaskSource:
    """The source of one of several tests, by the hash of what is trained on: all of them share a training."""
    task = source.task.model_copy(update={"name": source.task.part_of})
    if isinstance(source.form, FileLayout):
        files: dict[PartName, tuple[Path, ...]] = {
            part: paths for part, paths in source.files.items() if part != "test"
        }
        digest = source_of_files(task, source.name, source.form, files).hash
    else:
        splits = source.form.splits.model_copy(update={"test": None})
        digest = content_hash(
            [definition(task), source.form.model_copy(update={"splits": splits}).model_dump(mode="json")]
        )
    return replace(source, task=task, hash=digest)


def definition(task: Task) -> dict[str, Any]:
    """The part of a task that decides its examples and their use, not where they stand: it is hashed into names."""
    elsewhere = {"name", "bundled", "files", "hub", "size", "licence", "citation", "note"}
    return task.model_dump(mode="json", exclude=elsewhere)


def own_name(source: TaskSource, name: str) -> str:
    """The source's name for one of the task's columns."""
    return next((theirs for theirs, ours in source.form.rename.items() if ours == name), name)


def column(source: TaskSource, place: str, row: Row, name: str) -> Any:
    own = own_name(source, name)
    value = find_field(row, own, ABSENT)
    if value is ABSENT:
        columns = clipped(", ".join(field_names(row)))
        is_label = name in (source.task.label, "answers")
        remedy = f"rename: {{THEIRS: {name}}} in the task, or the column of the file"
        remedy += "; or leave a split without labels out" if is_label else ""
        raise InputError(
            f"{place}: task '{source.task.name}' needs column '{own}'; the columns are: {columns}; {remedy}"
        )
    return value


def text_column(source: TaskSource, place: str, row: Row, name: str) -> str:
    """A column's text; a list of texts, as PubMedQA has them, becomes one."""
    text = column(source, place, row, name)
    if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
        return " ".join(text)
    if not isinstance(text, str):
        raise InputError(
            f"{place}: column '{own_name(source, name)}' is {shown(text)}, not a text: mend the row or take it out"
        )
    if len(text) > LONGEST_TEXT:
        raise InputError(
            f"{place}: column '{own_name(source, name)}' has {len(text):,} characters, more than {LONGEST_TEXT:,}: "
            "split the text or cut it"
        )
    return text


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:40]


def id_of(place: str, row: Row) -> str:
    """The row's own id, else its place: `train.tsv:12`. ReCoRD's is a mapping of two numbers."""
    own = row.get("id", row.get("idx"))
    if own is None:
        return place.rpartition("/")[2]
    return "-".join(str(part) for part in own.values()) if isinstance(own, dict) else str(own)


def check_distinct(source: TaskSource) -> None:
    """Raises `InputError` where validation and test are the same bytes: the rate would be chosen on the test."""
    hashes = {part: [hash_part(path) for path in paths] for part, paths in source.files.items()}
    if "validation" in hashes and hashes["validation"] == hashes.get("test"):
        raise InputError(
            f"task '{source.task.name}': validation and test in {source.name} are the same data "
            f"({source.files['validation'][0].name}, {source.files['test'][0].name}), so the learning rate would be "
            "chosen on the test; leave validation out: a part of train takes its place"
        )


def hash_part(path: Path) -> str:
    """The hash of a file's bytes, or of all data files in a saved folder."""
    if path.is_dir():
        return content_hash([hash_part(file) for file in sorted(path.glob("*.arrow"))])
    return stamped_hash(str(path), path.stat().st_size, path.stat().st_mtime_ns)


@lru_cache(maxsize=1024)
def stamped_hash(path: str, size: int, modified_ns: int) -> str:
    return file_hash(Path(path))


def find_layout(task: Task, layout: FileLayout, folder: Path) -> dict[PartName, tuple[Path, ...]]:
    """The files of each part, each plain or compressed; none where they are missing."""
    found: dict[PartName, tuple[Path, ...]] = {}
    for part, name in parts_of(task, layout).items():
        by_name: dict[str, Path] = {}
        for ending in ("", *CODECS):
            matches = folder.glob(name + ending) if "*" in name else [folder / (name + ending)]
            for path in matches:
                if path.is_file() or is_saved(path):
                    by_name.setdefault(str(path).removesuffix(ending), path)
        found[part] = tuple(path for _, path in sorted(by_name.items()))
    return found


def parts_of(task: Task, layout: FileLayout) -> dict[PartName, str]:
    parts: dict[PartName, str] = {}
    if task.family == "retrieval":
        parts = {"corpus": layout.corpus, "queries": layout.queries}
        if layout.format == "mldr":  # queries stand in the splits
            del parts["queries"]
    for split, name in named_splits(layout).items():
        parts[split] = name
    return parts


def read_rows(source: TaskSource, part: PartName) -> Rows:
    """The rows of a split (in retrieval its judgements), the corpus or the queries, in order, read as they are needed.

    Raises:
        InputError: naming file and line: broken JSON, a table or columns of another form, text that is not UTF-8, a
            file that is cut short; or a hub split that cannot be read.
    """
    task, form = source.task, source.form
    if isinstance(form, FileLayout):
        is_collection = part in ("corpus", "queries")
        if is_collection and form.format == "mldr":
            asked = source.splits if part == "queries" else (part,)
            paths = [path for name in dict.fromkeys(asked) for path in source.files[name]]
            return itertools.chain.from_iterable(read_mldr(path, part) for path in paths)
        chains = (read_file(task, form, path, "jsonl" if is_collection else None) for path in source.files[part])
        return itertools.chain.from_iterable(chains)
    if part == "corpus" or part == "queries":
        place = getattr(form, part)
        tables = (read_hub(form, place.config, split) for split in place.splits)
        return itertools.chain.from_iterable(tables)
    return read_hub(form, form.config, named_splits(form.splits)[part], own_name(source, task.label))


def read_hub(hub: Hub, config: str | None, split: str, label: str = "") -> Rows:
    """Rows at the resolved commit; labels that the repository names in the column `label` come as names."""
    table = load_rows(hub.id, config, split, pin_commit(hub.id, hub.revision))
    return rows_of_dataset(table, label, f"{hub.id} {split}")
