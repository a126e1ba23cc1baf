"""A folder of documents and an embedding model → an index on disk, memory-mapped → passages for questions.

INDEX/  index.json  passages.jsonl  lines.npy (where each begins)  embeddings.npy (fp32, [N, D])  words/ (BM25's)

An index has the embeddings of one model and refuses any other, or none: BM25 alone ranks until a model adds them. It
follows its text: an update embeds new passages, and rebuilds BM25's part. BM25, the embeddings, or both rank the
passages; two rankings are fused. A cross-encoder may reorder the best. If embeddings do not find passages by their own
words, BM25 alone ranks.

Letters: Q questions, N passages, D width.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from glob import glob
from itertools import compress, islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification

from biphase import console
from biphase.config import Strict
from biphase.corpus.forms import Row
from biphase.corpus.rows import kind_of
from biphase.corpus.text import TextSource, cut_words, find_text_sources, join_words, sample_language
from biphase.corpus.tokenizer import load_auto_tokenizer
from biphase.embedding import model as embedders
from biphase.embedding.pairs import hash_text
from biphase.embedding.passages import (
    INDEX_REMEDY,
    LINES,
    PASSAGE_WORDS,
    PASSAGES,
    base_of,
    cutting_hash,
    document_of,
    place_of,
    read_texts,
    root_of,
    tell_text,
    write_passages,
)
from biphase.embedding.questions import ANSWER_COLUMNS, By, Filter, Request, UserQuestion, exact_number, read_request
from biphase.encoder.models import find_folder, find_ranker, unreplaced
from biphase.encoder.network import load_weights
from biphase.errors import InputError, clipped, first_of, told_as
from biphase.exporting.plain import list_module_files, read_embedder_file
from biphase.files import Stamp, content_hash, own_folder, read_json_as, reading, refuse_damaged, stamp_of, write_json
from biphase.run import split_reference
from biphase.tasks.bm25 import (
    FUSED_PASSAGES,
    Hit,
    fuse_rankings,
    fuse_with_words,
    index_bm25,
    open_bm25,
    query_bm25,
    searched_words,
    stems_of,
)

if TYPE_CHECKING:
    import pandas

Loaded = TypeVar("Loaded")
VECTORS, WORDS = "embeddings.npy", "words"
RERANKED_PASSAGES = 10
"""The number of passages that a cross-encoder reads with the question, or more if the user asks for more."""
LEAST_KNOWN = 0.5
"""The least share of the passages of a text in another place that its index must have to follow it there."""
TRIED_PASSAGES = 64
"""The number of passages to search by their own words, to see what embeddings are good for."""
TRIED_WORDS = 12
LEAST_FOUND = 0.7
"""The least share of these passages that embeddings find where fusing them in helps. An English model for English finds
0.72 to 0.95; models that found 0.52 of Turkish and 0.66 of German passages made the fused ranking worse than BM25."""


class IndexManifest(Strict):
    """The `index.json` of an index: its model, its text and the way it was built."""

    model: str
    """The name of the embedding model; empty for an index of words alone."""
    model_hash: str
    text: str
    """The path or the glob of the text, which earlier versions wrote as the user did, or a Hub data set."""
    text_hash: str
    num_passages: int
    width: int
    """The number of dimensions of an embedding."""
    text_field: str
    model_place: str
    """The path of the model on this machine; empty for a model of the Hub."""
    cutting: str = ""
    """The hash of some passages, which depends on how texts are cut."""
    sources: list[str]
    """The Hub data sets of the text, with their commits."""
    language: str = ""
    """The language whose stems and stop words BM25 uses; empty for plain words."""
    columns: tuple[str, ...] = ()
    """The columns of the documents beside their text."""
    has_cells: bool = False
    """Whether a column may be one of a .csv, where numbers are texts."""
    found_share: float = 1.0
    """The share of passages that embeddings find by their own words (`share_found`)."""


@dataclass(frozen=True)
class Index:
    """An open index."""

    folder: Path
    manifest: IndexManifest
    model: str
    """The path or Hub id of its model; empty for an index of words alone."""
    stamp: Stamp
    """The stamp of its `index.json`, from before it was read."""
    embedder: SentenceTransformer | None = None
    """Its model; None before it is loaded."""


def open_index(path: Path, model: str | None, text: str | None, text_field: str, language: str | None) -> Index:
    """Open an index. If `text` is given, update it first if it has changed or its language is not `language`. Raises
    `InputError` for another model, field or way to cut, and for another language without `text`."""
    # 1. The present state of its model and its text.
    with reading(path / "index.json", INDEX_REMEDY):
        stamp = stamp_of(path / "index.json")
    refuse_damaged(path, INDEX_REMEDY)
    manifest = read_json_as(path / "index.json", IndexManifest, INDEX_REMEDY)
    model_path = model or model_of(manifest)
    name = text or manifest.text
    named = tell_text(name, path)
    text_hash = manifest.text_hash
    if text or (not manifest.sources and (Path(name).exists() or glob(name, recursive=True))):
        try:
            text_hash = hash_named(name, find_text_sources([name], manifest.sources))
        except InputError as error:
            if text:
                raise
            console.err.print(f"{error}: {path} answers as it was built")
    # 2. Differences that only a rebuild removes.
    difference, instead = None, ""
    if manifest.model and embedders.hash_embedder(model_path) != manifest.model_hash:
        other_model = "which has changed since" if model in (None, manifest.model) else f"not by {model}"
        difference = f"by {manifest.model}, {other_model}"
    elif text and manifest.text_field != text_field:
        difference = f"of the field '{manifest.text_field}', not of '{text_field}'"
        instead = "leave --text-field out, or "
    elif manifest.cutting != cutting_hash(manifest.language):
        difference = "of passages that were cut in another way"
    if difference is not None:
        remedy = tell_rebuild(model_path if manifest.model else "") + ("" if text else f" from its text, {named}")
        raise InputError(f"{path} was made {difference}: {instead}{remedy}")
    # 3. Differences that an update removes.
    is_other_language = language not in (None, manifest.language)
    if is_other_language and not text:
        message = f"{path} has the words of language '{manifest.language}', not of '{language}'"
        raise InputError(f"{message}: search its text, {named}, with that language")
    lacks_vectors = model is not None and not manifest.model
    if lacks_vectors and not text:
        raise InputError(f"{path} has no embeddings: search its text, {named}, with {model}, which adds them")
    index = Index(path, manifest, model_path, stamp)
    has_changed = text_hash != manifest.text_hash
    if text and (has_changed or is_other_language or lacks_vectors):
        return build_index(text, model_path, path, text_field, language, index)
    if has_changed:
        console.err.print(f"{name} has changed since {path} was built: search {named}, and the index follows")
    return rename_text(index, text, text_field) if text else index


def rename_text(index: Index, text: str, text_field: str) -> Index:
    """Build an index again if the same text is in another place; return it as it is for a text of the Hub, and if its
    folder cannot be written."""
    if index.manifest.sources or base_of(text) == base_of(index.manifest.text):
        return index
    try:
        return build_index(text, index.model, index.folder, text_field, None, index)
    except OSError as error:
        console.err.print(f"{error}: {index.folder} answers as it was built, from {index.manifest.text}")
        return index


def is_here(model: str) -> bool:
    """Tell whether a name is a folder or a run on this machine."""
    return bool(model) and (Path(model).exists() or Path(split_reference(model)[0]).exists())


def rebuild_index(text: str, model: str | None, path: Path, text_field: str, language: str | None) -> Index:
    """Build an index again. It keeps its model and its language unless others are given."""
    manifest = read_json_as(path / "index.json", IndexManifest, INDEX_REMEDY)
    model = model or model_of(manifest)
    if model:
        find_folder(model)  # it may be gone
    return build_index(text, model, path, text_field, language or manifest.language or None)


def model_of(manifest: IndexManifest) -> str:
    """Return the path or Hub id of an index's model; empty for an index of words alone."""
    return manifest.model_place if is_here(manifest.model_place) else manifest.model


