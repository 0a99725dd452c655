"""Which one of the failing ranks reports, so that one failure gives one report.

Over MPI the ranks agree on the lowest that failed; later the lifeline decides. Processes that
cannot ask each other anything have one reporter per node. They have the same parent, the launcher's
daemon: the first of them to bind a socket of that name, in Linux's abstract namespace, holds the
claim until it ends; nothing is left behind. Another user can guess the name and take it, but not
unnoticed: the kernel says whose process listens on a socket.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp import environment
from mpiddp.launch.mpi import mpi
from mpiddp.process.sockets.peer_user import find_user

if TYPE_CHECKING:
    from mpi4py import MPI

ANSWER_SECONDS = 0.5
"""How long a failing rank waits for the others' answer before it reports itself."""
REPORTERS = 4
"""How many ranks may have to step in for each other if no rank can be asked."""
LISTENING_SECONDS = 2.0
"""How long the holder of a claim may take from binding to listening; it may be descheduled."""


def agree_on_failure(
    communicator: MPI.Intracomm, code: int | None, seconds: float
) -> tuple[int, int] | None:
    """The lowest rank that failed in this phase of start-up, and its exit code. Collective.

    ``code`` is this rank's own exit code, None if it did not fail. Returns None if no rank did,
    or if not all have come within ``seconds``.
    """
    from mpi4py import MPI

    none = communicator.Get_size() << 8
    mine = none if code is None else communicator.Get_rank() << 8 | code
    buffer, lowest = array.array("q", [mine]), array.array("q", [none])
    request = communicator.Iallreduce([buffer, MPI.INT64_T], [lowest, MPI.INT64_T], op=MPI.MIN)
    if not mpi.wait(request, seconds) or lowest[0] >= none:
        return None
    return lowest[0] >> 8, lowest[0] & 0xFF


def await_turn(rank: int, last: int = REPORTERS) -> None:
    """Sleep, so that ranks report one after the other and the first one ends the job.

    Ranks from ``last`` on take their turn together.
    """
    time.sleep(min(rank, last) * ANSWER_SECONDS)


@dataclass(frozen=True)
class Claim:
    """The right to report for the processes of this launch on this node, until it is let go."""

    holder: socket.socket
    note: str = ""
    """A line for the report, if others may report as well."""


def claim_node() -> Claim | None:
    """The claim, to be kept as long as it shall hold; None if another process of ours has it.

    If the system has no such sockets, or a stranger has taken the name, everyone gets one:
    rather many reports than none.
    """
    name = _name_claim()
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(name)
        holder.listen(socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Claim(holder)
        user = _find_holder(name)
        if user != os.geteuid():
            who = "another user" if user is None else f"user {user}"
            return Claim(holder, f"mpiddp: {who} has taken {name[1:]!r}; each process reports\n")
        holder.close()
        return None
    return Claim(holder)


def _name_claim() -> str:
    """The same for all processes of this launch on this node, and for no others of this user.

    Containers may share the names of sockets, but not the numbers of processes.
    """
    launch = [os.environ.get(name, "") for name in environment.LAUNCH_IDENTITY]
    with contextlib.suppress(OSError):
        launch.append(os.readlink("/proc/self/ns/pid"))
    digest = hashlib.sha256("\n".join(launch).encode()).hexdigest()[:16]
    return f"\0mpiddp-{os.geteuid()}-{os.getppid()}-{digest}"


def _find_holder(name: str) -> int | None:
    """The user whose process listens there; None if no process answers."""
    end = time.monotonic() + LISTENING_SECONDS
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
            question.setblocking(False)  # A queue that somebody has filled is no answer either.
            try:
                question.connect(name)
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    return None
            except OSError:
                return None
            else:
                return find_user(question)
        time.sleep(0.01)
