"""A task → where its rows come from (a folder, the package, the hub) and what they hash to → the rows, unchecked.

Files have one of the forms of `spec.Format`, each with a reader; plain, .zst and .gz. Rows stand under the task's names
for their columns, each with its place (`train.tsv:12`) for messages. Code of a hub repository is never run.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from biphase.config import BUNDLED
from biphase.corpus.rows import (
    ABSENT,
    CODECS,
    PlacedRow,
    Row,
    check_header,
    check_text,
    find_field,
    is_saved,
    need_field,
    plain_path,
    read_dataset,
    read_json_file,
    read_json_lines,
    read_table,
    read_text_lines,
    saved_tables,
)
from biphase.errors import InputError, nearest
from biphase.files import content_hash, hash_stamped
from biphase.hub import load_rows, pin_commit
from biphase.tasks.spec import (
    TASK_SPLITS,
    FileLayout,
    Format,
    Hub,
    HubRows,
    Task,
    TaskSplit,
    find_task,
    is_own_task,
    named_splits,
    test_names,
)

SHORT_ROW: Row = {}
"""Stands for a row with too few fields, of a table that is known to have such."""

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".tsv": "tsv",
    ".csv": "csv",
    ".json": "json",
    ".parquet": "parquet",
    ".conllu": "conllu",
    ".qrels": "trec",
    ".trec": "trec",
}
"""What a file is by its ending, where its layout does not say it; anything else has columns."""

UD_COLUMNS = (1, 3)
"""Where CoNLL-U has the word and its universal part of speech. Its first column numbers words, so that the default of
`FileLayout.columns` cannot be meant there: it stands for these, also where a tree of a layout names it."""

QUOTE = '"'
LONGEST_FIELD = 1 << 28
"""Characters that a field in quotes may have: an open quote must not swallow a file of any size."""

LONGEST_TEXT = 5_000_000
"""Characters of a text, more than long novels have: tokenizers need some hundred bytes for each."""
HUB = Path("hub")
"""A `data_dir` of this name stands for the hub's data, also for a task that comes with the package."""

PartName = TaskSplit | Literal["corpus", "queries"]
PartFiles = dict[PartName, tuple[Path, ...]]
Dir = TypeVar("Dir", bound=str | Path)


@dataclass(frozen=True)
class TaskSource:
    """A source says where the data of a task is. Equal sources hold the same data for the same use of it."""

    task: Task = field(compare=False)
    name: str
    """The folder, `biphase`, or `hub-id@revision`: for messages."""
    hash: str
    """SHA-256 of what decides the examples: the task's definition and the files' bytes, or the hub id and commit."""
    form: FileLayout | Hub = field(compare=False)
    files: PartFiles = field(compare=False)
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
        raise InputError(f"task '{task.name}' has several tests: name one, such as FILE.yaml:{tests[0]}")
    if data_dir is not None and data_dir != HUB:
        if not data_dir.is_dir():
            raise InputError(f"{data_dir} is not a folder with the data of task '{task.name}'")
        if not task.files:
            raise InputError(f"task '{task.name}' does not say what files a folder holds: give them as files")
        folder, name, layouts = data_dir, str(data_dir), task.files
    elif data_dir is None and task.bundled:
        names = {split: f"{task.name}-{split}.jsonl" for split in TASK_SPLITS}
        folder, name, layouts = BUNDLED / "tasks", "biphase", (FileLayout.model_validate(names),)
    elif task.hub is not None:
        hub = task.hub.model_copy(update={"revision": pin_commit(task.hub.id, task.hub.revision)})
        return TaskSource(task, f"{hub.id}@{hub.revision}", hash_source(task, hub, {}), hub, {})
    else:
        where = "is not on the hub" if data_dir == HUB else "comes neither with biphase nor from the hub"
        raise InputError(
            f"task '{task.name}' {where}: give the folder with its data as `data`, in a study as evaluation.data_dirs"
        )
    for layout in layouts:
        files = find_layout(task, layout, folder)
        if all(files.values()):
            return TaskSource(task, name, hash_source(task, layout, files), layout, files)
    needed = " or ".join(" + ".join(parts_of(task, layout).values()) for layout in layouts)
    raise InputError(f"{folder}: task '{task.name}' needs {needed} there")


