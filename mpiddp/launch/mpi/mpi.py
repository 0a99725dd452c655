"""Bring MPI up: load the library, compare it with the launcher, initialise it.

MPI_Init is called through ctypes on the loaded library. mpi4py would hold the interpreter's lock
throughout; ctypes releases it, so that torch can be imported meanwhile and a deadline can fire.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mpiddp import environment
from mpiddp.errors import LaunchError
from mpiddp.launch.launcher.exported_variables import set_meanwhile
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi import intel_mpi
from mpiddp.launch.mpi.compatibility import (
    check_gpu_support,
    check_host,
    check_library,
    check_memory,
    check_user,
    library_path,
    mapped_files,
)
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.mpi.slurm_pmi import shortened_values
from mpiddp.launch.network.mpi_interfaces import told_interfaces

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

OPEN_MPI_5 = r"Open MPI v([5-9]|\d\d)"
"""Matches what the library says of its version, for 5.0 and later."""
LEAVING_SECONDS = 0.2
"""How much later than the first the last rank may leave MPI_Init."""
LENGTH_BYTES = 8
ENVELOPE_BYTES = 4096
"""What a broadcast sends at once; longer values take more messages."""
LONGEST_MESSAGE = 1 << 28
"""Bytes of one collective; longer values take several. MPI counts in 32 bits, and an all-gather
counts the bytes of all ranks together."""


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
            "pip install mpi4py (and 'mpiddp[mpi]' if no MPI library is installed)"
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
        version = MPI.Get_library_version()
        check_library(version, launcher)
        check_host(version, launcher)
        check_user(version, launcher)
        check_memory(version, launcher)
        _hide_enclosing_step(launcher)
    return MPI


def _hide_enclosing_step(launcher: Launcher) -> None:
    """Forget process managers that serve the Slurm step in which the launcher was started.

    MPICH refuses to start between two.
    """
    others = environment.MANAGER_SIGNS.keys() - launcher.process_managers
    for name in (name for manager in others for name in environment.MANAGER_SIGNS[manager]):
        os.environ.pop(name, None)


def initialize(MPI: Any, launcher: Launcher | None) -> tuple[str, ...]:
    """Call MPI_Init_thread(MPI_THREAD_MULTIPLE) without holding the interpreter's lock.

    Errors of MPI calls become exceptions. ``launcher`` started this process. Returns the interfaces
    to which MPI's TCP transports were confined; none if they choose.
    """
    if has_ended(MPI):
        raise LaunchError(
            "MPI was shut down earlier in this process and cannot start again: "
            "use one mpiddp.init() for the whole program"
        )
    interfaces: tuple[str, ...] = ()
    if not MPI.Is_initialized():
        library = ctypes.CDLL(MPI.__file__)
        provided = ctypes.c_int()
        version = MPI.Get_library_version()
        with (
            told_interfaces(version, library_path(), launcher) as interfaces,
            shortened_values(version, launcher),
            set_meanwhile(intel_mpi.find_settings(version, library_path(), launcher)),
        ):
            code = library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
        if code != MPI.SUCCESS:
            raise LaunchError(f"MPI_Init failed with MPI's error code {code}")
        # As mpi4py does; what a script has chosen since stays.
        for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
            communicator.Set_errhandler(MPI.ERRORS_RETURN)
        _let_others_leave(version, MPI.COMM_WORLD.Get_size())
        if not re.match(OPEN_MPI_5, version):
            _keep_workers_out()
    return interfaces


def _keep_workers_out() -> None:
    """Let workers that multiprocessing spawns import mpi4py: most MPIs would end them in MPI_Init.

    They inherit the launcher's variables. Open MPI 5 takes them for the rank that has started
    them, so that they can ask for its number. Other programs, such as an mpirun, are left alone.
    """
    from multiprocessing import util  # Not above: --help does without it.

    spawn = util.spawnv_passfds

    def start(*arguments: Any) -> Any:
        with set_meanwhile({environment.MPI4PY_INITIALIZE: "0"}):
            return spawn(*arguments)

    vars(util)["spawnv_passfds"] = start


def add_own_variables() -> None:
    """Set the environment variables that MPI_Init adds, before threads read the environment.

    And have UCX, which reads it when MPI is loaded, leave SIGHUP alone.

    glibc before 2.41 moves its table when a variable is added, and a thread in getenv reads freed
    memory then: torch's import crashed so, now and then. What exists already is replaced in place.
    As when MPI sets them, ``os.environ`` does not show them.
    """
    found = {**dict.fromkeys(environment.NO_BACKTRACES, "1"), environment.UCX_DEBUG_SIGNAL: "0"}
    if mode := os.environ.get(environment.PMIX_SECURITY_MODE):
        found[environment.PMIX_SECURITY] = mode
    for name in found.keys() - os.environ.keys():
        os.putenv(name, found[name])


class KeptMpi:
    """Keeps MPI up for a session in a script that starts and ends MPI itself.

    Until ``close``, ``MPI.Init`` of the script finds MPI started, and its ``MPI.Finalize`` does
    nothing yet: the session has messages to send until its end.
    """

    def __init__(self, MPI: Any, *, is_own: bool) -> None:
        """``MPI``: mpi4py's module, initialised; ``is_own``: by the session."""
        self._module = MPI
        self._is_own, self._is_left = is_own, False
        is_finalized = MPI.Is_finalized
        replaced = {
            "Init": lambda: None,
            "Init_thread": self._find_thread_level,
            "Finalize": self._leave,
            "Is_finalized": lambda: self._is_left or is_finalized(),
        }
        self._before = {name: getattr(MPI, name) for name in replaced}
        vars(MPI).update(replaced)

    def _find_thread_level(self, required: int | None = None) -> Any:
        return self._module.Query_thread()

    def _leave(self) -> None:
        self._is_left = True

    def release(self) -> None:
        """Give the script its functions back."""
        vars(self._module).update(self._before)

    def close(self) -> None:
        """End MPI if the session has started it, or the script has done with it."""
        self.release()
        if (self._is_own or self._is_left) and not has_ended(self._module):
            finalize(self._module)


