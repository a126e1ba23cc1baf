"""A plan → an estimate of the FLOPs, hours and disk space that it needs, with the assumptions of the estimate; the
folder of a study → its measured costs.

This module also finds the speed and memory of devices, and the sizes of networks, samples and tasks.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, groupby, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from biphase.config import parse_config
from biphase.console import duration
from biphase.corpus.shards import is_shard_set, read_shard_manifest
from biphase.errors import InputError, first_of, nearest
from biphase.files import read_json
from biphase.finetuning.scores import measure_trainings
from biphase.flops import (
    CPU_EFFICIENCY,
    DEVICES,
    EFFICIENCY,
    FLOAT32,
    WATTS,
    WITHOUT_BF16,
    SampleLengths,
    Shape,
    flops_between,
    known_device,
    model_shape,
    moment_bytes,
    plan_memory,
    settle_precision,
    shape_of,
    update_flops,
)
from biphase.hub import find_positions, fit_samples, read_config_here
from biphase.machine import total_memory, visible_gpus
from biphase.presets import PRESETS
from biphase.recipe import Data, Recipe
from biphase.report.formats import show_count, show_gib, show_list, show_power
from biphase.run import open_run, read_metrics
from biphase.studies.folder import StudyState
from biphase.studies.plan import EvaluatedModel, Plan, PlannedRun, StudyCell
from biphase.studies.spec import EmbedEvaluation, Planning, Study, find_data_dirs, trainings
from biphase.tasks.examples import AnyExample, TaggedWords, input_of, load_examples
from biphase.tasks.families import KINDS, TaskSize
from biphase.tasks.sources import HUB, TaskSource, dir_of, find_source
from biphase.tasks.spec import find_task, name_tests
from biphase.tasks.splits import TaskData


@dataclass(frozen=True)
class Machine:
    """A number of devices of one kind. A device is a GPU, or a core of a CPU."""

    name: str
    devices: int
    peak_flops: float
    efficiency: float
    source: str
    """The source of the efficiency in words."""

    @property
    def speed(self) -> str:
        """The speed of one device in words."""
        if self.efficiency == 1:
            return f"{self.peak_flops / 1e9:,.3g} GFLOP/s, {self.source}"
        return f"{self.peak_flops / 1e12:,.3g} TFLOP/s, {self.efficiency:.0%} of them used, {self.source}"

    @property
    def memory(self) -> float:
        """The memory of one device in bytes; for a CPU, the memory of this machine; 0 if unknown."""
        if self.name == "CPU":
            return float(total_memory())
        return DEVICES[key][1] * 2.0**30 if (key := known_device(self.name)) else 0.0

    def device_hours(self, flops: float) -> float:
        """Return the hours that one device takes for these FLOPs."""
        return flops / (self.peak_flops * self.efficiency) / 3600


def find_machine(name: str, devices: int | None = None, efficiency: float | None = None) -> Machine:
    """Find a device in `DEVICES` by any name that contains a key; or, if `name` is the folder of a run, measure its
    device by the median speed of its steps, without the first tenth. By default, find one device; of the CPU of a run,
    as many threads as the run used.

    Raises `InputError` for an unknown device, for fewer than one device, for an efficiency outside 0 to 1 or together
    with a run, and for a run with too few logged steps or with sessions on different devices.
    """
    count = 1 if devices is None else devices
    parse_config(Planning, {"devices": count, "efficiency": efficiency}, origin=f"device {name}")
    if (Path(name) / "config.yaml").exists():
        if efficiency is not None:
            raise InputError(f"{name} is a run, which measures its own efficiency; leave the efficiency out")
        run = open_run(Path(name))
        records = read_metrics(run, "train")
        speeds = [record["flops_per_second"] for record in records[len(records) // 10 + 1 :]]
        if not speeds:
            raise InputError(f"{name} has logged too few steps to measure a device; let it train for longer")
        machine = read_json(run.path / "environment.json")
        (device, used), *others = {count_devices(session) for session in (*machine.get("earlier", ()), machine)}
        if others:
            raise InputError(f"{name} was trained on several devices, and measures none; give another run or a device")
        if device == "cpu":
            device, count = "CPU", used if devices is None else devices
        return Machine(device, count, median(speeds) / used, 1.0, f"as measured in {name}")
    key = known_device(name)
    if key is None or re.search(r"-[0-9a-f]{8}/?$", name):  # a run that is not here may be named after its device
        raise InputError(f"unknown device or run '{name}'{nearest(name, DEVICES)}")
    usual = CPU_EFFICIENCY if key == "CPU" else EFFICIENCY
    return Machine(key, count, DEVICES[key][0], efficiency or usual, "stated" if efficiency else "assumed")


def count_devices(machine: Mapping[str, Any]) -> tuple[str, int]:
    """Return the name of the device in a record of a machine, and the number of GPUs, or of CPU threads, over all
    processes."""
    device = str(machine.get("device", "not known"))
    return device, machine.get("processes", 1) * (machine.get("threads", 1) if device == "cpu" else 1)


def study_machine(study: Study, device: str | None = None, efficiency: float | None = None) -> Machine | None:
    """Find the given device, or else the device in the study file; return None if neither names one.

    The efficiency in the file applies only to the file's device. Raises `InputError` for an efficiency without a
    device.
    """
    planning = study.planning
    if device is None and planning.device is not None:
        device, efficiency = planning.device, planning.efficiency if efficiency is None else efficiency
    if device is not None:
        return find_machine(device, planning.devices if "devices" in planning.model_fields_set else None, efficiency)
    if efficiency is not None:
        raise InputError("an efficiency needs a device; give one, such as H100")
    return None


SAMPLED_SAMPLES = 100_000
"""The number of samples per shard set by which the mean length is measured."""


def find_lengths(data: Data, planning: Planning) -> SampleLengths:
    """Find the lengths of samples by the packer's rule, by existing shards, or by the study's assumption."""
    low, high = data.min_sample_tokens, data.max_sample_tokens
    if data.packing == "stream":
        # Two samples fill `high` tokens, cut at a uniform r in low..high - low. So the mean length is high / 2, and the
        # mean squared length is the square of that plus the variance of a uniform integer.
        variance = ((high - 2 * low + 1) ** 2 - 1) / 12
        squares = 2 * ((high / 2) ** 2 + variance)
        return SampleLengths(high / 2, squares / high, "of a token stream cut at random")
    folders = (data.shards, *(source.path for source in data.mixture or ()))
    absent = [folder for folder in folders if not is_shard_set(folder)]
    if not absent:
        from biphase.corpus.packing import make_samples, open_text

        text, samples_per_token, mean_keys = open_text(data), 0.0, 0.0
        for shards, share in zip(text.sets, map(float, text.shares), strict=True):
            samples = make_samples(data, shards)
            chosen = np.linspace(0, samples.num_samples - 1, min(samples.num_samples, SAMPLED_SAMPLES)).astype(np.int64)
            starts, stops = samples.spans(chosen)
            lengths = (stops - starts).astype(np.float64)
            samples_per_token += share / float(lengths.mean())
            mean_keys += share * float((lengths**2).sum() / lengths.sum())
        return SampleLengths(1 / samples_per_token, mean_keys, f"measured in {', '.join(folders[1:] or folders)}")
    mean = float(planning.mean_sample_tokens or high / 2)
    return SampleLengths(mean, mean, f"assumed: {absent[0]} is not here; all samples have the mean length")


def find_vocab_size(shards: str, planning: Planning) -> int | None:
    """Find the size of a vocabulary by existing shards or by the study's assumption; return None without either."""
    return read_shard_manifest(Path(shards)).vocab_size if is_shard_set(shards) else planning.vocab_size


