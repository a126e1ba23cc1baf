"""The demo from end to end, with little training."""

from importlib import resources
from pathlib import Path

import pytest

from biphase import demo
from biphase.config import Recipe, load_config
from biphase.pretraining.loop import train
from biphase.run import Run

SHORT = ("curriculum.0.steps=4", "curriculum.1.steps=4", "schedule.warmup_steps=2", "schedule.decay_steps=2")


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def pretrain(folder: Path) -> Run:
        recipe = Path(str(resources.files("biphase") / "bundled" / "demo.yaml"))
        shards = f"data.shards={folder / 'shards'}"
        return train(load_config(Recipe, recipe, [shards, *SHORT]), folder / "runs")

    quick = {"max_train_examples": 64, "max_eval_examples": 50, "epochs": 1}
    monkeypatch.setattr(demo, "pretrain", pretrain)
    monkeypatch.setattr(demo, "TASKS", {task: config.model_copy(update=quick) for task, config in demo.TASKS.items()})
    demo.run_demo(tmp_path / "demo")
    out = capsys.readouterr().out
    assert all(task in out for task in demo.TASKS) and "took" in out
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000
    assert len(list((tmp_path / "demo" / "scores").glob("*/score.json"))) == 2 * 2 * 3
