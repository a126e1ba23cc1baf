"""On a Ray cluster units do what they do here, on nodes that have the same code and files, or the reason is told."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from biphase.engine import ray as cluster_module
from biphase.engine import ray as ray_module
from biphase.engine.ray import Head, RayPool, connect_ray, describe_loss, find_difference, hash_code, visible_file
from biphase.engine.scheduler import run_units
from biphase.engine.units import Engine, Unit
from biphase.errors import InputError
from biphase.files import locked

DRIVER = """
import subprocess, sys
from pathlib import Path
from biphase.engine import ray as cluster
from biphase.cli.app import complain
from biphase.engine.units import Engine
from biphase.engine.scheduler import run_units
from biphase.engine.units import Unit
from biphase.errors import InputError, StoppedError
cluster.HEAD_SECONDS = 2.0
address, folder = sys.argv[1:]
units = [Unit("a", Path.touch, {"self": Path("first")})]
units += [Unit("b", subprocess.run, {"args": ["sleep", "300"]}, needs=("a",))]
try:
    for outcome in run_units(units, Engine(kind="ray", address=address), folder=Path(folder)):
        print(outcome.error, flush=True)
except (InputError, StoppedError) as error:
    complain(str(error), 143 if isinstance(error, StoppedError) else 2)
"""


def test_a_node_has_the_code_and_the_files_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_module, "SEEN_SECONDS", 0.2)
    here, gone = str(tmp_path), str(tmp_path / "gone")
    assert find_difference(here, hash_code(), here) == find_difference(here, hash_code(), None) == ""
    assert find_difference(here, "another", None).startswith("has another biphase (")
    assert f"has no folder {gone}, the current folder of this command" in find_difference(gone, hash_code(), None)
    seen = find_difference(here, hash_code(), str(tmp_path / "scores" / ".seen-1"))
    assert f"does not see new files in {tmp_path / 'scores'}: choose" in seen


def test_any_change_of_the_code_is_another_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_module, "SOURCE", tmp_path)
    hashes = {hash_code()}
    for name, text in (("a.py", "1"), ("b/a.py", "1"), ("a.py", "2"), ("tasks.yaml", "1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.add(hash_code())
    (tmp_path / "a.pyc").touch()
    assert hash_code() in hashes and len(hashes) == 5
    monkeypatch.setattr(ray_module, "version", lambda name: f"{version(name).partition('+')[0]}+cu130")
    assert hash_code() in hashes, "a build for GPUs"
    monkeypatch.setattr(ray_module, "version", lambda name: "0.1" if name == "torch" else version(name))
    assert hash_code() not in hashes


def test_the_file_that_nodes_look_for_stays_as_long_as_it_is_needed(tmp_path: Path) -> None:
    """What a killed process has left goes; that of another one at the same work does not."""
    theirs, left, other = tmp_path / ".seen-theirs", tmp_path / ".seen-left", tmp_path / "seen"
    for path in (left, other):
        path.touch()
    with locked(theirs), visible_file(tmp_path) as name:
        assert set(tmp_path.iterdir()) == {theirs, other, Path(name)}
    assert set(tmp_path.iterdir()) == {theirs, other}
    with visible_file(tmp_path / "new") as name:
        assert Path(name).parent == tmp_path / "new"


def test_a_loss_is_one_line_that_names_the_node() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.exceptions import ActorUnavailableError, RayActorError

    place: Future[str] = Future()
    died = RayActorError(error_msg="It died.\n\tactor_id: 12\nIts node is dead. Worker exit type: ODD. More.")
    assert describe_loss(died, place) == describe_loss(died, None) == "worker was lost: Its node is dead."
    place.set_result("10.0.0.7")
    assert describe_loss(died, place) == "worker was lost on node 10.0.0.7: Its node is dead."
    unavailable = ActorUnavailableError("RpcError: RPC error: Socket closed rpc_code: 14", None)
    assert describe_loss(unavailable, place) == "worker was lost on node 10.0.0.7: nothing answers there"


def test_a_lost_worker_leaves_no_traceback() -> None:
    """A failure with a traceback is not repeated by the processes that wait for it; this unit may succeed elsewhere."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    lost: Future[bytes] = Future()
    lost.set_exception(ray.exceptions.RayActorError(error_msg="Its node is dead."))
    pool = RayPool.__new__(RayPool)
    pool.head, pool.nodes, pool.pending = Head("127.0.0.1:1"), {}, {0: lost}
    [(_, (kind, outcome))] = pool.listen()
    assert (kind, outcome.error, outcome.worker_died) == ("ended", "worker was lost: Its node is dead.", True)
    assert not outcome.traceback


