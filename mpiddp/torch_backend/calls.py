"""The calls of one process group: one after the other, at once or beside the program."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.profiler import record_function

from mpiddp.errors import MpiddpError, PeerLostError
from mpiddp.torch_internals import find_is_profiled, keep_from_compiler

Call = Callable[[], object]
Start = Callable[[], distributed.Work] | None
DESTROYED = "mpiddp: this process group has been destroyed"
FORKED = "mpiddp: a forked child takes no part in collective calls: its parent does"
SHOWN = 3
"""Number of last calls that `CallQueue.describe` lists."""


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
        """Return once the call has ended. Raises its error; DistNetworkError after ``timeout``."""
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


class _FinishedWork(distributed.Work):
    """Of the calls that their callers waited for."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


_FINISHED = _FinishedWork()
_NOTHING: AbstractContextManager[None] = nullcontext()
_is_profiled = find_is_profiled()


@dataclass
class _Record:
    """One of the last calls."""

    number: int
    name: str
    shapes: list[Any]
    state: str = "under way"


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
        self._last: deque[_Record] = deque(maxlen=SHOWN)
        self.begun = 0
        """Calls so far, counted from 1; alike on all ranks."""

    def make(
        self, name: str, call: Call, tensors: list[Any], *, waits: bool, start: Start = None
    ) -> distributed.Work:
        """Make the call if ``waits``, else begin it.

        ``start``: begins it in Gloo and returns Gloo's work, which is done if the caller waits and
        no other call is under way.

        Raises DistBackendError for a destroyed group. If ``waits``, raises the call's error, too.
        """
        if self._is_closed:
            raise distributed.DistBackendError(DESTROYED)
        if os.getpid() != self._process:
            # The thread that has the turn is its parent's.
            raise distributed.DistBackendError(FORKED)
        self.begun += 1
        record = _Record(self.begun, name, [getattr(each, "shape", None) for each in tensors])
        self._last.append(record)
        # A callback of a future makes its calls in the thread of the calls: nobody else would.
        is_own = threading.get_ident() == self._worker_thread
        # Not if the caller has a work: Gloo would make the calls of its callbacks at any time.
        if start is not None and waits and (is_own or not self._pending):
            record.state = "left to Gloo"
            return start()
        shown = f"mpiddp:{name}" if _is_profiled() else ""
        if waits and (is_own or not self._pending):
            with self._turn, record_function(shown) if shown else _NOTHING:
                _translate(call, record)
            return _FINISHED
        work = CallWork(tensors)
        if shown:
            with record_function(shown):
                pass  # Its beginning: torch crashes (SIGSEGV) if a range ends in another thread.
        if is_own:
            self._work(call, work, record)
            return work
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, f"mpiddp-{self._name}")
            self._pending += 1
            self._worker.submit(self._work_off, call, work, record)
        if waits:
            work.wait()
        return work

    def describe(self) -> list[str]:
        """The last calls, one line each."""
        return [
            f"mpiddp:{each.name} {each.number} of group {self._name}, {each.state}, "
            f"sizes {[list(shape) for shape in each.shapes if shape is not None]}"
            for each in list(self._last)
        ]

    def close(self) -> None:
        """Wait for the calls that were begun."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self._is_closed = True

    def _work_off(self, call: Call, work: CallWork, record: _Record) -> None:
        self._worker_thread = threading.get_ident()
        self._work(call, work, record, self._leave)

    def _work(
        self, call: Call, work: CallWork, record: _Record, leave: Callable[[], None] | None = None
    ) -> None:
        error: BaseException | None = None
        # The caller's mode, in which a result may not be written, is not this thread's.
        with self._turn, torch.inference_mode():
            try:
                _translate(call, record)
            except BaseException as caught:  # It is raised to whoever waits.
                error = caught
        # Callbacks may make calls, which come before those that the program makes meanwhile.
        work.end(error, leave)

    def _leave(self) -> None:
        with self._lock:
            self._pending -= 1


def _translate(call: Call, record: _Record) -> None:
    """Make the call; raise what torch's users expect if it fails."""
    try:
        call()
        record.state = "complete"
    except PeerLostError as error:
        raise distributed.DistNetworkError(f"mpiddp: {error}") from error
    except MpiddpError as error:
        raise distributed.DistBackendError(f"mpiddp: {error}") from error
    finally:
        if record.state != "complete":
            record.state = "failed"
