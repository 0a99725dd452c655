"""Calls that may hang, with a timeout."""

from __future__ import annotations

import atexit
import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from mpiddp.wording import print_message

K = TypeVar("K")
T = TypeVar("T")

PAUSE_SECONDS = 0.05
LEAST_PAUSES = 3
QUIET_SECONDS = 1.0
"""How long a lasting call is waited for without a word."""
LASTING_SECONDS = 300.0
"""How long lasting calls are waited for when the process leaves."""
INTERRUPTED_SECONDS = 20.0
"""The same after Ctrl-C; a second Ctrl-C ends it at once."""


class LateError(Exception):
    """The work was not done in time, and goes on by itself."""


class BackgroundCall(Generic[T]):
    """Runs ``work`` in a thread from the moment it is made.

    A look-up that no server answers, or a file system that has gone, cannot be interrupted: the
    thread is left to itself then, and does not keep the process from ending. If no thread can
    be started, as while the interpreter shuts down, the work is done at once.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._begin = time.monotonic()
        self._done = threading.Event()
        try:
            self._make_thread(work).start()
        except RuntimeError:
            self._run(work)

    def _make_thread(self, work: Callable[[], T]) -> threading.Thread:
        return threading.Thread(target=self._run, args=(work,), name="mpiddp-call", daemon=True)

    @staticmethod
    def check_threads() -> None:
        """Raise RuntimeError if no thread can be started, so that no call is bounded in time."""
        threading.Thread(target=int, name="mpiddp-check", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether ``finish`` would return, or raise, at once."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long at most; returns whether it is done."""
        return self._done.wait(seconds)

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


class _LastingThread(threading.Thread):
    """Of a lasting call."""

    def __init__(self, call: LastingCall[Any], target: Callable[..., None], work: Any) -> None:
        super().__init__(target=target, args=(work,), name="mpiddp-lasting", daemon=True)
        self.call = call


class LastingCall(BackgroundCall[T]):
    """A call that is waited for if the process leaves in an orderly way before it is done.

    That is: at the end of the program, after ``sys.exit`` and exceptions, and before a failing rank
    ends its job. Only a kill and ``os._exit`` are not orderly. A failure that nobody asks for is
    printed.
    """

    def __init__(self, work: Callable[[], T], what: str) -> None:
        """``what``: names the work in messages, such as "the checkpoint of step 7"."""
        self.what = what
        self._unseen: list[str] = []
        """Failures that have not been raised or printed yet."""
        weakref.finalize(self, _say_all, self._unseen)
        super().__init__(work)

    def _make_thread(self, work: Callable[[], T]) -> threading.Thread:
        return _LastingThread(self, self._run, work)

    def _run(self, work: Callable[[], T]) -> None:
        def note() -> T:
            try:
                return work()
            except BaseException as error:
                self._unseen.append(f"{self.what} failed: {error}")
                raise

        super()._run(note)

    def finish(self, seconds: float | None = None) -> T:
        end = time.monotonic() + LASTING_SECONDS
        try:
            # Short waits: a slow disk is no stall of the main thread (`mpiddp.lifeline.movement`).
            while seconds is None and time.monotonic() < end and not self.is_done:
                self._done.wait(PAUSE_SECONDS)
            return super().finish(seconds)
        except BaseException as error:
            if error is self._error:
                self._unseen.clear()
            raise


def call_at_exit(work: Callable[[], object]) -> None:
    """Have ``work`` done when the interpreter ends, while executors can be used.

    Functions of atexit come too late: executors refuse new work by then. ``concurrent.futures`` is
    told in time by this function of ``threading``, which has no public name.
    """
    # Imported first, so that it is told last.
    import concurrent.futures.thread

    assert concurrent.futures.thread is not None
    register = getattr(threading, "_register_atexit", atexit.register)
    register(work)


def finish_lasting_calls(
    reason: str = "the program ends", seconds: float = LASTING_SECONDS
) -> None:
    """Wait until lasting calls of this process are done, for ``seconds`` at most.

    Says on standard error what is waited for, if it takes longer than a moment, and what was left
    undone. In a forked child there are none.
    """
    begin = time.monotonic()
    # Not by ``join``, which refuses a thread that is being started just now.
    for call in [each.call for each in threading.enumerate() if isinstance(each, _LastingThread)]:
        if not call.wait(QUIET_SECONDS):
            _say(f"{reason}: waiting up to {seconds:g} s for {call.what}")
            while not call.wait(PAUSE_SECONDS) and time.monotonic() < begin + seconds:
                pass  # In short waits, as in ``LastingCall.finish``.
        if not call.is_done:
            _say(f"{call.what} was not finished in {seconds:g} s, and is lost")


def _say_all(lines: list[str]) -> None:
    """When a call is forgotten, or the interpreter ends: say what nobody has heard."""
    while lines:
        _say(lines.pop())


def _say(line: str) -> None:
    with contextlib.suppress(Exception):  # Standard error may have gone.
        print_message(line)


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
