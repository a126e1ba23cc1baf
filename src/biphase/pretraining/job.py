"""A run in training: its origin, its claimed folder, and the state that training changes.

Fresh, resumed, branched and adapted runs differ only in their `Start`: a network, a position in the data order and, if
it is carried over, the optimizer's state. Weights and moments are loaded at the start and saved in checkpoints.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMaskedLM, EuroBertConfig, PreTrainedModel

from biphase.corpus.packing import TrainingText, open_text
from biphase.corpus.shards import ShardSet
from biphase.curriculum import Phase
from biphase.device import describe_machine
from biphase.distributed import World
from biphase.encoder.lora import adapt_network
from biphase.encoder.network import TokenIds, language_model_class, load_model, make_model
from biphase.encoder.packed import PackedModel, count_flops
from biphase.encoder.proofs import check_directions, check_head, freeze_unreached
from biphase.errors import BusyError, InputError, memory_told
from biphase.files import remove_folder, write_json
from biphase.flops import FlopCount, update_flops
from biphase.hub import load_model_config, model_fingerprint, position_limit
from biphase.pretraining import optimizer
from biphase.pretraining.checkpoint import load_optimizer, save_checkpoint
from biphase.pretraining.start import ORIGIN, Start, begin_with_model, find_branch, refuse_other_commit
from biphase.recipe import Recipe
from biphase.run import CheckpointManifest, Run, claim_run, read_checkpoint_manifest, read_own_name, whole_steps


@dataclass(frozen=True)
class Job:
    """The facts that stay the same while a run trains."""

    recipe: Recipe
    run: Run
    world: World
    text: TrainingText
    origin: Start
    """The point at which the run began, however often it was resumed."""
    pass_step: int = field(init=False)
    """The step, over all runs, from which passes over the text (`mask_passes`) count: the one from which the parent
    counted, or this run's first if the batches since then had other sizes."""

    def __post_init__(self) -> None:
        origin = self.origin
        begin = origin.order_step if origin.pass_step is None else origin.pass_step
        has_sizes = origin.pass_position - self.tokens_before(begin - origin.step) == origin.data_position
        object.__setattr__(self, "pass_step", begin if has_sizes else origin.step)

    def tokens_before(self, run_step: int) -> int:
        """Count the tokens of this run's updates before `run_step`."""
        return self.recipe.tokens_before(self.origin.step + run_step) - self.recipe.tokens_before(self.origin.step)


def open_job(
    recipe: Recipe, root: Path, world: World, text: TrainingText | None = None, model: Path | None = None
) -> Job:
    """Open the recipe's run under `root`, named by everything that decides its weights. Writes nothing and loads no
    weights. Every process must call it; all raise `InputError` if they open different runs, for a run that was begun or
    trained in another precision than `auto` means here, that was validated on other text, or that began with another
    commit of the Hub model.

    Args:
        text: the opened texts of `data`, if the caller has them.
        model: the folder of `init.model`, if the caller has it.
    """
    init, origin, text = recipe.init, Start(), text or open_text(recipe.data)
    if init.model is not None:
        recipe, origin = begin_with_model(recipe, text.main, model)

    def run_from(origin: Start, dtype: torch.dtype = world.dtype) -> Run:
        identity = recipe.identity(text.fingerprint, origin.parent, str(dtype))
        return Run(root / f"{recipe.name}-{identity[:8]}")

    if init.checkpoint is not None:
        origin = world.on_first(lambda: find_branch(recipe, text, root, run_from))
    run = run_from(origin)
    # Each process has a place in the sums for the hash in the name of its run.
    number = int(run.path.name[-8:], 16)
    hashes = {f"{int(each):08x}" for each in world.sum(*(number * (world.rank == rank) for rank in range(world.size)))}
    if len(hashes) > 1:
        remedy = "give all machines the same recipe, text, model and precision"
        raise InputError(f"the processes would train different runs ({', '.join(sorted(hashes))}): {remedy}")
    if (name := read_own_name(run)) != run.path.name:
        raise InputError(f"{run.path} holds the run {name}: rename the folder back, or delete it")
    if recipe.compute.precision == "auto":
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        own = names.pop(world.dtype)
        [(dtype, other)] = names.items()
        begun = run_from(origin, dtype)
        if world.on_first(lambda: not run.path.exists() and (begun.is_done or bool(whole_steps(begun)))):
            made = "trained" if begun.is_done else "begun"
            problem = f"{begun.path} was {made} in {other}, which is not the precision of this device"
            remedy = f"continue it on a device like its first or with compute.precision={other}, or "
            remedy += f"train another with compute.precision={own}" if begun.is_done else "delete it"
            raise InputError(f"{problem}: {remedy}")
    if recipe.init.revision != init.revision:  # a commit that the user has not named
        world.on_first(partial(refuse_other_commit, recipe, run, text.fingerprint, origin.parent))
    refuse_other_validation_text(run, recipe, text.main, world)
    return Job(recipe, run, world, text, origin)


