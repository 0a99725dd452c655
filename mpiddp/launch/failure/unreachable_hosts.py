"""Which hosts of a job do not answer, for the time before MPI could tell.

Inside MPI_Init no rank knows which ranks are missing. Slurm has named the hosts, though, and a host
that is up refuses a connection to a port on which no process listens, while one that is cut off
does not answer.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from functools import partial

from mpiddp.process.background import BackgroundCalls

DISCARD_PORT = 9
"""TCP's discard service (RFC 863): hardly ever there, and harmless if it is."""
MOST_HOSTS = 64
LONGEST_SECONDS = 4.5
MARGIN_SECONDS = 0.3
"""The kernel gives up asking for a neighbour's address after three seconds."""
SILENT = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN)


def find_silent_hosts(hostnames: Sequence[str], seconds: float = LONGEST_SECONDS) -> dict[str, str]:
    """Of ``hostnames`` (the first 64 of them), those that do not answer, and what was found.

    Returns within ``seconds``. A host behind a firewall is among them: nothing tells the two apart.
    """
    asked = list(dict.fromkeys(hostnames))[:MOST_HOSTS]
    end = time.monotonic() + seconds
    calls = BackgroundCalls({name: partial(_ask, name, end - MARGIN_SECONDS) for name in asked})
    found = {}
    while (answer := calls.next_result(end)) is not None:
        name, problem = answer
        if problem is not None:
            found[name] = problem
    return {name: found[name] for name in asked if name in found}


def _ask(hostname: str, end: float) -> str | None:
    """What kept ``hostname`` from answering until ``end``; None if it answered, or unknown.

    A name that cannot be looked up, or not in time, is no proof.
    """
    try:
        found = socket.getaddrinfo(hostname, DISCARD_PORT, socket.AF_INET, socket.SOCK_STREAM)
        address = str(found[0][4][0])
        left = end - time.monotonic()
        if left <= 0:
            return None
        socket.create_connection((address, DISCARD_PORT), left).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror if error.errno in SILENT else None
    return None
