"""A ranker of pairs (`ranking: pairs`): a cross-encoder reads a query with a document, and reorders BM25's best.

A query with one relevant document and some others is a question with choices: it has the loss and the scores of
multiple choice. An unjudged document among BM25's best may be relevant all the same.

Letters: Q queries, S pairs of a query and a candidate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from typing import Any

import numpy as np

from biphase.corpus.forms import PlacedRow
from biphase.corpus.rows import text_column
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import CellContext, HashedTokenizer, TokenizedTexts, share_room, to_bounds
from biphase.finetuning.families import Predicted, multiple_choice, predict_inputs
from biphase.finetuning.kept import KeptModel
from biphase.finetuning.metrics import BM25, Judgement, judge_ranking, ranking_scores
from biphase.tasks.bm25 import index_bm25, query_bm25
from biphase.tasks.spec import EVALUATED_SPLITS, TASK_SPLITS, EvaluatedSplit, TaskSplit
from biphase.tasks.splits import DRAW_SEED, Collection, Judgements

CANDIDATES = 100
"""The number of documents to reorder for each query."""
NEGATIVES = 7
"""The number of other documents beside the relevant one in training, drawn from BM25's best."""


@dataclass(frozen=True)
class Split(multiple_choice.Split):
    """Queries with their candidates, in BM25's order."""

    documents_S: list[str]
    """The id of each pair's document."""
    relevance: Judgements

    def judge(self, scores_S1: np.ndarray, cell: CellContext) -> Judgement:
        """Judge the new order and BM25's own."""
        order_of_bm25 = -np.arange(len(scores_S1), dtype=np.float64)
        before, _ = ranking_scores(self.relevance, order_candidates(self, order_of_bm25))
        means, rows = judge_ranking(self.relevance, order_candidates(self, scores_S1[:, 0]), cell.task.metric)
        return means | {BM25: before["ndcg_at_10"]}, rows


def judge_bm25(data: Collection, cell: CellContext) -> dict[EvaluatedSplit, Judgement]:
    """Judge BM25 alone on the queries of each evaluated split, without any training."""
    rank, judged = ranker_of(data), dict[EvaluatedSplit, Judgement]()
    for split in EVALUATED_SPLITS:
        relevance, ranked = rank_split(data, split, rank, cell.config)
        scores = {query: {id: -float(place) for place, id in enumerate(ids)} for query, ids in ranked.items()}
        judged[split] = judge_ranking(relevance, scores, cell.task.metric)
    return judged


def encode(data: Collection, tokenizer: HashedTokenizer, config: FinetuneConfig) -> dict[TaskSplit, Split]:
    """Encode queries with their candidates as pairs of texts."""
    rank, splits = ranker_of(data), {}
    for name in TASK_SPLITS:
        relevance: Judgements = {}
        if name == "train":
            groups = group_training(data, rank)
        else:
            relevance, ranked = rank_split(data, name, rank, config)
            groups = [(query, candidates) for query, candidates in ranked.items() if candidates]
        named = [(query, document) for query, candidates in groups for document in candidates]
        pairs = [(data.queries[query], data.documents[document]) for query, document in named]
        texts = encode_pairs(tokenizer, pairs, config.max_length)
        bounds_Q1 = to_bounds([len(candidates) for _, candidates in groups])
        splits[name] = Split(
            ids=[query for query, _ in groups],
            texts=texts,
            num_examples=len(groups),
            num_truncated=texts.count_cut(bounds_Q1),
            bounds_Q1=bounds_Q1,
            right_Q=np.zeros(len(groups), dtype=np.int64),
            documents_S=[document for _, document in named],
            relevance=relevance,
        )
    return splits


Rank = Callable[[Sequence[str], Sequence[str]], dict[str, list[str]]]
"""The ids of queries and of documents → the best documents of each query, best first."""


