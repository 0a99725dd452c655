"""Whether a rank's process is stopped, as by SIGSTOP, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpiddp.process.event_loop import EventLoop

PERIOD = 0.5
"""Seconds between two looks."""
STOPPED = "T"
"""The state of such a process; one that a debugger has stopped is in another state."""


class StopWatch:
    """Tells of a rank that has been stopped for too long, and again as long as it stays so."""

    def __init__(
        self, loop: EventLoop, find_state: Callable[[], str], tell: Callable[[float], object]
    ) -> None:
        """``find_state``: of the process, as ps shows it. ``tell`` is called with the seconds."""
        self._loop = loop
        self._find_state = find_state
        self._tell = tell
        self._limit = 0.0
        self._since: float | None = None
        """When it was first seen to be stopped."""

    @property
    def is_stopped(self) -> bool:
        return self._find_state() == STOPPED

    def begin(self, limit: float) -> None:
        """Look from now on; ``limit``: seconds that are not too long."""
        self._limit = limit
        self._look(time.monotonic())

    def add_pause(self, seconds: float) -> None:
        """This process was stopped as well: that time does not count."""
        if self._since is not None:
            self._since += seconds

    def _look(self, now: float) -> None:
        due = now + PERIOD
        if not self.is_stopped:
            self._since = None
        elif self._since is None:
            self._since = now
            due = min(due, now + self._limit)
        elif now - self._since >= self._limit:
            self._tell(self._limit)
        else:
            due = min(due, self._since + self._limit)
        self._loop.call_at(due, self._look)
