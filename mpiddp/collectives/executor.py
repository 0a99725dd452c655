"""Binds one rank's program to memory once, and then runs it without creating objects.

A bound program is a list of callables without arguments. It belongs to addresses, not to tensors:
it keeps no tensor alive, and is found by the addresses of all buffers that it uses. So memory that
was freed and allocated again either has the same addresses, which is correct, or is a new entry.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Instruction,
    Message,
    Operand,
    Program,
    Publish,
    Push,
    Reduce,
    Source,
    Start,
    Wait,
)
from mpiddp.collectives.operators import Action, Arithmetic, Span, View, convert, make_span
from mpiddp.collectives.transport import Messages, Messenger
from mpiddp.collectives.transport.node_memory import NodeMemory, PeerMemory
from mpiddp.collectives.transport.shared_memory import SharedMemory, view_of

MOST_BINDINGS = 16
"""Bound programs that are kept for each plan: as many buffers can take turns."""


@dataclass(frozen=True)
class Description:
    """Names a call in error messages."""

    call: str
    """For example ``all-reduce (ring over mpi)``."""
    steps: int
    hosts: Mapping[int, str]
    """Of each rank where it is known."""

    def wait(self, step: int, rank: int) -> str:
        """In which step a rank waits, and for which rank."""
        host = self.hosts.get(rank)
        where = f"rank {rank} on {host}" if host else f"rank {rank}"
        last = step >= self.steps
        place = "at its end" if last else f"in step {step + 1} of {self.steps}"
        return f"{self.call}, {place}: waited for {where}"

    def message(self, message: Message) -> str:
        return self.wait(message.step, message.peer)


@dataclass(frozen=True)
class Binding:
    """A program and the memory that it works in."""

    actions: tuple[Action, ...]
    messages: Messages | None
    """Kept alive with the binding."""
    kept: tuple[object, ...]
    """Kept alive too: views of mapped memory do not keep it mapped."""
    workspace: int
    """Bytes used beside the buffer: scratch, copies of peers' data, and wide sums."""

    def run(self) -> None:
        for action in self.actions:
            action()

    def between(self, before: Action, after: Action) -> Binding:
        """The same actions with one more before and after them."""
        return replace(self, actions=(before, *self.actions, after))


@dataclass
class Bindings:
    """The bound programs of one plan that were used last, by their addresses."""

    _entries: OrderedDict[Hashable, Binding] = field(default_factory=OrderedDict)

    def find(self, key: Hashable, make: Callable[[], Binding]) -> Binding:
        """The one for ``key``; a new one replaces the one that was not used for longest."""
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= MOST_BINDINGS:
                self._entries.popitem(last=False)
            entry = self._entries[key] = make()
        elif len(self._entries) > 1:
            self._entries.move_to_end(key)
        return entry


def allocate(count: int, dtype: torch.dtype, like: Span) -> Span:
    """New memory on the device of ``like``; the caller keeps it alive."""
    device = like.memory.device if isinstance(like.memory, torch.Tensor) else "cpu"
    tensor = torch.empty(count, dtype=dtype, device=device)
    if tensor.device.type == "cpu":
        raw = tensor.view(torch.int16) if dtype in (torch.float16, torch.bfloat16) else tensor
        return Span(raw.numpy().view(make_span(tensor).memory.dtype), dtype)
    return Span(tensor, dtype)


class Workspace:
    """Memory beside the buffers that all bound programs of a rank share, one at a time."""

    def __init__(self) -> None:
        self._spaces: dict[Hashable, Span] = {}

    def find(self, purpose: Hashable, count: int, dtype: torch.dtype, like: Span) -> Span:
        """Room for ``count`` elements for one purpose, on the device of ``like``.

        When it grows, programs that are bound already keep the old memory.
        """
        stream = None
        if isinstance(like.memory, torch.Tensor):
            stream = torch.cuda.current_stream(like.memory.device)
        key = (purpose, dtype, stream)
        space = self._spaces.get(key)
        if space is None or len(space.memory) < count:
            space = self._spaces[key] = allocate(count, dtype, like)
        return Span(space.memory[:count], dtype)


class Stage:
    """Memory for copies of buffers, as long as the longest copy so far."""

    def __init__(self, shared_memory: SharedMemory | None) -> None:
        """With ``shared_memory`` peers can map it."""
        self._shared_memory = shared_memory or SharedMemory()
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._on_gpus: dict[tuple[int, int], torch.Tensor] = {}
        """By device and stream: calls on two streams work at the same time."""

    def find(self, count: int, dtype: torch.dtype, like: Span) -> Span:
        """Room for ``count`` elements, with undefined values."""
        size = count * dtype.itemsize
        if isinstance(like.memory, torch.Tensor):
            return self._find_on_gpu(size, dtype, like.memory)
        if self._memory is None or size > self._size:
            self._memory = self._shared_memory.allocate(size)
            self._size = size
        return Span(view_of(self._memory, 0, count, dtype), dtype, self._memory)

    def _find_on_gpu(self, size: int, dtype: torch.dtype, like: torch.Tensor) -> Span:
        key = (like.get_device(), torch.cuda.current_stream(like.device).cuda_stream)
        memory = self._on_gpus.get(key)
        if memory is None or size > memory.numel():
            memory = torch.empty(size, dtype=torch.uint8, device=like.device)
            self._on_gpus[key] = memory
        return Span(memory[:size].view(dtype), dtype)


