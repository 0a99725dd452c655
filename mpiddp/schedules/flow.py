"""A schedule whose chunks flow through the steps in parts, as mpiddp runs it over MPI.

``cost.simulate`` ends each step before the next one begins. mpiddp cuts chunks that are long, and
sends a part on as soon as it has its value, while the next one is still on its way. So a chain of
long messages takes about as long as one of them. Here every part is a message of its own:

- a rank, and a node's link, sends one after the other and hears one after the other, in the order
  in which they can begin, and is busy for what a message takes beyond α: the latency of one hides
  behind the next, as in LogP (Culler et al., PPoPP'93);
- a rank takes what it hears in the order of the steps, and of the parts in each, however it comes;
- what it has so taken (and added) it sends on at once.

Messages that a schedule packs together are priced one by one, each with its own latency.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mpiddp.schedules.cost import check_nodes
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.schedule import Schedule

ORIGIN = -1
"""The step before the first one: what ranks have to begin with."""


def flow(
    schedule: Schedule, size: int, machine: Machine, nodes: Sequence[int], parts: int
) -> list[float]:
    """When each rank has its last part, in seconds, for a buffer of ``size`` bytes.

    ``parts``: of each chunk. Raises ConfigurationError if the nodes are not the schedule's.
    """
    sizes = check_nodes(schedule.ranks, nodes)
    node_of = [node for node, count in enumerate(sizes) for _ in range(count)]
    course = _Course(machine, node_of, parts)
    course.plan(schedule, size)
    course.run()
    return [rank.time for rank in course.ranks]


@dataclass(slots=True)
class _Message:
    """All parts of a transfer."""

    src: int
    dst: int
    step: int
    latency: float
    busy: float
    """Seconds for which a part occupies a rank's port."""
    on_link: float
    """The same of a node's link; 0 inside a node."""
    adding: float


@dataclass(slots=True)
class _Rank:
    """What a rank has heard, in the order in which it takes it."""

    steps: list[int] = field(default_factory=list)
    """In which it hears something."""
    place: int = 0
    """Parts that it has taken, of all steps."""
    time: float = 0.0
    """When it took the last one."""
    missing: dict[tuple[int, int], int] = field(default_factory=dict)
    """Messages of a step's part that have not arrived."""
    arrival: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    adding: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds for adding a part, by step."""
    waiting: dict[int, list[_Message]] = field(default_factory=lambda: defaultdict(list))
    """What may leave once a part of that step has been taken."""


class _Course:
    """What happens, in the order of time."""

    def __init__(self, machine: Machine, node_of: Sequence[int], parts: int) -> None:
        self._machine, self._node_of, self._parts = machine, node_of, parts
        self.ranks = [_Rank() for _ in node_of]
        self._free: dict[tuple[str, int], float] = defaultdict(float)
        """When each port of a rank or node is free again."""
        self._events: list[tuple[float, int, bool, _Message, int]] = []
        """Time, a number that breaks ties, whether it arrives (or leaves), message, part."""
        self._number = itertools.count()

    def plan(self, schedule: Schedule, size: int) -> None:
        """List all messages, and what each of them waits for."""
        bounds = schedule.bounds(size)
        last: list[dict[int, int]] = [{} for _ in self.ranks]
        for number, step in enumerate(schedule.steps):
            made = [each for each in step if bounds[each.hi] > bounds[each.lo]]
            for src, dst, lo, hi, reduce in made:
                length = (bounds[hi] - bounds[lo]) / self._parts
                message = self._make(src, dst, number, length, reduce)
                needed = max(last[src].get(chunk, ORIGIN) for chunk in range(lo, hi))
                self.ranks[src].waiting[needed].append(message)
                self._expect(message)
            for _, dst, lo, hi, _ in made:
                last[dst].update(dict.fromkeys(range(lo, hi), number))

    def _make(self, src: int, dst: int, step: int, length: float, reduce: bool) -> _Message:
        is_far = self._node_of[src] != self._node_of[dst]
        cost = self._machine.between if is_far else self._machine.inside
        return _Message(
            src,
            dst,
            step,
            latency=float(cost.delay(length)),
            busy=float(cost.occupation(length)),
            on_link=float(self._machine.occupation(length)) if is_far else 0.0,
            adding=float(self._machine.addition_seconds(length)) if reduce else 0.0,
        )

    def _expect(self, message: _Message) -> None:
        rank, step = self.ranks[message.dst], message.step
        if not rank.steps or rank.steps[-1] != step:
            rank.steps.append(step)
        rank.adding[step] += message.adding
        for part in range(self._parts):
            rank.missing[step, part] = rank.missing.get((step, part), 0) + 1

    def run(self) -> None:
        for rank in self.ranks:
            for part in range(self._parts):
                self._send_on(rank, ORIGIN, part, 0.0)
        while self._events:
            time, _, arrives, message, part = heapq.heappop(self._events)
            end = message.dst if arrives else message.src
            way = "in" if arrives else "out"
            start = self._occupy((way, end), time, message.busy)
            if message.on_link:
                start = self._occupy((f"link {way}", self._node_of[end]), start, message.on_link)
            if arrives:
                self._arrive(message, part, start + message.busy + message.latency)
            else:
                self._push(start, message, part, arrives=True)

    def _occupy(self, port: tuple[str, int], time: float, busy: float) -> float:
        """When a message begins that could begin at ``time``."""
        start = max(time, self._free[port])
        self._free[port] = start + busy
        return start

    def _push(self, time: float, message: _Message, part: int, *, arrives: bool) -> None:
        heapq.heappush(self._events, (time, next(self._number), arrives, message, part))

    def _send_on(self, rank: _Rank, step: int, part: int, time: float) -> None:
        for message in rank.waiting.get(step, ()):
            self._push(time, message, part, arrives=False)

    def _arrive(self, message: _Message, part: int, time: float) -> None:
        rank, key = self.ranks[message.dst], (message.step, part)
        rank.arrival[key] = max(rank.arrival[key], time)
        rank.missing[key] -= 1
        for step, ready in self._list_next(rank):
            if rank.missing[step, ready]:
                break
            rank.time = max(rank.time, rank.arrival[step, ready]) + rank.adding[step]
            rank.place += 1
            self._send_on(rank, step, ready, rank.time)

    def _list_next(self, rank: _Rank) -> Iterator[tuple[int, int]]:
        """The parts that it has not taken, in order."""
        for place in range(rank.place, len(rank.steps) * self._parts):
            yield rank.steps[place // self._parts], place % self._parts
