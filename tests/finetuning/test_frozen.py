"""A linear model on a frozen encoder's vectors: against transformers' own network and scikit-learn."""

import json
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
from biphase.finetuning.frozen import FROZEN_SCORES, VECTOR_STRENGTHS, fit_vectors, score_frozen
from biphase.finetuning.scores import Score, read_scores
from biphase.finetuning.words import WORD_SCORES, score_words
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


def score_beside(plan: CellPlan, folder: Path) -> Score | None:
    """The score of the linear model beside a cell; None without one."""
    words = score_words(plan.train, plan.evaluation, [plan.config], folder / WORD_SCORES)
    scores = score_frozen(plan, words, folder / FROZEN_SCORES)
    return scores[0] if scores else None


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
    score = score_beside(plan, tmp_path / "scores")
    assert score is not None
    vectors = {split: vectors_of(model_folder, data.splits[split]) for split in data.splits}
    labels = {split: [example.label for example in data.splits[split]] for split in data.splits}
    found = []
    for strength in VECTOR_STRENGTHS:
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
    score = score_beside(plan, tmp_path / "scores")
    assert score is not None
    train, test = (vectors_of(model_folder, examples) for examples in (data.train, data.test))
    found = []
    for strength in VECTOR_STRENGTHS:
        model = make_pipeline(StandardScaler(), Ridge(alpha=1 / strength))
        model.fit(train, [example.label for example in data.train])
        found.append(np.corrcoef(model.predict(test), [example.label for example in data.test])[0, 1])
    assert any(score.metrics["test"]["pearson"] == pytest.approx(value, abs=1e-3) for value in found)


def test_it_is_computed_once_and_on_few_of_many_examples(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "MOST_EXAMPLES", 50)
    plan, _ = plan_beside(model_folder, tmp_path)
    score = score_beside(plan, tmp_path / "scores")
    assert score is not None and score.num_examples["train"] == 50
    monkeypatch.setattr(frozen, "write_frozen", lambda *_: pytest.fail("it was computed before"))
    assert score_beside(plan.changed(learning_rate=1e-3), tmp_path / "scores") == score
    assert not read_scores(tmp_path / "scores").cells, "a baseline is no cell"


@pytest.mark.parametrize("present", [(0, 2), (1,)])
def test_a_class_without_training_examples_is_never_predicted(
    present: tuple[int, ...], model_folder: Path, tmp_path: Path
) -> None:
    plan, _ = plan_beside(model_folder, tmp_path)
    rng = np.random.default_rng(0)
    labels = rng.choice(present, 40)
    outputs = fit_vectors(plan.task, rng.normal(size=(40, 5)), labels, 0.1, {"test": rng.normal(size=(30, 5))})
    assert outputs["test"].shape == (30, 3) and np.isfinite(outputs["test"]).all()
    assert {*outputs["test"].argmax(1)} <= {*present}


def test_sets_of_classes_have_a_regression_for_each_class(model_folder: Path, tmp_path: Path) -> None:
    plan, data = plan_beside(model_folder, tmp_path, lambda nouns, _: sorted({"cat", "dog"} & {*nouns}))
    score = score_beside(plan, tmp_path / "scores")
    assert score is not None
    scaler = StandardScaler().fit(vectors_of(model_folder, data.train))
    train, test = (scaler.transform(vectors_of(model_folder, examples)) for examples in (data.train, data.test))
    found = []
    for strength in VECTOR_STRENGTHS:
        right = np.ones(len(data.test), dtype=bool)
        for index in range(2):
            model = LogisticRegression(C=strength, max_iter=1000)
            model.fit(train, [index in example.label for example in data.train])
            right &= model.predict(test) == [index in example.label for example in data.test]
        found.append(right.mean())
    assert any(score.metrics["test"]["accuracy"] == pytest.approx(value, abs=0.011) for value in found)


def test_a_task_with_its_own_train_file_and_several_tests_has_the_baseline_for_each(
    model_folder: Path, tmp_path: Path
) -> None:
    """The encoded train split and those of a test are two readings, whose settings are the cell's."""
    for seed, name in enumerate(("train", "validation", "en", "de")):
        lines = [json.dumps(row) for row in make_rows(30 if seed else 60, noisy_class, seed)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "own.yaml").write_text(
        "name: own\nfamily: sequence_classification\nmetric: accuracy\ntemplate: '{text}'\nlabel: label\n"
        "classes: [a, b, c]\nfiles: [{train: train.jsonl, validation: validation.jsonl, "
        "test: {en: en.jsonl, de: de.jsonl}}]\n",
        encoding="utf-8",
    )
    config = FinetuneConfig.model_validate(SHORT)
    plans = plan_cells(str(model_folder), [f"{tmp_path}/own.yaml:de"], config, {"own": str(tmp_path)})
    score = score_beside(plans[0], tmp_path / "scores")
    assert score is not None and score.num_examples == {"train": 60, "validation": 30, "test": 30}


@pytest.mark.parametrize("settings", [{"words": False}, {"frozen": True}, {"weights": "random"}])
def test_it_is_left_out_where_it_says_nothing(model_folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    plan, _ = plan_beside(model_folder, tmp_path, **settings)
    assert score_beside(plan, tmp_path / "scores") is None


def test_small_encoders_are_left_out(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "LEAST_PARAMETERS", 10**6)
    plan, _ = plan_beside(model_folder, tmp_path)
    assert score_beside(plan, tmp_path / "scores") is None


def test_fine_tuning_tells_what_the_frozen_encoder_reaches(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = make_rows(300, noisy_class)
    biphase.finetune(model_folder, "own", data=rows, scores=tmp_path, learning_rate=1e-3, **SHORT)
    printed = capsys.readouterr()
    assert [model for model, _ in read_scores(tmp_path).cells] == [str(model_folder)]
    assert "own · frozen vectors + linear: accuracy validation" in " ".join(printed.err.split())
    assert "Beside its vectors before training: " in printed.out
