"""Interfaces and addresses: which ones could carry this job, and what NCCL and Gloo are told.

Nothing here communicates. `rendezvous` finds out which candidate every node really reaches.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError

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
    """Mbit/s; 0 where the system does not say."""

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


@dataclass(frozen=True)
class InterfaceRule:
    """Which interfaces may be used, in the terms of NCCL_SOCKET_IFNAME.

    NCCL's syntax is ``[^][=]name,name…``: ``^`` excludes, ``=`` compares whole names instead of
    prefixes (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    """

    names: tuple[str, ...]
    exact: bool = False
    exclude: bool = False
    source: str = "--interface"

    @staticmethod
    def from_nccl(text: str, source: str) -> InterfaceRule:
        """Parse NCCL's syntax; ``name:port`` items lose their port."""
        exclude = text.startswith("^")
        text = text[exclude:]
        exact = text.startswith("=")
        names = (item.split(":")[0].strip() for item in text[exact:].split(","))
        return InterfaceRule(tuple(name for name in names if name), exact, exclude, source)

    def admits(self, name: str) -> bool:
        """Whether NCCL, given this rule, would consider the interface ``name``."""
        matches = any(
            name == wanted if self.exact else name.startswith(wanted) for wanted in self.names
        )
        return matches != self.exclude

    @property
    def nccl(self) -> str:
        """The value of NCCL_SOCKET_IFNAME that says the same."""
        return ("^" if self.exclude else "") + ("=" if self.exact else "") + ",".join(self.names)


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
            found.append(Interface(name, addresses, state.speed))
    return tuple(found)


def parse_interface_option(text: str, hostname: str) -> InterfaceRule | None:
    """Read ``--interface``: ``auto``, ``NAME[,NAME…]``, ``HOST=NAME,…`` or NCCL's syntax.

    HOST may be a shell pattern (``node*``) and is compared with the short and the full name. A
    host that no item names chooses by itself: None, like ``auto``.
    """
    text = text.strip()
    if text == "auto":
        return None
    if not text.strip("^=, "):
        raise ConfigurationError(
            f"--interface {text!r} names no interface: expected auto, NAME, HOST=NAME,… or "
            "NCCL's syntax (^docker,lo or =eth0)"
        )
    if text.startswith(("^", "=")):
        return InterfaceRule.from_nccl(text, "--interface")
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not any("=" in item for item in items):
        return InterfaceRule(tuple(items), exact=True)
    names = []
    for item in items:
        host, equals, name = item.partition("=")
        if not (host and equals and name):
            raise ConfigurationError(f"--interface: expected HOST=NAME, found {item!r} in {text!r}")
        if fnmatch.fnmatch(hostname, host) or fnmatch.fnmatch(hostname.split(".")[0], host):
            names.append(name)
    return InterfaceRule(tuple(names), exact=True) if names else None


def find_rule(
    option: str, hostname: str, variables: Mapping[str, str] | None = None
) -> InterfaceRule | None:
    """The rule in force on this host: the option's, else NCCL's own settings, else Gloo's."""
    variables = os.environ if variables is None else variables
    rule = parse_interface_option(option, hostname)
    if rule is not None:
        return rule
    nccl = nccl_setting(variables)
    if nccl:
        return InterfaceRule.from_nccl(nccl, environment.NCCL_SOCKET_IFNAME)
    gloo = variables.get(environment.GLOO_SOCKET_IFNAME)
    if gloo:
        return InterfaceRule(
            tuple(gloo.split(",")), exact=True, source=environment.GLOO_SOCKET_IFNAME
        )
    return None


def nccl_setting(variables: Mapping[str, str]) -> str | None:
    """What NCCL itself will take for its interfaces: the variable, else its configuration files.

    NCCL reads ``$NCCL_CONF_FILE`` or ``~/.nccl.conf``, then ``/etc/nccl.conf``; the first value
    found counts.
    """
    value = variables.get(environment.NCCL_SOCKET_IFNAME)
    if value:
        return value
    user_file = variables.get(environment.NCCL_CONF_FILE) or os.path.expanduser("~/.nccl.conf")
    for path in (Path(user_file), Path("/etc/nccl.conf")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and name.strip() == environment.NCCL_SOCKET_IFNAME:
                return value.strip()
    return None


def list_candidates(
    interfaces: Sequence[Interface], rule: InterfaceRule | None, node_count: int, hostname: str
) -> tuple[Candidate, ...]:
    """Addresses that rank 0 offers, best first.

    Loopback is offered only where all ranks are on one node. Between nodes, real interfaces come
    before container bridges and link-local addresses, the faster one first.

    Raises ConfigurationError when the rule leaves nothing.
    """
    admitted = [i for i in interfaces if rule is None or rule.admits(i.name)]
    if rule is None or (not admitted and node_count == 1 and rule.source != "--interface"):
        admitted = [i for i in interfaces if i.is_loopback == (node_count == 1)]
    candidates = [
        (IPv4Address(address).is_link_local, interface.is_bridge, -interface.speed, order, address)
        for order, interface in enumerate(admitted)
        for address in interface.addresses
    ]
    if not candidates:
        raise ConfigurationError(describe_lack(interfaces, rule, node_count, hostname))
    return tuple(
        Candidate(address, admitted[order].name) for *_, order, address in sorted(candidates)
    )


def describe_lack(
    interfaces: Sequence[Interface], rule: InterfaceRule | None, node_count: int, hostname: str
) -> str:
    """Why no interface of this host can be used, and which there are."""
    there = ", ".join(f"{i.name} ({', '.join(i.addresses)})" for i in interfaces) or "none"
    if rule is None:
        scope = "that other nodes could reach" if node_count > 1 else "for loopback"
        return f"{hostname} has no interface {scope}; up with an IPv4 address: {there}"
    return (
        f"{rule.source} {rule.nccl!r} fits no interface of {hostname}; "
        f"up with an IPv4 address: {there}"
    )


def find_interface(interfaces: Sequence[Interface], address: str) -> str | None:
    """Name of the interface that holds ``address``."""
    for interface in interfaces:
        if address in interface.addresses:
            return interface.name
    return None


def choose_variables(
    interfaces: Sequence[Interface],
    used: Sequence[str],
    rule: InterfaceRule | None,
    node_count: int,
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Interface variables to set on this node for NCCL and Gloo.

    Args:
        used: interfaces over which this node and rank 0 reached each other, the agreed one first.

    What the user, the environment or NCCL's configuration files say is left alone. NCCL is told
    only between nodes and only where it could pick an interface that leads elsewhere. Gloo would
    look its own host name up, which may answer 127.0.1.1 or nothing, so it is always told.
    """
    variables = os.environ if variables is None else variables
    chosen = {}
    if not nccl_setting(variables):
        if rule is not None and rule.source == "--interface":
            chosen[environment.NCCL_SOCKET_IFNAME] = rule.nccl
        elif node_count > 1 and used:
            others = [i for i in interfaces if not i.is_loopback and i.name not in used]
            if others:
                chosen[environment.NCCL_SOCKET_IFNAME] = "=" + ",".join(used)
    if not variables.get(environment.GLOO_SOCKET_IFNAME):
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
