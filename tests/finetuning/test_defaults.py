import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import biphase
from biphase.finetuning import defaults
from biphase.finetuning.heads import load_encoder
from biphase.finetuning.scores import Score, show_rate

SETTINGS: dict[str, Any] = {"device": "cpu", "precision": "fp32", "max_length": 64, "batch_size": 8, "epochs": 2}
ROWS = [
    {"text": f"the {noun} is {'good' if number % 3 else 'bad'} on day {number}", "label": "yes" if number % 3 else "no"}
    for number in range(60)
    for noun in ("cat", "dog")
]


def tune(model_folder: Path, scores: Path, **settings: Any) -> Score:
    return biphase.finetune(model_folder, "own", data=ROWS, template="{text}", scores=scores, **SETTINGS | settings)


def test_a_table_without_a_rate_is_trained_at_the_best_of_a_search_that_is_told_and_not_repeated(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = tune(model_folder, tmp_path)
    [record] = (tmp_path / ".rates").glob("own-*.json")
    tried = {float(rate): value for rate, value in json.loads(record.read_text()).items()}
    assert [*tried] == defaults.rates_by_size(load_encoder(str(model_folder)).backbone)
    assert score.config.learning_rate == min(tried, key=lambda rate: tried[rate])
    told = " ".join(capsys.readouterr().err.split())
    assert f"own: learning rate {show_rate(score.config.learning_rate)} (tried for" in told
    explicit = tune(model_folder, tmp_path / "again", learning_rate=score.config.learning_rate)
    assert (explicit.cell, explicit.metrics, explicit.final_loss) == (score.cell, score.metrics, score.final_loss)
    assert not (tmp_path / "again" / ".rates").exists()
    monkeypatch.setattr(defaults, "try_rate", lambda *_: pytest.fail("it was searched for before"))
    assert tune(model_folder, tmp_path) == score


def test_the_search_tries_what_a_linear_probe_needs_and_goes_on_where_a_rate_diverges(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def try_rate(_: Any, rate: float) -> float | None:
        tried.append(rate)
        return None if rate > 0.02 else 1 / rate

    monkeypatch.setattr(defaults, "try_rate", try_rate)
    score = tune(model_folder, tmp_path, frozen=True)
    assert tuple(tried) == defaults.PROBE_RATES
    assert score.config.learning_rate == max(rate for rate in tried if rate <= 0.02)


def test_the_rate_by_size_is_the_papers_for_its_network() -> None:
    class Sized(nn.Module):
        def __init__(self, num_parameters: int) -> None:
            super().__init__()
            self.embedding, self.rest = nn.Embedding(7, 3), nn.Parameter(torch.empty(num_parameters, device="meta"))

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

    assert defaults.rates_by_size(Sized(112_000_000)) == [2e-5, 5e-5, 2e-4] != defaults.rates_by_size(Sized(500_000))
