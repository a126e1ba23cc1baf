"""Pretraining speed and memory beside Hugging Face Trainer: same network, samples, masks' rate, precision, machine.

    python benchmarks/pretraining.py                              # CPU: tokens/s, where the time goes, peak memory
    python benchmarks/pretraining.py --device cuda                # an NVIDIA GPU: 210m and 610m, tokens/s and MFU

Every arm runs in a process of its own, the arms take turns, and that several times over; what counts is the median over
these rounds. benchmarks/README.md says what each arm is and how FLOPs are counted.

Letters: B samples of a batch, L its longest sample, T real tokens, N targets, V vocabulary.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

# torch, transformers and biphase are imported inside functions: an arm sets the allocator and its threads first.

HERE = Path(__file__).resolve().parent
DEVELOPER_TEXT = HERE.parent.parent / "shared" / "data" / "corpus" / "train-00.jsonl.zst"
BUNDLED_TEXT = HERE.parent / "src" / "biphase" / "bundled" / "corpus" / "train.jsonl.zst"

ARMS = {
    "trainer": "HF Trainer, padded, as shipped",
    "trainer-heap": "HF Trainer, padded, allocator keeps its heap",
    "trainer-heap-compile": "HF Trainer, padded, allocator keeps its heap, torch_compile=True",
    "trainer-heap-compile-sorted": "the same, with train_sampling_strategy=group_by_length",
    "biphase": "biphase loop as shipped (compute.compile=auto)",
    "biphase-eager": "biphase loop, compute.compile=off",
    "biphase-compile": "biphase loop, compute.compile=on",
}
CPU_ARMS = ["trainer", "trainer-heap", "trainer-heap-compile", "biphase", "biphase-compile"]
CUDA_ARMS = ["trainer", "trainer-heap-compile", "biphase-eager", "biphase"]
GIB = 2**30


@dataclass(frozen=True)
class Job:
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
    """Of biphase's forward pass; 0: as many as the Trainer's has real ones."""
    warmup_steps: int
    steps: int
    device: str
    seed: int = 0
    """Of the order of the samples: each round has its own."""
    memory_limit_gib: float = 0.0
    """Of private memory, after which the process ends with an error; 0: none."""

    @property
    def num_steps(self) -> int:
        return self.warmup_steps + self.steps


@dataclass
class Ledger:
    """What each forward pass held and when each step ended (by the clock, by the processor's time), in order."""

    ends: list[tuple[float, float]]
    passes: list[dict[str, float]]


# Both sides: the same recipe, samples and network


def recipe_of(job: Job) -> Any:
    """The recipe of both sides: MLM at 40 %, all [MASK], a constant rate, the paper's optimizer."""
    from biphase.config import Recipe
    from biphase.corpus.shards import ShardSet
    from biphase.pretraining.batches import make_samples

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
    samples = make_samples(Recipe.model_validate(tree), ShardSet.open(job.shards))
    real_tokens = max(job.context, round(job.batch_samples * samples.num_tokens / samples.num_samples))
    tree["batch_tokens"] = real_tokens * job.accumulate
    tree["compute"]["microbatch_tokens"] = max(job.context, job.microbatch_tokens or real_tokens)
    return Recipe.model_validate(tree)


def compile_setting(job: Job) -> str:
    return {"biphase-eager": "off", "biphase-compile": "on"}.get(job.arm, "auto")


def measured_peak(job: Job) -> tuple[Any, Any, float]:
    """Device, type of the arithmetic, FLOP/s of a large product with the threads of this process."""
    from biphase.device import choose_device, choose_dtype, peak_flops

    device = choose_device(job.device)
    dtype = choose_dtype("auto", device)
    return device, dtype, peak_flops(device, dtype)


def note_step(ledger: Ledger, device: Any) -> None:
    from biphase.device import synchronize

    synchronize(device)
    ledger.ends.append((time.perf_counter(), time.process_time()))


def summarize_steps(job: Job, ledger: Ledger, peak: float, device: Any) -> dict[str, Any]:
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


def run_biphase(job: Job) -> dict[str, Any]:
    """`train` itself, with a clock where it records a step and a scale where it forms a microbatch."""
    import biphase.pretraining.loop as loop
    from biphase.flops import FlopCount
    from biphase.pretraining.metrics import MetricsLog

    device, dtype, peak = measured_peak(job)
    ledger, recipe = Ledger([], []), recipe_of(job)
    record_step, count_batch = MetricsLog.record_step, FlopCount.batch

    def stamped(self: Any, *arguments: Any) -> None:
        note_step(ledger, device)
        record_step(self, *arguments)

    def weighed(self: Any, lengths_S: Any, num_targets: int, causal: bool) -> float:
        flops, tokens = count_batch(self, lengths_S, num_targets, causal), int(lengths_S.sum())
        ledger.passes.append(
            {"tokens": tokens, "slots": tokens, "targets": num_targets, "flops": flops, "executed_flops": flops}
        )
        return flops

    clock, scale = replaced(MetricsLog, "record_step", stamped), replaced(FlopCount, "batch", weighed)
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


# Hugging Face Trainer


class SampleList:
    """The samples of biphase as a data set of lists, as `run_mlm.py` makes them (with their special-token masks)."""

    def __init__(self, shards: Any, samples: Any, special_ids: tuple[int, ...]) -> None:
        self.shards, self.samples, self.special_ids = shards, samples, set(special_ids)

    def __len__(self) -> int:
        return self.samples.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        import numpy as np

        if index >= len(self):  # ends iteration, by which Trainer learns the lengths
            raise IndexError(index)
        start, stop = self.samples.spans(np.array([index]))
        ids = self.shards.read(int(start[0]), int(stop[0])).astype(np.int64).tolist()
        return {"input_ids": ids, "special_tokens_mask": [int(token in self.special_ids) for token in ids]}


def run_trainer(job: Job) -> dict[str, Any]:
    import torch
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

    from biphase.corpus.shards import ShardSet
    from biphase.encoder.packed import count_flops
    from biphase.pretraining.batches import make_samples
    from biphase.pretraining.start import Start, load_network

    device, dtype, peak = measured_peak(job)
    recipe, shards = recipe_of(job), ShardSet.open(job.shards)
    model = load_network(recipe, Start(), shards)
    model.config.use_cache = False
    attention = trainer_attention(device)
    model.set_attn_implementation(attention)
    flops, ledger = count_flops(model), Ledger([], [])
    collate = DataCollatorForLanguageModeling(
        shards.tokenizer(), mlm_probability=0.4, mask_replace_prob=1.0, random_replace_prob=0.0
    )

    def weighed(features: list[dict[str, Any]]) -> Any:
        batch = collate(features)
        lengths_B, (num, longest) = batch["attention_mask"].sum(1), batch["input_ids"].shape
        targets, slots = int((batch["labels"] != -100).sum()), num * longest
        pairs = num * longest**2
        ledger.passes.append(
            {
                "tokens": int(lengths_B.sum()),
                "slots": slots,
                "targets": targets,
                "flops": flops.batch(lengths_B.numpy(), targets, causal=False),
                "executed_flops": (flops.per_token + flops.per_target) * slots + flops.per_token_and_key * pairs,
            }
        )
        return batch

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            note_step(ledger, device)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=job.num_steps,
            per_device_train_batch_size=job.batch_samples,
            gradient_accumulation_steps=job.accumulate,
            learning_rate=recipe.schedule.peak_lr,
            lr_scheduler_type="constant",
            adam_beta1=recipe.optimizer.betas[0],
            adam_beta2=recipe.optimizer.betas[1],
            adam_epsilon=recipe.optimizer.eps,
            weight_decay=recipe.optimizer.weight_decay,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            bf16=dtype == torch.bfloat16,
            use_cpu=device.type == "cpu",
            torch_compile="compile" in job.arm,
            train_sampling_strategy="group_by_length" if "sorted" in job.arm else "random",
            seed=job.seed,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = SampleList(shards, make_samples(recipe, shards), shards.manifest.special_ids)
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=weighed, callbacks=[Clock()])
        trainer.train()
    ledger.passes = ledger.passes[: job.num_steps * job.accumulate]  # the loader reads one batch ahead
    return summarize_steps(job, ledger, peak, device) | {
        "per_device_train_batch_size": job.batch_samples,
        "gradient_accumulation_steps": job.accumulate,
        "dtype": str(dtype),
        "attention": attention,
        "optimizer": str(arguments.optim),
        "data_loader_workers": arguments.dataloader_num_workers,
    }