def refuse_other_validation_text(run: Run, recipe: Recipe, shards: ShardSet, world: World) -> None:
    """Raise `InputError` if a run on a mixture has validated on other text than `shards`, the set of `data.shards`,
    which decides no weights there. Every process must call it."""
    if recipe.data.mixture is None:  # the text is part of the run's name
        return

    def read_last() -> str:
        steps = whole_steps(run)
        return read_checkpoint_manifest(run.steps / str(steps[-1]), check_files=False).validation_text if steps else ""

    if (made := world.on_first(read_last)) not in ("", shards.fingerprint):
        unlike = f"other text ({made[:8]}) than {shards.folder} has now ({shards.fingerprint[:8]})"
        remedy = "restore that text, or give the recipe another name to train another run"
        raise InputError(f"{run.path} was validated on {unlike}: {remedy}")


@contextmanager
def hold_run(job: Job) -> Iterator[None]:
    """Claim the run folder for all processes. Each raises `BusyError` if another process holds it, and an `InputError`
    for a missing or other tokenizer, which every checkpoint contains, and with a remedy if memory runs out in the
    block."""
    world, run, compute, lora = job.world, job.run, job.recipe.compute, job.recipe.init.lora
    remedy = f"lower compute.microbatch_tokens ({compute.microbatch_tokens:,})"
    if not compute.activation_checkpointing:
        remedy += ", or set compute.activation_checkpointing=true"
    if world.size > 1 and compute.parallel == "ddp" and not job.recipe.needs_whole_matrices:
        remedy += ", or compute.parallel=fsdp"
    if lora is None or not lora.lora_dropout:  # dropout is drawn for each microbatch
        remedy += "; the result stays the same"
    with world.fail_together():
        _ = job.text.main.tokenizer
    with ExitStack() as held:
        with world.fail_together(BusyError):
            if world.is_main:
                environment = describe_machine(world.device) | {"processes": world.size}
                environment["precision"] = str(world.dtype).removeprefix("torch.")
                held.enter_context(claim_run(run, job.recipe.model_dump(mode="json"), environment))
                if job.recipe.init.checkpoint is not None and not run.is_done:
                    origin = asdict(job.origin)
                    for key in ("model_folder", "optimizer_folder"):
                        origin[key] = origin[key] and str(Path(origin[key]).resolve())
                    write_json(run.path / ORIGIN, origin)
        held.enter_context(memory_told(remedy))
        yield


def load_network(recipe: Recipe, start: Start, shards: ShardSet) -> PreTrainedModel:
    """Load the network at `start`, in fp32 on the CPU, and prove that our loss scores as its own head does."""
    manifest, longest, source = shards.manifest, recipe.data.max_sample_tokens, start.model_folder
    if source is None:
        ids = TokenIds(manifest.vocab_size, manifest.mask_id, manifest.eos_id, manifest.pad_id, manifest.bos_id)
        assert recipe.init.preset is not None
        return make_model(recipe.init.preset, recipe.init.architecture, ids, longest, recipe.seed)
    is_resumed = start.optimizer_folder is not None
    new_head = recipe.init.new_head and not is_resumed
    network = load_model(source, vocab_size=manifest.vocab_size, seed=recipe.seed, new_head=new_head)
    limit = position_limit(network) or longest
    if limit < longest:
        remedy = f"set data.max_sample_tokens={limit} or lower (it is {longest})"
        raise InputError(f"{source} takes {limit} positions; {remedy}")
    is_encoder = language_model_class(network.config) is AutoModelForMaskedLM
    if is_encoder and not isinstance(network.config, EuroBertConfig):
        if causal := [phase.objective for phase in recipe.curriculum if phase.is_causal]:
            remedy = f"leave {causal[0]} out of the curriculum, or start from a decoder"
            raise InputError(f"{source}: transformers knows {type(network).__name__} as bidirectional only; {remedy}")
        if network.base_model.first_position and manifest.pad_id != network.config.pad_token_id:
            tokens = f"{network.config.pad_token_id}, and that of the shards is {manifest.pad_id}"
            remedy = "prepare the text with the model's own tokenizer"
            raise InputError(f"{source} counts positions from after its padding token {tokens}: {remedy}")
    for role in ("mask", "eos", "pad"):
        setattr(network.config, f"{role}_token_id", getattr(manifest, f"{role}_id"))
    check_head(network)
    freeze_unreached(network)
    if not is_encoder:
        check_directions(network, sorted({phase.is_causal for phase in recipe.curriculum}))
    return network


@dataclass
class State:
    """The state that training changes, and the costs of a run."""

    model: nn.Module
    """A `PackedModel`, wrapped for its processes."""
    optimizers: list[torch.optim.Optimizer]
    tokens_seen: int
    saved_step: int
    """The step of the run's last whole checkpoint; 0 for none."""
    num_tokens: int
    """The tokens of all updates of the run, even if it was resumed."""
    flops: FlopCount
    compiling: str
    """A phrase that says whether the blocks are compiled, and why."""
    loaded_step: int = 0
    """The step of the checkpoint with which this state began; 0 for none."""


