"""Binds one rank's program to memory once, and then runs it without creating objects.

A bound program is a list of callables without arguments. It belongs to addresses, not to tensors:
it keeps no tensor alive, and is found by the addresses of all buffers that it uses. So memory that
was freed and allocated again either has the same addresses, which is correct, or is a new entry.

A plan belongs to buffers of one length and type, and binds its program to the buffers that it is
given. If it cannot work in a buffer (its type is too narrow for sums, or peers cannot reach its
memory), it works in a copy of the buffer, in a stage that all plans share.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Instruction,
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
from mpiddp.collectives.transport import BoundMessages, Messenger
from mpiddp.collectives.transport.node_memory import (
    PRIVATE,
    SEGMENT,
    Location,
    NodeMemory,
    PeerMemory,
)
from mpiddp.collectives.transport.operators import (
    Action,
    Arithmetic,
    MemorySpan,
    View,
    allocate,
    convert,
    copy,
    make_span,
)
from mpiddp.collectives.transport.shared_memory import SharedMemory, view_of
from mpiddp.collectives.transport.single_copy import LargePages

Value = TypeVar("Value")
Shortcut = Callable[[torch.Tensor], object]
NOWHERE = -1
"""No buffer's address."""
MOST_BINDINGS = 16
"""Bound programs that are kept for each plan: as many buffers can take turns."""
MOST_MAILBOX_CALLS = 64
"""Buffers for which a mailbox plan keeps its call."""


@dataclass(frozen=True)
class Description:
    """Names a call in error messages."""

    call: str
    """For example ``all-reduce (ring over mpi)``."""
    steps: int
    hosts: Mapping[int, str]
    """Of each rank, if it is known."""

    def describe_wait(self, step: int, rank: int) -> str:
        """In which step a rank waits, and for which rank."""
        host = self.hosts.get(rank)
        where = f"rank {rank} on {host}" if host else f"rank {rank}"
        last = step >= self.steps
        place = "at its end" if last else f"in step {step + 1} of {self.steps}"
        return f"{self.call}, {place}: waited for {where}"

    def describe_entry(self, rank: int) -> str:
        """The same at the beginning of the call."""
        return self.describe_wait(0, rank)

    def describe_message(self, message: ProgramMessage) -> str:
        return self.describe_wait(message.step, message.peer)


@dataclass(frozen=True)
class BoundProgram:
    """A program and the memory that it works in."""

    actions: tuple[Action, ...]
    messages: BoundMessages | None
    """Kept alive with the binding."""
    kept: tuple[object, ...]
    """Kept alive too: views of mapped memory do not keep it mapped."""

    def run(self) -> None:
        for action in self.actions:
            action()


