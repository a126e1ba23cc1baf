"""One file of a task → its rows, unchecked: a reader for each form that files have.

Rows are dictionaries under the file's own names of columns, each with its place (`train.tsv:12`) for messages. Files
are opened out of .zst and .gz; nothing is unpickled.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from biphase.corpus.rows import (
    SAVED_STATE,
    SPLITS,
    damaged,
    find_field,
    plain_path,
    read_json_file,
    read_json_lines,
    read_text_lines,
)
from biphase.errors import InputError
from biphase.tasks.spec import FileLayout, Format, Task, is_own_task

Row = dict[str, Any]
Rows = Iterable[tuple[str, Row | None]]
"""Rows with the place of each; None for one that the source is known to have broken."""

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

SAVED = (SAVED_STATE, SPLITS)
"""A folder with one of these files was written by `save_to_disk` of a `datasets.Dataset`, or of several by name."""

UD_COLUMNS = (1, 3)
"""Where CoNLL-U has the word and its universal part of speech. Its first column numbers words, so that the default of
`FileLayout.columns` cannot be meant there: it stands for these, also where a tree of a layout names it."""

QUOTE = '"'
LONGEST_FIELD = 1 << 28
"""Characters that a field in quotes may have: an open quote must not swallow a file of any size."""


def read_file(task: Task, layout: FileLayout, path: Path, form: Format | None, *, is_to_predict: bool = False) -> Rows:
    """The rows of one file (or saved folder) in a form; None: as the layout says, or the ending.

    Rows `is_to_predict` are a user's own, whatever the task: words stand without tags, and a .tsv may have quotes.
    """
    label = next((old for old, new in layout.rename.items() if new == task.label), task.label)
    if path.is_dir():
        return read_saved(path, label)
    form = form or layout.format or format_of(task, path)
    if form == "tsv" and layout.delimiter not in (None, "\t"):
        raise InputError(f"{path}: fields of a .tsv are divided by tabs, not by '{layout.delimiter}': say format: csv")
    match form:
        case "jsonl":
            return ((f"{path}:{number}", row) for number, row, _ in read_json_lines(path))
        case "tsv" if layout.quotes is None and (is_to_predict or not is_own_task(task)):
            return read_tsv(path, layout, is_guessed=is_to_predict or task.family != "retrieval")
        case "tsv":
            return read_quoted(path, layout, "\t") if layout.quotes else read_tsv(path, layout)
        case "csv":
            return read_quoted(path, layout, layout.delimiter)
        case "squad":
            return read_squad(path, read_json_file(path))
        case "columns" | "conllu":
            return read_columns(path, task, layout, is_conllu=form == "conllu", has_tags=not is_to_predict)
        case "parquet":
            return read_arrow_table(path, label)
    readers: dict[Format, Callable[[Path], Rows]]
    readers = {"json": read_json_rows, "record": read_record, "trec": read_trec, "mldr": read_mldr}
    return readers[form](path)


def is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in SAVED)


def read_any_file(path: Path, layout: FileLayout | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of a file that no task names, in any form that tasks are read in."""
    reader = Task(name="rows", family="token_classification", metric="f1", classes=("O", "B-x", "I-x"))
    found = read_file(reader, layout or FileLayout(), path, None)
    return ((place, row) for place, row in found if row is not None)


