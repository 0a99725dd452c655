"""What goes on beside a call that is measured: computation, busy processes, cold caches."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE = 32 << 20
"""Bytes of the last cache if the kernel does not tell."""
SWEPT_CACHES = 2
"""How many times the last cache's size is swept: caches do not keep the newest bytes exactly."""
KERNEL_SIDE, GPU_KERNEL_SIDE = 128, 1024
"""Of the square matrices that are multiplied beside a call; on CPUs some tens of microseconds."""
TRIALS = 20

BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000): pass
"""
"""A program that ends with the process whose number it is given, which started it."""


def find_last_cache() -> int:
    """Bytes of this machine's last cache."""
    sizes = []
    for path in CACHES.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=USUAL_CACHE)


def make_sweep() -> Callable[[], object]:
    """A function after which none of the memory that was used before is in a cache.

    The function writes to separate memory, which is larger than the last cache. Rotating among the
    buffers of a call instead would take thousands of small ones to fill a cache, and each call
    would pay the look-up of another buffer.
    """
    memory = torch.zeros(SWEPT_CACHES * find_last_cache() // 4, dtype=torch.int32)
    return lambda: memory.add_(1)


def start_busy(count: int) -> list[subprocess.Popen[bytes]]:
    """Processes that do nothing but use a core each, as long as this one lives."""
    command = [sys.executable, "-S", "-c", BUSY, str(os.getpid())]
    return [subprocess.Popen(command) for _ in range(count)]


class Kernel:
    """Something to compute that takes about a given time."""

    def __init__(self, device: torch.device | None) -> None:
        side = KERNEL_SIDE if device is None else GPU_KERNEL_SIDE
        self._left, self._right, self._out = (torch.ones(side, side, device=device) for _ in "lro")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None else None
        self._count = 1

    def set_seconds(self, seconds: float) -> int:
        """Compute for about so long; returns how many matrices that are."""
        taken = []
        for _ in range(TRIALS):
            begin = perf_counter()
            self.compute()
            self.wait()
            taken.append((perf_counter() - begin) / self._count)
        self._count = max(1, round(seconds / median(taken)))
        return self._count

    def set_count(self, count: int) -> None:
        self._count = count

    def compute(self) -> None:
        """Multiply; on a GPU this only starts the work, on a stream separate from the current one.

        ``wait`` returns when it is done.
        """
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for _ in range(self._count):
                torch.mm(self._left, self._right, out=self._out)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
