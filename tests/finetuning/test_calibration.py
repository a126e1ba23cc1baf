"""A kept model's probabilities are as honest as one temperature makes them; sets of labels have thresholds."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import accuracy_score, f1_score, log_loss

import biphase
from biphase.errors import InputError
from biphase.files import MARK
from biphase.finetuning.calibration import Calibration, calibration_error, choose_thresholds, fit_temperature
from biphase.finetuning.class_report import read_report, tell_report
from biphase.finetuning.encoding import EncodedSplit
from biphase.finetuning.kept import RECORD
from biphase.finetuning.scores import read_score
from biphase.tasks.spec import task_table

from ..conftest import DEVICE
from .conftest import write_jsonl
from .test_keeping import fit_and_keep, keep_untrained
from .test_kinds import fit_made_up, sentences, write_task
from .test_predict import predict_all


def calibration_of(kept: Path) -> Calibration:
    return Calibration.model_validate(json.loads((kept / RECORD).read_text())["calibration"])


def test_the_calibration_error_is_that_of_guo_et_al() -> None:
    """Their script's loop over bins, which are open below and closed above."""
    rng = np.random.default_rng(0)
    confidence_N = np.append(rng.random(200) ** 0.3, [1.0, 1 / 15, 2 / 15])
    is_right_N = rng.random(203) < confidence_N**2
    rows = [
        {"probability": p, "gold": "a", "predicted": "ab"[not r]} for p, r in zip(confidence_N, is_right_N, strict=True)
    ]
    expected, edges = 0.0, np.linspace(0, 1, 16)
    for low, high in pairwise(edges):
        inside = (confidence_N > low) & (confidence_N <= high)
        if inside.any():
            expected += abs(confidence_N[inside].mean() - is_right_N[inside].mean()) * inside.mean()
    assert calibration_error(rows) == pytest.approx(expected) and expected > 0.05


def test_the_temperature_has_the_lowest_loss() -> None:
    """Labels are drawn from the logits divided by 2.5; the loss is scikit-learn's."""
    rng = np.random.default_rng(0)
    logits_NC = 5 * rng.standard_normal((4000, 5))
    probabilities_NC = softmax(logits_NC / 2.5, axis=1)
    gold_N = (probabilities_NC.cumsum(axis=1) < rng.random((4000, 1))).sum(axis=1)
    temperature = fit_temperature(logits_NC.astype(np.float32), gold_N)
    assert temperature == pytest.approx(2.5, rel=0.05)
    losses = [log_loss(gold_N, softmax(logits_NC / (temperature * factor), axis=1)) for factor in (0.98, 1, 1.02)]
    assert min(losses) == losses[1]
    # A choice that a question lacks changes nothing; where all are right there is nothing to fit.
    padded_NC = np.hstack([logits_NC, np.full((4000, 1), -np.inf)])
    assert fit_temperature(padded_NC, gold_N) == pytest.approx(temperature, rel=1e-4)
    assert fit_temperature(logits_NC, logits_NC.argmax(axis=1)) == 1.0


def test_noise_gives_no_temperature() -> None:
    """Labels are drawn from the logits themselves: a temperature is kept in 5 % of such samples, as the test says."""
    rng = np.random.default_rng(0)
    temperatures = []
    for _ in range(400):
        logits_NC = 2 * rng.standard_normal((300, 4))
        gold_N = (softmax(logits_NC, axis=1).cumsum(axis=1) < rng.random((300, 1))).sum(axis=1)
        temperatures.append(fit_temperature(logits_NC, gold_N))
    assert 0.02 < np.mean(np.array(temperatures) != 1) < 0.08
    # A degenerate network knows the shares of the classes alone, as all that it says of any example.
    shares_C = np.array([0.6, 0.3, 0.1])
    logits_NC = np.tile(np.log(shares_C), (1000, 1))
    assert fit_temperature(logits_NC, np.repeat([0, 1, 2], [610, 290, 100])) == 1
    assert fit_temperature(logits_NC, np.repeat([0, 1, 2], [800, 150, 50])) < 1  # these examples do say otherwise


