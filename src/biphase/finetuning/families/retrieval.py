"""Retrieval: InfoNCE with in-batch negatives on (query, document) pairs; evaluation by exact search.

Embeddings are means over tokens, compared by cosine. Where a batch does not fit into memory its gradient is cached: all
texts are embedded without a graph, the loss gives the gradient of each embedding, and parts are embedded again to
carry it on (GradCache, Gao et al. 2021, arXiv:2101.06983). The result is that of one large batch.

Letters: B pairs of a batch, D width, Q queries, N documents, P pairs, J judgements, K documents kept per query.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from biphase.finetuning.batches import cut, evaluation_batches, pack
from biphase.finetuning.cell import CellContext
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import KeyedTokenizer, Texts, encode
from biphase.finetuning.heads import Embedder
from biphase.finetuning.metrics.ranking import ranking_scores
from biphase.tasks.examples import Collection, EvaluatedSplit
from biphase.tasks.spec import Task

ENCODING_SETTINGS = ("judged_only",)

TOP = 100
"""Documents kept per query: what the metrics look at."""
SEARCH_DOCUMENTS = 8192
"""Documents that are embedded and scored at a time: no more scores than this per query ever exist."""


@dataclass(frozen=True)
class Judgements:
    """Which documents a split's queries were judged against, and how relevant each is."""

    queries_J: np.ndarray
    documents_J: np.ndarray
    grades_J: np.ndarray
    judged_N: np.ndarray
    """Documents that a query of the split was judged against, ascending; also queries that are not evaluated."""
    num_truncated: int
    """Of these queries and documents."""

    @property
    def num_examples(self) -> int:
        return len(np.unique(self.queries_J))


@dataclass(frozen=True)
class Encoded:
    query_ids: tuple[str, ...]
    document_ids: tuple[str, ...]
    queries: Texts
    documents: Texts
    pairs_P2: np.ndarray
    """Train: query and a document that is relevant to it."""
    pair_keys_P: np.ndarray
    """`query · N + document` of the pairs, ascending."""
    validation: Judgements
    test: Judgements
    left_out: int

    @property
    def train(self) -> "Pairs":
        return Pairs(self)


@dataclass(frozen=True)
class Pairs:
    """The training pairs, as what a batch is made of."""

    encoded: Encoded

    @property
    def num_examples(self) -> int:
        return len(self.encoded.pairs_P2)

    @property
    def num_truncated(self) -> int:
        return count_truncated(self.encoded.queries, self.encoded.documents, *self.encoded.pairs_P2.T)

    def items_of(self, examples: np.ndarray) -> np.ndarray:
        return examples

    def count_tokens(self, items: np.ndarray) -> int:
        queries, documents = self.encoded.pairs_P2[items].T
        return int(self.encoded.queries.lengths_S[queries].sum() + self.encoded.documents.lengths_S[documents].sum())


def encode_task(data: Collection, keyed: KeyedTokenizer, config: FinetuneConfig) -> Encoded:
    task = data.task
    query_numbers = {id: number for number, id in enumerate(data.queries)}
    document_numbers = {id: number for number, id in enumerate(data.documents)}
    queries = [task.query_template.replace("{text}", text) for text in data.queries.values()]
    documents = [task.document_template.replace("{text}", text) for text in data.documents.values()]
    pairs = [(query_numbers[query], document_numbers[document]) for query, document in data.train]

    query_texts = encode(keyed, queries, config.max_length)
    document_texts = encode(keyed, documents, config.max_length)

    def judgements(split: EvaluatedSplit) -> Judgements:
        rows = [
            (query_numbers[query], document_numbers[document], grade)
            for query, grades in data.relevance[split].items()
            for document, grade in grades.items()
        ]
        queries_J, documents_J, grades_J = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
        judged_N = np.array(sorted(document_numbers[document] for document in data.judged_documents[split]))
        num_truncated = count_truncated(query_texts, document_texts, queries_J, judged_N)
        return Judgements(queries_J, documents_J, grades_J, judged_N, num_truncated)

    pairs_P2 = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Encoded(
        query_ids=tuple(data.queries),
        document_ids=tuple(data.documents),
        queries=query_texts,
        documents=document_texts,
        pairs_P2=pairs_P2,
        pair_keys_P=np.sort(pairs_P2[:, 0] * len(documents) + pairs_P2[:, 1]),
        validation=judgements("validation"),
        test=judgements("test"),
        left_out=data.left_out,
    )


