"""A study file → arms: models × curricula × budgets in few lines, each arm a complete recipe with a name of its own.

A curriculum is a list of phases. `25/75` stands for 25 % CLM, then 75 % MLM of a budget; `5k+17k` gives the same in
steps; `40k clm + 2k mlm20` names objectives and masking percentages. Longer lists have a name and a place of their own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from string import Formatter
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from biphase.config import Count, Phase, PositiveCount, Recipe, Strict, load_config, parse_config
from biphase.encoder.presets import PRESETS
from biphase.errors import InputError, nearest
from biphase.finetuning.config import FinetuneConfig
from biphase.tasks.spec import find_task

OBJECTIVES = ("clm", "mlm", "mntp")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def read_steps(value: Any) -> Any:
    """`42k` → 42000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)k", value) if isinstance(value, str) else None
    if match is None:
        return value
    steps = Fraction(match[1]) * 1000
    return int(steps) if steps.denominator == 1 else value


def write_steps(steps: int) -> str:
    """42000 → `42k`."""
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def read_seeds(value: Any) -> Any:
    """5 → 0, 1, 2, 3, 4."""
    return tuple(range(value)) if isinstance(value, int) else value


Steps = Annotated[PositiveCount, BeforeValidator(read_steps)]
Seeds = Annotated[tuple[Count, ...], BeforeValidator(read_seeds), Field(min_length=1)]
Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


class StudyModel(Strict):
    """What an arm starts from. A preset with no changes needs no entry."""

    name: Annotated[str, Field(pattern=NAME)]
    preset: str | None = None
    architecture: dict[str, bool | int | float | str] = Field(default_factory=dict)
    model: str | None = None
    """A Hugging Face decoder or encoder, in place of a preset."""
    revision: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Changes to the study's `recipe` for this model."""


class Curriculum(Strict):
    """A list of phases with a name, for what the short forms cannot say."""

    name: str
    phases: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    """Each with the keys of a recipe's phase, and `share` of the budget in place of `steps` where wanted."""
    repeat: PositiveCount = 1
    """How often the list is gone through: shares and steps are those of one round."""


class ArmGroup(Strict):
    """Every combination of models (or parents), curricula and budgets."""

    group: str
    """What the plan's table calls these arms."""
    name: str = ""
    """A template of {model} or {parent}, {curriculum} and {budget}; `{model}-{curriculum}-{budget}` unless given."""
    models: tuple[str, ...] = ()
    """Presets, or names of `models`."""
    parents: tuple[str, ...] = ()
    """In place of models: arms whose final model, decayed, is trained further."""
    curricula: Annotated[tuple[str, ...], Field(min_length=1)]
    budgets: tuple[Steps, ...] = ()
    """In steps; not needed where a curriculum says its steps."""
    carry_optimizer: bool = True
    """With `parents`: go on with the parent's optimizer moments, or start them at zero."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Changes to the study's `recipe` for these arms."""

    @model_validator(mode="after")
    def one_beginning(self) -> "ArmGroup":
        if self.group == "evaluation":
            raise ValueError("no group of arms can be named 'evaluation': the plan's table has a row of that name")
        if bool(self.models) == bool(self.parents):
            raise ValueError(f"arms '{self.group}': give either models or parents")
        return self


class Intermediate(Strict):
    """Checkpoints before the decay that are evaluated like final models."""

    arms: Annotated[tuple[str, ...], Field(min_length=1)]
    steps: Annotated[tuple[Steps, ...], Field(min_length=1)]
    """Counted from the beginning of the arm: from random weights, or from the parent's end."""


class Evaluation(Strict):
    """Every model is fine-tuned on every task with every rate and seed."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    learning_rates: Rates
    seeds: Seeds
    """A list, or how many: 5 means 0 to 4."""
    finetune: dict[str, Any] = Field(default_factory=dict)
    """Keys of `biphase finetune`, for all tasks."""
    per_task: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The same for single tasks."""
    data_dirs: dict[str, str] = Field(default_factory=dict)
    """Folders with a task's data as published, in place of the hub."""
    random_weights: bool = False
    """Fine-tune each network from random weights too: the control that pretraining must beat."""


class Planning(Strict):
    """What the estimates of cost assume. Changes no result."""

    device: str | None = None
    devices: PositiveCount = 1
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Useful FLOP/s as a share of the device's peak."""
    vocab_size: PositiveCount | None = None
    """Of the tokenizer, where the shards are not here to say it."""
    mean_sample_tokens: PositiveCount | None = None
    """Where the shards are not here to say it, and samples are documents."""


class Published(Strict):
    """What a publication reports for a group of arms, or for `evaluation`, to stand beside the plan."""

    group: str
    steps: Count | None = None
    gpu_hours: Annotated[float, Field(ge=0)] | None = None
    note: str = ""


