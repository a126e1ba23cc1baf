"""Facts and settings that need no PyTorch, which takes seconds to load: cores, GPUs, bf16 units, the heap, signals
that end a process, and the parent with which it ends."""

import atexit
import ctypes
import gc
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from biphase.errors import InputError

GPU_FILES = ("nvidia*", "nvgpu*", "nvhost*", "kfd", "dxg")
"""Names in Linux's /dev of the GPUs that PyTorch can use: NVIDIA's, Tegra's, AMD's, and those in WSL."""

BF16_UNITS = {"amx_bf16", "avx512_bf16", "bf16"}
"""CPU flags (x86, x86, Arm) without which bf16 products are far slower than fp32 ones."""

HEAP_SETTINGS = ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX")
"""Settings that decide whether glibc returns freed memory, as in MALLOC_MMAP_THRESHOLD_ and in GLIBC_TUNABLES."""

STOPS = (signal.SIGTERM, signal.SIGHUP)
"""The signals, besides Ctrl-C, that ask a process to end: schedulers send one, a closing terminal the other."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables of PyTorch's allocator for GPUs; the second is the older name."""

GRACE = "BIPHASE_GRACE_SECONDS"
"""The environment variable for the seconds between asking a process to end and killing it."""
GRACE_SECONDS = 110
"""The default grace, in which training saves its state. Ctrl-C cuts it short, and so may the system."""


def num_cores() -> int:
    """Count the cores that this process may use; round a quota up.

    taskset, Slurm (which does not bind processes to cores at every site) and a container's cpuset or quota may allow
    fewer cores than the machine has.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allotted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return math.ceil(min(cores, cpu_quota(), int(allotted) if allotted.isdecimal() and int(allotted) else math.inf))


def total_memory() -> int:
    """Return the bytes of the machine's memory, or of a container's limit; 0 if the system does not say."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0
    return int(min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()))


def memory_limit(root: Path = Path("/")) -> float:
    """Read the most bytes that this process's control groups may use; infinite without a limit."""
    limits = [math.inf]
    for folder in control_groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max" is no number
                limits.append(float((folder / name).read_text()))
    return min(limits)


def cpu_quota(root: Path = Path("/")) -> float:
    """Read the quota of cores from this process's control groups; infinite without a limit."""
    limits = [math.inf]
    for folder in control_groups("cpu", root):
        names = ("cpu.max",) if (folder / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = map(float, " ".join((folder / name).read_text() for name in names).split())
            limits += [quota / period] if quota > 0 else []
    return min(limits)


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of their parents, version 2 or 1."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group_name = line.split(":", 2)
            base = root / "sys/fs/cgroup" / (controller if controller in controllers.split(",") else "")
            if controllers and base.name != controller:
                continue
            group = base / group_name.lstrip("/")  # in a container it may lie outside, and only / is visible
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


@cache
def name_bf16_cores() -> frozenset[str]:
    """Name the CPU's units for bf16 products, as Linux does; none without any."""
    cpuinfo = Path("/proc/cpuinfo")
    return frozenset(BF16_UNITS.intersection(cpuinfo.read_text().split()) if cpuinfo.exists() else ())


def has_bf16_cores() -> bool:
    """Return whether the CPU has units for bf16 products."""
    return bool(name_bf16_cores())


def gpu_variables() -> list[str]:
    """Name the environment variables that choose a process's GPUs: those that are set, else NVIDIA's.

    AMD's runtime also obeys NVIDIA's variable if its own is not set, and applies both to the GPUs that ROCR's variable
    leaves.
    """
    set_here = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in os.environ]
    return set_here or [name for name in ("ROCR_VISIBLE_DEVICES",) if name in os.environ] or ["CUDA_VISIBLE_DEVICES"]


def visible_gpus() -> list[str]:
    """List the GPUs that PyTorch would see here, each as a value for `gpu_variables`."""
    allowed = os.environ.get(gpu_variables()[0])
    count = count_gpus(allowed)
    if not allowed:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in allowed.split(",")]
    # A process sees only one part of a GPU (MIG), however many are allowed.
    return names if count and all(name.startswith("MIG-") for name in names) else names[:count]


