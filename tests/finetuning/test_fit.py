import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from biphase.errors import InputError
from biphase.finetuning.fit import (
    Compute,
    Encoder,
    accumulate_gradients,
    build,
    cell_hash,
    choose_examples,
    fit_cell,
    learning_rate,
    load_encoded,
    load_encoder,
    measure,
    predict,
    train,
)
from biphase.finetuning.score import FinetuneConfig, Score, read_score
from biphase.finetuning.tasks import TASKS

CPU = Compute(torch.device("cpu"), torch.float32, microbatch_tokens=65_536)


@pytest.fixture
def tasks(pairs_dir: Path, words_dir: Path) -> dict[str, FinetuneConfig]:
    """A quick configuration for a task of each family."""
    common = {"precision": "fp32", "device": "cpu", "learning_rate": 3e-3, "batch_size": 8, "epochs": 2}
    return {
        "snli": FinetuneConfig(data_dir=str(pairs_dir), **common),
        "wnut17": FinetuneConfig(data_dir=str(words_dir), **common),
    }


def changed(config: FinetuneConfig, **values: object) -> FinetuneConfig:
    return FinetuneConfig.model_validate(config.model_dump() | values)


def encoded_for(encoder: Encoder, task: str, config: FinetuneConfig):
    return load_encoded(TASKS[task], config.data_dir, encoder.keyed, 256)


