"""The point at which a run starts: random weights, a model, or a checkpoint of another run that it branches from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from biphase.console import err
from biphase.corpus.packing import TrainingText
from biphase.corpus.shards import ShardSet, check_tokenizer
from biphase.corpus.tokenizer import find_tokenizer, tokenizer_hash
from biphase.errors import InputError
from biphase.files import read_json_as
from biphase.hub import count_positions, fetch_model, fit_samples, load_model_config, model_fingerprint
from biphase.recipe import Recipe
from biphase.run import Run, find_checkpoint, read_checkpoint_manifest, read_recipe, split_reference, whole_steps

ORIGIN = "origin.json"
"""The file in the folder of a branch that records its origin, because the parent may lose that checkpoint later."""


@dataclass(frozen=True)
class Start:
    """The point at which a run begins or, with other `tokens_seen` and folders, continues."""

    step: int = 0
    """The updates of all runs before this one."""
    tokens_seen: int = 0
    data_position: int = 0
    """The tokens of the data order before the first batch."""
    order_step: int = 0
    """The step, over all runs, at which that order began."""
    pass_step: int | None = None
    """The step, over all runs, from which the parent counted passes over the text (`mask_passes`); None: from the
    beginning of the order."""
    pass_position: int = 0
    """The tokens of the data order before that step."""
    parent: str | None = None
    """The content hash of the checkpoint or model that it begins with."""
    carried: tuple[str, ...] = ()
    """The parts that it takes over from there: weights, optimizer, data position."""
    model_folder: str | None = None
    """A transformers folder; None for random weights."""
    optimizer_folder: Path | None = None


def begin_with_model(recipe: Recipe, shards: ShardSet, folder: Path | None = None) -> tuple[Recipe, Start]:
    """Return the start at the recipe's `init.model`, and the recipe. Shorten samples to the model's positions unless
    the recipe sets their length. Name the commit of a Hub model if the recipe does not.

    Raises `InputError` for a model whose tokenizer is not that of the shards. Prints a line if the folder has no
    tokenizer to compare.

    Args:
        folder: the model's folder, if the caller has it.
    """
    source, revision = recipe.init.model or "", recipe.init.revision
    folder = folder or fetch_model(source, revision)
    config = load_model_config(folder)
    recipe = fit_samples(recipe, count_positions(config))
    parent = model_fingerprint(source, folder)
    if revision is None and "@" not in source and not Path(source).is_dir():
        recipe = recipe.model_copy(update={"init": recipe.init.model_copy(update={"revision": folder.name})})
    tokenizer, manifest = find_tokenizer(folder, str(folder)), shards.manifest
    if tokenizer is not None:
        content = tokenizer_hash(tokenizer)
        check_tokenizer(shards, content)
    elif manifest.vocab_size > config.vocab_size + len(manifest.special_ids):
        sizes = f"{folder} has {config.vocab_size} tokens and the shards have {manifest.vocab_size}"
        raise InputError(f"{sizes}: their tokenizers differ")
    else:
        doubt = "nothing shows whether it was trained with the tokenizer of the shards"
        sizes = f"{manifest.vocab_size:,} tokens, the network has {config.vocab_size:,}"
        err.print(f"{folder} has no tokenizer: {doubt} ({sizes})")
    return recipe, Start(parent=parent, carried=("weights",), model_folder=str(folder))


def find_branch(recipe: Recipe, text: TrainingText, root: Path, run_from: Callable[[Start], Run]) -> Start:
    """Return the start at a checkpoint of another run. The data order continues if both runs have the same one;
    otherwise it starts over.

    If the other run has lost that checkpoint, return the origin that the recipe's own run recorded, provided that this
    run is done or has a checkpoint to continue from. A run with LoRA can continue only while the other run has it,
    because its adapters train beside those weights.

    Args:
        run_from: maps an origin to the recipe's run.
    """
    reference = recipe.init.checkpoint or ""
    path, step = split_reference(reference)
    try:
        folder = find_checkpoint(reference)
        parent = Run(folder.parent.parent)
        if not step and not parent.is_done:  # its last step would later mean another parent, and another run
            steps = ", ".join(f"@{step}" for step in whole_steps(parent))
            remedy = f"say which one, {parent.path}@STEP; it has {steps}"
            raise InputError(f"{parent.path} is not done, so its last step may change: {remedy}")
        before = read_recipe(parent).data
        manifest = read_checkpoint_manifest(folder)
        check_tokenizer(text.main, manifest.tokenizer_hash)
    except InputError:
        for file in sorted(root.glob(f"{recipe.name}-????????/{ORIGIN}")):
            run, origin = Run(file.parent), read_json_as(file, Start)
            begun = Path(origin.model_folder or "").parent
            is_named = begun == Path(path).resolve() / "steps" / (step or begun.name)
            if is_named and run_from(origin) == run and (run.is_done or whole_steps(run)):
                return origin
        raise
    # The parent's data position means something only if both runs read the same samples in the same order.
    same_text = manifest.data_fingerprint == text.fingerprint
    goes_on = same_text and (before.order, before.shares) == (recipe.data.order, recipe.data.shares)
    carried = {"weights": True, "optimizer": recipe.init.carry_optimizer, "data position": goes_on}
    return Start(
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        data_position=manifest.data_position if goes_on else 0,
        order_step=manifest.order_step if goes_on else manifest.step,
        pass_step=manifest.pass_step if goes_on else None,
        pass_position=manifest.pass_position if goes_on else 0,
        parent=manifest.content,
        carried=tuple(part for part, is_carried in carried.items() if is_carried),
        model_folder=str(folder / "model"),
        optimizer_folder=folder if recipe.init.carry_optimizer else None,
    )


def refuse_other_commit(recipe: Recipe, run: Run, data_fingerprint: str, parent: str | None) -> None:
    """Raise `InputError` if `run` does not exist, but an unfinished run of this recipe and text, which began with
    another commit of the Hub model, as if the cache that had it was emptied."""
    for path in [] if run.path.exists() else sorted(run.path.parent.glob(f"{recipe.name}-????????")):
        begun = Run(path)
        if begun.is_done or not (steps := whole_steps(begun)):
            continue
        made = read_recipe(begun)
        if (made.init.model, made.identity("", None, "")) == (recipe.init.model, recipe.identity("", None, "")):
            manifest = read_checkpoint_manifest(begun.steps / str(steps[-1]), check_files=False)
            if manifest.data_fingerprint == data_fingerprint and manifest.parent != parent:
                unlike = f"{path} began with another commit of {recipe.init.model} than {recipe.init.revision}"
                remedy = f"say init.revision={made.init.revision or 'COMMIT'} to continue it, or delete it"
                raise InputError(f"{unlike}: {remedy}")
