"""Sources of text become documents: files, folders, globs and Hub data sets in, a stream of `Document(id, text)` out.

`find_text_sources` expands a user's words to single files, on disk or in a Hub data set, each with a fingerprint, and
accepts values in memory; `read_documents` streams one source. Errors are `InputError`s that name file and line.
py3langid identifies the language of a text (139 of them, no download).
"""

import glob
import json
import math
import os
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from biphase import console
from biphase.config import plain_value
from biphase.corpus.forms import (
    FIRST_ROWS,
    CommaNumber,
    Row,
    is_missing,
    mark_numbers,
    rows_in_memory,
    template_columns,
)
from biphase.corpus.rows import (
    ABSENT,
    DEFAULT_FORM,
    MAX_LINE_BYTES,
    as_number,
    check_text,
    column,
    ending_of,
    find_field,
    kind_of,
    open_table,
    own_name,
    plain_name,
    read_json_lines,
    read_table,
    read_text_lines,
    refuse_pipe,
    saved_tables,
)
from biphase.errors import InputError, first_of, nearest, refuse_doubles, refuse_unknown
from biphase.files import MARK, file_hash, whole_file
from biphase.hub import load_rows, pin_commit, told_by_hub

SEVERAL, CODE, UNKNOWN_LANGUAGE = "several", "code", "unknown"
MOSTLY, MUCH = 0.8, 0.3
"""The share of one language from which the whole text counts as that language, and the share of code from which it
counts as code, because code has comments too."""
PIECE, MOST_PIECES = 1000, 20
"""The fewest characters to judge at once, because fewer say little, and the approximate number of pieces of a text."""
CODE_SIGNS = frozenset("{}()[]=;<>_+*/\\#&|")
LEAST_SIGNS, LEAST_INDENTED = 0.045, 0.3
"""The least share of signs among the characters of program code, and of indented lines. Prose has a fifth of these
signs; tables and lists have no indented lines."""
LANGUAGE_TEXTS = 100
LEAST_MARGIN = 0.02
"""The least lead of the likeliest language over the next one, in nats per character, for text that has a language."""


def find_language(texts: Iterable[str]) -> str:
    """Find the language of most texts, as an ISO 639 code such as `de`; or `code`, `several`, `unknown`."""
    votes, piece = Counter[str](), ""
    for text in (*(sample for whole in texts for sample in spread(whole)), None):
        piece += "" if text is None else f"{text}\n"
        if len(piece) >= PIECE or (text is None and piece and not votes):
            votes[language_of(piece)] += len(piece)
            piece = ""
    if votes[CODE] > MUCH * votes.total():
        return CODE
    [(language, most)] = votes.most_common(1) or [(UNKNOWN_LANGUAGE, 0)]
    return language if most >= MOSTLY * votes.total() else SEVERAL


