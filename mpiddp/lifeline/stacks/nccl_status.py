"""What NCCL's own watch (RAS, from NCCL 2.24 on) knows of a job: which processes do not answer, and
which ranks are behind in how many collectives.

Each process of a job listens at NCCL_RAS_ADDR of its node, and answers for all of the job. It takes
lines of text (NVIDIA's manual, chapter RAS, and nccl/src/ras/client.cc, read in 2026-11).
"""

from __future__ import annotations

import contextlib
import socket
import time

VERSION = b"CLIENT PROTOCOL 2\n"
"""A server of another version answers nevertheless."""
GREETING = b"SERVER PROTOCOL "
FIRST_SECONDS = 0.3
"""How long the process may take that has accepted; another one is tried then."""
ATTEMPTS = 3
PEER_SECONDS = 1
"""How long NCCL waits for its other processes, a whole number."""
MOST_SECONDS = 2.0
MOST_BYTES = 1 << 20


def ask(address: str) -> str:
    """NCCL's report, under a title; a line that says why there is none.

    ``address``: ``HOST:PORT``, as in NCCL_RAS_ADDR.
    """
    host, _, port = address.rpartition(":")
    end, problem = time.monotonic() + MOST_SECONDS, "no port"
    for _ in range(ATTEMPTS if port.isdigit() else 0):
        try:
            with socket.create_connection((host.strip("[]"), int(port)), FIRST_SECONDS) as link:
                return f"NCCL, by its RAS at {address}:\n{_converse(link, end)}"
        except OSError as error:
            # The kernel hands a connection to any process of the job, of which some may hang.
            problem = error.strerror or str(error) or type(error).__name__
    return f"NCCL's RAS at {address} does not answer: {problem}\n"


def _converse(link: socket.socket, end: float) -> str:
    """Raises OSError."""
    for line, expected in ((VERSION, GREETING), (b"TIMEOUT %d\n" % PEER_SECONDS, b"OK")):
        link.sendall(line)
        answer = b""
        while not answer.endswith(b"\n") and (piece := link.recv(1 << 10)):
            answer += piece
        if not answer.startswith(expected):
            raise OSError(f"it says {answer[:80]!r}")
    link.sendall(b"VERBOSE STATUS\n")
    found = b""
    with contextlib.suppress(TimeoutError):  # What has come by then is shown.
        while (seconds := end - time.monotonic()) > 0 and len(found) < MOST_BYTES:
            link.settimeout(seconds)
            piece = link.recv(1 << 16)
            if not piece:
                break
            found += piece
    return found.decode(errors="replace")
