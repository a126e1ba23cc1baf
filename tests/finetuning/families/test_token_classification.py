import numpy as np
import pytest

from biphase.encoder.models import Encoder
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.families.token_classification import (
    Split,
    encode_words,
    tag_rows,
    vote,
)
from biphase.tasks.examples import TaggedWords

SENTENCES = (
    TaggedWords("a", ("Zürich", "—", "naïve", "dog"), (7, 0, 0, 9)),
    TaggedWords("b", ("river",), (0,)),
    TaggedWords("c", ("🤖🤖", "it's", "the", "New\u00a0York"), (1, 0, 0, 7)),
)


def encode(encoder: Encoder, max_length: int = 100) -> Split:
    return encode_words(SENTENCES, encoder.tokenizer, FinetuneConfig(max_length=max_length))


def test_every_token_belongs_to_its_word(encoder: Encoder) -> None:
    split = encode(encoder)
    tokenizer = encoder.tokenizer.pretrained
    for number, sentence in enumerate(SENTENCES):
        tokens = slice(split.texts.bounds_S1[number], split.texts.bounds_S1[number + 1])
        ids, words = split.texts.tokens_T[tokens], split.words_T[tokens]
        assert words[-1] == -1
        for place, word in enumerate(sentence.words):
            mine = ids[words == split.word_bounds_S1[number] + place]
            assert tokenizer.decode(mine).strip() == word
    assert split.tags_W.tolist() == [7, 0, 0, 9, 0, 1, 0, 0, 7]


def test_a_space_belongs_to_the_word_after_it(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ab cd`: tokens `a`, `b`, ` `, `cd`."""
    tokens = np.arange(4, dtype=np.int32), np.array([[0, 1], [1, 2], [2, 3], [3, 5]], dtype=np.int32)
    monkeypatch.setattr(type(encoder.tokenizer), "tokenize", lambda *_, **__: iter([tokens]))
    sentences = [TaggedWords("a", ("ab", "cd"), (0, 0))]
    split = encode_words(sentences, encoder.tokenizer, FinetuneConfig())
    assert split.words_T.tolist() == [0, 0, 1, 1, -1]


def test_words_cut_off_stay_in_gold(encoder: Encoder) -> None:
    split = encode(encoder, max_length=4)
    assert split.num_truncated == 2 and split.texts.lengths_S.max() == 4
    assert len(split.tags_W) == 9 and len(split.words_T) == len(split.texts.tokens_T)
    voted = vote(np.full(len(split.words_T), 5), split.words_T, 9, 13, default=0)
    assert set(np.flatnonzero(voted == 0)) == set(range(9)) - set(split.words_T.tolist())


def test_majority_vote() -> None:
    words = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, -1, 4, -1])
    labels = np.array([3, 1, 1, 2, 0, 1, 0, 0, 1, 3, 2, 3])
    assert vote(labels, words, num_words=6, num_labels=4, default=-1).tolist() == [1, 2, 1, -1, 2, -1]


def test_a_row_has_the_tags_of_its_words(encoder: Encoder) -> None:
    """A word without a prediction has none."""
    names = [f"t{number}" for number in range(10)]
    predicted = np.array([7, -1, 0, 9, 1, 2, 3, 4, 5])
    first, second, _ = tag_rows(encode(encoder), (predicted, np.arange(9) / 7), names)
    assert first == {
        "id": "a",
        "gold": ["t7", "t0", "t0", "t9"],
        "predicted": ["t7", "", "t0", "t9"],
        "probabilities": [0, 0.14286, 0.28571, 0.42857],
    }
    assert second == {"id": "b", "gold": ["t0"], "predicted": ["t1"], "probabilities": [0.57143]}
