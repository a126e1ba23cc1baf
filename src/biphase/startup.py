"""Settings of a process that must be made before PyTorch is loaded."""

import atexit
import ctypes
import gc
import os
import platform
import sys


def prepare_process() -> None:
    """Everything below; environment variables that the user has set stay."""
    keep_heap()
    collect_rarely()
    # OpenMP threads that wait by spinning take the core from the thread they wait for when other work runs too; those
    # that sleep at once wake up too late for the many short operations of a step. GNU's runtime spins for microseconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # Bars and notices of other libraries would tear ours apart.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def keep_heap() -> None:
    """Stop glibc from returning freed activations to the kernel: the page faults that follow cost up to half the time.

    Must run before the first large allocation. Does nothing without glibc.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, -1)
    libc.mallopt(m_mmap_max, 0)


def collect_rarely() -> None:
    """Fewer searches for cyclic garbage, and none at the end: a third of the time that a short command takes.

    PyTorch and transformers bring half a million objects that stay; Python would look through them again and again.
    """
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
