"""Any rank's failure ends the job, once, with its exit code.

An exception in one rank leaves the others waiting until they are told. So every failure comes
here: the ranks agree which one reports, that one prints one report (`reports`), and MPI_Abort ends
the job with the documented code (`mpiddp.errors`). Nothing on the way there may keep the process:
what may hang or fail (the error's own text, the console, files, a hook) is bounded in
time, and ending the process is the last act of a ``finally``.

Which rank reports depends on how far the job has come. Before MPI is up it is the launcher's rank
0; a failure that only this process knows of (a bad option, a failed import) is first carried into
MPI_Init, so that no rank waits for one that has gone. During start-up the ranks agree over MPI
and the lowest failing one reports. Later the lifeline says who reports: the first rank that failed,
or none if a lost rank is behind it, which the lifeline reports itself. A rank that gets no
answer prints its own report, in the order of ranks. A rank that left the report to another, and
still runs after 10 s, prints its own.

In a notebook or an interactive Python that is alone, errors are raised and nothing is aborted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from mpiddp.errors import SUCCESS, AloneError, LaunchError, PeerLostError, UnreachableError
from mpiddp.launch.failure import early
from mpiddp.launch.failure.deadline import CLOSING, PhaseDeadlines
from mpiddp.launch.failure.error_meaning import exit_code, find_call
from mpiddp.launch.failure.error_origin import find_origin
from mpiddp.launch.failure.missing_ranks import describe_missing, explain_expiry, explain_silent_mpi
from mpiddp.launch.failure.peers import Peers
from mpiddp.launch.failure.reporting_rank import (
    ANSWER_SECONDS,
    REPORTERS,
    Claim,
    agree_on_failure,
    await_turn,
    claim_node,
)
from mpiddp.launch.failure.reports import FailureReports, Report
from mpiddp.launch.failure.termination import (
    ReportedExit,
    end_process,
    end_soon,
    is_interactive,
    may_call_mpi,
)
from mpiddp.launch.launcher.launcher import find_launcher
from mpiddp.launch.mpi import mpi
from mpiddp.process import job_directory
from mpiddp.process.background import (
    INTERRUPTED_SECONDS,
    LASTING_SECONDS,
    BackgroundCall,
    finish_lasting_calls,
)
from mpiddp.process.outcome import write_outcome
from mpiddp.wording import read_message

PATIENCE_SECONDS = 10.0
"""How long a rank that leaves the report to another waits for that one to end it."""
CARRY_SECONDS = 60.0
"""How long a failure that came before MPI waits for the others in MPI_Init."""
SHOWN = 200
"""Characters of an error that the others hear of."""


class FailureHandler(FailureReports):
    """Ends one process, and its job. As a context manager it catches every exception of its body.

    Start-up tells it how to reach the other ranks, the trainer which run it makes.
    """

    def __init__(
        self,
        hidden_files: tuple[str, ...] = (),
        *,
        ends_with_run: bool = False,
        outlasts_runs: bool = False,
    ) -> None:
        """``hidden_files``: source files whose frames are left out at the top of a traceback.

        ``ends_with_run``: a run that is done is all that this process is to do.
        ``outlasts_runs``: a run that was preempted does not end it, either.
        """
        super().__init__(Peers(), hidden_files)
        self._ends_with_run, self._outlasts_runs = ends_with_run, outlasts_runs
        self.starting = True
        """Whether the ranks still agree at the end of each phase of start-up."""
        self.seconds = 300.0
        """Time limit of each phase of start-up."""
        self._waiting = False
        self._process = os.getpid()
        self._ends = threading.Lock()
        self._ender: int | None = None
        """The thread that is ending this process."""
        self._code = SUCCESS
        """The exit code that it ends with."""
        self._claim: Claim | None = None
        self._is_leaving = False
        """Whether all ranks leave, because one was lost."""

    def meet_launcher(self) -> Peers:
        """Find the launcher, once. Raises LaunchError."""
        if self.peers.launcher is None:
            self.meet(launcher=find_launcher())
        return self.peers

    def begin_start(self, seconds: float) -> None:
        """Start-up begins: each of its phases may take so long."""
        self.seconds = seconds

    def end_start(self, previous: FailureHandler | None = None) -> None:
        """Start-up is over. ``previous``: of a session of this process, whose peers it knows."""
        if previous is not None:
            self.peers = previous.peers
        self.starting = False

    @property
    def step_under_way(self) -> int | None:
        """The step that is being made, from 1; None between steps."""
        return self.run.step_under_way

    def __enter__(self) -> FailureHandler:
        early.forget()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and exit_code(error) != SUCCESS:
            self.fail(error)

    # Ends

    def fail(self, error: BaseException, *, told: bool = False) -> None:
        """End the job because of ``error``; ``told``: its report has been printed already.

        Returns only if the error is to rise further: in an interactive process that is alone,
        in a forked child, and for an exit that was reported before.
        """
        if not isinstance(error, ReportedExit) and self._is_in_charge():
            if not self.starting and not isinstance(error, PeerLostError):
                # Its other ranks are alive and write their parts: a checkpoint that has begun.
                is_interrupted = isinstance(error, KeyboardInterrupt)
                seconds = INTERRUPTED_SECONDS if is_interrupted else LASTING_SECONDS
                with contextlib.suppress(KeyboardInterrupt):
                    finish_lasting_calls(
                        f"{type(error).__name__} in rank {self.peers.rank}", seconds
                    )
            self._end_job(exit_code(error), lambda: self._tell(error, told=told))

    def settle(self, error: BaseException | None) -> None:
        """End a phase of start-up: returns if no rank failed in it, ends the job otherwise."""
        if error is not None:
            self.fail(error)
            raise error
        if self.peers.communicator is None:
            return
        self._waiting = True
        try:
            failed = agree_on_failure(self.peers.communicator, None, float("inf"))
        finally:
            self._waiting = False
        if failed is not None:
            # That rank reports, and ends this one.
            self._announce(failed[1])
            self._end_job(failed[1], lambda: time.sleep(PATIENCE_SECONDS))

    def leave_job(self, code: int) -> None:
        """End this process: the job ends, and was reported. Runs on the lifeline's thread."""
        if self._is_in_charge():
            self._is_leaving = True
            self._end_job(code, lambda: None)

    def lose_lifeline(self) -> None:
        """End the job because this node's companion has gone. Runs on the lifeline's thread."""
        self.fail(
            PeerLostError(
                "the companion process of this node has gone (killed?), without which a lost rank "
                "would not be noticed"
            )
        )

    def expire(self, phase: str) -> None:
        """End the job because a phase outlasted its time. Runs on PhaseDeadlines' thread."""
        kind = PeerLostError if phase == CLOSING else UnreachableError
        if self._is_in_charge():
            self._end_job(kind.exit_code, lambda: self._tell_expiry(phase, kind))

    def leave(self, code: int) -> NoReturn:
        """End this process with ``code``: everything was said, and MPI is closed."""
        raise ReportedExit(code)

    def finish(self, code: int = SUCCESS, reason: str = "done") -> None:
        """Write how a run has ended: with exit code 0, or to be continued. Called by rank 0.

        If it is done, no later outcome replaces this, whatever happens while the session is closed.
        A script goes on after its run, and may still fail: the job's own outcome is left open.
        """
        job_directory.check_attempt()
        ends_job = self._ends_with_run or (code != SUCCESS and not self._outlasts_runs)
        outcome = self.make_outcome(code, reason, self.step)
        write_outcome(self.run_directory, outcome, ends_job=ends_job)

    def is_own_process(self) -> bool:
        """Whether this is the process that was started, and not a forked child of it."""
        return os.getpid() == self._process

    def _is_in_charge(self) -> bool:
        """Whether this process may end the job: it is no forked child, and has other ranks or is
        not interactive."""
        return self.is_own_process() and (self.peers.is_shared or not is_interactive())

    def _end_job(self, code: int, tell: Callable[[], None]) -> NoReturn:
        """The only way to end the job: call ``tell``, then end this process and, by MPI, all.

        The first thread that calls this does so; any other stops here.
        """
        try:
            if threading.current_thread() is threading.main_thread():
                # A second Ctrl-C must not stop the first one's report, before or half-way.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                try:
                    BackgroundCall.check_threads()
                except RuntimeError:
                    end_soon(2 * PATIENCE_SECONDS)
            if not self._ends.acquire(blocking=False):
                while self._ender != threading.get_ident():
                    time.sleep(3600)
                self._end()
            self._ender, self._code = threading.get_ident(), code
            tell()
        finally:
            self._end()

    def _end(self) -> NoReturn:
        end_process(
            self._code,
            is_shared=self.peers.is_shared,
            has_mpi=self.peers.communicator is not None,
            is_hurried=self._is_leaving,
            drain=self.output.drain,
        )

    # Reports

    def _tell(self, error: BaseException, *, told: bool) -> None:
        """Report, or leave it to another rank; then still report if that one does not."""
        with contextlib.suppress(LaunchError):
            self.meet_launcher()
        lifeline = self.peers.lifeline
        if lifeline is not None and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(Exception):  # The report does without.
                lifeline.note_failure(error)
        report = self.compose_report(error)
        self._code = report.outcome.code
        try:
            is_reporter = self._is_reporter(report)
        except Exception:  # Rather two reports than none.
            is_reporter = True
        if self._is_leaving:
            self._code = PeerLostError.exit_code
        elif is_reporter:
            self.report(report, told=told)
        else:
            self.write_files(report, is_reporter=False)
            # Without MPI no other rank could end this process.
            if self.peers.communicator is not None:
                time.sleep(PATIENCE_SECONDS)
                await_turn(self.peers.rank)
                self.report(report, told=told)
        self._hold_claim(2 * ANSWER_SECONDS)

    def _announce(self, code: int) -> None:
        """Tell the other ranks that this one is not lost."""
        lifeline = self.peers.lifeline  # The main thread may close it meanwhile.
        if lifeline is not None:
            lifeline.announce(code)

    def _tell_expiry(self, phase: str, kind: type[PeerLostError | UnreachableError]) -> None:
        self._announce(kind.exit_code)
        text = self._explain_expiry(phase)
        if text is not None:
            self.report(self.compose_report(kind(text)))
        else:
            time.sleep(PATIENCE_SECONDS)
        self._hold_claim(REPORTERS * ANSWER_SECONDS)

    def _explain_expiry(self, phase: str) -> str | None:
        """The message of an expired deadline; None if another rank says it."""
        peers = self.peers
        try:
            if peers.communicator is not None:
                return explain_expiry(phase, self.seconds, peers, waits=self._waiting)
            if not peers.is_shared:
                return describe_missing(phase, self.seconds, {}, peers.describe_rank)
            # In MPI_Init and MPI_Finalize no rank can say who is missing. Rank 0 reports at once.
            # If it is the one that is stuck, the next one steps in, and so on.
            await_turn(peers.rank)
            if peers.rank >= REPORTERS:
                return None
            # Under a bare srun one that ends does not end the others.
            self._claim_node()
            if self._claim is None:
                return None
            return explain_silent_mpi(phase, self.seconds, peers.launcher)
        except Exception as error:  # The report must come out.
            await_turn(peers.rank)
            text = describe_missing(phase, self.seconds, {}, peers.describe_rank)
            return f"{text} (the ranks could not be asked: {read_message(error)})"

    # Which rank reports

    def _is_reporter(self, report: Report) -> bool:
        is_main = threading.current_thread() is threading.main_thread()
        if self.peers.communicator is None and is_main:
            self._carry_into_mpi(report)
        peers = self.peers
        if peers.communicator is None:
            return self._is_reporter_without_mpi(report.error)
        if not peers.is_shared:
            return True
        if self.starting:
            self._announce(self._code)
            if not may_call_mpi():
                await_turn(peers.rank)
                return True
            failed = agree_on_failure(peers.communicator, self._code, ANSWER_SECONDS)
            return failed is None or failed[0] == peers.communicator.Get_rank()
        if peers.lifeline is None:
            return True
        text = report.outcome.reason.partition("\n")[0][:SHOWN]
        text += find_call(report.error.__traceback__)
        answer = peers.lifeline.ask(self._code, text, find_origin(report.error))
        self._is_leaving = answer == "leave"
        if answer is None:
            # Every rank that gets no answer reports, one after the other.
            await_turn(peers.rank)
        return answer != "silent"

    def _is_reporter_without_mpi(self, error: BaseException) -> bool:
        """No rank can be asked: the launcher's rank 0 reports, and one process on each other node.

        If every rank is alone in MPI, all ranks find that, and rank 0's report is enough. A rank 0
        that comes too late finds that another process has its node's claim, and has reported.
        """
        launcher = self.peers.launcher
        if launcher is None:
            return True
        if launcher.rank != 0 and isinstance(error, AloneError):
            time.sleep(REPORTERS * ANSWER_SECONDS)  # mpirun would end a late rank 0 with this one.
            return False
        time.sleep(ANSWER_SECONDS * (launcher.rank != 0))
        self._claim_node()
        return self._claim is not None

    def _claim_node(self) -> None:
        self._claim = claim_node()
        self.note = self._claim.note if self._claim is not None else ""

    def _hold_claim(self, seconds: float) -> None:
        """Let the other processes of this node find the claim taken."""
        if self._claim is not None:
            time.sleep(seconds)

    def _carry_into_mpi(self, report: Report) -> None:
        """Join MPI with a failure that came before it, if MPI can be joined."""
        launcher = self.peers.launcher
        if isinstance(report.error, LaunchError) or launcher is None or not self.peers.is_shared:
            return

        def give_up(_: str) -> None:
            # In the deadline's thread: the main thread does not return from MPI_Init.
            try:
                self.report(report)
            finally:
                self._end()

        deadlines = PhaseDeadlines(min(self.seconds, CARRY_SECONDS), give_up)
        try:
            with deadlines.phase("MPI"):
                module = mpi.load(launcher)
                mpi.initialize(module, launcher)
                self.meet(communicator=module.COMM_WORLD.Dup())
        except Exception:  # What failed first is what the user must read.
            return
        finally:
            deadlines.close()