RunSize = tuple[Shape | None, SampleLengths]
"""The shape of a run's network (None if unknown) and the lengths of its samples."""


def fit_recipes(plan: Plan) -> dict[str, Recipe]:
    """Return the recipe of each run, by name, with samples as short as training makes them: what a model's positions
    lower, they lower for its descendants too."""
    recipes = dict[str, Recipe]()
    for name, run in plan.runs.items():  # parents come first
        positions = find_positions(read_config_here(run.recipe.init.model))
        recipes[name], data, parent = fit_samples(run.recipe, positions), run.recipe.data, run.parent
        if parent and data.max_sample_tokens == plan.runs[parent].recipe.data.max_sample_tokens:
            data = data.model_copy(update={"max_sample_tokens": recipes[parent].data.max_sample_tokens})
            recipes[name] = run.recipe.model_copy(update={"data": data})
    return recipes


def measure_sizes(plan: Plan) -> dict[str, RunSize]:
    """Return the size of each run, by name. Read each shard set once."""
    lengths_of, vocab_size_of = cache(find_lengths), cache(find_vocab_size)
    planning, recipes, sizes = plan.study.planning, fit_recipes(plan), dict[str, RunSize]()
    for name, run in plan.runs.items():
        data = recipes[name].data
        init, vocab_size = run.recipe.init, vocab_size_of(data.shards, planning)
        own = None if run.parent else model_shape(init, read_config_here(init.model), vocab_size)
        one_order = data.model_copy(update={"order_seed": 0})  # no length depends on it
        sizes[name] = sizes[run.parent][0] if run.parent else own, lengths_of(one_order, planning)  # parents come first
    return sizes


