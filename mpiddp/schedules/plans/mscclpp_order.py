"""Orders the operations of an MSCCL++ plan: signals, semaphores, barriers and packets.

A signal or a semaphore is matched by its place among those of its kind. A packet carries a flag, so
that who reads it waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpiddp.errors import ScheduleError
from mpiddp.schedules.plans.plan import Buffer, Operation, Span

Key = tuple[Any, ...]
"""What is signalled: it tells a signal from all others, and which one of several is meant."""


@dataclass(frozen=True)
class Move:
    """An operation with what it says and waits for, not yet by numbers."""

    operation: Operation
    signals: tuple[Key, ...] = ()
    waits: tuple[Key, ...] = ()
    makes_packets: tuple[Span, ...] = ()
    takes_packets: tuple[Span, ...] = ()


def link(moves: Sequence[Move]) -> tuple[Operation, ...]:
    """The operations, with those that must have ended before each of them.

    Raises ScheduleError for one that waits for what never comes, and for two that write the same
    packets.
    """
    signals: dict[Key, list[int]] = defaultdict(list)
    packets: dict[tuple[int, Buffer, int], int] = {}
    for number, move in enumerate(moves):
        for key in move.signals:
            # All that come to a barrier are waited for.
            signals[key[:-1] if key[0] == "barrier" else key].append(number)
        for span in move.makes_packets:
            for chunk in range(span.lo, span.hi):
                cell = (span.rank, span.buffer, chunk)
                other = packets.setdefault(cell, number)
                if other != number:
                    raise ScheduleError(
                        f"race: {move.operation} and {moves[other].operation} both write packets "
                        f"to {_name(span)}, and a reader cannot tell them apart"
                    )
    return tuple(
        replace(move.operation, after=tuple(sorted(_find_causes(move, signals, packets))))
        for move in moves
    )


def _find_causes(
    move: Move, signals: Mapping[Key, list[int]], packets: Mapping[tuple[int, Buffer, int], int]
) -> set[int]:
    found: set[int] = set()
    for key in move.waits:
        if key[0] == "barrier":
            *name, count = key
            found.update(signals[tuple(name)])
            if len(signals[tuple(name)]) != count:
                raise ScheduleError(
                    f"deadlock: {move.operation} waits for {count} thread blocks, of which "
                    f"{len(signals[tuple(name)])} come"
                )
        elif key in signals:
            found.update(signals[key])
        else:
            raise ScheduleError(
                f"deadlock: {move.operation} waits for a signal that is never given"
            )
    for span in move.takes_packets:
        for chunk in range(span.lo, span.hi):
            maker = packets.get((span.rank, span.buffer, chunk))
            if maker is None:
                raise ScheduleError(
                    f"deadlock: {move.operation} waits for packets that nobody writes to "
                    f"{_name(span)}"
                )
            found.add(maker)
    return found


def _name(span: Span) -> str:
    return f"rank {span.rank}'s {span.buffer.name.lower()}"
