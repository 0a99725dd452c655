"""The watch over a phase, in processes of its own: they are stopped and continued."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import launchers
from mpiddp.launch.failure.deadline import GRACE, LATE_SECONDS

PROGRAM = """
import time
from mpiddp.launch.failure.deadline import PhaseDeadlines

deadlines = PhaseDeadlines({seconds}, lambda phase: print("expired", phase, flush=True))
with deadlines.phase("address"):
    print("ready", flush=True)
    time.sleep({sleep})
deadlines.close()
print("end", flush=True)
"""


def start(seconds: float, sleep: float) -> subprocess.Popen:
    program = PROGRAM.format(seconds=seconds, sleep=sleep)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=launchers.ROOT
    )
    assert process.stdout.readline() == "ready\n"
    return process


def stop(process: subprocess.Popen, seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(("sleep", "printed"), [(0.1, "end\n"), (1.0, "expired address\nend\n")])
def test_a_phase_that_outlasts_its_deadline_expires_once(sleep, printed):
    process = start(0.5, sleep)
    assert process.communicate(timeout=20)[0] == printed


def test_a_process_that_is_continued_to_be_ended_says_nothing():
    process = start(0.3, 30)
    stop(process, 0.3 + LATE_SECONDS + 0.3)
    time.sleep(GRACE / 2)
    process.terminate()
    assert process.communicate(timeout=20)[0] == ""


def test_a_process_that_is_continued_and_left_alone_speaks_after_a_while():
    process = start(0.3, 0.3 + LATE_SECONDS + 0.3 + 2 * GRACE)
    stop(process, 0.3 + LATE_SECONDS + 0.3)
    assert process.communicate(timeout=20)[0] == "expired address\nend\n"


def test_a_process_that_is_continued_and_goes_on_says_nothing():
    process = start(0.3, 0.5)
    stop(process, 0.3 + LATE_SECONDS + 0.3)
    assert process.communicate(timeout=20)[0] == "end\n"
