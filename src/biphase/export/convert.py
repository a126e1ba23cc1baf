"""An old EuroBERT, made for code of its own that transformers 5 breaks → a folder of transformers' own EuroBERT; a
model that reads images too → its network of text.

None of that code is run. Its configuration said `rope_theta`, `rope_scaling` and `clf_pooling` where transformers says
`rope_parameters` and `classifier_pooling`, and meant a base of 250,000 where it said nothing (transformers: 10,000).
Its weights had the names of today, but for `out_proj` of the sequence classifier.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMultimodalLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
    PreTrainedModel,
)

from biphase import __version__
from biphase.corpus.tokenizer import TOKENIZER_FILES, load_pretrained_tokenizer
from biphase.encoder.network import (
    has_other_parts,
    language_model_class,
    load_backbone,
    load_weights,
    load_whole_config,
    make_generation_saveable,
)
from biphase.encoder.proofs import PROOF_LENGTHS, agree, foreign_errors_fail, telling_tokens
from biphase.errors import InputError, told_as
from biphase.files import own_folder, read_json_as, write_text
from biphase.hub import INDEX, fetch_model, refuse_pickles

PLAIN_TYPES = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Types of text parts without a class of their own → the types that compute the same: without images, the positions of
Qwen's three axes are one."""

CONVERTED_CARD = """\
---
library_name: transformers
---

# {name}

{about}, written by biphase {version}. Its licence is that of the model that it came from.
"""


def write_text_part(source: Path, folder: Path, shown: str) -> str:
    """Write the text network of the model in `source` as a folder of its own; returns a line about it.

    Before the folder takes its name it is loaded back, and gives the logits of the whole model for a few texts.

    Raises:
        InputError: a part that reads text and has a language model's head is not to be told apart.
    """
    config = load_whole_config(source)
    if not has_other_parts(config):
        told = f"{shown} is a '{config.model_type}' model, which needs no converting"
        raise InputError(f"{told}: only old EuroBERTs and models that read images or sound too are converted")
    whole: Any = load_weights(AutoModelForMultimodalLM, source, config, attention=None, dtype="auto").eval()
    tower, head = whole.get_decoder(), whole.get_output_embeddings()
    network = as_plain(tower, head, shown)
    others = ", ".join(name for name, part in whole.base_model.named_children() if tower not in {*part.modules()})
    left = sum(weight.numel() for weight in whole.parameters()) - sum(weight.numel() for weight in network.parameters())
    with own_folder(folder, "converted model") as part:
        network.generation_config = whole.generation_config
        make_generation_saveable(network)
        network.save_pretrained(part)
        del whole, tower, head
        check_text_part(part, type(network), load_weights(AutoModelForMultimodalLM, source, config, None).eval(), shown)
        what = f"with the weights and the logits for text, without the {left:,} other parameters ({others}), of"
        finish_folder(part, source, folder.name, f"`{type(network).__name__}`, {what} `{shown}`")
    told = f"{folder}: {type(network).__name__}, the text network of {shown}"
    return f"{told}; left behind: {left:,} parameters ({others})"


