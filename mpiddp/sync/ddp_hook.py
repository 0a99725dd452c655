"""Averages DDP's buckets of gradients by a schedule instead of torch.distributed.

DDP calls a communication hook for each bucket as soon as the backward pass has filled it (Li et
al., PyTorch Distributed, VLDB 2020, section 4). The hook hands the bucket to this session's
collective calls and gives its result back.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from mpiddp.checkpoints.ddp_buckets import list_sparse
from mpiddp.collectives import AUTO, BOTH, SHARED, TORCH
from mpiddp.collectives.bootstrap import ensure_communicator
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.planner import CallRequest, Selection, select
from mpiddp.collectives.transport.operators import Operator, choose_accumulation
from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import current_session
from mpiddp.process.memory_limits import find_shortage
from mpiddp.schedules.proof import find_sums
from mpiddp.schedules.schedule import Collective

SHARED_MEMORY_FILES = "/dev/shm"
"""The directory of torch's shared memory."""
MOST_CALLS = 1024
"""Whose times are kept: more than a model's buckets. Nobody asks a script's hook for them."""
Moment: TypeAlias = "float | torch.cuda.Event"
"""Of time.perf_counter; on a GPU an event in the current stream, since calls are only queued."""


@dataclass(frozen=True)
class Synchronization:
    algorithm: str
    """A registered one, or ``auto``, which goes by each bucket's size."""
    transport: str = AUTO
    wire_dtype: torch.dtype | None = None
    """The type in which gradients travel; None for their own. An algorithm that adds all
    contributions at once (direct, one-shot) adds them in float32; other algorithms round to this
    type in each step, since otherwise their sums would travel in float32."""
    overlap: bool = False
    """Whether gradients travel during the backward pass."""


@dataclass
class Exchange:
    """What a rank has sent of gradients."""

    sent_bytes: int = 0
    """As the schedules say."""
    blocked: deque[tuple[Moment, Moment]] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))
    """Begin and end of the last calls that the backward pass waited for."""
    first_start: Moment | None = None
    """When the first call began that runs beside the backward pass."""


