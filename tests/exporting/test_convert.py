"""Old EuroBERT checkpoints, in the layout that was published: none of their code runs, and the numbers are Llama's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import biphase
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, lay_out
from biphase.encoder.network import load_backbone, load_model
from biphase.encoder.packed import packed_hidden
from biphase.errors import InputError
from biphase.exporting.convert import convert_checkpoint
from biphase.exporting.model import write_sentence_transformer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
}
CLASSES = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
PUBLISHED: dict[str, Any] = {
    **SIZES,
    "architectures": ["EuroBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_eurobert.EuroBertConfig",
        **{f"AutoModel{name}": f"modeling_eurobert.EuroBert{name}" for name in CLASSES},
    },
    "bos_token": "<|begin_of_text|>",
    "bos_token_id": 0,
    "clf_pooling": "mean",
    "eos_token": "<|end_of_text|>",
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "is_decoder": False,
    "mask_token": "<|mask|>",
    "mask_token_id": 2,
    "model_type": "eurobert",
    "pad_token_id": 1,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 250000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": False,
}
"""As in config.json of the hub's, with the numbers of a tiny one."""

CODE = "raise SystemExit('this is never run')\n"
TOKENS = torch.arange(3, 40)[None]


def llama(**changes: Any) -> LlamaForCausalLM:
    """The same network but for its mask, from which every weight of the tests comes."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 250_000.0}
    config = LlamaConfig(**{**SIZES, "rope_parameters": rope, "initializer_range": 0.2, **changes})
    return LlamaForCausalLM(config).eval()


def hidden_both_ways(network: LlamaForCausalLM) -> torch.Tensor:
    """Llama's last hidden states under a mask that hides nothing."""
    length = TOKENS.shape[1]
    return network.model(input_ids=TOKENS, attention_mask=torch.zeros(1, 1, length, length)).last_hidden_state


