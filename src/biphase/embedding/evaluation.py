"""An embedding model, BM25 or a search index, and judged texts → scores, without training on these texts.

In a folder of BEIR's layout, all documents are searched for each query of the test judgements; for an index, its own
documents. A file of scored pairs is a similarity task (STS). MTEB's own code runs its own tasks.

Letters: Q queries, N documents, D width.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim

from biphase import console
from biphase.corpus.text import sample_language
from biphase.embedding.index import Searcher
from biphase.embedding.model import embed_texts, encoder_of, find_similar, hash_embedder
from biphase.embedding.pairs import UnclearPairsError, read_pairs
from biphase.embedding.passages import document_of, read_passages
from biphase.embedding.questions import By, Request, UserQuestion
from biphase.embedding.recipe import PairSource, set_name
from biphase.errors import InputError, told_as
from biphase.files import content_hash
from biphase.finetuning.metrics import Judgement, judge_ranking, score_rows
from biphase.tasks.bm25 import Hit, fuse_with_words, index_bm25, query_bm25, stems_of
from biphase.tasks.families import KINDS
from biphase.tasks.sources import TaskSource, find_source
from biphase.tasks.spec import FileLayout, Task
from biphase.tasks.splits import Judgements, own_documents, read_judged_texts, read_judgements, read_named_texts

KEPT_DOCUMENTS = 100
"""The documents per query that the metrics need."""


@dataclass(frozen=True)
class JudgedSet:
    """Texts with judgements: documents that are relevant to queries, or pairs with a score."""

    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    """The queries that have judgements."""
    relevance: dict[str, dict[str, int]]
    pairs: list[tuple[str, str, float]]

    @cached_property
    def query_documents(self) -> frozenset[str]:
        """The queries that are also documents: such a query's hits leave out the query itself."""
        return own_documents(self.queries, self.documents, self.relevance)

    @property
    def metric(self) -> str:
        """The name of the main metric."""
        return "spearman" if self.pairs else "ndcg_at_10"


def read_judged_set(path: Path) -> JudgedSet:
    """Read a folder in BEIR's layout, as for a retrieval task, or a file of scored pairs. Raises `InputError` for a
    path that is neither, or has no judgement."""
    if not path.is_dir():
        remedy = "call its columns sentence1, sentence2 and score"
        try:
            pairs = read_pairs(PairSource(path=str(path)), seed=0)
        except UnclearPairsError as error:
            raise InputError(f"{error.args[0]} {remedy}") from None
        if pairs.kind != "scored":
            raise InputError(f"{path}: no scored pairs: {remedy}")
        return JudgedSet(set_name(str(path)), {}, {}, {}, [(row[0], row[1], row[2]) for row in pairs.rows])
    source, relevance = open_judged(path, FileLayout(test="qrels/test.tsv"))
    queries, documents = read_judged_texts(source, {"test": relevance}, judged_only=False)
    return JudgedSet(set_name(str(path)), documents, queries, relevance, [])


def open_judged(path: Path, layout: FileLayout) -> tuple[TaskSource, Judgements]:
    """Open a folder in BEIR's layout, and read its test judgements."""
    source = find_source(Task(name="BEIR", family="retrieval", metric="ndcg_at_10", files=(layout,)), path)
    relevance = read_judgements(source, "test")
    if all(grade <= 0 for grades in relevance.values() for grade in grades.values()):
        raise InputError(f"{path / 'qrels/test.tsv'}: no document is relevant to any query: all scores would be 0")
    return source, relevance


def read_judged_questions(path: Path, searcher: Searcher) -> JudgedSet:
    """Read the queries and judgements of a folder in BEIR's layout, for the documents of an index. A document that the
    index lacks, such as an empty one, counts as not found. Raises `InputError` if it lacks all."""
    if not path.is_dir():
        raise InputError(f"{path}: an index is judged by a folder with queries.jsonl and qrels/test.tsv")
    # Its corpus, if it has one, is not read, so any file may take its place.
    source, relevance = open_judged(path, FileLayout(test="qrels/test.tsv", corpus="queries.jsonl"))
    queries = read_named_texts(source, "queries", relevance.keys())
    # Only the text of a document that has a query's id matters, to tell whether it is the query.
    documents = dict[str, str]()
    for passage in read_passages(searcher.index.folder):
        id = document_of(passage)
        documents[id] = f"{documents.get(id, '')} {passage['text']}".strip() if id in queries else ""
    judged = {id for grades in relevance.values() for id in grades}
    if missing := judged - documents.keys():
        share = f"{len(missing):,} of {len(judged):,} judged documents"
        lack = f"{searcher.index.folder} lacks {share}, such as '{min(missing)}'"
        if missing == judged:
            raise InputError(f"{lack}: {path} judges other documents, or under other ids")
        console.err.print(f"{lack}; they count as not found")
    return JudgedSet(set_name(str(path)), documents, queries, relevance, [])


