"""Plan → FLOPs, device hours and disk, with every assumption named.

FLOPs are counted as the training loop counts them (`biphase.flops`); hours are FLOPs over peak and efficiency, so they
are as good as the efficiency: where there is a run to measure, name its folder as the device.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from biphase.config import MAX_COUNT
from biphase.encoder.presets import shape_of
from biphase.errors import InputError, clipped, nearest
from biphase.files import read_json_as
from biphase.flops import (
    LLAMA_SHAPED,
    SHAPE_KEYS,
    SampleLengths,
    Shape,
    flops_per_token,
    known_device,
    read_shape,
)
from biphase.memory import plan_memory
from biphase.recipe import Data, Recipe
from biphase.study.arms import starting_models
from biphase.study.devices import Machine
from biphase.study.plan import Plan, StudyCell, count_embedded
from biphase.study.spec import EMBED, Planning, Published, StartingModel
from biphase.study.trunks import PlannedRun, phases_between
from biphase.tasks.spec import Family, TaskSize, find_task

BYTES_PER_WEIGHT = 4
"""Checkpoints hold weights and moments in fp32."""
SAMPLED_SAMPLES = 100_000
"""How many samples of a shard set are looked at for their mean length."""


def find_lengths(data: Data, planning: Planning) -> SampleLengths:
    """How long samples are: in the shards where they are here, else by the packer's rule or as the study assumes."""
    low, high = data.min_sample_tokens, data.max_sample_tokens
    if data.packing == "stream":
        # Two samples fill `high` tokens, cut at r uniform in low..high - low. So each is high / 2 long on average, with
        # the variance of a uniform integer, and the mean of its square is the square of the mean plus the variance.
        variance = ((high - 2 * low + 1) ** 2 - 1) / 12
        squares = 2 * ((high / 2) ** 2 + variance)
        return SampleLengths(high / 2, squares / high, "of a token stream cut at random")
    places = (data.shards, *(part.path for part in data.mixture or ()))
    if all((Path(place) / "manifest.json").exists() for place in places):
        from biphase.corpus.mixture import make_samples, open_text

        text, samples_per_token, mean_keys = open_text(data), 0.0, 0.0
        for shards, share in zip(text.sets, map(float, text.shares), strict=True):
            samples = make_samples(data, shards)
            chosen = np.linspace(0, samples.num_samples - 1, min(samples.num_samples, SAMPLED_SAMPLES)).astype(np.int64)
            starts, stops = samples.spans(chosen)
            lengths = (stops - starts).astype(np.float64)
            samples_per_token += share / float(lengths.mean())
            mean_keys += share * float((lengths**2).sum() / lengths.sum())
        return SampleLengths(1 / samples_per_token, mean_keys, f"measured in {', '.join(places[1:] or places)}")
    mean = float(planning.mean_sample_tokens or high / 2)
    return SampleLengths(mean, mean, "assumed: all samples as long as the mean")


def find_vocab_size(data: Data, planning: Planning) -> int:
    """The vocabulary of the shards where they are here, else as the study says. Raises `InputError` without either."""
    manifest = Path(data.shards) / "manifest.json"
    if manifest.exists():
        vocab_size: int = read_json_as(manifest, dict[str, Any]).get("vocab_size", 0)
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise InputError(f"{manifest} is damaged (vocab_size is {vocab_size!r}); prepare the shards anew")
        return vocab_size
    if planning.vocab_size is None:
        raise InputError(f"the shards {data.shards} are not here yet: give planning.vocab_size, such as 32768")
    return planning.vocab_size


