"""Lines of JSON over connections that never block."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from typing import Any

RECEIVED_BYTES = 1 << 16
LONGEST_LINE = 1 << 26
"""Bytes; above what the stacks and records of all ranks of a large job take."""


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
        """Send a message, now or, if the other end takes no more, by ``flush``."""
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

        Raises OSError once the other end has gone, and ValueError if a line is longer than
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


def listen_locally() -> socket.socket:
    """A listening socket for processes of this machine, under a name that the kernel picks."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("")
    server.listen(socket.SOMAXCONN)
    return server


def describe_server(server: socket.socket) -> str:
    """What ``open_connection`` is given to reach ``server``."""
    found = server.getsockname()
    if server.family == socket.AF_UNIX:
        name: bytes = found[1:]
        return f"@{name.decode()}"
    return f"{found[0]}:{found[1]}"


def encode_token(token: str) -> bytes:
    """What a caller sends first."""
    return token.encode() + b"\n"


def open_connection(place: str, seconds: float) -> socket.socket:
    """A connection to the server that ``describe_server`` calls ``place``. Raises OSError."""
    if not place.startswith("@"):
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)), seconds)
    with contextlib.ExitStack() as unused:
        connection = unused.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(seconds)
        connection.connect(b"\0" + place[1:].encode())
        unused.pop_all()
    return connection


def connect(place: str, token: str, seconds: float) -> Link:
    """Connect to a server that knows ``token``. Raises OSError."""
    connection = open_connection(place, seconds)
    connection.sendall(encode_token(token))
    return Link(connection)
