import numpy as np

from biphase.finetuning.encoders import Encoder
from biphase.finetuning.encoding import HashedTokenizer, encode_texts, tokenize

TEXTS = ["the dog", "Premise: a cat .\nHypothesis: a tree .", "", "<|mask|> and <|end_of_text|> are text"]


def test_texts_end_with_eos_and_decode_to_themselves(encoder: Encoder) -> None:
    texts = encode_texts(encoder.tokenizer, TEXTS, 100)
    tokenizer = encoder.tokenizer.pretrained
    assert texts.num_samples == 4 and len(texts.truncated) == 0
    for number, text in enumerate(TEXTS):
        ids = texts.tokens_T[texts.bounds_S1[number] : texts.bounds_S1[number + 1]]
        assert ids[-1] == tokenizer.eos_token_id
        assert not np.isin(ids[:-1], tokenizer.all_special_ids).any()
        assert tokenizer.decode(ids[:-1]) == text


def test_long_texts_are_cut_and_named(encoder: Encoder) -> None:
    whole, cut = encode_texts(encoder.tokenizer, TEXTS, 100), encode_texts(encoder.tokenizer, TEXTS, 6)
    assert cut.lengths_S.tolist() == np.minimum(whole.lengths_S, 6).tolist()
    assert cut.truncated.tolist() == np.flatnonzero(whole.lengths_S > 6).tolist() == [1, 3]
    assert cut.tokens_T[cut.bounds_S1[1:] - 1].tolist() == [encoder.tokenizer.closing] * 4


def test_a_classification_token_opens_inputs(encoder: Encoder) -> None:
    """As BERT's tokenizer has it: [CLS] text [SEP]."""

    class Bert:
        cls_token_id, sep_token_id, eos_token_id = 7, 8, 9
        backend_tokenizer = encoder.tokenizer.pretrained.backend_tokenizer

    texts = encode_texts(HashedTokenizer("", Bert()), ["the dog", ""], 100)
    plain = encode_texts(encoder.tokenizer, ["the dog", ""], 100)
    first = texts.tokens_T[: texts.bounds_S1[1]]
    assert first[0] == 7 and first[-1] == 8
    assert (first[1:-1] == plain.tokens_T[: plain.bounds_S1[1] - 1]).all()
    assert texts.tokens_T[texts.bounds_S1[1] :].tolist() == [7, 8]


def test_spans_are_characters(encoder: Encoder) -> None:
    text = "naïve 🤖 dogs"
    [(ids, spans)] = tokenize(encoder.tokenizer, [text], with_spans=True)
    assert len(spans) == len(ids)
    assert spans[:, 1].max() == len(text)
    assert spans[-1].tolist()[1] == len(text)
