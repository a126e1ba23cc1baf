"""Rows of a retrieval task → its documents, queries and judgements, checked, in splits that are published or drawn;
and what BM25 finds in them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase import console
from biphase.corpus.readers import find_field
from biphase.corpus.words import searched_words
from biphase.errors import InputError
from biphase.tasks.drawing import Judgements, draw_queries
from biphase.tasks.sources import PartName, TaskSource, column, own_name, read_rows, text_column
from biphase.tasks.spec import EvaluatedSplit, Task, TaskSplit


@dataclass(frozen=True)
class Collection:
    """Documents, the queries that are judged, and the judgements, of a retrieval task. Texts have no prefixes."""

    task: Task
    source: str
    documents: dict[str, str]
    queries: dict[str, str]
    train: tuple[tuple[str, str], ...]
    """(query id, relevant document id); empty where the task is trained on another one."""
    relevance: dict[EvaluatedSplit, Judgements]
    """Every judgement of the queries that are evaluated, of grade 0 and below too."""
    judged_documents: dict[EvaluatedSplit, tuple[str, ...]]
    """The documents that a judgement of the split names, whether its query is evaluated or not."""
    left_out: int
    """Queries of train without a relevant document."""


def load_collection(source: TaskSource, judged_only: bool) -> Collection:
    task = source.task
    # 1. Judgements, whose queries are drawn into splits where the source has no such split.
    judged = {split: read_judgements(source, split) for split in source.splits}
    for split, judgements in judged.items():
        if not judgements:
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no judgements")
    judged = draw_queries(source, judged)
    # 2. The texts that they name.
    queries, documents = read_judged_texts(source, judged, judged_only)
    # 3. Pairs to train on. A query without a relevant document gives none; no split may have such queries alone.
    pairs: dict[TaskSplit, list[tuple[str, str]]] = {"train": []}
    for split, judgements in judged.items():
        pairs[split] = []
        for query, grades in judgements.items():
            pairs[split] += [(query, document) for document, grade in grades.items() if grade > 0]
        if not pairs[split]:
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no relevant document")
    return Collection(
        task=task,
        source=source.name,
        documents=documents,
        queries=queries,
        train=tuple(pairs["train"]),
        relevance={"validation": judged["validation"], "test": judged["test"]},
        judged_documents={"validation": named_documents(judged["validation"]), "test": named_documents(judged["test"])},
        left_out=len(judged.get("train", {})) - len({query for query, _ in pairs["train"]}),
    )


def read_judgements(source: TaskSource, split: TaskSplit) -> Judgements:
    judgements: Judgements = {}
    for place, row in read_rows(source, split):
        assert row is not None
        query, document = (str(column(source, place, row, name)) for name in ("query-id", "corpus-id"))
        value = column(source, place, row, "score")
        try:
            grade = int(value)
        except (TypeError, ValueError, OverflowError):
            grade = None
        # Where a grade needs more than 31 bits, pytrec_eval scores 0 in silence.
        if grade is None or (isinstance(value, float) and value != grade) or abs(grade) >= 2**31 - 1:
            raise InputError(f"{place}: grade {value!r} is not a whole number of 31 bits")
        if judgements.setdefault(query, {}).setdefault(document, grade) != grade:
            raise InputError(f"{place}: document '{document}' has two grades for query '{query}'")
    return judgements


def named_documents(judgements: Judgements) -> tuple[str, ...]:
    """The documents that judgements name, each once, in their order."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(judgements.values())))


