"""Extractive question answering, by start and end of a span or, as in the paper, by classifying tokens.

The input is the question and its context. With the span head (`qa_head: span`) a long context becomes several windows
that overlap by `doc_stride` tokens, and the end-of-text token stands for "no answer". With the token head (`token`)
there is one window, label 1 on the tokens of the first answer. Where a question lists candidates (ReCoRD's entities),
the best of them is the answer.

Letters: T tokens of all windows, W windows, Q questions, K context tokens of all questions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from biphase.finetuning.batches import Batch, backward_by_parts, evaluation_batches, on_device
from biphase.finetuning.cell import CellContext
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import KeyedTokenizer, Texts, cumulate, join, tokenize
from biphase.finetuning.heads import SpanFinder, TokenClassifier
from biphase.finetuning.metrics.answers import (
    answer_scores,
    counted_answers,
    paper_answer_f1,
    record_scores,
    token_f1,
)
from biphase.tasks.examples import Question, TaskData
from biphase.tasks.spec import Task

ENCODING_SETTINGS = ("qa_head", "doc_stride")

LOWEST = -1e4
"""A logit, in place of minus infinity, which differences and sums would turn into no number."""


@dataclass(frozen=True)
class Split:
    ids: tuple[str, ...]
    texts: Texts
    """The windows."""
    questions_W: np.ndarray
    context_tokens_T: np.ndarray
    """Which of the K context tokens each token is; -1 for those of the question and for special tokens."""
    context_starts_Q: np.ndarray
    """How many tokens stand before the context in each question's windows."""
    context_bounds_Q1: np.ndarray
    """Where the context tokens of each question lie in K."""
    spans_K2: np.ndarray
    """Where each context token begins and ends in its context, in characters."""
    answers_Q2: np.ndarray
    """The tokens of the first answer, from and up to, in K; (-1, -1) when there is none or it was cut off."""
    gold: tuple[tuple[str, ...], ...]
    """All answers of each question; none when it has no answer."""
    contexts: tuple[str, ...]
    """Of the splits that are evaluated; those of train are not kept."""
    candidates: tuple[tuple[tuple[int, int], ...], ...]
    """The candidates' tokens, in K."""
    num_truncated: int
    """Questions of which some tokens are in no window."""

    @property
    def num_examples(self) -> int:
        return len(self.ids)

    def items_of(self, questions: np.ndarray) -> np.ndarray:
        """The training items of questions: all windows of their contexts."""
        return np.flatnonzero(np.isin(self.questions_W, questions))

    def count_tokens(self, windows: np.ndarray) -> int:
        return self.texts.count_tokens(windows)


@dataclass(frozen=True)
class Encoded:
    train: Split
    validation: Split
    test: Split
    left_out: int
    has_unanswerable: bool
    """Whether a question of train has no answer: only then may one be predicted."""


def encode_task(data: TaskData, keyed: KeyedTokenizer, config: FinetuneConfig) -> Encoded:
    train, validation, test = (
        encode_split(data.task, examples, keyed, config, keep_contexts=examples is not data.train)  # type: ignore[arg-type]
        for examples in (data.train, data.validation, data.test)
    )
    return Encoded(train, validation, test, data.left_out, any(not answers for answers in train.gold))


