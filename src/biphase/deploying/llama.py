"""A folder of a EuroBERT or a bidirectional Llama → the same network as a plain Llama without a head, for servers
without EuroBERT: vLLM, Text Embeddings Inference on GPUs, llama.cpp.

A EuroBERT is a Llama without the causal mask, and its weights have the same names. The configuration states the
direction under every server's own key: a server that overlooks it is causal, and returns other vectors without an
error.
"""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import AutoModel, LlamaModel

from biphase.encoder.network import load_weights, save_network
from biphase.errors import InputError
from biphase.exporting.card import FLOOR, add_chapter, with_network
from biphase.exporting.model import DIRECTION_KEY, NEEDS_VERSION, as_llama, set_direction
from biphase.exporting.plain import (
    NamedOutputs,
    load_named,
    prove_outputs,
    read_modules,
    read_pooling,
    refuse_left_out_prompts,
)
from biphase.files import read_json_as, write_json, write_text
from biphase.hub import load_model_config, read_config

VLLM_CLASS = "LlamaBidirectionalModel"
"""The class that is bidirectional in every version of vLLM that has it; older versions overlook `is_causal` in a
`LlamaModel`. transformers loads a `LlamaModel` for both, by `model_type`."""
VLLM_POOLING = {"mean": "avg", "cls": "cls", "lasttoken": "last"}
"""The poolings that servers have: sentence-transformers' name → vLLM's for this class."""


def become_llama(folder: Path) -> None:
    """Turn a model folder into one of a `LlamaModel`; transformers must compute the same hidden states with both.

    Raises:
        InputError: a network of another type, a causal one, one with a task's head, or a pooling that servers lack.
        FailedProofError: other hidden states.
    """
    pooling, config = find_pooling(folder), load_model_config(folder)
    is_turned_llama = config.model_type == "llama" and getattr(config, "is_causal", True) is False
    if config.model_type != "eurobert" and not is_turned_llama:
        raise InputError(f"as llama: only a EuroBERT or a bidirectional Llama becomes one, not a '{config.model_type}'")
    network: Any = load_weights(AutoModel, folder, attention=None, dtype="auto").eval()
    twin: Any = LlamaModel(as_llama(network.config)).to(network.dtype)
    twin.load_state_dict(network.state_dict(), strict=True)
    set_direction(twin.config, causal=False)
    twin.config.use_cache = False
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    twin.published_dropout = network.published_dropout
    save_network(twin, folder)
    saved = read_json_as(folder / "config.json", dict[str, Any])
    rope = saved["rope_parameters"]  # TEI reads `rope_theta`, and ignores all types but the plain one
    theta = {"rope_theta": rope["rope_theta"]} if rope["rope_type"] == "default" else {}
    named = {"architectures": [VLLM_CLASS], "pooling": VLLM_POOLING[pooling], DIRECTION_KEY: True}
    write_json(folder / "config.json", saved | theta | named)
    if (settings := folder / "config_sentence_transformers.json").exists():
        write_json(settings, read_json_as(settings, dict[str, Any]) | NEEDS_VERSION)
    saved_twin, compute = load_named(folder, pooled=False)
    before, name = NamedOutputs(network.float(), saved_twin.tokenizer), type(network).__name__
    gap = prove_outputs(compute, before.outputs, before, f"the LlamaModel of this {name}")
    proof = f"its hidden states are at most {gap:.1e} of their mean size from those of the {name} it was made from"
    line = (
        f"A LlamaModel without a head, which looks both ways: {proof}. Load it with transformers {FLOOR} or later: "
        "transformers 4 silently looks left only, and so may a server. Compare a few vectors first."
    )
    add_chapter(folder, "A plain Llama", [line])
    card: Any = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    if card.data.pipeline_tag == "fill-mask":
        card.data.pipeline_tag = "feature-extraction"
    card.data.tags = ["llama" if tag == "eurobert" else tag for tag in card.data.tags or ()]
    card.text = with_network(card.text, twin)
    for pattern, words in (
        (r"\bAutoModelFor\w+", "AutoModel"),
        (r"`AutoModel` gives the network without the language model head[^.]*\. ", ""),
    ):
        card.text = re.sub(pattern, words, card.text)
    write_text(folder / "README.md", str(card))


def find_pooling(folder: Path) -> str:
    """Find the pooling of an encoder (`mean`) or embedding model. Raises `InputError` for a pooling that servers lack,
    and for a network with a task's head."""
    name = read_config(folder).kind or "Model"
    if not name.endswith(("Model", "ForMaskedLM", "ForCausalLM")):
        raise InputError(f"{name} has the head of a task: encoders and embedding models alone become a Llama or a GGUF")
    refuse_left_out_prompts(folder)
    pooling = " and ".join(read_pooling(folder)) if read_modules(folder) else "mean"
    if pooling not in VLLM_POOLING:
        raise InputError(f"its pooling is '{pooling}': servers know {', '.join(VLLM_POOLING)}")
    return pooling