def test_a_version_mismatch_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its last line alone, which is that of one of the versions."""
    pytest.importorskip("ray", reason="Ray is not installed")
    told = "Traceback:\nValueError: first\nCaused:\nRuntimeError: Version mismatch: it has\n    Ray: 1\n    Python: 3\n"

    def fail(args: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, args, stderr=told)

    monkeypatch.setattr(cluster_module.subprocess, "run", fail)
    with pytest.raises(InputError, match="'auto': RuntimeError: Version mismatch: it has Ray: 1 Python: 3; use the"):
        connect_ray("auto")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator:
    """A cluster, for tests in an order: the last one ends it."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def driving(address: str, folder: Path) -> Iterator[subprocess.Popen]:
    """A process that has done the first of two units on a cluster, and is at the other."""
    command = [sys.executable, "-c", DRIVER, address, str(folder)]
    with subprocess.Popen(command, cwd=folder, stdout=-1, stderr=-1, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "None\n"
            assert (folder / "first").exists(), "a worker stands where its command stands"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.minutes
def test_a_node_with_other_files_ends_the_run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its units would be done where nobody sees it. A cluster of this machine alone, before, changes nothing."""
    [alone] = run_units([Unit("a", os.getpid, {})], Engine(kind="ray", workers=1))
    assert alone.error is None
    monkeypatch.setattr(ray_module, "hash_code", lambda: "of another version")
    engine = Engine(kind="ray", address=request.getfixturevalue("two_nodes").address)
    with pytest.raises(InputError, match=r"the Ray node [\w.:]+ has another biphase"):
        list(run_units([Unit("a", os.getpid, {})], engine, folder=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.minutes
def test_who_waits_for_a_place_is_told_why(
    two_nodes: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Others hold it, or no node that is left has it: that ends the run."""
    monkeypatch.setattr(ray_module, "PLACE_SECONDS", 0.5)
    monkeypatch.setattr(ray_module, "LEFT_SECONDS", 3.0)
    engine = Engine(kind="ray", address=two_nodes.address)
    large = two_nodes.add_node(num_cpus=4)
    monkeypatch.setattr(ray_module, "divide_nodes", lambda *_: (1, 4, 0))
    two_nodes.remove_node(large)
    with pytest.raises(InputError, match="each worker needs 4 CPUs, and none of the 2 remaining Ray nodes"):
        list(run_units([Unit("a", os.getpid, {})], engine))
    assert "each worker needs 4 CPUs, and no remaining node has them" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.minutes
def test_a_command_on_a_cluster_ends_in_one_line(two_nodes: Any, tmp_path: Path) -> None:
    """When it is asked to stop, and when the head is gone, after which Ray would end it without a word."""
    address = two_nodes.address
    with driving(address, tmp_path) as process:
        process.terminate()
        out, told = process.communicate(timeout=60)
    assert (process.returncode, out, told) == (143, "", "biphase: stopped; run the same command to continue\n")
    with driving(address, tmp_path) as process:
        two_nodes.head_node.kill_gcs_server()
        out, told = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert told.splitlines()[-1].startswith(f"biphase: the head of the Ray cluster at {address} is gone")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_the_head_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head("127.0.0.1:1")
    head.answered -= 6.0
    head.look()
    assert head.is_there, "it may come back"
    head.answered = 0.0
    monkeypatch.setattr(cluster_module.time, "monotonic", lambda: 1000.0)
    with pytest.raises(InputError, match=r"at 127\.0\.0\.1:1 is gone \(Connection refused\); finished work is kept"):
        head.look()
    assert not head.is_there


def test_a_lost_head_is_told_where_a_call_of_ray_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By a thread, which ends nothing where the main one has ended the run."""
    codes: list[int] = []
    monkeypatch.setattr(cluster_module.os, "_exit", codes.append)
    monkeypatch.setattr(cluster_module, "LAST_SECONDS", 0.0)
    monkeypatch.setattr(cluster_module, "HEAD_SECONDS", 0.0)
    Head("127.0.0.1:1", answered=-100.0).watch()
    assert codes == [2] and capsys.readouterr().err.startswith("biphase: the head of the Ray cluster at 127.0.0.1:1 is")
    over = Head("127.0.0.1:1", answered=-100.0)
    over.is_over.set()
    over.watch()
    assert codes == [2]


def test_what_goes_wrong_through_a_client_means_that_the_cluster_is_gone() -> None:
    """Ray's client has many kinds of errors for it; of a worker it speaks as Ray does elsewhere."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    for raised, address, expected in (
        (ValueError("odd"), "", InputError),
        (ValueError("odd"), "10.0.0.1:6379", ValueError),
        (ray.exceptions.RayActorError(), "", ray.exceptions.RayActorError),
    ):
        head = Head(address)
        with pytest.raises(expected) as caught, head.needed():
            raise raised
        assert head.is_there == (expected is not InputError) == (caught.value is raised)
