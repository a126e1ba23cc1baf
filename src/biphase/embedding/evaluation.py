"""An embedding model, or BM25, and judged texts → scores, without any fine-tuning on them.

A folder in BEIR's layout is retrieval over all its documents for all queries of its test judgements; a file of scored
pairs is similarity (STS). MTEB's own tasks run by its own code.

Letters: Q queries, N documents, D width.
"""

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim

from biphase import console
from biphase.embedding.model import embed_texts, find_similar
from biphase.embedding.pairs import read_pairs
from biphase.embedding.recipe import PairSource, set_name
from biphase.errors import InputError, first_line
from biphase.files import content_hash
from biphase.finetuning.metrics import Judgement, judge_ranking, score_rows
from biphase.tasks.sources import find_source
from biphase.tasks.spec import METRICS, FileLayout, Task
from biphase.tasks.splits import index_bm25, own_documents, query_bm25, read_judged_texts, read_judgements

KEPT_DOCUMENTS = 100
"""Documents kept for a query: what the metrics look at."""


@dataclass(frozen=True)
class Judged:
    """Texts with the judgement of people: of documents by query, or of pairs by a score."""

    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    """Those of the split that is judged."""
    relevance: dict[str, dict[str, int]]
    pairs: list[tuple[str, str, float]]

    @cached_property
    def own(self) -> frozenset[str]:
        """Queries that are documents too, which are not to be found by themselves."""
        return own_documents(self.queries, self.documents, self.relevance)

    @property
    def num_searched(self) -> int:
        """How many documents a search is asked for: what is kept and, where there are any, the query itself."""
        return KEPT_DOCUMENTS + bool(self.own)

    @property
    def metric(self) -> str:
        """The main one."""
        return "spearman" if self.pairs else "ndcg_at_10"

    @property
    def hash(self) -> str:
        return content_hash([self.documents, self.queries, self.relevance, self.pairs])


def read_judged(path: Path) -> Judged:
    """A folder in BEIR's layout, read as those of retrieval tasks are, or a file of scored pairs.

    Raises `InputError` for what is neither, or holds none.
    """
    if not path.is_dir():
        pairs = read_pairs(PairSource(path=str(path)), seed=0)
        if pairs.kind != "scored":
            raise InputError(f"{path}: no scored pairs: two texts and a score are needed")
        return Judged(set_name(str(path)), {}, {}, {}, [(row[0], row[1], row[2]) for row in pairs.rows])
    layout = FileLayout(test="qrels/test.tsv")
    source = find_source(Task(name="BEIR", family="retrieval", metric="ndcg_at_10", files=(layout,)), path)
    relevance = read_judgements(source, "test")
    if not relevance:
        raise InputError(f"{path / 'qrels'}: no judgements of test")
    if all(grade <= 0 for grades in relevance.values() for grade in grades.values()):
        raise InputError(f"{path / 'qrels/test.tsv'}: no document is relevant to any query: all scores would be 0")
    queries, documents = read_judged_texts(source, {"test": relevance}, judged_only=False)
    return Judged(set_name(str(path)), documents, queries, relevance, [])


def score_arms(models: Mapping[str, SentenceTransformer], judged: Judged) -> dict[str, dict[str, float]]:
    """The scores of models by their names, with BM25's where there are documents to find."""
    scores = {name: score_embedder(model, judged)[0] for name, model in models.items()}
    return scores | ({"BM25": score_bm25(judged)} if judged.documents else {})


