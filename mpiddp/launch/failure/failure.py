"""The one way out: any rank's failure ends the job, once, with its exit code.

An exception in one rank leaves the others waiting for as long as nobody tells them. So every
failure comes here: the ranks agree who speaks, that one prints one report, and MPI_Abort ends
the job with the documented code (`mpiddp.errors`). Nothing on the way there may keep the process:
whatever may hang or fail (the error's own text, the console, files, a hook) is bounded in time,
and ending the process is the last act of a ``finally``.

Who speaks depends on how far the job has come. Before MPI is up it is the launcher's rank 0;
a failure that only this process knows of (a bad option, a failed import) is first carried into
MPI_Init, so that nobody waits for a rank that has gone. During start-up the ranks agree over MPI
and the lowest failing one speaks. Later the first rank that claims the report in the store prints
it; a rank that gets no answer within half a second prints its own, in the order of ranks. A rank
that left the report to another one, and still runs after 10 s, prints its own.

In a notebook errors are raised and nothing is aborted.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
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
from mpiddp.launch.background import BackgroundCall, LateError
from mpiddp.launch.failure.deadline import CLOSING, Watch
from mpiddp.launch.failure.error_report import (
    describe_error,
    exit_code,
    has_own_hook,
    has_trace,
    is_peer_loss,
    read_message,
    visible_part,
)
from mpiddp.launch.failure.missing_ranks import (
    ROLL_CALL_SECONDS,
    Whereabouts,
    call_the_roll,
    describe_missing,
    describe_silent_end,
    describe_silent_init,
    find_missing,
    find_position,
)
from mpiddp.launch.failure.node_claim import Claim, claim_node
from mpiddp.launch.failure.outcome import Outcome, outcome_path, read_outcome, write_outcome
from mpiddp.launch.failure.reporter import ANSWER_SECONDS, agree_on_failure, claim_report
from mpiddp.launch.failure.unreachable_hosts import find_silent_hosts
from mpiddp.launch.launcher.launcher import Launcher, find_launcher, hosts_of_step
from mpiddp.launch.mpi import mpi

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.launch.world import Roster, World

PATIENCE_SECONDS = 10.0
"""How long a rank that leaves the speaking to another one waits to be ended by it."""
READ_SECONDS = 5.0
"""How long it may take to put an error into words: its text may ask a GPU that hangs, and the lines
of a traceback a file system."""
HOOK_SECONDS = 5.0
"""How long a script's own hook may take to show an error, while other ranks wait."""
CONSOLE_SECONDS = 3.0
"""How long the console may take to accept a report."""
FILES_SECONDS = 2.0
"""How long the run directory may take to accept a report."""
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