def load_state(job: Job, run_step: int) -> State:
    """Load the state after `run_step` updates: 0, or a step with a checkpoint. Every process must call it."""
    recipe, world, start = job.recipe, job.world, job.origin
    if run_step:
        folder = job.run.steps / str(start.step + run_step)
        manifest = world.on_first(partial(read_checkpoint_manifest, folder))
        start = replace(start, tokens_seen=manifest.tokens_seen, optimizer_folder=folder)
        if recipe.init.lora is None:  # else the adapters go on beside the weights with which they began
            start = replace(start, model_folder=str(folder / "model"))
        elif not Path(start.model_folder or "").is_dir():
            lack = f"{start.model_folder}, beside which the adapters of {job.run.path} train, is gone"
            raise InputError(f"{lack}: put it back, or delete {job.run.path} and begin with another model")
    load = partial(load_network, recipe, start, job.text.main)
    sharded = world.size > 1 and recipe.compute.parallel == "fsdp"
    network, whole = optimizer.outline_network(load, world) if sharded else (load(), None)
    counted: Any = whole if sharded else network  # an outline computes no products to count
    num_tokens = job.tokens_before(recipe.num_steps)
    flops = world.on_first(partial(count_flops, counted))
    if recipe.init.lora is not None:
        assert start.model_folder is not None
        lacked = range(load_model_config(start.model_folder).vocab_size, job.text.main.manifest.vocab_size)
        adapt_network(network, recipe.init.lora, {job.text.main.manifest.mask_id, *lacked}, recipe.seed)
    work = num_tokens * flops.per_token
    compiles, compiling = optimizer.decide_compile(recipe.compute, world.device, world.dtype, work)
    model = optimizer.parallelize(PackedModel(network), recipe.compute, world, compiles=compiles)
    if sharded:
        optimizer.fill_parts(model, whole, world)
        del whole
    optimizers = optimizer.make_optimizers(recipe.optimizer, model, dtype=world.dtype, sharded=sharded)
    shapes = [matrix.shape for matrix in optimizer.block_matrices(model)]
    flops = replace(flops, per_update=update_flops(recipe.optimizer, shapes))
    if recipe.init.lora is not None:
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        flops = flops.with_adapters(num_trained, is_tied=network.get_output_embeddings().weight.requires_grad)
    if start.optimizer_folder is not None:
        load_optimizer(start.optimizer_folder, optimizer.unwrap(model), optimizers, world)
    return State(model, optimizers, start.tokens_seen, run_step, num_tokens, flops, compiling, loaded_step=run_step)


def refuse_other_weights(job: Job, run_step: int) -> None:
    """Raise `InputError` if the files with the weights after `run_step` updates have been replaced in the meantime.

    Weights are memory-mapped, not read at once, and the first update may still read them from their files.
    """
    source, start = job.recipe.init.model, job.origin
    if run_step:
        read_checkpoint_manifest(job.run.steps / str(start.step + run_step))
    if start.model_folder is not None and (not run_step or job.recipe.init.lora is not None):
        folder = Path(start.model_folder)
        content = model_fingerprint(source, folder) if source else read_checkpoint_manifest(folder.parent).content
        if content != start.parent:
            raise InputError(f"{folder} was replaced while {job.run.path} began with it: run the same command again")


def save_state(job: Job, state: State, done: int, phase: Phase) -> None:
    """Write the checkpoint after update `done`, in a phase, and remove old checkpoints that the recipe does not keep. A
    finished run, which trains again to add a checkpoint, keeps all that it has, but not those on the way there.

    Every process must call it.
    """
    origin, recipe, run = job.origin, job.recipe, job.run
    manifest = CheckpointManifest(
        step=origin.step + done,
        run_step=done,
        tokens_seen=state.tokens_seen,
        data_position=origin.data_position + job.tokens_before(done),
        order_step=origin.order_step,
        pass_step=job.pass_step,
        pass_position=origin.data_position + job.tokens_before(job.pass_step - origin.step),
        data_fingerprint=job.text.fingerprint,
        texts=job.text.contents,
        run=run.path.name,
        tokenizer_hash=job.text.main.manifest.tokenizer_hash,
        objective=phase.objective,
        is_decayed=done > recipe.decay_start,
        parent=origin.parent,
        carried=list(origin.carried),
        validation_text=job.text.main.fingerprint,
    )
    packed: Any = optimizer.unwrap(state.model)
    if packed.network.config.model_type != "eurobert":  # so that transformers reloads a decoder with this direction
        packed.network.config.is_causal = phase.is_causal
    save_checkpoint(run, manifest, packed, state.optimizers, job.text.main.tokenizer, job.world)
    before, state.saved_step = state.saved_step, done
    if not job.world.is_main:
        return
    if run.is_done:
        passing = [origin.step + before] if before > state.loaded_step else []
    else:
        passing = [step for step in whole_steps(run) if step - origin.step not in recipe.kept_steps]
        passing = passing[: -(recipe.checkpoints.keep_last or len(passing))]  # 0 keeps them all
    for step in passing:
        remove_folder(run.steps / str(step))
