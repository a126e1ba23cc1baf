"""A task → the source of its rows (a folder, the package, the Hub) and its hash → the rows, unchecked.

`corpus.rows` reads files by their form. Rows have the task's names of columns, and a location (`train.tsv:12`) for
messages. Code of a Hub repository is never run.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from biphase.config import BUNDLED
from biphase.corpus.forms import PUBLISHED, PlacedRow, read_dataset
from biphase.corpus.rows import (
    ABSENT,
    CODECS,
    FORMATS,
    QUOTE,
    SHORT_ROW,
    FileForm,
    ending_of,
    find_field,
    open_table,
    plain_path,
    renamed,
    rows_of_file,
    saved_tables,
)
from biphase.errors import InputError, refuse_unknown
from biphase.files import content_hash, hash_path, reading
from biphase.hub import load_rows, pin_commit
from biphase.tasks import spec

HUB = Path("hub")
"""A `data_dir` of this name means the Hub's data, even for a bundled task."""

PartName = spec.TaskSplit | Literal["corpus", "queries"]
PartHashes = dict[PartName, list[str]]
DataDirs = Mapping[str, str | Path]
"""Folders of data by task; other tasks come from the package or the Hub."""


@dataclass(frozen=True)
class TaskSource:
    """The source of a task's data. Equal sources hold the same data for the same use."""

    task: spec.Task = field(compare=False)
    name: str
    """The folder, `biphase`, or `hub-id@revision`: for messages."""
    hash: str
    """SHA-256 of the task's definition and the files' bytes, or the Hub id and commit."""
    form: spec.FileLayout | spec.Hub = field(compare=False)
    files: dict[PartName, tuple[Path, ...]] = field(compare=False)
    """The files of each part; empty for the Hub."""
    hashes: PartHashes = field(compare=False)
    """The hash of each file."""

    @property
    def splits(self) -> tuple[spec.TaskSplit, ...]:
        """The splits of the source; the others are drawn."""
        return tuple(self.form.splits.named)


def find_source(task: spec.Task, data_dir: str | Path | None) -> TaskSource:
    """Find the files in `data_dir`, or in the package for a bundled task, or else the Hub's data, without reading them.

    `data_dir` may have any layout of the task; the first complete one is used. The name `hub` means the Hub.

    Raises:
        InputError: a folder without the files (naming the missing ones), a task without a source, a Hub repository
            whose commit cannot be found out.
    """
    if tests := spec.test_names(task):
        raise InputError(f"task '{task.name}' has several tests: name one, such as FILE.yaml:{tests[0]}")
    data_dir = None if data_dir is None else Path(data_dir)
    if data_dir is not None and data_dir != HUB:
        if not data_dir.is_dir():
            raise InputError(f"{data_dir} is not a folder with the data of task '{task.name}'")
        if not task.files:
            raise InputError(f"task '{task.name}' does not say what files a folder holds: give them as files")
        folder, name, layouts = data_dir, str(data_dir), task.files
    elif data_dir is None and task.bundled:
        splits = {split: f"{task.name}-{split}.jsonl" for split in spec.TASK_SPLITS}
        folder, name, layouts = BUNDLED / "tasks", "biphase", (spec.FileLayout.model_validate(splits),)
    elif task.hub is not None:
        hub = task.hub.model_copy(update={"revision": pin_commit(task.hub.id, task.hub.revision)})
        return TaskSource(task, f"{hub.id}@{hub.revision}", hash_source(task, hub, {}), hub, {}, {})
    else:
        reason = "is not on the Hub" if data_dir == HUB else "comes neither with biphase nor from the Hub"
        remedy = "give the folder with its data as `data`, in a study as evaluation.data_dirs"
        raise InputError(f"task '{task.name}' {reason}: {remedy}")
    needed = []
    for layout in layouts:
        names = parts_of(task, layout)
        files = {part: find_files(folder, file_name) for part, file_name in names.items()}
        if all(files.values()):
            hashes = {part: [hash_rows(path) for path in paths] for part, paths in files.items()}
            return TaskSource(task, name, hash_source(task, layout, hashes), layout, files, hashes)
        needed.append(" + ".join(names.values()))
    raise InputError(f"{folder}: task '{task.name}' needs {' or '.join(needed)} there")


def name_data_dirs(pairs: Iterable[tuple[str, str]], tasks: Iterable[str], option: str) -> dict[str, str]:
    """Map tasks to their folders of data.

    Args:
        pairs: a task, by its name or its YAML file, and its folder.
        tasks: names or YAML files; the tasks that they are trained on may have a folder too.
        option: the option or key of the pairs, for messages.

    Raises `InputError` for any other task, and for one that is given twice.
    """
    folders: dict[str, str] = {}
    names = {name for task in map(spec.find_task, tasks) for name in (task.name, task.trained_on, task.part_of) if name}
    for task_name, folder in pairs:
        name = spec.find_task(task_name).name if task_name.endswith((".yaml", ".yml")) else task_name
        refuse_unknown(f"{option}: unknown task", name, names)
        if name in folders:
            remedy = "drop one of them; two different tasks need different names"
            raise InputError(f"{option}: task {name} is given two folders, {folders[name]} and {folder}; {remedy}")
        folders[name] = folder
    return folders