def write_old(folder: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A folder as published; a change to None takes a key out."""
    folder.mkdir()
    config = {key: value for key, value in (PUBLISHED | changes).items() if value is not None or key == "rope_scaling"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_eurobert.py", "modeling_eurobert.py"):
        (folder / name).write_text(CODE)
    save_file({key: weight.contiguous() for key, weight in weights.items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def test_what_needs_code_of_its_own_is_named_as_the_user_names_it(tmp_path: Path) -> None:
    network, cache = llama(), tmp_path / "models--some--model" / "snapshots"
    cache.mkdir(parents=True)
    said = load_backbone(write_old(cache / "said", network.state_dict()))
    length = TOKENS.shape[1]
    layout = lay_out(np.array([0, length]), causal=False, pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    states = packed_hidden(said.eval(), TOKENS[0], torch.arange(length), layout)
    torch.testing.assert_close(states, hidden_both_ways(network)[0])
    write_old(cache / "left", network.state_dict(), rope_theta=None)
    write_old(cache / "other", network.state_dict(), model_type="strange")
    for load in (load_backbone, load_model):
        with pytest.raises(InputError, match=r"^some/model is a EuroBERT with .* biphase convert some/model FOLDER$"):
            load(cache / "left")
        with pytest.raises(InputError, match=r"^some/model needs its own code \(type 'strange', auto_map"):
            load(cache / "other")
    with pytest.raises(InputError, match=r"^some/model needs its own code \(type 'strange', auto_map"):
        convert_checkpoint(str(cache / "other"), tmp_path / "new")


@pytest.mark.parametrize("theta", [250000, None], ids=["said", "left-to-the-code"])
@torch.no_grad()
def test_logits_are_those_of_a_llama_that_sees_everything(theta: int | None, corpus: Any, tmp_path: Path) -> None:
    network = llama(vocab_size=384)
    old = write_old(tmp_path / "old", network.state_dict(), rope_theta=theta, vocab_size=384)
    AutoTokenizer.from_pretrained(corpus.tokenizer).save_pretrained(old)
    told = convert_checkpoint(str(old), tmp_path / "new")
    assert "EuroBertForMaskedLM" in told
    assert "RoPE base 250,000" in told
    new = AutoModelForMaskedLM.from_pretrained(tmp_path / "new").eval()
    torch.testing.assert_close(new(input_ids=TOKENS).logits, network.lm_head(hidden_both_ways(network)))
    assert "auto_map" not in json.loads((tmp_path / "new" / "config.json").read_text())
    assert not list((tmp_path / "new").glob("*.py"))
    assert [check.verdict for check in biphase.check(tmp_path / "new")] == ["equal"]
    texts = [AutoTokenizer.from_pretrained(folder)("Ozma of Oz").input_ids for folder in (old, tmp_path / "new")]
    assert texts[0] == texts[1]


def test_every_weight_stays_to_the_last_bit(tmp_path: Path) -> None:
    """In bfloat16, as published; without the prefix and with a tied head, as the authors' script wrote them."""
    weights = {name: weight.bfloat16() for name, weight in llama().state_dict().items()}
    convert_checkpoint(str(write_old(tmp_path / "old", weights)), tmp_path / "new")
    saved = load_file(tmp_path / "new" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())
    bare = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    tied = write_old(tmp_path / "tied", bare, tie_word_embeddings=True, architectures=["EuroBertModel"])
    assert "EuroBertForMaskedLM" in convert_checkpoint(str(tied), tmp_path / "tied-new")
    assert "EuroBertModel" in convert_checkpoint(str(write_old(tmp_path / "bare", bare)), tmp_path / "bare-new")


def test_the_parts_of_an_embedding_model_that_are_left_out_are_told(tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", llama().state_dict())
    prompts = {"query": "find: "}
    write_sentence_transformer(old, llama(), 64, pooling="lasttoken", further=["Normalize"], prompts=prompts)
    told = convert_checkpoint(str(old), tmp_path / "new")
    left_out = "without what sentence-transformers adds to it (Pooling, Normalize, prompts)"
    assert told.endswith(f", {left_out}") and left_out in (tmp_path / "new" / "README.md").read_text()
    assert not (tmp_path / "new" / "modules.json").exists()


@torch.no_grad()
def test_classifiers(tmp_path: Path) -> None:
    network = llama()
    weights = {name: weight for name, weight in network.state_dict().items() if name != "lm_head.weight"}
    dense, last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 3)
    labels = {"id2label": {"0": "no", "1": "so", "2": "yes"}, "label2id": {"no": 0, "so": 1, "yes": 2}}
    heads = {f"dense.{name}": weight for name, weight in dense.state_dict().items()}
    heads |= {f"out_proj.{name}": weight for name, weight in last.state_dict().items()}
    convert_checkpoint(str(write_old(tmp_path / "texts", weights | heads, **labels)), tmp_path / "new-texts")
    new = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new-texts").eval()
    hidden = hidden_both_ways(network)
    expected = last(torch.nn.functional.gelu(dense(hidden.mean(dim=1))))  # clf_pooling: mean
    torch.testing.assert_close(new(input_ids=TOKENS).logits, expected)
    assert new.config.id2label[2] == "yes"
    heads = {f"classifier.{name}": weight for name, weight in last.state_dict().items()}
    convert_checkpoint(str(write_old(tmp_path / "tokens", weights | heads, **labels)), tmp_path / "new-tokens")
    tokens = AutoModelForTokenClassification.from_pretrained(tmp_path / "new-tokens").eval()
    torch.testing.assert_close(tokens(input_ids=TOKENS).logits, last(hidden))


def test_what_is_not_one_is_refused(tmp_path: Path) -> None:
    weights = llama().state_dict()
    cases: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
        "is a 'llama' model": (weights, {"model_type": "llama"}),
        "are unexpected, such as 'adapter.weight'": (weights | {"adapter.weight": torch.ones(1)}, {}),
        "are missing, such as 'model.norm.weight'": (
            {name: weight for name, weight in weights.items() if name != "model.norm.weight"},
            {},
        ),
        "do not fit its config.json": (weights, {"intermediate_size": 64}),
        "are unexpected, such as 'model.layers.1.": (weights, {"num_hidden_layers": 1}),
        "is not a EuroBERT configuration (Validation error for field 'rope_parameters'": (
            weights,
            {"rope_scaling": "linear"},
        ),
        "is not a EuroBERT configuration": (weights, {"hidden_size": "many"}),
    }
    for number, (line, (given, changes)) in enumerate(cases.items()):
        old = write_old(tmp_path / str(number), given, **changes)
        with pytest.raises(InputError) as refused:
            convert_checkpoint(str(old), tmp_path / "new")
        assert line in str(refused.value)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "new").exists()
    pickled = write_old(tmp_path / "pickled", weights)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match="has no weights"):
        convert_checkpoint(str(pickled), tmp_path / "new")
