"""How a run fails: with a line that says where and what to do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import MakeRecipe, loader_of, only, weights_at

import biphase.pretraining.loop as loop
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError
from biphase.pretraining.loop import train
from biphase.pretraining.objectives import make_microbatches
from biphase.run import Run, read_metrics, whole_steps


def test_a_loss_that_is_not_finite_names_step_and_samples(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth microbatch of the run, which is the second of step 2, comes out as NaN."""
    original, calls = PackedModel.forward, []

    def forward(self: PackedModel, *args: Any) -> Any:
        out = original(self, *args)
        if len(args) < 5:
            return out
        calls.append(1)
        return (out[0] * math.nan, *out[1:]) if len(calls) == 4 else out

    monkeypatch.setattr(PackedModel, "forward", forward)
    recipe = tiny_recipe(*only("clm", 3, "checkpoints.every_steps=1"))
    with pytest.raises(InputError) as caught:
        train(recipe, tmp_path)
    ids = make_microbatches(*loader_of(recipe), recipe.curriculum[0], 1)[1].sample_ids_S
    line = str(caught.value)
    assert "loss nan" in line
    assert f"at step 2, samples {', '.join(map(str, ids[:8]))}" in line
    assert "the last checkpoint is @1; lower schedule.peak_lr" in line
    (path,) = tmp_path.iterdir()
    assert whole_steps(Run(path)) == [1]
    assert all(tensor.isfinite().all() for tensor in weights_at(Run(path), 1).values())
    assert [row["step"] for row in read_metrics(Run(path), "train")] == [1]
    assert not Run(path).is_done


def test_a_rate_that_is_too_high_stops_the_run(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(*only("clm", 5))
    schedule = recipe.schedule.model_copy(update={"peak_lr": 1e38})  # beyond what a recipe may ask for
    with pytest.raises(
        InputError, match=r"at step 2, samples .* no checkpoint was written yet; lower schedule.peak_lr"
    ):
        train(recipe.model_copy(update={"schedule": schedule}), tmp_path)


ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24 GiB of which 1 GiB is free. I"
)
ON_A_CPU = (
    "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes. Error code 12 (C)"
)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError(ON_A_GPU),
            r"\(CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 .* 1 GiB is free\)",
        ),
        (RuntimeError(ON_A_CPU), r"\(can't allocate memory: you tried to allocate 4 bytes. Error"),
    ],
)
def test_without_memory_the_keys_are_named(
    error: Exception, told: str, tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(loop, "update", update)
    remedy = r": lower compute.microbatch_tokens \(256\), or set compute.activation_checkpointing=true; the result"
    with pytest.raises(InputError, match=told + ".*" + remedy):
        train(tiny_recipe(*only("clm", 1)), tmp_path)


def test_with_dropout_of_adapters_fewer_tokens_at_once_change_the_result(
    decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(*_: Any) -> Any:
        raise torch.OutOfMemoryError(ON_A_GPU)

    monkeypatch.setattr(loop, "update", update)
    origin = f"init={{model: {decoder}, lora: {{r: 4, lora_dropout: 0.1}}}}"
    with pytest.raises(InputError, match=r"\(256\), or set compute.activation_checkpointing=true$"):
        train(tiny_recipe(*only("clm", 1, origin)), tmp_path)


def test_batches_too_small_for_the_microbatches(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Found behind the claim of the run's folder, of which nothing stays where nothing was done."""
    with pytest.raises(InputError, match="is below a sample of 64 tokens each; raise it or compute"):
        train(tiny_recipe(*only("clm", 1, "batch_tokens=100", "compute.microbatch_tokens=64")), tmp_path)
    assert not any(tmp_path.iterdir())


def test_without_validation_text(tiny_recipe: MakeRecipe, corpus: Any, tmp_path: Path, capsys: Any) -> None:
    from biphase.corpus.prepare import prepare

    source = corpus.shards.parent / "train.jsonl"
    prepare([source], corpus.tokenizer, tmp_path / "shards", validation_fraction=0.0, workers=1)
    run = train(tiny_recipe(*only("clm", 1, f"data.shards={tmp_path / 'shards'}")), tmp_path / "runs")
    assert read_metrics(run, "validation") == []
    assert "shards has no validation documents: training without validation" in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_with_too_little_validation_text(
    packing: str, tiny_recipe: MakeRecipe, corpus: Any, tmp_path: Path, capsys: Any
) -> None:
    """No sample fits into it. A text to train on needs one, and is named."""
    from biphase.corpus.prepare import prepare

    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"text": "A few words."}\n')
    source, shards = corpus.shards.parent / "train.jsonl", tmp_path / "shards"
    prepare([source], corpus.tokenizer, shards, validation=[held_out], workers=1)
    limits = "batch_tokens=2000", "compute.microbatch_tokens=2000", f"data.shards={shards}", f"data.packing={packing}"
    run = train(tiny_recipe(*only("clm", 1, *limits)), tmp_path / "runs")
    assert read_metrics(run, "validation") == []
    assert "shards has too little validation text for a sample" in capsys.readouterr().err
    prepare([held_out], corpus.tokenizer, tmp_path / "short", validation_fraction=0.0, workers=1)
    with pytest.raises(InputError, match=rf"^{tmp_path / 'short'}: split 'train' has no document .*: lower data\.min_"):
        train(tiny_recipe(*only("clm", 1, *limits, f"data.shards={tmp_path / 'short'}")), tmp_path / "runs")
