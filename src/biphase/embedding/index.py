"""A folder of documents and an embedding model → an index on disk, memory-mapped → passages for questions.

INDEX/  index.json  passages.jsonl  lines.npy (where each begins)  embeddings.npy (fp32, [N, D])  words/ (BM25's)

An index belongs to a model; one of another model is refused, never mixed. It follows its text: passages that it has not
are embedded, and BM25's part is built anew. Passages are found by BM25, by their embeddings, or by both, whose rankings
are fused; a cross-encoder may read the best of them again.

Letters: Q questions, N passages, D width.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification

from biphase import console
from biphase.config import Strict
from biphase.corpus.rows import Row
from biphase.corpus.text import (
    Document,
    TextSource,
    cut_words,
    find_text_sources,
    join_words,
    plain_value,
    read_documents,
    sample_language,
)
from biphase.embedding.model import embed_pieces, encode_batch, find_similar, hash_embedder, load_embedder, width_of
from biphase.embedding.pairs import hash_text
from biphase.embedding.questions import Condition, Request
from biphase.encoder.models import find_ranker
from biphase.encoder.network import load_weights
from biphase.encoder.search import fuse_rankings, in_pieces
from biphase.errors import InputError, clipped, told_as
from biphase.files import content_hash, own_folder, read_json_as, reading, refuse_damaged, write_json
from biphase.run import split_reference
from biphase.tasks.bm25 import index_bm25, open_bm25, query_bm25, stems_of

PASSAGES, LINES, VECTORS, WORDS = "passages.jsonl", "lines.npy", "embeddings.npy", "words"
PASSAGE_WORDS = 120
FUSED_PASSAGES = 100
"""Passages of each of the two rankings that are fused."""
RERANKED_PASSAGES = 50
"""Passages that a cross-encoder reads with the question."""
ALIKE = 0.9
"""Above this mean cosine, embeddings hardly tell passages apart: those of networks that were not trained for search."""
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
    language: str = ""
    """The language of BM25's words, which have its stems and no stop words; empty for words as they stand."""
    columns: tuple[str, ...] = ()
    """The columns that the documents have beside their text."""
    mean_cosine: float = 0.0
    """The mean cosine of two different passages."""


@dataclass(frozen=True)
class Index:
    """An index that was opened, and the place of the model that it was made with."""

    folder: Path
    manifest: IndexManifest
    model: str
    embedder: SentenceTransformer | None = None
    """The model, where it is loaded."""


def open_index(path: Path, model: str | None, text: str | None, text_field: str, language: str | None) -> Index:
    """Open an index, with the place of its model now; where its text is given and has changed, or a language that is
    not the index's, it is brought up to date first. Raises `InputError` where its model is another one or has changed,
    or its text would be cut into other passages."""
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
    is_other_language = language not in (None, manifest.language)
    differences = {
        f"by {manifest.model}, {other_model}": hash_embedder(model_path) != manifest.model_hash,
        f"of the field '{manifest.text_field}', not of '{text_field}'": bool(text) and is_other_field,
        "of passages that were cut in another way": manifest.cutting != cutting_hash(),
    }
    for difference, is_there in differences.items():
        if is_there:
            remedy = "rebuild it (--rebuild)" + ("" if text else f" from its text, {manifest.text}")
            raise InputError(f"{path} was made {difference}: {remedy}")
    if is_other_language and not text:
        told = f"{path} has the words of language '{manifest.language}', not of '{language}'"
        raise InputError(f"{told}: search its text, {manifest.text}, with that language")
    index = Index(path, manifest, model_path)
    if text and (has_changed or is_other_language):
        return build_index(text, model_path, path, text_field, language, index)
    if has_changed:
        console.err.print(f"{name} has changed since {path} was made of it: search {name}, and the index follows")
    return index


def is_here(model: str) -> bool:
    """Tell whether a model is a folder or a run of this machine."""
    return bool(model) and (Path(model).exists() or Path(split_reference(model)[0]).exists())


