"""Extractive question answering, by start and end of a span or, as in the paper, by classifying tokens.

The input is the question and its context. With the span head (`qa_head: span`) a long context becomes several windows
that overlap by `doc_stride` tokens, and the end-of-text token stands for "no answer". With the token head (`token`)
there is one window, label 1 on the tokens of the first answer. Where a question lists candidates (ReCoRD's entities),
the best of them is the answer.

Letters: T tokens of all windows, W windows, Q questions, K context tokens of all questions, S segments, C columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor
from torch.nn.functional import cross_entropy

from biphase import console
from biphase.corpus.rows import PlacedRow, Row
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import (
    AdditiveSplit,
    Batch,
    BatchModel,
    CellContext,
    HashedTokenizer,
    segment_logsumexp,
    to_bounds,
)
from biphase.finetuning.families import Predicted, predict_inputs
from biphase.finetuning.kept import KeptModel
from biphase.finetuning.metrics import Judgement, Rows, answer_scores, counted_answers, paper_answer_f1, token_f1
from biphase.tasks.examples import Answer, Question, find_answer, read_spans
from biphase.tasks.sources import text_column
from biphase.tasks.spec import Task, TaskSplit
from biphase.tasks.splits import TaskData

LOWEST = -1e4
"""A logit, in place of minus infinity, which differences and sums would turn into no number."""


def best_spans(
    starts_K: np.ndarray, ends_K: np.ndarray, bounds_Q1: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The span of at most `max_tokens` context tokens with the highest start + end, [Q, 2] from and up to, and [Q] its
    score. Ties: the shortest, then the first."""
    # For each token as the start, the best end: all starts at once, with spans that grow by one token.
    last_K = np.repeat(bounds_Q1[1:] - 1, np.diff(bounds_Q1))
    best_K = np.full(len(starts_K), -np.inf)
    extra_K = np.zeros(len(starts_K), dtype=np.int64)
    indices_K = np.arange(len(starts_K))
    for extra in range(max_tokens):
        is_inside = indices_K + extra <= last_K
        scores = np.where(is_inside, starts_K + ends_K[np.minimum(indices_K + extra, len(ends_K) - 1)], -np.inf)
        is_better = scores > best_K
        best_K[is_better], extra_K[is_better] = scores[is_better], extra
    # For each question, the best start.
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


LEAST_LONGEST = 30
"""The longest answer, in tokens, that is predicted at least."""
ANSWERS_WITHIN = 0.99


