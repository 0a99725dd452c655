"""Ranks on several nodes of a real Slurm cluster, called from the shell of an allocation."""

import json
import shutil
import sys

import pytest

import launchers

pytestmark = pytest.mark.slurm


def test_functions_run_on_the_ranks_of_two_nodes(slurm_cluster, tmp_path):
    around = [str(shutil.which("salloc")), "--quiet", "--nodes=2", "--ntasks-per-node=2"]
    around += ["--nodelist=node[1-2]"]
    words = (*around, sys.executable, launchers.PROGRAMS / "calling.py")
    env = {**launchers.WAITING, **slurm_cluster.environment()}
    done = launchers.execute(*words, env=env, cwd=tmp_path, timeout=170).expect(0)
    *printed, last = launchers.drop_gloo_lines(done.stdout).splitlines()
    found = json.loads(last)
    nodes = ["node1", "node2"]
    assert found["hosts"] == nodes
    assert found["seen"] == [[node, 1.0] for node in nodes]
    assert found["equal"] == [True] * 2
    assert "ranks 0-1" in found["stacks"]
    # Of both calls of look.
    assert sorted(printed) == sorted(2 * [f"[{rank}] here is rank {rank}" for rank in range(2)])
    assert list(found["lost"]) == ["1"]
    assert "rank 1 of 2 on node2 was lost: it was killed by SIGKILL" in found["lost"]["1"]
    assert found["again"] == nodes
    assert slurm_cluster.ask("squeue", "-h") == ""
