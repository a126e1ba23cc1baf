"""What is loaded of a network, and what is refused; `test_families.py` compares what loaded ones compute."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import (
    AlbertConfig,
    AutoModel,
    BertConfig,
    DPRConfig,
    FNetConfig,
    Gemma3TextConfig,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MPNetConfig,
    MptConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    Wav2Vec2Config,
    YosoConfig,
)

from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, lay_out
from biphase.encoder.network import (
    PaddedBackbone,
    fresh_backbone,
    layer_cosines,
    load_backbone,
    load_model,
    merge_weights,
)
from biphase.encoder.packed import packed_hidden
from biphase.errors import InputError

SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 160,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
OTHER_NAMES = {"vocab_size": 120, "hidden_size": 32}


def save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


def hidden(backbone: torch.nn.Module, lengths: list[int], tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    layout = lay_out(np.cumsum([0, *lengths]), causal=False, pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    with torch.no_grad():
        return packed_hidden(backbone.eval(), tokens, positions, layout)


@pytest.mark.parametrize("kind", [RobertaConfig, MPNetConfig])
def test_fresh_weights_are_of_the_same_kind(kind: type, tmp_path: Path) -> None:
    backbone = load_backbone(save(kind(**SMALL), tmp_path))
    fresh = fresh_backbone(backbone)
    assert type(fresh) is type(backbone)
    tokens = 4 + torch.arange(12)
    ours, theirs = hidden(fresh, [5, 7], tokens), hidden(backbone, [5, 7], tokens)
    assert ours.shape == theirs.shape and not torch.equal(ours, theirs)
    torch.testing.assert_close(hidden(fresh, [5], tokens[:5]), ours[:5])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            GPTNeoConfig(**OTHER_NAMES, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
            "GPTNeoModel: a bidirectional objective does not see later tokens",
        ),
        (
            MambaConfig(**OTHER_NAMES, num_hidden_layers=2, state_size=4),
            "MambaModel: a bidirectional objective does not see later tokens",
        ),
        (
            MptConfig(vocab_size=120, d_model=32, n_layers=2, n_heads=4, max_seq_len=160),
            "cannot be made a bidirectional encoder",
        ),
    ],
)
def test_decoders_and_oddities_that_stay_as_they_are(config: PretrainedConfig, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        load_backbone(save(config, tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    folder = save(BertConfig(**SMALL), tmp_path / "bert")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(InputError, match="has no weights"):
        load_backbone(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match="has no weights"):
        load_backbone(folder)
    small = {"vocab_size": 100, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    with pytest.raises(InputError, match="encoder-decoder"):
        load_backbone(save(T5Config(**small), tmp_path / "t5"))
    for kind, count in ((BertConfig, "num_hidden_layers"), (AlbertConfig, "num_hidden_groups")):
        kind(**SMALL | {count: 2**63}).save_pretrained(tmp_path / count)
        with pytest.raises(InputError, match=f"has {count} 9223372036854775808; at most 1,000 are allowed"):
            load_backbone(tmp_path / count)
    (tmp_path / "num_hidden_layers" / "config.json").write_text("[5]")
    with pytest.raises(InputError, match=r"config\.json is damaged"):
        load_backbone(tmp_path / "num_hidden_layers")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot read a model configuration"):
        load_backbone(tmp_path / "empty")


NO_TEXT = "which does not read tokens of text"
SOUND = {"conv_dim": (16,), "conv_kernel": (3,), "conv_stride": (2,), "num_feat_extract_layers": 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ViTConfig(image_size=8, patch_size=4, hidden_size=32, num_hidden_layers=1, num_attention_heads=4), NO_TEXT),
        (Wav2Vec2Config(**SMALL, **SOUND, num_conv_pos_embedding_groups=2), NO_TEXT),
        (DPRConfig(**SMALL), "gives no hidden state for each token of a text"),
    ],
)
def test_what_is_no_network_of_tokens_is_refused(config: PretrainedConfig, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        load_backbone(save(config, tmp_path))


@pytest.mark.parametrize(
    ("published", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ({"temperature": 0.9, "do_sample": True}, {"temperature": 0.9, "do_sample": True}),
        ({"pad_token_id": -1, "length_penalty": 2.0}, {}),
        ({}, {}),
    ],
)
def test_settings_of_generation_can_be_saved(published: dict[str, Any], kept: dict[str, Any], tmp_path: Path) -> None:
    """transformers 5.17 saves none that fail its strict check; later ones, none that fail it and were changed."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    ids = {"bos_token_id": 2, "eos_token_id": [3, 4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ids | published))
    settings = load_model(tmp_path).generation_config
    assert settings is not None
    settings.validate(strict=True)
    found = settings.to_diff_dict()
    assert {key: found[key] for key in found if key not in ("_from_model_config", "transformers_version")} == ids | kept


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq", "bitsandbytes"])
@pytest.mark.parametrize("load", [load_model, load_backbone])
def test_quantized_weights_are_refused(load: Any, method: str, tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"is quantized \({method}\): give a model that is not"):
        load(tmp_path)