def run_flops(run: PlannedRun, size: RunSize, until: int | None = None) -> dict[str, float]:
    """Count the FLOPs of a run by objective, up to the step `until`; {} for a network of unknown shape."""
    shape, lengths = size
    if shape is None:
        return {}
    flops = replace(shape.flops, per_update=update_flops(run.recipe.optimizer, shape.matrices))
    return flops_between(run.recipe, flops, lengths, 0, (until or run.last) - run.first, run.first)


def measure_training(plan: Plan, model: EvaluatedModel, sizes: Mapping[str, RunSize]) -> tuple[float, float | None]:
    """Count a model's tokens and FLOPs since random weights; the FLOPs are None for a network of unknown shape."""
    tokens, flops = 0.0, 0.0
    name: str | None = model.run
    end = model.step
    while name is not None:  # a parent may have had batches of another size
        run = plan.runs[name]
        tokens += run.recipe.tokens_before(end) - run.recipe.tokens_before(run.first)
        flops += sum(run_flops(run, sizes[name], end).values()) or math.nan
        name, end = run.parent, run.first
    return tokens, None if math.isnan(flops) else flops


MOST_COUNTED_BYTES = 10_000_000
"""The largest total size of a task's files at which a plan counts the examples."""
CHARACTERS_PER_TOKEN = 4
GUESSED_UPDATES = 1000
"""The updates of a stage of embedding training that states neither its updates nor its pairs."""


def task_size(name: str, folders: Mapping[str, str]) -> TaskSize:
    """Return the size that a task states; or else the size of its files, if its folder (`folders`: task → folder) has
    them and they are small and valid; or else the typical size of its family."""
    task = find_task(name_tests(name)[0])
    folder = dir_of(task, folders)
    if task.size is None and not task.kind.is_search and folder not in (None, str(HUB)):
        with suppress(InputError):  # `look_for_data` raises it before the study runs
            source = find_source(task, folder)
            paths = chain.from_iterable(source.files.values())
            if sum(path.stat().st_size if path.is_file() else math.inf for path in paths) <= MOST_COUNTED_BYTES:
                return count_examples(source)
    return task.size or task.kind.size


