"""Which worker of a parameter server has been silent for too long."""

from __future__ import annotations

import time
from collections.abc import Callable


class WorkerDeadlines:
    """Knows of whom a message is due, and until when.

    Who waits for weights owes nothing. Nor does anybody between two epochs, which the ranks spend
    in collective calls that have deadlines of their own, or in an evaluation.
    """

    def __init__(
        self, workers: int, timeout: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """``timeout``: seconds from the weights for a step to its gradient."""
        self._workers = workers
        self._timeout = timeout
        self._now = now
        self._due: dict[int, float] = {}
        self._rests = True

    def hear(self, worker: int) -> None:
        """A message has come; the first one of an epoch makes the others' due, too."""
        if self._rests:
            self._rests = False
            for each in range(self._workers):
                self.expect(each)
        self._due.pop(worker, None)

    def excuse(self, worker: int) -> None:
        """Nothing more is due of it in this epoch."""
        self._due.pop(worker, None)

    def expect(self, worker: int) -> None:
        """It has been given weights."""
        self._due[worker] = self._now() + self._timeout

    def rest(self) -> None:
        """An epoch is over."""
        self._rests = True
        self._due.clear()

    def find_lost(self) -> list[int]:
        """The workers whose messages are overdue, in order."""
        now = self._now()
        return sorted(worker for worker, due in list(self._due.items()) if now > due)
