"""A collective algorithm as data: which rank sends which chunks to which rank, step by step.

A buffer is cut into equal chunks. Within a step every transfer reads the state before the
step. What arrives for one chunk to be reduced is added in the order of the source ranks, the
rank's own value in its place, from the left; if the rank holds nothing of its own (a
dedicated server), the first arrival is taken as it is. A schedule is global: ``project`` gives
each rank its part, so that no send can lack its receive.

The form follows libNBC's rounds (Hoefler, Lumsdaine, Rehm, SC'07) and the chunk schedules of
SCCL (Cai et al., PPoPP'21), without a language: a schedule is made by ordinary Python.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from mpiddp.errors import ConfigurationError


class Collective(enum.Enum):
    """What a schedule promises."""

    ALL_REDUCE = "all-reduce"
    """Every member ends with the sum of the members' buffers."""
    REDUCE_SCATTER = "reduce-scatter"
    """The owner of each chunk ends with its sum over the members."""
    ALL_GATHER = "all-gather"
    """Every member ends with each chunk as its owner had it."""
    REDUCE = "reduce"
    """A reduce-scatter in which one rank, the root, owns all chunks."""
    BROADCAST = "broadcast"
    """An all-gather in which one rank, the root, owns all chunks."""

    @property
    def gathers(self) -> bool:
        """Whether it only copies what owners begin with: the second half of an all-reduce."""
        return self in (Collective.ALL_GATHER, Collective.BROADCAST)


MIRROR = {
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE: Collective.BROADCAST,
    Collective.BROADCAST: Collective.REDUCE,
}


class Transfer(NamedTuple):
    """One message: chunks ``lo`` to ``hi`` (exclusive) of ``src``, added or copied at ``dst``."""

    src: int
    dst: int
    lo: int
    hi: int
    reduce: bool