def cut_document(document: Document) -> Iterator[Row]:
    """Cut a document into passages of about `PASSAGE_WORDS` words, named by document and number, with its columns."""
    columns = {"columns": document.columns} if document.columns else {}
    for number, words in enumerate(cut_words(document.text, PASSAGE_WORDS)):
        yield {"id": f"{document.id}#{number}", "text": join_words(words), **columns}


def cutting_hash() -> str:
    """Hash the way in which texts are cut."""
    return content_hash(list(cut_document(Document("sample", SAMPLE))))[:16]


def build_index(
    text: str, model: str, index: Path, text_field: str, language: str | None, old: Index | None = None
) -> Index:
    """Embed the passages of the text, but for those that `old` has, the index of the text as it was. The folder appears
    whole, and replaces only what was built there before.

    Args:
        language: of stop words and stems; None for that of `old`, or the one that is found.
    """
    folder, target = Path(text).expanduser().resolve(), index.resolve()
    if target.is_relative_to(folder) and not any(part.startswith(".") for part in target.relative_to(folder).parts):
        raise InputError(f"{index} is inside of {text}, and would be searched too: give an index beside it")
    sources = find_text_sources([text])
    text_hash = hash_text(text, sources)  # before it is read: what changes meanwhile is another text
    with own_folder(index, "search index") as part:
        embedder = load_embedder(model)
        cut = write_passages(part, sources, text_field, old)
        num_passages, num_new = len(cut.old_numbers_N), int((cut.old_numbers_N < 0).sum())
        if not num_passages:
            raise InputError(f"{text} holds no text to search")
        if old is not None and num_new == num_passages:
            raise InputError(f"{index} was made of another text than {text} holds now: rebuild it (--rebuild)")
        if language is None:
            language = (old and old.manifest.language) or sample_language(read_texts(part), num_passages)
        with console.track("index words", None, "passages"):
            words = index_bm25(read_texts(part), stems_of(language))
            if words is not None:
                words.save(part / WORDS)
        rows_ND = embed_passages(part, embedder, cut.old_numbers_N, old)
        manifest = IndexManifest(
            model=model if old is None else old.manifest.model,
            model_hash=hash_embedder(model),
            text=text,
            text_hash=text_hash,
            num_passages=num_passages,
            width=width_of(embedder),
            text_field=text_field,
            model_place=str(Path(model).absolute()) if is_here(model) else "",
            cutting=cutting_hash(),
            sources=[source.record_name for source in sources if source.path is None],
            language=language,
            columns=cut.columns,
            mean_cosine=mean_cosine(rows_ND),
        )
        write_json(part / "index.json", manifest.model_dump())
    change = "" if old is None else f", {num_new:,} of them new"
    console.err.print(f"{index}: {num_passages:,} passages{change}; language of words: {language}")
    return Index(index, manifest, model, embedder)


@dataclass(frozen=True)
class CutPassages:
    """What is known of a text that was cut into passages."""

    old_numbers_N: np.ndarray
    """The number that each passage's text has in the index as it was before, or -1."""
    columns: tuple[str, ...]
    """The columns of the documents."""


def write_passages(part: Path, sources: Sequence[TextSource], text_field: str, old: Index | None) -> CutPassages:
    """Write the passages of a text, and where each begins."""
    old_texts = () if old is None else read_texts(old.folder)
    old_numbers = {hash_passage(text): number for number, text in enumerate(old_texts)}
    lines, numbers, columns = array("q"), array("q"), dict[str, None]()
    with open(part / PASSAGES, "wb") as file, console.track("cut passages", None, "passages") as progress:
        documents = (read_documents(source, text_field, with_columns=True) for source in sources)
        for document in chain.from_iterable(documents):
            columns |= dict.fromkeys(document.columns)
            for passage in cut_document(document):
                lines.append(file.tell())
                numbers.append(old_numbers.get(hash_passage(passage["text"]), -1))
                file.write(json.dumps(passage, ensure_ascii=False, default=plain_value).encode() + b"\n")
                progress.advance(1)
    np.save(part / LINES, np.array(lines, dtype=np.int64))
    return CutPassages(np.array(numbers, dtype=np.int64), tuple(columns))


