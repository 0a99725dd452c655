"""Keeps what MPICH tells Slurm, while it starts, within what Slurm reads.

Under ``srun --mpi=pmi2`` MPICH speaks PMI-1, whose commands are lines. Slurm takes a command to be
what one ``read`` of 1024 bytes gives (``handle_pmi1_cmd`` in ``plugins/mpi/pmi2/pmi1.c``: "TODO:
read until newline", up to 26.05), and cuts off what is longer. MPICH publishes its network address
in hexadecimal values as long as Slurm allows a value to be, 1024 again, to which the command's
other words come; and it publishes 4096 bytes whatever the address's length
(``MPIDI_UCX_comm_addr_exchange``), the rest being whatever lies behind it in memory. Runs of zeros
are shortened, so most starts stay below the limit; one whose memory holds something denser there
loses a part of the address, and MPI_Init aborts or hangs.

So Slurm's answer to "how long may a value be" is changed on its way to MPICH. All ranks must be
told the same, since they cut and join long values by it: a job in which a part of the ranks
initialises MPI by itself is not helped. MPICH would also cut what it reads to that length; the one
longer value that Slurm has, which rank is on which node of an irregular layout, it finds out by
itself if Slurm does not tell.

Each message takes the interpreter's lock: beside the import of torch, which takes longer still,
MPI_Init of four ranks on two nodes took 3.1 s instead of 2.7.
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
from mpiddp.launch.launcher.launcher import Launcher

LONGEST_COMMAND = 1024
"""What Slurm reads of a command, in bytes."""
OTHER_WORDS = 29 + 64 + 21
"""What a command has beside its value: ``cmd=put kvsname= key= value=`` and a newline, a key, and
Slurm's name of the store, which is the numbers of job and step; each at its longest."""
LONGEST_VALUE = (LONGEST_COMMAND - OTHER_WORDS) // 2 * 2
"""With a byte for the end. Even: of an odd limit MPICH makes segments of one size where it cuts a
value, and of a different size where it joins them."""
ROOM = 1 << 16
LIMIT = re.compile(rb"\b(vallen_max=)(\d+)\b")
VALUE = re.compile(rb"^cmd=get_result\b.*\bvalue=(\S*)")
NOT_FOUND = b"cmd=get_result rc=1\n"


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
    """The file descriptor over which MPICH will speak to Slurm, or None if it will not."""
    if launcher is None or launcher.key != "slurm" or not version.startswith("MPICH"):
        return None
    try:
        descriptor = int(os.environ.get(environment.PMI_DESCRIPTOR, ""))
        os.fstat(descriptor)
    except (ValueError, OSError):
        return None
    return descriptor


def shorten_answer(answer: bytes) -> bytes:
    """An answer of Slurm's, with a limit on values that its commands leave room for.

    A value that is longer is said not to be there.
    """
    value = VALUE.match(answer)
    if value is not None and len(value[1]) >= LONGEST_VALUE:
        return NOT_FOUND
    return LIMIT.sub(lambda found: found[1] + b"%d" % min(int(found[2]), LONGEST_VALUE), answer)


def _relay(server: int, ours: socket.socket) -> None:
    """Carry commands and answers until either side closes.

    Each is one write on its side and at most one is under way, so what a read gives is whole.
    """
    client = ours.fileno()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(OSError))
        # However it ends, MPICH must not wait for answers that never come.
        stack.callback(ours.shutdown, socket.SHUT_RDWR)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        selector.register(client, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                data = os.read(ready.fd, ROOM)
                if not data:
                    return
                if ready.fd == client:
                    os.write(server, data)
                else:
                    os.write(client, shorten_answer(data))
