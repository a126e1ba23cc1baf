"""Embedding models trained with LoRA: beside peft's own adapters, after a kill, and the plain model that is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from biphase.embedding import training
from biphase.embedding.model import PackedTransformer, load_embedder
from biphase.embedding.training import train_embedder

from .test_training import Make, kill_and_go_on, make_in

LORA = "lora={r: 4, lora_alpha: 8}"


@pytest.fixture
def make(encoder_folder: Path, pairs: list[dict[str, str]], tmp_path: Path) -> Make:
    return make_in(tmp_path, encoder_folder, pairs)


def test_losses_and_embeddings_are_those_of_pefts_own_adapters(
    make: Make, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pairs and batches; the adapters are peft's own model around the network, and are not merged."""
    out, facts = train_embedder(make(LORA), tmp_path / "runs")
    kept: list[Any] = []

    def wrap(run: training.StageRun, tables: Any) -> Any:
        torch.manual_seed(run.recipe.seed)
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        wrapped: Any = get_peft_model(run.model[0].network, config)
        assert wrapped.base_model.model is run.model[0].network
        trained = train_stage(run, tables)
        kept.append(run.model.encode(documents))
        wrapped.merge_and_unload()
        return trained

    train_stage = training.train_stage
    monkeypatch.setattr(training, "train_stage", wrap)
    _, theirs = train_embedder(make(f"out={tmp_path / 'theirs'}"), tmp_path / "runs")
    ours, expected = ([log["loss"] for log in each["stages"][0]["losses"]] for each in (facts, theirs))
    assert ours == pytest.approx(expected, rel=1e-6)
    embeddings = SentenceTransformer(str(out)).encode(documents)
    torch.testing.assert_close(torch.tensor(embeddings), torch.tensor(kept[0]), rtol=0, atol=1e-5)


def test_a_kept_model_is_plain_and_its_other_weights_are_those_before(
    make: Make, encoder_folder: Path, tmp_path: Path
) -> None:
    """Each stage has adapters of its own; the second goes on from the merged network."""
    recipe = make(LORA)
    (stage,) = recipe.model_dump(mode="json")["stages"]
    stages = json.dumps([stage, stage | {"name": "second"}])
    once, _ = train_embedder(recipe, tmp_path / "runs")
    twice, facts = train_embedder(make(LORA, f"stages={stages}", f"out={tmp_path / 'two'}"), tmp_path / "runs")
    assert [stage["steps"] for stage in facts["stages"]] == [4, 4]
    before, after, last = (load_file(folder / "model.safetensors") for folder in (encoder_folder, once, twice))
    names = [name for name in after if "_proj" in name]
    assert len(names) == 14 and after.keys() == last.keys()
    for name in after:
        old = before.get(name, before.get(f"model.{name}"))
        assert old is not None and torch.equal(after[name], old) == torch.equal(last[name], old) == (name not in names)
        assert torch.equal(after[name], last[name]) == (name not in names)


def test_a_killed_training_goes_on_as_if_it_had_not_been(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints hold the adapters and the linear map, and none the frozen network."""
    whole, _ = train_embedder(make(LORA, "dense=true"), tmp_path / "a")
    again = make(LORA, "dense=true", f"out={tmp_path / 'again'}")
    kill_and_go_on(again, tmp_path / "b", whole, monkeypatch)
    assert load_embedder(str(tmp_path / "again")).encode(["a"]).shape == (1, 32)


def test_random_weights_have_no_adapters(make: Make) -> None:
    with pytest.raises(ValueError, match="adapters would leave random weights as they are"):
        make(LORA, "weights=random")


def test_every_stage_computes_in_bf16(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does one that goes on after the stages before it were done."""
    types = list[torch.dtype]()
    compute = PackedTransformer.compute_hidden

    def note(self: Any, tokens: Any, positions: Any, bounds: Any, dtype: torch.dtype) -> Any:
        types.extend([dtype] if self.training and torch.is_grad_enabled() else [])
        return compute(self, tokens, positions, bounds, dtype)

    monkeypatch.setattr(PackedTransformer, "compute_hidden", note)
    (stage,) = make().model_dump(mode="json")["stages"]
    stages = json.dumps([stage, stage | {"name": "second"}])
    train_embedder(make(f"stages={stages}", "precision=bf16", "merge=0"), tmp_path / "runs")
    assert len(types) >= 8 and {*types} == {torch.bfloat16}
