"""Which ranks share a node, and what is possible between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, eq=False)
class Layout:
    """The ranks of a communicator."""

    rank: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    nodes: tuple[int, ...]
    """The node of each rank, by number."""
    transports: tuple[str, ...]
    """What can carry a call between all ranks, the preferred one first."""
    absent: dict[str, str] = field(default_factory=dict)
    """Of other transports, why they cannot."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.nodes)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on this rank's node, itself among them."""
        return tuple(r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ranks node by node; they need not be numbered so."""
        return tuple(sorted(range(self.size), key=lambda rank: (self.nodes[rank], rank)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The ranks of each node, in the order of ``order``."""
        return tuple(map(self.nodes.count, sorted(set(self.nodes))))


def count_cores(affinities: Sequence[Sequence[int]], quotas: Sequence[float] = ()) -> float:
    """The cores that ranks of one node may use between them: at most their container's share."""
    return min(len(set().union(*affinities)), max(quotas, default=math.inf))


def find_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """The cores' worth of time that this process's container has (cgroup v2); no limit is inf."""
    try:
        share, period = file.read_text().split()
        return float(share) / float(period)
    except (OSError, ValueError):
        # There is no such file, or it says "max".
        return math.inf