@lru_cache
def count_examples(source: TaskSource) -> TaskSize:
    """Count the examples of each split of a task, and estimate their tokens from characters."""
    data = load_examples(source, judged_only=True)
    assert isinstance(data, TaskData)
    tokens = {name: sum(map(count_characters, split)) // CHARACTERS_PER_TOKEN for name, split in data.splits.items()}
    return TaskSize(
        train_examples=len(data.train),
        example_tokens=math.ceil(tokens["train"] / len(data.train)),
        evaluated_tokens=tokens["validation"] + tokens["test"],
        test_examples=len(data.test),
    )


def count_characters(example: AnyExample) -> int:
    """Count the characters of an example's texts that a network sees."""
    text = " ".join(example.words) if isinstance(example, TaggedWords) else input_of(example)
    return len(text) if isinstance(text, str) else sum(map(len, text))


def list_assumptions(plan: Plan, sizes: Mapping[str, RunSize], machine: Machine | None) -> Iterator[str]:
    """Yield the assumptions about samples, the machine and the sizes of tasks, in words."""
    for text in dict.fromkeys(lengths for _, lengths in sizes.values()):
        yield f"samples of {text.mean_tokens:,.0f} tokens; a token attends to {text.mean_keys:,.0f} ({text.source})"
    if machine:
        yield f"{machine.name}: {machine.speed}"
        slower = [name for name, run in plan.runs.items() if run.recipe.compute.precision == "fp32"]
        if slower and machine.efficiency != 1 and machine.name not in ("CPU", *WITHOUT_BF16):
            yield f"hours are those of bf16; training in fp32 takes longer ({first_of(slower)})"
    evaluation = plan.study.evaluation
    if evaluation is not None:
        names = {name for trained, tests in trainings(evaluation).items() for name in (trained, *tests)}
        folders = find_data_dirs(evaluation)
        sized: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names):
            task, size = find_task(name), task_size(name, folders)
            own = "typical sizes, guessed," if size.test_examples is None else "the counted examples"
            sized["rounded sizes of the published data" if task.size else own].append(task.name)
        sources = [f"{origin} of {show_list(tasks)}" for origin, tasks in sized.items()]
        yield f"fine-tuning: {'; '.join(sources) or 'the sizes of typical data'}, at the same efficiency"
        if evaluation.embed is not None and (guessed := count_embedded(evaluation.embed)[2]):
            yield f"embedding: {GUESSED_UPDATES:,} updates in {show_list(guessed)}, without max_steps or limits of data"


def tell_memory(model: str, shape: Shape, recipe: Recipe, is_on_cpu: bool) -> str:
    """Write the most memory that training needs: on a CPU; or on one GPU, on each of 8, and on each of 64."""
    alone = plan_memory(shape, recipe, on_cpu=is_on_cpu)["total"]
    if is_on_cpu:
        needed, installed = f"{show_gib(alone)} of memory per process on a CPU, beside Python's own", total_memory()
        if 0 < installed < alone:
            needed += f", which is more than the {show_gib(installed)} of this machine"
    else:
        layouts: list[tuple[int, str]] = [(8, "ddp"), (8, "fsdp"), (64, "fsdp")]
        ddp, fsdp, fsdp_of_64 = [show_gib(plan_memory(shape, recipe, *layout)["total"]) for layout in layouts]
        needed = f"{show_gib(alone)} on one GPU, {ddp} on each of 8 under DDP"
        if not recipe.needs_whole_matrices:
            needed += f", {fsdp} on each of 8 and {fsdp_of_64} of 64 under FSDP"
    return f"{model}: at most {needed} (microbatches of at most {recipe.compute.microbatch_tokens:,} tokens)"


FULL = 0.9
"""The share of a device's memory that a plan may fill; the rest is for memory that no formula counts."""


def fits(shape: Shape, recipe: Recipe, machine: Machine) -> bool:
    """Tell whether training by a recipe fits into the memory of each device, or of a CPU, on which one process trains;
    True if their memory is unknown."""
    is_on_cpu = machine.name == "CPU"
    devices = 1 if is_on_cpu else machine.devices
    needed = plan_memory(shape, settle_precision(recipe, machine.name), devices, on_cpu=is_on_cpu)["total"]
    return not machine.memory or needed <= FULL * machine.memory


