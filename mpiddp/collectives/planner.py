"""Makes the plan of a call, with the schedule and the transport that the user named, or by a rule.

Where a tuning table (`mpiddp.collectives.tuning`) has been made for the ranks' layout, ``auto`` for
algorithm and transport is what it says for the buffer, unless ``fixed_order`` is asked for.

The rule of ``auto`` without one, for buffers on the CPU:

- all ranks on one node, shared memory: one-shot up to the size of a mailbox, direct beyond;
- one rank on each node, MPI: recursive-doubling up to LATENCY_BYTES, ring beyond;
- several nodes of several ranks, shared memory and MPI: two-level, with direct inside the nodes
  and recursive-doubling or ring between them, by the same bound;
- if only messages are possible inside nodes: as one rank on each node.

On GPUs, over NCCL: direct inside a node; between nodes as above, with two levels. Without NCCL, as
on the CPU: each rank makes the call in a copy of its buffer in the host's memory.
Broadcast and reduce: a binomial tree up to LATENCY_BYTES; beyond, in the memory of a node, straight
from or to the root, and over messages a chain in parts. Reduce-scatter and all-gather: direct in
the memory of a node, ring over messages. With ``fixed_order``: one-shot up to LATENCY_BYTES, direct
beyond and for reduce-scatter.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property

import torch

from mpiddp.collectives import AUTO, BOTH, MPI, SHARED, TORCH, TRANSPORTS
from mpiddp.collectives.compiler.hazards import RankPart, find_part
from mpiddp.collectives.compiler.lowering import compile_part
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.executor import (
    CallPlan,
    Description,
    Execution,
    HostPlan,
    MailboxPlan,
    MemoryPlan,
    MessagePlan,
    Recent,
    Stage,
    Workspace,
)
from mpiddp.collectives.transport import Messenger
from mpiddp.collectives.transport.node_memory import BLOCK, MAILBOX, NEXT_CALL, NodeMemory
from mpiddp.collectives.transport.operators import (
    Arithmetic,
    Operator,
    choose_accumulation,
    find_operator,
    name_type,
)
from mpiddp.collectives.transport.shared_memory import SharedMemory
from mpiddp.collectives.transport.single_copy import LargePages
from mpiddp.collectives.tuning import GPU, NO_TABLE, Tuning, make_key
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.proof import is_order_fixed
from mpiddp.schedules.registry import Choice, is_built_in, names, parse
from mpiddp.schedules.schedule import Collective, Schedule, rotate, segment

LATENCY_BYTES = 32 << 10
"""Up to this size latency decides, beyond it bandwidth."""
PART_BYTES = 256 << 10
"""Of a buffer that is passed along a chain."""
MOST_PARTS = 64
MOST_ANALYSES = 64
"""Schedules whose analysis is kept."""
NCCL = "torch, on GPUs"
"""The messenger of transport torch for tensors on GPUs."""

_SUMS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
_MOVED = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: the type as which it is copied if nothing is added."""


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
    tuning: Tuning = NO_TABLE
    """What a tuning table says for these ranks."""
    has_nccl: bool = True
    """Whether tensors on GPUs travel over NCCL; through the host's memory otherwise."""

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


@dataclass(frozen=True, eq=False)
class CallRequest:
    """What the user asked for. Plans are kept by identity: equal calls are one object."""

    kind: Collective
    algorithm: str = AUTO
    transport: str = AUTO
    root: int = 0
    fixed_order: bool = False
    operator: str = "sum"
    reduction_dtype: torch.dtype | None = None
    allows_servers: bool = False
    """Whether an all-reduce may leave out the buffers of dedicated servers: to measure that."""

    @property
    def is_open(self) -> bool:
        """Whether a tuning table may choose."""
        return self.algorithm == self.transport == AUTO and not self.fixed_order


@dataclass(frozen=True)
class Selection:
    schedule: Schedule
    name: str
    """Of the algorithm, with its parameters."""
    transport: str
    fingerprint: int = 0
    """Of a schedule made outside this package, which may differ between ranks; else 0."""


