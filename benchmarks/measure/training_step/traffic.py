"""Bytes that a step sends: counted from what is sent, or read from the network's interfaces.

Every rank has a port, and every node a link to the network, which its ranks share. The busiest of
them is the bottleneck if the network is. A rank sends nothing to itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpiddp.schedules.schedule import Schedule

LOOPBACK = "lo"

Counters = Mapping[str, tuple[int, int]]
"""For each interface, bytes received and sent."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step."""

    sent: tuple[int, ...]
    """By each rank."""
    received: tuple[int, ...]
    node_sent: tuple[int, ...]
    """By each node's ranks to other nodes."""
    node_received: tuple[int, ...]

    @property
    def each(self) -> float:
        """What a rank sends, on average."""
        return sum(self.sent) / len(self.sent)

    @property
    def busiest(self) -> int:
        """The most that goes over a link, one way: a node's, or a rank's port on one node."""
        if len(self.node_sent) > 1:
            return max(self.node_sent + self.node_received)
        return max(self.sent + self.received)


Message = tuple[int, int, int]
"""From a rank, to a rank, bytes."""


def add_up(messages: Iterable[Message], nodes: Sequence[int]) -> Traffic:
    ranks, count = len(nodes), max(nodes) + 1
    sent, received, out, into = [0] * ranks, [0] * ranks, [0] * count, [0] * count
    for source, target, size in messages:
        if source == target:
            continue
        sent[source] += size
        received[target] += size
        if nodes[source] != nodes[target]:
            out[nodes[source]] += size
            into[nodes[target]] += size
    return Traffic(tuple(sent), tuple(received), tuple(out), tuple(into))


def list_transfers(schedule: Schedule, count: int, item: int) -> Iterable[Message]:
    """A schedule's messages for a buffer of ``count`` elements of ``item`` bytes."""
    bounds = schedule.bounds(count)
    for step in schedule.steps:
        for source, target, lo, hi, _ in step:
            yield source, target, item * (bounds[hi] - bounds[lo])


def list_pushes(
    count: int, item: int, servers: Sequence[int], workers: Sequence[int]
) -> Iterable[Message]:
    """What workers push and servers answer in a step, of ``count`` elements of ``item`` bytes."""
    for number, server in enumerate(servers):
        size = item * (count * (number + 1) // len(servers) - count * number // len(servers))
        for worker in workers:
            yield worker, server, size
            yield server, worker, size


@dataclass(frozen=True)
class Bytes:
    """Of one step, in short."""

    each: float
    """What a rank sends, on average."""
    busiest: float | None
    """The most over a link, one way; None if unknown, as on one machine, whose ranks share
    ``lo``."""
    is_read: bool
    """Whether interfaces counted them: with headers and other programs' bytes."""


# ---- the interfaces -----------------------------------------------------------------------


def read_counters() -> dict[str, tuple[int, int]]:
    """This node's interfaces' (on Linux from /proc/net/dev), those of the present namespace."""
    import psutil

    return {
        name: (row.bytes_recv, row.bytes_sent)
        for name, row in psutil.net_io_counters(pernic=True).items()
    }


def subtract(before: Counters, after: Counters) -> dict[str, tuple[int, int]]:
    return {
        name: (after[name][0] - before[name][0], after[name][1] - before[name][1])
        for name in after
        if name in before
    }


def read_bytes(nodes: Sequence[Counters], steps: int, ranks: int) -> Bytes:
    """Of what each node counted in so many steps.

    Between nodes counts the interface that sent most on its node.
    """
    inside = sum(counters.get(LOOPBACK, (0, 0))[1] for counters in nodes)
    if len(nodes) == 1:
        return Bytes(inside / steps / ranks, None, is_read=True)
    others = [[counters[name] for name in counters if name != LOOPBACK] for counters in nodes]
    links = [max(each, key=lambda counted: counted[1], default=(0, 0)) for each in others]
    total = inside + sum(sent for _, sent in links)
    return Bytes(total / steps / ranks, max(map(max, links)) / steps, is_read=True)


def describe_traffic(traffic: Traffic) -> dict[str, Any]:
    return {**vars(traffic), "each": traffic.each, "busiest": traffic.busiest}
