import base64
import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import regex
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from biphase.corpus.tokenizer import (
    EOS,
    LLAMA3_SPLIT,
    MASK,
    MIN_VOCAB_SIZE,
    PAD,
    load_tokenizer,
    save_tokenizer,
    special_ids,
    token_byte_lengths,
    tokenizer_hash,
    train_tokenizer,
)
from biphase.errors import InputError

LLAMA3 = Path(__file__).parents[2].parent / "shared/data/tokenizer_llama3/tokenizer.model"
needs_llama3 = pytest.mark.skipif(not LLAMA3.exists(), reason="../shared/data/tokenizer_llama3 is not here")

TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; the dogs jump over the fox.\n\n" * 3,
    "def f(x):\n    return  x[0] == 'a'  # comment\n\tpass\r\n",
    "Größe, naïve, Москва, 日本語のテキスト, हिन्दी में, ภาษาไทย, مَرْحَبًا, 🙂👍🏽",
    " leading and trailing ",
    "\x00\x7f\u2028 e\u0301 é",
]


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 320)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def byte_level(special: list[str] = (), vocab_size: int = 256) -> Tokenizer:  # type: ignore[assignment]
    """A byte-level BPE without merges, as a foreign tokenizer would come."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    vocab |= {f"unreachable{number}": number for number in range(256, vocab_size)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    return backend


def test_trained_tokenizer_is_lossless_and_counts_bytes(trained) -> None:
    assert len(trained) == 320
    lengths_V = token_byte_lengths(trained)
    assert lengths_V.dtype == np.uint16 and lengths_V.shape == (320,)
    for text in [*TEXTS, "unseen: ﷽ ẞ \U0010ffff"]:
        ids = encode(trained, text)
        assert trained.decode(ids) == text
        assert lengths_V[ids].sum() == len(text.encode())
        assert not set(ids) & set(special_ids(trained))


def test_trained_tokenizer_has_its_special_tokens_and_adds_none(trained) -> None:
    assert (trained.eos_token, trained.mask_token, trained.pad_token) == (EOS, MASK, PAD)
    assert special_ids(trained) == [0, 1, 2]
    assert trained("fox")["input_ids"] == encode(trained, "fox")
    assert token_byte_lengths(trained)[:3].sum() == 0


def test_training_is_deterministic_and_vowel_signs_stay_in_their_words() -> None:
    texts = ["हिन्दी में हिन्दी " * 20, *TEXTS]
    first, again = train_tokenizer(texts, 400), train_tokenizer(iter(texts), 400)
    assert tokenizer_hash(first) == tokenizer_hash(again)
    assert len(encode(first, " हिन्दी")) == 1


def test_too_little_vocabulary_or_text(capsys) -> None:
    with pytest.raises(InputError, match="`vocab_size` is 258: give 259"):
        train_tokenizer(TEXTS, MIN_VOCAB_SIZE - 1)
    with pytest.raises(InputError, match=r"99999999999999: give .* to 10,000,000"):
        train_tokenizer(TEXTS, 99999999999999)
    assert len(train_tokenizer(TEXTS, MIN_VOCAB_SIZE)) == MIN_VOCAB_SIZE
    with pytest.raises(InputError, match="too little text"):
        train_tokenizer([], 300)
    train_tokenizer(["abababab"], 1000)
    assert "of the 1,000 asked for" in capsys.readouterr().err


def test_a_model_folder_is_never_replaced_by_a_tokenizer(trained: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    save_tokenizer(trained, tmp_path / "t")
    save_tokenizer(trained, tmp_path / "t")  # our own may be
    (tmp_path / "t" / "config.json").write_text("{}")  # now it is a model's too
    for folder in (tmp_path / "model", tmp_path / "t"):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(InputError, match="give a new or an empty folder"):
            save_tokenizer(trained, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_save_and_load_keep_ids_and_hash(trained, tmp_path: Path, capsys) -> None:
    save_tokenizer(trained, tmp_path / "t")
    for loaded in (
        load_tokenizer(tmp_path / "t"),
        load_tokenizer(str(tmp_path / "t" / "tokenizer.json")),
        AutoTokenizer.from_pretrained(tmp_path / "t"),
    ):
        assert tokenizer_hash(loaded) == tokenizer_hash(trained)
        assert [encode(loaded, text) for text in TEXTS] == [encode(trained, text) for text in TEXTS]
        assert (loaded.eos_token_id, loaded.mask_token_id, loaded.pad_token_id) == (0, 1, 2)
    assert capsys.readouterr().err == ""
    assert tokenizer_hash(train_tokenizer(TEXTS, 321)) != tokenizer_hash(trained)


def test_a_tokenizer_of_the_hub_is_had_from_the_cache(trained, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    save_tokenizer(trained, tmp_path / "models--some--tokenizer" / "snapshots" / ("a" * 40))
    (tmp_path / "models--some--tokenizer" / "refs").mkdir()
    (tmp_path / "models--some--tokenizer" / "refs" / "main").write_text("a" * 40)
    assert tokenizer_hash(load_tokenizer("some/tokenizer")) == tokenizer_hash(trained)
    with pytest.raises(InputError, match="tokenizer some/other is not a folder here"):
        load_tokenizer("some/other")


def test_missing_tokens_are_added_and_reported(tmp_path: Path, capsys) -> None:
    byte_level(["<|endoftext|>"]).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    said = capsys.readouterr().err
    assert tokenizer.eos_token_id == 256 and "eos is its token <|endoftext|> (256)" in said
    assert (
        tokenizer.mask_token_id == 257 and "mask is the new token <|mask|> (257), the vocabulary grows to 258" in said
    )
    assert tokenizer.pad_token_id == 258 and len(tokenizer) == 259
    assert special_ids(tokenizer) == [256, 257, 258]
    assert token_byte_lengths(tokenizer)[encode(tokenizer, "häß")].sum() == 5


def test_unused_reserved_slots_are_taken_first(tmp_path: Path, capsys) -> None:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    backend = byte_level(names)
    given = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=names[0], eos_token=names[1])
    given.chat_template = "{{ messages[0].content }}"
    given.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == given.chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, len(tokenizer)) == (258, 259, 260)
    assert "mask takes the reserved slot <|reserved_special_token_0|> (258)" in capsys.readouterr().err
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert tokenizer_hash(load_tokenizer(tmp_path / "saved")) == tokenizer_hash(tokenizer)


def test_wordpiece_with_unused_entries_of_its_vocabulary(tmp_path: Path) -> None:
    names = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "un", "##seen"]
    backend = Tokenizer(models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id, len(tokenizer)) == (4, 1, 0, 7)
    assert encode(tokenizer, "unseen") == [5, 6]
    assert token_byte_lengths(tokenizer).tolist() == [0, 0, 0, 0, 0, 2, 4]


def test_unigram_with_unused_entries_of_its_vocabulary(tmp_path: Path) -> None:
    pieces = ["<unk>", "</s>", "<pad>", "<unused0>", "a", "b", "ab"]
    backend = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.add_special_tokens(["</s>", "<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 3, 2, 7)
    assert encode(tokenizer, "ab<|mask|>ab") == [6, 3, 6]


def test_sentencepiece_bytes() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é"]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
    for text in ("a a é", "日 a🙂"):
        assert token_byte_lengths(tokenizer)[encode(tokenizer, text)].sum() == len(text.encode())


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "junk.json").write_text("{]")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "spiece.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    (tmp_path / "tokenizer.pkl").write_bytes(b"\x80\x04.")
    (tmp_path / "empty").mkdir()
    for name, part in [
        ("junk.json", "neither a tokenizer.json nor"),
        ("other.json", "neither a tokenizer.json nor"),
        ("spiece.model", "neither a tokenizer.json nor"),
        ("weights.pt", "there is no such folder"),
        ("tokenizer.pkl", "neither a tokenizer.json nor"),
        ("missing", "there is no such folder"),
        ("empty", "has no tokenizer files"),
    ]:
        with pytest.raises(InputError, match=part) as caught:
            load_tokenizer(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("vocab", [{}, {"a": 3}, {"a": 4_000_000_000}])
def test_ids_that_tokenizers_takes_and_fails_on_later(trained, tmp_path: Path, vocab: dict[str, int]) -> None:
    """An empty vocabulary, an id twice, one for which there is no room."""
    tree = json.loads(trained.backend_tokenizer.to_str())
    tree["model"] |= {"vocab": tree["model"]["vocab"] | vocab} if vocab else {"vocab": {}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match=r"is damaged: .*an id of its own below 10,000,000|out of vocabulary"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_new_token_needs_a_free_id(tmp_path: Path) -> None:
    """`tokenizers` numbers it by the size of the vocabulary, which another token may have as its id."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    Tokenizer(models.BPE(vocab | {"far": 257}, [])).save(str(tmp_path / "tokenizer.json"))
    told = r"has no eos token: its ids have gaps, and the new token <\|end_of_text\|> would get an id in use \(257\)"
    with pytest.raises(InputError, match=told):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer_config\.json is damaged \(tokenizer_class"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "EvilTokenizer"}))
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def replacing(*pairs: tuple[dict[str, str], str]) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": pattern, "content": content} for pattern, content in pairs]
    return {"type": "Sequence", "normalizers": steps}


@pytest.mark.parametrize(
    ("normalizer", "is_refused"),
    [
        (replacing(*[({"String": "a"}, "a" * 20)] * 3), True),
        (replacing(*[({"Regex": "(?=a)"}, "a")] * 10), True),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 40}] * 2}, True),
        ({"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 9}, True),
        (replacing(({"String": "``"}, '"'), ({"Regex": " {2,}"}, "\u2581")), False),
    ],
    ids=["strings", "empty matches", "prefixes", "bytes", "a usual one"],
)
def test_a_tokenizer_that_makes_texts_endless_is_refused_before_it_is_loaded(
    normalizer: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["a text"], 300).save_pretrained(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    for source in (path, tmp_path):
        if is_refused:
            with pytest.raises(InputError, match=r"tokenizer\.json may make a text .* times as long; give one without"):
                load_tokenizer(source)
        else:
            assert load_tokenizer(source)("a ``b")["input_ids"]


def test_damaged_tiktoken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [base64.b64encode(bytes([byte])).decode() + f" {byte}" for byte in range(5)]
    path = tmp_path / "tokenizer.model"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match="is damaged or not Llama 3's: it needs 128,000 base64 tokens"):
        load_tokenizer(path)
    monkeypatch.setattr("biphase.corpus.tokenizer.LLAMA3_RANKS", 4)
    for damaged in ("?? 3", "AA==", lines[4]):
        path.write_text("\n".join([*lines[:3], damaged]))
        with pytest.raises(InputError, match=r"tokenizer.model is damaged or not Llama 3's"):
            load_tokenizer(path)


