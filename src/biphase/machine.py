"""What this machine has: cores, GPUs, units for bf16. Found out without loading PyTorch, which takes seconds."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from biphase.errors import InputError

GPU_FILES = ("nvidia*", "nvgpu*", "nvhost*", "kfd", "dxg")
"""Of which in Linux' /dev every GPU has one that PyTorch can use: NVIDIA's, Tegra's, AMD's, those of Windows' Linux."""

BF16_UNITS = {"amx_bf16", "avx512_bf16", "bf16"}
"""CPU flags (x86, x86, Arm) without which bf16 products are far slower than fp32 ones."""


def num_cores() -> int:
    """Cores that this process may use (fewer than the machine has under taskset, Slurm or a container's cpuset)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_bf16_cores() -> bool:
    """Whether the CPU has units for products in bf16."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and not BF16_UNITS.isdisjoint(cpuinfo.read_text().split())


def visible_gpus() -> list[str]:
    """GPUs that PyTorch would see here, each as a value of CUDA_VISIBLE_DEVICES."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_gpus(allowed)
    return allowed.split(",")[:count] if allowed else [str(number) for number in range(count)]


@cache
def count_gpus(allowed: str | None) -> int:
    """PyTorch is asked where there may be a GPU: it is right on every platform. Where it is not loaded, in a process of
    its own (2 s).

    Args:
        allowed: the value of CUDA_VISIBLE_DEVICES that the answer holds for.
    """
    if allowed == "" or not has_gpu_files():
        return 0
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.device_count()
    command = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise InputError(f"PyTorch does not load, so GPUs cannot be counted: {lines[-1]}; device=cpu does without")
    return int(answer.stdout.split()[-1])


def has_gpu_files() -> bool:
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in GPU_FILES)
