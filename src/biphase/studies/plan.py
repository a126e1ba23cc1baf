"""A study → its plan: runs that train each distinct step of the arms once, their checkpoints, and the cells to score.

Arms share a trunk as long as everything that decides their weights agrees and the learning rate is not in its decay.
They part where the objective changes, where a decay begins, or where one of them ends. The first arm in the file that
needs a step trains it. A later arm is a run that starts from the kept checkpoint, with its moments and its place in the
data order, so it gets the same weights as if trained alone. Warm-up and decay are never cut: each lies within one run.

A trunk with two branches. Each arm has a warm-up ╱ of 10 steps and a decay ╲ of 20 steps; ● is a kept checkpoint:

    step       0   10                   60       80      100              140     160      180     200
    clm-200    ╱───────── clm ──────────●────────●────────────────────── clm ──────────────╲───────●
    clm-100                             │        ╰╲──────●
    60-100                              ╰────────────────── mlm ──────────╲───────●

    arm                                                       run
    clm-200    begin 0, trunk none,    first  0, last 200    the whole arm; keeps 60, 80, 200
    clm-100    begin 0, trunk clm-200, first 80, last 100    its decay, since clm-200 trains steps 0 to 80
    60-100     begin 0, trunk clm-200, first 60, last 160    its 100 steps of MLM, without a warm-up

An arm that continues clm-200 (`parents` in the study file) begins at 200. Steps count updates since random weights,
including those of all parents, as in checkpoints.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, product
from typing import Any, Literal

from biphase.curriculum import Phase, cut_phases, join_phases, phases_between
from biphase.errors import InputError, refuse_unknown
from biphase.files import content_hash
from biphase.finetuning.config import FinetuneConfig
from biphase.recipe import Init, Recipe
from biphase.report.formats import write_steps
from biphase.report.grammar import AskedInequality
from biphase.report.hypotheses import ArmsBySpot, bind
from biphase.report.paper import read_findings
from biphase.report.results import LOSS
from biphase.studies import spec
from biphase.studies.arms import Arm, expand_arms


@dataclass(frozen=True)
class PlannedRun:
    """A run of `biphase pretrain`, which trains the steps of an arm that no earlier run trains."""

    name: str
    """The name of its arm."""
    group: str
    model: str
    parent: str | None
    """The run that it starts from; None if it starts from random weights or a foreign model."""
    first: int
    """The step at which it starts; 0 without a parent."""
    last: int
    kept: tuple[int, ...]
    """The steps whose checkpoints another run or an evaluation needs, and the last step."""
    recipe: Recipe
    """The recipe of the run. Its `init.checkpoint` is PARENT@STEP, which the training unit replaces with a folder."""
    key: str
    """The hash of everything that decides its weights: its recipe and the keys of its ancestors."""
    placeless_key: str
    """The same hash without the paths of shard sets. Together with their contents, it identifies the run wherever the
    shard sets are."""

    @property
    def steps(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> int:
        return self.recipe.tokens_before(self.last) - self.recipe.tokens_before(self.first)

    @property
    def stored_steps(self) -> list[int]:
        """The steps whose checkpoints exist when the run is done: kept steps, ends of phases, and the last step before
        the decay."""
        return sorted(self.first + step for step in self.recipe.kept_steps)


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint to fine-tune and score: a model in the paper's terms."""

    name: str
    pooled_name: str
    """The name without the pretraining seed, under which reports pool all seeds."""
    arm: str
    kind: Literal["final", "intermediate", "random"]
    """`random`: the network and tokenizer of the checkpoint with fresh weights."""
    run: str
    step: int
    seed: int = 0


@dataclass(frozen=True)
class StudyCell:
    """A fine-tuning of a model on the training data of a task, evaluated on one task or several."""

    model: str
    task: str
    training: str
    """The name of the training in scores: the task's own name, even if the study names its file."""
    evaluates: tuple[str, ...]
    """The tasks to evaluate it on. Several tasks may share a training, as nq and mldr_en share that of msmarco."""
    config: FinetuneConfig

    @property
    def name(self) -> str:
        """The name of the cell's unit, for `study status` and `--unit`."""
        return f"{self.model}/{self.training}/lr{self.config.learning_rate:g}/seed{self.config.seed}"