class Recent(Generic[Value]):
    """The most recently used values, by key: at most ``most``."""

    def __init__(self, most: int = MOST_BINDINGS) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def find(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value for ``key``; a new one replaces the least recently used one."""
        value = self._values.get(key)
        if value is None:
            while len(self._values) >= self._most:
                self._values.popitem(last=False)
            value = self._values[key] = make()
        try:
            self._values.move_to_end(key)
        except KeyError:
            # Another thread, which prepares calls too, has made room meanwhile.
            self._values[key] = value
        return value


class Workspace:
    """Memory beside the buffers that all bound programs of a rank share, one at a time."""

    def __init__(self) -> None:
        self._spaces: dict[Hashable, MemorySpan] = {}

    def find(
        self, purpose: Hashable, count: int, dtype: torch.dtype, like: MemorySpan
    ) -> MemorySpan:
        """Room for ``count`` elements for one purpose, on the device of ``like``.

        When it grows, programs that are bound already keep the old memory. On a GPU each stream has
        its own, since calls on two streams work at the same time.
        """
        stream = None
        if isinstance(like.memory, torch.Tensor):
            stream = torch.cuda.current_stream(like.memory.device)
        key = (purpose, dtype, stream)
        space = self._spaces.get(key)
        if space is None or len(space.memory) < count:
            space = self._spaces[key] = allocate(count, dtype, like)
        return MemorySpan(space.memory[:count], dtype)


class Stage:
    """Memory for copies of buffers, as long as the longest copy so far."""

    def __init__(self, shared_memory: SharedMemory | None) -> None:
        """With ``shared_memory`` peers can map it."""
        self._shared_memory = shared_memory or SharedMemory()
        self._memory: mmap.mmap | None = None
        self._on_gpus = Workspace()

    def find(self, count: int, dtype: torch.dtype, like: MemorySpan) -> MemorySpan:
        """Room for ``count`` elements, with undefined values."""
        size = count * dtype.itemsize
        if isinstance(like.memory, torch.Tensor):
            room = self._on_gpus.find("stage", size, torch.uint8, like)
            return MemorySpan(room.memory.view(dtype), dtype)
        if self._memory is None or size > len(self._memory):
            self._memory = self._shared_memory.allocate(size)
        return MemorySpan(view_of(self._memory, 0, count, dtype), dtype, self._memory)


@dataclass(frozen=True)
class Execution:
    """A program and all that it needs except buffers."""

    program: RankProgram
    arithmetic: Arithmetic
    signature: int
    """24 bits that differ between different calls."""
    description: Description
    messenger: Messenger | None = None
    """None if the program has no messages."""
    node_memory: NodeMemory | None = None
    """None if it has no partners."""
    workspace: Workspace = field(default_factory=Workspace)
    """Shared with programs that never run at the same time."""
    stage: Stage | None = None
    """Where it works if it cannot work in the buffers."""
    buffer_type: torch.dtype | None = None
    """Type of the buffers' elements; None for the type that is added and sent."""

    @property
    def is_wide(self) -> bool:
        """Whether it works in a wider type than the buffers have."""
        return self.buffer_type not in (None, self.arithmetic.dtype)

    @property
    def memory(self) -> NodeMemory:
        """That of a program with partners."""
        assert self.node_memory is not None
        return self.node_memory

    def enter_stage(self, tensor: torch.Tensor) -> tuple[MemorySpan, Action, Action]:
        """Room in the stage, and the actions that copy the tensor into it and back."""
        assert self.stage is not None
        buffer = make_span(tensor, self.buffer_type)
        count = self.program.count
        room = self.stage.find(count, self.arithmetic.dtype, buffer)
        return room, convert(room, buffer, count), convert(buffer, room, count)


class _Binder:
    def __init__(
        self, execution: Execution, own: MemorySpan, peers: Mapping[int, PeerMemory]
    ) -> None:
        self.execution = execution
        self.program = program = execution.program
        self.arithmetic = execution.arithmetic
        self.own = own
        self.peers = peers
        messenger = execution.messenger if program.messages else None
        self.scratch = self._find_room("scratch", program.scratch, self.arithmetic.dtype)
        self.messages: BoundMessages | None = None
        if messenger is not None:
            views = [
                (self.scratch if each.scratch else own).slice(each.start, each.start + each.length)
                for each in program.messages
            ]
            self.messages = messenger.bind(
                program, views, execution.signature, execution.description.describe_message
            )

    def _find_room(self, purpose: Hashable, count: int, dtype: torch.dtype) -> MemorySpan:
        return self.execution.workspace.find(purpose, count, dtype, self.own)

    def bind(self) -> BoundProgram:
        actions: list[Action] = []
        for instruction in self.program.instructions:
            actions += self._bind(instruction)
        return BoundProgram(tuple(actions), self.messages, (*self.peers.values(), self.own))

    def _bind(self, instruction: Instruction) -> list[Action]:
        match instruction:
            case Start(numbers):
                assert self.messages is not None
                return [self.messages.start(numbers)]
            case Finish(number):
                assert self.messages is not None
                return [self.messages.finish(number)]
            case Wait(step, rank, stage):
                describe = self._describe(step, rank)
                return [self.execution.memory.wait(rank, stage, describe)]
            case Publish(stage):
                return [self.execution.memory.publish(stage)]
            case Fetch(step, rank, start, length, slot):
                target = self.scratch.slice(slot, slot + length)
                return [self.peers[rank].read(start, target, self._describe(step, rank))]
            case Pack(start, length, slot):
                source = self.own.slice(start, start + length)
                return [copy(self.scratch.slice(slot, slot + length), source)]
            case Push(step, rank, start, length):
                source = self.own.slice(start, start + length)
                return [self.peers[rank].write(start, source, self._describe(step, rank))]
            case Reduce():
                return self._bind_reduce(instruction)

    def _bind_reduce(self, reduce: Reduce) -> list[Action]:
        start, stop = reduce.start, reduce.start + reduce.length
        actions: list[Action] = []
        views, own = [], None
        for place, operand in enumerate(reduce.operands):
            if operand.source is Source.OWN:
                own = place
            views.append(self._find_operand(reduce, place, operand, actions))
        workspace = None
        if self.arithmetic.needs_workspace(own, len(views)):
            room = self._find_room("sum", self._most(), self.arithmetic.accumulation)
            workspace = room.operand(0, reduce.length)
        out = self.own.operand(start, stop)
        return actions + self.arithmetic.reduce(out, views, own, reduce.final, workspace)

    def _describe(self, step: int, rank: int) -> Callable[[], str]:
        return partial(self.execution.description.describe_wait, step, rank)

    def _find_operand(
        self, reduce: Reduce, place: int, operand: Operand, actions: list[Action]
    ) -> View:
        count = reduce.length
        start, stop = operand.start, operand.start + count
        if operand.source is Source.OWN:
            return self.own.operand(start, stop)
        if operand.source is Source.SCRATCH:
            return self.scratch.operand(start, stop)
        peer = self.peers[operand.rank]
        view = peer.operand(start, count)
        if view is None:
            room = self._find_room(place, self._most(), self.arithmetic.dtype)
            describe = self._describe(reduce.step, operand.rank)
            actions.append(peer.read(start, room.slice(0, count), describe))
            view = room.operand(0, count)
        return view

    def _most(self) -> int:
        return min(self.program.block, self.program.count)


def bind(execution: Execution, own: MemorySpan, peers: Mapping[int, PeerMemory]) -> BoundProgram:
    """Bind a program to memory.

    Args:
        own: the rank's buffer; its memory must live as long as the binding is run.
        peers: the buffers of the program's partners.
    """
    return _Binder(execution, own, peers).bind()


# ---- plans --------------------------------------------------------------------------------


class CallPlan:
    """A prepared call; this one is for one rank, whose buffer is the result."""

    def run(self, tensor: torch.Tensor) -> None:
        """Make the call in place on a contiguous tensor of the plan's length and type."""

    def prepare(self, tensor: torch.Tensor) -> Action:
        """A function that makes the call on this tensor, while the tensor lives."""
        return partial(self.run, tensor)

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """A function that makes the call on any tensor at this one's address."""
        return self.run


@dataclass(frozen=True)
class HostPlan(CallPlan):
    """Makes a call on a GPU's buffer in a copy of it in the host's memory.

    The host waits for what is queued on the current stream, and the stream for the host.
    """

    plan: CallPlan
    """The call on the copy."""
    room: torch.Tensor
    """For the copy; other plans may have the same memory."""

    def run(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach().view(-1)
        self.room.copy_(flat)
        self.plan.run(self.room)
        flat.copy_(self.room)


class MessagePlan(CallPlan):
    """Messages alone."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._bindings: Recent[BoundProgram] = Recent()

    def run(self, tensor: torch.Tensor) -> None:
        self._find(tensor).run()

    def prepare(self, tensor: torch.Tensor) -> Action:
        return self._find(tensor).run

    def _find(self, tensor: torch.Tensor) -> BoundProgram:
        # Calls on two streams of a GPU may not share their scratch space.
        stream = None if tensor.is_cpu else torch.cuda.current_stream(tensor.device).cuda_stream
        return self._bindings.find((tensor.data_ptr(), stream), lambda: self._bind(tensor))

    def _bind(self, tensor: torch.Tensor) -> BoundProgram:
        execution = self._execution
        if not execution.is_wide:
            return bind(execution, make_span(tensor, execution.buffer_type), {})
        stage, put, get = execution.enter_stage(tensor)
        binding = bind(execution, stage, {})
        return replace(binding, actions=(put, *binding.actions, get))


@dataclass(frozen=True)
class _Staging:
    """A buffer's copy in the stage."""

    stage: MemorySpan
    location: Location
    put: Action
    get: Action


class _Last(NamedTuple):
    """The last call: the next one on the same buffers needs no look-up, which takes 5 µs."""

    address: int
    shared_memory: object
    """All segments of this process; a new object after each change."""
    location: Location
    versions: tuple[int, ...]
    """Of the partners' locations."""
    binding: BoundProgram


class MemoryPlan(CallPlan):
    """Works in the memory of the node's ranks, with messages to the other ranks."""

    def __init__(self, execution: Execution, pages: LargePages) -> None:
        self._execution = execution
        self._node_memory = execution.memory
        self._pages = pages
        self._bindings: Recent[BoundProgram] = Recent()
        self._stagings: Recent[_Staging] = Recent()
        """By address of the buffer."""
        self._last: _Last | None = None

    def run(self, tensor: torch.Tensor) -> None:
        address, last, node_memory = tensor.data_ptr(), self._last, self._node_memory
        if (
            last is not None
            and last.address == address
            and last.shared_memory is node_memory.shared_memory.own
        ):
            if last.location.kind == PRIVATE:
                self._pages.visit(tensor)
            self._run_at(last.location, tensor, address)
            return
        place = node_memory.shared_memory.find(address, tensor.numel() * tensor.element_size())
        if self._execution.is_wide or (place is None and not node_memory.can_copy):
            staging = self._stagings.find(address, lambda: self._make_staging(tensor))
            staging.put()
            self._run_at(staging.location, staging.stage, NOWHERE)
            staging.get()
        elif place is None:
            self._pages.visit(tensor)
            self._run_at(Location(PRIVATE, address), tensor, address)
        else:
            self._run_at(Location(SEGMENT, *place), tensor, address)

    def _make_staging(self, tensor: torch.Tensor) -> _Staging:
        stage, put, get = self._execution.enter_stage(tensor)
        size = self._execution.program.count * stage.dtype.itemsize
        place = self._node_memory.shared_memory.find(stage.address, size)
        assert place is not None, "the stage of shared memory lies in a segment"
        return _Staging(stage, Location(SEGMENT, *place), put, get)

    def _run_at(self, location: Location, memory: torch.Tensor | MemorySpan, address: int) -> None:
        """``address``: of the caller's buffer, or NOWHERE for the stage."""
        execution, node_memory = self._execution, self._node_memory
        partners = execution.program.partners
        node_memory.enter(execution.signature, location)
        node_memory.meet(partners, execution.signature, execution.description.describe_entry)
        versions = node_memory.versions(partners)
        last = self._last
        if last is None or last.location is not location or last.versions != versions:
            key = (location, tuple(map(node_memory.location, partners)))
            binding = self._bindings.find(key, lambda: self._bind(memory, key[1]))
            last = _Last(address, node_memory.shared_memory.own, location, versions, binding)
            self._last = last
        last.binding.run()

    def _bind(
        self, memory: torch.Tensor | MemorySpan, locations: tuple[Location, ...]
    ) -> BoundProgram:
        execution, node_memory = self._execution, self._node_memory
        own = memory if isinstance(memory, MemorySpan) else make_span(memory, execution.buffer_type)
        count, dtype = execution.program.count, execution.arithmetic.dtype
        peers = {
            rank: node_memory.find_memory(rank, location, count, dtype)
            for rank, location in zip(execution.program.partners, locations, strict=True)
        }
        return bind(execution, own, peers)


@dataclass(frozen=True)
class MailboxPlan(CallPlan):
    """One-shot for small buffers on one node: each rank fills its mailbox and adds up all of them.

    A rank fills its two mailboxes in turn. Before it fills one again, it has seen all other ranks
    begin the call in between, so none still reads it. So no rank waits at the end of a call.
    """

    arithmetic: Arithmetic
    count: int
    signature: int
    description: Description
    node_memory: NodeMemory
    _calls: Recent[Callable[..., None]] = field(default_factory=lambda: Recent(MOST_MAILBOX_CALLS))
    """The call on each buffer, by address."""

    def run(self, tensor: torch.Tensor) -> None:
        self.prepare(tensor)()

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        return self.prepare(tensor)

    def prepare(self, tensor: torch.Tensor) -> Callable[..., None]:
        return self._calls.find(tensor.data_ptr(), lambda: self._bind(make_span(tensor)))

    def _bind(self, own: MemorySpan) -> Callable[..., None]:
        add, add_too = (self._bind_sum(own, parity) for parity in (0, 1))
        buffer = memoryview(own.memory.data).cast("B")
        return self.node_memory.exchange(
            self.signature, buffer, (add, add_too), self.description.describe_entry
        )

    def _bind_sum(self, own: MemorySpan, parity: int) -> list[Action]:
        node_memory, count, dtype = self.node_memory, self.count, self.arithmetic.dtype
        boxes = [node_memory.mailbox(rank, parity, count, dtype) for rank in node_memory.ranks]
        workspace = None
        if self.arithmetic.widens:
            workspace = allocate(count, self.arithmetic.accumulation, own).operand(0, count)
        views = [box.operand(0, count) for box in boxes]
        out = own.operand(0, count)
        return self.arithmetic.reduce(out, views, None, True, workspace)