def fit_memory(shape: Shape, recipe: Recipe, machine: Machine) -> Recipe | None:
    """Return the recipe, changed so that it fits into the memory of the machine's devices. Try smaller microbatches,
    then activation checkpointing, then FSDP over all devices. Return None if none of these is enough."""
    first, smallest = recipe.compute, recipe.data.max_sample_tokens
    sizes = [size for step in range(8) if (size := first.microbatch_tokens >> step) >= smallest]
    is_whole = recipe.needs_whole_matrices or machine.devices == 1 or machine.name == "CPU"
    layouts = [first.parallel] if is_whole else [first.parallel, "fsdp"]
    for parallel, recomputes, size in product(layouts, (first.activation_checkpointing, True), sizes):
        changes = {"microbatch_tokens": size, "activation_checkpointing": recomputes, "parallel": parallel}
        changed = recipe.model_copy(update={"compute": first.model_copy(update=changes)})
        if fits(shape, changed, machine):
            return changed
    return None


def tell_misfit(model: str, shape: Shape, recipe: Recipe, machine: Machine) -> str:
    """Write that a network does not fit into one GPU, with two remedies: the smallest change with which one or several
    GPUs are enough, and the largest preset that fits. Return "" if the network fits."""
    machine = replace(machine, devices=1)
    if fits(shape, recipe, machine):
        return ""
    ways = []
    for devices in (1, 2, 4, 8):
        if fitted := fit_memory(shape, recipe, replace(machine, devices=devices)):
            keys = " ".join(f"recipe.{change}" for change in recipe.compute.list_changes(fitted.compute))
            ways.append(keys + (f" on {devices} of them" if devices > 1 else ""))
            break
    smaller = [name for name in PRESETS if fits(shape_of(name, {}, shape.vocab_size), recipe, machine)]
    ways += [f"preset {name}, the largest that fits with the settings of the study" for name in smaller[:1]]
    needed = show_gib(plan_memory(shape, recipe)["total"])
    lack = f"{model} does not fit into the {show_gib(machine.memory)} of one {machine.name} (up to {needed} are needed)"
    return f"{lack}; what fits: {', or '.join(ways)}" if ways else lack


def refuse_lack_of_memory(recipe: Recipe, vocab_size: int, processes: int) -> None:
    """Raise `InputError` for a training by so many processes on a CPU that needs more memory than the machine has: its
    system would kill them without a word. A GPU says itself what it lacks."""
    is_on_cpu = recipe.compute.device == "cpu" or (recipe.compute.device == "auto" and not visible_gpus())
    settings, installed = read_config_here(recipe.init.model), total_memory()
    shape = model_shape(recipe.init, settings, vocab_size)
    if shape is None or not installed or not is_on_cpu:
        return
    recipe = fit_samples(recipe, find_positions(settings))
    needed = processes * plan_memory(shape, recipe, processes, on_cpu=True)["total"]
    if needed <= installed:
        return
    alone = find_machine("CPU")
    fitted = fit_memory(shape, recipe, alone)
    ways = [] if fitted is None else [" ".join(recipe.compute.list_changes(fitted.compute)) or "fewer processes"]
    ways += [f"preset {name}" for name in PRESETS if fits(shape_of(name, {}, vocab_size), recipe, alone)][:1]
    remedy = f"; what fits: {', or '.join(ways)}" if ways else ""
    lack = f"{recipe.name} needs {show_gib(needed)} of memory, and this machine has {show_gib(installed)}"
    raise InputError(f"{lack}{remedy}")


