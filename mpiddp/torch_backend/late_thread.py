"""A thread that does work which no other thread has done in time."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable
from functools import cache

from mpiddp.process.background import call_at_exit

MONOTONIC, CLOSES_ON_EXEC = 1, 0o2000000
"""CLOCK_MONOTONIC and TFD_CLOEXEC of Linux."""
AT_ONCE = 1e-9
_library = ctypes.PyDLL(None, use_errno=True)
_create, _set = _library.timerfd_create, _library.timerfd_settime
_set.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@cache
def _pack(seconds: float) -> bytes:
    """The kernel's ``itimerspec`` of a timer that goes off once; never for 0."""
    return struct.pack("4l", 0, 0, *divmod(round(seconds * 1e9), 10**9))


class LateThread:
    """Calls ``work`` in its own thread, some time after ``set``, unless ``cancel`` is called first.

    A timer of the kernel wakes it (timerfd): to set one takes a microsecond, where to wake a thread
    at once takes some 50, and takes a core and the interpreter's lock from the thread that works.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        """``work`` is also done when the interpreter ends, if the thread was started."""
        self._work = work
        self._name = name
        self._process = os.getpid()
        self._is_closed = False
        self._timer = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it is there; before ``set``. Raises OSError, RuntimeError."""
        if self._thread is not None:
            return
        self._timer = _create(MONOTONIC, CLOSES_ON_EXEC)
        if self._timer < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"no timer for thread {self._name}: {os.strerror(code)}")
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            os.close(self._timer)
            self._timer = -1
            raise
        self._thread = thread
        close = weakref.WeakMethod(self.close)
        call_at_exit(lambda: (found := close()) and found())

    def set(self, seconds: float) -> None:
        """Have the work done after this time, in place of what was set before.

        After ``close`` the calling thread does it at once.
        """
        if self._is_closed:
            self._work()
            return
        _set(self._timer, 0, _pack(seconds), None)

    def cancel(self) -> None:
        """Nothing is left to do."""
        _set(self._timer, 0, _pack(0.0), None)

    def close(self) -> None:
        """Have the work done once more, and end the thread. A forked child has no such thread."""
        thread = self._thread
        if thread is None or self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        while thread is not threading.current_thread() and thread.is_alive():
            # Another thread's ``cancel`` may come between the two.
            _set(self._timer, 0, _pack(AT_ONCE), None)
            thread.join(0.1)

    def _run(self) -> None:
        while not self._is_closed:
            os.read(self._timer, 8)
            self._work()
        self._work()
        # Another file may have its number next.
        timer, self._timer = self._timer, -1
        os.close(timer)