def build_index(
    text: str, model: str, index: Path, text_field: str, language: str | None, old: Index | None = None
) -> Index:
    """Build an index of the passages of a text. The folder appears whole, and replaces only an index.

    Args:
        model: the embedding model; empty for an index of words alone.
        language: the language of stop words and stems. None: the language of `old`, or of a sample of passages.
        old: the index of an earlier state of the text, whose embeddings are copied.
    """
    folder, target = Path(text).expanduser().resolve(), index.resolve()
    if target.is_relative_to(folder) and not any(name.startswith(".") for name in target.relative_to(folder).parts):
        raise InputError(f"{index} is inside {text}, and would be searched too: give an index beside it")
    sources = find_text_sources([text])
    text_hash = hash_named(text, sources)  # hashed before it is read: a change in between counts as another text
    with own_folder(index, "search index") as part:
        if old is not None:
            check_unreplaced(old)  # now, while no other call can write there
        # 1. Passages.
        model_hash, embedder = open_model(model) if model else ("", None)
        before = old.folder if old else None
        old_rows_N, columns, num_gone = write_passages(part, sources, text_field, root_of(text), before)
        num_passages, num_new = len(old_rows_N), int((old_rows_N < 0).sum())
        if not num_passages:
            raise InputError(f"{text} holds no text to search")
        if old is not None and place_of(text) != place_of(old.manifest.text):
            refuse_other_place(old, text, 1 - num_new / num_passages)
        # 2. BM25's words.
        if language is None:
            language = find_words_language(part, num_passages, old)
        with console.track("index words", None, "passages"):
            if (words := index_bm25(read_texts(part), stems_of(language))) is not None:
                words.save(part / WORDS)
        # 3. Embeddings.
        width, found_share = 0, 1.0
        if embedder is not None:
            vectors_ND = write_vectors(part, embedder, old_rows_N, old)
            width, found_share = vectors_ND.shape[1], share_found(embedder, vectors_ND, read_texts(part))
        manifest = IndexManifest(
            model=old.manifest.model if old is not None and old.manifest.model else model,
            model_hash=model_hash,
            text=str(Path(text).expanduser().absolute()) if all(source.path for source in sources) else text,
            text_hash=text_hash,
            num_passages=num_passages,
            width=width,
            text_field=text_field,
            model_place=str(Path(model).absolute()) if is_here(model) else "",
            cutting=cutting_hash(language),
            sources=[source.record_name for source in sources if source.path is None],
            language=language,
            columns=columns,
            has_cells=any(source.path is not None and kind_of(Path(source.name)) == "csv" for source in sources),
            found_share=found_share,
        )
        write_json(part / "index.json", manifest.model_dump())
        stamp = stamp_of(part / "index.json")
    change = tell_change(num_new, num_gone) if old is not None else ""
    alone = "" if model else "; words alone rank them until you name an embedding model (--model)"
    console.err.print(f"{index}: {num_passages:,} passages{change}; BM25 language: {language}{alone}")
    return Index(index, manifest, model, stamp, embedder)


