"""The harness itself: a job's ranks, its environment, its deadline, what it leaves behind."""

from __future__ import annotations

import os
import time

import pytest

import launchers

pytestmark = pytest.mark.by_default("openmpi")

HELLO = """
import os, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
vendor, version = MPI.get_vendor()
line = f"{world.rank} of {world.size} {vendor} {version[0]}\\n"
os.write(1, line.encode())
world.Barrier()
"""
SLEEP = HELLO + "time.sleep(60)\n"
VENDORS = {"openmpi": "Open MPI 5", "mpich": "MPICH", "openmpi4": "Open MPI 4", "impi": "Intel MPI"}


def test_mpirun_and_libmpi_belong_together_and_ranks_may_be_more_than_cores(launcher):
    ranks = min(os.cpu_count() or 1, 6) + 2
    result = launchers.run(launcher, ranks, ["-c", HELLO]).expect(0)
    for rank in range(ranks):
        assert f"{rank} of {ranks} {VENDORS[launcher.name]}" in result.stdout


def test_the_deadline_kills_every_rank(either_launcher):
    with launchers.start(either_launcher, 2, ["-c", SLEEP]) as job:
        job.until(lambda: job.stdout().count("\n") == 2, "all ranks to be up")
        job.deadline = time.monotonic()
        with pytest.raises(launchers.JobError, match=r"still running after 120 s(.|\n)* of 2 "):
            job.wait()
    assert job.processes() == []


def test_variables_of_another_launch_are_removed_and_others_added_and_removed(monkeypatch):
    inherited = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_SIZE", "PRTE_LAUNCHED", "SLURM_JOB_ID"]
    inherited += ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR"]
    inherited += ["TORCHELASTIC_RUN_ID", "GROUP_RANK", "HYDI_CONTROL_FD", "MPI_LOCALRANKID"]
    inherited += ["OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "MPI4PY_RC_INITIALIZE"]
    for name in inherited:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("RANKING", "kept")
    program = "import os; print(sorted(os.environ), os.environ['ADDED'])"
    alone, env = launchers.table()["alone"], {"ADDED": "yes", "PATH": None}
    result = launchers.run(alone, 1, ["-c", program], env=env).expect(0)
    assert not [name for name in (*inherited, "PATH") if repr(name) in result.stdout]
    assert "'RANKING'" in result.stdout and result.stdout.endswith("] yes\n")
    with pytest.raises(AssertionError, match=r"7 was expected(.|\n)*exit code 0(.|\n)*'RANKING'"):
        result.expect(7)


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
