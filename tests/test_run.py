"""A run folder: one process at a time, and a log that survives a kill."""

from pathlib import Path

import pytest

from biphase.errors import InputError
from biphase.files import read_json
from biphase.run import Run, claim_run, open_run, read_config, read_done, read_metrics, run_path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Killed while it wrote the line of step 3."""
    made = Run(tmp_path)
    for step in (1, 2):
        made.log({"kind": "train", "step": step})
        made.log({"kind": "validation", "step": step})
    with open(made.metrics, "a") as file:
        file.write('{"kind": "train", "st')
    return made


def test_a_line_cut_short_does_not_count(run: Run) -> None:
    assert [row["step"] for row in read_metrics(run, "train")] == [1, 2]


def test_what_is_logged_again_is_forgotten(run: Run) -> None:
    run.forget_after(1)
    run.log({"kind": "train", "step": 2, "again": True})
    assert read_metrics(run, "train") == [{"kind": "train", "step": 1}, {"kind": "train", "step": 2, "again": True}]
    assert read_metrics(run, "validation") == [{"kind": "validation", "step": 1}]


def test_claim_writes_what_the_run_is(tmp_path: Path) -> None:
    run = Run(run_path(tmp_path, "name", "0123456789"))
    assert run.path.name == "name-01234567"
    with claim_run(run, {"name": "größer"}, {"torch": "2"}):
        assert read_config(open_run(run.path)) == {"name": "größer"}
        assert read_json(run.path / "environment.json") == {"torch": "2"}
        with pytest.raises(InputError, match="in use by another process"), claim_run(run, {}, {}):
            pass
    with claim_run(run, {"name": "again"}, {}):
        assert read_config(run) == {"name": "again"}


def test_done_mark(run: Run) -> None:
    assert not run.is_done
    assert read_done(run) is None
    run.mark_done({"step": 2})
    assert run.is_done
    assert read_done(run) == {"step": 2}


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        open_run(tmp_path)