@dataclass(frozen=True)
class _Report:
    """An error in words."""

    error: BaseException
    code: int
    """Exit code."""
    text: str
    """For the console and the log."""
    reason: str
    """For outcome.json."""


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
        self.attempt = 1
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
        self._node_claim: Claim | None = None
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
        code = exit_code(error)
        try:
            self._begin_leaving(code)
            if self.launcher is None:
                with contextlib.suppress(LaunchError):
                    self.launcher = find_launcher()
            report = self._compose(error)
            code = report.code
            self._tell(report, told=told)
        finally:
            self._end(code)

    def _tell(self, report: _Report, *, told: bool) -> None:
        """Report, or leave it to the one who speaks; then still report if that one does not."""
        try:
            speaks = self._speaks(report)
        except Exception:  # Rather two reports than none.
            speaks = True
        if speaks:
            self._report(report, told=told)
        else:
            self._write_files(report, with_outcome=False)
            # Without MPI there is nobody who could end this process.
            if self.communicator is not None:
                time.sleep(PATIENCE_SECONDS + min(self._who()[0], SPEAKERS) * ANSWER_SECONDS)
                self._report(report, told=told)
        if self._node_claim is not None:
            # The other processes of this node must find the claim taken.
            time.sleep(2 * ANSWER_SECONDS)

    def _is_in_charge(self) -> bool:
        """Whether ending the job is up to this process: not a child's, nor a lone notebook's."""
        return os.getpid() == self._process and (self._is_shared() or not in_notebook())

    def _begin_leaving(self, code: int) -> None:
        """Let one thread, once, end this process; the others stop here."""
        if not self._leaving.acquire(blocking=False):
            if self._leaver == threading.get_ident():
                self._end(code)
            # Another thread is ending this process.
            while True:
                time.sleep(3600)
        self._leaver = threading.get_ident()
        if threading.current_thread() is threading.main_thread():
            # A second Ctrl-C must not stop the first one's report half-way.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                BackgroundCall.check_threads()
            except RuntimeError:
                _end_soon(2 * PATIENCE_SECONDS)

    def leave(self, code: int) -> NoReturn:
        """End this process with ``code``: everything was said, and MPI is closed."""
        raise _Left(code)

    def finish(self) -> None:
        """Write the outcome of a run that is done (exit code 0). Called by rank 0.

        It stays, whatever happens to a rank while the session is closed.
        """
        if self.run_directory is not None:
            self._write_outcome(self.run_directory, SUCCESS, "done")

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
            return f"step {self.step}: " if self.step is not None else ""
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

    def _compose(self, error: BaseException) -> _Report:
        """Put ``error`` into words; its type alone where its text fails or does not come."""

        def compose() -> _Report:
            lost = self._is_peer_loss(error)
            code = PeerLostError.exit_code if lost else exit_code(error)
            reason = f"{type(error).__name__}: {read_message(error)}".rstrip(": ")
            return _Report(error, code, self.describe(error), reason)

        try:
            return BackgroundCall(compose).finish(READ_SECONDS)
        except LateError:
            problem = f"its message could not be read within {READ_SECONDS:g} s"
        except BaseException as another:
            problem = f"its message could not be read ({type(another).__name__})"
        reason = f"{type(error).__name__}: {problem}"
        return _Report(error, exit_code(error), f"mpiddp: {self._place()}{reason}\n", reason)

    def _report(self, report: _Report, *, told: bool = False) -> None:
        # The console first: files may be on a system that has stopped answering.
        note = self._node_claim.note if self._node_claim is not None else ""
        self._print("" if told else self._show(report) + note)
        self._write_files(report, with_outcome=True)
        if self._is_shared():
            time.sleep(FORWARD_SECONDS)

    def _show(self, report: _Report) -> str:
        """Let a script's own hook show the error; returns what is still to be printed."""
        error = report.error
        if not (self.runs_script and has_trace(error) and has_own_hook()):
            return report.text
        trace = visible_part(error.__traceback__, self.hidden_files)
        context = contextvars.copy_context()

        def show() -> None:
            with contextlib.suppress(OSError):
                _flush_output()
            context.run(sys.excepthook, type(error), error, trace)

        try:
            if self._is_shared():
                BackgroundCall(show).finish(HOOK_SECONDS)
            else:
                show()  # A debugger may talk to its user there.
        except LateError:
            problem = f"did not return within {HOOK_SECONDS:g} s"
        except BaseException as another:
            problem = f"raised {type(another).__name__}: {read_message(another)}"
        else:
            return ""
        return f"{report.text}mpiddp: the script's sys.excepthook {problem}\n"

    def _print(self, text: str) -> None:
        with contextlib.suppress(BaseException):  # The log has it as well.
            BackgroundCall(lambda: write_console(text)).finish(CONSOLE_SECONDS)

    def _end(self, code: int) -> NoReturn:
        is_stuck = self._is_shared() or threading.current_thread() is not threading.main_thread()
        try:
            try:
                BackgroundCall(_flush_output).finish(CONSOLE_SECONDS)
            except BaseException:
                # The interpreter would wait for its streams, or give its own exit code.
                is_stuck = True
            if self.communicator is not None and self._is_shared():
                _abort(code)
        finally:
            if is_stuck:
                os._exit(code)
            raise _Left(code)

    # Who speaks

    def _speaks(self, report: _Report) -> bool:
        if self.communicator is None and threading.current_thread() is threading.main_thread():
            self._carry_into_mpi(report)
        if self.communicator is None:
            return self._speaks_without_mpi(report.error)
        if not self._is_shared():
            return True
        if self.starting:
            if not _may_call_mpi():
                time.sleep(min(self._who()[0], SPEAKERS) * ANSWER_SECONDS)
                return True
            failed = agree_on_failure(self.communicator, report.code, ANSWER_SECONDS)
            return failed is None or failed[0] == self.communicator.Get_rank()
        is_first = claim_report(self.store) if self.store is not None else True
        if is_first is None:
            # Whoever asked may speak: one after the other, so that the first one ends the job.
            time.sleep(min(self._who()[0], SPEAKERS) * ANSWER_SECONDS)
        return is_first is not False

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

    def _carry_into_mpi(self, report: _Report) -> None:
        """Join MPI with a failure that came before it, where MPI can be joined."""
        is_wrong = isinstance(report.error, LaunchError)
        if is_wrong or self.launcher is None or not self._is_shared():
            return

        def give_up(_: str) -> None:
            try:
                self._report(report)
            finally:
                self._end(report.code)

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
            try:
                time.sleep(PATIENCE_SECONDS)
            finally:
                self._end(failed[1])

    # Deadlines

    def expire(self, phase: str) -> None:
        """End the job because a phase outlasted its time. Runs on Watch's thread."""
        if not self._is_in_charge():
            return
        kind = PeerLostError if phase == CLOSING else UnreachableError
        self._begin_leaving(kind.exit_code)
        try:
            text = self._explain(phase)
            if text is not None:
                self._report(self._compose(kind(text)))
            else:
                time.sleep(PATIENCE_SECONDS)
            if self._node_claim is not None:
                # The other processes of this node must find the claim taken.
                time.sleep(SPEAKERS * ANSWER_SECONDS)
        finally:
            self._end(kind.exit_code)

    def _explain(self, phase: str) -> str | None:
        """The message of an expired deadline; None if another rank says it."""
        try:
            if self.communicator is None:
                return self._explain_silent_mpi(phase)
            return self._call_the_roll(phase)
        except Exception as error:
            time.sleep(min(self._who()[0], SPEAKERS) * ANSWER_SECONDS)
            text = describe_missing(phase, self.seconds, {}, self.describe_rank)
            return f"{text} (the ranks could not be asked: {read_message(error)})"

    def _explain_silent_mpi(self, phase: str) -> str | None:
        """The message for MPI_Init or MPI_Finalize, in which no rank can say who is missing.

        Rank 0 speaks at once. If it is the one that is stuck, the next one steps in, and so on.
        """
        rank = self._who()[0]
        time.sleep(min(rank, SPEAKERS) * ANSWER_SECONDS)
        if rank >= SPEAKERS:
            return None
        # Under a bare srun one that ends does not end the others.
        self._node_claim = claim_node()
        if self._node_claim is None:
            return None
        if phase == CLOSING:
            return describe_silent_end(self.seconds)
        hosts = hosts_of_step()
        silent = find_silent_hosts(hosts)
        return describe_silent_init(self.launcher, self.seconds, len(hosts), silent)

    def _call_the_roll(self, phase: str) -> str | None:
        communicator = self.communicator
        assert communicator is not None
        rank = communicator.Get_rank()
        if not _may_call_mpi():
            return describe_missing(phase, self.seconds, {}, self.describe_rank)
        answers = call_the_roll(communicator, Whereabouts(phase, self._waiting, find_position()))
        if answers is not None:
            missing = find_missing(answers, communicator.Get_size())
            return describe_missing(phase, self.seconds, missing, self.describe_rank)
        # Rank 0 ends the job while this sleeps, unless it is missing itself.
        time.sleep(ROLL_CALL_SECONDS + min(rank, 2 * SPEAKERS) * ANSWER_SECONDS)
        return describe_missing(phase, self.seconds, {0: "no answer"}, self.describe_rank)

    def describe_rank(self, rank: int) -> str:
        """``rank 3 on node002``, as far as this rank knows."""
        if self.roster is not None:
            return self.roster.describe(rank)
        if rank == 0 and self.world is not None:
            return f"rank 0 on {self.world.master_hostname}"
        return f"rank {rank}"

    # Files

    def _write_files(self, report: _Report, *, with_outcome: bool) -> None:
        """Write the outcome and the log, as far as the file system answers."""
        if self.run_directory is None:
            return
        directory = self.run_directory

        def write() -> str:
            problem = ""
            try:
                if with_outcome and not _is_done(directory):
                    self._write_outcome(directory, report.code, report.reason)
            except OSError as error:
                problem = f"{outcome_path(directory)} could not be written: {error}"
            with contextlib.suppress(OSError):  # The console has it as well.
                self._log(directory, report.text)
            return problem

        try:
            problem = BackgroundCall(write).finish(FILES_SECONDS)
        except LateError:
            problem = f"{directory} did not take this report within {FILES_SECONDS:g} s"
        except BaseException as error:
            problem = f"{directory} did not take this report: {read_message(error)}"
        if problem and with_outcome:
            self._print(f"mpiddp: {problem}\n")

    def _log(self, directory: Path, text: str) -> None:
        folder = directory / "logs"
        folder.mkdir(exist_ok=True)
        # Names of files may hold bytes that are no text.
        path = folder / f"rank-{self._who()[0]}.log"
        with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text)

    def _write_outcome(self, directory: Path, code: int, reason: str) -> None:
        write_outcome(directory, Outcome(code, reason, *self._who(), self.step, self.attempt))