def name_data_dirs(pairs: Iterable[tuple[str, str]], tasks: Iterable[str], origin: str) -> dict[str, str]:
    """Folders of data by the names of their tasks.

    Args:
        pairs: a task, by its name or its YAML file, and its folder.
        tasks: names or YAML files; what these are trained on may have a folder too.
        origin: what to call the pairs in a message.

    Raises `InputError` for any other task, and for one that is given twice.
    """
    folders: dict[str, str] = {}
    names: set[str] = set()
    for task in map(find_task, tasks):
        names.update(name for name in (task.name, task.trained_on, task.part_of) if name)
    for task_name, folder in pairs:
        name = find_task(task_name).name if task_name.endswith((".yaml", ".yml")) else task_name
        if name not in names:
            raise InputError(f"{origin}: '{task_name}' is none of the tasks{nearest(name, names)}")
        if name in folders:
            raise InputError(f"{origin}: {name} has {folders[name]} already")
        folders[name] = folder
    return folders


def dir_of(task: Task, data_dirs: Mapping[str, Dir]) -> Dir | None:
    """The folder with a task's data; of one of several tests, that of the task."""
    return data_dirs.get(task.name, data_dirs.get(task.part_of or task.name))


def hash_source(task: Task, form: FileLayout | Hub, files: PartFiles) -> str:
    """The hash of a task's definition and of the bytes of its files, or the commit of its hub data."""
    if isinstance(form, Hub):
        return content_hash([definition(task), form.model_dump(mode="json")])
    layout = form.model_dump(mode="json", exclude={*TASK_SPLITS, "corpus", "queries"})
    hashes = {part: [hash_part(path) for path in paths] for part, paths in files.items()}
    return content_hash([definition(task), layout, hashes])


def training_source(source: TaskSource) -> TaskSource:
    """The source of one of several tests, by the hash of what is trained on: all of them share a training."""
    task, form = source.task.model_copy(update={"name": source.task.part_of}), source.form
    if isinstance(form, Hub):
        form = form.model_copy(update={"splits": form.splits.model_copy(update={"test": None})})
    trained: PartFiles = {part: paths for part, paths in source.files.items() if part != "test"}
    return replace(source, task=task, hash=hash_source(task, form, trained))


def definition(task: Task) -> dict[str, Any]:
    """The part of a task that decides its examples and their use, not where they stand: it is hashed into names."""
    elsewhere = {"name", "bundled", "files", "hub", "size", "licence", "citation", "note"}
    return task.model_dump(mode="json", exclude=elsewhere)


def text_column(place: str, row: Row, name: str) -> str:
    """A column's text; a list of texts, as PubMedQA has them, becomes one."""
    text = column(place, row, name)
    if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
        return " ".join(text)
    text = check_text(place, name, text)
    if len(text) > LONGEST_TEXT:
        raise InputError(f"{place}: column '{name}' has {len(text):,} characters, more than {LONGEST_TEXT:,}: cut it")
    return text


def column(place: str, row: Row, name: str) -> Any:
    """The value of a column. Raises `InputError` where the row has none of this name."""
    remedy = f"rename: {{THEIRS: {name}}} in the task, or the column of the file; leave a split without labels out"
    return need_field(place, row, name, remedy)


def id_of(place: str, row: Row) -> str:
    """The row's own id, else its place: `train.tsv:12`. ReCoRD's is a mapping of two numbers."""
    row_id = row.get("id", row.get("idx"))
    if row_id is None:
        return place.rpartition("/")[2]
    return "-".join(str(part) for part in row_id.values()) if isinstance(row_id, dict) else str(row_id)


def check_distinct(source: TaskSource) -> None:
    """Raises `InputError` where validation and test are the same bytes: the rate would be chosen on the test."""
    hashes = {part: [hash_part(path) for path in paths] for part, paths in source.files.items()}
    if "validation" in hashes and hashes["validation"] == hashes.get("test"):
        files = f"{source.files['validation'][0].name}, {source.files['test'][0].name}"
        message = f"task '{source.task.name}': validation and test in {source.name} are the same data ({files})"
        raise InputError(f"{message}: leave validation out, and a part of train takes its place")


def hash_part(path: Path) -> str:
    """The hash of a file's bytes, or of all data files in a saved folder."""
    if path.is_dir():
        return content_hash([hash_part(file) for file in sorted(path.glob("*.arrow"))])
    return hash_stamped(path, path.stat().st_size, path.stat().st_mtime_ns)


def find_layout(task: Task, layout: FileLayout, folder: Path) -> PartFiles:
    """The files of each part, each plain or compressed; none where they are missing."""
    files: PartFiles = {}
    for part, name in parts_of(task, layout).items():
        by_name: dict[str, Path] = {}
        for ending in ("", *CODECS):
            matches = folder.glob(name + ending) if "*" in name else [folder / (name + ending)]
            for path in matches:
                if path.is_file() or is_saved(path):
                    by_name.setdefault(str(path).removesuffix(ending), path)
        files[part] = tuple(path for _, path in sorted(by_name.items()))
    return files


