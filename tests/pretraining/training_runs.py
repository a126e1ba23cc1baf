"""What the tests of training share: shorter recipes, runs that are stopped, and what a run left behind."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import biphase.pretraining.loop as loop
from biphase.corpus.packing import Batches
from biphase.corpus.tokenizer import save_tokenizer
from biphase.distributed import World
from biphase.errors import StoppedError
from biphase.files import file_hash
from biphase.pretraining.job import Job, open_job
from biphase.pretraining.loop import open_batches, train
from biphase.recipe import Recipe
from biphase.run import Run, read_metrics

MakeRecipe = Callable[..., Recipe]


def shorter(*overrides: str) -> list[str]:
    """Six steps, CLM then MLM, without validation text in between."""
    return [
        "curriculum.0.steps=3",
        "curriculum.1.steps=3",
        "schedule.decay_steps=2",
        "validation.every_steps=0",
        *overrides,
    ]


def only(objective: str, steps: int, *overrides: str) -> list[str]:
    """One phase at a constant rate."""
    phase = f"curriculum=[{{objective: {objective}, steps: {steps}}}]"
    return [phase, "schedule.warmup_steps=0", "schedule.decay_steps=0", *overrides]


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in read_metrics(run, "train")]


def weights_at(run: Run, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.steps / str(step) / "model" / "model.safetensors")


def loader_of(recipe: Recipe) -> tuple[Job, Batches]:
    """The job and the batches of a recipe, for this process alone."""
    job = open_job(recipe, Path("nowhere"), World(0, 1, torch.device("cpu")))
    return job, open_batches(job)[0]


def digests(run: Run, step: int) -> dict[str, str]:
    """Hashes of the weights and of the optimizer's moments."""
    folder = run.steps / str(step)
    return {name: file_hash(folder / name) for name in ("model/model.safetensors", "optimizer.safetensors")}


def numbers(run: Run) -> list[dict[str, Any]]:
    """What was logged, without what depends on the clock."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    timed = ("tokens_per_second", "flops_per_second", "share_of_peak", "data_wait")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A real SIGTERM while update `step` (counted from now) is being computed."""
    original, done = loop.update, []

    def update(*args: Any) -> Any:
        done.append(1)
        if len(done) == step:
            signal.raise_signal(signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(loop, "update", update)


def train_until(step: int, recipe: Recipe, root: Path) -> Path:
    """Train, be stopped during update `step`, and return the run folder."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(StoppedError, match=f"stopped at step {step} of {recipe.num_steps}; run the same command"):
            train(recipe, root)
    (path,) = root.iterdir()
    return path


def other_shards(corpus: Any, folder: Path) -> Path:
    """The same text with another tokenizer."""
    from biphase.corpus.prepare import prepare
    from biphase.corpus.tokenizer import train_tokenizer

    lines = (corpus.shards.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    save_tokenizer(train_tokenizer(texts, 300), folder / "other_tokenizer")
    prepare([corpus.shards.parent / "train.jsonl"], folder / "other_tokenizer", folder / "other_shards", workers=1)
    return folder / "other_shards"
