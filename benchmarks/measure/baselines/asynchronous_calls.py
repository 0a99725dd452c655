r"""All-reduces that are waited for at once, with ``async_op=True`` and without, in turns.

    PYTHONPATH=. python -m mpiddp -n 2 \
        benchmarks/measure/baselines/asynchronous_calls.py ROUNDS SIZE…

SIZE in bytes. Rank 0 prints medians over the rounds of what a call takes in a row of calls, in µs:
over mpiddp's backend, over Gloo, of ``mpiddp.all_reduce``, and of MPI.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed

import mpiddp
import mpiddp.torch_backend

MANY, FEW = 60, 8
"""Calls in a row, of small buffers and of large ones."""
SMALL = 1 << 18
"""Bytes up to which a buffer is small."""


def _begin_and_wait(tensor: torch.Tensor, group: Any) -> None:
    distributed.all_reduce(tensor, group=group, async_op=True).wait()


def measure(size: int, rounds: int) -> dict[str, float]:
    """The median time of each kind of call, in µs."""
    tensor = torch.zeros(max(size // 4, 1))
    kinds: dict[str, Callable[[], object]] = {
        "mpiddp.all_reduce": partial(mpiddp.all_reduce, tensor),
        "MPI_Allreduce": partial(COMM.Allreduce, MPI.IN_PLACE, tensor.numpy()),
    }
    for name, group in GROUPS.items():
        kinds[name] = partial(distributed.all_reduce, tensor, group=group)
        kinds[f"{name}, async_op"] = partial(_begin_and_wait, tensor, group)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    count = MANY if size <= SMALL else FEW
    for _ in range(rounds + 1):
        for kind, call in kinds.items():
            call()
            COMM.Barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            times[kind].append((time.perf_counter() - begin) / count * 1e6)
    # The first round prepares what later ones use.
    return {kind: median(row[1:]) for kind, row in times.items()}


if __name__ == "__main__":
    with mpiddp.init(backend="gloo") as session:
        COMM: Any = session.comm
        GROUPS = {name: distributed.new_group(backend=name) for name in ("gloo", "mpiddp")}
        for length in map(int, sys.argv[2:]):
            found = measure(length, int(sys.argv[1]))
            if session.world.rank == 0:
                row = ", ".join(f"{kind} {each:.1f}" for kind, each in found.items())
                print(f"{length} bytes: {row}", flush=True)
