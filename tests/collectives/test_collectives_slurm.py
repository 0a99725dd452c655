"""Collective calls between the nodes of a real Slurm cluster."""

from __future__ import annotations

import re

import pytest

import battery
import facts
import launchers

pytestmark = pytest.mark.slurm

DEADLINE = 140.0
TRANSPORTS = ("auto", "mpi", "torch", "shared-memory+mpi")
PAIR = ("--nodelist=node[1-2]", "--nodes=2")


# Without Slurm: test_all_reduce.py.
@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "placement", "library", "mpi", "parts", "nodes"),
    [
        (4, "plane=3", "openmpi", "pmix", ("between",), [3, 1]),
        (5, "cyclic", "mpich", "pmi2", ("between",), [3, 2]),
    ],
)
def test_calls_between_nodes_are_exact(
    size, placement, library, mpi, parts, nodes, slurm_cluster, cluster_pool
):
    flags = (*PAIR, f"--distribution={placement}", "--exclusive")
    launcher = slurm_cluster.srun(*flags, mpi=mpi, library=library)
    reports = cluster_pool(launcher, size).call(battery.run, *parts, timeout=DEADLINE).values
    battery.check_reports(reports, [battery.LISTS[part](size, TRANSPORTS) for part in parts])
    described = reports[0]["describe"]
    assert described["transports"] == ["shared-memory+mpi", "mpi", "torch"]
    assert described["nodes"] == nodes and described["single_copy"] is True
    for length, outer in (("64", "recursive-doubling"), (str(1 << 22), "ring")):
        expected = f"two-level:inner=direct,outer={outer} over shared-memory+mpi"
        assert {report["chosen"][length] for report in reports} == {expected}


@pytest.mark.long
def test_a_rank_of_another_node_that_stops_is_named(slurm_cluster, tmp_path):
    launcher = slurm_cluster.srun(*PAIR, "--distribution=plane=3")
    arguments = ["shared-memory+mpi", "is stopped", "3", "4"]
    program = [launchers.PROGRAMS / "victims.py", *arguments]
    result = launchers.run(launcher, 4, program, cwd=tmp_path)
    result.expect(6)
    (line,) = [line for line in facts.messages(result) if "waited for" in line]
    # One of its own node's neighbours may be told of that waits for it in turn.
    assert re.match(
        r"mpiddp: rank [0-2] of 4 on node1: all-reduce \(one-shot over shared-memory\+mpi\), "
        r"(in step 1 of 1|at its end): waited for rank (3 on node2|\d on node1) for 4 s",
        line,
    )