def finalize(MPI: Any) -> None:
    """Call MPI_Finalize without holding the interpreter's lock, so that a deadline can fire."""
    ctypes.CDLL(MPI.__file__).MPI_Finalize()


def has_ended(MPI: Any) -> bool:
    """Whether MPI_Finalize was called, by whomever: a library of the script's may have done so."""
    flag = ctypes.c_int()
    ctypes.CDLL(MPI.__file__).MPI_Finalized(ctypes.byref(flag))
    return bool(flag.value)


def leave_alone(MPI: Any) -> None:
    """End MPI in a process that is alone in it, so that nothing is left of it.

    No launcher's daemon cleans up after it, and Open MPI 5 leaves its segment of shared memory.
    """
    segments = [path for path in mapped_files() if Path(path).name.startswith("sm_segment.")]
    finalize(MPI)
    for path in segments:
        Path(path).unlink(missing_ok=True)


def _let_others_leave(version: str, size: int) -> None:
    """Wait a moment before the first message, if the last rank may still be in MPI_Init.

    Open MPI 5 crashes there when a rank that has left it a little earlier sends
    (open-mpi/ompi#12495, #13559): 11 of 321 launches of 16 ranks on two cores without the pause,
    none of 68 with it; PMIx's own fence instead left 8 of 203. A pause makes the crash rarer and
    excludes nothing. torch is imported meanwhile.
    """
    if size > 1 and re.match(OPEN_MPI_5, version):
        time.sleep(LEAVING_SECONDS)


def wait(request: MPI.Request, seconds: float = float("inf")) -> bool:
    """Whether an MPI request is completed within ``seconds``; sleeps while it waits."""
    return wait_until(request.Test, seconds)


