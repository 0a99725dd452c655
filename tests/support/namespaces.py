"""Several nodes on one machine: network namespaces, each with a hostname, joined by a bridge.

MPICH starts one rank in each, over pipes, and its own messages go through shared memory: so
what mpiddp finds out about the network is all that the job knows of it. A namespace lives
as long as the process that holds it, which reads a pipe from this one; nothing is made in
the machine's own namespace, and nothing stays when the tests end, however they end.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import launchers

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
        return ["nsenter", "--target", str(self.holder), "--net", "--uts", *command]

    def ip(self, command: str) -> None:
        subprocess.run(
            self.enter("ip", *command.split()), check=True, timeout=launchers.SHORTEST_DEADLINE
        )


@dataclass(frozen=True)
class Cluster:
    """Nodes, and the switch between them: a bridge in a namespace of its own."""

    nodes: tuple[Node, ...]
    switch: Node

    def join(self, node: Node, interface: str, address: str) -> None:
        # The other end is named by the address: that is unique.
        self.switch.ip(f"link add {address} type veth peer name {interface} netns {node.holder}")
        self.switch.ip(f"link set {address} master bridge up")
        node.ip(f"address add {address}/24 dev {interface}")
        node.ip(f"link set {interface} up")

    def connect(self, *interfaces: str, network: str = "10.77.0") -> None:
        """Join the first nodes, each by the interface given for it; node1 gets address 1."""
        for number, interface in enumerate(interfaces, 1):
            self.join(self.nodes[number - 1], interface, f"{network}.{number}")


def lose_large_packets(node: Node, interface: str) -> None:
    """Let ``node`` send packets of 9,000 bytes into a switch that drops what exceeds 1,500.

    Nobody says so, and TCP does not try shorter ones. A packet that the kernel has put together
    from several would pass: between namespaces it is never cut up.
    """
    node.ip(f"link set {interface} mtu 9000 gso_max_segs 1")
    probing = "sysctl -q -w net.ipv4.tcp_mtu_probing=0"
    subprocess.run(node.enter(*probing.split()), check=True, timeout=launchers.SHORTEST_DEADLINE)


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
    with launchers.begin(*command) as (holder, line):
        assert line == "ready"
        yield Node(hostname, holder.pid)


def find_obstacle() -> str | None:
    """Why no namespaces can be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    absent = [name for name in TOOLS if shutil.which(name) is None]
    if absent:
        return f"{absent[0]} is missing: apt-get install iproute2 util-linux"
    attempt = ["hostname h", "ip link add v1 type veth peer name v2", "ip link add b0 type bridge"]
    command = ["unshare", "--net", "--uts", "sh", "-c", " && ".join(attempt)]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=launchers.SHORTEST_DEADLINE
    )
    return f"no network namespaces: {answer.stderr.strip()}" if answer.returncode else None


@contextlib.contextmanager
def make_cluster() -> Iterator[Cluster]:
    """Three nodes, node1 to node3, that have no interface but loopback, and a switch.

    Skips the test where no namespaces can be made.
    """
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    with contextlib.ExitStack() as stack:
        nodes = tuple(stack.enter_context(hold(f"node{number}")) for number in (1, 2, 3))
        switch = stack.enter_context(hold("switch"))
        switch.ip("link add name bridge type bridge")
        switch.ip("link set bridge up")
        yield Cluster(nodes, switch)


@contextlib.contextmanager
def start(
    nodes: Sequence[Node],
    *arguments: str,
    wraps: Mapping[int, Sequence[str]] | None = None,
    **env: str,
) -> Iterator[launchers.Job]:
    """Start ``python ARGUMENTS…`` as one job with a rank on each of ``nodes``.

    ``wraps`` holds, by rank, a command that the program is an argument of.
    """
    program = (sys.executable, *arguments)
    commands = [node.enter(*(wraps or {}).get(i, ()), *program) for i, node in enumerate(nodes)]
    (first, *rest), *others = commands
    rest += [word for other in others for word in (":", "-n", "1", *other)]
    mpich, env = launchers.table()["mpich"], {**ENVIRONMENT, **env}
    with launchers.start(mpich, 1, rest, env=env, python=first) as job:
        yield job


def run(nodes: Sequence[Node], *arguments: str, **options: Any) -> launchers.Result:
    """Run a job to its end; see `start`."""
    with start(nodes, *arguments, **options) as job:
        return job.wait()