@dataclass(frozen=True)
class Split(AdditiveSplit):
    """Windows as samples, and where the contexts of the questions and their answers lie in them.

    Context tokens are numbered through the whole split, each once, however many windows it is in. With question 0 of 5
    context tokens in the windows 0–2 and 2–4, and question 1 of 3 in one window, K is 8 and

        questions_W         0 0 1
        context_tokens_T    -1 -1 0 1 2 -1   -1 -1 2 3 4 -1   -1 5 6 7 -1     (-1: question and end-of-text)
        context_bounds_Q1   0 5 8
    """

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
    gold: list[list[str]]
    """All answers of each question; none when it has no answer."""
    contexts: list[str]
    """The contexts of a split that is evaluated; those of train are not kept."""
    candidates_C2: np.ndarray
    """The tokens of the candidates of all questions, as those of answers."""
    candidate_bounds_Q1: np.ndarray
    has_unanswerable: bool
    """Whether a question of train has no answer: only then may one be predicted."""
    max_answer_tokens: int
    """What 99 % of train's answers fit into, and at least 30: the longest answer where the configuration has none."""

    def items_of(self, examples: np.ndarray) -> np.ndarray:
        """List all windows of some questions' contexts."""
        return np.flatnonzero(np.isin(self.questions_W, examples))

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        """The mean over windows (span head), or over their tokens (token head): label 1 on those of the first answer, 0
        on all others, the question's too."""
        if cell.config.qa_head == "span":
            return span_loss(output, self, batch, cell) / len(items)
        targets_T = cell.on_device(is_in_answer(self, batch).astype(np.int64))
        return cross_entropy(output, targets_T, reduction="sum") / int(self.lengths_I[items].sum())

    def predict(self, model: BatchModel, cell: CellContext) -> Rows:
        """The answer to each question as `text`, which is empty for none; the best one, also where no answer scores
        higher, as `best_text`, with its `start` and `end` in its context; by how much no answer scores higher; the
        `probability` of that span, of the span head; and the tokens of the answer as `selected`, counted from the first
        of the input."""
        is_span = cell.config.qa_head == "span"
        # 1. Logits of all tokens of all windows, and of each context token those of one window.
        logits_T2 = self.texts.predict(model, cell)
        logits_K2 = context_logits(self, logits_T2)
        # 2. How good it is to start and to end at each context token, and to have no answer. With the span head that is
        #    the lowest sum of both logits at an end-of-text token of the question's windows.
        if is_span:
            starts_K, ends_K = logits_K2[:, 0], logits_K2[:, 1]
            null_Q = np.full(self.num_examples, np.inf)
            np.minimum.at(null_Q, self.questions_W, logits_T2[self.texts.bounds_S1[1:] - 1].sum(1))
        else:
            # The sum of a span's margins (log-odds of being in the answer) is the sum of its start and its end.
            margins_K = logits_K2[:, 1] - logits_K2[:, 0]
            ends_K = np.cumsum(margins_K)
            starts_K = margins_K - ends_K
            null_Q = np.zeros(self.num_examples)
        # 3. The best span of each question, or the best of its candidates.
        longest = cell.config.max_answer_tokens or self.max_answer_tokens
        spans_Q2, scores_Q = best_spans(starts_K, ends_K, self.context_bounds_Q1, longest)
        for question, (begin, end) in enumerate(pairwise(self.candidate_bounds_Q1.tolist())):
            candidates = self.candidates_C2[begin:end]
            whole = candidates[candidates[:, 0] >= 0]
            if len(whole):
                scores = starts_K[whole[:, 0]] + ends_K[whole[:, 1] - 1]
                spans_Q2[question], scores_Q[question] = whole[scores.argmax()], scores.max()
        # 4. The tokens of the answer, or none where having none is better.
        is_empty_Q = (null_Q > scores_Q) & self.has_unanswerable
        selected = tokens_of_spans(self, spans_Q2, is_empty_Q)
        if not is_span:  # all tokens labelled 1, in the question too, of the one window that it has with this head
            is_labelled_T = logits_T2[:, 1] > logits_T2[:, 0]
            selected = [np.flatnonzero(part) for part in np.split(is_labelled_T, self.texts.bounds_S1[1:-1])]
        # 5. Its text, and the probability of its span among those of its context: that of its start times that of its
        #    end.
        answers = []
        for question, (first, last) in enumerate(pairwise(self.context_bounds_Q1.tolist())):
            start, end = characters_of_span(self, question, *spans_Q2[question].tolist())
            text, total = self.contexts[question][start:end], 0.0
            if first < last:
                total = float(logsumexp(starts_K[first:last]) + logsumexp(ends_K[first:last]))
            answer = {"text": "" if is_empty_Q[question] else text, "best_text": text, "start": start, "end": end}
            answer["no_answer_score"] = float(null_Q[question] - scores_Q[question])
            answer["probability"] = math.exp(min(float(scores_Q[question]) - total, 0.0))
            answers.append(answer | {"selected": selected[question]})
        return answers

    def judge(self, answers: Rows, cell: CellContext) -> Judgement:
        scores = answer_scores([answer["text"] for answer in answers], self.gold)
        if self.has_unanswerable:
            no_answer = [answer["no_answer_score"] for answer in answers]
            by_threshold = answer_scores([answer["best_text"] for answer in answers], self.gold, no_answer)
            scores |= {name: by_threshold[name] for name in ("best_exact", "best_f1")}
        gold_tokens = tokens_of_spans(self, self.answers_Q2, self.answers_Q2[:, 0] < 0)
        scores["paper_f1"] = paper_answer_f1(gold_tokens, [answer["selected"] for answer in answers])
        rows = []
        for id, answer, gold, counted in zip(self.ids, answers, self.gold, counted_answers(self.gold), strict=True):
            text = answer["text"]
            row = {"id": id, "gold": gold, "predicted": text, "score": token_f1(text, counted)}
            row["no_answer_score"] = round(answer["no_answer_score"], 5)
            if cell.config.qa_head == "span":
                row["probability"] = round(answer["probability"], 5)
            rows.append(row)
        return scores, rows


