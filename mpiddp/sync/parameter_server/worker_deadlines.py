"""Finds workers of a parameter server whose messages are overdue."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpiddp.launch.mpi.pauses import LONGEST_GAP


class WorkerDeadlines:
    """When each worker's next message is due.

    Time counts up to LONGEST_GAP between two looks, so that a long update, or a stopped process,
    makes no worker late. Nothing is due from a worker that waits for weights, nor from any between
    two epochs: ranks are in an evaluation then, or in collective calls, which have deadlines of
    their own.
    """

    def __init__(
        self, workers: int, timeout: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """``timeout``: seconds between sending the weights of a step and its gradient."""
        self._workers = workers
        self._timeout = timeout
        self._now = now
        self._seconds, self._looked = 0.0, now()
        self._due: dict[int, float] = {}
        self._rests = True

    def hear(self, worker: int) -> None:
        """A message has arrived; after the first of an epoch all workers' messages are due."""
        if self._rests:
            self._rests = False
            for each in range(self._workers):
                self.expect(each)
        self._due.pop(worker, None)

    def excuse(self, worker: int) -> None:
        """No more messages are due from this worker in this epoch."""
        self._due.pop(worker, None)

    def expect(self, worker: int) -> None:
        """The worker has received weights: its gradient is due."""
        self._due[worker] = self._seconds + self._timeout

    def rest(self) -> None:
        """The epoch is over: nothing is due."""
        self._rests = True
        self._due.clear()

    def find_lost(self) -> list[int]:
        """The workers whose messages are overdue, in order."""
        now = self._now()
        self._seconds += min(now - self._looked, LONGEST_GAP)
        self._looked = now
        return sorted(worker for worker, due in list(self._due.items()) if self._seconds > due)
