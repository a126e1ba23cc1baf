"""Settings of a process, in a process of its own, and how it is asked to end."""

import gc
import math
import os
import platform
import pty
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from threading import Thread

import pytest

from biphase import machine
from biphase.cli.app import run_command
from biphase.errors import InputError
from biphase.machine import needs_extra

from .conftest import mostly_later

CODE = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # the last to be called
from biphase.machine import prepare_process
prepare_process()
before = gc.get_stats()[0]["collections"]
kept = [[] for _ in range(50_000)]
print(gc.get_stats()[0]["collections"] == before)
cycle = []
cycle.append(cycle)
del cycle
print(gc.collect() > 0)
"""


def test_garbage_is_looked_for_rarely_and_not_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


MAPPED = """
import ctypes
from biphase.machine import prepare_process
prepare_process()
class Usage(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "mapped", *"abcdef")]
tell = ctypes.CDLL(None).mallinfo2
tell.restype = Usage
before = tell().mapped
kept = [bytearray(8 << 20) for _ in range(4)]
print(tell().mapped - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
def test_a_heap_that_the_user_has_set_stays_as_it_is() -> None:
    """Else freed memory is kept: no large array lies outside the heap, from where it would go back to the kernel."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    tuned = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}
    others = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
    for own, outside in (({}, 0), (others, 0), ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, 4), (tuned, 4)):
        env = plain | own
        done = subprocess.run([sys.executable, "-c", MAPPED], capture_output=True, text=True, check=True, env=env)
        assert int(done.stdout) == outside


def test_the_memory_of_a_gpu_grows_unless_the_user_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # what the test sets is taken back
        monkeypatch.delenv(name)
    machine.let_segments_grow(tmp_path)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    machine.let_segments_grow(tmp_path)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    machine.let_segments_grow(tmp_path)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/not/here", {"cpu.max": "400000 100000"}, 4),
        ("4:memory:/\n2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/", {}, math.inf),
        ("broken", {"cpu.max": "broken"}, math.inf),
    ],
)
def test_cores_of_a_control_group(groups: str, files: dict[str, str], quota: float, tmp_path: Path) -> None:
    for name, text in ({"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{key}": files[key] for key in files}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cpu_quota(tmp_path) == quota
    assert machine.cpu_quota(tmp_path / "elsewhere") == math.inf


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": "max"}, math.inf),
        ("0::/a/b", {"a/memory.max": "8589934592", "a/b/memory.max": "17179869184"}, 2**33),
        ("4:memory:/a\n2:cpu:/", {"memory/a/memory.limit_in_bytes": "1048576"}, 2**20),
        ("0::/", {}, math.inf),
    ],
)
def test_memory_of_a_control_group(groups: str, files: dict[str, str], limit: float, tmp_path: Path) -> None:
    for name, text in ({"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{key}": files[key] for key in files}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.memory_limit(tmp_path) == limit


def test_a_part_of_a_core_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for quota, cores in ((math.inf, 8), (2.5, 3), (0.2, 1), (64, 8)):
        monkeypatch.setattr(machine, "cpu_quota", lambda quota=quota: quota)
        assert machine.num_cores() == cores


def test_slurm_gives_fewer_cores_than_it_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: math.inf)
    for given, cores in (("4", 4), ("64", 8), ("", 8), ("0", 8), ("many", 8)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert machine.num_cores() == cores


def test_the_grace_is_what_the_user_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.GRACE, raising=False)
    assert machine.grace() == machine.GRACE_SECONDS
    monkeypatch.setenv(machine.GRACE, "600")
    assert machine.grace() == 600
    for given in ("ten", "nan", "0"):
        monkeypatch.setenv(machine.GRACE, given)
        with pytest.raises(InputError, match=f"BIPHASE_GRACE_SECONDS={given} in the environment is not a whole number"):
            machine.grace()


def test_signals_are_noted_in_the_main_thread() -> None:
    """A second Ctrl-C ends at once; another thread can be told nothing, and works all the same."""
    before = signal.getsignal(signal.SIGTERM)
    noted: list[int] = []
    asked = [signal.SIGTERM, signal.SIGTERM, signal.SIGHUP]
    heeded = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}  # nohup and & ignore them
    handlers = {number: signal.signal(number, handler) for number, handler in heeded.items()}
    try:
        with pytest.raises(KeyboardInterrupt), machine.stop_signals(noted.append):
            for number in (*asked, signal.SIGINT):
                signal.raise_signal(number)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert noted == asked and signal.getsignal(signal.SIGTERM) is before
    worked = []

    def work() -> None:
        with machine.stop_signals(noted.append):
            worked.append(1)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert worked


def test_the_last_search_for_garbage_is_spared_but_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton._C.libtriton", sys)
        machine.leave_garbage()
        assert gc.get_freeze_count() == 0
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    machine.leave_garbage()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


LEFT = """
import os, signal, sys
from biphase.console import err
from biphase.machine import stop_signals
noted = []
with stop_signals(noted.append):
    print("ready", flush=True)
    sys.stdin.read(1)
    err.print("what nobody reads")
os._exit(128 + noted[0] if noted else 0)
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_is_a_stop(ignored: bool) -> None:
    """Lines for it end nothing. Under `nohup` it is no stop."""
    terminal, end = pty.openpty()
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with subprocess.Popen([sys.executable, "-c", LEFT], stdin=-1, stdout=-1, stderr=end) as process:
            assert process.stdin and process.stdout
            os.close(end)
            assert process.stdout.readline() == b"ready\n"
            if not ignored:
                os.close(terminal)
            process.send_signal(signal.SIGHUP)
            process.communicate(b"x")
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert process.returncode == (0 if ignored else 129)


IMPORTS = "import json, resource, yaml"
CHILDREN = {
    "a process": ("-c", IMPORTS),
    "a process of it": (
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{IMPORTS}'], check=True)",
    ),
    "the launcher and its processes": (
        *("-m", "biphase.distributed", "--standalone", "--nproc-per-node=1"),
        *("-m", "biphase", "--version"),
    ),
}


@pytest.mark.parametrize("child", mostly_later(CHILDREN, "a process", "a process of it"))
def test_modules_of_the_current_folder_are_never_run(child: str, tmp_path: Path) -> None:
    for name in ("json", "resource", "torch", "yaml"):
        (tmp_path / f"{name}.py").write_text("import os; os.mkdir('RAN')")
    starting = machine.python_process(*CHILDREN[child])
    subprocess.run(**starting, cwd=tmp_path, check=True)
    if child.startswith("the launcher"):  # as people start it
        del starting["env"]
        subprocess.run(**starting, cwd=tmp_path, check=True)
    assert not (tmp_path / "RAN").exists()


def test_every_python_process_of_ours_is_made_in_one_place() -> None:
    """But for what `doctor` says of this one."""
    source = Path(machine.__file__).parent
    makers = [path.name for path in source.rglob("*.py") if "sys.executable" in path.read_text(encoding="utf-8")]
    assert sorted(makers) == ["doctor.py", "machine.py"]


def test_a_package_of_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """From every command, doctor too, before transformers raises what it thinks of it; of an extra, where it is used.
    What is not installed is told elsewhere."""
    needed = [
        "torch<3,>=2",
        "tokenizers>=0.23.3",
        'sentence-transformers<7,>=6.2; extra == "embeddings"',
        "not-there>9",
    ]
    here = {"torch": "2.13.0a0+nv26", "tokenizers": "0.23.3", "sentence-transformers": "6.0.1"}

    def version(name: str) -> str:
        if name not in here:
            raise PackageNotFoundError
        return here[name]

    monkeypatch.setattr(machine, "requires", lambda _: needed)
    monkeypatch.setattr(machine, "version", version)
    machine.refuse_versions.cache_clear()
    machine.refuse_versions()
    with pytest.raises(
        InputError, match=r"sentence-transformers 6.0.1 is installed, .*: pip install 'sentence-tr.*6.2'"
    ):
        machine.refuse_versions("embeddings")
    with pytest.raises(InputError, match=r"sentence-transformers 6\.0\.1"), needs_extra("embeddings", "biphase embed"):
        pass
    here["tokenizers"] = "0.23.2"
    machine.refuse_versions.cache_clear()
    for words in (["doctor"], ["inspect", "nowhere"]):
        with pytest.raises(InputError, match=r"tokenizers 0\.23\.2 is installed"):
            run_command(words)
    monkeypatch.setattr(machine, "requires", requires)
    machine.refuse_versions.cache_clear()
    machine.refuse_versions("embeddings")
