"""A program for the ranks of a job: one of them goes, stops, or stays away from a collective call.

mpirun -n 3 python tests/programs/victims.py TRANSPORT HOW WHO DEADLINE
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

import mpiddp

SOON = 0.2
"""Seconds; a good number of calls."""


def main() -> None:
    transport, how, who, deadline = sys.argv[1:]
    with mpiddp.init(timeout=60) as session:
        if transport == "torch":
            # Its group keeps the timeout that it begins with.
            session._timeout = float(deadline)
        is_victim = session.world.rank == int(who)
        buffers = [torch.zeros(count) for count in (10, 300000)]
        for buffer in buffers:
            mpiddp.all_reduce(buffer, "one-shot", transport)
        # The first calls take longer on a busy machine.
        session.collectives.waiter.set_seconds(float(deadline))
        if is_victim:
            if how == "stays away":
                time.sleep(1000)
            number = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}[how]
            threading.Timer(SOON, os.kill, (os.getpid(), number)).start()
        while True:
            for buffer in buffers:
                mpiddp.all_reduce(buffer, "one-shot", transport)


if __name__ == "__main__":
    main()
