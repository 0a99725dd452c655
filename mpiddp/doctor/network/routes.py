"""Findings about the routes to rank 0, the links between nodes, and the clocks."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from mpiddp.doctor.examiner.findings import Finding, failed, join_some, passed, skipped, warned
from mpiddp.doctor.network.node_links import FAULTY_SHARE, NodeLinks, find_limit
from mpiddp.errors import UnreachableError
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.network.interfaces import Interface

INTERFACES = "interfaces"
LINKS = "links"
CLOCKS = "clocks"

LONGEST_LATENCY = 5e-3
"""Seconds there and back."""
LARGEST_SKEW = 1.0
"""Seconds."""
BETTER = 2.0
"""An interface that is left unused is pointed out if it is this many times faster."""
CLAIMED_SHARE = 0.25
"""A link is pointed out if it carries less than this share of what its interfaces claim."""
ONE_STREAM = 10e9
"""Bits per second. Beyond it, one TCP stream may be limited by a core instead of the link."""
NOMINAL = 2e9
"""Bits per second: a virtual interface that claims more is taken for this fast."""

VIRTUAL_DRIVERS = ("virtio_net", "vmxnet3", "hv_netvsc", "vif")
"""Of the network cards that virtual machines see: vmxnet3, for one, always claims 10 Gbit/s."""
DEVICES = Path("/sys/class/net")
ROUTES = Path("/proc/net/route")
IS_UP, IS_REFUSED = 0x1, 0x200
"""Flags of a route (linux/route.h)."""


@dataclass(frozen=True)
class Way:
    """How one node reaches rank 0."""

    interface: str
    address: str
    """The node's own, on that interface."""
    master: str
    """Rank 0's."""
    gateway: str | None
    """The first one on the way; None if the master is a neighbour."""
    speed: int
    """Of the interface, Mbit/s; 0 if the system does not say."""
    told: str
    """What NCCL and Gloo are told."""
    faster: tuple[str, int] | None
    """Name and speed of an interface that is left unused."""
    is_virtual: bool = False
    """Whether the speed is a mere claim, since there is no cable."""

    @property
    def expected(self) -> float:
        """Bits per second that a TCP stream should reach by what the interface claims."""
        return CLAIMED_SHARE * min(1e6 * self.speed, NOMINAL if self.is_virtual else ONE_STREAM)


def find_way(
    used: str,
    address: str,
    master: str,
    interfaces: Sequence[Interface],
    variables: Mapping[str, str],
    *,
    chosen_by_user: bool,
    routes: Path = ROUTES,
) -> Way:
    """Look at this node's way to rank 0; an interface that the user chose has no better."""
    speed = next((each.speed for each in interfaces if each.name == used), 0)
    others = [each for each in interfaces if not (each.is_loopback or each.is_bridge)]
    best = max(others, key=lambda each: each.speed, default=None)
    if best is None or chosen_by_user or not best.speed >= BETTER * speed > 0:
        best = None
    try:
        table = routes.read_text()
    except OSError:
        table = ""
    return Way(
        interface=used,
        address=address,
        master=master,
        gateway=find_gateway(table, used, master) if address != master else None,
        speed=speed,
        told=", ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "nothing",
        faster=None if best is None else (best.name, best.speed),
        is_virtual=is_virtual(used),
    )


def is_virtual(interface: str, devices: Path = DEVICES) -> bool:
    """Whether an interface has no card of this machine below it, or that of a virtual machine."""
    folder = devices / interface
    if (folder / "device").exists():
        return (folder / "device/driver").resolve().name in VIRTUAL_DRIVERS
    below = [path.name.removeprefix("lower_") for path in folder.glob("lower_*")]
    return all(is_virtual(name, devices) for name in below)


def find_gateway(table: str, interface: str, address: str) -> str | None:
    """The gateway to an address by the kernel's main table of routes (``/proc/net/route``).

    The most exact route by this interface counts, and of several the one of the lowest metric.
    None if the address is a neighbour's, or no such route is listed.
    """
    found: list[tuple[int, int, IPv4Address]] = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[0] != interface:
            continue
        flags = int(fields[3], 16)
        mask = _read_address(fields[7])
        network = IPv4Network((int(_read_address(fields[1])), str(mask)), strict=False)
        if not flags & IS_UP or flags & IS_REFUSED or IPv4Address(address) not in network:
            continue
        found.append((network.prefixlen, -int(fields[6]), _read_address(fields[2])))
    best = max(found, key=lambda route: route[:2], default=None)
    return str(best[2]) if best is not None and int(best[2]) else None


def _read_address(text: str) -> IPv4Address:
    """The kernel writes the four bytes as one number in its own order."""
    return IPv4Address(int(text, 16).to_bytes(4, sys.byteorder))


def judge_ways(ways: Sequence[Way]) -> list[Finding]:
    """One finding for every node; nodes that differ in their own address alone agree."""
    alike: dict[Way, list[str]] = {}
    for way in ways:
        alike.setdefault(replace(way, address=""), []).append(way.address)
    return [_judge_way(way, fold_hostnames(alike[replace(way, address="")])) for way in ways]


def _judge_way(way: Way, addresses: str) -> Finding:
    """Of nodes that are alike, with the short form of their addresses."""
    path = f"{way.interface} {addresses}"
    if addresses != way.master:
        path += f" → {way.master}" + (f" through {way.gateway}" if way.gateway else "")
    path += f" at {way.speed} Mbit/s" if way.speed else ""
    if way.faster is None:
        return passed(INTERFACES, f"{path}; NCCL and Gloo are told {way.told}")
    name, speed = way.faster
    return warned(
        INTERFACES,
        f"{path} is what every node is reached by, while {name} at {speed} Mbit/s is left unused",
        f"If {name} connects all nodes: --interface {name}",
    )


