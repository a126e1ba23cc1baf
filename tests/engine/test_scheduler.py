"""Units as a grid and a study do them: one record of what failed, and an honest time left."""

from pathlib import Path

import pytest

from biphase import console
from biphase.engine import units as units_module
from biphase.engine.scheduler import Failure, Forecast, read_failures, run_batch
from biphase.engine.units import Engine, Outcome, Unit
from biphase.errors import BusyError, InputError
from biphase.files import write_json

HERE = Engine(workers=0)


def refuse(marker: str) -> list[str]:
    if not Path(marker).exists():
        raise InputError("no marker")
    return []


def test_failures_are_kept_until_the_unit_is_done(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    marker = tmp_path / "marker"
    units = [
        Unit("a b/c", refuse, {"marker": str(marker)}),
        Unit("a-b-c", list, {}, needs=("a b/c",)),
        Unit("fine", list, {}),
    ]
    failures = run_batch(units, HERE, tmp_path, label="test", things="units")
    assert [(failure.unit, failure.reason) for failure in failures] == [
        ("a b/c", "no marker"),
        ("a-b-c", "blocked: a b/c failed: no marker"),
    ]
    assert [failure.is_blocked for failure in failures] == [False, True]
    assert {failure.cause for failure in failures} == {"a b/c"}
    assert sorted(read_failures(tmp_path), key=lambda failure: failure.unit) == failures, "one file for each"
    assert capsys.readouterr().err.count("no marker") == 1
    marker.touch()
    done = []
    assert run_batch(units, HERE, tmp_path, label="test", things="units", on_done=lambda u: done.append(u.name)) == []
    assert not read_failures(tmp_path) and len(done) == 3


@pytest.mark.parametrize("name", ["encode genre for 模型" + 80 * "模型", 260 * "м", 300 * "m"])
def test_a_long_name_has_a_file_too(name: str, tmp_path: Path) -> None:
    unit = Unit(name, refuse, {"marker": str(tmp_path / "marker")})
    failures = run_batch([unit], HERE, tmp_path, label="test", things="units")
    assert [failure.unit for failure in failures] == [name] and read_failures(tmp_path) == failures


def fail_elsewhere(folder: str, reason: str, error: str | None) -> list[str]:
    """Busy, and meanwhile another process fails; then what comes of it here."""
    record, tried = Path(folder, "failed", "train.json"), Path(folder, "tried")
    if not tried.exists():
        tried.touch()
        record.parent.mkdir(exist_ok=True)
        write_json(record, {"unit": "train", "reason": reason, "traceback": "theirs" if reason == "diverged" else ""})
        raise BusyError("held")
    tried.unlink()
    if error is not None:
        raise InputError(error)
    return []


@pytest.mark.parametrize("number", [0, 1])
def test_what_failed_elsewhere_meanwhile_is_not_done_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As jobs of an array that wait for one run. The next call does it again; what was blocked there, or lost its
    worker, is done here."""
    monkeypatch.setattr(units_module, "POLL_SECONDS", 0.0)

    def run(reason: str, error: str | None = None) -> list[Failure]:
        arguments = {"folder": str(tmp_path), "reason": reason, "error": error}
        unit = Unit("train", fail_elsewhere, arguments)
        engine = Engine(workers=number, device="cpu")
        return run_batch([unit], engine, tmp_path, label="test", things="units", waits_for_busy=True)

    assert run("diverged") == [Failure("train", "diverged", "theirs")] == read_failures(tmp_path)
    assert (tmp_path / "tried").exists()
    (failure,) = run("diverged", "diverged")
    assert "Traceback" in failure.traceback and [failure] == read_failures(tmp_path), "its own"
    for reason in ("blocked: parent failed: diverged", "worker was killed (signal 9, SIGKILL; out of memory?)"):
        assert run(reason) == [] == read_failures(tmp_path)


def test_time_left_is_told_by_cost_and_kind() -> None:
    """A training of 960 s stays 960 s after ten cells of 20 s; two at a time need half as long."""
    training = Unit("train", list, {}, kind="train", cost=48e12)
    cells = [Unit(f"cell{index}", list, {}, kind="cell", cost=1e12) for index in range(20)]
    encode = Unit("encode", list, {})
    forecast = Forecast([training, encode, *cells])
    forecast.note(encode, Outcome("encode", [], None, 3.0))
    assert forecast.seconds_left is None
    for cell in cells[:10]:
        forecast.note(cell, Outcome(cell.name, [], None, 20.0))
    assert forecast.seconds_left == pytest.approx(48 * 20 + 10 * 20), "as long for its cost as all, until one is done"
    forecast.note(cells[10], Outcome(cells[10].name, None, "broken", 0.1))
    assert forecast.seconds_left == pytest.approx(48 * 20 + 9 * 20), "what failed says nothing of speed"
    forecast.note(cells[11], Outcome(cells[11].name, [], None, 20.0, num_running=2))
    assert forecast.seconds_left == pytest.approx((48 * 20 + 8 * 20) / 2)
    forecast.note(training, Outcome("train", [], None, 4800.0))
    assert forecast.seconds_left == pytest.approx(8 * 20), "each kind at its own speed"


def test_time_left_knows_of_what_runs() -> None:
    """A quarter of a first training in 10 s: the rest takes 30, and a second one, three times as long, 120."""
    one, two = (Unit(name, list, {}, kind="train", cost=cost) for name, cost in (("one", 1e12), ("two", 3e12)))
    forecast = Forecast([one, two])
    forecast.running["one"] = one, 0.25, 10.0
    assert forecast.seconds_left == pytest.approx(30 + 120)
    forecast.running["two"] = two, 0.25, 30.0
    assert forecast.seconds_left == pytest.approx((30 + 90) / 2), "side by side"
    forecast.note(one, Outcome("one", [], None, 40.0, num_running=2))
    assert forecast.seconds_left == pytest.approx(90 / 2)


def train_and_score() -> list[str]:
    for progress in ((1.0, 15.0, "read"), (0.9, 3240.0, "train"), (0.5, 12.0, "score")):
        console.report_progress(progress)
    return []


def test_time_left_is_told_by_the_longest_bar_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float | None] = []
    monkeypatch.setattr(console.Tracker, "advance", lambda *_, seconds_left=None: told.append(seconds_left))
    units = [Unit("cell", train_and_score, {}, cost=1.0), Unit("other", list, {}, cost=1.0)]
    run_batch(units, HERE, tmp_path, label="test", things="units")
    assert told[1:4] == pytest.approx([15, 3960, 3960])


def test_records_of_failures(tmp_path: Path) -> None:
    assert read_failures(tmp_path) == []
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "gone.json").symlink_to("nowhere")  # another process has removed it since it was listed
    assert read_failures(tmp_path) == []
    (tmp_path / "failed" / "a.json").write_text('{"unit": "a"}')
    with pytest.raises(InputError, match=r"a\.json is damaged \(reason"):
        read_failures(tmp_path)
    assert Failure("a", "blocked: b failed: c").is_blocked