class Study(Strict):
    name: Annotated[str, Field(pattern=NAME)]
    title: str = ""
    question: str = ""
    recipe: dict[str, Any]
    """A recipe without name, init and curriculum: what all arms have in common."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Of MLM and MNTP phases that say none."""
    models: tuple[StudyModel, ...] = ()
    curricula: tuple[Curriculum, ...] = ()
    arms: Annotated[tuple[ArmGroup, ...], Field(min_length=1)]
    intermediate: tuple[Intermediate, ...] = ()
    evaluation: Evaluation | None = None
    planning: Planning = Planning()
    published: tuple[Published, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One final model of a study."""

    name: str
    group: str
    model: str
    """A preset or a name of the study's models; that of its first ancestor when it continues another arm."""
    parent: str | None
    """The arm whose final model it continues."""
    curriculum: str
    """As the study file writes it."""
    recipe: Recipe
    """All of it, as if nothing were shared. With a parent, `init.checkpoint` is the parent's name."""


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """The study file at `path`, changed by `key.sub=value` overrides. Raises `InputError` as `load_config` does."""
    return load_config(Study, path, overrides)


def expand_arms(study: Study) -> dict[str, Arm]:
    """All arms by name, in the order of the file but parents before their children.

    Raises:
        InputError: an unknown model, curriculum or parent; two arms with one name; a circle of parents; a split that
            does not fill its budget; a recipe that does not hold together, such as a budget shorter than its warm-up
            and decay.
    """
    models = named_models(study)
    drafts: dict[str, Draft] = {}
    for draft in draft_arms(study):
        if draft.name in drafts:
            first, second = drafts[draft.name].group.group, draft.group.group
            raise InputError(
                f"two arms are named '{draft.name}' (groups '{first}' and '{second}'); give one group a name of its "
                "own, such as name: '{model}-{curriculum}-{budget}-x'"
            )
        drafts[draft.name] = draft
    arms: dict[str, Arm] = {}
    for draft in parents_first(drafts):
        origin = draft.source if draft.group.models else arms[draft.source].model
        arms[draft.name] = finish(study, draft, models[origin])
    return arms


@dataclass(frozen=True)
class Draft:
    """An arm whose parent is not looked up yet."""

    name: str
    group: ArmGroup
    source: str
    """The name of a model or a parent."""
    curriculum: str
    phases: tuple[Phase, ...]


def named_models(study: Study) -> dict[str, StudyModel]:
    """The presets, and over them the models of the study."""
    models = {name: StudyModel(name=name, preset=name) for name in PRESETS}
    refuse_doubles("models", [model.name for model in study.models])
    for model in study.models:
        if model.preset is not None and model.preset not in PRESETS:
            raise InputError(f"model '{model.name}': unknown preset '{model.preset}'{nearest(model.preset, PRESETS)}")
        models[model.name] = model
    return models


def refuse_doubles(what: str, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{what}: '{twice}' is named twice; give one of the two another name")


def draft_arms(study: Study) -> Iterator[Draft]:
    refuse_doubles("curricula", [curriculum.name for curriculum in study.curricula])
    models, tables = named_models(study), {curriculum.name: curriculum for curriculum in study.curricula}
    for group in study.arms:
        for name in group.models:
            if name not in models:
                raise InputError(f"arms '{group.group}': unknown model '{name}'{nearest(name, models)}")
        for source in group.models or group.parents:
            for text in group.curricula:
                portions = read_curriculum(text, tables, study.mask_probability)
                for budget in group.budgets or (None,):
                    phases = fill(portions, budget, f"arms '{group.group}': curriculum '{text}'")
                    name = name_arm(group, source, text, sum(phase.steps for phase in phases))
                    yield Draft(name, group, source, text, phases)


def name_arm(group: ArmGroup, source: str, curriculum: str, steps: int) -> str:
    kind = "model" if group.models else "parent"
    values = {kind: source, "curriculum": curriculum_label(curriculum), "budget": write_steps(steps)}
    template = group.name or f"{{{kind}}}-{{curriculum}}-{{budget}}"
    try:
        for _, field, _, _ in Formatter().parse(template):
            if field is not None and field not in values:
                raise InputError(f"arms '{group.group}': unknown field '{{{field}}}' in name{nearest(field, values)}")
        return template.format(**values)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"arms '{group.group}': name '{template}' is not a template ({error})") from None


def curriculum_label(text: str) -> str:
    """A curriculum as part of a name: `25/75` → `25-75`."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


def parents_first(drafts: Mapping[str, Draft]) -> list[Draft]:
    done: dict[str, Draft] = {}

    def visit(draft: Draft, trail: tuple[str, ...]) -> None:
        if draft.name in trail:
            circle = " → ".join([*trail[trail.index(draft.name) :], draft.name])
            raise InputError(f"arms '{draft.group.group}': a circle of parents: {circle}")
        if draft.name in done:
            return
        if draft.group.parents:
            if draft.source not in drafts:
                raise InputError(
                    f"arm '{draft.name}' continues the unknown arm '{draft.source}'{nearest(draft.source, drafts)}"
                )
            visit(drafts[draft.source], (*trail, draft.name))
        done[draft.name] = draft

    for draft in drafts.values():
        visit(draft, ())
    return list(done.values())


def finish(study: Study, draft: Draft, model: StudyModel) -> Arm:
    parent = draft.source if draft.group.parents else None
    tree: dict[str, Any] = {}
    for changes in (study.recipe, model.recipe, draft.group.recipe):
        taken = {"name", "init", "curriculum"} & changes.keys()
        if taken:
            raise InputError(
                f"study '{study.name}': recipe.{min(taken)} follows from the arm '{draft.name}'; leave it out"
            )
        tree = merge(tree, changes)
    init: dict[str, Any] = {key: getattr(model, key) for key in ("preset", "architecture", "model", "revision")}
    if parent is not None:
        init = {"checkpoint": parent, "carry_optimizer": draft.group.carry_optimizer}
    if (tree.get("checkpoints") or {}).get("keep"):
        raise InputError(
            f"study '{study.name}': recipe.checkpoints.keep follows from the arms; name checkpoints to evaluate under "
            "intermediate"
        )
    curriculum = [phase.model_dump() for phase in draft.phases]
    tree |= {"name": draft.name, "init": init, "curriculum": curriculum}
    recipe = parse_config(Recipe, tree, origin=f"arm '{draft.name}'")
    return Arm(draft.name, draft.group.group, model.name, parent, draft.curriculum, recipe)


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with single values, or whole lists, replaced by those of `changes`."""
    merged = dict(tree)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


@dataclass(frozen=True)
class Portion:
    """A phase before its budget is known: a number of steps, or a share."""

    settings: Mapping[str, Any]
    steps: int | None
    share: Fraction | None


PART = re.compile(r"(?:(\d+(?:\.\d+)?)(k|%|)\s+)?([a-z]+)(\d+(?:\.\d+)?)?")
SPLIT = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)")
STEPS_SPLIT = re.compile(r"(\d+(?:\.\d+)?k?)\+(\d+(?:\.\d+)?k?)")