def judge_links(links: Sequence[NodeLinks], ways: Sequence[Way]) -> Finding:
    """One finding for all links; ``ways`` has those of the same nodes."""
    if len(links) < 2:
        return skipped(LINKS, "one node")
    problems = [problem for link in links for problem in link.problems]
    if problems:
        return failed(
            LINKS,
            "TCP: " + join_some(problems),
            "Open a path between these nodes (firewall? route?), or name an interface that has "
            "one: --interface NAME",
            UnreachableError.exit_code,
        )
    # What a node received, it received from the one before it. Host names may repeat.
    rates = [
        (
            f"{links[index - 1].hostname} → {link.hostname}",
            link.received or 0.0,
            # The end that claims less is the limit.
            min(ways[index - 1], ways[index], key=lambda way: way.expected),
        )
        for index, link in enumerate(links)
    ]
    trips = [
        (f"{link.hostname} → {link.neighbour}", link.ring.seconds)
        for link in links
        if link.ring is not None
    ]
    slow = find_slow(rates)
    parts = [_describe_slow(*each) for each in slow]
    parts += [
        f"{name} {describe_seconds(seconds)} there and back"
        for name, seconds in trips
        if seconds > LONGEST_LATENCY
    ]
    if parts:
        usual = describe_rate(statistics.median(rate for _, rate, _ in rates))
        text = f"TCP: {join_some(parts)}; the median is {usual}"
        advice = _advise_on_slow([way for _, rate, way in slow if rate < way.expected])
        faulty = find_faulty(links)
        if faulty:
            text += f"; {fold_hostnames(faulty)} is as slow with other nodes"
            return replace(failed(LINKS, text, advice), hosts=faulty)
        return warned(LINKS, text, advice)
    slowest, rate, _ = min(rates, key=lambda item: item[1])
    latest, seconds = max(trips, key=lambda item: item[1])
    return passed(
        LINKS,
        f"TCP round the ring of nodes: at least {describe_rate(rate)} ({slowest}), at most "
        f"{describe_seconds(seconds)} there and back ({latest})",
    )


def find_faulty(links: Sequence[NodeLinks]) -> tuple[str, ...]:
    """The hosts that send or receive far less than the others, with either of two partners."""
    crossed = [link.cross_checked for link in links]
    if None in crossed:
        return ()
    near, far = _mark_faulty([link.received for link in links]), _mark_faulty(crossed)
    count = len(links)
    return tuple(
        link.hostname
        for at, link in enumerate(links)
        # What it receives, and what the next two receive from it.
        if (near[at] and far[at]) or (near[(at + 1) % count] and far[(at + 2) % count])
    )


def _mark_faulty(rates: Sequence[float | None]) -> list[bool]:
    known = [rate or 0.0 for rate in rates]
    limit = FAULTY_SHARE * statistics.median(known)
    return [rate < limit for rate in known]


def find_slow(rates: Sequence[tuple[str, float, Way]]) -> list[tuple[str, float, Way]]:
    """Links that are slow beside the others, or for their interface, the slowest first."""
    limit = find_limit([rate for _, rate, _ in rates])
    slow = (item for item in rates if item[1] < max(limit, item[2].expected))
    return sorted(slow, key=lambda item: item[1])


def _describe_slow(name: str, rate: float, way: Way) -> str:
    found = f"{name} {describe_rate(rate)}"
    if rate >= way.expected:
        return found
    kind = ", a virtual interface," if way.is_virtual else ""
    return f"{found}, though {way.interface}{kind} claims {describe_rate(1e6 * way.speed)}"


def _advise_on_slow(disproved: Sequence[Way]) -> str:
    """``disproved``: of the links that carry less than their interfaces claim."""
    if disproved and all(way.is_virtual for way in disproved):
        return (
            "What a virtual interface claims is no measurement: compare with what such a machine "
            f"is promised, look for a limit (tc qdisc show dev {disproved[0].interface}), and at "
            "who else uses the network below"
        )
    where = "these nodes' cables, switch ports and interfaces (ethtool)"
    return f"Look at {where}, and at who else uses them"


def judge_clocks(links: Sequence[NodeLinks]) -> Finding:
    if len(links) < 2:
        return skipped(CLOCKS, "one node")
    pings = [(link.hostname, link.master) for link in links if link.master is not None]
    if not pings:
        return skipped(CLOCKS, f"{links[0].hostname} was not reached")
    # Only what is beyond doubt is pointed out.
    wrong = [
        f"{name} is {describe_seconds(abs(ping.offset))} "
        f"{'behind' if ping.offset > 0 else 'ahead of'} {links[0].hostname}"
        for name, ping in pings
        if abs(ping.offset) - ping.seconds / 2 > LARGEST_SKEW
    ]
    if wrong:
        return warned(
            CLOCKS,
            join_some(wrong),
            "Times in logs and of files will mislead you: have NTP (chrony) set the clocks",
        )
    name, ping = max(pings, key=lambda item: abs(item[1].offset))
    return passed(
        CLOCKS,
        f"at most {describe_seconds(abs(ping.offset))} ± {describe_seconds(ping.seconds / 2)} from "
        f"{links[0].hostname} ({name})",
    )


def describe_rate(rate: float) -> str:
    """``940 Mbit/s``, ``12.3 Gbit/s``."""
    return f"{rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


def describe_seconds(seconds: float) -> str:
    """``85 µs``, ``2.5 ms``, ``3.1 s``."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
