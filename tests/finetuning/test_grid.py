import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from biphase.engine.scheduler import failure_path, read_failures
from biphase.engine.units import Engine, Outcome, Unit
from biphase.errors import InputError
from biphase.files import locked, write_json
from biphase.finetuning import fit
from biphase.finetuning import grid as grid_module
from biphase.finetuning.config import CellPlan
from biphase.finetuning.grid import (
    Grid,
    grid_units,
    list_numbers,
    missing_trainings,
    plan_grid,
    plan_missing,
    resolve_for,
    run_grid,
)
from biphase.finetuning.scores import Score, read_score, read_scores
from biphase.report.results import select_rate

from .conftest import make_cell

HERE = Engine(workers=0)


@pytest.fixture
def grid(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> Grid:
    return Grid(
        models=(str(model_folder),),
        tasks=("snli", "wnut17"),
        config=make_cell("snli", epochs=1).config,
        out=tmp_path / "scores",
        learning_rates=(1e-3, 3e-3),
        seeds=(0, 1),
        data_dirs=data_dirs,
    )


def missing(grid: Grid) -> int:
    return sum(map(len, missing_trainings(plan_grid(grid), grid.out)))


def names(grid: Grid) -> list[str]:
    return [unit.name for unit in grid_units(grid, plan_grid(grid)) if unit.kind]


def finished(grid: Grid) -> list[Score]:
    cells = [cell for training in plan_grid(grid) for cell in training if cell.is_finished(grid.out)]
    return [read_score(cell.folder(grid.out)) for cell in cells]


def test_numbers_of_numpy_are_those_of_python() -> None:
    seeds, rates = list_numbers("seeds", np.arange(2)), list_numbers("learning_rates", np.array([0.5, 1], np.float32))
    assert (seeds, rates) == ((0, 1), (0.5, 1.0)) and {*map(type, seeds + rates)} == {int, float}
    for axis, number in (("seeds", -1), ("seeds", 0.5), ("learning_rates", "low"), ("learning_rates", 0.0)):
        with pytest.raises(InputError, match=f"^{axis}: '{axis[:-1]}' is {number!r}: "):
            list_numbers(axis, [number])


def test_only_what_is_missing_is_run(grid: Grid) -> None:
    assert missing(grid) == 8
    assert run_grid(grid, plan_grid(grid), HERE) == []
    assert missing(grid) == 0
    scores = finished(grid)
    assert {(s.task, s.config.learning_rate, s.config.seed) for s in scores} == {
        (task, rate, seed) for task in grid.tasks for rate in (1e-3, 3e-3) for seed in (0, 1)
    }
    for task in grid.tasks:  # what validation would have chosen on other examples is known from what was kept
        choice = select_rate(read_scores(grid.out), read_scores(grid.out).models[0], task).choice
        assert choice is not None and sum(choice.draw_noise().shares.values()) == 1
        assert not choice.draw_noise().why_unknown
    wider = replace(grid, seeds=(0, 1, 2))
    assert missing(wider) == 4
    told = plan_missing(wider, plan_grid(wider), HERE)
    mean = sum(sum(score.seconds.values()) for score in scores) / 8
    assert [record["missing"] for record in told.cells] == [2, 2] and told.unknown_trainings == 0
    assert told.seconds_of_one_worker == pytest.approx(4 * mean)
    scores[0].folder.joinpath("score.json").write_text("{")  # type: ignore[union-attr]
    assert plan_missing(wider, plan_grid(wider), HERE).known_trainings == 4, (
        "what is damaged is told where scores are shown"
    )


@pytest.mark.slow
@pytest.mark.minutes
def test_workers_give_the_same_scores(grid: Grid, tmp_path: Path) -> None:
    small = replace(grid, learning_rates=(3e-3,))
    run_grid(small, plan_grid(small), HERE)
    other = replace(small, out=tmp_path / "other")
    assert run_grid(other, plan_grid(other), Engine(workers=2, device="cpu")) == []
    ours, theirs = finished(small), finished(other)
    assert [score.metrics for score in ours] == [score.metrics for score in theirs]
    assert len(ours) == 4


def test_a_cell_that_another_process_is_at_is_no_failure(grid: Grid, capsys: pytest.CaptureFixture) -> None:
    small = replace(grid, learning_rates=(1e-3,), tasks=("snli",))
    trainings = plan_grid(small)
    with locked(small.out / ".locks" / trainings[0][0].folder(small.out).name):
        assert run_grid(small, plan_grid(small), HERE) == []
    assert "another process works on it" in capsys.readouterr().err
    assert missing(small) == 1 and not read_failures(small.out)


def test_a_failed_cell_is_told_and_run_again(
    grid: Grid, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fit.fit_cells

    def fail_once(plans: list[CellPlan], *others: object) -> object:
        [plan] = plans
        if (plan.task.name, plan.config.seed, plan.config.learning_rate) == ("snli", 0, 1e-3):
            raise InputError("no memory left")
        return real(plans, *others)

    monkeypatch.setattr(fit, "fit_cells", fail_once)
    [failure] = run_grid(grid, plan_grid(grid), HERE)
    monkeypatch.setattr(fit, "fit_cells", real)
    assert failure.unit == names(grid)[0] and "no memory left" in failure.reason
    assert "no memory left" in capsys.readouterr().err
    assert read_failures(grid.out) == [failure]
    assert missing(grid) == 1
    assert run_grid(grid, plan_grid(grid), HERE) == []
    assert missing(grid) == 0 and not read_failures(grid.out)


def test_bad_data_fails_its_task_alone(grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for split in ("train", "validation", "test"):
        rows = [{"premise": split, "hypothesis": "b", "label": 7}]
        (bad / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = replace(grid, data_dirs={**grid.data_dirs, "snli": bad})
    failures = run_grid(small, plan_grid(small), HERE)
    assert "label 7 is not one of task 'snli'" in failures[0].reason
    blocked = [failure for failure in failures if failure.reason.startswith("blocked: encode snli for ")]
    assert len(blocked) == 4 + 1 and all(failure.is_blocked for failure in blocked)
    assert capsys.readouterr().err.count("label 7 is not one of") == 1
    kept = read_failures(small.out)
    assert len(kept) == 1 + 4 + 1 and all("train.jsonl:1: label 7 is not one of" in one.reason for one in kept)
    assert {one.unit for one in kept if one.is_blocked} == {
        "score words alone on snli",
        *(name for name in names(small) if "snli" in name),
    }
    assert {score.task for score in finished(small)} == {"wnut17"}
    assert missing(small) == 4


def test_only_failures_of_what_is_missing_are_told(grid: Grid) -> None:
    """A record of the same unit on data that were mended since has another name."""
    small = replace(grid, tasks=("snli",), learning_rates=(1e-3,), seeds=(0,))
    trainings = plan_grid(small)
    *_, unit = grid_units(small, trainings)
    for file, reason in ((unit.file, "no memory left"), (f"snli-{'0' * 16}", "label 7 is not one of task 'snli'")):
        path = failure_path(small.out, replace(unit, file=file))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"unit": unit.name, "reason": reason, "traceback": ""})
    assert len(read_failures(small.out)) == 2
    assert [failure.reason for failure in plan_missing(small, trainings, HERE).failed] == ["no memory left"]


def test_parts_of_a_grid(grid: Grid) -> None:
    trainings = plan_grid(grid)
    parts = [plan_grid(grid, f"{number}/3") for number in range(3)]
    assert sorted(t[0].hash for part in parts for t in part) == sorted(t[0].hash for t in trainings)
    assert [len(part) for part in parts] == [3, 3, 2]
    for wrong in ("3/3", "1", "a/b", "-1/2", "²/٣", "1/" + "9" * 5000):
        with pytest.raises(InputError, match="must be NUMBER/TOTAL"):
            plan_grid(grid, wrong)


def test_tasks_that_share_a_training_are_one(grid: Grid, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    folder = data_dirs["squad_retrieval"]
    judged = tmp_path / "msmarco" / "qrels"
    judged.mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl"):
        (judged.parent / name).symlink_to(folder / name)
    for name, place in (("train", "train"), ("test", "test")):
        (judged / f"{name}.tsv").symlink_to(folder / "qrels" / f"{place}.tsv")
    (judged / "dev.tsv").write_text("".join((judged / "test.tsv").read_text().splitlines(keepends=True)[:-1]))
    shared = replace(grid, tasks=("nq", "msmarco"), data_dirs={"nq": folder, "msmarco": judged.parent})
    trainings = plan_grid(shared)
    assert len(trainings) == 4
    assert [cell.task.name for cell in trainings[0]] == ["nq", "msmarco"]
    one = replace(shared, learning_rates=(1e-3,), seeds=(0,))
    assert run_grid(one, plan_grid(one), HERE) == []
    scores = finished(one)
    assert {score.trained_on for score in scores} == {"msmarco"}
    of_one = scores[0].seconds["train"] + sum(score.seconds["evaluate"] for score in scores)
    assert scores[0].seconds["train"] == scores[1].seconds["train"]
    told = plan_missing(shared, plan_grid(shared), HERE)
    assert (told.seconds_of_one_worker, told.known_trainings) == (pytest.approx(3 * of_one), 3)
    told = plan_missing(
        replace(shared, out=tmp_path / "empty"), plan_grid(replace(shared, out=tmp_path / "empty")), HERE
    )
    assert (told.seconds_of_one_worker, told.unknown_trainings) == (None, 4)


@pytest.mark.parametrize(("engine", "precision"), [(Engine(workers=2), "fp32"), (Engine(kind="ray"), "bf16")])
def test_the_precision_is_that_of_where_the_units_run(
    grid: Grid, engine: Engine, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has no units for bf16; those of the cluster have."""
    asked = []

    def run_there(units: list[Unit], engine: Engine) -> Iterator[Outcome]:
        asked.extend(units)
        monkeypatch.setattr("biphase.finetuning.config.has_bf16_cores", lambda: True)
        yield from (Outcome(unit.name, unit.function(**unit.arguments), None, 0.0) for unit in units)

    monkeypatch.setattr("biphase.finetuning.config.has_bf16_cores", lambda: False)
    monkeypatch.setattr(grid_module, "run_units", run_there)
    auto = grid.config.model_copy(update={"precision": "auto"})
    config = resolve_for(auto, engine)
    assert config == grid.config.model_copy(update={"precision": precision})
    assert len(asked) == (engine.kind == "ray")
    explicit = grid.config.model_copy(update={"device": "cuda"})
    assert resolve_for(explicit, engine) == explicit  # this machine may have none
    monkeypatch.setattr(grid_module, "run_units", lambda units, engine: [Outcome("find out", None, "no nodes", 0.0)])
    if engine.kind == "ray":
        with pytest.raises(InputError, match="find out: no nodes"):
            resolve_for(auto, engine)


def test_what_is_named_twice(grid: Grid) -> None:
    with pytest.raises(InputError, match="task snli is named twice"):
        plan_grid(replace(grid, tasks=("snli", "snli")))
    with pytest.raises(InputError, match="did you mean"):
        plan_grid(replace(grid, tasks=("snl",)))


def test_a_task_of_ones_own(grid: Grid, tmp_path: Path) -> None:
    """Named by its file, also to the workers."""
    lines = ["name: own", "family: token_classification", "metric: f1", "label: ner_tags"]
    lines += ["classes: [O, B-location, I-location]", "files: [{train: train.jsonl, validation: validation.jsonl, "]
    lines[-1] += "test: test.jsonl}]"
    path = tmp_path / "own.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    dirs = {"own": grid.data_dirs["wnut17"]}
    own = replace(grid, tasks=(str(path),), learning_rates=(1e-3,), seeds=(0,), data_dirs=dirs)
    assert run_grid(own, plan_grid(own), HERE) == []
    assert [score.task for score in finished(own)] == ["own"]
