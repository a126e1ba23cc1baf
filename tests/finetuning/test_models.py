"""What is known of a model without loading it, against what loading it shows."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    LlamaConfig,
    MPNetConfig,
    OPTConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from biphase.corpus.tokenizer import load_tokenizer
from biphase.encoder.models import identify
from biphase.errors import InputError
from biphase.files import file_hash, write_hashed
from biphase.finetuning.heads import load_encoder
from biphase.run import CheckpointManifest

from .conftest import fit_cell, make_cell

SMALL = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "pad_token_id": 1,
}
NETWORKS = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**SMALL),
    "xlm-roberta": XLMRobertaConfig(**SMALL),
    "camembert": CamembertConfig(**SMALL),
    "mpnet": MPNetConfig(**SMALL),
    "deberta-v2": DebertaV2Config(**SMALL),
    "llama": LlamaConfig(**SMALL),
    "opt-350m": OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16),
}
USABLE = dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), 22)


def save(config: PretrainedConfig, model_folder: Path, folder: Path) -> Path:
    """A random network with the tokenizer of another."""
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    for path in model_folder.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("family", NETWORKS)
def test_positions_are_known_without_loading(family: str, model_folder: Path, data_dirs: dict, tmp_path: Path) -> None:
    folder = str(save(NETWORKS[family], model_folder, tmp_path / "model"))
    identity, encoder = identify(folder), load_encoder(folder)
    assert identity.max_length == encoder.max_length == USABLE.get(family, 24)
    assert identity.hash == encoder.hash
    score = fit_cell(folder, "snli", make_cell("snli", max_steps=1).config, None, data_dirs["snli"])
    assert score.config.max_length == identity.max_length and score.num_truncated["train"] > 0


def test_a_network_that_numbers_its_positions_in_an_unknown_way(
    model_folder: Path, data_dirs: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save(NETWORKS["roberta"], model_folder, tmp_path / "model"))
    for module in ("hub", "encoder.proofs", "finetuning.heads"):
        monkeypatch.setattr(f"biphase.{module}.AFTER_PADDING", set())
    with pytest.raises(InputError, match=r"max_length 24: .* has positions for 22 tokens"):
        fit_cell(folder, "snli", make_cell("snli").config, None, data_dirs["snli"])


def test_a_special_token_needs_no_row(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma's image token has none, and fine-tuning never reads it. Another token does."""
    folder = save(LlamaConfig(**SMALL | {"vocab_size": 300}), model_folder, tmp_path / "model")
    tokenizer = load_tokenizer(model_folder)
    assert len(tokenizer) == 300
    shutil.copytree(folder, tmp_path / "other")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)
    encoder = load_encoder(str(folder))
    assert encoder.tokenizer.pretrained.convert_tokens_to_ids("<image_soft_token>") == 300
    encoded = encoder.tokenizer.encode_texts(["a <image_soft_token>"], 100)
    assert encoded.tokens_T.max() < 300
    fit_cell(str(folder), "snli", make_cell("snli", max_steps=1).config, None, data_dirs["snli"], tmp_path / "kept")
    assert load_encoder(str(tmp_path / "kept")).backbone.config.vocab_size == 300
    tokenizer.add_tokens(["<plain>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="its tokenizer has 302 tokens, its network 300; they do not belong together"):
        load_encoder(str(tmp_path / "other"))


def test_what_lacks_is_named_without_loading(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="has no tokenizer files"):
        identify(str(folder))
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no weights \(model\.safetensors\)"):
        identify(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match="pickles are never opened"):
        identify(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "no such"}))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="cannot read a model configuration"):
        identify(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json is not valid JSON .*; save the model again"):
        identify(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_checkpoint_is_no_model(name: str, model_folder: Path, tmp_path: Path) -> None:
    """One flipped bit would give other scores, under a name of their own."""
    model = tmp_path / "runs" / "run" / "steps" / "10" / "model"
    shutil.copytree(model_folder, model)
    files = {f"model/{path.name}": file_hash(path) for path in model.iterdir()}
    manifest = CheckpointManifest(10, 10, 0, 0, "", "", "mlm", False, None, [], (), "run", files=files)
    write_hashed(model.parent / "manifest.json", asdict(manifest))
    assert identify(str(model)).hash == identify(str(model_folder)).hash
    content = bytearray((model / name).read_bytes())
    content[len(content) // 2] ^= 1
    (model / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} is damaged .it is not what was written"):
        identify(str(model))
