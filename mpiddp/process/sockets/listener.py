"""Listening sockets for callers who know a token.

A caller is unauthenticated until it has sent a token. Nothing else that it sends is read, and
nothing is sent to it. Strangers may connect as often as they like: the number of unauthenticated
connections is bounded, each is closed after GREETING_SECONDS in all, and callers who know the
token are admitted meanwhile.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpiddp.process.sockets.peer_user import find_user

MOST_UNAUTHENTICATED = 256
"""Connections; one more takes the place of the oldest."""
FILES_SHARE = 4
"""They take at most one in so many of the files that this process may open."""
GREETING_SECONDS = 5.0
"""How long a caller may take to send its token."""
SPARED_SECONDS = 0.25
"""A connection that is younger is not closed for another: its token may be on the way. Meanwhile
callers wait in the kernel's queue."""
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
NEVER = float("inf")


class TokenListener:
    """Accepts connections for a selector's owner, and admits callers that have sent a token.

    The owner calls each key's ``data`` with the events that came, and ``refresh`` when it is due.
    """

    def __init__(
        self,
        servers: Iterable[socket.socket],
        selector: selectors.BaseSelector,
        admit: Mapping[bytes, Callable[[socket.socket], object]],
    ) -> None:
        """``servers``: listening sockets, which stay their owner's.

        ``admit``: the tokens, which are of one length, and who takes over the connections, which
        never block, of callers that have sent them.
        """
        (self._length,) = {len(token) for token in admit}
        self._servers = list(servers)
        self._selector = selector
        self._admit = admit
        self._heard: dict[socket.socket, tuple[float, bytes]] = {}
        """When each has connected, and what it has sent; the oldest comes first."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST_UNAUTHENTICATED
        if files != resource.RLIM_INFINITY:
            self._most = min(self._most, files // FILES_SHARE)
        self._paused_until = NEVER
        """When connections are accepted again; NEVER while they are accepted."""
        for server in self._servers:
            server.setblocking(False)
        self._watch_servers()

    def find_time(self) -> float:
        """When ``refresh`` is due, by time.monotonic()."""
        return min(self._paused_until, self._find_oldest() + GREETING_SECONDS)

    def refresh(self, now: float) -> None:
        """Close the connections that took too long; accept again after a pause."""
        while self._find_oldest() + GREETING_SECONDS <= now:
            self._drop_oldest()
        if self._paused_until <= now:
            self._paused_until = NEVER
            self._watch_servers()

    def close(self) -> None:
        """Close the connections that are not admitted, and leave the selector."""
        while self._heard:
            self._drop_oldest()
        self._leave_servers()
        self._paused_until = NEVER

    def _watch_servers(self) -> None:
        for server in self._servers:
            self._selector.register(
                server, selectors.EVENT_READ, lambda _, server=server: self._accept(server)
            )

    def _leave_servers(self) -> None:
        if self._paused_until == NEVER:
            for server in self._servers:
                self._selector.unregister(server)

    def _accept(self, server: socket.socket) -> None:
        if self._paused_until != NEVER:
            return  # Another server's event came first.
        now = time.monotonic()
        if len(self._heard) >= self._most and not self._make_room(now):
            return
        try:
            caller, _ = server.accept()
        except OSError as error:
            # Otherwise it went away between the event and the accept.
            if error.errno in NO_DESCRIPTOR:
                self._make_room(now)
            return
        if caller.family == socket.AF_UNIX and find_user(caller) != os.geteuid():
            caller.close()
            return
        caller.setblocking(False)
        self._heard[caller] = (now, b"")
        self._selector.register(caller, selectors.EVENT_READ, lambda _: self._hear(caller))
        # A caller that waited in the kernel's queue may have sent its token by now.
        self._hear(caller)

    def _make_room(self, now: float) -> bool:
        """Close the oldest connection; pause, and return False, if all are too young."""
        until = (self._find_oldest() if self._heard else now) + SPARED_SECONDS
        if until > now:
            self._leave_servers()
            self._paused_until = until
            return False
        self._drop_oldest()
        return True

    def _find_oldest(self) -> float:
        """When the oldest has connected; NEVER if there is none."""
        return next(iter(self._heard.values()), (NEVER, b""))[0]

    def _drop_oldest(self) -> None:
        self._forget(next(iter(self._heard))).close()

    def _hear(self, caller: socket.socket) -> None:
        """Read no more than a token."""
        if caller not in self._heard:
            return  # It was closed after the event.
        since, said = self._heard[caller]
        try:
            piece = caller.recv(self._length - len(said))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        said += piece
        if piece and len(said) < self._length:
            self._heard[caller] = (since, said)
            return
        self._forget(caller)
        for token, take in self._admit.items():
            if hmac.compare_digest(said, token):
                take(caller)
                return
        caller.close()

    def _forget(self, caller: socket.socket) -> socket.socket:
        self._selector.unregister(caller)
        del self._heard[caller]
        return caller


Serve = Callable[[], int]
"""Does for one connection what can be done now. Returns the events to wait for, 0 at the end;
OSError is the end as well."""


class ListeningThread:
    """A thread that accepts connections, and serves callers that know a token, until it is closed.

    The listening sockets stay their owner's.
    """

    def __init__(
        self,
        servers: Iterable[socket.socket],
        admit: Mapping[bytes, Callable[[socket.socket], Serve | None]],
    ) -> None:
        """``admit``: by token, a function that returns what serves an admitted connection.

        None if the function has taken over the connection, which is closed here otherwise.
        """
        self._wake, self._alarm = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._served: set[socket.socket] = set()
        begin = {token: self._make_begin(make) for token, make in admit.items()}
        self._listener = TokenListener(servers, self._selector, begin)
        self._thread = threading.Thread(target=self._run, name="mpiddp-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and close every connection."""
        self._alarm.send(b"x")
        self._thread.join()
        self._wake.close()
        self._alarm.close()

    def _make_begin(
        self, make: Callable[[socket.socket], Serve | None]
    ) -> Callable[[socket.socket], None]:
        def begin(connection: socket.socket) -> None:
            serve = make(connection)
            if serve is not None:
                self._served.add(connection)
                self._selector.register(
                    connection, selectors.EVENT_READ, lambda _: self._serve(connection, serve)
                )
                self._serve(connection, serve)

        return begin

    def _serve(self, connection: socket.socket, serve: Serve) -> None:
        try:
            events = serve()
        except OSError:
            events = 0
        if events:
            self._selector.modify(connection, events, self._selector.get_key(connection).data)
        else:
            self._served.remove(connection)
            self._selector.unregister(connection)
            connection.close()

    def _run(self) -> None:
        try:
            while True:
                due = self._listener.find_time()
                pause = None if due == NEVER else max(0.0, due - time.monotonic())
                for key, events in self._selector.select(pause):
                    if key.fileobj is self._wake:
                        return
                    take: Any = key.data
                    take(events)
                self._listener.refresh(time.monotonic())
        finally:
            self._listener.close()
            for connection in self._served:
                connection.close()
            self._selector.close()
