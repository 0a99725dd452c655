"""Plays a schedule on values of any kind: symbols, sets of letters, tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

from mpiddp.errors import ScheduleError
from mpiddp.schedules.schedule import Schedule, Step

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
