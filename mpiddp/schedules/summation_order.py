"""What the sums of a schedule are made of: where they are complete, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpiddp.schedules.replay import finish
from mpiddp.schedules.schedule import Collective, Schedule


@dataclass(frozen=True)
class Sums:
    """What is known of a schedule's sums."""

    final: frozenset[tuple[int, int, int]]
    """Step, rank and chunk of each addition after which every contribution is in the chunk."""
    is_single: bool
    """Whether each sum is made at once, of contributions as they were: nothing is rounded on the
    way, in whatever type it travels."""


def find_sums(schedule: Schedule) -> Sums:
    """Follow the contributions through the schedule."""
    whole = sum(1 << rank for rank in schedule.members)
    held = {
        (rank, chunk): 1 << rank
        for chunk in range(schedule.chunks)
        for rank in schedule.contributors(chunk)
    }
    final, is_single = set(), True
    for number, step in enumerate(schedule.steps):
        after: dict[tuple[int, int], int] = {}
        passed_on = set()
        for src, dst, lo, hi, reduce in step:
            for chunk in range(lo, hi):
                value, place = held.get((src, chunk), 0), (dst, chunk)
                if reduce:
                    is_single = is_single and value.bit_count() == 1
                    if value == whole and len(schedule.members) > 1:
                        passed_on.add(place)
                    value |= after.get(place, held.get(place, 0))
                after[place] = value
        reduced = {(t.dst, chunk) for t in step if t.reduce for chunk in range(t.lo, t.hi)}
        is_single = is_single and all(after[place] == whole for place in reduced)
        # A sum that was complete when it came is not completed once more.
        complete = {place for place in reduced - passed_on if after[place] == whole}
        final |= {(number, rank, chunk) for rank, chunk in complete}
        held |= after
    return Sums(frozenset(final), is_single)


def is_order_fixed(schedule: Schedule) -> bool:
    """Whether all chunks are summed in the same order, wherever the buffer is cut.

    The two operands of one addition may be swapped, which changes no bit. Where nothing is added,
    it is.
    """
    trees: dict[tuple[int, int], int] = {}
    first = len(schedule.members) + schedule.ranks

    def add(values: Sequence[int]) -> int:
        total = values[0]
        for value in values[1:]:
            pair = (total, value) if total < value else (value, total)
            total = trees.setdefault(pair, first + len(trees))
        return total

    if schedule.collective in (Collective.ALL_GATHER, Collective.BROADCAST):
        return True
    state = finish(schedule, lambda rank, chunk: rank, add)
    results = {state[rank][c] for c in range(schedule.chunks) for rank in schedule.holders(c)}
    return len(results) <= 1