def count_truncated(queries: Texts, documents: Texts, chosen_queries: np.ndarray, chosen_documents: np.ndarray) -> int:
    """How many of the chosen texts were cut."""
    return int(np.isin(queries.truncated, chosen_queries).sum() + np.isin(documents.truncated, chosen_documents).sum())


def training_items(encoded: Encoded) -> Pairs:
    return encoded.train


def build(backbone: nn.Module, task: Task, config: FinetuneConfig) -> nn.Module:
    return Embedder(backbone)


def accumulate_gradients(model: nn.Module, encoded: Encoded, items: np.ndarray, cell: CellContext) -> Tensor:
    """The mean InfoNCE loss over pairs, each query against all documents of the batch, and its gradient."""
    queries, documents = encoded.pairs_P2[items].T
    parts = [
        (encoded.queries, part) for part in cut(queries, encoded.queries.lengths_S, cell.compute.microbatch_tokens)
    ]
    parts += [
        (encoded.documents, part)
        for part in cut(documents, encoded.documents.lengths_S, cell.compute.microbatch_tokens)
    ]
    fits = encoded.train.count_tokens(items) <= cell.compute.microbatch_tokens
    with torch.set_grad_enabled(fits):
        pieces = [embed(model, texts, part, cell) for texts, part in parts]
    embeddings = torch.cat(pieces)
    leaf = embeddings if fits else embeddings.detach().requires_grad_()
    known = known_positives(encoded, queries, documents)
    loss = contrastive_loss(leaf[: len(items)], leaf[len(items) :], known.to(leaf.device), cell.config.scale)
    loss.backward()
    if not fits:
        assert leaf.grad is not None
        gradients = leaf.grad.split([len(piece) for piece in pieces])
        for (texts, part), gradient in zip(parts, gradients, strict=True):
            embed(model, texts, part, cell).backward(gradient)
    return loss.detach()


def embed(model: nn.Module, texts: Texts, samples: np.ndarray, cell: CellContext) -> Tensor:
    """Mean embeddings [S, D], fp32."""
    batch = pack(texts, samples, cell.compute)
    with cell.compute.autocast():
        return model(batch.tokens_T, batch.positions_T, batch.layout)


def contrastive_loss(queries_BD: Tensor, documents_BD: Tensor, known_BB: Tensor, scale: float) -> Tensor:
    """Mean cross-entropy in nats of finding each query's own document by scaled cosine.

    Documents of other pairs that are known to be relevant to the query as well are no negatives.
    """
    scores_BB = scale * normalize(queries_BD, dim=-1) @ normalize(documents_BD, dim=-1).T
    return cross_entropy(
        scores_BB.masked_fill(known_BB, float("-inf")), torch.arange(len(scores_BB), device=scores_BB.device)
    )


def known_positives(encoded: Encoded, queries_B: np.ndarray, documents_B: np.ndarray) -> Tensor:
    """Boolean [B, B]: a training pair of this query and that document, apart from the diagonal."""
    keys_P = encoded.pair_keys_P
    keys_BB = queries_B[:, None] * encoded.documents.num_samples + documents_B
    found_BB = keys_P[np.minimum(np.searchsorted(keys_P, keys_BB), len(keys_P) - 1)] == keys_BB
    np.fill_diagonal(found_BB, False)
    return torch.from_numpy(found_BB)


