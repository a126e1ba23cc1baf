"""Slices of the campaigns of faults, the same in every run: `make campaigns` has the whole of them."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from fuzzing import LOST, campaign

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slices work, one after the other, in one small world."""
    return tmp_path_factory.mktemp("campaigns")


@pytest.mark.slow
def test_a_slice_of_broken_input(folder: Path) -> None:
    """Each ends with the right result or one line: no traceback, no hang, no damage that nobody noticed."""
    made = list(campaign(count=40, seed=0, folder=folder))
    lost = [json.dumps(asdict(one)) for one in made if one.outcome in LOST]
    assert len(made) == 40
    assert not lost, "\n".join(lost)


@pytest.mark.slow
def test_a_slice_of_kills(folder: Path) -> None:
    """Nothing of pretraining, shards, cells and studies is lost, redone or left lying."""
    run_whole(["killing.py", "--count", "2", "--folder", str(folder)])


@pytest.mark.slow
def test_a_slice_of_full_disks(folder: Path) -> None:
    """One line each, and the same command ends as if the disk had never been full."""
    run_whole(["full_disk.py", "--count", "1", "--folder", str(folder)])


@pytest.mark.slow
def test_a_slice_of_hostile_models(folder: Path) -> None:
    """No code of theirs runs, and nothing behind a link is touched."""
    run_whole(["hostile.py", "--every", "29", "--folder", str(folder)])


def run_whole(words: list[str]) -> None:
    """A campaign as `make campaigns` calls it, in a process of its own: it forks, and sets what a process has once."""
    done = subprocess.run(
        [sys.executable, str(HERE / words[0]), *words[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
