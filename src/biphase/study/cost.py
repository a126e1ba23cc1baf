"""A plan → the FLOPs, hours and disk that it takes, and what this estimate rests on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from biphase.encoder.presets import PRESETS, shape_of
from biphase.errors import InputError, nearest
from biphase.flops import BFLOAT16, FLOAT32, Shape, known_device, plan_memory
from biphase.machine import has_bf16_cores, total_memory
from biphase.recipe import Recipe
from biphase.report.formats import show_estimate, show_list
from biphase.study.plan import Plan, StudyCell
from biphase.study.sizes import TYPICAL_SIZES, Machine, Sizes, measure_sizes, task_size
from biphase.study.spec import EMBED, EmbedEvaluation, Published, trainings
from biphase.tasks.spec import find_task


def list_assumptions(plan: Plan, sizes: Sizes, machine: Machine | None) -> Iterator[str]:
    for text in dict.fromkeys(sizes.texts.values()):
        yield f"samples of {text.mean_tokens:,.0f} tokens, a token meets {text.mean_keys:,.0f} ({text.source})"
    if machine:
        yield f"{machine.name}: {machine.speed}"
    evaluation = plan.study.evaluation
    if evaluation is not None:
        names = {name for trained, tests in trainings(evaluation).items() for name in (trained, *tests)}
        has_size = {task.name: task.size is not None for task in map(find_task, sorted(names))}
        told = []
        if published := [name for name, is_published in has_size.items() if is_published]:
            told.append(f"rounded sizes of the published data of {show_list(published)}")
        if typical := [name for name, is_published in has_size.items() if not is_published]:
            told.append(f"typical sizes, guessed, of {show_list(typical)}")
        yield f"fine-tuning: {'; '.join(told) or 'the sizes of typical data'}, at the same efficiency"
        if evaluation.embed is not None and count_embedded(evaluation.embed) is None:
            yield "embedding: 1,000 updates a stage, for want of its max_steps, or limit of its sources"


def tell_memory(model: str, shape: Shape, recipe: Recipe, is_on_cpu: bool) -> str:
    """The memory that a network needs as a recipe trains it, at most: on a CPU, or on a GPU alone, and as one of 8 and
    of 64."""
    if is_on_cpu:
        needed, here = memory_of(shape, recipe, 1, on_cpu=True), total_memory()
        told = f"at most {show_gib(needed)} of memory in each process on a CPU, Python's own aside"
        if 0 < here < needed:
            told += f", which is more than the {show_gib(here)} of this machine"
    else:
        told = f"at most {show_gib(memory_of(shape, recipe, 1))} on one GPU"
        told += f", {show_gib(memory_of(shape, recipe, 8, parallel='ddp'))} on each of 8 under DDP"
        if recipe.optimizer.name != "muon":  # which needs whole matrices
            eight, many = memory_of(shape, recipe, 8), memory_of(shape, recipe, 64)
            told += f", {show_gib(eight)} on each of 8 and {show_gib(many)} of 64 under FSDP"
    return f"{model}: {told} (microbatches of {recipe.compute.microbatch_tokens:,} tokens)"


def memory_of(
    shape: Shape, recipe: Recipe, devices: int, parallel: Literal["ddp", "fsdp"] = "fsdp", on_cpu: bool = False
) -> float:
    """The bytes that a device needs when a recipe's largest batch is shared out."""
    batch, each, precision = recipe.batch_tokens, recipe.compute.microbatch_tokens, recipe.compute.precision
    most_tokens = batch if isinstance(batch, int) else max(batch.start, batch.to)
    is_bf16 = not on_cpu or precision == "bf16" or (precision == "auto" and has_bf16_cores())
    return plan_memory(
        shape,
        devices,
        microbatch_tokens=each,
        num_microbatches=math.ceil(most_tokens / (devices * each)),
        recomputes=recipe.compute.activation_checkpointing,
        muon=recipe.optimizer.name == "muon",
        parallel=parallel,
        number=BFLOAT16 if is_bf16 else FLOAT32,
        device="cpu" if on_cpu else "cuda",
    ).total


