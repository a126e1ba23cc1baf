"""Extractive question answering, by start and end of a span or, as in the paper, by classifying tokens.

The input is the question and its context. With the span head (`qa_head: span`) a long context becomes several windows
that overlap by `doc_stride` tokens, and the end-of-text token means "no answer". With the token head (`token`)
there is one window, and the tokens of the first answer have label 1. If a question lists candidates (ReCoRD's
entities), the best of them is the answer.

Letters: T tokens of all windows, W windows, Q questions, K context tokens of all questions, S segments, C columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import logsumexp
from torch import Tensor
from torch.nn.functional import cross_entropy

from biphase import console
from biphase.corpus.forms import PlacedRow, Row
from biphase.corpus.rows import text_column
from biphase.corpus.text import end_of_marks
from biphase.device import to_device
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import Batch, BatchModel, CellContext, EncodedSplit, HashedTokenizer, to_bounds
from biphase.finetuning.families import Predicted, predict_inputs
from biphase.finetuning.kept import KeptModel
from biphase.finetuning.loss import segment_logsumexp
from biphase.finetuning.metrics import Judgement, Rows, answer_scores, counted_answers, paper_answer_f1, token_f1
from biphase.tasks.examples import Answer, Question, find_answer, input_of, read_spans
from biphase.tasks.spec import Task, TaskSplit
from biphase.tasks.splits import TaskData

LOWEST = -1e4
"""A logit in place of minus infinity, whose differences would be nan."""


def best_spans(
    starts_K: np.ndarray, ends_K: np.ndarray, bounds_Q1: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the span of at most `max_tokens` context tokens with the highest start + end. Returns the spans, [Q, 2] from
    and up to, and their scores, [Q]. Among ties: the first start, then the shortest."""
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
        if begin == end:  # the tokenizer leaves nothing of this context
            spans.append((begin, begin))
            scores_Q.append(LOWEST)
            continue
        start = begin + int(best_K[begin:end].argmax())
        spans.append((start, start + int(extra_K[start]) + 1))
        scores_Q.append(best_K[start])
    return np.array(spans, dtype=np.int64), np.array(scores_Q)


LEAST_LONGEST = 30
"""The least value for the longest answer, in tokens."""
ANSWERS_WITHIN = 0.99


