"""Lines of JSON over TCP: how the command tells ranks what to measure, and is told the times.

Who waits for a line sleeps, in a read: two jobs can live side by side on few cores, and the one
that does not measure takes none of them.
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

GREETING_SECONDS = 5.0
"""How long who connects may take to say the token."""
LOOK_SECONDS = 0.2
"""Between two looks at whether those who should connect are still alive."""


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, message: Any) -> None:
        """Write one line. Raises OSError where the other end has gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Any:
        """The next line; None once the other end has gone.

        Raises TimeoutError after ``seconds``; the line is of no use then.
        """
        self._connection.settimeout(seconds)
        try:
            text = self._reader.readline()
        except ConnectionError:
            return None
        self._connection.settimeout(None)
        # Half a line is what remains of a writer that died.
        return json.loads(text) if text.endswith(b"\n") else None

    def close(self) -> None:
        """Close this end."""
        self._reader.close()
        self._connection.close()


def _make_line(connection: socket.socket) -> Line:
    """A line over TCP: nothing waits in it for more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Line(connection)


def listen(host: str) -> socket.socket:
    """A listening socket at a port that the kernel chooses; ``host`` may be empty, for all."""
    return socket.create_server((host, 0))


def get_port(server: socket.socket) -> int:
    """The port that it listens on."""
    return int(server.getsockname()[1])


def accept(
    server: socket.socket, token: str, seconds: float, check: Callable[[], None] = lambda: None
) -> tuple[Line, Any]:
    """Wait for somebody who knows ``token``; returns the line and what was said with it.

    ``check`` is called now and then; what it raises ends the wait. Raises TimeoutError.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        server.settimeout(LOOK_SECONDS)
        try:
            line = _make_line(server.accept()[0])
        except TimeoutError:
            continue
        found = _receive_greeting(line)
        if isinstance(found, dict) and hmac.compare_digest(str(found.get("token")), token):
            return line, found.get("greeting")
        line.close()
    raise TimeoutError(f"nobody connected within {seconds:g} s")


def _receive_greeting(line: Line) -> Any:
    try:
        return line.receive(GREETING_SECONDS)
    except (OSError, ValueError):
        return None


def connect(addresses: Sequence[str], token: str, greeting: Any, seconds: float) -> Line:
    """Connect to the first ``HOST:PORT`` that answers. Raises OSError if none does."""
    errors = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=seconds)
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        connection.settimeout(None)
        line = _make_line(connection)
        line.send({"token": token, "greeting": greeting})
        return line
    raise ConnectionError("; ".join(errors) or "no address to connect to")
