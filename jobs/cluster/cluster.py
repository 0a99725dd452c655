"""The cluster as a whole: start whatever of it is not running."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import configuration
import machines
import network
from state import Machine, Shape, machine_directory


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
        parts.append(f"{shape.gpus} {'real' if shape.devices else 'fake'} GPUs each")
    if shape.devices and shape.nodes * shape.gpus > len(shape.devices):
        parts.append("which nodes share: ranks need --allow-shared-gpu")
    parts.append(f"links of {rate}" if rate else "links unlimited")
    return ", ".join(parts)