def score_embedder(model: SentenceTransformer, judged: Judged) -> Judgement:
    """Retrieval over all documents, by the model's own similarity (cosine unless it says another one), or the
    correlation of cosines with the scores; and for each query or pair what it contributes (`finetuning.predictions`).
    """
    if judged.pairs:
        one, other = [row[0] for row in judged.pairs], [row[1] for row in judged.pairs]
        embeddings = [embed_texts(model.encode, texts, f"embed {judged.name}") for texts in (one, other)]
        cosines = pairwise_cos_sim(*embeddings).tolist()
        rows = []
        for number, ((_, _, score), cosine) in enumerate(zip(judged.pairs, cosines, strict=True)):
            rows.append({"id": str(number), "gold": score, "predicted": cosine})
        return score_rows(rows, METRICS["regression"], ()), rows
    documents, queries, label = list(judged.documents.values()), list(judged.queries.values()), f"embed {judged.name}"
    lengths = {"normalize_embeddings": model.similarity_fn_name == "cosine"}
    documents_ND = embed_texts(model.encode_document, documents, f"{label} corpus", **lengths)
    queries_QD = embed_texts(model.encode_query, queries, f"{label} queries", **lengths)
    return retrieval_scores(judged, find_similar(model, queries_QD, documents_ND, judged.num_searched))


def score_bm25(judged: Judged) -> dict[str, float]:
    """BM25 (Lucene's form, k1 1.5, b 0.75) on lower-cased words (`searched_words`), without stop words or stems."""
    ranked = query_bm25(index_bm25(judged.documents.values()), [*judged.queries.values()], judged.num_searched)
    return retrieval_scores(judged, ranked)[0]


def retrieval_scores(judged: Judged, hits_of_queries: Iterable[Sequence[tuple[int, float]]]) -> Judgement:
    """NDCG, MRR and recall, trec_eval's, of the numbers and scores of documents that were found for each query, best
    first; and the share of right documents that are among the first ten."""
    ids = list(judged.documents)
    ranked: dict[str, dict[str, float]] = {}
    for query, hits in zip(judged.queries, hits_of_queries, strict=True):
        scores = {ids[number]: score for number, score in hits if ids[number] != query or query not in judged.own}
        ranked[query] = dict(itertools.islice(scores.items(), KEPT_DOCUMENTS))
    means, rows = judge_ranking(judged.relevance, ranked, judged.metric)
    return {name: means[name] for name in ("ndcg_at_10", "mrr_at_10", "recall_at_10", "recall_at_100")}, rows


def to_mteb(judged: Judged, scores: dict[str, float]) -> dict[str, Any]:
    """Scores as MTEB's result files have them."""
    main = scores[judged.metric]
    if judged.pairs:
        scores = {f"cosine_{metric}": value for metric, value in scores.items()} | scores
    return {
        "task_name": judged.name,
        "dataset_revision": "local",
        "evaluation_time": None,
        "kg_co2_emissions": None,
        "mteb_version": None,
        "scores": {"test": [scores | {"main_score": main, "hf_subset": "default", "languages": []}]},
    }


def run_mteb(model: SentenceTransformer, name: str) -> tuple[dict[str, Any], float]:
    """MTEB's result of one task as its files have it, and its main score, the mean over subsets and splits.

    Args:
        name: `STSBenchmark`, or `STSBenchmark=FOLDER` with the task's data as `datasets` reads a folder (such as
            `test.jsonl` or `test.parquet`), for machines without network.

    Raises:
        InputError: no such task, or data that cannot be had.
    """
    import mteb

    name, _, folder = name.partition("=")
    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise InputError(f"MTEB has no task '{name}' ({first_line(error)})") from None
    if folder:
        if not Path(folder).is_dir():
            raise InputError(f"{folder} is no folder")
        local = {"path": str(Path(folder).resolve()), "revision": "local"}
        task.metadata = task.metadata.model_copy(update={"dataset": local})
    try:
        with console.track(f"MTEB {name}", None, "tasks"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="mteb")  # of how it calls other libraries
            result = mteb.evaluate(
                model, task, cache=None, co2_tracker=False, overwrite_strategy="always", show_progress_bar=False
            )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # of data in another form, too
        remedy = (
            f"{folder} must have its data as the hub has them" if folder else f"mteb:{name}=FOLDER needs no network"
        )
        raise InputError(f"MTEB's {name} cannot be run ({first_line(error)}); {remedy}") from None
    scored = result.task_results[0]
    return scored.to_dict() | {"date": scored.date.timestamp() if scored.date else None}, float(scored.get_score())
