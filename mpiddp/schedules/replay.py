"""Plays a schedule on values of any kind, and finds out how its sums are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from mpiddp.errors import ScheduleError
from mpiddp.schedules.schedule import Collective, Schedule, Step

Value = TypeVar("Value")
State = list[list[Value | None]]
"""For each rank and each chunk what it holds; None for nothing that is part of any result."""


_SOURCE = itemgetter(0)


def replay(
    schedule: Schedule,
    contribution: Callable[[int, int], Value],
    add: Callable[[Sequence[Value]], Value],
) -> Iterator[State[Value]]:
    """The state before the first step and after each one; always the same list, changed.

    ``contribution(rank, chunk)`` is what a contributor begins with; ``add`` sums at least two
    values, in the order in which a rank would. Raises ScheduleError where a rank sends what it does
    not hold, or what a step leaves behind would depend on timing: a chunk copied into twice, or
    copied into and reduced.
    """
    state: State[Value] = [[None] * schedule.chunks for _ in range(schedule.ranks)]
    for chunk in range(schedule.chunks):
        for rank in schedule.contributors(chunk):
            state[rank][chunk] = contribution(rank, chunk)
    yield state
    for number, step in enumerate(schedule.steps):
        _take(state, number, step, add)
        yield state


def finish(
    schedule: Schedule,
    contribution: Callable[[int, int], Value],
    add: Callable[[Sequence[Value]], Value],
) -> State[Value]:
    """The state after the last step; as ``replay``."""
    states = replay(schedule, contribution, add)
    state = next(states)
    for _ in states:
        pass
    return state


def _take(
    state: State[Value], number: int, step: Step, add: Callable[[Sequence[Value]], Value]
) -> None:
    copied: dict[tuple[int, int], Value] = {}
    added: dict[tuple[int, int], list[tuple[int, Value]]] = {}
    for src, dst, lo, hi, reduce in step:
        row = state[src]
        for chunk in range(lo, hi):
            value, place = row[chunk], (dst, chunk)
            if value is None:
                raise ScheduleError(
                    f"step {number}: rank {src} sends chunk {chunk} to rank {dst}, "
                    "but holds nothing of it"
                )
            if not reduce:
                if place in copied:
                    raise ScheduleError(
                        f"step {number}: chunk {chunk} of rank {dst} is copied into twice"
                    )
                copied[place] = value
            elif place in added:
                added[place].append((src, value))
            else:
                added[place] = [(src, value)]
    for (rank, chunk), operands in added.items():
        own = state[rank][chunk]
        if own is not None:
            operands.append((rank, own))
        if len(operands) > 1:
            operands.sort(key=_SOURCE)
            state[rank][chunk] = add([value for _, value in operands])
        else:
            state[rank][chunk] = operands[0][1]
    for (rank, chunk), value in copied.items():
        if (rank, chunk) in added:
            raise ScheduleError(
                f"step {number}: chunk {chunk} of rank {rank} is both copied into and reduced"
            )
        state[rank][chunk] = value


@dataclass(frozen=True)
class Sums:
    """Where a schedule completes its sums."""

    final: frozenset[tuple[int, int, int]]
    """Step, rank and chunk of each addition after which every contribution is in the chunk."""
    is_single: bool
    """Whether each sum is made at once from original contributions, so that no partial sum is
    rounded on the way."""


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
        # A sum that was complete when it arrived is not completed again.
        complete = {place for place in reduced - passed_on if after[place] == whole}
        final |= {(number, rank, chunk) for rank, chunk in complete}
        held |= after
    return Sums(frozenset(final), is_single)


def is_order_fixed(schedule: Schedule) -> bool:
    """Whether all chunks are summed in the same order, independent of where the buffer is cut.

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