FULL = 0.9
"""The share of a device's memory that a plan may fill: the rest is for what is not counted."""


def fits(shape: Shape, recipe: Recipe, machine: Machine, devices: int = 1) -> bool:
    """Whether a recipe's training fits into the memory of each of so many devices, as far as that is known."""
    needed = memory_of(shape, recipe, devices, recipe.compute.parallel, on_cpu=machine.name == "CPU")
    return not machine.memory or needed <= FULL * machine.memory


def fit_memory(shape: Shape, recipe: Recipe, machine: Machine) -> Recipe | None:
    """The recipe as it fits into the memory of a machine's devices, with the first change that is enough: smaller
    microbatches, activation checkpointing, FSDP over all devices. None where nothing is."""
    first, smallest = recipe.compute, recipe.data.max_sample_tokens
    sizes = [size for step in range(8) if (size := first.microbatch_tokens >> step) >= smallest]
    over = [1] if recipe.optimizer.name == "muon" or machine.devices == 1 else [1, machine.devices]
    for devices, recomputes, size in product(over, (first.activation_checkpointing, True), sizes):
        changes: dict[str, Any] = {"microbatch_tokens": size, "activation_checkpointing": recomputes}
        changes |= {"parallel": "fsdp"} if devices > 1 else {}
        changed = recipe.model_copy(update={"compute": first.model_copy(update=changes)})
        if fits(shape, changed, machine, devices):
            return changed
    return None


def tell_misfit(model: str, shape: Shape, recipe: Recipe, machine: Machine) -> str:
    """What one GPU lacks, the first change with which it or several are enough, and the largest preset that fits; empty
    where the network fits as it is trained."""
    if fits(shape, recipe, machine):
        return ""
    ways = []
    for devices in (1, 2, 4, 8):
        fitted = fit_memory(shape, recipe, replace(machine, devices=devices))
        if fitted is not None:
            pairs = [(key, value) for key, value in fitted.compute if value != getattr(recipe.compute, key)]
            changes = " ".join(f"recipe.compute.{key}={str(value).lower()}" for key, value in pairs)
            ways.append(changes + (f" on {devices} of them" if devices > 1 else ""))
            break
    for name in PRESETS:
        if fits(shape_of(name, {}, shape.vocab_size), recipe, machine):
            ways.append(f"preset {name}, the largest that fits with the settings of the study")
            break
    needed = show_gib(memory_of(shape, recipe, 1))
    told = f"{model} does not fit into the {show_gib(machine.memory)} of one {machine.name} (up to {needed} are needed)"
    return f"{told}; what fits: {', or '.join(ways)}" if ways else told


def show_gib(num_bytes: float) -> str:
    return f"{show_estimate(num_bytes / 2**30)} GiB"


BYTES_PER_WEIGHT = 4
"""Checkpoints hold weights and moments in fp32."""


@dataclass(frozen=True)
class GroupCost:
    """One row: a group of arms, or `evaluation`."""

    group: str
    models: int
    steps_alone: int
    """The steps of its arms if each were trained from its beginning (a continued one: from its parent's end)."""
    steps: int
    tokens: float
    flops: float
    device_hours: float | None
    """None where no device is named."""
    published: Published | None
    """What the study file says was published about the group."""


@dataclass(frozen=True)
class Estimate:
    """What a plan costs, and what that is based on."""

    machine: Machine | None
    groups: tuple[GroupCost, ...]
    first_seed_flops: float | None
    """What the first pretraining seed costs, with its fine-tunings; None where there are no others."""
    flops_by_objective: dict[str, float]
    """The FLOPs of pretraining alone."""
    disk: dict[str, float]
    """Bytes of checkpoints: the weights of the `models` alone, when no run needs more; what is `needed`, with the
    weights of branch points, and moments where a run goes on with them; `everything` with its moments, when all runs
    are done."""
    unknown: tuple[str, ...]
    """The runs of networks whose shape is not known here, which are not counted."""
    misfits: tuple[str, ...]
    """The networks that are too large for the machine's memory, and what would help."""
    assumptions: tuple[str, ...]
    published_on: str | None = None
    """The device of published hours: that of the study file."""

    @property
    def flops(self) -> float:
        return sum(group.flops for group in self.groups)


