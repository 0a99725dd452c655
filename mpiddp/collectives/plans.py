"""What one kind of call has prepared, for buffers of one length and type.

A plan has the rank's program, and binds it to the buffers that it meets. Where a buffer cannot be
used as it is (a type that is too narrow to be added in, memory that no peer can reach), the
plan works in a stage beside it, which all plans share.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from mpiddp.collectives.executor import (
    MOST_BINDINGS,
    Binding,
    Bindings,
    Description,
    Execution,
    allocate,
    bind,
)
from mpiddp.collectives.operators import Action, Arithmetic, Span, convert, copy, make_span
from mpiddp.collectives.transport.huge_pages import LargePages
from mpiddp.collectives.transport.node_memory import (
    PRIVATE,
    SHARED,
    Location,
    Neighbourhood,
)
from mpiddp.collectives.transport.shared_memory import Segments, view_of

MOST_LETTERS = 64
"""Buffers that a mailbox plan knows at a time."""


class Plan(Protocol):
    """A prepared call."""

    def run(self, tensor: torch.Tensor) -> None:
        """Make the call on a contiguous tensor of the plan's length and type, in place."""

    def prepare(self, tensor: torch.Tensor) -> Action:
        """What makes the call on such a tensor, as long as the tensor lives."""

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """What makes the call on any tensor that lies where this one does; keeps none alive."""


Shortcut = Callable[[torch.Tensor], object]


class NoPlan:
    """One rank alone: its buffer is the result."""

    def run(self, tensor: torch.Tensor) -> None:
        """Nothing to do."""

    def prepare(self, tensor: torch.Tensor) -> Action:
        """Nothing to do, later."""
        return partial(self.run, tensor)

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """Nothing to do, quickly."""
        return self.run


class Stage:
    """Memory beside the buffers, as long as the longest that was needed; zeros at first."""

    def __init__(self, segments: Segments | None) -> None:
        """In a segment that peers can map, or in private memory."""
        self._segments = segments or Segments()
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._on_gpus: dict[tuple[int, int], torch.Tensor] = {}
        """By device and stream: calls on two streams work at the same time."""

    def find(self, count: int, dtype: torch.dtype, like: Span) -> Span:
        """Room for ``count`` elements; what was there before may be lost."""
        size = count * dtype.itemsize
        if isinstance(like.memory, torch.Tensor):
            return self._find_on_gpu(size, dtype, like.memory)
        if self._memory is None or size > self._size:
            self._memory = self._segments.allocate(size)
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
class Parts:
    """What plans that run a program are made of."""

    execution: Execution
    stage: Stage
    """Where it works if not in the buffers themselves."""
    dtype: torch.dtype
    """As what the elements of the buffers are seen."""

    @property
    def work_type(self) -> torch.dtype:
        """Of what is added and sent."""
        return self.execution.arithmetic.dtype

    @property
    def is_wide(self) -> bool:
        """Whether it works in a wider type than the buffers have."""
        return self.work_type != self.dtype

    @property
    def count(self) -> int:
        """Elements of a buffer."""
        return self.execution.program.count

    def find_stage(self, buffer: Span) -> Span:
        """The stage, as long as the program needs it."""
        return self.stage.find(self.count, self.work_type, buffer)


@dataclass
class MessagePlan:
    """Messages alone."""

    parts: Parts
    bindings: Bindings = field(default_factory=Bindings)

    def run(self, tensor: torch.Tensor) -> None:
        """See ``Plan``."""
        self._find(tensor).run()

    def prepare(self, tensor: torch.Tensor) -> Action:
        """See ``Plan``."""
        return self._find(tensor).run

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """See ``Plan``; a binding by itself would outlive its place among the last ones."""
        return self.run

    def _find(self, tensor: torch.Tensor) -> Binding:
        # Calls on two streams of a GPU may not share their scratch space.
        stream = None if tensor.is_cpu else torch.cuda.current_stream(tensor.device).cuda_stream
        return self.bindings.find((tensor.data_ptr(), stream), lambda: self._bind(tensor))

    def _bind(self, tensor: torch.Tensor) -> Binding:
        parts = self.parts
        buffer = make_span(tensor, parts.dtype)
        if not parts.is_wide:
            return bind(parts.execution, buffer, {})
        stage, count = parts.find_stage(buffer), parts.count
        put, get = convert(stage, buffer, count), convert(buffer, stage, count)
        return bind(parts.execution, stage, {}).between(put, get)


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
    """The last call, so that the next one on the same buffers finds its binding at once."""

    address: int
    segments: object
    """All segments of this process: another object where one of them has come or gone."""
    location: Location
    versions: tuple[int, ...]
    """Of the partners' locations."""
    binding: Binding


