"""Kinds of tasks beside the paper's: scored as scikit-learn and scipy score them, kept as transformers has them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.fit import fit_cell
from biphase.finetuning.predictions import read_examples
from biphase.finetuning.scores import Score

from .conftest import NOUNS, write_jsonl
from .test_predict import predict_all

Rows = list[dict[str, Any]]


def write_task(folder: Path, rows: Rows, **keys: Any) -> Path:
    """A task's YAML file; of the rows every third is validation, every third test."""
    for number, split in enumerate(("train", "validation", "test")):
        write_jsonl(folder / f"{split}.jsonl", rows[number::3])
    files = [{split: f"{split}.jsonl" for split in ("train", "validation", "test")}]
    (folder / "task.yaml").write_text(yaml.safe_dump({"name": "made-up", "files": files} | keys))
    return folder / "task.yaml"


def fit_made_up(task: Path, model: Path, **settings: Any) -> tuple[Score, Rows]:
    """The score of a cell, its network kept in `kept`, and the rows of test.jsonl."""
    given = {"precision": "fp32", "device": "cpu", "learning_rate": 5e-3, "batch_size": 8, "epochs": 12}
    config = FinetuneConfig.model_validate(given | {"max_length": 128} | settings)
    folder = task.parent
    score = fit_cell(str(model), str(task), config, folder / "scores", folder, keep=folder / "kept")
    assert score.folder is not None
    examples = read_examples(score)  # which holds their contributions against the score
    rows = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    assert len(examples.values) == len(rows)
    return score, rows


def test_parts_of_speech(model_folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(90):
        words = [str(word) for word in rng.choice(NOUNS, rng.integers(2, 7))]
        rows.append({"tokens": words, "tags": ["NOUN" if word in NOUNS[:5] else "VERB" for word in words]})
    keys = {"family": "token_classification", "metric": "accuracy", "label": "tags", "classes": ["NOUN", "VERB"]}
    task = write_task(tmp_path, rows, **keys)
    score, found = fit_made_up(task, model_folder)
    pairs = [pair for row in found for pair in zip(row["gold"], row["predicted"], strict=True)]
    assert score.metrics["test"] == {"accuracy": pytest.approx(np.mean([a == b for a, b in pairs]))}
    assert score.metrics["test"]["accuracy"] > 0.9
    predicted = predict_all(tmp_path / "kept", tmp_path / "test.jsonl")
    assert [row["predicted"] for row in predicted] == [row["predicted"] for row in found]
    assert "spans" not in predicted[0]
    # Words that are cut off have no tag, which is wrong.
    (tmp_path / "kept").rename(tmp_path / "first")
    score, found = fit_made_up(task, model_folder, max_length=4)
    gone = [predicted for row in found for predicted in row["predicted"]].count("")
    right = sum(a == b for row in found for a, b in zip(row["gold"], row["predicted"], strict=True))
    assert gone > 0 and score.metrics["test"]["accuracy"] == pytest.approx(right / len(pairs))
