from itertools import pairwise

import numpy as np
import pytest
import torch

from biphase.finetuning.batches import pack
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoders import Encoder
from biphase.finetuning.families.question_answering import (
    QuestionSplit,
    characters_of_span,
    cut_windows,
    encode_questions,
    encode_task,
    span_loss,
    token_loss,
)
from biphase.tasks.answers import Answer
from biphase.tasks.examples import Question, TaskData
from biphase.tasks.spec import task_table

from ..conftest import make_cell

CONTEXT = "The naïve dog — “Rex” — sleeps near the river. " * 2 + "A cat named Zoë watches 🤖 robots."
QUESTIONS = (
    Question("a", "Who sleeps?", CONTEXT, (Answer("naïve dog", 4), Answer("dog", 10))),
    Question("b", "Who watches?", CONTEXT, (Answer("Zoë", CONTEXT.index("Zoë")),)),
    Question("c", "Who flies?", CONTEXT, ()),
)


def encode(encoder: Encoder, **settings: object) -> QuestionSplit:
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


def test_token_loss_labels_the_first_answer(encoder: Encoder) -> None:
    split = encode(encoder, qa_head="token")
    cell = make_cell("squad_v2", qa_head="token")
    batch = pack(split.texts, np.array([1, 0]), cell)
    sure = torch.zeros(len(batch.indices_T), 2)
    begins, ends = split.answers_Q2[[1, 0]].T
    inside = np.zeros(len(batch.indices_T), dtype=bool)
    places = split.context_tokens_T[batch.indices_T]
    for begin, end in zip(begins, ends, strict=True):
        inside |= (places >= begin) & (places < end)
    sure[inside, 1] = 50.0
    sure[~inside, 0] = 50.0
    assert token_loss(sure, split, batch, cell).item() == pytest.approx(0, abs=1e-6)
    assert token_loss(-sure, split, batch, cell).item() == pytest.approx(50 * len(sure), rel=1e-4)


@pytest.mark.parametrize(("num_long", "given"), [(0, None), (3, None), (3, 20)])
def test_the_longest_answer_is_chosen_from_train(
    encoder: Encoder, capsys: pytest.CaptureFixture[str], num_long: int, given: int | None
) -> None:
    long, short = Answer("dog " * 40 + "dog", 0), Answer("dog", 0)
    train = [Question(str(n), "Who?", "dog " * 60, (long if n < num_long else short,)) for n in range(100)]
    task = task_table()["squad"].model_copy(update={"name": "mine"})
    data = TaskData(task, "here", tuple(train), tuple(train[:2]), tuple(train[:2]), 0)
    encoded = encode_task(data, encoder.tokenizer, FinetuneConfig(max_answer_tokens=given))
    begin, end = encoded.splits["train"].answers_Q2[0].tolist()
    assert {split.max_answer_tokens for split in encoded.splits.values()} == {max(30, end - begin)}
    assert (end - begin > 100) == (num_long > 0)
    assert ("tokens are predicted" in capsys.readouterr().err) == (num_long > 0)
