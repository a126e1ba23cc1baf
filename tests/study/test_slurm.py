"""The script for Slurm, with an `srun` that says what it was asked for."""

import os
import subprocess
from importlib import resources
from pathlib import Path

import pytest

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
    script = resources.files("biphase") / "bundled" / "studies" / "slurm.sh"
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    slurm = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(script), "a.yaml", "/shared/a", "seeds=2"]
    assert subprocess.run(command, cwd=tmp_path, env=os.environ | slurm, check=False).returncode == expected
    calls = [
        "64 110 biphase study run a.yaml seeds=2 --out /shared/a --unit train --processes 8",
        "64 110 biphase study run a.yaml seeds=2 --out /shared/a --unit cells --workers-per-gpu 4",
    ]
    assert (tmp_path / "calls").read_text().splitlines() == calls[:num_calls]