def dir_of(task: spec.Task, data_dirs: DataDirs) -> str | Path | None:
    """Find the folder with a task's data; one of several tests has the folder of its task."""
    return data_dirs.get(task.name, data_dirs.get(task.part_of or task.name))


def find_task_sources(name: str, data_dirs: DataDirs) -> tuple[TaskSource, TaskSource]:
    """Find the sources to train on and to evaluate on, usually one."""
    task = spec.find_task(name)
    evaluation = find_source(task, dir_of(task, data_dirs))
    if task.part_of is not None:
        return training_source(evaluation), evaluation
    if task.trained_on is None:
        return evaluation, evaluation
    trained_on = spec.find_task(task.trained_on)
    return find_source(trained_on, dir_of(trained_on, data_dirs)), evaluation


def hash_source(task: spec.Task, form: spec.FileLayout | spec.Hub, hashes: PartHashes) -> str:
    """Hash a task's definition and the bytes of its files, or the commit of its Hub data."""
    content: list[Any] = [definition(task), *list_readings(task, form)]
    if isinstance(form, spec.Hub):
        return content_hash([*content, form.model_dump(mode="json")])
    layout = form.model_dump(mode="json", exclude={*spec.TASK_SPLITS, "corpus", "queries"})
    return content_hash([*content, layout, hashes])


def list_readings(task: spec.Task, form: spec.FileLayout | spec.Hub) -> list[str]:
    """List what tells apart a user's data that is read in another way than earlier versions read it: rows that may be
    running texts with spans, as files of columns are not, classes that were the keys of comments, and answers."""
    if spec.is_own_task(task) or not (task.kind.is_tagging or task.kind.is_answering):
        return []
    if task.kind.is_answering:
        return ["answers have the marks of their last letters"]
    places = form.named.values() if isinstance(form, spec.FileLayout) else ()
    formats = {getattr(form, "format", None) or ending_of(Path(place)) for place in places}
    has_columns = formats - {*FORMATS, *FORMATS.values()}
    comments = ["comments are no words"] * bool(has_columns and {"sent_id", "text"} & {*task.classes})  # once tags
    return comments + ["invisible signs end no word"] * (not formats or not formats <= WORD_LISTS)


WORD_LISTS = {"columns", "conllu", ".conll", ".conllu"}
"""Formats and endings of files whose rows are always lists of words."""


def hash_rows(path: Path) -> str:
    """Hash a file's bytes, or the files of a data set that `datasets` saved in a folder, but not those that `map` has
    left beside them. Raises `InputError` for a missing file."""
    hashes = []
    for file in sorted(saved_tables(path)) if path.is_dir() else [path]:
        with reading(file):
            hashes.append(hash_path(file))
    return content_hash(hashes) if path.is_dir() else hashes[0]


def training_source(source: TaskSource) -> TaskSource:
    """Return the source to train on for one of several tests. Its hash ignores the test, because all tests share a
    training."""
    task = source.task.model_copy(update={"name": source.task.part_of})
    form = source.form
    if isinstance(form, spec.Hub):
        form = form.model_copy(update={"splits": form.splits.model_copy(update={"test": None})})
    trained: PartHashes = {part: hashes for part, hashes in source.hashes.items() if part != "test"}
    return replace(source, task=task, hash=hash_source(task, form, trained))


def definition(task: spec.Task) -> dict[str, Any]:
    """Return the keys of a task that decide its examples and their use, but not their place, for hashes. Five entries
    tell tasks that are read in another way than earlier versions read them."""
    elsewhere = {"name", "bundled", "files", "hub", "size", "licence", "citation", "note"}
    tree = task.model_dump(mode="json", exclude=elsewhere)
    if task.part_of is not None and task.duplicates == "drop":
        tree["duplicates"] = "drop from the test"
    names = [name for _, name, _, _ in Formatter().parse(task.template)]
    if names[-1:] == [None] and len(names) - names.count(None) == 1:
        tree["cut"] = "the only column, not the text after it"
    if task.missing == "drop" and len(names) - names.count(None) > 1:
        tree["null"] = "an empty text beside others"
    if task.kind.has_label_sets and any({*",;|"} & {*name} for name in (*task.classes, *task.labels)):
        tree["labels of one text"] = "a class, if it is the name of one"
    if task.group is not None:
        tree["groups"] = "the same in all spellings, added or taken out one by one"
    return tree


