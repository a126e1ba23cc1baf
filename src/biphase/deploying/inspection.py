"""Any model folder → facts about it, from transformers' results and from its files: head, direction, tokenizer,
pooling, prompts, limits.

Contradictions become warnings: a missing head that transformers draws at random; a network whose direction differs from
its configuration; token ids without a row; weights that nothing reads, or that are not finite.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from biphase.corpus.tokenizer import TOKENIZER_FILES, load_pretrained_tokenizer, tell_misreading
from biphase.deploying.onnx import silenced
from biphase.encoder.network import language_model_class
from biphase.encoder.proofs import each_alone, looks_both_ways, telling_tokens
from biphase.errors import InputError, first_of, told_as
from biphase.exporting.model import DIRECTION_KEY
from biphase.exporting.plain import (
    network_class,
    read_modules,
    read_named_prompts,
    read_pooling,
    tell_limits,
    text_limits,
)
from biphase.hub import load_model_config, refuse_pickles


def examine_model(folder: Path) -> dict[str, Any]:
    """Collect the facts of a model folder, and warnings.

    Raises `InputError` for a folder that transformers loads only with the folder's own code, or with pickles.
    """
    config = load_model_config(folder)
    warnings = list[str]()
    refuse_pickles(folder)
    if getattr(config, "auto_map", None):
        warnings.append("its configuration names code of its own (auto_map), which is not run here and may differ")
    settings: Any = {"config": config, "dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    with told_as(f"cannot load weights from {folder}"), silenced():
        model, report = network_class(config).from_pretrained(folder, **settings, output_loading_info=True)
    model.eval()
    size = sum(weight.numel() for weight in model.parameters())
    facts: dict[str, Any] = {"network": f"{type(model).__name__}, {size:,} parameters"}
    facts["head"] = examine_head(model, report["missing_keys"], warnings)
    if unused := sorted(report["unexpected_keys"]):
        warnings.append(f"{len(unused)} weights are not used by {type(model).__name__}: {first_of(unused)}")
    if broken := [name for name, weight in model.state_dict().items() if not weight.isfinite().all()]:
        warnings.append(f"weights are not finite numbers: {first_of(broken)}")
    else:
        facts["direction"] = examine_direction(model, config, warnings)
    facts |= examine_texts(folder, model, warnings)
    if read_modules(folder):
        facts |= {"pooling": ", ".join(read_pooling(folder)) or "not said", "prompts": read_named_prompts(folder)}
    return facts | {"warnings": warnings}


def examine_head(model: Any, missing: set[str], warnings: list[str]) -> str:
    """Describe a network's head, and warn of weights drawn at random."""
    has_head = model.base_model is not model
    of_head = sorted(name for name in missing if has_head and not name.startswith(f"{model.base_model_prefix}."))
    below = sorted({*missing} - {*of_head})
    if of_head:
        drawn = f"the head is DRAWN AT RANDOM: the weights lack {first_of(of_head)}"
        warnings.append(f"{drawn}; fine-tune it before you believe what {type(model).__name__} says")
    if below:
        only = "its pooler (pooler_output) is" if all("pooler." in name for name in below) else "parts of it are"
        warnings.append(f"{only} DRAWN AT RANDOM: the weights lack {first_of(below)}")
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    return "drawn at random" if of_head else "tied to the embeddings" if is_tied else "stored" if has_head else "none"


@torch.no_grad()
def examine_direction(model: Any, config: Any, warnings: list[str]) -> str:
    """Measure the direction of a network: does a changed last token change the states before it?"""
    network = model.base_model
    try:
        each_alone(network, telling_tokens(network, 9), [9])
    except InputError as error:
        warnings.append(f"which way it looks cannot be measured: {error}")
        return "unknown"
    is_causal = not looks_both_ways(network)
    for key, claims_causal in claimed_directions(config).items():
        if claims_causal != is_causal:
            looks, said = ("back only", "both ways") if is_causal else ("both ways", "back only")
            warnings.append(f"it looks {looks}, but by {key} it should look {said}")
    return "causal" if is_causal else "both ways"


def claimed_directions(config: Any) -> dict[str, bool]:
    """Read whether a configuration claims that a network is causal, by key; without such a key, the network's type
    decides."""
    settings, kind = config.to_dict(), language_model_class(config)
    claims = {
        "is_causal": settings.get("is_causal"),
        # Other values concern images.
        DIRECTION_KEY: {True: False, "all": False, False: True}.get(settings.get(DIRECTION_KEY)),
    }
    said = {key: claim for key, claim in claims.items() if claim is not None}
    if said or kind is None:
        return said
    return {f"its type ({config.model_type})": kind is transformers.AutoModelForCausalLM}


def examine_texts(folder: Path, model: Any, warnings: list[str]) -> dict[str, Any]:
    """Compare the tokenizer's ids with the rows of the embedding, and the longest texts with the network's
    positions."""
    facts: dict[str, Any] = {}
    tokenizer = None
    if any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        tokenizer = load_pretrained_tokenizer(folder)
        vocabulary, rows = tokenizer.get_vocab(), model.get_input_embeddings().weight.shape[0]
        if (highest := max(vocabulary.values(), default=0)) >= rows:
            warnings.append(f"its tokenizer gives ids up to {highest:,}, and its embedding has {rows:,} rows")
        warnings += filter(None, [tell_misreading(folder, tokenizer)])
        closed = " ".join(tokenizer.convert_ids_to_tokens(tokenizer("a")["input_ids"]))
        facts["tokenizer"] = f"{len(vocabulary):,} tokens, {rows:,} rows; it makes of 'a': {closed}"
    else:
        warnings.append("it has no tokenizer files")
    limits = facts["longest_text"] = text_limits(folder, tokenizer)
    for name, limit in limits.items():
        if limit > limits.get("positions", limit):
            warnings.append(f"{name} cuts texts at {limit:,} tokens, and the network has {limits['positions']:,}")
    warnings += filter(None, [tell_limits(limits)])
    return facts