def embed_passages(part: Path, embedder: SentenceTransformer, old_numbers_N: np.ndarray, old: Index | None) -> Any:
    """Write the embeddings of all passages: those of `old` are copied, others are made. Returns them, mapped into
    memory."""
    shape_ND = (len(old_numbers_N), width_of(embedder))
    rows_ND = np.lib.format.open_memmap(part / VECTORS, mode="w+", dtype=np.float32, shape=shape_ND)
    if old is not None:
        np.take(open_vectors(old.folder), old_numbers_N, axis=0, out=rows_ND, mode="clip")
    is_new_N = old_numbers_N < 0
    new_numbers, texts = np.flatnonzero(is_new_N), compress(read_texts(part), is_new_N)
    unit = {"normalize_embeddings": embedder.similarity_fn_name == "cosine"}
    begin = 0
    for piece_ND in embed_pieces(embedder.encode_document, texts, len(new_numbers), "index", **unit):
        rows_ND[new_numbers[begin : begin + len(piece_ND)]] = piece_ND.cpu().numpy()
        begin += len(piece_ND)
    rows_ND.flush()
    return rows_ND


def hash_passage(text: str) -> bytes:
    return sha256(text.encode()).digest()


def mean_cosine(rows_ND: np.ndarray) -> float:
    """Return the mean cosine of two different rows: the length of the sum of all, less each row with itself."""
    num_rows, sum_D = len(rows_ND), np.zeros(rows_ND.shape[1])
    for _, piece_ND in in_pieces(torch.from_numpy(rows_ND)):
        sum_D += torch.nn.functional.normalize(piece_ND.double(), dim=1).sum(0).numpy()
    return float((sum_D @ sum_D - num_rows) / (num_rows * (num_rows - 1))) if num_rows > 1 else 0.0


def read_passages(folder: Path) -> Iterator[Row]:
    """Yield the passages of an index: `id`, `text`, and `columns` where their document has some."""
    with reading(folder / PASSAGES, "rebuild it"), open(folder / PASSAGES, "rb") as file:
        yield from map(json.loads, file)


def read_texts(folder: Path) -> Iterator[str]:
    """Yield the text of each passage of an index."""
    return (passage["text"] for passage in read_passages(folder))


def open_vectors(folder: Path) -> np.ndarray:
    """Map the embeddings of an index into memory; to change them changes no file."""
    with reading(folder, "rebuild it"):
        return np.load(folder / VECTORS, mmap_mode="c", allow_pickle=False)  # as tensors want to be writable


def answer_request(index: Index, request: Request) -> list[Row]:
    """Find the best passages of each question: a row for each passage, with the columns of its document.

    Raises `InputError` for a condition on a column that no document has.
    """
    folder, manifest = index.folder, index.manifest
    name = {"bm25": "BM25", "embeddings": manifest.model, "both": f"{manifest.model} + BM25"}[request.by]
    hits_Q = rank_passages(index, request)
    ranker = None if request.ranker is None else load_ranker(request.ranker)
    answers: list[Row] = []
    with reading(folder, "rebuild it"), open(folder / PASSAGES, "rb") as file:
        lines_N = np.load(folder / LINES, mmap_mode="r", allow_pickle=False)
        for question, hits in zip(request.questions, hits_Q, strict=True):
            found: list[Row] = []
            for number, score in hits:
                file.seek(lines_N[number])
                found.append({"by": name, "rank": 0, "score": score, **json.loads(file.readline())})
            if ranker is not None:
                found = rank_again(ranker, str(request.ranker), question.text, found)
            named = {"question_id": question.id, "question": question.text} if question.id else {}
            for rank, passage in enumerate(found[: request.top], start=1):
                columns = passage.pop("columns", {})
                answer = named | passage | {"rank": rank}
                answers.append(answer | {column: columns[column] for column in columns if column not in answer})
    return answers


