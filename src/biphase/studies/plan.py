"""A study → its plan: runs that train each distinct step of its arms once, what they pass on, what is scored.

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

    arm                                                       run
    clm-200    begin 0, trunk none,    first  0, last 200    all of it; kept 60, 80, 200
    clm-100    begin 0, trunk clm-200, first 80, last 100    its decay, since steps 0 to 80 are those of clm-200
    60-100     begin 0, trunk clm-200, first 60, last 160    its 100 steps of MLM, without a warm-up

An arm that continues clm-200 (`parents` in the study file) begins at 200: steps count updates since random weights,
over all parents, as checkpoints do.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, Literal

from biphase.errors import InputError, refuse_unknown
from biphase.files import content_hash
from biphase.finetuning.config import FinetuneConfig
from biphase.recipe import Init, Phase, Recipe, cut_phases, join_phases, phases_between
from biphase.report.formats import write_steps
from biphase.report.grammar import AskedInequality
from biphase.report.hypotheses import ArmsBySpot, bind
from biphase.report.paper import read_findings
from biphase.studies import spec
from biphase.studies.arms import Arm, expand_arms


@dataclass(frozen=True)
class PlannedRun:
    """A run of `biphase pretrain`: the steps that an arm needs beyond those that earlier runs have trained."""

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
    placeless_key: str
    """The same without the places of its shard sets: with what these hold, it names the run wherever they lie."""

    @property
    def steps(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> int:
        return self.recipe.tokens_before(self.last) - self.recipe.tokens_before(self.first)

    @property
    def stored_steps(self) -> list[int]:
        """Steps whose checkpoints are there when the run is done: kept ones, ends of phases, the last before the
        decay."""
        return sorted(self.first + step for step in self.recipe.kept_steps)


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint that is fine-tuned and scored: what the paper calls a model."""

    name: str
    pooled_name: str
    """The name under which reports pool it with the other pretraining seeds: its own, without the seed."""
    arm: str
    kind: Literal["final", "intermediate", "random"]
    """`random` is the network and tokenizer of the checkpoint with fresh weights."""
    run: str
    step: int
    seed: int = 0


@dataclass(frozen=True)
class StudyCell:
    """A fine-tuning: a model on a task's training data, evaluated on one task or several."""

    model: str
    task: str
    evaluates: tuple[str, ...]
    """The tasks that it is evaluated on; several share their training, as nq and mldr_en share that of msmarco."""
    config: FinetuneConfig

    @property
    def name(self) -> str:
        """The cell as a unit of work, as `study status` and `--unit` know it."""
        return f"{self.model}/{spec.scored_as(self.task)}/lr{self.config.learning_rate:g}/seed{self.config.seed}"


CITED = re.compile(r"(F[0-9]+) of the paper")
"""A line that is one of the paper's findings as a whole."""

Condition = str | Sequence[Sequence[AskedInequality]]
"""A line of a hypothesis, bound to the plan: the key of a finding of the paper, such as F1; or groups of inequalities
over the plan's arms, where a group holds if one of its members does."""


