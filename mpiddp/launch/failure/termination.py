"""The last words and the end of a process; none of it may hang."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from mpiddp import environment
from mpiddp.launch.mpi import mpi
from mpiddp.process.background import BackgroundCall
from mpiddp.process.streams.console import CONSOLE_SECONDS

ABORT_SECONDS = 5.0
"""How long MPI_Abort may take to end this process."""
HURRY_SECONDS = 0.4
"""Timeout of the console, and of MPI_Abort, if all ranks leave by themselves."""


class ReportedExit(SystemExit):
    """Everything was reported already; only the exit code is left to carry out of the program."""


def is_interactive() -> bool:
    """Whether somebody types commands into this process, or will once the script has ended.

    In IPython or a Jupyter kernel, in Python's own interpreter, in ``code.interact``, and with
    ``-i`` or PYTHONINSPECT, which has an effect on a terminal only.
    """
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return True
    inspects = sys.flags.inspect or os.environ.get(environment.PYTHONINSPECT)
    return bool(inspects) and os.isatty(0)


def may_call_mpi() -> bool:
    """Whether this thread may: below MPI_THREAD_MULTIPLE the main thread may be in MPI already."""
    from mpi4py import MPI

    is_main = threading.current_thread() is threading.main_thread()
    return is_main or MPI.Query_thread() >= MPI.THREAD_MULTIPLE


def flush_output() -> None:
    """Raises OSError if a file system is full."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(ValueError, AttributeError):  # Closed, or None.
            stream.flush()


def end_process(
    code: int,
    *,
    is_shared: bool,
    has_mpi: bool,
    drain: Callable[[], None],
    is_hurried: bool = False,
) -> NoReturn:
    """End this process with ``code``, and the job if other processes belong to it.

    ``drain`` returns when what was printed is written. ``is_hurried``: all processes of the job end
    by themselves, and are killed soon. A process that is alone ends as Python ends, by an
    exception: functions registered for the exit are run.
    """

    def flush() -> None:
        flush_output()
        drain()

    is_stuck = is_shared or threading.current_thread() is not threading.main_thread()
    try:
        try:
            BackgroundCall(flush).finish(HURRY_SECONDS if is_hurried else CONSOLE_SECONDS)
        except BaseException:
            # The interpreter would wait for its streams, or give its own exit code.
            is_stuck = True
        if has_mpi and is_shared:
            abort(code, HURRY_SECONDS if is_hurried else ABORT_SECONDS)
    finally:
        if is_stuck:
            os._exit(code)
        raise ReportedExit(code)


def abort(code: int, seconds: float = ABORT_SECONDS) -> None:
    """MPI_Abort, and the end of this process even if that does not return in ``seconds``.

    On a node that is cut off, Slurm's daemon waits for minutes to pass the word on. MPI is called
    without the interpreter's lock, which mpi4py would hold, so that the other thread can run.
    """
    from mpi4py import MPI

    def leave() -> None:
        time.sleep(seconds)
        os._exit(code)

    try:
        threading.Thread(target=leave, name="mpiddp-leave", daemon=True).start()
    except RuntimeError:  # The interpreter is shutting down: Python 3.12 starts no threads then.
        end_soon(seconds)
    if mpi.has_ended(MPI):
        os._exit(code)  # The launcher and the companions see it.
    size = MPI._sizeof(MPI.Comm)
    handle = {4: ctypes.c_int, 8: ctypes.c_void_p}[size](MPI._handleof(MPI.COMM_WORLD))
    ctypes.CDLL(MPI.__file__).MPI_Abort(handle, ctypes.c_int(code))


def end_soon(seconds: float) -> None:
    """Have the kernel end this process, if no thread can. Call it on the main thread."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
