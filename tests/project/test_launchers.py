"""The harness itself: what a job leaves behind, and how a pool ends whose ranks have ended."""

import os
import signal

import pytest

import launchers
import mpiddp
from pool import Pools


def test_a_process_that_stays_behind_is_reported_and_killed(monkeypatch):
    monkeypatch.setattr(launchers, "GRACE", 0.5)
    program = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(subprocess.Popen(sleep, start_new_session=True).pid)\n"
    )
    with launchers.start("alone", 1, ["-c", program]) as job:
        with pytest.raises(launchers.JobError, match="left processes behind") as caught:
            job.wait()
        assert job.stdout().strip() in str(caught.value)
    assert job.processes() == []


def find_process(session):
    return os.getpid()


@pytest.mark.mpi
def test_a_rank_that_ends_after_the_last_call_is_reported():
    pools = Pools()
    ranks = pools("openmpi", 2)
    os.kill(ranks.call(find_process).values[1], signal.SIGKILL)
    launchers.until(lambda: not ranks.is_running, "the end")
    said = "the ranks did not end well: rank 1 of 2"
    with pytest.raises((AssertionError, mpiddp.MpiddpError), match=said):
        pools.close()
    assert ranks.is_ended
