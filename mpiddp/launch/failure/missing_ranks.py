"""Who is missing when a phase has outlasted its deadline."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp.launch.failure.deadline import CLOSING, PHASES
from mpiddp.launch.failure.peers import Peers
from mpiddp.launch.failure.reporting_rank import REPORTERS, await_turn
from mpiddp.launch.failure.termination import may_call_mpi
from mpiddp.launch.failure.unreachable_hosts import find_silent_hosts
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.launcher.launcher import Launcher, hosts_of_step
from mpiddp.launch.mpi import pauses

if TYPE_CHECKING:
    from mpi4py import MPI

ANSWERS_SECONDS = 1.0
"""How long rank 0 listens for the others."""
POSITION_TAG = 1
SHOWN = 8
"""How many ranks a message names."""
LONGER = "to wait longer, increase --timeout SECONDS"


@dataclass(frozen=True)
class PhasePosition:
    """How far one rank has come when a deadline expires."""

    phase: str
    waits: bool
    """Whether it is done with the phase and only waits for the others."""
    line: str
    """Function, file and line that its main thread is in."""

    @property
    def progress(self) -> int:
        """Larger for a rank that has come further."""
        return 2 * PHASES.index(self.phase) + self.waits


def explain_expiry(phase: str, seconds: float, peers: Peers, *, waits: bool) -> str:
    """The message of a phase that outlasted ``seconds``; the ranks are asked where each one is.

    ``waits``: whether this rank is done with the phase. Ranks other than 0 return later: by then
    rank 0 has ended the job, unless it is missing itself.
    """
    communicator = peers.communicator
    assert communicator is not None
    rank = communicator.Get_rank()
    if not may_call_mpi():
        return describe_missing(phase, seconds, {}, peers.describe_rank)
    answers = gather_positions(communicator, PhasePosition(phase, waits, find_line()))
    if answers is not None:
        missing = find_missing(answers, communicator.Get_size())
        return describe_missing(phase, seconds, missing, peers.describe_rank)
    time.sleep(ANSWERS_SECONDS)
    await_turn(rank, 2 * REPORTERS)
    return describe_missing(phase, seconds, {0: "no answer"}, peers.describe_rank)


def gather_positions(
    communicator: MPI.Intracomm, mine: PhasePosition
) -> dict[int, PhasePosition] | None:
    """Collect on rank 0 what each rank answers within ANSWERS_SECONDS; None on the others.

    Runs beside a main thread that is stuck in MPI, on a separate communicator. Point-to-point
    on purpose: a collective would wait for exactly the ranks that are missing.
    """
    from mpi4py import MPI

    if communicator.Get_rank() != 0:
        communicator.isend(mine, 0, POSITION_TAG)
        return None
    answers = {0: mine}
    end = time.monotonic() + ANSWERS_SECONDS
    status = MPI.Status()
    while len(answers) < communicator.Get_size() and time.monotonic() < end:
        if communicator.iprobe(MPI.ANY_SOURCE, POSITION_TAG, status):
            source = status.Get_source()
            answers[source] = communicator.recv(source=source, tag=POSITION_TAG)
        else:
            time.sleep(0.01)
    return answers


def find_missing(answers: Mapping[int, PhasePosition], size: int) -> dict[int, str]:
    """The ranks that keep the others waiting, and what is known of each.

    They are those that did not answer, and those in an earlier phase than the furthest. If all
    are in the same one, they are those in another position than most; without a majority all.
    """
    missing = {rank: "no answer" for rank in range(size) if rank not in answers}
    furthest = max(answer.progress for answer in answers.values())
    for rank, answer in answers.items():
        if answer.progress < furthest:
            missing[rank] = f"still in {answer.phase!r}, {answer.line}"
    if missing:
        return missing
    (usual, count), *_ = Counter(answer.line for answer in answers.values()).most_common()
    return {
        rank: f"in {answer.line}"
        for rank, answer in answers.items()
        if answer.line != usual or 2 * count <= size or count == size
    }


def find_line() -> str:
    """Where the main thread of this process is: ``function (file.py:12)``.

    Ranks that wait at the same place are found at the same line, wherever in the wait they are.
    """
    frame = each = sys._current_frames().get(threading.main_thread().ident or 0)
    while each is not None:
        if each.f_code.co_filename == pauses.__file__:
            frame = each.f_back
        each = each.f_back
    if frame is None:
        return "unknown"
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def describe_missing(
    phase: str, seconds: float, missing: Mapping[int, str], name: Callable[[int], str]
) -> str:
    """The message of an expired deadline; ``name`` turns a rank into ``rank 3 on node002``."""
    what = (
        "closing the session did not end"
        if phase == CLOSING
        else f"start-up did not get past {phase!r}"
    )
    start = f"{what} within {seconds:g} s; "
    if not missing:
        return start + LONGER
    names = [f"{name(rank)} ({where})" for rank, where in sorted(missing.items())[:SHOWN]]
    if len(missing) > len(names):
        names.append(f"and {len(missing) - len(names)} more")
    return f"{start}waited for {', '.join(names)}. Look at what these do; {LONGER}"


def explain_silent_mpi(phase: str, seconds: float, launcher: Launcher | None) -> str:
    """The message of an expired MPI_Init or MPI_Finalize, which say nothing of the others."""
    if phase == CLOSING:
        return (
            f"MPI_Finalize did not return within {seconds:g} s: a rank was lost or stopped while "
            f"the session was closed; {LONGER}"
        )
    hosts = hosts_of_step()
    return describe_silent_init(launcher, seconds, len(hosts), find_silent_hosts(hosts))


def describe_silent_init(
    launcher: Launcher | None, seconds: float, hosts: int, silent: Mapping[str, str]
) -> str:
    """The message of an expired MPI_Init, in which only the launcher's word is known.

    Args:
        hosts: of the job, this one included; 0 if the launcher does not say.
        silent: those of them that do not answer, and what was found of each.
    """
    name = launcher.name if launcher is not None else "the launcher"
    size = launcher.size if launcher is not None else None
    start = (
        f"MPI_Init did not return within {seconds:g} s: {name} started {size or 'several'} ranks, "
        "and at least one of them did not come. "
    )
    if not silent:
        return (
            f"{start}Look for ranks that are stuck before mpiddp.init(), or nodes that cannot "
            f"reach each other; {LONGER}"
        )
    folded = fold_hostnames(list(silent))
    found = f"Not reached from here: {folded} ({', '.join(sorted(set(silent.values())))})"
    if len(silent) >= hosts - 1:
        return (
            f"{start}{found}, which is every other host: they are down, or this one is cut off, "
            "or a firewall lies between"
        )
    return (
        f"{start}{found}: down or cut off, or behind a firewall; srun --exclude={folded} does "
        "without"
    )
