"""Keeps memory that a pass has freed in the process, or gives it back."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""glibc's names, of mallopt(3)."""
NEVER = -1
"""Of a threshold, which is unsigned inside."""


def keep_freed_memory() -> None:
    """Have glibc keep freed memory and use it again; without effect on other C libraries.

    glibc returns each block above 32 MiB to the kernel when it is freed, and allocates it again,
    page by page, in the next step. For a large model on a CPU that takes as long as the backward
    pass. Kept memory belongs to the process until it ends.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(M_MMAP_MAX, 0)
        adjust(M_TRIM_THRESHOLD, NEVER)


def release_freed_memory() -> None:
    """Have glibc return freed memory to the kernel; without effect on other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
