"""Calls that may hang, with a limit to how long they are waited for."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")

PAUSE_SECONDS = 0.05
LEAST_PAUSES = 3


class LateError(Exception):
    """The work was not done in time, and goes on by itself."""


class BackgroundCall(Generic[T]):
    """Runs ``work`` in a thread from the moment it is made.

    A look-up that no server answers, or a file system that has gone, cannot be interrupted: the
    thread is left to itself then, and does not keep the process from ending. Where no thread can
    be started, as while the interpreter shuts down, the work is done at once.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._begin = time.monotonic()
        self._done = threading.Event()
        try:
            threading.Thread(
                target=self._run, args=(work,), name="mpiddp-call", daemon=True
            ).start()
        except RuntimeError:
            self._run(work)

    @staticmethod
    def check_threads() -> None:
        """Raise RuntimeError where no thread can be started, so that no call is bounded in time."""
        threading.Thread(target=int, name="mpiddp-check", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether ``finish`` would return, or raise, at once."""
        return self._done.is_set()

    def finish(self, seconds: float | None = None) -> T:
        """What the work returned, None too if it returns that.

        Raises LateError if it is not done about ``seconds`` after it began, and whatever the work
        raised. Without ``seconds`` it waits however long that takes.
        """
        if seconds is None:
            self._done.wait()
            seconds = 0.0
        left = self._begin + seconds - time.monotonic()
        # An import of torch may keep all threads from running for a while: what matters is how
        # long this thread had the chance to, so short pauses are counted and not the clock.
        for _ in range(max(LEAST_PAUSES, math.ceil(left / PAUSE_SECONDS))):
            if self._done.wait(PAUSE_SECONDS):
                break
        if self._error is not None:
            raise self._error
        if not self._results:
            raise LateError
        return self._results[0]

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._results.append(work())
        except BaseException as error:  # Raised again in finish, on the thread that asked.
            self._error = error
        self._done.set()


class BackgroundCalls(Generic[K, T]):
    """Runs each of ``works`` in a separate thread; none of them may raise."""

    def __init__(self, works: Mapping[K, Callable[[], T]]) -> None:
        self._results: queue.SimpleQueue[tuple[K, T]] = queue.SimpleQueue()
        self._missing = len(works)
        for key, work in works.items():
            threading.Thread(
                target=self._run, args=(key, work), name=f"mpiddp-call-{key}", daemon=True
            ).start()

    def next_result(self, end: float) -> tuple[K, T] | None:
        """The next work that is done; None when all were, or at ``end`` of time.monotonic()."""
        if self._missing == 0:
            return None
        try:
            result = self._results.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return None
        self._missing -= 1
        return result

    def _run(self, key: K, work: Callable[[], T]) -> None:
        self._results.put((key, work()))
