"""The process beside the front that ends what the front has started, whatever ends the front.

A launcher may hang. Ranks may leave processes behind, which hold their output, so that the
launcher waits for them. The front may be killed. So it forks this process before it runs a
launcher, and tells it of each signal that is to end the job, and of the launcher's end. What
belongs to the attempt is known by its token (`environment.ATTEMPT_TOKEN`), even if it has left its
parents. On other nodes Slurm ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mpiddp import environment
from mpiddp.launch.launcher import leftovers
from mpiddp.process import job_directory
from mpiddp.process.descendants import find_descendants, has_variable, list_children, survey
from mpiddp.process.rank_process import find_start

RANKS_SECONDS = 360.0
"""How long ranks may go on after SIGTERM or SIGHUP: longer than they wait for a checkpoint that
they write (`process.background.LASTING_SECONDS`)."""
LAUNCHER_SECONDS = 4.0
"""How long a launcher may take to end after a signal once its ranks have; and how long all may take
after a second signal."""
ALONE_SECONDS = 3.0
"""How long what ranks have started may outlive them if the job ends by itself. The companion
process ends by then."""
TERM_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""
KILL_SECONDS = 5.0
"""How long the kernel may take for that."""
QUIET_SECONDS, BUSY_SECONDS = 1.0, 0.1
"""Between two looks at the ranks: at first, and once something has happened."""
ENDED, FAILED = 0, 255
"""What the front says of the launcher's end; other numbers are signals."""
KILLED = 1
"""Exit code of this process if it had to kill the launcher."""


@dataclass(frozen=True)
class Watched:
    """What is to be ended."""

    token: str
    """Of the attempt; empty if Slurm ends what its processes leave behind."""
    has_ranks: bool
    """Whether it is a launcher with all ranks below it."""
    kill_step: Callable[[int], object]
    """Ends what Slurm runs for a launcher, by its process; it would outlive that."""
    directory: str = ""
    """The job's, which goes with a front that was killed; empty if it has none."""


class Guard:
    """The front's handle on that process: a context manager around the launcher's life."""

    def __init__(self, watched: Watched) -> None:
        receiver, self._sender = os.pipe()
        self._began = time.time()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._process: int | None = os.fork()
        if self._process == 0:
            try:
                session = os.getsid(0)
                _leave_front(receiver)
                os._exit(KILLED if _Watch(watched, receiver, session).run() else 0)
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(receiver)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(FAILED)

    def watch(self, launcher: int) -> None:
        """Say which process the launcher is."""
        self._send(launcher.to_bytes(4, "big"))

    def tell(self, number: int) -> None:
        """Say that launcher or ranks were sent a signal that is to end the job."""
        self._send(bytes([number]))

    def finish(self, status: int) -> bool:
        """Say that the launcher has ended, and wait until all that it has started has ended, too.

        Returns whether the launcher had to be killed.
        """
        if self._process is None:
            return False
        self._send(bytes([FAILED if status else ENDED]))
        process, self._process = self._process, None
        _, found = os.waitpid(process, 0)
        os.close(self._sender)
        if status:
            leftovers.remove(self._began)
        return os.waitstatus_to_exitcode(found) == KILLED

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # Somebody has killed it.
            os.write(self._sender, message)


def _leave_front(kept: int) -> None:
    """Hold nothing open that others wait for, and get no signals of a terminal."""
    os.setsid()
    for name in os.listdir("/proc/self/fd"):
        if int(name) != kept:
            with contextlib.suppress(OSError):  # That of the folder itself.
                os.close(int(name))


