"""A run that is being trained: what stays the same meanwhile, which checkpoints it keeps, and who holds its folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from biphase.config import Recipe
from biphase.corpus.shards import ShardSet
from biphase.device import choose_dtype, describe_machine
from biphase.distributed import World
from biphase.errors import BusyError, InputError
from biphase.pretraining.curriculum import mixture_ends
from biphase.pretraining.schedule import decay_start
from biphase.pretraining.start import Start, find_start
from biphase.run import Run, claim_run, run_path, whole_steps


@dataclass(frozen=True)
class Job:
    """What stays the same while a run trains."""

    recipe: Recipe
    run: Run
    world: World
    dtype: torch.dtype
    shards: ShardSet
    origin: Start
    """Where the run began, however often it was resumed since."""

    @property
    def kept_steps(self) -> set[int]:
        """Steps whose checkpoints stay: the ends of mixtures, the last before the decay, and those in the recipe."""
        recipe = self.recipe
        decay = decay_start(recipe.schedule, recipe.num_steps)
        return {*mixture_ends(recipe.curriculum), decay, *recipe.checkpoints.keep} - {0}

    @property
    def lost_steps(self) -> list[int]:
        """Kept steps of a finished run without a whole checkpoint: named after it was done, or dropped since."""
        saved = {step - self.origin.step for step in whole_steps(self.run)}
        return sorted(set(self.recipe.checkpoints.keep) - saved) if self.run.is_done else []

    def is_due(self, done: int, every: int) -> bool:
        """Whether something that happens at kept steps, and after `every` updates (0: never), happens now."""
        return done in self.kept_steps or (every > 0 and done % every == 0)


def open_job(recipe: Recipe, root: Path, world: World) -> Job:
    """The recipe's run under `root`, named by what decides its weights. Writes nothing and loads no weights."""
    shards = ShardSet.open(Path(recipe.data.shards), "train")
    origin = find_start(recipe, shards, world)
    dtype = choose_dtype(recipe.compute.precision, world.device)
    run = Run(run_path(root, recipe.name, recipe.identity(shards.fingerprint, origin.parent, str(dtype))))
    return Job(recipe, run, world, dtype, shards, origin)


@contextmanager
def hold_run(job: Job) -> Iterator[None]:
    """Claim the run folder for all processes; every one of them raises `InputError` when it is taken."""
    world, taken = job.world, None
    with ExitStack() as held:
        if world.is_main:
            environment = describe_machine(world.device) | {"processes": world.size}
            try:
                held.enter_context(claim_run(job.run, job.recipe.model_dump(mode="json"), environment))
            except InputError as error:
                taken = error
        if world.any(taken is not None):
            raise taken or BusyError(f"{job.run.path} is in use by another process")
        yield
