"""From a call to its plan: which schedule, which types, which transport, and in whose memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass

import torch

from mpiddp.collectives.compiler.lowering import Part, compile_part, find_part
from mpiddp.collectives.compiler.tiling import Cut
from mpiddp.collectives.executor import Description, Execution, Workspace
from mpiddp.collectives.operators import (
    Arithmetic,
    Operator,
    choose_accumulation,
    find_operator,
    name_type,
)
from mpiddp.collectives.plans import (
    MailboxPlan,
    MemoryPlan,
    MessagePlan,
    NoPlan,
    Parts,
    Plan,
    Stage,
)
from mpiddp.collectives.selection import BOTH, MPI, SHARED, TORCH, Call, Selection, select
from mpiddp.collectives.topology import Layout
from mpiddp.collectives.transport import Messenger
from mpiddp.collectives.transport.huge_pages import LargePages
from mpiddp.collectives.transport.node_memory import BLOCK, MAILBOX, NEXT_CALL, Neighbourhood
from mpiddp.collectives.transport.shared_memory import Segments
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective

_SUMS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
_MOVED = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""As what elements of so many bytes are moved where nothing is added."""


MOST_ANALYSES = 64
"""Schedules whose analysis is kept."""
NCCL = "torch, on GPUs"
"""The messenger of transport torch for tensors on GPUs."""


@dataclass(frozen=True, eq=False)
class Request:
    """A call as a user makes it. Plans are kept for the object, so the same call is one object."""

    call: Call
    operator: str = "sum"
    reduction_dtype: torch.dtype | None = None


class Planner:
    """Makes plans, and what they share."""

    def __init__(
        self,
        layout: Layout,
        segments: Segments,
        neighbourhood: Neighbourhood | None,
        messengers: Mapping[str, Callable[[], Messenger]],
    ) -> None:
        """``messengers``: makers of what carries messages, by transport; each is called once,
        collectively, when it is first needed."""
        self.layout = layout
        self.segments = segments
        self.neighbourhood = neighbourhood
        self._makers = messengers
        self._messengers: dict[str, Messenger] = {}
        self._stages: dict[str, Stage] = {}
        self._workspace = Workspace()
        self._pages = LargePages()
        self._parts: dict[tuple[int, bool], Part] = {}

    def close(self) -> None:
        """Give back what messengers and neighbourhood hold."""
        for messenger in self._messengers.values():
            messenger.close()
        if self.neighbourhood is not None:
            self.neighbourhood.close()

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
        part = self._find_part(selection)
        # A sum that is made at once is as exact from narrow operands; any other travels wide.
        is_wide = accumulation != dtype and not part.sums.is_single
        arithmetic = Arithmetic(
            operator,
            accumulation if is_wide else dtype,
            accumulation,
            len(selection.schedule.members),
        )
        description = Description(
            f"{call.kind.value} ({selection.name} over {selection.transport})",
            len(selection.schedule.steps),
            dict(enumerate(self.layout.hosts)),
        )
        if self._fits_mailbox(selection, tensor, arithmetic):
            assert self.neighbourhood is not None
            return MailboxPlan(
                arithmetic, tensor.numel(), signature, description, self.neighbourhood
            )
        return self._make_parts(
            selection, part, tensor.numel(), arithmetic, signature, description, dtype, on_gpu
        )

    def _find_part(self, selection: Selection) -> Part:
        """This rank's part of a schedule, which is looked at once for buffers of all lengths."""
        in_memory = selection.transport in (SHARED, BOTH)
        # The schedule is kept with its part, so that no other one can have its identity.
        key = (id(selection.schedule), in_memory)
        if key not in self._parts:
            if len(self._parts) >= MOST_ANALYSES:
                self._parts.clear()
            group = self.layout.neighbours if in_memory else (self.layout.rank,)
            self._parts[key] = find_part(selection.schedule, self.layout.rank, group)
        return self._parts[key]

    def _fits_mailbox(
        self, selection: Selection, tensor: torch.Tensor, arithmetic: Arithmetic
    ) -> bool:
        return (
            selection.transport == SHARED
            and len(selection.schedule.steps) == 1
            and selection.schedule.collective is Collective.ALL_REDUCE
            and 0 < tensor.numel() * arithmetic.dtype.itemsize <= MAILBOX
        )

    def _make_parts(
        self,
        selection: Selection,
        part: Part,
        count: int,
        arithmetic: Arithmetic,
        signature: int,
        description: Description,
        dtype: torch.dtype,
        on_gpu: bool,
    ) -> Plan:
        in_memory = selection.transport in (SHARED, BOTH)
        messenger = self.find_messenger(selection, on_gpu=on_gpu)
        cut = _find_cut(messenger, arithmetic.dtype.itemsize, in_memory)
        program = compile_part(part, count, cut)
        neighbourhood = self.neighbourhood if in_memory else None
        execution = Execution(
            program, arithmetic, signature, description, messenger, neighbourhood, self._workspace
        )
        parts = Parts(execution, self._find_stage(selection.transport), dtype)
        if part.group:
            return MemoryPlan(parts, self._pages)
        return MessagePlan(parts)

    def find_messenger(self, selection: Selection, *, on_gpu: bool) -> Messenger | None:
        """What carries the messages, made if it is new: then this is collective.

        None where there are no messages: in shared memory, and on one rank. Raises
        ConfigurationError.
        """
        if selection.transport == SHARED or self.layout.size == 1:
            return None
        name = NCCL if on_gpu else MPI if selection.transport == BOTH else selection.transport
        if name not in self._messengers:
            self._messengers[name] = self._makers[name]()
        return self._messengers[name]

    def _find_stage(self, transport: str) -> Stage:
        if transport not in self._stages:
            self._stages[transport] = Stage(None if transport == TORCH else self.segments)
        return self._stages[transport]


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
