"""The script for Slurm, with an `srun` that says what it was asked for; and what Slurm 22.05 sets for a process."""

import os
import subprocess
from pathlib import Path

import pytest

from biphase.cli.init import init_slurm
from biphase.console import describe_copies
from biphase.distributed import join_world
from biphase.errors import InputError
from biphase.recipe import ComputeConfig

SRUN = """#!/bin/bash
echo "$SRUN_CPUS_PER_TASK $BIPHASE_GRACE_SECONDS $*" >> calls
exit "$(sed -n "$(wc -l < calls)p" codes)"
"""


@pytest.mark.parametrize(
    ("codes", "num_calls", "expected"),
    [((0, 0), 2, 0), ((2, 0), 2, 2), ((0, 3), 2, 3), ((2, 3), 2, 2), ((143, 0), 1, 143), ((130, 0), 1, 130)],
)
def test_a_failed_run_holds_nothing_up_but_a_stop_does(
    codes: tuple[int, int], num_calls: int, expected: int, tmp_path: Path
) -> None:
    script = tmp_path / "slurm.sh"
    init_slurm(Path("mini"), Path("/shared/a b"), jobs=4, out=script)
    assert script.read_text().splitlines()[1] == f"# sbatch --array=0-3 {script} mini '/shared/a b'"
    with pytest.raises(InputError, match=r"slurm.sh already exists"):
        init_slurm(Path("mini"), Path("/shared/a"), out=script)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    slurm = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(script), "a.yaml", "/shared/a", "seeds=2"]
    assert subprocess.run(command, cwd=tmp_path, env=os.environ | slurm, check=False).returncode == expected
    calls = [
        "64 110 biphase study run a.yaml seeds=2 --folder /shared/a --unit train --processes 8",
        "64 110 biphase study run a.yaml seeds=2 --folder /shared/a --unit cells --workers-per-gpu 4",
    ]
    assert (tmp_path / "calls").read_text().splitlines() == calls[:num_calls]


@pytest.mark.parametrize(
    ("folder", "jobs", "told"),
    [
        ("x\ntouch PWNED #", 8, r"x\\ntouch PWNED #.*: a name has a line end; choose another name"),
        ("/shared/a\u2028b", 8, "a name has a line end"),
        ("/shared/a", 0, "--jobs 0: give 1 to 1,000"),
        ("/shared/a", -1, "--jobs -1: give 1 to 1,000"),
        ("/shared/a", 10**20, "--jobs 10*: give 1 to 1,000"),
    ],
)
def test_a_script_that_would_do_something_else_is_not_written(
    folder: str, jobs: int, told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        init_slurm(Path("mini"), Path(folder), jobs=jobs, out=tmp_path / "slurm.sh")
    assert not [*tmp_path.iterdir()]


ALLOCATION = {"SLURM_JOB_ID": "6", "SLURM_JOB_NODELIST": "n2", "SLURM_NTASKS": "3", "SLURM_NPROCS": "3"}
BATCH = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASK_PID": "19156"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3"}
ONE_OF_STEP = STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
UNDER_TORCHRUN = STEP | {"WORLD_SIZE": "2"}


@pytest.mark.parametrize("variables", [ALLOCATION, BATCH, STEP, ONE_OF_STEP], ids=["salloc", "batch", "n3", "n1"])
def test_slurm_alone_makes_no_process_one_of_several(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recorded below `salloc -n 3`, `sbatch -n 3`, `srun -n 3`, also with --pty, and `srun -n 1` in the former."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with join_world(ComputeConfig(device="cpu")) as world:
        assert (world.rank, world.size) == (0, 1)


@pytest.mark.parametrize(
    ("variables", "is_told"), [(BATCH, False), (STEP, True), (ONE_OF_STEP, False), (UNDER_TORCHRUN, False)]
)
def test_copies_that_srun_started_are_told(
    variables: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("srun started this command 3 times, each on its own" in describe_copies()) == is_told