@dataclass(frozen=True)
class Ranking:
    """The best documents of each query of a split, best first."""

    queries_Q: np.ndarray
    documents_QK: np.ndarray
    scores_QK: np.ndarray


def predict(model: nn.Module, encoded: Encoded, split_name: str, cell: CellContext) -> Ranking:
    """Exact search by cosine: documents in chunks, of each chunk and of what was best before only the best stay."""
    judgements: Judgements = getattr(encoded, split_name)
    queries_Q = np.unique(judgements.queries_J)
    documents_N = judgements.judged_N if cell.config.judged_only else np.arange(encoded.documents.num_samples)
    queries_QD = embed_all(model, encoded.queries, queries_Q, cell)
    best_scores = queries_QD.new_empty(len(queries_QD), 0)
    best_documents = torch.empty(len(queries_QD), 0, dtype=torch.long, device=queries_QD.device)
    longest_first = documents_N[np.argsort(-encoded.documents.lengths_S[documents_N], kind="stable")]
    for begin in range(0, len(longest_first), SEARCH_DOCUMENTS):
        chunk = longest_first[begin : begin + SEARCH_DOCUMENTS]
        scores = queries_QD @ embed_all(model, encoded.documents, chunk, cell).T
        documents = torch.from_numpy(chunk).to(scores.device).expand(len(scores), -1)
        scores, documents = torch.cat([best_scores, scores], 1), torch.cat([best_documents, documents], 1)
        best_scores, order = scores.topk(min(TOP, scores.shape[1]), dim=1)
        best_documents = documents.gather(1, order)
    return Ranking(queries_Q, best_documents.cpu().numpy(), best_scores.cpu().numpy())


def embed_all(model: nn.Module, texts: Texts, samples: np.ndarray, cell: CellContext) -> Tensor:
    """Unit embeddings [S, D] of the given samples, in their order."""
    order = {int(sample): row for row, sample in enumerate(samples)}
    embeddings = None
    for batch, output in evaluation_batches(model, texts, samples, cell.compute):
        if embeddings is None:
            embeddings = output.new_empty(len(samples), output.shape[1])
        rows = torch.tensor([order[int(sample)] for sample in batch.samples], device=output.device)
        embeddings[rows] = normalize(output, dim=-1)
    assert embeddings is not None
    return embeddings


def measure(encoded: Encoded, split_name: str, ranking: Ranking, cell: CellContext) -> dict[str, float]:
    return score_ranking(encoded, split_name, ranking)[0]


def score_ranking(encoded: Encoded, split_name: str, ranking: Ranking) -> tuple[dict[str, float], dict[str, Any]]:
    judgements: Judgements = getattr(encoded, split_name)
    relevance: dict[str, dict[str, int]] = {}
    columns = (judgements.queries_J, judgements.documents_J, judgements.grades_J)
    for query, document, grade in zip(*(column.tolist() for column in columns), strict=True):
        relevance.setdefault(encoded.query_ids[query], {})[encoded.document_ids[document]] = grade
    ranked = {
        encoded.query_ids[query]: {encoded.document_ids[d]: s for d, s in zip(documents, scores, strict=True)}
        for query, documents, scores in zip(
            ranking.queries_Q.tolist(), ranking.documents_QK.tolist(), ranking.scores_QK.tolist(), strict=True
        )
    }
    return ranking_scores(relevance, ranked)


def records(encoded: Encoded, split_name: str, ranking: Ranking, cell: CellContext) -> Iterator[dict[str, Any]]:
    """The ten best documents of each query."""
    by_query = score_ranking(encoded, split_name, ranking)[1][cell.task.metric]
    for query, documents, scores in zip(
        ranking.queries_Q.tolist(), ranking.documents_QK[:, :10], ranking.scores_QK[:, :10], strict=True
    ):
        id = encoded.query_ids[query]
        yield {
            "id": id,
            "predicted": [encoded.document_ids[document] for document in documents],
            "scores": [round(float(score), 5) for score in scores],
            "score": by_query[id],
        }
