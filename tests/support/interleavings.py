"""What can happen when the ranks' programs run at the same time.

``check`` looks at all orders at once: the instructions of all ranks, with who waits for whom, are
a graph. A circle in it is a deadlock; two accesses to the same memory of which one writes, with no
path between them, are a race. ``play`` runs one order, which a seed stands for, with every copy in
two halves, so that a race is seen in the result as well.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

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
from oracle import DeadlockError, MisfitError, take_turns


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
    """Where a message of that rank goes from and to."""
    ends = (rank, message.peer) if message.sends else (message.peer, rank)
    return Address(*ends, message.tag)


def area_of(rank: int, message: ProgramMessage) -> Area:
    """Where it leaves from, or lands."""
    return Area(rank, message.scratch, message.start, message.start + message.length)


def operand_area(rank: int, operand: Operand, length: int) -> Area:
    """Where a contribution lies, for a sum that this rank makes."""
    owner = operand.rank if operand.source is Source.PEER else rank
    is_scratch = operand.source is Source.SCRATCH
    return Area(owner, is_scratch, operand.start, operand.start + length)


def own(rank: int, start: int, length: int) -> Area:
    """Part of a buffer."""
    return Area(rank, False, start, start + length)


# ---- all orders ---------------------------------------------------------------------------


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
        ends: dict[tuple[Address, bool], tuple[int, int]] = {}
        for rank, program in enumerate(self.programs):
            for number, message in enumerate(program.messages):
                _keep(ends, (address_of(rank, message), message.sends), (rank, number), "made")
                if (rank, number) not in started or (rank, number) not in finished:
                    raise MisfitError(f"rank {rank}: {message} is not started or not finished")
        for (address, sends), (rank, number) in ends.items():
            other = ends.get((address, not sends))
            if other is None:
                raise MisfitError(f"{address}: nobody is at the other end")
            if sends:
                self._link_message(started, finished, (rank, number), other)

    def _link_message(
        self,
        started: Mapping[tuple[int, int], int],
        finished: Mapping[tuple[int, int], int],
        send: tuple[int, int],
        receive: tuple[int, int],
    ) -> None:
        """A message is copied at some time after both ends are started, before one is finished."""
        pair = (send, receive)
        source, target = (self.programs[rank].messages[number] for rank, number in pair)
        if source.length != target.length or source.step != target.step:
            raise MisfitError(f"{source} meets {target}")
        node = self._add(f"message {source}", *(started[end] for end in pair))
        for end in pair:
            self.before[finished[end]].append(node)
        self.accesses.append(Access(node, area_of(send[0], source), False))
        self.accesses.append(Access(node, area_of(receive[0], target), True))

    def order(self) -> list[int]:
        """The nodes in a possible order. Raises DeadlockError if there is none."""
        after: list[list[int]] = [[] for _ in self.before]
        missing = [len(nodes) for nodes in self.before]
        for node, nodes in enumerate(self.before):
            for earlier in nodes:
                after[earlier].append(node)
        ready = [node for node, count in enumerate(missing) if count == 0]
        order = []
        while ready:
            node = ready.pop()
            order.append(node)
            for later in after[node]:
                missing[later] -= 1
                if missing[later] == 0:
                    ready.append(later)
        if len(order) < len(missing):
            stuck = [
                self.names[node]
                for node, count in enumerate(missing)
                if count and any(not missing[earlier] for earlier in self.before[node])
            ]
            raise DeadlockError(f"wait for ever: {stuck}")
        return order

    def check(self) -> None:
        """Raise DeadlockError or RaceError if there is an order in which something goes wrong."""
        ancestors = [0] * len(self.before)
        for node in self.order():
            for earlier in self.before[node]:
                ancestors[node] |= ancestors[earlier] | 1 << earlier
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


def check(programs: Sequence[RankProgram]) -> None:
    """Raise DeadlockError, RaceError or MisfitError if anything can go wrong in any order."""
    Graph(programs).check()


# ---- one order ----------------------------------------------------------------------------


class _Run:
    """The memory, and one generator per rank that yields what it waits for."""

    def __init__(self, programs: Sequence[RankProgram], buffers: Sequence[np.ndarray]) -> None:
        self.buffers = [np.array(buffer) for buffer in buffers]
        self._scratch = [
            np.full(program.scratch, 99, self.buffers[0].dtype) for program in programs
        ]
        self._progress = [-1] * len(programs)
        self._started: dict[tuple[Address, bool], Area] = {}
        self.travelling: list[Iterator[None]] = []
        self._arrived: set[Address] = set()
        self.results = list(self.buffers)

    def _view(self, area: Area) -> np.ndarray:
        memory = self._scratch if area.scratch else self.buffers
        return memory[area.rank][area.start : area.stop]

    def _travel(self, address: Address, source: Area, target: Area) -> Iterator[None]:
        yield from self._copy(target, source)
        self._arrived.add(address)

    def _copy(self, target: Area, source: Area) -> Iterator[None]:
        into, out_of = self._view(target), self._view(source)
        middle = len(into) // 2
        into[:middle] = out_of[:middle]
        yield
        into[middle:] = out_of[middle:]

    def _start(self, rank: int, message: ProgramMessage) -> None:
        address = address_of(rank, message)
        self._started[address, message.sends] = area_of(rank, message)
        source, target = (self._started.get((address, sends)) for sends in (True, False))
        if source is not None and target is not None:
            self.travelling.append(self._travel(address, source, target))

    def _reduce(self, rank: int, reduce: Reduce) -> Iterator[None]:
        target = self._view(own(rank, reduce.start, reduce.length))
        operands = [self._view(operand_area(rank, o, reduce.length)) for o in reduce.operands]
        middle = reduce.length // 2
        for half in (slice(middle), slice(middle, None)):
            total = operands[0][half].copy()
            for operand in operands[1:]:
                yield
                total = total + operand[half]
            yield
            target[half] = total

    def play(self, rank: int, program: RankProgram) -> Iterator[Callable[[], bool]]:
        """One rank."""
        self._progress[rank] = ENTERED
        yield lambda: all(self._progress[each] >= ENTERED for each in program.partners)
        for instruction in program.instructions:
            match instruction:
                case Wait(_, peer, stage):
                    yield lambda peer=peer, stage=stage: self._progress[peer] >= stage
                case Publish(stage):
                    self._progress[rank] = stage
                    yield _at_once
                case Start(numbers):
                    for number in numbers:
                        self._start(rank, program.messages[number])
                    yield _at_once
                case Finish(number):
                    address = address_of(rank, program.messages[number])
                    yield lambda address=address: address in self._arrived
                case Fetch(_, peer, start, length, slot):
                    target = Area(rank, True, slot, slot + length)
                    for _ in self._copy(target, own(peer, start, length)):
                        yield _at_once
                case Pack(start, length, slot):
                    target = Area(rank, True, slot, slot + length)
                    for _ in self._copy(target, own(rank, start, length)):
                        yield _at_once
                case Push(_, peer, start, length):
                    for _ in self._copy(own(peer, start, length), own(rank, start, length)):
                        yield _at_once
                case Reduce():
                    for _ in self._reduce(rank, instruction):
                        yield _at_once

    def returns(self, rank: int) -> None:
        """From now on the buffer is the user's, who puts other values there."""
        self.results[rank] = self.buffers[rank].copy()
        self.buffers[rank][:] = 77
        self.buffers[rank].flags.writeable = False


def _at_once() -> bool:
    return True


def play(
    programs: Sequence[RankProgram], buffers: Sequence[np.ndarray], seed: int
) -> list[np.ndarray]:
    """The buffers afterwards, in the order that ``seed`` stands for.

    Even seeds draw the next mover anew each time; odd ones always let the first that can move, in
    an order drawn once; messages travel late or early by chance. Raises DeadlockError if nobody
    can move, and ValueError if somebody writes into the buffer of a rank that has returned.
    """
    dice = random.Random(seed)
    state = _Run(programs, buffers)
    players = {rank: state.play(rank, program) for rank, program in enumerate(programs)}
    eagerness = dice.random()

    def travel(is_stuck: bool) -> bool:
        moves = bool(state.travelling) and (is_stuck or dice.random() < eagerness)
        if moves:
            message = dice.choice(state.travelling)
            if next(message, "arrived") == "arrived":
                state.travelling.remove(message)
        return moves

    take_turns(players, dice, draws_anew=seed % 2 == 0, travel=travel, end=state.returns)
    return state.results