@dataclass(frozen=True)
class Execution:
    """A program and all that it needs except buffers."""

    program: Program
    arithmetic: Arithmetic
    signature: int
    """24 bits that differ between different calls."""
    description: Description
    messenger: Messenger | None = None
    """None where the program has no messages."""
    node_memory: NodeMemory | None = None
    """None where it has no partners."""
    workspace: Workspace = field(default_factory=Workspace)
    """Shared with programs that never run at the same time."""
    stage: Stage | None = None
    """Where it works if it cannot work in the buffers."""
    buffer_type: torch.dtype | None = None
    """Type of the buffers' elements; None for the type that is added and sent."""

    @property
    def count(self) -> int:
        return self.program.count

    @property
    def is_wide(self) -> bool:
        """Whether it works in a wider type than that of the buffers."""
        return self.buffer_type not in (None, self.arithmetic.dtype)

    def enter_stage(self, tensor: torch.Tensor) -> tuple[Span, Action, Action]:
        """Room in the stage, and the actions that copy the tensor into it and back."""
        assert self.stage is not None
        buffer = make_span(tensor, self.buffer_type)
        room = self.stage.find(self.count, self.arithmetic.dtype, buffer)
        return room, convert(room, buffer, self.count), convert(buffer, room, self.count)


class _Binder:
    """Turns instructions into callables on given memory."""

    def __init__(self, execution: Execution, own: Span, peers: Mapping[int, PeerMemory]) -> None:
        self.workspace = execution.workspace
        self.program = program = execution.program
        self.arithmetic = arithmetic = execution.arithmetic
        self.own = own
        self.peers = peers
        self.node_memory = execution.node_memory
        self.description = description = execution.description
        messenger = execution.messenger if program.messages else None
        self.progress = messenger.progress if messenger is not None else None
        self.scratch = self.workspace.find("scratch", program.scratch, arithmetic.dtype, own)
        self.bytes = program.scratch * arithmetic.dtype.itemsize
        self.rooms: dict[int, Span] = {}
        """Where operands are read to, by their place in a sum."""
        self.wide: Span | None = None
        self.messages: Messages | None = None
        if messenger is not None:
            views = [
                (self.scratch if each.scratch else own).move(each.start, each.start + each.length)
                for each in program.messages
            ]
            self.messages = messenger.bind(
                program.messages, views, execution.signature, description.message
            )

    def bind(self) -> Binding:
        actions: list[Action] = []
        for instruction in self.program.instructions:
            actions += self._bind(instruction)
        return Binding(tuple(actions), self.messages, (*self.peers.values(), self.own), self.bytes)

    def _bind(self, instruction: Instruction) -> list[Action]:
        match instruction:
            case Start(numbers):
                assert self.messages is not None
                return [self.messages.start(numbers)]
            case Finish(number):
                assert self.messages is not None
                return [self.messages.finish(number)]
            case Wait(step, rank, stage):
                assert self.node_memory is not None
                describe = self._describe(step, rank)
                return [self.node_memory.wait(rank, stage, describe, self.progress)]
            case Publish(stage):
                assert self.node_memory is not None
                return [self.node_memory.publish(stage)]
            case Fetch(step, rank, start, length, slot):
                target = self.scratch.move(slot, slot + length)
                return [self.peers[rank].read(start, target, self._describe(step, rank))]
            case Push(step, rank, start, length):
                source = self.own.move(start, start + length)
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
        needs = self.arithmetic.needs_workspace(own, len(views))
        workspace = self._find_workspace(reduce.length) if needs else None
        out = self.own.compute(start, stop)
        return actions + self.arithmetic.reduce(out, views, own, reduce.final, workspace)

    def _describe(self, step: int, rank: int) -> Callable[[], str]:
        return partial(self.description.wait, step, rank)

    def _find_operand(
        self, reduce: Reduce, place: int, operand: Operand, actions: list[Action]
    ) -> View:
        count = reduce.length
        start, stop = operand.start, operand.start + count
        if operand.source is Source.OWN:
            return self.own.compute(start, stop)
        if operand.source is Source.SCRATCH:
            return self.scratch.compute(start, stop)
        peer = self.peers[operand.rank]
        view = peer.operand(start, count)
        if view is None:
            room = self._find_room(place)
            describe = self._describe(reduce.step, operand.rank)
            actions.append(peer.read(start, room.move(0, count), describe))
            view = room.compute(0, count)
        return view

    def _most(self) -> int:
        return min(self.program.block, self.program.count)

    def _find_room(self, place: int) -> Span:
        if place not in self.rooms:
            self.rooms[place] = self.workspace.find(
                place, self._most(), self.arithmetic.dtype, self.own
            )
            self.bytes += self._most() * self.arithmetic.dtype.itemsize
        return self.rooms[place]

    def _find_workspace(self, count: int) -> View:
        if self.wide is None:
            self.wide = self.workspace.find(
                "sum", self._most(), self.arithmetic.accumulation, self.own
            )
            self.bytes += self._most() * self.arithmetic.accumulation.itemsize
        return self.wide.compute(0, count)


def bind(execution: Execution, own: Span, peers: Mapping[int, PeerMemory]) -> Binding:
    """Bind a program to memory.

    Args:
        own: the rank's buffer; its memory must live as long as the binding is run.
        peers: the buffers of the program's partners.
    """
    return _Binder(execution, own, peers).bind()
