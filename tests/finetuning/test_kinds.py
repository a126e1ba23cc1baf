"""Kinds of tasks beside the paper's: scored as scikit-learn and scipy score them, kept as transformers has them."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
import transformers
import yaml
from sklearn.metrics import mean_absolute_error, root_mean_squared_error
from sklearn.preprocessing import StandardScaler

import biphase
from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.finetuning.config import PROTOCOL, FinetuneConfig, settle_config
from biphase.finetuning.encoding import CellContext
from biphase.finetuning.encoding_cache import encode_source
from biphase.finetuning.families.sequence_classification import Split
from biphase.finetuning.heads import NumberLayer, build_network
from biphase.finetuning.kept import RECORD
from biphase.finetuning.metrics import score_rows
from biphase.finetuning.scores import Score, read_examples, tell_errors
from biphase.tasks.examples import label_index, load_examples
from biphase.tasks.sources import find_source
from biphase.tasks.spec import Task, find_task
from biphase.tasks.splits import draw_indices

from ..conftest import DEVICE
from .conftest import NOUNS, fit_cell, predict_split, write_jsonl
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
    given = {"precision": "fp32", "device": DEVICE, "learning_rate": 5e-3, "batch_size": 8, "epochs": 12}
    config = FinetuneConfig.model_validate(given | {"max_length": 128} | settings)
    folder = task.parent
    score = fit_cell(str(model), str(task), config, folder / "scores", folder, keep=folder / "kept")
    assert score.folder is not None
    examples = read_examples(score)  # which holds their contributions against the score
    rows = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    assert examples.values_SN.shape == (1, len(rows))
    (score.folder / "test.npz").unlink()  # it is made again of the predictions
    again = read_examples(score)
    assert np.array_equal(again.values_SN, examples.values_SN)
    assert (again.fingerprint, again.num_degenerate) == (examples.fingerprint, examples.num_degenerate)
    return score, rows


def test_parts_of_speech(model_folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(90):
        words = [str(word) for word in rng.choice(NOUNS, rng.integers(2, 7))]
        rows.append({"tokens": words, "tags": ["NOUN" if word in NOUNS[:5] else "VERB" for word in words]})
    keys = {"family": "token_classification", "metric": "macro_f1", "label": "tags", "classes": ["NOUN", "VERB"]}
    task = write_task(tmp_path, rows, **keys)
    score, found = fit_made_up(task, model_folder)
    pairs = [pair for row in found for pair in zip(row["gold"], row["predicted"], strict=True)]
    macro = sklearn.metrics.f1_score(*zip(*pairs, strict=True), average="macro")
    expected = {"accuracy": np.mean([a == b for a, b in pairs]), "macro_f1": macro}
    assert score.metrics["test"] == pytest.approx(expected)
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


def sentences(rng: np.random.Generator, number: int) -> list[list[str]]:
    return [[str(word) for word in rng.choice(NOUNS, 5, replace=False)] for _ in range(number)]


def test_similarity_of_pairs(model_folder: Path, tmp_path: Path) -> None:
    """How many of four words are of one kind, from 0 to 1; correlations are scipy's, numbers the pipeline's."""
    rows = []
    for words in sentences(np.random.default_rng(0), 150):
        share = sum(word in NOUNS[:5] for word in words[:4]) / 4
        rows.append({"a": " ".join(words[:2]), "b": " ".join(words[2:4]), "score": str(share)})
    keys = {"family": "sequence_classification", "problem_type": "regression", "metric": "spearman", "label": "score"}
    score, found = fit_made_up(write_task(tmp_path, rows, template="{a} ; {b}", **keys), model_folder)
    gold, predicted = np.array([(row["gold"], row["predicted"]) for row in found]).T
    assert gold.tolist() == [float(row["score"]) for row in rows[2::3]]
    assert score.metrics["test"] == {
        "spearman": pytest.approx(scipy.stats.spearmanr(gold, predicted).statistic),
        "pearson": pytest.approx(scipy.stats.pearsonr(gold, predicted).statistic),
    }
    assert score.metrics["test"]["pearson"] > 0.8
    errors = {"mae": mean_absolute_error(gold, predicted), "rmse": root_mean_squared_error(gold, predicted)}
    told = f"in the unit of the labels: mae {errors['mae']:.4g}, rmse {errors['rmse']:.4g}"
    assert [sentence.endswith(told) for sentence in tell_errors(score)] == [True]
    judged = biphase.score(tmp_path / "kept", tmp_path / "test.jsonl", device=DEVICE)
    assert {name: judged.metrics[name].value for name in errors} == pytest.approx(errors, rel=1e-3)
    assert judged.show("mae").startswith(f"mae {judged.metrics['mae'].value:.4g} [0.")
    classify = transformers.pipeline("text-classification", str(tmp_path / "kept"), device="cpu")
    assert classify.model.config.problem_type == "regression"
    said = [classify(f"{row['a']} ; {row['b']}")[0] for row in rows[2::3]]
    assert [one["score"] for one in said] == pytest.approx(predicted.tolist(), abs=1e-4)
    with pytest.raises(InputError, match=r"every 'score' is 0\.5: a correlation needs different numbers"):
        biphase.score(tmp_path / "kept", [row | {"score": "0.5"} for row in rows[:2]], device=DEVICE)
    assert said[0]["label"] == "score"
    kept = predict_all(tmp_path / "kept", unlabelled(tmp_path / "test.jsonl", "score"))
    assert [row["predicted"] for row in kept] == pytest.approx(predicted.tolist(), abs=1e-4)


def rated_texts(folder: Path, scale: float, mean: float) -> tuple[Path, np.ndarray]:
    """A task whose label counts some words of each text, times a scale and plus a mean, and the labels of train."""
    words = sentences(np.random.default_rng(0), 150)
    numbers = scale * np.array([sum(word in NOUNS[:5] for word in row[:4]) for row in words]) + mean
    rows = [{"text": " ".join(row[:4]), "score": number} for row, number in zip(words, numbers.tolist(), strict=True)]
    folder.mkdir()
    keys = {"family": "sequence_classification", "problem_type": "regression", "metric": "spearman", "label": "score"}
    return write_task(folder, rows, template="{text}", **keys), numbers[::3]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"lora": {"r": 2}},
        {"head": "transformers"},
        {"weight_dtype": "bf16"},
    ],
    ids=["paper", "bf16", "lora", "transformers", "bf16 weights"],
)
@pytest.mark.parametrize(("scale", "mean"), [(30.0, 4000.0), (1e-4, -2e-3)])
def test_numbers_are_learned_as_scikit_learns_scaler_writes_them(
    scale: float, mean: float, settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """In any unit, with the same losses; and predicted in that unit, by transformers too."""
    if "lora" in settings:
        pytest.importorskip("peft")
    task, labels = rated_texts(tmp_path / "raw", scale, mean)
    scaler = StandardScaler().fit(labels[:, None])
    [center], [deviation] = scaler.mean_, scaler.scale_
    own, _ = rated_texts(tmp_path / "own", scale / deviation, (mean - center) / deviation)
    (score, found), (expected, standard) = (
        fit_made_up(path, model_folder, max_steps=8, **settings) for path in (task, own)
    )
    tolerance = 2e-4 if not {"precision", "weight_dtype"} & {*settings} else 0.05
    losses = [json.loads((one.folder / "losses.json").read_text()) for one in (score, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance) and losses[0][0] == pytest.approx(1, abs=0.9)
    predicted, z = (np.array([row["predicted"] for row in rows]) for rows in (found, standard))
    assert (predicted - center) / deviation == pytest.approx(z, abs=tolerance) and np.ptp(z) > 2 * tolerance

    rows = [json.loads(line) for line in (tmp_path / "raw" / "test.jsonl").read_text().splitlines()]
    classify = transformers.pipeline("text-classification", str(tmp_path / "raw" / "kept"), device="cpu")
    said = np.array([classify(row["text"])[0]["score"] for row in rows])
    assert said == pytest.approx(predicted, abs=tolerance * deviation)


@pytest.mark.parametrize("is_probe", [False, True])
def test_numbers_far_from_0_are_predicted(is_probe: bool, encoder: Encoder, tmp_path: Path) -> None:
    """A network that cannot reach them with its updates would say the same of every text."""
    task, _ = rated_texts(tmp_path / "raw", 30.0, 4000.0)
    settings: dict[str, Any] = {"frozen": True, "learning_rate": 0.1} if is_probe else {"load_best_model_at_end": True}
    given: dict[str, Any] = {
        "precision": "fp32",
        "device": DEVICE,
        "batch_size": 8,
        "epochs": 12,
        "learning_rate": 5e-3,
    }
    config = FinetuneConfig.model_validate(given | {"max_length": 128} | settings)
    score = fit_cell(encoder.name, str(task), config, tmp_path / "scores", task.parent)
    assert score.folder is not None
    found = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    gold, predicted = np.array([(row["gold"], row["predicted"]) for row in found]).T
    assert sklearn.metrics.r2_score(gold, predicted) > (0.2 if is_probe else 0.3), "0 for the same of every text"
    assert score.final_loss is not None and score.final_loss < 1
    assert score.protocol == PROTOCOL + 1, "scores of the training that they had before go by another name"


def test_numbers_are_computed_in_fp32(model_folder: Path, tmp_path: Path) -> None:
    """The last layer is, so that bf16 makes no ties; labels of a subset that are all the same are learned too."""
    task, _ = rated_texts(tmp_path / "raw", 30.0, 4000.0)
    _, found = fit_made_up(task, model_folder, precision="bf16", epochs=4)
    predicted = torch.tensor([row["predicted"] for row in found], dtype=torch.float64)
    assert len(predicted.unique()) > 0.9 * len(predicted) > 9 * len(predicted.bfloat16().unique())
    (tmp_path / "raw" / "kept").rename(tmp_path / "first")
    score, found = fit_made_up(task, model_folder, max_train_examples=1, epochs=40)
    label = load_examples(find_source(find_task(str(task)), task.parent), False).train[draw_indices(50, 1)[0]].label
    assert not score.diverged and [row["predicted"] for row in found] == pytest.approx([label] * 50, abs=3)


def test_a_head_without_a_bias_learns_numbers_of_the_size_1(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 1, bias=False)
    number, inputs = NumberLayer(layer), torch.randn(5, 3)
    Split.set_unit(SimpleNamespace(labels_S=np.array([3.0, 4.0])), number, np.arange(2))
    assert torch.equal(number(inputs), layer(inputs) * math.sqrt(12.5)) and number.take_unit()[0] == 0
    assert torch.equal(number(inputs), layer(inputs))


def test_sets_of_labels(model_folder: Path, tmp_path: Path) -> None:
    """Which of four words are in a text; a label that is nowhere counts as in scikit-learn."""
    names = [*NOUNS[:4], "moon"]
    rows = []
    for number, words in enumerate(sentences(np.random.default_rng(0), 120)):
        labels = [name for name in names if name in words]
        rows.append({"text": " ".join(words), "label": labels if number % 2 else "|".join(labels)})
    keys = {"family": "sequence_classification", "problem_type": "multi_label_classification", "metric": "micro_f1"}
    score, found = fit_made_up(write_task(tmp_path, rows, template="{text}", classes=names, **keys), model_folder)
    assert [row["gold"] for row in found] == [[n for n in names if n in row["text"].split()] for row in rows[2::3]]
    gold, predicted = (np.array([[n in row[key] for n in names] for row in found]) for key in ("gold", "predicted"))
    scores = score.metrics["test"]
    for average in ("micro", "macro"):
        theirs = sklearn.metrics.f1_score(gold, predicted, average=average, zero_division=0)
        assert scores[f"{average}_f1"] == pytest.approx(theirs)
    assert scores["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(gold, predicted))
    assert score_rows(found, ("macro_f1",), names)["macro_f1"] == pytest.approx(scores["macro_f1"])
    kept = predict_all(tmp_path / "kept", unlabelled(tmp_path / "test.jsonl", "label"))
    thresholds = json.loads((tmp_path / "kept" / RECORD).read_text())["calibration"]["thresholds"]
    for row in kept:
        above = [name for name, t in zip(names, thresholds, strict=True) if row["probabilities"][name] > t]
        assert row["predicted"] == above
    classify = transformers.pipeline("text-classification", str(tmp_path / "kept"), device="cpu", top_k=None)
    for row, one in zip(rows[2::3], found, strict=True):
        said = {part["label"]: part["score"] for part in classify([row["text"]])[0]}
        assert one["probabilities"] == pytest.approx(said, abs=1e-4)


def unlabelled(file: Path, label: str) -> Path:
    """The rows of a file without their labels."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    write_jsonl(file.with_name("new.jsonl"), [{key: row[key] for key in row if key != label} for row in rows])
    return file.with_name("new.jsonl")


