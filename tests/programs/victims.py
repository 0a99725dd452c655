"""A program for the ranks of a job: rank 1 is killed or stopped in a collective call.

mpirun -n 3 python tests/programs/victims.py TRANSPORT HOW DEADLINE
"""

import os
import signal
import sys
import threading

import torch

import mpiddp

SOON = 0.2
"""Seconds; a good number of calls."""


def main() -> None:
    transport, how, deadline = sys.argv[1:]
    with mpiddp.init(timeout=60) as session:
        if transport == "torch":
            # Its group keeps the timeout that it begins with.
            session._timeout = float(deadline)
        buffers = [torch.zeros(count) for count in (10, 300000)]
        for buffer in buffers:
            mpiddp.all_reduce(buffer, "one-shot", transport)
        # The first calls take longer on a busy machine.
        session.collectives.waiter.set_seconds(float(deadline))
        if session.world.rank == 1:
            number = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}[how]
            threading.Timer(SOON, os.kill, (os.getpid(), number)).start()
        while True:
            for buffer in buffers:
                mpiddp.all_reduce(buffer, "one-shot", transport)


if __name__ == "__main__":
    main()
