"""What runs in the ranks of ``python -m benchmarks training-step``.

    python -m benchmarks.training_step.worker mpi|torch HOST:PORT,…

`benchmarks.launching.worker_loop` tells the ranks what to do. Models wrapped in DDP are kept from
one visit to the next, until they are to be let go; parameter servers, whose threads look for
messages all the time, are closed after each visit.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import distributed

from benchmarks.launching.paired_jobs import MPI_JOB
from benchmarks.launching.worker_loop import Member, join_lines, serve
from benchmarks.training_step import checks, loops
from benchmarks.training_step.contenders import Order, read_order
from benchmarks.training_step.loops import Loop
from mpiddp.errors import ConfigurationError


class Job(Member, Protocol):
    """One job's rank."""

    device: torch.device
    counts: bool
    """Whether this rank reads its node's interfaces."""

    def prepare(self, order: Order) -> Loop | None:
        """Make a contender ready; None on ranks that it leaves idle. Collective.

        Raises ConfigurationError, on all ranks, if it cannot be.
        """

    def describe(self, order: Order, loop: Loop) -> dict[str, Any]:
        """What a step of it sends, and how; after a step."""

    def probe(self, size: int, iterations: int) -> list[float]:
        """Seconds of sending so many bytes from one node to the next and hearing of it."""


class Bench:
    """Does what is ordered, with one job's rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kept: dict[Order, Loop | None] = {}

    def perform(self, command: Mapping[str, Any]) -> Any:
        what = command["do"]
        if what == "let go":
            self._kept.clear()
            gc.collect()
            return {}
        if what == "probe":
            return self._job.probe(command["bytes"], command["iterations"])
        order = read_order(command["order"])
        if what == "compute alone":
            if self._job.rank != 0:
                return {}
            return checks.compute_alone(order, command["workers"], self._job.device)
        try:
            with self._open(order) as loop:
                if what == "check":
                    return self._check(order, loop)
                return self._measure(order, loop, command["steps"])
        except ConfigurationError as error:
            return {"refused": str(error)}

    @contextlib.contextmanager
    def _open(self, order: Order) -> Iterator[Loop | None]:
        if order in self._kept:
            yield self._kept[order]
            return
        loop = self._job.prepare(order)
        if not order.contender.serves:
            self._kept[order] = loop
            yield loop
            return
        assert loop is not None
        yield loop
        # An error leaves the servers to the end of the job: they are not waited for here.
        loop.update.close()

    def _check(self, order: Order, loop: Loop | None) -> dict[str, Any]:
        if loop is None:
            return {}
        found = checks.take_checked_steps(order, loop)
        loops.warm_up(loop, loops.WARM_STEPS)
        return {**found, "notes": self._job.describe(order, loop)}

    def _measure(self, order: Order, loop: Loop | None, steps: int) -> dict[str, Any]:
        if loop is None:
            return {}
        if order.contender.serves:
            loops.warm_up(loop, loops.WARM_STEPS)
        barrier = _stay if len(loop.workers) == 1 else distributed.barrier
        return loops.measure(loop, steps, barrier, counts=self._job.counts)


def _stay() -> None:
    """No barrier: one rank waits for no other."""


def main(name: str, addresses: Sequence[str]) -> None:
    """Join the job's ranks and carry out commands until one says to end."""
    with _open_job(name) as job, join_lines(job, addresses) as (above, below):
        serve(job.rank, Bench(job).perform, above, below)


@contextlib.contextmanager
def _open_job(name: str) -> Iterator[Job]:
    """Join the job's ranks: a session over MPI, or a group whose processes never load MPI."""
    if name == MPI_JOB:
        from mpiddp.launch.failure.failure import FailureHandler

        with FailureHandler() as failure_handler:
            import mpiddp

            with mpiddp.init(allow_shared_gpu=True, bind="none") as session:
                from benchmarks.training_step.mpi_job import MpiJob

                yield MpiJob(session, failure_handler.fail)
        return
    from benchmarks.training_step.torch_job import TorchJob

    with contextlib.closing(TorchJob()) as job:
        yield job


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
