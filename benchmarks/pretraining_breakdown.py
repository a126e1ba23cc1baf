"""Where the time of our own update goes, by `torch.profiler`: an arm of `pretraining.py`."""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretraining_job import PretrainingJob, recipe_of


def run_breakdown(job: PretrainingJob) -> dict[str, Any]:
    """Shares of the CPU (or CUDA) time of `steps` updates by kind of work, batch making included."""
    from torch.profiler import ProfilerActivity, profile

    update, make_batch, device = open_update(job)
    for step in range(job.warmup_steps):
        update(make_batch(step), step)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    batch_seconds, started = 0.0, time.perf_counter()
    with profile(activities=activities) as profiled:
        for step in range(job.warmup_steps, job.num_steps):
            begun = time.perf_counter()
            batch = make_batch(step)
            batch_seconds += time.perf_counter() - begun
            update(batch, step)
    seconds = time.perf_counter() - started
    kinds, operators = sort_events(profiled.events(), cuda=device.type == "cuda")
    if device.type == "cpu":
        kinds["data (on a thread of its own in the loop)"] = batch_seconds
        kinds["python and the profiler"] = max(seconds - sum(kinds.values()), 0.0)
    total = sum(kinds.values())
    ranked = sorted(operators.items(), key=lambda item: -item[1])[:25]
    return {
        "seconds_per_step_profiled": seconds / job.steps,
        "shares": {name: value / total for name, value in sorted(kinds.items(), key=lambda item: -item[1])},
        "operators": {name: value / total for name, value in ranked},
    }


def open_update(job: PretrainingJob) -> tuple[Callable[..., Any], Callable[[int], Any], Any]:
    """The loop's own `update` and batches, without its records and checkpoints; scopes named for `sort_events`."""
    import biphase.pretraining.loop as loop
    from biphase.corpus.packing import open_text
    from biphase.corpus.shards import ShardSet
    from biphase.device import choose_device, choose_dtype, synchronize
    from biphase.distributed import World
    from biphase.encoder.packed import PackedModel, count_flops
    from biphase.pretraining.job import Job, State, load_network
    from biphase.pretraining.objectives import make_microbatches
    from biphase.pretraining.optimizer import decide_compile, make_optimizers, parallelize
    from biphase.pretraining.start import Start
    from biphase.run import Run

    recipe, shards = recipe_of(job), ShardSet(job.shards)
    device = choose_device(job.device)
    world = World(0, 1, device, choose_dtype("auto", device))
    mine = Job(recipe, Run(Path(os.devnull)), world, open_text(recipe.data), Start())
    batches, _ = loop.open_batches(mine)
    network = load_network(recipe, Start(), shards)
    compiles, compiling = decide_compile(recipe.compute, device, world.dtype, 0.0)
    if not compiles:
        for module in network.modules():
            if "Norm" in type(module).__name__:
                name_scope(module, "norm")
    flops = count_flops(network)
    model = parallelize(PackedModel(network), recipe.compute, world, compiles=compiles)
    model.train()
    state = State(model, make_optimizers(recipe.optimizer, model), 0, 0, 0, flops, compiling)

    def update(microbatches: Any, step: int) -> None:
        loop.update(mine, state, microbatches, step)
        synchronize(device)

    return update, lambda step: make_microbatches(mine, batches, recipe.curriculum[0], step), device


def name_scope(module: Any, name: str) -> None:
    """Have the profiler see a module's forward pass under `name`."""
    from torch.profiler import record_function

    open_scopes: list[Any] = []

    def enter(*_: Any) -> None:
        open_scopes.append(record_function(f"scope: {name}").__enter__())

    def leave(*_: Any) -> None:
        open_scopes.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


SCOPES = (
    ("head and loss", re.compile(r"ChunkedLoss")),
    ("attention", re.compile(r"bucket_attention|BucketAttention|varlen|flash_attn")),
    ("optimizer", re.compile(r"Optimizer\.step|zero_grad|_fused_adam|_foreach_norm|linalg_vector_norm|_foreach_mul_")),
    ("norm", re.compile(r"scope: norm")),
)
KINDS = (
    (
        "GEMM of the blocks",
        re.compile(r"aten::(mm|addmm|matmul|linear|_to_mkldnn|mkldnn)|mkl|gemm|cutlass|nvjet", re.I),
    ),
    ("compiled elementwise and norm", re.compile(r"cpp_fused|triton_|graph_\d|CompiledF|Torch-Compiled", re.I)),
    ("embedding", re.compile(r"embedding|index_select|index_add|index_put|aten::index", re.I)),
    ("gradient accumulation", re.compile(r"AccumulateGrad|aten::add_$")),
    ("elementwise", re.compile(r"^aten::|elementwise|reduce_kernel|vectorized", re.I)),
)


def sort_events(events: Any, *, cuda: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by kind of work and by operator. A backward operator belongs to the scope of its forward one."""
    owner_of: dict[int, str] = {}
    scope_of: dict[int, str | None] = {}

    def scope(event: Any) -> str | None:
        if id(event) not in scope_of:
            own = next((name for name, pattern in SCOPES if pattern.search(event.name)), None)
            scope_of[id(event)] = own or (scope(event.cpu_parent) if event.cpu_parent is not None else None)
        return scope_of[id(event)]

    on_cpu = [event for event in events if str(event.device_type).endswith("CPU")]
    for event in on_cpu:
        found = scope(event)
        if found and event.sequence_nr >= 0 and not event.name.startswith("autograd::"):
            owner_of.setdefault(event.sequence_nr, found)
    kinds: dict[str, float] = defaultdict(float)
    operators: dict[str, float] = defaultdict(float)
    for event in on_cpu:
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) * 1e-6
        found = scope(event)
        above = event
        while found is None and above is not None:
            if above.name.startswith("autograd::engine::evaluate_function"):
                found = owner_of.get(above.sequence_nr)
                break
            above = above.cpu_parent
        if found is None:
            found = next((name for name, pattern in KINDS if pattern.search(event.name)), "other")
        kinds[found] += seconds
        operators[f"{found}: {event.name}"] += seconds
    return dict(kinds), dict(operators)
