"""The machine under a run: device, arithmetic type, measured or stated peak, versions."""

import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from biphase import __version__
from biphase.errors import InputError
from biphase.flops import PEAK_FLOPS, known_device
from biphase.machine import has_bf16_cores

Prefetched = TypeVar("Prefetched")


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`; of several GPUs, the one of this process's local rank.

    Raises `InputError` if there is none, and for any other name.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device '{name}': give auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses among several GPUs")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but PyTorch sees no CUDA device; use cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            reason = f"the process with the local rank {local_rank} sees {num_gpus} GPU{'s' * (num_gpus > 1)}"
            raise InputError(f"{reason}: start one process for each GPU of a machine, and let each of them see all")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto` is bf16 if the device has units for it, else fp32. Raises `InputError` for an unknown
    name."""
    if precision not in ("auto", "bf16", "fp32"):
        raise InputError(f"precision '{precision}': give auto, bf16 or fp32")
    if precision != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    return torch.bfloat16 if has_bf16_units(device) else torch.float32


def explain_dtype(dtype: torch.dtype, device: torch.device) -> str:
    """Name a type that `choose_dtype` chose, with the reason, in words."""
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    if choose_dtype("auto", device) != dtype:
        return f"{name} (as given)"
    processor = "GPU" if device.type == "cuda" else "CPU"
    return f"{name} (this {processor} has {'' if name == 'bf16' else 'no '}units for bf16)"


def has_bf16_units(device: torch.device) -> bool:
    """Tell whether the device multiplies in bf16 itself, rather than by emulation."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else has_bf16_cores()


def missing_for_compile(device: torch.device) -> str:
    """Name the tool that torch.compile lacks on this device, with the remedy; "" if it works."""
    if device.type == "cpu":
        has_compiler = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
        return "" if has_compiler else "there is no C++ compiler; install g++"
    # On a GPU, Triton makes the kernels, and compiles their launchers with Python's headers.
    if find_spec("triton") is None:
        return "there is no Triton; install triton"
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang")):
        return "there is no C compiler; install gcc"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    return "" if (headers / "Python.h").exists() else f"there is no {headers / 'Python.h'}; install python3-dev"


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s: stated for known GPUs in bf16, else measured once: the fastest of several matmuls,
    because other processes may take the device for a part of this time."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = known_device(torch.cuda.get_device_name(device))
        if name is not None:
            return PEAK_FLOPS[name]
    size = 8192 if device.type == "cuda" else 1536
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < 4 or sum(seconds) < 0.3:
        synchronize(device)
        started = time.perf_counter()
        left @ right
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(seconds)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a device tensor. A GPU fetches it from a pinned copy while the CPU continues."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def prefetch(items: Iterable[Prefetched]) -> Generator[Prefetched]:
    """Yield items in order. While the caller works on one, a thread makes the next one.

    An error that making an item raises is raised where that item is due. The thread ends with the generator: use
    `contextlib.closing` where an error may leave the loop.
    """
    remaining = iter(items)

    def make() -> list[Prefetched]:
        return list(islice(remaining, 1))

    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(make)
        while ready := pending.result():
            pending = thread.submit(make)
            yield from ready


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return models[0].partition(":")[2].strip() if models else platform.processor()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """List the facts on which a result depends besides its configuration: versions, processor, threads, device."""
    import transformers

    return {
        "biphase": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
