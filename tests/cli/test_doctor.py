"""What `biphase doctor` finds out, and what it warns of."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from biphase import files
from biphase.cli.doctor import describe_hub, describe_locks, file_system
from biphase.cli.show import print_facts

MOUNTS = r"""/dev/vda / ext4 rw,relatime 0 0
server:/export /shared nfs4 rw,vers=4.2,local_lock=none 0 0
server:/old /old nfs rw,vers=3,nolock,local_lock=all 0 0
mds:/scratch /scratch lustre rw,flock 0 0
mds:/work /with\040space lustre rw,localflock 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind", "told"),
    [
        ("/data/me", "ext4", "flock works"),
        ("/shared/runs", "nfs4", "flock works here, and between machines as nfs4 is mounted"),
        ("/old/runs", "nfs", "! flock works only within this machine (nfs, local_lock=all, nolock)"),
        ("/scratch", "lustre", "flock works here, and between machines"),
        ("/with space/x", "lustre", "! flock works only within this machine (lustre, localflock)"),
        ("/sharedx", "ext4", "flock works"),
        (os.fsdecode(b"/caf\xe9/runs"), "nfs4", "flock works here"),
    ],
)
def test_locks_by_file_system(folder: str, kind: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_bytes(MOUNTS.encode() + b"nas:/cafe /caf\xe9 nfs4 rw 0 0\n")
    found, options = file_system(Path(folder), tmp_path / "mounts")
    assert found == kind
    assert describe_locks(tmp_path, found, options).startswith(told)


def test_locks_that_are_given_twice_and_locks_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", lambda file, how: None)
    assert describe_locks(tmp_path, "fuse", set()).startswith("! a held lock was granted a second time")

    def refuse(file: object, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    said = describe_locks(tmp_path, "lustre", set())
    assert said.startswith("! flock does not work here (no locks on its file system (Function not implemented))")


def test_the_hub_by_what_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in describe_hub()[constants.ENDPOINT]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as server:  # bound, but nobody listens
        server.bind(("127.0.0.1", 0))
        for url in (f"http://127.0.0.1:{server.getsockname()[1]}", "file:///etc"):
            monkeypatch.setattr(constants, "ENDPOINT", url)
            assert describe_hub()[url].startswith("! not reachable (")


@pytest.mark.slow
@pytest.mark.minutes
def test_all_facts_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No secret is among them, and the Hub's cache is where huggingface_hub puts it."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("XDG_CACHE_HOME", str(tmp_path)), ("HF_HUB_OFFLINE", "1"), ("HF_TOKEN", "secret")):
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "biphase", "doctor", str(tmp_path / "not" / "yet"), "--format", "json"]
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert list(facts) == ["versions", "machine", "computing", "environment", "files", "hub"]
    assert {"precision", "attention", "compile"} <= facts["computing"].keys() and facts["versions"]["torch"]
    assert facts["files"]["hub's cache"].startswith(f"{tmp_path}/huggingface/hub: ")
    assert facts["files"]["locks"].startswith("flock works")
    print_facts(facts)
    text = capsys.readouterr().out
    assert text.count("\n") < 45 and "secret" not in text
