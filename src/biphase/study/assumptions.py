"""What an estimate rests on, in lines for people."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

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
        peak = f"{machine.peak_flops / 1e12:,.3g} TFLOP/s"
        yield f"{machine.name}: {peak}, {machine.efficiency:.0%} of them used, {machine.source}"
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


def show_gib(num_bytes: float) -> str:
    return f"{show_estimate(num_bytes / 2**30)} GiB"
