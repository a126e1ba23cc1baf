"""How long `biphase study status` and `biphase study report` take on a study of which all is finished.

`reading` is what the report does before it draws: finding out what is done, and what all cells scored.

A synthetic folder: every run of a plan with its checkpoints (of a few bytes), every cell with its `score.json`, made in
a temporary folder. Scores are random numbers; what is measured is bookkeeping: which runs and cells are done, by the
models' fingerprints and the cells' settings. Each measurement is a process of its own, so that no cache helps. Seconds
are those of a clock; processor seconds, of all its processes together, say the same on a machine that is busy.

    python benchmarks/bookkeeping.py                     # the plan of the paper: 38 runs, 15,000 cells
    python benchmarks/bookkeeping.py --study src/biphase/bundled/studies/mini.yaml
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from measuring import HERE, git_commit, save, say

BUNDLED = HERE.parent / "src" / "biphase" / "bundled" / "studies"

METRICS = {
    "sequence_classification": ("accuracy",),
    "token_classification": ("f1", "paper_f1"),
    "question_answering": ("f1", "paper_f1"),
    "retrieval": ("ndcg_at_10", "paper_ndcg_at_10"),
}

READING = """
import sys
from pathlib import Path
from biphase.studies.folder import read_state
from biphase.studies.plan import plan_study
from biphase.studies.run import status
from biphase.studies.spec import load_study
plan, folder = plan_study(load_study(Path(sys.argv[1]))), Path(sys.argv[2])
status(read_state(plan, folder))
"""
"""What `report` does before it draws."""

WAYS = {
    "status": ["-m", "biphase", "study", "status", "{study}", "--out", "{folder}"],
    "reading": ["-c", READING, "{study}", "{folder}"],
    "report": ["-m", "biphase", "study", "report", "{study}", "--out", "{folder}"],
}
"""Arguments of Python for each measurement."""


def make_folder(study: Path, folder: Path) -> dict[str, int]:
    """Everything that a finished study leaves behind; returns how many runs, cells and scores that is."""
    from biphase.encoder.models import identify
    from biphase.files import write_hashed
    from biphase.studies.folder import TrainedRecord, claim_study_folder, reach_step
    from biphase.studies.plan import plan_study
    from biphase.studies.spec import load_study

    plan = plan_study(load_study(study))
    place = claim_study_folder(folder, plan.study)
    (folder / "trained").mkdir()
    for run in plan.runs.values():
        path = place / "runs" / f"{run.name}-{run.key[:8]}"
        steps = run.stored_steps
        write_run(path, run.last, steps, run.recipe.model_dump(mode="json"))
        record = TrainedRecord(path.name, run.key, 3600.0, run.placeless_key)
        write_hashed(place / "trained" / f"{run.name}.json", asdict(record))
    rng = random.Random(0)
    fingerprints = {m.name: identify(reach_step(place, plan.runs[m.run], m.step)) for m in plan.models}
    num_scores = sum(write_scores(plan, place, cell, fingerprints[cell.model], rng) for cell in plan.cells)
    return {"runs": len(plan.runs), "models": len(plan.models), "cells": len(plan.cells), "scores": num_scores}


def write_run(path: Path, last: int, steps: list[int], config: dict[str, Any]) -> None:
    import numpy as np
    import yaml
    from safetensors.numpy import save

    from biphase.files import file_hash, write_hashed
    from biphase.run import CheckpointManifest

    for step in steps:
        model = path / "steps" / str(step) / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 2048}))
        (model / "tokenizer.json").write_text("{}")
        weights = np.frombuffer(f"{path.name}@{step}".encode(), dtype=np.uint8)
        (model / "model.safetensors").write_bytes(save({"weight": weights}))
        files = {f"model/{file.name}": file_hash(file) for file in model.iterdir()}
        manifest = CheckpointManifest(step, step, 0, 0, "", "", "mlm", False, None, [], (), path.name, files)
        write_hashed(path / "steps" / str(step) / "manifest.json", asdict(manifest))
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    records = [
        {"kind": "train", "step": s, "objective": "clm", "loss": 9 / (1 + s)} for s in range(1, last, last // 50)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "environment.json").write_text(json.dumps({"run": path.name}))
    (path / "done.json").write_text(json.dumps({"step": last, "tokens_seen": last}))


def write_scores(plan: Any, place: Any, cell: Any, fingerprint: Any, rng: random.Random) -> int:
    from biphase.files import write_hashed
    from biphase.finetuning.config import PROTOCOL, settle_config
    from biphase.tasks.spec import find_task

    for name in cell.evaluates:
        task = find_task(name)
        values = {metric: rng.uniform(0.01, 1.0) for metric in {task.metric, *METRICS[task.family]}}
        config = settle_config(cell.config, task, fingerprint.max_length)
        score = {
            "protocol": PROTOCOL,
            "cell": f"{rng.getrandbits(256):064x}",
            "model": cell.model,
            "model_hash": fingerprint.hash,
            "task": name,
            "trained_on": cell.task,
            "source": "synthetic",
            "data_hash": "0" * 64,
            "metric": task.metric,
            "config": config.model_copy(update={"precision": "bf16"}).model_dump(mode="json"),
            "metrics": {"validation": values, "test": {key: value - 0.01 for key, value in values.items()}},
            "num_examples": {"train": 1000, "validation": 100, "test": 100},
            "num_truncated": {"train": 0, "validation": 0, "test": 0},
            "num_left_out": 0,
            "num_steps": 1000,
            "diverged": False,
            "diverged_at_step": None,
            "final_loss": 0.5,
            "seconds": {"train": 60.0, "evaluate": 6.0},
            "tokens_per_second": {"train": 1e5, "evaluate": 3e5},
            "peak_memory_bytes": 10**9,
            "machine": {"device": "synthetic"},
        }
        path = place / "scores" / cell.model / f"{name}-{score['cell'][:16]}"
        path.mkdir(parents=True)
        write_hashed(path / "score.json", score)
    return len(cell.evaluates)


def measure(way: str, study: Path, folder: Path) -> tuple[float, float]:
    """Seconds and processor seconds of a command."""
    begun, before = time.perf_counter(), os.times()
    places = {"{study}": str(study), "{folder}": str(folder)}
    words = [sys.executable, *(places.get(word, word) for word in WAYS[way])]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}: {done.stderr}")
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begun, spent


def describe_machine() -> dict[str, Any]:
    """The machine and the versions that matter to what is measured; PyTorch is none of them."""
    from biphase.machine import num_cores

    names = ("pydantic", "numpy", "scipy", "matplotlib")
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].split(":")[1].strip() if models else ""
    return {"cpu": cpu, "cores": num_cores(), "load_before": os.getloadavg()[0], "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=BUNDLED / "paper.yaml")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        counts = make_folder(arguments.study, Path(folder) / "study")
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        processor: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(arguments.repeats):
            for way in WAYS:
                took, spent = measure(way, arguments.study, Path(folder) / "study")
                seconds[way].append(took)
                processor[way].append(spent)
                say(f"{way}: {took:.1f} s, {spent:.1f} processor s")
    result = {
        "what": "bookkeeping of a finished study: seconds, and processor seconds, of a whole command",
        "study": arguments.study.name,
        "machine": found,
        "commit": git_commit(),
        "counts": counts,
        "seconds": seconds,
        "processor_seconds": processor,
    }
    path = HERE / "results" / f"{date.today().isoformat()}-bookkeeping.json"
    save(path, result)
    medians = ", ".join(
        f"{way} {median(seconds[way]):.1f} s ({median(processor[way]):.1f} of processors)" for way in WAYS
    )
    print(f"{counts['cells']:,} cells: {medians}; written to {path}")


if __name__ == "__main__":
    main()
