"""`inspect` says of any model what transformers computes with it, and warns where that is not what its files say."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, LlamaConfig

import biphase
from biphase.cli.app import run_command
from biphase.corpus.tokenizer import load_tokenizer, train_tokenizer
from biphase.errors import InputError
from biphase.exporting.model import set_direction, write_sentence_transformer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def make_model(corpus: Any, tmp_path: Path) -> Callable[..., Path]:
    """Write a small network of a class of transformers with a tokenizer, with settings of its configuration."""

    def make(kind: str, configuration: Any = BertConfig, **settings: Any) -> Path:
        tokenizer = load_tokenizer(corpus.tokenizer)
        torch.manual_seed(0)
        config = configuration(**{"vocab_size": len(tokenizer), "initializer_range": 0.3, **SIZES, **settings})
        folder = tmp_path / "model"
        getattr(transformers, kind)(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remove_weights(folder: Path, part: str) -> None:
    def remove(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if part in name]:
            del weights[name]

    change_weights(folder, remove)


def warned(folder: Path) -> str:
    return "\n".join(biphase.inspect(folder)["warnings"])


def test_a_model_that_is_what_it_says(make_model: Callable[..., Path]) -> None:
    folder = make_model("BertForMaskedLM", max_position_embeddings=64, dtype="bfloat16")
    facts = biphase.inspect(folder)
    size = sum(weight.numel() for weight in AutoModelForMaskedLM.from_pretrained(folder).parameters())
    assert facts["network"] == f"BertForMaskedLM, {size:,} parameters"
    assert (facts["head"], facts["direction"], facts["warnings"]) == ("tied to the embeddings", "both ways", [])
    assert facts["longest_text"]["positions"] == 64
    assert facts["tokenizer"].startswith("384 tokens, 384 rows; it makes of 'a': a")


def test_a_head_that_the_weights_lack_is_drawn_at_random(
    make_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model("BertModel")
    change_json(folder / "config.json", architectures=["BertForSequenceClassification"])
    facts = biphase.inspect(folder)
    assert facts["head"] == "drawn at random"
    [warning] = facts["warnings"]
    assert "DRAWN AT RANDOM: the weights lack classifier.bias, classifier.weight" in warning
    run_command(["inspect", str(folder)])
    told = capsys.readouterr()
    assert f"! {' '.join(warning.split())[:40]}" in " ".join(told.out.split())
    assert "LOAD REPORT" not in told.err


def test_parts_that_are_drawn_or_read_by_nothing(make_model: Callable[..., Path]) -> None:
    folder = make_model("BertForSequenceClassification")
    change_json(folder / "config.json", architectures=["BertModel"])
    assert "2 weights are not used by BertModel: classifier.bias, classifier.weight" in warned(folder)
    remove_weights(folder, "pooler")
    assert "its pooler (pooler_output) is DRAWN AT RANDOM" in warned(folder)
    remove_weights(folder, "layer.1.output.dense.weight")
    assert "parts of it are DRAWN AT RANDOM" in warned(folder)


def llama(make_model: Callable[..., Path], **settings: Any) -> Path:
    return make_model("LlamaForCausalLM", LlamaConfig, num_key_value_heads=2, max_position_embeddings=64, **settings)


def test_directions_are_measured_and_compared(make_model: Callable[..., Path]) -> None:
    folder = llama(make_model)
    assert biphase.inspect(folder) | {"direction": "causal", "warnings": []} == biphase.inspect(folder)
    change_json(folder / "config.json", is_causal=False)
    facts = biphase.inspect(folder)
    assert (facts["direction"], facts["warnings"]) == ("both ways", [])
    # Transformers does not know the key of the servers.
    content = json.loads((folder / "config.json").read_text())
    del content["is_causal"]
    (folder / "config.json").write_text(json.dumps(content | {"use_bidirectional_attention": True}))
    facts = biphase.inspect(folder)
    assert facts["direction"] == "causal"
    assert facts["warnings"] == ["it looks back only, but by use_bidirectional_attention it should look both ways"]


def test_a_class_that_splits_texts_its_own_way(make_model: Callable[..., Path]) -> None:
    """transformers gives the class that a folder names the tokens of its tokenizer.json, but not the splitter."""
    folder = make_model("BertForMaskedLM")
    train_tokenizer(["THEY'LL see"] * 50, 280).save_pretrained(folder)
    change_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    said = "AutoTokenizer takes GPT2Tokenizer, which splits texts differently than its tokenizer.json"
    assert biphase.inspect(folder)["warnings"] == [said]
    change_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer")
    [warning] = biphase.inspect(folder)["warnings"]
    assert f"tokenizer {folder} cannot be loaded" in warning


def test_a_key_of_gemma(make_model: Callable[..., Path]) -> None:
    settings = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 3}
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig
    folder = make_model("Gemma3ForCausalLM", config, layer_types=layers, use_bidirectional_attention=True, **settings)
    facts = biphase.inspect(folder)
    assert (facts["direction"], facts["warnings"]) == ("both ways", [])


def test_what_we_export_has_no_warnings(make_model: Callable[..., Path]) -> None:
    folder = llama(make_model)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    set_direction(model.config, causal=False)
    model.save_pretrained(folder)
    write_sentence_transformer(folder, model, 64, prompts={"query": "find: ", "document": ""})
    facts = biphase.inspect(folder)
    assert (facts["direction"], facts["pooling"], facts["prompts"]) == ("both ways", "mean", {"query": "find: "})
    assert facts["longest_text"] == {"positions": 64, "sentence_transformers": 64}
    assert facts["warnings"] == []


def test_tokenizer_pooling_and_lengths_that_do_not_fit(make_model: Callable[..., Path]) -> None:
    folder = make_model("BertModel", vocab_size=300, max_position_embeddings=16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)
    write_sentence_transformer(folder, transformers.BertModel.from_pretrained(folder), 128)
    said = warned(folder)
    assert "its tokenizer gives ids up to 383, and its embedding has 300 rows" in said
    assert "tokenizer cuts texts at 512 tokens, and the network has 16" in said
    assert "sentence_transformers cuts texts at 128 tokens" in said
    for path in folder.glob("*token*"):
        path.unlink()
    assert "it has no tokenizer files" in warned(folder)


def test_no_numbers_and_code_of_its_own(make_model: Callable[..., Path]) -> None:
    folder = make_model("BertModel")
    change_json(folder / "config.json", auto_map={"AutoModel": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('was run')")
    assert "names code of its own (auto_map), which is not run" in warned(folder)

    def damage(weights: dict[str, torch.Tensor]) -> None:
        weights["encoder.layer.0.output.dense.weight"][0, 0] = float("nan")

    change_weights(folder, damage)
    facts = biphase.inspect(folder)
    assert "weights are not finite numbers: encoder.layer.0.output.dense.weight" in "\n".join(facts["warnings"])
    assert "direction" not in facts


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut weights": (lambda folder: cut(folder / "model.safetensors"), "cannot load weights|damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "a pickle": (with_pickle, "pickles are never opened"),
    "cut configuration": (lambda folder: cut(folder / "config.json"), "config.json"),
    "another width": (lambda folder: change_json(folder / "config.json", hidden_size=64), "cannot load weights"),
    "an unknown type": (lambda folder: change_json(folder / "config.json", model_type="odd"), "cannot read a model"),
    "cut tokenizer": (lambda folder: cut(folder / "tokenizer.json"), "tokenizer"),
    "a file for pooling": (lambda folder: (folder / "modules.json").write_text("3"), "modules.json is damaged"),
}


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *(("1_Pooling/config.json", {"pooling_mode": value}) for value in ([None], 3, {})),
        *(("config_sentence_transformers.json", {"prompts": value}) for value in ([{}], "a", {"query": 1})),
        *(("sentence_bert_config.json", {"max_seq_length": value}) for value in ("a", [], {})),
        *(("config.json", {"architectures": value}) for value in (1.5, [None], "BertModel")),
        *(("config.json", {"id2label": value}) for value in (1e308, [])),
        ("tokenizer_config.json", {"model_max_length": {}}),
    ],
)
def test_each_record_of_a_folder_is_typed(
    file: str, change: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model("BertModel", max_position_embeddings=64)
    write_sentence_transformer(folder, transformers.BertModel.from_pretrained(folder), 32)
    change_json(folder / file, **change)
    [key] = change
    with pytest.raises(InputError, match=rf"{file} is damaged \({key}") as told:
        biphase.inspect(folder)
    assert "\n" not in str(told.value)
    with pytest.raises(InputError, match=rf"{file} is damaged|only a EuroBERT"):
        biphase.export(folder, tmp_path / "out", as_="llama")


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_folders_are_told_in_one_line(kind: str, make_model: Callable[..., Path]) -> None:
    folder = make_model("BertModel")
    damage, words = BROKEN[kind]
    damage(folder)
    with pytest.raises(InputError, match=words) as told:
        biphase.inspect(folder)
    assert "\n" not in str(told.value)


def test_an_index_that_leads_elsewhere_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model("BertModel")
    shutil.copy(folder / "model.safetensors", tmp_path / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(InputError, match=r"is no \*\.safetensors file beside it"):
        biphase.inspect(folder)
