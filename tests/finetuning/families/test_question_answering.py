from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import TokenizedTexts, pack
from biphase.finetuning.families import question_answering
from biphase.finetuning.families.question_answering import (
    Split,
    best_spans,
    characters_of_span,
    cut_windows,
    encode_questions,
    span_loss,
)
from biphase.finetuning.loss import segment_logsumexp
from biphase.tasks.examples import Question
from biphase.tasks.spec import task_table
from biphase.tasks.splits import TaskData

from ..conftest import make_cell

CONTEXT = "The naïve dog — “Rex” — sleeps near the river. " * 2 + "A cat named Zoë watches 🤖 robots."
QUESTIONS = (
    Question("a", "Who sleeps?", CONTEXT, (("naïve dog", 4), ("dog", 10))),
    Question("b", "Who watches?", CONTEXT, (("Zoë", CONTEXT.index("Zoë")),)),
    Question("c", "Who flies?", CONTEXT, ()),
)


def encode(encoder: Encoder, **settings: object) -> Split:
    config = FinetuneConfig.model_validate({"max_length": 256} | settings)
    return encode_questions(task_table()["squad_v2"], QUESTIONS, encoder.tokenizer, config, has_unanswerable=True)


def test_an_input_is_question_context_and_end_of_text(encoder: Encoder) -> None:
    split = encode(encoder)
    tokenizer = encoder.tokenizer.pretrained
    first = split.texts.tokens_T[: split.texts.bounds_S1[1]]
    assert tokenizer.decode(first[:-1]) == f"Question: Who sleeps?\nContext: {CONTEXT}"
    assert first[-1] == tokenizer.eos_token_id
    assert split.num_truncated == 0 and split.questions_W.tolist() == [0, 1, 2]


def test_answers_are_found_again_as_text(encoder: Encoder) -> None:
    split = encode(encoder)
    for number, answer in enumerate(("naïve dog", "Zoë")):
        first, last = characters_of_span(split, number, *split.answers_Q2[number])
        assert CONTEXT[first:last] == answer
    assert split.answers_Q2[2].tolist() == [-1, -1]
    assert split.gold == [["naïve dog", "dog"], ["Zoë"], []]


def test_an_answer_has_the_marks_that_the_tokenizer_drops(encoder: Encoder) -> None:
    """BERT's uncased tokenizers end the last token before them."""
    context = "यह हिंदी में है, in Krome\u030cr\u030ci\u0301z\u030c."
    tokens = np.array([[3, 7], [9, 10], [20, len(context) - 2]])
    split = replace(encode(encoder), contexts=[context], spans_K2=tokens)
    spans = [characters_of_span(split, 0, index, index + 1) for index in range(3)]
    assert [context[first:last] for first, last in spans] == ["हिंदी", "में", context[20:-1]]


def test_long_contexts_become_overlapping_windows(encoder: Encoder) -> None:
    split = encode(encoder, max_length=64, doc_stride=10)
    assert split.num_truncated == 0 and split.texts.lengths_S.max() == 64
    bounds = split.texts.bounds_S1.tolist()
    for question, (first, last) in enumerate(pairwise(split.context_bounds_Q1.tolist())):
        windows = [
            split.context_tokens_T[a:b] for w, (a, b) in enumerate(pairwise(bounds)) if split.questions_W[w] == question
        ]
        inside = [window[window >= 0] for window in windows]
        assert set(np.concatenate(inside)) == set(range(first, last))
        for left, right in pairwise(inside):
            assert left[-1] - right[0] + 1 == 10
    whole = encode(encoder)
    is_context, is_whole = split.context_tokens_T >= 0, whole.context_tokens_T >= 0
    ids_K = whole.texts.tokens_T[is_whole][np.argsort(whole.context_tokens_T[is_whole])]
    assert (split.texts.tokens_T[is_context] == ids_K[split.context_tokens_T[is_context]]).all()


