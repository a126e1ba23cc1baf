"""Models that read images beside text: the network of text stands alone, with the logits of the whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import tiny_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

from biphase.api.folders import inspect
from biphase.encoder.network import load_backbone, load_model
from biphase.errors import InputError
from biphase.exporting.convert import convert_checkpoint

from ..conftest import mostly_later

PLAIN = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "paligemma": "gemma",
    "smolvlm": "llama",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
VISION = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "projection_dim", "vision_output_dim"), 32),
    "depth": 2,
    "num_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
}


def tiny_whole(model_type: str, is_tied: bool) -> Any:
    kind, parts = CONFIG_MAPPING[model_type], {}
    published: Any = kind()
    for name in kind.sub_configs:
        part = getattr(published, name)
        if part is None:  # Gemma 4 names its others where it has them
            continue
        settings = part.to_dict()
        changes = {key: value for key, value in VISION.items() if isinstance(settings.get(key), int | list)}
        if part is published.get_text_config():
            changes = {**tiny_config(part.model_type).to_dict(), "tie_word_embeddings": is_tied}
            if "mrope_section" in (settings["rope_parameters"] or {}) or "qwen" in model_type:
                changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
        parts[name] = settings | changes
    places = [key for key, id in published.to_dict().items() if key.endswith(("token_id", "token_index")) and id]
    tokens = {key: 100 + number for number, key in enumerate(places)}
    torch.manual_seed(0)
    whole = AutoModelForMultimodalLM.from_config(kind(**parts, **tokens, tie_word_embeddings=is_tied))
    for weight in whole.parameters():
        weight.data += torch.randn(weight.shape) * (0.1 if weight.ndim > 1 else 0.05)
    return whole.to(torch.bfloat16)


@pytest.mark.parametrize("model_type", mostly_later(PLAIN, "gemma3", "qwen2_vl"))
@torch.no_grad()
def test_the_network_of_text_stands_alone(model_type: str, tmp_path: Path) -> None:
    folder, text = tmp_path / "whole", tmp_path / "text"
    tiny_whole(model_type, is_tied=model_type.startswith("gemma")).save_pretrained(folder)
    for load in (load_model, load_backbone):
        with pytest.raises(InputError, match=r"reads images or sound beside text; .*biphase convert"):
            load(folder)
    assert "biphase convert" in str(inspect(folder).get("text_network", "biphase convert"))
    assert "left behind" in convert_checkpoint(str(folder), text)
    config = json.loads((text / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == (PLAIN[model_type], "bfloat16")
    tokens = 4 + torch.arange(40)[None] * 7 % 90
    whole = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    whole = whole.language_model if model_type == "llama4" else whole  # 5.24 runs it no further without an image
    alone = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32).eval()
    torch.testing.assert_close(alone(input_ids=tokens).logits, whole(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)
    if model_type == "llama4":
        load_backbone(text)
    else:
        load_model(text)


def test_a_network_of_text_that_computes_something_else_alone_is_refused(tmp_path: Path) -> None:
    """Cohere 2 multiplies its logits, Aya Vision does not."""
    tiny_whole("aya_vision", is_tied=True).save_pretrained(tmp_path / "whole")
    with pytest.raises(InputError, match="computes something else than the whole model"):
        convert_checkpoint(str(tmp_path / "whole"), tmp_path / "text")
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize("is_tied", [False, True])
def test_qwen_vl_as_published(is_tied: bool, tmp_path: Path) -> None:
    """Its configuration has the text network's fields beside `vision_config`, and names its RoPE by an old key."""
    folder, text = tmp_path / "whole", tmp_path / "text"
    tiny_whole("qwen2_vl", is_tied).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    parts = config.pop("text_config")
    rope = parts.pop("rope_parameters")
    old = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": rope["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(parts | config | old | {"tie_word_embeddings": is_tied}))
    assert f"biphase convert {folder} FOLDER" in inspect(folder)["text_network"]
    convert_checkpoint(str(folder), text)
    written = json.loads((text / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert written["tie_word_embeddings"] is is_tied
    load_model(text)
