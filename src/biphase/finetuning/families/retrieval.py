"""Retrieval: InfoNCE with in-batch negatives on (query, document) pairs and exact search; or a ranker of pairs.

Embeddings are means over tokens, compared by cosine. Where a batch does not fit into memory its gradient is cached: all
texts are embedded without a graph, the loss gives the gradient of each embedding, and parts are embedded again to
carry it on (GradCache, Gao et al. 2021, arXiv:2101.06983). The result is that of one large batch.

With `ranking: pairs` a cross-encoder reads a query with a document, and orders BM25's best documents anew by its
scores. A query with a document that is right and others that are not is a question with choices: loss and scores are
those of multiple choice. What is not judged among BM25's best may be right all the same.

Letters: B pairs of a batch, D width, Q queries, A all queries, N documents, J judgements,
S pairs of a query and a candidate.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from biphase.encoder.search import SEARCH_DOCUMENTS, find_nearest
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import (
    BatchModel,
    CellContext,
    EncodedSplit,
    HashedTokenizer,
    TokenizedTexts,
    count_touched,
    share_room,
    split_by_tokens,
    to_bounds,
)
from biphase.finetuning.families.sequence_classification import ChoiceSplit
from biphase.finetuning.metrics import BM25, Judgement, Ranked, judge_ranking, ranking_scores
from biphase.tasks.bm25 import index_bm25, query_bm25
from biphase.tasks.spec import TASK_SPLITS, TaskSplit
from biphase.tasks.splits import DRAW_SEED, Collection, Judgements, own_documents

TOP = 100
"""Documents kept per query: what the metrics look at."""


@dataclass(frozen=True)
class JudgedSplit(EncodedSplit):
    """A split says which documents its queries were judged against, and how relevant each is.

    Texts are those of the whole task, which its splits share: `ids` and `texts` are all queries, by their numbers. The
    judgements of train are its pairs of a query and a relevant document, its examples.
    """

    document_ids: list[str]
    documents: TokenizedTexts
    queries_J: np.ndarray
    documents_J: np.ndarray
    relevance: Judgements
    """The grades of the judgements, by the ids of query and document; none of train's."""
    judged_N: np.ndarray
    """Documents that a query of the split was judged against, ascending; also queries that are not evaluated."""
    itself_A: np.ndarray
    """For each of all queries the document that is the query itself, or -1: it is not to be found."""

    @cached_property
    def lengths_I(self) -> np.ndarray:
        return self.texts.lengths_S[self.queries_J] + self.documents.lengths_S[self.documents_J]

    @cached_property
    def keys_J(self) -> np.ndarray:
        """`query · N + document` of the judgements, ascending: one number for each pair, to be found by bisection."""
        return np.sort(self.queries_J * self.documents.num_samples + self.documents_J)

    def accumulate_gradients(self, model: nn.Module, items: np.ndarray, cell: CellContext) -> Tensor:
        """The mean InfoNCE loss over pairs, each query against all documents of the batch, and its gradient."""
        queries, documents = self.queries_J[items], self.documents_J[items]
        most = cell.config.microbatch_tokens
        parts = [(self.texts, part) for part in split_by_tokens(queries, self.texts.lengths_S, most)]
        parts += [(self.documents, part) for part in split_by_tokens(documents, self.documents.lengths_S, most)]
        # 1. Embed all texts; with a graph only where all of them fit into memory at once.
        fits = bool(self.lengths_I[items].sum() <= most)
        with torch.set_grad_enabled(fits):
            pieces = [texts.compute(model, part, cell)[1] for texts, part in parts]
        embeddings = torch.cat(pieces)
        # 2. The loss, and its gradient: down to the parameters, or, without a graph, only down to the embeddings.
        leaf = embeddings if fits else embeddings.detach().requires_grad_()
        positives = no_negatives(self, queries, documents).to(leaf.device)
        loss = contrastive_loss(leaf[: len(items)], leaf[len(items) :], positives, cell.config.scale)
        loss.backward()
        # 3. Embed each part once more, now with its graph alone, and carry the gradient of its embeddings on.
        if not fits:
            assert leaf.grad is not None
            gradients = leaf.grad.split([len(piece) for piece in pieces])
            for (texts, part), gradient in zip(parts, gradients, strict=True):
                texts.compute(model, part, cell)[1].backward(gradient)
        return loss.detach()

    def predict(self, model: BatchModel, cell: CellContext) -> Ranked:
        """Exact search by cosine, the longest documents first."""
        queries_Q = np.unique(self.queries_J)
        assert cell.config.judged_only is not None, "the configuration is settled"
        documents_N = self.judged_N if cell.config.judged_only else np.arange(self.documents.num_samples)
        documents_N = documents_N[np.argsort(-self.documents.lengths_S[documents_N], kind="stable")]
        chunks = [documents_N[at : at + SEARCH_DOCUMENTS] for at in range(0, len(documents_N), SEARCH_DOCUMENTS)]
        pieces = ((chunk, embed_all(model, self.documents, chunk, cell)) for chunk in chunks)
        names_N = np.argsort(np.argsort(np.array(self.document_ids, dtype=object), kind="stable"))
        queries_QD = embed_all(model, self.texts, queries_Q, cell)
        nearest = find_nearest(queries_QD, pieces, TOP, itself_Q=self.itself_A[queries_Q], names_N=names_N)
        ranked = {}
        for query, hits in zip(queries_Q.tolist(), nearest, strict=True):
            ranked[self.ids[query]] = {self.document_ids[document]: score for document, score in hits}
        return ranked

    def judge(self, ranked: Ranked, cell: CellContext) -> Judgement:
        return judge_ranking(self.relevance, ranked, cell.task.metric)


