"""What the commands share: one line for what goes wrong, and starting what is not running."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import configuration
import machines
import network
import requirements
from state import ClusterError, Machine, Shape, demand_shape, machine_directory


def main(work: Callable[[], None]) -> None:
    """Run a command; a ClusterError becomes one line and exit code 1."""
    try:
        work()
    except ClusterError as error:
        sys.exit(f"jobs/cluster/{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that calls the program by its place in the checkout."""
    name = f"jobs/cluster/{Path(sys.argv[0]).name}"
    return argparse.ArgumentParser(prog=name, description=description, allow_abbrev=False)


def parse_nothing(description: str) -> None:
    """The command line of a command without arguments."""
    parser(description).parse_args()


def parse_node(description: str) -> tuple[Shape, Machine]:
    """The command line of a command for one node. Raises ClusterError."""
    reader = parser(description)
    reader.add_argument("node", metavar="NODE", help="as node2")
    name = reader.parse_args().node
    requirements.check_root()
    shape = demand_shape()
    return shape, shape.find(name)


def start_controller(shape: Shape) -> None:
    """Start the controller, its bridge and its daemons, as far as they are not running."""
    controller = shape.controller
    if machines.find_init(controller) is None:
        _prepare(shape, controller)
        machines.boot(controller)
    network.make_bridge(shape)
    machines.start_munge(controller)
    machines.start_daemon(controller, "slurmctld")


def start_nodes(shape: Shape, nodes: Sequence[Machine], rate: str | None) -> None:
    """Start nodes, their links and their daemons, as far as they are not running."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in pool.map(lambda node: _start_node(shape, node, rate), nodes):
            pass


def _start_node(shape: Shape, node: Machine, rate: str | None) -> None:
    if machines.find_init(node) is None:
        _prepare(shape, node)
        machines.boot(node)
    network.connect(shape, node)
    network.set_link(shape, node, up=True)
    network.shape_link(shape, node, rate)
    machines.start_munge(node)
    machines.start_daemon(node, "slurmd", "-N", node.name)


def _prepare(shape: Shape, machine: Machine) -> None:
    machine_directory(machine).mkdir(parents=True, exist_ok=True)
    configuration.write_hosts(shape, machine)


def describe(shape: Shape, rate: str | None) -> str:
    """The cluster in half a line."""
    parts = [f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}", f"{shape.cpus} CPUs each"]
    if shape.gpus:
        parts.append(f"{shape.gpus} fake GPUs each")
    parts.append(f"links of {rate}" if rate else "links unlimited")
    return ", ".join(parts)
