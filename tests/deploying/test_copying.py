"""A copy has the model's files, and takes the place of nobody's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from biphase.corpus.tokenizer import load_tokenizer, train_tokenizer
from biphase.deploying.copying import copy_model
from biphase.errors import InputError
from biphase.exporting.model import save_encoder
from biphase.exporting.plain import text_limits
from biphase.files import file_hash
from biphase.finetuning.kept import TRAINED_ROWS


@pytest.fixture
def source(corpus: Any, tmp_path: Path) -> Path:
    tokenizer = load_tokenizer(corpus.tokenizer)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    save_encoder(tmp_path / "source", transformers.BertModel(config), tokenizer)
    return tmp_path / "source"


def test_files_that_appear_during_the_copy_stay(source: Path, tmp_path: Path) -> None:
    def fill(part: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()

    with pytest.raises(InputError, match=r"out-\d+ is the new model, because its place has other files by now"):
        copy_model(source, tmp_path / "out", fill)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    [other] = tmp_path.glob("out-*")
    assert file_hash(other / "model.safetensors") == file_hash(source / "model.safetensors")


def test_a_copy_knows_the_rows_that_trained_its_model(source: Path, tmp_path: Path) -> None:
    """A fine-tuned model's file of their hashes goes along, other files of a user do not."""
    for name in (TRAINED_ROWS, "notes.txt"):
        (source / name).write_bytes(b"12345678")
    copy_model(source, tmp_path / "out", lambda part: None)
    assert (tmp_path / "out" / TRAINED_ROWS).read_bytes() == b"12345678"
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_a_copy_that_transformers_reads_otherwise_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(["THEY'LL see"] * 50, 280).save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))
    copy_model(source, tmp_path / "out", lambda part: None)
    told = " ".join(capsys.readouterr().err.split())
    warning = "AutoTokenizer takes GPT2Tokenizer, which splits texts differently than its tokenizer.json; the golden"
    assert warning in told


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_a_copy_cuts_texts_where_sentence_transformers_does(name: str, source: Path, tmp_path: Path) -> None:
    """It reads its settings by several names."""
    from sentence_transformers.base.modules import Transformer

    (source / name).write_text(json.dumps({"max_seq_length": 16, "do_lower_case": False}))
    copy_model(source, tmp_path / "out", lambda part: None)
    assert Transformer.load(str(tmp_path / "out")).max_seq_length == 16
    assert text_limits(tmp_path / "out")["sentence_transformers"] == 16
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 16
