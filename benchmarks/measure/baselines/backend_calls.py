r"""Calls of torch.distributed over Gloo and over mpiddp's backend, in turns in the same processes.

    PYTHONPATH=. torchrun --nproc-per-node 4 \
        benchmarks/measure/baselines/backend_calls.py SECONDS SIZE…
    PYTHONPATH=. python -m mpiddp -n 4 \
        benchmarks/measure/baselines/backend_calls.py SECONDS SIZE…

SECONDS for each call and SIZE, in bytes. Rank 0 prints medians of the slowest rank, in ms, and the
share of Gloo's time; ``Gloo again`` is a second group of Gloo's: so far apart are equal things.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from torch import distributed

import mpiddp.torch_backend  # noqa: F401 - registers the backend
from benchmarks.measure.baselines.framework_collectives import prepare

QUANTITIES = ("all-reduce", "reduce-scatter", "all-gather")
MOST_CALLS = 10
SMALL = 1 << 18
"""Bytes up to which so many calls are made in a turn; of larger ones, one."""


def measure(quantity: str, size: int, seconds: float) -> dict[str, float]:
    """The median time of each group's call, in ms, behind a barrier of the default group."""
    buffer = torch.zeros(max(size // 4, distributed.get_world_size()))
    calls = {name: prepare(buffer, group, quantity) for name, group in GROUPS.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, goes_on = time.monotonic(), torch.ones(1)
    while goes_on.item():
        for name, call in calls.items():
            for _ in range(MOST_CALLS if size <= SMALL else 1):
                distributed.barrier()
                called = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - called)
        goes_on.fill_(time.monotonic() - begin < seconds or len(times[name]) < 4)
        distributed.broadcast(goes_on, 0)
    found = {}
    for name, row in times.items():
        slowest = torch.tensor(row)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        # The first one of all makes connections.
        found[name] = median(slowest[1:].tolist()) * 1e3
    return found


if __name__ == "__main__":
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    names = {"Gloo": "gloo", "Gloo again": "gloo", "mpiddp": "mpiddp"}
    GROUPS = {name: distributed.new_group(backend=each) for name, each in names.items()}
    for what in QUANTITIES:
        for count in map(int, sys.argv[2:]):
            row = measure(what, count, float(sys.argv[1]))
            shares = (f"{name} {each:.3f} ({each / row['Gloo']:.2f})" for name, each in row.items())
            if distributed.get_rank() == 0:
                print(f"{what} of {count} bytes:", ", ".join(shares), flush=True)
    distributed.destroy_process_group()
