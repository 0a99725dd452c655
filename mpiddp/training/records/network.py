"""``--track-network``: what interfaces have sent, beside what the ranks say that they sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mpiddp.launch.network.infiniband import INFINIBAND
from mpiddp.launch.network.interfaces import list_interfaces

OCTETS = 4
"""InfiniBand's unit of data (Documentation/ABI/stable/sysfs-class-infiniband)."""

Counters: TypeAlias = Mapping[str, tuple[int, int]]
"""Bytes sent and received, by the interface's name."""


def read_counters(folder: Path = INFINIBAND) -> Counters:
    """What this host's interfaces, and InfiniBand's ports, have counted since they were made.

    InfiniBand's data bypasses the system's interfaces. Bridges within the host are left out.
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
    """Of a rank in an epoch."""

    counted_bytes: int
    """Gradients and weights that it has sent, also within its node."""
    interfaces: dict[str, dict[str, int]]
    """``sent_bytes`` and ``received_bytes`` by the interface's name, of whatever process; empty but
    on the first rank of a node."""


class NetworkMeter:
    """Of one rank; the first of a node reads the counters."""

    def __init__(self, is_first: bool, read: Callable[[], Counters] = read_counters) -> None:
        self._read: Callable[[], Counters] = read if is_first else dict
        self._before: Counters = {}
        self._steps = 0

    def begin(self, steps: int) -> None:
        """An epoch begins, or goes on after so many steps."""
        self._before, self._steps = self._read(), steps

    def measure(self, sent_bytes: float, steps: int) -> Network:
        """Since ``begin``; ``sent_bytes``: those of all steps of the epoch."""
        counted = sent_bytes * (steps - self._steps) / max(steps, 1)
        interfaces = {
            name: {"sent_bytes": sent - before[0], "received_bytes": received - before[1]}
            for name, (sent, received) in self._read().items()
            if (before := self._before.get(name)) is not None
        }
        return Network(round(counted), interfaces)


def describe(node: Mapping[str, Any]) -> str:
    """The line on a node."""
    parts = [f"{node['counted_bytes'] / 1e6:.1f} MB counted"]
    for name, each in node["interfaces"].items():
        sent, received = each["sent_bytes"] / 1e6, each["received_bytes"] / 1e6
        parts.append(f"{name} sent {sent:.1f} MB and received {received:.1f} MB")
    return f"Network of {node['host']}: {'; '.join(parts)}"