@dataclass(frozen=True)
class Split(EncodedSplit):
    """Windows as samples, and the places of contexts and answers in them.

    Context tokens are counted through the whole split, each once, however many windows have it. With question 0 of 5
    context tokens in the windows 0–2 and 2–4, and question 1 of 3 in one window, K is 8 and

        questions_W         0 0 1
        context_tokens_T    -1 -1 0 1 2 -1   -1 -1 2 3 4 -1   -1 5 6 7 -1     (-1: question and end-of-text)
        context_bounds_Q1   0 5 8
    """

    questions_W: np.ndarray
    context_tokens_T: np.ndarray
    """The index of each token among the K context tokens; -1 for the question's and for special tokens."""
    context_starts_Q: np.ndarray
    """The number of tokens before the context in each question's windows."""
    context_bounds_Q1: np.ndarray
    """The bounds of each question's context tokens in K."""
    spans_K2: np.ndarray
    """The span of each context token in its context, in characters."""
    answers_Q2: np.ndarray
    """The tokens of the first answer, from and up to, in K; (-1, -1) for no answer, or one that was cut off."""
    gold: list[list[str]]
    """The answers of each question; empty for an unanswerable one."""
    contexts: list[str]
    """The contexts of an evaluated split; empty for train."""
    candidates_C2: np.ndarray
    """The tokens of the candidates of all questions, as in `answers_Q2`."""
    candidate_bounds_Q1: np.ndarray
    has_unanswerable: bool
    """Whether a question of train has no answer. Only then may "no answer" be predicted."""
    max_answer_tokens: int
    """The longest answer, unless configured: it covers 99 % of the answers in train, and is 30 tokens at least."""

    def items_of(self, examples: np.ndarray) -> np.ndarray:
        """List all windows of some questions."""
        return np.flatnonzero(np.isin(self.questions_W, examples))

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        """Compute the mean over windows (span head), or over their tokens (token head). The label of a token is 1 in
        the first answer and 0 elsewhere, in the question too."""
        if cell.config.qa_head == "span":
            return span_loss(output, self, batch, cell) / len(items)
        targets_T = cell.on_device(is_in_answer(self, batch).astype(np.int64))
        return cross_entropy(output, targets_T, reduction="sum") / int(self.lengths_I[items].sum())

    def predict(self, model: BatchModel, cell: CellContext) -> Rows:
        """Answer each question.

        An answer has a `text`, empty for none; the span with the highest score as `best_text`, with its `start` and
        `end` in the context and, from the span head, its `probability`; the `no_answer_score`, the lead of "no answer"
        over that span; and the tokens of the answer as `selected`, counted from the first of the input.
        """
        is_span = cell.config.qa_head == "span"
        # 1. Logits of all tokens in all windows, and of each context token in one window.
        logits_T2 = self.texts.predict(model, cell)
        logits_K2 = context_logits(self, logits_T2)
        # 2. Scores for starting and ending at each context token, and for no answer: with the span head, the lowest sum
        #    of both logits at an end-of-text token of the question's windows.
        if is_span:
            starts_K = logits_K2[:, 0]
            ends_K = logits_K2[:, 1]
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
        # 4. The tokens of the answer, or none if "no answer" scores higher.
        is_empty_Q = (null_Q > scores_Q) & self.has_unanswerable
        selected = tokens_of_spans(self, spans_Q2, is_empty_Q)
        if not is_span:  # all tokens of the one window that are labelled 1, in the question too
            is_labelled_T = logits_T2[:, 1] > logits_T2[:, 0]
            selected = [np.flatnonzero(labelled) for labelled in np.split(is_labelled_T, self.texts.bounds_S1[1:-1])]
        # 5. Its text, and its probability among the spans of its context: the probability of its start times that of
        # its end.
        answers = []
        for question, (first, last) in enumerate(pairwise(self.context_bounds_Q1.tolist())):
            start, end = characters_of_span(self, question, *spans_Q2[question].tolist())
            text = self.contexts[question][start:end]
            total = 0.0
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
    """Encode the splits of a task. Train decides for all splits whether questions may have no answer, and the longest
    answer. Prints it if train sets more than 30 tokens, or over 1 % are longer."""
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
    """Encode questions with their contexts, in windows."""
    before_question = task.template.removesuffix("{context}")
    room = tokenizer.room(config.max_length)
    prefixes = [before_question.replace("{question}", example.question) for example in examples]
    inputs = [prefix + example.context for prefix, example in zip(prefixes, examples, strict=True)]
    windows: list[np.ndarray] = []
    num_windows: list[int] = []
    context_tokens: list[np.ndarray] = []
    spans: list[np.ndarray] = []
    starts: list[int] = []
    answers: list[TokenSpan] = []
    candidates: list[TokenSpan] = []
    num_truncated = 0
    first = 0  # the index in K of the question's first context token
    encoded = tokenizer.tokenize(inputs, with_spans=True)
    for example, prefix, (ids, spans_T2) in zip(examples, prefixes, encoded, strict=True):
        # 1. Question and context were tokenized as one text; tokens that end within the prefix are the question's. A
        #    question that takes more than half of the room is cut.
        num_question = int(np.searchsorted(spans_T2[:, 1], len(prefix), side="right"))
        question = ids[: min(num_question, room // 2)]
        context = ids[num_question:]
        spans_K2 = np.maximum(spans_T2[num_question:] - len(prefix), 0)
        spans.append(spans_K2)
        # 2. Windows: the question, then a part of the context.
        parts = cut_windows(len(context), room - len(question), config)
        num_windows.append(len(parts))
        starts.append(len(tokenizer.opening) + len(question))
        for begin, end in parts:
            windows.append(np.concatenate([question, context[begin:end]]))
            context_tokens += [np.full(starts[-1], -1), np.arange(first + begin, first + end), np.full(1, -1)]
        # 3. The answer must be in a window, a candidate only in the context.
        num_covered = parts[-1][1]
        answers.append(tokens_of_answer(example.answers[0] if example.answers else None, spans_K2, first, num_covered))
        candidates += [tokens_of_answer(span, spans_K2, first, len(context)) for span in example.candidates]
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
        context_bounds_Q1=to_bounds([len(span) for span in spans]),
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
"""Context tokens as indices in K, from and up to; (-1, -1) for none."""


def cut_windows(num_tokens: int, room: int, config: FinetuneConfig) -> list[tuple[int, int]]:
    """Cut a context into windows of at most `room` tokens; the token head has the first one only.

    25 tokens, room for 10 and a `doc_stride` of 4: 0–10, 6–16, 12–22, 18–25. Each advances half of the room or more.
    """
    step = max(room - config.doc_stride, (room + 1) // 2)
    parts = [(0, min(room, num_tokens))]
    while config.qa_head == "span" and parts[-1][1] < num_tokens:
        begin = parts[-1][0] + step
        parts.append((begin, min(begin + room, num_tokens)))
    return parts


def tokens_of_answer(answer: Answer | None, spans_K2: np.ndarray, first: int, limit: int) -> TokenSpan:
    """Find the tokens that an answer's characters touch; (-1, -1) without an answer, or past `limit`."""
    if answer is not None:
        text, start = answer
        begin = int(np.searchsorted(spans_K2[:, 1], start, side="right"))
        end = int(np.searchsorted(spans_K2[:, 0], start + len(text), side="left"))
        if begin < end <= limit:
            return first + begin, first + end
    return -1, -1


def is_in_answer(split: Split, batch: Batch) -> np.ndarray:
    """Tell for each token, [T], whether it belongs to the first answer of its window's question."""
    context_T = split.context_tokens_T[batch.indices_T]
    answers_W2 = split.answers_Q2[split.questions_W[batch.samples]]
    answers_T2 = np.repeat(answers_W2, split.texts.lengths_S[batch.samples], axis=0)
    return (context_T >= 0) & (context_T >= answers_T2[:, 0]) & (context_T < answers_T2[:, 1])


def span_loss(logits_T2: Tensor, split: Split, batch: Batch, cell: CellContext) -> Tensor:
    """Sum two cross-entropies, of the answer's start and of its end, over windows, and halve the sum. Each is over the
    context and the end-of-text token, which is the target if a window does not contain the whole answer."""
    # 1. The choices in a window: its context and its last token, the end-of-text.
    bounds_W1 = to_bounds(split.texts.lengths_S[batch.samples])
    last_W = bounds_W1[1:] - 1
    is_choice_T = split.context_tokens_T[batch.indices_T] >= 0
    is_choice_T[last_W] = True
    # 2. The start and end of the answer in each window, as indices in the batch. Its tokens are neighbours, so the
    #    start follows from the end and from how many of them the window holds; unless it holds all, both are the
    #    end-of-text. (`reduceat` reduces each stretch between two bounds: here, each window.)
    inside_T = is_in_answer(split, batch)
    num_inside_W = np.add.reduceat(inside_T, bounds_W1[:-1])
    ends_W = np.maximum.reduceat(np.where(inside_T, np.arange(len(inside_T)), -1), bounds_W1[:-1])
    answers_W2 = split.answers_Q2[split.questions_W[batch.samples]]
    is_whole_W = (num_inside_W > 0) & (num_inside_W == answers_W2[:, 1] - answers_W2[:, 0])
    inside_W2 = np.stack([ends_W - num_inside_W + 1, ends_W], 1)
    targets_W2 = np.where(is_whole_W[:, None], inside_W2, last_W[:, None])
    # 3. Cross-entropy: logsumexp over a window's choices minus the logit of the right one, for start and for end.
    is_hidden_T = to_device(~is_choice_T, cell.device)
    masked_T2 = logits_T2.masked_fill(is_hidden_T[:, None], float("-inf"))
    logsumexp_W2 = segment_logsumexp(masked_T2, batch.layout.bounds_S1.long())
    return (logsumexp_W2 - masked_T2.gather(0, cell.on_device(targets_W2))).mean(1).sum()


def context_logits(split: Split, logits_T2: np.ndarray) -> np.ndarray:
    """Choose the logits of each context token, [K, 2], from the window with the most context on the token's poorer
    side. Tokens outside of all windows score lowest."""
    # The window of each context token, and how much context is left and right of it there (the window opens with
    # the question and closes with one end-of-text token).
    inside_T = np.flatnonzero(split.context_tokens_T >= 0)
    windows_T = np.repeat(np.arange(split.texts.num_samples), split.texts.lengths_S)[inside_T]
    opens_W = split.texts.bounds_S1[:-1] + split.context_starts_Q[split.questions_W]
    left = inside_T - opens_W[windows_T]
    right = split.texts.bounds_S1[1:][windows_T] - 2 - inside_T
    order = np.argsort(np.minimum(left, right), kind="stable")  # the last write to an index stays: the roomiest window
    logits_K2 = np.full((len(split.spans_K2), 2), LOWEST, dtype=np.float64)
    logits_K2[:, 0] *= -1  # of the token head: surely no answer
    logits_K2[split.context_tokens_T[inside_T[order]]] = logits_T2[inside_T[order]]
    return logits_K2


def tokens_of_spans(split: Split, spans_Q2: np.ndarray, is_empty_Q: np.ndarray) -> list[np.ndarray]:
    """List the tokens of spans of K, counted from the first of the input."""
    offsets_Q = split.context_starts_Q - split.context_bounds_Q1[:-1]
    tokens = []
    for (begin, end), offset, is_empty in zip(spans_Q2.tolist(), offsets_Q.tolist(), is_empty_Q, strict=True):
        tokens.append(np.arange(0) if is_empty else np.arange(begin + offset, end + offset))
    return tokens


def characters_of_span(split: Split, question: int, begin: int, end: int) -> tuple[int, int]:
    """Find the characters of a span of K in its context, with the marks of its last letter, and without blanks around
    them."""
    if begin == end:
        return 0, 0
    context = split.contexts[question]
    first, last = int(split.spans_K2[begin, 0]), end_of_marks(context, int(split.spans_K2[end - 1, 1]))
    text = context[first:last]
    first = last - len(text.lstrip())
    return first, first + len(text.strip())


def predict(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Find the answers, their characters in the context, their probability, and the lead of "no answer"."""
    inputs = []
    for index, (location, row) in enumerate(rows):
        question, context = text_column(location, row, "question"), text_column(location, row, "context")
        for name, text in {"question": question, "context": context}.items():
            if not text.strip():
                raise InputError(f"{location}: the {name} is empty: fill it in, or remove the row")
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
    return Predicted(answers, split.num_truncated, [*map(input_of, inputs)])
