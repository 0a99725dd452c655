"""The calls of one process group: one after the other, at once or beside the program."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from mpiddp.errors import MpiddpError, PeerLostError
from mpiddp.torch_internals import keep_from_compiler

Call = Callable[[], object]
DESTROYED = "mpiddp: this process group has been destroyed"
FORKED = "mpiddp: a forked child takes no part in collective calls: its parent does"
SHOWN = 3
"""The last calls that `CallQueue.describe` tells of."""


@keep_from_compiler
class CallWork(distributed.Work):
    """A call that was begun; what torch's users wait for."""

    def __init__(self, tensors: list[Any]) -> None:
        """``tensors``: the value of its future."""
        super().__init__()
        self._tensors = tensors
        self.ended = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def end(self, error: BaseException | None, leave: Callable[[], None] | None = None) -> None:
        """The call has ended, with an error or without.

        ``leave`` is called after the future's callbacks; without a future, before a wait returns.
        """
        with self._lock:
            self._error = error
            future = self._future
            if future is None and leave is not None:
                leave()
            self.ended.set()
        if future is not None:
            future.set_result(error)
            if leave is not None:
                leave()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once the call has ended. Raises its error, or DistNetworkError after a while."""
        seconds = timeout.total_seconds()
        if not self.ended.wait(seconds if seconds > 0 else None):
            raise distributed.DistNetworkError(f"the call has not ended after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def is_success(self) -> bool:
        return self.ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """A future whose value is the list of tensors, made when it is first asked for."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.ended.is_set():
                    self._future.set_result(self._error)
        # Not set_exception(): C++, which waits for the future as well, would not see the error.
        return self._future.then(self._pass_on)

    def _pass_on(self, future: torch.futures.Future[Any]) -> list[Any]:
        error = future.value()
        if error is not None:
            raise error
        return self._tensors


class CallQueue:
    """Makes the calls of a group in their order.

    A call that its caller waits for is made in the caller's thread if no other one is under way,
    since a thread of its own would cost some 50 µs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._turn = threading.Lock()
        """Held during a call."""
        self._lock = threading.Lock()
        self._pending = 0
        """Calls that were given to the thread, and have not ended."""
        self._worker: ThreadPoolExecutor | None = None
        self._worker_thread = 0
        self._is_closed = False
        self._last: deque[tuple[int, str, list[Any], threading.Event]] = deque(maxlen=SHOWN)
        self.begun = 0
        """Calls so far, counted from 1; alike on all ranks."""

    def make(self, name: str, call: Call, tensors: list[Any], *, waits: bool) -> CallWork:
        """Make the call, now if ``waits``, or begin it. Raises what torch's users expect."""
        if self._is_closed:
            raise distributed.DistBackendError(DESTROYED)
        if os.getpid() != self._process:
            # The thread that has the turn is its parent's.
            raise distributed.DistBackendError(FORKED)
        work = CallWork(tensors)
        self.begun += 1
        shapes = [getattr(tensor, "shape", None) for tensor in tensors]
        self._last.append((self.begun, name, shapes, work.ended))
        # A callback of a future makes its calls in the thread of the calls: nobody else would.
        if threading.get_ident() == self._worker_thread or (waits and not self._pending):
            with self._turn:
                error = _find_error(call)
            work.end(error)
            work.wait()
            return work
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, f"mpiddp-{self._name}")
            self._pending += 1
            self._worker.submit(self._work, call, work)
        if waits:
            work.wait()
        return work

    def describe(self) -> list[str]:
        """The last calls, one line each."""
        return [
            f"mpiddp:{name} {number} of group {self._name}, "
            f"{'complete' if ended.is_set() else 'under way'}, "
            f"sizes {[list(shape) for shape in shapes if shape is not None]}"
            for number, name, shapes, ended in list(self._last)
        ]

    def close(self) -> None:
        """Wait for the calls that were begun."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self._is_closed = True

    def _work(self, call: Call, work: CallWork) -> None:
        self._worker_thread = threading.get_ident()
        # The caller's mode, in which a result may not be written, is not this thread's.
        with self._turn, torch.inference_mode():
            error = _find_error(call)
        # Callbacks may make calls, which come before those that the program makes meanwhile.
        work.end(error, self._leave)

    def _leave(self) -> None:
        with self._lock:
            self._pending -= 1


def _find_error(call: Call) -> BaseException | None:
    """Make the call; what torch's users expect if it fails."""
    try:
        _translate(call)
    except BaseException as error:  # It is raised to whoever waits.
        return error
    return None


def _translate(call: Call) -> None:
    try:
        call()
    except PeerLostError as error:
        raise distributed.DistNetworkError(f"mpiddp: {error}") from error
    except MpiddpError as error:
        raise distributed.DistBackendError(f"mpiddp: {error}") from error
