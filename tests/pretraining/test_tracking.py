"""Numbers of a run in TensorBoard and in Weights & Biases, as those packages read them back."""

import importlib
import json
import struct
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from training_runs import MakeRecipe, losses, only

from biphase.console import check_tracking, open_tracking
from biphase.errors import InputError, StoppedError
from biphase.pretraining.loop import MetricsLog, train
from biphase.run import read_metrics, read_recipe


def test_tensorboard(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Each objective has curves of its own, the rest bears the names of transformers' trainer."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tiny_recipe(*only("clm", 2, "tracking=tensorboard", "validation.every_steps=2")), tmp_path)
    events = reader.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/clm_loss")] == [1, 2]
    assert [event.value for event in events.Scalars("train/clm_loss")] == pytest.approx(losses(run), rel=1e-6)
    tags = {"eval/clm_loss", "eval/clm_accuracy", "train/learning_rate", "train/grad_norm"}
    assert tags | {"train/num_input_tokens_seen"} <= set(events.Tags()["scalars"])
    assert read_recipe(run).tracking == "tensorboard"


def test_no_step_is_faster_than_the_peak(tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: Any) -> None:
    """As a peak that was measured beside other work may be."""
    monkeypatch.setattr("biphase.pretraining.loop.peak_flops", lambda *_: 1.0)
    rows = read_metrics(train(tiny_recipe(*only("clm", 3)), tmp_path), "train")
    fastest = list(accumulate((row["flops_per_second"] for row in rows), max))
    shares = [row["flops_per_second"] / peak for row, peak in zip(rows, fastest, strict=True)]
    assert [row["share_of_peak"] for row in rows] == pytest.approx(shares, abs=1e-3)


@pytest.mark.slow
@pytest.mark.minutes
def test_wandb_offline(tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """W&B's own record of a run that was stopped and went on: one run, each step once."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = tiny_recipe(*only("mlm", 4, "tracking=wandb", "checkpoints.every_steps=2"))

    def stop(*arguments: Any, original: Any = MetricsLog.record_step) -> None:
        original(*arguments)
        if arguments[1]["step"] == 3:
            raise StoppedError("as if killed")

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(MetricsLog, "record_step", stop)
        train(recipe, tmp_path)
    told = capsys.readouterr().err
    run = train(recipe, tmp_path)
    first, second = sorted(run.path.glob("wandb/offline-run-*"))
    assert f"W&B: offline; `wandb sync {first}` sends it" in told
    # offline-run-TIME-ID, and -1 behind it for a second one of the same second
    assert first.name.split("-")[3] == second.name.split("-")[3]
    assert [row["_step"] for row in read_wandb(first)] == [1, 2, 3]
    rows = read_wandb(second)
    assert [row["_step"] for row in rows] == [3, 4]
    assert [row["train/mlm_loss"] for row in rows] == pytest.approx(losses(run)[2:])
    assert "eval/mlm_loss" in rows[-1]


@pytest.mark.slow
@pytest.mark.parametrize("is_of_study", [True, False])
def test_wandb_groups_what_is_of_one_study(is_of_study: bool, tmp_path: Path, monkeypatch: Any) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "study-a" / "scores" / "model" / "tracking" / "cell"
    folder.mkdir(parents=True)
    if is_of_study:
        (tmp_path / "study-a" / "study.yaml").touch()
    with open_tracking("wandb", folder, {}):
        assert (wandb.run.group or None) == ("study-a" if is_of_study else None)


def read_wandb(folder: Path) -> list[dict[str, float]]:
    """The rows of history in the log that W&B wrote: after 7 bytes, parts of records in blocks of 32 KiB as LevelDB has
    them (checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    content, at, rows, whole = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no part fits into the rest of this block
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole = (b"" if kind in (1, 2) else whole) + content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record.FromString(whole)
            items = record.history.item
            rows += [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}]
    return [row for row in rows if row]


def test_tracking_without_its_package(tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: Any) -> None:
    """A folder `wandb`, which W&B leaves where it ran, is no package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=r"wandb needs a package that is not installed; pip install .biphase\[wandb\]"):
        check_tracking("wandb")
