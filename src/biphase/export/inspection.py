"""A model folder of anybody → what transformers computes with it, beside what its files say: head, direction,
tokenizer, pooling, prompts, limits.

What does not agree becomes a warning: a head that the weights lack, and transformers draws at random; a network that
looks another way than its configuration says; ids without a row; weights that nothing reads, or that are no numbers.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel

from biphase.corpus.tokenizer import TOKENIZER_FILES, load_pretrained_tokenizer, misreading_class
from biphase.encoder.network import language_model_class
from biphase.encoder.proofs import each_alone, looks_both_ways, telling_tokens, window_of
from biphase.errors import InputError, first_of, told_as
from biphase.export.golden import read_pooling, read_prompts
from biphase.export.onnx import silenced
from biphase.files import read_json_as
from biphase.hub import count_positions, load_model_config, output_width, refuse_pickles

Facts = dict[str, Any]
LEAST_LIMIT = 2**31
"""Tokenizers and networks without a limit of length name such a number."""


def examine_model(folder: Path) -> Facts:
    """Collect what a model folder computes, and warnings.

    Raises `InputError` for a folder that transformers cannot load without code of its own or pickles.
    """
    config = load_model_config(folder)
    refuse_pickles(folder)
    model, report, warnings = load_as_named(folder, config)
    numbers = model.state_dict()
    if broken := [name for name, weight in numbers.items() if not weight.isfinite().all()]:
        warnings.append(f"weights are no finite numbers: {first_of(broken)}")
    size = sum(weight.numel() for weight in model.parameters())
    facts: Facts = {"network": f"{type(model).__name__}, {size:,} parameters", "stored_as": stored_types(folder)}
    facts["head"] = examine_head(model, report, warnings)
    if unused := sorted(report["unexpected_keys"]):
        facts["unused_weights"] = unused
        warnings.append(f"{len(unused)} weights are read by nothing in {type(model).__name__}: {first_of(unused)}")
    if not broken:
        facts["direction"] = examine_direction(model, config, warnings)
    facts |= examine_tokenizer(folder, model, config, warnings) | examine_pooling(folder, config, warnings)
    return facts | {"warnings": warnings}


def load_as_named(folder: Path, config: Any) -> tuple[PreTrainedModel, Facts, list[str]]:
    """Load the class that a configuration names, else the network without a head; return it with transformers' report
    of what the weights lack, and warnings."""
    names, warnings = list(getattr(config, "architectures", None) or []), list[str]()
    kinds = [getattr(transformers, str(name), None) for name in names]
    kind: Any = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, PreTrainedModel)), None)
    if names and kind is None:
        warnings.append(f"transformers has no class {names[0]}: looked at as AutoModel takes it")
    if read_json_as(folder / "config.json", Facts).get("auto_map"):
        warnings.append("its configuration names code of its own (auto_map), which is not run here and may differ")
    with told_as(f"cannot load weights from {folder}"), silenced():
        model, report = (kind or transformers.AutoModel).from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    return model.eval(), report, warnings


def stored_types(folder: Path) -> str:
    """Name the types of the numbers in the weights' files, most frequent first."""
    types = Counter[str]()
    for path in folder.glob("*.safetensors"):
        with told_as(f"{path} is damaged"), safe_open(path, "pt") as file:
            types.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    return ", ".join(name for name, _ in types.most_common())


def examine_head(model: Any, report: Facts, warnings: list[str]) -> str:
    """Say what a network's head is, and warn of weights that are drawn at random."""
    missing, base = sorted(report["missing_keys"]), model.base_model is model
    of_head = [name for name in missing if not base and not name.startswith(f"{model.base_model_prefix}.")]
    below = sorted({*missing} - {*of_head})
    if of_head:
        drawn = f"the head is DRAWN AT RANDOM: the weights lack {first_of(of_head)}"
        warnings.append(f"{drawn}; fine-tune it before you believe what {type(model).__name__} says")
    if below:
        only = "its pooler (pooler_output) is" if all("pooler." in name for name in below) else "parts of it are"
        warnings.append(f"{only} DRAWN AT RANDOM: the weights lack {first_of(below)}")
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if head is not None and not is_tied and not of_head and getattr(model.config, "tie_word_embeddings", False):
        warnings.append("its configuration says that the head is tied to the embeddings; the weights are not")
    return "none" if base else "drawn at random" if of_head else "tied to the embeddings" if is_tied else "stored"


