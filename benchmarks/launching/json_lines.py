"""Lines of JSON over TCP: commands to the ranks, and their answers.

A process that waits for a line sleeps in a read: two jobs can share few cores, and the one that
does not measure uses none of them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

GREETING_SECONDS = 5.0
"""Time limit of a caller's token, and then of its greeting."""
LOOK_SECONDS = 0.2
"""Between two checks that the processes that should connect are still alive."""
MOST_CALLERS = 64
"""Connections that have not sent the token yet. Another one replaces the first of them: a rank
sends it at once."""
RECEIVED_BYTES = 1 << 16
LONGEST_LINE = 1 << 26
"""Bytes; far above what ranks answer."""


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    def send(self, message: Any) -> None:
        """Write one line. Raises OSError where the other end has gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Any:
        """The next line; None once the other end has gone.

        Raises TimeoutError where it is not complete after ``seconds``, and ValueError where it is
        longer than LONGEST_LINE or no JSON; the line is of no use then.
        """
        end = None if seconds is None else time.monotonic() + seconds
        pieces, size = [self._received], len(self._received)
        while b"\n" not in pieces[-1]:
            if size > LONGEST_LINE:
                raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
            try:
                pieces.append(self._receive_piece(end))
            except ConnectionError:
                return None
            if not pieces[-1]:
                # Half a line is what remains of a writer that died.
                return None
            size += len(pieces[-1])
        text, _, self._received = b"".join(pieces).partition(b"\n")
        return json.loads(text)

    def _receive_piece(self, end: float | None) -> bytes:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv(RECEIVED_BYTES)
        finally:
            self._connection.settimeout(None)

    def close(self) -> None:
        self._connection.close()


def _make_line(connection: socket.socket) -> Line:
    """A line over TCP: nothing waits in it for more."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Line(connection)


def listen(host: str) -> socket.socket:
    """A listening socket at a port that the kernel chooses; ``host`` may be empty, for all."""
    return socket.create_server((host, 0))


def get_port(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def accept(
    server: socket.socket,
    token: str,
    count: int,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> list[tuple[Line, Any]]:
    """Wait for ``count`` callers that know ``token``; returns their lines and greetings.

    Nothing of what a caller sends is read beyond the token before the token is right, and no caller
    is waited for alone: strangers keep nobody out. ``check`` is called now and then; what it raises
    ends the wait. Raises TimeoutError after ``seconds``.
    """
    end = time.monotonic() + seconds
    found: list[tuple[Line, Any]] = []
    with contextlib.ExitStack() as unused:
        callers = _Callers(server, token)
        unused.callback(callers.close)
        while len(found) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(found)} of {count} connected within {seconds:g} s")
            check()
            for line in callers.listen(LOOK_SECONDS):
                try:
                    found.append((line, line.receive(GREETING_SECONDS)))
                except (OSError, ValueError):
                    line.close()
                else:
                    unused.callback(line.close)
        callers.close()
        unused.pop_all()
    return found


class _Callers:
    """Connections to ``server`` that have not sent ``token`` yet."""

    def __init__(self, server: socket.socket, token: str) -> None:
        self._server = server
        self._token = token.encode() + b"\n"
        self._heard: dict[socket.socket, tuple[float, bytes]] = {}
        """Until when each may take, and what it has said; the first to connect comes first."""
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def listen(self, seconds: float) -> list[Line]:
        """The lines of those that have now sent the token; waits up to ``seconds``."""
        found = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._admit()
            elif key.fileobj in self._heard and self._hear(key.fileobj):
                self._forget(key.fileobj)
                found.append(_make_line(key.fileobj))
        now = time.monotonic()
        for caller in [each for each, (until, _) in self._heard.items() if until < now]:
            self._drop(caller)
        return found

    def _admit(self) -> None:
        try:
            caller, _ = self._server.accept()
        except OSError:
            return  # It went away between the event and the accept.
        if len(self._heard) == MOST_CALLERS:
            self._drop(next(iter(self._heard)))
        caller.setblocking(False)
        self._heard[caller] = (time.monotonic() + GREETING_SECONDS, b"")
        self._selector.register(caller, selectors.EVENT_READ)

    def _hear(self, caller: socket.socket) -> bool:
        """Read no more than the token; whether it is now complete and right."""
        until, said = self._heard[caller]
        try:
            piece = caller.recv(len(self._token) - len(said))
        except OSError:
            piece = b""
        said += piece
        self._heard[caller] = (until, said)
        if piece and len(said) < len(self._token):
            return False
        if hmac.compare_digest(said, self._token):
            return True
        self._drop(caller)
        return False

    def _forget(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._heard[caller]

    def _drop(self, caller: socket.socket) -> None:
        self._forget(caller)
        caller.close()

    def close(self) -> None:
        """Close the connections that have not become lines; the server stays open."""
        for caller in list(self._heard):
            self._drop(caller)
        self._selector.close()


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
        line = _make_line(connection)
        connection.sendall(token.encode() + b"\n")
        line.send(greeting)
        return line
    raise ConnectionError("; ".join(errors) or "no address to connect to")