def trainer_attention(device: Any) -> str:
    """The fastest that is at hand: flash-attn (which drops the padding in attention) on CUDA, else SDPA."""
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"


# Where the time of our step goes


def run_breakdown(job: Job) -> dict[str, Any]:
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


def open_update(job: Job) -> tuple[Callable[..., Any], Callable[[int], Any], Any]:
    """The loop's own `update` and batches, without its records and checkpoints; scopes named for `sort_events`."""
    import biphase.pretraining.loop as loop
    from biphase.corpus.shards import ShardSet
    from biphase.device import choose_device, choose_dtype, synchronize
    from biphase.distributed import World
    from biphase.encoder.packed import PackedModel, count_flops
    from biphase.pretraining.batches import open_loader
    from biphase.pretraining.job import Job
    from biphase.pretraining.optimizer import make_optimizers
    from biphase.pretraining.parallel import parallelize, should_compile
    from biphase.pretraining.start import Start, load_network
    from biphase.pretraining.state import TrainState
    from biphase.run import Run

    recipe, shards = recipe_of(job), ShardSet.open(job.shards)
    device = choose_device(job.device)
    world, dtype = World(0, 1, device), choose_dtype("auto", device)
    source = open_loader(recipe, shards, world, dtype, 0)
    network = load_network(recipe, Start(), shards)
    if not should_compile(recipe.compute, device, dtype, 0.0):
        for module in network.modules():
            if "Norm" in type(module).__name__:
                name_scope(module, "norm")
    flops = count_flops(network)
    model = parallelize(PackedModel(network), recipe.compute, dtype, world, work=0.0)
    model.train()
    optimizers = make_optimizers(recipe.optimizer, model)
    mine = Job(recipe, Run(Path(os.devnull)), world, dtype, shards, Start())
    state = TrainState(model, optimizers, flops)

    def update(microbatches: Any, step: int) -> None:
        loop.update(state, microbatches, step, mine)
        synchronize(device)

    return update, lambda step: source.microbatches(recipe.curriculum[0], step), device


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
    ("attention", re.compile(r"bucket_attention|varlen|flash_attn")),
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


