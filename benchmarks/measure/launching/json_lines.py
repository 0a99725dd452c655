"""Lines of JSON over TCP: commands to the ranks, and their answers.

A process that waits for a line sleeps in a read: two jobs can share few cores, and the one that
does not measure uses none of them.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.process.sockets.listener import ListeningThread

GREETING_SECONDS = 5.0
"""Time limit of the greeting that follows the token."""
LOOK_SECONDS = 0.2
"""Between two checks that the processes that should connect are still alive."""
RECEIVED_BYTES = 1 << 16
LONGEST_LINE = 1 << 26
"""Bytes; far above what ranks answer."""


class JsonLine:
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


def _make_line(connection: socket.socket) -> JsonLine:
    """A line over TCP: nothing waits in it for more."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return JsonLine(connection)


def listen(host: str) -> socket.socket:
    """A listening socket at a port that the kernel chooses; ``host`` may be empty, for all."""
    return socket.create_server((host, 0), backlog=socket.SOMAXCONN)


def get_port(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def accept(
    server: socket.socket,
    token: str,
    count: int,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> list[tuple[JsonLine, Any]]:
    """Wait for ``count`` callers that know ``token``; returns their lines and greetings.

    ``check`` is called now and then; what it raises ends the wait. Raises TimeoutError after
    ``seconds``.
    """
    end, word = time.monotonic() + seconds, token.encode() + b"\n"
    found: list[tuple[JsonLine, Any]] = []
    known: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    # What is put into the queue is read by this thread alone.
    thread = ListeningThread([server], {word: known.put})
    with contextlib.closing(thread), contextlib.ExitStack() as unused:
        while len(found) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(found)} of {count} connected within {seconds:g} s")
            check()
            try:
                line = _make_line(known.get(timeout=LOOK_SECONDS))
            except queue.Empty:
                continue
            try:
                found.append((line, line.receive(GREETING_SECONDS)))
            except (OSError, ValueError):
                line.close()
            else:
                unused.callback(line.close)
        unused.pop_all()
    return found


def connect(addresses: Sequence[str], token: str, greeting: Any, seconds: float) -> JsonLine:
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
