"""The loop as a whole: golden losses, resuming bit for bit, branches, adapted decoders, and how a run fails."""

import errno
import json
import math
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import biphase.pretraining.checkpoint as checkpoint
import biphase.pretraining.loop as loop
import biphase.pretraining.state as state
import biphase.pretraining.validation as validation
from biphase.config import Recipe
from biphase.corpus.shards import ShardSet
from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer
from biphase.distributed import World
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, lay_out
from biphase.encoder.load import load_backbone
from biphase.encoder.packed import PackedModel, packed_hidden
from biphase.errors import InputError, StoppedError
from biphase.files import file_hash, read_json
from biphase.pretraining.batches import open_loader
from biphase.pretraining.checkpoint import read_checkpoint_manifest
from biphase.pretraining.loop import train
from biphase.pretraining.parallel import checkpoint_activations
from biphase.pretraining.schedule import learning_rate
from biphase.run import Run, claim_run, read_metrics, whole_steps

MakeRecipe = Callable[..., Recipe]

GOLDEN = Path(__file__).parents[1] / "golden" / "pretraining.json"
STORIES = Path(__file__).parents[2].parent / "shared/data/decoder_stories260K"


def shorter(*overrides: str) -> list[str]:
    """Six steps, CLM then MLM, without validation text in between."""
    return [
        "curriculum.0.steps=3",
        "curriculum.1.steps=3",
        "schedule.decay_steps=2",
        "validation.every_steps=0",
        *overrides,
    ]


def only(objective: str, steps: int, *overrides: str) -> list[str]:
    """One phase at a constant rate."""
    phase = f"curriculum=[{{objective: {objective}, steps: {steps}}}]"
    return [phase, "schedule.warmup_steps=0", "schedule.decay_steps=0", *overrides]


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in read_metrics(run, "train")]


def weights_at(run: Run, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.steps / str(step) / "model" / "model.safetensors")


def digests(run: Run, step: int) -> dict[str, str]:
    """Hashes of the weights and of the optimizer's moments."""
    folder = run.steps / str(step)
    return {name: file_hash(folder / name) for name in ("model/model.safetensors", "optimizer.safetensors")}


def numbers(run: Run) -> list[dict[str, Any]]:
    """What was logged, without what depends on the clock."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    timed = ("tokens_per_second", "flops_per_second", "share_of_peak")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A real SIGTERM while update `step` (counted from now) is being computed."""
    original, done = loop.update, []

    def update(*args: Any) -> Any:
        done.append(1)
        if len(done) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(loop, "update", update)


def train_until(step: int, recipe: Recipe, root: Path) -> Path:
    """Train, be stopped during update `step`, and return the run folder."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(StoppedError, match=f"stopped at step {step} of {recipe.num_steps}; run the same command"):
            train(recipe, root)
    (path,) = root.iterdir()
    return path


@pytest.fixture(scope="module")
def finished(tiny_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps CLM and ten MLM, with a checkpoint every five. Not to be changed."""
    recipe = tiny_recipe("checkpoints.every_steps=5", "checkpoints.keep_last=0")
    return train(recipe, tmp_path_factory.mktemp("finished"))


# Numbers


def test_golden_losses(finished: Run, corpus: Any, update_golden: bool) -> None:
    """The same losses as when they were written, within rounding."""
    found = {
        "data_fingerprint": ShardSet.open(corpus.shards).fingerprint,
        "loss": losses(finished),
        "validation_loss": {row["step"]: row["loss"] for row in read_metrics(finished, "validation")},
    }
    found = json.loads(json.dumps(found))
    if update_golden:
        GOLDEN.write_text(json.dumps(found, indent=2) + "\n")
    golden = read_json(GOLDEN)
    again = "python -m pytest tests/pretraining/test_loop.py -k golden --update-golden"
    assert found["data_fingerprint"] == golden["data_fingerprint"], (
        "The shards that the tests prepare have changed, so the losses cannot be compared. If tests/conftest.py, the "
        f"tokenizer's training or the shard format was changed on purpose, write them anew: {again}"
    )
    for step, ours, theirs in zip(range(1, 21), found["loss"], golden["loss"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4), (
            f"The loss of step {step} is {ours}, and was {theirs} when tests/golden/pretraining.json was written. "
            "Wrong at step 1: initial weights, data order, masks or the loss. Right at step 1 only: gradients, "
            "optimizer or rate. Wrong from step 11: the switch to MLM. If the change of numbers is meant, say why and "
            f"run: {again}"
        )
    assert found["validation_loss"] == pytest.approx(golden["validation_loss"], rel=1e-4)


def test_loss_falls_in_both_phases(finished: Run) -> None:
    found = losses(finished)
    assert found[0] == pytest.approx(math.log(384), abs=0.1), "random weights do not predict uniformly"
    assert found[9] < found[0] - 0.8
    assert np.mean(found[15:]) < np.mean(found[10:13])


def test_metrics_tell_each_step_once(finished: Run, tiny_recipe: MakeRecipe) -> None:
    rows, recipe = read_metrics(finished, "train"), tiny_recipe()
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["objective"] for row in rows] == ["clm"] * 10 + ["mlm"] * 10
    assert [row["lr"] for row in rows] == [learning_rate(recipe.schedule, step, 20) for step in range(20)]
    assert rows[-1]["tokens_seen"] == sum(row["tokens"] for row in rows)
    assert all(abs(row["tokens"] - 512) < 64 for row in rows)
    assert all(row["targets"] < row["tokens"] for row in rows[:10])
    assert sum(row["targets"] for row in rows[10:]) == pytest.approx(
        0.4 * sum(row["tokens"] for row in rows[10:]), rel=0.1
    )
    assert [row["step"] for row in read_metrics(finished, "validation")] == [10, 15, 20]
    for row in read_metrics(finished, "validation"):
        assert 0 <= row["accuracy"] <= 1
        assert 0 < row["bits_per_byte"] < row["loss"] / math.log(2)


