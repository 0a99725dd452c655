"""The doctor over several nodes, with the faults that a network and its nodes can have."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import doctors
from doctors import NO_TORCH, PATCHED, STAGE, Reading, read
from namespaces import Cluster, lead_nowhere, make_cluster, run

INTERFACES = ("ens1f1", "ens1f0np0", "ib0")
HOSTS = """\
127.0.0.1 localhost
10.77.0.1 node1
::ffff:10.77.0.1 node1
10.77.0.2 node2
::ffff:10.77.0.2 node2
10.77.0.3 node3
::ffff:10.77.0.3 node3
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with make_cluster() as made:
        yield made


@pytest.fixture
def hosts(tmp_path: Path) -> dict[int, list[str]]:
    """What gives each rank an /etc/hosts that knows all nodes, in torch's form as well."""
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return dict.fromkeys(range(3), mount(put(path, "/etc/hosts")))


def mount(*commands: str) -> list[str]:
    """What runs a program after commands in a mount namespace of its own."""
    return ["unshare", "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


def put(source: Path, target: str) -> str:
    return f"mount --bind {source} {target}"


def examine(
    cluster: Cluster, folder: Path, exit_code: int, wraps: dict[int, list[str]], patch: str = ""
) -> Reading:
    program = ["-c", PATCHED.format(patch=patch)] if patch else ["-m", "mpiddp.doctor"]
    options = [*STAGE, "--runs-dir", str(folder / "runs"), "--data-dir", str(folder)]
    return read(run(cluster.nodes, *program, *options, wraps=wraps), exit_code=exit_code)


def test_neighbours_that_do_not_reach_each_other(cluster, hosts, tmp_path):
    cluster.connect(*INTERFACES)
    cluster.nodes[1].ip("route add unreachable 10.77.0.3/32")
    reading = examine(cluster, tmp_path, 4, hosts, NO_TORCH)
    assert reading.bad() == {"links": "fail"}
    text = reading.line("links").text
    assert text.startswith("TCP: node2 → node3 (10.77.0.3): No route to host. ")
    assert reading.lines[-1].check == "the rest"


def test_nodes_without_a_common_address(cluster, tmp_path):
    one, _, three = cluster.nodes
    cluster.connect("ens1f1", "ens1f1")
    lead_nowhere(one, "docker0", "172.17.0.1")
    lead_nowhere(three, "docker0", "172.17.0.1")
    reading = examine(cluster, tmp_path, 4, {}, NO_TORCH)
    line = reading.line("interfaces")
    assert line.status == "fail"
    head, *table = line.text.split("\n")
    assert head.startswith("no address of rank 0 on node1 was reached by every node")
    assert [re.split(r" {2,}", row.strip()) for row in table] == [
        ["node", "10.77.0.1 (ens1f1)", "172.17.0.1 (docker0)"], ["node1", "reached", "reached"],
        ["node2", "reached", "Network is unreachable"],
        ["node3", "Network is unreachable", "Connection refused"],
    ]  # fmt: skip
    # Wherever it can, the examination goes on.
    assert reading.line("GPUs").status == "skip" and reading.lines[-1].check == "the rest"


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
        options = {"cwd": tmp_path, "exit_code": 2, "env": quiet}
        reading = doctors.examine(launcher, 3, "--runs-dir", runs, **options)
    finally:
        shell("node1", f"printf %s '{hosts}' > /etc/hosts")
        shell("node2", "mount -o remount,size=4g /dev/shm")
        shell("node3", "tc qdisc delete dev ens1f0 root")
        shell("node2", f"umount {runs}")
    must = {"host name": "warn", "shared memory": "warn", "links": "fail", "run directory": "fail"}
    assert must.items() <= reading.bad().items(), str(reading.result)
    assert "node1" in reading.line("host name").text
    assert "127.0.1.1" in reading.line("host name").text
    assert "node2" in reading.line("shared memory").text
    claim = ", though ens1f0, a virtual interface, claims 10.0 Gbit/s; the median"
    text = reading.line("links").text
    rate = re.match(rf"TCP: node3 → node1 ([\d.]+) Mbit/s{claim}", text)
    # The rate without headers; the queue adds what it holds.
    assert rate is not None and 5 < float(rate[1]) < 30, text
    assert reading.line("run directory").text.startswith("node2")
