"""Prices a schedule: how long its steps take on a machine with given latencies and bandwidths.

The model is Hockney's (α seconds for a message, β for each of its bytes) with γ seconds for each
byte that is added, a rank that sends and receives at once but one message at a time each way,
and, for each node, one link to the network that its ranks share. The slowest rank decides the time
of a step: the longer of its sending and its receiving, or its node's link if that is slower, and
then its adding. Steps do not overlap.

The model leaves out two things: the latency of one message may be hidden behind another (LogP), so
real pipelines of small segments are quicker; and switches above the nodes may be shared, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import ConfigurationError
from mpiddp.schedules.machine import Machine, MessageCost
from mpiddp.schedules.schedule import Collective, Schedule, Step

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def flat(latency: float, seconds_per_byte: float, addition: float = 0.0) -> Machine:
    """A machine on which all pairs of ranks are alike."""
    link = MessageCost(latency, seconds_per_byte)
    return Machine(link, link, addition)


def split(ranks: int, nodes: int) -> tuple[int, ...]:
    """Neighbouring ranks on ``nodes`` nodes, as evenly as they go."""
    if not 1 <= nodes <= ranks:
        raise ConfigurationError(f"{ranks} ranks go on 1 to {ranks} nodes, not on {nodes}")
    return tuple(ranks * (node + 1) // nodes - ranks * node // nodes for node in range(nodes))


def split_in_two(ranks: int) -> tuple[int, ...]:
    """Two nodes, or one for one rank: what algorithms take that need nodes if none are given."""
    return split(ranks, min(ranks, 2))


# ---- simulation ---------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPrice:
    seconds: float
    messages: int
    """Of all ranks together; transfers of nothing are not made."""
    sent: int
    """Bytes of all ranks together."""
    busiest: int
    """Bytes that the busiest rank sends or receives."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """A schedule, priced step by step."""

    steps: tuple[StepPrice, ...]
    sent: Integers
    """Bytes that each rank sends: shape (ranks,)."""
    received: Integers
    """Bytes that each rank receives: shape (ranks,)."""

    @property
    def seconds(self) -> float:
        return math.fsum(step.seconds for step in self.steps)


def simulate(
    schedule: Schedule,
    count: int,
    machine: Machine,
    nodes: Sequence[int] | None = None,
    *,
    item: int = 1,
) -> Simulation:
    """Price each step for a buffer of ``count`` elements of ``item`` bytes.

    ``nodes`` has the number of ranks on each node, in the order of the ranks; one rank on each
    if it is not given. Raises ConfigurationError if they are not the schedule's ranks, or if
    ``count`` is negative.
    """
    if count < 0:
        raise ConfigurationError(f"elements must be >= 0, found {count}")
    nodes = check_nodes(schedule.ranks, nodes)
    node_of = np.repeat(np.arange(len(nodes)), nodes)
    counter = _Counter(machine, node_of, len(nodes), packed=schedule.packed)
    bounds = np.array(schedule.bounds(count), dtype=np.int64) * item
    sent = np.zeros(schedule.ranks, np.int64)
    received = np.zeros(schedule.ranks, np.int64)
    prices = []
    for step in schedule.steps:
        price, out, into = counter.count(step, bounds)
        sent += out
        received += into
        prices.append(price)
    return Simulation(tuple(prices), sent, received)


def check_nodes(ranks: int, nodes: Sequence[int] | None) -> tuple[int, ...]:
    """The ranks of each node; raises ConfigurationError if there are not ``ranks`` of them."""
    sizes = (1,) * ranks if nodes is None else tuple(nodes)
    if sum(sizes) != ranks or min(sizes, default=0) < 1:
        raise ConfigurationError(
            f"nodes of {', '.join(map(str, sizes))} ranks are not {ranks} ranks: "
            "each node has at least one, and together they have all"
        )
    return sizes


class StepMessages(NamedTuple):
    """Those of a step that are made, each an array with a value a message."""

    src: Integers
    dst: Integers
    size: Integers
    """In bytes."""
    reduce: Integers
    """1 for what is added, 0 for what is copied."""


def list_messages(step: Step, bounds: Integers, *, packed: bool) -> StepMessages:
    """The messages of a step; ``bounds``: where each chunk begins, in bytes.

    ``packed``: what a rank sends to another one, to add or to copy, is one message.
    """
    table = np.fromiter(chain.from_iterable(step), np.int64, 5 * len(step)).reshape(-1, 5)
    size = bounds[table[:, 3]] - bounds[table[:, 2]]
    made = size > 0
    src, dst, size, reduce = (
        column[made] for column in (table[:, 0], table[:, 1], size, table[:, 4])
    )
    if not packed or not len(size):
        return StepMessages(src, dst, size, reduce)
    ranks = int(max(src.max(), dst.max())) + 1
    key, place = np.unique((src * ranks + dst) * 2 + reduce, return_inverse=True)
    total = np.bincount(place, size, len(key)).astype(np.int64)
    return StepMessages(key // 2 // ranks, key // 2 % ranks, total, key % 2)


class _Counter:
    def __init__(self, machine: Machine, node_of: Integers, nodes: int, *, packed: bool) -> None:
        self._machine, self._node_of, self._nodes = machine, node_of, nodes
        self._ranks, self._packed = len(node_of), packed

    def count(self, step: Step, bounds: Integers) -> tuple[StepPrice, Integers, Integers]:
        """The price of the step, and the bytes that each rank sends and receives."""
        src, dst, size, reduce = list_messages(step, bounds, packed=self._packed)
        out, into = self._per_rank(src, size), self._per_rank(dst, size)
        far = self._node_of[src] != self._node_of[dst]
        machine = self._machine
        time = np.where(far, machine.between.seconds(size), machine.inside.seconds(size))
        busy = np.maximum(
            np.maximum(self._per_rank(src, time), self._per_rank(dst, time)),
            np.maximum(self._on_link(src, far, size), self._on_link(dst, far, size)),
        )
        busy += self._per_rank(dst, machine.addition_seconds(size) * reduce)
        price = StepPrice(
            float(busy.max(initial=0.0)),
            len(size),
            int(size.sum()),
            int(max(out.max(initial=0.0), into.max(initial=0.0))),
        )
        return price, out.astype(np.int64), into.astype(np.int64)

    def _per_rank(self, ranks: Integers, weights: NDArray[np.generic]) -> Floats:
        return np.bincount(ranks, weights, self._ranks).astype(np.float64)

    def _on_link(self, ranks: Integers, far: NDArray[np.bool_], size: Integers) -> Floats:
        """How long the node's link is busy, for each rank that uses it."""
        users, times = ranks[far], self._machine.occupation(size[far])
        loads = np.bincount(self._node_of[users], times, self._nodes)
        delays = np.zeros(self._nodes)
        np.maximum.at(delays, self._node_of[users], self._machine.between.delay(size[far]))
        time = np.zeros(self._ranks)
        time[users] = (delays + loads)[self._node_of[users]]
        return time


