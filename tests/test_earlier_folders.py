"""A user's folders that an earlier version wrote are read, gone on with and compared as if this one had written them.

`fixtures/earlier_folders/README.md` says how they were made.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import biphase.cli.app as cli
from biphase import inspect
from biphase.run import Run, read_metrics

EARLIER = Path(__file__).parent / "fixtures" / "earlier_folders"
RUN = "trained/tiny-26fdd699"
SETTINGS = ["precision=fp32", "device=cpu", "max_steps=120", "batch_size=4", "max_length=48", "max_eval_examples=6"]
GRID = [
    "--tasks=mood.yaml",
    "--learning-rates=1e-1",
    "--seeds=0-1",
    "--data-dir=mood=mood",
    "--workers=0",
    "--out=scores",
]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folders, in which the test stands."""
    folder = shutil.copytree(EARLIER, tmp_path / "world")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "prepare_process", lambda: None)
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call `biphase` in this process, and return what it printed for a program."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["biphase", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = capsys.readouterr()
        assert not caught.value.code, printed.err
        return printed.out

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for locks and other hidden ones."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("shards", "shards"),
        (RUN, "run"),
        ("kept", "fine-tuned model"),
        ("embedder", "embedding model"),
        ("index", "search index"),
    ],
)
def test_each_is_whole(world: Path, folder: str, kind: str) -> None:
    assert inspect(folder, verify=True)["kind"] == kind


def test_finished_work_is_not_done_again(world: Path, call: Callable[..., str]) -> None:
    """The same commands find the run and the stage of the embedding model under their names."""
    folders = [world / RUN, *world.glob("embedding/*/stages")]
    before = [contents(folder) for folder in folders]
    call("pretrain", "recipe.yaml", "--runs", "trained")
    call("embed", "embed.yaml", "--runs", "embedding")
    assert [contents(folder) for folder in folders] == before


def test_a_run_goes_on(world: Path, call: Callable[..., str]) -> None:
    """Killed after its third step, to the losses that the earlier version came to."""
    run = Run(Path(RUN))
    whole = read_metrics(run, "train")
    (run.path / "done.json").unlink()
    shutil.rmtree(run.steps / "6")
    call("pretrain", "recipe.yaml", "--runs", "trained")
    resumed = read_metrics(run, "train")
    assert [record["step"] for record in resumed] == [record["step"] for record in whole]
    assert [record["loss"] for record in resumed] == pytest.approx([record["loss"] for record in whole], rel=1e-4)


def test_a_run_is_branched(world: Path, call: Callable[..., str]) -> None:
    call("pretrain", "recipe.yaml", "--runs", "trained", "name=branch", "init={}", f"init.checkpoint={RUN}@3")
    [branch] = Path("trained").glob("branch-*")
    assert Run(branch).is_done


def test_scores_are_found_and_compared(world: Path, call: Callable[..., str]) -> None:
    """Cells have the same names: none is computed anew."""
    cells = contents(world / "scores")
    call("evaluate", f"{RUN}@3", f"{RUN}@6", *SETTINGS, *GRID)
    printed = call("evaluate", "--compare", f"{RUN}@3", f"{RUN}@6", "--tasks", "mood.yaml", "--out", "scores")
    assert contents(world / "scores") == cells
    assert "50.00" in printed and "75.00" in printed and "within noise" in printed


def test_a_kept_model_predicts_as_then(world: Path, call: Callable[..., str]) -> None:
    earlier = [json.loads(line) for line in Path("predicted.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in earlier:
        row["probabilities"] = pytest.approx(row["probabilities"], abs=1e-3)
        row["probability"] = pytest.approx(row["probability"], abs=1e-3)
    printed = call("predict", "kept", "mood/test.jsonl", "--device", "cpu")
    assert [json.loads(line) for line in printed.splitlines()] == earlier


@pytest.mark.parametrize("place", [["index"], ["train.jsonl", "--model", "embedder", "--index", "index"]])
def test_an_index_answers(world: Path, call: Callable[..., str], place: list[str]) -> None:
    """By itself, and as the index of its text, which is not made again."""
    index = contents(world / "index")
    printed = call("search", place[0], "who is Tip?", *place[1:])
    assert "train-10#0" in printed.partition("BM25")[2]
    assert contents(world / "index") == index
