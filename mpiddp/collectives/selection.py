"""Selects the schedule and the transport of a call: as the user named them, or by a rule.

The rule of ``auto``, for buffers on the CPU:

- all ranks on one node, shared memory: one-shot up to the size of a mailbox, direct beyond;
- one rank on each node, MPI: recursive-doubling up to LATENCY_BYTES, ring beyond;
- several nodes of several ranks, shared memory and MPI: two-level, with direct inside the nodes
  and recursive-doubling or ring between them, by the same bound;
- where only messages are possible inside nodes: as one rank on each node.

On GPUs, over NCCL: direct inside a node; between nodes as above, with two levels.
Broadcast and reduce: a binomial tree up to LATENCY_BYTES; beyond, in the memory of a node, straight
from or to the root, and over messages a chain in parts. Reduce-scatter and all-gather: direct in
the memory of a node, ring over messages. With ``fixed_order``: one-shot up to LATENCY_BYTES, direct
beyond and for reduce-scatter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from functools import cached_property

from mpiddp.collectives.transport.node_memory import MAILBOX
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.proof import is_order_fixed
from mpiddp.schedules.registry import Choice, names, parse
from mpiddp.schedules.schedule import Collective, Schedule, rotate, segment

AUTO = "auto"
MPI, TORCH, SHARED, BOTH = "mpi", "torch", "shared-memory", "shared-memory+mpi"
TRANSPORTS = (SHARED, BOTH, MPI, TORCH)

LATENCY_BYTES = 32 << 10
"""Up to this size latency decides, beyond it bandwidth."""
PART_BYTES = 256 << 10
"""Of a buffer that is passed along a chain."""
MOST_PARTS = 64


@dataclass(frozen=True, eq=False)
class Layout:
    """The ranks of a communicator."""

    rank: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    nodes: tuple[int, ...]
    """The node of each rank, by number."""
    transports: tuple[str, ...]
    """The transports that connect all ranks, the preferred one first."""
    absent: dict[str, str] = field(default_factory=dict)
    """Why other transports are not possible."""

    @property
    def size(self) -> int:
        return len(self.nodes)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on this rank's node, itself among them."""
        return tuple(r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ranks node by node; they need not be numbered so."""
        return tuple(sorted(range(self.size), key=lambda rank: (self.nodes[rank], rank)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The ranks of each node, in the order of ``order``."""
        return tuple(map(self.nodes.count, sorted(set(self.nodes))))


@dataclass(frozen=True)
class Call:
    """What the user asked for."""

    kind: Collective
    algorithm: str = AUTO
    transport: str = AUTO
    root: int = 0
    fixed_order: bool = False
    allows_servers: bool = False
    """Whether an all-reduce may leave out the buffers of dedicated servers: to measure that."""


@dataclass(frozen=True)
class Selection:
    """What is run."""

    schedule: Schedule
    name: str
    """Of the algorithm, with its parameters."""
    transport: str


def select(call: Call, size: int, layout: Layout, *, on_gpu: bool) -> Selection:
    """The schedule and the transport for a buffer of ``size`` bytes.

    Raises ConfigurationError for what does not exist, is not possible here or would leave out
    ranks, ScheduleError for an algorithm that does not do what it promises.
    """
    transport = _select_transport(call.transport, layout, on_gpu)
    if not 0 <= call.root < layout.size:
        raise ConfigurationError(f"root must be 0 to {layout.size - 1}, found {call.root}")
    if call.algorithm == AUTO:
        name = _choose_name(call, size, layout, transport, on_gpu=on_gpu)
    else:
        name = call.algorithm
    choice = parse(name)
    schedule = _build(call, choice, layout)
    if call.fixed_order and not is_order_fixed(schedule):
        raise ConfigurationError(
            f"{choice} adds in an order that depends on where a buffer is cut: with fixed_order "
            f"use {_list_fixed(call, layout)}"
        )
    return Selection(schedule, str(choice), transport)


def _select_transport(wish: str, layout: Layout, on_gpu: bool) -> str:
    if wish != AUTO and wish not in TRANSPORTS:
        raise ConfigurationError(
            f"no transport is called {wish!r}; there are auto, {', '.join(TRANSPORTS)}"
        )
    if on_gpu and wish not in (AUTO, TORCH):
        raise ConfigurationError(
            f"transport {wish} works on CPU memory, but the tensor is on a GPU: use torch"
        )
    if wish == AUTO:
        return TORCH if on_gpu else layout.transports[0]
    if wish not in layout.transports:
        reason = layout.absent.get(wish, "")
        raise ConfigurationError(
            f"transport {wish} is not possible here: {reason}; possible: "
            f"{', '.join(layout.transports)}"
        )
    return wish


def _choose_name(call: Call, size: int, layout: Layout, transport: str, *, on_gpu: bool) -> str:
    """The rule of the module's docstring."""
    is_short = size <= LATENCY_BYTES
    in_memory = transport == SHARED or (on_gpu and len(layout.sizes) == 1)
    if call.kind in (Collective.BROADCAST, Collective.REDUCE):
        if is_short:
            return "binomial-tree"
        if in_memory:
            return "gather-broadcast"
        return f"naive-ring:segments={min(MOST_PARTS, -(-size // PART_BYTES))}"
    if call.kind is not Collective.ALL_REDUCE:
        return "direct" if in_memory or call.fixed_order else "ring"
    if call.fixed_order:
        return "one-shot" if is_short else "direct"
    if transport == SHARED and size <= MAILBOX:
        return "one-shot"
    if in_memory:
        return "direct"
    between = "recursive-doubling" if is_short else "ring"
    has_levels = transport == BOTH or on_gpu
    if has_levels and 1 < len(layout.sizes) < layout.size:
        return f"two-level:inner=direct,outer={between}"
    return between


@functools.lru_cache(maxsize=64)
def _build(call: Call, choice: Choice, layout: Layout) -> Schedule:
    nodes = order = None
    if choice.algorithm.knows_nodes and len(layout.sizes) > 1:
        nodes, order = layout.sizes, layout.order
    if call.kind is Collective.ALL_REDUCE:
        schedule = choice.build(layout.size, nodes, order)
        left_out = schedule.ranks - len(schedule.members)
        if left_out and not call.allows_servers:
            raise ConfigurationError(
                f"{choice} leaves out the buffers of {left_out} of {schedule.ranks} ranks, which "
                "only serve: use gather-broadcast or direct, which include them"
            )
        return schedule
    half = choice.build_half(call.kind, layout.size, nodes, order)
    if call.kind in (Collective.REDUCE, Collective.BROADCAST):
        return _root(call, choice, half)
    if half.owners != tuple(range(layout.size)) or choice.segments > 1:
        raise ConfigurationError(
            f"{choice} on {layout.size} ranks does not give each rank one part of the buffer, in "
            f"order, so it makes no {call.kind.value}: ring and direct do"
        )
    return half


def _root(call: Call, choice: Choice, half: Schedule) -> Schedule:
    owner = half.owners[0]
    if len(set(half.owners)) > 1 or len(half.members) < half.ranks:
        raise ConfigurationError(
            f"{choice} has no single root, so it makes no {call.kind.value}: binomial-tree, "
            "gather-broadcast and naive-ring do"
        )
    return segment(rotate(half, (call.root - owner) % half.ranks), choice.segments)


def _list_fixed(call: Call, layout: Layout) -> str:
    fitting = []
    for name in names():
        try:
            schedule = _build(call, parse(name), layout)
        except (ConfigurationError, ScheduleError):
            continue
        if is_order_fixed(schedule):
            fitting.append(name)
    return ", ".join(fitting)
