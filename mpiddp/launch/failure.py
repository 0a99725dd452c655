"""The one way out: any rank's failure ends the job, once, with its exit code.

An exception in one rank leaves the others waiting for as long as nobody tells them. So every
failure comes here: the ranks agree who speaks, that one prints one report, and MPI_Abort ends
the job with the documented code (`mpiddp.errors`).

Who speaks depends on how far the job has come. Before MPI is up it is the launcher's rank 0;
a failure that only this process knows of (a bad option, a failed import) is first carried into
MPI_Init, so that nobody waits for a rank that has gone. During start-up the ranks agree over MPI
and the lowest failing one speaks. Later the first to claim it in the store does, and whoever
gets no answer within half a second.

In a notebook errors are raised and nothing is aborted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpiddp.errors import (
    SUCCESS,
    AloneError,
    LaunchError,
    PeerLostError,
    UnreachableError,
)
from mpiddp.launch import mpi
from mpiddp.launch.deadline import Watch
from mpiddp.launch.launcher import Launcher, find_launcher, hosts_of_step
from mpiddp.launch.node_claim import claim_node
from mpiddp.launch.outcome import Outcome, outcome_path, write_outcome
from mpiddp.launch.report import (
    describe_error,
    exit_code,
    has_own_hook,
    has_trace,
    is_peer_loss,
    visible_part,
)
from mpiddp.launch.roll_call import (
    ROLL_CALL_SECONDS,
    Whereabouts,
    call_the_roll,
    describe_missing,
    describe_silent_init,
    find_missing,
    find_position,
)
from mpiddp.launch.silence import find_silent_hosts
from mpiddp.launch.speaker import ANSWER_SECONDS, agree_on_failure, claim_report

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.launch.world import Roster, World

PATIENCE_SECONDS = 10.0
"""How long a rank that leaves the speaking to another one waits to be ended by it."""
FORWARD_SECONDS = 0.2
"""How long a launcher may take to read a report: MPICH's forgets the rest when a rank aborts."""
ABORT_SECONDS = 5.0
"""How long MPI_Abort may take to end this process."""
CARRY_SECONDS = 60.0
"""How long a failure that came before MPI waits for the others in MPI_Init."""
SPEAKERS = 4
"""How many ranks may have to step in for each other where nobody can be asked."""


class _Left(SystemExit):
    """Everything was said already; only the exit code is left to carry out of the program."""


