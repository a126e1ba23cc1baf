"""A folder of documents and an embedding model → an index on disk, memory-mapped → passages for a question.

INDEX/  index.json  passages.jsonl  embeddings.npy (fp32, [N, D], unit length)

An index belongs to the model and the text that it was made of; one of another model is refused, never mixed.

Letters: N passages, D width, K answers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from biphase import console
from biphase.corpus.text import read_all
from biphase.corpus.words import cut_words, find_words, join_words
from biphase.embedding.folder import hash_embedder, load_embedder
from biphase.embedding.packed_module import ENCODE_TEXTS, width_of
from biphase.embedding.pairs import hash_text
from biphase.errors import InputError
from biphase.files import own_folder, read_json_as, write_json
from biphase.run import split_reference
from biphase.tasks.collection import search_bm25

PASSAGE_WORDS = 120
CHUNK_PASSAGES = 512
"""Passages that are embedded between two signs of progress."""


@dataclass(frozen=True)
class IndexManifest:
    """What an index was made of."""

    model: str
    model_hash: str
    text: str
    text_hash: str
    num_passages: int
    width: int
    text_field: str = "text"
    model_place: str = ""
    """Where the model is on this machine, from wherever it is asked for; empty for one of the hub."""


def is_index(path: Path) -> bool:
    return (path / "index.json").exists()


def open_index(path: Path, model: str | None, text: str | None, text_field: str = "text") -> IndexManifest:
    """What an index says of itself, and where its model is now. Raises `InputError` where its model or text is another
    one, or not as it was."""
    manifest = read_json_as(path / "index.json", IndexManifest, "delete the index and build it again")
    place = model or (manifest.model_place if is_here(manifest.model_place) else manifest.model)
    if hash_embedder(place) != manifest.model_hash:
        raise InputError(
            f"{path} was made by {manifest.model}"
            + (f", not by {model}" if model else ", which has changed since")
            + ": rebuild it"
        )
    if text is not None and manifest.text_hash != hash_text(text):
        raise InputError(f"{path} was made of another text than {text} holds now: rebuild it")
    if text is not None and manifest.text_field != text_field:
        raise InputError(f"{path} was made of the field '{manifest.text_field}', not of '{text_field}': rebuild it")
    return replace(manifest, model_place=place)


def is_here(model: str) -> bool:
    """Whether a model is a folder or a run of this machine."""
    return bool(model) and (Path(model).exists() or Path(split_reference(model)[0]).exists())


def build_index(text: str, model: str, index: Path, text_field: str = "text") -> IndexManifest:
    """Embed all passages of the text; the folder appears whole, and replaces only what was built there before."""
    passages = []  # of about `PASSAGE_WORDS` words, named by document and number
    for document in read_all([text], text_field):
        for number, passage in enumerate(cut_words(find_words(document.text), PASSAGE_WORDS)):
            passages.append((f"{document.id}#{number}", join_words(passage)))
    if not passages:
        raise InputError(f"{text} holds no text to search")
    embedder = load_embedder(model)
    width = width_of(embedder)
    manifest = IndexManifest(
        model=model,
        model_hash=hash_embedder(model),
        text=text,
        text_hash=hash_text(text),
        num_passages=len(passages),
        width=width,
        text_field=text_field,
        model_place=str(Path(model).absolute()) if is_here(model) else "",
    )
    with own_folder(index, "search index") as part:
        texts = [passage for _, passage in passages]
        embed_to_file(embedder.encode_document, texts, width, part / "embeddings.npy", "index")
        lines = (json.dumps({"id": id, "text": passage}, ensure_ascii=False) + "\n" for id, passage in passages)
        (part / "passages.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(part / "index.json", asdict(manifest))
    console.err.print(f"{index}: {len(passages):,} passages")
    return manifest


def embed_to_file(encode: Callable[..., Any], texts: Sequence[str], width: int, path: Path, label: str) -> np.ndarray:
    """Write the embeddings of texts, of length 1, piece by piece; returns them as [N, D], mapped into memory."""
    rows_ND = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(len(texts), width))
    with console.track(label, len(texts), "passages") as progress:
        for begin in range(0, len(texts), CHUNK_PASSAGES):
            piece = texts[begin : begin + CHUNK_PASSAGES]
            found = encode(piece, batch_size=ENCODE_TEXTS, normalize_embeddings=True, show_progress_bar=False)
            rows_ND[begin : begin + len(piece)] = found
            progress.advance(len(piece))
    rows_ND.flush()
    return rows_ND


def answer_question(index: Path, manifest: IndexManifest, question: str, top: int) -> list[dict[str, Any]]:
    """The best passages by the model, and by BM25 over the same passages: a record for each."""
    passages = [json.loads(line) for line in (index / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    rows_ND = np.load(index / "embeddings.npy", mmap_mode="r", allow_pickle=False)
    if len(passages) != manifest.num_passages or rows_ND.shape != (manifest.num_passages, manifest.width):
        raise InputError(f"{index} is damaged: passages and embeddings do not match; rebuild it")
    query_D = load_embedder(manifest.model_place or manifest.model).encode_query(question, normalize_embeddings=True)
    scores_N = rows_ND @ query_D
    best_K = np.argsort(-scores_N, kind="stable")[:top].tolist()
    found = {
        manifest.model: [(number, float(scores_N[number])) for number in best_K],
        "BM25": search_bm25([passage["text"] for passage in passages], [question], top)[0],
    }
    records = []
    for name, hits in found.items():
        for rank, (number, score) in enumerate(hits, start=1):
            records.append({"by": name, "rank": rank, "score": score, **passages[number]})
    return records
