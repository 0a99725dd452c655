"""What a companion watches besides connections: whether a rank is stopped, or superseded."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from mpiddp import environment
from mpiddp.errors import PeerLostError
from mpiddp.lifeline.membership import Membership
from mpiddp.process import job_directory
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.wording import print_message

CHECK_SECONDS = 3.0
"""Between two looks at the newest attempt's token."""
LOOKS = 10
"""How often the process is looked at, at least, in the time that it may be stopped."""
LONGEST_PERIOD = 3.0
"""Seconds between two looks."""
STOPPED = "T"
"""The state of such a process; one that a debugger has stopped is in another state."""


class SuspensionWatch:
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
        self.last = float("-inf")
        """When it was last seen to be stopped."""

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
        due = now + min(self._limit / LOOKS, LONGEST_PERIOD)
        if not self.is_stopped:
            self._since = None
        else:
            self.last, self._since = now, self._since or now
            if now - self._since >= self._limit:
                self._tell(self._limit)
            else:
                due = min(due, self._since + self._limit)
        self._loop.call_at(due, self._look)


class AttemptWatch:
    """Compares the token of this attempt with that of the newest.

    A thread does it, because a file system may not answer.
    """

    def __init__(self) -> None:
        self.is_superseded = False

    def begin(self, membership: Membership) -> None:
        if environment.ATTEMPT_TOKEN in os.environ:
            threading.Thread(target=self._watch, args=(membership,), daemon=True).start()

    def _watch(self, own: Membership) -> None:
        try:
            while True:
                job_directory.check_attempt()
                time.sleep(CHECK_SECONDS)
        except PeerLostError as error:
            self.is_superseded = True
            with contextlib.suppress(OSError):
                print_message(f"rank {own.rank} of {own.size} on {own.hostname}: {error}")