def score_index(searcher: Searcher, dataset: JudgedSet) -> dict[str, dict[str, float]]:
    """Score the answers of an index, documents by their best passages, for each way to rank them."""
    numbers = {id: number for number, id in enumerate(dataset.documents)}
    questions = [UserQuestion(id, text) for id, text in dataset.queries.items()]
    scores = {}
    ways: tuple[By, ...] = get_args(By) if searcher.index.manifest.model else ("bm25",)
    for by in ways:
        request = Request(questions, num_searched(dataset), by, (), None, documents=True)
        hits_Q = searcher.rank_documents(request, by, request.top)
        found = [[(numbers[document_of(searcher.files.read(row))], score) for row, score in hits] for hits in hits_Q]
        scores[f"{searcher.index.folder.name}, {by}"] = retrieval_scores(dataset, by_rank(found))[0]
    return scores


def score_arms(models: Mapping[str, SentenceTransformer], dataset: JudgedSet) -> dict[str, dict[str, float]]:
    """Score models, by name. If there are documents to find, also score BM25, and each model fused with BM25 as
    `biphase search` fuses them."""
    if dataset.pairs:
        return {name: score_embedder(model, dataset)[0] for name, model in models.items()}
    ranked = {name: rank_by_model(model, dataset) for name, model in models.items()}
    scores = {name: retrieval_scores(dataset, hits_Q)[0] for name, hits_Q in ranked.items()}
    find_words = stems_of(sample_language(dataset.documents.values(), len(dataset.documents)))
    words, queries = index_bm25(dataset.documents.values(), find_words), list(dataset.queries.values())
    for name, hits_Q in ranked.items():
        fused = fuse_with_words(words, queries, hits_Q, num_searched(dataset), find_words)
        scores[f"{name} + BM25"] = retrieval_scores(dataset, by_rank(fused))[0]
    return scores | {"BM25": score_bm25(dataset)}


def by_rank(hits_Q: Sequence[Sequence[Hit]]) -> list[list[Hit]]:
    """Replace scores by negative ranks, so that equal ones stay in the order that `search` shows. trec_eval would order
    them by their ids. Fusing makes many: the best by words alone and the best by embeddings alone both score 0.5."""
    return [[(document, -rank) for rank, (document, _) in enumerate(hits)] for hits in hits_Q]


def score_embedder(model: SentenceTransformer, dataset: JudgedSet) -> Judgement:
    """Score retrieval over all documents, by the model's own similarity (cosine unless it names another), or the
    correlation of cosines with the scores of pairs. Returns also a row of predictions for each query or pair."""
    if not dataset.pairs:
        return retrieval_scores(dataset, rank_by_model(model, dataset))
    firsts, seconds, scores = zip(*dataset.pairs, strict=True)
    embeddings = [embed_texts(model.encode, texts, f"embed {dataset.name}") for texts in (firsts, seconds)]
    cosines = pairwise_cos_sim(*embeddings).tolist()
    judged = enumerate(zip(scores, cosines, strict=True))
    rows = [{"id": str(index), "gold": score, "predicted": cosine} for index, (score, cosine) in judged]
    return score_rows(rows, KINDS["regression"].metrics, ()), rows


def num_searched(dataset: JudgedSet) -> int:
    """Count the documents to find for a query: one more if the query may find itself, because that hit is left out."""
    return KEPT_DOCUMENTS + bool(dataset.query_documents)


def rank_by_model(model: SentenceTransformer, dataset: JudgedSet) -> list[list[tuple[int, float]]]:
    """Find the documents nearest to each query: their indices and scores, best first."""
    documents, queries = list(dataset.documents.values()), list(dataset.queries.values())
    documents_ND = embed_texts(encoder_of(model, "document"), documents, f"embed {dataset.name} corpus")
    queries_QD = embed_texts(encoder_of(model, "query"), queries, f"embed {dataset.name} queries")
    return find_similar(model, queries_QD, documents_ND, num_searched(dataset))


