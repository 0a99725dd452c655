"""Makes the plan of a call: its schedule, types, transport and program.

A plan belongs to buffers of one length and type, and binds its program to the buffers that it is
given. Where it cannot work in a buffer (its type is too narrow for sums, or peers cannot reach its
memory), it works in a copy of the buffer, in a stage that all plans share.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from mpiddp.collectives.compiler.lowering import Part, compile_part, find_part
from mpiddp.collectives.compiler.tiling import Cut
from mpiddp.collectives.executor import (
    MOST_BINDINGS,
    Binding,
    Bindings,
    Description,
    Execution,
    Stage,
    Workspace,
    allocate,
    bind,
)
from mpiddp.collectives.operators import (
    Action,
    Arithmetic,
    Operator,
    Span,
    choose_accumulation,
    copy,
    find_operator,
    make_span,
    name_type,
)
from mpiddp.collectives.selection import (
    BOTH,
    MPI,
    SHARED,
    TORCH,
    Call,
    Layout,
    Selection,
    select,
)
from mpiddp.collectives.transport import Messenger
from mpiddp.collectives.transport.node_memory import (
    BLOCK,
    MAILBOX,
    NEXT_CALL,
    PRIVATE,
    SEGMENT,
    Location,
    NodeMemory,
)
from mpiddp.collectives.transport.shared_memory import SharedMemory
from mpiddp.collectives.transport.single_copy import LargePages
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective

_SUMS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
_MOVED = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""Where nothing is added, elements of so many bytes are copied as this type."""


MOST_ANALYSES = 64
"""Schedules whose analysis is kept."""
MOST_MAILBOX_CALLS = 64
"""Buffers that a mailbox plan knows at a time."""
NCCL = "torch, on GPUs"
"""The messenger of transport torch for tensors on GPUs."""


@dataclass(frozen=True, eq=False)
class Request:
    """A call as the user makes it. Plans are kept by identity: equal calls are one object."""

    call: Call
    operator: str = "sum"
    reduction_dtype: torch.dtype | None = None


# ---- plans --------------------------------------------------------------------------------


class Plan(Protocol):
    """A prepared call."""

    def run(self, tensor: torch.Tensor) -> None:
        """Make the call in place on a contiguous tensor of the plan's length and type."""

    def prepare(self, tensor: torch.Tensor) -> Action:
        """A function that makes the call on this tensor, while the tensor lives."""

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """A function that makes the call on any tensor at this one's address."""


Shortcut = Callable[[torch.Tensor], object]


class NoPlan:
    """For one rank: its buffer is the result."""

    def run(self, tensor: torch.Tensor) -> None:
        """Nothing to do."""

    def prepare(self, tensor: torch.Tensor) -> Action:
        return partial(self.run, tensor)

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        return self.run


@dataclass
class MessagePlan:
    """Messages alone."""

    execution: Execution
    bindings: Bindings = field(default_factory=Bindings)

    def run(self, tensor: torch.Tensor) -> None:
        self._find(tensor).run()

    def prepare(self, tensor: torch.Tensor) -> Action:
        return self._find(tensor).run

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """See ``Plan``; a binding by itself would outlive its place among the last ones."""
        return self.run

    def _find(self, tensor: torch.Tensor) -> Binding:
        # Calls on two streams of a GPU may not share their scratch space.
        stream = None if tensor.is_cpu else torch.cuda.current_stream(tensor.device).cuda_stream
        return self.bindings.find((tensor.data_ptr(), stream), lambda: self._bind(tensor))

    def _bind(self, tensor: torch.Tensor) -> Binding:
        execution = self.execution
        if not execution.is_wide:
            return bind(execution, make_span(tensor, execution.buffer_type), {})
        stage, put, get = execution.enter_stage(tensor)
        return bind(execution, stage, {}).between(put, get)


@dataclass(frozen=True)
class _Staging:
    """A buffer's copy in the stage."""

    stage: Span
    location: Location
    put: Action
    get: Action


NOWHERE = -1
"""No buffer's address."""


class _Last(NamedTuple):
    """The last call: the next one on the same buffers needs no look-up, which takes 5 µs."""

    address: int
    shared_memory: object
    """All segments of this process; a new object after each change."""
    location: Location
    versions: tuple[int, ...]
    """Of the partners' locations."""
    binding: Binding


