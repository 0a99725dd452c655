"""A call that may hang, and that nobody waits for longer than he wants to."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PAUSE_SECONDS = 0.05
LEAST_PAUSES = 3


class Errand(Generic[T]):
    """Runs ``work`` in a thread of its own from the moment it is made.

    A look-up that no server answers, or a file system that has gone, cannot be interrupted: the
    thread is left to itself then, and does not keep the process from ending.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.seconds: float | None = None
        """How long the work took; None while it runs."""
        self._value: T | None = None
        self._error: Exception | None = None
        self._begin = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="mpiddp-errand", daemon=True
        )
        self._thread.start()

    def finish(self, seconds: float) -> T | None:
        """What the work returned; None if it is not done about ``seconds`` after it began.

        Raises the Exception that the work raised.
        """
        left = self._begin + seconds - time.monotonic()
        # An import of torch may keep all threads from running for a while: what matters is how
        # long this thread had the chance to, so short pauses are counted and not the clock.
        for _ in range(max(LEAST_PAUSES, math.ceil(left / PAUSE_SECONDS))):
            self._thread.join(PAUSE_SECONDS)
            if not self._thread.is_alive():
                break
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._value = work()
        except Exception as error:  # Raised again in finish, on the thread that asked.
            self._error = error
        self.seconds = time.monotonic() - self._begin
