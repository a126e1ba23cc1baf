"""Linear probes and few shots: settings of any task."""

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.linear_model import LogisticRegression

from biphase.config import parse_config
from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.finetuning import heads as probe
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding_cache import encode_source
from biphase.finetuning.fit import draw_shots, train_network
from biphase.finetuning.heads import build_network
from biphase.tasks.sources import find_source
from biphase.tasks.spec import task_table

from .conftest import fit_cell, make_cell, predict_split


def train(task: str, encoder: Encoder, folder: Path, **settings: Any) -> tuple[Any, ...]:
    cell = make_cell(task, **settings)
    encoded, _ = encode_source(find_source(task_table()[task], folder), encoder.tokenizer, cell.config)
    torch.manual_seed(0)
    network = build_network(encoder, cell, [])
    return network, encoded, cell, *train_network(network, encoded["train"], cell)


def test_a_probe_is_logistic_regression_on_the_means_of_tokens(
    encoder: Encoder, model_folder: Path, data_dirs: dict[str, Path]
) -> None:
    """On what transformers' own network gives; with as many features as texts, both separate the texts of train."""
    settings = {"frozen": True, "learning_rate": 0.3, "epochs": 60, "batch_size": 32, "weight_decay": 0.0}
    network, encoded, cell, _, training = train("snli", encoder, data_dirs["snli"], **settings)
    assert [name for name, _ in network.named_children()] == ["backbone", "dropout", "out"]
    assert not [*network.backbone.parameters()]
    theirs = transformers.AutoModel.from_pretrained(model_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    features = {}
    for split in ("train", "test"):
        texts = encoded[split].texts
        samples = [torch.from_numpy(part.astype(np.int64)) for part in np.split(texts.tokens_T, texts.bounds_S1[1:-1])]
        with torch.no_grad():
            features[split] = torch.stack([theirs(one[None]).last_hidden_state[0].mean(0) for one in samples])
        assert tokenizer.decode(samples[0][:-1]).startswith("Premise: ")
    logits = features["test"] @ network.out.weight.detach().T + network.out.bias.detach()
    np.testing.assert_allclose(predict_split(network, encoded["test"], cell), logits, atol=1e-4)
    gold = encoded["train"].labels_S
    regression = LogisticRegression(C=1e4, max_iter=2000).fit(features["train"].numpy(), gold)
    ours = predict_split(network, encoded["train"], cell).argmax(-1)
    assert (ours == gold).mean() >= (regression.predict(features["train"].numpy()) == gold).mean() - 0.1
    assert training["num_steps"] == 60


@pytest.mark.parametrize("task", ["snli", "wnut17"])
def test_features_are_made_once_and_give_what_the_frozen_encoder_gives(
    task: str, encoder: Encoder, model_folder: Path, data_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of other rates and seeds encode nothing, and a cell alone has the same score to the last bit."""
    settings = {"frozen": True, "learning_rate": 0.1, "epochs": 3, "batch_size": 8, "head_dropout": 0.0}
    cell = make_cell(task, **settings)
    fit = partial(fit_cell, str(model_folder), task, data_dir=data_dirs[task])
    probe.stored_features.cache_clear()
    alone = fit(cell.config)
    with monkeypatch.context() as patch:
        patch.setattr(probe, "packed_hidden", lambda *_: pytest.fail("encoded again"))
        fit(cell.config.model_copy(update={"learning_rate": 0.01, "seed": 1}))
        again = fit(cell.config)
    assert again.metrics == alone.metrics and again.final_loss == alone.final_loss
    monkeypatch.setattr(probe, "can_look_up", lambda _: False)
    slow = fit(cell.config)
    assert slow.final_loss == pytest.approx(alone.final_loss, rel=1e-4)
    assert slow.metrics["test"] == pytest.approx(alone.metrics["test"], abs=0.1)


@pytest.mark.parametrize("task", ["snli", "wnut17"])
def test_features_take_room_for_what_is_asked_for(
    task: str, model_folder: Path, data_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: dict[Any, dict[int, torch.Tensor]] = {}
    monkeypatch.setattr(probe, "BLOCK", 2)
    monkeypatch.setattr(probe, "stored_features", lambda *key: stores.setdefault(key, {}))
    config = make_cell(task, frozen=True, max_steps=2, batch_size=2, max_train_examples=4).config
    fit_cell(str(model_folder), task, config, data_dir=data_dirs[task])
    ((*_, texts), rows), *_, ((*_, test_texts), test_rows) = stores.items()
    assert 0 < len(rows) < texts.num_samples / 2
    assert len(test_rows) == test_texts.num_samples


def test_a_gpu_holds_an_encoder_once_and_not_for_ever(encoder: Encoder) -> None:
    first = probe.place_backbone(encoder, torch.device("meta"))
    assert probe.place_backbone(encoder, torch.device("meta")) is first
    assert probe.place_backbone(encoder, torch.device("cpu")) is encoder.backbone
    del first
    gc.collect()
    assert not probe.backbones


@pytest.mark.parametrize("task", ["wnut17", "squad_v2"])
def test_probes_of_other_families(task: str, encoder: Encoder, data_dirs: dict[str, Path]) -> None:
    before = copy.deepcopy(encoder.backbone.state_dict())
    network, _, _, losses, _ = train(task, encoder, data_dirs[task], frozen=True, learning_rate=0.1, epochs=3)
    for after in (encoder.backbone.state_dict(), network.backbone.state_dict()):
        assert all(torch.equal(before[key], after[key]) for key in after)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_shots_are_drawn_from_each_class_by_the_seed(encoder: Encoder, data_dirs: dict[str, Path]) -> None:
    strata = np.array([0, 1, 0, 2, 1, 2, 0, 0, 2, 1])
    drawn = draw_shots(strata, 2, seed=3)
    assert strata[drawn].tolist().count(0) == strata[drawn].tolist().count(1) == 2 and len(drawn) == 6
    assert drawn.tolist() == draw_shots(strata, 2, seed=3).tolist() == sorted(set(drawn.tolist()))
    assert {tuple(draw_shots(strata, 2, seed)) for seed in range(9)} != {tuple(drawn)}
    with pytest.raises(InputError, match="shots=4: a class of the train split has only 3 examples"):
        draw_shots(strata, 4, seed=0)
    with pytest.raises(InputError, match="shots=4: the train split has only 3 examples"):
        draw_shots(np.zeros(3, dtype=np.int64), 4, seed=0)
    # Steps are not bounded by the one epoch that a whole task has by default.
    _, encoded, _, _, training = train("snli", encoder, data_dirs["snli"], shots=2, epochs=1, max_steps=5)
    assert training["num_steps"] == 5
    lengths = encoded["train"].texts.lengths_S[draw_shots(encoded["train"].strata, 2, 0)]
    num_tokens = training["tokens_per_second"]["train"] * training["seconds"]["train"]
    assert num_tokens == pytest.approx(5 * lengths.sum(), rel=0.1)
    *_, training = train("wnut17", encoder, data_dirs["wnut17"], shots=16, epochs=2, max_steps=50)
    assert training["num_steps"] == 4


def test_what_does_not_go_together(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give one"):
        parse_config(FinetuneConfig, {"shots": 2, "max_train_examples": 5}, origin="finetune")
    config = make_cell("snli", frozen=True).config
    with pytest.raises(InputError, match="squad_retrieval has no head to train"):
        fit_cell(str(model_folder), "squad_retrieval", config, data_dir=data_dirs["squad_retrieval"])
    with pytest.raises(
        InputError, match=r"a linear probe cannot be kept for sequence classification: .*; leave frozen out"
    ):
        fit_cell(str(model_folder), "snli", config, tmp_path, data_dirs["snli"], keep=tmp_path / "kept")
