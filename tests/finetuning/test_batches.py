import numpy as np
import pytest

from biphase.finetuning.batches import (
    IGNORED,
    EncodedTask,
    count_targets,
    cut,
    encode_task,
    evaluation_order,
    make_batch,
    training_order,
    vote,
    words_of_tokens,
)
from biphase.finetuning.fit import Encoder
from biphase.finetuning.tasks import TASKS, LabelledText, TaggedWords, TaskData

TEXTS = ("the dog", "Premise: a cat .\nHypothesis: a tree .", "", "<|mask|> and <|end_of_text|> are text")
SENTENCES = (
    TaggedWords("a", ("Zürich", "—", "naïve", "dog"), (7, 0, 0, 9)),
    TaggedWords("b", ("river",), (0,)),
    TaggedWords("c", ("🤖🤖", "it's", "the", "New\u00a0York"), (1, 0, 0, 7)),
)


def encode_texts(encoder: Encoder, max_length: int = 100) -> EncodedTask:
    examples = tuple(LabelledText(str(n), text, n % 3) for n, text in enumerate(TEXTS))
    return encode_task(TaskData(TASKS["snli"], "", examples, examples[:1], examples[:2], 0), encoder.keyed, max_length)


def encode_words(encoder: Encoder, max_length: int = 100) -> EncodedTask:
    data = TaskData(TASKS["wnut17"], "", SENTENCES, SENTENCES[:1], SENTENCES[1:], 0)
    return encode_task(data, encoder.keyed, max_length)


def test_texts_end_with_eos_and_decode_to_themselves(encoder: Encoder) -> None:
    split = encode_texts(encoder).train
    tokenizer = encoder.keyed.tokenizer
    for n, text in enumerate(TEXTS):
        ids = split.tokens_T[split.bounds_S1[n] : split.bounds_S1[n + 1]]
        assert ids[-1] == tokenizer.eos_token_id
        assert not np.isin(ids[:-1], tokenizer.all_special_ids).any()
        assert tokenizer.decode(ids[:-1]) == text
    assert split.gold_U.tolist() == [0, 1, 2, 0]
    assert split.units_T is None and split.num_truncated == 0


def test_splits_are_encoded_alike(encoder: Encoder) -> None:
    encoded = encode_texts(encoder)
    assert (encoded.test.tokens_T == encoded.train.tokens_T[: encoded.test.bounds_S1[-1]]).all()
    with pytest.raises(ValueError, match="read-only"):
        encoded.train.tokens_T[0] = 0


def test_every_token_belongs_to_its_word(encoder: Encoder) -> None:
    split = encode_words(encoder).train
    tokenizer = encoder.keyed.tokenizer
    assert split.units_T is not None
    for n, sentence in enumerate(SENTENCES):
        tokens = slice(split.bounds_S1[n], split.bounds_S1[n + 1])
        ids, words = split.tokens_T[tokens], split.units_T[tokens]
        assert words[-1] == -1
        for number, word in enumerate(sentence.words):
            mine = ids[words == split.unit_bounds_S1[n] + number]
            assert tokenizer.decode(mine).strip() == word
    assert split.gold_U.tolist() == [7, 0, 0, 9, 0, 1, 0, 0, 7]


def test_a_space_belongs_to_the_word_after_it() -> None:
    """`ab cd`: tokens `a`, `b`, ` `, `cd`."""
    assert words_of_tokens(("ab", "cd"), np.array([0, 1, 2, 4])).tolist() == [0, 0, 1, 1]


def test_words_cut_off_stay_in_gold(encoder: Encoder) -> None:
    split = encode_words(encoder, max_length=4).train
    assert split.num_truncated == 2
    assert split.lengths_S.max() == 4
    assert len(split.gold_U) == 9
    voted = vote(np.full(len(split.tokens_T), 5), split.units_T, 9, 13, default=0)
    assert set(np.flatnonzero(voted == 0)) == set(range(9)) - set(split.units_T.tolist())


def test_batch_is_its_samples(encoder: Encoder) -> None:
    split = encode_words(encoder).train
    assert split.units_T is not None
    samples = np.array([2, 0])
    batch = make_batch(split, samples)
    pieces = [np.arange(split.bounds_S1[n], split.bounds_S1[n + 1]) for n in samples]
    assert (batch.rows == np.concatenate(pieces)).all()
    assert (batch.tokens_T.numpy() == split.tokens_T[batch.rows]).all()
    assert batch.positions_T.tolist() == [*range(len(pieces[0])), *range(len(pieces[1]))]
    assert batch.layout.bounds_S1.tolist() == [0, len(pieces[0]), len(batch.rows)]
    wanted = [split.gold_U[word] if word >= 0 else IGNORED for word in split.units_T[batch.rows]]
    assert batch.targets.tolist() == wanted
    assert count_targets(split, samples) == sum(target != IGNORED for target in wanted)
    texts = encode_texts(encoder).train
    assert make_batch(texts, np.array([3, 1])).targets.tolist() == [0, 1]
    assert count_targets(texts, np.array([3, 1])) == 2


def test_majority_vote() -> None:
    units = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, -1, 4, -1])
    labels = np.array([3, 1, 1, 2, 0, 1, 0, 0, 1, 3, 2, 3])
    assert vote(labels, units, num_units=6, num_labels=4, default=0).tolist() == [1, 2, 1, 0, 2, 0]


def test_training_order() -> None:
    steps = list(training_order(num_samples=10, batch_size=4, num_steps=7, seed=3))
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(np.concatenate(steps[:3])) == sorted(np.concatenate(steps[3:6])) == list(range(10))
    assert not (np.concatenate(steps[:3]) == np.concatenate(steps[3:6])).all()
    again = training_order(10, 4, 7, seed=3)
    assert all((a == b).all() for a, b in zip(steps, again, strict=True))


def test_evaluation_order_holds_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    lengths[17] = 500
    parts = evaluation_order(lengths, 100)
    assert parts[0].tolist() == [17]
    assert sorted(np.concatenate(parts)) == list(range(200))
    assert all(lengths[part].sum() <= 100 for part in parts[1:])


def test_cut_fills_parts() -> None:
    lengths = np.array([5, 5, 5, 12, 1])
    assert [part.tolist() for part in cut(np.array([0, 1, 2, 3, 4]), lengths, 10)] == [[0, 1], [2], [3], [4]]
    assert cut(np.array([], dtype=int), lengths, 10) == []
