"""Signals that come while mpiddp's own programs are imported: they end the process with one line.

Python would show where it was then, in every rank. Installed by ``import mpiddp``, if that begins
``python -m mpiddp`` or one of its modules, until a failure handler or the front takes over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def heed() -> None:
    """Take these signals, unless they are ignored. Call it from the main thread."""
    for number, usual in USUAL.items():
        if signal.getsignal(number) == usual:
            signal.signal(number, _leave)


def forget() -> None:
    """Give them back. Does nothing if they were not taken."""
    for number, usual in USUAL.items():
        if signal.getsignal(number) is _leave:
            signal.signal(number, usual)


def _leave(number: int, _: object) -> None:
    """A rank leaves the line to the front or the launcher."""
    try:
        from mpiddp.environment import JOB_DIRECTORY, LAUNCHERS, is_set

        if not is_set((JOB_DIRECTORY, *(row.rank for row in LAUNCHERS))):
            name = signal.Signals(number).name
            os.write(2, f"mpiddp: stopped by {name}: exit code {128 + number}\n".encode())
    finally:  # That module is just being imported, or nobody reads.
        os._exit(128 + number)