@cache
def count_gpus(allowed: str | None) -> int:
    """Count the GPUs that PyTorch sees under this value of `gpu_variables`.

    Where there may be a GPU, PyTorch counts, because it is right on every platform. If it is not loaded, another
    process asks it (2 s).
    """
    # On systems other than Linux, only PyTorch can tell.
    may_have_some = sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in GPU_FILES)
    if allowed == "" or not may_have_some:
        return 0
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.device_count()
    asking = python_process("-c", "import torch; print(torch.cuda.device_count())")
    answer = subprocess.run(**asking, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise InputError(f"PyTorch does not load, so GPUs cannot be counted: {lines[-1]}; device=cpu does without")
    return int(answer.stdout.split()[-1])


def python_process(*words: str, **variables: str) -> dict[str, Any]:
    """Return the arguments and environment of a Python process for `subprocess`, with these words and variables.

    Neither this process nor any Python that it starts imports modules from the current folder.
    """
    return {"args": [sys.executable, "-P", *words], "env": os.environ | variables | {"PYTHONSAFEPATH": "1"}}


@cache
def refuse_versions(extra: str = "") -> None:
    """Raise `InputError` for a package version that biphase, or this extra of it, does not support. Code that imports a
    missing package reports it."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    with suppress(PackageNotFoundError):  # of the package, or of biphase: a checkout need not be installed
        for needed in map(Requirement, requires("biphase") or ()):
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            installed = version(needed.name)
            if Version(installed).base_version not in needed.specifier:  # NVIDIA's PyTorch 2.11 is a 2.11.0a0
                problem = f"{needed.name} {installed} is installed, biphase needs another"
                raise InputError(f"{problem}: pip install '{needed.name}{needed.specifier}'")


def prepare_process() -> None:
    """Prepare a process for work: its heap, a GPU's memory, garbage collection, threads, and other libraries' messages.

    The user's environment variables win.
    """
    keep_heap()
    let_segments_grow()
    # Search for cyclic garbage less often, and never at the end: that saves a third of a short command's time. PyTorch
    # and transformers create half a million lasting objects, which Python would scan again and again.
    gc.set_threshold(100_000)
    atexit.register(leave_garbage)
    # OpenMP threads that spin while they wait take the core from the thread they wait for when other work runs too.
    # Threads that sleep at once wake up too late for the many short operations of a step. GNU's runtime spins for
    # microseconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # Bars and notices of other libraries would tear ours apart.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a launcher's end prints pages of C++ frames


def leave_garbage() -> None:
    """Skip the garbage search at the end of a process, unless Triton is loaded, which would report leaks."""
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


def keep_heap() -> None:
    """Stop glibc from returning freed activations to the kernel, because page faults cost up to half the time.

    Must run before the first large allocation. Does nothing without glibc, or if the user has set one of the settings:
    kept memory fragments, and a long training may occupy several times as much as it needs.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{name}_" in os.environ or f"glibc.malloc.{name.lower()}=" in tunables for name in HEAP_SETTINGS):
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, -1)
    libc.mallopt(m_mmap_max, 0)


def let_segments_grow(devices: Path = Path("/dev")) -> None:
    """Let PyTorch extend its segments of GPU memory, unless the user has set that: microbatches differ in length, and
    segments of fixed size would leave more and more gaps."""
    if any(devices.glob("nvidia*")) and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def environment_number(variable: str, least: int, default: int | None = None) -> int:
    """Return the whole number in an environment variable, else the default, else `least`. Raises `InputError` for any
    other value."""
    value = os.environ.get(variable) or str(default or least)
    if not value.isdecimal() or int(value) < least:
        raise InputError(f"{variable}={value} in the environment is not a whole number of {least} or more: unset it")
    return int(value)


def grace() -> int:
    """Return the seconds between asking a process to end and killing it."""
    return environment_number(GRACE, 1, GRACE_SECONDS)


@contextmanager
def handled(handler: Callable[[int, Any], None], *signals: int) -> Iterator[None]:
    """Handle signals by `handler` while the block runs, but not SIGHUP under `nohup`. Does nothing outside the main
    thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals = tuple(signum for signum in signals if signum != signal.SIGHUP)

    def handle(signum: int, frame: Any) -> None:
        if signum == signal.SIGHUP:
            outlive_terminal()
        handler(signum, frame)

    handlers = {signum: signal.signal(signum, handle) for signum in signals}
    try:
        yield
    finally:
        for signum, earlier_handler in handlers.items():
            signal.signal(signum, earlier_handler)


def outlive_terminal() -> None:
    """Discard the output for a closed terminal, because each line would raise an error."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream)


def stop_signals(note: Callable[[int], None]) -> AbstractContextManager[None]:
    """Pass `STOPS` and SIGINT to `note` while the block runs, so that it can save its state.

    SIGINT as a second signal ends the block at once; SIGTERM does not, as Slurm and torchrun may both send one.
    """
    noted: list[int] = []

    def handle(signum: int, _: Any) -> None:
        if noted and signum == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(signum)
        note(signum)

    return handled(handle, *STOPS, signal.SIGINT)


def end_with_parent(parent: int, grace_seconds: float) -> None:
    """End this process, with its process group if it leads one, once the process `parent` is gone.

    SIGTERM comes first, and SIGKILL after the grace.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        target = 0 if os.getpgrp() == os.getpid() else os.getpid()  # 0 is the process group of this process
        for signum in (signal.SIGTERM, signal.SIGKILL):
            os.kill(target, signum)
            time.sleep(grace_seconds)

    threading.Thread(target=watch, daemon=True).start()


def describe_kill(signum: int) -> str:
    """Describe the death of a process: `was killed (signal 9, SIGKILL; out of memory?)`."""
    names = {member.value: f", {member.name}" for member in signal.Signals}
    causes = {int(signal.SIGKILL): "; out of memory?", int(signal.SIGBUS): "; was a file that it reads cut short?"}
    return f"was killed (signal {signum}{names.get(signum, '')}{causes.get(signum, '')})"


@contextmanager
def needs_extra(extra: str, feature: str) -> Iterator[None]:
    """Turn a missing or outdated package of an extra into an `InputError` with the command that installs it."""
    refuse_versions(extra)
    try:
        yield
    except ModuleNotFoundError as error:
        extra = "mteb" if error.name == "mteb" else extra
        raise InputError(f"{feature} needs {error.name}: pip install 'biphase[{extra}]'") from None
