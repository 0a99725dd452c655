"""What a collective takes over MPI: the ranks' compiled programs, followed on a modelled machine.

``cost.simulate`` ends each step before the next one begins. mpiddp cuts chunks that are long, and
sends a part on as soon as it has its value, while the next one is still on its way. So a chain of
long messages takes about as long as one of them. Here each rank follows the program that it would
run, one instruction after the other: it waits for the part that comes next there, however early
another one arrived, and adds before it sends on. Of the messages

- those between two ranks follow each other, as on a connection: the next one leaves when the one
  before has been taken in. So connections that meet at a port share it evenly;
- a rank's port, and a node's link, is busy for what a message takes beyond α, one message after the
  other each way: the latency of one hides behind the next, as in LogP (Culler et al., PPoPP'93).
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpiddp.collectives.compiler.hazards import find_part
from mpiddp.collectives.compiler.instructions import (
    Finish,
    ProgramMessage,
    RankProgram,
    Reduce,
    Start,
)
from mpiddp.collectives.compiler.lowering import compile_part
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.schedules.cost import check_nodes
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.schedule import Schedule


def flow(
    schedule: Schedule, count: int, machine: Machine, nodes: Sequence[int], cut: BufferCut,
    item: int = 1,
) -> list[float]:  # fmt: skip
    """When each rank ends, in seconds, for a buffer of ``count`` elements of ``item`` bytes.

    Raises ConfigurationError if the nodes are not the schedule's.
    """
    sizes = check_nodes(schedule.ranks, nodes)
    node_of = [node for node, each in enumerate(sizes) for _ in range(each)]
    parts = [find_part(schedule, rank, ()) for rank in range(schedule.ranks)]
    course = _Course([compile_part(part, count, cut) for part in parts], machine, node_of, item)
    course.run()
    return [rank.time for rank in course.ranks]


@dataclass(eq=False, slots=True)
class _Sending:
    """A message on its way."""

    src: int
    number: int
    """Among its sender's messages."""
    message: ProgramMessage
    ready: float
    """When it could leave, if nothing were before it."""


@dataclass(slots=True)
class _Rank:
    program: RankProgram
    place: int = 0
    """Of the next instruction."""
    time: float = 0.0
    """When it has come there."""
    ends: dict[int, float] = field(default_factory=dict)
    """When its messages have left or arrived, by number, as far as that is known."""
    arriving: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number of each message that it receives, by source and tag."""


class _Course:
    """What happens, in the order of time."""

    def __init__(
        self, programs: Sequence[RankProgram], machine: Machine, node_of: Sequence[int], item: int
    ) -> None:
        self._machine, self._node_of, self._item = machine, node_of, item
        self.ranks = [_Rank(program) for program in programs]
        for rank in self.ranks:
            for number, message in enumerate(rank.program.messages):
                if not message.sends:
                    rank.arriving[message.peer, message.tag] = number
        self._free: dict[tuple[str, int], float] = defaultdict(float)
        """When each port of a rank or node is free again."""
        self._connections: dict[tuple[int, int], deque[_Sending]] = defaultdict(deque)
        """By source and destination: what has not been taken in."""
        self._events: list[tuple[float, int, bool, _Sending]] = []
        """Time, a number that breaks ties, whether it arrives (or leaves)."""
        self._number = itertools.count()

    def run(self) -> None:
        for rank in range(len(self.ranks)):
            self._go_on(rank)
        while self._events:
            time, _, arrives, sending = heapq.heappop(self._events)
            if arrives:
                self._take_in(time, sending)
            else:
                start, busy, _ = self._pass(time, sending, "out", sending.src)
                self.ranks[sending.src].ends[sending.number] = start + busy
                self._push(start, sending, arrives=True)
                self._go_on(sending.src)

    def _go_on(self, number: int) -> None:
        """Follow a rank's program until it waits for a message of which the end is not known."""
        rank = self.ranks[number]
        instructions, messages = rank.program.instructions, rank.program.messages
        while rank.place < len(instructions):
            match instructions[rank.place]:
                case Start(started):
                    for place in started:
                        if messages[place].sends:
                            self._send(_Sending(number, place, messages[place], rank.time))
                case Finish(place):
                    if place not in rank.ends:
                        return
                    rank.time = max(rank.time, rank.ends[place])
                case Reduce(length=length, operands=operands):
                    adding = self._machine.addition_seconds(float(length * self._item))
                    rank.time += (len(operands) - 1) * float(adding)
            rank.place += 1

    def _send(self, sending: _Sending) -> None:
        connection = self._connections[sending.src, sending.message.peer]
        connection.append(sending)
        if len(connection) == 1:
            self._push(sending.ready, sending, arrives=False)

    def _take_in(self, time: float, sending: _Sending) -> None:
        src, message = sending.src, sending.message
        start, busy, latency = self._pass(time, sending, "in", message.peer)
        rank = self.ranks[message.peer]
        rank.ends[rank.arriving[src, message.tag]] = start + busy + latency
        connection = self._connections[src, message.peer]
        connection.popleft()
        if connection:
            self._push(max(connection[0].ready, start + busy), connection[0], arrives=False)
        self._go_on(message.peer)

    def _pass(
        self, time: float, sending: _Sending, way: str, rank: int
    ) -> tuple[float, float, float]:
        """When a message begins to pass a rank's port that could do so at ``time``, for how long it
        occupies it, and its latency."""
        message, node = sending.message, self._node_of[rank]
        is_far = self._node_of[sending.src] != self._node_of[message.peer]
        cost = self._machine.between if is_far else self._machine.inside
        size = float(message.length * self._item)
        busy = float(cost.occupation(size))
        start = self._occupy((way, rank), time, busy)
        if is_far:
            on_link = float(self._machine.occupation(size))
            start = self._occupy((f"link {way}", node), start, on_link)
        return start, busy, float(cost.delay(size))

    def _occupy(self, port: tuple[str, int], time: float, busy: float) -> float:
        """When a message begins that could begin at ``time``."""
        start = max(time, self._free[port])
        self._free[port] = start + busy
        return start

    def _push(self, time: float, sending: _Sending, *, arrives: bool) -> None:
        heapq.heappush(self._events, (time, next(self._number), arrives, sending))