NUMBERS = {"problem_type": "regression", "metric": "pearson"}
SETS = {"problem_type": "multi_label_classification", "metric": "micro_f1", "classes": ["a", "b"]}


@pytest.mark.parametrize(
    ("keys", "labels", "complaint"),
    [
        (NUMBERS, ["1", "high"], r"train\.jsonl:2: 'label' is \"high\", not a number"),
        (NUMBERS, [1, "0,5"], r"train\.jsonl:2: 'label' is \"0,5\", not a number"),
        (NUMBERS, [1, True], r"train\.jsonl:2: 'label' is true, not a number"),
        (NUMBERS, [1, 10**400], r"train\.jsonl:2: 'label' is 10*, not a number: fix the row or remove it"),
        (NUMBERS, [1, float("nan")], r"1 row has no label \(the first: .*train\.jsonl:2\); fill them in"),
        (NUMBERS, [2, 2.0], "all 2 examples of train in .* have the same label"),
        (
            SETS,
            [["a"], ["c"]],
            r"train\.jsonl:2: label 'c' is not one of .*; correct it, or map it by `labels` in the task file befor",
        ),
        (SETS, [["a"], {"a": 1}], r"train\.jsonl:2: 'label' is {\"a\": 1}, not a list of labels \(empty for none\)"),
        (SETS, ["a,b", "b; a"], "all 2 examples of train in .* have the same label"),
        ({"metric": "mcc", "classes": ["a", "b"]}, ["a", "a"], "all 2 examples of train in .* have the same label"),
    ],
)
def test_labels_that_do_not_fit(tmp_path: Path, keys: Any, labels: list[Any], complaint: str) -> None:
    rows = [{"text": str(number), "label": label} for number, label in enumerate(labels)]
    task = write_task(tmp_path, [], family="sequence_classification", template="{text}", **keys)
    write_jsonl(tmp_path / "train.jsonl", rows)
    for split, label in (("validation", labels[0]), ("test", labels[0])):
        write_jsonl(tmp_path / f"{split}.jsonl", [{"text": split, "label": label}])
    with pytest.raises(InputError, match=complaint):
        load_examples(find_source(find_task(str(task)), tmp_path), judged_only=False)


