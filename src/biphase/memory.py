"""The allocator setting that training on a CPU asks for."""

import ctypes
import platform
import sys


def keep_heap() -> None:
    """Stop glibc from returning freed activations to the kernel: the page faults that follow cost up to half the time.

    Must run before the first large allocation. Does nothing without glibc.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_mmap_max, 0)
