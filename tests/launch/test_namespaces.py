"""Jobs over several nodes: a network namespace for each (`namespaces`)."""

import re
from collections.abc import Iterator

import pytest

from facts import PROGRAM, messages, read
from namespaces import Cluster, lead_nowhere, lose_large_packets, make_cluster, run


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with make_cluster() as made:
        yield made


def collect(nodes, folder, interface="auto", **env):
    """The facts of every rank, by rank, and the finished job."""
    program = f"import os; os.chdir({str(folder)!r})\n{PROGRAM}"
    result = run(nodes, "-c", program, interface, **env)
    return read(folder, result, len(nodes)), result


def variable(found, name):
    return [row["set"].get(name) for row in found]


def test_interfaces_that_lead_nowhere(cluster, tmp_path):
    names = ("ens1f1", "ens1f0np0")
    for number, node in enumerate(cluster.nodes[:2], 1):
        # Made first and first by name: what takes the first interface takes a wrong one.
        lead_nowhere(node, "docker0", "172.17.0.1")
        lead_nowhere(node, "aa0", f"10.66.0.{number}")
    cluster.connect(*names)
    found, result = collect(cluster.nodes[:2], tmp_path)
    assert {row["master"][0] for row in found} == {"10.77.0.1"}
    assert variable(found, "NCCL_SOCKET_IFNAME") == ["=ens1f1", "=ens1f0np0"]
    assert variable(found, "GLOO_SOCKET_IFNAME") == list(names)
    assert "  interface       ens1f1 on node1; ens1f0np0 on node2\n" in result.stderr
    (seconds,) = re.findall(r"address ([0-9.]+) ", result.stderr)
    # One that leads nowhere is tried for 13.5 s.
    assert float(seconds) < 12.0


@pytest.mark.long
def test_another_network_is_taken_where_one_drops_large_packets(cluster, tmp_path):
    # By itself rank 0 prefers the first.
    cluster.connect("ens1", "ens1")
    cluster.connect("ens2", "ens2", network="10.78.0")
    for node in cluster.nodes[:2]:
        lose_large_packets(node, "ens1")
    found, _ = collect(cluster.nodes[:2], tmp_path)
    assert {row["master"][0] for row in found} == {"10.78.0.1"}
    assert variable(found, "NCCL_SOCKET_IFNAME") == ["=ens2"] * 2


def test_a_switch_that_passes_nothing(cluster):
    cluster.connect("ens1f1", "ens1f1")
    cluster.switch.ip("link set bridge down")
    # Three nodes without a common network: tests/doctor/test_doctor_nodes.py.
    result = run(cluster.nodes[:2], "-c", "import mpiddp; mpiddp.init(timeout=90)").expect(4)
    (line,) = messages(result)
    assert "no address of rank 0 on node1 was reached by every node" in line
    assert "--interface" in line and "Traceback" not in result.stderr
    table = result.stderr.partition(line)[2].split("\n")[1:4]
    rows = ["node 10.77.0.1 (ens1f1)", "node1 reached", "node2 No route to host"]
    assert [" ".join(row.split()) for row in table] == rows, str(result)
