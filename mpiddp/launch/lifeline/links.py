"""Lines of JSON over connections that never block, and the listening sockets they come from."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from mpiddp.launch.peer_user import find_user

RECEIVED_BYTES = 1 << 16
LONGEST_LINE = 1 << 24
"""Bytes; above what the stacks of all ranks of a large job take."""
TOKEN_BYTES = 16
MOST_UNAUTHENTICATED = 64
"""Connections that have not sent a token yet; one more takes the place of the first of them."""
GREETING_SECONDS = 5.0
"""How long a caller may take to send its token."""


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message, now or, where the other end takes no more, by ``flush``."""
        self._unsent += json.dumps([kind, content]).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left. That the other end has gone is found by ``receive``."""
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> list[tuple[str, Any]]:
        """The messages that have come: kind and content of each.

        Raises OSError once the other end has gone, and ValueError where a line is longer than
        LONGEST_LINE or no message.
        """
        try:
            piece = self.connection.recv(RECEIVED_BYTES)
        except BlockingIOError:
            return []
        if not piece:
            raise ConnectionResetError("the other end has gone")
        self._received += piece
        if len(self._received) > LONGEST_LINE:
            raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
        if b"\n" not in piece:
            return []
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        return [_read_message(line) for line in lines]

    def wait(self, seconds: float) -> bool:
        """Whether something comes within ``seconds``."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            return bool(selector.select(None if seconds == float("inf") else seconds))

    def close(self) -> None:
        self.connection.close()


def _read_message(line: bytes | bytearray) -> tuple[str, Any]:
    try:
        kind, content = json.loads(line)
    except (TypeError, RecursionError) as error:
        raise ValueError("no message") from error
    return str(kind), content


class TokenListener:
    """A listening socket, and its callers that have not sent a token yet."""

    def __init__(
        self,
        server: socket.socket,
        selector: selectors.BaseSelector,
        admit: Mapping[str, Callable[[Link], object]],
    ) -> None:
        """``admit``: who takes over the connections of callers that sent a token, by token."""
        self._server = server
        self._selector = selector
        self._admit = {token.encode() + b"\n": take for token, take in admit.items()}
        self._longest = max(map(len, self._admit))
        self._heard: dict[socket.socket, tuple[float, bytes]] = {}
        """Until when each may take, and what it has said; the first to connect comes first."""
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ, self._accept)

    def close_late(self, now: float) -> None:
        """Close the connections that took too long."""
        for caller in [each for each, (until, _) in self._heard.items() if until < now]:
            self._forget(caller).close()

    def _accept(self, _: int) -> None:
        try:
            caller, _address = self._server.accept()
        except OSError:
            return  # It went away between the event and the accept.
        if caller.family == socket.AF_UNIX and find_user(caller) != os.geteuid():
            caller.close()
            return
        now = time.monotonic()
        self.close_late(now)
        if len(self._heard) == MOST_UNAUTHENTICATED:
            self._forget(next(iter(self._heard))).close()
        caller.setblocking(False)
        self._heard[caller] = (now + GREETING_SECONDS, b"")
        self._selector.register(caller, selectors.EVENT_READ, lambda _: self._hear(caller))

    def _hear(self, caller: socket.socket) -> None:
        """Read no more than a token."""
        if caller not in self._heard:
            return  # It was closed after the event.
        until, said = self._heard[caller]
        try:
            piece = caller.recv(self._longest - len(said))
        except OSError:
            piece = b""
        said += piece
        if piece and len(said) < self._longest:
            self._heard[caller] = (until, said)
            return
        self._forget(caller)
        for token, take in self._admit.items():
            if hmac.compare_digest(said, token):
                take(Link(caller))
                return
        caller.close()

    def _forget(self, caller: socket.socket) -> socket.socket:
        self._selector.unregister(caller)
        del self._heard[caller]
        return caller

    def close(self) -> None:
        for caller in list(self._heard):
            self._forget(caller).close()
        self._selector.unregister(self._server)
        self._server.close()


def listen(address: str) -> socket.socket:
    """A listening socket on an IPv4 address, at a port that the kernel picks."""
    return socket.create_server((address, 0))


def listen_locally() -> socket.socket:
    """A listening socket for processes of this machine, under a name that the kernel picks."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("")
    server.listen(socket.SOMAXCONN)
    return server


def describe_server(server: socket.socket) -> str:
    """What ``connect`` is given to reach ``server``."""
    found = server.getsockname()
    if server.family == socket.AF_UNIX:
        name: bytes = found[1:]
        return f"@{name.decode()}"
    return f"{found[0]}:{found[1]}"


def connect(place: str, token: str, seconds: float) -> Link:
    """Connect to a server that knows ``token``. Raises OSError."""
    if place.startswith("@"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as unused:
            unused.callback(connection.close)
            connection.settimeout(seconds)
            connection.connect(b"\0" + place[1:].encode())
            unused.pop_all()
    else:
        host, _, port = place.rpartition(":")
        connection = socket.create_connection((host, int(port)), seconds)
    connection.sendall(token.encode() + b"\n")
    return Link(connection)