@dataclass(frozen=True)
class Plan:
    """The runs and cells of a study. Runs stand behind the runs that they start from."""

    study: spec.Study
    arms: dict[str, Arm]
    runs: dict[str, PlannedRun]
    models: tuple[EvaluatedModel, ...]
    cells: tuple[StudyCell, ...]
    families: dict[str, str]
    """The names under which scores stand → the codes of their families."""
    hypotheses: tuple[Sequence[Condition], ...] = ()
    """The lines of each hypothesis."""

    @property
    def num_seeds(self) -> int:
        """The most pretraining seeds that an arm has."""
        return 1 + max(arm.seed for arm in self.arms.values())

    @property
    def has_one_order(self) -> bool:
        """An arm that is pretrained several times sees the data in one order each time."""
        order_seeds = {name: arm.recipe.data.order_seed for name, arm in self.arms.items()}
        return any(arm.seed and order_seeds[name] == order_seeds[arm.pooled_name] for name, arm in self.arms.items())

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
        arms = {name: arm for name, arm in self.arms.items() if not arm.seed}
        runs = {name: run for name, run in self.runs.items() if name in arms}
        models = {model.name: model for model in self.models if not model.seed}
        cells = tuple(cell for cell in self.cells if cell.model in models)
        return replace(self, arms=arms, runs=runs, models=tuple(models.values()), cells=cells)

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

    @property
    def segments(self) -> list[dict[str, Any]]:
        """Every run, cut where its objective changes, where its rate stops to rise or begins to fall, and at kept
        steps. The parent of a segment is the one at whose end it begins; None where no run of the plan does."""
        segments: list[dict[str, Any]] = []
        ending_at: dict[tuple[str, int], str] = {}
        for run in self.runs.values():
            schedule = run.recipe.schedule
            warm_end, decay_begin = run.first + schedule.warmup_steps, run.last - schedule.decay_steps
            # It begins at a kept step of its parent, where a segment of that one ends; its own follow one another.
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
        """Every step that stays on disk when its run is done, in the order of the runs, and who needs it.

        `models` are those that it is, whose cells need its weights; `needed_by` are the runs that start from it, and
        `moments_needed_by` those of them that go on with its optimizer. When these are done, and at once where there
        are none, it or its moments may be dropped, unless it is a model.
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
    """Plan a study; nothing is read from disk but the table of tasks.

    Raises:
        InputError: as `expand_arms` and `check_evaluation`; an intermediate checkpoint that cannot exist; two arms that
            are one model; a hypothesis as `bind_hypotheses`.
    """
    arms = expand_arms(study)
    if study.evaluation is not None:
        spec.check_evaluation(study.evaluation)
    arms = share_trunks(arms)
    models = list_models(study, arms)
    runs, cells = make_runs(arms, models), tuple(list_cells(study, models))
    plan = Plan(study, arms, runs, models, cells, spec.task_families(study.evaluation))
    return replace(plan, hypotheses=tuple(bind_hypotheses(plan)))


def list_models(study: spec.Study, arms: Mapping[str, Arm]) -> tuple[EvaluatedModel, ...]:
    """List final models in the order of the file, then intermediate ones, then each network from random weights."""
    finals = []
    for name, arm in arms.items():
        run = run_that_trains(arms, arm.last, name)
        finals.append(EvaluatedModel(name, arm.pooled_name, name, "final", run, arm.last, arm.seed))
    # By name, for a checkpoint that is named twice is one model.
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
        # The first final model of each network lends its checkpoint for the network and the tokenizer.
        for final in finals:
            network = arms[final.arm].model
            name = f"{network}-random"
            if name in arms:
                raise InputError(f"arm '{name}' has the name of the control; give its group another name")
            controls.setdefault(network, replace(final, name=name, pooled_name=name, kind="random"))
    return (*finals, *before_decay.values(), *controls.values())


def list_cells(study: spec.Study, models: tuple[EvaluatedModel, ...]) -> Iterator[StudyCell]:
    """Cells of one model and task follow one another, so that a worker loads both once."""
    evaluation = study.evaluation
    if evaluation is None:
        return
    # The control is trained as often as an arm is pretrained, where need be with further seeds: both have an interval.
    num_pretrained, first = 1 + max(model.seed for model in models), evaluation.seeds_of(0)
    further = [seed for seed in range(num_pretrained) if seed not in first]
    further = further[: max(0, num_pretrained - len(first))]
    evaluated = spec.trainings(evaluation)
    if evaluation.embed is not None:
        evaluated[evaluation.embed.name] = tuple(evaluation.embed.tasks)

    @cache
    def list_configs(task: str, seeds: Sequence[int], weights: str) -> list[FinetuneConfig]:
        points = product(evaluation.learning_rates, seeds)
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
            for config in list_configs(task, seeds, weights):
                yield StudyCell(model.name, task, evaluates, config)


def train_name(run: str) -> str:
    """Name the unit that trains a run."""
    return f"train {run}"


def history(plan: Plan, model: EvaluatedModel) -> tuple[Phase, ...]:
    """List the phases of a model from its beginning, over all parents; those of a foreign model are not known."""
    *earlier, arm = plan.lineage(model.arm)
    before = [phase for parent in earlier for phase in parent.recipe.curriculum]
    return join_phases([*before, *phases_between(arm.recipe.curriculum, 0, model.step - arm.begin)])


def share_trunks(arms: Mapping[str, Arm]) -> dict[str, Arm]:
    """Place every arm behind the longest beginning that it shares with one of the earlier arms; of equally long ones,
    behind that of the first arm in the file.

    Raises `InputError` when two arms are the same model.
    """
    placed: dict[str, Arm] = {}
    # The arms of which all is equal that decides the weights of a step, but the curriculum and the decay.
    relatives: dict[str, list[str]] = defaultdict(list)
    for name, arm in arms.items():
        # 1. Alone, the arm would train all its steps, from random weights or from the end of the arm that it continues.
        recipe, begin, run = arm.recipe, 0, None
        if arm.parent is not None:
            begin = placed[arm.parent].last
            run = run_that_trains(placed, begin, arm.parent)
        first, tree = begin, recipe.weights_tree
        del tree["curriculum"], tree["schedule"]["decay_steps"]
        earlier = relatives[content_hash(tree)]
        # 2. The steps that it has in common with an earlier arm are those of a trunk, unless they end in the warm-up.
        trunk, longest = "", max(1, recipe.schedule.warmup_steps) - 1
        for relative in earlier:
            rival = arms[relative].recipe
            if (recipe.curriculum, recipe.schedule) == (rival.curriculum, rival.schedule):
                raise InputError(f"arms '{relative}' and '{name}' are the same model under two names; leave one out")
            if shared_steps(recipe, rival) > longest:
                trunk, longest = relative, shared_steps(recipe, rival)
        if trunk:
            # The trunk's arm may itself be a branch of a third one, whose run then has the checkpoint.
            first = begin + longest
            run = run_that_trains(placed, first, trunk)
        placed[name] = replace(arm, begin=begin, trunk=run, first=first, last=begin + recipe.num_steps)
        earlier.append(name)
    return placed


def shared_steps(recipe: Recipe, rival: Recipe) -> int:
    """Count the steps that two recipes have in common which differ in curriculum and decay alone: phase by phase, up to
    and into the first that differs, and not beyond the step where either's rate begins to fall.

        clm 200           | 60 clm + 100 mlm   →  60: of the first phases, the shorter one
        60 clm + 100 mlm  | 60 clm + 80 mlm    → 140: equal first phases, and the shorter one of the second
        60 clm + 100 mlm  | 60 clm + 80 mlm20  →  60: the second phases have nothing in common
    """
    common = 0
    for phase, rival_phase in zip(recipe.curriculum, rival.curriculum, strict=False):
        if phase != rival_phase:
            # One whose masking ratio moves is no beginning of a longer one, in which it moves more slowly.
            is_alike = not phase.is_ramped and phase.model_copy(update={"steps": rival_phase.steps}) == rival_phase
            common += min(phase.steps, rival_phase.steps) if is_alike else 0
            break
        common += phase.steps
    return min(common, recipe.decay_start, rival.decay_start)


def run_that_trains(arms: Mapping[str, Arm], step: int, arm: str) -> str:
    """Find the run that trains an arm up to `step`, and so has that checkpoint: of 60-100 at step 60 clm-200."""
    while step <= arms[arm].first:
        trunk = arms[arm].trunk
        assert trunk is not None
        arm = trunk
    return arm


def make_runs(arms: Mapping[str, Arm], models: Iterable[EvaluatedModel]) -> dict[str, PlannedRun]:
    """Make a run for each arm that has steps of its own, which keeps what the models and other runs need."""
    # An arm whose every step another arm's run trains is a checkpoint of that run.
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
            # A branch goes on as if it had never left the trunk, and its warm-up lies behind it. An arm that continues
            # another one begins with its own warm-up, and with moments if it asks for them.
            is_branch = first > arm.begin
            init = Init(checkpoint=f"{arm.trunk}@{first}", carry_optimizer=is_branch or init.carry_optimizer)
            schedule = schedule.model_copy(update={"warmup_steps": 0}) if is_branch else schedule
        checkpoints = recipe.checkpoints.model_copy(update={"keep": tuple(step - first for step in steps)})
        curriculum = phases_between(recipe.curriculum, first - arm.begin, last - arm.begin)
        changes = {"init": init, "schedule": schedule, "curriculum": curriculum, "checkpoints": checkpoints}
        trained_recipe = Recipe.model_validate(recipe.model_copy(update=changes).model_dump())
        tree, trunk = trained_recipe.weights_tree, runs[arm.trunk] if arm.trunk else None
        key = content_hash([tree, trunk and trunk.key])
        tree["data"] = recipe.data.order | {"shares": [str(share) for share in recipe.data.shares]}
        keys = key, content_hash([tree, trunk and trunk.placeless_key])
        runs[name] = PlannedRun(name, arm.group, arm.model, arm.trunk, first, last, steps, trained_recipe, *keys)
    return runs


def list_named_arms(plan: Plan) -> dict[str, ArmsBySpot]:
    """List the names that a hypothesis can use, with their arms: an arm, an arm without its budget, a curriculum, a
    group, an intermediate or a random model; `random` stands for those of all networks."""
    plan = plan.of_first_seed
    spots = {name: (arm.model, arm.recipe.num_steps) for name, arm in plan.arms.items()}
    named_arms = {name: {spot: {name: name}} for name, spot in spots.items()}
    for model in plan.models:
        if model.kind != "final":
            named_arms[model.name] = {(plan.arms[model.arm].model, model.step): {model.name: model.name}}
    names_of_models = {*named_arms}
    for arm in plan.arms.values():
        # The names that it shares with the same arm at other budgets; and what it is called there at every place.
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
    """Bind the lines of every hypothesis to arms of the plan. Raises `InputError` for a line that is not in the
    grammar, or asks for what the study does not have."""
    study = plan.study
    if study.hypotheses and study.evaluation is None:
        raise InputError("hypotheses are about scores: the study needs an evaluation")
    named_arms, findings = list_named_arms(plan), read_findings()["findings"]
    for hypothesis in study.hypotheses:
        conditions: list[Condition] = []
        try:
            for line in hypothesis.holds:
                cited = CITED.fullmatch(line.strip())
                if cited is None:
                    conditions.append(bind(line, named_arms, plan.families))
                else:
                    refuse_unknown("unknown finding of the paper", cited[1], findings)
                    conditions.append(cited[1])
        except InputError as error:
            raise InputError(f"hypothesis '{hypothesis.name}': {error}") from None
        yield conditions