def parts_of(task: Task, layout: FileLayout) -> dict[PartName, str]:
    parts: dict[PartName, str] = {}
    if task.family == "retrieval":
        parts = {"corpus": layout.corpus, "queries": layout.queries}
        if layout.format == "mldr":  # queries stand in the splits
            del parts["queries"]
    for split, name in named_splits(layout).items():
        parts[split] = name
    return parts


def read_rows(source: TaskSource, part: PartName) -> Iterator[PlacedRow]:
    """The rows of a split (in retrieval its judgements), the corpus or the queries, in order, read as they are needed.

    Columns that the source calls otherwise stand under the task's names too.

    Raises:
        InputError: naming file and line: broken JSON, a table or columns of another form, text that is not UTF-8, a
            file that is cut short; or a hub split that cannot be read.
    """
    form = source.form
    if isinstance(form, FileLayout):
        rows = read_layout(source, form, part)
    else:
        if part == "corpus" or part == "queries":
            texts: HubRows = getattr(form, part)
        else:
            texts = HubRows(config=form.config, splits=(named_splits(form.splits)[part],))
        splits = (read_hub_split(form.id, form.revision, texts.config, split) for split in texts.splits)
        rows = itertools.chain.from_iterable(splits)
    for place, row in rows:
        yield place, row | renamed(form, row) if form.rename and row is not SHORT_ROW else row


def renamed(form: FileLayout | Hub, row: Row) -> Row:
    """The columns of a row that a form of files has other names for, under the task's names."""
    values = {ours: find_field(row, theirs, ABSENT) for theirs, ours in form.rename.items()}
    return {ours: value for ours, value in values.items() if value is not ABSENT}


def read_layout(source: TaskSource, layout: FileLayout, part: PartName) -> Iterator[PlacedRow]:
    """The rows of the files of a part."""
    task = source.task
    if layout.quotes is None and (is_own_task(task) or task.family == "retrieval"):
        layout = layout.model_copy(update={"quotes": False})  # as GLUE and BEIR publish their tables
    splits = source.splits if layout.format == "mldr" and part == "queries" else (part,)  # they stand in the splits
    for path in (path for split in splits for path in source.files[split]):
        if layout.format == "mldr":
            yield from read_mldr(path, part)
        elif part in ("corpus", "queries"):
            yield from rows_of_file(path, FileLayout(format="jsonl"))
        elif task.family == "retrieval":
            form = layout.format or FORMATS.get(plain_path(path).suffix, "trec")
            if layout.format is None and form == "tsv":  # of TREC's form, too, where it has no header and four fields
                fields = next(numbered_lines(path), (1, ""))[1].split("\t")
                form = "trec" if len(fields) == 4 and fields[-1].lstrip("-").isdecimal() else "tsv"
            yield from rows_of_file(path, layout.model_copy(update={"format": form}))
        else:
            yield from rows_of_file(path, layout, task.words, task.label)


def read_hub_split(id: str, revision: str | None, config: str | None, split: str) -> Iterator[PlacedRow]:
    """The rows of a split of a hub data set, at the commit that the revision names."""
    table = load_rows(id, config, split, pin_commit(id, revision))
    return ((f"{id} {split}: row {number}", row) for number, row in enumerate(read_dataset(table)))


