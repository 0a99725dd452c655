"""Ranks that enter a run whose lock rank 0 has to wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.process.directory_lock import DirectoryLock
from mpiddp.training.options.config import parse
from mpiddp.training.shared_run import enter_run

PAUSES = 5


def enter(session: Session) -> tuple[str, int]:
    """Enter the run ``a``; returns its path, and how many broadcasts this rank took part in."""
    acquire, broadcast, count = DirectoryLock.acquire, session.broadcast, 0

    def acquire_late(*values: Any, pause: Callable[[float], object], **more: Any) -> DirectoryLock:
        for _ in range(PAUSES):
            pause(0)
        return acquire(*values, pause=pause, **more)

    def count_broadcasts(value: Any) -> Any:
        nonlocal count
        count += 1
        return broadcast(value)

    with contextlib.ExitStack() as stack:
        for where, name, new in (
            (DirectoryLock, "acquire", acquire_late),
            (session, "broadcast", count_broadcasts),
        ):
            stack.enter_context(mock.patch.object(where, name, new))
        handler = find_failure_handler(session)
        run = enter_run(parse(["--name", "a"]).resolve(), session, handler)
    handler.entered_runs.discard(run.state.directory)
    if run.opened is not None:
        run.opened.close()
    return str(run.state.directory), count
