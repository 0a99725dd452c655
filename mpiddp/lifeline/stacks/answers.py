"""A companion's answer to where its rank is: the stack, and the last collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpiddp.lifeline.stacks.dump import LOOK_SECONDS, StackReader
from mpiddp.process.sockets.event_loop import EventLoop

RECORD_SECONDS = 0.5
"""How long the rank may take to read its flight record: another thread may hold the lock."""

Reply = Callable[[Any], object]


class StackAnswers:
    """Questions that come while one is being answered get the same answer."""

    def __init__(
        self, reader: StackReader, loop: EventLoop, ask_for_record: Callable[[], object]
    ) -> None:
        self.reader = reader
        self._failed: list[Any] | None = None
        self._loop = loop
        self._ask_for_record = ask_for_record
        self._replies: list[Reply] = []
        self._record: list[str] | None = None
        self._record_end = 0.0

    def ask(self, reply: Reply) -> None:
        """Have ``reply`` called with the answer."""
        self._replies.append(reply)
        if len(self._replies) > 1:
            return
        now = time.monotonic()
        self._record, self._record_end = None, now + RECORD_SECONDS
        self._ask_for_record()
        self.reader.ask()
        self._loop.call_at(now + LOOK_SECONDS, self._look)

    def note_failure(self, frames: list[Any]) -> None:
        """Where the rank was when an error ended its work: the stack shows it no more."""
        self._failed = frames

    def take_record(self, lines: list[str]) -> None:
        """What the rank has read in its groups' flight records."""
        self._record = lines

    def _look(self, now: float) -> None:
        frames = self.reader.read()
        if frames is None or (self._record is None and now < self._record_end):
            self._loop.call_at(now + LOOK_SECONDS, self._look)
            return
        answer = {
            "state": self.reader.find_state(),
            "failed": self._failed is not None,
            "frames": self._failed or [frame.pack() for frame in frames],
            "record": self._record or [],
        }
        replies, self._replies = self._replies, []
        for reply in replies:
            reply(answer)
