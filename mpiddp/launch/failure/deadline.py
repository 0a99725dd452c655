"""A deadline for each phase of start-up, and for the end.

One thread per process watches the phase that the main thread is in. MPI and torch release the
interpreter's lock while they wait, so the thread can still report when they do not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CLOSING = "close"
PHASES = (
    "MPI", "code", "node", "import torch", "address", "network", "GPUs",
    "store", "group", "first all-reduce", "summary", CLOSING,
)  # fmt: skip
"""The phases of start-up, of the doctor's examination and of the end, in order; each uses some of
them."""

LATE_SECONDS = 1.0
"""A deadline that is noticed so many seconds late: this process was stopped meanwhile."""
GRACE = 1.0
"""Seconds that it waits then before it reports: a launcher continues the processes that it is about
to end, and ranks that were not stopped have reported the cause."""


class PhaseDeadlines:
    """Calls ``expire(phase)`` from its own thread when a phase outlasts ``seconds``.

    Remembers how long each phase took. Close it when start-up is over.
    """

    def __init__(self, seconds: float, expire: Callable[[str], None]) -> None:
        self.seconds = seconds
        self.durations: dict[str, float] = {}
        """Seconds by name of phase, in the order in which they ended."""
        self.current: str | None = None
        self._end = float("inf")
        self._expire = expire
        self._closed = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="mpiddp-deadline", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Let the body be the phase ``name``."""
        begin = time.monotonic()
        self._set(name, begin + self.seconds)
        try:
            yield
        finally:
            self._set(None, float("inf"))
            self.durations[name] = time.monotonic() - begin

    def close(self) -> None:
        """Stop watching and join the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _set(self, name: str | None, end: float) -> None:
        with self._condition:
            self.current = name
            self._end = end
            self._condition.notify()

    def _watch(self) -> None:
        with self._condition:
            extended = None
            while not self._closed:
                remaining = self._end - time.monotonic()
                if remaining > 0:
                    self._condition.wait(None if remaining == float("inf") else remaining)
                    continue
                if remaining < -LATE_SECONDS and extended != self._end:
                    extended = self._end
                    self._condition.wait(GRACE)
                    continue
                name = self.current or ""
                self._end = float("inf")
                self._condition.release()
                try:
                    self._expire(name)
                finally:
                    self._condition.acquire()
