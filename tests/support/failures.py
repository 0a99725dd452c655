"""A failure handler of a rank among others."""

from __future__ import annotations

from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.launch.mpi.world import World


def shared_failure_handler(*, ends_with_run: bool = False) -> FailureHandler:
    failure_handler = FailureHandler(ends_with_run=ends_with_run)
    failure_handler.meet(world=World(3, 8, 1, 2, 1, 4, "node2", "node1"))
    failure_handler.run = FixedProgress(step=17)
    return failure_handler