@torch.no_grad()
def examine_direction(model: Any, config: Any, warnings: list[str]) -> str:
    """Measure which way a network looks, by whether a changed last token moves what it gives for those before."""
    network = model.base_model
    try:
        each_alone(network, telling_tokens(network, 9), [9])
    except InputError as error:
        warnings.append(f"which way it looks cannot be measured: {error}")
        return "unknown"
    is_causal = not looks_both_ways(network)
    for key, claims_causal in claimed_directions(config):
        if claims_causal != is_causal:
            looks, said = ("back only", "both ways") if is_causal else ("both ways", "back only")
            warnings.append(f"it looks {looks}, but by {key} it should look {said}")
    window, layers = window_of(config), getattr(config, "layer_types", None) or []
    narrow = sum("sliding" in str(kind) or "local" in str(kind) for kind in layers)
    share = f" in {narrow} of {len(layers)} layers" if layers else ""
    return ("causal" if is_causal else "both ways") + (f", {window} tokens far{share}" if window else "")


def claimed_directions(config: Any) -> Iterator[tuple[str, bool]]:
    """Give what a configuration says of the direction, each with whether that is causal; what its type is made for
    where it says nothing."""
    settings = config.to_dict()
    said = {
        "is_causal": settings.get("is_causal"),
        "use_bidirectional_attention": {True: False, "all": False, False: True}.get(
            settings.get("use_bidirectional_attention")
        ),
        "is_decoder": settings.get("is_decoder") or None,
    }
    claims = {key: bool(value) for key, value in said.items() if value is not None}
    kind = language_model_class(config)
    if not claims and kind is not None:
        claims[f"its type ({config.model_type})"] = kind is transformers.AutoModelForCausalLM
    yield from claims.items()


def examine_tokenizer(folder: Path, model: Any, config: Any, warnings: list[str]) -> Facts:
    """Compare the tokenizer with the rows of the embedding and the positions of the network."""
    positions = count_positions(config)
    limits: Facts = {"positions": positions if positions < LEAST_LIMIT else None}
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        warnings.append("it has no tokenizer files")
        return {"longest_text": limits}
    tokenizer = load_pretrained_tokenizer(folder)
    vocabulary, rows = tokenizer.get_vocab(), model.get_input_embeddings().weight.shape[0]
    if (highest := max(vocabulary.values(), default=0)) >= rows:
        warnings.append(f"its tokenizer gives ids up to {highest:,}, and its embedding has {rows:,} rows")
    if misread_as := misreading_class(tokenizer, config):
        warnings.append(f"AutoTokenizer takes {misread_as}, which splits texts otherwise than its tokenizer.json")
    ids, inner = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    opened, closed = (tokenizer.convert_ids_to_tokens(part) for part in (ids[:1], ids[-1:]))
    ends = f"opened by {opened[0]}, " if ids[:1] != inner[:1] else ""
    ends += f"closed by {closed[0]}" if ids[-1:] != inner[-1:] else "not closed"
    limits["tokenizer"] = tokenizer.model_max_length if tokenizer.model_max_length < LEAST_LIMIT else None
    settings = folder / "sentence_bert_config.json"
    limits["sentence_transformers"] = read_json_as(settings, Facts).get("max_seq_length") if settings.exists() else None
    for name, limit in limits.items():
        if isinstance(limit, int) and limit > positions:
            warnings.append(f"{name} cuts texts at {limit:,} tokens, and the network has {positions:,} positions")
    return {"tokenizer": f"{len(vocabulary):,} tokens, {rows:,} rows; texts {ends}", "longest_text": limits}


def examine_pooling(folder: Path, config: Any, warnings: list[str]) -> Facts:
    """Read how sentence-transformers makes an embedding of a text."""
    if not (folder / "modules.json").exists():
        return {}
    for path in folder.glob("*_Pooling/config.json"):
        content, width = read_json_as(path, Facts), output_width(config)
        said = content.get("embedding_dimension", content.get("word_embedding_dimension", width))
        if said != width:
            warnings.append(f"{path.parent.name} pools rows of {said} numbers, and the network gives {width}")
    path = folder / "config_sentence_transformers.json"
    settings = read_json_as(path, Facts) if path.exists() else {}
    facts = {"pooling": ", ".join(read_pooling(folder)) or "not said", "prompts": dict(read_prompts(folder))}
    return facts | {key: settings.get(key) for key in ("default_prompt_name", "similarity_fn_name")}