def model_shape(model: StartingModel, vocab_size: int) -> Shape | None:
    """The shape of a preset or of a folder with a Llama-like config.json; None for other types and what only the hub
    knows."""
    if model.preset is not None:
        return shape_of(model.preset, model.architecture, vocab_size)
    config = Path(model.model or "") / "config.json"
    if not config.is_file():
        return None
    settings = read_json_as(config, dict[str, Any], "save the model anew")
    if settings.get("model_type") not in LLAMA_SHAPED or any(key not in settings for key in SHAPE_KEYS):
        return None
    for key in (*SHAPE_KEYS, "head_dim", "vocab_size"):
        size = settings.get(key) or 1
        if not isinstance(size, int) or not 0 < size <= MAX_COUNT:
            raise InputError(f"{config}: {key} is {clipped(repr(size))}, which is no size; save the model anew")
    return read_shape(settings | {"vocab_size": max(vocab_size, settings.get("vocab_size", 0))})


@dataclass(frozen=True)
class Sizes:
    """What the runs of a plan compute with: by name of a run, its network and the lengths of its samples."""

    shapes: Mapping[str, Shape | None]
    texts: Mapping[str, SampleLengths]

    def flops(self, run: PlannedRun, until: int | None = None) -> dict[str, float]:
        """What a run costs, by objective, up to a step of it; nothing for a network of unknown shape."""
        shape, spent = self.shapes[run.name], dict[str, float]()
        if shape is None:
            return spent
        end = run.first
        for phase in phases_between(run.recipe.curriculum, 0, (until or run.last) - run.first):
            begin, end = end, end + phase.steps
            tokens = run.recipe.tokens_before(end) - run.recipe.tokens_before(begin)
            for part, share in phase.parts:
                flops = share * tokens * flops_per_token(shape.flops, part, self.texts[run.name])
                spent[part.objective] = spent.get(part.objective, 0.0) + flops
        return spent


def measure_sizes(plan: Plan) -> Sizes:
    """The sizes of all runs; each set of shards is looked into once."""
    models, planning = starting_models(plan.study), plan.study.planning
    texts: dict[Data, SampleLengths] = {}
    vocabularies: dict[str, int] = {}
    shapes = {}
    for run in plan.runs.values():
        data = run.recipe.data
        if data not in texts:
            texts[data], vocabularies[data.shards] = find_lengths(data, planning), find_vocab_size(data, planning)
        shapes[run.name] = model_shape(models[run.model], vocabularies[data.shards])
    return Sizes(shapes, {run.name: texts[run.recipe.data] for run in plan.runs.values()})


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
    # What the figures rest on, for people.
    assumptions = []
    for text in dict.fromkeys(sizes.texts.values()):
        what = f"samples of {text.mean_tokens:,.0f} tokens, a token meets {text.mean_keys:,.0f}"
        assumptions.append(f"{what} ({text.source})")
    if machine:
        peak = f"{machine.peak_flops / 1e12:,.4g} TFLOP/s"
        assumptions.append(f"{machine.name}: {peak}, {machine.efficiency:.0%} of them used, {machine.source}")
    if plan.cells:
        steps, tokens, flops = map(sum, zip(*cell_costs(plan, sizes), strict=True))
        hours = machine.device_hours(flops) if machine else None
        told = published.get("evaluation")
        rows.append(GroupCost("evaluation", len(plan.models), steps, steps, tokens, flops, hours, told))
        assumptions.append("fine-tuning: rounded sizes of the tasks' published data, at the same efficiency")
        evaluation = plan.study.evaluation
        if evaluation is not None and evaluation.embed is not None and count_embedded(evaluation.embed) is None:
            assumptions.append("embedding: 1,000 updates a stage, for want of its max_steps, or limit of its sources")
    assumptions += list_memory(plan, sizes)
    return Estimate(
        machine=machine,
        groups=tuple(rows),
        first_seed_flops=estimate(plan.of_first_seed).flops if plan.num_seeds > 1 else None,
        flops_by_objective=spent,
        disk=count_disk(plan, sizes),
        unknown=tuple(name for name, shape in sizes.shapes.items() if shape is None),
        assumptions=tuple(assumptions),
        published_on=known_device(plan.study.planning.device or ""),
    )