def select(
    request: CallRequest,
    size: int,
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    *,
    on_gpu: bool,
) -> Selection:
    """The schedule and the transport for a buffer of ``size`` bytes.

    ``dtype``: of its elements; a tuning table may depend on it, the rule does not.

    Raises ConfigurationError for what does not exist, is not possible here or would leave out
    ranks, ScheduleError for an algorithm that does not do what it promises.
    """
    on_gpu = on_gpu and layout.has_nccl
    if request.is_open:
        key = make_key(request.kind, name_type(dtype), on_gpu=on_gpu)
        tuned = layout.tuning.find(key, size)
        if tuned is not None:
            request = replace(request, algorithm=tuned.algorithm, transport=tuned.transport)
    transport = _select_transport(request.transport, layout, on_gpu)
    if not 0 <= request.root < layout.size:
        name = "src" if request.kind is Collective.BROADCAST else "dst"
        raise ConfigurationError(f"{name} must be 0 to {layout.size - 1}, found {request.root}")
    if request.algorithm == AUTO:
        name = _choose_name(request, size, layout, transport, on_gpu=on_gpu)
    else:
        name = request.algorithm
    choice = parse(name)
    schedule = _make_schedule(request, choice, layout)
    if request.fixed_order and not is_order_fixed(schedule):
        raise ConfigurationError(
            f"{choice} adds in an order that depends on where a buffer is cut: with fixed_order "
            f"use {_list_fixed(request, layout)}"
        )
    fingerprint = 0 if is_built_in(choice) else _find_fingerprint(schedule)
    return Selection(schedule, str(choice), transport, fingerprint)


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


def _choose_name(
    request: CallRequest, size: int, layout: Layout, transport: str, *, on_gpu: bool
) -> str:
    """The rule of the module's docstring."""
    is_short = size <= LATENCY_BYTES
    in_memory = transport == SHARED or (on_gpu and len(layout.sizes) == 1)
    if request.kind in (Collective.BROADCAST, Collective.REDUCE):
        if is_short:
            return "binomial-tree"
        if in_memory:
            return "gather-broadcast"
        return f"naive-ring:segments={min(MOST_PARTS, -(-size // PART_BYTES))}"
    if request.kind is not Collective.ALL_REDUCE:
        return "direct" if in_memory or request.fixed_order else "ring"
    if request.fixed_order:
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


def _make_schedule(request: CallRequest, choice: Choice, layout: Layout) -> Schedule:
    schedule = _build(request.kind, request.root, choice, layout)
    left_out = schedule.ranks - len(schedule.members)
    if left_out and not request.allows_servers and request.kind is Collective.ALL_REDUCE:
        raise ConfigurationError(
            f"{choice} leaves out the buffers of {left_out} of {schedule.ranks} ranks, which "
            "only serve: use gather-broadcast or direct, which include them"
        )
    return schedule


def _find_fingerprint(schedule: Schedule) -> int:
    return zlib.crc32(repr((schedule.chunks, schedule.packed, schedule.steps)).encode())


@functools.lru_cache(maxsize=64)
def _build(kind: Collective, root: int, choice: Choice, layout: Layout) -> Schedule:
    nodes = order = None
    if choice.algorithm.knows_nodes and len(layout.sizes) > 1:
        nodes, order = layout.sizes, layout.order
    if kind is Collective.ALL_REDUCE:
        return choice.build(layout.size, nodes, order)
    half = choice.build_half(kind, layout.size, nodes, order)
    if kind in (Collective.REDUCE, Collective.BROADCAST):
        if len(set(half.owners)) > 1 or len(half.members) < half.ranks:
            raise ConfigurationError(
                f"{choice} has no single root, so it makes no {kind.value}; binomial-tree, for "
                "example, does"
            )
        return segment(rotate(half, (root - half.owners[0]) % half.ranks), choice.segments)
    if half.owners != tuple(range(layout.size)) or choice.segments > 1:
        raise ConfigurationError(
            f"{choice} on {layout.size} ranks does not give each rank one part of the buffer, in "
            f"order, so it makes no {kind.value}: ring and direct do"
        )
    return half


