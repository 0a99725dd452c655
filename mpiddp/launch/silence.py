"""Which hosts of a job do not answer, for the time before MPI could tell.

Inside MPI_Init nobody knows who is missing. Slurm has named the hosts, though, and a host that
is up refuses a connection to a port on which nobody listens, while one that is cut off says
nothing.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Sequence

DISCARD_PORT = 9
"""TCP's discard service (RFC 863): hardly ever there, and harmless where it is."""
MOST_HOSTS = 64
LONGEST_SECONDS = 4.0
"""The kernel gives up asking for a neighbour's address after three seconds."""
SILENT = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN)


def find_silent_hosts(hostnames: Sequence[str], seconds: float = LONGEST_SECONDS) -> dict[str, str]:
    """Of ``hostnames`` (the first 64 of them), those that do not answer, and what was found.

    Returns within ``seconds``, as far as they have been found out by then. A host behind a
    firewall that drops packets is among them.
    """
    asked = list(dict.fromkeys(hostnames))[:MOST_HOSTS]
    answers: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
    for name in asked:
        threading.Thread(
            target=lambda n=name: answers.put((n, _ask(n, seconds))),
            name=f"mpiddp-ask-{name}",
            daemon=True,
        ).start()
    found = dict.fromkeys(asked, "no answer")
    end = time.monotonic() + seconds
    for _ in asked:
        try:
            name, problem = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if problem is None:
            del found[name]
        else:
            found[name] = problem
    return found


def _ask(hostname: str, seconds: float) -> str | None:
    try:
        socket.create_connection((hostname, DISCARD_PORT), seconds).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        # A refusal is an answer; so is a name that this host cannot look up, for lack of proof.
        return error.strerror if error.errno in SILENT else None
    return None