def test_the_token_head_has_one_window_and_counts_what_it_cuts(encoder: Encoder) -> None:
    split = encode(encoder, max_length=64, qa_head="token")
    assert split.questions_W.tolist() == [0, 1, 2] and split.num_truncated == 3
    assert split.answers_Q2[0, 0] >= 0 and split.answers_Q2[1].tolist() == [-1, -1]


def test_windows_of_a_short_context() -> None:
    assert cut_windows(5, 10, FinetuneConfig()) == [(0, 5)]
    assert cut_windows(25, 10, FinetuneConfig(doc_stride=4)) == [(0, 10), (6, 16), (12, 22), (18, 25)]
    assert cut_windows(25, 10, FinetuneConfig(doc_stride=400))[-1][1] == 25


def test_span_loss_is_cross_entropy_over_context_and_end(encoder: Encoder) -> None:
    split = encode(encoder, max_length=64, doc_stride=10)
    cell = make_cell("squad_v2")
    windows = np.arange(split.texts.num_samples)
    batch = pack(split.texts, windows, cell)
    logits = torch.randn(len(batch.indices_T), 2, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for a, b in pairwise(split.texts.bounds_S1.tolist()):
        window = int(np.searchsorted(split.texts.bounds_S1, a))
        places = split.context_tokens_T[a:b]
        choices = [*np.flatnonzero(places >= 0).tolist(), b - a - 1]
        begin, end = split.answers_Q2[split.questions_W[window]].tolist()
        where = [choices.index(i) for i in np.flatnonzero(np.isin(places, range(begin, end)) & (places >= 0)).tolist()]
        is_whole = len(where) == end - begin > 0
        targets = (where[0], where[-1]) if is_whole else (len(choices) - 1,) * 2
        for side, target in enumerate(targets):
            expected += -logits[a:b, side][choices].log_softmax(0)[target].item() / 2
    assert span_loss(logits, split, batch, cell).item() == pytest.approx(expected, rel=1e-5)


def predict_from(
    logits_T2: np.ndarray, split: Split, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> list[dict[str, Any]]:
    """What a network with these logits predicts."""
    logits_T2 = logits_T2.astype(np.float32)
    monkeypatch.setattr(TokenizedTexts, "predict", lambda *_, **__: logits_T2)
    network: Any = None
    return split.predict(network, make_cell("squad_v2", **settings))


def roomiest_places(split: Split, question: int) -> list[int]:
    """The slow twin: of each context token the place in the window with most context on its poorer side, else the
    last."""
    best: dict[int, tuple[int, int]] = {}
    for window in np.flatnonzero(split.questions_W == question).tolist():
        places = range(split.texts.bounds_S1[window], split.texts.bounds_S1[window + 1])
        inside = [place for place in places if split.context_tokens_T[place] >= 0]
        for number, place in enumerate(inside):
            room = min(number, len(inside) - 1 - number)
            best[int(split.context_tokens_T[place])] = max(
                best.get(int(split.context_tokens_T[place]), (-1, 0)), (room, place)
            )
    return [best[token][1] for token in sorted(best)]


@pytest.mark.parametrize("seed", range(4))
def test_the_best_span_over_all_windows(encoder: Encoder, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The highest start + end of at most six tokens, unless both logits of the end of one window are higher."""
    split = encode(encoder, max_length=64, doc_stride=40)
    logits_T2 = np.random.default_rng(seed).normal(0, 3, (len(split.texts.tokens_T), 2)).astype(np.float32)
    ends_W = split.texts.bounds_S1[1:] - 1
    logits_T2[ends_W] -= 20
    logits_T2[ends_W[split.questions_W == 1]] += 70
    found = predict_from(logits_T2, split, monkeypatch, max_answer_tokens=6)
    for question in range(3):
        rows = logits_T2[roomiest_places(split, question)].astype(float)
        choices = [(i, j) for i in range(len(rows)) for j in range(i, min(i + 6, len(rows)))]
        scores = [rows[i, 0] + rows[j, 1] for i, j in choices]
        begin, last = choices[int(np.argmax(scores))]
        first = split.context_bounds_Q1[question]
        text = CONTEXT[split.spans_K2[first + begin, 0] : split.spans_K2[first + last, 1]].strip()
        null = min(logits_T2[end].sum() for end in ends_W[split.questions_W == question])
        assert found[question]["best_text"] == text
        assert found[question]["no_answer_score"] == pytest.approx(null - max(scores), rel=1e-5)
        assert found[question]["text"] == ("" if null > max(scores) else text)
        chances = [torch.tensor(rows[:, side]).softmax(0)[at] for side, at in enumerate((begin, last))]
        assert found[question]["probability"] == pytest.approx(float(chances[0] * chances[1]), rel=1e-4)
        start = split.context_starts_Q[question] + begin
        assert found[question]["selected"].tolist() == (
            [] if null > max(scores) else [*range(start, start + last + 1 - begin)]
        )
    best = [answer["best_text"] for answer in found]
    assert [answer["text"] for answer in found] == [best[0], "", best[2]]
    without = predict_from(logits_T2, replace(split, has_unanswerable=False), monkeypatch, max_answer_tokens=6)
    assert [answer["text"] for answer in without] == [answer["best_text"] for answer in without] == best


def test_the_best_of_the_candidates(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three tokens, one of one, and one that was cut off; the second question has none."""
    split = encode(encoder)
    logits_T2 = np.random.default_rng(0).normal(0, 3, (len(split.texts.tokens_T), 2)).astype(np.float32)
    third = split.context_bounds_Q1[2]
    candidates = np.array([[4, 7], [9, 10], [-1, -1], [-1, -1], [third, third + 2]])
    split = replace(split, candidates_C2=candidates, candidate_bounds_Q1=np.array([0, 3, 4, 5]), has_unanswerable=False)
    starts = split.texts.bounds_S1[0] + split.context_starts_Q[0]
    for winner, (begin, end) in enumerate(([4, 7], [9, 10])):
        changed = logits_T2.copy()
        changed[starts + end - 1, 1] = 20
        found = predict_from(changed, split, monkeypatch)
        assert found[0]["best_text"] == CONTEXT[split.spans_K2[begin, 0] : split.spans_K2[end - 1, 1]].strip(), winner
        score = changed[starts + begin, 0] + 20
        assert found[0]["no_answer_score"] == pytest.approx(changed[split.texts.bounds_S1[1] - 1].sum() - score)
        assert found[2]["best_text"] == CONTEXT[: split.spans_K2[third + 1, 1]].strip()
    plain = predict_from(logits_T2, encode(encoder), monkeypatch)
    assert found[1]["best_text"] == plain[1]["best_text"]


def test_the_token_head_sums_up_margins(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of tokens that are labelled 1 on balance; none where no token is; all that are labelled are selected."""
    split = encode(encoder, qa_head="token")
    logits_T2 = np.zeros((len(split.texts.tokens_T), 2), dtype=np.float32)
    logits_T2[:, 0] = 1.0
    begin = split.texts.bounds_S1[0] + split.context_starts_Q[0]
    logits_T2[begin + 3 : begin + 8, 1] = 3.0
    logits_T2[begin + 5, 1] = 0.5  # worth going on for
    logits_T2[begin - 2, 1] = 9.0  # in the question
    found = predict_from(logits_T2, split, monkeypatch, qa_head="token")
    assert found[0]["text"] == CONTEXT[split.spans_K2[3, 0] : split.spans_K2[7, 1]].strip()
    assert found[0]["selected"].tolist() == [int(split.context_starts_Q[0]) + at for at in (-2, 3, 4, 6, 7)]
    assert found[0]["no_answer_score"] == pytest.approx(-(4 * 2 - 0.5))
    assert [(answer["text"], answer["selected"].tolist()) for answer in found[1:]] == [("", []), ("", [])]


def test_token_loss_labels_the_first_answer(encoder: Encoder) -> None:
    split = encode(encoder, qa_head="token")
    cell = make_cell("squad_v2", qa_head="token")
    windows = np.array([1, 0])
    batch = pack(split.texts, windows, cell)
    sure = torch.zeros(len(batch.indices_T), 2)
    begins, ends = split.answers_Q2[[1, 0]].T
    inside = np.zeros(len(batch.indices_T), dtype=bool)
    places = split.context_tokens_T[batch.indices_T]
    for begin, end in zip(begins, ends, strict=True):
        inside |= (places >= begin) & (places < end)
    sure[inside, 1] = 50.0
    sure[~inside, 0] = 50.0
    assert split.loss(sure, batch, windows, cell).item() == pytest.approx(0, abs=1e-6)
    assert split.loss(-sure, batch, windows, cell).item() == pytest.approx(50, rel=1e-4)


@pytest.mark.parametrize(("num_long", "given"), [(0, None), (3, None), (3, 20)])
def test_the_longest_answer_is_chosen_from_train(
    encoder: Encoder, capsys: pytest.CaptureFixture[str], num_long: int, given: int | None
) -> None:
    long, short = ("dog " * 40 + "dog", 0), ("dog", 0)
    train = [Question(str(n), "Who?", "dog " * 60, (long if n < num_long else short,)) for n in range(100)]
    task = task_table()["squad"].model_copy(update={"name": "mine"})
    data = TaskData(task, tuple(train), tuple(train[:2]), tuple(train[:2]), 0)
    splits = question_answering.encode(data, encoder.tokenizer, FinetuneConfig(max_answer_tokens=given))
    begin, end = splits["train"].answers_Q2[0].tolist()
    assert {split.max_answer_tokens for split in splits.values()} == {max(30, end - begin)}
    assert (end - begin > 100) == (num_long > 0)
    assert ("tokens are predicted" in capsys.readouterr().err) == (num_long > 0)


def reference_best_span(starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> tuple[int, int]:
    """The slow twin of `best_spans`, for one question."""
    pairs = [(i, j) for i in range(len(starts)) for j in range(i, min(i + max_tokens, len(starts)))]
    start, last = max(pairs, key=lambda pair: (starts[pair[0]] + ends[pair[1]], pair[0] - pair[1], -pair[0]))
    return start, last + 1


def test_best_spans_equal_their_slow_twin() -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 30, 2]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    starts, ends = rng.normal(size=(2, bounds[-1])).round(1)
    for max_tokens in (1, 4, 30):
        spans, scores = best_spans(starts, ends, bounds, max_tokens)
        for number, (a, b) in enumerate(pairwise(bounds)):
            begin, end = reference_best_span(starts[a:b], ends[a:b], max_tokens)
            assert scores[number] == pytest.approx(starts[a:b][begin] + ends[a:b][end - 1])
            assert end - begin <= max_tokens
            assert starts[spans[number, 0]] + ends[spans[number, 1] - 1] == pytest.approx(scores[number])


def test_segment_logsumexp() -> None:
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    bounds = torch.tensor([0, 1, 5, 7])
    found = segment_logsumexp(logits, bounds)
    wanted = torch.stack([logits[a:b].logsumexp(0) for a, b in pairwise(bounds.tolist())])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (found, wanted)))


@pytest.mark.parametrize("name", ["question", "context"])
def test_neither_question_nor_context_may_be_empty(name: str) -> None:
    nothing: Any = None  # no model is needed to see it
    row = {"question": "who?", "context": "it is Ann"} | {name: " "}
    with pytest.raises(InputError, match=rf"^rows\.csv:2: the {name} is empty: fill it in, or remove the row"):
        question_answering.predict(nothing, nothing, nothing, [("rows.csv:2", row)])
