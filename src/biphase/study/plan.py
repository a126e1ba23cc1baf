"""A study → its plan: runs that share their trunks (`study.trunks`), what they pass on, what is evaluated, and how."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from biphase.errors import InputError, nearest
from biphase.finetuning.config import FinetuneConfig
from biphase.recipe import Phase
from biphase.study.arms import Arm, expand_arms, seeded_name
from biphase.study.spec import (
    Study,
    check_evaluation,
    embed_configs,
    finetune_config,
    join_phases,
    scored_as,
    trainings,
)
from biphase.study.trunks import (
    ArmPath,
    PlannedRun,
    Segment,
    TrunkIndex,
    cut_segments,
    make_runs,
    phases_between,
    place_on_trunk,
    run_that_trains,
    stored_steps,
)


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint that is fine-tuned and scored: what the paper calls a model."""

    name: str
    arm: str
    kind: Literal["final", "intermediate", "random"]
    """`random` is the network and tokenizer of the checkpoint with fresh weights."""
    run: str
    step: int
    seed: int = 0

    @property
    def pooled_name(self) -> str:
        """The name under which reports pool it with the other pretraining seeds: its own, without the seed."""
        if not self.seed:
            return self.name
        return self.arm.removesuffix(seeded_name("", self.seed)) + self.name.removeprefix(self.arm)

    @property
    def checkpoint(self) -> str:
        """`RUN@STEP`, as checkpoints are named everywhere."""
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
    """The tasks that it is evaluated on; several share their training, as nq and mldr_en share that of msmarco."""
    config: FinetuneConfig

    @property
    def name(self) -> str:
        """The cell as a unit of work, as `study status` and `--unit` know it."""
        return f"{self.model}/{scored_as(self.task)}/lr{self.config.learning_rate:g}/seed{self.config.seed}"


@dataclass(frozen=True)
class Plan:
    """What a study does. Runs stand behind the runs that they start from."""

    study: Study
    arms: dict[str, Arm]
    runs: dict[str, PlannedRun]
    segments: tuple[Segment, ...]
    models: tuple[EvaluatedModel, ...]
    checkpoints: tuple[Checkpoint, ...]
    cells: tuple[StudyCell, ...]

    @property
    def num_seeds(self) -> int:
        """The most pretraining seeds that an arm has."""
        return 1 + max(arm.seed for arm in self.arms.values())

    @property
    def has_one_order(self) -> bool:
        """Whether an arm that is pretrained several times sees the data in one order each time."""
        seen = {(arm.pooled_name, arm.recipe.data.order_seed) for arm in self.arms.values() if arm.seed}
        return any((arm.pooled_name, arm.recipe.data.order_seed) in seen for arm in self.arms.values() if not arm.seed)

    @cached_property
    def usual_recipes(self) -> dict[tuple[str, bool], str]:
        """The `recipe_key` that most arms of a network have, of equals the first in the file; by the network and
        whether they continue another arm. Points of a sweep and growing batches do not count."""
        recipes: dict[tuple[str, bool], Counter[str]] = {}
        for arm in self.arms.values():
            if not arm.seed and not arm.settings and isinstance(arm.recipe.batch_tokens, int):
                recipes.setdefault((arm.model, arm.parent is not None), Counter())[arm.recipe_key] += 1
        return {network: counts.most_common(1)[0][0] for network, counts in recipes.items()}

    @property
    def of_first_seed(self) -> "Plan":
        """The part of the plan that is of the first pretraining seed: a plan for itself. The others repeat it, or a
        part of it."""
        runs = {name: run for name, run in self.runs.items() if not self.arms[name].seed}
        models = tuple(model for model in self.models if not model.seed)
        names = {model.name for model in models}
        return replace(
            self,
            arms={name: arm for name, arm in self.arms.items() if not arm.seed},
            runs=runs,
            segments=tuple(segment for segment in self.segments if segment.run in runs),
            models=models,
            checkpoints=tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.run in runs),
            cells=tuple(cell for cell in self.cells if cell.model in names),
        )

    def lineage(self, name: str) -> list[Arm]:
        """The arms that an arm continues, the oldest first, and the arm itself."""
        arms = [self.arms[name]]
        while (parent := arms[0].parent) is not None:
            arms.insert(0, self.arms[parent])
        return arms

    @property
    def steps(self) -> int:
        """The steps that are trained, each once."""
        return sum(run.steps for run in self.runs.values())

    @property
    def steps_alone(self) -> int:
        """The steps of all arms if each were trained from its beginning."""
        return sum(arm.recipe.num_steps for arm in self.arms.values())

    @property
    def longest_chain(self) -> int:
        """Steps that must follow one another however many devices there are, each run as a whole."""
        up_to: dict[str, int] = {}
        for name, run in self.runs.items():
            up_to[name] = run.steps + (up_to[run.parent] if run.parent else 0)
        return max(up_to.values())


