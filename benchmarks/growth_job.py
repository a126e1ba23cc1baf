"""The parts of `growth.py` that measure all sizes in one process, after one call on next to nothing.

python benchmarks/growth_job.py predict '{"model": …}'      # prints what it measured as JSON
"""

import ctypes
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Found

QUERIES = ("the history of the first railway", "cells that divide", "what the king said to him", "a law about water")


def read_status(field: str) -> float:
    """Return a size in MiB from what Linux says of this process: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


def cpu_seconds() -> float:
    """Return the processor time, user and system, of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measured(action: Callable[[], Any]) -> Found:
    """Seconds of a call, and the most MiB that it had above what the process had before."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free counts to the call, which may use it
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    cpu, wall = cpu_seconds(), time.perf_counter()
    action()
    spent = {"cpu_seconds": cpu_seconds() - cpu, "wall_seconds": time.perf_counter() - wall}
    return spent | {"peak_mib": read_status("VmHWM") - before}


def step(shards: str, preset: str, shapes: Sequence[Sequence[int]], batch_tokens: int) -> list[Found]:
    """Two updates for each vocabulary and longest sample, with what `plan_memory` plans, in MiB."""
    from biphase.flops import plan_memory, shape_of
    from biphase.pretraining.loop import train
    from biphase.recipe import Recipe

    def recipe_of(vocab_size: int, sample_tokens: int) -> Recipe:
        tree: dict[str, Any] = {"name": "growth", "batch_tokens": batch_tokens}
        tree["init"] = {"preset": preset, "architecture": {"vocab_size": vocab_size}}
        tree["data"] = {"shards": shards, "max_sample_tokens": sample_tokens}
        tree["curriculum"] = [{"objective": "mlm", "steps": 2, "mask_probability": 0.4}]
        tree["schedule"] = {"warmup_steps": 0, "decay_steps": 0}
        tree["validation"] = tree["checkpoints"] = {"every_steps": 0}
        tree["compute"] = {"compile": "off", "device": "cpu", "precision": "fp32", "microbatch_tokens": batch_tokens}
        return Recipe.model_validate(tree)

    found = []
    with tempfile.TemporaryDirectory() as folder:
        train(recipe_of(4096, 128), Path(folder) / "start")
        for number, (vocab_size, sample_tokens) in enumerate(shapes):
            recipe = recipe_of(vocab_size, sample_tokens)
            run = measured(lambda: train(recipe, Path(folder) / str(number)))  # noqa: B023
            planned = plan_memory(shape_of(preset, {}, vocab_size), recipe, on_cpu=True)
            found.append(run | {"planned_mib": {name: size / 2**20 for name, size in planned.items()}})
    return found


def clocked_calls(owner: Any, name: str) -> list[float]:
    """Replace a function by one that notes the processor seconds of each call."""
    original: Callable[..., Any] = getattr(owner, name)
    spent: list[float] = []

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return original(*arguments, **named)
        finally:
            spent.append(time.process_time() - began)

    setattr(owner, name, timed)
    return spent


def index(model: str, texts: Sequence[str]) -> list[Found]:
    """Build an index of each text and search it, by embeddings and by BM25: the processor seconds of the encoder, of
    BM25's part, and of the first query and later ones (their median)."""
    import biphase
    from biphase.embedding import index as indexing
    from biphase.embedding import model as embedders

    encoder, words = clocked_calls(embedders, "encode_batch"), clocked_calls(indexing, "index_bm25")
    found = []
    for text in (texts[0], *texts):  # the first one again: the first time, it loads what all need
        folder = Path(f"{text}.index")
        encoder.clear()
        words.clear()
        run = measured(lambda: indexing.build_index(text, model, folder, "text", "en"))  # noqa: B023
        run |= {"encoder": sum(encoder), "words": sum(words)}
        for by in ("embeddings", "bm25"):
            queries = [measured(lambda: biphase.search(folder, query, by=by)) for query in QUERIES]  # noqa: B023
            run[by] = {
                "first": queries[0],
                "later": {key: median(each[key] for each in queries[1:]) for key in queries[0]},
            }
        found.append(run)
    return found[1:]


def predict(model: str, files: Sequence[str]) -> list[Found]:
    """Predict the rows of each file into another one."""
    import biphase

    def once(file: str) -> Found:
        out = Path(f"{file}.predicted.jsonl")
        found = measured(lambda: biphase.predict(model, file, out=out))
        with out.open() as lines, open(file) as rows:
            assert sum(1 for _ in lines) == sum(1 for _ in rows), "a row is missing"
        out.unlink()
        return found

    return [once(file) for file in (files[0], *files)][1:]


if __name__ == "__main__":
    from biphase import silence
    from biphase.machine import keep_heap

    keep_heap()
    silence()
    print(json.dumps({"runs": globals()[sys.argv[1]](**json.loads(sys.argv[2]))}))
