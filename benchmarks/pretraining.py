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
import resource
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import (
    BUNDLED_TEXT,
    GIB,
    HERE,
    Found,
    describe_setup,
    error_of,
    make_document,
    medians_of,
    result_path,
    run_job,
    save,
    say,
    summarize_ratios,
    take_turns,
    whole_pairs,
)
from pretraining_job import PretrainingJob, run_biphase

DEVELOPER_TEXT = HERE.parent.parent / "shared" / "data" / "corpus" / "train-00.jsonl.zst"

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
    from biphase.corpus.text import find_text_sources, sample_texts
    from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer
    from biphase.files import content_hash

    found = find_text_sources(sources)
    place = folder / f"{content_hash([source.fingerprint for source in found])[:8]}-{vocab_size}"
    if not (place / "tokenizer").exists():
        save_tokenizer(train_tokenizer(sample_texts(found, "text", "file", 30.0), vocab_size), place / "tokenizer")
    prepare(sources, place / "tokenizer", place / "shards", validation_fraction=0.0)
    return place / "shards"


def run_apart(job: PretrainingJob, threads: int) -> Found:
    """Run a job in a process of its own. A failed one gives {"error": its last line}; the other arms go on."""
    begun = time.perf_counter()
    try:
        found = run_job(__file__, job, threads, {"TOKENIZERS_PARALLELISM": "false"})
    except subprocess.CalledProcessError as failed:
        return error_of(failed) | {"returncode": failed.returncode}
    return found | {"process_seconds": time.perf_counter() - begun}


def measure_speed(jobs: dict[str, PretrainingJob], options: argparse.Namespace) -> dict[str, Any]:
    """All arms of one setting, taking turns: medians, and ratios within each round."""
    rounds = take_turns(
        list(jobs),
        options.rounds,
        lambda arm, number: run_apart(replace(jobs[arm], seed=number), options.threads),
        lambda found: f"{found['tokens_per_second']:,.0f} tokens/s",
    )
    peak = 0.0  # the highest that any process measured: another load can only lower it
    for each in rounds:
        peak = max([peak, *(found["peak_flops"] for found in each.values() if "error" not in found)])
    arms = {arm: summarize_arm(arm, [each[arm] for each in rounds], peak) for arm in jobs}
    ratios: dict[str, dict[str, float]] = {}
    for ours in (arm for arm in arms if arm.startswith("biphase")):
        for theirs in (arm for arm in arms if arm.startswith("trainer")):
            if pairs := whole_pairs(rounds, ours, theirs):
                ratios[f"{ours} / {theirs}"] = compare(pairs)
    return {"peak_flops": peak, "arms": arms, "ratios": ratios, "rounds": rounds}


def summarize_arm(arm: str, rounds: list[Found], peak: float) -> dict[str, Any]:
    """Medians over the rounds that did not fail."""
    whole = [found for found in rounds if "error" not in found]
    if not whole:
        return {"what": ARMS[arm], "error": rounds[0]["error"]}
    medians = medians_of(whole, [key for key, value in whole[0].items() if isinstance(value, float)])
    rates = [found["tokens_per_second"] for found in whole]
    return {
        "what": ARMS[arm],
        "rounds": len(whole),
        "tokens_per_second_range": [min(rates), max(rates)],
        **medians,
        "useful_share_of_peak": medians["useful_flops_per_second"] / peak,
        "executed_share_of_peak": medians["executed_flops_per_second"] / peak,
    }


def compare(pairs: list[tuple[Found, Found]]) -> dict[str, float]:
    """Ours over theirs within each round; `by_arithmetic`: what equal FLOP/s on both sides would give."""
    rates = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in pairs]
    by_cpu = [ours["tokens_per_cpu_second"] / theirs["tokens_per_cpu_second"] for ours, theirs in pairs]
    flops = [theirs["executed_flops_per_token"] / ours["executed_flops_per_token"] for ours, theirs in pairs]
    return summarize_ratios(rates, by_cpu) | {"by_arithmetic": statistics.median(flops)}


def measure_memory(job: PretrainingJob, options: argparse.Namespace) -> dict[str, Any]:
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


def work(job: PretrainingJob) -> Found:
    """Run a job in this process, whose imports follow the allocator's setting."""
    if job.memory_limit_gib:
        limit = int(job.memory_limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from biphase.machine import keep_heap

    is_ours = job.arm.startswith("biphase")
    if is_ours or "heap" in job.arm:
        keep_heap()
    if job.kind == "breakdown":
        from pretraining_breakdown import run_breakdown

        return run_breakdown(job)
    if is_ours:
        return run_biphase(job)
    from peers.trainer_pretraining import run_trainer

    return run_trainer(job)


def parse_options() -> argparse.Namespace:
    from biphase.machine import num_cores

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
        setup = describe_setup(options.device, options.threads)
        options.out = result_path("pretraining", setup["device" if on_cuda else "processor"], options.threads)
    return options


def main() -> None:
    options = parse_options()
    if options.job:
        options.answer.write_text(json.dumps(work(PretrainingJob(**json.loads(options.job)))))
        return
    options = with_defaults(options)
    started = time.perf_counter()
    machine = describe_setup(options.device, options.threads)
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
    what = "pretraining, real tokens per second (padding not counted), biphase and Hugging Face Trainer"
    shown = {key: value for key, value in vars(options).items() if key not in ("work", "out", "job", "answer")}
    document = make_document(what, machine, shown, time.perf_counter() - started)
    document |= {
        "text": {"sources": [Path(name).name for name in sources], "origin": origin},
        "results": results,
        "memory": memory,
    }
    save(options.out, document)
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


def job_of(options: argparse.Namespace, shards: Path, preset: str, vocab_size: int, packing: str) -> PretrainingJob:
    return PretrainingJob(
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