def test_a_weight_that_is_not_fp32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(LlamaConfig(**SMALL), tmp_path)
    original = LlamaModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def in_16_bits(cls: type, *args: Any, **options: Any) -> Any:
        network, report = original(cls, *args, **options)
        return network.to(torch.bfloat16), report

    monkeypatch.setattr(LlamaModel, "from_pretrained", classmethod(in_16_bits))
    with pytest.raises(InputError, match=r"its weight 'embed_tokens.weight' stays torch.bfloat16"):
        load_backbone(folder)


@pytest.mark.parametrize("load", [load_model, load_backbone])
def test_an_adapter_is_refused(load: Any, tmp_path: Path) -> None:
    """With or without a whole model beside it, which it would be laid over, or not."""
    for folder in (tmp_path / "alone", save(LlamaConfig(**SMALL), tmp_path / "whole")):
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')
        with pytest.raises(InputError, match="is a LoRA adapter: merge it into its model first"):
            load(folder)


@pytest.mark.parametrize("kind", [FNetConfig, YosoConfig])
def test_who_depends_on_its_neighbours_lengths_reads_equal_ones_together(kind: type, tmp_path: Path) -> None:
    backbone = load_backbone(save(kind(**SMALL), tmp_path))
    assert isinstance(backbone, PaddedBackbone) and backbone.equal_lengths
    tokens = 4 + torch.arange(60) * 3 % 110
    together = hidden(backbone, [20, 7, 20, 13], tokens)
    alone = torch.cat([hidden(backbone, [len(part)], part) for part in tokens.split([20, 7, 20, 13])])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert fresh_backbone(backbone).equal_lengths


def test_a_network_published_as_bidirectional_keeps_its_window(tmp_path: Path) -> None:
    """EmbeddingGemma's kind, on texts that are longer than the window: the token itself counts on both sides."""
    layers = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
    folder = save(Gemma3TextConfig(**SMALL, **layers, use_bidirectional_attention=True), tmp_path)
    tokens = 4 + torch.arange(65) * 7 % 110
    published = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = torch.cat([published(part[None]).last_hidden_state[0] for part in tokens.split([40, 25])])
    backbone = load_backbone(folder)
    assert not isinstance(backbone, PaddedBackbone)
    torch.testing.assert_close(hidden(backbone, [40, 25], tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [BertConfig, MPNetConfig])
def test_two_loads_of_a_folder_are_equal(kind: type, tmp_path: Path) -> None:
    """The padding row, too, which is zero in fresh weights."""
    folder = save(kind(**SMALL), tmp_path)
    first, second = load_backbone(folder), load_backbone(folder)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not first.get_input_embeddings().weight[1].any()


class Network(nn.Module):
    """An embedding, two blocks of two matrices, a norm."""

    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 5), nn.Linear(5, width)) for _ in range(2))
        self.norm = nn.RMSNorm(width)


def test_the_average_has_the_share_of_the_network_before() -> None:
    network, before = Network(0), Network(1)
    pairs = list(zip(network.parameters(), before.parameters(), strict=True))
    expected = [0.75 * one + 0.25 * other for one, other in pairs]
    merge_weights(network, before, 0.25)
    torch.testing.assert_close(list(network.parameters()), expected)
    torch.testing.assert_close(list(before.parameters()), list(Network(1).parameters()))


def test_cosines_are_pytorchs_over_all_weights_of_a_layer() -> None:
    network, before = Network(0), Network(1)
    parts = {"embeddings": lambda net: net.embed_tokens, "rest": lambda net: net.norm}
    parts |= {str(at): lambda net, at=at: net.layers[at] for at in range(2)}
    cosines = layer_cosines(network, before)
    assert list(cosines) == ["embeddings", "0", "1", "rest"]
    for name, part in parts.items():
        one, other = (
            torch.cat([weight.detach().flatten() for weight in part(net).parameters()]) for net in (network, before)
        )
        assert cosines[name] == pytest.approx(float(cosine_similarity(one, other, dim=0)), abs=1e-6)
    assert cosines["rest"] == pytest.approx(1) and abs(cosines["0"]) < 0.9
    before.norm.weight.data.zero_()
    assert layer_cosines(network, before)["rest"] == 0


def test_a_network_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match=r"it cannot be merged: its weights embed_tokens\.weight, "):
        layer_cosines(Network(0), Network(1, width=4), "it")
    more = Network(1)
    more.head = nn.Linear(3, 1, bias=False)
    for network, other in ((Network(0), more), (more, Network(0))):
        with pytest.raises(InputError, match=r"its weights head\.weight differ"):
            layer_cosines(network, other, "it")
    with pytest.raises(InputError, match="cannot be merged: its"):
        layer_cosines(Network(0), nn.Linear(3, 3), "it")
