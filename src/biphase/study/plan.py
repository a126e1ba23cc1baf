"""Arms → runs that train each distinct step once, the checkpoints that they pass on, and the fine-tuning cells.

Arms share a trunk as long as everything that decides their weights agrees and the rate is at its peak: they part where
the objective changes, where a decay begins, or where one of them ends. The first arm in the file that needs a step
trains it; a later arm is a run that starts from the kept checkpoint, with its moments and its place in the data order,
and so gives the weights that it would have had alone. Warm-up and decay are never cut: a schedule begins and ends
within one run.

Steps count updates since random weights, over all parents, as checkpoints do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from biphase.config import Init, Phase, Recipe
from biphase.errors import InputError, nearest
from biphase.files import content_hash
from biphase.finetuning.config import FinetuneConfig
from biphase.study.spec import (
    Arm,
    Study,
    are_alike,
    check_evaluation,
    expand_arms,
    finetune_config,
    join_phases,
    trainings,
)

SchedulePart = Literal["warm-up", "constant", "decay"]


@dataclass(frozen=True)
class PlannedRun:
    """One `biphase pretrain`: what an arm needs beyond what earlier runs have trained."""

    name: str
    """Of its arm."""
    group: str
    model: str
    parent: str | None
    """The run that it starts from."""
    first: int
    """The parent's step that it starts from, 0 without a parent."""
    last: int
    recipe: Recipe
    """`init.checkpoint` is PARENT@STEP with the parent's name: `start_from` puts a folder in its place."""
    kept: tuple[int, ...]
    """Steps of which another run or an evaluation needs the checkpoint, the last one included."""
    key: str
    """Names everything that decides its weights: its recipe, and the keys of the runs behind it."""

    @property
    def steps(self) -> int:
        return self.last - self.first


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


@dataclass(frozen=True)
class Model:
    """A checkpoint to evaluate."""

    name: str
    arm: str
    kind: Literal["final", "intermediate", "random"]
    """`random`: its network and tokenizer, with fresh weights."""
    run: str
    step: int

    @property
    def checkpoint(self) -> str:
        return f"{self.run}@{self.step}"


@dataclass(frozen=True)
class Checkpoint:
    """A kept step of a run, and until when it is needed."""

    run: str
    step: int
    needed_by: tuple[str, ...]
    """Runs that start from it: when they are done, and where there are none, it may be dropped unless it is a model."""
    moments_needed_by: tuple[str, ...]
    """Those of them that go on with its optimizer; afterwards, and at once where there are none, the moments may go."""
    models: tuple[str, ...]
    """Models that it is: their cells need its weights."""


@dataclass(frozen=True)
class StudyCell:
    """One fine-tuning: a model on a task's training data, evaluated on one task or several."""

    model: str
    task: str
    evaluates: tuple[str, ...]
    """More than one where tasks share their training, as nq and mldr_en share that of msmarco."""
    config: FinetuneConfig

    @property
    def name(self) -> str:
        return f"{self.model}/{self.task}/lr{self.config.learning_rate:g}/seed{self.config.seed}"


@dataclass(frozen=True)
class Plan:
    """What a study does. Runs stand behind the runs that they start from."""

    study: Study
    arms: dict[str, Arm]
    runs: dict[str, PlannedRun]
    segments: tuple[Segment, ...]
    models: tuple[Model, ...]
    checkpoints: tuple[Checkpoint, ...]
    cells: tuple[StudyCell, ...]

    @property
    def steps(self) -> int:
        return sum(run.steps for run in self.runs.values())

    @property
    def steps_alone(self) -> int:
        """Of all arms if each were trained from its beginning."""
        return sum(arm.recipe.num_steps for arm in self.arms.values())

    @property
    def longest_chain(self) -> int:
        """Steps that must follow one another however many devices there are, each run as a whole."""
        behind: dict[str, int] = {}
        for name, run in self.runs.items():
            behind[name] = run.steps + (behind[run.parent] if run.parent else 0)
        return max(behind.values())


def plan_study(study: Study) -> Plan:
    """The plan of a study; nothing is read from disk but the table of tasks.

    Raises:
        InputError: as `expand_arms` and `check_evaluation`; an intermediate checkpoint that cannot exist; two arms that
            are one model.
    """
    arms = expand_arms(study)
    if study.evaluation is not None:
        check_evaluation(study.evaluation)
    tracks: dict[str, Track] = {}
    for arm in arms.values():
        tracks[arm.name] = lay_track(arm, tracks)
    models = list_models(study, tracks)
    kept: dict[str, set[int]] = {name: {track.last} for name, track in tracks.items() if track.is_run}
    for track in tracks.values():
        if track.is_run and track.parent is not None:
            kept[track.parent].add(track.first)
    for model in models:
        kept[model.run].add(model.step)
    runs: dict[str, PlannedRun] = {}
    for name, steps in kept.items():
        parent = tracks[name].parent
        runs[name] = make_run(tracks[name], tuple(sorted(steps)), runs[parent].key if parent else None)
    segments = tuple(cut_segments(runs))
    return Plan(study, arms, runs, segments, models, list_checkpoints(runs, models), tuple(list_cells(study, models)))