def read_curriculum(text: str, tables: Mapping[str, Curriculum], mask_probability: float) -> tuple[Portion, ...]:
    """The phases of a name in `tables` or of a short form: `mlm`, `mlm30`, `25/75`, `5k+17k`, `40k clm + 2k mlm20`."""
    if text in tables:
        return table_portions(tables[text], mask_probability)
    if split := SPLIT.fullmatch(text):
        text = f"{split[1]}% clm + {split[2]}% mlm"
    elif split := STEPS_SPLIT.fullmatch(text):
        text = f"{split[1]} clm + {split[2]} mlm"
    if not all((part := PART.fullmatch(piece.strip())) and part[3] in OBJECTIVES for piece in text.split("+")):
        raise InputError(
            f"unknown curriculum '{text}'{nearest(text, [*tables, *OBJECTIVES])}; short forms are such as mlm30, "
            "25/75, 5k+17k and 40k clm + 2k mlm20"
        )
    return tuple(read_part(piece.strip(), text, mask_probability) for piece in text.split("+"))


def read_part(piece: str, text: str, mask_probability: float) -> Portion:
    """`40k clm`, `25% mlm20`, `mlm`; `text` is the whole curriculum, for messages."""
    part = PART.fullmatch(piece)
    assert part is not None
    amount, unit, objective, percent = part.groups()
    settings: dict[str, Any] = {"objective": objective}
    if objective == "clm" and percent:
        raise InputError(f"curriculum '{text}': clm masks nothing; write clm, not clm{percent}")
    if objective != "clm":
        settings["mask_probability"] = float(percent) / 100 if percent else mask_probability
    if amount is None or unit == "%":
        return checked(Portion(settings, None, Fraction(amount or "100") / 100), f"curriculum '{text}'")
    steps = read_steps(f"{amount}k") if unit else amount
    if isinstance(steps, str):
        if not steps.isdecimal():
            raise InputError(f"curriculum '{text}': {amount}{unit} is no whole number of steps")
        steps = int(steps)
    return checked(Portion(settings, steps, None), f"curriculum '{text}'")


def checked(portion: Portion, place: str) -> Portion:
    """The portion, once a phase can be made of its settings."""
    tree = {**portion.settings, "steps": 1 if portion.steps is None else portion.steps}
    parse_config(Phase, tree, origin=place)
    return portion


