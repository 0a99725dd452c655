"""A schedule whose ranks need not be in step: when each of them ends if one is late or slow.

``cost.simulate`` lets every step end with its slowest rank, so that a late rank would hold up all
algorithms alike. Here a rank goes on as soon as its own part of a step is done. A message begins
when both of its ranks have come to the step. A rank sends its messages one after the other, in the
order of the step, and takes what arrives one after the other, in the order of arrival; so does
a node's link. Without a disturbance no rank ends later than by ``simulate`` if each has a node of
its own; on a shared link another order may cost more (R. L. Graham, Bounds on Multiprocessing
Timing Anomalies, 1969): up to a tenth, as far as was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import ConfigurationError
from mpiddp.schedules.cost import Floats, Integers, check_nodes, list_messages
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.schedule import Schedule


@dataclass(frozen=True)
class Disturbance:
    """What is late or slow on a machine."""

    delays: Mapping[int, float] = field(default_factory=dict)
    """Seconds by which a rank begins late."""
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """How many times as long a rank's messages and additions take."""
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """How many times as long messages between two nodes take, either way."""

    def check(self, ranks: int, nodes: int) -> None:
        """Raise ConfigurationError if a rank or a node does not exist."""
        for rank in (*self.delays, *self.slow_ranks):
            if not 0 <= rank < ranks:
                raise ConfigurationError(f"there is no rank {rank} among {ranks} ranks")
        for pair in self.slow_links:
            if not all(0 <= node < nodes for node in pair):
                raise ConfigurationError(
                    f"there is no link {pair[0]}-{pair[1]} between {nodes} "
                    f"node{'s' if nodes > 1 else ''}, which are numbered from 0"
                )


@dataclass(frozen=True)
class Timeline:
    """Prices the whole of a schedule; ``nodes`` as for ``cost.simulate``."""

    machine: Machine
    nodes: Sequence[int]
    disturbance: Disturbance = Disturbance()

    def run(self, schedule: Schedule, count: int, *, item: int = 1) -> Floats:
        """When each rank ends, in seconds: shape (ranks,).

        For a buffer of ``count`` elements of ``item`` bytes. Raises ConfigurationError if the nodes
        are not the schedule's, or lack what is disturbed.
        """
        nodes = check_nodes(schedule.ranks, self.nodes)
        self.disturbance.check(schedule.ranks, len(nodes))
        node_of = np.repeat(np.arange(len(nodes)), nodes)
        slowness = _spread(self.disturbance.slow_ranks, schedule.ranks, 1.0)
        ready = _spread(self.disturbance.delays, schedule.ranks, 0.0)
        bounds = np.array(schedule.bounds(count), dtype=np.int64) * item
        for step in schedule.steps:
            src, dst, size, reduce = list_messages(step, bounds, packed=schedule.packed)
            if not len(size):
                continue
            source, target = node_of[src], node_of[dst]
            slower = np.maximum(slowness[src], slowness[dst]) * self._find_slow(source, target)
            begin = np.maximum(ready[src], ready[dst])
            far = source != target
            between, inside = self.machine.between, self.machine.inside
            time = np.where(far, between.seconds(size), inside.seconds(size)) * slower
            sent = _queue(src, begin, time, np.arange(len(size)))
            end = np.maximum(sent, _queue(dst, begin, time, begin))
            if far.any():
                busy = self.machine.occupation(size[far]) * slower[far]
                first = begin[far] + between.delay(size[far]) * slower[far]
                for link, order in ((source, sent), (target, begin)):
                    there = _queue(link[far], first, busy, order[far])
                    end[far] = np.maximum(end[far], there)
            after = ready.copy()
            np.maximum.at(after, src, end)
            np.maximum.at(after, dst, end)
            adding = self.machine.addition_seconds(size) * reduce * slowness[dst]
            ready = after + np.bincount(dst, adding, schedule.ranks)
        return ready

    def _find_slow(self, source: Integers, target: Integers) -> Floats:
        factors = np.ones(len(source))
        for (one, other), factor in self.disturbance.slow_links.items():
            there = (source == one) & (target == other)
            factors[there | ((source == other) & (target == one))] = factor
        return factors


def _spread(values: Mapping[int, float], count: int, usual: float) -> Floats:
    found = np.full(count, usual)
    for place, value in values.items():
        found[place] = value
    return found


def _queue(users: Integers, begin: Floats, time: Floats, key: NDArray[Any]) -> Floats:
    """When each message ends if its user (rank or link) has one after the other.

    In the order of ``key``, and none before its own ``begin``.
    """
    order = np.lexsort((key, users))
    users, begin, time = users[order], begin[order], time[order]
    is_first = np.diff(users, prepend=-1) != 0
    if is_first.all():
        ends = begin + time
    else:
        # end(k) = max(begin(k), end(k-1)) + time(k): a running sum, and a running maximum of what
        # is waited for. A row for each user makes both of them stop where another one begins.
        row = np.cumsum(is_first) - 1
        place = np.arange(len(users)) - np.flatnonzero(is_first)[row]
        shape = (row[-1] + 1, place.max() + 1)
        times, begins = np.zeros(shape), np.full(shape, -np.inf)
        times[row, place], begins[row, place] = time, begin
        sums = np.cumsum(times, axis=1)
        waits = np.maximum.accumulate(begins - (sums - times), axis=1)
        ends = (sums + waits)[row, place]
    found = np.empty_like(ends)
    found[order] = ends
    return found
