"""The watch over a phase, in processes of its own: they are stopped and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import launchers
from mpiddp.launch.failure.deadline import GRACE, LATE_SECONDS

PROGRAM = """
import os, signal, threading
from mpiddp.launch.failure import deadline

over = threading.Event()
def expire(phase):
    print("expired", phase, flush=True)
    over.set()

deadline.GRACE = {grace}
deadlines = deadline.PhaseDeadlines({seconds}, expire)
with deadlines.phase("address"):
    if {stops}:
        os.kill(os.getpid(), signal.SIGSTOP)
    over.wait({longest})
deadlines.close()
print("end", flush=True)
"""


def start(
    seconds: float, longest: float, *, stops: bool = False, grace: float = GRACE
) -> subprocess.Popen:
    """A process in a phase that may take ``seconds``, and ends as it expires or after ``longest``.

    ``stops``: it is stopped in it, past its deadline, and continued.
    """
    program = PROGRAM.format(seconds=seconds, longest=longest, stops=stops, grace=grace)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=launchers.ROOT
    )
    if stops:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(seconds + LATE_SECONDS + 0.3)
        process.send_signal(signal.SIGCONT)
    return process


@pytest.mark.parametrize(
    ("seconds", "longest", "printed"), [(60, 0.1, "end\n"), (0.5, 60, "expired address\nend\n")]
)
def test_a_phase_that_outlasts_its_deadline_expires_once(seconds, longest, printed):
    assert start(seconds, longest).communicate(timeout=90)[0] == printed


def test_a_process_that_is_continued_to_be_ended_says_nothing():
    process = start(2.0, 60, stops=True, grace=60)
    time.sleep(GRACE / 2)
    process.terminate()
    assert process.communicate(timeout=60)[0] == ""


def test_a_process_that_is_continued_and_left_alone_speaks_after_a_while():
    assert start(2.0, 60, stops=True).communicate(timeout=60)[0] == "expired address\nend\n"


def test_a_process_that_is_continued_and_goes_on_says_nothing():
    assert start(2.0, 2.1, stops=True, grace=60).communicate(timeout=60)[0] == "end\n"