def table_portions(table: Curriculum, mask_probability: float) -> tuple[Portion, ...]:
    portions = []
    for number, phase in enumerate(table.phases):
        place = f"curriculum '{table.name}', phase {number}"
        settings = {key: value for key, value in phase.items() if key not in ("steps", "share")}
        if ("steps" in phase) == ("share" in phase):
            raise InputError(f"{place} needs either steps or share")
        if settings.get("objective") != "clm":
            settings = {"mask_probability": mask_probability, **settings}
        share = phase.get("share")
        if "share" in phase and not (isinstance(share, int | float) and share is not True and 0 < share <= 1):
            raise InputError(f"{place}: share is {share!r}, not a number above 0 and up to 1")
        one_round = None if share is None else Fraction(str(share)) / table.repeat
        portions.append(checked(Portion(settings, read_steps(phase.get("steps")), one_round), place))
    return tuple(portions) * table.repeat


def fill(portions: tuple[Portion, ...], budget: int | None, place: str) -> tuple[Phase, ...]:
    """The phases within a budget of steps. Shares round where each phase ends, so that the sum is the budget."""
    steps = [portion.steps for portion in portions if portion.steps is not None]
    shares = [portion.share for portion in portions if portion.share is not None]
    if steps and shares:
        raise InputError(f"{place} mixes steps and shares; use one of the two")
    if steps and budget not in (None, sum(steps)):
        raise InputError(f"{place} has {sum(steps)} steps, which is not the budget of {budget}; leave budgets out")
    if shares:
        reached = list(accumulate(shares))
        if abs(float(reached[-1]) - 1) > 1e-6:
            raise InputError(f"{place} is impossible: its shares add up to {float(reached[-1]):.4%}, not 100 %")
        if budget is None:
            raise InputError(f"{place} needs budgets, such as budgets: [12k]")
        ends = [round(share * budget) for share in reached]
        steps = [end - begin for begin, end in pairwise([0, *ends])]
    if min(steps) < 1:
        raise InputError(f"{place} gives one of its phases less than a step of {budget or sum(steps)}")
    phases = (Phase(**portion.settings, steps=count) for portion, count in zip(portions, steps, strict=True))
    return join_phases(phases)


def join_phases(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """The same training with as few phases as it takes: neighbours alike become one."""
    joined: list[Phase] = []
    for phase in phases:
        kind = Phase(objective="clm", steps=phase.steps) if phase.objective == "clm" else phase
        if joined and are_alike(joined[-1], kind):
            kind = kind.model_copy(update={"steps": joined.pop().steps + kind.steps})
        joined.append(kind)
    return tuple(joined)


def are_alike(phase: Phase, other: Phase) -> bool:
    """Whether two phases differ in their steps at most."""
    return phase.model_copy(update={"steps": other.steps}) == other


def trainings(evaluation: Evaluation) -> dict[str, tuple[str, ...]]:
    """Each task that is trained on, and the tasks that its models are evaluated on."""
    trained: dict[str, tuple[str, ...]] = {}
    for task in evaluation.tasks:
        name = find_task(task).trained_on or task
        trained[name] = (*trained.get(name, ()), task)
    return trained


def check_evaluation(evaluation: Evaluation) -> None:
    """Raises `InputError` for a task or a setting that fine-tuning does not know."""
    trained = trainings(evaluation)
    for key, values in (("task", evaluation.tasks), ("rate", evaluation.learning_rates), ("seed", evaluation.seeds)):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise InputError(f"evaluation: {key} {twice} is named twice")
    for task in trained:
        finetune_config(evaluation, task, evaluation.learning_rates[0], evaluation.seeds[0])
    for task in evaluation.per_task:
        if task in evaluation.tasks and task not in trained:
            raise InputError(f"evaluation.per_task: '{task}' is trained as '{find_task(task).trained_on}'; name that")
        if task not in trained:
            raise InputError(f"evaluation.per_task: '{task}' is none of the tasks{nearest(task, trained)}")
    for task in evaluation.data_dirs:
        if task not in (known := {*evaluation.tasks, *trained}):
            raise InputError(f"evaluation.data_dirs: '{task}' is none of the tasks{nearest(task, known)}")


def finetune_config(evaluation: Evaluation, task: str, learning_rate: float, seed: int) -> FinetuneConfig:
    """What a cell of `task` does."""
    given = {**evaluation.finetune, **evaluation.per_task.get(task, {})}
    for key in ("learning_rate", "seed"):
        if key in given:
            raise InputError(f"evaluation: '{key}' follows from {key}s; leave it out of finetune and per_task")
    tree = {**given, "learning_rate": learning_rate, "seed": seed}
    return parse_config(FinetuneConfig, tree, origin=f"evaluation of '{task}'")