def list_memory(plan: Plan, sizes: Sizes) -> list[str]:
    """For each network and way to train it, the memory that a GPU needs, at most: alone, and as one of 8 and of 64."""
    lines = []
    for run in plan.runs.values():
        shape, compute = sizes.shapes[run.name], run.recipe.compute
        if shape is None:
            continue
        batch, each, muon = run.recipe.batch_tokens, [], run.recipe.optimizer.name == "muon"
        most_tokens = batch if isinstance(batch, int) else max(batch.start, batch.to)
        for devices in (1, 8, 64):
            planned = plan_memory(
                shape,
                devices,
                microbatch_tokens=compute.microbatch_tokens,
                num_microbatches=math.ceil(most_tokens / (devices * compute.microbatch_tokens)),
                recomputes=compute.activation_checkpointing,
                muon=muon,
            )
            each.append(f"{planned.total / 2**30:,.1f}")
        told = f"{run.model}: at most {each[0]} GiB on one GPU"
        if not muon:  # which needs whole matrices
            told += f", {each[1]} on each of 8 and {each[2]} of 64 under FSDP"
        lines.append(f"{told} (microbatches of {compute.microbatch_tokens:,} tokens)")
    return list(dict.fromkeys(lines))


def group_cost(plan: Plan, group: str, sizes: Sizes, machine: Machine | None, published: Published | None) -> GroupCost:
    """The row of a group of arms: what its runs train, beside what its arms would need alone."""
    arms = [arm for arm in plan.arms.values() if arm.group == group]
    runs = [run for run in plan.runs.values() if run.group == group]
    flops = sum(each for run in runs for each in sizes.flops(run).values())
    steps, steps_alone = sum(run.steps for run in runs), sum(arm.recipe.num_steps for arm in arms)
    tokens = float(sum(run.tokens for run in runs))
    hours = machine.device_hours(flops) if machine else None
    return GroupCost(group, len(arms), steps_alone, steps, tokens, float(flops), hours, published)


TYPICAL_SIZES: dict[Family, TaskSize] = {
    "sequence_classification": TaskSize(train_examples=50_000, example_tokens=40, evaluated_tokens=1_000_000),
    "token_classification": TaskSize(train_examples=15_000, example_tokens=25, evaluated_tokens=200_000),
    "question_answering": TaskSize(train_examples=90_000, example_tokens=200, evaluated_tokens=3_000_000),
    "multiple_choice": TaskSize(train_examples=40_000, example_tokens=200, evaluated_tokens=2_000_000),
    "retrieval": TaskSize(train_examples=100_000, example_tokens=120, evaluated_tokens=1_000_000),
}
"""The sizes that are assumed of tasks that do not say theirs."""


def cell_costs(plan: Plan, sizes: Sizes | None) -> Iterator[tuple[int, float, float]]:
    """Updates, tokens and FLOPs of every cell, in the order of the plan; no FLOPs without sizes."""
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
            known[key] = cell_cost(shape, cell, context, embedded)
        yield known[key]


def cell_cost(
    shape: Shape | None, cell: StudyCell, context: int, embedded: tuple[int, float] | None = None
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
    trained = find_task(cell.task)
    size = trained.size or TYPICAL_SIZES[trained.family]
    examples = min(size.train_examples, config.max_train_examples or size.train_examples)
    if config.shots is not None:
        has_strata = trained.family == "sequence_classification" and trained.problem_type is None
        examples = config.shots * (len(trained.classes) if has_strata else 1)
    epoch_steps, steps = math.ceil(examples / config.batch_size), config.max_steps
    if config.shots is None or config.epochs > 1:
        steps = min(steps, config.epochs * epoch_steps)
    tokens = steps * examples / epoch_steps * min(size.example_tokens, context, config.max_length)
    evaluated, limit = 0.0, 2 * config.max_eval_examples if config.max_eval_examples else math.inf
    for test in map(find_task, cell.evaluates):
        own = test.size or TYPICAL_SIZES[test.family]
        few = math.inf if test.family == "retrieval" else limit * own.example_tokens  # there, documents remain
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
