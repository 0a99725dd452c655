"""What runs in the ranks of ``python -m benchmarks allreduce``."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import mpiddp
from benchmarks.collectives.ranks import inputs
from benchmarks.collectives.ranks.calls import Calls, CallSpec, Prepared
from benchmarks.launching import worker_loop
from mpiddp.errors import ConfigurationError

WARM_SHARE = 10
"""One untimed iteration for so many timed ones, and at least one."""
SETTLE_SECONDS = 0.02
"""How long ranks compute before anything is timed. The kernel may wake a rank on the core of the
rank that woke it, where both stay while they take turns. Ranks that compute get a core each."""


def measure(calls: Calls, spec: CallSpec) -> dict[str, Any]:
    """Check one contender on one size, then time it.

    Returns ``times``, this rank's, in nanoseconds, and ``wrong``, elements of the sum; or, where
    the contender cannot do that, ``refused``, the reason.
    """
    try:
        prepared = calls.prepare(spec)
    except ConfigurationError as error:
        return {"refused": str(error)}
    try:
        wrong = check(prepared, calls.rank, calls.size)
        return {"times": time_iterations(prepared, spec.iterations), "wrong": wrong}
    except ConfigurationError as error:
        return {"refused": str(error)}
    finally:
        prepared.close()


def check(prepared: Prepared, rank: int, size: int) -> int:
    """Sum integers; returns how many elements are wrong, and leaves the buffer zero."""
    tensor = prepared.tensor
    if tensor is None:
        return 0
    inputs.fill(tensor, rank, size)
    prepared.call()
    members = prepared.members
    # Servers that only serve end with anything.
    serves = members is not None and rank not in members
    wrong = 0 if serves else inputs.count_wrong(tensor, size, members)
    # However often zeros are summed in place, they do not overflow.
    tensor.zero_()
    return wrong


def time_iterations(prepared: Prepared, iterations: int) -> list[int]:
    """Nanoseconds of each iteration on this rank, each behind the contender's own barrier."""
    call, barrier, now = prepared.call, prepared.barrier, time.perf_counter_ns
    times = []
    gc.disable()
    try:
        settle()
        for _ in range(max(1, iterations // WARM_SHARE) if iterations else 0):
            barrier()
            call()
        for _ in range(iterations):
            barrier()
            begin = now()
            call()
            times.append(now() - begin)
        # No rank sleeps again, or frees its buffer, before all have finished.
        barrier()
    finally:
        gc.enable()
    return times


def settle() -> None:
    """Let the kernel find a core for each rank."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        pass


def perform(calls: Calls, command: Mapping[str, Any]) -> Any:
    if command["do"] == "describe":
        return calls.describe()
    return measure(calls, CallSpec(**command["spec"]))


def join_session(session: mpiddp.Session, _: object) -> Calls:
    from benchmarks.collectives.ranks.mpi_calls import MpiCalls

    return MpiCalls(session)


def join_torchrun() -> Calls:
    from benchmarks.collectives.ranks.torch_calls import TorchCalls

    return TorchCalls()


if __name__ == "__main__":
    worker_loop.run(join_session, join_torchrun, lambda calls: partial(perform, calls))
