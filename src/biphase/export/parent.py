"""A run that ended looking both ways → the decoder that it came from, as it was when training began, and their average.

Several runs may lie between the two: what looks back only is looked for from run to run.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from biphase.encoder.load import load_model
from biphase.encoder.merging import check_mergeable, layer_cosines, merge_weights
from biphase.errors import InputError
from biphase.hub import fetch_model, model_fingerprint
from biphase.pretraining.checkpoint import CheckpointManifest, read_checkpoint_manifest
from biphase.run import Run, find_checkpoint, read_recipe


def merge_with_parent(network: PreTrainedModel, run: Run, manifest: CheckpointManifest, share: float) -> str:
    """Average the network, in place, with the decoder that it came from, which has that share; a line about it.

    The decoder is taken as it was when training began: tokens that it lacked, such as the mask token, had their rows.

    Raises:
        InputError: the run looks back only or began with random weights, or its parent is not at hand or has changed.
    """
    if not 0 < share < 1:
        raise InputError(f"merge {share:g} is no share of the parent: give one above 0 and below 1, such as 0.5")
    if manifest.objective == "clm":
        raise InputError(f"{run.path} ended with CLM: merge is for an encoder that came from a decoder")
    name, folder, seed = find_decoder(run, manifest)
    embedding: Any = network.get_input_embeddings()
    parent = load_model(folder, vocab_size=embedding.weight.shape[0], seed=seed)
    check_mergeable(network, parent, name)
    cosines = ", ".join(f"{layer} {cosine:.4f}" for layer, cosine in layer_cosines(network, parent).items())
    merge_weights(network, parent, share)
    return f"{share:.0%} of it is {name}; cosine between the weights of the two, by layer: {cosines}"


def find_decoder(run: Run, manifest: CheckpointManifest) -> tuple[str, Path, int]:
    """The nearest ancestor that looked back only, or the model of others at the beginning: its name, its model folder
    and the seed of the run that started from it."""
    recipe = read_recipe(run)
    init = recipe.init
    if init.model is not None:
        folder = fetch_model(init.model, init.revision)
        if model_fingerprint(init.model, folder) != manifest.parent:
            raise InputError(f"{init.model} is not what {run.path} started from: its files have changed since")
        return Path(init.model).name if Path(init.model).is_dir() else init.model, folder, recipe.seed
    if init.checkpoint is None:
        raise InputError(f"{run.path} began with random weights, not with a decoder to merge with; leave out merge")
    folder = find_checkpoint(init.checkpoint)
    parent = read_checkpoint_manifest(folder)
    if parent.content != manifest.parent:
        raise InputError(f"{init.checkpoint} is not what {run.path} started from: it was trained anew since")
    parent_run = Run(folder.parent.parent)
    if parent.objective != "clm":
        return find_decoder(parent_run, parent)
    return f"{parent_run.path.name}@{parent.step}", folder / "model", recipe.seed
