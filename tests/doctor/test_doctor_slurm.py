"""The doctor on a real Slurm cluster. docs/troubleshooting.md shows such a run."""

from __future__ import annotations

import re

import pytest

from doctors import examine

pytestmark = pytest.mark.slurm


def flags(nodes, *more):
    return (f"--nodelist=node[1-{nodes}]", f"--nodes={nodes}", "--ntasks-per-node=1", *more)


def test_faults_of_single_nodes_are_all_found(slurm_cluster, tmp_path):
    """One run, and on each node another fault; on one of them two."""
    runs = tmp_path / "runs"
    runs.mkdir()
    hosts = slurm_cluster.must("exec", "node1", "cat", "/etc/hosts")

    def shell(node, line):
        slurm_cluster.must("exec", node, "sh", "-c", line)

    try:
        shell("node1", f"printf %s '127.0.1.1 node1\n{hosts}' > /etc/hosts")
        shell("node2", "mount -o remount,size=16m /dev/shm")
        shell("node3", "tc qdisc add dev ens1f0 root tbf rate 10mbit burst 80kb latency 50ms")
        shell("node2", f"mount -t tmpfs tmpfs {runs}")
        launcher = slurm_cluster.srun(*flags(3))
        # Shared memory that small is Open MPI's own trouble, too.
        quiet = {"OMPI_MCA_btl": "self,tcp"}
        reading = examine(launcher, 3, "--runs-dir", runs, cwd=tmp_path, exit_code=2, env=quiet)
    finally:
        shell("node1", f"printf %s '{hosts}' > /etc/hosts")
        shell("node2", "mount -o remount,size=4g /dev/shm")
        shell("node3", "tc qdisc delete dev ens1f0 root")
        shell("node2", f"umount {runs}")
    bad = reading.bad()
    wanted = {
        "host name": "warn",
        "shared memory": "warn",
        "links": "fail",
        "run directory": "fail",
    }
    assert wanted.items() <= bad.items(), str(reading.result)
    assert "node1" in reading.line("host name").text
    assert "127.0.1.1" in reading.line("host name").text
    assert "node2" in reading.line("shared memory").text
    claim = ", though ens1f0, a virtual interface, claims 10.0 Gbit/s; the median"
    text = reading.line("links").text
    rate = re.match(rf"TCP: node3 → node1 ([\d.]+) Mbit/s{claim}", text)
    # The rate without headers; the queue adds what it holds.
    assert rate is not None and 5 < float(rate[1]) < 30, text
    assert reading.line("run directory").text.startswith("node2")