def ranker_of(data: Collection) -> Rank:
    """Return a function that ranks documents by BM25, and indexes the same ones once for all its calls. A query that is
    a document too does not find itself."""
    index = cache(lambda ids: index_bm25(data.documents[id] for id in ids))

    def rank(queries: Sequence[str], documents: Sequence[str]) -> dict[str, list[str]]:
        texts = [data.queries[id] for id in queries]
        found = query_bm25(index(tuple(documents)), texts, CANDIDATES + bool(data.query_documents))
        ranked = {}
        for query, hits in zip(queries, found, strict=True):
            candidates = [documents[hit] for hit, _ in hits]
            ranked[query] = [id for id in candidates if id != query or query not in data.query_documents][:CANDIDATES]
        return ranked

    return rank


def rank_split(
    data: Collection, split: EvaluatedSplit, rank: Rank, config: FinetuneConfig
) -> tuple[Judgements, dict[str, list[str]]]:
    """Return the judgements of a split's queries, and the best documents of each, both in the order of all queries."""
    grades = data.relevance[split]
    relevance = {query: grades[query] for query in data.queries if query in grades}
    return relevance, rank(list(relevance), [*(data.judged_documents[split] if config.judged_only else data.documents)])


def group_training(data: Collection, rank: Rank) -> list[tuple[str, list[str]]]:
    """Group each training pair's query with its relevant document, then others: drawn from BM25's best, and from all
    documents if these are too few, because BM25 finds only documents that share a word."""
    ids = list(data.documents)
    right: dict[str, list[str]] = {}
    for query, document in data.train:
        right.setdefault(query, []).append(document)
    ranked = rank(list(right), ids) if right else {}
    groups = []
    for index, (query, document) in enumerate(data.train):
        draw = np.random.default_rng((DRAW_SEED, index))
        excluded = {*right[query], *({query} & data.query_documents)}
        wrong = [id for id in ranked[query] if id not in excluded]
        if len(wrong) < NEGATIVES:
            excluded |= {*wrong}
            others = (ids[index] for index in draw.permutation(len(ids)) if ids[index] not in excluded)
            wrong += islice(others, NEGATIVES - len(wrong))
        groups.append((query, [document, *(wrong[index] for index in draw.permutation(len(wrong))[:NEGATIVES])]))
    return groups


def encode_pairs(tokenizer: HashedTokenizer, pairs: Sequence[tuple[str, str]], max_length: int) -> TokenizedTexts:
    """Encode queries and documents as the tokenizer's own pairs, each text closed. If a pair is too long, cut its
    longer text."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    ids = dict(zip(texts, (tokens for tokens, _ in tokenizer.tokenize(texts)), strict=True))
    between = np.array(tokenizer.between, np.int32)
    room = tokenizer.room(max_length) - len(between)
    parts, cut = [], []
    for index, (query, document) in enumerate(pairs):
        lengths = [len(ids[query]), len(ids[document])]
        caps = share_room(lengths, room)
        parts.append(np.concatenate([ids[query][: caps[0]], between, ids[document][: caps[1]]]))
        if caps != lengths:
            cut.append(index)
    return replace(tokenizer.concatenate(parts, max_length), truncated=np.array(cut, dtype=np.int64))


def order_candidates(split: Split, scores_S: np.ndarray) -> dict[str, dict[str, float]]:
    """Arrange scores by query, then by document; a query without candidates has none."""
    ranked: dict[str, dict[str, float]] = {query: {} for query in split.relevance}
    for query, (begin, end) in zip(split.ids, pairwise(split.bounds_Q1.tolist()), strict=True):
        ranked[query] = dict(zip(split.documents_S[begin:end], scores_S[begin:end].tolist(), strict=True))
    return ranked


def predict(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Score how well the `document` of each row answers its `query`; higher is better."""
    pairs = [(text_column(location, row, "query"), text_column(location, row, "document")) for location, row in rows]
    texts = encode_pairs(tokenizer, pairs, model.config.max_length)
    scores_S = predict_inputs(model, network, texts)[:, 0]
    return Predicted([{"predicted": round(score, 5)} for score in scores_S.tolist()], len(texts.truncated))