def test_a_network_that_is_far_too_sure_gets_a_temperature_from_a_hundred_examples() -> None:
    """It is right in 63 % and sure in 95 %, as after many epochs on a small table: these examples do not tell its best
    temperature from 20, but they do tell it from 1."""
    rng = np.random.default_rng(0)
    rows, errors = [], []
    for num in (100, 2000):
        gold_N = rng.integers(2, size=num)
        sure_N = np.where(rng.random(num) < 0.63, 1, -1) * rng.normal(4, 1, num)
        rows.append((np.stack([-sure_N / 2, sure_N / 2], axis=1) * np.where(gold_N == 1, 1, -1)[:, None], gold_N))
    temperature = fit_temperature(*rows[0])
    for divisor in (1, temperature):
        chances_NC = softmax(rows[1][0] / divisor, axis=1)
        right_N = chances_NC.argmax(axis=1) == rows[1][1]
        pairs = zip(chances_NC.max(axis=1), right_N, strict=True)
        errors.append(calibration_error({"probability": p, "gold": True, "predicted": right} for p, right in pairs))
    assert temperature > 4 and errors[1] < 0.1 < 0.3 < errors[0]


@pytest.mark.parametrize("gap", [0.028, 0.01])
def test_a_fit_at_the_end_of_its_range_is_no_fit(gap: float) -> None:
    """A network that has learned nothing prefers one class by a hair, which has more than a third of 120 examples by
    luck: the best temperature is 0.051, or lower than the search goes. A hundred times the logits have one.
    """
    logits_NC, gold_N = np.tile([gap, 0.0, 0.0], (120, 1)), np.repeat([0, 1, 2], [56, 32, 32])
    assert fit_temperature(logits_NC, gold_N) == 1
    assert fit_temperature(100 * logits_NC, gold_N) == pytest.approx(100 * gap / np.log(56 / 32), rel=0.05)


def test_thresholds_have_the_highest_f1_of_each_class() -> None:
    rng = np.random.default_rng(0)
    gold_NC = rng.random((60, 4)) < [0.1, 0.5, 0.3, 0.0]
    probabilities_NC = (0.2 * gold_NC + 0.4 * rng.random((60, 4))).round(2)  # of which some are equal
    thresholds = choose_thresholds(probabilities_NC, gold_NC, "macro_f1")
    for number, threshold in enumerate(thresholds[:3]):
        tried = [f1_score(gold_NC[:, number], probabilities_NC[:, number] > t) for t in np.linspace(0, 0.99, 199)]
        chosen = f1_score(gold_NC[:, number], probabilities_NC[:, number] > threshold)
        assert chosen == max(tried) > f1_score(gold_NC[:, number], probabilities_NC[:, number] > 0.5)
    assert thresholds[3] == 0.5  # which no example has
    gold_21 = np.array([[1], [0]])
    assert choose_thresholds(np.array([[0.9], [0.4]]), gold_21, "macro_f1") == (0.5,)  # as good as any from 0.4 to 0.9
    assert choose_thresholds(np.array([[0.4], [0.2]]), gold_21, "macro_f1") == (pytest.approx(0.3),)


