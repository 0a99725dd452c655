"""Links: a bridge on the controller, and one cable from it to each node and to this machine.

The bridge is in a namespace of its own, not in this machine's, where a firewall that somebody
set up for containers may filter what passes over bridges.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import subprocess
from collections.abc import Sequence

import machines
from state import ClusterError, Machine, Shape

# 10.77 first; 198.18.0.0/15 is set aside for measuring networks (RFC 2544).
NETWORKS = (*(f"10.77.{n}" for n in range(16)), *(f"198.18.{n}" for n in range(16)))
LEAST_BURST = 80_000
"""Bytes. Below a segment that the kernel has put together (64 KB and headers) every one would
have to be cut up again; far above it, links would be faster than their rate."""
BURST_SECONDS = 1e-3
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def claim() -> tuple[str, str]:
    """A network that this machine does not know yet, and a name for an interface into it."""
    routes = _known_networks()
    for number, prefix in enumerate(NETWORKS):
        network = ipaddress.ip_network(f"{prefix}.0/24")
        # A cluster without IPv4 has the interface alone.
        is_taken = _exists(["ip", "link", "show", f"mpiddp{number}"])
        if not is_taken and not any(network.overlaps(other) for other in routes):
            return prefix, f"mpiddp{number}"
    raise ClusterError("all of 10.77.0.0/20 and 198.18.0.0/20 are in use on this machine")


def _known_networks() -> list[ipaddress.IPv4Network]:
    text = subprocess.run(
        ["ip", "-4", "route", "show", "table", "all"], capture_output=True, text=True
    ).stdout
    found = re.findall(r"^(?:\w+ )?(\d+\.\d+\.\d+\.\d+(?:/\d+)?) ", text, re.MULTILINE)
    return [ipaddress.IPv4Network(each, strict=False) for each in found]


def make_bridge(shape: Shape) -> None:
    """The bridge, with the controller's address, and this machine's own link to it."""
    controller = shape.controller
    if not _has_interface(controller, controller.interface):
        own = f"address {_hardware_address(controller.address)}"
        _ip(controller, f"link add name {controller.interface} {own} type bridge")
    for address in controller.addresses:
        _ip(controller, _assign(address, controller.interface))
    _ip(controller, f"link set {controller.interface} up")
    _plug(shape, "host", None, shape.host_interface, shape.host_addresses)


def connect(shape: Shape, machine: Machine) -> None:
    """Give a node its interface, its address and its link to the bridge, whatever is missing."""
    _plug(shape, machine.port, machine, machine.interface, machine.addresses)


def _plug(
    shape: Shape, port: str, machine: Machine | None, interface: str, addresses: Sequence[str]
) -> None:
    """A cable between a port of the bridge and an interface of a node, or of this machine."""
    controller = shape.controller

    def run(command: str) -> None:
        if machine is None:
            _run(["ip", *command.split()])
        else:
            _ip(machine, command)

    own = ["ip", "link", "show", interface]
    is_there = _exists(own if machine is None else machines.enter(machine, own))
    if not (is_there and _has_interface(controller, port)):
        # Half of a cable; a machine that has died takes its own half away a moment later.
        with contextlib.suppress(ClusterError):
            _ip(controller, f"link delete {port}")
        with contextlib.suppress(ClusterError):
            run(f"link delete {interface}")
        # Any process in the network that the interface goes to.
        target = os.getpid() if machine is None else machines.find_init(machine)
        # Seen from outside: inside the controller this machine's process numbers mean nothing.
        inside = ["nsenter", "--target", str(machines.find_init(controller)), "--net"]
        far_end = f"name {interface} address {_hardware_address(addresses[0])} netns {target}"
        link = f"link add {port} type veth peer {far_end}"
        _run([*inside, "ip", *link.split()])
    _ip(controller, f"link set {port} master {controller.interface} up")
    for address in addresses:
        run(_assign(address, interface))
    run(f"link set {interface} up")


def _assign(address: str, interface: str) -> str:
    # Nobody else has an address: the kernel need not ask whether somebody does.
    length, more = ("64", " nodad") if ":" in address else ("24", "")
    return f"address replace {address}/{length} dev {interface}{more}"


def _hardware_address(address: str) -> str:
    """The Ethernet address that goes with an address: the same each time the node is made.

    The other machines keep the one that they know for up to a minute.
    """
    return f"02:00:{ipaddress.ip_address(address).packed[-4:].hex(':')}"


def disconnect_host(shape: Shape) -> None:
    """Take away this machine's own link."""
    if _exists(["ip", "link", "show", shape.host_interface]):
        _run(["ip", "link", "delete", shape.host_interface])


def find_link(shape: Shape, machine: Machine) -> str:
    """``up``, ``cut``, or ``gone`` if the bridge has no such port."""
    if machines.find_init(shape.controller) is None or not _has_interface(
        shape.controller, machine.port
    ):
        return "gone"
    text = machines.run(shape.controller, "ip", "-oneline", "link", "show", machine.port)
    flags = text[text.index("<") + 1 : text.index(">")].split(",")
    return "up" if "UP" in flags else "cut"


def set_link(shape: Shape, machine: Machine, *, up: bool) -> None:
    """Take a node's link away, or give it back."""
    _ip(shape.controller, f"link set {machine.port} {'up' if up else 'down'}")


def parse_rate(text: str) -> str | None:
    """A rate as tc writes it, or None for ``none``. Raises ClusterError."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if found is None or float(found[1]) * UNITS[found[2]] < 8e3:
        raise ClusterError(f"rate {text!r}: expected one such as 400mbit or 1gbit, or none")
    return text.lower()


def shape_link(shape: Shape, machine: Machine, rate: str | None) -> None:
    """Limit what a node sends and receives, each to ``rate``; None takes the limit away."""
    for owner, interface in ((machine, machine.interface), (shape.controller, machine.port)):
        if rate is None:
            if "tbf" in machines.run(owner, "tc", "qdisc", "show", "dev", interface):
                machines.run(owner, "tc", "qdisc", "delete", "dev", interface, "root")
            continue
        limit = f"rate {rate} burst {_burst(rate)} latency 50ms"
        words = f"tc qdisc replace dev {interface} root tbf {limit}".split()
        machines.run(owner, *words)


def find_rate(machine: Machine) -> str | None:
    """The rate of a node's link, as tc says it."""
    text = machines.run(machine, "tc", "qdisc", "show", "dev", machine.interface)
    found = re.search(r"tbf .*?rate (\S+)", text)
    return found[1] if found else None


def _burst(rate: str) -> int:
    number, unit = float(rate[:-4]), rate[-4:]
    return max(LEAST_BURST, int(number * UNITS[unit] / 8 * BURST_SECONDS))


def _ip(machine: Machine, command: str) -> None:
    machines.run(machine, "ip", *command.split())


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _has_interface(machine: Machine, interface: str) -> bool:
    return _exists(machines.enter(machine, ["ip", "link", "show", interface]))


def _exists(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0
