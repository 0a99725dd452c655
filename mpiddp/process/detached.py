"""Starting a program beside this process which is not its child.

A script may wait for all children that it has (``os.wait()``): it must not find one of mpiddp's.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

SHELL = ("/bin/sh", "-c", '"$@" &', "sh")
"""Starts the rest of the command line in the background, and ends."""


def start(command: Sequence[str], descriptors: Sequence[int], error: int | None = None) -> None:
    """Start a program in a new session, with all signals blocked until it ends.

    Launchers and terminals send them to all processes that they find, and only the rank is to act
    on them.
    ``descriptors``: what the program inherits; ``error``: its standard error, else this process's.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        process = subprocess.Popen(
            [*SHELL, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error,
            pass_fds=descriptors,
            start_new_session=True,
            cwd="/",
        )
        process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
