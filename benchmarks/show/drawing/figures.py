"""What the animated page shows of a schedule, as data: its states, and the terms of its prices.

The page contains no algorithm and no cost model. It multiplies the terms by latencies, bytes
and speeds, takes all chunks as equally large, and shows segments as copies of the schedule, each
one step behind the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiddp.schedules.cost import bound
from mpiddp.schedules.machine import Machine, MessageCost
from mpiddp.schedules.proof import replay
from mpiddp.schedules.schedule import Schedule

Integers = NDArray[np.int64]


def find_ends(schedule: Schedule) -> list[int]:
    """0 and the chunk at which each column ends: neighbours that no transfer separates are one."""
    transfers = chain.from_iterable(schedule.steps)
    return sorted({0, schedule.chunks}.union(*((t.lo, t.hi) for t in transfers)))


def describe_states(schedule: Schedule) -> dict[str, Any]:
    """The columns' ``ends``; the ``sums`` and ``changes`` of all steps, and their transfers.

    A value is a number: the contribution of the rank with this number, or, from ``ranks`` on, one
    of ``sums``, each of which has the values that were added, in order. ``changes`` has for each
    step the cells, rank by rank, whose value changes, and their new values.
    """
    ends, sums = find_ends(schedule), dict[tuple[int, ...], int]()
    column = {end: number for number, end in enumerate(ends)}

    def add(values: Sequence[int]) -> int:
        return sums.setdefault(tuple(values), schedule.ranks + len(sums))

    cells = (
        [row[chunk] for row in state for chunk in ends[:-1]]
        for state in replay(schedule, lambda rank, _: rank, add)
    )
    before = next(cells)
    changes = []
    for now in cells:
        pairs = ((cell, new) for cell, new in enumerate(now) if new != before[cell])
        changes.append(list(chain.from_iterable(pairs)))
        before = now
    return {
        "ends": ends,
        "sums": list(sums),
        "changes": changes,
        "steps": [
            [int(each) for t in step for each in (*t[:2], column[t.lo], column[t.hi], t.reduce)]
            for step in schedule.steps
        ],
    }


def describe_bound(schedule: Schedule, nodes: Sequence[int]) -> list[float]:
    """The factors of the lower bound.

    Of latency and of the buffer's bytes, inside nodes and between them, of which the greater
    product counts; and of the bytes' addition. Without messages inside nodes the first ones hold
    as well, since a rank is a node then.
    """
    unit, promise = MessageCost(1, 1), (len(schedule.members), schedule.collective)
    inside = bound(1, Machine(unit, unit, 1), nodes, *promise)
    between = bound(1, Machine(MessageCost(0, 0), unit, 1), nodes, *promise)
    return [
        inside.latency, between.latency, inside.bandwidth, between.bandwidth, inside.addition,
    ]  # fmt: skip


class Loads:
    """What the ranks do in each step, in messages and chunks, however many segments there are."""

    def __init__(self, schedule: Schedule, nodes: Sequence[int]) -> None:
        home = np.repeat(np.arange(len(nodes)), nodes)
        self._neighbours = (home[:, None] == home).astype(np.int64)
        # Of each rank: messages and chunks sent to other nodes, and within its node; the same
        # received; chunks added.
        self._counts = np.zeros((len(schedule.steps), schedule.ranks, 9), np.int64)
        self._ends: list[Integers] = []
        """Source, destination and whether it is added, of each message of each step."""
        self._packed = schedule.packed
        for found, step in zip(self._counts, schedule.steps, strict=True):
            src, dst, lo, hi, reduce = np.array(step, np.int64).reshape(-1, 5).T
            near = 2 * (home[src] == home[dst])
            for ranks, place in ((src, near), (dst, 4 + near)):
                np.add.at(found, (ranks, place + 1), hi - lo)
            np.add.at(found[:, 8], dst, (hi - lo) * reduce)
            ends = np.stack([src, dst, reduce])
            self._ends.append(np.unique(ends, axis=1) if schedule.packed else ends)
            self._count_messages(found, self._ends[-1])
        self._known: dict[bytes, tuple[Any, ...]] = {}

    def _count_messages(self, counts: Integers, ends: Integers) -> None:
        src, dst, _ = ends
        near = 2 * self._neighbours[src, dst]
        counts[:, :8:2] = 0
        np.add.at(counts, (src, near), 1)
        np.add.at(counts, (dst, 4 + near), 1)

    def describe(self, segments: int) -> Iterator[tuple[Any, ...]]:
        """Each step of the schedule in so many segments.

        It is the number of messages, the most chunks through a rank, and the loads of which the one
        that takes longest decides: messages and chunks between nodes, chunks added, and, where
        there are any, messages and chunks inside nodes.
        """
        steps, ranks, _ = self._counts.shape
        if steps == 0:
            return
        padding = np.zeros((segments, ranks, 9), np.int64)
        totals = np.concatenate([padding, self._counts, padding[1:]]).cumsum(0)
        for number, window in enumerate(totals[segments:] - totals[:-segments]):
            if self._packed and segments > 1:
                # Parts of the buffer that meet between two ranks share their message.
                ends = self._ends[max(0, number - segments + 1) : number + 1]
                self._count_messages(window, np.unique(np.concatenate(ends, axis=1), axis=1))
            key = window.tobytes()
            if key not in self._known:
                self._known[key] = self._describe_step(window)
            yield self._known[key]

    def _describe_step(self, counts: Integers) -> tuple[Any, ...]:
        sent, received, added = counts[:, :4], counts[:, 4:8], counts[:, 8]
        rows = set[tuple[int, ...]]()
        for side in (sent, received):
            # A node's link carries what all its ranks send, after one message's latency.
            link = self._neighbours @ side[:, 1]
            for (far, volume, near, inner), shared, more in zip(
                side.tolist(), link.tolist(), added.tolist(), strict=True
            ):
                rows.add((far, volume, more, near, inner))
                rows.add((min(far, 1), shared * (far > 0), more, 0, 0))
        loads = [row for row in rows if not any(_exceeds(other, row) for other in rows)]
        busiest = max(int((side[:, 1] + side[:, 3]).max()) for side in (sent, received))
        messages = int(sent[:, [0, 2]].sum())
        return (messages, busiest, *(row if any(row[3:]) else row[:3] for row in sorted(loads)))


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