def encode_judged(data: Collection, tokenizer: HashedTokenizer, config: FinetuneConfig) -> dict[TaskSplit, JudgedSplit]:
    """Encode the texts of a task once, and say for each split which of them were judged."""
    task, query_ids, document_ids = data.task, list(data.queries), list(data.documents)
    query_numbers = {id: number for number, id in enumerate(query_ids)}
    document_numbers = {id: number for number, id in enumerate(document_ids)}
    texts = [task.query_template.replace("{text}", text) for text in data.queries.values()]
    queries = tokenizer.encode_texts(texts, config.max_length)
    texts = [task.document_template.replace("{text}", text) for text in data.documents.values()]
    documents = tokenizer.encode_texts(texts, config.max_length)
    twins = own_documents(data.queries, data.documents, data.relevance["validation"] | data.relevance["test"])
    itself_A = np.array([document_numbers[id] if id in twins else -1 for id in query_ids], dtype=np.int64)

    splits = {}
    for name in TASK_SPLITS:
        relevance: Judgements = {}
        pairs, named = data.train, {document for _, document in data.train}
        if name != "train":
            relevance, named = data.relevance[name], set(data.judged_documents[name])
            pairs = tuple((query, document) for query, grades in relevance.items() for document in grades)
        queries_J = np.array([query_numbers[query] for query, _ in pairs], dtype=np.int64)
        documents_J = np.array([document_numbers[document] for _, document in pairs], dtype=np.int64)
        judged_N = np.array(sorted(document_numbers[document] for document in named), dtype=np.int64)
        num_truncated = np.isin(queries.truncated, queries_J).sum() + np.isin(documents.truncated, judged_N).sum()
        splits[name] = JudgedSplit(
            ids=query_ids,
            texts=queries,
            num_examples=len(pairs if name == "train" else relevance),
            num_truncated=int(num_truncated),
            document_ids=document_ids,
            documents=documents,
            queries_J=queries_J,
            documents_J=documents_J,
            relevance=relevance,
            judged_N=judged_N,
            itself_A=itself_A,
        )
    return splits


def contrastive_loss(queries_BD: Tensor, documents_BD: Tensor, positives_BB: Tensor, scale: float) -> Tensor:
    """Mean cross-entropy in nats of finding each query's own document by scaled cosine.

    Documents of other pairs that are `positives` of the query too, or the query itself, are no negatives.
    """
    scores_BB = scale * normalize(queries_BD, dim=-1) @ normalize(documents_BD, dim=-1).T
    numbers_B = torch.arange(len(scores_BB), device=scores_BB.device)
    return cross_entropy(scores_BB.masked_fill(positives_BB, float("-inf")), numbers_B)


def no_negatives(split: JudgedSplit, queries_B: np.ndarray, documents_B: np.ndarray) -> Tensor:
    """Boolean [B, B]: a training pair of this query and that document, or one and the same text; the diagonal apart."""
    keys_J = split.keys_J
    keys_BB = queries_B[:, None] * split.documents.num_samples + documents_B
    is_positive_BB = keys_J[np.minimum(np.searchsorted(keys_J, keys_BB), len(keys_J) - 1)] == keys_BB
    is_positive_BB |= documents_B == split.itself_A[queries_B, None]
    np.fill_diagonal(is_positive_BB, False)
    return torch.from_numpy(is_positive_BB)


def embed_all(model: BatchModel, texts: TokenizedTexts, samples: np.ndarray, cell: CellContext) -> Tensor:
    """Unit embeddings [S, D] of the given samples, in their order."""
    rows_of = {int(sample): row for row, sample in enumerate(samples)}
    embeddings = None
    for batch, output in texts.outputs(model, samples, cell):
        if embeddings is None:
            embeddings = output.new_empty(len(samples), output.shape[1])
        rows = torch.tensor([rows_of[int(sample)] for sample in batch.samples], device=output.device)
        embeddings[rows] = normalize(output, dim=-1)
    assert embeddings is not None
    return embeddings


CANDIDATES = 100
"""Documents of each query that are ordered anew."""
NEGATIVES = 7
"""Documents beside the right one that training has, drawn from BM25's best."""