def in_notebook() -> bool:
    """Whether this process is an interactive IPython or Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _may_call_mpi() -> bool:
    """Whether this thread may: below MPI_THREAD_MULTIPLE the main thread may be in MPI already."""
    from mpi4py import MPI

    is_main = threading.current_thread() is threading.main_thread()
    return is_main or MPI.Query_thread() >= MPI.THREAD_MULTIPLE


def _abort(code: int) -> None:
    """MPI_Abort, and the end of this process even where that does not return.

    On a node that is cut off, Slurm's daemon waits for minutes to pass the word on. MPI is called
    without the interpreter's lock, which mpi4py would hold, so that the other thread can run.
    """
    from mpi4py import MPI

    def leave() -> None:
        time.sleep(ABORT_SECONDS)
        os._exit(code)

    try:
        threading.Thread(target=leave, name="mpiddp-leave", daemon=True).start()
    except RuntimeError:  # The interpreter is shutting down: Python 3.12 starts no threads then.
        _end_soon(ABORT_SECONDS)
    size = MPI._sizeof(MPI.Comm)
    handle = {4: ctypes.c_int, 8: ctypes.c_void_p}[size](MPI._handleof(MPI.COMM_WORLD))
    ctypes.CDLL(MPI.__file__).MPI_Abort(handle, ctypes.c_int(code))


def _end_soon(seconds: float) -> None:
    """Have the kernel end this process, where no thread can. Call it on the main thread."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _is_done(directory: Path) -> bool:
    outcome = read_outcome(directory)
    return outcome is not None and outcome.get("code") == SUCCESS


def write_console(text: str) -> None:
    """Write to whatever the script has made of its standard error, or to the one it was given.

    One write, so that no other rank's output falls in between.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.write(text)  # type: ignore[union-attr]
            stream.flush()  # type: ignore[union-attr]
            return


def _flush_output() -> None:
    """Raises OSError where a file system is full."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(ValueError, AttributeError):  # Closed, or None.
            stream.flush()