@pytest.fixture(scope="module")
def llama3() -> PreTrainedTokenizerFast:
    return load_tokenizer(LLAMA3)


def encode_slowly(text: str) -> list[int]:
    """Llama 3's encoding from its definition: in each word, join the neighbours of lowest rank, leftmost first."""
    ranks = llama3_ranks()
    ids = []
    for word in regex.findall(LLAMA3_SPLIT, text):
        whole = word.encode()
        parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
        while unions := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            _, at = min(unions)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@cache
def llama3_ranks() -> dict[bytes, int]:
    lines = (line.split() for line in LLAMA3.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@needs_llama3
def test_llama3_layout(llama3, tmp_path: Path) -> None:
    assert len(llama3) == max(llama3.get_vocab().values()) + 1 == 128_256
    assert (llama3.bos_token_id, llama3.eos_token_id, llama3.pad_token_id) == (128_000, 128_001, 128_001)
    assert (llama3.mask_token_id, llama3.mask_token) == (128_002, MASK)
    assert special_ids(llama3) == list(range(128_000, 128_256))
    names = llama3.convert_ids_to_tokens([128_001, 128_003, 128_006, 128_008, 128_009, 128_010, 128_255])
    reserved = [f"<|reserved_special_token_{number}|>" for number in (1, 4, 5, 250)]
    assert names == [EOS, reserved[0], "<|start_header_id|>", reserved[1], "<|eot_id|>", *reserved[2:]]
    assert encode(llama3, "hello world") == [15339, 1917]  # published with the original


@needs_llama3
def test_llama3_ids_are_those_of_the_definition(llama3) -> None:
    rng = random.Random(0)
    letters = [*"ab-= \n\téह日ß1x.(#_'", "  ", "न्", "語", "23", "Th", "ing", "'S", "\r\n", "🙂", "т"]
    texts = ["".join(rng.choice(letters) * rng.choice([1, 1, 2, 5]) for _ in range(12)) for _ in range(2000)]
    texts += [letter * number for letter in "- =\n.a0~" for number in range(1, 130, 3)]
    lengths_V = token_byte_lengths(llama3)
    for text in [*TEXTS, *texts]:
        ids = encode(llama3, text)
        assert ids == encode_slowly(text), repr(text)
        assert lengths_V[ids].sum() == len(text.encode())
        assert llama3.decode(ids) == text