def encode(data: TaskData, tokenizer: HashedTokenizer, config: FinetuneConfig) -> dict[TaskSplit, Split]:
    """Encode the splits of a task with what all of them take from train: whether a question has no answer, and the
    longest answer. Tells it where it is not 30 tokens, and how many answers a given one cuts."""
    has_unanswerable = any(not example.answers for example in data.train)
    splits = {}
    for name, examples in data.splits.items():
        splits[name] = encode_questions(data.task, examples, tokenizer, config, has_unanswerable)
    train, longest = splits["train"], LEAST_LONGEST
    lengths_Q = np.diff(train.answers_Q2[train.answers_Q2[:, 0] >= 0], axis=1)[:, 0]
    if len(lengths_Q) and not len(train.candidates_C2):
        longest = max(longest, int(np.quantile(lengths_Q, ANSWERS_WITHIN, method="inverted_cdf")))
        most = config.max_answer_tokens or longest
        share_longer = float((lengths_Q > most).mean())
        if (config.max_answer_tokens is None and longest > LEAST_LONGEST) or share_longer > 1 - ANSWERS_WITHIN:
            remedy = f" (max_answer_tokens={longest} holds 99 %)" if config.max_answer_tokens else ""
            message = f"answers of up to {most} tokens are predicted; {share_longer:.1%} of train's are longer{remedy}"
            console.err.print(f"{data.task.name}: {message}")
    splits["train"] = replace(train, contexts=[])
    return {name: replace(split, max_answer_tokens=longest) for name, split in splits.items()}


