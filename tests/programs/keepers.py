"""What may keep a rank that has failed from its end: each by itself, in a child of this program.

    python tests/programs/keepers.py FOLDER

The children fail all at once, without MPI; each writes its standard error into FOLDER/NAME. This
program prints their exit codes by name; None where one was still there after DEADLINE seconds.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from mpiddp.errors import LaunchError, PeerLostError
from mpiddp.launch.failure import failure, missing_ranks, reports, termination
from mpiddp.launch.failure.deadline import PhaseDeadlines
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi.world import World
from mpiddp.process import outcome
from mpiddp.process.background import LastingCall
from mpiddp.process.outcome import Outcome, write_outcome
from mpiddp.process.streams import console

BOUND, DEADLINE = 2.0, 90.0
"""Seconds, instead of the real bounds: for what blocks, and for all else on a busy machine."""


def block(*_: object) -> None:
    time.sleep(1000)


def shout(*_: object) -> None:
    raise TypeError("loudly")


class UnreadableError(LaunchError):
    """What it does instead of telling what it is about stands in its argument."""

    def __str__(self) -> str:
        act: Callable[[], str] = self.args[0]
        return act()


def raise_unreadable(act: Callable[[], object]) -> Callable[[FailureHandler], None]:
    """A case in which nothing but the error itself is bad."""

    def fail(_: FailureHandler) -> None:
        raise UnreadableError(act)

    return fail


def close_stderr(_: FailureHandler) -> None:
    """As a program that wants to be a daemon."""
    sys.stderr.close()


def fill_stderr(_: FailureHandler) -> None:
    """Its file system is full."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


def clog_stderr(_: FailureHandler) -> None:
    """Nobody reads."""
    _, sender = os.pipe()
    os.set_blocking(sender, False)
    try:
        while True:
            os.write(sender, bytes(4096))
    except BlockingIOError:
        os.set_blocking(sender, True)
    os.dup2(sender, 2)


def replace_stderr(_: FailureHandler) -> None:
    """By something that is no stream."""
    sys.stderr = None  # type: ignore[assignment]


def block_log(failure_handler: FailureHandler) -> None:
    """A file system that does not answer."""
    assert failure_handler.run_directory is not None
    (failure_handler.run_directory / "logs").mkdir()
    os.mkfifo(failure_handler.run_directory / "logs" / "rank-3.log")


def block_outcome(_: FailureHandler) -> None:
    """A file system that does not answer."""
    outcome.write_outcome = block  # type: ignore[assignment]


def set_hook(hook: Callable[..., None]) -> Callable[[FailureHandler], None]:
    def prepare(failure_handler: FailureHandler) -> None:
        failure_handler.runs_script = True
        sys.excepthook = hook

    return prepare


def break_deadline(failure_handler: FailureHandler) -> None:
    """An error while the one who is missing is looked for."""
    failure_handler.meet(world=World(0, 8, 0, 2, 0, 4, "node1", "node1"))
    missing_ranks.hosts_of_step = shout  # type: ignore[assignment]
    with PhaseDeadlines(0.1, failure_handler.expire).phase("MPI"):
        block()


class Lifeline:
    """One whose companion answers as it is told."""

    def __init__(self, ask: Callable[..., str]) -> None:
        self.ask = ask

    def announce(self, _: int) -> None:
        """Nobody hears it."""

    def note_failure(self, _: BaseException) -> None:
        """Its companion hears of it, and has gone."""
        print("noted", file=sys.stderr)
        shout()


def break_claim(failure_handler: FailureHandler) -> None:
    """An error while the ranks agree which rank reports: it reports at once."""
    failure.PATIENCE_SECONDS = 2 * DEADLINE
    set_answer(failure_handler, shout)


