"""The ranks of a launch, ready for collective calls."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

import torch

from mpiddp.collectives.compilation import Cut, compile_program
from mpiddp.collectives.executor import Description
from mpiddp.collectives.layout import Layout
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
from mpiddp.collectives.schedule import Collective
from mpiddp.collectives.selection import BOTH, MPI, SHARED, TORCH, Call, Selection, select
from mpiddp.collectives.sums import find_sums
from mpiddp.collectives.transport import Messenger
from mpiddp.collectives.transport.memory import BLOCK, MAILBOX, Neighbourhood
from mpiddp.collectives.transport.segments import Segments
from mpiddp.collectives.waiting import Waiter
from mpiddp.errors import ConfigurationError

MOST_PLANS = 256
"""Plans that are kept; the one unused longest is made anew when it is needed again."""

_SUMS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
_MOVED = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""As what elements of so many bytes are moved where nothing is added."""


@dataclass(frozen=True, eq=False)
class Request:
    """A call as a user makes it. Plans are kept for the object, so the same call is one object."""

    call: Call
    operator: str = "sum"
    reduction_dtype: torch.dtype | None = None


class Communicator:
    """Collective calls of one rank. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        layout: Layout,
        waiter: Waiter,
        segments: Segments,
        neighbourhood: Neighbourhood | None,
        messengers: Mapping[str, Callable[[], Messenger]],
        notes: tuple[str, ...] = (),
        agree: Callable[[Any, str], Any] | None = None,
    ) -> None:
        """Made by ``setup.make_communicator``.

        Args:
            messengers: makers of what carries messages, by transport; called once, collectively.
            notes: what a user should know of the transports.
            agree: compares a value between all ranks before each call, if calls are to be checked.
        """
        self.layout = layout
        self.waiter = waiter
        self.segments = segments
        self.notes = notes
        self.neighbourhood = neighbourhood
        self._makers = messengers
        self._messengers: dict[str, Messenger] = {}
        self._agree = agree
        self._calls = 0
        self._plans: dict[Hashable, Plan] = {}
        self._stages: dict[str, Stage] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._pending = 0
        self.letters: dict[Hashable, Callable[[], object]] = {}
        """Calls that were made before and depend on nothing but the own buffer, by all that tells
        them from others: they are found in one look. Empty as long as calls are compared, or others
        are under way."""
        self._lock = threading.Lock()
        self._flag = torch.zeros(1, dtype=torch.int32)

    # ---- calls ----------------------------------------------------------------------------

    def run(self, request: Request, tensor: torch.Tensor) -> torch.Tensor:
        """Make a call, in place. Raises ConfigurationError, PeerLostError."""
        key = (request, tensor.numel(), tensor.dtype, tensor.get_device())
        plan = self._plans.get(key)
        if plan is None or self._looks_twice() or not tensor.is_contiguous():
            if self._pending:
                # Behind those that were begun before.
                return self.start(request, tensor).wait()
            plan = self._prepare(key, request, tensor)
        plan.run(tensor)
        return tensor

    def _looks_twice(self) -> bool:
        return self._agree is not None or self._pending > 0

    def remember(self, request: Request, tensor: torch.Tensor, key: Hashable) -> None:
        """Have a call that was just made found under ``key`` in ``letters``."""
        plan = self._plans.get(_key(request, tensor))
        if plan is not None and plan.is_letter and not self._looks_twice():
            if len(self.letters) >= MOST_PLANS:
                self.letters.clear()
            self.letters[key] = plan.prepare(tensor)

    def prepare(self, request: Request, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What makes a call on this tensor, as often as it is called."""
        plan = self._prepare(_key(request, tensor), request, tensor)
        call = plan.prepare(tensor)

        def make_call() -> torch.Tensor:
            if self._looks_twice():
                return self.run(request, tensor)
            call()
            return tensor

        return make_call

    def start(self, request: Request, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin a call; its future has the tensor once it is done.

        On a GPU the call is queued on the current stream, as every other; on the CPU a thread
        makes such calls in the order in which they were begun.
        """
        if tensor.device.type != "cpu":
            queued: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=[tensor.device]
            )
            queued.set_result(self.run(request, tensor))
            return queued
        plan = self._prepare(_key(request, tensor), request, tensor)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "mpiddp-collectives")
            self._pending += 1
            self.letters = {}
        self._worker.submit(self._work, plan, tensor, future)
        return future

    def _work(
        self, plan: Plan, tensor: torch.Tensor, future: torch.futures.Future[torch.Tensor]
    ) -> None:
        try:
            plan.run(tensor)
        except BaseException as error:
            self._count_down()
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            self._count_down()
            future.set_result(tensor)

    def _count_down(self) -> None:
        with self._lock:
            self._pending -= 1

    def barrier(self) -> None:
        """Return once every rank has come. Raises PeerLostError."""
        self.run(_BARRIER, self._flag)

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank owns in a reduce-scatter or an all-gather: a view of the flat tensor.

        Rank r of n owns elements ⌊r·count/n⌋ to ⌊(r+1)·count/n⌋.
        """
        rank, size, count = self.layout.rank, self.layout.size, tensor.numel()
        return tensor.view(-1)[count * rank // size : count * (rank + 1) // size]

    def close(self) -> None:
        """Wait for calls that were begun; give back requests and memory. Collective."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self.letters.clear()
        self._plans.clear()
        for messenger in self._messengers.values():
            messenger.close()
        if self.neighbourhood is not None:
            self.neighbourhood.close()

    # ---- preparation ----------------------------------------------------------------------

    def _prepare(self, key: Hashable, request: Request, tensor: torch.Tensor) -> Plan:
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ConfigurationError(
                f"expected a contiguous tensor, found one of shape {tuple(tensor.shape)} and "
                f"{_describe_layout(tensor)}: call .contiguous() first"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ConfigurationError(f"expected a CPU or CUDA tensor, found {tensor.device}")
        if self._agree is not None:
            self._calls += 1
            self._agree(
                (
                    self._calls,
                    astuple(request),
                    tensor.numel(),
                    name_type(tensor.dtype),
                    tensor.device.type,
                ),
                "the collective call",
            )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(request, tensor)
            if len(self._plans) >= MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
        return plan

    def _make(self, request: Request, tensor: torch.Tensor) -> Plan:
        call, dtype = request.call, tensor.dtype
        if call.kind in _SUMS:
            operator = find_operator(request.operator)
            accumulation = choose_accumulation(operator, dtype, request.reduction_dtype)
        else:
            operator, dtype = Operator.SUM, _find_moved(dtype)
            accumulation = dtype
        on_gpu = tensor.device.type != "cpu"
        size = tensor.numel() * accumulation.itemsize
        selection = select(call, size, self.layout, on_gpu=on_gpu)
        if self.layout.size == 1:
            return NoPlan()
        signature = _sign(request, selection, tensor)
        sums = find_sums(selection.schedule)
        # A sum that is made at once is as exact from narrow operands; any other travels wide.
        is_wide = accumulation != dtype and not sums.is_single
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
            selection, tensor.numel(), arithmetic, signature, description, dtype
        )

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
        count: int,
        arithmetic: Arithmetic,
        signature: int,
        description: Description,
        dtype: torch.dtype,
    ) -> Plan:
        in_memory = selection.transport in (SHARED, BOTH)
        messenger = None
        if selection.transport != SHARED:
            messenger = self._find_messenger(MPI if in_memory else selection.transport)
        group = self.layout.neighbours if in_memory else (self.layout.rank,)
        program = compile_program(
            selection.schedule,
            self.layout.rank,
            count,
            group,
            _find_cut(messenger, arithmetic.dtype.itemsize, in_memory),
        )
        parts = Parts(
            program, arithmetic, signature, description, self._find_stage(selection.transport),
            dtype, messenger, self.neighbourhood if in_memory else None,
        )  # fmt: skip
        if in_memory and len(group) > 1:
            return MemoryPlan(parts)
        return MessagePlan(parts)

    def _find_messenger(self, transport: str) -> Messenger:
        if transport not in self._messengers:
            self._messengers[transport] = self._makers[transport]()
        return self._messengers[transport]

    def _find_stage(self, transport: str) -> Stage:
        if transport not in self._stages:
            self._stages[transport] = Stage(None if transport == TORCH else self.segments)
        return self._stages[transport]


_BARRIER = Request(Call(Collective.ALL_REDUCE), "max")


def _key(request: Request, tensor: torch.Tensor) -> Hashable:
    return (request, tensor.numel(), tensor.dtype, tensor.get_device())


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


def _describe_layout(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}"
    return f"strides {tensor.stride()}"


def _sign(request: Request, selection: Selection, tensor: torch.Tensor) -> int:
    """32 bits that differ where calls do; the same in all processes."""
    text = repr(
        (astuple(request), selection.name, selection.transport, tensor.numel(), tensor.dtype)
    )
    return zlib.crc32(text.encode())
