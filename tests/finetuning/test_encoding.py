import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers

from biphase.encoder.attention import PAD_TO_MULTIPLE_OF
from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import (
    HashedTokenizer,
    TokenizedTexts,
    cut_longest,
    pack,
    split_by_tokens,
    to_bounds,
)
from biphase.finetuning.fit import training_order
from biphase.tasks.examples import fill_row
from biphase.tasks.spec import Task

from .conftest import make_cell

TEXTS = ["the dog", "Premise: a cat .\nHypothesis: a tree .", "", "<|mask|> and <|end_of_text|> are text"]


def fill_template(template: str, row: dict[str, str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    task = Task(
        name="pairs", family="sequence_classification", metric="accuracy", template=template, classes=("no", "yes")
    )
    return fill_row(task, "row 1", row)


def test_texts_end_with_eos_and_decode_to_themselves(encoder: Encoder) -> None:
    texts = encoder.tokenizer.encode_texts(TEXTS, 100)
    tokenizer = encoder.tokenizer.pretrained
    assert texts.num_samples == 4 and len(texts.truncated) == 0
    for number, text in enumerate(TEXTS):
        ids = texts.tokens_T[texts.bounds_S1[number] : texts.bounds_S1[number + 1]]
        assert ids[-1] == tokenizer.eos_token_id
        assert not np.isin(ids[:-1], tokenizer.all_special_ids).any()
        assert tokenizer.decode(ids[:-1]) == text


def test_long_texts_are_cut_and_named(encoder: Encoder) -> None:
    whole, cut = encoder.tokenizer.encode_texts(TEXTS, 100), encoder.tokenizer.encode_texts(TEXTS, 6)
    assert cut.lengths_S.tolist() == np.minimum(whole.lengths_S, 6).tolist()
    assert cut.truncated.tolist() == np.flatnonzero(whole.lengths_S > 6).tolist() == [1, 3]
    assert cut.tokens_T[cut.bounds_S1[1:] - 1].tolist() == [encoder.tokenizer.closing] * 4


def test_a_classification_token_opens_inputs(encoder: Encoder) -> None:
    """As BERT's tokenizer has it: [CLS] text [SEP]."""

    class Bert:
        cls_token_id, sep_token_id, eos_token_id = 7, 8, 9
        backend_tokenizer = encoder.tokenizer.pretrained.backend_tokenizer

    texts = HashedTokenizer(Bert()).encode_texts(["the dog", ""], 100)
    plain = encoder.tokenizer.encode_texts(["the dog", ""], 100)
    first = texts.tokens_T[: texts.bounds_S1[1]]
    assert first[0] == 7 and first[-1] == 8
    assert (first[1:-1] == plain.tokens_T[: plain.bounds_S1[1] - 1]).all()
    assert texts.tokens_T[texts.bounds_S1[1] :].tolist() == [7, 8]


def test_spans_are_characters(encoder: Encoder) -> None:
    text = "naïve 🤖 dogs"
    [(ids, spans)] = encoder.tokenizer.tokenize([text], with_spans=True)
    assert len(spans) == len(ids)
    assert spans[:, 1].max() == len(text)
    assert spans[-1].tolist()[1] == len(text)


@pytest.mark.parametrize("lengths", [(40, 3), (3, 40), (20, 20), (21, 20), (20, 21), (9, 9), (12, 60)])
@pytest.mark.parametrize("room", [12, 17, 18])
def test_the_longer_text_of_a_pair_is_cut_as_transformers_does(
    encoder: Encoder, lengths: tuple[int, int], room: int
) -> None:
    """Held against the truncation of transformers' own tokenizer, which gets both texts without the template."""
    texts = {"first": " dog" * lengths[0], "second": " cat" * lengths[1]}
    text, columns = fill_template("{first}{second}", texts)
    theirs = copy.deepcopy(encoder.tokenizer.pretrained)
    wanted = theirs(
        texts["first"], texts["second"], truncation="longest_first", max_length=room, add_special_tokens=False
    )["input_ids"]
    encoded = encoder.tokenizer.encode_filled([(text, columns)], room + 1)
    assert encoded.tokens_T[:-1].tolist() == wanted
    whole = theirs(texts["first"], texts["second"], truncation=False, add_special_tokens=False)["input_ids"]
    assert encoded.truncated.tolist() == [0] * (len(whole) > room)


def test_both_hypotheses_of_a_long_premise_are_seen(encoder: Encoder) -> None:
    template = "Premise: {premise}\nHypothesis: {hypothesis}"
    said = ("no dog is there", "a cat is there")
    pairs = [{"premise": "the dog sees a cat " * 60, "hypothesis": hypothesis} for hypothesis in said]
    encoded = encoder.tokenizer.encode_filled([fill_template(template, pair) for pair in pairs], 64)
    first, second = (encoded.tokens_T[a:b] for a, b in zip(encoded.bounds_S1, encoded.bounds_S1[1:], strict=False))
    assert len(first) == len(second) == 64 and encoded.truncated.tolist() == [0, 1]
    for sample, pair in zip((first, second), pairs, strict=True):
        decoded = encoder.tokenizer.pretrained.decode(sample[:-1])
        assert decoded.endswith("\nHypothesis: " + pair["hypothesis"]) and decoded.startswith("Premise: the dog")


def test_the_end_of_a_template_stays_where_its_only_column_is_cut(encoder: Encoder) -> None:
    filled = [fill_template("Text: {a}\nIt is:", {"a": "the dog sees a cat " * number}) for number in (60, 1)]
    encoded = encoder.tokenizer.encode_filled(filled, 64)
    assert encoded.truncated.tolist() == [0] and encoded.lengths_S[0] == 64
    decoded = encoder.tokenizer.pretrained.decode(encoded.tokens_T[:63])
    assert decoded.startswith("Text: the dog sees") and decoded.endswith("\nIt is:")
    plain = [fill_template("Text: {a}", {"a": "the dog sees a cat " * 60})]
    cut, texts = (encoder.tokenizer.encode_filled(plain, 64), encoder.tokenizer.encode_texts([plain[0][0]], 64))
    assert (cut.tokens_T == texts.tokens_T).all() and cut.truncated.tolist() == [0]


def test_caps_of_columns() -> None:
    spans = np.array([(n, n + 1) for n in range(17)])
    kept = cut_longest(spans, [(0, 9), (9, 11), (11, 17)], 12)
    assert kept.tolist() == [0, 1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 15]
    assert len(cut_longest(spans, [(0, 2), (3, 5)], 7)) == 7  # more text around the columns than there is room


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (models.WordLevel({"a": 0}, unk_token="b"), "Missing .UNK. token"),  # a bare `Exception`
        (models.BPE({"a": 0}, [], unk_token="b"), "no entry found|retry-limit"),  # a panic, which is none
    ],
)
def test_a_tokenizer_that_fails_on_a_text_is_told(model: models.Model, reason: str) -> None:
    backend = Tokenizer(model)
    if isinstance(model, models.BPE):
        backend.normalizer = normalizers.Replace(Regex("(a+)+$"), "x")
    with pytest.raises(InputError, match=rf"the tokenizer cannot read a text \(.*({reason})"):
        list(HashedTokenizer(SimpleNamespace(backend_tokenizer=backend)).tokenize(["a" * 40 + "!"]))


