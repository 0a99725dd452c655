"""Thousands of calls of a pool's ranks, with buffers that come and go.

Lengths, transports and memory change all the time, as the ranks' common random numbers say; where
a buffer lies, each rank decides for itself. It reports what grows, and what was wrong.
"""

import gc
import mmap
import os
import random
from pathlib import Path
from typing import Any

import torch

import mpiddp

TRANSPORTS = ("shared-memory", "shared-memory", "shared-memory+mpi", "mpi", "torch")
TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64)
PAGE = 4096
LENGTHS = [PAGE * pages // 8 for pages in (1, 2, 3, 16, 64)]
"""Elements of 8 bytes; whole pages, so that a mapping that was freed leaves room for the next."""
WARM = 700
"""Calls after which nothing should grow any more."""


def measure() -> dict[str, int]:
    """Of this process: what is resident, in bytes; open files; mappings, those of files with no
    name apart."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
        "files": len(os.listdir("/proc/self/fd")), "mappings": len(lines),
        "segments": sum("memfd:mpiddp" in line for line in lines),
        "named segments": sum("/dev/shm/" in line for line in lines),
    }  # fmt: skip


def allocate(size: int, is_shared: bool) -> torch.Tensor:
    """Bytes in pages of their own, which the kernel has again when the tensor goes."""
    if is_shared:
        return mpiddp.shared_empty(size, torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class Churn:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.common = random.Random(1)
        self.own = random.Random(2 + rank)
        self.kept: list[torch.Tensor] = []
        """Some buffers live longer, so that others cannot have their place."""
        self.seen: dict[int, bool] = {}
        """By address, whether the last buffer there was shared."""
        self.changed = 0
        """How often an address came back with memory of the other kind."""
        self.wrong: list[str] = []

    def call(self, number: int) -> None:
        length, dtype = self.common.choice(LENGTHS), self.common.choice(TYPES)
        transport = self.common.choice(TRANSPORTS)
        # Most lengths are never met again, some always are.
        count = length * 8 // dtype.itemsize - self.common.choice((0, 0, number % 500))
        is_shared = self.own.random() < 0.5
        memory = allocate(length * 8, is_shared)
        address = memory.data_ptr()
        self.changed += self.seen.get(address, is_shared) != is_shared
        self.seen[address] = is_shared
        tensor = memory.view(dtype)[:count]
        tensor.fill_(self.rank + number % 9)
        mpiddp.all_reduce(tensor, transport=transport)
        total = sum(range(self.size)) + self.size * (number % 9)
        if not bool((tensor == total).all()):
            self.wrong.append(f"call {number}: {count} of {dtype} over {transport}")
        if self.own.random() < 0.1:
            self.kept.append(memory)
        if len(self.kept) > 5 or self.own.random() < 0.05:
            self.kept.clear()


def run(session: mpiddp.Session, total: int) -> dict[str, Any]:
    """Make ``total`` calls; measure in between and at the end."""
    churn = Churn(session.world.rank, session.world.size)
    report: dict[str, Any] = {}
    for number in range(total):
        if number == min(WARM, total // 2):
            churn.kept.clear()
            report["before"] = measure()
        churn.call(number)
    churn.kept.clear()
    return report | {"after": measure(), "wrong": churn.wrong, "changed": churn.changed}
