"""Fine-tuning with LoRA: what it trains, beside peft's own adapters, and the plain model that it keeps."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

import biphase
from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.files import file_hash
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.fit import train_network
from biphase.finetuning.heads import build_network
from biphase.tasks.sources import find_task_sources

from .conftest import fit_cell, make_cell

Dirs = dict[str, Path]


@pytest.mark.parametrize("task", ["snli", "wnut17", "squad_v2"])
def test_losses_are_those_of_pefts_own_adapters(task: str, encoder: Encoder, data_dirs: Dirs) -> None:
    """The same head and the same batches; the adapters are peft's own model around the network, with its defaults."""
    settings = {"head_dropout": 0.0, "learning_rate": 1e-2}
    cell = make_cell(task, lora={"r": 4, "lora_alpha": 8}, **settings)
    splits, _ = load_encoded(find_task_sources(task, data_dirs)[0], encoder, cell.config)
    torch.manual_seed(0)
    ours: Any = build_network(encoder, cell, splits.values())
    losses, _ = train_network(ours, splits["train"], cell)
    torch.manual_seed(0)
    theirs: Any = build_network(encoder, make_cell(task, **settings), splits.values())
    torch.manual_seed(cell.config.seed)
    wrapped = get_peft_model(theirs.backbone, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    assert wrapped.base_model.model is theirs.backbone
    expected, _ = train_network(theirs, splits["train"], make_cell(task, **settings))
    assert len(losses) > 4 and losses == pytest.approx(expected, rel=1e-6)
    trained = {name for name, weight in ours.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name or not name.startswith("backbone.") for name in trained) and "out.weight" in trained
    moved = [float(weight.detach().abs().max()) for name, weight in ours.named_parameters() if ".lora_B." in name]
    assert len(moved) == 14 and min(moved) > 1e-3, "each of them was 0"


def test_a_kept_model_is_plain_and_predicts_without_peft(
    model_folder: Path, data_dirs: Dirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The labels that were scored; base weights outside of the adapted layers are those of the encoder."""
    before = file_hash(model_folder / "model.safetensors")
    config = make_cell("snli", learning_rate=1e-2, epochs=4, lora={"r": 8}).config
    score = fit_cell(str(model_folder), "snli", config, tmp_path / "scores", data_dirs["snli"], tmp_path / "kept")
    assert score.folder is not None and score.config.lora is not None
    assert file_hash(model_folder / "model.safetensors") == before
    rows = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    monkeypatch.setitem(sys.modules, "peft", None)
    shutil.copy(data_dirs["snli"] / "test.jsonl", tmp_path / "rows.jsonl")
    predicted = biphase.predict(tmp_path / "kept", tmp_path / "rows.jsonl", device="cpu")
    assert [*predicted["predicted"]] == [row["predicted"] for row in rows]
    assert len({*predicted["predicted"]}) > 1
    kept, base = load_file(tmp_path / "kept" / "model.safetensors"), load_file(model_folder / "model.safetensors")
    for name, weight in base.items():
        if name.startswith("model."):
            is_adapted = "_proj" in name
            assert torch.equal(kept[name], weight) != is_adapted, name
    assert not any("lora" in name or "base_layer" in name for name in kept)


@pytest.mark.parametrize("task", ["wnut17", "squad_v2", "squad_retrieval"])
def test_each_family_is_kept(task: str, model_folder: Path, data_dirs: Dirs, tmp_path: Path) -> None:
    config = make_cell(task, lora={"r": 2, "target_modules": ["q_proj"]}).config
    score = fit_cell(str(model_folder), task, config, tmp_path / "scores", data_dirs[task], tmp_path / "kept")
    assert not score.diverged
    assert not any("lora" in name for name in load_file(tmp_path / "kept" / "model.safetensors"))


def test_the_pooler_of_a_new_head_trains_too(model_folder: Path, data_dirs: Dirs, tmp_path: Path) -> None:
    """It is drawn with the head, so it must not stay random."""
    folder = tmp_path / "bert"
    shutil.copytree(model_folder, folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(vocab_size=vocab_size, **sizes)).save_pretrained(folder)
    config = make_cell("snli", lora={"r": 4}, head="transformers").config
    fit_cell(str(folder), "snli", config, tmp_path / "scores", data_dirs["snli"], tmp_path / "kept")
    kept, base = load_file(tmp_path / "kept" / "model.safetensors"), load_file(folder / "model.safetensors")
    layer = "bert.encoder.layer.0.intermediate.dense.weight"
    assert not torch.equal(kept[layer], base[layer])
    assert float(kept["bert.pooler.dense.bias"].abs().max()) > 0, "drawn as zeros"
    table = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(kept[table], base[table])


def test_what_names_a_cell(encoder: Encoder) -> None:
    plain = FinetuneConfig()
    assert "lora" not in plain.model_dump(mode="json")
    with pytest.raises(ValueError, match="lora adapts the encoder, and frozen leaves it as it is; give one"):
        FinetuneConfig.model_validate({"lora": {"r": 4}, "frozen": True})
    assert hash(FinetuneConfig.model_validate({"lora": {"r": 4, "target_modules": ["a"]}})), (
        "encoded tasks are cached by it"
    )
    with pytest.raises(InputError, match="no linear layer of the blocks is called 'query'"):
        build_network(encoder, make_cell("snli", lora={"r": 4, "target_modules": "query"}), [])