def record_event() -> torch.cuda.Event:
    """A moment of the current stream, which nothing waits for."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class ScheduleHook:
    """Averages buckets over all ranks, in place; ``attach`` registers it with DDP."""

    def __init__(
        self, synchronization: Synchronization, communicator: Communicator, *, on_gpu: bool
    ) -> None:
        """Collective. Raises ConfigurationError for what is not possible here, ScheduleError for an
        algorithm that is no all-reduce.
        """
        self._communicator = communicator
        self._read_clock: Callable[[], Moment] = record_event if on_gpu else time.perf_counter
        self.can_overlap = on_gpu or communicator.is_concurrent
        """Whether calls can run beside the backward pass."""
        self.overlap = synchronization.overlap and self.can_overlap
        """May be changed between two steps, on all ranks alike."""
        self._wire_dtype = synchronization.wire_dtype
        self._request = CallRequest(
            Collective.ALL_REDUCE,
            synchronization.algorithm,
            synchronization.transport,
            operator="average",
        )
        selection = communicator.planner.select(self._request, 0, on_gpu=on_gpu)
        self.algorithm = selection.name
        transports = [selection.transport]
        if self._request.is_open:
            # A tuning table may choose others for some sizes; the rule decides on the rest.
            transports += communicator.layout.tuning.list_transports(Collective.ALL_REDUCE)
            by_nccl = on_gpu and communicator.layout.has_nccl
            transports += [TORCH if by_nccl else communicator.layout.transports[0]]
        for transport in dict.fromkeys(transports):
            each = replace(selection, transport=transport)
            communicator.planner.ensure_messenger(each, on_gpu=on_gpu)
        self._narrow_requests: dict[int, CallRequest] = {}
        """By length of a bucket."""
        in_memory = any(transport in (SHARED, BOTH) for transport in transports)
        self._shares = in_memory and communicator.node_memory is not None and not on_gpu
        self._uses: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        """How often each bucket's storage came: up to 2."""
        self._wires: WeakKeyDictionary[torch.UntypedStorage, torch.Tensor] = WeakKeyDictionary()
        """For each bucket's storage, a buffer of the narrower type."""
        self._exchange = Exchange()
        self._sizes: dict[tuple[int, torch.dtype], int] = {}
        """Bytes that this rank sends for a bucket of so many elements."""

    def take_exchange(self) -> Exchange:
        """What was sent since the last call of this."""
        exchange, self._exchange = self._exchange, Exchange()
        return exchange

    def choose_overlap(self, overlap: bool) -> None:
        """From the next backward pass on."""
        self.overlap = overlap

    def _select(self, count: int, like: torch.Tensor) -> Selection:
        """What averages ``count`` elements of a tensor's type."""
        size, layout = count * like.element_size(), self._communicator.layout
        return select(self._request, size, layout, like.dtype, on_gpu=not like.is_cpu)

    def synchronize(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook; ``bucket`` is a ``torch.distributed.GradBucket``."""
        gradients = bucket.buffer()
        if self._wire_dtype is not None and self._wire_dtype != gradients.dtype:
            return self._send_narrow(gradients)
        self._share(gradients)
        return self._average(gradients, self._request)

    def average(self, tensor: torch.Tensor) -> int:
        """Average a tensor that is no bucket, in place; returns the bytes that this rank sends.

        Collective.
        """
        self._share(tensor)
        self._communicator.run(self._request, tensor)
        return self._count_bytes(tensor)

    def _average(
        self, tensor: torch.Tensor, request: CallRequest
    ) -> torch.futures.Future[torch.Tensor]:
        exchange = self._exchange
        exchange.sent_bytes += self._count_bytes(tensor)
        begin = self._read_clock()
        if self.overlap:
            exchange.first_start = exchange.first_start or begin
            return self._communicator.start(request, tensor)
        self._communicator.run(request, tensor)
        exchange.blocked.append((begin, self._read_clock()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if tensor.is_cpu else [tensor.device]
        )
        future.set_result(tensor)
        return future

    def _count_bytes(self, tensor: torch.Tensor) -> int:
        key = (tensor.numel(), tensor.dtype)
        found = self._sizes.get(key)
        if found is None:
            item = tensor.element_size()
            schedule = self._select(key[0], tensor).schedule
            bounds, rank = schedule.bounds(key[0]), self._communicator.layout.rank
            sent = (each for step in schedule.steps for each in step if each.src == rank)
            found = item * sum(bounds[each.hi] - bounds[each.lo] for each in sent)
            self._sizes[key] = found
        return found

    def _send_narrow(self, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        wire = self._find_wire(gradients)
        wire.copy_(gradients)

        def widen(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return gradients.copy_(future.value())

        return self._average(wire, self._find_narrow_request(wire)).then(widen)

    def _find_narrow_request(self, wire: torch.Tensor) -> CallRequest:
        request = self._narrow_requests.get(wire.numel())
        if request is None:
            adds_once = find_sums(self._select(wire.numel(), wire).schedule).is_single
            request = replace(self._request, reduction_dtype=None if adds_once else wire.dtype)
            self._narrow_requests[wire.numel()] = request
        return request

    def _find_wire(self, gradients: torch.Tensor) -> torch.Tensor:
        storage = gradients.untyped_storage()
        wire = self._wires.get(storage)
        if wire is None:
            assert self._wire_dtype is not None
            if self._shares:
                shape = (gradients.numel(),)
                wire = self._communicator.shared_memory.empty(shape, self._wire_dtype)
            else:
                wire = torch.empty_like(gradients, dtype=self._wire_dtype)
            self._wires[storage] = wire
        return wire

    def _share(self, gradients: torch.Tensor) -> None:
        """Move a bucket that comes a second time to memory that the node's ranks share.

        DDP makes new buckets after its first step, and a rank that has joined (``model.join()``)
        has new ones in each call: those never come again. Each rank decides for itself, since only
        it knows which bucket is new: a call works in shared and in private memory at once.
        """
        storage = gradients.untyped_storage()
        if not self._shares or (uses := self._uses.get(storage, 0)) > 1:
            return
        self._uses[storage] = uses + 1
        if uses == 0:
            return
        # Room for all ranks, which allocate at about the same time; twice, since the old memory is
        # kept until it has been copied.
        size = len(self._communicator.layout.neighbours) * storage.nbytes()
        if 2 * size >= shutil.disk_usage(SHARED_MEMORY_FILES).free or find_shortage(size):
            return
        try:
            # torch has no type for it.
            gradients.share_memory_()
        except (RuntimeError, OSError):
            # Another program has taken the room; the gradients are where they were.
            return
        self._communicator.shared_memory.adopt(gradients)


# DDP compares annotations with classes; in this module they are texts.
ScheduleHook.synchronize.__annotations__ = {}


def attach(synchronization: Synchronization, model: DistributedDataParallel) -> ScheduleHook:
    """Have a model's gradients averaged that way, over the current session's ranks.

    What carries the gradients is made here. Collective. Raises ConfigurationError, ScheduleError.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"expected a model in DistributedDataParallel, found {type(model).__name__}"
        )
    communicator = ensure_communicator()
    ranks = model.process_group.size()
    if ranks != communicator.layout.size:
        raise ConfigurationError(
            f"the model's process group has {ranks} ranks, and the session "
            f"{communicator.layout.size}: mpiddp averages gradients over all ranks"
        )
    for name in list_sparse(model.module):
        raise ConfigurationError(
            f"parameter {name}: expected dense gradients, found an embedding with sparse=True: "
            "make it with sparse=False, or leave the gradients to torch.distributed"
        )
    on_gpu = next(model.parameters()).is_cuda
    hook = ScheduleHook(synchronization, communicator, on_gpu=on_gpu)
    current_session().agree(hook.algorithm, "the algorithm")
    try:
        model.register_comm_hook(None, hook.synchronize)
    except RuntimeError as error:
        raise ConfigurationError(f"the model takes no communication hook: {error}") from None
    return hook