CITED = re.compile(r"(F[0-9]+) of the paper")
"""The form of a line that cites a whole finding of the paper."""

Condition = str | Sequence[Sequence[AskedInequality]]
"""A line of a hypothesis, bound to the plan: the key of a finding of the paper, such as F1, or groups of inequalities
over the plan's arms. A group holds if one of its inequalities does."""


@dataclass(frozen=True)
class Plan:
    """The runs and cells of a study. Each run comes after its parent."""

    study: spec.Study
    arms: dict[str, Arm]
    runs: dict[str, PlannedRun]
    models: tuple[EvaluatedModel, ...]
    cells: tuple[StudyCell, ...]
    families: dict[str, str]
    """Name of a task in scores → the code of its family."""
    hypotheses: tuple[Sequence[Condition], ...] = ()
    """The conditions of each hypothesis."""

    @property
    def num_seeds(self) -> int:
        """The largest number of pretraining seeds that an arm has."""
        return 1 + max(arm.seed for arm in self.arms.values())

    @property
    def num_rates(self) -> list[int]:
        """The fewest and the most learning rates of a model on a task, once if they are equal."""
        rates = defaultdict[tuple[str, str], set[float]](set)
        for cell in self.cells:
            if not cell.task.startswith(spec.EMBED):
                rates[cell.model, cell.task].add(cell.config.learning_rate)
        counts = {*map(len, rates.values())} or {1}
        return sorted({min(counts), max(counts)})

    @property
    def has_one_order(self) -> bool:
        """Whether the pretraining seeds of some arm see the data in the same order."""
        return any(arm.seed and arm.recipe.data == self.arms[arm.pooled_name].recipe.data for arm in self.arms.values())

    @property
    def runs_compared_by_loss(self) -> set[str]:
        """The runs whose held-out losses at the end hypotheses compare."""
        lines = [line for conditions in self.hypotheses for line in conditions if not isinstance(line, str)]
        arms = {name for asked in chain(*chain(*lines)) for name in arms_compared_by_loss(asked)}
        return {model.run for model in self.models if model.kind == "final" and model.pooled_name in arms}

    @cached_property
    def usual_recipes(self) -> dict[tuple[str, bool], str]:
        """(network, whether its arms continue another arm) → the most frequent `recipe_key` of these arms; at a tie,
        the first in the file. Points of a sweep and arms with growing batches do not count."""
        recipes: dict[tuple[str, bool], Counter[str]] = {}
        for arm in self.arms.values():
            if not arm.seed and not arm.settings and isinstance(arm.recipe.batch_tokens, int):
                recipes.setdefault((arm.model, arm.parent is not None), Counter())[arm.recipe_key] += 1
        return {network: counts.most_common(1)[0][0] for network, counts in recipes.items()}

    @property
    def of_first_seed(self) -> "Plan":
        """The plan of only the first pretraining seed. The other seeds repeat this plan, or a part of it."""
        arms = {name: arm for name, arm in self.arms.items() if not arm.seed}
        runs = {name: run for name, run in self.runs.items() if name in arms}
        models = {model.name: model for model in self.models if not model.seed}
        cells = tuple(cell for cell in self.cells if cell.model in models)
        return replace(self, arms=arms, runs=runs, models=tuple(models.values()), cells=cells)

    def lineage(self, name: str) -> list[Arm]:
        """Return the ancestors of an arm, the oldest first, and the arm itself."""
        arms = [self.arms[name]]
        while (parent := arms[0].parent) is not None:
            arms.insert(0, self.arms[parent])
        return arms

    @property
    def steps(self) -> int:
        """The total number of steps of all runs."""
        return sum(run.steps for run in self.runs.values())

    @property
    def steps_alone(self) -> int:
        """The total number of steps of all arms without sharing."""
        return sum(arm.recipe.num_steps for arm in self.arms.values())

    @property
    def longest_chain(self) -> int:
        """The number of steps in the longest chain of runs, which must follow one another however many devices there
        are."""
        up_to: dict[str, int] = {}
        for name, run in self.runs.items():
            up_to[name] = run.steps + (up_to[run.parent] if run.parent else 0)
        return max(up_to.values())

    @property
    def segments(self) -> list[dict[str, Any]]:
        """All runs, cut where the objective changes, where the warm-up ends, where the decay begins, and at kept steps.
        The parent of a segment is the segment at whose end it begins; None if the plan has no such segment."""
        segments: list[dict[str, Any]] = []
        ending_at: dict[tuple[str, int], str] = {}
        for run in self.runs.values():
            schedule = run.recipe.schedule
            warm_end, decay_begin = run.first + schedule.warmup_steps, run.last - schedule.decay_steps
            # A run begins at a kept step of its parent, where a segment ends. Its own segments follow one another.
            parent = ending_at[run.parent, run.first] if run.parent else None
            cuts = [step - run.first for step in (warm_end, decay_begin, *run.kept)]
            for begin, end, phase in cut_phases(run.recipe.curriculum, cuts):
                first, last = run.first + begin, run.first + end
                part = "warm-up" if last <= warm_end else "decay" if first >= decay_begin else "constant"
                name, ends = f"{run.name}:{first}-{last}", {"part": part, "first": first, "last": last}
                segments.append({"name": name, "run": run.name, "parent": parent, "phase": phase, **ends})
                ending_at[run.name, last] = parent = name
        return segments

    @cached_property
    def checkpoints(self) -> dict[tuple[str, int], dict[str, list[str]]]:
        """Every checkpoint (run, step) that is on disk when its run is done, in the order of the runs → its users.

        `models` are the models that the checkpoint stands for; their cells need its weights. `needed_by` are the runs
        that start from it; those in `moments_needed_by` also continue with its optimizer moments. When its users are
        done, the checkpoint or its moments may be deleted.
        """
        checkpoints: dict[tuple[str, int], dict[str, list[str]]] = {}
        for run in self.runs.values():
            for step in run.stored_steps:
                checkpoints[run.name, step] = {"models": [], "needed_by": [], "moments_needed_by": []}
            if run.parent is not None:
                checkpoints[run.parent, run.first]["needed_by"].append(run.name)
                if run.recipe.init.carry_optimizer:
                    checkpoints[run.parent, run.first]["moments_needed_by"].append(run.name)
        for model in self.models:
            checkpoints[model.run, model.step]["models"].append(model.name)
        return checkpoints