def rank_passages(index: Index, request: Request) -> list[list[tuple[int, float]]]:
    """Rank the passages for each question: numbers and scores, best first."""
    texts = [question.text for question in request.questions]
    is_searched_N = check_passages(index, request.conditions) if request.conditions else None
    num_hits = request.top if request.ranker is None else max(request.top, RERANKED_PASSAGES)
    num_each = max(num_hits, FUSED_PASSAGES) if request.by == "both" else num_hits
    rankings = []
    if request.by != "embeddings":
        with reading(index.folder / WORDS, "rebuild it"):
            words = open_bm25(index.folder / WORDS)
        rankings.append(query_bm25(words, texts, num_each, stems_of(index.manifest.language), is_searched_N))
    if request.by != "bm25":
        rankings.append(rank_by_embeddings(index, texts, num_each, is_searched_N))
    if request.by != "both":
        return rankings[0]
    return [fuse_rankings(pair, num_hits) for pair in zip(*rankings, strict=True)]


def check_passages(index: Index, conditions: Sequence[Condition]) -> np.ndarray:
    """Tell for each passage whether it meets the conditions. Raises `InputError` for one on a column that no document
    has."""
    for condition in conditions:
        if condition.column not in index.manifest.columns:
            names = clipped(", ".join(index.manifest.columns)) or "none"
            raise InputError(f"where: there is no column '{condition.column}'; the columns are: {names}")
    rows = (passage.get("columns", {}) for passage in read_passages(index.folder))
    is_searched_N = np.array([all(condition.holds(row) for condition in conditions) for row in rows])
    if not is_searched_N.any():
        console.err.print("no passage meets the conditions (--where)")
    return is_searched_N


def rank_by_embeddings(
    index: Index, questions: Sequence[str], top: int, is_searched_N: np.ndarray | None
) -> list[list[tuple[int, float]]]:
    """Find the passages nearest to each question by the model's similarity: numbers and scores, best first."""
    manifest = index.manifest
    if manifest.mean_cosine > ALIKE:
        told = f"the passages' mean cosine is {manifest.mean_cosine:.3f}: {manifest.model} hardly tells them apart"
        console.err.print(f"{told}; train it for search (biphase embed), or search by words alone (--by bm25)")
    embedder = load_embedder(index.model) if index.embedder is None else index.embedder
    rows_ND = open_vectors(index.folder)
    numbers_N = np.arange(len(rows_ND)) if is_searched_N is None else np.flatnonzero(is_searched_N)
    searched_ND = rows_ND if is_searched_N is None else rows_ND[numbers_N]  # indexed, it would be copied
    unit = {"normalize_embeddings": embedder.similarity_fn_name == "cosine"}
    queries_QD = encode_batch(embedder.encode_query, questions, **unit).cpu()
    hits_Q = find_similar(embedder, queries_QD, torch.from_numpy(searched_ND), top)
    return [[(int(numbers_N[number]), score) for number, score in hits] for hits in hits_Q]


def rank_again(ranker: CrossEncoder, name: str, question: str, passages: Sequence[Row]) -> list[Row]:
    """Order the best passages by the scores that a cross-encoder gives them. Raises `InputError` for scores that are no
    numbers."""
    best = passages[:RERANKED_PASSAGES]
    pairs = [(question, passage["text"]) for passage in best]
    scores: Any = ranker.predict(pairs, show_progress_bar=False) if pairs else []
    if not np.isfinite(scores).all():
        raise InputError(f"{name} gives scores that are no finite numbers; take it from where it is whole")
    scored = [passage | {"by": name, "score": float(score)} for passage, score in zip(best, scores, strict=True)]
    return sorted(scored, key=lambda passage: -passage["score"])


def load_ranker(name: str) -> CrossEncoder:
    """Load a cross-encoder that gives one score. Raises `InputError` for one that cannot be loaded, or lacks weights,
    which would be drawn at random."""
    folder = find_ranker(name)
    load_weights(AutoModelForSequenceClassification, folder, attention=None)
    with told_as(f"{name} is no cross-encoder that can be loaded"):
        return CrossEncoder(str(folder), trust_remote_code=False, model_kwargs={"dtype": torch.float32})
