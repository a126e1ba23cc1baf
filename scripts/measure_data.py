"""What the data path costs: processor seconds and memory at rising numbers of documents, and of checking what is read.

    python scripts/measure_data.py [--most 10000000] [--out benchmarks/results/DATE-data.json]

Sizes are measured as lengths alone, without tokens: documents of 1,000 tokens in the mean (lognormal). What is said of
10⁹ documents is extrapolated linearly from the two largest sizes, and called so. The cost of checks is that of one pass
over the bundled text, batch by batch, in turns with and without them.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from biphase.corpus.packing import Batches, PackedSet, cut_documents
from biphase.corpus.prepare import prepare
from biphase.corpus.shards import ShardSet
from biphase.corpus.text import find_text_sources, sample_texts
from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
GOAL = 10**9
BATCH_TOKENS = 2_359_296


def clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of a call, and what it gave."""
    started = time.process_time()
    given = call()
    return time.process_time() - started, given


def measure_size(num_documents: int) -> dict[str, float]:
    """In a process of its own: what the lengths of so many documents cost."""
    rng = np.random.default_rng(0)
    ends_D = np.cumsum(np.clip(rng.lognormal(6.4, 1.0, num_documents), 1, 1e6).astype(np.int64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opening, samples = clocked(lambda: cut_documents(ends_D, 12, 2048))
    packed = PackedSet(None, samples, seed=42)  # type: ignore[arg-type]  # an order reads no shard
    first = min(BATCH_TOKENS, samples.num_tokens // 2)
    one_epoch, _ = clocked(lambda: packed.samples_between(0, first))
    batch_seconds, _ = clocked(lambda: packed.samples_between(first, 2 * first))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "documents": num_documents,
        "tokens": int(ends_D[-1]),
        "ends_bytes": ends_D.nbytes,
        "kept_bytes": 2 * ends_D.nbytes,  # and as many ends of pieces
        "peak_bytes_beside_ends": (peak - before) * 1024,
        "opening_seconds": opening,
        "first_batch_of_an_epoch_seconds": one_epoch,
        "batch_seconds": batch_seconds,
    }


def measure_sizes(most: int) -> list[dict[str, float]]:
    sizes = [size for size in (10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7) if size <= most]
    command = [sys.executable, __file__, "--size"]
    return [json.loads(subprocess.check_output([*command, str(size)])) for size in sizes]


def extrapolate(measured: list[dict[str, float]]) -> dict[str, float]:
    """The line through the two largest sizes, at 10⁹ documents; a batch stays what it is."""
    low, high = measured[-2:]
    share = (GOAL - high["documents"]) / (high["documents"] - low["documents"])
    line = {key: high[key] + share * (high[key] - low[key]) for key in high}
    return line | {"documents": GOAL, "batch_seconds": high["batch_seconds"]}


def measure_checks(rounds: int = 9) -> dict[str, float]:
    """Processor seconds of a pass over the bundled text, as its documents are touched for the first time or not."""
    with tempfile.TemporaryDirectory() as place:
        folder, text = Path(place), ROOT / "src/biphase/bundled/corpus"
        save_tokenizer(train_tokenizer(sample_texts(find_text_sources([text]), limit_mb=2), 4096), folder / "tokenizer")
        prepare([text], folder / "tokenizer", folder / "set", workers=1, validation_fraction=0)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(rounds):
            for arm, times in seconds.items():
                shards = ShardSet(folder / "set")
                samples = cut_documents(shards.document_ends, 12, 2048)
                packed = PackedSet(shards, samples, seed=1)
                batches = Batches([packed], lambda step: 16_384 * step)
                packed.samples_between(0, 1)
                for start in shards.starts[:-1]:
                    shards.read(start, start + 1)
                if arm == "without":
                    shards.is_checked[:] = True
                steps = range(samples.num_tokens // 16_384)
                times.append(clocked(partial(deque, map(batches.batch, steps), maxlen=0))[0])
        ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
        return {
            "tokens": samples.num_tokens,
            "documents": shards.num_documents,
            "seconds_with": statistics.median(seconds["with"]),
            "seconds_without": statistics.median(seconds["without"]),
            "ratio_median": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],  # type: ignore[dict-item]
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10**7, help="the largest number of documents that is measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.size:
        print(json.dumps(measure_size(given.size)))
        return
    measured = measure_sizes(given.most)
    found = {"measured": measured, "extrapolated": extrapolate(measured), "checks": measure_checks()}
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