def test_run_folder_is_an_interface(finished: Run, tiny_recipe: MakeRecipe, corpus: Any) -> None:
    assert whole_steps(finished) == [5, 10, 15, 20]
    assert finished.path.name.startswith("tiny-")
    assert Recipe.model_validate(yaml.safe_load((finished.path / "config.yaml").read_text())).curriculum
    assert read_json(finished.path / "environment.json")["torch"] == torch.__version__
    assert read_json(finished.path / "done.json")["step"] == 20
    for step, objective, is_decayed in ((5, "clm", False), (10, "clm", False), (15, "mlm", False), (20, "mlm", True)):
        manifest = read_checkpoint_manifest(finished.steps / str(step))
        assert (manifest.step, manifest.run_step, manifest.objective) == (step, step, objective)
        assert (manifest.is_decayed, manifest.parent, manifest.carried) == (is_decayed, None, [])
        assert manifest.data_position == step * 512
        assert manifest.data_fingerprint == ShardSet.open(corpus.shards).fingerprint
    assert not list(finished.path.rglob("*.part"))


def test_a_finished_run_returns_at_once(
    finished: Run, tiny_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train_steps", lambda *args, **options: pytest.fail("trained again"))
    before = file_hash(finished.metrics)
    assert train(tiny_recipe(), finished.path.parent) == finished
    assert file_hash(finished.metrics) == before


def test_causality_is_proved_at_each_switch(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[bool] = []
    original = validation.probe_causality

    def probe(model: Any, causal: bool, *rest: Any) -> None:
        proved.append(causal)
        assert not model.training
        original(model, causal, *rest)

    monkeypatch.setattr(validation, "probe_causality", probe)
    phases = ", ".join(f"{{objective: {name}, steps: 2}}" for name in ("clm", "mlm", "mntp", "clm"))
    train(tiny_recipe(*only("clm", 1, f"curriculum=[{phases}]")), tmp_path / "right")
    assert proved == [True, False, False, True]
    monkeypatch.setattr("biphase.encoder.proofs.lay_out", always_causal)
    monkeypatch.setattr(loop, "update", lambda *args: pytest.fail("trained before the proof"))
    with pytest.raises(AssertionError, match="does not see later tokens"):
        train(tiny_recipe(*only("mlm", 1)), tmp_path / "wrong")


def always_causal(bounds_S1: np.ndarray, **options: Any) -> Any:
    return lay_out(bounds_S1, **options | {"causal": True})


def test_objectives_mixed_by_batch(tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step is CLM, on the same samples; a branch keeps the rhythm, and the model counts as masked."""
    proved: list[bool] = []
    original = validation.probe_causality
    monkeypatch.setattr(
        validation,
        "probe_causality",
        lambda model, causal, *rest: proved.append(causal) or original(model, causal, *rest),
    )
    mixed = "curriculum=[{{objective: mlm, steps: {}, clm_share: 0.5}}]"
    flat = ["schedule.warmup_steps=0", "schedule.decay_steps=0", "validation.every_steps=0"]
    whole = train(tiny_recipe(*flat, mixed.format(7), "checkpoints.every_steps=3"), tmp_path)
    assert [row["objective"] for row in read_metrics(whole, "train")] == ["mlm", "clm"] * 3 + ["mlm"]
    assert proved == [False, True], "each direction once in a phase"
    assert [row["objective"] for row in read_metrics(whole, "validation")] == ["mlm", "clm"]
    assert read_checkpoint_manifest(whole.steps / "7").objective == "mlm"
    branch = train(tiny_recipe(*flat, mixed.format(4), f"init={{checkpoint: {whole.path}@3}}", "name=branch"), tmp_path)
    assert losses(branch) == losses(whole)[3:]
    pure = train(tiny_recipe(*flat, *only("clm", 7), "name=pure"), tmp_path)
    assert [row["tokens"] for row in read_metrics(pure, "train")] == [
        row["tokens"] for row in read_metrics(whole, "train")
    ]


def test_every_objective_sees_the_same_samples(tiny_recipe: MakeRecipe) -> None:
    seen = {}
    for objective in ("clm", "mlm", "mntp"):
        recipe = tiny_recipe(*only(objective, 9))
        shards = ShardSet.open(recipe.data.shards, "train")
        source = open_loader(recipe, shards, World(0, 1, torch.device("cpu")), torch.float32, 0)
        made = [source.microbatches(recipe.curriculum[0], step) for step in (0, 8)]
        seen[objective] = [m.sample_ids_S.tolist() for step in made for m in step]
    assert seen["clm"] == seen["mlm"] == seen["mntp"]


# One global token mean


def test_a_part_without_a_sample_asks_nothing(tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe()
    shards = ShardSet.open(recipe.data.shards, "train")
    source = open_loader(recipe, shards, World(0, 1, torch.device("cpu")), torch.float32, 0)
    for phase in recipe.curriculum:
        parts = [source.microbatch(phase, 0, part, 40) for part in range(40)]
        assert any(len(part.inputs_T) == 1 for part in parts)
        assert all(len(part.inputs_T) > 0 and len(part.sample_ids_S) > 0 for part in parts)
        assert all((len(part.inputs_T) + part.layout.num_padding) % PAD_TO_MULTIPLE_OF == 0 for part in parts)
        targets = torch.cat([part.targets_N for part in parts])
        assert torch.equal(targets, source.microbatch(phase, 0, 0, 1).targets_N)


def test_unequal_microbatches_leave_the_gradient_unchanged(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """After the first step, AdamW's first moment is a tenth of the (clipped) gradient."""
    made = {}
    for microbatch_tokens in (512, 200, 64):
        recipe = tiny_recipe(*only("mlm", 1, f"compute.microbatch_tokens={microbatch_tokens}"))
        run = train(recipe, tmp_path / str(microbatch_tokens))
        moments = load_file(run.steps / "1" / "optimizer.safetensors")
        made[microbatch_tokens] = {k: v.double() for k, v in moments.items() if k.endswith("exp_avg")}
        (row,) = read_metrics(run, "train")
        made[microbatch_tokens]["loss"] = torch.tensor(row["loss"])
        made[microbatch_tokens]["targets"] = torch.tensor(row["targets"])
        (validation,) = read_metrics(run, "validation")
        made[microbatch_tokens]["validation"] = torch.tensor(validation["loss"])
    for other in (200, 64):
        assert made[512]["targets"] == made[other]["targets"]
        for name, expected in made[512].items():
            assert (made[other][name] - expected).abs().max() <= 2e-6 * expected.abs().max(), name


def test_a_batch_without_a_target_is_no_nan(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    run = train(tiny_recipe(*only("mlm", 3, "curriculum.0.mask_probability=1e-12")), tmp_path)
    assert losses(run) == [0, 0, 0]
    assert all(row["targets"] == row["grad_norm"] == 0 for row in read_metrics(run, "train"))
    assert all(tensor.isfinite().all() for tensor in weights_at(run, 3).values())


def test_bf16_is_near_fp32(tiny_recipe: MakeRecipe, finished: Run, tmp_path: Path) -> None:
    run = train(tiny_recipe(*shorter("compute.precision=bf16")), tmp_path)
    assert losses(run)[:3] == pytest.approx(losses(finished)[:3], rel=5e-3)
    assert losses(run)[:3] != losses(finished)[:3]
    tensors = {**weights_at(run, 6), **load_file(run.steps / "6" / "optimizer.safetensors")}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}, "master weights and moments are fp32"


FEW = ["curriculum.0.steps=2", "curriculum.1.steps=1", "schedule={warmup_steps: 0, decay_steps: 0}"]


def test_activation_checkpointing_changes_no_number(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        run = train(tiny_recipe(*FEW, "compute.activation_checkpointing=true"), tmp_path / "checkpointing")
    plain = train(tiny_recipe(*FEW), tmp_path / "plain")
    assert losses(run) == pytest.approx(losses(plain), rel=1e-6)
    assert run.path.name == plain.path.name, "how to compute is no part of a run's identity"


def test_a_network_that_cannot_checkpoint_activations(decoder: Path) -> None:
    network = LlamaForCausalLM.from_pretrained(decoder)
    network.supports_gradient_checkpointing = False
    with pytest.raises(InputError, match=r"compute.activation_checkpointing: Llama.* does not support"):
        checkpoint_activations(network)


@pytest.mark.slow
def test_compiling_changes_no_number(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Four graphs: with and without gradients, causal and not. More would be batches that do not fit one graph."""
    from torch._dynamo.utils import counters

    counters.clear()
    run = train(tiny_recipe(*FEW, "compute.compile=on"), tmp_path / "compiled")
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
    assert losses(run) == pytest.approx(losses(train(tiny_recipe(*FEW), tmp_path / "plain")), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    ["data.packing=stream", "optimizer.name=muon", "curriculum.1.objective=mntp", "curriculum.1.clm_share=0.4"],
)
def test_variants_train_and_resume(change: str, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(*shorter(change))
    whole = train(recipe, tmp_path / "whole")
    assert losses(whole)[2] < losses(whole)[0]
    train_until(2, recipe, tmp_path / "parts")
    assert digests(train(recipe, tmp_path / "parts"), 6) == digests(whole, 6)


# Stopping and going on


@pytest.mark.parametrize("step", [5, 10, 17])
def test_resume_is_bit_exact(step: int, finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Stopped by SIGTERM in the CLM phase, at the switch, and during the decay."""
    recipe = tiny_recipe()
    path = train_until(step, recipe, tmp_path)
    assert whole_steps(Run(path))[-1] == step
    assert not (path / "done.json").exists()
    run = train(recipe, tmp_path)
    assert run.path == path
    assert digests(run, 20) == digests(finished, 20)
    assert numbers(run) == numbers(finished)


def test_what_a_killed_process_left_is_ignored(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Killed after step 8: past the checkpoint of step 5, halfway through writing that of step 10."""
    recipe = tiny_recipe()
    run = Run(train_until(5, recipe, tmp_path))
    for name in (".10.part", "10"):
        shutil.copytree(run.steps / "5", run.steps / name)
        (run.steps / name / "manifest.json").unlink()
    with open(run.metrics, "a") as file:
        file.writelines(json.dumps({"kind": "train", "step": step, "loss": 0.0}) + "\n" for step in (6, 7))
        file.write('{"kind": "train", "step": 8, "lo')
    assert whole_steps(run) == [5]
    run = train(recipe, tmp_path)
    assert digests(run, 20) == digests(finished, 20)
    assert numbers(run) == numbers(finished)
    assert not list(run.path.rglob(".*.part"))


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.safetensors", "model/config.json"])
def test_a_damaged_checkpoint_is_named(name: str, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(*shorter())
    run = Run(train_until(2, recipe, tmp_path))
    damaged = run.steps / "2" / name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"steps/2 is damaged: {name} has changed or is cut short; delete"):
        train(recipe, tmp_path)
    damaged.unlink()
    with pytest.raises(InputError, match=rf"steps/2 is damaged: {name} is missing"):
        train(recipe, tmp_path)
    shutil.rmtree(run.steps / "2")
    assert train(recipe, tmp_path).is_done


def no_space(patch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(checkpoint, "save_file", full)


def no_large_file(patch: pytest.MonkeyPatch) -> None:
    """A real failure inside safetensors, as a full disk is: no file may grow beyond 64 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = checkpoint.save_checkpoint

    def save(*args: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            original(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    patch.setattr(state, "save_checkpoint", save)


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (no_space, OSError, "No space left"),
        (no_large_file, InputError, "cannot write .*/steps/10: .*too large.* earlier checkpoints are kept"),
    ],
)
def test_no_space_left_keeps_the_previous_checkpoint(
    limit: Any, error: Any, message: str, finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe()
    run = Run(train_until(5, recipe, tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        limit(patch)
        with pytest.raises(error, match=message):
            train(recipe, tmp_path)
    assert whole_steps(run) == [5]
    assert not list(run.path.rglob(".*.part"))
    assert digests(train(recipe, tmp_path), 20) == digests(finished, 20)


def test_two_processes_do_not_share_a_run(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(*shorter())
    run = Run(train_until(2, recipe, tmp_path))
    before = (run.path / "environment.json").read_text()
    with claim_run(run, {}, {}), pytest.raises(InputError, match="is in use by another process"):
        train(recipe, tmp_path)
    assert before  # the loser wrote nothing: what is there now is the winner's
    assert (run.path / "environment.json").read_text() == "{}\n"


def test_passing_checkpoints_are_dropped(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe("checkpoints.every_steps=2", "checkpoints.keep_last=2", "validation.every_steps=0")
    run = train(recipe, tmp_path)
    assert whole_steps(run) == [10, 15, 16, 18, 20], "ends of phases and the last step before the decay stay"


def test_a_finished_run_gets_a_checkpoint_that_it_did_not_keep(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The same training, from the checkpoint before: nothing is logged again, and nothing else changes."""
    run = train(tiny_recipe("validation.every_steps=0"), tmp_path / "late")
    told, done, weights = run.metrics.read_text(), read_json(run.path / "done.json"), digests(run, 20)
    assert whole_steps(run) == [10, 15, 20]
    recipe = tiny_recipe("validation.every_steps=0", "checkpoints.keep=[4, 12]")
    path = train_until_step_is_kept(recipe, tmp_path / "late")
    assert path == run.path and whole_steps(run) == [2, 10, 15, 20]
    assert train(recipe, tmp_path / "late").path == run.path, "what is kept decides no weights"
    assert whole_steps(run)[-5:] == [4, 10, 12, 15, 20]
    assert (run.metrics.read_text(), read_json(run.path / "done.json"), digests(run, 20)) == (told, done, weights)
    early = train(recipe, tmp_path / "early")
    assert whole_steps(early) == [4, 10, 12, 15, 20]
    assert all(digests(early, step) == digests(run, step) for step in (4, 12))


def test_a_checkpoint_named_behind_the_progress_is_made_in_the_end(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    quiet = "validation.every_steps=0"
    train_until(9, tiny_recipe(quiet), tmp_path)
    run = train(tiny_recipe(quiet, "checkpoints.keep=[4]"), tmp_path)
    assert {4, 10, 15, 20} <= set(whole_steps(run))


def train_until_step_is_kept(recipe: Recipe, root: Path) -> Path:
    """Stopped during the second of the steps that are trained once more."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(StoppedError, match="stopped at step 2 of 4; run the same command"):
            train(recipe, root)
    (path,) = root.iterdir()
    return path


# Branches


def test_branch_goes_on_where_the_parent_was(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A branch from an undecayed step, with its optimizer, is the trunk going on."""
    branch = tiny_recipe(
        f"init={{checkpoint: {finished.path}@5}}", *only("clm", 5), "schedule.decay_steps=0", "validation.every_steps=0"
    )
    run = train(branch, tmp_path)
    assert losses(run) == losses(finished)[5:10]
    assert digests(run, 10) == digests(finished, 10)
    manifest, parent = read_checkpoint_manifest(run.steps / "10"), read_checkpoint_manifest(finished.steps / "5")
    assert manifest.parent == parent.content
    assert manifest.carried == ["weights", "optimizer", "data position"]
    assert (manifest.step, manifest.run_step, manifest.data_position) == (10, 5, 10 * 512)
    assert manifest.tokens_seen == read_checkpoint_manifest(finished.steps / "10").tokens_seen


def test_decay_branch_and_its_rates(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"init={{checkpoint: {finished.path}@10}}", *only("mlm", 4), "schedule.decay_steps=4")
    path = train_until(3, recipe, tmp_path)
    run = train(recipe, tmp_path)
    assert run.path == path
    assert [row["lr"] for row in read_metrics(run, "train")] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3], rel=1e-12)
    assert losses(run)[0] == losses(finished)[10], "the first MLM step of the trunk"
    assert whole_steps(run) == [13, 14]
    assert [read_checkpoint_manifest(run.steps / str(step)).is_decayed for step in (13, 14)] == [True, True]
    assert read_json(run.path / "done.json")["step"] == 14


def test_branch_without_optimizer(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"init={{checkpoint: {finished.path}@5, carry_optimizer: false}}", *only("clm", 2))
    run = train(recipe, tmp_path)
    assert losses(run)[0] == losses(finished)[5]
    assert losses(run)[1] != losses(finished)[6]
    assert read_checkpoint_manifest(run.steps / "7").carried == ["weights", "data position"]
    assert load_file(run.steps / "7" / "optimizer.safetensors")["network.lm_head.weight/step"] == 2


def test_branch_to_another_order_begins_it_anew(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"init={{checkpoint: {finished.path}}}", *only("mlm", 1), "data.order_seed=1")
    manifest = read_checkpoint_manifest(train(recipe, tmp_path).steps / "21")
    assert manifest.carried == ["weights", "optimizer"]
    assert manifest.data_position == 512


def test_branch_to_another_optimizer_says_what_to_do(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    muon = train(tiny_recipe(*shorter("optimizer.name=muon")), tmp_path)
    for parent, name in ((finished, "muon"), (muon, "adamw")):
        recipe = tiny_recipe(f"init={{checkpoint: {parent.path}}}", *only("mlm", 1), f"optimizer.name={name}")
        with pytest.raises(InputError, match=r"use init.carry_optimizer=false"):
            train(recipe, tmp_path)


def test_branch_names_what_is_wrong(finished: Run, tiny_recipe: MakeRecipe, corpus: Any, tmp_path: Path) -> None:
    def branch(reference: Path | str, *overrides: str) -> None:
        train(tiny_recipe(f"init={{checkpoint: {reference}}}", *only("mlm", 1), *overrides), tmp_path / "runs")

    with pytest.raises(InputError, match=r"has no checkpoint '@7'; it has @5, @10, @15, @20"):
        branch(f"{finished.path}@7")
    with pytest.raises(InputError, match="is not a run folder"):
        branch(tmp_path)
    other = other_shards(corpus, tmp_path)
    with pytest.raises(InputError, match=r"was made with tokenizer .*prepare the text again"):
        branch(finished.path, f"data.shards={other}")
    damaged = shutil.copytree(finished.path, tmp_path / "damaged")
    weights = damaged / "steps" / "20" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"is damaged: model/model.safetensors"):
        branch(damaged)
    assert not (tmp_path / "runs").exists()


def test_a_parent_that_trains_on_needs_its_step(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """RUN alone would mean another parent, and so another run, once the trunk has gone on."""
    recipe = tiny_recipe(*shorter("checkpoints.every_steps=1", "checkpoints.keep_last=0"))
    trunk = train_until(2, recipe, tmp_path / "trunk")
    branch = tiny_recipe(f"init={{checkpoint: {trunk}}}", *only("mlm", 1))
    with pytest.raises(InputError, match=rf"{trunk} is not done, .*: say which one, {trunk}@STEP; it has @1, @2"):
        train(branch, tmp_path / "runs")
    named = train(tiny_recipe(f"init={{checkpoint: {trunk}@2}}", *only("mlm", 1)), tmp_path / "runs")
    train(recipe, tmp_path / "trunk")
    assert train(tiny_recipe(f"init={{checkpoint: {trunk}@2}}", *only("mlm", 1)), tmp_path / "runs") == named
    assert read_json(train(branch, tmp_path / "runs").path / "done.json")["step"] == 7, "the last step of a done run"


def other_shards(corpus: Any, folder: Path) -> Path:
    """The same text with another tokenizer."""
    from biphase.corpus.prepare import prepare
    from biphase.corpus.tokenizer import train_tokenizer

    lines = (corpus.shards.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    save_tokenizer(train_tokenizer(texts, 300), folder / "other_tokenizer")
    prepare([corpus.shards.parent / "train.jsonl"], folder / "other_tokenizer", folder / "other_shards", workers=1)
    return folder / "other_shards"


# Adapting a decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a Hugging Face folder, without a tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("decoder") / "llama"
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def looks_back(model: Any) -> bool:
    """Whether an early output of a transformers model moves when a later token is changed."""
    tokens = torch.arange(10, 22)[None]
    changed = tokens.clone()
    changed[0, 9] = 5
    with torch.no_grad():
        outputs = [
            model(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state[0, 0] for x in (tokens, changed)
        ]
    return bool((outputs[0] - outputs[1]).abs().max() > 1e-6)


def test_a_decoder_becomes_an_encoder(decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"init={{model: {decoder}}}", *shorter("curriculum.1.steps=9", "schedule.peak_lr=3e-3"))
    run = train(recipe, tmp_path)
    assert np.mean(losses(run)[-3:]) < losses(run)[3]
    manifest = read_checkpoint_manifest(run.steps / "12")
    assert manifest.carried == ["weights"]
    assert manifest.parent is not None
    for step, causal in ((3, True), (12, False)):
        folder = run.steps / str(step) / "model"
        assert read_json(folder / "config.json")["is_causal"] is causal
        reloaded = AutoModel.from_pretrained(folder).eval()
        assert looks_back(reloaded) is not causal
    ours, theirs = load_backbone(run.steps / "12" / "model").eval(), AutoModel.from_pretrained(folder).eval()
    tokens_T = torch.arange(40, 70)
    with torch.no_grad():
        packed_TD = packed_hidden(ours, tokens_T, torch.arange(30), lay_out(np.array([0, 30]), causal=False))
        torch.testing.assert_close(
            packed_TD, theirs(input_ids=tokens_T[None]).last_hidden_state[0], rtol=1e-4, atol=1e-5
        )


def test_adaptation_resumes_bit_exactly(decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"init={{model: {decoder}}}", *shorter())
    whole = train(recipe, tmp_path / "whole")
    train_until(4, recipe, tmp_path / "parts")
    assert digests(train(recipe, tmp_path / "parts"), 6) == digests(whole, 6)


def test_a_hub_model_is_its_commit(
    decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, or by `main`, the same commit is the same run; another commit is another run."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--some--decoder"
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        shutil.copytree(decoder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()

    def adapt(**init: str) -> Path:
        recipe = tiny_recipe(*only("mlm", 1), f"init={json.dumps({'model': 'some/decoder', **init})}")
        return train(recipe, tmp_path / "runs").path

    found = []
    for commit in commits:
        (repository / "refs" / "main").write_text(commit)
        found.append(adapt())
        assert adapt(revision=commit) == found[-1]
    assert found[0] != found[1]
    with pytest.raises(InputError, match=r"model some/decoder at revision v2 is no folder here and cannot be had"):
        adapt(revision="v2")


MASKED_FAMILIES = {
    "bert": (BertConfig, BertForMaskedLM),
    "roberta": (RobertaConfig, RobertaForMaskedLM),
    "modernbert": (ModernBertConfig, ModernBertForMaskedLM),
}


def save_masked(family: str, folder: Path, **settings: Any) -> Path:
    """A tiny masked language model, weights larger than usual, with the dropout of its kind and 90 positions."""
    config, kind = MASKED_FAMILIES[family]
    roles = {"pad_token_id": 2, "eos_token_id": 0, "bos_token_id": None, "cls_token_id": None, "sep_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    settings = {"vocab_size": 384, "max_position_embeddings": 90, "initializer_range": 0.1} | roles | sizes | settings
    model = kind(config(**settings))
    with torch.no_grad():  # a row of zeros is drawn anew, see `train_padding_row`
        model.get_input_embeddings().weight[settings["pad_token_id"]].normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", MASKED_FAMILIES)
def test_a_masked_language_model_goes_on(family: str, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The first loss is the network's own on each sample alone, without dropout; batches exceed its positions."""
    folder = save_masked(family, tmp_path / family)
    recipe = tiny_recipe(f"init={{model: {folder}}}", *only("mlm", 12), "schedule.peak_lr=3e-3")
    whole = train(recipe, tmp_path / "whole")
    assert np.mean(losses(whole)[-3:]) < losses(whole)[0] - 0.3
    network = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    shards = ShardSet.open(recipe.data.shards, "train")
    source = open_loader(recipe, shards, World(0, 1, torch.device("cpu")), torch.float32, 0)
    total, count = 0.0, 0
    for part in source.microbatches(recipe.curriculum[0], 0):
        assert len(part.inputs_T) > 90
        with torch.no_grad():
            alone = [
                network(input_ids=sample[None]).logits[0] for sample in part.inputs_T.split(part.lengths_S.tolist())
            ]
        logits_NV = torch.cat(alone)[part.target_positions_N]
        total += float(torch.nn.functional.cross_entropy(logits_NV, part.targets_N, reduction="sum"))
        count += len(part.targets_N)
    assert losses(whole)[0] == pytest.approx(total / count, rel=1e-5)
    train_until(4, recipe, tmp_path / "parts")
    assert digests(train(recipe, tmp_path / "parts"), 12) == digests(whole, 12)


def test_what_a_masked_language_model_cannot(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    def go_on(folder: Path, *overrides: str) -> None:
        train(tiny_recipe(*only("mlm", 1), f"init={{model: {folder}}}", *overrides), tmp_path / "runs")

    with pytest.raises(InputError, match=r"BertForMaskedLM as bidirectional only; leave clm out of the curriculum"):
        go_on(save_masked("bert", tmp_path / "bert"), "curriculum.0.objective=clm")
    with pytest.raises(InputError, match=r"takes 47 positions; set data.max_sample_tokens=47"):
        go_on(save_masked("roberta", tmp_path / "short", max_position_embeddings=50))
    with pytest.raises(InputError, match=r"from behind its padding token 5, and that of the shards is 2: prepare"):
        go_on(save_masked("roberta", tmp_path / "padding", pad_token_id=5))


def test_a_foreign_model_must_fit(decoder: Path, tiny_recipe: MakeRecipe, corpus: Any, tmp_path: Path) -> None:
    def adapt(model: Path, *overrides: str) -> None:
        train(tiny_recipe(f"init={{model: {model}}}", *only("mlm", 1), *overrides), tmp_path / "runs")

    with pytest.raises(InputError, match=r"takes 128 positions; set data.max_sample_tokens=128"):
        adapt(decoder, "data.max_sample_tokens=200")
    with_other = shutil.copytree(decoder, tmp_path / "with_other")
    other_shards(corpus, tmp_path)
    shutil.copytree(tmp_path / "other_tokenizer", with_other, dirs_exist_ok=True)
    with pytest.raises(InputError, match="was made with tokenizer"):
        adapt(with_other)
    with_same = shutil.copytree(decoder, tmp_path / "with_same")
    shutil.copytree(corpus.tokenizer, with_same, dirs_exist_ok=True)
    adapt(with_same)
    small = tmp_path / "small"
    LlamaForCausalLM(LlamaConfig.from_pretrained(decoder, vocab_size=256)).save_pretrained(small)
    with pytest.raises(InputError, match="knows 256 tokens and the shards have 384"):
        adapt(small)


STORY = """Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her \
friends. One day, she saw a big red ball. She wanted to play with it, but it was too high. Her mom said, "Lily, let's \
find a way to get the ball." Lily was happy. They found a long stick and the ball fell down. Lily and her mom played."""


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """Shards in the vocabulary of the real decoder: llama2.c's pieces and scores as a BPE with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    from biphase.corpus.prepare import prepare

    pieces = [piece for piece, _ in read_json(STORIES / "tok512.json")]
    vocab = {piece.replace(" ", "▁"): number for number, piece in enumerate(pieces)}
    words = list(vocab)[259:]
    merges = [(w[:at], w[at:]) for w in words for at in range(1, len(w)) if w[:at] in vocab and w[at:] in vocab]
    backend = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder = tmp_path_factory.mktemp("stories")
    roles = {"unk_token": "<unk>", "bos_token": pieces[1], "eos_token": pieces[2]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder / "plain")
    save_tokenizer(load_tokenizer(folder / "plain"), folder / "tokenizer")
    for name, texts in (("train", documents), ("validation", [STORY])):
        lines = (json.dumps({"id": f"{name}-{number}", "text": text}) for number, text in enumerate(texts))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    prepare(
        [folder / "train.jsonl"],
        folder / "tokenizer",
        folder / "shards",
        validation_sources=[folder / "validation.jsonl"],
        workers=1,
    )
    return folder / "shards"


@pytest.mark.skipif(not STORIES.exists(), reason="../shared/data/decoder_stories260K is not here")
def test_a_real_decoder_becomes_an_encoder(stories: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        f"init={{model: {STORIES / 'hf'}}}",
        f"data.shards={stories}",
        "curriculum=[{objective: clm, steps: 1}, {objective: mlm, steps: 30, mask_probability: 0.2}]",
        "schedule={peak_lr: 3e-3, warmup_steps: 5, decay_steps: 10}",
        "validation.every_steps=0",
    )
    run = train(recipe, tmp_path)
    found, validation = losses(run), read_metrics(run, "validation")
    assert found[0] < 4.8, "a pretrained decoder predicts another book better than chance (6.2)"
    assert validation[0]["loss"] < 1.8, "and a story like those that it was trained on much better"
    assert np.mean(found[-5:]) < np.mean(found[1:4]) - 0.5
    folder = run.steps / "31" / "model"
    assert read_json(folder / "config.json")["is_causal"] is False
    assert looks_back(AutoModel.from_pretrained(folder).eval())
    assert not looks_back(AutoModel.from_pretrained(run.steps / "1" / "model").eval())
    assert AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.shape[0] == 514  # 512, mask and pad


# How a run fails


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
    shards = ShardSet.open(recipe.data.shards, "train")
    source = open_loader(recipe, shards, World(0, 1, torch.device("cpu")), torch.float32, 0)
    ids = source.microbatches(recipe.curriculum[0], 1)[1].sample_ids_S
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
    with pytest.raises(
        InputError, match=r"at step 2, samples .* no checkpoint was written yet; lower schedule.peak_lr"
    ):
        train(tiny_recipe(*only("clm", 5, "schedule.peak_lr=1e38")), tmp_path)


def test_batches_too_small_for_the_microbatches(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leaves less than one sample of 64 tokens each; raise one of the two"):
        train(tiny_recipe(*only("clm", 1, "batch_tokens=100", "compute.microbatch_tokens=64")), tmp_path)


def test_without_validation_text(tiny_recipe: MakeRecipe, corpus: Any, tmp_path: Path, capsys: Any) -> None:
    from biphase.corpus.prepare import prepare

    source = corpus.shards.parent / "train.jsonl"
    prepare([source], corpus.tokenizer, tmp_path / "shards", validation_fraction=0.0, workers=1)
    run = train(tiny_recipe(*only("clm", 1, f"data.shards={tmp_path / 'shards'}")), tmp_path / "runs")
    assert read_metrics(run, "validation") == []
    assert "training without validation" in capsys.readouterr().err


def test_tensorboard(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tiny_recipe(*only("clm", 2, "tensorboard=true")), tmp_path)
    events = reader.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses(run), rel=1e-6)
    assert events.Scalars("validation/accuracy")
