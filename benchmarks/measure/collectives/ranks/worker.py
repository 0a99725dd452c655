"""What runs in the ranks of the commands that measure collectives."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

import mpiddp
from benchmarks.measure.collectives.ranks import inputs
from benchmarks.measure.collectives.ranks.calls import Calls, CallSpec, Prepared
from benchmarks.measure.collectives.ranks.load import Kernel, make_sweep, start_busy
from benchmarks.measure.launching import worker_loop
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.plans.loading import load

WARM_SHARE = 10
"""One untimed iteration for so many timed ones, and at least one."""
SETTLE_SECONDS = 0.02
"""How long ranks compute before anything is timed. The kernel may wake a rank on the core of the
rank that woke it, where both stay while they take turns. Ranks that compute get a core each."""


def measure(calls: Calls, spec: CallSpec) -> dict[str, Any]:
    """Check one contender on one size, then time it.

    Returns this rank's ``times``, in nanoseconds; ``wrong``, elements of the result; ``checked``,
    nanoseconds of the call that was checked; ``speed``, of the core; ``ran``, the algorithm; with
    overlap, ``compute`` and ``alone``, nanoseconds. Or, if the contender cannot do that,
    ``refused``, the reason.
    """
    try:
        with contextlib.ExitStack() as stack:
            prepared = calls.prepare(spec)
            stack.callback(prepared.close)
            wrong, checked = check(prepared, spec, calls.rank, calls.size)
            found = {"checked": checked, "wrong": wrong, "ran": prepared.ran}
            if spec.overlap:
                return {**found, **time_overlap(calls, prepared, spec.iterations)}
            sweep = make_sweep() if spec.cold else None
            speed, times = time_iterations(prepared, spec.iterations, sweep)
            return {**found, "speed": speed, "times": times}
    except ConfigurationError as error:
        return {"refused": str(error)}


def check(prepared: Prepared, spec: CallSpec, rank: int, size: int) -> tuple[int, int]:
    """Work on integers, or pass known bytes; the buffer of a collective is left zero.

    Returns how many elements are wrong, and nanoseconds of the call, a contender's first one.
    """
    tensor, exchange, operator = prepared.tensor, prepared.exchange, spec.operator or "sum"
    if exchange is not None:
        inputs.fill_exchange(exchange, rank, size)
    elif tensor is not None:
        inputs.fill(tensor, rank, size, operator)
    else:
        return 0, 0
    _wait_for_gpu(prepared)
    begin = time.perf_counter_ns()
    prepared.call()
    _wait_for_gpu(prepared)
    taken = time.perf_counter_ns() - begin
    if exchange is not None:
        return inputs.count_wrong_bytes(exchange, size), taken
    assert tensor is not None
    wrong = inputs.count_wrong(
        spec.quantity, tensor, rank, size, operator, prepared.members, prepared.part
    )
    # However often zeros are summed in place, they do not overflow.
    tensor.zero_()
    return wrong, taken


def _wait_for_gpu(prepared: Prepared) -> None:
    """Return once all that was begun on its GPU, if it has one, is done."""
    if prepared.device is not None:
        torch.cuda.synchronize(prepared.device)


def time_iterations(
    prepared: Prepared, iterations: int, sweep: Callable[[], object] | None = None
) -> tuple[float, list[int]]:
    """The core's speed, and nanoseconds of each iteration, each behind the contender's own barrier.

    ``sweep``: empties the caches before each iteration.
    """
    call, barrier = prepared.call, prepared.barrier
    gc.disable()
    try:
        speed = settle()
        for _ in range(max(1, iterations // WARM_SHARE) if iterations else 0):
            barrier()
            call()
        if prepared.device is not None:
            times = _time_on_gpu(prepared, iterations)
        else:
            times = _time(call, barrier, iterations, sweep)
        # No rank sleeps again, or frees its buffer, before all have finished.
        barrier()
    finally:
        gc.enable()
    return speed, [each // prepared.messages for each in times]


def _time(
    call: Callable[[], object],
    barrier: Callable[[], object],
    iterations: int,
    sweep: Callable[[], object] | None = None,
) -> list[int]:
    now, times = time.perf_counter_ns, []
    for _ in range(iterations):
        if sweep is not None:
            sweep()
        barrier()
        begin = now()
        call()
        times.append(now() - begin)
    return times


def _time_on_gpu(prepared: Prepared, iterations: int) -> list[int]:
    """By events on the current stream, which the GPU itself times."""
    marks = []
    for _ in range(iterations):
        prepared.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        prepared.call()
        end.record()
        end.synchronize()
        marks.append((begin, end))
    return [round(begin.elapsed_time(end) * 1e6) for begin, end in marks]


def time_overlap(calls: Calls, prepared: Prepared, iterations: int) -> dict[str, Any]:
    """Time a call alone, a computation of about its length alone, and both at once.

    All ranks compute equally much. Raises ConfigurationError if the call cannot be started.
    """
    start = prepared.start
    if start is None:
        raise ConfigurationError("it has no call that goes on while ranks compute")
    speed, alone = time_iterations(prepared, iterations)
    kernel = Kernel(prepared.device)
    wanted = kernel.set_seconds(median(alone) * prepared.messages * 1e-9 if alone else 0)
    kernel.set_count(calls.broadcast(wanted))

    def compute() -> None:
        kernel.compute()
        kernel.wait()

    def do_both() -> None:
        wait = start()
        kernel.compute()
        wait()
        # On a GPU it is the stream that has waited.
        _wait_for_gpu(prepared)

    computing = _time(compute, prepared.barrier, iterations)
    both = _time(do_both, prepared.barrier, iterations)
    prepared.barrier()
    return {"speed": speed, "times": both, "compute": computing, "alone": alone}


def settle() -> float:
    """Let the kernel find a core for each rank; returns this one's speed, in loops per second."""
    loops, begin = 0, time.monotonic()
    end = begin + SETTLE_SECONDS
    while (now := time.monotonic()) < end:
        loops += 1
    return loops / (now - begin)


@dataclass
class Worker:
    """A rank that carries out what the benchmark asks for."""

    calls: Calls
    busy: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def perform(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "describe":
            free = psutil.virtual_memory().available
            return {**self.calls.describe(), "free_bytes": free}
        if command["do"] == "be busy":
            if self.calls.describe()["local_rank"] == 0:
                self.busy += start_busy(command["count"])
            return len(self.busy)
        if command["do"] == "load":
            return [list(load(Path(file))) for file in command["files"]]
        spec = command["spec"]
        pairs = tuple((source, target) for source, target in spec.get("pairs", ()))
        return measure(self.calls, CallSpec(**{**spec, "pairs": pairs}))


def join_session(session: mpiddp.Session, _: object) -> Calls:
    from benchmarks.measure.collectives.ranks.mpi_calls import MpiCalls

    return MpiCalls(session)


def join_torchrun() -> Calls:
    from benchmarks.measure.collectives.ranks.torch_calls import TorchCalls

    return TorchCalls()


if __name__ == "__main__":
    worker_loop.run(join_session, join_torchrun, lambda calls: Worker(calls).perform)