def estimate(plan: Plan, machine: Machine | None = None) -> Estimate:
    """What a plan costs on a machine. Raises `InputError` where the vocabulary is not known."""
    sizes = measure_sizes(plan)
    spent = {name: sizes.flops(run) for name, run in plan.runs.items()}
    by_objective: dict[str, float] = {}
    for objectives in spent.values():
        for objective, flops in objectives.items():
            by_objective[objective] = by_objective.get(objective, 0.0) + flops
    groups = dict.fromkeys(arm.group for arm in plan.arms.values())
    published = {entry.group: entry for entry in plan.study.published}
    for group in published:
        if group not in (*groups, "evaluation"):
            raise InputError(f"published: unknown group '{group}'{nearest(group, [*groups, 'evaluation'])}")
    rows = []
    for group in groups:
        arms = [arm for arm in plan.arms.values() if arm.group == group]
        runs = [run for run in plan.runs.values() if run.group == group]
        flops = float(sum(each for run in runs for each in spent[run.name].values()))
        steps, alone = sum(run.steps for run in runs), sum(arm.recipe.num_steps for arm in arms)
        hours = machine.device_hours(flops) if machine else None
        tokens = float(sum(run.tokens for run in runs))
        rows.append(GroupCost(group, len(arms), alone, steps, tokens, flops, hours, published.get(group)))
    if plan.cells:
        steps, tokens, flops = map(sum, zip(*cell_costs(plan, sizes), strict=True))
        hours = machine.device_hours(flops) if machine else None
        group = "evaluation"
        rows.append(GroupCost(group, len(plan.models), steps, steps, tokens, flops, hours, published.get(group)))
    networks = [(run.model, shape, run.recipe) for name, run in plan.runs.items() if (shape := sizes.shapes[name])]
    is_on_cpu = machine is not None and machine.name == "CPU"
    memory = [tell_memory(*network, is_on_cpu) for network in networks]
    misfits = [tell_misfit(*network, machine) for network in networks] if machine and not is_on_cpu else []
    return Estimate(
        machine=machine,
        groups=tuple(rows),
        first_seed_flops=estimate(plan.of_first_seed).flops if plan.num_seeds > 1 else None,
        flops_by_objective=by_objective,
        disk=count_disk(plan, sizes),
        unknown=tuple(name for name, shape in sizes.shapes.items() if shape is None),
        misfits=tuple(dict.fromkeys(filter(None, misfits))),
        assumptions=tuple(dict.fromkeys([*list_assumptions(plan, sizes, machine), *memory])),
        published_on=known_device(plan.study.planning.device or ""),
    )


def cell_costs(plan: Plan, sizes: Sizes | None) -> Iterator[tuple[int, float, float]]:
    """Updates, tokens and FLOPs of every cell, in the order of the plan; no FLOPs without sizes of the networks."""
    runs = {model.name: plan.runs[model.run] for model in plan.models}
    # Cells that differ in rate and seed alone cost the same: of the paper's 15,000, a few dozen differ.
    costs = dict[Any, tuple[int, float, float]]()
    embed = None if plan.study.evaluation is None else plan.study.evaluation.embed
    embedded = None if embed is None else count_embedded(embed)
    for cell in plan.cells:
        run = runs[cell.model]
        shape, context = sizes.shapes[run.name] if sizes else None, run.recipe.data.max_sample_tokens
        key = (shape, cell.task, cell.evaluates, context)
        if key not in costs:
            is_embedding = cell.task.startswith(EMBED)
            costs[key] = embedding_cost(shape, cell, embedded) if is_embedding else cell_cost(shape, cell, context)
        yield costs[key]