# One process per arm


def work(job: Job) -> dict[str, Any]:
    """Run a job in this process."""
    if job.memory_limit_gib:
        limit = int(job.memory_limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from biphase.machine import keep_heap

    is_ours = job.arm.startswith("biphase")
    if is_ours or "heap" in job.arm:
        keep_heap()
    if job.kind == "breakdown":
        return run_breakdown(job)
    return run_biphase(job) if is_ours else run_trainer(job)


def run_apart(job: Job, threads: int) -> dict[str, Any]:
    """Run a job in a process of its own. A failed one gives {"error": its last line}; the other arms go on."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, __file__, "--job", json.dumps(asdict(job)), "--answer", answer.name]
        begun = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return {
                "error": lines[-1] if lines else f"ended by signal {-done.returncode}",
                "returncode": done.returncode,
            }
        return json.loads(answer.read()) | {"process_seconds": time.perf_counter() - begun}


# What is measured


def find_text(given: list[str]) -> tuple[list[str], str]:
    """Sources of text, and where they come from in words."""
    if given:
        return given, "given on the command line"
    if DEVELOPER_TEXT.exists():
        return [str(DEVELOPER_TEXT)], "the developers' corpus (train-00), not part of the repository"
    return [str(BUNDLED_TEXT)], "the text bundled with biphase"


def prepare_shards(sources: list[str], vocab_size: int, folder: Path) -> Path:
    """A tokenizer of `vocab_size` trained on the sources, and their shards; made once."""
    from biphase.corpus.prepare import prepare
    from biphase.corpus.text import find_sources, sample_texts
    from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer
    from biphase.files import content_hash

    found = find_sources(sources)
    place = folder / f"{content_hash([source.fingerprint for source in found])[:8]}-{vocab_size}"
    if not (place / "tokenizer").exists():
        save_tokenizer(train_tokenizer(sample_texts(found, "text", "file", 30.0), vocab_size), place / "tokenizer")
    prepare(sources, place / "tokenizer", place / "shards", validation_fraction=0.0)
    return place / "shards"


def measure_speed(jobs: dict[str, Job], options: argparse.Namespace) -> dict[str, Any]:
    """All arms of one setting, taking turns: medians, and ratios within each round."""
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        rounds.append({})
        for arm, job in jobs.items():
            found = rounds[-1][arm] = run_apart(replace(job, seed=number), options.threads)
            rate = f"{found['tokens_per_second']:,.0f} tokens/s" if "error" not in found else found["error"]
            say(f"  round {number + 1}/{options.rounds} {arm}: {rate}")
    return summarize_rounds(rounds)


def summarize_rounds(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds. The peak is the highest that any process measured: another load can only lower it."""
    peak = max((found["peak_flops"] for each in rounds for found in each.values() if "error" not in found), default=0.0)
    arms: dict[str, Any] = {}
    for arm in rounds[0]:
        whole = [each[arm] for each in rounds if "error" not in each[arm]]
        if not whole:
            arms[arm] = {"what": ARMS[arm], "error": rounds[0][arm]["error"]}
            continue
        medians = {
            key: statistics.median(found[key] for found in whole)
            for key, value in whole[0].items()
            if isinstance(value, float)
        }
        rates = [found["tokens_per_second"] for found in whole]
        arms[arm] = {"what": ARMS[arm], "rounds": len(whole), "tokens_per_second_range": [min(rates), max(rates)]}
        arms[arm] |= medians | {
            "useful_share_of_peak": medians["useful_flops_per_second"] / peak,
            "executed_share_of_peak": medians["executed_flops_per_second"] / peak,
        }
    ratios = {
        f"{ours} / {theirs}": compared
        for ours in arms
        for theirs in arms
        if ours.startswith("biphase") and theirs.startswith("trainer")
        for compared in [compare([(each[ours], each[theirs]) for each in rounds])]
        if compared
    }
    return {"peak_flops": peak, "arms": arms, "ratios": ratios, "rounds": rounds}


def compare(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Ours over theirs within each round; `by_arithmetic`: what equal FLOP/s on both sides would give."""
    whole = [(ours, theirs) for ours, theirs in pairs if "error" not in ours and "error" not in theirs]
    if not whole:
        return {}
    ratios = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in whole]
    by_cpu = [ours["tokens_per_cpu_second"] / theirs["tokens_per_cpu_second"] for ours, theirs in whole]
    work = [theirs["executed_flops_per_token"] / ours["executed_flops_per_token"] for ours, theirs in whole]
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "median_by_cpu_seconds": statistics.median(by_cpu),
        "by_arithmetic": statistics.median(work),
    }


def measure_memory(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of two steps with a large vocabulary, each side as shipped, on as many samples."""
    samples = max(1, options.memory_tokens // job.context)
    base = replace(
        job, kind="memory", model_vocab=128_256, batch_samples=samples, accumulate=1, warmup_steps=1, steps=1
    )
    found: dict[str, Any] = {"vocabulary": base.model_vocab, "samples": samples, "context": base.context}
    limit = 0.0 if job.device == "cuda" else options.memory_limit
    for arm in ("biphase-eager", "trainer"):
        result = run_apart(replace(base, arm=arm, memory_limit_gib=limit), options.threads)
        kept = ("peak_memory_gib", "tokens_per_second", "error")
        found[arm] = {key: result[key] for key in kept if key in result}
        if "steps" in result:
            found[arm] |= {key: result["steps"][0][key] for key in ("tokens", "slots", "targets")}
        say(f"  memory {arm}: {found[arm]}")
    return found


def describe(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    from biphase.device import choose_device, describe_machine

    device = choose_device(options.device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return describe_machine(device) | {
        "threads": options.threads,
        "cores": num_cores(),
        "memory_gib": round(memory, 1),
        "load_before": os.getloadavg()[0],
        "accelerate": version("accelerate"),
        "commit": git_commit(),
    }


def git_commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_table(results: list[dict[str, Any]], memory: dict[str, Any] | None) -> None:
    for result in results:
        setting = f"vocabulary {result['vocabulary']:,}, context {result['context']}, {result['packing']}"
        print(f"\n{result['preset']}, {setting}")
        print(f"  {'arm':<28} {'tokens/s':>9} {'min–max':>15} {'useful/peak':>11} {'padding':>8} {'GiB':>6}")
        for arm, found in result["arms"].items():
            if "error" in found:
                print(f"  {arm:<28} {found['error'][:90]}")
                continue
            low, high = found["tokens_per_second_range"]
            print(
                f"  {arm:<28} {found['tokens_per_second']:>9,.0f} {f'{low:,.0f}–{high:,.0f}':>15} "
                f"{found['useful_share_of_peak']:>11.1%} {found['padding_share']:>8.1%} "
                f"{found['peak_memory_gib']:>6.2f}"
            )
        for name, ratio in result["ratios"].items():
            spread = f"({ratio['min']:.2f}–{ratio['max']:.2f})"
            print(f"  {name}: {ratio['median']:.2f}× {spread}; at equal FLOP/s: {ratio['by_arithmetic']:.2f}×")
        for arm, found in result.get("breakdown", {}).items():
            shares = ", ".join(
                f"{name} {share:.0%}" for name, share in found.get("shares", {}).items() if share >= 0.005
            )
            print(f"  where the time of {arm} goes: {shares or found.get('error')}")
    if memory:
        print(f"\npeak memory with a vocabulary of {memory['vocabulary']:,}:")
        for arm in ("biphase-eager", "trainer"):
            found = memory[arm]
            told = (
                f"{found['peak_memory_gib']:.2f} GiB, {found['tokens']} tokens" if "tokens" in found else found["error"]
            )
            print(f"  {arm:<28} {told}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="*", default=[], help="sources, as for `biphase prepare`")
    parser.add_argument("--work", type=Path, help="where tokenizers and shards are kept (~/.cache/biphase-benchmarks)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--presets", nargs="+", help="sizes of the network (CPU: 11m; CUDA: 210m 610m)")
    parser.add_argument("--vocab", type=int, nargs="+", help="tokenizers (CPU: 8192 32768; CUDA: 32768)")
    parser.add_argument("--model-vocab", type=int, help="rows of the head (CPU: the tokenizer's; CUDA: 128256)")
    parser.add_argument("--context", type=int, help="most tokens of a sample (CPU: 512; CUDA: 2048)")
    parser.add_argument("--packing", nargs="+", choices=("documents", "stream"), default=["documents"])
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, help=f"CPU: {' '.join(CPU_ARMS)}; CUDA: {' '.join(CUDA_ARMS)}"
    )
    parser.add_argument("--batch-samples", type=int, help="samples of a forward pass of the Trainer (CPU: 16; CUDA: 8)")
    parser.add_argument(
        "--microbatch-tokens", type=int, default=0, help="of biphase (as many real ones as the Trainer)"
    )
    parser.add_argument("--accumulate", type=int, help="forward passes per update (CPU: 1; CUDA: 8)")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--warmup-steps", type=int, help="dropped: compilation, the allocator's growth (CPU: 2; CUDA: 8)"
    )
    parser.add_argument("--steps", type=int, help="measured ones (CPU: 4; CUDA: 20)")
    parser.add_argument("--memory-tokens", type=int, default=4096, help="of the memory measurement; 0: leave it out")
    parser.add_argument("--memory-limit", type=float, default=16.0, help="GiB after which one of its processes ends")
    parser.add_argument("--no-breakdown", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    """What was not given, for the device that is there."""
    from biphase.device import choose_device

    options.device = choose_device(options.device).type
    on_cuda = options.device == "cuda"
    defaults = {
        "presets": (["11m"], ["210m", "610m"]),
        "vocab": ([8192, 32768], [32768]),
        "model_vocab": (0, 128_256),
        "context": (512, 2048),
        "arms": (CPU_ARMS, CUDA_ARMS),
        "batch_samples": (16, 8),
        "accumulate": (1, 8),
        "warmup_steps": (2, 8),
        "steps": (4, 20),
    }
    for name, (cpu, cuda) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, cuda if on_cuda else cpu)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    options.work = options.work or cache / "biphase-benchmarks"
    if options.out is None:
        machine = re.sub(
            r"[^a-z0-9]+", "-", str(describe(options)["device" if on_cuda else "processor"]).lower()
        ).strip("-")
        name = f"{date.today().isoformat()}-pretraining-{machine}-{options.threads}-threads.json"
        options.out = HERE / "results" / name
    return options


def main() -> None:
    options = parse_options()
    if options.job:
        options.answer.write_text(json.dumps(work(Job(**json.loads(options.job)))))
        return
    from biphase.files import write_json

    options = with_defaults(options)
    started = time.perf_counter()
    machine = describe(options)
    sources, origin = find_text(options.text)
    say(f"text: {', '.join(sources)} ({origin})")
    results = []
    for vocab_size in options.vocab:
        shards = prepare_shards(sources, vocab_size, options.work)
        for preset in options.presets:
            for packing in options.packing:
                results.append(measure_setting(options, shards, preset, vocab_size, packing))
    memory = None
    if options.memory_tokens:
        memory = measure_memory(job_of(options, shards, options.presets[0], vocab_size, options.packing[0]), options)
    document = {
        "what": "pretraining, real tokens per second (padding not counted), biphase and Hugging Face Trainer",
        "date": date.today().isoformat(),
        "machine": machine | {"load_after": os.getloadavg()[0]},
        "text": {"sources": sources, "origin": origin},
        "options": {key: value for key, value in vars(options).items() if key not in ("work", "out", "job", "answer")},
        "minutes": (time.perf_counter() - started) / 60,
        "results": results,
        "memory": memory,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, document)
    print_table(results, memory)
    print(f"\nwritten to {options.out}")


def measure_setting(
    options: argparse.Namespace, shards: Path, preset: str, vocab_size: int, packing: str
) -> dict[str, Any]:
    say(f"{preset}, vocabulary {vocab_size:,}, {packing}")
    job = job_of(options, shards, preset, vocab_size, packing)
    result: dict[str, Any] = {
        "preset": preset,
        "vocabulary": job.model_vocab,
        "tokenizer_vocabulary": vocab_size,
        "context": job.context,
        "packing": packing,
        "objective": "mlm, 40 % of the tokens, always the mask token",
    }
    jobs = {arm: replace(job, arm=arm, warmup_steps=job.warmup_steps + ("compile" in arm)) for arm in options.arms}
    result |= measure_speed(jobs, options)
    if not options.no_breakdown:
        result["breakdown"] = {
            arm: run_apart(replace(job, kind="breakdown", arm=arm, steps=min(job.steps, 3)), options.threads)
            for arm in options.arms
            if arm.startswith("biphase")
        }
    return result


def job_of(options: argparse.Namespace, shards: Path, preset: str, vocab_size: int, packing: str) -> Job:
    return Job(
        kind="speed",
        arm=options.arms[0],
        shards=str(shards),
        preset=preset,
        model_vocab=options.model_vocab or vocab_size,
        context=options.context,
        packing=packing,
        batch_samples=options.batch_samples,
        accumulate=options.accumulate,
        microbatch_tokens=options.microbatch_tokens,
        warmup_steps=options.warmup_steps,
        steps=options.steps,
        device=options.device,
    )


if __name__ == "__main__":
    main()