@pytest.mark.parametrize("metric", ["micro_f1", "accuracy"])
def test_thresholds_lower_no_score_on_validation(metric: str) -> None:
    """Of a class that is not learned, the best F1 is that of predicting it for nearly every text."""
    rng = np.random.default_rng(0)
    gold_NC = rng.random((300, 4)) < [0.4, 0.4, 0.05, 0.05]
    probabilities_NC = 0.05 + 0.01 * rng.random((300, 4))
    probabilities_NC[:, :2] = 0.3 * rng.random((300, 2)) + [0.2, 0.5] + 0.2 * gold_NC[:, :2]
    scores = []
    for thresholds in ((0.5,) * 4, choose_thresholds(probabilities_NC, gold_NC, metric)):
        predicted_NC = probabilities_NC > np.array(thresholds)
        scores.append(
            accuracy_score(gold_NC, predicted_NC)
            if metric == "accuracy"
            else f1_score(gold_NC, predicted_NC, average="micro")
        )
    assert thresholds[0] < 0.5 < thresholds[1] and scores[1] > scores[0] + 0.1 and thresholds[2:] == (0.5, 0.5)
    of_macro = choose_thresholds(probabilities_NC, gold_NC, "macro_f1")
    assert of_macro[:2] == thresholds[:2] and max(of_macro[2:]) < 0.06


