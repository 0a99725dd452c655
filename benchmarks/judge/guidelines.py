"""Self-consistent performance guidelines: what a collective must not lose to.

After Träff, Gropp & Thakur, "Self-consistent MPI performance guidelines" (IEEE TPDS 21, 2010), and
Hunold & Carpen-Amarie's PGMPI: a user could replace a collective by others, or by calls on parts of
its buffer, so it should never be slower than they are. Each contender is compared with itself.
A guideline counts as broken if the contender takes longer than what replaces it, by the ratios of
all replacements of a call of one size, judged together (`ratios.find_greater`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from benchmarks.judge.correlation import find_coefficient
from benchmarks.judge.ratios import compare_runs, find_greater
from benchmarks.records.contenders import PARTS, SUBSTITUTES, Contender, Task
from benchmarks.records.options import describe_interval
from mpiddp.wording import describe_size

Times = Mapping[Task, tuple[float, ...]]
"""Seconds of each round, by what was measured in one command."""


def list_broken(task: Task, times: Times) -> list[str]:
    """What the contender loses to on this size, of what was measured."""
    if task.contender.quantity not in (*PARTS, *SUBSTITUTES):
        return []
    coefficient = find_coefficient([list(times.values())])
    ratios = {}
    for name, count, parts in _list_replacements(task, times):
        rounds = zip(*(times[part] for part in parts), strict=False)
        # Other sizes were measured in other rounds.
        together = [count * sum(each) for each in rounds]
        ratios[name] = compare_runs(together, [times[task]], coefficient)
    slower = find_greater(ratios)
    return [
        f"loses to {name}: takes {ratio.estimate:.2f} times as long "
        f"({describe_interval(ratio.interval)})"
        for name, ratio in ratios.items()
        if name in slower
    ]


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