def refuse_other_place(old: Index, text: str, known_share: float) -> None:
    """Raise `InputError` for a text in another place than that of an index, unless the index has most of its passages
    (`known_share`), as after a move."""
    if known_share < LEAST_KNOWN:
        has = f"was made from {old.manifest.text}, and has {known_share:.0%} of the passages of {text}"
        remedy = "give this text an index of its own (--index)"
        raise InputError(f"{old.folder} {has}: {remedy}, or {tell_rebuild(old.model)}")


def hash_named(text: str, sources: Sequence[TextSource]) -> str:
    """Hash a text, and behind a glob the names of its files too, because documents without an id are called by them."""
    content = hash_text(text, sources)
    if Path(text).expanduser().exists() or not all(source.path for source in sources):
        return content
    return content_hash([content, *(os.path.relpath(source.name, root_of(text)) for source in sources)])


def tell_rebuild(model: str) -> str:
    """Write the remedy for an index that cannot be updated, with the model of its embeddings."""
    return f"rebuild it (--rebuild{f' --model {model}' if model else ''})"


def tell_change(num_new: int, num_gone: int) -> str:
    """Write how many passages of an updated index are new, and how many earlier ones are gone."""
    return f", {num_new:,} of them new" + (f"; {num_gone:,} earlier ones are gone" if num_gone > 0 else "")


