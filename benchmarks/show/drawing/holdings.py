"""What each rank holds after each step: the letters of the ranks that contributed to it."""

from __future__ import annotations

import string
from collections.abc import Sequence

from mpiddp.schedules.proof import replay
from mpiddp.schedules.schedule import Schedule

Holdings = tuple[tuple[frozenset[int], ...], ...]
"""For each rank and each chunk: whose contributions are in it."""


def follow(schedule: Schedule) -> list[Holdings]:
    """The holdings before the first step and after each."""
    nothing: frozenset[int] = frozenset()
    states = replay(
        schedule, lambda rank, _: frozenset([rank]), lambda parts: nothing.union(*parts)
    )
    return [
        tuple(tuple(nothing if chunk is None else chunk for chunk in row) for row in state)
        for state in states
    ]


def letter(rank: int) -> str:
    """a to z, then aa, ab and so on."""
    first, last = divmod(rank, 26)
    return (letter(first - 1) if first else "") + string.ascii_lowercase[last]


def spell(ranks: frozenset[int]) -> str:
    """``a+b+c``; four and more neighbours as ``a…d``; nothing as ``·``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "+".join(map(_spell_run, runs)) or "·"


def _spell_run(run: Sequence[int]) -> str:
    if len(run) < 4:
        return "+".join(map(letter, run))
    return f"{letter(run[0])}…{letter(run[-1])}"
