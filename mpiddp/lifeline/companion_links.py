"""A companion's connections to those of other nodes, with heartbeats both ways.

All connect to that of rank 0's node, which is their parent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpiddp.lifeline.membership import Membership
from mpiddp.process.sockets import links
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.process.sockets.links import Link
from mpiddp.process.sockets.listener import TokenListener
from mpiddp.process.sockets.ports import PortRange, listen

BEATS = 10
"""How many heartbeats fit at least into the time after which a silent connection is lost."""
LONGEST_PERIOD = 3.0
"""Seconds between two of them."""
CONNECT_SECONDS = 10.0
GONE = "its companion process, or its node, has gone"


@dataclass(frozen=True)
class Handlers:
    """What is called when something comes."""

    take_decision: Callable[[str, Any], object]
    """Kind and content of a message of the parent: ``welcome`` if it has accepted this one,
    ``closed`` if it has ended in good order, or a decision."""
    take_report: Callable[[Link, str, Any], object]
    """A message of a child, and its connection."""
    note_parent_lost: Callable[[str], object]
    """The parent was lost: how."""
    note_child_lost: Callable[[int, str], object]
    """A child was lost: its rank, and how."""


class CompanionLinks:
    """One companion's connections."""

    def __init__(self, loop: EventLoop, handlers: Handlers) -> None:
        self._loop = loop
        self._handlers = handlers
        self._listeners: list[TokenListener] = []
        self._seconds = float("inf")
        self._parent: Link | None = None
        self._children: dict[Link, int] = {}
        """And the rank of each; -1 until it has said so."""
        self._heard: dict[Link, float] = {}
        """When something has come over each connection."""

    @property
    def has_parent(self) -> bool:
        return self._parent is not None

    @property
    def has_children(self) -> bool:
        return bool(self._children)

    @property
    def has_unsent(self) -> bool:
        return any(link.has_unsent for link in self._list_links())

    def listen(
        self,
        address: str,
        ports: PortRange | None,
        token: str,
        clients: dict[str, Callable[[Link], object]],
    ) -> str:
        """Listen on an address for companions that know ``token``; returns where.

        ``ports``: those that may be listened on; None for any. ``clients``: who takes over the
        connections of callers with other tokens. Raises OSError.
        """
        server = listen(address, ports)
        admit = {
            links.encode_token(known): lambda caller, take=take: take(Link(caller))
            for known, take in {token: self._admit, **clients}.items()
        }
        self._listeners.append(TokenListener([server], self._loop.selector, admit))
        return links.describe_server(server)

    def connect(self, membership: Membership) -> None:
        """Connect to the parent, if there is one, and begin with heartbeats. Raises OSError."""
        self._seconds = membership.seconds
        if membership.address:
            self._parent = links.connect(membership.address, membership.token, CONNECT_SECONDS)
            self._heard[self._parent] = time.monotonic()
            self._loop.add(
                self._parent, self._take_from_parent, lambda _: self._note_parent_lost(GONE)
            )
            self._parent.send("hello", membership.rank)
        self._beat(time.monotonic())

    def send_up(self, kind: str, content: Any) -> None:
        if self._parent is not None:
            self._parent.send(kind, content)

    def send_down(self, kind: str, content: Any) -> None:
        for child in self._children:
            child.send(kind, content)

    def say_goodbye(self) -> None:
        """This companion ends in good order."""
        for link in self._list_links():
            link.send("closed")

    def find_time(self) -> float:
        """When ``refresh`` is due."""
        return min((each.find_time() for each in self._listeners), default=float("inf"))

    def refresh(self, now: float) -> None:
        """Do what the listening sockets need at this time."""
        for listener in self._listeners:
            listener.refresh(now)

    def add_pause(self, late: float) -> None:
        """For so many seconds nobody could be heard here."""
        self._heard = {link: heard + late for link, heard in self._heard.items()}

    def _list_links(self) -> list[Link]:
        return [*self._children, *([self._parent] if self._parent is not None else [])]

    def _admit(self, link: Link) -> None:
        self._children[link] = -1
        self._heard[link] = time.monotonic()
        self._loop.add(
            link,
            lambda kind, content: self._take_from_child(link, kind, content),
            lambda _: self._note_child_lost(link, GONE),
        )

    def _take_from_parent(self, kind: str, content: Any) -> None:
        assert self._parent is not None
        self._heard[self._parent] = time.monotonic()
        if kind == "closed":
            self._drop(self._parent)
            self._parent = None
        if kind != "beat":
            self._handlers.take_decision(kind, content)

    def _take_from_child(self, link: Link, kind: str, content: Any) -> None:
        self._heard[link] = time.monotonic()
        if kind == "hello":
            self._children[link] = content
            link.send("welcome")
        elif kind == "closed":
            self._children.pop(link, None)
            self._drop(link)
        elif kind != "beat":
            self._handlers.take_report(link, kind, content)

    def _beat(self, now: float) -> None:
        """Tell the neighbours that this companion lives, and find those that are silent."""
        for link, heard in list(self._heard.items()):
            link.send("beat")
            if now - heard >= self._seconds:
                how = f"nothing has been heard from it for {self._seconds:g} s: its node is down "
                if link is self._parent:
                    self._note_parent_lost(how + "or cut off")
                else:
                    self._note_child_lost(link, how + "or cut off")
        due = min(self._heard.values(), default=float("inf")) + self._seconds
        period = min(self._seconds / BEATS, LONGEST_PERIOD)
        self._loop.call_at(min(now + period, max(due, now + 0.01)), self._beat)

    def _drop(self, link: Link) -> None:
        self._heard.pop(link, None)
        self._loop.remove(link)

    def _note_child_lost(self, link: Link, how: str) -> None:
        self._drop(link)
        rank = self._children.pop(link)
        if rank >= 0:
            self._handlers.note_child_lost(rank, how)

    def _note_parent_lost(self, how: str) -> None:
        if self._parent is not None:
            self._drop(self._parent)
            self._parent = None
            self._handlers.note_parent_lost(how)