@dataclass
class MemoryPlan:
    """Works in the memory of the node's ranks, with messages to the other ranks."""

    execution: Execution
    pages: LargePages
    """Of all plans."""
    bindings: Bindings = field(default_factory=Bindings)

    _stagings: dict[int, _Staging] = field(default_factory=dict)
    """By address of the buffer."""
    _last: _Last | None = None

    @property
    def _node_memory(self) -> NodeMemory:
        node_memory = self.execution.node_memory
        assert node_memory is not None
        return node_memory

    def run(self, tensor: torch.Tensor) -> None:
        address, last, node_memory = tensor.data_ptr(), self._last, self._node_memory
        if (
            last is not None
            and last.address == address
            and last.shared_memory is node_memory.shared_memory.own
        ):
            if last.location.kind == PRIVATE:
                self.pages.visit(tensor)
            self._run_at(last.location, tensor, address)
            return
        place = node_memory.shared_memory.find(address, tensor.numel() * tensor.element_size())
        if self.execution.is_wide or (place is None and not node_memory.can_copy):
            self._run_staged(tensor)
        elif place is None:
            self.pages.visit(tensor)
            self._run_at(Location(PRIVATE, address), tensor, address)
        else:
            self._run_at(Location(SEGMENT, *place), tensor, address)

    def prepare(self, tensor: torch.Tensor) -> Action:
        return partial(self.run, tensor)

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        return self.run

    def _run_staged(self, tensor: torch.Tensor) -> None:
        staging = self._stagings.get(tensor.data_ptr())
        if staging is None:
            if len(self._stagings) >= MOST_BINDINGS:
                self._stagings.clear()
            staging = self._stagings[tensor.data_ptr()] = self._make_staging(tensor)
        staging.put()
        self._run_at(staging.location, staging.stage, NOWHERE)
        staging.get()

    def _make_staging(self, tensor: torch.Tensor) -> _Staging:
        stage, put, get = self.execution.enter_stage(tensor)
        size = self.execution.count * stage.dtype.itemsize
        place = self._node_memory.shared_memory.find(stage.address, size)
        assert place is not None, "the stage of shared memory lies in a segment"
        return _Staging(stage, Location(SEGMENT, *place), put, get)

    def _run_at(self, location: Location, memory: torch.Tensor | Span, address: int) -> None:
        """``address``: of the caller's buffer, or NOWHERE for the stage."""
        execution, node_memory = self.execution, self._node_memory
        partners = execution.program.partners
        node_memory.enter(execution.signature, location)
        node_memory.meet(partners, execution.signature, self._describe)
        versions = node_memory.versions(partners)
        last = self._last
        if last is None or last.location is not location or last.versions != versions:
            key = (location, tuple(map(node_memory.location, partners)))
            binding = self.bindings.find(key, lambda: self._bind(memory, key[1]))
            last = _Last(address, node_memory.shared_memory.own, location, versions, binding)
            self._last = last
        last.binding.run()

    def _describe(self, rank: int) -> str:
        return self.execution.description.wait(0, rank)

    def _bind(self, memory: torch.Tensor | Span, locations: tuple[Location, ...]) -> Binding:
        execution, node_memory = self.execution, self._node_memory
        own = memory if isinstance(memory, Span) else make_span(memory, execution.buffer_type)
        count, dtype = execution.count, execution.arithmetic.dtype
        peers = {
            rank: node_memory.resolver.find_memory(rank, location, count, dtype)
            for rank, location in zip(execution.program.partners, locations, strict=True)
        }
        return bind(execution, own, peers)