def _list_fixed(request: CallRequest, layout: Layout) -> str:
    fitting = []
    for name in names():
        try:
            schedule = _make_schedule(request, parse(name), layout)
        except (ConfigurationError, ScheduleError):
            continue
        if is_order_fixed(schedule):
            fitting.append(name)
    return ", ".join(fitting)


# ---- planning -----------------------------------------------------------------------------


class Planner:
    """Makes plans, and what they share."""

    def __init__(
        self,
        layout: Layout,
        shared_memory: SharedMemory,
        node_memory: NodeMemory | None,
        messengers: Mapping[str, Callable[[], Messenger]],
        agree: Callable[[int, str], object] | None = None,
    ) -> None:
        """``messengers``: by transport, a function that makes its messenger; called once,
        collectively, when it is first needed. ``agree`` compares a value on all ranks of the
        layout; None for a rank alone.

        Raises ConfigurationError if the layout's tuning table names what cannot be.
        """
        _check_tuning(layout)
        self.layout = layout
        self.shared_memory = shared_memory
        self.node_memory = node_memory
        self._makers = messengers
        self._agree = agree
        self._messengers: dict[str, Messenger] = {}
        self._stage, self._private_stage = Stage(shared_memory), Stage(None)
        self._workspace = Workspace()
        self._pages = LargePages()
        self._host_room = torch.empty(0, dtype=torch.uint8)
        """For copies of buffers of GPUs without NCCL: as long as the longest one so far."""
        self._parts: Recent[RankPart] = Recent(MOST_ANALYSES)
        self._compared: set[tuple[Collective, int, str]] = set()
        """Kind, root and algorithm of the schedules that all ranks have alike."""

    def close(self) -> None:
        """Give back what messengers and node_memory hold."""
        for messenger in self._messengers.values():
            messenger.close()
        if self.node_memory is not None:
            self.node_memory.close()

    def make(self, request: CallRequest, tensor: torch.Tensor) -> CallPlan:
        """The plan of a call on tensors like this one; collective as ``select``.

        Raises ConfigurationError.
        """
        dtype = tensor.dtype
        on_gpu = tensor.device.type != "cpu"
        if on_gpu and not self.layout.has_nccl:
            room = self._find_host_room(tensor.numel(), dtype)
            return HostPlan(self.make(request, room), room)
        if request.kind in _SUMS:
            operator = find_operator(request.operator)
            accumulation = choose_accumulation(operator, dtype, request.reduction_dtype)
        else:
            operator, dtype = Operator.SUM, _find_moved(dtype)
            accumulation = dtype
        size = tensor.numel() * tensor.element_size()
        selection = self.select(request, size, tensor.dtype, on_gpu=on_gpu)
        if self.layout.size == 1:
            return CallPlan()
        signature = _sign(request, selection, tensor)
        description = Description(
            f"{request.kind.value} ({selection.name} over {selection.transport})",
            len(selection.schedule.steps),
            dict(enumerate(self.layout.hosts)),
        )
        members = len(selection.schedule.members)
        if self.node_memory is not None and _fits_mailbox(selection, tensor.numel(), dtype):
            # A sum of original contributions, made at once, is as exact from narrow operands.
            arithmetic = Arithmetic(operator, dtype, accumulation, members)
            return MailboxPlan(arithmetic, tensor.numel(), signature, description, self.node_memory)
        part = self._find_part(selection)
        # Partial sums travel in the wide type.
        is_wide = accumulation != dtype and not part.sums.is_single
        in_memory = selection.transport in (SHARED, BOTH)
        messenger = self.ensure_messenger(selection, on_gpu=on_gpu)
        arithmetic = Arithmetic(operator, accumulation if is_wide else dtype, accumulation, members)
        cut = _find_cut(messenger, arithmetic.dtype.itemsize, in_memory)
        execution = Execution(
            compile_part(part, tensor.numel(), cut),
            arithmetic,
            signature,
            description,
            messenger,
            self.node_memory if in_memory else None,
            self._workspace,
            self._private_stage if selection.transport == TORCH else self._stage,
            dtype,
        )
        return MemoryPlan(execution, self._pages) if part.group else MessagePlan(execution)

    def _find_host_room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """In shared memory, if the node's ranks have any. Plans share it: calls take turns."""
        size = count * dtype.itemsize
        if size > len(self._host_room):
            is_shared = self.node_memory is not None
            empty = self.shared_memory.empty if is_shared else torch.empty
            self._host_room = empty((size,), dtype=torch.uint8)
        return self._host_room[:size].view(dtype)

    def select(
        self, request: CallRequest, size: int, dtype: torch.dtype = torch.float32, *, on_gpu: bool
    ) -> Selection:
        """As `select`; collective the first time that an algorithm of the user's is selected.

        The ranks then compare its schedule, which might depend on a rank's hash seed, for example.
        Raises ConfigurationError that names the ranks whose schedule differs from rank 0's.
        """
        selection = select(request, size, self.layout, dtype, on_gpu=on_gpu)
        key = (request.kind, request.root, selection.name)
        if selection.fingerprint and key not in self._compared and self._agree is not None:
            self._agree(selection.fingerprint, f"the schedule of {selection.name}")
            self._compared.add(key)
        return selection

    def _find_part(self, selection: Selection) -> RankPart:
        """This rank's part of a schedule; analysed once for buffers of all lengths."""
        in_memory = selection.transport in (SHARED, BOTH)
        # The part keeps its schedule alive, so that no other schedule can get the same id.
        key = (id(selection.schedule), in_memory)
        group = self.layout.neighbours if in_memory else (self.layout.rank,)
        return self._parts.find(key, lambda: find_part(selection.schedule, self.layout.rank, group))

    def ensure_messenger(self, selection: Selection, *, on_gpu: bool) -> Messenger | None:
        """The messenger of a transport; collective the first time.

        None in shared memory and on one rank. Raises ConfigurationError.
        """
        if selection.transport == SHARED or self.layout.size == 1:
            return None
        on_gpu = on_gpu and self.layout.has_nccl
        name = NCCL if on_gpu else MPI if selection.transport == BOTH else selection.transport
        if name not in self._messengers:
            messenger = self._messengers[name] = self._makers[name]()
            if self.node_memory is not None:
                self.node_memory.help_in_waits(messenger.progress)
        return self._messengers[name]