def encode_split(
    task: Task, examples: Sequence[Question], keyed: KeyedTokenizer, config: FinetuneConfig, keep_contexts: bool
) -> Split:
    before = task.template.partition("{context}")[0]
    prefixes = [before.replace("{question}", example.question) for example in examples]
    inputs = [prefix + example.context for prefix, example in zip(prefixes, examples, strict=True)]
    room = config.max_length - len(keyed.opening) - 1
    windows: list[np.ndarray] = []
    questions: list[int] = []
    places: list[np.ndarray] = []
    starts: list[int] = []
    spans: list[np.ndarray] = []
    answers: list[tuple[int, int]] = []
    candidates = []
    first = num_truncated = 0
    no_context = np.full(len(keyed.opening), -1)
    for number, (example, prefix, tokens) in enumerate(
        zip(examples, prefixes, tokenize(keyed, inputs, with_spans=True), strict=True)
    ):
        assert tokens.spans is not None
        num_question = int(np.searchsorted(tokens.spans[:, 1], len(prefix), side="right"))
        question, context = tokens.ids[: min(num_question, room // 2)], tokens.ids[num_question:]
        spans_K2 = np.maximum(tokens.spans[num_question:] - len(prefix), 0)
        parts = cut_windows(len(context), room - len(question), config)
        num_truncated += len(question) < num_question or parts[-1][1] < len(context)
        for begin, end in parts:
            windows.append(np.concatenate([question, context[begin:end]]))
            inside = np.arange(first + begin, first + end)
            places += [no_context, np.full(len(question), -1), inside, np.full(1, -1)]
            questions.append(number)
        starts.append(len(keyed.opening) + len(question))
        spans.append(spans_K2)
        answers.append(tokens_of_answer(example.answers[:1], spans_K2, first, parts[-1][1]))
        candidates.append(
            tuple(tokens_of_answer((candidate,), spans_K2, first, len(context)) for candidate in example.candidates)
        )
        first += len(context)
    return Split(
        ids=tuple(example.id for example in examples),
        texts=join(keyed, windows, config.max_length),
        questions_W=np.array(questions, dtype=np.int64),
        context_tokens_T=np.concatenate(places).astype(np.int64),
        context_starts_Q=np.array(starts, dtype=np.int64),
        context_bounds_Q1=cumulate([len(part) for part in spans]),
        spans_K2=np.concatenate(spans),
        answers_Q2=np.array(answers, dtype=np.int64),
        gold=tuple(tuple(answer.text for answer in example.answers) for example in examples),
        contexts=tuple(example.context for example in examples) if keep_contexts else (),
        candidates=tuple(candidates),
        num_truncated=num_truncated,
    )


def cut_windows(num_tokens: int, room: int, config: FinetuneConfig) -> list[tuple[int, int]]:
    """Windows of at most `room` context tokens; only the first one for the token head."""
    step = max(room - config.doc_stride, (room + 1) // 2)
    parts = [(0, min(room, num_tokens))]
    while config.qa_head == "span" and parts[-1][1] < num_tokens:
        begin = parts[-1][0] + step
        parts.append((begin, min(begin + room, num_tokens)))
    return parts


def tokens_of_answer(answers: Sequence[Any], spans_K2: np.ndarray, first: int, limit: int) -> tuple[int, int]:
    """The tokens that an answer's characters touch, from and up to; (-1, -1) without one or past `limit`."""
    for answer in answers:
        begin = int(np.searchsorted(spans_K2[:, 1], answer.start, side="right"))
        end = int(np.searchsorted(spans_K2[:, 0], answer.start + len(answer.text), side="left"))
        if begin < end <= limit:
            return first + begin, first + end
    return -1, -1


def training_items(encoded: Encoded) -> Split:
    return encoded.train


def build(backbone: nn.Module, task: Task, config: FinetuneConfig) -> nn.Module:
    if config.qa_head == "span":
        return SpanFinder(backbone)
    return TokenClassifier(backbone, 2, config.head_dropout)


def accumulate_gradients(model: nn.Module, encoded: Encoded, windows: np.ndarray, cell: CellContext) -> Tensor:
    """The mean loss over `windows` (span head) or over their tokens (token head), and its gradient."""
    split = encoded.train
    loss = span_loss if cell.config.qa_head == "span" else token_loss
    num_targets = len(windows) if cell.config.qa_head == "span" else split.texts.count_tokens(windows)

    def loss_of(batch: Batch) -> Tensor:
        logits_T2 = model(batch.tokens_T, batch.positions_T, batch.layout)
        return loss(logits_T2, split, batch, cell) / num_targets

    return backward_by_parts(split.texts, windows, cell.compute, loss_of)


def token_loss(logits_T2: Tensor, split: Split, batch: Batch, cell: CellContext) -> Tensor:
    """Sum of cross-entropies: label 1 on the first answer's tokens, 0 on all others, the question's too."""
    targets_T = is_in_answer(split, batch).astype(np.int64)
    return cross_entropy(logits_T2, on_device(targets_T, cell.compute), reduction="sum")


def is_in_answer(split: Split, batch: Batch) -> np.ndarray:
    """Boolean [T]."""
    places_T = split.context_tokens_T[batch.places_T]
    lengths = np.diff(split.texts.bounds_S1)[batch.samples]
    answers_T2 = np.repeat(split.answers_Q2[split.questions_W[batch.samples]], lengths, axis=0)
    return (places_T >= 0) & (places_T >= answers_T2[:, 0]) & (places_T < answers_T2[:, 1])


def span_loss(logits_T2: Tensor, split: Split, batch: Batch, cell: CellContext) -> Tensor:
    """Sum over windows of the mean of two cross-entropies over context and end-of-text: where the answer starts, ends.

    A window without the whole answer has both at its end-of-text token.
    """
    bounds_W1 = cumulate(np.diff(split.texts.bounds_S1)[batch.samples])
    is_choice_T = split.context_tokens_T[batch.places_T] >= 0
    last_W = bounds_W1[1:] - 1
    is_choice_T[last_W] = True
    inside_T = is_in_answer(split, batch)
    num_inside_W = np.add.reduceat(inside_T, bounds_W1[:-1])
    answers_W2 = split.answers_Q2[split.questions_W[batch.samples]]
    is_whole_W = (num_inside_W > 0) & (num_inside_W == answers_W2[:, 1] - answers_W2[:, 0])
    ends = np.maximum.reduceat(np.where(inside_T, np.arange(len(inside_T)), -1), bounds_W1[:-1])
    targets_W2 = np.where(is_whole_W[:, None], np.stack([ends - num_inside_W + 1, ends], 1), last_W[:, None])
    hidden_T = torch.from_numpy(~is_choice_T).to(logits_T2.device)
    masked_T2 = logits_T2.masked_fill(hidden_T[:, None], float("-inf"))
    logsumexp_W2 = segment_logsumexp(masked_T2, batch.layout.bounds_S1.long())
    chosen_W2 = masked_T2.gather(0, on_device(targets_W2, cell.compute))
    return (logsumexp_W2 - chosen_W2).mean(1).sum()


def segment_logsumexp(logits_TC: Tensor, bounds_S1: Tensor) -> Tensor:
    """[S, C], over the rows of each segment."""
    segments_T = torch.repeat_interleave(torch.arange(len(bounds_S1) - 1, device=logits_TC.device), bounds_S1.diff())
    index_TC = segments_T[:, None].expand_as(logits_TC)
    highest = logits_TC.new_full((len(bounds_S1) - 1, logits_TC.shape[1]), float("-inf"))
    highest = highest.scatter_reduce(0, index_TC, logits_TC.detach(), "amax")
    sums = torch.zeros_like(highest).index_add(0, segments_T, (logits_TC - highest[segments_T]).exp())
    return sums.log() + highest


@dataclass(frozen=True)
class Predictions:
    """Of each question of a split."""

    texts: tuple[str, ...]
    """Empty: no answer."""
    best_texts: tuple[str, ...]
    """The best answer, also where no answer scores higher."""
    no_answer_scores_Q: np.ndarray
    """How much higher no answer scores than the best one."""
    selected: tuple[np.ndarray, ...]
    """The tokens of the answer, counted from the first of the input."""


def predict(model: nn.Module, encoded: Encoded, split_name: str, cell: CellContext) -> Predictions:
    split: Split = getattr(encoded, split_name)
    is_span = cell.config.qa_head == "span"
    logits_T2 = np.zeros((len(split.texts.tokens_T), 2), dtype=np.float32)
    for batch, logits in evaluation_batches(model, split.texts, np.arange(split.texts.num_samples), cell.compute):
        logits_T2[batch.places_T] = logits.cpu().numpy()
    logits_K2 = context_logits(split, logits_T2)
    if is_span:
        starts_K, ends_K = logits_K2[:, 0], logits_K2[:, 1]
        null_Q = np.full(len(split.ids), np.inf)
        np.minimum.at(null_Q, split.questions_W, logits_T2[split.texts.bounds_S1[1:] - 1].sum(1))
    else:
        starts_K, ends_K = margin_sums(logits_K2[:, 1] - logits_K2[:, 0])
        null_Q = np.zeros(len(split.ids))
    spans_Q2, scores_Q = best_spans(starts_K, ends_K, split.context_bounds_Q1, cell.config.max_answer_tokens)
    for number, candidates in enumerate(split.candidates):
        whole = np.array([candidate for candidate in candidates if candidate[0] >= 0]).reshape(-1, 2)
        if len(whole):
            scores = starts_K[whole[:, 0]] + ends_K[whole[:, 1] - 1]
            spans_Q2[number], scores_Q[number] = whole[scores.argmax()], scores.max()
    is_empty_Q = (null_Q > scores_Q) & encoded.has_unanswerable
    best_texts = tuple(text_of_span(split, number, begin, end) for number, (begin, end) in enumerate(spans_Q2.tolist()))
    texts = tuple("" if empty else text for text, empty in zip(best_texts, is_empty_Q, strict=True))
    selected = select_spans(split, spans_Q2, is_empty_Q) if is_span else select_tokens(split, logits_T2)
    return Predictions(texts, best_texts, null_Q - scores_Q, selected)


def context_logits(split: Split, logits_T2: np.ndarray) -> np.ndarray:
    """Logits [K, 2] of each context token, from the window where it has most context on its poorer side.

    Tokens that no window holds score lowest.
    """
    inside_T = np.flatnonzero(split.context_tokens_T >= 0)
    windows_T = np.repeat(np.arange(split.texts.num_samples), split.texts.lengths_S)[inside_T]
    opens_W = split.texts.bounds_S1[:-1] + split.context_starts_Q[split.questions_W]
    left, right = inside_T - opens_W[windows_T], split.texts.bounds_S1[1:][windows_T] - 2 - inside_T
    order = np.argsort(np.minimum(left, right), kind="stable")  # of repeated indices the last write stays: the roomiest
    logits_K2 = np.full((len(split.spans_K2), 2), LOWEST, dtype=np.float64)
    logits_K2[:, 0] *= -1  # of the token head: surely no answer
    logits_K2[split.context_tokens_T[inside_T[order]]] = logits_T2[inside_T[order]]
    return logits_K2


def select_spans(split: Split, spans_Q2: np.ndarray, is_empty_Q: np.ndarray) -> tuple[np.ndarray, ...]:
    offsets_Q = split.context_starts_Q - split.context_bounds_Q1[:-1]
    return tuple(
        np.arange(0) if empty else np.arange(begin + offset, end + offset)
        for (begin, end), offset, empty in zip(spans_Q2.tolist(), offsets_Q.tolist(), is_empty_Q, strict=True)
    )


def select_tokens(split: Split, logits_T2: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of the token head, which has one window per question: all tokens labelled 1, in the question too."""
    is_selected_T = logits_T2[:, 1] > logits_T2[:, 0]
    bounds = pairwise(split.texts.bounds_S1.tolist())
    return tuple(np.flatnonzero(is_selected_T[begin:end]) for begin, end in bounds)


def margin_sums(margins_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end scores whose sum is the sum of a span's margins (log-odds of being in the answer)."""
    ends_K = np.cumsum(margins_K)
    return margins_K - ends_K, ends_K


def best_spans(
    starts_K: np.ndarray, ends_K: np.ndarray, bounds_Q1: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The span of at most `max_tokens` context tokens with the highest start + end, [Q, 2] from and up to, and [Q] its
    score. Ties: the shortest, then the first."""
    last_K = np.repeat(bounds_Q1[1:] - 1, np.diff(bounds_Q1))
    best_K = np.full(len(starts_K), -np.inf)
    extra_K = np.zeros(len(starts_K), dtype=np.int64)
    places_K = np.arange(len(starts_K))
    for extra in range(max_tokens):
        is_inside = places_K + extra <= last_K
        scores = np.where(is_inside, starts_K + ends_K[np.minimum(places_K + extra, len(ends_K) - 1)], -np.inf)
        is_better = scores > best_K
        best_K[is_better], extra_K[is_better] = scores[is_better], extra
    spans, scores_Q = [], []
    for begin, end in pairwise(bounds_Q1.tolist()):
        if begin == end:  # a context of which the tokenizer leaves nothing
            spans.append((begin, begin))
            scores_Q.append(LOWEST)
            continue
        start = begin + int(best_K[begin:end].argmax())
        spans.append((start, start + int(extra_K[start]) + 1))
        scores_Q.append(best_K[start])
    return np.array(spans, dtype=np.int64), np.array(scores_Q)


def reference_best_span(starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> tuple[int, int]:
    """The slow twin of `best_spans`, for one question."""
    pairs = [(i, j) for i in range(len(starts)) for j in range(i, min(i + max_tokens, len(starts)))]
    start, last = max(pairs, key=lambda pair: (starts[pair[0]] + ends[pair[1]], pair[0] - pair[1], -pair[0]))
    return start, last + 1


def text_of_span(split: Split, question: int, begin: int, end: int) -> str:
    if begin == end:
        return ""
    return split.contexts[question][split.spans_K2[begin, 0] : split.spans_K2[end - 1, 1]].strip()


def measure(encoded: Encoded, split_name: str, predictions: Predictions, cell: CellContext) -> dict[str, float]:
    split: Split = getattr(encoded, split_name)
    texts = dict(zip(split.ids, predictions.texts, strict=True))
    gold = dict(zip(split.ids, split.gold, strict=True))
    scores = record_scores(texts, gold) if any(split.candidates) else answer_scores(texts, gold)
    if encoded.has_unanswerable:
        best = dict(zip(split.ids, predictions.best_texts, strict=True))
        no_answer = dict(zip(split.ids, predictions.no_answer_scores_Q.tolist(), strict=True))
        by_threshold = answer_scores(best, gold, no_answer)
        scores |= {name: by_threshold[name] for name in ("best_exact", "best_f1")}
    gold_tokens = select_spans(split, split.answers_Q2, split.answers_Q2[:, 0] < 0)
    return scores | {"paper_f1": paper_answer_f1(gold_tokens, predictions.selected)}


def records(encoded: Encoded, split_name: str, predictions: Predictions, cell: CellContext) -> Iterator[dict[str, Any]]:
    split: Split = getattr(encoded, split_name)
    columns = (split.ids, split.gold, counted_answers(split.gold), predictions.texts)
    for id, gold, counted, text, no_answer in zip(*columns, predictions.no_answer_scores_Q.tolist(), strict=True):
        yield {
            "id": id,
            "gold": list(gold),
            "predicted": text,
            "score": token_f1(text, counted),
            "no_answer_score": round(no_answer, 5),
        }