@dataclass(frozen=True)
class Track:
    """Where an arm's steps are trained: up to `first` by its parent, from there to `last` by itself."""

    arm: Arm
    origin: int
    """Where the arm itself begins: the end of the arm that it continues, 0 for others."""
    parent: str | None
    first: int
    last: int
    history: str
    """As `history_key` of the arm."""

    @property
    def is_run(self) -> bool:
        """False for an arm that is a step of another one's run."""
        return self.first < self.last

    @property
    def flat_end(self) -> int:
        """Where the decay begins."""
        return self.last - self.arm.recipe.schedule.decay_steps


def lay_track(arm: Arm, tracks: Mapping[str, Track]) -> Track:
    """Behind the longest history that the arm shares with an earlier one."""
    origin, parent = 0, None
    if arm.parent is not None:
        parent, origin = owner(tracks, arm.parent, tracks[arm.parent].last), tracks[arm.parent].last
    track = Track(arm, origin, parent, origin, origin + arm.recipe.num_steps, history_key(arm.recipe))
    alike = {name: other for name, other in tracks.items() if other.history == track.history}
    for name, other in alike.items():
        if is_same(arm, other.arm):
            raise InputError(f"arms '{name}' and '{arm.name}' are the same model under two names; remove one of them")
    shared = {name: shared_steps(track, other) for name, other in alike.items()}
    trunk = max(shared, key=shared.__getitem__, default=None)
    if trunk is None or not shared[trunk]:
        return track
    first = origin + shared[trunk]
    return replace(track, parent=owner(tracks, trunk, first), first=first)


def owner(tracks: Mapping[str, Track], name: str, step: int) -> str:
    """The run that trains an arm up to `step` and so has that checkpoint."""
    while step <= tracks[name].first:
        parent = tracks[name].parent
        assert parent is not None
        name = parent
    return name


def shared_steps(track: Track, other: Track) -> int:
    """Steps from the beginning of two arms with one history that are the same, up to where either's decay begins."""
    recipe = track.arm.recipe
    common = 0
    for mine, theirs in zip(recipe.curriculum, other.arm.recipe.curriculum, strict=False):
        common += min(mine.steps, theirs.steps) if are_alike(mine, theirs) else 0
        if mine != theirs:
            break
    common = min(common, track.flat_end - track.origin, other.flat_end - other.origin)
    return common if common >= recipe.schedule.warmup_steps else 0


