"""Pair ranking, `ranking: pairs` of a retrieval task: a cross-encoder reads a query with a document, BM25's best are
ordered anew by its scores.

A query with a document that is right and others that are not is a question with choices: texts, loss and scores are
those of multiple choice. What is not judged among BM25's best may be right all the same.

Letters: S pairs, Q queries.
"""

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from biphase.finetuning.config import EVALUATED_SPLITS, FinetuneConfig
from biphase.finetuning.encoding import (
    CellContext,
    EncodedTask,
    HashedTokenizer,
    TokenizedTexts,
    bounds_of_lengths,
    concatenate,
    count_touched,
    tokenize,
)
from biphase.finetuning.families.multiple_choice import ChoiceSplit
from biphase.finetuning.families.multiple_choice import accumulate_gradients as accumulate_gradients
from biphase.finetuning.families.multiple_choice import predict as predict
from biphase.finetuning.metrics import BM25, Judgement, judge_ranking, ranking_scores
from biphase.tasks.examples import Collection
from biphase.tasks.spec import TaskSplit
from biphase.tasks.splits import DRAW_SEED, own_documents, search_bm25

CANDIDATES = 100
"""Documents of each query that are ordered anew."""
NEGATIVES = 7
"""Documents beside the right one that training has, drawn from BM25's best."""


@dataclass(frozen=True)
class CandidateSplit(ChoiceSplit):
    """Queries with their candidates, as BM25 orders them."""

    documents_S: list[str]
    """The id of each pair's document."""
    relevance: dict[str, dict[str, int]]


split_kind = CandidateSplit


def encode_pairs(tokenizer: HashedTokenizer, pairs: Sequence[tuple[str, str]], max_length: int) -> TokenizedTexts:
    """Queries and documents as the tokenizer's own pairs, each closed; of a pair that is too long the longer is cut."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    ids = dict(zip(texts, (tokens for tokens, _ in tokenize(tokenizer, texts)), strict=True))
    closing, room = np.array([tokenizer.closing], np.int32), tokenizer.room(max_length) - 1
    parts, cut = [], []
    for number, (query, document) in enumerate(pairs):
        first, second = ids[query], ids[document]
        half = room // 2 if len(first) <= len(second) else (room + 1) // 2
        first = first[: max(half, room - len(second))]
        if len(first) + len(second) > room or len(first) < len(ids[query]):
            cut.append(number)
        parts.append(np.concatenate([first, closing, second[: room - len(first)]]))
    encoded = concatenate(tokenizer, parts, max_length)
    return TokenizedTexts(encoded.tokens_T, encoded.bounds_S1, np.array(cut, dtype=np.int64))


def encode_task(data: Collection, tokenizer: HashedTokenizer, config: FinetuneConfig) -> EncodedTask[CandidateSplit]:
    ids = list(data.documents)
    own = own_documents(data.queries, data.documents, data.relevance["validation"] | data.relevance["test"])
    groups = group_training(data, own)
    splits: dict[TaskSplit, CandidateSplit] = {"train": encode_groups(data, groups, {}, tokenizer, config)}
    for name in EVALUATED_SPLITS:
        searched = data.judged_documents[name] if config.judged_only else ids
        judged = {query: data.relevance[name][query] for query in data.queries if query in data.relevance[name]}
        ranked = rank_documents(data, own, list(judged), searched)
        groups = [(query, candidates) for query, candidates in ranked.items() if candidates]
        splits[name] = encode_groups(data, groups, judged, tokenizer, config)
    return EncodedTask(splits, data.left_out)


def rank_documents(
    data: Collection, own: Set[str], queries: Sequence[str], documents: Sequence[str]
) -> dict[str, list[str]]:
    """BM25 ranks the documents for each query. A query that is a document too (`own`) does not find itself."""
    texts, questions = [data.documents[id] for id in documents], [data.queries[id] for id in queries]
    ranked = {}
    for query, hits in zip(queries, search_bm25(texts, questions, CANDIDATES + bool(own)), strict=True):
        candidates = [documents[at] for at, _ in hits]
        ranked[query] = [id for id in candidates if id != query or query not in own][:CANDIDATES]
    return ranked


def group_training(data: Collection, own: Set[str]) -> list[tuple[str, list[str]]]:
    """Each training pair's query, with its right document and, behind it, others."""
    ids = list(data.documents)
    right: dict[str, list[str]] = {}
    for query, document in data.train:
        right.setdefault(query, []).append(document)
    ranked = rank_documents(data, own, list(right), ids) if right else {}
    groups = []
    for number, (query, document) in enumerate(data.train):
        known = {*right[query], *({query} & own)}
        wrong = [id for id in ranked[query] if id not in known]
        groups.append((query, [document, *draw_wrong(wrong, known, ids, number)]))
    return groups


def encode_groups(
    data: Collection,
    groups: Sequence[tuple[str, list[str]]],
    relevance: dict[str, dict[str, int]],
    tokenizer: HashedTokenizer,
    config: FinetuneConfig,
) -> CandidateSplit:
    """Queries with their candidates as pairs of texts."""
    named = [(query, document) for query, candidates in groups for document in candidates]
    pairs = [(data.queries[query], data.documents[document]) for query, document in named]
    encoded = encode_pairs(tokenizer, pairs, config.max_length)
    bounds_Q1 = bounds_of_lengths([len(candidates) for _, candidates in groups])
    return CandidateSplit(
        ids=[query for query, _ in groups],
        texts=encoded,
        num_examples=len(groups),
        num_truncated=count_touched(bounds_Q1, encoded.truncated),
        bounds_Q1=bounds_Q1,
        right_Q=np.zeros(len(groups), dtype=np.int64),
        documents_S=[document for _, document in named],
        relevance=relevance,
    )


def draw_wrong(wrong: list[str], known: Set[str], ids: Sequence[str], number: int) -> list[str]:
    """Documents for training pair `number` beside those that are `known`, the right ones: of those that BM25 finds, and
    of all others where they are too few, as BM25 finds only what shares a word."""
    draw = np.random.default_rng((DRAW_SEED, number))
    if len(wrong) < NEGATIVES:
        taken = {*wrong, *known}
        others = (ids[at] for at in draw.permutation(len(ids)) if ids[at] not in taken)
        wrong = [*wrong, *itertools.islice(others, NEGATIVES - len(wrong))]
    return [wrong[at] for at in draw.permutation(len(wrong))[:NEGATIVES]]


def order(split: CandidateSplit, scores_S: np.ndarray) -> dict[str, dict[str, float]]:
    """Scores by query, then by document; none for a query without candidates."""
    ranked: dict[str, dict[str, float]] = {query: {} for query in split.relevance}
    for query, (begin, end) in zip(split.ids, pairwise(split.bounds_Q1.tolist()), strict=True):
        ranked[query] = dict(zip(split.documents_S[begin:end], scores_S[begin:end].tolist(), strict=True))
    return ranked


def judge_split(split: CandidateSplit, predictions: np.ndarray, cell: CellContext) -> Judgement:
    """As of retrieval, and what BM25's own order scores."""
    before, _ = ranking_scores(split.relevance, order(split, -np.arange(len(predictions), dtype=np.float64)))
    means, rows = judge_ranking(split.relevance, order(split, predictions), cell.task.metric)
    return means | {BM25: before["ndcg_at_10"]}, rows
