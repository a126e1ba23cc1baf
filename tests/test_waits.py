"""Fine-tuning and embedding training give a GPU their steps without waiting for it, except where they read losses.

It needs the simulated device, which counts what the CPU would have waited for: `tests/test_simulated_gpu.py` runs it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

from transformers import Trainer

from biphase.embedding.training import train_embedder
from biphase.finetuning import fit

from .embedding.conftest import encoder_folder, pairs  # noqa: F401
from .embedding.test_training import make_in
from .finetuning.conftest import data_dirs, fit_cell, make_cell, model_folder  # noqa: F401

pytestmark = pytest.mark.skipif("simulated_gpu" not in sys.modules, reason="needs the simulated device")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import simulated_gpu

    monkeypatch.setattr(simulated_gpu, "WAITS", found := [])
    return found


def test_the_device_counts_what_the_cpu_waits_for(waits: list[str]) -> None:
    ours = torch.arange(4.0).pin_memory().to("cuda", non_blocking=True)
    ours[torch.arange(2).pin_memory().to("cuda", non_blocking=True)].repeat(2).relu_()
    assert not waits
    bounds = torch.tensor([1, 2], device="cuda")
    for wait in (
        lambda: ours.sum().item(),
        lambda: ours.tolist(),
        lambda: ours.cpu(),
        lambda: ours[ours > 1],
        lambda: ours.nonzero(),
        lambda: bounds.repeat_interleave(bounds),
        lambda: torch.ones(2).to("cuda", non_blocking=True),
        lambda: torch.ones(2).pin_memory().to("cuda"),
    ):
        before = len(waits)
        wait()
        assert len(waits) == before + 1
    before = len(waits)
    bounds.repeat_interleave(bounds, output_size=3)
    assert len(waits) == before


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("snli", {"microbatch_tokens": 60}),
        ("wnut17", {"class_weights": "balanced"}),
        ("squad_v2", {}),
        ("squad_v2", {"qa_head": "token"}),
        ("squad_retrieval", {}),
        ("squad_retrieval", {"microbatch_tokens": 60}),
        ("squad_retrieval", {"ranking": "pairs"}),
    ],
)
def test_a_step_of_fine_tuning_waits_only_to_read_losses(
    task: str,
    settings: dict[str, Any],
    model_folder: Path,  # noqa: F811
    data_dirs: dict[str, Path],  # noqa: F811
    waits: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for all losses since the last reading."""
    marks: list[int] = []
    set_training, finite_losses = fit.set_training, fit.finite_losses

    def begin(*args: Any) -> None:
        marks.append(len(waits))
        set_training(*args)

    def read(steps: Any) -> list[float]:
        marks.append(len(waits))
        losses = finite_losses(steps)
        marks.append(len(waits))
        return losses

    monkeypatch.setattr(fit, "set_training", begin)
    monkeypatch.setattr(fit, "finite_losses", read)
    config = make_cell(task, **settings).config.model_copy(update={"precision": "bf16"})
    score = fit_cell(str(model_folder), task, config, None, data_dirs[task])
    assert score.num_steps >= 8 and len(marks) >= 3
    assert np.diff(marks).tolist() == [0, 1] * (len(marks) // 2)


@pytest.mark.parametrize(
    "changes",
    [
        ["stages.0.mini_batch_tokens=100"],
        ["stages.0.loss=mnrl", "stages.0.orthogonal_weight=0.3", "prompts={query: 'find: ', document: 'text: '}"],
        ["pooling=cls", "precision=bf16"],
    ],
)
def test_a_step_of_embedding_training_waits_for_nothing(
    changes: list[str],
    encoder_folder: Path,  # noqa: F811
    pairs: list[dict[str, str]],  # noqa: F811
    tmp_path: Path,
    waits: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does anything between the steps, before the loss is logged."""
    marks: list[int] = []
    training_step: Callable[..., Any] = Trainer.training_step

    def step(*args: Any, **named: Any) -> Any:
        marks.append(len(waits))
        loss = training_step(*args, **named)
        marks.append(len(waits))
        return loss

    monkeypatch.setattr(Trainer, "training_step", step)
    train_embedder(make_in(tmp_path, encoder_folder, pairs)("stages.0.save_steps=100", *changes), tmp_path / "runs")
    assert len(marks) == 8 and len(set(marks)) == 1