def rows_of_file(
    path: Path, layout: FileLayout | None = None, words: str = "tokens", label: str | None = "label"
) -> Iterator[PlacedRow]:
    """The rows of one file, or of a folder that `datasets` saved, in the form that the layout or the ending says.

    Of words in columns, `words` and `label` name the lists of words and of tags; without a label there are no tags.
    """
    layout = layout or FileLayout()
    form = layout.format or FORMATS.get(plain_path(path).suffix, "columns")
    if form == "tsv" and layout.delimiter not in (None, "\t"):
        raise InputError(f"{path}: fields of a .tsv are divided by tabs, not by '{layout.delimiter}': say format: csv")
    if path.is_dir():
        return read_tables(path, saved_tables(path))
    match form:
        case "jsonl":
            return ((f"{path}:{number}", row) for number, row, _ in read_json_lines(path))
        case "tsv" | "csv":
            return read_separated(path, layout, is_csv=form == "csv")
        case "squad":
            return read_squad(path, read_json_file(path))
        case "columns" | "conllu":
            return read_columns(path, layout, words, label, is_conllu=form == "conllu")
        case "parquet":
            return read_tables(path, [path])
    readers: dict[Format, Callable[[Path], Iterator[PlacedRow]]]
    readers = {"json": read_json_rows, "record": read_record, "trec": read_trec, "mldr": read_mldr}
    return readers[form](path)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines without their ends, each with its number (from 1)."""
    return ((number, line.rstrip("\r\n")) for number, line, _ in read_text_lines(path))


def read_separated(path: Path, layout: FileLayout, *, is_csv: bool) -> Iterator[PlacedRow]:
    """The rows of a table whose fields are divided by commas, semicolons or tabs.

    A .csv is read as pandas, Excel and most others write it: fields with delimiters or line ends stand in quotes, a
    quote in there is doubled. A .tsv has no quoting, as GLUE's and BEIR's, unless the layout says so. Where that says
    nothing, a header in quotes makes the table one of quoted fields, and a single field in quotes is an error: whether
    they belong to the text cannot be seen.
    """
    later_lines = (line for _, line, _ in read_text_lines(path))
    first = next(later_lines, "")
    lines = itertools.chain([first], later_lines)
    is_quoted, is_guessed = is_csv or layout.quotes, not is_csv and layout.quotes is None
    if is_guessed and first.startswith(QUOTE):
        is_quoted, is_guessed = True, False
    delimiter = layout.delimiter or (";" if ";" in first and "," not in first else ",") if is_csv else "\t"
    if is_quoted:
        rows = quoted_fields(path, lines, delimiter)
    else:
        rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(lines, start=1))
    header: list[str] = []
    for number, fields in rows:
        place = f"{path}:{number}"
        if not header:
            header = fields if layout.has_header else [str(at) for at in range(len(fields))]
            check_header(place, header)
            if layout.has_header:
                continue
        fits = len(fields) == len(header)
        # Of a text with line ends or tabs in quotes, a part alone stands here.
        quoted = (field for field in fields if len(field) > 1 and field[0] == QUOTE)
        if is_guessed and any(field[-1] == QUOTE or not fits for field in quoted):
            raise InputError(
                f"{place}: a field in quotes: say `quotes: true` beside its name if they only enclose it (as pandas "
                "and Excel write them), `quotes: false` if they belong to the text; rows to predict are better a .csv"
            )
        if not fits and not (layout.has_short_rows and len(fields) < len(header)):
            raise InputError(
                f"{place}: {len(fields)} fields where the header names {len(header)}, parted by {delimiter!r} "
                "(`delimiter` or `format` in the entry of files)"
            )
        yield place, dict(zip(header, fields, strict=True)) if fits else SHORT_ROW


def quoted_fields(path: Path, lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row that is not empty, with the number of its first line."""
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    before = 0  # lines that earlier rows took
    try:
        for fields in reader:
            if fields:
                yield before + 1, fields
            before = reader.line_num
    except csv.Error as error:
        remedy = "a quote inside quotes is doubled, a line ends in \\n"
        raise InputError(f"{path}:{before + 1}: broken table ({error}); {remedy}") from None


def read_columns(
    path: Path, layout: FileLayout, words_name: str, tags_name: str | None, is_conllu: bool
) -> Iterator[PlacedRow]:
    """CoNLL's form: a word and its tag per line, an empty line or -DOCSTART- between sentences.

    Words may hold any character but tabs and spaces, no-break spaces too. Where words are numbered (they stand behind
    the first column), a line with `#` is a comment; elsewhere it is a word. In CoNLL-U, lines of numbers such as 3-4
    (what 3 and 4 are written as) and 3.1 (a word that is not written) are no words.
    """
    is_default = layout.columns == FileLayout.model_fields["columns"].default
    word_at, tag_at = UD_COLUMNS if is_conllu and is_default else layout.columns
    is_numbered, last = word_at > 0, word_at if tags_name is None else max(word_at, tag_at)
    words: list[str] = []
    tags: list[str] = []
    row: Row = {}
    first = 0
    for number, line in itertools.chain(numbered_lines(path), [(0, "")]):
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            if words:
                row[words_name] = words
                if tags_name is not None:
                    row[tags_name] = tags
                yield f"{path}:{first}", row
            words, tags, row = [], [], {}
        elif is_numbered and line.startswith("#"):
            key, _, value = line[1:].partition("=")
            row |= {"id": value.strip()} if key.strip() == "sent_id" else {}
        else:
            fields = line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]
            if len(fields) <= last:
                lacks = "a tag" if tags_name else f"a word in column {word_at} (from 0), where training had it"
                raise InputError(f"{path}:{number}: a line without {lacks}: '{line[:40]}'")
            if is_conllu and not fields[0].isdecimal():
                continue
            first = first if words else number
            words.append(fields[word_at])
            tags.append(fields[tag_at].strip() if tags_name else "")


