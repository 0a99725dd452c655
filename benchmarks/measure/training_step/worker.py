"""What runs in the ranks of ``python -m benchmarks training-step``.

Models wrapped in DDP are kept from one visit to the next, until they are to be let go; parameter
servers, whose threads look for messages all the time, are closed after each visit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import distributed

import mpiddp
from benchmarks.measure.launching import worker_loop
from benchmarks.measure.launching.worker_loop import Member
from benchmarks.measure.training_step import checks, loops
from benchmarks.measure.training_step.loops import StepLoop
from benchmarks.measure.training_step.synchronisations import LoopSpec, read_spec
from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler


class StepJob(Member, Protocol):
    """One job's rank."""

    device: torch.device
    counts: bool
    """Whether this rank reads its node's interfaces."""

    def prepare(self, spec: LoopSpec) -> StepLoop | None:
        """Make a contender ready; None on ranks that it leaves idle. Collective.

        Raises ConfigurationError, on all ranks, if it cannot be.
        """

    def describe(self, spec: LoopSpec, loop: StepLoop) -> dict[str, Any]:
        """What a step of it sends, and how; after a step."""

    def probe(self, size: int, iterations: int) -> list[float]:
        """Seconds of sending so many bytes from one node to the next and hearing of it."""


class StepBench:
    """Does what is ordered, with one job's rank."""

    def __init__(self, job: StepJob) -> None:
        self._job = job
        self._kept: dict[LoopSpec, StepLoop | None] = {}

    def perform(self, command: Mapping[str, Any]) -> Any:
        what = command["do"]
        if what == "let go":
            self._kept.clear()
            gc.collect()
            return {}
        if what == "probe":
            return self._job.probe(command["bytes"], command["iterations"])
        spec = read_spec(command["spec"])
        if what == "compute alone":
            if self._job.rank != 0:
                return {}
            return checks.compute_alone(spec, command["workers"], self._job.device)
        try:
            with self._open(spec) as loop:
                if loop is None:
                    return {}
                if what == "check":
                    return self._check(spec, loop)
                return self._measure(spec, loop, command["steps"])
        except ConfigurationError as error:
            return {"refused": str(error)}

    @contextlib.contextmanager
    def _open(self, spec: LoopSpec) -> Iterator[StepLoop | None]:
        if spec in self._kept:
            yield self._kept[spec]
            return
        loop = self._job.prepare(spec)
        if not spec.contender.serves:
            self._kept[spec] = loop
            yield loop
            return
        assert loop is not None
        yield loop
        # An error leaves the servers to the end of the job: they are not waited for here.
        loop.update.close()

    def _check(self, spec: LoopSpec, loop: StepLoop) -> dict[str, Any]:
        found = checks.take_checked_steps(spec, loop)
        loops.warm_up(loop, loops.WARM_STEPS)
        return {**found, "notes": self._job.describe(spec, loop)}

    def _measure(self, spec: LoopSpec, loop: StepLoop, steps: int) -> dict[str, Any]:
        if spec.contender.serves:
            loops.warm_up(loop, loops.WARM_STEPS)
        # One rank waits for no other.
        barrier = distributed.barrier if len(loop.workers) > 1 else lambda: None
        return loops.measure(loop, steps, barrier, counts=self._job.counts)


def join_session(session: mpiddp.Session, failure_handler: FailureHandler) -> StepJob:
    from benchmarks.measure.training_step.mpi_job import MpiJob

    return MpiJob(session, failure_handler.fail)


def join_torchrun() -> StepJob:
    from benchmarks.measure.training_step.torch_job import TorchJob

    return TorchJob()


def main() -> None:
    worker_loop.run(join_session, join_torchrun, lambda job: StepBench(job).perform)


if __name__ == "__main__":
    main()
