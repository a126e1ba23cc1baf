"""Checkpoints are whole or absent, and references to them are understood or refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import biphase.pretraining.checkpoint as checkpoint
from biphase import inspect
from biphase.corpus.tokenizer import load_tokenizer
from biphase.distributed import World
from biphase.encoder.attention import lay_out
from biphase.encoder.models import identify
from biphase.encoder.network import TokenIds, make_model
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError
from biphase.files import RECORD_HASH, read_json, remove_folder, write_hashed, write_json
from biphase.pretraining.checkpoint import load_optimizer, save_checkpoint
from biphase.pretraining.optimizer import make_optimizers
from biphase.recipe import Optimizer
from biphase.run import (
    CheckpointManifest,
    Run,
    find_checkpoint,
    find_model,
    read_checkpoint_manifest,
    whole_steps,
)

ALONE = World(0, 1, torch.device("cpu"))
MANIFEST = CheckpointManifest(
    step=3,
    run_step=3,
    tokens_seen=99,
    data_position=96,
    data_fingerprint="d",
    tokenizer_hash="t",
    objective="mlm",
    is_decayed=False,
    parent=None,
    carried=[],
    texts=("d",),
    run="tiny-12345678",
)


def tiny() -> PackedModel:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    return PackedModel(make_model("1m", small | {"num_key_value_heads": 4}, TokenIds(384, 1, 0, 2, None), 64, seed=0))


def stepped(name: str = "adamw") -> tuple[PackedModel, list[torch.optim.Optimizer]]:
    """A model after one update, and its optimizers."""
    model = tiny()
    optimizers = make_optimizers(Optimizer(name=name), model)  # type: ignore[arg-type]
    tokens = torch.arange(8)
    loss, _, _ = model(tokens, tokens, lay_out(np.array([0, 8]), causal=True), tokens, tokens)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


@pytest.fixture(scope="module")
def tokenizer(corpus: Any) -> PreTrainedTokenizerFast:
    return load_tokenizer(corpus.tokenizer)


@pytest.fixture
def run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Run:
    """A run with whole checkpoints 3 and 12."""
    made = Run(tmp_path / "tiny-12345678")
    made.path.mkdir()
    (made.path / "config.yaml").write_text("name: tiny\n")
    model, optimizers = stepped()
    for step in (3, 12):
        save_checkpoint(made, replace(MANIFEST, step=step), model, optimizers, tokenizer, ALONE)
    return made


def test_manifest_round_trip(run: Run) -> None:
    manifest = read_checkpoint_manifest(run.steps / "3")
    assert replace(manifest, files={}) == MANIFEST
    files = {str(path.relative_to(run.steps / "3")) for path in (run.steps / "3").rglob("*") if path.is_file()}
    assert set(manifest.files) == files - {"manifest.json"}
    assert {"model/model.safetensors", "model/config.json", "model/tokenizer.json", "optimizer.safetensors"} <= files


OTHERS = {
    "another run's": lambda tree: tree | {"run": "tiny-87654321"},
    "another step's": lambda tree: tree | {"step": 12},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_or_step_is_refused(
    other: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is asked for; but a run may have any name, and a checkpoint may be copied out of it."""
    written = read_json(run.steps / "3" / "manifest.json")
    del written[RECORD_HASH]
    write_json(run.environment, {"run": "tiny-12345678"})
    moved = Run(run.path.rename(tmp_path / "mine"))
    assert identify(f"{moved.path}@3").hash
    path = moved.steps / "3"
    write_hashed(path / "manifest.json", OTHERS[other](written))
    for ask in (find_checkpoint, identify, lambda _: inspect(path), lambda _: identify(str(path / "model"))):
        with pytest.raises(
            InputError, match=r"steps/3 is step \d+ of .*, not step 3 of tiny-12345678: put its own back"
        ):
            ask(f"{moved.path}@3")
    monkeypatch.setattr("biphase.api.folders.read_recipe", lambda run: SimpleNamespace(num_steps=12, curriculum=()))
    with pytest.raises(InputError, match="put its own back"):
        inspect(moved.path)
    copied = shutil.copytree(path, tmp_path / "3")
    assert read_checkpoint_manifest(copied).files


