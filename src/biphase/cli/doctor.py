"""`biphase doctor`: the facts that a bug report needs, by topic, a line for each; `!` marks a problem."""

import math
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from stat import S_ISDIR
from tempfile import TemporaryDirectory

from biphase.errors import DOCS, first_line
from biphase.files import is_locked, locked
from biphase.machine import num_cores, total_memory

PACKAGES = ("biphase", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy", "ray")
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    *("GOMP_SPINCOUNT", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "BIPHASE_CACHE"),
)
"""Environment variables that change which code and files are used, or how fast it runs. None contains a secret."""
LOCAL_LOCKS = {"nolock", "localflock", "noflock", "local_lock=flock", "local_lock=all"}
"""Mount options of NFS and Lustre under which other machines, or all other processes, do not see locks."""
GIB = 1 << 30


def examine(folder: Path = Path()) -> dict[str, dict[str, str]]:
    """Collect facts about this machine, by topic.

    Args:
        folder: The folder that you want to work in; the command checks its disk and its locks.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    from biphase.device import processor_name
    from biphase.finetuning.encoding_cache import cache_folder

    versions = {"python": f"{platform.python_version()} ({sys.executable})"}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    memory = total_memory()
    kind, options = file_system(folder.resolve())
    missing = "" if folder.exists() else f"! does not exist; above it, {nearest_existing(folder)} has "
    return {
        "versions": versions,
        "machine": {
            "system": platform.platform(),
            "processor": f"{processor_name()}, {num_cores()} of {os.cpu_count()} cores for this process",
            "memory": f"{memory / GIB:,.1f} GiB" if memory else "unknown",
        },
        "computing": describe_computing(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "files": {
            "documentation": str(DOCS),
            "folder": f"{folder.resolve()}: {missing}{free_space(folder)}, {kind}",
            "locks": describe_locks(nearest_existing(folder), kind, options),
            "hub's cache": f"{HF_HUB_CACHE}: {free_space(Path(HF_HUB_CACHE))}",
            "our cache": f"{cache_folder()}: {free_space(cache_folder())}",
        },
        "hub": describe_hub(),
    }


def describe_computing() -> dict[str, str]:
    """Describe the devices, what `auto` chooses on the first one, and why."""
    import torch

    from biphase.device import choose_device, choose_dtype, explain_dtype, missing_for_compile
    from biphase.encoder.attention import explain_backend
    from biphase.pretraining.optimizer import decide_compile
    from biphase.recipe import ComputeConfig

    facts = {}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"compute capability {properties.major}.{properties.minor}"
        facts[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / GIB:,.0f} GiB, {capability}"
    if not facts:
        facts["GPUs"] = f"none found; this PyTorch is built for {torch.version.cuda or torch.version.hip or 'CPUs'}"
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    _, compiles = decide_compile(ComputeConfig(), device, dtype, math.inf)
    return facts | {
        "precision": explain_dtype(dtype, device),
        "attention": explain_backend(device, dtype),
        "compile": f"in long runs {compiles}",
        "torch.compile": missing_for_compile(device) or "works here",
    }


def nearest_existing(path: Path) -> Path:
    path = path.resolve()
    here = (folder for folder in (path, *path.parents) if os.path.lexists(folder))
    return next(folder for folder in here if S_ISDIR(folder.stat().st_mode))  # OSError for a link to itself


def free_space(folder: Path) -> str:
    folder = nearest_existing(folder)
    free = shutil.disk_usage(folder).free
    warning = "! only " if free < GIB else ""
    return f"{warning}{free / GIB:,.1f} GiB free{'' if os.access(folder, os.W_OK) else ', ! not writable'}"


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> tuple[str, set[str]]:
    """Return the kind and the mount options of a folder's file system, or `unknown file system` and no options."""
    mounted: dict[str, tuple[str, set[str]]] = {}
    for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if mounts.exists() else ():
        _, mount_point, kind, options, *_ = line.split()
        mounted[mount_point.replace("\\040", " ")] = kind, set(options.split(","))  # \040 stands for a space
    around = [path for path in (folder, *folder.parents) if str(path) in mounted]
    return mounted[str(around[0])] if around else ("unknown file system", set())


def describe_locks(folder: Path, kind: str, options: set[str]) -> str:
    """Test whether a second process is denied a lock (flock) that another holds, because claims of runs and cells rely
    on that; describe the result."""
    try:
        with TemporaryDirectory(dir=folder) as scratch, locked(Path(scratch) / "lock"):
            if not is_locked(Path(scratch) / "lock"):
                return "! a held lock was granted a second time: two processes could train into one folder"
    except OSError as error:
        return f"! flock does not work here ({error.strerror}): runs cannot be claimed; use another file system"
    if local := LOCAL_LOCKS & options:
        names = ", ".join(sorted(local))
        return f"! flock works only within this machine ({kind}, {names}): use each folder from one machine"
    if kind.startswith("nfs") or kind == "lustre":
        return f"flock works here, and between machines as {kind} is mounted"
    return "flock works"


def describe_hub() -> dict[str, str]:
    """Describe whether the Hub answers, by its address."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError

    state = "not asked: HF_HUB_OFFLINE is set, so only the cache is used"
    if not constants.HF_HUB_OFFLINE:
        try:
            answer = get_session().head(constants.ENDPOINT, timeout=5)
            state = f"reachable (it answers {answer.status_code})"
        except (OSError, ValueError, HTTPError) as error:
            state = f"! not reachable ({first_line(error)}): use local folders, or files in the cache"
    return {constants.ENDPOINT: state}
