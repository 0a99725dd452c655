"""Bring MPI up: load the library, compare it with the launcher, initialise it.

MPI_Init is called through ctypes on the loaded library. mpi4py would hold the interpreter's lock
throughout; ctypes releases it, so that torch can be imported meanwhile and a deadline can fire.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from mpiddp import environment
from mpiddp.errors import LaunchError
from mpiddp.launch.compatibility import check_gpu_support, check_library
from mpiddp.launch.launcher import Launcher

if TYPE_CHECKING:
    from mpi4py import MPI

FIRST_PAUSE = 2e-5
LONGEST_PAUSE = 2e-3


def load(launcher: Launcher | None) -> Any:
    """Import ``mpi4py.MPI`` without initialising it and check that it fits the launcher.

    Returns the module. Raises LaunchError when there is no MPI library, or when it cannot work
    with the process manager that this launcher offers.
    """
    check_gpu_support()
    try:
        import mpi4py
    except ImportError:
        raise LaunchError(
            "mpi4py is not installed, so the ranks cannot find each other: "
            "pip install mpi4py (and 'mpiddp[mpi]' where no MPI library is installed)"
        ) from None
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LaunchError(
            f"mpi4py found no MPI library that it can load ({reason}): load the MPI module of "
            "this cluster, or pip install 'mpiddp[mpi]', or set MPI4PY_LIBMPI to the library"
        ) from None
    if launcher is not None and not MPI.Is_initialized():
        check_library(MPI.Get_library_version(), launcher)
    return MPI


def initialize(MPI: Any) -> bool:
    """Call MPI_Init_thread(MPI_THREAD_MULTIPLE) without holding the interpreter's lock.

    Returns whether this call initialised MPI; False if it was up already. Errors of MPI calls
    become exceptions. Processes started from here on do not initialise MPI on import.
    """
    if MPI.Is_finalized():
        raise LaunchError(
            "MPI was shut down earlier in this process and cannot start again: "
            "use one mpiddp.init() for the whole program"
        )
    initialized_here = not MPI.Is_initialized()
    if initialized_here:
        library = ctypes.CDLL(MPI.__file__)
        provided = ctypes.c_int()
        code = library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
        if code != MPI.SUCCESS:
            raise LaunchError(f"MPI_Init failed with MPI's error code {code}")
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    # Spawned DataLoader workers inherit the launcher's variables; one that ran MPI_Init would
    # die or join a job that does not expect it.
    os.environ[environment.MPI4PY_INITIALIZE] = "0"
    return initialized_here


def wait(request: MPI.Request, seconds: float = float("inf")) -> bool:
    """Wait for an MPI request while sleeping in between, so that waiting costs no core.

    MPI's own waits spin. During start-up the cores are needed for importing torch, and with
    more ranks than cores a spinning rank keeps the one that it waits for from running.

    Returns whether the request was completed within ``seconds``.
    """
    end = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while not request.Test():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True