def count_embedded(embed: EmbedEvaluation) -> tuple[int, float] | None:
    """The updates of all stages and the pairs that they go through, at most: by `max_steps`, or `limit` of the sources.
    None where neither is given."""
    updates, trained = 0, 0.0
    for stage in embed.settle().stages:
        num_pairs = sum(source.weight * (source.limit or math.inf) for source in stage.data)
        stage_updates = min(stage.max_steps or math.inf, stage.epochs * num_pairs / stage.batch_size)
        if stage_updates == math.inf:
            return None
        updates, trained = updates + math.ceil(stage_updates), trained + stage_updates * stage.batch_size
    return updates, trained


def embedding_cost(
    shape: Shape | None, cell: StudyCell, embedded: tuple[int, float] | None
) -> tuple[int, float, float]:
    """What a cell of `embed` costs, as `cell_cost` has it; its loss embeds everything twice."""
    size = TYPICAL_SIZES["retrieval"]
    steps, pairs = embedded or (cell.config.max_steps, cell.config.max_steps * cell.config.batch_size)
    tokens = float(pairs * size.example_tokens)
    each = shape.flops.token(keys=size.example_tokens, targets=0) if shape else 0.0
    return steps, tokens, each * (4 * tokens + len(cell.evaluates) * size.evaluated_tokens) / 3


def cell_cost(shape: Shape | None, cell: StudyCell, context: int) -> tuple[int, float, float]:
    """Updates, tokens trained on, and FLOPs of one fine-tuning, evaluation included.

    A forward pass is a third of training: that is what evaluation costs, and training where the encoder is `frozen`.
    """
    config, trained, size = cell.config, find_task(cell.task), task_size(cell.task)
    examples = min(size.train_examples, config.max_train_examples or size.train_examples)
    if config.shots is not None:
        has_strata = trained.family == "sequence_classification" and trained.problem_type is None
        examples = config.shots * (len(trained.classes) if has_strata else 1)
    epoch_steps, steps = math.ceil(examples / config.batch_size), config.max_steps  # no steps where nothing trains
    if config.shots is None or config.epochs > 1:
        steps = min(steps, config.epochs * epoch_steps)
    tokens = steps * examples / max(epoch_steps, 1) * min(size.example_tokens, context, config.max_length)
    evaluated = 0.0
    for test in cell.evaluates:
        tested = task_size(test)
        # Few queries of a retrieval leave all its documents to be encoded.
        if config.max_eval_examples and find_task(test).family != "retrieval":
            evaluated += min(2 * config.max_eval_examples * tested.example_tokens, tested.evaluated_tokens)
        else:
            evaluated += tested.evaluated_tokens
    each = shape.flops.token(keys=size.example_tokens, targets=0) if shape else 0.0
    return steps, tokens, each * (tokens / (3 if config.frozen else 1) + evaluated / 3)


def count_disk(plan: Plan, sizes: Sizes) -> dict[str, float]:
    """Bytes of all checkpoints, of those that must be there for a while, and of the models' weights."""
    disk = dict.fromkeys(("models", "needed", "everything"), 0.0)
    for checkpoint in plan.checkpoints:
        shape = sizes.shapes[checkpoint.run]
        if shape is None:
            continue
        # AdamW keeps two moments of a weight, Muon one of the matrices inside the blocks.
        has_muon = plan.runs[checkpoint.run].recipe.optimizer.name == "muon"
        weights = float(BYTES_PER_WEIGHT * shape.parameters)
        moments = 2 * weights - (BYTES_PER_WEIGHT * shape.block_weights if has_muon else 0)
        disk["everything"] += weights + moments
        disk["models"] += weights if checkpoint.models else 0.0
        disk["needed"] += weights if checkpoint.models or checkpoint.needed_by else 0.0
        disk["needed"] += moments if checkpoint.moments_needed_by else 0.0
    return disk