def plan_study(study: Study) -> Plan:
    """The plan of a study; nothing is read from disk but the table of tasks.

    Raises:
        InputError: as `expand_arms` and `check_evaluation`; an intermediate checkpoint that cannot exist; two arms that
            are one model.
    """
    arms = expand_arms(study)
    if study.evaluation is not None:
        check_evaluation(study.evaluation)
    index = TrunkIndex()
    for arm in arms.values():
        place_on_trunk(arm, index)
    paths = index.paths
    models = list_models(study, paths)
    runs = make_runs(paths, ((model.run, model.step) for model in models))
    return Plan(
        study=study,
        arms=arms,
        runs=runs,
        segments=tuple(cut_segments(runs)),
        models=models,
        checkpoints=tuple(list_checkpoints(runs, models)),
        cells=tuple(list_cells(study, models)),
    )


def list_models(study: Study, paths: Mapping[str, ArmPath]) -> tuple[EvaluatedModel, ...]:
    """Final models in the order of the file, then intermediate ones, then each network from random weights."""
    finals = []
    for name, path in paths.items():
        run = run_that_trains(path.last, name, paths)
        finals.append(EvaluatedModel(name, name, "final", run, path.last, path.arm.seed))
    # By name, for a checkpoint that is named twice is one model.
    before_decay: dict[str, EvaluatedModel] = {}
    for intermediate in study.intermediate:
        for pooled_name in intermediate.arms:
            seeds = [path for path in paths.values() if path.arm.pooled_name == pooled_name]
            if not seeds:
                hint = nearest(pooled_name, {path.arm.pooled_name for path in paths.values()})
                raise InputError(f"intermediate: unknown arm '{pooled_name}'{hint}")
            for path, count in product(seeds, intermediate.steps):
                arm, step, flat_end = path.arm.name, path.origin + count, path.flat_end - path.origin
                if count > flat_end:
                    raise InputError(f"intermediate: arm '{arm}' decays from step {flat_end} on, before step {count}")
                run, name = run_that_trains(step, arm, paths), f"{arm}@{count}"
                before_decay[name] = EvaluatedModel(name, arm, "intermediate", run, step, path.arm.seed)
    controls: dict[str, EvaluatedModel] = {}
    if study.evaluation is not None and study.evaluation.random_weights:
        # The first final model of each network lends its checkpoint for the network and the tokenizer.
        for final in finals:
            network = paths[final.arm].arm.model
            if f"{network}-random" in paths:
                raise InputError(f"arm '{network}-random' has the name of the control; give its group another name")
            controls.setdefault(network, replace(final, name=f"{network}-random", kind="random"))
    return (*finals, *before_decay.values(), *controls.values())


def list_checkpoints(runs: Mapping[str, PlannedRun], models: tuple[EvaluatedModel, ...]) -> Iterator[Checkpoint]:
    """List every step that stays on disk when its run is done, in the order of the runs."""
    started: dict[tuple[str, int], list[PlannedRun]] = {}
    for run in runs.values():
        if run.parent is not None:
            started.setdefault((run.parent, run.first), []).append(run)
    evaluated: dict[tuple[str, int], list[str]] = {}
    for model in models:
        evaluated.setdefault((model.run, model.step), []).append(model.name)
    for run in runs.values():
        for step in stored_steps(run):
            children = started.get((run.name, step), [])
            yield Checkpoint(
                run=run.name,
                step=step,
                needed_by=tuple(child.name for child in children),
                moments_needed_by=tuple(child.name for child in children if child.recipe.init.carry_optimizer),
                models=tuple(evaluated.get((run.name, step), ())),
            )


def list_cells(study: Study, models: tuple[EvaluatedModel, ...]) -> Iterator[StudyCell]:
    """Cells of one model and task follow one another, so that a worker loads both once."""
    evaluation = study.evaluation
    if evaluation is None:
        return
    # The control is trained as often as an arm is pretrained, where need be with further seeds: both have an interval.
    num_pretrained = 1 + max(model.seed for model in models)
    further = [seed for seed in range(num_pretrained) if seed not in evaluation.seeds]
    further = further[: max(0, num_pretrained - len(evaluation.seeds))]
    evaluated, configs = trainings(evaluation), dict[tuple[str, str], list[FinetuneConfig]]()
    if evaluation.embed is not None:
        evaluated[evaluation.embed.name] = tuple(evaluation.embed.tasks)
    for weights, seeds in (("pretrained", evaluation.seeds), ("random", (*evaluation.seeds, *further))):
        for task in evaluated:
            if evaluation.embed is not None and task == evaluation.embed.name:
                grid = embed_configs(evaluation.embed, seeds)
            else:
                points = product(evaluation.learning_rates, seeds)
                grid = [finetune_config(evaluation, task, rate, seed) for rate, seed in points]
            configs[weights, task] = [config.model_copy(update={"weights": weights}) for config in grid]
    for model in models:
        for task, evaluates in evaluated.items():
            for config in configs["random" if model.kind == "random" else "pretrained", task]:
                yield StudyCell(model.name, task, evaluates, config)


def history(plan: Plan, model: EvaluatedModel) -> tuple[Phase, ...]:
    """The phases of a model from its beginning, over all parents; those of a foreign model are not known."""
    *earlier, arm = plan.lineage(model.arm)
    before = [phase for parent in earlier for phase in parent.recipe.curriculum]
    steps = model.step - sum(phase.steps for phase in before)
    return join_phases([*before, *phases_between(arm.recipe.curriculum, 0, steps)])
