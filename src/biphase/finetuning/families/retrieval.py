"""Retrieval: training by InfoNCE with in-batch negatives on (query, document) pairs, and exact search.

Embeddings are means over tokens, compared by cosine. The gradient of a batch that does not fit into memory is cached:
all texts are embedded without a graph, the loss yields the gradient of each embedding, and parts are embedded again to
carry it on (GradCache, Gao et al. 2021, arXiv:2101.06983). The result equals that of one large batch.

Letters: B pairs of a batch, D width, Q queries, A all queries, N documents, J judgements.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from biphase.device import to_device
from biphase.encoder.search import SEARCH_DOCUMENTS, find_nearest
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import Batch, BatchModel, CellContext, EncodedSplit, HashedTokenizer, TokenizedTexts
from biphase.finetuning.metrics import Judgement, Ranked, judge_ranking
from biphase.tasks.spec import TASK_SPLITS, TaskSplit
from biphase.tasks.splits import Collection, Judgements

TOP = 100
"""The number of documents per query that the metrics read."""


@dataclass(frozen=True)
class Split(EncodedSplit):
    """The judgements of a split: how relevant documents are to its queries.

    The splits of a task share its texts: `ids` and `texts` are all queries. The judgements of train are its examples,
    pairs of a query and a relevant document.
    """

    document_ids: list[str]
    documents: TokenizedTexts
    queries_J: np.ndarray
    documents_J: np.ndarray
    relevance: Judgements
    """The grades of the judgements, by the ids of query and document; empty for train."""
    judged_N: np.ndarray
    """Documents that any judgement of the split names, ascending, also for queries that are not evaluated."""
    itself_A: np.ndarray
    """For each query, the document that is the query itself, which its search leaves out; -1 for none."""

    @cached_property
    def lengths_I(self) -> np.ndarray:
        return self.texts.lengths_S[self.queries_J] + self.documents.lengths_S[self.documents_J]

    @cached_property
    def keys_J(self) -> np.ndarray:
        """`query · N + document` of each judgement, ascending, for bisection."""
        return np.sort(self.queries_J * self.documents.num_samples + self.documents_J)

    def pack_items(self, items: np.ndarray, cell: CellContext) -> list[Batch]:
        """Pack the queries of some pairs, then their documents."""
        most = cell.config.microbatch_tokens
        queries = self.texts.in_batches(self.queries_J[items], most, cell)
        return [*queries, *self.documents.in_batches(self.documents_J[items], most, cell)]

    def accumulate_gradients(
        self, model: nn.Module, items: np.ndarray, batches: list[Batch], cell: CellContext
    ) -> Tensor:
        """Compute the mean InfoNCE loss over pairs, each query against all documents of the batch, and its gradient."""
        # 1. Embed all texts; with a graph only if all of them fit into memory at once. If not, adapters' dropout draws
        # the same once more in part 3.
        fits = bool(self.lengths_I[items].sum() <= cell.config.microbatch_tokens)
        devices = [cell.device] if cell.device.type == "cuda" else []
        with torch.set_grad_enabled(fits), torch.random.fork_rng(devices, enabled=not fits):
            pieces = [batch.compute(model, cell) for batch in batches]
        embeddings = torch.cat(pieces)
        # 2. The loss, and its gradient: down to the parameters, or, without a graph, only down to the embeddings.
        leaf = embeddings if fits else embeddings.detach().requires_grad_()
        positives = to_device(no_negatives(self, self.queries_J[items], self.documents_J[items]), cell.device)
        loss = contrastive_loss(leaf[: len(items)], leaf[len(items) :], positives, cell.config.scale)
        loss.backward()
        # 3. Embed each part once more, now with its graph alone, and carry the gradient of its embeddings on.
        if not fits:
            assert leaf.grad is not None
            gradients = leaf.grad.split([len(piece) for piece in pieces])
            for batch, gradient in zip(batches, gradients, strict=True):
                batch.compute(model, cell).backward(gradient)
        return loss.detach()

    def predict(self, model: BatchModel, cell: CellContext) -> Ranked:
        """Search by cosine, exactly; embed the longest documents first."""
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


def encode(data: Collection, tokenizer: HashedTokenizer, config: FinetuneConfig) -> dict[TaskSplit, Split]:
    """Encode the texts of a task once, and the judgements of each split as indices of texts."""
    # 1. All texts.
    task = data.task
    texts = [task.query_template.replace("{text}", text) for text in data.queries.values()]
    queries = tokenizer.encode_texts(texts, config.max_length)
    texts = [task.document_template.replace("{text}", text) for text in data.documents.values()]
    documents = tokenizer.encode_texts(texts, config.max_length)
    query_ids = list(data.queries)
    document_ids = list(data.documents)
    query_indices = {id: index for index, id in enumerate(query_ids)}
    document_indices = {id: index for index, id in enumerate(document_ids)}
    # 2. Queries that are documents too.
    itself_A = np.array(
        [document_indices[id] if id in data.query_documents else -1 for id in query_ids], dtype=np.int64
    )
    # 3. The judgements of each split; in train, the pairs are the judgements.
    splits = {}
    for name in TASK_SPLITS:
        relevance: Judgements = {}
        pairs = data.train
        judged = {document for _, document in pairs}
        if name != "train":
            relevance = data.relevance[name]
            pairs = tuple((query, document) for query, grades in relevance.items() for document in grades)
            judged = set(data.judged_documents[name])
        queries_J = np.array([query_indices[query] for query, _ in pairs], dtype=np.int64)
        documents_J = np.array([document_indices[document] for _, document in pairs], dtype=np.int64)
        judged_N = np.array(sorted(document_indices[document] for document in judged), dtype=np.int64)
        num_truncated = np.isin(queries.truncated, queries_J).sum() + np.isin(documents.truncated, judged_N).sum()
        splits[name] = Split(
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
    """Compute the mean cross-entropy, in nats, of finding each query's own document by scaled cosine. The `positives`
    (documents of other pairs that are relevant too, or are the query itself) do not count as negatives."""
    scores_BB = scale * normalize(queries_BD, dim=-1) @ normalize(documents_BD, dim=-1).T
    targets_B = torch.arange(len(scores_BB), device=scores_BB.device)
    return cross_entropy(scores_BB.masked_fill(positives_BB, float("-inf")), targets_B)


def no_negatives(split: Split, queries_B: np.ndarray, documents_B: np.ndarray) -> np.ndarray:
    """Tell, [B, B], which documents of other pairs also form a pair with the query, or are the query's own text."""
    keys_J = split.keys_J
    keys_BB = queries_B[:, None] * split.documents.num_samples + documents_B
    is_positive_BB = keys_J[np.minimum(np.searchsorted(keys_J, keys_BB), len(keys_J) - 1)] == keys_BB
    is_positive_BB |= documents_B == split.itself_A[queries_B, None]
    np.fill_diagonal(is_positive_BB, False)
    return is_positive_BB


def embed_all(model: BatchModel, texts: TokenizedTexts, samples: np.ndarray, cell: CellContext) -> Tensor:
    """Embed samples, in their order: [S, D], of length 1."""
    rows_of = {int(sample): row for row, sample in enumerate(samples)}
    embeddings = None
    for batch, output in texts.outputs(model, samples, cell):
        if embeddings is None:
            embeddings = output.new_empty(len(samples), output.shape[1])
        rows = to_device(np.array([rows_of[int(sample)] for sample in batch.samples]), output.device)
        embeddings[rows] = normalize(output, dim=-1)
    assert embeddings is not None
    return embeddings
