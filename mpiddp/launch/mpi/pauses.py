"""Waiting that costs no core: sleep between two looks, the longer the more time has gone by.

With more ranks than cores, a rank that spins, as MPI's own waits do, may occupy the core that the
awaited rank needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE = 2e-5
LONGEST_PAUSE = 2e-3
LONGEST_GAP = 1.0
"""Seconds between two looks that count: for the rest of a longer time this process was stopped."""
PAUSE_SHARE = 1 / 8
"""How long a pause is beside the time waited so far. A collective takes several steps, and each
look takes one: pauses that double made a collective of ranks that come together four times as
slow."""


class Pauses:
    """The pauses of one wait. Lengths are in seconds."""

    def __init__(self, longest: float = LONGEST_PAUSE) -> None:
        self._longest = longest
        self.begin()

    def begin(self) -> None:
        """Something has come: look again soon."""
        self._start = time.monotonic()

    def sleep(self) -> None:
        waited = time.monotonic() - self._start
        time.sleep(min(max(FIRST_PAUSE, PAUSE_SHARE * waited), self._longest))


def wait_until(
    test: Callable[[], object], seconds: float = float("inf"), longest: float = LONGEST_PAUSE
) -> bool:
    """Look until ``test()`` is true, ``longest`` seconds apart at most.

    Returns whether it was within ``seconds``, not counting those during which this process was
    stopped.
    """
    pauses, last = Pauses(longest), time.monotonic()
    while not test():
        now = time.monotonic()
        seconds, last = seconds - min(now - last, LONGEST_GAP), now
        if seconds < 0:
            return bool(test())
        pauses.sleep()
    return True
