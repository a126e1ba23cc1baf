"""How fast `biphase prepare` is beside `tokenizers` itself, on the same text and the same cores.

The yardstick is `encode_batch_fast` in one process on all cores, over texts that are already in memory, in batches of
two million characters: no reading, no writing, no ids taken out. `prepare` reads compressed files, tokenizes, hashes
and writes shards. Both run in turn, in processes of their own; the medians count. CPU seconds are given too, because
the wall clock of a shared machine is not only ours.

    python benchmarks/tokenization.py ../shared/data/corpus --tokenizer ../shared/data/tokenizer_llama3/tokenizer.model
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

BATCH_CHARS = 2_000_000
RESULTS = Path(__file__).parent / "results"


def run_tokenizers(sources: list[str], tokenizer: str, out: Path) -> dict[str, float]:
    """Seconds for encoding alone; reading the texts comes before the clock starts."""
    from tokenizers import Tokenizer

    from biphase.corpus.text import find_sources, read_documents

    texts = [document.text for source in find_sources(sources) for document in read_documents(source)]
    backend = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    backend.encode_batch_fast(texts[:100], add_special_tokens=False)
    wall, cpu = time.perf_counter(), time.process_time()
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= BATCH_CHARS:
            backend.encode_batch_fast(batch, add_special_tokens=False)
            batch, held = [], 0
    backend.encode_batch_fast(batch, add_special_tokens=False)
    seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return seconds | {"text_mb": sum(len(text.encode()) for text in texts) / 1e6}


def run_prepare(sources: list[str], tokenizer: str, out: Path) -> dict[str, float]:
    """Seconds for the whole of `prepare`: workers started, files read, shards and manifest written."""
    import transformers  # noqa: F401  its import is the command line's cost, not the tokenization's

    from biphase.corpus.prepare import prepare

    wall, cpu = time.perf_counter(), _cpu_seconds()
    manifest = prepare(sources, tokenizer, out, validation_fraction=0.01)
    seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": _cpu_seconds() - cpu}
    total = manifest.splits.values()
    return seconds | {"text_mb": sum(s.text_bytes for s in total) / 1e6, "tokens": sum(s.tokens for s in total)}


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


WAYS = {"tokenizers": run_tokenizers, "biphase": run_prepare}


def measure(way: str, sources: list[str], tokenizer: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sources, "--tokenizer", tokenizer, "--way", way, "--out", f"{folder}/set"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def summarize(runs: list[dict[str, float]]) -> dict[str, float]:
    return {
        "mb_per_second": statistics.median(run["text_mb"] / run["seconds"] for run in runs),
        "mb_per_cpu_second": statistics.median(run["text_mb"] / run["cpu_seconds"] for run in runs),
    }


def machine() -> dict[str, object]:
    from importlib.metadata import version

    from biphase.execute import num_cores

    names = ("tokenizers", "transformers", "numpy", "pyarrow")
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")  # noqa: SIM115
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    return {"cpu": model, "cores": num_cores(), "load_before": os.getloadavg()[0], "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(WAYS[arguments.way](arguments.sources, arguments.tokenizer, arguments.out)))
        return

    from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer
    from biphase.files import write_json

    found = machine()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(load_tokenizer(arguments.tokenizer), Path(folder) / "tokenizer")
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for repeat in range(arguments.repeats):
            for way in WAYS:
                runs[way].append(measure(way, arguments.sources, f"{folder}/tokenizer"))
                print(f"{repeat + 1}/{arguments.repeats} {way}: {runs[way][-1]}", file=sys.stderr, flush=True)
    medians = {way: summarize(listed) for way, listed in runs.items()}
    ratios = {key: medians["biphase"][key] / medians["tokenizers"][key] for key in medians["biphase"]}
    result = {
        "what": "tokenization, MB of text per second",
        "machine": found,
        "sources": arguments.sources,
        "tokenizer": arguments.tokenizer,
        "medians": medians,
        "biphase_over_tokenizers": ratios,
        "runs": runs,
    }
    path = RESULTS / f"{date.today().isoformat()}-tokenization.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, result)
    print(
        f"biphase reaches {ratios['mb_per_second']:.0%} of tokenizers (wall), {ratios['mb_per_cpu_second']:.0%} (CPU)"
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
