"""A run that was stopped, killed or out of space goes on bit for bit, and a branch where its parent was."""

import errno
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_runs import MakeRecipe, digests, losses, numbers, only, other_shards, shorter, stop_after, train_until

import biphase.pretraining.checkpoint as checkpoint
import biphase.pretraining.job as job
import biphase.pretraining.loop as loop
from biphase.errors import InputError, StoppedError
from biphase.files import read_json
from biphase.pretraining.loop import train
from biphase.recipe import Recipe
from biphase.run import Run, claim_run, read_checkpoint_manifest, read_metrics, whole_steps


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


def test_a_damaged_checkpoint_is_named(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(*shorter())
    run = Run(train_until(2, recipe, tmp_path))
    for name in ("model/model.safetensors", "optimizer.safetensors", "model/config.json"):
        damaged = run.steps / "2" / name
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1])
        with pytest.raises(InputError, match=rf"steps/2/{name} is damaged .*by its hash.; delete"):
            train(recipe, tmp_path)
        damaged.unlink()
        with pytest.raises(InputError, match=rf"steps/2/{name} is damaged .it is missing"):
            train(recipe, tmp_path)
        damaged.write_bytes(whole)
    shutil.rmtree(run.steps / "2")
    assert train(recipe, tmp_path).is_done


