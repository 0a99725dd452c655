"""The harness itself: which MPI a job's ranks have, what it leaves behind, ranks that stay."""

from __future__ import annotations

import os
import signal

import pytest

import launchers
import mpiddp
from pool import Pools

HELLO = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
vendor, version = MPI.get_vendor()
line = f"{world.rank} of {world.size} {vendor} {version[0]}\\n"
os.write(1, line.encode())
"""
VENDORS = {"openmpi": "Open MPI 5", "mpich": "MPICH", "openmpi4": "Open MPI 4", "impi": "Intel MPI"}


def test_mpirun_and_libmpi_belong_together_and_ranks_may_be_more_than_cores(launcher):
    ranks = min(os.cpu_count() or 1, 6) + 2
    result = launchers.run(launcher, ranks, ["-c", HELLO]).expect(0)
    for rank in range(ranks):
        assert f"{rank} of {ranks} {VENDORS[launcher.name]}" in result.stdout


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
@pytest.mark.parametrize("how", [pytest.param("asked for again", marks=pytest.mark.long), "closed"])
def test_a_rank_that_ends_between_two_calls_is_reported(how):
    pools = Pools()
    ranks = pools("openmpi", 2)
    os.kill(ranks.call(find_process).values[1], signal.SIGKILL)
    launchers.until(lambda: not ranks.is_running, "the end")
    said = "the ranks did not end well: rank 1 of 2"
    with pytest.raises((AssertionError, mpiddp.MpiddpError), match=said):
        pools("openmpi", 2) if how == "asked for again" else pools.close()
    assert ranks.is_ended
    if how == "asked for again":
        assert pools("openmpi", 2).is_running
    pools.close()
