"""mpiddp's backend between the nodes of a real Slurm cluster, held against Gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import launchers

pytestmark = pytest.mark.slurm

DEADLINE = 160.0
PAIR = ("--nodelist=node[1-2]", "--nodes=2")
SCRIPT = Path(__file__).parent / "comparison.py"


def check(result, ranks):
    result.expect(0)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert lines == [[]] * ranks


def test_ranks_of_mpiddp_send_over_mpi(slurm_cluster, tmp_path):
    launcher = slurm_cluster.srun(*PAIR, "--distribution=plane=2")
    result = launchers.run(launcher, 3, ["-m", "mpiddp", SCRIPT], timeout=DEADLINE, cwd=tmp_path)
    check(result, 3)


@pytest.mark.long
def test_ranks_of_torchrun_send_over_gloo(slurm_cluster, tmp_path):
    launcher = slurm_cluster.srun(*PAIR, "--ntasks-per-node=1", mpi="none")
    command = [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=node1:29511", SCRIPT),
    ]
    result = launchers.run(launcher, 2, command, timeout=DEADLINE, cwd=tmp_path)
    check(result, 4)
