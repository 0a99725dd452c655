"""Writes an all-reduce as MSCCL's XML: one thread block for each peer of a rank.

In a step a rank sends, then receives; alternately, if a connection does not hold all of it. What
several ranks send for one chunk waits in scratch memory and is then added in the order of the
ranks: the sums are those of the schedule, bit for bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple
from xml.etree import ElementTree

from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.plans.msccl_xml import NOP, SLOTS, read_xml
from mpiddp.schedules.plans.plan import Buffer
from mpiddp.schedules.plans.plan_proof import find_order, prove_plan
from mpiddp.schedules.schedule import Collective, Round, Schedule, Transfer, project

PROTOCOL = "Simple"
MOST_CHUNKS = 64
"""Of a message: the interpreter takes fewer than 72 (MSCCL_MAX_COUNT)."""
MOST_PEERS = 32
"""Of a rank on one channel (MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL)."""
MOST_STEPS = 256
"""Of a thread block (MSCCL_MAX_NUM_STEPS)."""
MOST_BLOCKS = 128
"""Of a rank: MSCCL holds the numbers of those that are waited for in signed bytes."""
MOST_BYTES = 1 << 40
"""Azure's executor wants a range of sizes: all of them."""


def check_exportable(schedule: Schedule) -> None:
    """Raise ConfigurationError unless it is an all-reduce of all ranks."""
    if schedule.collective is not Collective.ALL_REDUCE:
        raise ConfigurationError(f"only an all-reduce is exported, not {schedule.collective.value}")
    if left_out := sorted(set(range(schedule.ranks)) - set(schedule.members)):
        raise ConfigurationError(
            f"other projects' all-reduces sum over all ranks: rank {left_out[0]} of this one only "
            "serves"
        )


def write_xml(schedule: Schedule, name: str) -> str:
    """Raises ConfigurationError unless it is an all-reduce of all ranks, and not too large."""
    check_exportable(schedule)
    algo = _make_algo(schedule, name, is_in_turns=False)
    try:
        find_order(next(read_xml(ElementTree.tostring(algo))))
    except ScheduleError:
        # Two ranks send each other more than a connection holds, before either takes any of it.
        algo = _make_algo(schedule, name, is_in_turns=True)
        try:
            prove_plan(next(read_xml(ElementTree.tostring(algo))))
        except ScheduleError as error:
            raise ConfigurationError(
                f"{name} does not fit MSCCL's connections, which hold {SLOTS[PROTOCOL]} chunks: "
                f"{error}"
            ) from None
    ElementTree.indent(algo)
    return ElementTree.tostring(algo, encoding="unicode") + "\n"


def _make_algo(schedule: Schedule, name: str, *, is_in_turns: bool) -> ElementTree.Element:
    """``is_in_turns``: whether ranks send what a connection holds, and then receive, as often as
    needed; else all at once.
    """
    algo = ElementTree.Element(
        "algo", name=name, proto=PROTOCOL, nchannels=str(math.ceil(schedule.ranks / MOST_PEERS)),
        nchunksperloop=str(schedule.chunks), ngpus=str(schedule.ranks), coll="allreduce",
        inplace="1", outofplace="0", minBytes="0", maxBytes=str(MOST_BYTES),
    )  # fmt: skip
    for rank, rounds in enumerate(project(schedule)):
        program = _Program(rank, is_in_turns)
        for each in rounds:
            program.take(each)
        algo.append(program.make_element(schedule))
    return algo


class _Place(NamedTuple):
    """Neighbouring chunks of one of the rank's buffers."""

    buffer: Buffer
    lo: int
    length: int

    @property
    def cells(self) -> list[tuple[Buffer, int]]:
        return [(self.buffer, chunk) for chunk in range(self.lo, self.lo + self.length)]


_Piece = tuple[Transfer, int, int]
"""A transfer with the first of its chunks that are meant, and how many."""
_Step = tuple[int, int]
"""The peer of a thread block, and a number."""