def format_of(task: Task, path: Path) -> Format:
    form = FORMATS.get(plain_path(path).suffix, "trec" if task.family == "retrieval" else "columns")
    if task.family == "retrieval" and form == "tsv":  # TREC's judgements have no header, and four fields
        fields = next(numbered_lines(path), (1, ""))[1].split("\t")
        return "trec" if len(fields) == 4 and fields[-1].lstrip("-").isdecimal() else "tsv"
    return form


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines without their ends, each with its number (from 1)."""
    return ((number, line.rstrip("\r\n")) for number, line, _ in read_text_lines(path))


def read_tsv(path: Path, layout: FileLayout, is_guessed: bool = False) -> Rows:
    """GLUE's and BEIR's form: a header, tabs, no quoting.

    Where nobody said that there is no quoting (`is_guessed`), a header in quotes makes the table one of quoted fields,
    and a single field in quotes is an error: whether they belong to the text cannot be seen.
    """
    lines = numbered_lines(path)
    number, first = next(lines, (1, ""))
    if is_guessed and first.startswith(QUOTE):
        yield from read_quoted(path, layout, "\t")
        return
    header = first.split("\t")
    if not layout.has_header:
        header, lines = [str(at) for at in range(len(header))], itertools.chain([(number, first)], lines)
    check_header(f"{path}:{number}", header)
    for number, line in lines:
        fields = line.split("\t")
        fits = len(fields) == len(header)
        # Of a text with line ends or tabs in quotes, a part alone stands here.
        if is_guessed and any(
            len(field) > 1 and field[0] == QUOTE and (field[-1] == QUOTE or not fits) for field in fields
        ):
            raise InputError(
                f"{path}:{number}: a field in quotes: say `quotes: true` beside its name if they only "
                "enclose it (as pandas and Excel write them), `quotes: false` if they belong to the text; "
                "rows to predict are better a .csv"
            )
        if fits:
            yield f"{path}:{number}", dict(zip(header, fields, strict=True))
        elif layout.has_short_rows and len(fields) < len(header):
            yield f"{path}:{number}", None
        else:
            raise ragged(f"{path}:{number}", len(fields), len(header))


def read_quoted(path: Path, layout: FileLayout, delimiter: str | None) -> Rows:
    """CSV as pandas, Excel and most others write it: fields with delimiters or line ends stand in quotes, a quote in
    there is doubled."""
    lines = (line for _, line, _ in read_text_lines(path))
    first = next(lines, "")
    delimiter = delimiter or guess_delimiter(first)
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    header: list[str] = []
    before = 0  # lines that earlier rows took
    try:
        for fields in reader:
            place, before = f"{path}:{before + 1}", reader.line_num
            if not fields:  # an empty line
                continue
            if not header:
                header = fields if layout.has_header else [str(at) for at in range(len(fields))]
                check_header(place, header)
                if layout.has_header:
                    continue
            if len(fields) != len(header):
                is_tsv = "\t" in first and layout.format is None
                remedy = (
                    "; tabs divide it: format: tsv"
                    if is_tsv
                    else f", parted by '{delimiter}' (`delimiter` in the entry of files)"
                )
                raise ragged(place, len(fields), len(header), remedy)
            yield place, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        remedy = "a quote inside quotes is doubled, a line ends in \\n"
        raise InputError(f"{path}:{before + 1}: broken table ({error}); {remedy}") from None


def guess_delimiter(header: str) -> str:
    """A comma, or where the header of a .csv has none of them, a semicolon."""
    return ";" if ";" in header and "," not in header else ","


def check_header(place: str, names: Sequence[str]) -> None:
    """Raises `InputError` where a table has two columns of one name: only one of them would be read."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{place}: the header names a column twice ('{twice[0]}'): rename one")


def ragged(place: str, num_fields: int, num_columns: int, remedy: str = "") -> InputError:
    return InputError(f"{place}: {num_fields} fields where the header names {num_columns}{remedy}")


def read_columns(path: Path, task: Task, layout: FileLayout, is_conllu: bool = False, has_tags: bool = True) -> Rows:
    """CoNLL's form: a word and its tag per line, an empty line or -DOCSTART- between sentences.

    Words may hold any character but tabs and spaces, no-break spaces too. Where words are numbered (they stand behind
    the first column), a line with `#` is a comment; elsewhere it is a word. In CoNLL-U, lines of numbers such as 3-4
    (what 3 and 4 are written as) and 3.1 (a word that is not written) are no words.
    """
    is_default = layout.columns == FileLayout.model_fields["columns"].default
    word_at, tag_at = UD_COLUMNS if is_conllu and is_default else layout.columns
    is_numbered, last = word_at > 0, max(word_at, tag_at) if has_tags else word_at
    words: list[str] = []
    tags: list[str] = []
    row: Row = {}
    first = 0
    for number, line in itertools.chain(numbered_lines(path), [(0, "")]):
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            if words:
                yield f"{path}:{first}", row | {task.words: words} | ({task.label: tags} if has_tags else {})
            words, tags, row = [], [], {}
        elif is_numbered and line.startswith("#"):
            key, _, value = line[1:].partition("=")
            row |= {"id": value.strip()} if key.strip() == "sent_id" else {}
        else:
            fields = line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]
            if len(fields) <= last:
                lacks = "a tag" if has_tags else f"a word in column {word_at} (from 0), where training had it"
                raise InputError(f"{path}:{number}: a line without {lacks}: '{line[:40]}'")
            if is_conllu and not fields[0].isdecimal():
                continue
            first = first if words else number
            words.append(fields[word_at])
            tags.append(fields[tag_at].strip() if has_tags else "")


