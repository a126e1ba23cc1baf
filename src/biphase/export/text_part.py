"""A model of several parts, for images or sound beside text → a folder of its text network alone, of the plain type.

transformers reads the whole model, whatever names its weights have, and says which part of it reads text. None of the
code for images is called.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

from biphase import __version__
from biphase.corpus.tokenizer import TOKENIZER_FILES, load_pretrained_tokenizer
from biphase.encoder.configuration import has_other_parts, load_whole_config
from biphase.encoder.load import language_model_class, load_weights, make_generation_saveable
from biphase.encoder.probes import PROOF_LENGTHS, telling_tokens
from biphase.encoder.proofs import agree, foreign_errors_fail
from biphase.errors import InputError, told_as
from biphase.files import own_folder, write_text

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

`{kind}`, {what} `{source}`, written by biphase {version}. Its licence is that of `{source}`.
"""


def write_text_part(source: Path, folder: Path, shown: str) -> str:
    """Write the text network of the model in `source` as a folder of its own; returns a line about it.

    Before the folder takes its name it is loaded back, and gives the logits of the whole model for a few texts.

    Raises:
        InputError: a part that reads text and has a language model's head is not to be told apart.
    """
    config = load_whole_config(source)
    if not has_other_parts(config):
        raise InputError(
            f"{shown} is a '{config.model_type}' model, which needs no converting: only old EuroBERT checkpoints and "
            "models that read images or sound too are converted"
        )
    whole: Any = load_weights(AutoModelForMultimodalLM, source, config, attention=None, dtype="auto").eval()
    tower, head = whole.get_decoder(), whole.get_output_embeddings()
    network = as_plain(tower, head, shown)
    others = ", ".join(name for name, part in whole.base_model.named_children() if tower not in {*part.modules()})
    left = sum(weight.numel() for weight in whole.parameters()) - sum(weight.numel() for weight in network.parameters())
    with own_folder(folder, "converted model") as part:
        network.generation_config = whole.generation_config
        make_generation_saveable(network)
        network.save_pretrained(part)
        add_tokenizer(source, part)
        del whole, tower, head
        check_text_part(part, type(network), load_weights(AutoModelForMultimodalLM, source, config, None).eval(), shown)
        what = f"with the weights and the logits for text, without the {left:,} other parameters ({others}), of"
        write_converted_card(part, folder, type(network), what, shown)
    return (
        f"{folder}: {type(network).__name__}, the text network of {shown}; left behind: {left:,} parameters ({others})"
    )


def add_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer of a model, where it has one."""
    if any(path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
        load_pretrained_tokenizer(source).save_pretrained(folder)


def write_converted_card(part: Path, folder: Path, kind: type, what: str, shown: str) -> None:
    """A small card, that says what a folder is of the model that it came from."""
    card = CONVERTED_CARD.format(name=folder.name, kind=kind.__name__, what=what, source=shown, version=__version__)
    write_text(part / "README.md", card)


def as_plain(tower: Any, head: Any, shown: str) -> PreTrainedModel:
    """The language model of the plain type that has the weights of `tower` and `head`, which it shares."""
    config = plain_config(tower.config)
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


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a text part, of the type that has a language model's class."""
    plain = PLAIN_TYPES.get(config.model_type)
    if plain is None:
        return config
    settings = {"norm_topk_prob": True, **config.to_dict()}  # which Qwen3-VL-MoE does unasked
    known = CONFIG_MAPPING[plain]().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    rope = {key: value for key, value in settings["rope_parameters"].items() if not key.startswith("mrope")}
    return CONFIG_MAPPING[plain](**{key: settings[key] for key in known & settings.keys()} | {"rope_parameters": rope})


@torch.no_grad()
def check_text_part(folder: Path, kind: Any, whole: Any, shown: str) -> None:
    """Load the folder as a user would, and compare its logits with those of the whole model."""
    network = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    published = whole.config.to_dict()
    places = [id for key, id in published.items() if key.endswith(("token_id", "token_index")) and isinstance(id, int)]
    words = torch.tensor(sorted({*range(network.config.vocab_size)} - {*places}))  # no places of images
    tokens = telling_tokens(network, max(PROOF_LENGTHS), words)[None]
    with foreign_errors_fail(f"{shown}: {type(whole).__name__} cannot read a text alone"):
        theirs = whole(input_ids=tokens).logits
    if not agree(network(input_ids=tokens).logits, theirs):
        raise InputError(f"{shown}: {type(network).__name__} computes something else than the whole model does")
