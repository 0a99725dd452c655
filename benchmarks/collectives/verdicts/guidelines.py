"""Self-consistent performance guidelines: what a collective must not lose to.

After Träff, Gropp & Thakur, "Self-consistent MPI performance guidelines" (IEEE TPDS 21, 2010), and
Hunold & Carpen-Amarie's PGMPI: a user could replace a collective by others, or by calls on parts of
its buffer, so it should never be slower than they are. Each contender is compared with itself.
A guideline counts as broken only if the intervals of the medians do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from benchmarks.collectives.contenders import PARTS, SUBSTITUTES, Contender, Task
from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.common.statistics import median_interval

Times = Mapping[Task, tuple[float, ...]]
"""Seconds of each round, by what was measured in one command."""


def list_broken(task: Task, times: Times) -> list[str]:
    """What the contender loses to on this size, of what was measured."""
    if task.contender.quantity not in (*PARTS, *SUBSTITUTES):
        return []
    low, _ = _find_ends(times[task])
    mine = f"{describe_seconds(low)} or more"
    found = []
    for name, count, parts in _list_replacements(task, times):
        bound = count * sum(_find_ends(times[part])[1] for part in parts)
        if low > bound:
            found.append(f"loses to {name}: {mine}, and {describe_seconds(bound)} or less")
    return found


def _list_replacements(task: Task, times: Times) -> Iterable[tuple[str, int, list[Task]]]:
    """Its name, how often the parts are called, and the parts."""
    own = task.contender
    sets: list[tuple[str, ...]] = list(PARTS.get(own.quantity, ()))
    if own.quantity in SUBSTITUTES:
        sets.append((SUBSTITUTES[own.quantity],))
    for quantities in sets:
        parts = [_find_part(task, own, quantity, times) for quantity in quantities]
        known = [part for part in parts if part is not None]
        if len(known) == len(quantities):
            yield " + ".join(quantities), 1, known
    for size in sorted({each.bytes for each in times}):
        smaller = replace(task, bytes=size)
        if 0 < size < task.bytes and task.bytes % size == 0 and smaller in times:
            count = task.bytes // size
            yield f"{count} calls of {describe_size(size)}", count, [smaller]


def _find_part(task: Task, own: Contender, quantity: str, times: Times) -> Task | None:
    """The same contender's other collective, with the operator where it has one."""
    for operator in (task.operator, "", "sum"):
        part = replace(task, contender=replace(own, quantity=quantity), operator=operator)
        if part in times:
            return part
    return None


def _find_ends(values: tuple[float, ...]) -> tuple[float, float]:
    interval = median_interval(values)
    return (interval.low, interval.high) if interval else (min(values), max(values))
