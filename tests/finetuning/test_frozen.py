"""A linear model on a frozen encoder's vectors: against transformers' own network and scikit-learn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import biphase
from biphase.finetuning import frozen
from biphase.finetuning.config import CellPlan, FinetuneConfig, plan_cells
from biphase.finetuning.frozen import STRENGTHS, score_frozen
from biphase.tasks.own import write_task

from .test_words import load, make_rows, noisy_class, texts_of

SHORT: dict[str, Any] = {"device": "cpu", "precision": "fp32", "max_length": 64, "epochs": 4}


@pytest.fixture(autouse=True)
def _count_small_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "LEAST_PARAMETERS", 0)


def plan_beside(model: Path, folder: Path, label: Any = noisy_class, **settings: Any) -> tuple[CellPlan, Any]:
    """A cell on texts with these labels, and its examples."""
    named = zip(("train", "validation", "test"), (400, 100, 150), strict=True)
    data = {split: make_rows(size, label, seed) for seed, (split, size) in enumerate(named)}
    task, place = write_task(data, folder, "own")
    [plan] = plan_cells(str(model), [task], FinetuneConfig.model_validate(SHORT | settings), {"own": place})
    return plan, load(plan.evaluation)


def vectors_of(model: Path, examples: Any) -> np.ndarray:
    """The mean of transformers' own hidden states over a text's tokens and its end."""
    network = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    means = []
    for text in texts_of(examples):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            means.append(network(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy())
    return np.stack(means)


def test_classes_are_told_apart_as_by_scikit_learn_on_transformers_own_vectors(
    model_folder: Path, tmp_path: Path
) -> None:
    plan, data = plan_beside(model_folder, tmp_path)
    score = score_frozen(plan, tmp_path / "scores")
    assert score is not None
    vectors = {split: vectors_of(model_folder, data.splits[split]) for split in data.splits}
    labels = {split: [example.label for example in data.splits[split]] for split in data.splits}
    found = []
    for strength in STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        model.fit(vectors["train"], labels["train"])
        found.append([model.score(vectors[split], labels[split]) for split in ("validation", "test")])
    best = max(found, key=lambda values: values[0])
    assert len({values[1] for values in found}) > 1, "the choice of a strength decides nothing here"
    for split, value in zip(("validation", "test"), best, strict=True):
        assert score.metrics[split]["accuracy"] == pytest.approx(value, abs=0.011)  # an example on the border
    assert score.num_examples == {"train": 400, "validation": 100, "test": 150}


def test_numbers_are_predicted_by_ridge_on_the_vectors(model_folder: Path, tmp_path: Path) -> None:
    plan, data = plan_beside(model_folder, tmp_path, lambda nouns, luck: nouns.count("cat") - nouns.count("dog") + luck)
    score = score_frozen(plan, tmp_path / "scores")
    assert score is not None
    train, test = (vectors_of(model_folder, examples) for examples in (data.train, data.test))
    found = []
    for strength in STRENGTHS:
        model = make_pipeline(StandardScaler(), Ridge(alpha=1 / strength))
        model.fit(train, [example.label for example in data.train])
        found.append(np.corrcoef(model.predict(test), [example.label for example in data.test])[0, 1])
    assert any(score.metrics["test"]["pearson"] == pytest.approx(value, abs=1e-3) for value in found)


def test_it_is_computed_once_and_a_class_without_training_examples_is_never_predicted(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = plan_beside(model_folder, tmp_path, lambda nouns, luck: "rare" if luck > 1 else noisy_class(nouns, luck))
    score = score_frozen(plan, tmp_path / "scores")
    monkeypatch.setattr(frozen, "write_frozen", lambda *_: pytest.fail("it was computed before"))
    assert score_frozen(plan.changed(learning_rate=1e-3), tmp_path / "scores") == score


@pytest.mark.parametrize("settings", [{"words": False}, {"frozen": True}, {"weights": "random"}])
def test_it_is_left_out_where_it_says_nothing(model_folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    plan, _ = plan_beside(model_folder, tmp_path, **settings)
    assert score_frozen(plan, tmp_path / "scores") is None


def test_small_encoders_are_left_out(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "LEAST_PARAMETERS", 10**6)
    plan, _ = plan_beside(model_folder, tmp_path)
    assert score_frozen(plan, tmp_path / "scores") is None


def test_fine_tuning_tells_what_the_frozen_encoder_reaches(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = make_rows(300, noisy_class)
    biphase.finetune(model_folder, "own", data=rows, scores=tmp_path, learning_rate=1e-3, **SHORT)
    printed = capsys.readouterr()
    assert "own · frozen vectors + linear: accuracy validation" in " ".join(printed.err.split())
    assert "Without fine-tuning: " in printed.out