def find_words_language(part: Path, num_passages: int, old: Index | None) -> str:
    """Find the language of BM25's words: that of the old index, else that of a sample of passages, or `none` without
    stems and stop words. Prints a line if the passages of an update are in another language."""
    found = sample_language(read_texts(part), num_passages)
    found = "none" if stems_of(found) is searched_words else found
    language = found if old is None else old.manifest.language
    if language != found != "none":
        console.err.print(f"the text is in '{found}' now; BM25's language stays '{language}' (--language {found})")
    return language


def write_vectors(part: Path, embedder: SentenceTransformer, old_rows_N: np.ndarray, old: Index | None) -> np.ndarray:
    """Write the embeddings of the passages of an index, [N, D]: copies from the old index, if it has any, then the
    others."""
    vectors_ND = embedders.create_vectors(part / VECTORS, len(old_rows_N), embedders.width_of(embedder))
    if old is not None and old.manifest.model:
        np.take(open_vectors(old.folder), old_rows_N, axis=0, out=vectors_ND, mode="clip")
    else:
        old_rows_N = np.full_like(old_rows_N, -1)
    encode, new_texts = embedders.fast_encoder_of(embedder, "document"), compress(read_texts(part), old_rows_N < 0)
    embedders.embed_into(vectors_ND, np.flatnonzero(old_rows_N < 0), encode, new_texts, "index")
    embedders.tell_cut(embedder, read_texts(part), len(vectors_ND))
    return vectors_ND


