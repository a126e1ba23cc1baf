import json
from pathlib import Path

import numpy as np
import pytest

from biphase.corpus.tokenizer import train_tokenizer
from biphase.encoder.backbone import TokenIds, make_model
from biphase.finetuning.fit import Encoder, load_encoder

NOUNS = ["dog", "cat", "boy", "girl", "tree", "house", "river", "train", "paper", "stone"]
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network with random weights and its tokenizer."""
    texts = [f"Premise: the {a} sees a {b} .\nHypothesis: a {b} is near the {a} ." for a in NOUNS for b in NOUNS]
    tokenizer = train_tokenizer(texts, 300)
    ids = TokenIds(len(tokenizer), tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None)
    folder = tmp_path_factory.mktemp("model")
    make_model("1m", SHAPE, ids, max_len=256, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(model_folder: Path) -> Encoder:
    return load_encoder(str(model_folder))


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pair(rng: np.random.Generator) -> dict:
    first, second, other = rng.choice(NOUNS, 3, replace=False)
    label = int(rng.integers(3))
    said = {0: f"the {second} is there", 1: f"the {other} is big", 2: f"no {first} is there"}[label]
    return {"premise": f"a {first} and a {second} in the garden", "hypothesis": said, "label": label}


def sentence(rng: np.random.Generator) -> dict:
    words = [str(word) for word in rng.choice(NOUNS, rng.integers(2, 9))]
    tags = ["B-location" if word in NOUNS[:2] else "O" for word in words]
    return {"tokens": words, "ner_tags": tags}


@pytest.fixture(scope="session")
def pairs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SNLI's format: 32 train, 20 validation and 23 test pairs."""
    return write_splits(tmp_path_factory.mktemp("pairs"), pair)


@pytest.fixture(scope="session")
def words_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WNUT's format: 32 train, 20 validation and 23 test sentences."""
    return write_splits(tmp_path_factory.mktemp("words"), sentence)


def write_splits(folder: Path, make) -> Path:
    rng = np.random.default_rng(0)
    for split, size in (("train", 32), ("validation", 20), ("test", 23)):
        write_jsonl(folder / f"{split}.jsonl", [make(rng) for _ in range(size)])
    return folder
