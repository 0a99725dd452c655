"""One voice per node for processes that cannot ask each other anything.

Processes of one launch on one node have the same parent, the launcher's daemon. The first of
them to bind a socket of that name, in Linux's abstract namespace, holds the claim until it ends;
nothing is left behind. Anybody can guess the name and take it, but nobody can pretend to be this
user: the kernel says whose process listens on a socket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from dataclasses import dataclass

from mpiddp import environment

LISTENING_SECONDS = 0.2
"""How long a holder may take from binding to listening."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group: struct ucred of unix(7)."""


@dataclass(frozen=True)
class Claim:
    """The right to speak for the processes of this launch on this node, until it is let go."""

    holder: socket.socket
    note: str = ""
    """A line for the report, where others may speak as well."""


def claim_node() -> Claim | None:
    """The claim, to be kept as long as it shall hold; None if another process of ours has it.

    Where the system has no such sockets, or a stranger has taken the name, everyone gets one:
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
    """The user whose process listens there; None where nobody answers."""
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
                answer = question.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size
                )
                user: int = CREDENTIALS.unpack(answer)[1]
                return user
        time.sleep(0.01)