def test_a_kept_model_is_scored_as_its_cell_was(
    model_folder: Path,
    data_dirs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the same file. The temperature changes probabilities, and no label."""
    calls: list[int] = []

    def counted(split: Any, *arguments: Any) -> Any:
        calls.append(split.num_examples)
        return predict_once(split, *arguments)

    predict_once = EncodedSplit.predict
    monkeypatch.setattr(EncodedSplit, "predict", counted)
    kept, _, rows = fit_and_keep("snli", model_folder, data_dirs["snli"], tmp_path, epochs=6)
    assert calls.count(len(rows)) == 1, "a kept model is not run on test again"
    calibration = calibration_of(kept)
    said = capsys.readouterr().err
    assert calibration.temperature != 1 and f"a temperature of {calibration.temperature:.2f}" in said
    assert re.search(r"the kept model on test: the surest examples: of 9\d % \(probability from 0\.\d{3}\), ", said)
    file = data_dirs["snli"] / "test.jsonl"
    score = biphase.score(kept, file, picture=tmp_path / "a.png", device=DEVICE)
    right = np.array([row["gold"] == row["predicted"] for row in rows])
    accuracy = score.metrics["accuracy"]
    assert accuracy.value == pytest.approx(right.mean()) and score.num_examples == len(rows)
    half = 2.0739 * right.std(ddof=1) / np.sqrt(len(rows))  # Student's t, 22 degrees of freedom
    assert [accuracy.low, accuracy.high] == pytest.approx([right.mean() - half, right.mean() + half], abs=1e-4)
    assert score.classes is not None and calibration.on_test is not None
    assert score.classes.calibration_error == pytest.approx(calibration.on_test[1], abs=1e-3)
    predicted = predict_all(kept, file)
    assert [one["predicted"] for one in predicted] == [row["predicted"] for row in rows]
    logs = [np.log([*one["probabilities"].values()]) * calibration.temperature for one in predicted]
    uncalibrated = [softmax(row).max() for row in logs]
    assert uncalibrated == pytest.approx([row["probability"] for row in rows], abs=1e-3)
    # The cell has it too, kept or not, and its report tells what is left.
    [cell] = (tmp_path / "scores").glob("snli-*")
    assert read_score(cell).calibration == calibration
    capsys.readouterr()
    before, after = calibration.on_test
    report = read_report(read_score(cell))
    assert report is not None and report.calibration_error == pytest.approx(before)
    [sentence] = [line for line in tell_report(report, {}) if "ECE" in line]
    assert sentence == (
        f"probabilities are {100 * after:.1f} points off on average (ECE) with the temperature "
        f"{calibration.temperature:.2f} that validation gives, as in a kept model; {100 * before:.1f} without it"
    )
    # `predict` on labelled rows says as much.
    capsys.readouterr()
    biphase.predict(kept, file, device=DEVICE)
    assert "labels: 23 known to the model, 0 missing, 0 unknown\n" in capsys.readouterr().err


def test_rows_without_a_label_are_left_out_of_a_score(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    kept, _, _ = fit_and_keep("snli", model_folder, data_dirs["snli"], tmp_path)
    row = {"premise": "a", "hypothesis": "b"}
    score = biphase.score(kept, [row | {"label": "neutral"}, row | {"label": None}, row | {"label": 2}], device=DEVICE)
    assert (score.num_examples, score.num_left_out) == (2, 1)
    for rows, complaint in (
        (
            [row | {"label": "neutral"}, row | {"label": "maybe"}],
            r"rows.jsonl:2: label 'maybe' is not one of task 'snli'",
        ),
        ([row], "no row has a label in a column 'label'; `biphase predict` needs none"),
    ):
        write_jsonl(tmp_path / "rows.jsonl", rows)
        in_memory = complaint.replace("rows.jsonl:2", "^row 1")
        with pytest.raises(InputError, match=in_memory):
            biphase.score(kept, rows, device=DEVICE)
        with pytest.raises(InputError, match=complaint):
            biphase.score(kept, tmp_path / "rows.jsonl", device=DEVICE)
    with pytest.raises(InputError, match="has no head that predicts"):
        biphase.score(model_folder, [row])


@pytest.mark.parametrize("task", ["wnut17", "squad_v2"])
def test_taggers_and_answers_are_scored_as_their_cells_were(
    task: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    kept, _, rows = fit_and_keep(task, model_folder, data_dirs[task], tmp_path, epochs=10, learning_rate=1e-2)
    file = data_dirs[task] / ("test.jsonl" if task == "wnut17" else "dev-v2.0.json")
    score, [folder] = biphase.score(kept, file, device=DEVICE), [*(tmp_path / "scores").glob("*-*")]
    cell = json.loads((folder / "score.json").read_text())["metrics"]["test"]
    assert {name: measure.value for name, measure in score.metrics.items()} == pytest.approx(cell)
    assert score.num_examples == len(rows) and (score.classes is None) == (task == "squad_v2")


def test_sets_of_labels_are_kept_with_thresholds(model_folder: Path, tmp_path: Path) -> None:
    """A rare label, which is never surer than a half after a short training; the cell's own score stays as it was."""
    names = ["dog", "cat", "moon"]
    rows: list[dict[str, Any]] = []
    for words in sentences(np.random.default_rng(0), 150):
        rows.append({"text": " ".join(words), "labels": [name for name in names if name in words]})
    keys = {"family": "sequence_classification", "problem_type": "multi_label_classification", "metric": "micro_f1"}
    task = write_task(tmp_path, rows, template="{text}", label="labels", classes=names, **keys)
    cell, found = fit_made_up(task, model_folder, epochs=2)
    thresholds = calibration_of(tmp_path / "kept").thresholds
    assert len(thresholds) == 3 and thresholds != (0.5, 0.5, 0.5) and thresholds[2] == 0.5
    predicted = predict_all(tmp_path / "kept", tmp_path / "test.jsonl")
    for one, row in zip(predicted, found, strict=True):
        assert one["probabilities"] == pytest.approx(row["probabilities"], abs=1e-4)
        above = [name for name, least in zip(names, thresholds, strict=True) if one["probabilities"][name] > least]
        assert one["predicted"] == above
    score = biphase.score(tmp_path / "kept", tmp_path / "test.jsonl", device=DEVICE)
    assert score.metrics["macro_f1"].value > cell.metrics["test"]["macro_f1"]


@pytest.mark.parametrize(
    ("calibration", "complaint"),
    [({"temperature": 0}, "greater than 0"), ({"thresholds": [0.5]}, "not have one threshold for each of its classes")],
)
def test_a_calibration_that_cannot_be_is_refused(
    calibration: dict[str, Any], complaint: str, model_folder: Path, tmp_path: Path
) -> None:
    kept = keep_untrained(task_table()["snli"], model_folder, tmp_path / "kept")
    record = json.loads((kept / RECORD).read_text())
    (kept / RECORD).write_text(json.dumps(record | {"calibration": calibration}))
    (kept / MARK).unlink()
    with pytest.raises(InputError, match=complaint):
        biphase.predict(kept, [{"premise": "a", "hypothesis": "b"}])