class WayOut:
    """The way out of one process. As a context manager it catches every exception of its body.

    `startup.start` tells it, as start-up proceeds, what it may use to reach the other ranks.
    """

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self.world: World | None = None
        self.roster: Roster | None = None
        """On rank 0 only."""
        self.communicator: MPI.Intracomm | None = None
        """Used by nothing but failure, so that its messages meet no others."""
        self.store: Any = None
        self.run_directory: Path | None = None
        self.step: int | None = None
        """Step of training, for messages and outcome.json."""
        self.attempt = 0
        self.starting = True
        """Whether the ranks still agree at the end of each phase of start-up."""
        self.runs_script = False
        """Whether somebody's script runs inside: its exceptions and exit codes stay plain."""
        self.hidden_files: tuple[str, ...] = ()
        """Source files whose frames are left out at the top of a traceback."""
        self.seconds = 300.0
        """Time limit of each phase of start-up."""
        self._waiting = False
        self._process = os.getpid()
        self._leaving = threading.Lock()
        self._node_claim: socket.socket | None = None
        self._leaver: int | None = None
        """The thread that is ending this process."""

    def __enter__(self) -> WayOut:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and exit_code(error) != SUCCESS:
            self.fail(error)

    # Ending

    def fail(self, error: BaseException, *, told: bool = False) -> None:
        """End the job because of ``error``; ``told``: its report has been printed already.

        Returns only where the error is to rise further: in a notebook, in a forked child, and
        for an exit that was reported before.
        """
        if isinstance(error, _Left) or not self._is_in_charge():
            return
        code = self._code(error)
        self._begin_leaving(code)
        if self._speaks(error):
            self._report(error, told=told)
        else:
            self._log(self.describe(error))
            # Without MPI there is nobody who could end this process.
            time.sleep(PATIENCE_SECONDS if self.communicator is not None else 0.0)
        if self._node_claim is not None:
            # The other processes of this node must find the claim taken.
            time.sleep(2 * ANSWER_SECONDS)
        self._end(code)

    def _is_in_charge(self) -> bool:
        """Whether ending the job is up to this process: not a child's, nor a lone notebook's."""
        return os.getpid() == self._process and (self._is_shared() or not in_notebook())

    def _begin_leaving(self, code: int) -> None:
        """Let one thread, once, end this process; the others stop here."""
        if not self._leaving.acquire(blocking=False):
            if self._leaver == threading.get_ident():
                self._end(code)
            _sleep_for_ever()
        self._leaver = threading.get_ident()
        if threading.current_thread() is threading.main_thread():
            # A second Ctrl-C must not stop the first one's report half-way.
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave(self, code: int) -> NoReturn:
        """End this process with ``code``: everything was said, and MPI is closed."""
        raise _Left(code)

    def finish(self) -> None:
        """Write the outcome of a run that is done (exit code 0). Called by rank 0."""
        self._write_outcome(SUCCESS, "done")

    def describe(self, error: BaseException) -> str:
        """The report of ``error``: one line for mistakes of the user's, else a traceback."""
        return describe_error(
            error,
            self._place(),
            is_shared=self._is_shared(),
            lost_peer=self._is_peer_loss(error),
            hidden_files=self.hidden_files,
        )

    def _place(self) -> str:
        if not self._is_shared():
            return ""
        rank, hostname = self._who()
        size = self.world.size if self.world is not None else None
        if size is None and self.launcher is not None:
            size = self.launcher.size
        of = f" of {size}" if size is not None else ""
        step = f" at step {self.step}" if self.step is not None else ""
        return f"rank {rank}{of} on {hostname}{step}: "

    def _who(self) -> tuple[int, str]:
        """Rank and host, from the launcher where MPI has not told yet."""
        if self.world is not None:
            return self.world.rank, self.world.hostname
        return self.launcher.rank if self.launcher is not None else 0, socket.gethostname()

    def _is_shared(self) -> bool:
        """Whether other processes belong to the job."""
        if self.world is not None:
            return self.world.size > 1
        return self.launcher is not None and (self.launcher.size or 2) > 1

    def _is_peer_loss(self, error: BaseException) -> bool:
        return not self.runs_script and self._is_shared() and is_peer_loss(error)

    def _code(self, error: BaseException) -> int:
        return PeerLostError.exit_code if self._is_peer_loss(error) else exit_code(error)

    def _report(self, error: BaseException, *, told: bool = False) -> None:
        # The console first: files may be on a system that has stopped answering.
        _flush(sys.stdout)
        report = "" if told else self.describe(error)
        if self.runs_script and has_trace(error) and has_own_hook():
            trace = visible_part(error.__traceback__, self.hidden_files)
            sys.excepthook(type(error), error, trace)
        else:
            # One write, so that no other rank's output falls in between.
            sys.stderr.write(report)
        _flush(sys.stderr)
        self._log(report)
        self._write_outcome(self._code(error), f"{type(error).__name__}: {error}".rstrip(": "))
        if self._is_shared():
            time.sleep(FORWARD_SECONDS)

    def _end(self, code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        if self.communicator is not None and self._is_shared():
            _abort(code)
        if self._is_shared() or threading.current_thread() is not threading.main_thread():
            os._exit(code)
        raise _Left(code)

    # Who speaks

    def _speaks(self, error: BaseException) -> bool:
        if self.communicator is None:
            self._carry_into_mpi(error)
        if self.communicator is None:
            return self._speaks_without_mpi(error)
        if not self._is_shared():
            return True
        if self.starting:
            failed = agree_on_failure(self.communicator, self._code(error), ANSWER_SECONDS)
            return failed is None or failed[0] == self.communicator.Get_rank()
        return self.store is None or claim_report(self.store)

    def _speaks_without_mpi(self, error: BaseException) -> bool:
        """Nobody can be asked: the launcher's rank 0 speaks, and one process of other nodes.

        A pair of library and launcher that do not fit is found by all ranks alike, so that
        rank 0's word is enough.
        """
        if self.launcher is None:
            return True
        if self.launcher.rank != 0:
            time.sleep(ANSWER_SECONDS)
        self._node_claim = claim_node()
        return self.launcher.rank == 0 or (
            self._node_claim is not None and not isinstance(error, AloneError)
        )

    def _carry_into_mpi(self, error: BaseException) -> None:
        """Join MPI with a failure that came before it, where MPI can be joined."""
        try:
            self.launcher = find_launcher()
        except LaunchError:
            return
        if isinstance(error, LaunchError) or self.launcher is None or not self._is_shared():
            return

        def give_up(_: str) -> None:
            self._report(error)
            self._end(self._code(error))

        watch = Watch(min(self.seconds, CARRY_SECONDS), give_up)
        try:
            with watch.phase("MPI"):
                module = mpi.load(self.launcher)
                mpi.initialize(module, self.launcher)
                self.join(module.COMM_WORLD)
        except Exception:  # What failed first is what the user must read.
            return
        finally:
            watch.close()

    def join(self, world_communicator: MPI.Intracomm) -> None:
        """Take a communicator for failure's own messages. Collective."""
        self.communicator = world_communicator.Dup()

    def settle(self, error: BaseException | None) -> None:
        """End a phase of start-up: returns where no rank failed in it, ends the job otherwise."""
        if error is not None:
            self.fail(error)
            raise error
        if self.communicator is None:
            return
        self._waiting = True
        try:
            failed = agree_on_failure(self.communicator, None, float("inf"))
        finally:
            self._waiting = False
        if failed is not None:
            # Another rank speaks, and ends this one.
            self._begin_leaving(failed[1])
            time.sleep(PATIENCE_SECONDS)
            self._end(failed[1])

    # Deadlines

    def expire(self, phase: str) -> None:
        """End the job because a phase of start-up outlasted its time. Runs on Watch's thread."""
        if not self._is_in_charge():
            return
        code = UnreachableError.exit_code
        self._begin_leaving(code)
        if self.communicator is None:
            text = self._explain_silent_init()
        else:
            text = self._call_the_roll(phase)
        if text is not None:
            self._report(UnreachableError(text))
        else:
            time.sleep(PATIENCE_SECONDS)
        if self._node_claim is not None:
            # The other processes of this node must find the claim taken.
            time.sleep(SPEAKERS * ANSWER_SECONDS)
        self._end(code)

    def _explain_silent_init(self) -> str | None:
        """Inside MPI_Init nobody knows who is missing, only how many were expected.

        Rank 0 speaks at once. If it is the one that is stuck, the next one steps in, and so on.
        """
        rank = self.launcher.rank if self.launcher is not None else 0
        time.sleep(min(rank, SPEAKERS) * ANSWER_SECONDS)
        if rank >= SPEAKERS:
            return None
        # Under a bare srun one that ends does not end the others.
        self._node_claim = claim_node()
        if self._node_claim is None:
            return None
        hosts = hosts_of_step()
        silent = find_silent_hosts(hosts)
        return describe_silent_init(self.launcher, self.seconds, len(hosts), silent)

    def _call_the_roll(self, phase: str) -> str | None:
        from mpi4py import MPI

        communicator = self.communicator
        assert communicator is not None
        rank = communicator.Get_rank()
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            # The main thread is inside MPI, and this library takes one thread at a time.
            return describe_missing(phase, self.seconds, {}, self._describe_rank)
        answers = call_the_roll(communicator, Whereabouts(phase, self._waiting, find_position()))
        if answers is not None:
            missing = find_missing(answers, communicator.Get_size())
            return describe_missing(phase, self.seconds, missing, self._describe_rank)
        # Rank 0 ends the job while this sleeps, unless it is missing itself.
        time.sleep(ROLL_CALL_SECONDS + min(rank, 2 * SPEAKERS) * ANSWER_SECONDS)
        return describe_missing(phase, self.seconds, {0: "no answer"}, self._describe_rank)

    def _describe_rank(self, rank: int) -> str:
        if self.roster is not None:
            return self.roster.describe(rank)
        if rank == 0 and self.world is not None:
            return f"rank 0 on {self.world.master_hostname}"
        return f"rank {rank}"

    # Files

    def _log(self, report: str) -> None:
        if self.run_directory is None:
            return
        try:
            folder = self.run_directory / "logs"
            folder.mkdir(exist_ok=True)
            with (folder / f"rank-{self._who()[0]}.log").open("a") as log:
                log.write(report)
        except OSError:
            return  # The report itself must come out even where the disk is full.

    def _write_outcome(self, code: int, reason: str) -> None:
        if self.run_directory is None:
            return
        outcome = Outcome(code, reason, *self._who(), self.step, self.attempt)
        try:
            write_outcome(self.run_directory, outcome)
        except OSError as error:
            if code == SUCCESS:
                raise
            path = outcome_path(self.run_directory)
            sys.stderr.write(f"mpiddp: {path} could not be written: {error}\n")


def in_notebook() -> bool:
    """Whether this process is an interactive IPython or Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _abort(code: int) -> None:
    """MPI_Abort, and the end of this process even where that does not return.

    On a node that is cut off, Slurm's daemon waits for minutes to pass the word on. MPI is called
    without the interpreter's lock, which mpi4py would hold, so that the other thread can run.
    """
    from mpi4py import MPI

    def leave() -> None:
        time.sleep(ABORT_SECONDS)
        os._exit(code)

    with contextlib.suppress(RuntimeError):  # The interpreter is shutting down.
        threading.Thread(target=leave, name="mpiddp-leave", daemon=True).start()
    size = MPI._sizeof(MPI.Comm)
    handle = {4: ctypes.c_int, 8: ctypes.c_void_p}[size](MPI._handleof(MPI.COMM_WORLD))
    ctypes.CDLL(MPI.__file__).MPI_Abort(handle, ctypes.c_int(code))


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return  # Closed or full: the failure on its way out matters more.


def _sleep_for_ever() -> NoReturn:
    """Another thread is ending this process."""
    while True:
        time.sleep(3600)
