"""A folder of documents and an embedding model → an index on disk, memory-mapped → passages for a question.

INDEX/  index.json  passages.jsonl  lines.npy (where each begins)  embeddings.npy (fp32, [N, D])  words/ (BM25's)

An index belongs to the model and the text that it was made of; one of another model is refused, never mixed.

Letters: N passages, D width.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from biphase import console
from biphase.config import Strict
from biphase.corpus.text import Document, cut_words, find_text_sources, join_words, read_documents
from biphase.embedding.model import embed_to_file, find_similar, hash_embedder, load_embedder, width_of
from biphase.embedding.pairs import hash_text
from biphase.errors import InputError
from biphase.files import content_hash, own_folder, read_json_as, reading, refuse_damaged, write_json
from biphase.run import split_reference
from biphase.tasks.bm25 import index_bm25, open_bm25, query_bm25

PASSAGES, LINES, VECTORS, WORDS = "passages.jsonl", "lines.npy", "embeddings.npy", "words"
PASSAGE_WORDS = 120
SAMPLE = "A word, and 永和九年 歲在癸丑 คำไทย\nat last. " * 40
"""A text whose passages tell one way of cutting from another."""


class IndexManifest(Strict):
    """What an index was made of: its `index.json`."""

    model: str
    """The name of the embedding model."""
    model_hash: str
    text: str
    text_hash: str
    num_passages: int
    width: int
    """Numbers in a vector."""
    text_field: str
    model_place: str
    """Where the model was on this machine; empty for one of the hub."""
    cutting: str = ""
    """The hash of the way in which texts were cut."""
    sources: list[str]
    """The data sets of the hub that the text names, with the commit."""


@dataclass(frozen=True)
class Index:
    """An index that was opened, and the model that it was made with."""

    folder: Path
    manifest: IndexManifest
    embedder: SentenceTransformer


def open_index(path: Path, model: str | None, text: str | None, text_field: str) -> Index:
    """Open an index with its model, from where this is now. Raises `InputError` where its model or text is another one
    or has changed, or its text would be cut into other passages."""
    remedy = "delete the index and build it again"
    refuse_damaged(path, remedy)
    manifest = read_json_as(path / "index.json", IndexManifest, remedy)
    model_path = model or (manifest.model_place if is_here(manifest.model_place) else manifest.model)
    name = text or manifest.text
    text_hash = manifest.text_hash
    if text or (not manifest.sources and Path(name).exists()):
        text_hash = hash_text(name, find_text_sources([name], manifest.sources))
    has_changed = text_hash != manifest.text_hash
    is_other_field = manifest.text_field != text_field
    is_its_place = model is None or model == manifest.model
    other_model = "which has changed since" if is_its_place else f"not by {model}"
    differences = {
        f"by {manifest.model}, {other_model}": hash_embedder(model_path) != manifest.model_hash,
        f"of another text than {text} holds now": bool(text) and has_changed,
        f"of the field '{manifest.text_field}', not of '{text_field}'": bool(text) and is_other_field,
        "of passages that were cut in another way": manifest.cutting != cutting_hash(),
    }
    for difference, is_there in differences.items():
        if is_there:
            remedy = "rebuild it (--rebuild)" + ("" if text else f" from its text, {manifest.text}")
            raise InputError(f"{path} was made {difference}: {remedy}")
    if has_changed:
        console.err.print(f"{name} has changed since {path} was made of it: search it, with --rebuild")
    return Index(path, manifest, load_embedder(model_path))


def is_here(model: str) -> bool:
    """Tell whether a model is a folder or a run of this machine."""
    return bool(model) and (Path(model).exists() or Path(split_reference(model)[0]).exists())


def cut_document(document: Document) -> Iterator[dict[str, str]]:
    """Cut a document into passages of about `PASSAGE_WORDS` words, named by document and number."""
    for number, words in enumerate(cut_words(document.text, PASSAGE_WORDS)):
        yield {"id": f"{document.id}#{number}", "text": join_words(words)}


def cutting_hash() -> str:
    """Hash the way in which texts are cut."""
    return content_hash(list(cut_document(Document("sample", SAMPLE))))[:16]


def build_index(text: str, model: str, index: Path, text_field: str) -> Index:
    """Embed all passages of the text. The folder appears whole, and replaces only what was built there before."""
    folder, target = Path(text).expanduser().resolve(), index.resolve()
    if target.is_relative_to(folder) and not any(part.startswith(".") for part in target.relative_to(folder).parts):
        raise InputError(f"{index} is inside of {text}, and would be searched too: give an index beside it")
    sources = find_text_sources([text])
    text_hash = hash_text(text, sources)  # before it is read: what changes meanwhile is another text
    with own_folder(index, "search index") as part:
        embedder = load_embedder(model)
        lines = array("q")
        with open(part / PASSAGES, "wb") as file, console.track("cut passages", None, "passages") as progress:
            for document in chain.from_iterable(read_documents(source, text_field) for source in sources):
                for passage in cut_document(document):
                    lines.append(file.tell())
                    file.write(json.dumps(passage, ensure_ascii=False).encode() + b"\n")
                    progress.advance(1)
        if not lines:
            raise InputError(f"{text} holds no text to search")
        np.save(part / LINES, np.array(lines, dtype=np.int64))
        manifest = IndexManifest(
            model=model,
            model_hash=hash_embedder(model),
            text=text,
            text_hash=text_hash,
            num_passages=len(lines),
            width=width_of(embedder),
            text_field=text_field,
            model_place=str(Path(model).absolute()) if is_here(model) else "",
            cutting=cutting_hash(),
            sources=[source.record_name for source in sources if source.path is None],
        )
        with console.track("index words", None, "passages"):
            words = index_bm25(read_passages(part))
            if words is not None:
                words.save(part / WORDS)
        path, shape_ND = part / VECTORS, (len(lines), width_of(embedder))
        unit = {"normalize_embeddings": embedder.similarity_fn_name == "cosine"}
        embed_to_file(embedder.encode_document, read_passages(part), shape_ND, path, "index", **unit)
        write_json(part / "index.json", manifest.model_dump())
    console.err.print(f"{index}: {len(lines):,} passages")
    return Index(index, manifest, embedder)


def read_passages(part: Path) -> Iterator[str]:
    """Yield the text of each passage."""
    with open(part / PASSAGES, "rb") as file:
        for line in file:
            yield json.loads(line)["text"]


def answer_question(index: Index, question: str, top: int) -> list[dict[str, Any]]:
    """Find the best passages by the model, and by BM25 over the same passages: a record for each."""
    folder, embedder = index.folder, index.embedder
    with reading(folder, "rebuild it"):
        lines_N = np.load(folder / LINES, mmap_mode="r", allow_pickle=False)
        rows_ND = np.load(folder / VECTORS, mmap_mode="c", allow_pickle=False)  # as tensors want to be writable
        words = open_bm25(folder / WORDS)
    is_cosine = embedder.similarity_fn_name == "cosine"
    query_1D = embedder.encode_query([question], normalize_embeddings=is_cosine, convert_to_tensor=True).cpu()
    [hits] = find_similar(embedder, query_1D, torch.from_numpy(rows_ND), top)
    hits_by_name = {index.manifest.model: hits, "BM25": query_bm25(words, [question], top)[0]}
    records = []
    with reading(folder / PASSAGES, "rebuild it"), open(folder / PASSAGES, "rb") as file:
        for name, ranked in hits_by_name.items():
            for rank, (number, value) in enumerate(ranked, start=1):
                file.seek(lines_N[number])
                records.append({"by": name, "rank": rank, "score": value, **json.loads(file.readline())})
    return records
