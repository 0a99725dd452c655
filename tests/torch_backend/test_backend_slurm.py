"""mpiddp's backend between the nodes of a real Slurm cluster, held against Gloo."""

from pathlib import Path

import pytest

import launchers

pytestmark = pytest.mark.slurm

DEADLINE = 160.0
PAIR = ("--nodelist=node[1-2]", "--nodes=2")
SCRIPT = Path(__file__).parent / "comparison.py"


def test_ranks_of_mpiddp_send_over_mpi(slurm_cluster, tmp_path):
    launcher = slurm_cluster.srun(*PAIR, "--distribution=plane=2")
    result = launchers.run(launcher, 3, ["-m", "mpiddp", SCRIPT], timeout=DEADLINE, cwd=tmp_path)
    lines = [line for line in result.expect(0).stdout.splitlines() if line.startswith("[")]
    assert lines == ["[]"] * 3
