"""How fast `biphase prepare` is beside `tokenizers` itself, on the same text and the same cores.

The yardstick is `encode_batch_fast` in one process on all cores, over texts that are already in memory, in batches of
two million characters: no reading, no writing, no ids taken out. Its start is `import tokenizers` and loading
`tokenizer.json`. Ours is the whole command: interpreter, imports, loading and saving the tokenizer, reading compressed
files, tokenizing, hashing, writing shards; its start is the time of the same command on one short line. So the speeds
are told with the start on both sides, as a user waits for them, and without it, as a large corpus sees them. Both run
in turn, in processes of their own; the medians count. CPU seconds are given too, because the wall clock of a shared
machine is not only ours.

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
from collections.abc import Callable
from datetime import date
from pathlib import Path

from measuring import HERE, clocked, save, say

PEER = HERE / "peers" / "tokenizers_alone.py"
Run = dict[str, float]
"""`seconds` and `cpu_seconds` with the start, `start_seconds` and `start_cpu_seconds` of it, `text_mb`."""


def measure_tokenizers(sources: list[str], tokenizer: Path) -> Run:
    command = [sys.executable, str(PEER), str(tokenizer), *sources]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_biphase(sources: list[str], tokenizer: Path) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        line = Path(folder) / "line.txt"
        line.write_text("One short line.\n")
        start = time_prepare([str(line)], tokenizer, Path(folder) / "start")
        whole = time_prepare(sources, tokenizer, Path(folder) / "set")
        splits = json.loads((Path(folder) / "set" / "manifest.json").read_text())["splits"].values()
    text_mb = sum(split["text_bytes"] for split in splits) / 1e6
    return whole | {f"start_{name}": value for name, value in start.items()} | {"text_mb": text_mb}


def time_prepare(sources: list[str], tokenizer: Path, out: Path) -> Run:
    command = [sys.executable, "-m", "biphase", "prepare", *sources, "--tokenizer", str(tokenizer), "--out", str(out)]
    found: Run = {}
    with clocked(found):
        subprocess.run(command, check=True, capture_output=True)
    return {"seconds": found["wall_seconds"], "cpu_seconds": found["cpu_seconds"]}


MEASURES: dict[str, Callable[[list[str], Path], Run]] = {"tokenizers": measure_tokenizers, "biphase": measure_biphase}


def summarize(runs: list[Run]) -> Run:
    def median(clock: str, start: str | None = None) -> float:
        return statistics.median(run["text_mb"] / (run[clock] - (run[start] if start else 0)) for run in runs)

    return {
        "mb_per_second": median("seconds"),
        "mb_per_second_without_start": median("seconds", "start_seconds"),
        "mb_per_cpu_second": median("cpu_seconds"),
        "mb_per_cpu_second_without_start": median("cpu_seconds", "start_cpu_seconds"),
    }


def describe_versions() -> dict[str, object]:
    from importlib.metadata import version

    from biphase.machine import num_cores

    names = ("tokenizers", "transformers", "numpy", "pyarrow")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    return {"cpu": model, "cores": num_cores(), "load_before": os.getloadavg()[0], "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--files", type=int, nargs="+", help="sizes: the first so many of the files", default=[3, 11])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    from biphase.corpus.text import find_text_sources
    from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer

    machine = describe_versions()
    files = [source.name for source in find_text_sources(arguments.sources)]
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        save_tokenizer(load_tokenizer(arguments.tokenizer), tokenizer)
        for num_files in sorted({min(number, len(files)) for number in arguments.files}):
            runs: dict[str, list[Run]] = {way: [] for way in MEASURES}
            for repeat in range(arguments.repeats):
                for way, measure in MEASURES.items():
                    runs[way].append(measure(files[:num_files], tokenizer))
                    say(f"{repeat + 1}/{arguments.repeats} {way}: {runs[way][-1]}")
            medians = {way: summarize(listed) for way, listed in runs.items()}
            ratios = {key: medians["biphase"][key] / medians["tokenizers"][key] for key in medians["biphase"]}
            text_mb = runs["biphase"][0]["text_mb"]
            sizes.append(
                {
                    "files": files[:num_files],
                    "text_mb": text_mb,
                    "medians": medians,
                    "biphase_over_tokenizers": ratios,
                    "runs": runs,
                }
            )
            told = ", ".join(f"{key} {ratio:.0%}" for key, ratio in ratios.items())
            print(f"{text_mb:.0f} MB: biphase reaches of tokenizers: {told}")
    result = {
        "what": "tokenization, MB of text per second",
        "machine": machine,
        "tokenizer": str(arguments.tokenizer),
        "sizes": sizes,
    }
    path = HERE / "results" / f"{date.today().isoformat()}-tokenization.json"
    save(path, result)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