def plan_study(study: spec.Study) -> Plan:
    """Plan a study. Read nothing from disk but descriptions of tasks.

    Raises:
        InputError: like `expand_arms`, `check_evaluation`, `list_models`, `check_rates`, `share_trunks` and
        `bind_hypotheses`.
    """
    arms = expand_arms(study)
    if study.evaluation is not None:
        spec.check_evaluation(study.evaluation)
    arms = share_trunks(arms)
    models = list_models(study, arms)
    if study.evaluation is not None:
        check_rates(study.evaluation, models)
    runs, cells = make_runs(arms, models), tuple(list_cells(study, models))
    plan = Plan(study, arms, runs, models, cells, spec.task_families(study.evaluation))
    return replace(plan, hypotheses=tuple(bind_hypotheses(plan)))


def list_models(study: spec.Study, arms: Mapping[str, Arm]) -> tuple[EvaluatedModel, ...]:
    """List the final models in the order of the file, then intermediate models, then each network with random weights.
    Raises `InputError` for an intermediate checkpoint that cannot exist."""
    finals = []
    for name, arm in arms.items():
        run = run_that_trains(arms, arm.last, name)
        finals.append(EvaluatedModel(name, arm.pooled_name, name, "final", run, arm.last, arm.seed))
    # By name, because a checkpoint that the file names twice is one model.
    before_decay: dict[str, EvaluatedModel] = {}
    for intermediate in study.intermediate:
        for pooled in intermediate.arms:
            refuse_unknown("intermediate: unknown arm", pooled, (arm.pooled_name for arm in arms.values()))
            seeds = [arm for arm in arms.values() if arm.pooled_name == pooled]
            for arm, count in product(seeds, intermediate.steps):
                name, step, flat_end = arm.name, arm.begin + count, arm.recipe.decay_start
                if count > flat_end:
                    raise InputError(f"intermediate: arm '{name}' decays from step {flat_end} on, before step {count}")
                at, run = f"@{count}", run_that_trains(arms, step, name)
                model = EvaluatedModel(name + at, pooled + at, name, "intermediate", run, step, arm.seed)
                before_decay[model.name] = model
    controls: dict[str, EvaluatedModel] = {}
    if study.evaluation is not None and study.evaluation.random_weights:
        # The checkpoint of each network's first final model provides the network and the tokenizer.
        for final in finals:
            network = arms[final.arm].model
            name = f"{network}-random"
            if name in arms:
                raise InputError(f"arm '{name}' has the name of the control; give its group another name")
            controls.setdefault(network, replace(final, name=name, pooled_name=name, kind="random"))
    return (*finals, *before_decay.values(), *controls.values())


