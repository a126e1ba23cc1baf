"""The loop computes what it should: golden losses, one global token mean, the same numbers by every way to compute."""

import json
import math
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_runs import MakeRecipe, digests, loader_of, losses, only, shorter, train_until, weights_at
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MistralConfig

import biphase.pretraining.loop as loop
from biphase.corpus.packing import Batches
from biphase.corpus.shards import ShardSet
from biphase.curriculum import OBJECTIVES
from biphase.distributed import World
from biphase.encoder import proofs
from biphase.encoder.attention import ATTENTION, PAD_TO_MULTIPLE_OF, lay_out
from biphase.encoder.packed import PackedModel
from biphase.encoder.proofs import FailedProofError
from biphase.errors import InputError
from biphase.files import RECORD_HASH, file_hash, read_json, write_hashed
from biphase.flops import SampleLengths, flops_between
from biphase.pretraining.job import load_state, open_job
from biphase.pretraining.loop import open_batches, train
from biphase.pretraining.objectives import make_microbatches, make_steps
from biphase.pretraining.optimizer import parallelize
from biphase.recipe import ComputeConfig, Recipe
from biphase.run import Run, read_checkpoint_manifest, read_metrics, read_recipe, whole_steps

from ..conftest import mostly_later

GOLDEN = Path(__file__).parents[1] / "golden" / "pretraining.json"


