"""The configuration of a model that others made, or why it is nothing to begin with."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from biphase.errors import InputError, told_as
from biphase.files import read_json
from biphase.hub import model_name

MOST_LAYERS = 1_000
"""transformers makes as many as it is told, one by one, for ever if need be."""


def load_model_config(source: str | Path) -> PretrainedConfig:
    """The configuration of the network of text in a model folder or hub model.

    Raises:
        InputError: none that can be read, that of an encoder-decoder, which is two networks in one, of a network of
            text among others, or of an adapter or quantized weights, which cannot be trained.
    """
    published, name = load_whole_config(source), model_name(source)
    config = published.get_text_config()
    if not hasattr(config, "vocab_size"):
        raise InputError(f"{name} is a '{config.model_type}' model, which does not read tokens of text")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder ({config.model_type}), which is not supported")
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise InputError(f"{name}: config.json says {layers} layers; up to {MOST_LAYERS:,} are made")
    if has_other_parts(published):
        raise InputError(
            f"{name} ({published.model_type}) reads images or sound beside text; make a folder of its text network "
            f"({config.model_type}) first: biphase convert {name} FOLDER"
        )
    return config


def load_whole_config(source: str | Path) -> PretrainedConfig:
    """The configuration of all parts of a model. Raises `InputError` as `load_model_config` does, whatever the parts
    are."""
    if str(source).startswith((".", "/")) and not Path(source).is_dir():
        raise InputError(f"{source} is not a folder")
    if (Path(source) / "adapter_config.json").exists():  # transformers would follow it elsewhere, or pass over it
        raise InputError(
            f"{source} is a LoRA adapter: merge it into its model first: merge_and_unload().save_pretrained(FOLDER)"
        )
    refuse_own_code(Path(source))
    name = model_name(source)
    with told_as(f"cannot read a model configuration from {name}"):
        published: PretrainedConfig = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
        config = published.get_text_config()
    quantized = getattr(published, "quantization_config", None) or getattr(config, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method", "in a way that it does not name")
        raise InputError(f"{name} is quantized ({method}): give the weights that are not")
    return published


def has_other_parts(published: PretrainedConfig) -> bool:
    """Whether a network of text stands among others, for images or sound, in a model that writes text."""
    return type(published) in MODEL_FOR_MULTIMODAL_LM_MAPPING and published.get_text_config() is not published


def refuse_own_code(folder: Path) -> None:
    """Raises `InputError` for a model that only code of its own (`auto_map`) reads as it is meant: none is ever run."""
    content: Any = None
    with suppress(InputError):  # what cannot be read is told by who reads it in earnest
        content = read_json(folder / "config.json")
    if not isinstance(content, dict) or not content.get("auto_map"):
        return
    name, kind = model_name(folder), content.get("model_type")
    if kind == "eurobert" and not content.keys() & {"rope_theta", "rope_parameters"}:
        # Its own code and transformers mean another base where it says none.
        raise InputError(
            f"{name} is a EuroBERT for code of its own, which is never run; make a folder of it for transformers: "
            f"biphase convert {name} FOLDER"
        )
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{name} needs code of its own (of type '{kind}', auto_map in its config.json), which is never run; take a "
            "model of a type that transformers knows"
        )