@dataclass(frozen=True)
class Estimate:
    """The cost of a plan, and its assumptions."""

    machine: Machine | None
    flops: float
    flops_by_objective: dict[str, float]
    """Objective → the FLOPs of its pretraining."""
    groups: list[dict[str, Any]]
    """A row for each `group` of arms, and one for `evaluation`: the number of `models`; `steps_alone`, the steps
    without sharing (a continued arm counts from its parent's end); the `steps` and `tokens` of training; `flops`; and
    `device_hours`, None without a device."""
    disk_bytes: dict[str, float]
    """Bytes of checkpoints: `models`, only the weights of the models; `needed`, also the weights of branch points and
    the moments with which runs continue; `everything`, all weights and moments."""
    misfits: tuple[str, ...]
    """Sentences about networks that are too large for the machine's memory, with remedies."""
    not_counted: tuple[str, ...]
    """The runs whose network has an unknown shape."""
    assumptions: tuple[str, ...]
    first_seed_flops: float | None
    """The FLOPs of the first pretraining seed, including its fine-tunings; None with a single seed."""


def estimate(plan: Plan, machine: Machine | None = None) -> Estimate:
    """Estimate the cost of a plan on a machine. Raises `InputError` for an unknown vocabulary."""
    for shards in dict.fromkeys(run.recipe.data.shards for run in plan.runs.values()):
        if find_vocab_size(shards, plan.study.planning) is None:
            raise InputError(f"the shards {shards} are not here yet: give planning.vocab_size, such as 32768")
    sizes = measure_sizes(plan)
    spent = {name: run_flops(run, sizes[name]) for name, run in plan.runs.items()}
    by_objective = defaultdict[str, float](float)
    for by_run in spent.values():
        for objective, flops in by_run.items():
            by_objective[objective] += flops
    rows = [*list_groups(plan, sizes, spent)]
    for row in rows:
        row["device_hours"] = machine.device_hours(row["flops"]) if machine else None
    is_on_cpu = machine is not None and machine.name == "CPU"
    memory, misfits, not_counted = [], [], []
    for name, recipe in fit_recipes(plan).items():
        (shape, _), model = sizes[name], plan.runs[name].model
        if shape is None:
            not_counted.append(name)
            continue
        recipe = settle_precision(recipe, machine.name) if machine else recipe
        memory.append(tell_memory(model, shape, recipe, is_on_cpu))
        if machine and not is_on_cpu:
            misfits.append(tell_misfit(model, shape, recipe, machine))
    return Estimate(
        machine=machine,
        flops=sum(row["flops"] for row in rows),
        flops_by_objective=by_objective,
        groups=rows,
        disk_bytes=count_disk(plan, sizes),
        misfits=tuple(dict.fromkeys(filter(None, misfits))),
        not_counted=tuple(not_counted),
        assumptions=tuple(dict.fromkeys([*list_assumptions(plan, sizes, machine), *memory])),
        first_seed_flops=estimate(plan.of_first_seed).flops if plan.num_seeds > 1 else None,
    )