def read_trec(path: Path) -> Rows:
    """TREC's judgements: query, a number that nobody uses, document, grade; blanks between them."""
    for number, line in numbered_lines(path):
        fields = line.split()
        if len(fields) == 4:
            yield f"{path}:{number}", {"query-id": fields[0], "corpus-id": fields[2], "score": fields[3]}
        elif fields:
            raise InputError(f"{path}:{number}: {len(fields)} fields where TREC has query, 0, document and grade")


def read_mldr(path: Path, part: str = "judgements") -> Rows:
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


def read_json_rows(path: Path) -> Rows:
    """A JSON file of rows: a list of objects, objects by their id, one object a line, or SQuAD's form."""
    lines = (line.strip() for _, line, _ in read_text_lines(path) if line.strip())
    first, second = next(lines, ""), next(lines, None)
    with suppress(json.JSONDecodeError):
        if second is not None and first.startswith("{") and isinstance(json.loads(first), dict):
            return ((f"{path}:{number}", row) for number, row, _ in read_json_lines(path))
    content = read_json_file(path)
    if isinstance(content, list):
        rows = [(f"{path}: row {number}", row) for number, row in enumerate(content)]
    elif isinstance(content, dict) and not isinstance(content.get("data"), list):
        named = {id: {"id": id} | row if isinstance(row, dict) else row for id, row in content.items()}
        rows = [(f"{path}: row {id}", row) for id, row in named.items()]
    else:
        return read_squad(path, content)
    wrong = next((place for place, row in rows if not isinstance(row, dict)), None)
    if wrong is not None:
        raise InputError(f"{wrong} is no object: a list of objects, objects by their id, or SQuAD's form is needed")
    return rows


def read_arrow_table(path: Path, label: str) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema, names = file.schema_arrow, list[str]()
            check_header(str(path), schema.names)
            if b"huggingface" in (schema.metadata or {}):  # written by `datasets`, which says there what labels mean
                from datasets import Features

                names = class_names(find_field(Features.from_arrow_schema(schema), label))
            yield from rows_of_batches(file.iter_batches(batch_size=1000), label, names, str(path))
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from None


def read_saved(path: Path, label: str) -> Rows:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote; labels that it names come as names."""
    import datasets

    if not is_saved(path):
        raise InputError(f"{path} is a folder; name a file of rows in it")
    try:
        table = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise damaged(path, error) from None
    if not isinstance(table, datasets.Dataset):
        raise InputError(f"{path} holds several splits: name the folder of one, such as {path.name}/{min(table)}")
    return rows_of_dataset(table, label, str(path))


def rows_of_dataset(table: Any, label: str, place: str) -> Rows:
    """The rows of a data set; of a column of labels, or of lists of labels, that names them, the names."""
    batches = table.with_format("arrow").iter(batch_size=1000)
    return rows_of_batches(batches, label, class_names(find_field(table.features, label)), place)


def class_names(feature: Any) -> list[str]:
    """What the numbers in a column of a data set stand for, where it says so."""
    return list(getattr(getattr(feature, "feature", feature), "names", None) or [])


def rows_of_batches(batches: Iterable[Any], label: str, names: list[str], place: str) -> Rows:
    for number, row in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches)):
        if names:
            row[label] = with_names(find_field(row, label), names)
        yield f"{place}: row {number}", row


def with_names(value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [with_names(item, names) for item in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def read_squad(path: Path, content: Any) -> Rows:
    """SQuAD's form, 1.1 and 2.0: one JSON document, data → paragraphs → qas."""
    try:
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        rows = [
            {**answered, "context": paragraph["context"]} for paragraph in paragraphs for answered in paragraph["qas"]
        ]
    except (KeyError, TypeError):
        raise InputError(f"{path}: not SQuAD's form, data → paragraphs → context and qas") from None
    return ((str(path), row) for row in rows)


def read_record(path: Path) -> Rows:
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
                f"{place}: not SuperGLUE's form of ReCoRD, passage (text, entities), qas (query, answers, idx) and idx"
            ) from None
        yield from ((place, row) for row in rows)