def register_comm_hook(
    model: DistributedDataParallel,
    algorithm: str = "auto",
    transport: str = "auto",
    wire_dtype: torch.dtype | None = None,
    *,
    overlap: bool = False,
) -> DistributedDataParallel:
    """Have mpiddp average a DDP model's gradients, instead of torch.distributed; returns the model.

    Collective: every rank calls it, once for each model, after ``mpiddp.init()`` or in a script
    that ``python -m mpiddp`` started. Gradients are averaged over all ranks of the session:

        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        mpiddp.register_comm_hook(model)

    With ``gradient_as_bucket_view=True`` DDP makes no copy of the gradients. Within
    ``model.join()`` a rank that has no more samples counts with gradients of zero: sums are always
    divided by the number of all ranks.

    Args:
        model: wrapped in ``torch.nn.parallel.DistributedDataParallel`` over the default group.
        algorithm: as in ``all_reduce``; ``auto`` goes by the size of each bucket.
        transport: as in ``all_reduce``.
        wire_dtype: the type in which gradients travel, for example ``torch.bfloat16``; None for
            their own.
        overlap: whether gradients travel during the backward pass; which is quicker depends on the
            machine. Without effect on CPUs if MPI has less than MPI_THREAD_MULTIPLE.

    Raises:
        ConfigurationError: no DDP model, one over other ranks than the session's, with a hook of
            its own or with sparse gradients; an algorithm or a transport that is not possible here.
        ScheduleError: the algorithm is no all-reduce.
    """
    if not isinstance(wire_dtype, torch.dtype | None):
        raise ConfigurationError(f"wire_dtype: expected a torch type, found {wire_dtype!r}")
    if wire_dtype is not None:
        # Refused here, not in a backward pass.
        choose_accumulation(Operator.AVERAGE, wire_dtype, None)
    attach(Synchronization(algorithm, transport, wire_dtype, overlap), model)
    return model