def sample_language(texts: Iterable[str], num_texts: int) -> str:
    """Find the language of `num_texts` texts from about a hundred of them."""
    return find_language(islice(texts, None, None, max(1, num_texts // LANGUAGE_TEXTS)))


def spread(text: Any) -> Iterator[Any]:
    """Yield pieces of a text, of characters or tokens, spread from beginning to end: a book may begin with a licence in
    another language."""
    for start in range(0, len(text), max(PIECE, len(text) // MOST_PIECES)):
        yield text[start : start + PIECE]


def language_of(text: str) -> str:
    """Find the language of one piece of text."""
    from py3langid import rank

    lines = [line for line in text.splitlines() if line.strip()]
    letters = "".join(text.split())
    signs = sum(letter in CODE_SIGNS for letter in letters) / max(len(letters), 1)
    indented = sum(line[0] in " \t" for line in lines) / max(len(lines), 1)
    if signs > LEAST_SIGNS and indented > LEAST_INDENTED:
        return CODE
    (language, best), (_, second), *_ = rank(text)
    is_clear = language != "zxx" and best - second > LEAST_MARGIN * len(text)  # zxx: no language at all
    return str(language) if is_clear else UNKNOWN_LANGUAGE


UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    r"\u3005-\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Hiragana, Katakana
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
"""Characters of scripts without spaces, for a regular expression's brackets."""
MARKS = "".join(chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code)).startswith("M"))
"""Marks that belong to the letter before them, such as the vowels of Hindi: `\\w` has none of them."""
JOINERS = r"\u00ad\u061c\u200c-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff"
"""Invisible signs that end no word, for brackets: soft hyphens, joiners, marks of direction. BERT's tokenizers drop
them, so that a word of such signs would have no token."""
INNER = f"{MARKS}{JOINERS}"
WORD = re.compile(
    rf"[{JOINERS}]*(?:[{UNSPACED}][{INNER}]*|[^\W{UNSPACED}](?:[^\W{UNSPACED}]|[{INNER}])*|[^\w\s\u200b{JOINERS}][{INNER}]*)"
)
"""A word of running text, a character of a script without spaces, or a sign of punctuation; each with its marks and
joiners. The zero-width space divides words as a blank does."""
LAST_MARKS = re.compile(f"[{MARKS}]*")
PIECES = re.compile(rf"([{UNSPACED}]{{1,2}}|[^\s{UNSPACED}]+)(\s?)")


def cut_words(text: str, num_words: int) -> list[list[str]]:
    """Cut a text into passages of `num_words` words; the last may be shorter. A word includes the blank that follows
    it: `BERT 模型は` → `BERT␣`, `模型`, `は`."""
    words = [piece[1] + (" " if piece[2] else "") for piece in PIECES.finditer(text)]
    return [words[begin : begin + num_words] for begin in range(0, len(words), num_words)]


def end_of_marks(text: str, end: int) -> int:
    """Return the end of a span of a text with the marks of its last letter, which many tokenizers drop."""
    marks = LAST_MARKS.match(text, end)
    return marks.end() if marks else end


def count_words(text: str) -> int:
    """Count the words of a text as `cut_words` cuts it."""
    return sum(1 for _ in PIECES.finditer(text))


def join_words(words: Sequence[str]) -> str:
    """Join consecutive words of a passage to a text."""
    return "".join(words).rstrip()


TxtDocuments = Literal["file", "paragraphs", "lines"]

READABLE = ".txt, .md, .jsonl, .ndjson, .jsonlines, by its name .csv (these also as .gz or .zst), .parquet and .arrow"
HUB_ADDRESS = re.compile(
    r"(?:hub:)?(?P<dataset>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]*))?(?::(?P<split>[\w.]+))?(?:@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True)
class Document:
    """A text with its id: the source's own, or file and line."""

    id: str
    text: str
    num_bytes: int = field(default=0, compare=False)
    """The bytes of its file read so far. For the Hub and values in memory: the characters of the texts so far."""
    columns: Row = field(default_factory=dict, compare=False)
    """The single values in the other columns of its row, on request."""


@dataclass(frozen=True)
class TextSource:
    """A source of text: a file, a file of a Hub data set, or texts or rows in memory."""

    name: str
    fingerprint: str
    num_bytes: int | None = None
    """The size of a file on disk."""
    path: Path | None = None
    """The file, with links resolved."""
    rows: Any = None
    """Texts or rows in memory."""
    copies: frozenset[int] = frozenset()
    """The indices of the documents to leave out because an earlier one has their text."""

    @property
    def record_name(self) -> str:
        """The file name without its folders; on the Hub, the whole name with the commit."""
        return self.name if self.path is None else Path(self.name).name


def are_names(sources: Any) -> bool:
    """Return whether sources are names of files, folders or data sets, not values in memory.

    One string is always a name. Several strings are names, unless some are running text and none is an existing path or
    has the ending of a text file.
    """
    if isinstance(sources, str | Path):
        return True
    if not isinstance(sources, list | tuple) or not all(isinstance(source, str | Path) for source in sources):
        return False
    if len(sources) < 2 or not any(is_running_text(str(source)) for source in sources):
        return True
    return any(isinstance(name, Path) or os.path.exists(name) or kind_of(Path(name)) for name in sources)


def is_running_text(text: str) -> bool:
    """Return whether a text has several words, or letters without case (Chinese and Thai have no blanks)."""
    return len(text.split()) > 1 or any(unicodedata.category(letter) == "Lo" for letter in text)


def json_line(location: str, row: Row) -> str:
    """Format a row as a line of JSON. Raises `InputError` for half of a surrogate pair."""
    return check_text(location, "row", json.dumps(row, ensure_ascii=False, default=plain_value) + "\n")


def keep_rows(rows: Iterable[Row], folder: Path, stem: str) -> Path:
    """Write rows as `folder/STEM-HASH.jsonl`, unless that file, which has the same rows, exists."""
    rows = iter(rows)
    first = [*islice(rows, 1)]  # no folder for data that are no rows
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{stem}.jsonl"  # a user may have a file of that name without the dot
    with whole_file(part) as file:
        file.writelines(json_line(f"row {index}", row) for index, row in enumerate(chain(first, rows)))
    path = folder / f"{stem}-{file_hash(part)[:12]}.jsonl"
    if path.exists():
        part.unlink()
    else:
        part.rename(path)
    return path


IN_MEMORY = "the data in memory"
"""What messages call rows that no file of the user's holds."""


@contextmanager
def as_file(data: Any) -> Iterator[Path]:
    """Yield the file that data names, or a passing one with the rows in memory, whose place no message mentions."""
    if isinstance(data, str | Path):
        yield Path(data)
        return
    with TemporaryDirectory() as folder:
        file = keep_rows(rows_in_memory(data), Path(folder), "rows").rename(Path(folder) / f"{IN_MEMORY}.jsonl")
        try:
            yield file
        except InputError as error:
            message = re.sub(rf"{re.escape(str(file))}:(\d+)", lambda at: f"row {int(at[1]) - 1}", str(error))
            raise InputError(message.replace(str(file), IN_MEMORY)) from None


def name_data(file: Path) -> str:
    """Name the file that `as_file` yields, for messages."""
    return IN_MEMORY if file.stem == IN_MEMORY else file.name


def name_sources(sources: Any, folder: Path, text_field: str) -> list[str | Path]:
    """List the names of sources; write values in memory to a file in the folder."""
    if are_names(sources):
        return [sources] if isinstance(sources, str | Path) else list(sources)
    path = keep_rows(rows_in_memory(sources, text_field), folder, "texts")
    console.err.print(f"texts in memory are saved as {path}")
    return [path]


def find_text_sources(sources: Any, recorded: Collection[str] = ()) -> list[TextSource]:
    """Find the sources behind files, folders (recursive, sorted), globs and Hub data sets, in the given order. Values
    in memory (texts, rows, a DataFrame, a `datasets.Dataset`) are one source.

    A Hub data set is `hub:owner/name[:config[:split]][@revision]`, for example
    `hub:HuggingFaceFW/fineweb-edu:sample-10BT`; the prefix is optional if there is no such local path. The default
    split is `train`. Each file of the data set becomes a source, pinned to the revision's present commit, or without a
    revision to the commit of the `recorded` names of its files.

    Leaves out empty files, and prints a line. Raises `InputError` for sources that do not exist, match nothing, have an
    unknown ending or are given twice, and if all files are empty.
    """
    if not are_names(sources):
        return [TextSource("in memory", "", rows=sources)]
    names = [sources] if isinstance(sources, str | Path) else sources
    named = [source for name in names for source in expand(str(name), recorded)]
    if not named:
        raise InputError("no source is given: name files, folders, globs or Hub data sets")
    filled = [source for source in named if source.num_bytes != 0]
    if not filled:
        raise InputError(f"{named[0].name} is empty{', as are all other sources' if len(named) > 1 else ''}")
    name_left_out("empty", [source.name for source in named if source.num_bytes == 0], len(named))
    refuse_doubles("the source", [source.path or source.name for source in filled])
    return filled


def expand(source_name: str, recorded: Collection[str] = ()) -> list[TextSource]:
    """Find the sources behind one name."""
    if not source_name.strip():  # an unset shell variable; as a path it would be the current folder
        raise InputError("a source without a name is given: name a file, a folder, a glob or a Hub data set")
    path = Path(source_name).expanduser()
    if path.is_dir():
        return folder_sources(path)
    if path.exists():
        return [file_source(path)]
    if glob.has_magic(source_name):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise InputError(f"{source_name} matches no file")
        paths = {*map(Path, matches)}  # a folder comes with all that is in it
        matches = [match for match in matches if paths.isdisjoint(Path(match).parents)]
        return [source for match in leave_out_written(path, matches) for source in expand(match, recorded)]
    # A bare `owner/name` must not look like a mistyped path: no known ending, and no local folder with that name.
    is_bare = not path.is_absolute() and path.parts[0] not in (".", "..") and HUB_ADDRESS.fullmatch(str(path))
    if source_name.startswith("hub:") or (is_bare and kind_of(path) is None and not Path(path.parts[0]).exists()):
        return hub_sources(source_name, recorded)
    if not path.parent.is_dir():
        raise InputError(f"{source_name} does not exist: there is no folder {path.parent}")
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.exists())
    raise InputError(f"{source_name} does not exist{nearest(path.name, names) if 0 < len(names) <= 20 else ''}")


def leave_out_written(pattern: Path, matches: Sequence[str]) -> list[str]:
    """Leave out the matches of a glob in folders that biphase wrote, such as a search index, below the folder where the
    glob begins. Print a line that names these folders. Raises `InputError` if no match remains."""
    num_fixed = sum(1 for _ in takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    is_written = cache(lambda folder: (folder / MARK).exists())
    kept, written = [], set[str]()
    for match in matches:
        below = [Path(match), *Path(match).parents][: len(Path(match).parts) - num_fixed]
        folders = [str(folder) for folder in below if is_written(folder)]
        written.update(folders[-1:])
        kept += [] if folders else [match]
    if not kept:
        raise InputError(f"{pattern} matches nothing but what biphase wrote in {first_of(sorted(written))}")
    name_written(written)
    return kept


def check_place(source_name: str) -> None:
    """Raise `InputError` for a name that cannot be a source, such as a missing file, without reading it or asking the
    Hub."""
    path = Path(source_name).expanduser()
    if not path.is_dir() and (path.exists() or not HUB_ADDRESS.fullmatch(source_name)):
        expand(source_name)


def folder_sources(folder: Path) -> list[TextSource]:
    """List the readable files of a folder, without hidden ones and those in folders that biphase wrote, such as a
    search index. Print a line that names other files, and links to folders, which are not followed."""
    readable: list[Path] = []
    others: list[str] = []
    paths = sorted(path for path in folder.rglob("*") if not is_hidden(path.relative_to(folder).parent))
    written = {path.parent for path in paths if path.name == MARK and path.parent != folder}
    tables_of = cache(lambda folder: {*saved_tables(folder)})
    for path in paths:
        if path.name.startswith(".") or not written.isdisjoint(path.parents):
            continue
        tables = tables_of(path.parent) if ending_of(path) in (".arrow", ".json") else ()
        is_cached = ending_of(path) == ".arrow" and bool(tables) and path not in tables  # `datasets` caches beside them
        # A .csv beside texts is often about them, so read it only if it is named.
        if path.is_file() and kind_of(path) not in (None, "csv") and not is_cached:
            readable.append(path)
        elif path.is_file() or path.is_symlink():
            others.append(str(path))
    if not readable:
        raise InputError(f"{folder} holds no file that can be read: {READABLE}")
    name_left_out("not text sources", others, len(readable) + len(others))
    name_written(map(str, written))
    return [file_source(path) for path in readable]


def name_written(folders: Iterable[str]) -> None:
    if names := sorted(folders):
        console.err.print(f"{first_of(names)}: written by biphase, and left out")


def is_hidden(path: Path) -> bool:
    return any(name.startswith(".") for name in path.parts)


def name_left_out(kind: str, names: list[str], num_files: int) -> None:
    if names:
        console.err.print(f"{len(names):,} of {num_files:,} files are {kind} and left out: {first_of(names)}")


def file_source(path: Path) -> TextSource:
    refuse_pipe(path)
    if kind_of(path) is None:
        raise InputError(f"{path} has an unknown ending; biphase reads {READABLE}")
    status, file = path.stat(), path.resolve()
    return TextSource(str(path), f"{file} {status.st_size} {status.st_mtime_ns}", status.st_size, file)


def hub_sources(source_name: str, recorded: Collection[str]) -> list[TextSource]:
    """List the files of a Hub data set. Without a revision, take the commit of its `recorded` files if there is only
    one, and print a line."""
    match = HUB_ADDRESS.fullmatch(source_name)
    if match is None:
        raise InputError(f"{source_name} is not a Hub address; write hub:owner/name[:config[:split]][@revision]")
    dataset, config, split = match["dataset"], match["config"] or "", match["split"] or "train"
    commits = {name.rpartition("@")[2].partition("#")[0] for name in recorded if name.startswith(f"hub:{dataset}:")}
    if match["revision"] is None and len(commits) == 1:
        [commit] = commits
        console.err.print(f"{source_name}: commit {commit}, already here in part; name another by @REVISION")
    else:
        commit = pin_commit(dataset, match["revision"])
    address = f"hub:{dataset}:{config}:{split}@{commit}"
    counts = [int(name.rpartition("/")[2]) for name in recorded if name.startswith(f"{address}#")]
    count = max(counts) if counts else max(stream_rows(f"{address}#1/1").num_shards, 1)
    names = [f"{address}#{number}/{count}" for number in range(1, count + 1)]
    return [TextSource(name, fingerprint=name) for name in names]


def stream_rows(name: str) -> Any:
    """Stream the rows of one file of a Hub data set, by its name from `hub_sources`."""
    address, _, numbers = name.partition("#")
    number, count = map(int, numbers.split("/"))
    dataset, config, split, commit = HUB_ADDRESS.fullmatch(address).groups()  # type: ignore[union-attr]
    rows = load_rows(dataset, config or None, split, commit, streaming=True)
    return rows.shard(num_shards=count, index=number - 1) if count > 1 else rows


def read_documents(
    source: TextSource,
    text_field: str = "text",
    id_fields: Sequence[str] = ("id",),
    txt_documents: TxtDocuments = "file",
    *,
    with_columns: bool = False,
) -> Iterator[Document]:
    """Stream the documents of one source in order, including empty ones, which the caller counts.

    `text_field` and `id_fields` name JSON fields or columns; `meta.text` is a field inside another. A `text_field` with
    braces is a template of several, such as `{title}\n{body}`; if all of them are empty, so is the text. Beside other
    values, null is empty, and so is a column that a row lacks, if one of the source's first rows has it. The first of
    `id_fields` that is not empty is a row's id; the id of a row without one is its file and line. A .txt or .md file is
    one document (`txt_documents="file"`), one per paragraph between blank lines ("paragraphs"), or one per line
    ("lines", blank ones included). A source without documents yields an empty one. `with_columns` reads the other
    columns of rows too.

    Raises `InputError` with file and line: broken JSON, a missing field (with those that exist), a text that is not a
    string, bytes that are not UTF-8, half a surrogate pair, damaged compression.
    """
    refuse_unknown("unknown txt_documents", txt_documents, get_args(TxtDocuments))
    if source.path is not None and kind_of(Path(source.name)) == "text":
        documents = read_txt(source.path, source.record_name, txt_documents)
    else:
        documents = read_fields(source, text_field, id_fields, with_columns)
    first = next(documents, Document(document_id(source), ""))
    yield first
    yield from documents


def read_txt(path: Path, name: str, txt_documents: TxtDocuments) -> Iterator[Document]:
    """Stream the documents of a .txt or .md file, whose name may be that of a link to it."""
    lines: list[str] = []  # of the current document
    first = num_bytes = num_chars = 0
    for number, line, num_bytes in read_text_lines(path):
        if txt_documents == "lines":
            yield Document(f"{name}:{number}", line.rstrip("\r\n"), num_bytes)
        elif txt_documents == "file" or line.strip(string.whitespace):  # ASCII spaces only: others make no blank line
            first, num_chars = (first, num_chars + len(line)) if lines else (number, len(line))
            lines.append(line)
            if num_chars > MAX_LINE_BYTES:
                problem = f"{path}:{number}: the document has more than {MAX_LINE_BYTES:,} characters"
                raise InputError(f"{problem}; split it into paragraphs or lines by txt_documents (--txt-documents)")
        elif lines:
            yield Document(f"{name}:{first}", "".join(lines).rstrip("\r\n"), num_bytes)
            lines = []
    if lines and txt_documents == "file":
        yield Document(name, "".join(lines), num_bytes)
    elif lines:
        yield Document(f"{name}:{first}", "".join(lines).rstrip("\r\n"), num_bytes)


def read_fields(
    source: TextSource, text_field: str, id_fields: Sequence[str], with_columns: bool
) -> Iterator[Document]:
    """Stream the documents in the rows of a source, each under its id, else file and line (or row)."""
    mark, is_table = ": row ", source.path is not None and kind_of(Path(source.name)) == "csv"
    template = text_field.replace("\\n", "\n") if "{" in text_field else ""
    names = template_columns(template) or (text_field,)
    if source.path is None and source.rows is None:
        rows = read_hub_file(source.name)
    elif source.path is None:
        rows = ((number, row, 0) for number, row in enumerate(rows_in_memory(source.rows, text_field)))
    elif kind_of(Path(source.name)) == "parquet":
        rows = read_table(source.path, () if with_columns else names, id_fields)
    elif is_table:
        rows, mark = read_csv(source.path), ":"
    else:
        rows, mark = read_json_lines(source.path), ":"
    begin = list(islice(rows, FIRST_ROWS if template else 0))
    known = {name for name in names for _, row, _ in begin if find_field(row, name, ABSENT) is not ABSENT}
    num_chars = 0
    for number, row, num_bytes in chain(begin, rows):
        location = f"{source.name}{mark}{number}"
        remedy = "name one as text_field (--text-field)"
        fields = {
            name: find_field(row, name) if name in known else column(location, row, name, remedy) for name in names
        }
        if any(value is not None for value in fields.values()):
            fields = {name: "" if value is None else value for name, value in fields.items()}
        texts = {name: check_text(location, name, value) for name, value in fields.items()}
        text = "".join(texts.values())
        if template and text.strip():
            parts = string.Formatter().parse(template)
            text = "".join(literal + texts.get(name or "", "") for literal, name, _, _ in parts)
        num_chars += len(text)
        id = next((id for id in (find_field(row, name) for name in id_fields) if not is_missing(id)), None)
        name = document_id(source, f"{mark}{number}") if id is None else str(id)
        columns = other_columns(row, (*names, *id_fields)) if with_columns else {}
        if is_table:  # an empty cell is a missing value
            columns = {name: value for name, value in columns.items() if not is_missing(value)}
        yield Document(name, text, num_bytes or num_chars, columns)


def read_csv(path: Path) -> Iterator[tuple[int, Row, int]]:
    """Stream the rows of a table, each with the number of its first line and the bytes of the file read so far."""
    lines, line, num_bytes = read_text_lines(path), 0, 0
    for place, row in mark_numbers(*open_table(path, DEFAULT_FORM, is_csv=True)):
        number = int(place.rpartition(":")[2])
        while line < number:
            line, _, num_bytes = next(lines)
        yield number, row, num_bytes


def other_columns(row: Row, names: Sequence[str]) -> Row:
    """Return the single values of a row in other columns than these, by their plain names, without bytes. Numbers have
    decimal points; without 1.234 beside decimal commas, which may be a thousand."""
    own_names = {own_name(row, name) for name in names}
    columns = {}
    for name, value in row.items():
        if isinstance(value, CommaNumber):
            value = None if as_number(value) is None else value.replace(",", ".")
        if name not in own_names and value is not None and not isinstance(value, list | dict | bytes):
            columns[plain_name(name)] = value
    return columns


def read_hub_file(name: str) -> Iterator[tuple[int, Row, int]]:
    """Stream the rows of a file on the Hub, each with its number and 0 for the bytes read, which are unknown."""
    with told_by_hub(f"{name}: cannot be read further", "if the network failed, run the same command again"):
        for number, row in enumerate(stream_rows(name), start=1):
            yield number, row, 0


def document_id(source: TextSource, location: str = "") -> str:
    """Name a document without an id. The name omits the commit of a data set, because an unchanged row stays the same
    document."""
    return re.sub(r"@\w+(?=#\d+/\d+$)", "", source.record_name) + location


def sample_texts(
    sources: Sequence[TextSource],
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
    limit_mb: float = math.inf,
) -> Iterator[str]:
    """Yield the texts of the sources, or the first ones of each, up to an equal share of `limit_mb` MB (10⁶ bytes)."""
    limit = limit_mb / len(sources)
    for source in sources:
        num_bytes = 0
        for document in read_documents(source, text_field, txt_documents=txt_documents):
            yield document.text
            num_bytes += len(document.text.encode())
            if num_bytes >= limit * 1e6:
                break
