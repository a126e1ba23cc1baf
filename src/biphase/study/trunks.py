"""Arms → runs that train each distinct step once, and the segments that they consist of.

Arms share a trunk as long as everything that decides their weights agrees and the rate is at its peak: they part where
the objective changes, where a decay begins, or where one of them ends. The first arm in the file that needs a step
trains it; a later arm is a run that starts from the kept checkpoint, with its moments and its place in the data order,
and so gives the weights that it would have had alone. Warm-up and decay are never cut: a schedule begins and ends
within one run.

A trunk with two branches, each arm with a warm-up ╱ of 10 and a decay ╲ of 20 steps; ● is a kept checkpoint:

    step       0   10                   60       80      100              140     160      180     200
    clm-200    ╱───────── clm ──────────●────────●────────────────────── clm ──────────────╲───────●
    clm-100                             │        ╰╲──────●
    60-100                              ╰────────────────── mlm ──────────╲───────●

    arm        path                                            run
    clm-200    origin 0, parent none,    first  0, last 200    all of it; kept 60, 80, 200
    clm-100    origin 0, parent clm-200, first 80, last 100    its decay, since steps 0 to 80 are those of clm-200
    60-100     origin 0, parent clm-200, first 60, last 160    its 100 steps of MLM, without a warm-up

An arm that continues clm-200 (`parents` in the study file) has origin 200: steps count updates since random weights,
over all parents, as checkpoints do.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from biphase.errors import InputError
from biphase.files import content_hash
from biphase.recipe import Init, Phase, Recipe
from biphase.study.arms import Arm

SchedulePart = Literal["warm-up", "constant", "decay"]


@dataclass(frozen=True)
class ArmPath:
    """The runs that train the steps of an arm: up to `first` by other runs, from there to `last` by its own."""

    arm: Arm
    origin: int
    """Where the arm itself begins: the last step of the arm that it continues, 0 for an arm that continues none."""
    parent: str | None
    """The run that has step `first`; None where the arm begins with random weights or a foreign model."""
    first: int
    last: int
    trunk_key: str
    """The arm's `trunk_key`: only arms with equal ones can share steps, and they begin at one origin."""

    @property
    def flat_end(self) -> int:
        return self.last - self.arm.recipe.schedule.decay_steps


