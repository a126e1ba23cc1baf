"""An old EuroBERT, whose own code transformers 5 breaks → a folder of transformers' own EuroBERT; a model that also
reads images → its text network.

The old code is never run. Its configurations have `rope_theta`, `rope_scaling` and `clf_pooling` where transformers has
`rope_parameters` and `classifier_pooling`; their default RoPE base is 250,000 (transformers: 10,000). Weights have
today's names, except `out_proj` of the sequence classifier.
"""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCardData
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, EuroBertConfig, PreTrainedModel

from biphase import __version__
from biphase.corpus.tokenizer import TOKENIZER_FILES, load_pretrained_tokenizer
from biphase.encoder import network as networks
from biphase.encoder.proofs import PROOF_LENGTHS, agree, foreign_errors_fail, telling_tokens
from biphase.errors import InputError, told_as
from biphase.exporting.golden import write_golden
from biphase.exporting.plain import read_modules, read_named_prompts
from biphase.files import own_folder, read_json_as, write_text
from biphase.hub import fetch_model, has_other_parts, load_whole_config, refuse_pickles

PLAIN_TYPES = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Types of text networks without a class of their own → the types that compute the same. Without images, Qwen's three
axes of positions coincide."""

ROPE_THETA_UNLESS_SAID = 250_000.0
BACKBONE_PARTS = {"model", "embed_tokens", "layers", "norm"}
CLASS_BY_HEAD: dict[frozenset[str], type[PreTrainedModel]] = {
    frozenset(): transformers.EuroBertModel,
    frozenset({"lm_head"}): transformers.EuroBertForMaskedLM,
    frozenset({"dense", "classifier"}): transformers.EuroBertForSequenceClassification,
    frozenset({"classifier"}): transformers.EuroBertForTokenClassification,
}
"""The class, by the weights beside the backbone: `architectures` of converted checkpoints is not always right."""


def convert_checkpoint(reference: str, folder: Path) -> str:
    """Write an old EuroBERT, or the text network of a model of several parts, as a native folder; return a line, which
    also names the parts of an embedding model that are left out.

    Before the folder takes its name, transformers loads it without remote code. An old EuroBERT must have the same
    weights to the last bit, and compute the same for packed texts as for each alone. A text network must have the
    logits of the whole model for a few texts.

    Args:
        reference: a folder, or `ID[@REVISION]` on the Hub.

    Raises:
        InputError: a model of neither kind, pickled weights, or weights that are missing, too many or of another shape.
    """
    source = fetch_model(reference)
    refuse_pickles(source)
    name = source.name if Path(reference).is_dir() else reference
    config = read_json_as(source / "config.json", dict[str, Any])
    convert = convert_eurobert if config.get("model_type") == "eurobert" else take_text_part
    parts = [module.type.rpartition(".")[2] for module in read_modules(source)[1:]]
    parts += ["prompts"] if read_named_prompts(source) else []
    left_out = f", without what sentence-transformers adds to it ({', '.join(parts)})" if parts else ""
    with own_folder(folder, "converted model") as part:
        about, summary = convert(source, part, name)
        if any(path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
            load_pretrained_tokenizer(source).save_pretrained(part)
            write_golden(part)
        head = ModelCardData(library_name="transformers")
        about += f"{left_out}, written by biphase {__version__}. Its licence is that of the model that it came from."
        write_text(part / "README.md", f"---\n{head}\n---\n\n# {folder.name}\n\n{about}\n")
    return f"{folder}: {summary}{left_out}"


def take_text_part(source: Path, part: Path, name: str) -> tuple[str, str]:
    """Write the text network of the model `name` in `source`, and prove that it computes the same.

    Returns a line for the card, and one for the user. Raises `InputError` for a model whose text network or head
    transformers does not name.
    """
    config = load_whole_config(source)
    if not has_other_parts(config):
        problem = f"{name} is a '{config.model_type}' model, which needs no converting"
        raise InputError(f"{problem}: only old EuroBERTs and models that read images or sound too are converted")
    kind: Any = transformers.AutoModelForMultimodalLM
    whole: Any = networks.load_weights(kind, source, config, attention=None, dtype="auto").eval()
    tower, head = whole.get_decoder(), whole.get_output_embeddings()
    network = as_plain(tower, head, name)
    parts_left = ", ".join(key for key, child in whole.base_model.named_children() if tower not in {*child.modules()})
    left_out = f"{whole.num_parameters() - network.num_parameters():,} other parameters ({parts_left})"
    network.generation_config = whole.generation_config
    networks.make_generation_saveable(network)
    network.save_pretrained(part)
    plain: Any = type(network)
    del whole, tower, head, network  # both are loaded again, in fp32
    whole = networks.load_weights(kind, source, config, attention=None).eval()
    settings: Any = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    check_text_part(plain.from_pretrained(part, **settings).eval(), whole, name)
    about = f"`{plain.__name__}`, with the weights and the logits for text, without the {left_out}, of `{name}`"
    return about, f"{plain.__name__}, the text network of {name}; left behind: {left_out}"


def as_plain(tower: Any, head: Any, name: str) -> PreTrainedModel:
    """Make a language model of the plain type that shares the weights of `tower` and `head`."""
    config = tower.config
    if plain := PLAIN_TYPES.get(config.model_type):
        settings = {"norm_topk_prob": True, **config.to_dict()}  # Qwen3-VL-MoE does so without the setting
        rope = settings["rope_parameters"]
        settings["rope_parameters"] = {key: rope[key] for key in rope if not key.startswith(("mrope", "type"))}
        settable = CONFIG_MAPPING[plain]().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
        config = CONFIG_MAPPING[plain](**{key: settings[key] for key in settable & settings.keys()})
    kind: Any = networks.language_model_class(config)
    if kind is None or head is None:
        raise InputError(f"{name}: transformers has no language model head for its text part, '{config.model_type}'")
    config.tie_word_embeddings = head.weight is tower.get_input_embeddings().weight
    config.dtype = head.weight.dtype
    with torch.device("meta"):
        network = kind.from_config(config)
    with told_as(f"{name}: its text part is not a {type(network).__name__}"):
        network.base_model.load_state_dict(tower.state_dict(keep_vars=True), assign=True)
    network.set_output_embeddings(head)
    return network


@torch.no_grad()
def check_text_part(network: Any, whole: Any, name: str) -> None:
    """Raise `InputError` if a text network's logits differ from the logits of the whole model, or of its part with the
    head (Llama 4)."""
    published = whole.config.to_dict()
    marks = [id for key, id in published.items() if key.endswith(("token_id", "token_index")) and isinstance(id, int)]
    words = torch.tensor(sorted({*range(network.config.vocab_size)} - {*marks}))  # no image tokens
    tokens = telling_tokens(network, max(PROOF_LENGTHS), words)[None]
    reader: Any = next(module for module in whole.modules() if whole.get_output_embeddings() in module.children())
    with foreign_errors_fail(f"{name}: {type(reader).__name__} cannot read a text alone"):
        expected = reader(input_ids=tokens).logits
    if not agree(network(input_ids=tokens).logits, expected):
        raise InputError(f"{name}: {type(network).__name__} computes something else than the whole model does")


def convert_eurobert(source: Path, part: Path, name: str) -> tuple[str, str]:
    """Write the old EuroBERT `name` as one of transformers, and prove that its weights are the same.

    Returns a line for the card, and one for the user.
    """
    config = read_old_config(source / "config.json")
    weights = dict[str, torch.Tensor]()
    for path in sorted(source.glob("model*.safetensors")):
        with told_as(f"{path} cannot be read"):
            tensors = load_file(path)
        weights |= {re.sub("^out_proj", "classifier", key): tensor for key, tensor in tensors.items()}
    weights = {key: weight for key, weight in weights.items() if not key.endswith("rotary_emb.inv_freq")}
    heads = frozenset({key.partition(".")[0] for key in weights} - BACKBONE_PARTS)
    is_tied = not heads and config.tie_word_embeddings  # a tied head is not written
    kind: Any = CLASS_BY_HEAD.get(frozenset({"lm_head"}) if is_tied else heads, transformers.EuroBertModel)
    dtype = next(iter(weights.values())).dtype
    settings: Any = {"config": config, "state_dict": weights, "dtype": dtype}
    with told_as(f"{source}: its weights do not fit its config.json"):
        network, report = kind.from_pretrained(None, **settings, output_loading_info=True)
    for fault in ("missing", "unexpected"):
        if keys := sorted(report[f"{fault}_keys"]):
            raise InputError(f"{source}: {len(keys)} weights of {kind.__name__} are {fault}, such as '{keys[0]}'")
    network.save_pretrained(part)
    saved = kind.from_pretrained(part, dtype="auto", use_safetensors=True, trust_remote_code=False).state_dict()
    bare = {key.removeprefix("model."): weight for key, weight in saved.items()}
    for key, weight in weights.items():
        if not torch.equal(bare[key.removeprefix("model.")], weight):
            raise InputError(f"{source}: '{key}' changed in the written file (tied, or no numbers); not converted")
    networks.load_backbone(part)
    theta = config.rope_parameters["rope_theta"]
    about = f"`{kind.__name__}`, which needs no `trust_remote_code`, with the weights of `{name}`"
    return about, f"{kind.__name__}, {len(weights)} weights as they were ({dtype}), RoPE base {theta:,}"


def read_old_config(path: Path) -> Any:
    """Read an old configuration as one of transformers."""
    old = read_json_as(path, dict[str, Any])
    names = EuroBertConfig().to_dict().keys() - {"architectures", "dtype", "model_type", "transformers_version"}
    settings = {"rope_theta": ROPE_THETA_UNLESS_SAID, "classifier_pooling": old.get("clf_pooling", "late")}
    settings |= {key: value for key, value in old.items() if key in {*names, "rope_theta", "rope_scaling"}}
    with told_as(f"{path} is not a EuroBERT configuration"):
        return EuroBertConfig(**settings)  # it makes `rope_parameters` from the two old keys
