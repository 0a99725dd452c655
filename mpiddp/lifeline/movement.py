"""Whether the main thread of this process moves.

It does not while it is inside one call that waits, such as a collective, however that waits; nor
while it runs no Python at all, inside any other C call. If a program tells which step it makes,
it does not move while that is the same step.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType

from mpiddp.lifeline.progress import Progress
from mpiddp.lifeline.stacks.dump import LIBRARY, find_owner
from mpiddp.lifeline.stacks.positions import find_wait

LOOKS = 10
"""How many looks there are at least in the time after which a job has stalled."""
LONGEST_PERIOD = 1.0
"""Seconds between two of them."""
WAITING = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
    "torch/utils/data/dataloader.py", "mpiddp/collectives/", "mpiddp/collective_calls.py",
    "mpiddp/launch/mpi/control.py", "/multiprocessing/", "/concurrent/futures/", "/threading.py",
    "/queue.py", "/subprocess.py", "/selectors.py",
)  # fmt: skip
"""Calls into these wait for somebody."""


class Movement:
    """Notes in ``progress``, from a separate thread, whether the main thread has moved, and whether
    it is in a collective, or in a pass that may have called one."""

    def __init__(
        self, progress: Progress, seconds: float, find_step: Callable[[], int | None] = lambda: None
    ) -> None:
        """``seconds``: after which the job has stalled. ``find_step``: the step that is being made,
        None between steps."""
        self._progress = progress
        self._find_step = find_step
        self._step: int | None = None
        self._period = min(seconds / LOOKS, LONGEST_PERIOD)
        self._main = threading.main_thread().ident or 0
        self._has_run = True
        self._answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._run_in_main)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpiddp-movement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._progress.note_collective(False)

    def has_moved(self) -> bool:
        """Whether the main thread has moved since the last call."""
        before, self._step = self._step, self._find_step()
        if self._step is not None:
            return self._step != before
        has_run, self._has_run = self._has_run, False
        if has_run:
            # The interpreter makes this call from the main thread as soon as that runs Python.
            ctypes.pythonapi.Py_AddPendingCall(self._answer, None)
        frame = sys._current_frames().get(self._main)
        waiting = find_waiting(frame) if frame is not None else None
        if waiting is None:
            return has_run
        # A mark on the frame of this call: a second call of the same function has a new frame.
        # Nobody calls it but a debugger.
        has_moved = waiting.f_trace is not _mark
        waiting.f_trace = _mark
        return has_moved

    def is_in_collective(self) -> bool:
        """Whether the main thread is in a call that waits, or may wait, for other ranks."""
        files = list_library_files(sys._current_frames().get(self._main))
        return find_wait(files) is not False

    def _run_in_main(self, _: object) -> int:
        self._has_run = True
        return 0

    def _watch(self) -> None:
        while not self._stop.wait(self._period):
            if self.has_moved():
                self._progress.note_move()
            self._progress.note_collective(self.is_in_collective())


def _mark(*_: object) -> None:
    return None


def find_waiting(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of the call that waits, on a stack from its innermost frame on.

    None if the script, or something else, works.
    """
    found = None
    while frame is not None and _find_owner(frame.f_code.co_filename) == LIBRARY:
        # What the interpreter calls at its end may be work.
        is_end = frame.f_code.co_name == "_shutdown"
        if not is_end and any(part in frame.f_code.co_filename for part in WAITING):
            found = frame
        frame = frame.f_back
    return found


def list_library_files(frame: FrameType | None) -> list[str]:
    """The files of a stack's innermost frames, up to the first that is no library's."""
    found = []
    while frame is not None and _find_owner(frame.f_code.co_filename) == LIBRARY:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    return found


_find_owner = cache(find_owner)