@dataclass
class MemoryPlan:
    """Work in the memory of the peers on this node; messages to the others, if there are any."""

    parts: Parts
    pages: LargePages
    """Of all plans."""
    bindings: Bindings = field(default_factory=Bindings)

    _stagings: dict[int, _Staging] = field(default_factory=dict)
    """By address of the buffer."""
    _last: _Last | None = None

    @property
    def _neighbourhood(self) -> Neighbourhood:
        neighbourhood = self.parts.execution.neighbourhood
        assert neighbourhood is not None
        return neighbourhood

    def run(self, tensor: torch.Tensor) -> None:
        """See ``Plan``."""
        address, last, neighbourhood = tensor.data_ptr(), self._last, self._neighbourhood
        if (
            last is not None
            and last.address == address
            and last.segments is neighbourhood.segments.own
        ):
            if last.location.kind == PRIVATE:
                self.pages.visit(tensor)
            self._run_at(last.location, tensor, address)
            return
        place = neighbourhood.segments.find(address, tensor.numel() * tensor.element_size())
        if self.parts.is_wide or (place is None and not neighbourhood.can_copy):
            self._run_staged(tensor)
        elif place is None:
            self.pages.visit(tensor)
            self._run_at(Location(PRIVATE, address), tensor, address)
        else:
            self._run_at(Location(SHARED, *place), tensor, address)

    def prepare(self, tensor: torch.Tensor) -> Action:
        """See ``Plan``."""
        return partial(self.run, tensor)

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """See ``Plan``."""
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
        parts = self.parts
        count, buffer = parts.count, make_span(tensor, parts.dtype)
        stage = parts.find_stage(buffer)
        size = count * stage.dtype.itemsize
        place = self._neighbourhood.segments.find(stage.address, size)
        assert place is not None, "the stage of shared memory lies in a segment"
        location = Location(SHARED, *place)
        put, get = convert(stage, buffer, count), convert(buffer, stage, count)
        return _Staging(stage, location, put, get)

    def _run_at(self, location: Location, memory: torch.Tensor | Span, address: int) -> None:
        """``address``: of the caller's buffer, if that is what is worked in, or NOWHERE."""
        execution, neighbourhood = self.parts.execution, self._neighbourhood
        partners = execution.program.partners
        neighbourhood.enter(execution.signature, location)
        neighbourhood.meet(partners, execution.signature, self._describe)
        versions = neighbourhood.versions(partners)
        last = self._last
        if last is None or last.location is not location or last.versions != versions:
            key = (location, tuple(map(neighbourhood.location, partners)))
            binding = self.bindings.find(key, lambda: self._bind(memory, key[1]))
            last = _Last(address, neighbourhood.segments.own, location, versions, binding)
            self._last = last
        last.binding.run()

    def _describe(self, rank: int) -> str:
        return self.parts.execution.description.wait(0, rank)

    def _bind(self, memory: torch.Tensor | Span, locations: tuple[Location, ...]) -> Binding:
        parts, neighbourhood = self.parts, self._neighbourhood
        own = memory if isinstance(memory, Span) else make_span(memory, parts.dtype)
        peers = {
            rank: neighbourhood.resolver.find_memory(rank, location, parts.count, parts.work_type)
            for rank, location in zip(parts.execution.program.partners, locations, strict=True)
        }
        return bind(parts.execution, own, peers)


class MailboxPlan:
    """One-shot for small buffers on one node: all put theirs into a mailbox, all add all of them.

    A rank that puts its next letter into the other one of its two mailboxes has seen all others
    begin the call before, so nobody still reads from it: no rank waits at the end of a call.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        count: int,
        signature: int,
        description: Description,
        neighbourhood: Neighbourhood,
    ) -> None:
        self._arithmetic = arithmetic
        self._count = count
        self._signature = signature
        self._description = description
        self._neighbourhood = neighbourhood
        self._bindings: dict[int, Callable[..., None]] = {}
        """For each buffer, by its address, the call on it."""

    def run(self, tensor: torch.Tensor) -> None:
        """See ``Plan``."""
        self.prepare(tensor)()

    def find_shortcut(self, tensor: torch.Tensor) -> Shortcut:
        """See ``Plan``."""
        return self.prepare(tensor)

    def prepare(self, tensor: torch.Tensor) -> Callable[..., None]:
        """The call on this tensor's memory."""
        call = self._bindings.get(tensor.data_ptr())
        if call is None:
            if len(self._bindings) >= MOST_LETTERS:
                self._bindings.clear()
            call = self._bindings[tensor.data_ptr()] = self._bind(make_span(tensor))
        return call

    def _describe(self, rank: int) -> str:
        return self._description.wait(0, rank)

    def _bind(self, own: Span) -> Callable[..., None]:
        (put, add), (put_too, add_too) = (self._bind_box(own, parity) for parity in (0, 1))
        return self._neighbourhood.exchange(
            self._signature, (put, put_too), (add, add_too), self._describe
        )

    def _bind_box(self, own: Span, parity: int) -> tuple[Action, list[Action]]:
        neighbourhood, count, dtype = self._neighbourhood, self._count, self._arithmetic.dtype
        boxes = {
            rank: neighbourhood.mailbox(rank, parity, count, dtype) for rank in neighbourhood.ranks
        }
        put = copy(boxes[neighbourhood.rank].move(0, count), own.move(0, count))
        workspace = None
        if self._arithmetic.widens:
            workspace = allocate(count, self._arithmetic.accumulation, own).compute(0, count)
        views = [box.compute(0, count) for box in boxes.values()]
        out = own.compute(0, count)
        return put, self._arithmetic.reduce(out, views, None, True, workspace)