def read_judged_texts(
    source: TaskSource, judged: Mapping[TaskSplit, Judgements], judged_only: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The queries that are judged, and all documents or those that judgements name."""
    wanted = {query for judgements in judged.values() for query in judgements}
    named = {document for judgements in judged.values() for document in named_documents(judgements)}
    queries = read_texts(source, "queries", wanted)
    documents = read_texts(source, "corpus", named if judged_only else None)
    check_known(source, "query", wanted, queries)
    check_known(source, "document", named, documents)
    return queries, documents


def read_texts(source: TaskSource, part: PartName, wanted: Set[str] | None) -> dict[str, str]:
    """Texts by id, of all rows or of those that are wanted; a title goes before its text."""
    texts: dict[str, str] = {}
    with console.track(f"read {source.task.name} {part}", None, "rows") as progress:
        for number, (place, row) in enumerate(read_rows(source, part), start=1):
            assert row is not None
            id = str(column(source, place, row, "_id"))
            if number % 10_000 == 0:
                progress.advance(10_000)
            if wanted is not None and id not in wanted:
                continue
            text = text_column(source, place, row, "text")
            if find_field(row, own_name(source, "title")):
                text = f"{text_column(source, place, row, 'title')} {text}"
            if texts.setdefault(id, text.strip()) != text.strip():
                raise InputError(f"{place}: a second text with the id '{id}'")
    return texts


def check_known(source: TaskSource, kind: str, judged: Set[str], texts: Mapping[str, str]) -> None:
    """Every judged query or document has its text."""
    missing = judged - texts.keys()
    if not missing:
        return
    name = {"query": "query-id", "document": "corpus-id"}[kind]
    for split in source.splits:
        for place, row in read_rows(source, split):
            assert row is not None
            id = str(column(source, place, row, name))
            if id in missing:
                raise InputError(f"{place}: a judgement of {kind} '{id}', which {source.name} does not have")
    raise AssertionError("what is missing stands in a judgement")


def own_documents(
    queries: Mapping[str, str], documents: Mapping[str, str], relevance: Mapping[str, Mapping[str, int]]
) -> frozenset[str]:
    """The queries that are documents too, and would find themselves: the same id and the same text, a title before it
    aside, and no judgement that this is relevant. An id alone may be a number that coincides."""

    def is_itself(id: str) -> bool:
        query, document = (" ".join(texts[id].split()) for texts in (queries, documents))
        return f" {document}".endswith(f" {query}") and relevance.get(id, {}).get(id, 0) <= 0

    return frozenset(id for id in queries.keys() & documents.keys() if is_itself(id))


def search_bm25(documents: Iterable[str], queries: Sequence[str], top: int) -> list[list[tuple[int, float]]]:
    """The best documents of each query by their numbers, best first; those without a word of it are left out."""
    return query_bm25(index_bm25(documents), queries, top)


def index_bm25(documents: Iterable[str]) -> Any:
    """What bm25s searches in; None where no document has a word."""
    bm25s = load_bm25s()
    vocab: dict[str, int] = {}
    ids = [[vocab.setdefault(word, len(vocab)) for word in searched_words(text)] for text in documents]
    if not vocab:
        return None
    retriever = bm25s.BM25()
    retriever.index((ids, vocab), show_progress=False)
    return retriever


def open_bm25(folder: Path) -> Any:
    """What `index_bm25` gave and its `save` wrote, mapped into memory; None where there is no such folder."""
    own = {"backend": "auto"}  # the machine that wrote it may have had another one
    return load_bm25s().BM25.load(folder, mmap=True, override_params=own) if folder.exists() else None


def load_bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError:
        raise InputError("BM25 needs bm25s: pip install 'biphase[embeddings]'") from None
    return bm25s


def query_bm25(retriever: Any, queries: Sequence[str], top: int) -> list[list[tuple[int, float]]]:
    if retriever is None:
        return [[] for _ in queries]
    words = [searched_words(query) for query in queries]
    most = min(top, retriever.scores["num_docs"])
    numbers_QK, scores_QK = retriever.retrieve(words, k=most, show_progress=False)
    found = []
    for numbers, scores in zip(numbers_QK.tolist(), scores_QK.tolist(), strict=True):
        found.append([(number, score) for number, score in zip(numbers, scores, strict=True) if score > 0])
    return found
