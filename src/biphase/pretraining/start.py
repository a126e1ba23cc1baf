"""Where a run starts: fresh, resumed, branched and adapted runs differ here and nowhere else.

Each is a network, a place in the data order and, where it is carried, an optimizer's state.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoModelForMaskedLM, EuroBertConfig, PreTrainedModel

from biphase import console
from biphase.corpus.packing import TrainingText, find_shares
from biphase.corpus.shards import ShardSet, check_tokenizer
from biphase.corpus.tokenizer import TOKENIZER_FILES, load_tokenizer, tokenizer_hash
from biphase.distributed import World
from biphase.encoder.network import TokenIds, language_model_class, load_model, load_model_config, make_model
from biphase.encoder.packed import position_limit
from biphase.encoder.proofs import check_directions, check_head, freeze_unreached
from biphase.errors import InputError
from biphase.files import read_json_as, write_json
from biphase.hub import fetch_model, model_fingerprint
from biphase.pretraining.checkpoint import read_checkpoint_manifest
from biphase.pretraining.objectives import is_causal
from biphase.recipe import Recipe
from biphase.run import Run, find_checkpoint, read_recipe, split_reference, whole_steps

ORIGIN = "origin.json"
"""The file of a branch's run that says where it began: its parent may drop that checkpoint meanwhile."""


@dataclass(frozen=True)
class Start:
    """Where a run begins, or goes on."""

    run_step: int = 0
    """Updates of this run that are already done."""
    step: int = 0
    tokens_seen: int = 0
    data_position: int = 0
    parent: str | None = None
    carried: tuple[str, ...] = ()
    model_folder: str | None = None
    """A transformers folder, None for random weights."""
    optimizer_folder: Path | None = None


def find_start(recipe: Recipe, text: TrainingText) -> Start:
    """The beginning that `init` names. Loads no weights."""
    init, shards = recipe.init, text.main
    if init.preset is not None:
        return Start()
    if init.model is not None:
        folder = fetch_model(init.model, init.revision)
        check_foreign_tokenizer(folder, shards)
        parent = model_fingerprint(init.model, folder)
        return Start(parent=parent, carried=("weights",), model_folder=str(folder))
    return find_branch(recipe, text)


def find_branch(recipe: Recipe, text: TrainingText) -> Start:
    """The beginning at a checkpoint of another run; its text begins anew where the two have not the same order."""
    init, shards = recipe.init, text.main
    assert init.checkpoint is not None
    folder = find_checkpoint(init.checkpoint)
    path, step = split_reference(init.checkpoint)
    parent_run = Run(Path(path))
    if not step and not parent_run.is_done:  # its last step would name another parent later, and another run
        steps = ", ".join(f"@{step}" for step in whole_steps(parent_run))
        raise InputError(f"{path} is not done, so its last step may change: say which one, {path}@STEP; it has {steps}")
    manifest = read_checkpoint_manifest(folder)
    check_tokenizer(shards, manifest.tokenizer_hash)
    # The parent's place in the data order means something only where both walk through the same samples.
    theirs = read_recipe(Run(folder.parent.parent)).data
    same_text = manifest.data_fingerprint == text.fingerprint and len(manifest.data_history) < 2
    goes_on = same_text and (theirs.order, find_shares(theirs)) == (recipe.data.order, find_shares(recipe.data))
    carried = {"weights": True, "optimizer": init.carry_optimizer, "data position": goes_on}
    return Start(
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        data_position=manifest.data_position if goes_on else 0,
        parent=manifest.content,
        carried=tuple(what for what, is_carried in carried.items() if is_carried),
        model_folder=str(folder / "model"),
        optimizer_folder=folder if init.carry_optimizer else None,
    )


def record_origin(run: Run, origin: Start) -> None:
    """Keep in a run's folder where it began."""
    folders = {"model_folder": origin.model_folder, "optimizer_folder": origin.optimizer_folder}
    absolute = {name: folder and str(Path(folder).resolve()) for name, folder in folders.items()}
    write_json(run.path / ORIGIN, asdict(origin) | absolute)