def no_space(patch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(checkpoint, "write_tensors", full)


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

    patch.setattr(job, "save_checkpoint", save)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (no_space, r"cannot write .*/steps/10 \(No space left on device\); earlier checkpoints are kept"),
        (no_large_file, r"cannot write .*/steps/10 \(File too large\); earlier checkpoints are kept"),
    ],
)
def test_no_space_left_keeps_the_previous_checkpoint(
    limit: Any, message: str, finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe()
    run = Run(train_until(5, recipe, tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        limit(patch)
        with pytest.raises(InputError, match=message):
            train(recipe, tmp_path)
    assert whole_steps(run) == [5]
    assert not list(run.path.rglob(".*.part"))
    assert digests(train(recipe, tmp_path), 20) == digests(finished, 20)


def test_two_processes_do_not_share_a_run(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(*shorter())
    run = Run(train_until(2, recipe, tmp_path))
    before = read_json(run.environment)
    with claim_run(run, {}, {}), pytest.raises(InputError, match="is in use by another process"):
        train(recipe, tmp_path)
    # The loser wrote nothing: what is there now is the winner's.
    assert read_json(run.environment) == {"run": run.path.name, "earlier": [before]}


def test_a_device_of_another_precision_does_not_begin_anew(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphase.distributed.choose_dtype", lambda *_: torch.float32)
        path = train_until(2, tiny_recipe(*shorter("compute.precision=auto")), tmp_path)
        patch.setattr("biphase.distributed.choose_dtype", lambda *_: torch.bfloat16)
        with pytest.raises(InputError, match=rf"^{path} was begun in fp32, .* with compute\.precision=fp32, or delete"):
            train(tiny_recipe(*shorter("compute.precision=auto")), tmp_path)
    assert [*tmp_path.iterdir()] == [path]
    assert train(tiny_recipe(*shorter("compute.precision=fp32")), tmp_path) == Run(path)
    # A finished run is not begun anew either: not for a checkpoint to add, and not if its checkpoints were deleted.
    shutil.rmtree(Run(path).steps)
    told = rf"^{path} was trained in fp32, .* with compute\.precision=fp32, or train another with .*=bf16$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphase.distributed.choose_dtype", lambda *_: torch.bfloat16)
        with pytest.raises(InputError, match=told):
            train(tiny_recipe(*shorter("compute.precision=auto", "checkpoints.keep=[2]")), tmp_path)
    assert [*tmp_path.iterdir()] == [path]


def test_passing_checkpoints_are_dropped(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe("checkpoints.every_steps=2", "checkpoints.keep_last=2", "validation.every_steps=0")
    run = train(recipe, tmp_path)
    assert whole_steps(run) == [10, 15, 16, 18, 20], "ends of phases and the last step before the decay stay"


def test_a_finished_run_that_trains_again_loses_no_checkpoint(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Neither what it kept before nor the one at which training again was stopped."""
    often = ("checkpoints.every_steps=2", "checkpoints.keep_last=2", "validation.every_steps=0")
    run = train(tiny_recipe(*often), tmp_path)
    recipe = tiny_recipe(*often, "checkpoints.keep=[8]")
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(StoppedError, match="stopped at step 5 of 8"):
            train(recipe, tmp_path)
    assert whole_steps(run) == [5, 10, 15, 16, 18, 20]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)  # from step 5, three are left
        assert train(recipe, tmp_path) == run
    assert whole_steps(run) == [5, 8, 10, 15, 16, 18, 20]


def test_a_finished_run_that_trains_again_may_be_killed(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """It goes on from its last checkpoint on the way, as an unfinished run does."""
    often = ("checkpoints.every_steps=2", "validation.every_steps=0")
    run, update = train(tiny_recipe(*often, "checkpoints.keep_last=1"), tmp_path), loop.update
    kept, again = whole_steps(run), tiny_recipe(*often, "checkpoints.keep=[8]")

    def killed(job: Any, state: Any, microbatches: Any, step: int, *rest: Any) -> Any:
        assert step < 5, "killed"
        return update(job, state, microbatches, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", killed)
        with pytest.raises(AssertionError, match="killed"):
            train(again, tmp_path)
    assert whole_steps(run) == [4, *kept]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)  # from step 4, four are left
        assert train(again, tmp_path) == run
    assert whole_steps(run) == [4, 8, *kept]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_checkpoint_is_on_the_disk_before_an_older_one_goes(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records before it, its files and folders, then its name."""
    events: list[str] = []
    fsync, remove = os.fsync, job.remove_folder

    def note_sync(number: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def note_removal(path: Path) -> None:
        events.append(f"{path.name} goes")
        remove(path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(job, "remove_folder", note_removal)
    run = train(tiny_recipe(*only("clm", 3, "checkpoints.every_steps=1", "checkpoints.keep_last=1")), tmp_path)
    part = run.steps / ".2.part"
    files = read_checkpoint_manifest(run.steps / "3").files
    expected = {str(part / name) for name in (*files, "manifest.json", "model")} | {str(part), str(run.metrics)}
    begin, end = events.index(str(part)), events.index("1 goes")
    assert expected <= set(events[: begin + 1]) and str(run.steps) in events[begin:end]


def test_a_finished_run_gets_a_checkpoint_that_it_did_not_keep(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The same training, from the checkpoint before: only its validation is logged, and nothing else changes."""
    run = train(tiny_recipe("validation.every_steps=0"), tmp_path / "late")
    updates, done, weights = read_metrics(run, "train"), read_json(run.path / "done.json"), digests(run, 20)
    assert whole_steps(run) == [10, 15, 20]
    recipe = tiny_recipe("validation.every_steps=0", "checkpoints.keep=[4, 12]")
    path = train_until_step_is_kept(recipe, tmp_path / "late")
    assert path == run.path and whole_steps(run) == [2, 10, 15, 20]
    assert train(recipe, tmp_path / "late").path == run.path, "what is kept decides no weights"
    assert whole_steps(run)[-5:] == [4, 10, 12, 15, 20]
    assert (read_json(run.path / "done.json"), digests(run, 20)) == (done, weights)
    early = train(recipe, tmp_path / "early")
    assert whole_steps(early) == [4, 10, 12, 15, 20]
    assert all(digests(early, step) == digests(run, step) for step in (4, 12))
    shutil.rmtree(run.steps / "12")
    lines = run.metrics.read_text().splitlines(keepends=True)
    lines = [line for line in lines if not ("validation" in line and json.loads(line)["step"] == 12)]
    run.metrics.write_text("".join(lines) + '{"kind": "valid')  # the disk was full
    train(recipe, tmp_path / "late")
    assert whole_steps(run)[-5:] == [4, 10, 12, 15, 20]
    validated = read_metrics(run, "validation")
    assert [row["step"] for row in validated] == [4, 10, 12, 15, 20], "in order, and each once"
    assert validated == read_metrics(early, "validation") and read_metrics(run, "train") == updates


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
    with pytest.raises(InputError, match=r"model/model.safetensors is damaged"):
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


def test_a_branch_goes_on_without_its_parent(finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The checkpoint in which it began, or all of the parent, is gone meanwhile."""
    parent = tmp_path / "parent"
    shutil.copytree(finished.path, parent)
    recipe = tiny_recipe(f"init={{checkpoint: '{parent}@10'}}", *only("mlm", 4))
    whole = train(recipe, tmp_path / "whole")
    run = Run(train_until(2, recipe, tmp_path / "parts"))
    shutil.rmtree(parent / "steps" / "10")
    with pytest.raises(InputError, match=r"parent has no checkpoint '@10'"):
        train(recipe, tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"parent has no checkpoint '@10'"):
        train(tiny_recipe(f"init={{checkpoint: '{parent}@10'}}", *only("mlm", 3)), tmp_path / "parts")
    assert digests(train(recipe, tmp_path / "parts"), 14) == digests(whole, 14)
    assert numbers(run) == numbers(whole)
    manifests = [read_checkpoint_manifest(each.steps / "14") for each in (run, whole)]
    assert manifests[0] == manifests[1]
    shutil.rmtree(parent)
    assert train(recipe, tmp_path / "parts").path == run.path


@pytest.mark.parametrize("begin", ["with a model", "as a branch", "resumed"])
def test_weights_that_are_replaced_as_a_run_begins_are_not_trained(
    begin: str, finished: Run, tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, between their hash and the first update, until which they are mapped."""
    parent = Run(shutil.copytree(finished.path, tmp_path / "parents" / finished.path.name))
    folder, root = parent.steps / "10" / "model", tmp_path / "runs"
    origin = {
        "with a model": ["init={}", f"init.model={folder}"],
        "as a branch": ["init={}", f"init.checkpoint={parent.path}@10"],
    }
    recipe = tiny_recipe(*shorter(*origin.get(begin, [])))
    if begin == "resumed":
        folder = train_until(2, recipe, root) / "steps" / "2" / "model"
    update = loop.update

    def replace_weights(*arguments: Any) -> Any:
        with open(folder / "model.safetensors", "r+b") as file:
            file.seek(-999, os.SEEK_END)
            file.write(bytes(900))
        return update(*arguments)

    monkeypatch.setattr(loop, "update", replace_weights)
    with pytest.raises(InputError, match=r"model was replaced while|model\.safetensors is damaged"):
        train(recipe, root)
    assert [whole_steps(Run(path)) for path in root.iterdir()] == ([[2]] if begin == "resumed" else [])
