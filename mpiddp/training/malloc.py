"""What the C library does with memory that a pass has freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""glibc's names, of mallopt(3)."""
NEVER = -1
"""Of a threshold, which is unsigned inside."""


def keep_freed_memory() -> None:
    """Have this process keep what it frees, and use it again, from now on.

    glibc gives each block above 32 MiB back to the kernel as soon as it is freed, and gets it anew,
    page by page, in the next step: for a large model on a CPU that takes as long as the backward
    pass itself. Kept memory counts as this process's until its end. Without effect where the C
    library is another one.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(M_MMAP_MAX, 0)
        adjust(M_TRIM_THRESHOLD, NEVER)
