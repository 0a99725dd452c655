"""Collective calls between the nodes of a real Slurm cluster."""

from __future__ import annotations

import pytest

import battery

pytestmark = pytest.mark.slurm

DEADLINE = 140.0
TRANSPORTS = ("auto", "mpi", "torch", "shared-memory+mpi")


# Without Slurm: test_all_reduce.py.
@pytest.mark.long
def test_calls_between_nodes_are_exact(slurm_cluster, cluster_pool):
    flags = ("--nodelist=node[1-2]", "--nodes=2", "--distribution=plane=3", "--exclusive")
    launcher = slurm_cluster.srun(*flags, mpi="pmix", library="openmpi")
    reports = cluster_pool(launcher, 4).call(battery.run, "between", timeout=DEADLINE).values
    battery.check_reports(reports, [battery.list_between(4, TRANSPORTS)])
    described = reports[0]["describe"]
    assert described["transports"] == ["shared-memory+mpi", "mpi", "torch"]
    assert described["nodes"] == [3, 1] and described["single_copy"] is True
    for length, outer in (("64", "recursive-doubling"), (str(1 << 22), "ring")):
        expected = f"two-level:inner=direct,outer={outer} over shared-memory+mpi"
        assert {report["chosen"][length] for report in reports} == {expected}