def weights_tree(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides weights: all but its name, what is measured and kept on the way, and where it runs."""
    aside = {"name", "validation", "checkpoints", "tensorboard", "compute"}
    return recipe.model_dump(mode="json", exclude=aside) | {"precision": recipe.compute.precision}


def history_key(recipe: Recipe) -> str:
    """Names everything that decides the weights of a step, but for the curriculum and the decay."""
    tree = weights_tree(recipe)
    del tree["curriculum"], tree["schedule"]["decay_steps"]
    return content_hash(tree)


def is_same(arm: Arm, other: Arm) -> bool:
    mine, theirs = arm.recipe, other.recipe
    return mine.curriculum == theirs.curriculum and mine.schedule.decay_steps == theirs.schedule.decay_steps


def list_models(study: Study, tracks: Mapping[str, Track]) -> tuple[Model, ...]:
    """Final models in the order of the file, then intermediate ones, then each network from random weights."""
    finals = [Model(name, name, "final", owner(tracks, name, track.last), track.last) for name, track in tracks.items()]
    passing: dict[str, Model] = {}
    for intermediate in study.intermediate:
        for name in intermediate.arms:
            if name not in tracks:
                raise InputError(f"intermediate: unknown arm '{name}'{nearest(name, tracks)}")
            track = tracks[name]
            for count in intermediate.steps:
                step = track.origin + count
                if step > track.flat_end:
                    begin = track.flat_end - track.origin
                    raise InputError(f"intermediate: arm '{name}' decays from step {begin} on, before step {count}")
                model = Model(f"{name}@{count}", name, "intermediate", owner(tracks, name, step), step)
                passing[model.name] = model
    controls: dict[str, Model] = {}
    if study.evaluation is not None and study.evaluation.random_weights:
        for final in finals:
            network = tracks[final.arm].arm.model
            if f"{network}-random" in tracks:
                raise InputError(f"arm '{network}-random' has the name of the control; give its group another name")
            controls.setdefault(network, replace(final, name=f"{network}-random", kind="random"))
    return (*finals, *passing.values(), *controls.values())


def make_run(track: Track, kept: tuple[int, ...], parent_key: str | None) -> PlannedRun:
    recipe = track.arm.recipe
    init, schedule = recipe.init, recipe.schedule
    if track.first > track.origin:
        init = Init(checkpoint=f"{track.parent}@{track.first}", carry_optimizer=True)
        schedule = schedule.model_copy(update={"warmup_steps": 0})
    elif track.parent is not None:
        init = Init(checkpoint=f"{track.parent}@{track.first}", carry_optimizer=init.carry_optimizer)
    phases = cut_phases(recipe.curriculum, [track.first - track.origin])
    ends = list(accumulate(phase.steps for phase in phases))
    own = tuple(phase for phase, end in zip(phases, ends, strict=True) if track.origin + end > track.first)
    checkpoints = recipe.checkpoints.model_copy(update={"keep": tuple(step - track.first for step in kept)})
    changes = {"init": init, "schedule": schedule, "curriculum": own, "checkpoints": checkpoints}
    run = Recipe.model_validate(recipe.model_copy(update=changes).model_dump())
    return PlannedRun(
        name=track.arm.name,
        group=track.arm.group,
        model=track.arm.model,
        parent=track.parent,
        first=track.first,
        last=track.last,
        recipe=run,
        kept=kept,
        key=content_hash([weights_tree(run), parent_key]),
    )


def cut_phases(phases: tuple[Phase, ...], steps: list[int]) -> tuple[Phase, ...]:
    """The same training with a phase ending at each of `steps`."""
    cut: list[Phase] = []
    begin = 0
    for phase in phases:
        end = begin + phase.steps
        ends = sorted({begin, end, *(step for step in steps if begin < step < end)})
        cut += [phase.model_copy(update={"steps": b - a}) for a, b in pairwise(ends)]
        begin = end
    return tuple(cut)


def start_from(run: PlannedRun, checkpoint: str) -> Recipe:
    """The recipe of a run once the folder is known, as FOLDER@STEP, in which it begins."""
    return run.recipe.model_copy(update={"init": run.recipe.init.model_copy(update={"checkpoint": checkpoint})})


def cut_segments(runs: Mapping[str, PlannedRun]) -> Iterator[Segment]:
    ends: dict[tuple[str, int], str] = {}
    for run in runs.values():
        schedule = run.recipe.schedule
        warm_end, decay_begin = run.first + schedule.warmup_steps, run.last - schedule.decay_steps
        begin = run.first
        parent = ends[run.parent, run.first] if run.parent else None
        cuts = [warm_end, decay_begin, *run.kept]
        for phase in cut_phases(run.recipe.curriculum, [step - run.first for step in cuts]):
            end = begin + phase.steps
            part: SchedulePart = "warm-up" if end <= warm_end else "decay" if begin >= decay_begin else "constant"
            name = f"{run.name}:{begin}-{end}"
            yield Segment(name, run.name, parent, phase, part, begin, end)
            ends[run.name, end] = parent = name
            begin = end


def list_checkpoints(runs: Mapping[str, PlannedRun], models: tuple[Model, ...]) -> tuple[Checkpoint, ...]:
    """Every step that stays on disk when its run is done, in the order of the runs."""
    users: dict[tuple[str, int], list[PlannedRun]] = {}
    for run in runs.values():
        if run.parent is not None:
            users.setdefault((run.parent, run.first), []).append(run)
    evaluated: dict[tuple[str, int], list[str]] = {}
    for model in models:
        evaluated.setdefault((model.run, model.step), []).append(model.name)
    return tuple(
        Checkpoint(
            run.name,
            step,
            needed_by=tuple(user.name for user in users.get((run.name, step), ())),
            moments_needed_by=tuple(
                user.name for user in users.get((run.name, step), ()) if user.recipe.init.carry_optimizer
            ),
            models=tuple(evaluated.get((run.name, step), ())),
        )
        for run in runs.values()
        for step in stored_steps(run)
    )


def stored_steps(run: PlannedRun) -> list[int]:
    """Steps whose checkpoints are there when the run is done: kept ones, ends of phases, the last before the decay."""
    ends = accumulate(phase.steps for phase in run.recipe.curriculum)
    stored = {run.first + end for end in ends} | {run.last - run.recipe.schedule.decay_steps, *run.kept}
    return sorted(stored - {run.first})


def history(plan: Plan, model: Model) -> tuple[Phase, ...]:
    """The phases of a model from its beginning, over all parents; those of a foreign model are not known."""
    arm = plan.arms[model.arm]
    before: tuple[Phase, ...] = ()
    if arm.parent is not None:
        before = history(plan, next(other for other in plan.models if other.name == arm.parent))
    own = model.step - sum(phase.steps for phase in before)
    phases = cut_phases(arm.recipe.curriculum, [own])
    ends = accumulate(phase.steps for phase in phases)
    return join_phases([*before, *(phase for phase, end in zip(phases, ends, strict=True) if end <= own)])


def list_cells(study: Study, models: tuple[Model, ...]) -> Iterator[StudyCell]:
    """Cells of one model and task follow one another, so that a worker loads both once."""
    evaluation = study.evaluation
    if evaluation is None:
        return
    trained = trainings(evaluation)
    configs = {
        task: [
            finetune_config(evaluation, task, rate, seed)
            for rate in evaluation.learning_rates
            for seed in evaluation.seeds
        ]
        for task in trained
    }
    for model in models:
        changes = {"weights": "random"} if model.kind == "random" else {}
        for task, evaluates in trained.items():
            for config in configs[task]:
                yield StudyCell(model.name, task, evaluates, config.model_copy(update=changes))
