from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from biphase.finetuning.encoders import Encoder
from biphase.finetuning.encoding import KeyedTokenizer, Texts, encode, load_record, save_record, tokenize

TEXTS = ["the dog", "Premise: a cat .\nHypothesis: a tree .", "", "<|mask|> and <|end_of_text|> are text"]


def test_texts_end_with_eos_and_decode_to_themselves(encoder: Encoder) -> None:
    texts = encode(encoder.keyed, TEXTS, 100)
    tokenizer = encoder.keyed.tokenizer
    assert texts.num_samples == 4 and len(texts.truncated) == 0
    for number, text in enumerate(TEXTS):
        ids = texts.tokens_T[texts.bounds_S1[number] : texts.bounds_S1[number + 1]]
        assert ids[-1] == tokenizer.eos_token_id
        assert not np.isin(ids[:-1], tokenizer.all_special_ids).any()
        assert tokenizer.decode(ids[:-1]) == text


def test_long_texts_are_cut_and_named(encoder: Encoder) -> None:
    whole, cut = encode(encoder.keyed, TEXTS, 100), encode(encoder.keyed, TEXTS, 6)
    assert cut.lengths_S.tolist() == np.minimum(whole.lengths_S, 6).tolist()
    assert cut.truncated.tolist() == np.flatnonzero(whole.lengths_S > 6).tolist() == [1, 3]
    assert cut.tokens_T[cut.bounds_S1[1:] - 1].tolist() == [encoder.keyed.closing] * 4


def test_a_classification_token_opens_inputs(encoder: Encoder) -> None:
    """As BERT's tokenizer has it: [CLS] text [SEP]."""

    class Bert:
        cls_token_id, sep_token_id, eos_token_id = 7, 8, 9
        backend_tokenizer = encoder.keyed.tokenizer.backend_tokenizer

    texts = encode(KeyedTokenizer("", Bert()), ["the dog", ""], 100)
    plain = encode(encoder.keyed, ["the dog", ""], 100)
    first = texts.tokens_T[: texts.bounds_S1[1]]
    assert first[0] == 7 and first[-1] == 8
    assert (first[1:-1] == plain.tokens_T[: plain.bounds_S1[1] - 1]).all()
    assert texts.tokens_T[texts.bounds_S1[1] :].tolist() == [7, 8]


def test_spans_are_characters(encoder: Encoder) -> None:
    text = "naïve 🤖 dogs"
    [tokens] = tokenize(encoder.keyed, [text], with_spans=True)
    assert tokens.spans is not None and len(tokens.spans) == len(tokens.ids)
    assert tokens.spans[:, 1].max() == len(text)
    assert tokens.spans[-1].tolist()[1] == len(text)


@dataclass(frozen=True)
class Outer:
    ids: tuple[str, ...]
    texts: Texts
    flags_N: np.ndarray
    nested: tuple[tuple[int, ...], ...]
    maybe: int | None


def test_records_come_back_from_the_disk(tmp_path: Path, encoder: Encoder) -> None:
    texts = encode(encoder.keyed, TEXTS, 6)
    record = Outer(("a", "ü"), texts, np.array([True, False]), ((1, 2), ()), None)
    save_record(tmp_path / "record", record)
    found = load_record(tmp_path / "record", Outer)
    assert (found.ids, found.nested, found.maybe) == (record.ids, record.nested, None)
    assert (found.flags_N == record.flags_N).all() and (found.texts.tokens_T == texts.tokens_T).all()
    assert found.texts.tokens_T.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        found.texts.tokens_T[0] = 1
