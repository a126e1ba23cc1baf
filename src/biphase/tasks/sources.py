"""A task → where its rows come from (a folder, the package, the hub) and what they hash to → the rows, unchecked.

Files have one of the forms of `spec.Format`, each with a reader; plain, .zst and .gz. Rows stand under the task's names
for their columns, each with its place (`train.tsv:12`) for messages. Code of a hub repository is never run.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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
PartHashes = dict[PartName, list[str]]
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
    hashes: PartHashes = field(compare=False)
    """The hash of each file."""

    @property
    def splits(self) -> tuple[TaskSplit, ...]:
        """Those that stand there; the others are drawn."""
        return tuple(self.form.splits.named)


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
        return TaskSource(task, f"{hub.id}@{hub.revision}", hash_source(task, hub, {}), hub, {}, {})
    else:
        where = "is not on the hub" if data_dir == HUB else "comes neither with biphase nor from the hub"
        raise InputError(
            f"task '{task.name}' {where}: give the folder with its data as `data`, in a study as evaluation.data_dirs"
        )
    for layout in layouts:
        files = find_layout(task, layout, folder)
        if all(files.values()):
            hashes = {part: [hash_part(path) for path in paths] for part, paths in files.items()}
            return TaskSource(task, name, hash_source(task, layout, hashes), layout, files, hashes)
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


def hash_source(task: Task, form: FileLayout | Hub, hashes: PartHashes) -> str:
    """The hash of a task's definition and of the bytes of its files, or the commit of its hub data."""
    if isinstance(form, Hub):
        return content_hash([definition(task), form.model_dump(mode="json")])
    layout = form.model_dump(mode="json", exclude={*TASK_SPLITS, "corpus", "queries"})
    return content_hash([definition(task), layout, hashes])


def training_source(source: TaskSource) -> TaskSource:
    """The source of one of several tests, by the hash of what is trained on: all of them share a training."""
    task, form = source.task.model_copy(update={"name": source.task.part_of}), source.form
    if isinstance(form, Hub):
        form = form.model_copy(update={"splits": form.splits.model_copy(update={"test": None})})
    trained: PartHashes = {part: hashes for part, hashes in source.hashes.items() if part != "test"}
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
    for split, name in layout.named.items():
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
            texts = HubRows(config=form.config, splits=(form.splits.named[part],))
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
            for number, line, _ in read_json_lines(path):
                yield from unfold(f"{path}:{number}", line, part if part in PUBLISHED else "mldr")
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
    if path.is_dir():
        form = "parquet"
    match form:
        case "tsv" | "csv":
            yield from read_separated(path, layout, is_csv=form == "csv")
        case "columns" | "conllu":
            yield from read_columns(path, layout, words, label, is_conllu=form == "conllu")
        case "squad":
            yield from unfold(str(path), read_json_file(path), form)
        case "json":
            yield from read_json_rows(path)
        case "trec":
            yield from read_trec(path)
        case "parquet":
            if path.is_dir() and not saved_tables(path):
                raise InputError(f"{path} is a folder; name a file of rows in it")
            rows = itertools.chain.from_iterable(map(read_table, saved_tables(path) if path.is_dir() else [path]))
            yield from ((f"{path}: row {number}", row) for number, (_, row, _) in enumerate(rows))
        case _:
            for number, row, _ in read_json_lines(path):
                yield from unfold(f"{path}:{number}", row, form)


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
    is_quoted = is_csv or layout.quotes or (layout.quotes is None and first.startswith(QUOTE))
    is_guessed = layout.quotes is None and not is_quoted
    usual = (";" if ";" in first and "," not in first else ",") if is_csv else "\t"
    delimiter = layout.delimiter or usual
    if is_quoted:
        rows = quoted_fields(path, lines, delimiter)
    else:
        rows = ((number, line.rstrip("\r\n").split(delimiter)) for number, line in enumerate(lines, start=1))
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
                yield f"{path}:{first}", row | {words_name: words} | ({tags_name: tags} if tags_name else {})
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


def read_json_rows(path: Path) -> Iterator[PlacedRow]:
    """A JSON file of rows: a list of objects, objects by their id, one object a line, or SQuAD's form."""
    lines = (line for _, line, _ in read_text_lines(path) if line.strip())
    first = next(lines, "")
    with suppress(json.JSONDecodeError):
        if first.startswith("{") and next(lines, None) is not None and json.loads(first):
            return ((f"{path}:{number}", row) for number, row, _ in read_json_lines(path))
    content = read_json_file(path)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        return unfold(str(path), content, "squad")
    if isinstance(content, dict):
        named = {id: {"id": id} | row if isinstance(row, dict) else row for id, row in content.items()}
    else:
        named = dict(enumerate(content if isinstance(content, list) else [content]))
    for id, row in named.items():
        if not isinstance(row, dict):
            raise InputError(f"{path}: row {id} is no object: give a list of objects, objects by id, or SQuAD's form")
    return ((f"{path}: row {id}", row) for id, row in named.items())


def unfold_squad(document: Any) -> Iterator[Row]:
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield {**question, "context": paragraph["context"]}


def unfold_record(line: Any) -> Iterator[Row]:
    """The questions about a passage, with its entities."""
    text, entities = line["passage"]["text"], line["passage"]["entities"]
    spans = [(entity["start"], entity["end"] + 1) for entity in entities]  # ends are inclusive there
    named = {"text": [text[start:end] for start, end in spans], "start": [start for start, _ in spans]}
    for question in line["qas"]:
        answers = [{"text": answer["text"], "start": answer["start"]} for answer in question["answers"]]
        row = {"id": f"{line['idx']}-{question['idx']}", "question": question["query"], "context": text}
        yield row | {"candidates": named, "answers": answers}


def unfold_mldr(line: Any) -> Iterator[Row]:
    for passage in line["positive_passages"]:
        yield {"query-id": line["query_id"], "corpus-id": passage["docid"], "score": 1}


MLDR = "MLDR's form, lines of query_id, query, positive_passages (docid), or of docid, text"
PUBLISHED: dict[str, tuple[Callable[[Any], Iterable[Row]], str]] = {
    "jsonl": (lambda line: [line], ""),
    "squad": (unfold_squad, "SQuAD's form, data → paragraphs → context and qas"),
    "record": (unfold_record, "SuperGLUE's form of ReCoRD: passage, idx, qas (query, answers, idx)"),
    "mldr": (unfold_mldr, MLDR),
    "queries": (lambda line: [{"_id": line["query_id"], "text": line["query"]}], MLDR),
    "corpus": (lambda line: [{"_id": line["docid"], "text": line["text"]}], MLDR),
}
"""What one JSON value of a published form becomes, and what the form needs; MLDR has three kinds of rows."""


def unfold(place: str, content: Any, form: str) -> Iterator[PlacedRow]:
    """The rows of one JSON value of a published form. Raises `InputError` where it is of another form."""
    make_rows, needed = PUBLISHED[form]
    try:
        for row in make_rows(content):
            yield place, row
    except (KeyError, TypeError):
        raise InputError(f"{place}: not {needed}") from None
