"""Bytes that a step sends: counted from what is sent, or read from the network's interfaces.

Every rank has a port, and every node a link to the network, which its ranks share. The busiest of
them is the bottleneck if the network is. A rank sends nothing to itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpiddp.schedules.schedule import Schedule
from mpiddp.training.records.network import Counters

LOOPBACK = "lo"
Message = tuple[int, int, int]
"""From a rank, to a rank, bytes."""


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of one step."""

    each: float
    """What a rank sends, on average."""
    busiest: float | None
    """The most over a link, one way; None if unknown, as on one machine, whose ranks share
    ``lo``."""
    is_read: bool
    """Whether interfaces counted them: with headers and other programs' bytes."""


def add_up(messages: Iterable[Message], nodes: Sequence[int]) -> dict[str, Any]:
    """What each rank sends and receives, on average and over the busiest link, one way.

    That is a node's, or a rank's port on one node; ``node_sent`` goes to other nodes.
    """
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
    busiest = max(out + into) if count > 1 else max(sent + received)
    return {
        "sent": sent, "received": received, "node_sent": out, "node_received": into,
        "each": sum(sent) / ranks, "busiest": busiest,
    }  # fmt: skip


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


def subtract(before: Counters, after: Counters) -> Counters:
    return {
        name: (after[name][0] - before[name][0], after[name][1] - before[name][1])
        for name in after
        if name in before
    }


def read_traffic(nodes: Sequence[Counters], steps: int, ranks: int) -> StepTraffic:
    """Of what each node's interfaces counted in so many steps, sent and received.

    Between nodes counts the interface that sent most on its node.
    """
    inside = sum(counters.get(LOOPBACK, (0, 0))[0] for counters in nodes)
    if len(nodes) == 1:
        return StepTraffic(inside / steps / ranks, None, is_read=True)
    others = [[counters[name] for name in counters if name != LOOPBACK] for counters in nodes]
    links = [max(each, default=(0, 0)) for each in others]
    total = inside + sum(sent for sent, _ in links)
    return StepTraffic(total / steps / ranks, max(map(max, links)) / steps, is_read=True)