class _Watch:
    """The work of the forked process: watches launcher and ranks, and ends what is left."""

    def __init__(self, watched: Watched, receiver: int, session: int) -> None:
        self._watched, self._receiver = watched, receiver
        mark = f"{environment.ATTEMPT_TOKEN}={watched.token}" if watched.token else ""
        self._mark = mark.encode()
        # Ranks have these, and launchers and what these start beside them have not. What the front
        # has inherited says nothing of those below it.
        signs = [sign for sign in environment.RANK_VARIABLES["rank"] if sign not in os.environ]
        self._signs = [f"{sign}=".encode() for sign in signs]
        self._launcher = self._began = 0
        self._forked = time.time()
        self._signals: list[tuple[int, float]] = []
        """Signals that were to end the job, and when they came."""
        self._front_gone: float | None = None
        self._ranks: set[int] = set()
        """Every rank that was seen."""
        self._sessions = {session}
        """The front's, and the ranks': a process in another one has left them on purpose."""
        self._ranks_gone: float | None = None
        self._sweeps = 0
        """How often processes that ranks left behind were ended while the launcher went on."""
        self._has_killed = False

    def run(self) -> bool:
        """Watch until the launcher and all that it started have ended; whether it was killed."""
        told = os.read(self._receiver, 4)
        self._launcher = int.from_bytes(told, "big")
        self._began = find_start(self._launcher) or 0
        status = None if len(told) == 4 else FAILED  # It was not started.
        while status is None:
            status = self._receive()
            if status is None:
                self._look(time.monotonic())
        spares = status == ENDED and not self._is_asked
        alone = 0.0 if self._is_asked else ALONE_SECONDS
        self._end(lambda: self._find_strays(spares=spares), alone)
        if self._front_gone is not None:
            leftovers.remove(self._forked)
            if self._watched.directory:
                job_directory.remove_abandoned(Path(self._watched.directory))
        return self._has_killed

    @property
    def _is_asked(self) -> bool:
        """Whether the job is to end."""
        return bool(self._signals) or self._front_gone is not None

    def _receive(self) -> int | None:
        """Read the front's messages. Returns how the launcher has ended, None if it has not."""
        if self._front_gone is not None:
            time.sleep(BUSY_SECONDS)
            return None if find_start(self._launcher) == self._began else FAILED
        is_busy = self._is_asked or self._ranks_gone is not None
        seconds = BUSY_SECONDS if is_busy else QUIET_SECONDS if self._watched.has_ranks else None
        if not select.select([self._receiver], [], [], seconds)[0]:
            return None
        told, now = os.read(self._receiver, 64), time.monotonic()
        if not told:
            # The kernel has told the launcher (`attempt`).
            self._front_gone = now
        for number in told:
            if number in (ENDED, FAILED):
                return number
            self._signals.append((number, now))
        return None

    # While the launcher runs

    def _look(self, now: float) -> None:
        if self._watched.has_ranks:
            self._look_for_ranks(now)
        if now >= self._find_limit():
            self._has_killed = True
            self._watched.kill_step(self._launcher)
            self._kill(self._find_all)
        elif self._ranks_gone is not None:
            pause = 0.0 if self._is_asked else ALONE_SECONDS
            if now >= self._ranks_gone + (self._sweeps + 1) * pause:
                # Those that have left on purpose do not hold the launcher's output, at first.
                spares = not self._is_asked and self._sweeps == 0
                self._end(lambda: self._find_strays(spares=spares))
                self._sweeps += 1

    def _look_for_ranks(self, now: float) -> None:
        found = self._find_ranks(self._launcher)
        for rank in found - self._ranks:
            with contextlib.suppress(ProcessLookupError):
                self._sessions.add(os.getsid(rank))
        self._ranks |= found
        if found:
            self._ranks_gone = None
        elif self._ranks and self._ranks_gone is None:
            self._ranks_gone = now

    def _find_ranks(self, process: int) -> set[int]:
        """The ranks below a process of the launcher that have not ended."""
        found = set()
        for child in list_children(process):
            if has_variable(child, self._signs):
                found.add(child)
            else:
                found |= self._find_ranks(child)
        return found

    def _find_limit(self) -> float:
        """When the launcher is killed, if it has not ended by then."""
        limits = [float("inf")]
        if self._front_gone is not None:
            limits.append(self._front_gone + LAUNCHER_SECONDS)
        if len(self._signals) > 1:
            limits.append(self._signals[1][1] + LAUNCHER_SECONDS)
        has_ranks = bool(self._ranks) and self._ranks_gone is None
        if self._signals and self._watched.has_ranks and not has_ranks:
            limits.append(max(self._signals[0][1], self._ranks_gone or 0.0) + LAUNCHER_SECONDS)
        # A person can type Ctrl-C a second time.
        lasting = [when for number, when in self._signals if number != signal.SIGINT]
        limits += [when + RANKS_SECONDS for when in lasting]
        return min(limits)

    # Ends

    def _find_all(self) -> set[int]:
        """The launcher, and whatever belongs to the attempt."""
        relatives = survey(self._mark)
        marked = [process for process, found in relatives.items() if found.is_marked]
        return find_descendants([self._launcher, *marked], relatives)

    def _find_strays(self, *, spares: bool) -> set[int]:
        """What is not below the launcher any more. ``spares``: but not what left on purpose."""
        relatives = survey(self._mark)
        marked = [process for process, found in relatives.items() if found.is_marked]
        strays = find_descendants(marked, relatives)
        strays -= find_descendants([self._launcher], relatives)
        if spares:
            strays = {each for each in strays if relatives[each].session in self._sessions}
        return strays

    def _end(self, find: Callable[[], set[int]], alone: float = 0.0) -> None:
        """End what ``find`` finds: wait ``alone`` seconds, then SIGTERM, then SIGKILL."""
        for number, seconds in ((0, alone), (signal.SIGTERM, TERM_SECONDS)):
            found, end = find(), time.monotonic() + seconds
            _send(found, number)
            while found and time.monotonic() < end:
                time.sleep(BUSY_SECONDS)
                found = find()
            if not found:
                return
        self._kill(find)

    def _kill(self, find: Callable[[], set[int]]) -> None:
        end = time.monotonic() + KILL_SECONDS
        while (found := find()) and time.monotonic() < end:
            _send(found, signal.SIGKILL)
            time.sleep(BUSY_SECONDS)


def _send(processes: Iterable[int], number: int) -> None:
    # A companion before its ranks, which it would report as lost.
    for process in sorted(processes, reverse=True):
        with contextlib.suppress(OSError):
            os.kill(process, number)