@dataclass(frozen=True)
class CandidateSplit(ChoiceSplit):
    """Queries with their candidates, as BM25 orders them."""

    documents_S: list[str]
    """The id of each pair's document."""
    relevance: Judgements

    def judge(self, scores_S1: np.ndarray, cell: CellContext) -> Judgement:
        """Judge the new order, and BM25's own beside it."""
        order_of_bm25 = -np.arange(len(scores_S1), dtype=np.float64)
        before, _ = ranking_scores(self.relevance, order_candidates(self, order_of_bm25))
        means, rows = judge_ranking(self.relevance, order_candidates(self, scores_S1[:, 0]), cell.task.metric)
        return means | {BM25: before["ndcg_at_10"]}, rows


def encode_candidates(
    data: Collection, tokenizer: HashedTokenizer, config: FinetuneConfig
) -> dict[TaskSplit, CandidateSplit]:
    """Encode queries with their candidates as pairs of texts."""
    twins = own_documents(data.queries, data.documents, data.relevance["validation"] | data.relevance["test"])
    splits = {}
    for name in TASK_SPLITS:
        relevance: Judgements = {}
        groups = group_training(data, twins) if name == "train" else []
        if name != "train":
            grades = data.relevance[name]
            relevance = {query: grades[query] for query in data.queries if query in grades}
            searched = data.judged_documents[name] if config.judged_only else list(data.documents)
            ranked = rank_documents(data, twins, list(relevance), searched)
            groups = [(query, candidates) for query, candidates in ranked.items() if candidates]
        named = [(query, document) for query, candidates in groups for document in candidates]
        pairs = [(data.queries[query], data.documents[document]) for query, document in named]
        texts = encode_pairs(tokenizer, pairs, config.max_length)
        bounds_Q1 = to_bounds([len(candidates) for _, candidates in groups])
        splits[name] = CandidateSplit(
            ids=[query for query, _ in groups],
            texts=texts,
            num_examples=len(groups),
            num_truncated=count_touched(bounds_Q1, texts.truncated),
            bounds_Q1=bounds_Q1,
            right_Q=np.zeros(len(groups), dtype=np.int64),
            documents_S=[document for _, document in named],
            relevance=relevance,
        )
    return splits


def rank_documents(
    data: Collection, twins: Set[str], queries: Sequence[str], documents: Sequence[str]
) -> dict[str, list[str]]:
    """BM25 ranks the documents for each query. A query that is a document too (one of `twins`) does not find itself."""
    index, questions = index_bm25(data.documents[id] for id in documents), [data.queries[id] for id in queries]
    ranked = {}
    for query, hits in zip(queries, query_bm25(index, questions, CANDIDATES + bool(twins)), strict=True):
        candidates = [documents[number] for number, _ in hits]
        ranked[query] = [id for id in candidates if id != query or query not in twins][:CANDIDATES]
    return ranked


def group_training(data: Collection, twins: Set[str]) -> list[tuple[str, list[str]]]:
    """Each training pair's query, with its right document and, behind it, wrong ones: drawn from those that BM25 finds,
    and from all others where they are too few, as BM25 finds only what shares a word."""
    ids = list(data.documents)
    right: dict[str, list[str]] = {}
    for query, document in data.train:
        right.setdefault(query, []).append(document)
    ranked = rank_documents(data, twins, list(right), ids) if right else {}
    groups = []
    for number, (query, document) in enumerate(data.train):
        draw = np.random.default_rng((DRAW_SEED, number))
        excluded = {*right[query], *({query} & twins)}
        wrong = [id for id in ranked[query] if id not in excluded]
        if len(wrong) < NEGATIVES:
            excluded |= {*wrong}
            others = (ids[index] for index in draw.permutation(len(ids)) if ids[index] not in excluded)
            wrong += islice(others, NEGATIVES - len(wrong))
        groups.append((query, [document, *(wrong[index] for index in draw.permutation(len(wrong))[:NEGATIVES])]))
    return groups


def encode_pairs(tokenizer: HashedTokenizer, pairs: Sequence[tuple[str, str]], max_length: int) -> TokenizedTexts:
    """Queries and documents as the tokenizer's own pairs, each closed; of a pair that is too long the longer is cut."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    ids = dict(zip(texts, (tokens for tokens, _ in tokenizer.tokenize(texts)), strict=True))
    closing, room = np.array([tokenizer.closing], np.int32), tokenizer.room(max_length) - 1
    parts, cut = [], []
    for number, (query, document) in enumerate(pairs):
        lengths = [len(ids[query]), len(ids[document])]
        caps = share_room(lengths, room)
        parts.append(np.concatenate([ids[query][: caps[0]], closing, ids[document][: caps[1]]]))
        if caps != lengths:
            cut.append(number)
    return replace(tokenizer.concatenate(parts, max_length), truncated=np.array(cut, dtype=np.int64))


def order_candidates(split: CandidateSplit, scores_S: np.ndarray) -> dict[str, dict[str, float]]:
    """Scores by query, then by document; none for a query without candidates."""
    ranked: dict[str, dict[str, float]] = {query: {} for query in split.relevance}
    for query, (begin, end) in zip(split.ids, pairwise(split.bounds_Q1.tolist()), strict=True):
        ranked[query] = dict(zip(split.documents_S[begin:end], scores_S[begin:end].tolist(), strict=True))
    return ranked
