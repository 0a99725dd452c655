"""The calls of one process group: one after the other, at once or beside the program."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.profiler import record_function

from mpiddp.errors import MpiddpError, PeerLostError
from mpiddp.torch_backend.late_thread import AT_ONCE, LateThread
from mpiddp.torch_internals import (
    NO_BACKWARD,
    find_backward,
    find_is_profiled,
    find_queue_after_backward,
    infer,
    keep_from_compiler,
)

Call = Callable[[], object]
Start = Callable[[], distributed.Work] | None
DESTROYED = "mpiddp: this process group has been destroyed"
FORKED = "mpiddp: a forked child takes no part in collective calls: its parent does"
INTERRUPTED = "mpiddp: this call was interrupted before it began"
WITHIN = (
    "mpiddp: a call in a signal handler, while this thread is in another call, would wait for "
    "itself: have the handler set a flag, and make the call afterwards"
)
KEPT = 8
"""Number of last calls that `CallQueue.list_calls` lists."""
COMPLETE, LEFT, UNDER_WAY = "complete", "left to Gloo", "under way"


@keep_from_compiler
class CallWork(distributed.Work):
    """A call that was begun; what torch's users wait for. The thread that waits makes the call."""

    def __init__(self, queue: CallQueue, call: Call, tensors: list[Any], record: _Record) -> None:
        """``tensors``: the value of its future."""
        super().__init__()
        self.call = call
        self.record = record
        self._queue = queue
        self._tensors = tensors
        self._has_ended = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._gates: list[Any] = []
        """Locks on which other threads wait for the end."""

    def end(self, error: BaseException | None) -> None:
        """The call has ended, with an error or without: tell the threads and futures that wait."""
        with self._lock:
            self._error = error
            self._has_ended = True
            future = self._future
        for gate in self._gates:
            gate.release()
        if future is not None:
            future.set_result(error)

    def add_gate(self) -> Any:
        """A lock that is released at the end; not if the call has ended by now."""
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        return gate

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits at a gate."""
        return bool(self._gates)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once the call has ended. Raises its error; DistNetworkError after ``timeout``."""
        if not self._has_ended:
            self._queue.finish(self, timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._has_ended

    def is_success(self) -> bool:
        return self._has_ended and self._error is None

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
                if self._has_ended:
                    self._future.set_result(self._error)
        if not self._has_ended:
            self._queue.expect_end()
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
_is_profiled = find_is_profiled()


@dataclass(slots=True)
class _Record:
    """One of the last calls."""

    number: int
    name: str
    shapes: list[Any]
    state: str = "not begun"
    work: Any = None
    """A weak reference to Gloo's work, which its caller drops when it is complete."""

    @property
    def is_complete(self) -> bool:
        work = self.work() if self.work is not None else None
        return self.state == COMPLETE or (
            self.state == LEFT and (work is None or work.is_completed())
        )


class CallQueue:
    """Makes the calls of a group in their order, one at a time.

    A thread that waits for a call makes it, and those before it: to hand it to another thread and
    back takes 200 µs and more. A call that no thread waits for is made by the queue's own thread
    after a while.
    """

    def __init__(self, name: str, find_delay: Callable[[], float]) -> None:
        """``find_delay``: seconds after which the queue's thread makes a call that no thread waits
        for."""
        self._name = name
        self._find_delay = find_delay
        self._process = os.getpid()
        self._turn = threading.Lock()
        """Held by the thread that makes calls, until their callbacks have returned."""
        self._maker = 0
        """That thread."""
        self._caller = 0
        """The thread that is in a call, which a signal's handler may interrupt."""
        self._lock = threading.Lock()
        self._waiting: deque[CallWork] = deque()
        """Calls that no thread has begun."""
        self._late_thread = LateThread(self._make_rest, f"mpiddp-{name}")
        self._backward = NO_BACKWARD
        """The last backward pass at whose end calls are made."""
        self._is_closed = False
        self._last: deque[_Record] = deque(maxlen=KEPT)
        self.begun = 0
        """Calls so far, counted from 1; alike on all ranks."""

    def make(
        self, name: str, call: Call, tensors: list[Any], *, waits: bool, start: Start = None
    ) -> distributed.Work:
        """Make the call if ``waits``, else see to it that it is made.

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
        shapes = [getattr(each, "shape", None) for each in tensors]
        record = _Record(self.begun, name, shapes)
        self._last.append(record)
        # A callback of a future makes its calls itself, since it is in the thread of the calls.
        thread = threading.get_ident()
        is_own = thread == self._maker
        if waits and thread == self._caller:
            raise distributed.DistBackendError(WITHIN)
        if start is not None and waits and (is_own or not (self._waiting or self._turn.locked())):
            # Not if the caller has a work: Gloo would make the calls of its callbacks at any time.
            record.state = LEFT
            work = start()
            # Not the work itself, which would keep the tensors' memory.
            record.work = weakref.ref(work)
            return work
        shown = f"mpiddp:{name}" if _is_profiled() else ""
        if waits:
            make = self._call if is_own else self._make_last
            if shown:
                with record_function(shown):
                    make(call, record)
            else:
                make(call, record)
            return _FINISHED
        work = CallWork(self, call, tensors, record)
        if shown:
            with record_function(shown):
                pass  # Its beginning: torch crashes (SIGSEGV) if a range ends in another thread.
        if is_own and thread != self._caller:
            self._make(work)
        else:
            self._queue(work)
        return work

    def finish(self, work: CallWork, seconds: float = 0.0) -> None:
        """Return once the call has ended: make it, and those before it, unless another thread does.

        Raises DistNetworkError if it has not ended after ``seconds``, if they are positive.
        """
        if os.getpid() != self._process:
            raise distributed.DistBackendError(FORKED)
        thread = threading.get_ident()
        if thread == self._caller:
            raise distributed.DistBackendError(WITHIN)
        if thread == self._maker:
            # In a callback of another call.
            self._make_waiting(work)
        elif seconds > 0 or not self._make_waiting_if_free(work):
            # Not in this thread, which could not stop after a timeout, or has not got the turn.
            gate = work.add_gate()
            self._late_thread.set(AT_ONCE)
            if not (work.is_completed() or gate.acquire(timeout=seconds if seconds > 0 else -1)):
                raise distributed.DistNetworkError(f"the call has not ended after {seconds:g} s")

    def expect_end(self) -> None:
        """C++ may wait for a call from now on, without a call of ``wait``."""
        if os.getpid() != self._process:
            raise distributed.DistBackendError(FORKED)
        backward = find_backward()
        if backward == NO_BACKWARD:
            self._late_thread.set(AT_ONCE)
        elif backward != self._backward:
            # As DDP, before whose own work at its end this is done.
            self._backward = backward
            find_queue_after_backward()(self._make_rest)

    def list_calls(self) -> list[dict[str, Any]]:
        """The last calls, with what a `mpiddp.lifeline.stacks.recorded_call.RecordedCall` has."""
        return [
            {
                "number": each.number,
                "name": each.name,
                "shapes": [list(shape) for shape in each.shapes if shape is not None],
                "is_complete": each.is_complete,
                "is_under_way": each.state == UNDER_WAY,
            }
            for each in list(self._last)
        ]

    def close(self) -> None:
        """Return once the calls have ended; but for one that this thread is in, or calls back."""
        thread = threading.get_ident()
        if os.getpid() == self._process and thread not in (self._maker, self._caller):
            self._make_last(int, _Record(0, "close", []))
        self._late_thread.close()
        self._is_closed = True

    def _queue(self, work: CallWork) -> None:
        with self._lock:
            self._late_thread.start()
            self._waiting.append(work)
            is_first = len(self._waiting) == 1
        if is_first:
            self._late_thread.set(self._find_delay())

    def _make_last(self, call: Call, record: _Record) -> None:
        """Make a call after those that are waiting."""
        self._turn.acquire()
        try:
            if self._waiting:
                self._make_waiting()
            self._call(call, record)
        finally:
            self._give_back()

    def _make_rest(self) -> None:
        self._make_waiting_if_free()

    def _make_waiting_if_free(self, last: CallWork | None = None) -> bool:
        """False if another thread has the turn: it makes the waiting calls."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._make_waiting(last)
        finally:
            self._give_back()
        return True

    def _give_back(self) -> None:
        self._turn.release()
        if self._waiting:
            # What other threads began meanwhile, and what is after a call that was waited for.
            is_awaited = any(work.is_awaited for work in list(self._waiting))
            self._late_thread.set(AT_ONCE if is_awaited else self._find_delay())

    def _make_waiting(self, last: CallWork | None = None) -> None:
        """Make the waiting calls, up to ``last``, in the thread with the turn."""
        before, self._maker = self._maker, threading.get_ident()
        work = None
        try:
            while self._waiting and not (last is not None and last.is_completed()):
                work = self._waiting.popleft()
                if not self._waiting:
                    self._late_thread.cancel()
                self._make(work)
        finally:
            self._maker = before
            if work is not None and not work.is_completed():
                work.end(distributed.DistBackendError(INTERRUPTED))
        if last is not None and not last.is_completed():
            last.end(distributed.DistBackendError(INTERRUPTED))

    def _make(self, work: CallWork) -> None:
        error: BaseException | None = None
        # The caller's mode, in which a result may not be written, need not be this thread's.
        with infer(True):
            try:
                self._call(work.call, work.record)
            except BaseException as caught:  # It is raised in the thread that waits.
                error = caught
        # Callbacks may make calls, which come before those that the program makes meanwhile.
        work.end(error)

    def _call(self, call: Call, record: _Record) -> None:
        self._caller = threading.get_ident()
        try:
            _translate(call, record)
        finally:
            self._caller = 0


def _translate(call: Call, record: _Record) -> None:
    """Make the call; raise what torch's users expect if it fails."""
    record.state = UNDER_WAY
    try:
        call()
        record.state = COMPLETE
    except PeerLostError as error:
        raise distributed.DistNetworkError(f"mpiddp: {error}") from error
    except MpiddpError as error:
        raise distributed.DistBackendError(f"mpiddp: {error}") from error
    finally:
        if record.state != COMPLETE:
            record.state = "failed"