def finish_folder(part: Path, source: Path, name: str, about: str) -> None:
    """Write the tokenizer of the model that a folder came from, where it has one, and a small card that says what the
    folder is of it."""
    if any(path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
        load_pretrained_tokenizer(source).save_pretrained(part)
    write_text(part / "README.md", CONVERTED_CARD.format(name=name, about=about, version=__version__))


def as_plain(tower: Any, head: Any, shown: str) -> PreTrainedModel:
    """The language model of the plain type that has the weights of `tower` and `head`, which it shares."""
    config = tower.config
    if plain := PLAIN_TYPES.get(config.model_type):
        settings = {"norm_topk_prob": True, **config.to_dict()}  # which Qwen3-VL-MoE does unasked
        rope = settings["rope_parameters"]
        settings["rope_parameters"] = {key: rope[key] for key in rope if not key.startswith(("mrope", "type"))}
        known = CONFIG_MAPPING[plain]().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
        config = CONFIG_MAPPING[plain](**{key: settings[key] for key in known & settings.keys()})
    kind: Any = language_model_class(config)
    if kind is None or head is None:
        raise InputError(f"{shown}: transformers has no language model head for its text part, '{config.model_type}'")
    config.tie_word_embeddings = head.weight is tower.get_input_embeddings().weight
    config.dtype = head.weight.dtype
    with torch.device("meta"):
        network = kind.from_config(config)
    with told_as(f"{shown}: its text part is no {type(network).__name__}"):
        network.base_model.load_state_dict(tower.state_dict(keep_vars=True), assign=True)
    network.set_output_embeddings(head)
    return network


@torch.no_grad()
def check_text_part(folder: Path, kind: Any, whole: Any, shown: str) -> None:
    """Load the folder as a user would, and compare its logits with those of the whole model."""
    network = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    published = whole.config.to_dict()
    places = [id for key, id in published.items() if key.endswith(("token_id", "token_index")) and isinstance(id, int)]
    words = torch.tensor(sorted({*range(network.config.vocab_size)} - {*places}))  # no places of images
    tokens = telling_tokens(network, max(PROOF_LENGTHS), words)[None]
    outputs: list[Any] = []
    language_model = next(part for part in whole.modules() if whole.get_output_embeddings() in part.children())
    language_model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    with foreign_errors_fail(f"{shown}: {type(whole).__name__} cannot read a text alone"):
        try:
            whole(input_ids=tokens)
        except AttributeError:  # Llama 4 asks its language model in 5.24 for what only images give
            if not outputs:
                raise
    if not agree(network(input_ids=tokens).logits, outputs[0].logits):
        raise InputError(f"{shown}: {type(network).__name__} computes something else than the whole model does")


ROPE_THETA_UNLESS_SAID = 250_000.0
BACKBONE_PARTS = {"model", "embed_tokens", "layers", "norm"}
CLASS_BY_HEAD: dict[frozenset[str], type[PreTrainedModel]] = {
    frozenset(): EuroBertModel,
    frozenset({"lm_head"}): EuroBertForMaskedLM,
    frozenset({"dense", "classifier"}): EuroBertForSequenceClassification,
    frozenset({"classifier"}): EuroBertForTokenClassification,
}
"""The weights beside the network tell the class; `architectures` of converted checkpoints is not always true."""


def convert_checkpoint(reference: str, folder: Path) -> str:
    """Write an old EuroBERT, a folder or `ID[@REVISION]` of the hub, as a native folder, or the network of text of a
    model of several parts; returns a line about it.

    Before the folder takes its name it is loaded back without remote code, has the same weights to the last bit, and
    computes the same for packed texts as for each alone.

    Raises:
        InputError: no EuroBERT, weights as a pickle only, or weights that are missing, too many or of another shape.
    """
    source = Path(reference)
    if not source.is_dir():
        source = fetch_model(reference)
    refuse_pickles(source)
    shown = Path(reference).name if Path(reference).is_dir() else reference
    if read_json_as(source / "config.json", dict[str, Any]).get("model_type") != "eurobert":
        return write_text_part(source, folder, shown)
    config = read_old_config(source / "config.json")
    weights = read_old_weights(source)
    heads = frozenset({name.partition(".")[0] for name in weights} - BACKBONE_PARTS)
    if heads not in CLASS_BY_HEAD:
        raise InputError(f"{source} has weights that no EuroBERT has: {', '.join(sorted(heads))}")
    is_tied = not heads and config.tie_word_embeddings  # a tied head is not written
    kind = EuroBertForMaskedLM if is_tied else CLASS_BY_HEAD[heads]
    dtype = next(iter(weights.values())).dtype
    with told_as(f"{source}: its weights do not fit its config.json"):
        made: Any = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    network, report = made
    for what in ("missing", "unexpected"):
        keys = sorted(report[f"{what}_keys"])
        if keys:
            raise InputError(f"{source}: {len(keys)} weights of {kind.__name__} are {what}, such as '{keys[0]}'")
    with own_folder(folder, "converted model") as part:
        network.save_pretrained(part)
        check_converted(part, kind, weights, source)
        what = f"`{kind.__name__}`, which needs no `trust_remote_code`, with the weights of `{shown}`"
        finish_folder(part, source, folder.name, what)
    rope: Any = config.rope_parameters
    return f"{folder}: {kind.__name__}, {len(weights)} weights as they were ({dtype}), RoPE base {rope['rope_theta']:,}"


def read_old_config(path: Path) -> EuroBertConfig:
    """The configuration in transformers' own words."""
    old = read_json_as(path, dict[str, Any])
    known = EuroBertConfig().to_dict().keys() - {"architectures", "dtype", "model_type", "transformers_version"}
    settings = {key: value for key, value in old.items() if key in known}
    if "rope_parameters" not in settings:
        scaling = old.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise InputError(f"{path}: rope_scaling is {scaling!r}; it must be a mapping or null")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = old.get("rope_theta", ROPE_THETA_UNLESS_SAID)
        settings["rope_parameters"] = {**scaling, "rope_type": kind, "rope_theta": theta}
    settings.setdefault("classifier_pooling", old.get("clf_pooling", "late"))
    with told_as(f"{path} is no configuration of a EuroBERT"):
        return EuroBertConfig(**settings)


def read_old_weights(source: Path) -> dict[str, Tensor]:
    """The weights under transformers' own names, in the precision of the files."""
    names = {"model.safetensors"}
    if (source / INDEX).exists():
        names = set(read_json_as(source / INDEX, dict[str, Any])["weight_map"].values())
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        with told_as(f"{source / name} cannot be read"):
            weights |= load_file(source / name)
    kept = {name: weight for name, weight in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    kept = {("classifier." + name[9:] if name.startswith("out_proj.") else name): kept[name] for name in kept}
    if not kept or len({weight.dtype for weight in kept.values()}) > 1:
        raise InputError(f"{source}: its weights are {'of several precisions' if kept else 'absent'}; save them anew")
    return kept


def check_converted(folder: Path, kind: Any, weights: dict[str, Tensor], source: Path) -> None:
    """Load the folder as a user would, compare every weight, and prove what it computes as any encoder's."""
    again = kind.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    saved = again.state_dict()
    prefix = "" if kind is EuroBertModel else "model."
    for name, weight in weights.items():
        bare = name.removeprefix("model.")
        key = name if name in saved else prefix + bare if prefix + bare in saved else bare
        if not torch.equal(saved[key], weight):
            raise InputError(f"{source}: '{name}' is another in what was written (tied, or no numbers); not converted")
    load_backbone(folder)
