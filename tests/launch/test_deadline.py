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


def start(seconds: float, longest: float, grace: float = GRACE) -> subprocess.Popen:
    """A process in a phase that may take ``seconds``, and ends as it expires or after ``longest``.

    Those that may take 2 s are stopped in it, past their deadline, and continued.
    """
    stops = seconds == 2
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
    ("seconds", "longest", "grace", "printed"),
    [
        (60, 0.1, GRACE, "end\n"),
        (0.5, 60, GRACE, "expired address\nend\n"),
        # One that is continued and left alone speaks after a while; one that goes on says nothing.
        (2, 60, GRACE, "expired address\nend\n"),
        (2, 2.1, 60, "end\n"),
    ],
)
def test_a_phase_that_outlasts_its_deadline_expires_once(seconds, longest, grace, printed):
    assert start(seconds, longest, grace).communicate(timeout=90)[0] == printed


def test_a_process_that_is_continued_to_be_ended_says_nothing():
    process = start(2, 60, 60)
    time.sleep(GRACE / 2)
    process.terminate()
    assert process.communicate(timeout=60)[0] == ""
