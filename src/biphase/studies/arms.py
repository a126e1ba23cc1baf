"""A study → its arms: models × curricula × budgets, each with a complete recipe and a unique name."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from biphase.config import parse_config
from biphase.curriculum import Phase
from biphase.errors import InputError, nearest, refuse_doubles, refuse_unknown
from biphase.files import content_hash
from biphase.presets import PRESETS
from biphase.recipe import Recipe
from biphase.report.formats import write_steps
from biphase.studies import spec


@dataclass(frozen=True)
class Arm:
    """An arm of the study file, trained with one pretraining seed: a final model of the study."""

    name: str
    """The name of the arm with its seed (`seeded_name`)."""
    pooled_name: str
    """The name without the seed, under which reports pool all seeds."""
    group: str
    """The `group` of its entry in the study file."""
    model: str
    """A preset, or a name from the study's models; that of its oldest ancestor if it continues another arm."""
    parent: str | None
    curriculum: str
    recipe: Recipe
    """The whole recipe, without sharing. With a parent, `init.checkpoint` is the parent's name."""
    seed: int = 0
    """The pretraining seed."""
    settings: str = ""
    """A sweep's changes to its recipe, in the form that names have: `peak_lr0.003`."""
    # Results of `plan.share_trunks`. Steps count updates since random weights, including those of all parents.
    begin: int = 0
    """The step at which the arm begins: the last step of its parent, or 0."""
    trunk: str | None = None
    """The run that has the checkpoint of step `first`; None if the arm's own run begins with random weights or with a
    foreign model."""
    first: int = 0
    """The step at which its own run begins. Other runs train the steps before it."""
    last: int = 0

    @property
    def recipe_key(self) -> str:
        """The hash of its recipe without start, curriculum, budget and seeds. The decay is part of the budget."""
        tree = self.recipe.weights_tree
        del tree["init"], tree["curriculum"], tree["seed"], tree["schedule"]["decay_steps"], tree["data"]["order_seed"]
        return content_hash(tree)


def seeded_name(name: str, seed: int) -> str:
    """Name an arm with a pretraining seed: `1m-clm-400` for seed 0, `1m-clm-400-seed2` for seed 2."""
    return f"{name}-seed{seed}" if seed else name


@dataclass(frozen=True)
class UnresolvedArm:
    """An arm that names its parent, which may come later in the file."""

    name: str
    group: spec.ArmGroup
    source: spec.StartingModel | str
    """Its starting model, or the name of its parent."""
    curriculum: str
    phases: tuple[Phase, ...]
    seeds: spec.PretrainingSeeds
    swept: tuple[tuple[str, Any], ...] = ()
    """The keys of the recipe, with their values, at this point of the sweep."""


def expand_arms(study: spec.Study) -> dict[str, Arm]:
    """Return all arms by name, in the order of the file, but parents before their children, and the first pretraining
    seed before the second.

    Raises:
        InputError: for an unknown model, curriculum or parent; two arms with the same name; a circle of parents; a
            split that does not fill its budget; and an inconsistent recipe, such as a budget shorter than warm-up and
            decay.
    """
    unresolved: dict[str, UnresolvedArm] = {}
    for arm in list_combinations(study):
        first = unresolved.setdefault(arm.name, arm)
        if first is not arm:
            groups = f"groups '{first.group.group}' and '{arm.group.group}'"
            remedy = "give one group a name of its own, such as name: '{model}-{curriculum}-{budget}-x'"
            raise InputError(f"two arms are named '{arm.name}' ({groups}); {remedy}")
    lineages = [find_lineage(arm, unresolved) for arm in unresolved.values()]
    arms: dict[str, Arm] = {}
    for seed in range(max((lineage[-1].seeds.count for lineage in lineages), default=0)):
        for lineage in lineages:
            model = lineage[0].source  # the oldest arm's model is also that of its descendants
            assert isinstance(model, spec.StartingModel)
            for arm in lineage if seed < lineage[-1].seeds.count else ():
                name = seeded_name(arm.name, seed)
                if seed and name in unresolved:
                    raise InputError(f"arm '{name}' has the name of another arm's seed; give its group another name")
                if name not in arms:
                    arms[name] = write_arm(study, arm, model, seed)
    return arms