def test_content_names_the_model_alone(run: Run) -> None:
    manifest = read_checkpoint_manifest(run.steps / "3")
    assert manifest.content == read_checkpoint_manifest(run.steps / "12").content
    moments = manifest.files | {"optimizer.safetensors": "other"}
    weights = manifest.files | {"model/model.safetensors": "other"}
    assert replace(manifest, files=moments).content == manifest.content
    assert replace(manifest, files=weights).content != manifest.content


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_round_trip(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model, optimizers = stepped(name)
    save_checkpoint(Run(tmp_path), MANIFEST, model, optimizers, tokenizer, ALONE)
    file = tmp_path / "steps" / "3" / "optimizer.safetensors"
    save_file(load_file(file), tmp_path / "by the library")
    assert file.read_bytes() == (tmp_path / "by the library").read_bytes()
    fresh = tiny()
    loaded = make_optimizers(Optimizer(name=name), fresh)  # type: ignore[arg-type]
    load_optimizer(tmp_path / "steps" / "3", fresh, loaded, ALONE)
    by_name = dict(fresh.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        for before, after in zip(optimizers, loaded, strict=True):
            state = before.state.get(parameter, {})
            assert after.state.get(by_name[parameter_name], {}).keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(after.state[by_name[parameter_name]][key], value)


def test_unreadable_moments(run: Run) -> None:
    file = run.steps / "3" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    model = tiny()
    with pytest.raises(InputError, match=r"optimizer.safetensors cannot be read"):
        load_optimizer(run.steps / "3", model, make_optimizers(Optimizer(), model), ALONE)


def test_a_step_is_whole_or_absent(
    run: Run, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails on the way, up to the manifest itself, leaves no step behind."""
    model, optimizers = stepped()
    for name in ("write_tensors", "hash_below", "write_hashed"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, lambda *args: 1 / 0)
            with pytest.raises(
                InputError, match=r"cannot write .*20 \(division by zero\); earlier checkpoints are kept"
            ):
                save_checkpoint(run, replace(MANIFEST, step=20), model, optimizers, tokenizer, ALONE)
        assert sorted(path.name for path in run.steps.iterdir()) == ["12", "3"]


def test_what_cannot_be_written_ends_all_processes(
    run: Run, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that transformers refuses to save: one line, and the first process joins the others before it ends."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("GenerationConfig is invalid:\n- `top_p`: no sampling")

    model, optimizers = stepped()
    joined: list[Any] = []

    def join(world: World, *values: float) -> list[float]:
        joined.append(values)
        return [*values]

    monkeypatch.setattr(World, "sum", join)
    monkeypatch.setattr(model.network, "save_pretrained", refuse)
    with pytest.raises(InputError, match=r"steps/20 \(GenerationConfig is invalid: - `top_p`: no sampling\); earlier"):
        save_checkpoint(run, replace(MANIFEST, step=20), model, optimizers, tokenizer, ALONE)
    assert joined == [(True,)]


def test_whole_steps_are_ordered_as_numbers(run: Run, tmp_path: Path) -> None:
    for name in (".20.part", "20", "notes"):
        (run.steps / name).mkdir()
    shutil.copytree(run.steps / "3", run.steps / "²")  # a digit to str.isdigit, no number to int
    assert whole_steps(run) == [3, 12]
    assert whole_steps(Run(tmp_path / "none")) == []


def test_the_last_step_of_a_done_run_is_not_the_one_before(run: Run) -> None:
    run.mark_done({"step": 12, "tokens_seen": 99})
    assert find_checkpoint(str(run.path)) == run.steps / "12"
    manifest = run.steps / "12" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest.name)  # a loop
    with pytest.raises(InputError, match=r"is done at step 12, .*; the last whole one is @3: say .*@3 for that"):
        find_checkpoint(str(run.path))
    assert find_checkpoint(f"{run.path}@3") == run.steps / "3"


def test_references(run: Run, tmp_path: Path) -> None:
    assert find_checkpoint(str(run.path)) == run.steps / "12"
    assert find_checkpoint(f"{run.path}@3") == run.steps / "3"
    assert find_model(f"{run.path}@3") == str(run.steps / "3" / "model")
    assert find_model("EuroBERT/EuroBERT-210m") == "EuroBERT/EuroBERT-210m"
    (tmp_path / "a@b").mkdir()
    moved = run.path.rename(tmp_path / "a@b" / run.path.name)
    assert find_checkpoint(f"{moved}@3") == moved / "steps" / "3"
    assert find_checkpoint(str(moved)) == moved / "steps" / "12"
    assert find_model(str(moved)) == str(moved / "steps" / "12" / "model")
    run = Run(moved)
    for wanted in ("@4", "@x", "@²"):
        with pytest.raises(InputError, match=f"has no checkpoint '{wanted}'; it has @3, @12"):
            find_checkpoint(f"{run.path}{wanted}")
    with pytest.raises(InputError, match="is not a run folder"):
        find_checkpoint(str(tmp_path / "nothing"))
    (tmp_path / "model").mkdir()
    for name in ("config.yaml", "config.json"):
        (tmp_path / "model" / name).write_text("{}")
    assert find_model(str(tmp_path / "model")) == str(tmp_path / "model"), "a model with a config.yaml of its own"
    (tmp_path / "embedding" / "stages").mkdir(parents=True)
    (tmp_path / "embedding" / "config.yaml").write_text("out: embedder")
    with pytest.raises(InputError, match="is a run of biphase embed: give its model, the folder `out`"):
        find_model(str(tmp_path / "embedding"))
    empty = Run(tmp_path / "empty")
    empty.path.mkdir()
    (empty.path / "config.yaml").write_text("name: tiny\n")
    with pytest.raises(InputError, match="has no whole checkpoint yet"):
        find_checkpoint(str(empty.path))


def test_damage_is_named(run: Run) -> None:
    folder = run.steps / "3"
    stored = read_json(folder / "manifest.json")
    for change in ({"data_fingerprint": "e"}, {"data_position": 95}, {"objective": "clm"}, {"surprise": 1}):
        write_json(folder / "manifest.json", stored | change)
        with pytest.raises(InputError, match=r"manifest.json is damaged \(it is not what was written, by"):
            read_checkpoint_manifest(folder)
        with pytest.raises(InputError, match=r"is damaged \(it is not what was written"):
            identify(f"{run.path}@3")
    tree = {key: value for key, value in stored.items() if key != "record_hash"}
    write_json(folder / "manifest.json", tree)
    with pytest.raises(InputError, match=r"is damaged \(it is not what was written"):
        read_checkpoint_manifest(folder)
    write_hashed(folder / "manifest.json", tree | {"files": tree["files"] | {"model/more.safetensors": "0"}})
    with pytest.raises(InputError, match=r"model/more.safetensors is damaged .it is missing"):
        read_checkpoint_manifest(folder)
    (folder / "manifest.json").write_text('{"step": 3,')
    with pytest.raises(InputError, match=r"manifest.json is not valid JSON"):
        read_checkpoint_manifest(folder)
    for change, message in (
        ({"step": "third"}, r"manifest.json is damaged \(step: .*\); delete the folder and rerun"),
        ({"carried": None}, r"manifest.json is damaged \(carried: "),
        ({"files": {"model": "0"}}, r"model is damaged .it is missing"),
    ):
        write_hashed(folder / "manifest.json", tree | change)
        with pytest.raises(InputError, match=message):
            read_checkpoint_manifest(folder)
    write_hashed(folder / "manifest.json", {key: value for key, value in tree.items() if key != "objective"})
    with pytest.raises(InputError, match=r"manifest.json is damaged \(objective: Field required\)"):
        read_checkpoint_manifest(folder)
    for content in ("[]", "null"):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(InputError, match=r"manifest.json is damaged \("):
            read_checkpoint_manifest(folder)


def test_dropping_begins_with_the_manifest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while deleting: what is left of a dropped step must not look whole."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        remove_folder(run.steps / "3")
    assert whole_steps(run) == [12]
    remove_folder(run.steps / "3")
    assert [path.name for path in run.steps.iterdir()] == ["12"]