class MailboxPlan:
    """One-shot for small buffers on one node: each rank fills its mailbox and adds up all of them.

    A rank fills its two mailboxes in turn. Before it fills one again, it has seen all other ranks
    begin the call in between, so none still reads it. So no rank waits at the end of a call.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        count: int,
        signature: int,
        description: Description,
        node_memory: NodeMemory,
    ) -> None:
        self._arithmetic = arithmetic
        self._count = count
        self._signature = signature
        self._description = description
        self._node_memory = node_memory
        self._bindings: dict[int, Callable[..., None]] = {}
        """The call on each buffer, by address."""

    def run(self, tensor: torch.Tensor) -> None:
        self.prepare(tensor)()

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        return self.prepare(tensor)

    def prepare(self, tensor: torch.Tensor) -> Callable[..., None]:
        call = self._bindings.get(tensor.data_ptr())
        if call is None:
            if len(self._bindings) >= MOST_MAILBOX_CALLS:
                self._bindings.clear()
            call = self._bindings[tensor.data_ptr()] = self._bind(make_span(tensor))
        return call

    def _describe(self, rank: int) -> str:
        return self._description.wait(0, rank)

    def _bind(self, own: Span) -> Callable[..., None]:
        (put, add), (put_too, add_too) = (self._bind_box(own, parity) for parity in (0, 1))
        return self._node_memory.exchange(
            self._signature, (put, put_too), (add, add_too), self._describe
        )

    def _bind_box(self, own: Span, parity: int) -> tuple[Action, list[Action]]:
        node_memory, count, dtype = self._node_memory, self._count, self._arithmetic.dtype
        boxes = {
            rank: node_memory.mailbox(rank, parity, count, dtype) for rank in node_memory.ranks
        }
        put = copy(boxes[node_memory.rank].move(0, count), own.move(0, count))
        workspace = None
        if self._arithmetic.widens:
            workspace = allocate(count, self._arithmetic.accumulation, own).compute(0, count)
        views = [box.compute(0, count) for box in boxes.values()]
        out = own.compute(0, count)
        return put, self._arithmetic.reduce(out, views, None, True, workspace)


# ---- planning -----------------------------------------------------------------------------


class Planner:
    """Makes plans, and what they share."""

    def __init__(
        self,
        layout: Layout,
        shared_memory: SharedMemory,
        node_memory: NodeMemory | None,
        messengers: Mapping[str, Callable[[], Messenger]],
    ) -> None:
        """``messengers``: by transport, a function that makes its messenger; called once,
        collectively, when it is first needed."""
        self.layout = layout
        self.shared_memory = shared_memory
        self.node_memory = node_memory
        self._makers = messengers
        self._messengers: dict[str, Messenger] = {}
        self._stage, self._private_stage = Stage(shared_memory), Stage(None)
        self._workspace = Workspace()
        self._pages = LargePages()
        self._parts: dict[tuple[int, bool], Part] = {}

    def close(self) -> None:
        """Give back what messengers and node_memory hold."""
        for messenger in self._messengers.values():
            messenger.close()
        if self.node_memory is not None:
            self.node_memory.close()

    def make(self, request: Request, tensor: torch.Tensor) -> Plan:
        """The plan of a call on tensors like this one. Raises ConfigurationError."""
        call, dtype = request.call, tensor.dtype
        if call.kind in _SUMS:
            operator = find_operator(request.operator)
            accumulation = choose_accumulation(operator, dtype, request.reduction_dtype)
        else:
            operator, dtype = Operator.SUM, _find_moved(dtype)
            accumulation = dtype
        on_gpu = tensor.device.type != "cpu"
        size = tensor.numel() * tensor.element_size()
        selection = select(call, size, self.layout, on_gpu=on_gpu)
        if self.layout.size == 1:
            return NoPlan()
        signature = _sign(request, selection, tensor)
        description = Description(
            f"{call.kind.value} ({selection.name} over {selection.transport})",
            len(selection.schedule.steps),
            dict(enumerate(self.layout.hosts)),
        )
        members = len(selection.schedule.members)
        if self.node_memory is not None and _fits_mailbox(selection, tensor.numel(), dtype):
            # One step adds contributions as they were: that is as exact from narrow operands.
            arithmetic = Arithmetic(operator, dtype, accumulation, members)
            return MailboxPlan(arithmetic, tensor.numel(), signature, description, self.node_memory)
        part = self._find_part(selection)
        # So is any sum that is made at once; the others travel in the wide type.
        is_wide = accumulation != dtype and not part.sums.is_single
        in_memory = selection.transport in (SHARED, BOTH)
        messenger = self.find_messenger(selection, on_gpu=on_gpu)
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

    def _find_part(self, selection: Selection) -> Part:
        """This rank's part of a schedule; analysed once for buffers of all lengths."""
        in_memory = selection.transport in (SHARED, BOTH)
        # The part keeps its schedule alive, so that no other schedule can get the same id.
        key = (id(selection.schedule), in_memory)
        if key not in self._parts:
            if len(self._parts) >= MOST_ANALYSES:
                self._parts.clear()
            group = self.layout.neighbours if in_memory else (self.layout.rank,)
            self._parts[key] = find_part(selection.schedule, self.layout.rank, group)
        return self._parts[key]

    def find_messenger(self, selection: Selection, *, on_gpu: bool) -> Messenger | None:
        """The messenger of a transport; collective where it is the first time.

        None in shared memory and on one rank. Raises ConfigurationError.
        """
        if selection.transport == SHARED or self.layout.size == 1:
            return None
        name = NCCL if on_gpu else MPI if selection.transport == BOTH else selection.transport
        if name not in self._messengers:
            self._messengers[name] = self._makers[name]()
        return self._messengers[name]


def _fits_mailbox(selection: Selection, count: int, dtype: torch.dtype) -> bool:
    return (
        selection.transport == SHARED
        and len(selection.schedule.steps) == 1
        and selection.schedule.collective is Collective.ALL_REDUCE
        and 0 < count * dtype.itemsize <= MAILBOX
    )


def _find_cut(messenger: Messenger | None, itemsize: int, in_memory: bool) -> Cut:
    block = max(1, BLOCK // itemsize)
    if messenger is None:
        return Cut(cell=block, message=block, flows=True)
    cut = messenger.cut(itemsize)
    return Cut(min(block, cut.cell), cut.message, cut.flows) if in_memory else cut


def _find_moved(dtype: torch.dtype) -> torch.dtype:
    if dtype.itemsize not in _MOVED:
        raise ConfigurationError(
            f"expected elements of 1, 2, 4 or 8 bytes, found {name_type(dtype)}"
        )
    return _MOVED[dtype.itemsize]


def _sign(request: Request, selection: Selection, tensor: torch.Tensor) -> int:
    """24 bits that differ where calls do; the same in all processes."""
    text = repr(
        (astuple(request), selection.name, selection.transport, tensor.numel(), tensor.dtype)
    )
    return zlib.crc32(text.encode()) % NEXT_CALL