CELL = make_cell("snli", microbatch_tokens=100)


def texts_of(lengths: list[int]) -> TokenizedTexts:
    return TokenizedTexts(np.arange(sum(lengths), dtype=np.int32), to_bounds(lengths), np.zeros(0, dtype=np.int64))


def test_batch_is_its_samples() -> None:
    texts = texts_of([3, 2, 4])
    batch = pack(texts, np.array([2, 0, 2]), CELL)
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 0, 1, 2, 5, 6, 7, 8]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]
    assert batch.layout.bounds_S1.tolist() == [0, 4, 7, 11] and not batch.layout.causal
    assert batch.indices_T.tolist() == batch.tokens_T.tolist()
    assert batch.layout.num_padding == PAD_TO_MULTIPLE_OF - 11


def test_training_order() -> None:
    items, config = np.arange(20, 30), FinetuneConfig(batch_size=4, seed=3)
    steps = list(training_order(items, config, num_steps=7))
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(np.concatenate(steps[:3])) == sorted(np.concatenate(steps[3:6])) == items.tolist()
    assert not (np.concatenate(steps[:3]) == np.concatenate(steps[3:6])).all()
    again = training_order(items, config, 7)
    assert all((a == b).all() for a, b in zip(steps, again, strict=True))


def test_evaluation_sees_each_sample_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    lengths[17] = 500
    texts = texts_of(lengths)
    chosen = np.arange(0, 200, 2)
    chosen = np.append(chosen, 17)

    class Sizes(torch.nn.Module):
        def forward(self, batch):
            return torch.tensor(len(batch.tokens_T))

    found = [(batch, int(size)) for batch, size in texts.outputs(Sizes(), chosen, CELL)]
    assert found[0][0].samples.tolist() == [17]
    assert sorted(np.concatenate([batch.samples for batch, _ in found])) == sorted(chosen)
    assert all(size <= 100 for _, size in found[1:])


def test_outputs_stand_where_their_samples_and_tokens_do() -> None:
    """However batches are ordered and cut."""
    texts = texts_of(np.random.default_rng(0).integers(1, 50, 40).tolist())

    class Tokens(torch.nn.Module):
        def forward(self, batch):
            return batch.tokens_T[:, None].float()

    class Firsts(torch.nn.Module):
        def forward(self, batch):
            return batch.tokens_T[batch.layout.bounds_S1[:-1].long()][:, None].float()

    of_tokens = make_cell("wnut17", microbatch_tokens=100)
    assert texts.predict(Tokens(), of_tokens, 1)[:, 0].tolist() == texts.tokens_T.tolist()
    assert texts.predict(Firsts(), CELL, 1)[:, 0].tolist() == texts.bounds_S1[:-1].tolist()


def test_cut_fills_parts() -> None:
    lengths = np.array([5, 5, 5, 12, 1])
    assert [part.tolist() for part in split_by_tokens(np.array([0, 1, 2, 3, 4]), lengths, 10)] == [
        [0, 1],
        [2],
        [3],
        [4],
    ]
    assert split_by_tokens(np.array([], dtype=int), lengths, 10) == []


def test_a_tokenizer_is_copied_once_for_all_its_texts(encoder: Encoder) -> None:
    """Predictions call it for every few hundred rows; a copy of a large vocabulary takes longer than they do."""
    num_copies = 0

    def to_str() -> str:
        nonlocal num_copies
        num_copies += 1
        return encoder.tokenizer.pretrained.backend_tokenizer.to_str()

    tokenizer = HashedTokenizer(SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=to_str)))
    for _ in range(3):
        assert [ids.tolist() for ids, _ in tokenizer.tokenize(TEXTS)]
    assert num_copies == 1
