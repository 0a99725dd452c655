"""One thread that waits for connections, other descriptors and points in time."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

from mpiddp.process.sockets.links import Link

LATE_SECONDS = 1.0
"""So much later than planned, this process must have been stopped meanwhile."""


class EventLoop:
    """Callbacks by what they wait for. Times are time.monotonic()'s."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        """For descriptors; a key's data is called with the events that came."""
        self._links: dict[Link, int] = {}
        """And the events that are waited for."""
        self._timers: list[tuple[float, Callable[[float], object]]] = []

    def add(
        self, link: Link, take: Callable[[str, Any], object], lose: Callable[[str], object]
    ) -> None:
        """Have ``take`` called with each message, or ``lose`` with what ended the connection."""

        def serve(events: int) -> None:
            if link not in self._links:
                return  # It was removed after the event.
            if events & selectors.EVENT_WRITE:
                link.flush()
            if not events & selectors.EVENT_READ:
                return
            try:
                messages = link.receive()
            except (OSError, ValueError) as error:
                self.remove(link)
                lose(str(error))
                return
            for kind, content in messages:
                if link in self._links:
                    take(kind, content)

        self._links[link] = selectors.EVENT_READ
        self.selector.register(link.connection, selectors.EVENT_READ, serve)

    def remove(self, link: Link) -> None:
        """Close a connection, if it is not closed yet."""
        if self._links.pop(link, None) is not None:
            self.selector.unregister(link.connection)
            link.close()

    def call_at(self, when: float, work: Callable[[float], object]) -> None:
        """Have ``work`` called with the time, once, at ``when`` or soon afterwards."""
        self._timers.append((when, work))

    def find_time(self) -> float:
        """When the first timer is due."""
        return min((when for when, _ in self._timers), default=float("inf"))

    def wait(self, until: float, add_pause: Callable[[float], object]) -> None:
        """Serve what comes, once, or nothing at ``until``; then the timers that are due.

        ``add_pause`` is called before, with the seconds for which this process must have been
        stopped.
        """
        for link, events in self._links.items():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0)
            if wanted != events:
                key = self.selector.get_key(link.connection)
                self.selector.modify(link.connection, wanted, key.data)
                self._links[link] = wanted
        pause = None if until == float("inf") else max(0.0, until - time.monotonic())
        found = self.selector.select(pause)
        now = time.monotonic()
        if now > until + LATE_SECONDS:
            add_pause(now - until)
        for key, events in found:
            # An earlier one of these calls may have ended this one's watch.
            if self.selector.get_map().get(key.fd) is key:
                key.data(events)
        for timer in [each for each in self._timers if each[0] <= now]:
            self._timers.remove(timer)
            timer[1](now)
