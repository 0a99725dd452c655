"""Writes to standard error, whatever a script has made of it; none of it may hang."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from mpiddp.process.background import BackgroundCall
from mpiddp.wording import fit

CONSOLE_SECONDS = 3.0
"""How long the console may take to accept a report."""
FORWARD_SECONDS = 0.2
"""How long a launcher may take to read it: MPICH's forgets the rest when a rank aborts."""


def write_console(text: str) -> None:
    """Write to whatever the script has made of its standard error, or to the one it was given.

    One write, so that no other rank's output falls in between.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    for stream in (sys.stderr, sys.__stderr__):
        # One that is None fails like one that is closed.
        with contextlib.suppress(Exception):
            stream.write(fit(text, stream))  # type: ignore[union-attr]
            stream.flush()  # type: ignore[union-attr]
            return


def print_report(text: str, write_also: Callable[[str], None] | None = None) -> None:
    """Write to standard error and by ``write_also``, as far as they take it in CONSOLE_SECONDS."""

    def write() -> None:
        write_console(text)
        if write_also is not None:
            write_also(text)

    with contextlib.suppress(BaseException):  # The log has it as well.
        BackgroundCall(write).finish(CONSOLE_SECONDS)
