"""An old EuroBERT, made for code of its own that transformers 5 breaks → a folder of transformers' own EuroBERT; a
model that reads images too → its network of text (`text_part.py`).

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
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
    PreTrainedModel,
)

from biphase.encoder.load import load_backbone
from biphase.errors import InputError, told_as
from biphase.export.text_part import add_tokenizer, write_converted_card, write_text_part
from biphase.files import own_folder, read_json_as
from biphase.hub import INDEX, fetch_model, refuse_pickles

ROPE_THETA_UNLESS_SAID = 250_000.0
BACKBONE_PARTS = {"model", "embed_tokens", "layers", "norm"}
CLASS_BY_HEAD: dict[frozenset[str], type[PreTrainedModel]] = {
    frozenset(): EuroBertModel,
    frozenset({"lm_head"}): EuroBertForMaskedLM,
    frozenset({"dense", "classifier"}): EuroBertForSequenceClassification,
    frozenset({"classifier"}): EuroBertForTokenClassification,
}
"""What stands beside the network tells what a checkpoint is; `architectures` of converted ones is not always true."""


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
    kind = find_class(weights, config, source)
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
        add_tokenizer(source, part)
        check_converted(part, kind, weights, source)
        what = "which needs no `trust_remote_code`, with the weights of"
        write_converted_card(part, folder, kind, what, shown)
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


def find_class(weights: dict[str, Tensor], config: EuroBertConfig, source: Path) -> type[PreTrainedModel]:
    """The class that the weights beside the network belong to; a tied head is not written."""
    heads = frozenset({name.partition(".")[0] for name in weights} - BACKBONE_PARTS)
    if heads not in CLASS_BY_HEAD:
        raise InputError(f"{source} has weights that no EuroBERT has: {', '.join(sorted(heads))}")
    if not heads and config.tie_word_embeddings:
        return EuroBertForMaskedLM
    return CLASS_BY_HEAD[heads]


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