def find_lineage(arm: UnresolvedArm, unresolved: Mapping[str, UnresolvedArm]) -> list[UnresolvedArm]:
    """List the ancestors of an arm, the oldest first, and the arm itself. Raises `InputError` for an unknown parent,
    for a parent with fewer pretraining seeds, and for a circle."""
    lineage = [arm]
    while isinstance(arm.source, str):
        refuse_unknown(f"arm '{arm.name}' continues the unknown arm", arm.source, unresolved)
        parent = unresolved[arm.source]
        if arm.seeds.count > parent.seeds.count:
            remedy = f"give arms '{parent.group.group}' pretraining_seeds: {arm.seeds.count}"
            continues = f"continues '{parent.name}', which has {parent.seeds.count}"
            raise InputError(f"arm '{arm.name}' has {arm.seeds.count} pretraining seeds and {continues}; {remedy}")
        if parent in lineage:
            circle = [arm.name for arm in reversed(lineage[: lineage.index(parent) + 1])]
            raise InputError(f"arms '{parent.group.group}': a circle of parents: {' → '.join([*circle, parent.name])}")
        lineage.insert(0, parent)
        arm = parent
    return lineage


def sweep_architecture(group: spec.ArmGroup, model: spec.StartingModel) -> Iterator[spec.StartingModel]:
    """Yield the variants of a model in a group: one for each architecture of the group's sweep."""
    keys = [key for key in group.sweep if key.startswith(spec.ARCHITECTURE)]
    if keys and model.preset is None:
        raise InputError(f"arms '{group.group}': sweep: '{model.name}' is given whole; only presets have {keys[0]}")
    for values in product(*(group.sweep[key] for key in keys)):
        architecture = {key.removeprefix(spec.ARCHITECTURE): value for key, value in zip(keys, values, strict=True)}
        name = "-".join([model.name, *label_settings(architecture.items())])
        yield model.model_copy(update={"name": name, "architecture": {**model.architecture, **architecture}})


def label_settings(settings: Iterable[tuple[str, Any]]) -> list[str]:
    """Write settings as parts of a name: `schedule.peak_lr` 0.003 → `peak_lr0.003`."""
    return [key.rpartition(".")[2] + re.sub(r"[^A-Za-z0-9.+_-]+", "-", str(value)) for key, value in settings]


def list_combinations(study: spec.Study) -> Iterator[UnresolvedArm]:
    """Yield every combination of models (or parents), curricula, budgets and points of the sweep, group by group.
    Models are the presets and the study's own models, which may replace a preset."""
    models = {name: spec.StartingModel(name=name, preset=name) for name in PRESETS}
    refuse_doubles("models:", [model.name for model in study.models])
    for model in study.models:
        if model.preset is not None and model.preset not in PRESETS:
            raise InputError(f"model '{model.name}': unknown preset '{model.preset}'{nearest(model.preset, PRESETS)}")
        models[model.name] = model
    refuse_doubles("hypotheses:", [hypothesis.name for hypothesis in study.hypotheses])
    refuse_doubles("curricula:", [curriculum.name for curriculum in study.curricula])
    named = {curriculum.name: curriculum for curriculum in study.curricula}
    for group in study.arms:
        sources: list[spec.StartingModel | str] = [*group.parents]
        for name in group.models:
            refuse_unknown(f"arms '{group.group}': unknown model", name, models)
            sources += sweep_architecture(group, models[name])
        seeds = group.pretraining_seeds or study.pretraining_seeds
        axes: dict[str, tuple[Any, ...]] = {k: v for k, v in group.sweep.items() if not k.startswith(spec.ARCHITECTURE)}
        # The last axis changes fastest, as in nested loops.
        points = product(sources, group.curricula, group.budgets or (None,), *axes.values())
        for source, text, budget, *values in points:
            templates = spec.read_curriculum(text, named, study.mask_probability)
            phases = spec.fill_budget(templates, budget, f"arms '{group.group}': curriculum '{text}'")
            swept = tuple(zip(axes, values, strict=True))
            begin, steps = source if isinstance(source, str) else source.name, sum(phase.steps for phase in phases)
            yield UnresolvedArm(name_arm(group, begin, text, steps, swept), group, source, text, phases, seeds, swept)