def check_rates(evaluation: spec.Evaluation, models: Iterable[EvaluatedModel]) -> None:
    """Raise `InputError` for a tuned rate of an unknown arm or task, and for an arm without a rate on some task."""
    arms, trained = dict.fromkeys(model.pooled_name for model in models), spec.trainings(evaluation)
    for arm, rates in evaluation.tuned_rates.items():
        refuse_unknown("evaluation.tuned_rates: unknown arm", arm, arms)
        for task in rates:
            refuse_unknown("evaluation.tuned_rates: the study does not train on", task, trained)
    for arm, task in product(arms, trained):
        if not evaluation.rates_of(arm, task):
            remedy = "add one, or give learning_rates"
            raise InputError(f"evaluation.tuned_rates: {arm} has no rate on {spec.scored_as(task)}: {remedy}")


def list_cells(study: spec.Study, models: tuple[EvaluatedModel, ...]) -> Iterator[StudyCell]:
    """Yield all cells. Cells of one model and task are neighbours, so that a worker loads both once."""
    evaluation = study.evaluation
    if evaluation is None:
        return
    # The control has at least as many fine-tuning seeds as an arm has pretraining seeds, so that both have an interval.
    num_pretrained, first = 1 + max(model.seed for model in models), evaluation.seeds_of(0)
    further = [seed for seed in range(num_pretrained) if seed not in first][: max(0, num_pretrained - len(first))]
    evaluated = spec.trainings(evaluation)
    if evaluation.embed is not None:
        evaluated[evaluation.embed.name] = tuple(evaluation.embed.tasks)

    named = {task: spec.scored_as(task) for task in evaluated}

    @cache
    def list_configs(task: str, rates: Sequence[float], seeds: Sequence[int], weights: str) -> list[FinetuneConfig]:
        points = product(rates, seeds)
        if evaluation.embed is not None and task == evaluation.embed.name:
            grid = evaluation.embed.configs(seeds)
        else:
            grid = [spec.finetune_config(evaluation, task, rate, seed) for rate, seed in points]
        return [config.model_copy(update={"weights": weights}) for config in grid]

    for model in models:
        weights, seeds = "pretrained", evaluation.seeds_of(model.seed)
        if model.kind == "random":
            weights, seeds = "random", (*first, *further)
        for task, evaluates in evaluated.items():
            for config in list_configs(task, evaluation.rates_of(model.pooled_name, task), seeds, weights):
                yield StudyCell(model.name, task, named[task], evaluates, config)


def train_name(run: str) -> str:
    """Return the name of the unit that trains a run."""
    return f"train {run}"


def history(plan: Plan, model: EvaluatedModel) -> tuple[Phase, ...]:
    """List the phases of a model, after those of all its ancestors in the study."""
    *earlier, arm = plan.lineage(model.arm)
    before = [phase for parent in earlier for phase in parent.recipe.curriculum]
    return join_phases([*before, *phases_between(arm.recipe.curriculum, 0, model.step - arm.begin)])


