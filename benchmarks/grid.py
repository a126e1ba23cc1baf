"""The evaluation grid beside the usual way: the same cells by `biphase evaluate` and by Hugging Face Trainer.

    python benchmarks/grid.py                                     # 2 tasks × 2 rates × 3 seeds, a fresh 3m encoder
    python benchmarks/grid.py --model FOLDER --steps 200          # an encoder that has learnt something
    python benchmarks/grid.py --retrieval FOLDER                  # and Sentence Transformers, on a BEIR folder

Tasks: bundled ones of sequence and token classification; `--retrieval` adds a grid of its own. benchmarks/README.md
says what is the same on both sides, what each arm is and how its seconds are counted.

Letters: B samples of a batch, L its longest sample.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from grid_data import make_encoder, write_pairs, write_splits
from grid_job import METRICS, SPLITS, Cell, Grid, GridJob
from grid_scores import compare, compare_scores, print_results, summarize_cells
from measuring import (
    Found,
    call,
    clocked,
    describe_setup,
    error_of,
    make_document,
    result_path,
    run_job,
    save,
    say,
    take_turns,
    whole_pairs,
)

# torch, transformers and biphase are imported inside functions: what the usual way loads is a part of its time.


@dataclass(frozen=True)
class Way:
    """How an arm goes about its cells."""

    what: str
    is_loop: bool = False
    """All cells in one process, not a process for each."""
    is_side_by_side: bool = False
    """A process per core, one thread each, not one process with all cores as threads."""
    keeps_heap: bool = False
    """The allocator setting of `biphase.machine`."""
    is_fp32: bool = False
    """Arithmetic in fp32, which is what Trainer does unless told otherwise, whatever biphase does."""


ARMS = {
    "biphase": Way("biphase evaluate, default workers, a fresh cache"),
    "trainer": Way("Trainer, a process per cell, one after the other, all cores as threads"),
    "trainer-fp32": Way("the same in fp32, as it is shipped", is_fp32=True),
    "trainer-loop": Way("Trainer, all cells in one process, all cores as threads", is_loop=True),
    "trainer-loop-heap": Way("the same, its allocator keeps its heap", is_loop=True, keeps_heap=True),
    "trainer-side-by-side": Way("Trainer, a process per cell, one for each core at a time", is_side_by_side=True),
}
DEFAULT_ARMS = ["biphase", "trainer", "trainer-fp32", "trainer-loop"]


def run_arm(arm: str, grid: Grid, threads: int) -> Found:
    """One arm once, with a fresh cache. A failed one gives {"error": its last line}; the other arms go on."""
    from biphase.errors import InputError

    with tempfile.TemporaryDirectory() as folder:
        try:
            if arm == "biphase":
                found = run_biphase(grid, Path(folder))
            else:
                found = run_peer(ARMS[arm], grid, threads, Path(folder))
        except InputError as error:
            return {"error": str(error)}
        except subprocess.CalledProcessError as failed:
            return error_of(failed)
    cells, wall = found["cells"], found["wall_seconds"]
    expected = {(cell.task, cell.learning_rate, cell.seed) for cell in grid.cells}
    assert {(cell["task"], cell["learning_rate"], cell["seed"]) for cell in cells} == expected, f"{arm}: other cells"
    assert all(cell["steps"] == grid.config["max_steps"] for cell in cells), f"{arm}: other steps"
    seconds: dict[str, float] = defaultdict(float)
    for cell in cells:
        for stage, spent in cell["seconds"].items():
            seconds[stage] += spent
    seconds["rest"] = found["slots"] * wall - sum(seconds.values())
    return found | {"cells_per_hour": 3600 * len(cells) / wall, "seconds": dict(seconds)}


def run_biphase(grid: Grid, folder: Path) -> Found:
    """How many cells run at a time (`slots`), what the clock says, and the cells as `work` gives them."""
    from biphase.engine.local import count_workers
    from biphase.engine.units import Engine
    from biphase.errors import InputError
    from biphase.finetuning.scores import read_scores

    changed = ("max_steps", "epochs", "batch_size", "precision", "max_length")
    command = [sys.executable, "-m", "biphase", "evaluate", grid.model]
    command += [f"{key}={grid.config[key]}" for key in changed]
    command += ["--tasks", ",".join(grid.tasks), "--out", str(folder / "scores")]
    command += ["--workers-per-gpu", str(grid.workers_per_gpu)]
    command += ["--learning-rates", ",".join(map(str, grid.learning_rates)), "--seeds", ",".join(map(str, grid.seeds))]
    for name, task in grid.tasks.items():
        command += ["--data-dir", f"{name}={task['folder']}"]
    found: dict[str, Any] = {
        "slots": min(count_workers(Engine(workers_per_gpu=grid.workers_per_gpu)), len(grid.cells)),
        "cells": [],
    }
    with clocked(found):
        call(command, {"BIPHASE_CACHE": str(folder / "cache")})
    for score in read_scores(folder / "scores").scores:
        cell = Cell(score.task, score.config.learning_rate, score.config.seed)
        if score.diverged:
            raise InputError(f"{score.headline()}; give lower --learning-rates")
        metric = METRICS[grid.tasks[score.task]["family"]]
        scores = {split: score.metrics[split][metric] for split in SPLITS}
        found["cells"].append(asdict(cell) | {"scores": scores, "steps": score.num_steps, "seconds": score.seconds})
    return found


def run_peer(way: Way, grid: Grid, threads: int, folder: Path) -> Found:
    """What `run_biphase` gives, by the usual way."""
    if way.is_fp32:
        grid = replace(grid, config=grid.config | {"precision": "fp32"})
    slots = min(threads, len(grid.cells)) if way.is_side_by_side else 1
    parts = [grid.cells] if way.is_loop else [[cell] for cell in grid.cells]

    def run(cells: list[Cell]) -> list[dict[str, Any]]:
        job = GridJob(grid, cells, way.keeps_heap, str(folder / "datasets"), time.time())
        return run_cells(job, threads // slots)

    found: Found = {"slots": slots}
    with clocked(found), ThreadPoolExecutor(slots) as pool:
        found["cells"] = [cell for part in pool.map(run, parts) for cell in part]
    return found


def run_cells(job: GridJob, threads: int) -> list[dict[str, Any]]:
    """The cells of a job, run in a process of its own. What it took to start counts to the first of them."""
    found = run_job(__file__, job, threads, {"HF_DATASETS_CACHE": job.cache})
    for cell in found["cells"][:1]:
        cell["seconds"] = {"start": found["start"]} | cell["seconds"]
    return found["cells"]


def measure_grid(grid: Grid, arms: Sequence[str], rounds: int, threads: int) -> dict[str, Any]:
    """All arms, taking turns: medians, ratios within each round, scores of the first round."""
    say(f"{grid.name}: {len(grid.cells)} cells of {grid.config['max_steps']} steps")
    if grid.config["precision"] == "fp32":
        arms = [arm for arm in arms if not ARMS[arm].is_fp32]  # the other arms are in fp32 too
    if any(arm != "biphase" for arm in arms):  # so that no arm is the first to read the libraries from the disk
        with tempfile.TemporaryDirectory() as folder, suppress(subprocess.CalledProcessError):
            run_cells(GridJob(grid, [], False, folder, time.time()), threads)
    found = take_turns(
        arms,
        rounds,
        lambda arm, _: run_arm(arm, grid, threads),
        lambda once: f"{once['cells_per_hour']:,.0f} cells/h ({once['wall_seconds']:,.0f} s)",
    )
    ratios: dict[str, dict[str, float]] = {}
    differences: dict[str, dict[str, Any]] = {}
    for arm in [arm for arm in arms if arm != "biphase"] if "biphase" in arms else []:
        if pairs := whole_pairs(found, "biphase", arm):
            ratios[f"biphase / {arm}"] = compare(pairs)
        if pairs := whole_pairs(found[:1], "biphase", arm):
            differences[f"biphase − {arm}"] = {task: compare_scores(*pairs[0], task, grid) for task in grid.tasks}
    return {
        "name": grid.name,
        "tasks": list(grid.tasks),
        "learning_rates": grid.learning_rates,
        "seeds": grid.seeds,
        "config": {key: value for key, value in grid.config.items() if key not in ("learning_rate", "seed")},
        "num_cells": len(grid.cells),
        "arms": {arm: summarize_cells(ARMS[arm].what, [each[arm] for each in found], grid) for arm in arms},
        "ratios": ratios,
        "differences": differences,
        "rounds": found,
    }


def work(job: GridJob) -> Found:
    """All cells of a job, each with its scores and the seconds of its stages; `start`: the interpreter and imports."""
    if job.keeps_heap:
        from biphase.machine import keep_heap

        keep_heap()
    import datasets

    families = {job.grid.tasks[cell.task]["family"] for cell in job.cells or job.grid.cells}
    if "retrieval" in families:
        from peers.sentence_transformers_retrieval import fit_retriever as fit
    else:
        from peers.trainer_classification import fit_classifier as fit
    if "token_classification" in families:
        import seqeval.metrics  # noqa: F401
    datasets.disable_progress_bars()
    start = time.time() - job.began
    return {"start": start, "cells": [fit(job, cell) for cell in job.cells]}


def parse_options() -> argparse.Namespace:
    from biphase.machine import num_cores

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (a fresh network of --preset, random weights)")
    parser.add_argument("--preset", default="3m")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the fresh network")
    parser.add_argument("--tasks", nargs="*", default=["snli", "uner_en_ewt"], help="bundled ones")
    parser.add_argument(
        "--retrieval", type=Path, metavar="FOLDER", help="BEIR's layout with qrels/train and qrels/test"
    )
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-4, 5e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-examples", type=int, default=10**9, help="at most; the steps choose among them (all)")
    parser.add_argument("--evaluated-examples", type=int, default=500, help="at most, of validation and of test")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="of both sides")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=num_cores(), help="of the usual way; biphase takes all cores")
    parser.add_argument("--workers-per-gpu", type=int, default=1, help="cells of biphase that share a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.retrieval is not None and find_spec("sentence_transformers") is None:
        parser.error("--retrieval needs Sentence Transformers: pip install 'biphase[embeddings]'")
    options.device = "auto"
    return options


def make_grids(options: argparse.Namespace, folder: Path) -> Iterator[Grid]:
    from biphase.finetuning.config import FinetuneConfig, resolve_precision
    from biphase.finetuning.heads import load_encoder

    model = str((options.model or make_encoder(options.preset, options.vocab, folder)).resolve())
    encoder = load_encoder(model)
    given = {
        "max_steps": options.steps,
        "epochs": options.steps,  # so that the steps decide, as they do for Trainer
        "batch_size": options.batch_size,
        "precision": options.precision,
    }
    config = resolve_precision(FinetuneConfig.model_validate(given))
    settings = config.model_dump(mode="json") | {"max_length": min(config.max_length, encoder.max_length)}
    most = dict.fromkeys(SPLITS, options.evaluated_examples)

    def grid(name: str, tasks: dict[str, dict[str, Any]]) -> Grid:
        return Grid(name, model, tasks, options.learning_rates, options.seeds, settings, options.workers_per_gpu)

    sizes: dict[Literal["train", "validation", "test"], int] = {"train": options.train_examples, **most}
    if options.tasks:
        yield grid(
            "classification", {task: write_splits(task, sizes, folder / "data" / task) for task in options.tasks}
        )
    if options.retrieval is not None:
        tokenizer: Any = encoder.tokenizer.pretrained
        closing = "" if encoder.tokenizer.opening else tokenizer.eos_token
        task = "squad_retrieval"
        yield grid("retrieval", {task: write_pairs(task, options.retrieval, closing, folder / "data" / task)})


def main() -> None:
    options = parse_options()
    if options.job:
        given = json.loads(options.job)
        job = GridJob(**given | {"grid": Grid(**given["grid"]), "cells": [Cell(**cell) for cell in given["cells"]]})
        options.answer.write_text(json.dumps(work(job)))
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    started = time.perf_counter()
    machine = describe_setup(options.device, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        results = [
            measure_grid(grid, options.arms, options.rounds, options.threads)
            for grid in make_grids(options, Path(folder))
        ]
    out = options.out or result_path("grid", machine["processor"], options.threads)
    what = "the evaluation grid, cells per hour, biphase and Hugging Face Trainer"
    shown = {key: value for key, value in vars(options).items() if key != "out"}
    save(out, make_document(what, machine, shown, time.perf_counter() - started) | {"results": results})
    for result in results:
        print_results(result)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
