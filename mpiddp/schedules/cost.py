"""Prices a schedule: what its steps take on a machine with given latencies and bandwidths.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective, Schedule, Step

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class MessageCost:
    """The cost of a message between two ranks."""

    latency: float
    """α: seconds for each message."""
    seconds_per_byte: float
    """β."""


@dataclass(frozen=True)
class Machine:
    """What messages and additions take. Raises ConfigurationError for what cannot be."""

    inside: MessageCost
    """Between two ranks of one node."""
    between: MessageCost
    """Between ranks of two nodes; no quicker than inside."""
    addition: float = 0.0
    """γ: seconds for each byte that arrives to be added."""
    shared: float | None = None
    """Seconds per byte of a node's link to the network, each way: as ``between`` if not given,
    never more."""

    def __post_init__(self) -> None:
        figures = [*vars(self.inside).values(), *vars(self.between).values(), self.addition]
        figures += [] if self.shared is None else [self.shared]
        if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
            raise ConfigurationError(f"latencies and seconds per byte must be >= 0: {self}")
        if (
            self.between.latency < self.inside.latency
            or self.between.seconds_per_byte < self.inside.seconds_per_byte
        ):
            raise ConfigurationError(
                "messages between nodes cannot be quicker than inside one: "
                f"{self.between} < {self.inside}"
            )
        if self.uplink > self.between.seconds_per_byte:
            raise ConfigurationError(
                f"one rank sends a byte in {self.between.seconds_per_byte} s between nodes, so its "
                f"node's link cannot need {self.uplink} s for it"
            )

    @property
    def uplink(self) -> float:
        """Seconds per byte of a node's link, each way."""
        return self.between.seconds_per_byte if self.shared is None else self.shared


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


class _Counter:
    def __init__(self, machine: Machine, node_of: Integers, nodes: int, *, packed: bool) -> None:
        self._machine, self._node_of, self._nodes = machine, node_of, nodes
        self._ranks, self._packed = len(node_of), packed

    def count(self, step: Step, bounds: Integers) -> tuple[StepPrice, Integers, Integers]:
        """What the step takes, and the bytes that each rank sends and receives."""
        src, dst, reduce, size = self._list_messages(step, bounds)
        out, into = self._per_rank(src, size), self._per_rank(dst, size)
        far = self._node_of[src] != self._node_of[dst]
        inside, between = self._machine.inside, self._machine.between
        time = np.where(
            far,
            between.latency + size * between.seconds_per_byte,
            inside.latency + size * inside.seconds_per_byte,
        )
        busy = np.maximum(
            np.maximum(self._per_rank(src, time), self._per_rank(dst, time)),
            np.maximum(self._on_link(src, far, size), self._on_link(dst, far, size)),
        )
        busy += self._per_rank(dst, size * reduce) * self._machine.addition
        price = StepPrice(
            float(busy.max(initial=0.0)),
            len(size),
            int(size.sum()),
            int(max(out.max(initial=0.0), into.max(initial=0.0))),
        )
        return price, out.astype(np.int64), into.astype(np.int64)

    def _list_messages(self, step: Step, bounds: Integers) -> tuple[Integers, ...]:
        """Source, destination, whether it is added, and bytes of each message."""
        table = np.fromiter(chain.from_iterable(step), np.int64, 5 * len(step)).reshape(-1, 5)
        src, dst, reduce = table[:, 0], table[:, 1], table[:, 4]
        size = bounds[table[:, 3]] - bounds[table[:, 2]]
        made = size > 0
        if not made.all():
            src, dst, reduce, size = src[made], dst[made], reduce[made], size[made]
        if not self._packed:
            return src, dst, reduce, size
        key, place = np.unique((src * self._ranks + dst) * 2 + reduce, return_inverse=True)
        total = np.bincount(place, size, len(key)).astype(np.int64)
        return key // 2 // self._ranks, key // 2 % self._ranks, key % 2, total

    def _per_rank(self, ranks: Integers, weights: NDArray[np.generic]) -> Floats:
        return np.bincount(ranks, weights, self._ranks).astype(np.float64)

    def _on_link(self, ranks: Integers, far: NDArray[np.bool_], size: Integers) -> Floats:
        """How long the node's link is busy, for each rank that uses it."""
        users, bytes_ = ranks[far], size[far]
        loads = np.bincount(self._node_of[users], bytes_, self._nodes)
        time = np.zeros(self._ranks)
        node = self._node_of[users]
        time[users] = self._machine.between.latency + loads[node] * self._machine.uplink
        return time


# ---- lower bounds -------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """What no algorithm can beat; each by itself, in seconds."""

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
    hears m others at once. If some ranks only serve, the ``members`` send the buffer once and
    receive it once, perhaps at the same time. Of the other collectives, reduce-scatter and
    all-gather move half of the bytes, reduce and broadcast all of the buffer once; those that only
    gather add nothing.
    """
    if not size:
        return Bounds(0.0, 0.0, 0.0)
    ranks, hosts = sum(nodes), len(nodes)
    adders = ranks if members is None else members
    nearest = machine.between if max(nodes) == 1 else machine.inside
    latency = _count_rounds(adders, 2) * nearest.latency
    added = 0.0 if collective.gathers else (adders - 1) / ranks * size
    addition = added * machine.addition
    if adders < ranks:
        volume = size if adders > 1 else 0.0
        return Bounds(latency, volume * nearest.seconds_per_byte, addition)
    far = machine.between.latency * _count_rounds(hosts, 1 + max(nodes))
    port, link = (ranks - 1) / ranks, (hosts - 1) / hosts
    if collective in (Collective.REDUCE, Collective.BROADCAST):
        port, link = float(ranks > 1), float(hosts > 1)
    slowest = max(port * nearest.seconds_per_byte, link * machine.uplink)
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
    """Messages, and their volume as a multiple of the buffer."""

    messages: float = 0
    volume: float = 0

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

    def seconds(self, size: float, machine: Machine) -> float:
        near, far = machine.inside, machine.between
        rank = (
            self.near.messages * near.latency
            + self.near.volume * size * near.seconds_per_byte
            + self.far.messages * far.latency
            + self.far.volume * size * far.seconds_per_byte
        )
        link = far.latency + self.link * size * machine.uplink if self.link else 0.0
        return self.steps * (max(rank, link) + self.added * size * machine.addition)


def make_phase(steps: int, nodes: int, messages: float, volume: float, added: float = 0.0) -> Phase:
    """Steps whose slowest message goes to another node, if there is one."""
    load = Load(messages, volume)
    return Phase(steps, *((load, NOTHING) if nodes == 1 else (NOTHING, load)), added=added)


def exchange_phase(nodes: int, each: int, share: float, added: float) -> Phase:
    """One step in which everybody sends ``share`` of the buffer to everybody."""
    others = (nodes - 1) * each
    near, far = Load(1, share).scaled(each - 1, each - 1), Load(1, share).scaled(others, others)
    return Phase(1 if nodes * each > 1 else 0, near, far, each * far.volume, added)


@dataclass(frozen=True)
class ClosedForm:
    """A few kinds of steps, each with the load of its slowest rank.

    For chunks of equal size its price is that of ``simulate``, as the tests show.
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