def share_found(embedder: SentenceTransformer, vectors_ND: np.ndarray, texts: Iterator[str]) -> float:
    """Search some passages by their own words (a dozen from the middle, at most half of the passage), and return the
    share that ranks first among these passages. Every index tries the same number, at equal distances, so its size does
    not matter."""
    step = max(1, len(vectors_ND) // TRIED_PASSAGES)
    tried = np.arange(len(vectors_ND))[::step][:TRIED_PASSAGES]
    questions = []
    for text in islice(texts, 0, step * len(tried), step):
        words = next(iter(cut_words(text, PASSAGE_WORDS)))
        middle = len(words) // 2
        questions.append(join_words(words[middle : middle + max(1, min(TRIED_WORDS, middle))]))
    queries_QD = embedders.encode_batch(embedders.fast_encoder_of(embedder, "query"), questions).cpu()
    hits_Q = embedders.find_similar(embedder, queries_QD, torch.from_numpy(vectors_ND), 1, tried)
    return float(np.mean([row == hit for row, [(hit, _)] in zip(tried, hits_Q, strict=True)]))


def open_vectors(folder: Path) -> np.ndarray:
    """Map the embeddings of an index into memory. Changes to them reach no file."""
    with reading(folder, "rebuild it"):
        return np.load(folder / VECTORS, mmap_mode="c", allow_pickle=False)  # torch expects writable arrays


@dataclass(frozen=True)
class IndexFiles:
    """The open files of one state of an index, which stays the same while another process updates the folder."""

    lines: mmap
    """The passages, one on each line."""
    offsets_N: np.ndarray
    """The offset of each passage's line."""
    vectors_ND: np.ndarray | None
    """The embeddings; None in an index of words alone."""
    words: Any
    """BM25's part; None without words."""

    def read(self, row: int) -> Row:
        """Read a passage."""
        begin, end = self.offsets_N[row], self.offsets_N[row + 1] if row + 1 < len(self.offsets_N) else None
        return json.loads(self.lines[begin:end])


def check_unreplaced(index: Index) -> None:
    """Raise `InputError` if an index was replaced since `open_index` read its manifest."""
    with reading(index.folder, "rebuild it"):
        if stamp_of(index.folder / "index.json") != index.stamp:
            raise InputError(f"{index.folder} was replaced while it was opened: run the command again")


def open_files(index: Index) -> IndexFiles:
    """Open all files of an index. Raises `InputError` if it was replaced since `open_index` read its manifest."""
    folder = index.folder
    with reading(folder, "rebuild it"):
        with open(folder / PASSAGES, "rb") as file:
            lines = mmap(file.fileno(), 0, access=ACCESS_READ)
        offsets_N = np.load(folder / LINES, mmap_mode="r", allow_pickle=False)
        vectors_ND = open_vectors(folder) if index.manifest.model else None
        files = IndexFiles(lines, offsets_N, vectors_ND, open_bm25(folder / WORDS))
        check_unreplaced(index)
    return files


def load_once(load: Callable[..., Loaded]) -> Callable[..., Loaded]:
    """Let several threads load a model once, not each a copy of its own."""
    cached, lock = cache(load), Lock()

    def load_or_wait(*names: str) -> Loaded:
        with lock:
            return cached(*names)

    return load_or_wait


class Searcher:
    """An open index whose files and models stay in memory. It answers from the state of the index that it opened, and
    several threads may ask it at the same time."""

    def __init__(self, index: Index) -> None:
        files = open_files(index)
        self.index, self.files = index, files
        self.settle_by = cache(partial(settle_by, index, files))
        self.check_passages = lru_cache(maxsize=8)(partial(check_passages, index, files))
        self.load_embedder = load_once(lambda: index.embedder or load_index_model(index))
        self.load_ranker = load_once(load_ranker)

    def search(
        self,
        question: str | None = None,
        *,
        questions: Any = None,
        by: By | None = None,
        rerank: Any = None,
        where: Sequence[str] | str | None = None,
        documents: bool = False,
        top: int = 5,
    ) -> "pandas.DataFrame":
        """Find passages, as `biphase.search` does, whose arguments these are."""
        return self.tabulate(read_request(question, questions, top, by, where, rerank, documents))

    def tabulate(self, request: Request) -> "pandas.DataFrame":
        """Find the best passages of each question, as a table, which has its columns without a passage too."""
        import pandas

        found = pandas.DataFrame(self.answer(request), dtype=object)
        # Integers with gaps stay as they are: pandas would make them floats, in which large ones lose digits.
        kinds = {name: pandas.api.types.infer_dtype(found[name]) for name in found}
        inferred = [name for name, kind in kinds.items() if kind != "integer" or found[name].notna().all()]
        found[inferred] = found[inferred].infer_objects()
        first = 0 if request.questions[0].id else ANSWER_COLUMNS.index("by")
        further = [name for name in self.index.manifest.columns if name not in ANSWER_COLUMNS]
        return found if len(found) else found.reindex(columns=[*ANSWER_COLUMNS[first:], *further])

    def answer(self, request: Request) -> list[Row]:
        """Find the best passages of each question: a row for each passage, with the columns of its document. Raises
        `InputError` for a filter on a column that no document has."""
        # 1. Rank. A cross-encoder orders more than it has to return.
        model, by = self.index.manifest.model, self.settle_by(request.by)
        name = {"bm25": "BM25", "embeddings": model, "both": f"{model} + BM25"}[by]
        num_hits = request.top if request.ranker is None else max(request.top, RERANKED_PASSAGES)
        hits_Q = (self.rank_documents if request.documents else self.rank)(request, by, num_hits)
        lost = [question.text for question, hits in zip(request.questions, hits_Q, strict=True) if not hits]
        if not request.filters:
            tell_lost(lost, self.index.manifest.language)
        elif not self.check_passages(tuple(request.filters)).any():
            console.err.print("no passage meets the filters (--where)")
        ranker = None if request.ranker is None else self.load_ranker(request.ranker)
        # 2. Read the passages, reorder them, and give each its rank.
        answers: list[Row] = []
        for question, hits in zip(request.questions, hits_Q, strict=True):
            with reading(self.index.folder, "rebuild it"):
                passages = [{"by": name, "rank": 0, "score": score, **self.files.read(row)} for row, score in hits]
            if ranker is not None:
                passages = rank_again(ranker, str(request.ranker), question.text, passages)
            named = {"question_id": question.id, "question": question.text} if question.id else {}
            for rank, passage in enumerate(passages[: request.top], start=1):
                columns = passage.pop("columns", {})
                if request.documents:
                    passage["id"] = document_of(passage)
                answer = named | passage | {"rank": rank}
                answers.append(answer | {name: value for name, value in columns.items() if name not in ANSWER_COLUMNS})
        return answers

    def rank_documents(self, request: Request, by: By, num_hits: int) -> list[list[Hit]]:
        """Rank the documents for each question: the rows and scores of their best passages, best first."""
        queries_QD = None if by == "bm25" else self.embed(request.questions)
        hits_Q: list[list[Hit]] = [[] for _ in request.questions]
        asked, num_passages = [*range(len(hits_Q))], num_hits
        while asked:
            num_passages *= 4  # until each question has enough documents or all its passages
            part = replace(request, questions=[request.questions[index] for index in asked])
            passages_Q = self.rank(part, by, num_passages, None if queries_QD is None else queries_QD[asked])
            needing = []
            for index, hits in zip(asked, passages_Q, strict=True):
                best = dict[str, Hit]()
                for row, score in hits:
                    best.setdefault(document_of(self.files.read(row)), (row, score))
                hits_Q[index] = [*best.values()][:num_hits]
                needing += [index] if len(best) < num_hits and len(hits) == num_passages else []
            asked = needing
        return hits_Q

    def embed(self, questions: Sequence[UserQuestion]) -> torch.Tensor:
        """Embed questions, [Q, D]."""
        encode = embedders.fast_encoder_of(self.load_embedder(), "query")
        return embedders.encode_batch(encode, [question.text for question in questions]).cpu()

    def rank(self, request: Request, by: By, num_hits: int, queries_QD: torch.Tensor | None = None) -> list[list[Hit]]:
        """Rank the passages for each question: their rows in the index and scores, best first. `queries_QD`: the
        embeddings of the questions, if the caller has them."""
        files, texts = self.files, [question.text for question in request.questions]
        is_searched_N = self.check_passages(tuple(request.filters)) if request.filters else None
        find_words = stems_of(self.index.manifest.language)
        if by == "bm25":
            return query_bm25(files.words, texts, num_hits, find_words, is_searched_N)
        queries_QD = self.embed(request.questions) if queries_QD is None else queries_QD
        searched = None if is_searched_N is None else np.flatnonzero(is_searched_N)
        vectors_ND = torch.from_numpy(files.vectors_ND)
        num_nearest = num_hits if by == "embeddings" else max(num_hits, FUSED_PASSAGES)
        nearest_Q = embedders.find_similar(self.load_embedder(), queries_QD, vectors_ND, num_nearest, searched)
        if by == "embeddings":
            return nearest_Q
        return fuse_with_words(files.words, texts, nearest_Q, num_hits, find_words, is_searched_N)


def tell_lost(questions: Sequence[str], language: str) -> None:
    """Print the questions without a passage, and why they have none."""
    find_words = stems_of(language)
    stopped = [text for text in questions if searched_words(text) and not find_words(text)]
    unknown = [text for text in questions if text not in stopped]
    only_stops = f"has only stop words of '{language}'; search its text again with --language none"
    no_passage = "no passage has a word of this question; words of one character are not searched"
    for texts, told in ((stopped, only_stops), (unknown, no_passage)):
        if texts:
            console.err.print(f"{first_of([*map(repr, texts)])}: {told}")


def settle_by(index: Index, files: IndexFiles, by: By | None) -> By:
    """Choose the ranking: the user's choice, else both, or BM25 alone without embeddings, or if they find too few
    passages by their own words. Prints a line about such embeddings. Raises `InputError` for missing ones."""
    if not index.manifest.model:
        if by in (None, "bm25"):
            return "bm25"
        named = tell_text(index.manifest.text, index.folder)
        raise InputError(
            f"{index.folder} has no embeddings: search its text, {named}, with an embedding model (--model)"
        )
    found_share = index.manifest.found_share
    if by == "bm25" or found_share >= LEAST_FOUND or files.words is None:
        return by or "both"
    done = "so words alone rank (--by both: both)" if by is None else "words alone may rank better (--by bm25)"
    message = f"{index.manifest.model} finds {found_share:.0%} of passages by words of their own"
    console.err.print(f"{message}, fewer than {LEAST_FOUND:.0%}, {done}; train it for search (biphase embed)")
    return by or "bm25"


def open_model(name: str) -> tuple[str, SentenceTransformer]:
    """Load an embedding model, with its hash."""
    with unreplaced(find_folder(name)):
        return embedders.hash_embedder(name), embedders.load_for_inference(name)


def load_index_model(index: Index) -> SentenceTransformer:
    """Load the model of an index. Raises `InputError` if it has changed since the index was opened."""
    with unreplaced(find_folder(index.model)):
        if embedders.hash_embedder(index.model) != index.manifest.model_hash:
            raise InputError(f"{index.model} was replaced after {index.folder} was opened: run the command again")
        return embedders.load_for_inference(index.model)


def check_passages(index: Index, files: IndexFiles, filters: Sequence[Filter]) -> np.ndarray:
    """Tell which passages meet the filters, [N]. Prints a line about values that are compared by size, but are not
    numbers. Raises `InputError` for a column that no document has."""
    for wanted in filters:
        if wanted.column not in index.manifest.columns:
            names = clipped(", ".join(index.manifest.columns)) or "none"
            raise InputError(f"where: there is no column '{wanted.column}'; the columns are: {names}")
    texts_of: dict[str, list[Any]] = {wanted.column: [] for wanted in filters if wanted.sign not in ("=", "!=")}
    meets_N = np.zeros(len(files.offsets_N), dtype=bool)
    for row in range(len(meets_N)):
        columns = files.read(row).get("columns", {})
        meets_N[row] = all(wanted.holds(columns, has_cells=index.manifest.has_cells) for wanted in filters)
        for name in texts_of.keys() & columns.keys():
            if exact_number(columns[name]) is None:
                texts_of[name].append(columns[name])
    for name, texts in texts_of.items():
        if texts:
            share = f"in {len(texts):,} of {len(meets_N):,} passages, '{name}' is not a number"
            console.err.print(f"where: {share}, first {clipped(repr(texts[0]))}; they are left out")
    return meets_N


def rank_again(ranker: CrossEncoder, name: str, question: str, passages: Sequence[Row]) -> list[Row]:
    """Order passages by the mean of two scores, each scaled to 0..1: their score so far and a cross-encoder's. Raises
    `InputError` for scores that are not numbers."""
    texts = [passage["text"] for passage in passages]
    ranked = ranker.rank(question, texts, show_progress_bar=False) if texts else []
    if not all(np.isfinite(hit["score"]) for hit in ranked):
        raise InputError(f"{name} gives scores that are not finite numbers; copy it again from an intact one")
    given = [(index, passage["score"]) for index, passage in enumerate(passages)]
    fused = fuse_rankings(given, [(int(hit["corpus_id"]), float(hit["score"])) for hit in ranked])
    return [passages[index] | {"by": f"{passages[index]['by']} + {name}", "score": score} for index, score in fused]


def load_ranker(name: str) -> CrossEncoder:
    """Load a cross-encoder that gives one score. Raises `InputError` for one that cannot be loaded, or lacks weights,
    because these would be random."""
    with unreplaced(find_ranker(name)) as folder:
        list_module_files(folder)
        read_embedder_file(folder)
        load_weights(AutoModelForSequenceClassification, folder, attention=None)
        load_auto_tokenizer(folder)
        settings: Any = {"dtype": torch.float32, "use_safetensors": True}
        with told_as(f"{name} cannot be loaded as a cross-encoder"):
            return CrossEncoder(str(folder), trust_remote_code=False, model_kwargs=settings)
