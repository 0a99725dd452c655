"""What can happen when the ranks' programs run at the same time, in all orders at once.

The instructions of all ranks, with who waits for whom, are a graph. A cycle in it is a deadlock;
two accesses to the same memory of which one writes, with no path between them, are a race.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from mpiddp.collectives.compiler.hazards import ENTERED
from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Operand,
    Pack,
    ProgramMessage,
    Publish,
    Push,
    RankProgram,
    Reduce,
    Source,
    Start,
    Wait,
)
from oracle import DeadlockError, MisfitError


class RaceError(AssertionError):
    """Two accesses to the same memory, one of them a write, that nothing puts in an order."""


class Area(NamedTuple):
    """Elements of a rank's buffer, or of its scratch space."""

    rank: int
    scratch: bool
    start: int
    stop: int


class Access(NamedTuple):
    """A node of the graph that reads or writes."""

    node: int
    area: Area
    writes: bool


class Address(NamedTuple):
    """What the two ends of a message have in common."""

    source: int
    destination: int
    tag: int


def address_of(rank: int, message: ProgramMessage) -> Address:
    ends = (rank, message.peer) if message.sends else (message.peer, rank)
    return Address(*ends, message.tag)


def area_of(rank: int, message: ProgramMessage) -> Area:
    return Area(rank, message.scratch, message.start, message.start + message.length)


def operand_area(rank: int, operand: Operand, length: int) -> Area:
    """Where a contribution lies, for a sum that this rank makes."""
    owner = operand.rank if operand.source is Source.PEER else rank
    is_scratch = operand.source is Source.SCRATCH
    return Area(owner, is_scratch, operand.start, operand.start + length)


def own(rank: int, start: int, length: int) -> Area:
    return Area(rank, False, start, start + length)


@dataclass
class Graph:
    """What happens before what."""

    programs: Sequence[RankProgram]
    before: list[list[int]] = field(default_factory=list)
    """For each node those that come before it."""
    names: list[str] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """For each rank the node in which it returns."""

    def __post_init__(self) -> None:
        started: dict[tuple[int, int], int] = {}
        finished: dict[tuple[int, int], int] = {}
        published: dict[int, list[tuple[int, int]]] = {}
        waits: list[tuple[int, Wait]] = []
        for rank, program in enumerate(self.programs):
            last = self._add(f"rank {rank} enters")
            published[rank] = [(ENTERED, last)]
            for number, instruction in enumerate(program.instructions):
                node = self._add(f"rank {rank}, {number}: {instruction}", last)
                last = node
                match instruction:
                    case Start(messages):
                        for message in messages:
                            _keep(started, (rank, message), node, "started")
                    case Finish(message):
                        _keep(finished, (rank, message), node, "finished")
                    case Publish(stage):
                        published[rank].append((stage, node))
                    case Wait():
                        waits.append((node, instruction))
                    case _:
                        self._touch(rank, node, instruction)
            self.ends.append(self._add(f"rank {rank} returns", last))
        for node, wait in waits:
            self.before[node].append(self._find_publish(published[wait.rank], wait))
        self._link_messages(started, finished)

    def _add(self, name: str, *before: int) -> int:
        self.names.append(name)
        self.before.append(list(before))
        return len(self.names) - 1

    def _touch(self, rank: int, node: int, instruction: Fetch | Pack | Push | Reduce) -> None:
        match instruction:
            case Fetch(_, peer, start, length, slot):
                areas = [(own(peer, start, length), False)]
                areas.append((Area(rank, True, slot, slot + length), True))
            case Pack(start, length, slot):
                areas = [(own(rank, start, length), False)]
                areas.append((Area(rank, True, slot, slot + length), True))
            case Push(_, peer, start, length):
                areas = [(own(rank, start, length), False), (own(peer, start, length), True)]
            case Reduce(_, start, length, operands):
                areas = [(operand_area(rank, each, length), False) for each in operands]
                areas.append((own(rank, start, length), True))
        for area, writes in areas:
            if area.rank != rank and area.rank not in self.programs[rank].partners:
                raise RaceError(f"{self.names[node]}: rank {area.rank} need not have entered")
            self.accesses.append(Access(node, area, writes))

    def _find_publish(self, published: Sequence[tuple[int, int]], wait: Wait) -> int:
        for stage, node in published:
            if stage >= wait.stage:
                return node
        raise DeadlockError(f"{wait} is for a stage that is never published")

    def _link_messages(
        self, started: Mapping[tuple[int, int], int], finished: Mapping[tuple[int, int], int]
    ) -> None:
        """A message is copied at some time after both ends are started, before one is finished."""
        ends: dict[tuple[Address, bool], tuple[int, int]] = {}
        for rank, program in enumerate(self.programs):
            for number, message in enumerate(program.messages):
                _keep(ends, (address_of(rank, message), message.sends), (rank, number), "made")
                if (rank, number) not in started or (rank, number) not in finished:
                    raise MisfitError(f"rank {rank}: {message} is not started or not finished")
        for (address, sends), send in ends.items():
            receive = ends.get((address, not sends))
            if receive is None:
                raise MisfitError(f"{address}: nobody is at the other end")
            if not sends:
                continue
            pair = (send, receive)
            source, target = (self.programs[rank].messages[number] for rank, number in pair)
            if source.length != target.length or source.step != target.step:
                raise MisfitError(f"{source} meets {target}")
            node = self._add(f"message {source}", *(started[end] for end in pair))
            for end in pair:
                self.before[finished[end]].append(node)
            self.accesses.append(Access(node, area_of(send[0], source), False))
            self.accesses.append(Access(node, area_of(receive[0], target), True))

    def check(self) -> None:
        """Raise DeadlockError or RaceError if there is an order in which something goes wrong."""
        ancestors = [0] * len(self.before)
        try:
            for node in TopologicalSorter(dict(enumerate(self.before))).static_order():
                for earlier in self.before[node]:
                    ancestors[node] |= ancestors[earlier] | 1 << earlier
        except CycleError as error:
            names = [self.names[node] for node in error.args[1]]
            raise DeadlockError(f"wait for ever: {names}") from None
        by_memory: dict[tuple[int, bool], list[Access]] = defaultdict(list)
        for access in self.accesses:
            by_memory[access.area.rank, access.area.scratch].append(access)
        for (rank, _), accesses in by_memory.items():
            for access in accesses:
                if not ancestors[self.ends[rank]] >> access.node & 1:
                    name = self.names[access.node]
                    raise RaceError(f"{name}: rank {rank} may have returned")
            for write in accesses:
                if write.writes:
                    self._check_write(write, accesses, ancestors)

    def _check_write(
        self, write: Access, accesses: Sequence[Access], ancestors: Sequence[int]
    ) -> None:
        for other in accesses:
            if (
                write.node != other.node
                and max(write.area.start, other.area.start) < min(write.area.stop, other.area.stop)
                and not ancestors[write.node] >> other.node & 1
                and not ancestors[other.node] >> write.node & 1
            ):
                raise RaceError(f"{self.names[write.node]} against {self.names[other.node]}")


def _keep(table: dict, key: object, value: object, what: str) -> None:
    if key in table:
        raise MisfitError(f"{key} is {what} twice")
    table[key] = value