def name_arm(group: spec.ArmGroup, source: str, curriculum: str, steps: int, swept: Sequence[tuple[str, Any]]) -> str:
    """Fill in the group's template for names. Raises `InputError` for an invalid template."""
    slot = "model" if group.models else "parent"
    values = {slot: source, "curriculum": spec.curriculum_label(curriculum), "budget": write_steps(steps)}
    values |= {key.rpartition(".")[2]: str(value) for key, value in swept}
    template = group.name or "-".join([f"{{{slot}}}-{{curriculum}}-{{budget}}", *label_settings(swept)])
    try:
        return template.format(**values)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        fields = ", ".join(f"{{{field}}}" for field in values)
        raise InputError(f"arms '{group.group}': name '{template}' is not a template of {fields} ({error})") from None


def write_arm(study: spec.Study, arm: UnresolvedArm, model: spec.StartingModel, seed: int) -> Arm:
    """Make an arm. Its recipe is the study's, changed by its model, its group and its point of the sweep.

    The first pretraining seed has the seeds of the recipe; each further one adds 1 to them.
    """
    # 1. Settings from the study file.
    swept = []
    for key, value in arm.swept:  # `schedule.peak_lr` and 0.003 → {schedule: {peak_lr: 0.003}}
        for word in reversed(key.split(".")):
            value = {word: value}
        swept.append(value)
    settings: dict[str, Any] = {}
    for changes in (study.recipe, model.recipe, arm.group.recipe, *swept):
        decided = {"name", "init", "curriculum"} & changes.keys()
        remedy, checkpoints = "leave it out", changes.get("checkpoints")
        if isinstance(checkpoints, dict) and checkpoints.get("keep"):
            decided, remedy = {"checkpoints.keep"}, "name checkpoints to evaluate under intermediate"
        if decided:
            raise InputError(f"study '{study.name}': recipe.{min(decided)} follows from the arm '{arm.name}'; {remedy}")
        settings = merge_settings(settings, changes)
    # 2. Settings that follow from the arm.
    name, init = seeded_name(arm.name, seed), model.model_dump(include={"preset", "architecture", "model", "revision"})
    if isinstance(arm.source, str):
        init = {"checkpoint": seeded_name(arm.source, seed), "carry_optimizer": arm.group.carry_optimizer}
    settings |= {"name": name, "init": init, "curriculum": [phase.model_dump() for phase in arm.phases]}
    recipe = parse_config(Recipe, settings, origin=f"arm '{arm.name}'")
    # 3. Seeds that follow from its pretraining seed.
    if seed:
        draws = recipe.init.model is None or any(phase.masked for phase in recipe.curriculum)
        if not draws and not arm.seeds.order:
            remedy = "give its group pretraining_seeds: 1, or leave out order: false"
            raise InputError(f"arm '{name}': nothing is random, so all its pretraining seeds would agree; {remedy}")
        order_seed = recipe.data.order_seed + (seed if arm.seeds.order else 0)
        data = recipe.data.model_copy(update={"order_seed": order_seed})
        recipe = recipe.model_copy(update={"seed": recipe.seed + seed, "data": data})
    group, sweep = arm.group.group, "-".join(label_settings(arm.swept))
    return Arm(name, arm.name, group, model.name, recipe.init.checkpoint, arm.curriculum, recipe, seed, sweep)


def merge_settings(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `tree`: merge mappings key by key, and replace other values and whole lists."""
    merged = dict(tree)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge_settings(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
