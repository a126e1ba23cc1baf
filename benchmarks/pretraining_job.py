"""One arm of `pretraining.py` in one process: the job, the recipe and the clock that both sides share, and our side.

Letters: T real tokens, N targets.
"""

import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import GIB

# torch, transformers and biphase are imported inside functions: an arm sets the allocator and its threads first.


@dataclass(frozen=True)
class PretrainingJob:
    """One arm in one process. Paths are strings so that the job travels as JSON."""

    kind: str
    """`speed`, `breakdown` or `memory`."""
    arm: str
    shards: str
    preset: str
    model_vocab: int
    context: int
    packing: str
    batch_samples: int
    """Samples of a forward pass of the Trainer; biphase takes as many tokens as these have on average."""
    accumulate: int
    microbatch_tokens: int
    """How many biphase's forward pass takes, and as many times `accumulate` an update; 0: as many as the Trainer's has
    real ones."""
    warmup_steps: int
    steps: int
    device: str
    seed: int = 0
    """The seed of the order of the samples: each round has its own."""
    memory_limit_gib: float = 0.0
    """Private memory after which the process ends with an error; 0: no limit."""

    @property
    def num_steps(self) -> int:
        return self.warmup_steps + self.steps


@dataclass
class Ledger:
    """What each forward pass held and when each step ended (by the clock, by the processor's time), in order."""

    ends: list[tuple[float, float]]
    passes: list[dict[str, float]]


# Both sides: the same recipe, samples and network


def recipe_of(job: PretrainingJob) -> Any:
    """The recipe of both sides: MLM at 40 %, all [MASK], a constant rate, the paper's optimizer."""
    from biphase.corpus.packing import make_samples
    from biphase.corpus.shards import ShardSet
    from biphase.recipe import Recipe

    tree: dict[str, Any] = {
        "name": "bench",
        "init": {"preset": job.preset, "architecture": {"vocab_size": job.model_vocab}},
        "data": {
            "shards": job.shards,
            "max_sample_tokens": job.context,
            "packing": job.packing,
            "order_seed": job.seed,
        },
        "curriculum": [{"objective": "mlm", "steps": job.num_steps, "mask_probability": 0.4}],
        "schedule": {"warmup_steps": 0, "decay_steps": 0},
        "validation": {"every_steps": 0},
        "checkpoints": {"every_steps": 0},
        "compute": {"compile": compile_setting(job), "device": job.device},
    }
    samples = make_samples(Recipe.model_validate(tree).data, ShardSet(job.shards))
    real_tokens = max(job.context, round(job.batch_samples * samples.num_tokens / samples.num_samples))
    tree["compute"]["microbatch_tokens"] = max(job.context, job.microbatch_tokens or real_tokens)
    tree["batch_tokens"] = tree["compute"]["microbatch_tokens"] * job.accumulate
    return Recipe.model_validate(tree)


def compile_setting(job: PretrainingJob) -> str:
    return {"biphase-eager": "off", "biphase-compile": "on"}.get(job.arm, "auto")


def measured_peak(job: PretrainingJob) -> tuple[Any, Any, float]:
    """Device, type of the arithmetic, FLOP/s of a large product with the threads of this process."""
    from biphase.device import choose_device, choose_dtype, peak_flops

    device = choose_device(job.device)
    dtype = choose_dtype("auto", device)
    return device, dtype, peak_flops(device, dtype)


def note_step(ledger: Ledger, device: Any) -> None:
    from biphase.device import synchronize

    synchronize(device)
    ledger.ends.append((time.perf_counter(), time.process_time()))


def summarize_steps(job: PretrainingJob, ledger: Ledger, peak: float, device: Any) -> dict[str, Any]:
    """The steps after the warm-up. A step's time runs from the end of the one before it: data is included."""
    per_step = len(ledger.passes) // len(ledger.ends)
    steps: list[dict[str, float]] = []
    for i in range(job.warmup_steps, len(ledger.ends)):
        passes = ledger.passes[i * per_step : (i + 1) * per_step]
        (began, cpu_began), (ended, cpu_ended) = ledger.ends[i - 1], ledger.ends[i]
        total = {key: sum(each[key] for each in passes) for key in passes[0]}
        steps.append(total | {"seconds": ended - began, "cpu_seconds": cpu_ended - cpu_began})
    whole = {key: sum(step[key] for step in steps) for key in steps[0]}
    return {
        "tokens_per_second": whole["tokens"] / whole["seconds"],
        "tokens_per_cpu_second": whole["tokens"] / whole["cpu_seconds"],
        "useful_flops_per_second": whole["flops"] / whole["seconds"],
        "executed_flops_per_second": whole["executed_flops"] / whole["seconds"],
        "useful_flops_per_token": whole["flops"] / whole["tokens"],
        "executed_flops_per_token": whole["executed_flops"] / whole["tokens"],
        "peak_flops": peak,
        "padding_share": 1 - whole["tokens"] / whole["slots"],
        "peak_memory_gib": peak_memory(device),
        "passes_per_step": per_step,
        "steps": steps,
    }


def peak_memory(device: Any) -> float:
    """GiB: the most that was resident in this process, or allocated on its GPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


# biphase


def run_biphase(job: PretrainingJob) -> dict[str, Any]:
    """`train` itself, with a clock where it records a step and a scale where it forms a microbatch."""
    import biphase.pretraining.loop as loop
    from biphase.flops import FlopCount

    device, dtype, peak = measured_peak(job)
    ledger, recipe = Ledger([], []), recipe_of(job)
    record_step, count_batch = loop.MetricsLog.record_step, FlopCount.batch

    def stamped(self: Any, *arguments: Any) -> None:
        note_step(ledger, device)
        record_step(self, *arguments)

    def weighed(self: Any, lengths_S: Any, num_targets: int, causal: bool) -> float:
        flops, tokens = count_batch(self, lengths_S, num_targets, causal), int(lengths_S.sum())
        ledger.passes.append(
            {"tokens": tokens, "slots": tokens, "targets": num_targets, "flops": flops, "executed_flops": flops}
        )
        return flops

    clock, scale = replaced(loop.MetricsLog, "record_step", stamped), replaced(FlopCount, "batch", weighed)
    with clock, scale, tempfile.TemporaryDirectory() as runs:
        loop.train(recipe, Path(runs))
    return summarize_steps(job, ledger, peak, device) | {
        "batch_tokens": recipe.batch_tokens,
        "microbatch_tokens": recipe.compute.microbatch_tokens,
        "dtype": str(dtype),
        "attention": "varlen" if device.type == "cuda" else "buckets",
    }


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