Step = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    """A collective on ``ranks`` ranks and a buffer of any length, cut into ``chunks`` chunks."""

    collective: Collective
    ranks: int
    chunks: int
    steps: tuple[Step, ...]
    members: tuple[int, ...]
    """The ranks that contribute and get the result: all but dedicated servers."""
    owners: tuple[int, ...] = ()
    """The owner of each chunk. In an all-reduce: who holds its sum after half of the steps; empty
    if it has no such halves."""
    packed: bool = False
    """Whether all that a rank sends another in one step travels as one message, through a buffer in
    which chunks lie side by side that are no neighbours."""

    def contributors(self, chunk: int) -> tuple[int, ...]:
        """The ranks whose value of ``chunk`` is in the result."""
        return (self.owners[chunk],) if self.collective.gathers else self.members

    def holders(self, chunk: int) -> tuple[int, ...]:
        """The ranks that hold the result of ``chunk`` in the end."""
        scatters = self.collective in (Collective.REDUCE_SCATTER, Collective.REDUCE)
        return (self.owners[chunk],) if scatters else self.members

    def bounds(self, count: int) -> tuple[int, ...]:
        """Where each chunk of a buffer of ``count`` elements begins, and where the last ends.

        Chunks differ by one element at most; with fewer elements than chunks some are empty,
        and a transfer of nothing is not made.
        """
        return tuple(count * chunk // self.chunks for chunk in range(self.chunks + 1))


# ---- making schedules ---------------------------------------------------------------------


def all_reduce(
    ranks: int,
    chunks: int,
    steps: Iterable[Iterable[Transfer]],
    *,
    members: Iterable[int] | None = None,
    owners: Sequence[int] = (),
    packed: bool = False,
) -> Schedule:
    """An all-reduce of all ranks, or of ``members``."""
    return Schedule(
        Collective.ALL_REDUCE,
        ranks,
        chunks,
        tuple(map(tuple, steps)),
        tuple(range(ranks) if members is None else members),
        tuple(owners),
        packed,
    )


def scatter(
    ranks: int,
    steps: Iterable[Iterable[Transfer]],
    *,
    owners: Sequence[int],
    members: Iterable[int] | None = None,
    packed: bool = False,
) -> Schedule:
    """A reduce-scatter, one chunk per owner; a reduce, if there is one owner."""
    whole = all_reduce(ranks, len(owners), steps, members=members, owners=owners, packed=packed)
    return replace(whole, collective=_first_half(owners))


def _first_half(owners: Sequence[int]) -> Collective:
    return Collective.REDUCE if len(set(owners)) == 1 else Collective.REDUCE_SCATTER


def reverse(schedule: Schedule) -> Schedule:
    """Backwards, with the ends swapped: what was added on its way in is copied on its way out.

    Raises ValueError for an all-reduce, which has no mirror image.
    """
    if schedule.collective not in MIRROR:
        raise ValueError(f"an {schedule.collective.value} has no mirror image")
    steps = tuple(map(tuple, reverse_steps(schedule.steps)))
    return replace(schedule, collective=MIRROR[schedule.collective], steps=steps)


def reverse_steps(steps: Sequence[Iterable[Transfer]]) -> list[list[Transfer]]:
    """The last first, with sources and destinations swapped, additions for copies."""
    return [
        [Transfer(dst, src, lo, hi, not reduce) for src, dst, lo, hi, reduce in step]
        for step in reversed(steps)
    ]


def gather_back(half: Schedule) -> Schedule:
    """The all-reduce whose first half is ``half``, and whose second is its mirror image."""
    steps = half.steps + reverse(half).steps
    return replace(half, collective=Collective.ALL_REDUCE, steps=steps)


def halve(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """A reduce-scatter (or reduce) and an all-gather (or broadcast) that make the all-reduce.

    Raises ValueError if the schedule is not an all-reduce with owners half way.
    """
    if schedule.collective is not Collective.ALL_REDUCE or not schedule.owners:
        raise ValueError(f"an {schedule.collective.value} without owners has no halves")
    kind, middle = _first_half(schedule.owners), len(schedule.steps) // 2
    return (
        replace(schedule, collective=kind, steps=schedule.steps[:middle]),
        replace(schedule, collective=MIRROR[kind], steps=schedule.steps[middle:]),
    )


def place(
    schedule: Schedule, ranks: int, where: Sequence[int], low: int = 0, scale: int = 1
) -> list[list[Transfer]]:
    """The steps with rank r called ``where[r]``; chunk c becomes ``scale`` from low + c·scale on.

    Raises ValueError if ``where`` does not name another rank below ``ranks`` for each of them.
    """
    places = {rank for rank in where if 0 <= rank < ranks}
    if not len(where) == len(places) == schedule.ranks:
        raise ValueError(f"expected {schedule.ranks} ranks below {ranks}, found {list(where)}")
    return [
        [
            Transfer(where[src], where[dst], low + lo * scale, low + hi * scale, reduce)
            for src, dst, lo, hi, reduce in step
        ]
        for step in schedule.steps
    ]


def beside(parts: Iterable[Sequence[Iterable[Transfer]]]) -> list[list[Transfer]]:
    """Steps of several parts at the same time; no two parts share a chunk of a rank."""
    return [
        list(itertools.chain.from_iterable(step))
        for step in itertools.zip_longest(*parts, fillvalue=())
    ]


def relabel(schedule: Schedule, where: Sequence[int]) -> Schedule:
    """The same with every rank r called ``where[r]``.

    Raises ValueError if ``where`` is no permutation of the ranks.
    """
    return replace(
        schedule,
        steps=tuple(map(tuple, place(schedule, schedule.ranks, where))),
        members=tuple(sorted(where[rank] for rank in schedule.members)),
        owners=tuple(where[rank] for rank in schedule.owners),
    )


def rotate(schedule: Schedule, root: int) -> Schedule:
    """The same with every rank r called r + ``root``, modulo the number of ranks."""
    ranks = schedule.ranks
    return relabel(schedule, [(rank + root) % ranks for rank in range(ranks)])


def segment(schedule: Schedule, count: int) -> Schedule:
    """Pipeline: the buffer in ``count`` parts, each one step behind the part before it.

    Segment s consists of chunks s·c to (s + 1)·c, where c is the number of chunks before, so a
    transfer of neighbouring chunks stays one transfer. T steps become T + ``count`` − 1, and an
    all-reduce is nowhere half done any more (halve it first).

    Raises ConfigurationError if ``count`` is below 1.
    """
    if count < 1:
        raise ConfigurationError(f"segments must be an integer >= 1, found {count}")
    if count == 1:
        return schedule
    whole = schedule.collective is Collective.ALL_REDUCE
    length = len(schedule.steps) + count - 1 if schedule.steps else 0
    steps: list[list[Transfer]] = [[] for _ in range(length)]
    for part in range(count):
        moved = place(schedule, schedule.ranks, range(schedule.ranks), part * schedule.chunks)
        for number, step in enumerate(moved, part):
            steps[number] += step
    return replace(
        schedule,
        chunks=schedule.chunks * count,
        steps=tuple(map(tuple, steps)),
        owners=() if whole else schedule.owners * count,
    )


# ---- one rank's part ----------------------------------------------------------------------


class Round(NamedTuple):
    """What a rank does in one step: it posts all receives, sends in order, waits for all.

    Copies may land in place at once. What is to be added lands beside the buffer, and is added once
    all has been sent, in the order of the sources (that of ``receives``), with the rank's own value
    in its place, if it is one of ``Schedule.contributors``.
    """

    step: int
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


Rounds = tuple[Round, ...]


def project(schedule: Schedule) -> list[Rounds]:
    """Each rank's program; a step in which a rank has no part is not in it."""
    programs: list[list[Round]] = [[] for _ in range(schedule.ranks)]
    for number, step in enumerate(schedule.steps):
        parts: dict[int, tuple[list[Transfer], list[Transfer]]] = defaultdict(lambda: ([], []))
        for transfer in step:
            parts[transfer[1]][0].append(transfer)
            parts[transfer[0]][1].append(transfer)
        for rank, (receives, sends) in parts.items():
            # Stable, so that several messages of one peer stay in the order of its sends.
            receives.sort(key=itemgetter(0))
            programs[rank].append(Round(number, tuple(receives), tuple(sends)))
    return [tuple(program) for program in programs]
