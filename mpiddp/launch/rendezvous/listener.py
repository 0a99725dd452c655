"""Listening sockets that one thread answers, for callers who know a token."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

MOST_UNAUTHENTICATED = 256
"""Connections that have not said the token yet; one more takes the place of the first of them."""


class Caller:
    """One accepted connection, which never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_known = False
        """Whether it has said the token."""

    def go_on(self) -> int:
        """Do what can be done now; returns the events to wait for, 0 if that is the end.

        OSError is the end as well: whoever called reports it.
        """
        raise NotImplementedError


class Listener:
    """Accepts connections until it is closed; the listening sockets stay their owner's."""

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        make_caller: Callable[[socket.socket], Caller],
    ) -> None:
        self._make_caller = make_caller
        self._unauthenticated: list[Caller] = []
        """Callers that are not known, the first to come first."""
        self._wake, self._alarm = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._wake, *sockets):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._answer, name="mpiddp-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and close every connection."""
        self._alarm.send(b"x")
        self._thread.join()
        self._wake.close()
        self._alarm.close()

    def _answer(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._wake:
                        return
                    caller = key.data or self._accept(key.fileobj)
                    if caller is not None:
                        self._serve(caller)
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    self._dismiss(key.data)
            self._selector.close()

    def _accept(self, listener: Any) -> Caller | None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return None  # The caller went away between the event and the accept.
        connection.setblocking(False)
        caller = self._make_caller(connection)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._unauthenticated.append(caller)
        if len(self._unauthenticated) > MOST_UNAUTHENTICATED:
            self._dismiss(self._unauthenticated[0])
        return caller

    def _serve(self, caller: Caller) -> None:
        if caller.connection.fileno() < 0:
            return  # It was dismissed after the event.
        try:
            events = caller.go_on()
        except OSError:
            events = 0
        if caller.is_known and caller in self._unauthenticated:
            self._unauthenticated.remove(caller)
        if events:
            self._selector.modify(caller.connection, events, caller)
        else:
            self._dismiss(caller)

    def _dismiss(self, caller: Caller) -> None:
        if caller in self._unauthenticated:
            self._unauthenticated.remove(caller)
        self._selector.unregister(caller.connection)
        caller.connection.close()