def find_files(folder: Path, name: str) -> tuple[Path, ...]:
    """Find the files of a name, which may contain `*`, or `**` for any folders, each plain or compressed. Leave out
    `._NAME`, macOS's notes beside a file."""
    by_name: dict[str, Path] = {}
    for ending in ("", *CODECS):
        names = [name + ending]
        if "*" in name:
            names = glob(name + ending, root_dir=folder, recursive=True, include_hidden=True)
        for path in (folder / one for one in names if not Path(one).name.startswith("._")):
            if path.is_file() or saved_tables(path):
                by_name.setdefault(str(path).removesuffix(ending), path)
    by_plain: dict[Path, Path] = {}  # `train*` matches compressed files by itself too; of each, the first is read
    for _, path in sorted(by_name.items()):
        by_plain.setdefault(plain_path(path), path)
    return tuple(by_plain.values())


def parts_of(task: spec.Task, layout: spec.FileLayout) -> dict[PartName, str]:
    parts: dict[PartName, str] = {"corpus": layout.corpus} if task.kind.is_search else {}
    if parts and layout.format != "mldr":  # MLDR has the queries in the splits
        parts["queries"] = layout.queries
    for split, name in layout.named.items():
        parts[split] = name
    return parts


def read_rows(source: TaskSource, part: PartName) -> Iterator[PlacedRow]:
    """Read the rows of a split (in retrieval its judgements), of the corpus or of the queries, on demand.

    Renamed columns have the task's names too.

    Raises:
        InputError: naming file and line: broken JSON, a table or columns of another form, text that is not UTF-8, a
            file that is cut short; or a Hub split that cannot be read.
    """
    form = source.form
    if isinstance(form, spec.FileLayout):
        rows = read_layout(source, form, part)
    else:
        texts = getattr(form, part, None)  # the rows of the corpus or of the queries
        if texts is None:
            texts = spec.HubRows(config=form.config, splits=(getattr(form.splits, part),))
        splits = (read_hub_split(form.id, form.revision, texts.config, split) for split in texts.splits)
        rows = itertools.chain.from_iterable(splits)
    for location, row in rows:
        yield location, row | renamed(row, form.rename) if form.rename and row is not SHORT_ROW else row


def read_layout(source: TaskSource, layout: spec.FileLayout, part: PartName) -> Iterator[PlacedRow]:
    """Read the rows of the files of a part."""
    task = source.task
    if layout.quotes is None and (spec.is_own_task(task) or task.kind.is_search):
        layout = layout.model_copy(update={"quotes": False})  # as GLUE and BEIR publish their tables
    # MLDR has the queries in the splits.
    splits = source.splits if layout.format == "mldr" and part == "queries" else (part,)
    for path in (path for split in splits for path in source.files[split]):
        form: str | None = layout.format
        if form == "mldr":
            form = part if part in PUBLISHED else "mldr"
        elif part in ("corpus", "queries"):
            form = FORMATS.get(ending_of(path), "jsonl")
        elif form is None and task.kind.is_search:
            form = FORMATS.get(ending_of(path), "trec")
            form = "judgements" if form == "tsv" else form
        rows = rows_of_file(path, layout.model_copy(update={"format": form}), task.words, task.label)
        name = layout.split_column if part in SPLIT_WORDS else None
        yield from rows_of_split(rows, name, part) if name is not None else rows


SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""The words for each split, in small letters."""


def find_split(word: Any) -> str | None:
    """Return the split that a word names; None for any other word."""
    plain = str(word).strip().casefold()
    return next((split for split, words in SPLIT_WORDS.items() if plain in words), None)


def rows_of_split(rows: Iterable[PlacedRow], name: str, split: str) -> Iterator[PlacedRow]:
    """Yield the rows that the column `name` puts into a split. Raises `InputError` for a row in no split."""
    for location, row in rows:
        word = split if row is SHORT_ROW else find_field(row, name, ABSENT)
        if word is ABSENT:
            raise InputError(f"{location}: there is no column '{name}', the `split_column` of the task")
        if (found := find_split(word)) is None:
            raise InputError(f"{location}: '{name}' is '{word}', which names no split (train, validation, test)")
        if found == split:
            yield location, row


def has_needed_quotes(file: Path, layout: FileForm) -> bool:
    """Tell whether a .tsv quotes fields: all of its rows can be read as quoted, and a field has a tab, a line end or a
    quote inside."""
    ways = ({"quotes": True}, {"quotes": False})
    quoted, plain = (open_table(file, layout.model_copy(update=way), is_csv=False)[1] for way in ways)
    is_needed = False
    try:
        for _, row in quoted:
            try:
                written = next(plain)[1] if not is_needed else row
            except InputError:  # a row with more or fewer fields than the header
                is_needed = True
                continue
            is_needed = is_needed or any(QUOTE in value for value in {*row.values()} - {*written.values()})
    except InputError:
        return False
    return is_needed


def read_hub_split(id: str, revision: str | None, config: str | None, split: str) -> Iterator[PlacedRow]:
    """Read the rows of a split of a Hub data set, at the commit that the revision names."""
    table = load_rows(id, config, split, pin_commit(id, revision))
    return ((f"{id} {split}: row {row_number}", row) for row_number, row in enumerate(read_dataset(table)))
