"""Plan → FLOPs, device hours and disk, with every assumption named.

FLOPs are counted as the training loop counts them (`biphase.flops`); hours are FLOPs over peak and efficiency, so they
are as good as the efficiency: where there is a run to measure, name its folder as the device.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from biphase.errors import InputError, nearest
from biphase.flops import Shape, known_device
from biphase.recipe import Recipe
from biphase.study.assumptions import list_assumptions, list_misfits
from biphase.study.devices import Machine
from biphase.study.plan import Plan, StudyCell, count_embedded
from biphase.study.sizes import Sizes, measure_sizes
from biphase.study.spec import EMBED, Published
from biphase.study.task_sizes import TYPICAL_SIZES, find_sizes
from biphase.tasks.spec import TaskSize, find_task

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
    published = {entry.group: entry for entry in plan.study.published}
    groups = dict.fromkeys(arm.group for arm in plan.arms.values())
    for group in published:
        if group not in (*groups, "evaluation"):
            raise InputError(f"published: unknown group '{group}'{nearest(group, [*groups, 'evaluation'])}")
    spent: dict[str, float] = {}
    for run in plan.runs.values():
        for objective, flops in sizes.flops(run).items():
            spent[objective] = spent.get(objective, 0.0) + flops
    rows = [group_cost(plan, group, sizes, machine, published.get(group)) for group in groups]
    tasks = find_sizes(plan.study.evaluation)
    if plan.cells:
        steps, tokens, flops = map(sum, zip(*cell_costs(plan, sizes, tasks), strict=True))
        hours = machine.device_hours(flops) if machine else None
        rows.append(
            GroupCost("evaluation", len(plan.models), steps, steps, tokens, flops, hours, published.get("evaluation"))
        )
    return Estimate(
        machine=machine,
        groups=tuple(rows),
        first_seed_flops=estimate(plan.of_first_seed).flops if plan.num_seeds > 1 else None,
        flops_by_objective=spent,
        disk=count_disk(plan, sizes),
        unknown=tuple(name for name, shape in sizes.shapes.items() if shape is None),
        misfits=tuple(dict.fromkeys(list_misfits(plan, sizes, machine))),
        assumptions=tuple(list_assumptions(plan, sizes, tasks, machine)),
        published_on=known_device(plan.study.planning.device or ""),
    )


def group_cost(plan: Plan, group: str, sizes: Sizes, machine: Machine | None, published: Published | None) -> GroupCost:
    """The row of a group of arms: what its runs train, beside what its arms would need alone."""
    arms = [arm for arm in plan.arms.values() if arm.group == group]
    runs = [run for run in plan.runs.values() if run.group == group]
    flops = sum(each for run in runs for each in sizes.flops(run).values())
    steps, steps_alone = sum(run.steps for run in runs), sum(arm.recipe.num_steps for arm in arms)
    tokens = float(sum(run.tokens for run in runs))
    hours = machine.device_hours(flops) if machine else None
    return GroupCost(group, len(arms), steps_alone, steps, tokens, float(flops), hours, published)


def cell_costs(plan: Plan, sizes: Sizes | None, tasks: Mapping[str, TaskSize]) -> Iterator[tuple[int, float, float]]:
    """Updates, tokens and FLOPs of every cell, in the order of the plan; no FLOPs without sizes of the networks."""
    runs = {model.name: plan.runs[model.run] for model in plan.models}
    # Cells that differ in rate and seed alone cost the same: of the paper's 15,000, a few dozen differ.
    known = dict[Any, tuple[int, float, float]]()
    embed = None if plan.study.evaluation is None else plan.study.evaluation.embed
    embedded = None if embed is None else count_embedded(embed)
    for cell in plan.cells:
        run = runs[cell.model]
        shape, context = sizes.shapes[run.name] if sizes else None, run.recipe.data.max_sample_tokens
        key = (shape, cell.task, cell.evaluates, context)
        if key not in known:
            known[key] = cell_cost(shape, cell, context, tasks, embedded)
        yield known[key]


def cell_cost(
    shape: Shape | None,
    cell: StudyCell,
    context: int,
    tasks: Mapping[str, TaskSize],
    embedded: tuple[int, float] | None = None,
) -> tuple[int, float, float]:
    """Updates, tokens trained on, and FLOPs of one cell, evaluation included; `embedded` is as `count_embedded` has it.

    A forward pass is a third of training: that is what evaluation costs, and training where the encoder is `frozen`.
    """
    config = cell.config
    if cell.task.startswith(EMBED):  # the loss embeds everything twice
        size = TYPICAL_SIZES["retrieval"]
        steps, pairs = embedded or (config.max_steps, config.max_steps * config.batch_size)
        tokens = float(pairs * size.example_tokens)
        each = shape.flops.token(keys=size.example_tokens, targets=0) if shape else 0.0
        return steps, tokens, each * (4 * tokens + len(cell.evaluates) * size.evaluated_tokens) / 3
    trained, size = find_task(cell.task), tasks[cell.task]
    examples = min(size.train_examples, config.max_train_examples or size.train_examples)
    if config.shots is not None:
        has_strata = trained.family == "sequence_classification" and trained.problem_type is None
        examples = config.shots * (len(trained.classes) if has_strata else 1)
    epoch_steps, steps = math.ceil(examples / config.batch_size), config.max_steps  # none of an empty file
    if config.shots is None or config.epochs > 1:
        steps = min(steps, config.epochs * epoch_steps)
    tokens = steps * examples / max(epoch_steps, 1) * min(size.example_tokens, context, config.max_length)
    evaluated, limit = 0.0, 2 * config.max_eval_examples if config.max_eval_examples else math.inf
    for test in cell.evaluates:
        own = tasks[test]
        # Few queries of a retrieval leave all its documents to be encoded.
        few = math.inf if find_task(test).family == "retrieval" else limit * own.example_tokens
        evaluated += min(few, own.evaluated_tokens)
    each = shape.flops.token(keys=size.example_tokens, targets=0) if shape else 0.0
    return steps, tokens, each * (tokens / (3 if config.frozen else 1) + evaluated / 3)


def count_disk(plan: Plan, sizes: Sizes) -> dict[str, float]:
    """Bytes of all checkpoints, of those that must be there for a while, and of the models' weights."""
    disk = dict.fromkeys(("models", "needed", "everything"), 0.0)
    for checkpoint in plan.checkpoints:
        shape = sizes.shapes[checkpoint.run]
        if shape is None:
            continue
        weights = float(BYTES_PER_WEIGHT * shape.parameters)
        moments = moment_bytes(shape, plan.runs[checkpoint.run].recipe)
        disk["everything"] += weights + moments
        disk["models"] += weights if checkpoint.models else 0.0
        disk["needed"] += weights if checkpoint.models or checkpoint.needed_by else 0.0
        disk["needed"] += moments if checkpoint.moments_needed_by else 0.0
    return disk


def moment_bytes(shape: Shape, recipe: Recipe) -> float:
    """The optimizer's share: AdamW keeps two numbers for a weight, Muon one for the matrices inside the blocks."""
    single = shape.block_weights if recipe.optimizer.name == "muon" else 0
    return float(BYTES_PER_WEIGHT * (2 * shape.parameters - single))
