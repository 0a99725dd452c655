"""Self-consistent performance guidelines: what a collective must not lose to.

After Träff, Gropp & Thakur, "Self-consistent MPI performance guidelines" (IEEE TPDS 21, 2010), and
Hunold & Carpen-Amarie's PGMPI: a user could replace a collective by others, or by calls on parts of
its buffer, so it should never be slower than they are. Each contender is compared with itself.
A guideline counts as broken only if the 95 % intervals of the medians over the rounds do not
overlap; with fewer than six rounds there are none, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from benchmarks.collectives.contenders import PARTS, SUBSTITUTES, Contender, Task
from benchmarks.common.options import describe_seconds
from benchmarks.common.statistics import median_interval
from mpiddp.wording import describe_size

Times = Mapping[Task, tuple[float, ...]]
"""Seconds of each round, by what was measured in one command."""


def list_broken(task: Task, times: Times) -> list[str]:
    """What the contender loses to on this size, of what was measured."""
    if task.contender.quantity not in (*PARTS, *SUBSTITUTES):
        return []
    own = median_interval(times[task])
    found = []
    for name, count, parts in _list_replacements(task, times):
        theirs = [median_interval(times[part]) for part in parts]
        known = [interval.high for interval in theirs if interval is not None]
        bound = count * sum(known)
        if own is not None and len(known) == len(parts) and own.low > bound:
            mine = f"{describe_seconds(own.low)} or more"
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
    """The same contender's other collective, with the operator if it has one."""
    for operator in (task.operator, "", "sum"):
        part = replace(task, contender=replace(own, quantity=quantity), operator=operator)
        if part in times:
            return part
    return None
