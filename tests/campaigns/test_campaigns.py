"""Slices of the campaigns of faults, the same in every run: `make campaigns` has the whole of them."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from fuzzing import LOST, campaign


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slices work, one after the other, in one small world."""
    return tmp_path_factory.mktemp("campaigns")


@pytest.mark.slow
@pytest.mark.minutes
def test_a_slice_of_broken_input(folder: Path) -> None:
    """Each ends with the right result or one line: no traceback, no hang, no damage that nobody noticed."""
    made = list(campaign(count=25, seed=0, folder=folder))
    lost = [json.dumps(asdict(one)) for one in made if one.outcome in LOST]
    assert len(made) == 25
    assert not lost, "\n".join(lost)


SLICES = """
import sys
from argparse import Namespace
from pathlib import Path
sys.path.append(sys.argv[1])
import distributed, exchanging, full_disk, hostile, killing
slices = (
    (killing, Namespace(count=1, seed=0, only=None)),
    (full_disk, Namespace(count=1, seed=0)),
    (hostile, Namespace(every=29)),
    (distributed, Namespace(count=1, seed=0)),
    (exchanging, Namespace(count=1, seed=0)),
)
for module, given in slices:
    tried = list(module.campaign(given, Path(sys.argv[2])))
    assert tried and not any(lost for _, _, lost in tried), [module.__name__, *tried]
"""


@pytest.mark.slow
@pytest.mark.minutes
def test_slices_of_kills_full_disks_hostile_models_lost_processes_and_exchanged_files(folder: Path) -> None:
    """Killed: nothing of pretraining, shards, cells and studies is lost, redone or left lying. A full disk: one
    line, and the same command ends as if it had never been full. Hostile: no code of theirs runs, and nothing behind a
    link is touched. One of two processes killed: one line, and the run goes on. A file that is exchanged for another's:
    one line. In a process of their own: they fork, and set what a process has once."""
    command = [sys.executable, "-c", SLICES, str(Path(__file__).parent), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
