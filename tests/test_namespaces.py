"""Several nodes on one machine: network namespaces, each with a hostname, joined by a bridge.

MPICH starts one rank in each, over pipes, and its own messages go through shared memory: so
what mpiddp finds out about the network is all that the job knows of it. A namespace lives
as long as the process that holds it, which reads a pipe from this one; nothing is made in
the machine's own namespace, and nothing stays when the tests end, however they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

import launchers
from facts import PROGRAM, messages

DEADLINE = 40.0
ADDRESS_SECONDS = 5.0
"""What the address phase may take, however many interfaces lead nowhere."""
TOOLS = ("ip", "unshare", "nsenter")
ENVIRONMENT = {
    # Every rank is a node of its own, which still finds the others in /dev/shm.
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ucx",
    "UCX_TLS": "posix,self",
}
HOLD = 'hostname "$0" && ip link set lo up && echo ready && exec cat'


@dataclass(frozen=True)
class Node:
    """A namespace, entered through the process that holds it."""

    hostname: str
    holder: int

    def enter(self, *command: str) -> list[str]:
        """The command line that runs ``command`` on this node."""
        return ["nsenter", "--target", str(self.holder), "--net", "--uts", *command]

    def ip(self, command: str) -> None:
        """Run ``ip COMMAND`` on this node."""
        subprocess.run(self.enter("ip", *command.split()), check=True, timeout=10)


@dataclass(frozen=True)
class Cluster:
    """Nodes, and the switch between them: a bridge in a namespace of its own."""

    nodes: tuple[Node, ...]
    switch: Node

    def join(self, node: Node, interface: str, address: str) -> None:
        """Give ``node`` an interface that is connected to the switch."""
        # The other end is named by the address: that is unique.
        self.switch.ip(f"link add {address} type veth peer name {interface} netns {node.holder}")
        self.switch.ip(f"link set {address} master bridge up")
        node.ip(f"address add {address}/24 dev {interface}")
        node.ip(f"link set {interface} up")


def lead_nowhere(node: Node, interface: str, address: str) -> None:
    """Give ``node`` an interface that is up and reaches nobody."""
    node.ip(f"link add {interface} type veth peer name {address}")
    node.ip(f"address add {address}/24 dev {interface}")
    node.ip(f"link set {address} up")
    node.ip(f"link set {interface} up")


@contextlib.contextmanager
def hold(hostname: str) -> Iterator[Node]:
    """A new namespace with that hostname; it ends with the block."""
    command = ["unshare", "--net", "--uts", "sh", "-c", HOLD, hostname]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"ready\n"
            yield Node(hostname, holder.pid)
        finally:
            holder.kill()


def find_obstacle() -> str | None:
    """Why no namespaces can be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    absent = [name for name in TOOLS if shutil.which(name) is None]
    if absent:
        return f"{absent[0]} is missing: apt-get install iproute2 util-linux"
    attempt = ["hostname h", "ip link add v1 type veth peer name v2", "ip link add b0 type bridge"]
    command = ["unshare", "--net", "--uts", "sh", "-c", " && ".join(attempt)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return f"no network namespaces: {answer.stderr.strip()}" if answer.returncode else None


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three nodes, node1 to node3, that have no interface but loopback, and a switch."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    with contextlib.ExitStack() as stack:
        nodes = tuple(stack.enter_context(hold(f"node{number}")) for number in (1, 2, 3))
        switch = stack.enter_context(hold("switch"))
        switch.ip("link add name bridge type bridge")
        switch.ip("link set bridge up")
        yield Cluster(nodes, switch)


def run(nodes: Sequence[Node], *arguments: str, **env: str) -> launchers.Result:
    """Run ``python ARGUMENTS…`` as one job with a rank on each of ``nodes``."""
    program = [sys.executable, *arguments]
    command = nodes[0].enter(*program)
    for node in nodes[1:]:
        command += [":", "-n", "1", *node.enter(*program)]
    mpich = launchers.table()["mpich"]
    first, *rest = command
    return launchers.run(mpich, 1, rest, timeout=DEADLINE, env={**ENVIRONMENT, **env}, python=first)


def collect(nodes, folder, interface="auto", **env):
    """The facts of every rank, by rank, and the finished job."""
    program = f"import os; os.chdir({str(folder)!r})\n{PROGRAM}"
    result = run(nodes, "-c", program, interface, **env).expect(0)
    paths = [folder / f"{rank}.json" for rank in range(len(nodes))]
    return [json.loads(path.read_text()) for path in paths], result


def row_of(result, head):
    """What the start-up block says behind ``head``."""
    (text,) = re.findall(rf"^  {head}  +(.*)$", result.stderr, re.MULTILINE)
    return text


def variable(found, name):
    return [row["set"].get(name) for row in found]


def test_every_node_has_another_interface(cluster, tmp_path):
    names = ("ens1f1", "ens1f0np0", "ib0")
    for number, (node, name) in enumerate(zip(cluster.nodes, names, strict=True), 1):
        cluster.join(node, name, f"10.77.0.{number}")
    found, result = collect(cluster.nodes, tmp_path)
    assert [row["sum"] for row in found] == [[6.0, 6.0, 6.0]] * 3
    assert [row["world"]["hostname"] for row in found] == ["node1", "node2", "node3"]
    assert {row["world"]["master_hostname"] for row in found} == {"node1"}
    assert {row["master"][0] for row in found} == {"10.77.0.1"}
    assert variable(found, "GLOO_SOCKET_IFNAME") == list(names)
    # NCCL has nothing else to choose from.
    assert variable(found, "NCCL_SOCKET_IFNAME") == [None] * 3
    assert row_of(result, "ranks") == "3 ranks on 3 nodes: node[1-3]"
    assert row_of(result, "master").startswith("node1 at 10.77.0.1:")
    assert row_of(result, "interface") == "ens1f1 on node1; ens1f0np0 on node2; ib0 on node3"
    assert "stands for several" not in result.stderr


def test_interfaces_that_lead_nowhere(cluster, tmp_path):
    names = ("ens1f1", "ens1f0np0")
    for number, (node, name) in enumerate(zip(cluster.nodes[:2], names, strict=True), 1):
        # Made first and first by name: what takes the first interface takes a wrong one.
        lead_nowhere(node, "docker0", "172.17.0.1")
        lead_nowhere(node, "aa0", f"10.66.0.{number}")
        cluster.join(node, name, f"10.77.0.{number}")
    found, result = collect(cluster.nodes[:2], tmp_path)
    assert {row["master"][0] for row in found} == {"10.77.0.1"}
    assert variable(found, "NCCL_SOCKET_IFNAME") == ["=ens1f1", "=ens1f0np0"]
    assert variable(found, "GLOO_SOCKET_IFNAME") == list(names)
    assert row_of(result, "interface") == "ens1f1 on node1; ens1f0np0 on node2"
    (seconds,) = re.findall(r"address ([0-9.]+) ", row_of(result, "seconds"))
    assert float(seconds) < ADDRESS_SECONDS


def test_the_option_names_an_interface_per_node(cluster, tmp_path):
    for number, node in enumerate(cluster.nodes[:2], 1):
        # Both networks work; by itself rank 0 prefers the first.
        cluster.join(node, "ens1", f"10.77.0.{number}")
    second = [("ens2", "10.78.0.1"), ("eth9", "10.78.0.2")]
    for node, (name, address) in zip(cluster.nodes[:2], second, strict=True):
        cluster.join(node, name, address)
    found, _ = collect(cluster.nodes[:2], tmp_path, "node1=ens2,node2=eth9")
    assert {row["master"][0] for row in found} == {"10.78.0.1"}
    assert variable(found, "NCCL_SOCKET_IFNAME") == ["=ens2", "=eth9"]
    assert variable(found, "GLOO_SOCKET_IFNAME") == ["ens2", "eth9"]


INIT = ("-c", "import mpiddp; mpiddp.init(timeout=30)")


def expect_table(result, head, *rows):
    """The one message of a job that found no common address, with its table."""
    result.expect(4)
    (line,) = messages(result)
    assert "no address of rank 0 on node1 was reached by every node" in line
    assert "--interface" in line and "Traceback" not in result.stderr
    table = result.stderr[result.stderr.index(line) + len(line) :].splitlines()[1:]
    cells = [re.split(r" {2,}", text.strip()) for text in table[: len(rows) + 1]]
    assert cells == [["node", *head], *map(list, rows)], str(result)


def test_a_node_without_a_common_network(cluster):
    one, two, three = cluster.nodes
    cluster.join(one, "ens1f1", "10.77.0.1")
    cluster.join(two, "ens1f1", "10.77.0.2")
    lead_nowhere(one, "docker0", "172.17.0.1")
    lead_nowhere(three, "docker0", "172.17.0.1")
    expect_table(
        run(cluster.nodes, *INIT),
        ["10.77.0.1 (ens1f1)", "172.17.0.1 (docker0)"],
        ["node1", "reached", "reached"],
        ["node2", "reached", "Network is unreachable"],
        # Its own bridge has that address, and nobody listens there.
        ["node3", "Network is unreachable", "Connection refused"],
    )


def test_a_switch_that_passes_nothing(cluster):
    for number, node in enumerate(cluster.nodes[:2], 1):
        cluster.join(node, "ens1f1", f"10.77.0.{number}")
    cluster.switch.ip("link set bridge down")
    expect_table(
        run(cluster.nodes[:2], *INIT),
        ["10.77.0.1 (ens1f1)"],
        ["node1", "reached"],
        ["node2", "No route to host"],
    )