@dataclass
class _Program:
    """The thread blocks of one rank, by their peers, while they are written."""

    rank: int
    is_in_turns: bool
    scratch: int = 0
    _blocks: dict[int, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    _writers: dict[tuple[Buffer, int], _Step] = field(default_factory=dict)
    _readers: dict[tuple[Buffer, int], list[_Step]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _known: dict[_Step, int] = field(default_factory=dict)
    """By a thread block and another: the last step of the other that it has waited for."""
    _needed: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Thread block and step, and those that it waits for."""

    def take(self, one: Round) -> None:
        sources = _list_sources(one.receives)
        waiting: dict[Transfer, int] = {}
        end = 0
        for transfer in one.receives:
            is_shared = any(len(sources[chunk]) > 1 for chunk in range(transfer.lo, transfer.hi))
            if transfer.reduce and is_shared:
                waiting[transfer] = end
                end += transfer.hi - transfer.lo
        self.scratch = max(self.scratch, end)
        sends = self._list_turns([(each, each.dst) for each in one.sends])
        receives = self._list_turns([(each, each.src) for each in one.receives])
        for leaving, arriving in zip_longest(sends, receives, fillvalue=()):
            for transfer, lo, count in leaving:
                place = _Place(Buffer.INPUT, lo, count)
                self._emit(transfer.dst, "s", place, place, reads=[place])
            for transfer, lo, count in arriving:
                self._receive(transfer, lo, count, waiting.get(transfer))
        for lo, count, transfers in list_runs(tuple(waiting)):
            self._add(lo, count, transfers, waiting)

    def _list_turns(self, transfers: Sequence[tuple[Transfer, int]]) -> list[list[_Piece]]:
        """What goes to, or comes from, the peers at once; each transfer is given with its peer."""
        turns: list[list[_Piece]] = []
        counts: dict[int, int] = defaultdict(int)
        most = SLOTS[PROTOCOL] if self.is_in_turns else MOST_CHUNKS
        for transfer, peer in transfers:
            for lo, count in _split(transfer.lo, transfer.hi, most):
                turn = counts[peer] if self.is_in_turns else 0
                turns += [[] for _ in range(turn + 1 - len(turns))]
                turns[turn].append((transfer, lo, count))
                counts[peer] += 1
        return turns

    def _receive(self, transfer: Transfer, lo: int, count: int, waits: int | None) -> None:
        place = _Place(Buffer.INPUT, lo, count)
        if waits is not None:
            target = _Place(Buffer.SCRATCH, waits + lo - transfer.lo, count)
            self._emit(transfer.src, "r", place, target, writes=[target])
        elif transfer.reduce:
            self._emit(transfer.src, "rrc", place, place, reads=[place], writes=[place])
        else:
            self._emit(transfer.src, "r", place, place, writes=[place])

    def _add(
        self, lo: int, count: int, transfers: Sequence[Transfer], waiting: Mapping[Transfer, int]
    ) -> None:
        """Add what waits to the rank's own, in the order of the ranks."""
        operands = {
            each.src: _Place(Buffer.SCRATCH, waiting[each] + lo - each.lo, count)
            for each in transfers
        }
        operands[self.rank] = own = _Place(Buffer.INPUT, lo, count)
        first, *others = [operands[rank] for rank in sorted(operands)]
        for other in others:
            source, target = (first, other) if other is own else (other, first)
            self._emit(
                transfers[0].src, "re", source, target, reads=[source, target], writes=[target]
            )
            first = target

    def _emit(
        self,
        block: int,
        kind: str,
        source: _Place,
        target: _Place,
        *,
        reads: Sequence[_Place] = (),
        writes: Sequence[_Place] = (),
    ) -> None:
        causes = sorted(self._find_causes(block, reads, writes))
        for cause in causes[:-1]:
            nothing = _Place(Buffer.INPUT, -1, 0)
            self._append(block, NOP, nothing, nothing, cause)
        step = (block, self._append(block, kind, source, target, *causes[-1:]))
        for place in reads:
            for cell in place.cells:
                self._readers[cell].append(step)
        for place in writes:
            for cell in place.cells:
                self._writers[cell] = step
                self._readers[cell] = []

    def _find_causes(
        self, block: int, reads: Sequence[_Place], writes: Sequence[_Place]
    ) -> Iterator[_Step]:
        """The last step of each other thread block that it must wait for, unless it has."""
        steps = [
            self._writers[cell]
            for place in (*reads, *writes)
            for cell in place.cells
            if cell in self._writers
        ]
        steps += (step for place in writes for cell in place.cells for step in self._readers[cell])
        latest: dict[int, int] = {}
        for other, number in steps:
            latest[other] = max(number, latest.get(other, -1))
        for other, number in latest.items():
            if other != block and number > self._known.get((block, other), -1):
                self._known[block, other] = number
                yield other, number

    def _append(self, block: int, kind: str, source: _Place, target: _Place, *causes: _Step) -> int:
        steps = self._blocks[block]
        number = len(steps)
        steps.append(
            {
                "s": str(number), "type": kind,
                "srcbuf": source.buffer.value, "srcoff": str(source.lo),
                "dstbuf": target.buffer.value, "dstoff": str(target.lo), "cnt": str(source.length),
                "depid": "-1", "deps": "-1", "hasdep": "0",
            }
        )  # fmt: skip
        self._needed += ((block, number, *cause) for cause in causes)
        return number

    def make_element(self, schedule: Schedule) -> ElementTree.Element:
        """The rank's part of the plan. Raises ConfigurationError if it is too large for MSCCL."""
        steps = max(map(len, self._blocks.values()), default=0)
        if steps > MOST_STEPS or len(self._blocks) > MOST_BLOCKS:
            raise ConfigurationError(
                f"MSCCL takes at most {MOST_BLOCKS} thread blocks of {MOST_STEPS} steps a rank, "
                f"found {len(self._blocks)} of up to {steps}: fewer ranks or segments need less"
            )
        numbers = {peer: number for number, peer in enumerate(sorted(self._blocks))}
        for block, step, other, number in self._needed:
            self._blocks[block][step] |= {"depid": str(numbers[other]), "deps": str(number)}
            self._blocks[other][number]["hasdep"] = "1"
        gpu = ElementTree.Element(
            "gpu", id=str(self.rank), i_chunks=str(schedule.chunks), o_chunks="0",
            s_chunks=str(self.scratch),
        )  # fmt: skip
        for peer, block in numbers.items():
            # Each peer has another sum, so that no channel has too many.
            channel = (self.rank + peer) % schedule.ranks // MOST_PEERS
            fields = {
                "id": str(block), "send": str(peer), "recv": str(peer), "chan": str(channel),
            }  # fmt: skip
            element = ElementTree.SubElement(gpu, "tb", fields)
            for step_fields in self._blocks[peer]:
                ElementTree.SubElement(element, "step", step_fields)
        return gpu


def _split(lo: int, hi: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(lo, hi, most):
        yield start, min(most, hi - start)


def _list_sources(receives: Sequence[Transfer]) -> Mapping[int, list[Transfer]]:
    """For each chunk what is added to it."""
    found: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in receives:
        for chunk in range(transfer.lo, transfer.hi) if transfer.reduce else ():
            found[chunk].append(transfer)
    return found


def list_runs(added: Sequence[Transfer]) -> Iterator[tuple[int, int, list[Transfer]]]:
    """Neighbouring chunks to which the same transfers are added, at most MOST_CHUNKS of them."""
    sources = _list_sources(added)
    start = None
    for chunk in sorted(sources):
        if start is None:
            start = chunk
        is_last = sources.get(chunk + 1) != sources[chunk] or chunk + 1 - start == MOST_CHUNKS
        if is_last:
            yield start, chunk + 1 - start, sources[chunk]
            start = None
