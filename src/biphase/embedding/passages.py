"""Documents → the passages of an index: a line of JSON for each, and where each line begins.

INDEX/  passages.jsonl  lines.npy

A passage has about 120 words and the columns of its document. Its id is that of its document and its number there.

Letter: N passages.
"""

import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from biphase import console
from biphase.config import plain_value
from biphase.corpus.forms import Row
from biphase.corpus.text import Document, TextSource, cut_words, join_words, read_documents
from biphase.errors import first_of
from biphase.files import MARK, content_hash, file_hash, read_json_as, reading
from biphase.tasks.bm25 import SMALL_LETTERS, searched_words

PASSAGES, LINES = "passages.jsonl", "lines.npy"
INDEX_REMEDY = "delete the index and build it again"
KEPT_TEXTS = re.compile(r"texts-([0-9a-f]{12})\.jsonl")
"""The name of a copy of texts in memory, with the beginning of its hash (`corpus.text.keep_rows`)."""
ID_FIELDS = ("id", "_id")
"""The fields that may hold a document's id; the second is that of BEIR's files."""
PASSAGE_WORDS = 120
SAMPLE = "A word, and 永和九年 歲在癸丑 คำไทย हिन्दी ＡＢＣ İstanbul, soft\u00adly.\nAt last. " * 40
"""A text whose passages and words reveal a change in the way that texts are cut."""


def cut_document(document: Document, first: int = 0) -> Iterator[Row]:
    """Cut a document into passages of about `PASSAGE_WORDS` words. Their numbers begin with `first`."""
    columns = {"columns": document.columns} if document.columns else {}
    for number, words in enumerate(cut_words(document.text, PASSAGE_WORDS), first):
        yield {"id": f"{document.id}#{number}", "text": join_words(words), **columns}


def is_index(folder: Path) -> bool:
    """Tell whether a folder is a search index, perhaps a damaged one, and not documents with an index.json of their
    own."""
    return (folder / "index.json").exists() and any((folder / name).exists() for name in (PASSAGES, MARK))


def default_index(text: str) -> Path:
    """Name the index of a text that is given none: beside it, or in this folder for a data set of the Hub."""
    own = text.rstrip("/") if Path(text).exists() else text.removeprefix("hub:").replace("/", "--")
    return Path(f"{own}.index")


def field_of(index: Path) -> str:
    """Return the text field of an index; `text` if there is no index yet."""
    record = read_json_as(index / "index.json", dict[str, Any], INDEX_REMEDY) if is_index(index) else {}
    return str(record.get("text_field", "text"))


def tell_text(text: str, index: Path) -> str:
    """Write the text of an index as a command takes it, with the folder of the index if that is not the default."""
    return text if default_index(text).resolve() == index.resolve() else f"{text} --index {index}"


def document_of(passage: Row) -> str:
    """Return the id of a passage's document."""
    return passage["id"].rpartition("#")[0]


def root_of(text: str) -> Path:
    """Find the folder of a text: itself, that of the file, or that in which a glob begins."""
    named = Path(text).expanduser()
    return next(place for place in (named, *named.parents) if place.is_dir())


def place_of(text: str) -> Path:
    """Return the path of a text, or the folder of a copy of texts in memory, whose name depends on the texts."""
    path = Path(text).expanduser().resolve()
    return path.parent if KEPT_TEXTS.fullmatch(path.name) else path


def base_of(text: str) -> Path:
    """Return the folder in which a glob begins, which need not exist, or the place of another text."""
    path = Path(text).expanduser()
    if path.exists() or not has_magic(text):
        return place_of(text)
    return Path(*takewhile(lambda part: not has_magic(part), path.parts)).resolve()


def cutting_hash(language: str) -> str:
    """Hash the way in which texts of a language are cut into passages and words."""
    passages, letters = cut_document(Document("sample", SAMPLE)), SMALL_LETTERS.get(language, {})
    return content_hash([*passages, searched_words(SAMPLE), *letters.values()])[:16]