def test_multiple_choice(model_folder: Path, tmp_path: Path) -> None:
    """Which choice is of the first words? Two or three choices; scores are those of transformers' own class."""
    rng = np.random.default_rng(0)
    rows = []
    for number, words in enumerate(sentences(rng, 180)):
        wrong = [str(word) for word in rng.choice(NOUNS[5:], 2, replace=False)]
        right = int(rng.integers(2 + number % 2))
        choices = wrong[: 1 + number % 2]
        choices.insert(right, str(rng.choice(NOUNS[:5])))
        rows.append({"question": " ".join(words), "choices": {"text": choices, "label": []}, "label": "ABC"[right]})
    keys = {"family": "multiple_choice", "metric": "accuracy", "template": "{question} : {choice}", "unlabelled": ["?"]}
    task = write_task(tmp_path, rows, choices=["choices"], classes=["A", "B", "C"], **keys)
    score, found = fit_made_up(task, model_folder, microbatch_tokens=64)
    assert [row["gold"] for row in found] == [row["label"] for row in rows[2::3]]
    right = [row["gold"] == row["predicted"] for row in found]
    assert score.metrics["test"] == {"accuracy": pytest.approx(np.mean(right))} and np.mean(right) > 0.8
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "kept")
    for row, one in zip(rows[2::3], found, strict=True):
        texts = [f"{row['question']} : {choice}" for choice in row["choices"]["text"]]  # type: ignore[index]
        with torch.no_grad():
            logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
        assert one["predicted"] == "ABC"[int(logits.argmax())]
        assert one["probability"] == pytest.approx(float(logits.softmax(0).max()), abs=1e-4)
    kept = predict_all(tmp_path / "kept", unlabelled(tmp_path / "test.jsonl", "label"))
    assert [row["predicted"] for row in kept] == [row["predicted"] for row in found]
    assert [len(row["probabilities"]) for row in kept] == [len(row["choices"]["text"]) for row in rows[2::3]]
    # Names of the row's own, one of which says elsewhere that nobody knows the answer; names that tell nothing.
    for names, told in ((["1", "2", "3"], "123"), (["?", "1", "2"], "?12"), (["1", "1", "1"], "ABC")):
        named = [{**row, "choices": {**row["choices"], "label": names}} for row in rows[2::3]]  # type: ignore[dict-item]
        write_jsonl(tmp_path / "test.jsonl", named)
        own = predict_all(tmp_path / "kept", unlabelled(tmp_path / "test.jsonl", "label"))
        assert [row["predicted"] for row in own] == [told["ABC".index(row["predicted"])] for row in kept]
        assert [len(row["probabilities"]) for row in own] == [len(row["probabilities"]) for row in kept]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"a": "x", "b": "", "label": 0}, r'train\.jsonl:1: \["x", ""\] are not two or more choices'),
        ({"a": "x", "label": 0}, r"train\.jsonl:1: there is no column 'b'"),
        (
            {"a": "x", "b": "y", "label": 2},
            r"train\.jsonl:1: 2 choices, where task 'made-up' names 3, and 2 is right",
        ),
    ],
)
def test_choices_that_do_not_fit(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    keys = {"family": "multiple_choice", "metric": "accuracy", "template": "{choice}", "classes": ["A", "B", "C"]}
    others = [{"a": str(number), "b": "z", "label": 0} for number in range(5)]
    task = write_task(tmp_path, [row, *others], choices=["a", "b"], **keys)
    with pytest.raises(InputError, match=complaint):
        load_examples(find_source(find_task(str(task)), tmp_path), judged_only=False)


def test_the_right_choice_by_the_names_of_its_row(tmp_path: Path) -> None:
    """ARC names choices by letters in most rows, and from 1 on in some."""
    rows = [
        {"choices": {"text": ["x", "y"], "label": names}, "label": label}
        for names, label in ((["A", "B"], "B"), (["1", "2"], "1"), (["1", "2"], 2), ([1, 2], 1.0), ([], 0))
    ]
    keys = {"family": "multiple_choice", "metric": "accuracy", "template": "{choice}", "classes": ["A", "B"]}
    task = write_task(tmp_path, rows, choices=["choices"], **keys)
    write_jsonl(tmp_path / "train.jsonl", rows)
    data = load_examples(find_source(find_task(str(task)), tmp_path), judged_only=False)
    assert [example.label for example in data.train] == [1, 0, 1, 0, 0]
    write_jsonl(tmp_path / "train.jsonl", [{"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "label": "0"}])
    with pytest.raises(InputError, match=r"train.jsonl:1: label '0' is none of its choices: 1, 2"):
        load_examples(find_source(find_task(str(task)), tmp_path), judged_only=False)


@pytest.mark.parametrize(
    ("classes", "label", "number"),
    [(["1", "0"], 1.0, 0), (["1", "0"], "0.0", 1), (["b", "a"], 1.0, 1), ([1, 2, 3], 2, 1), ([1, 2, 3], 0, None)],
)
def test_numbers_that_are_names(classes: list[Any], label: Any, number: int | None) -> None:
    """Where classes are called by numbers, a number is a name: 0 to 2 are not taken for 1 to 3."""
    keys: dict[str, Any] = {"family": "sequence_classification", "metric": "accuracy", "template": "{text}"}
    task = Task(name="rated", classes=tuple(map(str, classes)), **keys)
    if number is None:
        with pytest.raises(InputError, match=r"label 0 is not one of task 'rated': 1, 2, 3; correct it, or map it"):
            label_index(task, "rows:1", label)
    else:
        assert label_index(task, "rows:1", label) == number


def test_choices_are_computed_together_whatever_fits(encoder: Encoder, tmp_path: Path) -> None:
    """The gradient of a batch is that of its parts, and the loss torch's cross-entropy of each question."""
    rows = [
        {"a": " ".join(words[:3]), "b": words[3], "label": n % 2}
        for n, words in enumerate(sentences(np.random.default_rng(0), 18))
    ]
    keys = {"family": "multiple_choice", "metric": "accuracy", "template": "{choice}", "classes": ["0", "1"]}
    task = find_task(str(write_task(tmp_path, rows, choices=["a", "b"], **keys)))
    losses = {}
    for most in (8, 65_536):
        config = FinetuneConfig(precision="fp32", device=DEVICE, max_length=64, microbatch_tokens=most)
        cell = CellContext(task, config, torch.device(DEVICE), torch.float32)
        splits, _ = encode_source(find_source(task, tmp_path), encoder.tokenizer, settle_config(config, task, 64))
        split = splits["train"]
        torch.manual_seed(0)
        network = build_network(encoder, cell, [])
        items = np.array([3, 0, 5])
        loss = split.accumulate_gradients(network, items, split.pack_items(items, cell), cell)
        scores = torch.from_numpy(predict_split(network, split, cell)).reshape(-1, 2)
        theirs = torch.nn.functional.cross_entropy(scores[items], torch.from_numpy(split.right_Q[items]))
        assert float(loss) == pytest.approx(float(theirs), abs=1e-5)
        losses[most] = torch.cat(
            [parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None]
        )
    torch.testing.assert_close(losses[8], losses[65_536], atol=1e-6, rtol=1e-4)
