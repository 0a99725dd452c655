"""Requests to end: SIGTERM from Slurm or mpirun, SIGINT from a terminal.

Python runs a signal's handler in the main thread, which may be inside a library that waits for
another rank. Its handler in C writes the signal's number into a pipe at once: a thread reads that,
and ends the job as any failure does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from mpiddp.errors import StoppedError

REQUESTS = (signal.SIGTERM, signal.SIGINT)


def heed_signals(stop: Callable[[StoppedError], object]) -> None:
    """Have ``stop`` called, in a separate thread, when this process is asked to end.

    For mpiddp's programs; a script installs handlers itself. Call it from the main thread. What is
    ignored or handled already stays so, and forked children have the handlers of before.
    """
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in REQUESTS}
    heeded = [number for number, handler in before.items() if handler in usual]
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)

    def wait() -> None:
        while True:
            for number in os.read(receiver, 64):
                if number in heeded:
                    stop(StoppedError(number))

    def forget() -> None:
        # The pipe is the parent's: a child that is terminated must not end the job.
        signal.set_wakeup_fd(-1)
        for number in heeded:
            signal.signal(number, before[number])

    threading.Thread(target=wait, name="mpiddp-signals", daemon=True).start()
    os.register_at_fork(after_in_child=forget)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for number in heeded:
        signal.signal(number, lambda *_: None)