def share_trunks(arms: Mapping[str, Arm]) -> dict[str, Arm]:
    """Place every arm after the longest beginning that it shares with an earlier arm; at a tie, take the first such arm
    in the file.

    Raises `InputError` for two arms that are the same model.
    """
    placed: dict[str, Arm] = {}
    # Groups of arms that agree in everything that decides the weights of a step, except curriculum and decay.
    relatives: dict[str, list[str]] = defaultdict(list)
    for name, arm in arms.items():
        # 1. Alone, the arm trains all its steps, from random weights or from the end of its parent.
        recipe, begin, run = arm.recipe, 0, None
        if arm.parent is not None:
            begin = placed[arm.parent].last
            run = run_that_trains(placed, begin, arm.parent)
        first, tree = begin, recipe.weights_tree
        del tree["curriculum"], tree["schedule"]["decay_steps"]
        earlier = relatives[content_hash(tree)]
        # 2. The steps in common with an earlier arm form a trunk, unless they end in the warm-up.
        trunk, longest = "", max(1, recipe.schedule.warmup_steps) - 1
        for relative in earlier:
            rival = arms[relative].recipe
            if (recipe.curriculum, recipe.schedule) == (rival.curriculum, rival.schedule):
                raise InputError(f"arms '{relative}' and '{name}' are the same model under two names; leave one out")
            if shared_steps(recipe, rival) > longest:
                trunk, longest = relative, shared_steps(recipe, rival)
        if trunk:
            # That arm may itself branch off a third arm, whose run then has the checkpoint.
            first = begin + longest
            run = run_that_trains(placed, first, trunk)
        placed[name] = replace(arm, begin=begin, trunk=run, first=first, last=begin + recipe.num_steps)
        earlier.append(name)
    return placed


def shared_steps(recipe: Recipe, rival: Recipe) -> int:
    """Count the common first steps of two recipes that differ only in curriculum and decay: phase by phase up to the
    first difference, but not beyond the step where either learning rate begins to fall.

        clm 200           | 60 clm + 100 mlm   →  60: the shorter of the first phases
        60 clm + 100 mlm  | 60 clm + 80 mlm    → 140: the equal first phases, and the shorter of the second
        60 clm + 100 mlm  | 60 clm + 80 mlm20  →  60: the second phases have nothing in common
    """
    common = 0
    for phase, rival_phase in zip(recipe.curriculum, rival.curriculum, strict=False):
        if phase != rival_phase:
            # A phase with a moving masking ratio is not the beginning of a longer one, whose ratio moves more slowly.
            is_alike = not phase.is_ramped and phase.model_copy(update={"steps": rival_phase.steps}) == rival_phase
            common += min(phase.steps, rival_phase.steps) if is_alike else 0
            break
        common += phase.steps
    return min(common, recipe.decay_start, rival.decay_start)


def run_that_trains(arms: Mapping[str, Arm], step: int, arm: str) -> str:
    """Find the run that trains `step` of an arm, and so has the checkpoint: clm-200 for 60-100 at step 60."""
    while step <= arms[arm].first:
        trunk = arms[arm].trunk
        assert trunk is not None
        arm = trunk
    return arm


def make_runs(arms: Mapping[str, Arm], models: Iterable[EvaluatedModel]) -> dict[str, PlannedRun]:
    """Make a run for each arm that has its own steps. A run keeps the checkpoints that models and other runs need."""
    # An arm without its own steps is a checkpoint of another arm's run.
    trained = {name: arm for name, arm in arms.items() if arm.first < arm.last}
    kept_steps = {name: {arm.last} for name, arm in trained.items()}
    for arm in trained.values():
        if arm.trunk is not None:
            kept_steps[arm.trunk].add(arm.first)
    for model in models:
        kept_steps[model.run].add(model.step)
    runs: dict[str, PlannedRun] = {}
    for name, arm in trained.items():
        recipe, first, last = arm.recipe, arm.first, arm.last
        init, schedule, steps = recipe.init, recipe.schedule, tuple(sorted(kept_steps[name]))
        if arm.trunk is not None:
            # A branch continues the trunk with its moments and without a warm-up. An arm that continues a parent has
            # its own warm-up, and takes over the moments if its group asks for that.
            is_branch = first > arm.begin
            init = Init(checkpoint=f"{arm.trunk}@{first}", carry_optimizer=is_branch or init.carry_optimizer)
            schedule = schedule.model_copy(update={"warmup_steps": 0}) if is_branch else schedule
        checkpoints = recipe.checkpoints.model_copy(update={"keep": tuple(step - first for step in steps)})
        curriculum = phases_between(recipe.curriculum, first - arm.begin, last - arm.begin)
        changes = {"init": init, "schedule": schedule, "curriculum": curriculum, "checkpoints": checkpoints}
        trained_recipe = Recipe.model_validate(recipe.model_copy(update=changes).model_dump(exclude_unset=True))
        tree, trunk = trained_recipe.weights_tree, runs[arm.trunk] if arm.trunk else None
        key = content_hash([tree, trunk and trunk.key])
        tree["data"] = recipe.data.placeless
        keys = key, content_hash([tree, trunk and trunk.placeless_key])
        runs[name] = PlannedRun(name, arm.group, arm.model, arm.trunk, first, last, steps, trained_recipe, *keys)
    return runs


