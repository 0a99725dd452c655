"""One rank's part of a schedule, and for whom it waits if ranks work in each other's memory.

With messages, a receive is the wait. In shared memory a rank reads another rank's buffer, to add it
to its own, and writes its results into the others' buffers. Each rank publishes its progress. This
module derives from the schedule which reads and writes must wait for which stage of which rank, so
that every rank sees the state that the schedule promises.

A step has two stages: what must be read early (READ: the source's owner changes the same chunk in
this step), and everything else (DONE). READ waits for earlier steps only, DONE for earlier steps
and the READ of its own, so there is no deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from mpiddp.schedules.proof import Sums, find_sums
from mpiddp.schedules.schedule import Rounds, Schedule, Step, Transfer, project

ENTERED = 0
"""The stage of a rank that has made the call: its buffer may be touched."""

Stages = dict[int, int]
"""The stage that each of some ranks must have reached."""
Key = tuple[int, Transfer]
"""A transfer with the number of its step."""


def read_stage(step: int) -> int:
    """Reached when what must be read early in that step has been read."""
    return 2 * step + 1


def done_stage(step: int) -> int:
    """Reached when that step is done."""
    return 2 * step + 2


@dataclass(frozen=True)
class Dependencies:
    reading: Mapping[Key, Stages]
    """Before it reads the source of a transfer, in its own memory or in a neighbour's."""
    writing: Mapping[Key, Stages]
    """Before it writes the destination of a transfer, in its own memory or in a neighbour's."""
    early: frozenset[Key]
    """Of its additions from a neighbour's memory, those that are read in the READ stage."""
    leaving: Stages
    """Before it returns: until then others work in its memory."""
    published: frozenset[int]
    """Its own stages for which other ranks wait."""


class _Analysis:
    """Walks through the steps with, for each chunk of each rank, its last readers and writers."""

    def __init__(self, schedule: Schedule, group: Collection[int]) -> None:
        self._schedule = schedule
        self._group = frozenset(group)
        self._writers: dict[tuple[int, int], Stages] = {}
        self._readers: dict[tuple[int, int], Stages] = defaultdict(dict)
        self.reading: dict[int, dict[Key, Stages]] = defaultdict(lambda: defaultdict(dict))
        self.writing: dict[int, dict[Key, Stages]] = defaultdict(lambda: defaultdict(dict))
        self.early: set[Key] = set()
        for number, step in enumerate(schedule.steps):
            self._walk(number, [t for t in step if t.src in group or t.dst in group])

    def _is_local(self, transfer: Transfer) -> bool:
        return transfer.src in self._group and transfer.dst in self._group

    def _find_early(self, number: int, step: Step | list[Transfer]) -> None:
        pulled = {
            (t.src, chunk)
            for t in step
            if t.reduce and self._is_local(t)
            for chunk in range(t.lo, t.hi)
        }
        changed = {(t.dst, chunk) for t in step if t.reduce for chunk in range(t.lo, t.hi)}
        for t in step:
            if t.reduce and self._is_local(t):
                chunks = range(t.lo, t.hi)
                if any((t.src, c) in changed or (t.dst, c) in pulled for c in chunks):
                    self.early.add((number, t))

    def _walk(self, number: int, step: list[Transfer]) -> None:
        self._find_early(number, step)
        for transfer in step:
            self._read(number, transfer)
        written: dict[tuple[int, int], Stages] = defaultdict(dict)
        for transfer in step:
            self._write(number, transfer, written)
        for place, writers in written.items():
            # Every writer waited for those who came before.
            self._writers[place] = writers
            self._readers.pop(place, None)

    def _read(self, number: int, transfer: Transfer) -> None:
        src, dst, lo, hi, reduce = transfer
        if src not in self._group:
            return
        key = (number, transfer)
        # What is to be added is fetched by who adds it; all else is handed out by its owner.
        reader = dst if reduce and dst in self._group else src
        stage = read_stage(number) if key in self.early else done_stage(number)
        for chunk in range(lo, hi):
            place = (src, chunk)
            _merge(self.reading[reader][key], self._find_writers(place), reader)
            _merge(self._readers[place], {reader: stage})

    def _write(
        self, number: int, transfer: Transfer, written: dict[tuple[int, int], Stages]
    ) -> None:
        src, dst, lo, hi, reduce = transfer
        if dst not in self._group:
            return
        writer = src if not reduce and src in self._group else dst
        waits = self.writing[writer][number, transfer]
        for chunk in range(lo, hi):
            place = (dst, chunk)
            _merge(waits, self._readers.get(place, {}), writer)
            _merge(waits, self._find_writers(place), writer)
            written[place][writer] = done_stage(number)

    def _find_writers(self, place: tuple[int, int]) -> Stages:
        return self._writers.get(place) or {place[0]: ENTERED}

    def find_leaving(self, rank: int) -> Stages:
        waits: Stages = {}
        for places in (self._writers, self._readers):
            for (owner, _), stages in places.items():
                if owner == rank:
                    _merge(waits, stages, rank)
        return waits

    def waits(self) -> Iterator[Stages]:
        for table in (self.reading, self.writing):
            for waits in table.values():
                yield from waits.values()
        yield from map(self.find_leaving, self._group)


def _merge(into: Stages, stages: Stages, without: int | None = None) -> None:
    for rank, stage in stages.items():
        if rank != without and into.get(rank, -1) < stage:
            into[rank] = stage


def find_dependencies(schedule: Schedule, rank: int, group: Iterable[int]) -> Dependencies:
    """The waits of ``rank``, if the ranks of ``group`` work in each other's memory."""
    analysis = _Analysis(schedule, frozenset(group))
    return Dependencies(
        dict(analysis.reading[rank]),
        dict(analysis.writing[rank]),
        frozenset(key for key in analysis.early if key[1].dst == rank),
        analysis.find_leaving(rank),
        frozenset(waits[rank] for waits in analysis.waits() if rank in waits),
    )


@dataclass(frozen=True, eq=False)
class RankPart:
    """One rank's part of a schedule, for buffers of any length."""

    schedule: Schedule
    rank: int
    group: frozenset[int]
    """The other ranks that share their memory with this one."""
    rounds: Rounds
    needs: Dependencies
    ends: Mapping[int, set[int]]
    """For each chunk the steps in which this rank completes it."""
    sums: Sums


def find_part(schedule: Schedule, rank: int, group: Collection[int]) -> RankPart:
    """The part of ``rank``; ``group`` shares its memory with it."""
    others = frozenset(group) - {rank}
    needs = Dependencies({}, {}, frozenset(), {}, frozenset())
    if others:
        needs = find_dependencies(schedule, rank, group)
    sums = find_sums(schedule)
    ends: dict[int, set[int]] = defaultdict(set)
    for step, dst, chunk in sums.final:
        if dst == rank:
            ends[chunk].add(step)
    return RankPart(schedule, rank, others, project(schedule)[rank], needs, ends, sums)