def test_golden_losses(finished: Run, corpus: Any, update_golden: bool) -> None:
    """The same losses as when they were written, within rounding."""
    found = {
        "data_fingerprint": ShardSet(corpus.shards).fingerprint,
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
    assert [row["lr"] for row in rows] == [1e-2 * recipe.schedule.share_of_peak(step, 20) for step in range(20)]
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


def test_time_left_is_told_by_the_flops_of_what_is_left(finished: Run) -> None:
    """What the updates of both phases cost was expected, one phase costs more than the other, and nothing is left."""
    recipe = read_recipe(finished)
    job = open_job(recipe, finished.path.parent, World(0, 1, torch.device("cpu")))
    flops = load_state(job, 0).flops
    spent = {"clm": 0.0, "mlm": 0.0}
    for row in read_metrics(finished, "train"):
        spent[row["objective"]] += row["tokens"] * row["flops_per_second"] / row["tokens_per_second"]
    samples, _ = open_batches(job)
    mean = samples.num_tokens / samples.num_samples
    lengths = SampleLengths(mean, mean, "mean")
    assert flops_between(recipe, flops, lengths, 0, 10) == {"clm": pytest.approx(spent["clm"], rel=0.1)}
    assert flops_between(recipe, flops, lengths, 10, 20) == {"mlm": pytest.approx(spent["mlm"], rel=0.1)}
    assert sum(flops_between(recipe, flops, lengths, 5, 20).values()) < spent["clm"] + spent["mlm"]
    assert flops_between(recipe, flops, lengths, 20, 20) == {}


def test_what_muon_multiplies_is_logged_and_expected(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The first update of two runs on one batch differs by that, and so does what is left of them."""
    run = train(tiny_recipe(*shorter("optimizer.name=muon")), tmp_path)
    job = open_job(read_recipe(run), tmp_path, World(0, 1, torch.device("cpu")))
    flops, lengths = load_state(job, 0).flops, SampleLengths(30, 30, "")
    first = [read_metrics(one, "train")[0] for one in (run, finished)]
    spent = [row["tokens"] * row["flops_per_second"] / row["tokens_per_second"] for row in first]
    assert flops.per_update > 0 and spent[0] - spent[1] == pytest.approx(flops.per_update, rel=0.05)
    counts = (flops, replace(flops, per_update=0.0))
    left = [sum(flops_between(job.recipe, count, lengths, 1, 6).values()) for count in counts]
    assert left[0] - left[1] == pytest.approx(5 * flops.per_update)


def test_waiting_for_data_is_told_as_a_share(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which each batch takes 3 s to come, an update 1 s, and a validation 100 s that count as neither."""
    clock, told = [0.0], []
    batches, update = loop.prefetch, loop.update

    def late(*args: Any) -> Any:
        for batch in batches(*args):
            clock[0] += 3
            yield batch

    def slow(*args: Any) -> Any:
        clock[0] += 1
        return update(*args)

    def validate(*_: Any) -> dict[str, float]:
        clock[0] += 100
        return dict.fromkeys(("loss", "accuracy", "bits_per_byte"), 0.0)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(loop.Tracker, "advance", lambda self, amount, note="", **_: told.append(note))
    for name, changed in {"prefetch": late, "update": slow, "validate": validate}.items():
        monkeypatch.setattr(loop, name, changed)
    run = train(tiny_recipe(*only("clm", 5), "validation.every_steps=2"), tmp_path)
    rows = read_metrics(run, "train")[1:]  # the log begins by the real clock
    assert [row["data_wait"] for row in rows] == [0.75] * 4
    assert [row["tokens_per_second"] for row in rows] == [round(row["tokens"] / 4, 1) for row in rows]
    assert all(note.endswith(" · 75% waiting for data") for note in told[2:]) and len(told) == 6


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
        assert manifest.data_fingerprint == ShardSet(corpus.shards).fingerprint
    assert not list(finished.path.rglob("*.part"))


def test_a_finished_run_returns_at_once(
    finished: Run, tiny_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train_steps", lambda *args, **options: pytest.fail("trained again"))
    before = file_hash(finished.metrics)
    assert train(tiny_recipe(), finished.path.parent) == finished
    assert file_hash(finished.metrics) == before


def test_a_narrow_window_passes_the_probe() -> None:
    """As it passed the proof when it was loaded: what lies beyond a window moves nothing."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, sliding_window=3, is_causal=False)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    proofs.prove_causality(PackedModel(network), False, network.base_model, torch.device("cpu"), torch.float32)


def test_causality_is_proved_at_each_switch(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[bool] = []
    original = proofs.probe_causality

    def probe(model: Any, causal: bool, *rest: Any, **options: Any) -> None:
        proved.append(causal)
        assert not model.training
        original(model, causal, *rest, **options)

    monkeypatch.setattr(proofs, "probe_causality", probe)
    phases = ", ".join(f"{{objective: {name}, steps: 2}}" for name in ("clm", "mlm", "mntp", "meap", "causal-mlm"))
    train(tiny_recipe(*only("clm", 1, f"curriculum=[{phases}]")), tmp_path / "right")
    assert proved == [True, False, False, True, True]
    monkeypatch.setattr("biphase.encoder.proofs.lay_out", always_causal)
    monkeypatch.setattr(loop, "update", lambda *args: pytest.fail("trained before the proof"))
    with pytest.raises(FailedProofError, match="does not see later tokens"):
        train(tiny_recipe(*only("mlm", 1)), tmp_path / "wrong")


def always_causal(bounds_S1: np.ndarray, **options: Any) -> Any:
    return lay_out(bounds_S1, **options | {"causal": True})


def test_processes_that_would_train_different_runs_end(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two, and what the other one sends. `test_distributed.py` starts two."""
    world, recipe = World(0, 2, torch.device("cpu")), tiny_recipe()
    alone = open_job(recipe, tmp_path, World(0, 1, torch.device("cpu")))
    own = alone.run.path.name[-8:]
    sent = torch.tensor([0, int(own, 16)])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda total: total.add_(sent))
    assert open_job(recipe, tmp_path, world).run == alone.run
    sent[1] = 0xFFFFFFFF
    with pytest.raises(InputError, match=rf"different runs \({own}, ffffffff\): give all machines the same recipe"):
        open_job(recipe, tmp_path, world)


def test_objectives_mixed_by_batch(tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step is CLM, on the same samples; a branch keeps the rhythm, and the model counts as masked."""
    proved: list[bool] = []
    original = proofs.probe_causality
    monkeypatch.setattr(
        proofs,
        "probe_causality",
        lambda model, causal, *rest, **options: proved.append(causal) or original(model, causal, *rest, **options),
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


def test_two_passes_over_each_text(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Every second step reads the text of the step before it; a branch from the middle of two passes goes on."""
    phase = "curriculum=[{{objective: mlm, steps: {}, mask_probability: 0.4, mask_passes: 2}}]"
    flat = ["schedule.warmup_steps=0", "schedule.decay_steps=0", "validation.every_steps=0"]
    recipe = tiny_recipe(*flat, phase.format(7), "checkpoints.every_steps=3")
    steps = [step.microbatches for step in make_steps(*loader_of(recipe), range(7))]
    read = [[m.sample_ids_S.tolist() for m in microbatches] for microbatches in steps]
    assert read[0] == read[1] != read[2] == read[3] != read[4]
    asked = [{*m.target_positions_N.tolist()} for m, *_ in steps]
    assert asked[0] and asked[1] and not asked[0] & asked[1]
    whole = train(recipe, tmp_path)
    branch = train(tiny_recipe(*flat, phase.format(4), f"init={{checkpoint: {whole.path}@3}}", "name=branch"), tmp_path)
    assert losses(branch) == losses(whole)[3:]
    # Another order begins with a first pass, and its branch goes on in the middle of two passes, too.
    order = [*flat, "data.order_seed=1", "checkpoints.every_steps=3"]
    anew = train(tiny_recipe(*order, phase.format(5), "name=anew", f"init={{checkpoint: {whole.path}@3}}"), tmp_path)
    later = train(tiny_recipe(*order, phase.format(2), "name=later", f"init={{checkpoint: {anew.path}@6}}"), tmp_path)
    assert losses(later) == losses(anew)[3:]
    # So does a branch whose parent began with batches of another size than the parent's own parent.
    wide = [*flat, "batch_tokens=1024", "checkpoints.every_steps=3"]
    wider = train(tiny_recipe(*wide, phase.format(5), "name=wider", f"init={{checkpoint: {whole.path}@3}}"), tmp_path)
    further = tiny_recipe(*wide, phase.format(2), "name=further", f"init={{checkpoint: {wider.path}@6}}")
    assert losses(train(further, tmp_path)) == losses(wider)[3:]
    # A checkpoint of an earlier version does not say from where passes counted: the branch begins a text anew.
    record = wider.steps / "6" / "manifest.json"
    later_keys = ("pass_step", "pass_position", RECORD_HASH)
    write_hashed(record, {key: value for key, value in read_json(record).items() if key not in later_keys})
    first, second = [
        [m.sample_ids_S.tolist() for m in s.microbatches] for s in make_steps(*loader_of(further), range(2))
    ]
    assert first == second
    # With batches of another size, there is no earlier batch to read again.
    larger = "batch_tokens=2048", f"init={{checkpoint: {whole.path}@3}}", "name=larger"
    steps = make_steps(*loader_of(tiny_recipe(*flat, phase.format(4), *larger)), range(2))
    first, second = [[m.sample_ids_S.tolist() for m in step.microbatches] for step in steps]
    assert first == second


def test_every_objective_sees_the_same_samples(tiny_recipe: MakeRecipe) -> None:
    seen = {}
    for objective in OBJECTIVES:
        recipe = tiny_recipe(*only(objective, 9))
        job, batches = loader_of(recipe)
        made = [make_microbatches(job, batches, recipe.curriculum[0], step) for step in (0, 8)]
        seen[objective] = [m.sample_ids_S.tolist() for step in made for m in step]
    assert all(samples == seen["mlm"] for samples in seen.values())


def test_a_part_without_a_sample_asks_nothing(tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe()
    job, batches = loader_of(recipe)
    for phase in recipe.curriculum:
        parts = []
        for rank in range(40):
            parts += make_microbatches(replace(job, world=World(rank, 40, torch.device("cpu"))), batches, phase, 0)
        assert len(parts) == 40
        assert any(len(part.inputs_T) == 1 for part in parts)
        assert all(len(part.inputs_T) > 0 and len(part.sample_ids_S) > 0 for part in parts)
        assert all((len(part.inputs_T) + part.layout.num_padding) % PAD_TO_MULTIPLE_OF == 0 for part in parts)
        targets = torch.cat([part.targets_N for part in parts])
        expected = torch.cat([part.targets_N for part in make_microbatches(job, batches, phase, 0)])
        assert torch.equal(targets, expected)


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
    compute = ComputeConfig(activation_checkpointing=True)
    with pytest.raises(InputError, match=r"compute.activation_checkpointing: Llama.* does not support"):
        parallelize(PackedModel(network), compute, World(0, 1, torch.device("cpu")), compiles=False)


COMPILED = """
import json, sys
from pathlib import Path

from torch._dynamo.utils import counters

from biphase.pretraining.loop import train
from biphase.recipe import Recipe

run = train(Recipe.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
print(json.dumps({"run": str(run.path), "graphs": counters["stats"]["unique_graphs"], **counters["graph_break"]}))
"""


@pytest.mark.slow
@pytest.mark.minutes
def test_compiling_changes_no_number(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Four graphs of blocks, with and without gradients, causal and not, and two of losses. More would be batches that
    do not fit one graph.

    A process of its own compiles, as a user's does: beside it, a compiler for each core takes half a gigabyte.
    """
    recipe = tiny_recipe(*FEW, "compute.compile=on")
    command = [sys.executable, "-c", COMPILED, recipe.model_dump_json(), str(tmp_path / "compiled")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    compiled = json.loads(answer.stdout.splitlines()[-1])
    run = Run(Path(compiled.pop("run")))
    assert compiled == {"graphs": 6}, "a graph for each direction, and none of them broken"
    assert losses(run) == pytest.approx(losses(train(tiny_recipe(*FEW), tmp_path / "plain")), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    mostly_later(
        [
            "data.packing=stream",
            "optimizer={name: muon, muon_weight_decay: 0.01}",
            "curriculum.1.objective=mntp",
            "curriculum.1={attention: causal, target: next, steps: 3, mask_probability: 0.15}",
            "curriculum.1={attention: causal, target: same, steps: 3, mask_probability: 0.4}",
            "curriculum.1.clm_share=0.4",
            "curriculum.1={objective: mlm, steps: 3, mask_passes: 2}",
            "curriculum.1.mask_probability={from: 0.5, to: 0.1}",
            "batch_tokens={from: 150, to: 900, steps: 4}",
        ],
        "data.packing=stream",
        "optimizer={name: muon, muon_weight_decay: 0.01}",
        "curriculum.1.objective=mntp",
    ),
)
def test_variants_train_and_resume(change: str, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(*shorter(change))
    whole = train(recipe, tmp_path / "whole")
    assert losses(whole)[2] < losses(whole)[0]
    train_until(2, recipe, tmp_path / "parts")
    assert digests(train(recipe, tmp_path / "parts"), 6) == digests(whole, 6)


def test_what_makes_no_network_leaves_no_run_folder(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    for change in ("num_attention_heads=5", "max_position_embeddings=16", "hidden_act=3"):
        with pytest.raises(InputError, match=r"init\.architecture"):
            train(tiny_recipe(f"init.architecture.{change}"), tmp_path)
    assert not any(tmp_path.iterdir())


def test_epochs_are_told_as_people_write_them(tiny_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "explain_computing", lambda *_: "")
    network: Any = torch.nn.Linear(1, 1)
    network.base_model = None
    _, batches = loader_of(tiny_recipe())
    tokens, model = 210 * batches.num_tokens, SimpleNamespace(network=network)
    state: Any = SimpleNamespace(model=model, num_tokens=tokens, compiling="not compiled")
    steps = f"batch_tokens={batches.num_tokens}", "schedule={warmup_steps: 0, decay_steps: 0}"
    masked = "{objective: mlm, steps: 90, mask_probability: 0.3, mask_passes: 3}"
    phases = f"curriculum=[{masked}, {{objective: clm, steps: 120}}]"
    job, _ = loader_of(tiny_recipe(*steps, phases))
    assert f" tokens, 150 epochs of {batches.num_samples:,} samples" in loop.describe_start(job, state, batches)
    # Each set of a mixture is told.
    mixture = "data.mixture=[{path: a, weight: 1}, {path: b, weight: 4}]"
    sets = tuple(SimpleNamespace(folder=Path(name)) for name in ("texts/a", "texts/b"))
    text: Any = replace(job.text, sets=sets)
    mixed = Batches(2 * batches.sets, job.tokens_before, (Fraction(1, 5), Fraction(4, 5)))
    job = replace(job, recipe=tiny_recipe(*steps, phases, mixture), text=text)
    assert ", a 30, b 120 epochs; " in loop.describe_start(job, state, mixed)