def test_learning_rate_at_every_step() -> None:
    config = FinetuneConfig(learning_rate=1.0, warmup_ratio=0.2)
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates == pytest.approx([1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert [learning_rate(FinetuneConfig(learning_rate=2.0, warmup_ratio=0), step, 2) for step in (0, 1)] == [2.0, 1.0]
    assert learning_rate(FinetuneConfig(learning_rate=2.0, warmup_ratio=1), 3, 4) == 2.0
    assert learning_rate(FinetuneConfig(learning_rate=2.0), 0, 1) == 2.0


def test_decay_is_that_of_transformers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=5e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 100, 1000)
    for step in range(1000):
        ahead = step if step >= 100 else step + 1
        assert learning_rate(FinetuneConfig(), step, 1000) == pytest.approx(5e-5 * schedule.lr_lambdas[0](ahead))


@pytest.mark.parametrize("task", ["snli", "wnut17"])
def test_packed_evaluation_equals_one_by_one(encoder: Encoder, tasks: dict, task: str) -> None:
    encoded = encoded_for(encoder, task, tasks[task])
    torch.manual_seed(0)
    model = build(encoder, TASKS[task], tasks[task])
    alone = Compute(CPU.device, CPU.dtype, microbatch_tokens=1)
    assert (predict(model, encoded, "test", CPU) == predict(model, encoded, "test", alone)).all()


@pytest.mark.parametrize("task", ["snli", "wnut17"])
def test_overfits_32_examples(encoder: Encoder, tasks: dict, task: str) -> None:
    config = changed(tasks[task], epochs=60, learning_rate=5e-3, head_dropout=0.0, weight_decay=0.0)
    encoded = encoded_for(encoder, task, config)
    torch.manual_seed(0)
    model = build(encoder, TASKS[task], config)
    training = train(model, encoded, config, CPU)
    assert training.num_steps == 240 and training.losses[-1] < 0.05 < training.losses[0]
    scores = measure(encoded, "train", predict(model, encoded, "train", CPU))
    assert scores[TASKS[task].metric] == 1.0


@pytest.mark.parametrize("task", ["snli", "wnut17"])
def test_same_cell_twice_is_the_same_to_the_last_bit(model_folder: Path, tasks: dict, task: str) -> None:
    first, second = (fit_cell(str(model_folder), task, tasks[task]) for _ in range(2))
    assert first.train_losses == second.train_losses and len(first.train_losses) == 8
    assert first.metrics == second.metrics
    other = fit_cell(str(model_folder), task, changed(tasks[task], seed=1))
    assert other.train_losses != first.train_losses and other.cell != first.cell


def test_a_cell_leaves_the_shared_encoder_alone(encoder: Encoder, tasks: dict) -> None:
    before = {name: value.clone() for name, value in encoder.backbone.state_dict().items()}
    state = torch.get_rng_state()
    fit_cell(encoder.name, "snli", tasks["snli"])
    assert load_encoder(encoder.name).backbone is encoder.backbone
    assert all(torch.equal(before[name], value) for name, value in encoder.backbone.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_folder_of_a_cell(model_folder: Path, tasks: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    score = fit_cell(str(model_folder), "wnut17", tasks["wnut17"], tmp_path)
    assert score.folder == tmp_path / f"wnut17-{score.cell[:16]}"
    assert sorted(file.name for file in score.folder.iterdir()) == ["score.json", "test.jsonl", "validation.jsonl"]
    assert read_score(score.folder) == score
    rows = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    assert len(rows) == score.num_examples["test"] == 23
    right = [gold == predicted for row in rows for gold, predicted in zip(row["gold"], row["predicted"], strict=True)]
    assert score.metrics["test"]["accuracy"] == pytest.approx(np.mean(right))
    capsys.readouterr()
    again = fit_cell(str(model_folder), "wnut17", tasks["wnut17"], tmp_path)
    assert again == score and again.seconds == score.seconds
    assert "finished before" in capsys.readouterr().out


def test_predictions_of_texts(model_folder: Path, tasks: dict, tmp_path: Path) -> None:
    score = fit_cell(str(model_folder), "snli", tasks["snli"], tmp_path)
    assert score.folder is not None
    rows = [json.loads(line) for line in (score.folder / "validation.jsonl").read_text().splitlines()]
    assert set(rows[0]) == {"id", "gold", "predicted"} and rows[0]["gold"] in TASKS["snli"].labels
    assert score.metrics["validation"]["accuracy"] == np.mean([row["gold"] == row["predicted"] for row in rows])


def test_the_name_of_a_cell(encoder: Encoder, tasks: dict, tmp_path: Path) -> None:
    config = tasks["snli"]
    encoded = encoded_for(encoder, "snli", config)
    name = cell_hash(encoder, encoded, config)
    same = {"data_dir": None, "device": "auto", "microbatch_tokens": 7}
    if not torch.cuda.is_available():
        assert cell_hash(encoder, encoded, changed(config, **same)) == name
    for change in ({"seed": 1}, {"learning_rate": 1e-3}, {"weights": "random"}, {"max_length": 20}, {"epochs": 1}):
        assert cell_hash(encoder, encoded, changed(config, **change)) != name
    assert cell_hash(encoder, encoded, changed(config, max_length=9999)) == name  # the network has 256 positions
    assert cell_hash(encoder, encoded_for(encoder, "snli", FinetuneConfig()), config) != name


def test_divergence_is_a_result(model_folder: Path, tasks: dict, tmp_path: Path) -> None:
    config = changed(tasks["snli"], learning_rate=1e30, warmup_ratio=0.0)
    score = fit_cell(str(model_folder), "snli", config, tmp_path)
    assert score.diverged and score.metrics == {}
    assert score.diverged_at_step == len(score.train_losses) < score.num_steps
    assert all(math.isfinite(loss) for loss in score.train_losses)
    assert fit_cell(str(model_folder), "snli", config, tmp_path) == score
    assert "diverged at step" in score.headline()


def test_random_weights_are_the_same_network_without_its_training(encoder: Encoder, tasks: dict) -> None:
    config = changed(tasks["snli"], weights="random")
    built = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        built.append(build(encoder, TASKS["snli"], config).backbone.state_dict())
    pretrained = encoder.backbone.state_dict()
    name = next(name for name in pretrained if "q_proj" in name)
    assert {key: value.shape for key, value in built[0].items()} == {key: v.shape for key, v in pretrained.items()}
    assert torch.equal(built[0][name], built[1][name])
    assert not torch.equal(built[0][name], built[2][name])
    assert not torch.equal(built[0][name], pretrained[name])


@pytest.mark.parametrize("task", ["snli", "wnut17"])
def test_microbatches_leave_the_gradient_unchanged(encoder: Encoder, tasks: dict, task: str) -> None:
    encoded = encoded_for(encoder, task, tasks[task])
    torch.manual_seed(0)
    model = build(encoder, TASKS[task], changed(tasks[task], head_dropout=0.0))
    results = []
    for budget in (65_536, 40):
        model.zero_grad()
        loss = accumulate_gradients(model, encoded.train, np.arange(9), Compute(CPU.device, CPU.dtype, budget))
        results.append((loss, [parameter.grad.clone() for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_training_on_a_subset(encoder: Encoder, tasks: dict) -> None:
    chosen = choose_examples(100, 10)
    assert len(set(chosen)) == 10 and (np.diff(chosen) > 0).all()
    assert (choose_examples(7, 10) == np.arange(7)).all()
    config = changed(tasks["snli"], max_train_examples=9, epochs=1)
    training = train(build(encoder, TASKS["snli"], config), encoded_for(encoder, "snli", config), config, CPU)
    assert training.num_steps == 2


def test_bf16_arithmetic_keeps_fp32_weights(encoder: Encoder, tasks: dict) -> None:
    encoded = encoded_for(encoder, "wnut17", tasks["wnut17"])
    compute = Compute(CPU.device, torch.bfloat16, 65_536)
    losses = {}
    for name, chosen in (("bf16", compute), ("fp32", CPU)):
        torch.manual_seed(0)
        model = build(encoder, TASKS["wnut17"], tasks["wnut17"])
        losses[name] = train(model, encoded, tasks["wnut17"], chosen).losses
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_long_inputs_are_cut_and_counted(model_folder: Path, tasks: dict, capsys: pytest.CaptureFixture) -> None:
    score = fit_cell(str(model_folder), "wnut17", changed(tasks["wnut17"], max_length=5))
    assert 0 < score.num_truncated["test"] <= 23
    assert "cut at 5 tokens" in capsys.readouterr().err
    assert score.metrics["test"].keys() == {"precision", "recall", "f1", "accuracy", "paper_f1"}


def test_bad_models(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(InputError, match="has no config"):
        fit_cell(str(tmp_path), "snli", FinetuneConfig())
    with pytest.raises(InputError, match="neither a folder nor a hub id"):
        fit_cell("/no/such/folder", "snli", FinetuneConfig())
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    with pytest.raises(InputError, match="cannot load weights"):
        fit_cell(str(tmp_path), "snli", FinetuneConfig())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match="cannot load weights"):
        fit_cell(str(tmp_path), "snli", FinetuneConfig())


def test_unknown_task_and_setting(model_folder: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'snli'\?"):
        fit_cell(str(model_folder), "snl", FinetuneConfig())
    with pytest.raises(ValueError, match="Extra inputs"):
        FinetuneConfig.model_validate({"lr": 1})


def test_headline_names_what_counts(model_folder: Path, tasks: dict) -> None:
    score: Score = fit_cell(str(model_folder), "snli", tasks["snli"])
    line = score.headline()
    assert "accuracy validation" in line and "tokens/s" in line and "seed 0" in line
