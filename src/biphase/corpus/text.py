"""Sources → documents: files, folders, globs and hub data sets in, a stream of `Document(id, text)` out, in order.

`find_sources` turns what a person typed into single files (or single files of a hub data set), each with a fingerprint;
`read_documents` streams one of them. Whatever is wrong with the input is an `InputError` that names file and line.
"""

import glob
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from biphase import console
from biphase.errors import InputError, first_line, nearest

Kind = Literal["text", "jsonl", "parquet", "hub"]
TxtDocuments = Literal["file", "paragraphs", "lines"]

KINDS: dict[str, Kind] = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
CODECS = {".gz": "gzip", ".zst": "zstd"}
READABLE = ".txt, .jsonl (both also as .gz or .zst) and .parquet"
HUB_ADDRESS = re.compile(
    r"(?:hub:)?(?P<dataset>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]*))?(?::(?P<split>[\w.]+))?(?:@(?P<revision>[\w./-]+))?"
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    id: str
    text: str


@dataclass(frozen=True)
class HubPart:
    """Data file `index` of the `count` files of one split of a hub data set, at one commit."""

    dataset: str
    config: str | None
    split: str
    revision: str
    index: int
    count: int


@dataclass(frozen=True)
class TextSource:
    """One file, or one file of a hub data set. `num_bytes` is its size on disk, None for the hub."""

    name: str
    kind: Kind
    fingerprint: str
    num_bytes: int | None
    path: Path | None = None
    part: HubPart | None = None


def find_sources(sources: Sequence[str | Path]) -> list[TextSource]:
    """Files, folders (recursive, sorted), globs and hub data sets → sources, in the order given.

    A hub data set is `hub:owner/name[:config[:split]][@revision]`, for example
    `hub:HuggingFaceFW/fineweb-edu:sample-10BT`; the prefix may be left out where no local path is meant. It is pinned
    to the commit found now, and each of its data files becomes a source. The split is `train` unless given.

    Raises `InputError` for what does not exist, matches nothing, is empty, has an unknown ending, or is given twice.
    """
    found = [source for given in sources for source in _expand(str(given))]
    if not found:
        raise InputError("no source is given: name files, folders, globs or hub data sets")
    seen: set[str] = set()
    for source in found:
        if source.fingerprint in seen:
            raise InputError(f"{source.name} is given twice (by name, by its folder or by a glob): name it once")
        seen.add(source.fingerprint)
    return found


def _expand(given: str) -> list[TextSource]:
    path = Path(given).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.exists():
        return [_file(path)]
    if glob.has_magic(given):
        return _matches(given)
    if given.startswith("hub:") or _means_hub(path):
        return _hub(given)
    raise InputError(f"{given} does not exist{_hint(path)}")


def _means_hub(path: Path) -> bool:
    """A bare `owner/name` that can be no mistyped path: no known ending, and no local folder of the owner's name."""
    is_bare = not path.is_absolute() and path.parts[0] not in (".", "..") and HUB_ADDRESS.fullmatch(str(path))
    return bool(is_bare) and _kind(path) is None and not Path(path.parts[0]).exists()


def _hint(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    names = sorted(entry.name for entry in path.parent.iterdir())
    return nearest(path.name, names) if 0 < len(names) <= 20 else ""


def _kind(path: Path) -> Kind | None:
    ending = Path(path.stem).suffix if path.suffix in CODECS else path.suffix
    kind = KINDS.get(ending)
    return None if kind == "parquet" and path.suffix in CODECS else kind


def _folder(folder: Path) -> list[TextSource]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    readable = [path for path in files if _kind(path) is not None]
    if not readable:
        raise InputError(f"{folder} holds no file that can be read: {READABLE}")
    if len(readable) < len(files):
        endings = ", ".join(sorted({path.suffix or path.name for path in files if _kind(path) is None}))
        console.err.print(f"{folder}: {len(files) - len(readable)} files are no text source and stay out ({endings})")
    return [_file(path) for path in readable]


def _matches(pattern: str) -> list[TextSource]:
    matches = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    if not matches:
        raise InputError(f"{pattern} matches no file")
    return [source for match in matches for source in _expand(match)]


def _file(path: Path) -> TextSource:
    kind = _kind(path)
    if kind is None:
        raise InputError(f"{path} has an unknown ending; can be read: {READABLE}")
    status = path.stat()
    if status.st_size == 0:
        raise InputError(f"{path} is empty: delete it or leave it out")
    fingerprint = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return TextSource(str(path), kind, fingerprint, status.st_size, path)


def _hub(given: str) -> list[TextSource]:
    match = HUB_ADDRESS.fullmatch(given)
    if match is None:
        raise InputError(f"{given} is no hub address; write hub:owner/name[:config[:split]][@revision]")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        commit = HfApi().dataset_info(match["dataset"], revision=match["revision"]).sha
        whole = HubPart(match["dataset"], match["config"] or None, match["split"] or "train", str(commit), 0, 1)
        count = max(_stream(whole).num_shards, 1)
    except (OSError, HTTPError, ValueError) as error:
        raise InputError(f"{given} cannot be read from the hub, nor is it a local path: {first_line(error)}") from None
    address = f"hub:{whole.dataset}:{whole.config or ''}:{whole.split}@{commit}"
    return [
        TextSource(
            name=f"{address}#{index + 1}/{count}",
            kind="hub",
            fingerprint=f"{address}#{index + 1}/{count}",
            num_bytes=None,
            part=HubPart(whole.dataset, whole.config, whole.split, whole.revision, index, count),
        )
        for index in range(count)
    ]


def _stream(part: HubPart) -> Any:
    """The part as a streaming data set. Code of the data set's own is never run (datasets ≥ 4 has no way to)."""
    import datasets

    rows = datasets.load_dataset(
        part.dataset, name=part.config, split=part.split, revision=part.revision, streaming=True
    )
    return rows.shard(num_shards=part.count, index=part.index) if part.count > 1 else rows


class DocumentReader(Iterator[Document]):
    """The documents of one source, in order. `bytes_read` is how far into the file on disk (hub: the text) it is."""

    def __init__(self, source: TextSource, text_field: str, id_field: str, txt_documents: TxtDocuments) -> None:
        self.source, self.text_field, self.id_field, self.txt_documents = source, text_field, id_field, txt_documents
        self.bytes_read = 0
        read = {
            "text": self._read_text,
            "jsonl": self._read_jsonl,
            "parquet": self._read_parquet,
            "hub": self._read_hub,
        }
        self._documents = read[source.kind]()
        self._num_read = 0

    def __next__(self) -> Document:
        try:
            document = next(self._documents)
        except StopIteration:
            if self._num_read == 0:
                raise InputError(f"{self.source.name} holds no documents: leave it out") from None
            raise
        self._num_read += 1
        return document

    def _read_text(self) -> Iterator[Document]:
        name = Path(self.source.name).name
        lines: list[bytes] = []
        first = 1
        for number, line in self._lines():
            if self.txt_documents == "lines":
                yield Document(f"{name}:{number}", self._decode(line.rstrip(b"\r\n"), number))
            elif self.txt_documents == "file" or line.strip():
                first = first if lines else number
                lines.append(line)
            elif lines:
                yield Document(f"{name}:{first}", self._decode(b"".join(lines).rstrip(b"\r\n"), first))
                lines = []
        if lines:
            whole_file = self.txt_documents == "file"
            text = b"".join(lines) if whole_file else b"".join(lines).rstrip(b"\r\n")
            yield Document(name if whole_file else f"{name}:{first}", self._decode(text, first))

    def _read_jsonl(self) -> Iterator[Document]:
        for number, line in self._lines():
            text = self._decode(line, number)
            if text.isspace():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                place = f"{self.source.name}:{number}"
                raise InputError(
                    f"{place}: broken JSON ({error.msg}, column {error.colno}): one object a line"
                ) from None
            if not isinstance(row, dict):
                raise InputError(
                    f"{self.source.name}:{number}: a JSON {_kind_of(row)}, where one object a line is needed"
                )
            yield self._document(row, f":{number}")

    def _read_parquet(self) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        number = 0
        try:
            with pq.ParquetFile(self.source.path) as file:
                columns = [name for name in (self.text_field, self.id_field) if name in file.schema_arrow.names]
                if self.text_field not in columns:
                    raise self._missing_field(file.schema_arrow.names, "")
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=columns):
                        for row in batch.to_pylist():
                            number += 1
                            yield self._document(row, f": row {number}")
                    self.bytes_read = (self.source.num_bytes or 0) * (group + 1) // file.num_row_groups
        except UnicodeDecodeError:
            raise InputError(f"{self.source.name}: a text after row {number} is not UTF-8") from None
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(error) from None

    def _read_hub(self) -> Iterator[Document]:
        assert self.source.part is not None
        from huggingface_hub.errors import HTTPError

        number = 0
        try:
            for number, row in enumerate(_stream(self.source.part), start=1):
                document = self._document(row, f": row {number}")
                self.bytes_read += len(document.text)
                yield document
        except (OSError, HTTPError) as error:
            raise InputError(
                f"{self.source.name}: the hub failed after row {number} ({first_line(error)}); "
                "run the same command again"
            ) from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered lines (from 1) with their ends, without a byte order mark, out of the compression."""
        import pyarrow as pa  # its streams, unlike zstandard's, notice a file that is cut short

        path = self.source.path
        assert path is not None
        try:
            with pa.OSFile(str(path)) as file:
                stream = pa.CompressedInputStream(file, CODECS[path.suffix]) if path.suffix in CODECS else file
                for number, line in enumerate(io.BufferedReader(stream, 1 << 20), start=1):
                    self.bytes_read = file.tell()
                    yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        except OSError as error:
            raise self._damaged(error) from None

    def _decode(self, data: bytes, first_line: int) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            byte = error.start - (data.rfind(b"\n", 0, error.start) + 1)
            raise InputError(
                f"{self.source.name}:{line}: not UTF-8 (byte {data[error.start]:#04x} at position {byte} of the line); "
                "convert the file, for example with iconv -f latin1 -t utf-8"
            ) from None

    def _document(self, row: dict[str, Any], place: str) -> Document:
        if self.text_field not in row:
            raise self._missing_field(row, place)
        text = row[self.text_field]
        if not isinstance(text, str):
            raise InputError(
                f"{self.source.name}{place}: field '{self.text_field}' is {_kind_of(text)}, not a string; "
                "mend the row or take it out"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{self.source.name}{place}: half of a surrogate pair ({text[error.start]!r}) at character "
                f"{error.start} of the text, which is no Unicode; take it out"
            ) from None
        given = row.get(self.id_field)
        return Document(f"{Path(self.source.name).name}{place}" if given is None else str(given), text)

    def _missing_field(self, names: Iterable[str], place: str) -> InputError:
        there = ", ".join(names)
        return InputError(
            f"{self.source.name}{place}: no field '{self.text_field}'; the fields are: {there}; "
            "name one with --text-field"
        )

    def _damaged(self, error: Exception) -> InputError:
        return InputError(
            f"{self.source.name} cannot be read to its end ({first_line(error)}): it is damaged, cut short or "
            "not what its ending says"
        )


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), type(value).__name__)


def read_documents(
    source: TextSource, text_field: str = "text", id_field: str = "id", txt_documents: TxtDocuments = "file"
) -> DocumentReader:
    """The documents of one source, streamed in order, those with an empty text too (the caller counts them).

    `text_field` and `id_field` name the JSON fields or parquet columns. A row without an id is named by file and line.
    A .txt file is one document (`txt_documents="file"`), or split at blank lines ("paragraphs"), or one per line
    ("lines", where a blank line is an empty document).

    Raises `InputError` naming file and line: broken JSON, a missing field (the fields that are there are listed), a
    text that is no string, bytes that are not UTF-8, half a surrogate pair, damaged compression, no document at all.
    """
    check_txt_documents(txt_documents)
    return DocumentReader(source, text_field, id_field, txt_documents)


def check_txt_documents(name: str) -> None:
    if name not in get_args(TxtDocuments):
        raise InputError(f"txt_documents '{name}' is unknown{nearest(name, get_args(TxtDocuments))}")


def sample_texts(
    sources: Sequence[TextSource],
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
    limit_mb: float | None = None,
) -> Iterator[str]:
    """The texts of the sources, or the first texts of each until about `limit_mb` MB (10⁶ bytes), shared out evenly."""
    limit = None if limit_mb is None else limit_mb * 1e6 / len(sources)
    for source in sources:
        taken = 0
        for document in read_documents(source, text_field, txt_documents=txt_documents):
            if limit is not None and taken >= limit:
                break
            taken += len(document.text.encode())
            yield document.text