def list_named_arms(plan: Plan) -> dict[str, ArmsBySpot]:
    """Map each name that a hypothesis can use to its arms: the name of an arm, with or without its budget, of a
    curriculum, a group, an intermediate or a random model. `random` means the random models of all networks."""
    plan = plan.of_first_seed
    spots = {name: (arm.model, arm.recipe.num_steps) for name, arm in plan.arms.items()}
    named_arms = {name: {spot: {name: name}} for name, spot in spots.items()}
    for model in plan.models:
        if model.kind != "final":
            named_arms[model.name] = {(plan.arms[model.arm].model, model.step): {model.name: model.name}}
    names_of_models = {*named_arms}
    for arm in plan.arms.values():
        # The names that the arm shares with arms at other spots; and `short`, its own name at each spot.
        short, spot = arm.name.removesuffix(f"-{write_steps(arm.recipe.num_steps)}"), spots[arm.name]
        names = [short, arm.group]
        if arm.parent is None and not arm.settings:
            names.append(arm.curriculum)
        for name in names:
            if name not in names_of_models:
                named_arms.setdefault(name, {}).setdefault(spot, {})[short.removeprefix(f"{arm.model}-")] = arm.name
        if f"{arm.model}-random" in names_of_models and "random" not in names_of_models:
            named_arms.setdefault("random", {})[spot] = {"random": f"{arm.model}-random"}
    return dict(named_arms)


def bind_hypotheses(plan: Plan) -> Iterator[list[Condition]]:
    """Bind the lines of every hypothesis to arms of the plan. Raises `InputError` for a line outside the grammar, and
    for names that the study does not have."""
    study = plan.study
    if study.hypotheses and study.evaluation is None:
        raise InputError("a study with hypotheses needs an evaluation, also for losses, because reports have scores")
    named_arms, findings = list_named_arms(plan), read_findings()["findings"]
    for hypothesis in study.hypotheses:
        conditions: list[Condition] = []
        try:
            for line in hypothesis.holds:
                cited = CITED.fullmatch(line.strip())
                if cited is None:
                    conditions.append(bind(line, named_arms, plan.families))
                    refuse_unlike_losses(plan, conditions[-1])
                else:
                    refuse_unknown("unknown finding of the paper", cited[1], findings)
                    conditions.append(cited[1])
        except InputError as error:
            raise InputError(f"hypothesis '{hypothesis.name}': {error}") from None
        yield conditions


def arms_compared_by_loss(asked: AskedInequality) -> list[str]:
    """List the arms whose held-out losses an inequality compares."""
    return [*chain(*(term.arms for term in asked.operands if term.task == LOSS))]


def refuse_unlike_losses(plan: Plan, groups: Any) -> None:
    """Raise `InputError` if an inequality compares held-out losses of different objectives, masks, texts or samples."""
    for asked in chain(*groups):
        kinds: dict[str, str] = {}
        for name in arms_compared_by_loss(asked):
            if name not in plan.arms:
                raise InputError(f"'{name}' is not trained, so it has no held-out loss")
            recipe = plan.arms[name].recipe
            data, (phase, _) = recipe.data, recipe.curriculum[-1].parts[0]
            validated = phase.with_mask_at(1).model_copy(update={"mask_passes": 1})  # validation has the first pass
            text = f"{recipe.validation.tokens:,} tokens of {data.shards}"
            samples = f"samples of {data.min_sample_tokens} to {data.max_sample_tokens} tokens"
            cut = f"packing: {data.packing}"
            if data.packing == "stream":  # the seed decides where it is cut, and so which samples come first
                cut += f", order_seed: {data.order_seed}"
            kinds[f"{validated.words}, on {text} in {samples} ({cut})"] = name
        if len(kinds) > 1:
            told = "; ".join(f"that of {name} is of {kind}" for kind, name in kinds.items())
            raise InputError(f"held-out losses of different kinds cannot be compared: {told}")
