"""Interfaces and addresses: which ones could carry this job, and what NCCL and Gloo are told.

Nothing here communicates. `address_agreement` finds out which candidate every node really reaches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from mpiddp import environment
from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.network.interface_rule import InterfaceRule, find_nccl_setting

# Interfaces that containers and virtual machines use among themselves on one host. Every host
# may own the same address on them (172.17.0.1), so they come last.
BRIDGES = (
    "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "podman", "lxc", "lxd", "tun", "tap"
)  # fmt: skip


@dataclass(frozen=True)
class Interface:
    """One network interface of this host that is up."""

    name: str
    addresses: tuple[str, ...]
    """IPv4, dotted."""
    speed: int = 0
    """Mbit/s; 0 if the system does not say."""
    mtu: int = 0
    """Bytes of the largest packet; 0 if the system does not say."""

    @property
    def is_loopback(self) -> bool:
        return any(IPv4Address(address).is_loopback for address in self.addresses)

    @property
    def is_bridge(self) -> bool:
        return self.name.startswith(BRIDGES)


@dataclass(frozen=True)
class Candidate:
    """An address of rank 0 that the other nodes try to reach."""

    address: str
    interface: str
    mtu: int = 0
    """Of the interface."""


def list_interfaces() -> tuple[Interface, ...]:
    """This host's interfaces that are up and have an IPv4 address."""
    import socket

    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(e.address for e in entries if e.family == socket.AF_INET)
        state = states.get(name)
        if addresses and state is not None and state.isup:
            found.append(Interface(name, addresses, state.speed, state.mtu))
    return tuple(found)


def list_candidates(
    interfaces: Sequence[Interface], rule: InterfaceRule | None, node_count: int, hostname: str
) -> tuple[Candidate, ...]:
    """Addresses that rank 0 offers, best first.

    Loopback is offered only if all ranks are on one node, or by its name. Between nodes, real
    interfaces come before container bridges and link-local addresses, the faster one first.

    Raises ConfigurationError when the rule leaves nothing, UnreachableError when there is nothing.
    """
    admitted = [i for i in interfaces if rule is None or rule.admits(i.name)]
    by_name = rule is not None and rule.exact and not rule.exclude
    if node_count > 1 and not by_name:
        admitted = [i for i in admitted if not i.is_loopback]
    elif rule is None or (not admitted and rule.source != "--interface"):
        admitted = [i for i in interfaces if i.is_loopback]
    candidates = [
        (IPv4Address(address).is_link_local, interface.is_bridge, -interface.speed, order, address)
        for order, interface in enumerate(admitted)
        for address in interface.addresses
    ]
    if not candidates:
        error = UnreachableError if rule is None else ConfigurationError
        raise error(describe_lack(interfaces, rule, node_count, hostname))
    return tuple(
        Candidate(address, admitted[order].name, admitted[order].mtu)
        for *_, order, address in sorted(candidates)
    )


def describe_lack(
    interfaces: Sequence[Interface], rule: InterfaceRule | None, node_count: int, hostname: str
) -> str:
    """Why no interface of this host can be used, and which there are."""
    there = ", ".join(f"{i.name} ({', '.join(i.addresses)})" for i in interfaces) or "none"
    if rule is None:
        scope = "that other nodes could reach" if node_count > 1 else "for loopback"
        return (
            f"{hostname} has no interface {scope}: mpiddp connects ranks over IPv4, not over IPv6; "
            f"up with an IPv4 address: {there}"
        )
    return (
        f"{rule.source} {rule.text!r} fits no interface of {hostname}; "
        f"up with an IPv4 address: {there}"
    )


def find_interface(interfaces: Sequence[Interface], address: str) -> Interface | None:
    """The interface that holds ``address``."""
    return next((each for each in interfaces if address in each.addresses), None)


def check_variables(backend: str, hostname: str, variables: Mapping[str, str] = os.environ) -> None:
    """Compare what NCCL or Gloo will read about interfaces with what this host has.

    Raises ConfigurationError if the backend will find no interface: its own error names
    neither the variable nor the host.
    """
    import socket

    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    names = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.family in families for entry in entries)
    ]
    if backend == "nccl":
        variable = environment.NCCL_SOCKET_IFNAME
        value = find_nccl_setting(variable, variables)
        fits = not value or any(map(InterfaceRule.from_nccl(value, variable).admits, names))
    else:
        variable = environment.GLOO_SOCKET_IFNAME
        value = variables.get(variable)
        fits = not value or set(value.split(",")) <= set(names)  # Gloo opens each of them.
    if not fits:
        raise ConfigurationError(
            f"{variable} is {value!r}, but the interfaces of {hostname} that have an address are "
            f"{', '.join(names) or 'none'}: correct the variable, unset it, or give --interface"
        )


def choose_variables(
    interfaces: Sequence[Interface],
    used: Sequence[str],
    rule: InterfaceRule | None,
    node_count: int,
    variables: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Interface variables to set on this node for NCCL and Gloo.

    Args:
        used: interfaces over which this node and rank 0 reached each other, the agreed one first.

    ``--interface`` is the user's latest word and overrides the environment. Otherwise what the
    environment or NCCL's configuration files say is left alone. NCCL is told
    only between nodes and only if it could pick an interface that leads elsewhere. Gloo would
    look its own host name up, which may answer 127.0.1.1 or nothing, so it is always told.
    """
    chosen = {}
    commanded = rule is not None and rule.source == "--interface"
    if rule is not None and commanded:
        chosen[environment.NCCL_SOCKET_IFNAME] = rule.nccl
    elif (
        node_count > 1 and used and not find_nccl_setting(environment.NCCL_SOCKET_IFNAME, variables)
    ):
        others = [i for i in interfaces if not i.is_loopback and i.name not in used]
        if others:
            chosen[environment.NCCL_SOCKET_IFNAME] = "=" + ",".join(used)
    if commanded or not variables.get(environment.GLOO_SOCKET_IFNAME):
        name = _gloo_interface(interfaces, used, rule)
        if name is not None:
            chosen[environment.GLOO_SOCKET_IFNAME] = name
    return chosen


def _gloo_interface(
    interfaces: Sequence[Interface], used: Sequence[str], rule: InterfaceRule | None
) -> str | None:
    """One exact name: Gloo knows neither prefixes nor exclusions."""
    admitted = [name for name in used if rule is None or rule.admits(name)]
    if admitted:
        return admitted[0]
    if rule is not None:
        for interface in sorted(interfaces, key=lambda i: (i.is_loopback, i.is_bridge)):
            if rule.admits(interface.name):
                return interface.name
    return used[0] if used else None
