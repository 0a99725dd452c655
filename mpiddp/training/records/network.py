"""``--track-network``: what interfaces have sent, beside what the ranks say that they sent."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from mpiddp.launch.network.infiniband import INFINIBAND
from mpiddp.launch.network.interfaces import list_interfaces
from mpiddp.wording import count_noun

OCTETS = 4
"""InfiniBand's unit of data (Documentation/ABI/stable/sysfs-class-infiniband)."""
SHOWN = 6
"""Interfaces that fit into a line."""

Counters: TypeAlias = Mapping[str, tuple[int, int]]
"""Bytes sent and received, by the interface's name."""


def read_counters(folder: Path = INFINIBAND) -> Counters:
    """What this host's interfaces, and InfiniBand's ports, have counted since they are there.

    InfiniBand's data passes by the interfaces of the system. Bridges within the host are left out.
    """
    import psutil  # Only if it is asked for.

    known = psutil.net_io_counters(pernic=True)
    names = [each.name for each in list_interfaces() if not each.is_bridge and each.name in known]
    found = {name: (known[name].bytes_sent, known[name].bytes_recv) for name in names}
    for counters in sorted(folder.glob("*/ports/*/counters")):
        files = (counters / f"port_{way}_data" for way in ("xmit", "rcv"))
        try:
            sent, received = (OCTETS * int(file.read_text()) for file in files)
        except (OSError, ValueError):
            continue  # A port whose driver does not count.
        found[f"{counters.parts[-4]}/{counters.parts[-2]}"] = sent, received
    return found


@dataclass(frozen=True)
class Network:
    """Of a node in an epoch, or of one of its ranks."""

    host: str
    counted_bytes: int
    """Gradients and weights that its ranks have sent, also to one another."""
    interfaces: dict[str, dict[str, int]] = field(default_factory=dict)
    """``sent_bytes`` and ``received_bytes`` by the interface's name, of whatever process."""


class NetworkMeter:
    """Of one rank; the first of a node reads the counters."""

    def __init__(self, is_first: bool, read: Callable[[], Counters] = read_counters) -> None:
        self._read: Callable[[], Counters] = read if is_first else dict
        self._before, self._steps = self._read(), 0

    def begin(self, steps: int) -> None:
        """An epoch begins, or goes on after so many steps."""
        self._before, self._steps = self._read(), steps

    def measure(self, sent_bytes: float, steps: int) -> Network:
        """Since ``begin``; ``sent_bytes``: those of all steps of the epoch."""
        counted = sent_bytes * (steps - self._steps) / max(steps, 1)
        now, before = self._read(), self._before
        interfaces = {
            name: {
                "sent_bytes": now[name][0] - before[name][0],
                "received_bytes": now[name][1] - before[name][1],
            }
            for name in now.keys() & before.keys()
        }
        return Network(socket.gethostname(), round(counted), dict(sorted(interfaces.items())))


def join_nodes(ranks: Sequence[Network]) -> list[dict[str, Any]]:
    """What the ranks of each node have measured, together, as JSON can hold it."""
    nodes: dict[str, Network] = {}
    for each in ranks:
        node = nodes.get(each.host, Network(each.host, 0))
        counted = node.counted_bytes + each.counted_bytes
        nodes[each.host] = Network(each.host, counted, node.interfaces | each.interfaces)
    return [asdict(node) for node in nodes.values()]


def add_up(nodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """What interfaces of each name have sent and received, on all nodes."""
    total: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for node in nodes:
        for name, counts in node["interfaces"].items():
            for way, each in counts.items():
                total[name][way] += each
    return {name: dict(counts) for name, counts in total.items()}


def describe(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The console's line."""
    total = add_up(nodes)
    by_most = sorted(total, key=lambda name: -total[name]["sent_bytes"])
    parts = [f"{sum(node['counted_bytes'] for node in nodes) / 1e6:.1f} MB counted"]
    for name in by_most[:SHOWN]:
        sent, received = (total[name][way] / 1e6 for way in ("sent_bytes", "received_bytes"))
        parts.append(f"{name} sent {sent:.1f} MB and received {received:.1f} MB")
    if len(by_most) > SHOWN:
        parts.append(f"{len(by_most) - SHOWN} more")
    where = nodes[0]["host"] if len(nodes) == 1 else count_noun(len(nodes), "node")
    return f"Network of {where}: {'; '.join(parts)}"