@dataclass(frozen=True)
class PlannedRun:
    """One `biphase pretrain`: what an arm needs beyond what earlier runs have trained."""

    name: str
    """The name of its arm."""
    group: str
    model: str
    parent: str | None
    first: int
    """The parent's step that it starts from, 0 without a parent."""
    last: int
    kept: tuple[int, ...]
    """The steps of which another run or an evaluation needs the checkpoint, the last one included."""
    recipe: Recipe
    """The recipe that is trained; its `init.checkpoint` is PARENT@STEP, where the unit that trains puts a folder."""
    key: str
    """A hash of everything that decides its weights: its recipe, and the keys of the runs behind it."""

    @property
    def steps(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> int:
        return self.recipe.tokens_before(self.last) - self.recipe.tokens_before(self.first)


@dataclass(frozen=True)
class Segment:
    """A stretch of a run under one objective and one part of the schedule, between two kept steps."""

    name: str
    run: str
    parent: str | None
    """The segment at whose end it begins; None from random weights or a foreign model."""
    phase: Phase
    part: SchedulePart
    first: int
    last: int

    @property
    def steps(self) -> int:
        return self.last - self.first


class TrunkIndex:
    """The paths of arms, and how far each beginning of a curriculum has been trained.

    An arm is compared with the beginnings of all others at once: a plan of thousands of arms takes seconds.
    """

    def __init__(self) -> None:
        self.paths: dict[str, ArmPath] = {}
        self.models: dict[tuple[str, tuple[Phase, ...], int], str] = {}
        self.reached: dict[Beginning, list[tuple[int, int, str]]] = defaultdict(list)
        """(how far its own rate does not fall, number, name) of each arm that goes farther than all before it."""

    def add(self, name: str, path: ArmPath) -> None:
        limit, number = path.flat_end - path.origin, len(self.paths)
        self.paths[name] = path
        for beginning, end in beginnings(path):
            farthest = self.reached[beginning]
            if not farthest or min(end, limit) > farthest[-1][0]:
                farthest.append((min(end, limit), number, name))

    def longest_beginning(self, path: ArmPath) -> tuple[str | None, int]:
        """The arm with which a path has the most steps in common from their origin on, and how many.

        Among equals it is the first in the file.
        """
        # Phase by phase, up to and into the first that differs:
        #   clm 200           | 60 clm + 100 mlm   →  60: of the first phases, the shorter one
        #   60 clm + 100 mlm  | 60 clm + 80 mlm    → 140: equal first phases, and the shorter one of the second
        #   60 clm + 100 mlm  | 60 clm + 80 mlm20  →  60: the second phases have nothing in common
        # and not beyond the step where either's rate begins to fall, and not a part of the warm-up.
        shared: list[tuple[int, int, str]] = []
        for beginning, end in beginnings(path):
            if beginning not in self.reached:
                break
            farthest, wanted = self.reached[beginning], min(end, path.flat_end - path.origin)
            far_enough = bisect_left(farthest, (wanted, -1, ""))
            reach, number, name = farthest[min(far_enough, len(farthest) - 1)]
            shared.append((min(reach, wanted), -number, name))
        common, _, name = max(shared, default=(0, 0, ""))
        return (name, common) if common >= max(1, path.arm.recipe.schedule.warmup_steps) else (None, 0)


Beginning = tuple[str, tuple[Phase, ...], Phase]
"""A trunk key, whole phases, and the phase behind them, of one step where its length may be any."""


def beginnings(path: ArmPath) -> Iterator[tuple[Beginning, int]]:
    """List each beginning of an arm's curriculum, up to and into a phase, and how many steps it has there."""
    phases, end = path.arm.recipe.curriculum, 0
    for number, phase in enumerate(phases):
        end += phase.steps
        yield (
            (path.trunk_key, phases[:number], phase if phase.is_ramped else phase.model_copy(update={"steps": 1})),
            end,
        )


def place_on_trunk(arm: Arm, index: TrunkIndex) -> None:
    """Add the path of an arm, behind the longest beginning that it shares with one of the earlier arms.

    Raises `InputError` when an earlier arm is the same model.
    """
    # Alone, the arm would train all its steps, from random weights or from the end of the arm that it continues.
    paths, recipe = index.paths, arm.recipe
    origin, parent = 0, None
    if arm.parent is not None:
        origin = paths[arm.parent].last
        parent = run_that_trains(origin, arm.parent, paths)
    alone = ArmPath(arm, origin, parent, origin, origin + recipe.num_steps, trunk_key(recipe))
    model = (alone.trunk_key, recipe.curriculum, recipe.schedule.decay_steps)
    twin = index.models.setdefault(model, arm.name)
    if twin != arm.name:
        raise InputError(f"arms '{twin}' and '{arm.name}' are the same model under two names; remove one of them")

    # The trunk's arm may itself be a branch of a third one, whose run then has the checkpoint.
    trunk, longest = index.longest_beginning(alone)
    if trunk is not None:
        first = origin + longest
        alone = replace(alone, first=first, parent=run_that_trains(first, trunk, paths))
    index.add(arm.name, alone)


def run_that_trains(step: int, arm: str, paths: Mapping[str, ArmPath]) -> str:
    """The run that trains an arm's path up to `step`, and so has that checkpoint: clm-200 for step 60 of 60-100."""
    while step <= paths[arm].first:
        parent = paths[arm].parent
        assert parent is not None
        arm = parent
    return arm


def trunk_key(recipe: Recipe) -> str:
    """A hash of everything that decides the weights of a step, but for the curriculum and the decay."""
    tree = recipe.weights_tree
    del tree["curriculum"], tree["schedule"]["decay_steps"]
    return content_hash(tree)


def make_runs(paths: Mapping[str, ArmPath], evaluated: Iterable[tuple[str, int]]) -> dict[str, PlannedRun]:
    """A run for each arm that has steps of its own; `evaluated` are the (run, step) that evaluations need."""
    # An arm whose every step another arm's run trains is a checkpoint of that run.
    trained = {name: path for name, path in paths.items() if path.first < path.last}
    kept = {name: {path.last} for name, path in trained.items()}
    for path in trained.values():
        if path.parent is not None:
            kept[path.parent].add(path.first)
    for run, step in evaluated:
        kept[run].add(step)
    runs: dict[str, PlannedRun] = {}
    for name, path in trained.items():
        arm, recipe = path.arm, path.arm.recipe
        init, schedule, steps = recipe.init, recipe.schedule, tuple(sorted(kept[name]))
        if path.first > path.origin:
            # A branch: the warm-up lies behind it, and it goes on as if it had never left the trunk.
            init = Init(checkpoint=f"{path.parent}@{path.first}", carry_optimizer=True)
            schedule = schedule.model_copy(update={"warmup_steps": 0})
        elif path.parent is not None:
            # The beginning of an arm that continues another one: with its own warm-up, and moments if it asks for them.
            init = Init(checkpoint=f"{path.parent}@{path.first}", carry_optimizer=init.carry_optimizer)
        checkpoints = recipe.checkpoints.model_copy(update={"keep": tuple(step - path.first for step in steps)})
        curriculum = phases_between(recipe.curriculum, path.first - path.origin, path.last - path.origin)
        changes = {"init": init, "schedule": schedule, "curriculum": curriculum, "checkpoints": checkpoints}
        own_recipe = Recipe.model_validate(recipe.model_copy(update=changes).model_dump())
        runs[name] = PlannedRun(
            name=arm.name,
            group=arm.group,
            model=arm.model,
            parent=path.parent,
            first=path.first,
            last=path.last,
            kept=steps,
            recipe=own_recipe,
            key=content_hash([own_recipe.weights_tree, runs[path.parent].key if path.parent else None]),
        )
    return runs


def cut_phases(phases: tuple[Phase, ...], steps: Collection[int]) -> Iterator[tuple[int, int, Phase]]:
    """(begin, end, phase) of the same training with a phase ending at each of `steps`, counted from its beginning.

    clm 60, mlm 100 cut at 20 and 150 → (0, 20, clm), (20, 60, clm), (60, 150, mlm), (150, 160, mlm).
    """
    begin = 0
    for phase in phases:
        end = begin + phase.steps
        ends = sorted({begin, end, *(step for step in steps if begin < step < end)})
        for a, b in pairwise(ends):
            yield a, b, phase.between(a - begin, b - begin)
        begin = end


def phases_between(phases: tuple[Phase, ...], first: int, last: int) -> tuple[Phase, ...]:
    """The part of a training between two of its steps: clm 60, mlm 100 between 20 and 150 → clm 40, mlm 90."""
    pieces = cut_phases(phases, (first, last))
    return tuple(phase for begin, end, phase in pieces if first <= begin and end <= last)


def cut_segments(runs: Mapping[str, PlannedRun]) -> Iterator[Segment]:
    """Cut every run where its objective changes, where its rate stops to rise or begins to fall, and at kept steps."""
    ending_at: dict[tuple[str, int], str] = {}
    for run in runs.values():
        schedule = run.recipe.schedule
        warm_end, decay_begin = run.first + schedule.warmup_steps, run.last - schedule.decay_steps
        # The run begins at a kept step of its parent, where a segment of that one ends; its own follow one another.
        parent = ending_at[run.parent, run.first] if run.parent else None
        cuts = [step - run.first for step in (warm_end, decay_begin, *run.kept)]
        for begin, end, phase in cut_phases(run.recipe.curriculum, cuts):
            first, last = run.first + begin, run.first + end
            part: SchedulePart = "warm-up" if last <= warm_end else "decay" if first >= decay_begin else "constant"
            name = f"{run.name}:{first}-{last}"
            yield Segment(name, run.name, parent, phase, part, first, last)
            ending_at[run.name, last] = parent = name


def stored_steps(run: PlannedRun) -> list[int]:
    """Steps whose checkpoints are there when the run is done: kept ones, ends of phases, the last before the decay."""
    ends = accumulate(phase.steps for phase in run.recipe.curriculum)
    stored = {run.first + end for end in ends} | {run.last - run.recipe.schedule.decay_steps, *run.kept}
    return sorted(stored - {run.first})