def encode_questions(
    task: Task, examples: Sequence[Question], tokenizer: HashedTokenizer, config: FinetuneConfig, has_unanswerable: bool
) -> Split:
    before_question, room = task.template.removesuffix("{context}"), tokenizer.room(config.max_length)
    prefixes = [before_question.replace("{question}", example.question) for example in examples]
    inputs = [prefix + example.context for prefix, example in zip(prefixes, examples, strict=True)]
    windows, context_tokens, spans = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    num_windows, starts, answers, candidates = list[int](), list[int](), list[TokenSpan](), list[TokenSpan]()
    num_truncated = first = 0  # `first`: the number in K of the first context token of the question at hand
    encoded = tokenizer.tokenize(inputs, with_spans=True)
    for example, prefix, (ids, spans_T2) in zip(examples, prefixes, encoded, strict=True):
        # 1. Question and context were tokenized as one text; tokens that end within the prefix are the question's. Of a
        #    question that takes more than half of the room, the rest is cut off.
        num_question = int(np.searchsorted(spans_T2[:, 1], len(prefix), side="right"))
        question, context = ids[: min(num_question, room // 2)], ids[num_question:]
        spans.append(np.maximum(spans_T2[num_question:] - len(prefix), 0))
        # 2. Windows: the question, then a part of the context.
        parts = cut_windows(len(context), room - len(question), config)
        starts.append(len(tokenizer.opening) + len(question))
        for begin, end in parts:
            windows.append(np.concatenate([question, context[begin:end]]))
            context_tokens += [np.full(starts[-1], -1), np.arange(first + begin, first + end), np.full(1, -1)]
        # 3. The answer must be in a window, a candidate only in the context.
        num_windows.append(len(parts))
        num_covered = parts[-1][1]
        answers.append(tokens_of_answer(example.answers[0] if example.answers else None, spans[-1], first, num_covered))
        candidates += [tokens_of_answer(span, spans[-1], first, len(context)) for span in example.candidates]
        num_truncated += len(question) < num_question or num_covered < len(context)
        first += len(context)
    return Split(
        ids=[example.id for example in examples],
        texts=tokenizer.concatenate(windows, config.max_length),
        num_examples=len(examples),
        num_truncated=num_truncated,
        questions_W=np.repeat(np.arange(len(examples)), num_windows),
        context_tokens_T=np.concatenate(context_tokens).astype(np.int64),
        context_starts_Q=np.array(starts, dtype=np.int64),
        context_bounds_Q1=to_bounds([len(part) for part in spans]),
        spans_K2=np.concatenate(spans),
        answers_Q2=np.array(answers, dtype=np.int64),
        gold=[[text for text, _ in example.answers] for example in examples],
        contexts=[example.context for example in examples],
        candidates_C2=np.array(candidates, dtype=np.int64).reshape(-1, 2),
        candidate_bounds_Q1=to_bounds([len(example.candidates) for example in examples]),
        has_unanswerable=has_unanswerable,
        max_answer_tokens=LEAST_LONGEST,
    )


TokenSpan = tuple[int, int]
"""Context tokens by their numbers in K, from and up to; (-1, -1) for none."""


def cut_windows(num_tokens: int, room: int, config: FinetuneConfig) -> list[tuple[int, int]]:
    """Windows of at most `room` context tokens; only the first one for the token head.

    25 tokens, room for 10 and a `doc_stride` of 4: 0–10, 6–16, 12–22, 18–25. Each goes on by half of the room at least.
    """
    step = max(room - config.doc_stride, (room + 1) // 2)
    parts = [(0, min(room, num_tokens))]
    while config.qa_head == "span" and parts[-1][1] < num_tokens:
        begin = parts[-1][0] + step
        parts.append((begin, min(begin + room, num_tokens)))
    return parts


def tokens_of_answer(answer: Answer | None, spans_K2: np.ndarray, first: int, limit: int) -> TokenSpan:
    """The tokens that an answer's characters touch, from and up to; (-1, -1) without one or past `limit`."""
    if answer is not None:
        text, start = answer
        begin = int(np.searchsorted(spans_K2[:, 1], start, side="right"))
        end = int(np.searchsorted(spans_K2[:, 0], start + len(text), side="left"))
        if begin < end <= limit:
            return first + begin, first + end
    return -1, -1


def is_in_answer(split: Split, batch: Batch) -> np.ndarray:
    """Boolean [T]: whether a token is one of the first answer to its window's question."""
    context_T = split.context_tokens_T[batch.indices_T]
    answers_W2 = split.answers_Q2[split.questions_W[batch.samples]]
    answers_T2 = np.repeat(answers_W2, split.texts.lengths_S[batch.samples], axis=0)
    return (context_T >= 0) & (context_T >= answers_T2[:, 0]) & (context_T < answers_T2[:, 1])


def span_loss(logits_T2: Tensor, split: Split, batch: Batch, cell: CellContext) -> Tensor:
    """Sum over windows of the mean of two cross-entropies over context and end-of-text: where the answer starts, ends.

    A window without the whole answer has both at its end-of-text token.
    """
    # 1. Among which tokens of a window is chosen: its context and its last token, the end-of-text.
    bounds_W1 = to_bounds(split.texts.lengths_S[batch.samples])
    last_W = bounds_W1[1:] - 1
    is_choice_T = split.context_tokens_T[batch.indices_T] >= 0
    is_choice_T[last_W] = True
    # 2. Where the answer starts and ends in each window, as token numbers of the batch. Its tokens are neighbours, so
    #    the start follows from the end and from how many of them the window holds; where that is not all, both are the
    #    end-of-text. (`reduceat` reduces each stretch between two bounds: here, each window.)
    inside_T = is_in_answer(split, batch)
    num_inside_W = np.add.reduceat(inside_T, bounds_W1[:-1])
    ends_W = np.maximum.reduceat(np.where(inside_T, np.arange(len(inside_T)), -1), bounds_W1[:-1])
    answers_W2 = split.answers_Q2[split.questions_W[batch.samples]]
    is_whole_W = (num_inside_W > 0) & (num_inside_W == answers_W2[:, 1] - answers_W2[:, 0])
    found_W2 = np.stack([ends_W - num_inside_W + 1, ends_W], 1)
    targets_W2 = np.where(is_whole_W[:, None], found_W2, last_W[:, None])
    # 3. Cross-entropy: logsumexp over a window's choices minus the logit of the right one, for start and for end.
    is_hidden_T = torch.from_numpy(~is_choice_T).to(logits_T2.device)
    masked_T2 = logits_T2.masked_fill(is_hidden_T[:, None], float("-inf"))
    logsumexp_W2 = segment_logsumexp(masked_T2, batch.layout.bounds_S1.long())
    chosen_W2 = masked_T2.gather(0, cell.on_device(targets_W2))
    return (logsumexp_W2 - chosen_W2).mean(1).sum()


def context_logits(split: Split, logits_T2: np.ndarray) -> np.ndarray:
    """Logits [K, 2] of each context token, from the window where it has most context on its poorer side.

    Tokens that no window holds score lowest.
    """
    # Of each token of a context: its window, and how much of the context stands left and right of it there (the window
    # opens with the question and closes with one end-of-text token).
    inside_T = np.flatnonzero(split.context_tokens_T >= 0)
    windows_T = np.repeat(np.arange(split.texts.num_samples), split.texts.lengths_S)[inside_T]
    opens_W = split.texts.bounds_S1[:-1] + split.context_starts_Q[split.questions_W]
    left, right = inside_T - opens_W[windows_T], split.texts.bounds_S1[1:][windows_T] - 2 - inside_T
    order = np.argsort(np.minimum(left, right), kind="stable")  # of repeated indices the last write stays: the roomiest
    logits_K2 = np.full((len(split.spans_K2), 2), LOWEST, dtype=np.float64)
    logits_K2[:, 0] *= -1  # of the token head: surely no answer
    logits_K2[split.context_tokens_T[inside_T[order]]] = logits_T2[inside_T[order]]
    return logits_K2


def tokens_of_spans(split: Split, spans_Q2: np.ndarray, is_empty_Q: np.ndarray) -> list[np.ndarray]:
    """The tokens of spans of K, counted from the first of the input."""
    offsets_Q = split.context_starts_Q - split.context_bounds_Q1[:-1]
    tokens = []
    for (begin, end), offset, is_empty in zip(spans_Q2.tolist(), offsets_Q.tolist(), is_empty_Q, strict=True):
        tokens.append(np.arange(0) if is_empty else np.arange(begin + offset, end + offset))
    return tokens


def characters_of_span(split: Split, question: int, begin: int, end: int) -> tuple[int, int]:
    """Find where a span of K begins and ends in its context, without blanks around it."""
    if begin == end:
        return 0, 0
    first, last = int(split.spans_K2[begin, 0]), int(split.spans_K2[end - 1, 1])
    text = split.contexts[question][first:last]
    first = last - len(text.lstrip())
    return first, first + len(text.strip())


def predict(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Find the answer, where it stands in the context, its probability, and how much better no answer is."""
    inputs = []
    for index, (location, row) in enumerate(rows):
        question, context = text_column(location, row, "question"), text_column(location, row, "context")
        if not context.strip():
            raise InputError(f"{location}: the context is empty")
        spans = read_spans(location, "candidates", row["candidates"]) if "candidates" in row else []
        candidates = tuple(find_answer(location, context, text, start) for text, start in spans)
        inputs.append(Question(str(index), question, context, (), candidates))
    split = encode_questions(model.task, inputs, tokenizer, model.config, model.has_unanswerable)
    answers: list[Row] = []
    for answer in predict_inputs(model, network, split):
        start, end = (answer["start"], answer["end"]) if answer["text"] else (None, None)
        row = {"predicted": answer["text"], "start": start, "end": end, "probability": round(answer["probability"], 5)}
        if model.has_unanswerable:
            row["no_answer_score"] = round(answer["no_answer_score"], 5)
        answers.append(row)
    return Predicted(answers, split.num_truncated)
