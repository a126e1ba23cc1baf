import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import biphase
from biphase import console
from biphase.errors import InputError
from biphase.finetuning import defaults
from biphase.finetuning.config import FinetuneConfig, plan_cells
from biphase.finetuning.fit import choose_items
from biphase.finetuning.heads import load_encoder
from biphase.finetuning.scores import Score, show_rate

SETTINGS: dict[str, Any] = {"device": "cpu", "precision": "fp32", "max_length": 64, "batch_size": 8, "epochs": 2}
UNSET = {key: value for key, value in SETTINGS.items() if key != "epochs"}
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


def test_the_search_tries_higher_rates_for_adapters(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[float]()
    monkeypatch.setattr(defaults, "try_rate", lambda _, rate: tried.append(rate) or rate)
    assert tune(model_folder, tmp_path, lora={"r": 2}).config.learning_rate == min(tried)
    assert tried == defaults.rates_by_size(load_encoder(str(model_folder)).backbone, defaults.LORA_FACTOR)


def test_all_seeds_have_one_search_and_one_rate_unless_they_draw_the_examples(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = list[int]()
    monkeypatch.setattr(defaults, "try_rate", lambda plan, rate: seeds.append(plan.config.seed) or rate)
    scores = [tune(model_folder, tmp_path, seed=seed, max_steps=1) for seed in (2, 0, 1)]
    assert seeds == [0, 0, 0] and len({score.config.learning_rate for score in scores}) == 1
    assert [score.config.seed for score in scores] == [2, 0, 1]
    seeds.clear()
    for seed in (1, 2):
        tune(model_folder, tmp_path, seed=seed, max_steps=1, shots=4)
    assert seeds == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("train", "validation", "epochs", "updates", "patience", "told"),
    [
        (
            285,
            15,
            20,
            180,
            None,
            "20 epochs of 9 updates for 285 examples; the last weights are kept, because validation has",
        ),
        (200, 500, 20, 140, 10, "up to 20 epochs of 7 updates for 200 examples; the weights that score best on"),
        (3000, 500, 6, 564, 3, "up to 6 epochs of 94 updates for 3,000 examples; the weights that score best on"),
        (3000, 499, 6, 564, None, "genre: 6 epochs of 94 updates for 3,000 examples; the last weights are kept"),
        (19_000, 1000, 3, 1782, 3, "up to 3 epochs of 594 updates for 19,000 examples"),
        (67_349, 5000, 3, 4000, 3, "up to 4,000 updates for 67,349 examples"),
    ],
)
def test_the_length_follows_from_the_size_of_the_table(
    train: int,
    validation: int,
    epochs: int,
    updates: int,
    patience: int | None,
    told: str,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"train": train, "validation": validation}
    splits: Any = {name: SimpleNamespace(num_examples=num, items_of=lambda items: items) for name, num in sizes.items()}
    monkeypatch.setattr(defaults, "load_encoded", lambda *_: (splits, 0))
    [plan] = plan_cells(str(model_folder), ["genre"], FinetuneConfig(device="cpu", precision="fp32"), {})
    chosen = defaults.choose_length(plan, ())
    assert told in " ".join(capsys.readouterr().err.split()) and chosen.hash != plan.hash
    assert chosen.config.epochs == epochs and choose_items(splits["train"], chosen.config)[1] == updates
    checks = (patience is not None, patience)
    assert (chosen.config.load_best_model_at_end, chosen.config.early_stopping_patience) == checks
    for given in ({"shots"}, {"epochs", "max_steps"}, {"epochs", "shots"}):
        assert defaults.choose_length(plan, given) is plan
    kept = defaults.choose_length(plan, {"load_best_model_at_end"}).config
    assert (kept.load_best_model_at_end, kept.early_stopping_patience) == (False, None), "to the end of the schedule"
    assert "up to" not in " ".join(capsys.readouterr().err.split())
    kept = defaults.choose_length(plan, {"load_best_model_at_end", "early_stopping_patience"}).config
    assert (kept.load_best_model_at_end, kept.early_stopping_patience, kept.epochs) == (False, None, epochs)
    told = " ".join(capsys.readouterr().err.split())
    assert "the last weights are kept; epochs=" in told and "because" not in told, "the user chose that"


@pytest.mark.parametrize(
    ("train", "given", "length", "told"),
    [
        (67_349, {"epochs": 5}, (5, 10_525), "10,525 updates for 67,349 examples; an epoch has 2,105"),
        (300, {"epochs": 5}, (5, 1000), "50 updates for 300 examples; an epoch has 10"),
        (300, {"max_steps": 505}, (51, 505), "505 updates for 300 examples; an epoch has 10"),
        (300, {"max_steps": 7}, (1, 7), "7 updates for 300 examples; an epoch has 10"),
        (300, {"max_steps": 505, "early_stopping_patience": 2}, (51, 505), "up to 505 updates for 300 examples"),
    ],
)
def test_epochs_or_updates_that_are_given_alone_decide_the_length(
    train: int,
    given: dict[str, int],
    length: tuple[int, int],
    told: str,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    split: Any = SimpleNamespace(num_examples=train, items_of=lambda items: items)
    monkeypatch.setattr(defaults, "load_encoded", lambda *_: ({"train": split, "validation": split}, 0))
    [plan] = plan_cells(str(model_folder), ["genre"], FinetuneConfig(device="cpu", precision="fp32", **given), {})
    chosen = defaults.choose_length(plan, given.keys())
    assert (chosen.config.epochs, chosen.config.max_steps) == length
    assert f"genre: {told}" in " ".join(capsys.readouterr().err.split())
    is_same = (plan.config.epochs, plan.config.max_steps) == length
    assert (chosen.hash == plan.hash) is is_same, "what trains the same updates as before keeps its name"
    assert not chosen.config.load_best_model_at_end


def test_words_alone_read_the_examples_of_the_chosen_length_before_anything_trains(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[FinetuneConfig] = []

    def stop(train: Any, evaluation: Any, configs: list[FinetuneConfig], out: Path) -> None:
        asked.extend(configs)
        raise InputError("stopped")

    monkeypatch.setattr("biphase.api.finetuning.score_words", stop)
    with pytest.raises(InputError, match="stopped"):
        biphase.finetune(model_folder, "own", data=ROWS, template="{text}", scores=tmp_path, **UNSET)
    assert [(config.epochs, config.max_steps) for config in asked] == [(20, 4000)]
    assert not (tmp_path / ".rates").exists()


@pytest.mark.slow
@pytest.mark.minutes
def test_a_table_without_a_length_is_the_cell_of_the_chosen_settings_and_a_length_that_is_given_stays(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data": ROWS, "template": "{text}", "learning_rate": 3e-3}
    score = biphase.finetune(model_folder, "own", scores=tmp_path, **given | UNSET)
    assert (score.config.epochs, score.config.max_steps, score.num_steps) == (20, 4000, 20 * 13)
    assert "260 steps, 20 epochs, " in score.spent
    explicit = biphase.finetune(model_folder, "own", scores=tmp_path, **given | UNSET, epochs=20, max_steps=4000)
    assert explicit == score
    one = biphase.finetune(model_folder, "own", scores=tmp_path, **given | UNSET, epochs=1)
    assert (one.config.epochs, one.config.max_steps, one.num_steps, one.checks) == (1, 1000, 13, {})
    paper = biphase.finetune(model_folder, "snli", data=data_dirs["snli"], scores=tmp_path, **UNSET)
    assert (paper.config.epochs, paper.config.max_steps, paper.config.learning_rate) == (1, 1000, 5e-5)
    assert not paper.config.load_best_model_at_end and paper.config.early_stopping_patience is None


@pytest.mark.parametrize(
    ("epochs", "num_steps", "steps"),
    [pytest.param(20, 260, 28, marks=[pytest.mark.slow, pytest.mark.minutes]), (6, 78, 20), (1, 13, 13)],
)
def test_all_tries_of_a_rate_have_a_third_of_the_updates_and_are_counted(
    epochs: int,
    num_steps: int,
    steps: int,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a short training they have more: in fewer than 20 updates no rate shows what it is worth."""
    bars: list[tuple[str, float, float]] = []
    original = console.Tracker.__init__

    def noted(tracker: Any, label: str, total: float, *given: Any) -> None:
        original(tracker, label, total, *given)
        bars.append((tracker.label, total, tracker.later))

    monkeypatch.setattr(console.Tracker, "__init__", noted)
    tune(model_folder, tmp_path, epochs=epochs, load_best_model_at_end=True)
    tries = [bar for bar in bars if bar[0].startswith("learning rate")]
    later = [2 * steps + num_steps, steps + num_steps, num_steps]
    assert tries == [(f"learning rate {n} of 3 · fine-tune own", steps, later[n - 1]) for n in (1, 2, 3)]
    assert bars[-2:] == [("fine-tune own", num_steps, 0), ("score own", 2, 0)]
    told = f"own: tries 3 learning rates for {steps} steps each, then trains {num_steps} steps"
    assert told in " ".join(capsys.readouterr().err.split())


def test_the_rate_by_size_is_the_papers_for_its_network() -> None:
    class Sized(nn.Module):
        def __init__(self, num_parameters: int) -> None:
            super().__init__()
            self.embedding, self.rest = nn.Embedding(7, 3), nn.Parameter(torch.empty(num_parameters, device="meta"))

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

    assert defaults.rates_by_size(Sized(112_000_000)) == [2e-5, 5e-5, 2e-4] != defaults.rates_by_size(Sized(500_000))


def test_texts_in_a_language_that_the_card_does_not_name_are_told(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of own tables alone; `code` and unknown languages are not told."""
    basque = "Gaur goizean lankideekin bildu gara, eta hurrengo asteko lanak banatu ditugu euskaraz hitz eginez"
    rows = [{"text": f"{basque}, {number}. egunean", "label": "ab"[number % 2]} for number in range(40)]
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    for card, told in (("en", "own: the texts are in 'eu', and the model's card names 'en' only"), ("[en, eu]", "")):
        (model / "README.md").write_text(f"---\nlanguage: {card}\n---\n")
        settings = SETTINGS | {"max_steps": 1, "learning_rate": 1e-3}
        biphase.finetune(model, "own", data=rows, template="{text}", scores=tmp_path / "scores", **settings)
        said = " ".join(capsys.readouterr().err.split())
        assert told in said and ("card names" in said) == bool(told)
