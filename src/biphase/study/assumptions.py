"""What an estimate rests on, in lines for people."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import Any

from biphase.encoder.presets import PRESETS, shape_of
from biphase.flops import Shape
from biphase.machine import has_bf16_cores, total_memory
from biphase.memory import BFLOAT16, FLOAT32, TrainingMemory, plan_memory
from biphase.recipe import Recipe
from biphase.report.formats import show_estimate, show_list
from biphase.study.devices import Machine
from biphase.study.plan import Plan, count_embedded
from biphase.study.sizes import Sizes
from biphase.tasks.spec import TaskSize, find_task


def list_assumptions(plan: Plan, sizes: Sizes, tasks: Mapping[str, TaskSize], machine: Machine | None) -> Iterator[str]:
    for text in dict.fromkeys(sizes.texts.values()):
        yield f"samples of {text.mean_tokens:,.0f} tokens, a token meets {text.mean_keys:,.0f} ({text.source})"
    if machine:
        yield f"{machine.name}: {machine.speed}"
    if plan.cells:
        yield f"fine-tuning: {tell_sizes(tasks)}, at the same efficiency"
        evaluation = plan.study.evaluation
        if evaluation is not None and evaluation.embed is not None and count_embedded(evaluation.embed) is None:
            yield "embedding: 1,000 updates a stage, for want of its max_steps, or limit of its sources"
    yield from dict.fromkeys(list_memory(plan, sizes, machine))


def tell_sizes(tasks: Mapping[str, TaskSize]) -> str:
    """Which tasks say how large they are."""
    told = {find_task(name).name: find_task(name).size is not None for name in tasks}
    says = {True: "rounded sizes of the published data of {}", False: "typical sizes, guessed, of {}"}
    lines = (
        words.format(show_list([name for name in told if told[name] is has_size]))
        for has_size, words in says.items()
        if has_size in told.values()
    )
    return "; ".join(lines) or "the sizes of typical data"


def list_memory(plan: Plan, sizes: Sizes, machine: Machine | None) -> Iterator[str]:
    """For each network and way to train it, the memory that it needs, at most: on a CPU, or on a GPU alone, and as one
    of 8 and of 64."""
    is_on_cpu = machine is not None and machine.name == "CPU"
    for run in plan.runs.values():
        shape = sizes.shapes[run.name]
        if shape is not None:
            told = tell_cpu_memory(shape, run.recipe) if is_on_cpu else tell_gpu_memory(shape, run.recipe)
            yield f"{run.model}: {told} (microbatches of {run.recipe.compute.microbatch_tokens:,} tokens)"


def tell_cpu_memory(shape: Shape, recipe: Recipe) -> str:
    precision = recipe.compute.precision
    is_bf16 = precision == "bf16" or (precision == "auto" and has_bf16_cores())
    needed = memory_of(shape, recipe, 1, number=BFLOAT16 if is_bf16 else FLOAT32, device="cpu").total
    told, here = f"at most {show_gib(needed)} of memory in each process on a CPU, Python's own aside", total_memory()
    return f"{told}, which is more than the {show_gib(here)} of this machine" if 0 < here < needed else told


def tell_gpu_memory(shape: Shape, recipe: Recipe) -> str:
    told = f"at most {show_gib(memory_of(shape, recipe, 1).total)} on one GPU"
    told += f", {show_gib(memory_of(shape, recipe, 8, parallel='ddp').total)} on each of 8 under DDP"
    if recipe.optimizer.name == "muon":  # which needs whole matrices
        return told
    eight, many = (show_gib(memory_of(shape, recipe, devices).total) for devices in (8, 64))
    return f"{told}, {eight} on each of 8 and {many} of 64 under FSDP"


def memory_of(shape: Shape, recipe: Recipe, devices: int, **way: Any) -> TrainingMemory:
    """What a device needs when a recipe's largest batch is shared out."""
    batch, each = recipe.batch_tokens, recipe.compute.microbatch_tokens
    most_tokens = batch if isinstance(batch, int) else max(batch.start, batch.to)
    return plan_memory(
        shape,
        devices,
        microbatch_tokens=each,
        num_microbatches=math.ceil(most_tokens / (devices * each)),
        recomputes=recipe.compute.activation_checkpointing,
        muon=recipe.optimizer.name == "muon",
        **way,
    )


FULL = 0.9
"""The share of a device's memory that a plan may fill: the rest is for what is not counted."""


def fits(shape: Shape, recipe: Recipe, machine: Machine, devices: int = 1) -> bool:
    """Whether a recipe's training fits into the memory of each of so many devices, as far as that is known."""
    on_cpu = machine.name == "CPU"
    number = FLOAT32 if on_cpu and not has_bf16_cores() else BFLOAT16
    where: Any = "cpu" if on_cpu else "cuda"
    needed = memory_of(shape, recipe, devices, parallel=recipe.compute.parallel, number=number, device=where)
    return not machine.memory or needed.total <= FULL * machine.memory


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


def list_misfits(plan: Plan, sizes: Sizes, machine: Machine | None) -> Iterator[str]:
    """The networks that do not fit into one of a machine's GPUs as the study trains them, and what would help."""
    for run in plan.runs.values():
        shape, recipe = sizes.shapes[run.name], run.recipe
        if machine is not None and machine.name != "CPU" and shape is not None and not fits(shape, recipe, machine):
            yield tell_misfit(run.model, shape, recipe, machine)


def tell_misfit(model: str, shape: Shape, recipe: Recipe, machine: Machine) -> str:
    """What one GPU lacks, and the changes with which it or several are enough."""
    recomputing = recipe.compute.model_copy(update={"activation_checkpointing": True})
    saving = recipe.model_copy(update={"compute": recomputing})
    tried = [(1, recipe), (1, saving), *((devices, saving) for devices in (2, 4, 8))]
    ways: dict[str, str] = {}
    for devices, start in tried:
        fitted = fit_memory(shape, start, replace(machine, devices=devices))
        if fitted is not None:
            compute, over = fitted.compute, f" on {devices} of them" if fitted.compute.parallel == "fsdp" else ""
            changed = {key: value for key, value in compute if value != getattr(recipe.compute, key)}
            ways.setdefault(compute.parallel + str(compute.activation_checkpointing), write_changes(changed) + over)
    smaller = (name for name in PRESETS if fits(shape_of(name, {}, shape.vocab_size), recipe, machine))
    ways |= {name: f"preset {name}, the largest that fits as the study has it" for name in islice(smaller, 1)}
    needed = show_gib(memory_of(shape, recipe, 1).total)
    told = f"{model} does not fit into the {show_gib(machine.memory)} of one {machine.name} (up to {needed} are needed)"
    return f"{told}; what fits: {', or '.join(ways.values())}" if ways else told


def write_changes(changed: dict[str, Any]) -> str:
    """`compute.microbatch_tokens=2048 compute.parallel=fsdp`."""
    return " ".join(f"compute.{key}={str(value).lower()}" for key, value in changed.items())


def show_gib(num_bytes: float) -> str:
    return f"{show_estimate(num_bytes / 2**30)} GiB"