def list_groups(
    plan: Plan, sizes: Mapping[str, RunSize], spent: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `Estimate.groups`, without hours. `spent`: run → its FLOPs by objective."""
    for group in dict.fromkeys(arm.group for arm in plan.arms.values()):
        arms = [arm for arm in plan.arms.values() if arm.group == group]
        runs = [run for run in plan.runs.values() if run.group == group]
        row: dict[str, Any] = {"group": group, "models": len(arms)}
        row["steps_alone"] = sum(arm.recipe.num_steps for arm in arms)
        row |= {"steps": sum(run.steps for run in runs), "tokens": float(sum(run.tokens for run in runs))}
        row["flops"] = float(sum(flops for run in runs for flops in spent[run.name].values()))
        yield row
    if plan.cells:
        costs = [*cell_costs(plan, sizes)]
        steps = sum(cost.steps for cost in costs)
        row = {"group": "evaluation", "models": len(plan.models), "steps_alone": steps, "steps": steps}
        row |= {"tokens": sum(cost.tokens for cost in costs), "flops": sum(cost.flops for cost in costs)}
        yield row


class CellCost(NamedTuple):
    """The cost of one fine-tuning."""

    steps: int
    tokens: float
    """The training tokens."""
    flops: float
    """The FLOPs of training and evaluation; 0 for a network of unknown shape."""


def cell_costs(plan: Plan, sizes: Mapping[str, RunSize]) -> Iterator[CellCost]:
    """Yield the cost of every cell, in the order of the plan."""
    recipes, runs = fit_recipes(plan), {model.name: model.run for model in plan.models}
    # Cells that differ only in rate and seed cost the same: the paper's 15,000 cells have a few dozen different costs.
    costs = dict[Any, CellCost]()
    evaluation = plan.study.evaluation
    assert evaluation is not None
    folders = find_data_dirs(evaluation)
    for cell in plan.cells:
        run = runs[cell.model]
        (shape, _), context = sizes[run], recipes[run].data.max_sample_tokens
        key = (shape, cell.task, cell.evaluates, context)
        if key not in costs and evaluation.embed is not None and cell.task == evaluation.embed.name:
            costs[key] = embed_cost(shape, cell, evaluation.embed)
        elif key not in costs:
            costs[key] = cell_cost(shape, cell, context, folders)
        yield costs[key]


def embed_cost(shape: Shape | None, cell: StudyCell, embed: EmbedEvaluation) -> CellCost:
    """Estimate the cost of one embedding model. Its loss embeds each text twice."""
    size, (steps, pairs, _) = KINDS["retrieval"].size, count_embedded(embed)
    tokens = float(pairs * size.example_tokens)
    per_token = shape.flops.token(keys=size.example_tokens, targets=0) if shape else 0.0
    return CellCost(steps, tokens, per_token * (4 * tokens + len(cell.evaluates) * size.evaluated_tokens) / 3)


def count_embedded(embed: EmbedEvaluation) -> tuple[int, float, list[str]]:
    """Return upper limits of the updates of all stages and of their pairs, by `max_steps` or by the `limit` of sources;
    and the names of the stages that have neither, each of which counts `GUESSED_UPDATES`."""
    updates, trained, guessed = 0, 0.0, list[str]()
    for stage in embed.settle().stages:
        num_pairs = sum(source.weight * (source.limit or math.inf) for source in stage.data)
        stage_updates = min(stage.max_steps or math.inf, stage.epochs * num_pairs / stage.batch_size)
        if stage_updates == math.inf:
            stage_updates, guessed = GUESSED_UPDATES, [*guessed, stage.name]
        updates, trained = updates + math.ceil(stage_updates), trained + stage_updates * stage.batch_size
    return updates, trained, guessed


def cell_cost(shape: Shape | None, cell: StudyCell, context: int, folders: Mapping[str, str]) -> CellCost:
    """Estimate the cost of one fine-tuning. A forward pass costs a third of a training step; evaluation, and training
    with a `frozen` encoder, need no backward pass."""
    config, trained, size = cell.config, find_task(cell.task), task_size(cell.task, folders)
    examples = min(size.train_examples, config.max_train_examples or size.train_examples)
    if config.shots is not None:
        examples = config.shots * (len(trained.classes) if trained.kind.has_strata else 1)
    epoch_steps, steps = math.ceil(examples / config.batch_size), config.max_steps  # 0 steps without examples
    if config.shots is None or config.epochs > 1:
        steps = min(steps, config.epochs * epoch_steps)
    seen, evaluated = min(size.example_tokens, context, config.max_length), 0.0
    tokens = steps * examples / max(epoch_steps, 1) * seen
    for test in cell.evaluates:
        tested = task_size(test, folders)
        length, most = max(tested.example_tokens, 1), 2 * (config.max_eval_examples or math.inf)
        if find_task(test).kind.is_search:  # it encodes all documents even for few queries
            evaluated += tested.evaluated_tokens
        else:
            evaluated += min(most * length, tested.evaluated_tokens) * min(context, config.max_length, length) / length
    per_token = shape.flops.token(keys=seen, targets=0) if shape else 0.0
    return CellCost(steps, tokens, per_token * (tokens / (3 if config.frozen else 1) + evaluated / 3))


def count_disk(plan: Plan, sizes: Mapping[str, RunSize]) -> dict[str, float]:
    """Count bytes on disk in fp32: of the models' weights, of all needed checkpoints, and of all checkpoints."""
    disk = dict.fromkeys(("models", "needed", "everything"), 0.0)
    for (run, _), users in plan.checkpoints.items():
        shape, _ = sizes[run]
        weights = float(FLOAT32 * shape.parameters) if shape else 0.0
        moments = moment_bytes(shape, plan.runs[run].recipe) if shape else 0.0
        disk["everything"] += weights + moments
        disk["models"] += weights if users["models"] else 0.0
        disk["needed"] += weights if users["models"] or users["needed_by"] else 0.0
        disk["needed"] += moments if users["moments_needed_by"] else 0.0
    return disk


COST_COLUMNS = ("stage", "device", "units", "steps", "tokens", "FLOPs", "worker time", "device hours", "kWh at most")


class StageCost(NamedTuple):
    """The measured cost of a stage's units on one device."""

    units: int
    steps: int
    tokens: float
    flops: float
    """The FLOPs; nan for a network of unknown shape."""
    seconds: float
    untimed: int
    """The number of units whose time is unknown."""


def list_costs(state: StudyState, sizes: Mapping[str, RunSize]) -> list[dict[str, object]]:
    """Return the measured costs: a row for each stage and device, with headers as keys. A device is a GPU or a CPU's
    thread. Runs that went on with others have no hours. The energy is the board's power limit times the hours."""
    spent: dict[tuple[str, str, int], list[StageCost]] = defaultdict(list)
    for name, record in state.records.items():
        run, machine = state.plan.runs[name], state.environments[name]
        used = sorted({count_devices(session) for session in (*machine.get("earlier", ()), machine)})
        flops, seconds = sum(run_flops(run, sizes[name]).values()) or math.nan, record.seconds * record.is_timed
        several = " and ".join(f"{count} × {device}" for device, count in used)
        place = "pretraining", *(used[0] if len(used) == 1 else (several, 0))
        spent[place].append(StageCost(1, run.steps, run.tokens, flops, seconds, not record.is_timed))
    for model in state.plan.models if state.scores else ():
        shape, _ = sizes[model.run]
        scores = sorted(state.scores[model.name].scores, key=lambda score: count_devices(score.machine))
        for devices, group in groupby(scores, key=lambda score: count_devices(score.machine)):
            for task, tuned in measure_trainings(group).items():
                flops = shape.flops.per_token * tuned.tokens if shape else math.nan
                place = f"fine-tuning and evaluation: {task}", *devices
                spent[place].append(StageCost(tuned.trainings, tuned.steps, tuned.tokens, flops, tuned.seconds, 0))
    rows = []
    for (stage, device, count), costs in spent.items():
        total = StageCost(*map(sum, zip(*costs, strict=True)))
        time = duration(total.seconds) if total.untimed < total.units else "not known"
        if 0 < total.untimed < total.units:
            time += f", without {show_count(total.untimed, 'run')} of unknown time"
        computed = "not known" if math.isnan(total.flops) else show_power(total.flops)
        hours, watts = total.seconds * count / 3600, WATTS.get(known_device(device) or "")
        energy = f"{hours * watts / 1000:.3g} at {watts} W" if watts and count else "not known"
        place_used, hours_used = (f"{count} × {device}", f"{hours:.3g}") if count else (device, "not known")
        columns = (stage, place_used, total.units, total.steps, f"{total.tokens:,.0f}", computed, time)
        rows.append(dict(zip(COST_COLUMNS, (*columns, hours_used, energy), strict=True)))
    return rows