class SleepingCommunicator:
    """Collectives over a communicator that sleep while they wait, as `wait` does.

    Beside ranks that sleep in their collectives, one that spins in its own keeps the very ranks
    from their cores that it waits for. Named as mpi4py's; the communicator stays its owner's.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        wait: Callable[[MPI.Request], object] = wait,
        longest: int = LONGEST_MESSAGE,
    ) -> None:
        """``wait`` waits for a request; what it raises is not caught.

        ``longest``: bytes of one message, the same on all ranks.
        """
        self._communicator = communicator
        self._wait = wait
        self._longest = longest

    def bcast(self, value: T) -> T:
        """Rank 0's ``value``; any object that pickle takes."""
        from mpi4py import MPI

        is_sender = self._communicator.Get_rank() == 0
        content: bytes | bytearray = pickle.dumps(value) if is_sender else b""
        room = ENVELOPE_BYTES - LENGTH_BYTES
        start = len(content).to_bytes(LENGTH_BYTES, "little") + content[:room]
        envelope = bytearray(start.ljust(ENVELOPE_BYTES, b"\0"))
        self._wait(self._communicator.Ibcast([envelope, MPI.BYTE]))
        length = int.from_bytes(envelope[:LENGTH_BYTES], "little")
        if not is_sender:
            content = envelope[LENGTH_BYTES:][:length].ljust(length, b"\0")
        view = memoryview(content)
        for first in range(room, length, self._longest):
            part = view[first : first + self._longest]
            self._wait(self._communicator.Ibcast([part, MPI.BYTE]))
        if is_sender:
            return value
        received: T = pickle.loads(view)
        return received

    def allgather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank; any objects that pickle takes."""
        contents, ends = self._collect(value, self._communicator.Iallgatherv)
        return _load(contents, ends)

    def gather(self, value: T) -> list[T] | None:
        """Every rank's ``value``, by rank, on rank 0; None on the others."""
        is_receiver = self._communicator.Get_rank() == 0
        contents, ends = self._collect(value, self._communicator.Igatherv, is_receiver=is_receiver)
        return _load(contents, ends) if is_receiver else None

    def _collect(
        self, value: object, begin: Callable[[Any, Any], MPI.Request], *, is_receiver: bool = True
    ) -> tuple[bytearray, list[int]]:
        """All ranks' values as pickles, one behind the other, and where each one ends.

        ``begin`` gathers parts of different lengths. They travel together, ``longest`` bytes of
        the whole at a time; the bytes stay empty if ``is_receiver`` is false.
        """
        from mpi4py import MPI

        content = memoryview(pickle.dumps(value))
        length = array.array("q", [len(content)])
        lengths = array.array("q", [0] * self._communicator.Get_size())
        self._wait(self._communicator.Iallgather([length, MPI.INT64_T], [lengths, MPI.INT64_T]))
        ends = list(itertools.accumulate(lengths))
        contents = bytearray(ends[-1] if is_receiver else 0)
        own = ends[self._communicator.Get_rank()] - len(content)
        for first in range(0, ends[-1], self._longest):
            # Of each rank's bytes so many belong to this message; they follow one another.
            borders = [min(max(first, end), first + self._longest) for end in (0, *ends)]
            counts = [end - start for start, end in itertools.pairwise(borders)]
            part = content[max(0, first - own) : max(0, first + self._longest - own)]
            target = memoryview(contents)[first : first + self._longest]
            self._wait(
                begin([part, MPI.BYTE], [target, (counts, None), MPI.BYTE] if is_receiver else None)
            )
        return contents, ends

    def Allreduce(self, mine: Any, result: Any, op: MPI.Op) -> None:  # noqa: N802 - mpi4py's name
        """Reduce buffers of all ranks into ``result`` of every rank."""
        self._wait(self._communicator.Iallreduce(mine, result, op=op))


def _load(contents: bytearray, ends: Sequence[int]) -> list[Any]:
    """The values of pickles that lie one behind the other."""
    view = memoryview(contents)
    return [pickle.loads(view[start:end]) for start, end in itertools.pairwise((0, *ends))]


def find_thread_limit() -> str:
    """MPI's level of thread support in this process; empty for MPI_THREAD_MULTIPLE.

    Below that, two threads must not call MPI at the same time. The level depends on how MPI was
    built, or on the program, if it has initialised MPI itself.
    """
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    }
    return names.get(MPI.Query_thread(), "")