def write_passages(
    part: Path, sources: Sequence[TextSource], text_field: str, root: Path, old: Path | None
) -> tuple[np.ndarray, tuple[str, ...], int]:
    """Write the passages of a text, and the offset of each. Returns each passage's row in the old index, [N], or -1 for
    a new one, the columns of the documents, and the number of different passages of the old index that are gone.

    Args:
        root: the folder of the text. The path of a file below it names the documents that have no id.
        old: the index of an earlier state of the text.
    """
    old_texts = () if old is None else read_texts(old)
    rows_by_hash = {sha256(text.encode()).digest(): row for row, text in enumerate(old_texts)}
    offsets, old_rows, counts = array("q"), array("q"), Counter[str]()
    columns, shared, repeated = dict[str, None](), dict[str, str](), dict[str, None]()
    with open(part / PASSAGES, "wb") as file, console.track("cut passages", None, "passages") as progress:
        for document in read_all(sources, text_field, root, shared):
            columns |= dict.fromkeys(document.columns)
            repeated |= dict.fromkeys([document.id] if document.id in counts else [])
            for passage in cut_document(document, counts[document.id]):
                counts[document.id] += 1
                offsets.append(file.tell())
                old_rows.append(rows_by_hash.get(sha256(passage["text"].encode()).digest(), -1))
                file.write(line_of(passage))
                progress.advance(1)
    if shared:
        offsets = rename_documents(part / PASSAGES, shared)
        console.err.print(f"{first_of([*shared])}: several files have this id; the name of its file precedes it")
    if repeated:
        told = "several rows of one file have this id; they count as parts of one document"
        console.err.print(f"{first_of([*repeated])}: {told}")
    np.save(part / LINES, np.array(offsets, dtype=np.int64))
    if old is None and "title" in columns:
        template = text_field if "{" in text_field else f"{{{text_field}}}"
        remedy = f"`--text-field '{{title}}\\n{template}'` adds it"
        console.err.print(f"{sources[0].name}: the column 'title' is shown, not searched; {remedy}")
    old_rows_N = np.array(old_rows, dtype=np.int64)
    num_gone = len(rows_by_hash) - len(np.unique(old_rows_N[old_rows_N >= 0]))
    return old_rows_N, tuple(columns), num_gone


def read_all(sources: Sequence[TextSource], text_field: str, root: Path, shared: dict[str, str]) -> Iterator[Document]:
    """Stream the documents of all sources, each under its own id. Where an earlier file has the id of a row, the name
    of the later file precedes it, and the id and the name of the earlier file come into `shared`."""
    owners = dict[str, str]()
    for source in sources:
        name = source.name if source.path is None else os.path.relpath(source.name, root)
        for document in read_documents(source, text_field, ID_FIELDS, with_columns=True):
            id = document.id
            if len(sources) == 1 and KEPT_TEXTS.fullmatch(name) and id.startswith(f"{name}:"):
                id = id.replace(name, "texts", 1)
            elif source.path is not None and id.partition(":")[0] == Path(name).name:  # the file, perhaps with the line
                id = str(Path(name).parent / id)
            elif (owner := owners.setdefault(id, name)) != name:
                shared[id], id = owner, f"{name}/{id}"
            yield replace(document, id=id)


def remove_earlier_texts(kept: Path) -> None:
    """Remove the copies of earlier texts in memory beside that of the present ones. A file that has changed since it
    was written stays."""
    for path in kept.parent.glob("texts-*.jsonl"):
        match = KEPT_TEXTS.fullmatch(path.name)
        if match and path != kept and file_hash(path).startswith(match[1]):
            path.unlink()


def rename_documents(path: Path, files: Mapping[str, str]) -> "array[int]":
    """Let the name of its file precede each of these ids of documents. Returns the offset of each passage."""
    offsets, part = array("q"), path.with_suffix(".part")
    with open(path, "rb") as old, open(part, "wb") as new:
        for passage in map(json.loads, old):
            document = document_of(passage)
            passage["id"] = f"{files[document]}/{passage['id']}" if document in files else passage["id"]
            offsets.append(new.tell())
            new.write(line_of(passage))
    part.replace(path)
    return offsets


def line_of(passage: Row) -> bytes:
    return json.dumps(passage, ensure_ascii=False, default=plain_value).encode() + b"\n"


def read_passages(folder: Path) -> Iterator[Row]:
    """Yield the passages of an index: `id`, `text`, and `columns` if the document has some."""
    with reading(folder / PASSAGES, "rebuild it"), open(folder / PASSAGES, "rb") as file:
        yield from map(json.loads, file)


def read_texts(folder: Path) -> Iterator[str]:
    """Yield the text of each passage of an index."""
    return (passage["text"] for passage in read_passages(folder))