def read_trec(path: Path) -> Iterator[PlacedRow]:
    """TREC's judgements: query, a number that nobody uses, document, grade; blanks between them."""
    for number, line in numbered_lines(path):
        fields = line.split()
        if len(fields) == 4:
            yield f"{path}:{number}", {"query-id": fields[0], "corpus-id": fields[2], "score": fields[3]}
        elif fields:
            raise InputError(f"{path}:{number}: {len(fields)} fields where TREC has query, 0, document and grade")


def read_mldr(path: Path, part: str = "judgements") -> Iterator[PlacedRow]:
    """MLDR's form: lines of documents (`corpus`), or of a query with its passages: as `queries`, else as judgements."""
    for number, line, _ in read_json_lines(path):
        place = f"{path}:{number}"
        try:
            if part == "corpus":
                yield place, {"_id": line["docid"], "text": line["text"]}
            elif part == "queries":
                yield place, {"_id": line["query_id"], "text": line["query"]}
            else:
                for passage in line["positive_passages"]:
                    yield place, {"query-id": line["query_id"], "corpus-id": passage["docid"], "score": 1}
        except (KeyError, TypeError):
            wanted = "docid, text" if part == "corpus" else "query_id, query, positive_passages (docid)"
            raise InputError(f"{place}: not MLDR's form, lines of {wanted}") from None


def read_json_rows(path: Path) -> Iterator[PlacedRow]:
    """A JSON file of rows: a list of objects, objects by their id, one object a line, or SQuAD's form."""
    lines = (line.strip() for _, line, _ in read_text_lines(path) if line.strip())
    first, second = next(lines, ""), next(lines, None)
    with suppress(json.JSONDecodeError):
        if second is not None and first.startswith("{") and isinstance(json.loads(first), dict):
            return ((f"{path}:{number}", row) for number, row, _ in read_json_lines(path))
    content = read_json_file(path)
    if isinstance(content, list):
        named = dict(enumerate(content))
    elif isinstance(content, dict) and not isinstance(content.get("data"), list):
        named = {id: {"id": id} | row if isinstance(row, dict) else row for id, row in content.items()}
    else:
        return read_squad(path, content)
    for id, row in named.items():
        if not isinstance(row, dict):
            raise InputError(f"{path}: row {id} is no object: give a list of objects, objects by id, or SQuAD's form")
    return ((f"{path}: row {id}", row) for id, row in named.items())


def read_tables(path: Path, tables: Sequence[Path]) -> Iterator[PlacedRow]:
    """The rows of the tables that a file or a saved folder consists of, numbered from 0."""
    if not tables:
        raise InputError(f"{path} is a folder; name a file of rows in it")
    rows = itertools.chain.from_iterable(map(read_table, tables))
    return ((f"{path}: row {number}", row) for number, (_, row, _) in enumerate(rows))


def read_squad(path: Path, content: Any) -> Iterator[PlacedRow]:
    """SQuAD's form, 1.1 and 2.0: one JSON document, data → paragraphs → qas."""
    try:
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        rows = [
            {**answered, "context": paragraph["context"]} for paragraph in paragraphs for answered in paragraph["qas"]
        ]
    except (KeyError, TypeError):
        raise InputError(f"{path}: not SQuAD's form, data → paragraphs → context and qas") from None
    return ((str(path), row) for row in rows)


def read_record(path: Path) -> Iterator[PlacedRow]:
    """SuperGLUE's form of ReCoRD: a passage with its entities per line, and the questions about it."""
    for line_number, line, _ in read_json_lines(path):
        place = f"{path}:{line_number}"
        try:
            passage, number = line["passage"], line["idx"]
            spans = [(entity["start"], entity["end"] + 1) for entity in passage["entities"]]  # ends are inclusive there
            entities = {"text": [passage["text"][a:b] for a, b in spans], "start": [a for a, _ in spans]}
            rows = [
                {
                    "id": f"{number}-{asked['idx']}",
                    "question": asked["query"],
                    "context": passage["text"],
                    "candidates": entities,
                    "answers": [{"text": answer["text"], "start": answer["start"]} for answer in asked["answers"]],
                }
                for asked in line["qas"]
            ]
        except (KeyError, TypeError):
            raise InputError(
                f"{place}: not SuperGLUE's form of ReCoRD: passage, idx, qas (query, answers, idx)"
            ) from None
        yield from ((place, row) for row in rows)
