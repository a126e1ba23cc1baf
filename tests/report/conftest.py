"""Finished cells as they lie on disk, with the scores and predictions that a test wants."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from biphase.files import content_hash
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.scores import Score


@pytest.fixture
def write_cell(tmp_path: Path) -> Callable[..., Path]:
    """Write a cell below `tmp_path/scores`; `test=None` diverged. Returns its folder."""

    def write(
        model: str,
        task: str = "genre",
        rate: float = 5e-5,
        seed: int = 0,
        test: float | None = 0.5,
        validation: float = 0.5,
        metric: str = "accuracy",
        lines: Sequence[dict[str, Any]] | None = None,
        model_hash: str = "a" * 64,
        data_hash: str = "d" * 64,
        name: str = "",
        classes: tuple[str, ...] = (),
        **settings: Any,
    ) -> Path:
        config = FinetuneConfig(learning_rate=rate, seed=seed, **settings)
        cell = f"{model} {model_hash} {task} {data_hash} {config} {name}"
        folder = tmp_path / "scores" / (name or f"{task}-{content_hash(cell)[:12]}")
        folder.mkdir(parents=True)
        values = {"validation": validation, "test": test}
        score = Score(
            cell=cell,
            model=model,
            model_hash=model_hash,
            task=task,
            trained_on=task,
            source="biphase",
            data_hash=data_hash,
            metric=metric,
            classes=classes,
            config=config,
            metrics={} if test is None else {split: {metric: value, "other": 0.1} for split, value in values.items()},
            num_examples={},
            num_truncated={},
            num_left_out=0,
            num_steps=10,
            diverged=test is None,
            diverged_at_step=3 if test is None else None,
            final_loss=None if test is None else 1.0,
            seconds={},
            tokens_per_second={},
            peak_memory_bytes=0,
            machine={},
        )
        (folder / "score.json").write_text(json.dumps(score.model_dump(mode="json")), encoding="utf-8")
        if lines is not None:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / "test.jsonl").write_text(text, encoding="utf-8")
        return folder

    return write


@pytest.fixture
def scores_folder(tmp_path: Path) -> Path:
    return tmp_path / "scores"