# ---- lower bounds -------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of any algorithm's time, each by itself, in seconds."""

    latency: float
    bandwidth: float
    addition: float

    @property
    def seconds(self) -> float:
        """The maximum; the bounds do not add up."""
        return max(self.latency, self.bandwidth, self.addition)


def bound(
    size: float,
    machine: Machine,
    nodes: Sequence[int],
    members: int | None = None,
    collective: Collective = Collective.ALL_REDUCE,
) -> Bounds:
    """Lower bounds of an all-reduce of ``size`` bytes over the ranks of ``nodes``.

    If all ranks are members: ⌈lg n⌉ messages one after the other, 2(n−1)/n·S bytes through
    some rank's port and (n−1)/n·S bytes added by some rank (Chan et al. 2007; Patarasuk and Yuan,
    JPDC 69(2), 2009). The same holds for whole nodes and their links, but that a node of m ranks
    receives from m others at once. If some ranks only serve, the ``members`` send the buffer once
    and receive it once, perhaps at the same time. Of the other collectives, reduce-scatter and
    all-gather move half of the bytes, reduce and broadcast all of the buffer once; those that only
    gather add nothing.
    """
    if not size:
        return Bounds(0.0, 0.0, 0.0)
    ranks, hosts = sum(nodes), len(nodes)
    adders = ranks if members is None else members
    used = [machine.inside] * (max(nodes) > 1) + [machine.between] * (hosts > 1)
    per_byte = min((cost.least_per_byte() for cost in used), default=0.0)
    latency = _count_rounds(adders, 2) * min((cost.least_latency for cost in used), default=0.0)
    added = 0.0 if collective.gathers else (adders - 1) / ranks * size
    adding = machine.adding
    addition = added * (machine.addition if adding is None else adding.least_per_byte())
    if adders < ranks:
        volume = size if adders > 1 else 0.0
        return Bounds(latency, volume * per_byte, addition)
    far = machine.between.least_latency * _count_rounds(hosts, 1 + max(nodes))
    port, link = (ranks - 1) / ranks, (hosts - 1) / hosts
    if collective in (Collective.REDUCE, Collective.BROADCAST):
        port, link = float(ranks > 1), float(hosts > 1)
    least = machine.between.least_per_byte(apart=machine.between.latency)
    uplink = least if machine.shared is None else min(least, machine.shared)
    slowest = max(port * per_byte, link * uplink)
    times = 2 if collective is Collective.ALL_REDUCE else 1
    return Bounds(max(latency, far), times * size * slowest, addition)