def find_recorded(recipe: Recipe, root: Path, run_from: Callable[[Start], Run]) -> Start | None:
    """Where the recipe's run began, by its own record; None where there is none, or no checkpoint to go on from.

    Args:
        run_from: the recipe's run, if it began there.
    """
    if recipe.init.checkpoint is None:
        return None
    path, step = split_reference(recipe.init.checkpoint)
    for file in sorted(root.glob(f"{recipe.name}-????????/{ORIGIN}")):
        run, origin = Run(file.parent), read_json_as(file, Start)
        begun = Path(origin.model_folder or "").parent
        is_named = begun == Path(path).resolve() / "steps" / (step or begun.name)
        if is_named and run_from(origin).path == run.path and (run.is_done or whole_steps(run)):
            return origin
    return None


def resume_start(run: Run, step: int, world: World) -> Start:
    """Where an interrupted run goes on; the first process alone looks whether all files are unchanged. A collective."""
    folder = run.steps / str(step)
    elsewhere = f"{folder} cannot be taken over; the first process says why"
    manifest = world.decide(lambda: read_checkpoint_manifest(folder), elsewhere)
    if len(manifest.data_history) > 1:
        raise InputError(f"{run.path} trains on a set to which an earlier version added text: begin it anew")
    return Start(
        run_step=manifest.run_step,
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        data_position=manifest.data_position,
        parent=manifest.parent,
        carried=tuple(manifest.carried),
        model_folder=str(folder / "model"),
        optimizer_folder=folder,
    )


def load_network(recipe: Recipe, start: Start, shards: ShardSet) -> PreTrainedModel:
    """The network at `start`, in fp32 on the CPU, its head checked against ours."""
    manifest = shards.manifest
    if start.model_folder is None:
        init, longest = recipe.init, recipe.data.max_sample_tokens
        tokens = TokenIds(manifest.vocab_size, manifest.mask_id, manifest.eos_id, manifest.pad_id, manifest.bos_id)
        assert init.preset is not None
        return make_model(init.preset, init.architecture, tokens, longest, recipe.seed)
    network = load_model(start.model_folder, vocab_size=manifest.vocab_size, seed=recipe.seed)
    source = start.model_folder
    limit = position_limit(network) or recipe.data.max_sample_tokens
    if limit < recipe.data.max_sample_tokens:
        raise InputError(
            f"{source} takes {limit} positions; set data.max_sample_tokens={limit} or lower "
            f"(it is {recipe.data.max_sample_tokens})"
        )
    is_encoder = language_model_class(network.config) is AutoModelForMaskedLM
    if is_encoder and not isinstance(network.config, EuroBertConfig):
        if any(is_causal(phase) for phase in recipe.curriculum):
            raise InputError(
                f"{source}: transformers knows {type(network).__name__} as bidirectional only; leave clm out of the "
                "curriculum, or start from a decoder"
            )
        if network.base_model.first_position and manifest.pad_id != network.config.pad_token_id:
            raise InputError(
                f"{source} counts positions from behind its padding token {network.config.pad_token_id}, and that of "
                f"the shards is {manifest.pad_id}: prepare the text with the model's own tokenizer"
            )
    for role in ("mask", "eos", "pad"):
        setattr(network.config, f"{role}_token_id", getattr(manifest, f"{role}_id"))
    check_head(network)
    freeze_unreached(network)
    if not is_encoder:
        check_directions(network, sorted({is_causal(phase) for phase in recipe.curriculum}))
    return network


def check_foreign_tokenizer(folder: Path, shards: ShardSet) -> None:
    """A model folder with a tokenizer must have been given the shards' tokenizer; one without is taken at its word, and
    that is said."""
    if any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        check_tokenizer(shards, tokenizer_hash(load_tokenizer(folder)))
        return
    vocab_size = load_model_config(folder).vocab_size
    if shards.manifest.vocab_size > vocab_size + len(shards.manifest.special_ids):
        raise InputError(
            f"{folder} knows {vocab_size} tokens and the shards have {shards.manifest.vocab_size}: another tokenizer"
        )
    console.err.print(
        f"{folder} has no tokenizer: nobody can tell whether that of the shards is the one that it was trained with "
        f"({shards.manifest.vocab_size:,} tokens, the network has {vocab_size:,})"
    )