def _check_tuning(layout: Layout) -> None:
    """Raise ConfigurationError if calls that follow the tuning table would be refused."""
    for key, ranges in layout.tuning.ranges.items():
        for each in ranges:
            request = CallRequest(Collective(key[0]), each.algorithm, each.transport)
            try:
                select(request, each.most, layout, on_gpu=key[2] == GPU)
            except (ConfigurationError, ScheduleError) as error:
                raise ConfigurationError(
                    f"the tuning table {layout.tuning.title}, {' '.join(key)}: {error}"
                ) from None


def _fits_mailbox(selection: Selection, count: int, dtype: torch.dtype) -> bool:
    return (
        selection.transport == SHARED
        and len(selection.schedule.steps) == 1
        and selection.schedule.collective is Collective.ALL_REDUCE
        and 0 < count * dtype.itemsize <= MAILBOX
    )


def _find_cut(messenger: Messenger | None, itemsize: int, in_memory: bool) -> BufferCut:
    block = max(1, BLOCK // itemsize)
    if messenger is None:
        return BufferCut(cell=block, message=block, flows=True)
    cut = messenger.cut(itemsize)
    return BufferCut(min(block, cut.cell), cut.message, cut.flows) if in_memory else cut


def _find_moved(dtype: torch.dtype) -> torch.dtype:
    if dtype.itemsize not in _MOVED:
        raise ConfigurationError(
            f"expected elements of 1, 2, 4 or 8 bytes, found {name_type(dtype)}"
        )
    return _MOVED[dtype.itemsize]


def _sign(request: CallRequest, selection: Selection, tensor: torch.Tensor) -> int:
    """24 bits that differ if calls do; the same in all processes."""
    text = repr(
        (astuple(request), selection.name, selection.transport, tensor.numel(), tensor.dtype)
    )
    return zlib.crc32(text.encode()) % NEXT_CALL
