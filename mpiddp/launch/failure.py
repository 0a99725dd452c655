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

import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpiddp.errors import (
    FAILURE,
    SUCCESS,
    LaunchError,
    PeerLostError,
    UnreachableError,
)
from mpiddp.launch import mpi
from mpiddp.launch.deadline import Watch
from mpiddp.launch.launcher import Launcher, find_launcher
from mpiddp.launch.outcome import Outcome, outcome_path, write_outcome
from mpiddp.launch.report import describe_error, exit_code, is_peer_loss
from mpiddp.launch.roll_call import (
    ROLL_CALL_SECONDS,
    Whereabouts,
    call_the_roll,
    describe_missing,
    find_missing,
    find_position,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.launch.world import Roster, World

ANSWER_SECONDS = 0.5
"""How long a failing rank waits for the others' or the store's answer before it speaks itself."""
PATIENCE_SECONDS = 1.5
"""How long a rank that leaves the speaking to another one waits to be ended by it."""
FAILURE_KEY = "mpiddp/failure"


class _Left(SystemExit):
    """Everything was said already; only the exit code is left to carry out of the program."""


class WayOut:
    """The way out of one process. As a context manager it catches every exception of its body.

    `session.start` tells it, as start-up proceeds, what it may use to reach the other ranks.
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
        """Time limit of MPI_Init when a failure is carried into it."""
        self._waiting = False
        self._leaving = threading.Lock()

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

    def fail(self, error: BaseException) -> None:
        """End the job because of ``error``.

        Returns only where the error is to rise further: in a notebook, and for an exit that was
        reported before.
        """
        if in_notebook() or isinstance(error, _Left):
            return
        if not self._leaving.acquire(blocking=False):
            _sleep_for_ever()
        if self._speaks(error):
            self._report(error)
        else:
            self._log(self.describe(error))
            time.sleep(PATIENCE_SECONDS)
        self._end(self._code(error))

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
        if not self._is_shared() or self.world is None:
            return ""
        step = f" at step {self.step}" if self.step is not None else ""
        return f"rank {self.world.rank} of {self.world.size} on {self.world.hostname}{step}: "

    def _is_shared(self) -> bool:
        """Whether other processes belong to the job."""
        if self.world is not None:
            return self.world.size > 1
        return self.launcher is not None and (self.launcher.size or 2) > 1

    def _is_peer_loss(self, error: BaseException) -> bool:
        return not self.runs_script and self._is_shared() and is_peer_loss(error)

    def _code(self, error: BaseException) -> int:
        return PeerLostError.exit_code if self._is_peer_loss(error) else exit_code(error)

    def _report(self, error: BaseException) -> None:
        report = self.describe(error)
        reason = f"{type(error).__name__}: {error}"
        self._log(report)
        self._write_outcome(self._code(error), reason)
        _flush(sys.stdout)
        # One write, so that no other rank's output falls in between.
        sys.stderr.write(report)
        _flush(sys.stderr)

    def _end(self, code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        if self.communicator is not None and self._is_shared():
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code)
        if self._is_shared() or threading.current_thread() is not threading.main_thread():
            os._exit(code)
        raise _Left(code)

    # Who speaks

    def _speaks(self, error: BaseException) -> bool:
        if self.communicator is None:
            self._carry_into_mpi(error)
        if self.communicator is None:
            first = self.launcher is None or self.launcher.rank == 0
            if not first:
                time.sleep(ANSWER_SECONDS)
            return first
        if not self._is_shared():
            return True
        if self.starting:
            speaker = self._agree(failed=True, seconds=ANSWER_SECONDS)
            return speaker is None or speaker == self.communicator.Get_rank()
        return self._claim()

    def _carry_into_mpi(self, error: BaseException) -> None:
        """Join MPI with a failure that came before it, where MPI can be joined."""
        try:
            self.launcher = find_launcher()
        except LaunchError:
            return
        if isinstance(error, LaunchError) or self.launcher is None or not self._is_shared():
            return
        with_deadline = Watch(self.seconds, self.expire)
        try:
            with with_deadline.phase("MPI"):
                module = mpi.load(self.launcher)
                mpi.initialize(module)
            self.join(module.COMM_WORLD)
        except Exception:  # What failed first is what the user must read.
            return
        finally:
            with_deadline.close()

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
        speaker = self._agree(failed=False, seconds=float("inf"))
        self._waiting = False
        if speaker is not None and self._leaving.acquire(blocking=False):
            time.sleep(PATIENCE_SECONDS)
            self._end(FAILURE)
        if speaker is not None:
            _sleep_for_ever()

    def _agree(self, *, failed: bool, seconds: float) -> int | None:
        """Lowest rank that failed in this phase; None if none did, or nobody answers in time."""
        import array

        if self.communicator is None:
            return None
        from mpi4py import MPI

        rank, size = self.communicator.Get_rank(), self.communicator.Get_size()
        mine = array.array("q", [rank if failed else size])
        lowest = array.array("q", [size])
        request = self.communicator.Iallreduce(
            [mine, MPI.INT64_T], [lowest, MPI.INT64_T], op=MPI.MIN
        )
        end = time.monotonic() + seconds
        pause = mpi.FIRST_PAUSE
        while not request.Test():
            if time.monotonic() > end:
                return None
            time.sleep(pause)
            pause = min(2 * pause, mpi.LONGEST_PAUSE)
        return lowest[0] if lowest[0] < size else None

    def _claim(self) -> bool:
        """Whether this rank is the first to claim the report in the store, or gets no answer."""
        if self.store is None:
            return True
        answer: list[int] = []

        def ask() -> None:
            try:
                answer.append(self.store.add(FAILURE_KEY, 1))
            except Exception:  # A store that cannot answer leaves the claim to whoever asks.
                return

        thread = threading.Thread(target=ask, name="mpiddp-claim", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        return not answer or answer[0] == 1

    # Deadlines

    def expire(self, phase: str) -> None:
        """End the job because a phase of start-up outlasted its time. Runs on Watch's thread."""
        if in_notebook() or not self._leaving.acquire(blocking=False):
            return
        if self.communicator is None:
            speaks, text = self._explain_silent_init()
        else:
            speaks, text = self._call_the_roll(phase)
        error = UnreachableError(text)
        if speaks:
            self._report(error)
        else:
            time.sleep(PATIENCE_SECONDS)
        self._end(error.exit_code)

    def _explain_silent_init(self) -> tuple[bool, str]:
        """Inside MPI_Init nobody knows who is missing, only how many were expected."""
        launcher = self.launcher
        text = (
            f"MPI_Init did not return within {self.seconds:g} s: "
            f"{launcher.name if launcher else 'the launcher'} started "
            f"{(launcher.size if launcher else None) or 'several'} ranks, and at least one of "
            "them did not come. Look for ranks that are stuck before mpiddp.init(), or nodes "
            "that cannot reach each other; --timeout SECONDS waits longer"
        )
        rank = launcher.rank if launcher else 0
        # Rank 0 speaks at once; if it is the one that is stuck, rank 1 does.
        if rank != 0:
            time.sleep(ANSWER_SECONDS)
        return rank <= 1, text

    def _call_the_roll(self, phase: str) -> tuple[bool, str]:
        communicator = self.communicator
        assert communicator is not None
        answers = call_the_roll(communicator, Whereabouts(phase, self._waiting, find_position()))
        if answers is not None:
            missing = find_missing(answers, communicator.Get_size())
            return True, describe_missing(phase, self.seconds, missing, self._describe_rank)
        time.sleep(ROLL_CALL_SECONDS + ANSWER_SECONDS)
        # Still here, so rank 0 has not ended the job: it is the one that is missing.
        text = describe_missing(phase, self.seconds, {0: "no answer"}, self._describe_rank)
        return communicator.Get_rank() == 1, text

    def _describe_rank(self, rank: int) -> str:
        if self.roster is not None:
            return self.roster.describe(rank)
        if rank == 0 and self.world is not None:
            return f"rank 0 on {self.world.master_hostname}"
        return f"rank {rank}"

    # Files

    def _log(self, report: str) -> None:
        if self.run_directory is None or self.world is None:
            return
        try:
            folder = self.run_directory / "logs"
            folder.mkdir(exist_ok=True)
            with (folder / f"rank-{self.world.rank}.log").open("a") as log:
                log.write(report)
        except OSError:
            return  # The report itself must come out even where the disk is full.

    def _write_outcome(self, code: int, reason: str) -> None:
        if self.run_directory is None or self.world is None:
            return
        world = self.world
        outcome = Outcome(code, reason, world.rank, world.hostname, self.step, self.attempt)
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


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return  # Closed or full: the failure on its way out matters more.


def _sleep_for_ever() -> NoReturn:
    """Another thread is ending this process."""
    while True:
        time.sleep(3600)