def set_answer(failure_handler: FailureHandler, ask: Callable[..., object]) -> None:
    """Let the lifeline answer by ``ask`` who reports."""
    failure_handler.starting = False
    launcher = Launcher("openmpi", "mpirun", 3, (8,), frozenset())
    failure_handler.meet(launcher=launcher, communicator=object(), lifeline=Lifeline(ask))
    # MPI is there already.
    mock.patch("mpiddp.launch.mpi.mpi.load", side_effect=lambda _: os._exit(99)).start()
    # Its node is cut off: MPI_Abort does not return.
    module = mock.Mock(__file__="", _sizeof=lambda _: 4, _handleof=lambda _: 0)
    sys.modules["mpi4py"] = mock.Mock(MPI=module)
    mock.patch("mpiddp.launch.mpi.mpi.has_ended", return_value=False).start()
    mock.patch("ctypes.CDLL", return_value=mock.Mock(MPI_Abort=block)).start()
    termination.ABORT_SECONDS = BOUND


def leave_to_nobody(failure_handler: FailureHandler) -> None:
    """Another one has claimed the report, and is never heard of."""
    set_answer(failure_handler, lambda *_, **__: "silent")
    failure.PATIENCE_SECONDS = BOUND


def lose_peer(failure_handler: FailureHandler) -> None:
    """While its part of a checkpoint is written, which is worth nothing without the other's."""
    set_answer(failure_handler, lambda *_, **__: "report")
    LastingCall(block, "the checkpoint")
    raise PeerLostError("rank 2 was lost")


def be_alone(failure_handler: FailureHandler) -> None:
    """One process: there is no rank to name."""
    failure_handler.meet(world=World(0, 1, 0, 1, 0, 1, "node1", "node1"))


def fail_after_the_end(failure_handler: FailureHandler) -> None:
    """The run is done; what happens afterwards does not undo that."""
    assert failure_handler.run_directory is not None
    write_outcome(failure_handler.run_directory, Outcome(0, "done", 0, "node1", 17, 0))


CASES: dict[str, Callable[[FailureHandler], None]] = {
    "text raises": raise_unreadable(shout), "text exits": raise_unreadable(sys.exit),
    "text blocks": raise_unreadable(block),
    "text is no text": raise_unreadable(lambda: "a\udcff"), "stderr closed": close_stderr,
    "stderr full": fill_stderr, "stderr clogged": clog_stderr, "stderr replaced": replace_stderr,
    "log blocks": block_log, "outcome blocks": block_outcome, "hook raises": set_hook(shout),
    "hook blocks": set_hook(block), "deadline breaks": break_deadline,
    "claim breaks": break_claim, "speaker silent": leave_to_nobody, "peer lost": lose_peer,
    "alone": be_alone, "done": fail_after_the_end,
}  # fmt: skip


BOUNDS = {
    (reports, "READ_SECONDS"): ["text blocks"], (reports, "HOOK_SECONDS"): ["hook blocks"],
    (console, "CONSOLE_SECONDS"): ["stderr clogged"],
    (outcome, "FILES_SECONDS"): ["log blocks", "outcome blocks"],
}  # fmt: skip
"""What blocks in which cases."""


def fail(case: str, folder: Path) -> None:
    """Fail as rank 3 of 8 at step 17."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    for (module, name), cases in BOUNDS.items():
        setattr(module, name, BOUND if case in cases else DEADLINE)
    with FailureHandler() as failure_handler:
        failure_handler.meet(world=World(3, 8, 1, 2, 1, 4, "node2", "node1"))
        failure_handler.run, failure_handler.run_directory = FixedProgress(step=17), folder
        CASES[case](failure_handler)
        raise ValueError("on purpose")


def main() -> None:
    children = {}
    for case in CASES:
        folder = Path(sys.argv[1]) / case
        folder.mkdir()
        child = os.fork()
        if child == 0:
            fail(case, folder)
        children[child] = case
    codes: dict[str, int | None] = dict.fromkeys(CASES)
    end = time.monotonic() + DEADLINE
    while children and time.monotonic() < end:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