def _count_rounds(count: int, factor: int) -> int:
    """How often 1 is to be multiplied to reach ``count``."""
    rounds, reached = 0, 1
    while reached < count:
        rounds, reached = rounds + 1, reached * factor
    return rounds


# ---- closed forms: prices for more ranks than can be simulated ----------------------------


class Load(NamedTuple):
    """Messages of one size, and their volume as a multiple of the buffer."""

    messages: float = 0
    volume: float = 0

    def seconds(self, size: float, cost: MessageCost) -> float:
        """Of all of them, for a buffer of ``size`` bytes."""
        return self.messages * cost.seconds(self.volume * size / (self.messages or 1))

    def scaled(self, messages: float, volume: float) -> Load:
        return Load(self.messages * messages, self.volume * volume)


NOTHING = Load()


@dataclass(frozen=True)
class Phase:
    """Steps that are alike for the rank that decides how long they take."""

    steps: int
    near: Load = NOTHING
    """What it sends (or receives) in each step within its node."""
    far: Load = NOTHING
    """What it sends to other nodes."""
    link: float = 0.0
    """Volume over its node's link in each step, of all its ranks together."""
    added: float = 0.0
    """What it adds in each step, as a multiple of the buffer."""
    beside: Load = NOTHING
    """What other ranks send within their nodes meanwhile, if that may take longer."""

    def seconds(self, size: float, machine: Machine) -> float:
        rank = self.near.seconds(size, machine.inside) + self.far.seconds(size, machine.between)
        share = self.far.volume * size / (self.far.messages or 1)
        delay = machine.between.delay(share)
        link = delay + self._fill(self.link, size, machine.occupation)
        slowest = max(rank, link if self.link else 0.0, self.beside.seconds(size, machine.inside))
        return self.steps * (slowest + self._fill(self.added, size, machine.addition_seconds))

    def _fill(self, volume: float, size: float, cost: Callable[[float], float]) -> float:
        """What ``volume`` costs in messages of the size of those that are sent."""
        load = self.far if self.far.messages else self.near
        share = load.volume / load.messages if load.volume else volume
        return volume / share * cost(share * size) if volume else 0.0


def make_phase(steps: int, nodes: int, messages: float, volume: float, added: float = 0.0) -> Phase:
    """Steps whose slowest message goes to another node, if there is one."""
    load = Load(messages, volume)
    return Phase(steps, *((load, NOTHING) if nodes == 1 else (NOTHING, load)), added=added)


def exchange_phase(nodes: int, each: int, share: float, added: float) -> Phase:
    """One step in which every rank sends ``share`` of the buffer to every other."""
    others = (nodes - 1) * each
    near, far = Load(1, share).scaled(each - 1, each - 1), Load(1, share).scaled(others, others)
    return Phase(1 if nodes * each > 1 else 0, near, far, each * far.volume, added)


@dataclass(frozen=True)
class ClosedForm:
    """A few kinds of steps, each with the load of its slowest rank.

    For chunks of equal size its price is that of ``simulate``, as the tests show, on machines whose
    messages between nodes are no quicker than inside.
    """

    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def seconds(self, size: float, machine: Machine) -> float:
        return math.fsum(phase.seconds(size, machine) for phase in self.phases)

    @property
    def near(self) -> Load:
        """The sum of all steps' loads within nodes."""
        return _sum_loads(phase.near.scaled(phase.steps, phase.steps) for phase in self.phases)

    @property
    def far(self) -> Load:
        """The sum of all steps' loads between nodes."""
        return _sum_loads(phase.far.scaled(phase.steps, phase.steps) for phase in self.phases)

    @property
    def added(self) -> float:
        """The sum of all steps' additions, as a multiple of the buffer."""
        return math.fsum(phase.steps * phase.added for phase in self.phases)


def _sum_loads(loads: Iterable[Load]) -> Load:
    return Load(*map(sum, zip(NOTHING, *loads, strict=True)))