def score_bm25(dataset: JudgedSet) -> dict[str, float]:
    """Score BM25 (Lucene's form, k1 1.5, b 0.75) on lower-cased words, with neither a stop list nor stems."""
    words, queries = index_bm25(dataset.documents.values()), list(dataset.queries.values())
    return retrieval_scores(dataset, query_bm25(words, queries, num_searched(dataset)))[0]


def retrieval_scores(dataset: JudgedSet, hits_of_queries: Iterable[Sequence[tuple[int, float]]]) -> Judgement:
    """Compute trec_eval's NDCG, MRR and recall of the hits of each query, which are the indices and scores of
    documents, best first. Returns also a row of predictions for each query."""
    ids = list(dataset.documents)
    ranked: dict[str, dict[str, float]] = {}
    for query, hits in zip(dataset.queries, hits_of_queries, strict=True):
        itself = query if query in dataset.query_documents else None
        scores = {ids[document]: score for document, score in hits if ids[document] != itself}
        ranked[query] = dict(list(scores.items())[:KEPT_DOCUMENTS])
    means, rows = judge_ranking(dataset.relevance, ranked, dataset.metric)
    return {name: means[name] for name in ("ndcg_at_10", "mrr_at_10", "recall_at_10", "recall_at_100")}, rows


def hash_judged(dataset: JudgedSet) -> str:
    """Hash the texts and judgements of a set."""
    return content_hash([dataset.documents, dataset.queries, dataset.relevance, dataset.pairs])


def hash_arms(models: Iterable[str], searchers: Iterable[Searcher]) -> dict[str, str]:
    """Hash what `score_arms` and `score_index` score, by the names of their scores; BM25 alone has none."""
    hashes = dict[str, str]()
    for model in models:
        hashes |= dict.fromkeys((model, f"{model} + BM25"), hash_embedder(model))
    for index in (searcher.index for searcher in searchers):
        arms = (f"{index.folder.name}, {by}" for by in get_args(By))
        hashes |= dict.fromkeys(arms, content_hash(index.manifest.model_dump()))
    return hashes


def to_mteb(dataset: JudgedSet, scores: dict[str, float], model_hash: str) -> dict[str, Any]:
    """Arrange scores as in MTEB's result files, with the hashes of the model and the data."""
    main = scores[dataset.metric]
    if dataset.pairs:
        scores = {f"cosine_{metric}": value for metric, value in scores.items()} | scores
    return {
        "task_name": dataset.name,
        "dataset_revision": "local",
        "evaluation_time": None,
        "kg_co2_emissions": None,
        "mteb_version": None,
        "scores": {"test": [scores | {"main_score": main, "hf_subset": "default", "languages": []}]},
        "made_of": {"model": model_hash, "data": hash_judged(dataset)},
    }


def run_mteb(model: SentenceTransformer, name: str) -> tuple[dict[str, Any], float]:
    """Run a task of MTEB. Returns its result, as in MTEB's files, and its main score: the mean over subsets and splits.

    Args:
        name: `STSBenchmark`, or `STSBenchmark=FOLDER` for machines without network. The folder has the task's data
            in files that `datasets` reads, such as `test.jsonl` or `test.parquet`.

    Raises:
        InputError: an unknown task, or data that cannot be read.
    """
    import mteb

    name, _, folder = name.partition("=")
    with told_as(f"MTEB has no task '{name}'"):
        task = mteb.get_task(name)
    if folder:
        local = {"path": str(Path(folder).resolve()), "revision": "local"}
        task.metadata = task.metadata.model_copy(update={"dataset": local})
    remedy = f"{folder} must have its data as the Hub has them" if folder else f"mteb:{name}=FOLDER needs no network"
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)  # about MTEB's calls of other libraries
    with told_as(f"MTEB's {name} cannot be run", remedy), quiet, console.track(f"MTEB {name}", None, "tasks"):
        result = mteb.evaluate(
            model, task, cache=None, co2_tracker=False, overwrite_strategy="always", show_progress_bar=False
        )
    scored = result.task_results[0]
    return scored.to_dict() | {"date": scored.date.timestamp() if scored.date else None}, float(scored.get_score())
