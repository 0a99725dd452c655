"""Keeps what MPICH tells Slurm, while it starts, within what Slurm reads.

Under ``srun --mpi=pmi2`` MPICH speaks PMI-1, whose commands are lines. Slurm takes a command to be
what one ``read`` of 1024 bytes gives (``handle_pmi1_cmd`` in ``plugins/mpi/pmi2/pmi1.c``: "TODO:
read until newline", up to 26.05), and cuts off what is longer. MPICH publishes its network address
in hexadecimal values as long as Slurm allows a value to be, 1024 again, to which the command's
other words come; and it publishes 4096 bytes whatever the address's length
(``MPIDI_UCX_comm_addr_exchange``), the rest being whatever lies behind it in memory. Runs of zeros
are shortened, so most starts stay below the limit; one whose memory holds something denser there
loses a part of the address, and MPI_Init aborts or hangs.

So Slurm's answer to "how long may a value be" is changed on its way to MPICH.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import threading
from collections.abc import Iterator

from mpiddp import environment
from mpiddp.launch.launcher import Launcher

LONGEST_COMMAND = 1024
"""What Slurm reads of a command, in bytes."""
OTHER_WORDS = 124
"""What a command has beside its value: ``cmd=put kvsname= key= value=`` and a newline are 28 bytes,
a key at most 64, and Slurm's name of the store, the numbers of job and step, at most 21."""
LONGEST_VALUE = LONGEST_COMMAND - OTHER_WORDS
"""Even, as it must be: of an odd limit MPICH's sender and receiver make segments of two sizes."""
ROOM = 1 << 16
ANSWER = re.compile(rb"\b(vallen_max=)(\d+)\b")


@contextlib.contextmanager
def shortened_values(version: str, launcher: Launcher | None) -> Iterator[None]:
    """While the body initialises MPI, let it publish only values that Slurm reads to their end.

    The library keeps the limit that it was told. Its connection is Slurm's own again afterwards.
    Does nothing for other libraries than MPICH, or without Slurm's PMI.

    Args:
        version: of the MPI library, as MPI_Get_library_version says it.
        launcher: that started this process.
    """
    descriptor = find_descriptor(version, launcher)
    if descriptor is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        server = os.dup(descriptor)
        stack.callback(os.close, server)
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        relay = threading.Thread(target=_relay, args=(server, ours), name="mpiddp-pmi", daemon=True)
        relay.start()
        stack.callback(relay.join)
        stack.callback(ours.shutdown, socket.SHUT_RDWR)
        inheritable = os.get_inheritable(descriptor)
        with theirs:
            os.dup2(theirs.fileno(), descriptor, inheritable)
        stack.callback(os.dup2, server, descriptor, inheritable)
        yield


def find_descriptor(version: str, launcher: Launcher | None) -> int | None:
    """The file descriptor over which MPICH will speak to Slurm, or None where it will not."""
    if launcher is None or launcher.key != "slurm" or not version.startswith("MPICH"):
        return None
    try:
        descriptor = int(os.environ.get(environment.PMI_DESCRIPTOR, ""))
        os.fstat(descriptor)
    except (ValueError, OSError):
        return None
    return descriptor


def shorten_answer(answer: bytes) -> bytes:
    """An answer of Slurm's, with a limit on values that its commands leave room for."""
    return ANSWER.sub(lambda found: found[1] + b"%d" % min(int(found[2]), LONGEST_VALUE), answer)


def _relay(server: int, ours: socket.socket) -> None:
    """Carry commands and answers until either side closes.

    Each is one write on its side and at most one is under way, so what a read gives is whole.
    """
    client = ours.fileno()
    with selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
        selector.register(server, selectors.EVENT_READ)
        selector.register(client, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                data = os.read(ready.fd, ROOM)
                if not data:
                    ours.shutdown(socket.SHUT_RDWR)
                    return
                if ready.fd == client:
                    os.write(server, data)
                else:
                    os.write(client, shorten_answer(data))
