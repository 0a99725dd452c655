"""Finds out that a job stands still: no rank has made progress for some time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpiddp.launch.lifeline.positions import describe, read_answers
from mpiddp.launch.lifeline.requests import Callback

CHECK_SECONDS = 2.0
"""How long a job that stands still has to move after all: longer than `movement.LONGEST_PERIOD`."""


@dataclass(frozen=True)
class StallHandlers:
    """What the watch needs of rank 0's companion."""

    ask: Callable[[Callback, str], object]
    """Ask all ranks, by the name of a request."""
    call_at: Callable[[float, Callable[[float], object]], object]
    end_job: Callable[[str, str], object]
    """With the reason, and a table of where each rank is."""


class StallWatch:
    """Asks all ranks, when they may have been idle for ``seconds``, how long they have been."""

    def __init__(self, seconds: float, handlers: StallHandlers) -> None:
        self._seconds = seconds
        self._handlers = handlers
        self._stands_still = False
        """Whether no rank was moving when they were last asked."""

    def look(self, _: float) -> None:
        """Ask now, and again when that may find something."""
        self._handlers.ask(Callback(self._decide), "idle")

    def _decide(self, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        # A rank that does not answer may be moving.
        idle = min(answers.values()) if len(answers) == len(hostnames) else 0.0
        # Asked twice, since all may have been stopped together, and have been continued just now.
        between = min(self._seconds / 2, CHECK_SECONDS)
        was_still, self._stands_still = self._stands_still, idle >= self._seconds - between
        if was_still and idle >= self._seconds:
            self._handlers.ask(Callback(self._end), "stacks")
            return
        # Sooner no job can have been still for long enough.
        pause = self._seconds - idle
        if not self._stands_still:
            pause -= between
        elif not was_still:
            pause = between
        self._handlers.call_at(time.monotonic() + pause, self.look)

    def _end(self, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        reason = f"no rank has made progress for {self._seconds:g} s"
        self._handlers.end_job(reason, describe(read_answers(hostnames, answers)))
