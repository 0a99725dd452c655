"""DDP's buckets of gradients, averaged by a schedule instead of by the framework.

DDP calls a communication hook for each bucket as soon as the backward pass has filled it (Li et
al., PyTorch Distributed, VLDB 2020, section 4). The hook hands the bucket to this session's
collective calls and gives its result back.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel

from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.planner import Request
from mpiddp.collectives.registry import parse
from mpiddp.collectives.schedule import Collective
from mpiddp.collectives.selection import AUTO, BOTH, SHARED, Call, select
from mpiddp.collectives.sums import find_sums
from mpiddp.errors import ConfigurationError
from mpiddp.sync.joint import find_communicator

SHARED_MEMORY_FILES = "/dev/shm"
"""Where torch puts memory that processes share."""


@dataclass(frozen=True)
class Synchronization:
    """How gradients become one."""

    algorithm: str
    """A registered one, or ``auto``, which goes by each bucket's size."""
    transport: str = AUTO
    wire_dtype: torch.dtype | None = None
    """In which gradients travel; None for their own type. An algorithm that adds all contributions
    at once (direct, one-shot) adds them in float32; another one rounds to this type in each step,
    as else its sums would travel in float32."""
    overlap: bool = False
    """Whether the backward pass goes on meanwhile."""


class ScheduleHook:
    """Averages buckets over all ranks, in place; ``attach`` registers it with DDP."""

    def __init__(self, synchronization: Synchronization, communicator: Communicator) -> None:
        """Raises ConfigurationError for an algorithm that leaves out ranks."""
        self.overlap = synchronization.overlap
        """May be changed between two steps, on all ranks alike."""
        self._communicator = communicator
        self._wire_dtype = synchronization.wire_dtype
        _check_members(synchronization.algorithm, communicator)
        self._call = Call(
            Collective.ALL_REDUCE, synchronization.algorithm, synchronization.transport
        )
        self._request = Request(self._call, "average")
        self._narrow_requests: dict[int, Request] = {}
        """By length of a bucket."""
        self._shares = _is_in_memory(synchronization.transport, communicator)
        self._looked_at: WeakSet[torch.UntypedStorage] = WeakSet()
        self._wires: dict[tuple[int, torch.device], torch.Tensor] = {}

    def synchronize(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook; ``bucket`` is a ``torch.distributed.GradBucket``."""
        gradients = bucket.buffer()
        if self._wire_dtype is not None and self._wire_dtype != gradients.dtype:
            return self._send_narrow(gradients)
        self._share(gradients)
        return self._average(gradients, self._request)

    def _average(
        self, tensor: torch.Tensor, request: Request
    ) -> torch.futures.Future[torch.Tensor]:
        if self.overlap:
            return self._communicator.start(request, tensor)
        self._communicator.run(request, tensor)
        return _finished(tensor)

    def _send_narrow(self, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        wire = self._find_wire(gradients)
        wire.copy_(gradients)

        def widen(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return gradients.copy_(future.value())

        return self._average(wire, self._find_narrow_request(wire)).then(widen)

    def _find_narrow_request(self, wire: torch.Tensor) -> Request:
        request = self._narrow_requests.get(wire.numel())
        if request is None:
            layout, size = self._communicator.layout, wire.numel() * wire.element_size()
            schedule = select(self._call, size, layout, on_gpu=not wire.is_cpu).schedule
            adds_once = find_sums(schedule).is_single
            request = Request(self._call, "average", None if adds_once else wire.dtype)
            self._narrow_requests[wire.numel()] = request
        return request

    def _find_wire(self, gradients: torch.Tensor) -> torch.Tensor:
        """Room for a bucket; two buckets of a length have the same address never at once."""
        key = (gradients.data_ptr(), gradients.device)
        wire = self._wires.get(key)
        if wire is None or wire.numel() < gradients.numel():
            assert self._wire_dtype is not None
            if self._shares and gradients.is_cpu:
                shape = (gradients.numel(),)
                wire = self._communicator.segments.empty(shape, self._wire_dtype)
            else:
                wire = torch.empty_like(gradients, dtype=self._wire_dtype)
            self._wires[key] = wire
        return wire[: gradients.numel()]

    def _share(self, gradients: torch.Tensor) -> None:
        """Put a bucket's memory where the node's ranks can work in it, if it is not there yet.

        DDP makes new buckets after its first step, so this is asked in every one.
        """
        storage = gradients.untyped_storage()
        if not self._shares or not gradients.is_cpu or storage in self._looked_at:
            return
        self._looked_at.add(storage)
        # Twice, since what lies there now is kept until it has been copied.
        if storage.nbytes() < shutil.disk_usage(SHARED_MEMORY_FILES).free // 2:
            # torch has no type for it.
            gradients.share_memory_()  # type: ignore[no-untyped-call]
            self._communicator.segments.adopt(gradients)


# DDP compares annotations with classes; in this module they are texts.
ScheduleHook.synchronize.__annotations__ = {}


def attach(synchronization: Synchronization, model: DistributedDataParallel) -> ScheduleHook:
    """Have a model's gradients averaged that way, over the current session's ranks.

    The model must have been wrapped with ``gradient_as_bucket_view=True``, so that gradients follow
    their bucket into shared memory. Raises ConfigurationError.
    """
    hook = ScheduleHook(synchronization, find_communicator())
    model.register_comm_hook(None, hook.synchronize)
    return hook


def _check_members(algorithm: str, communicator: Communicator) -> None:
    size = communicator.layout.size
    if algorithm == AUTO or size == 1:
        return
    members = parse(algorithm).build(size).members
    if len(members) < size:
        raise ConfigurationError(
            f"{algorithm} leaves out the gradients of {size - len(members)} of {size} ranks, which "
            "only serve: use gather-broadcast"
        )


def _is_in_memory(transport: str, communicator: Communicator) -> bool:
    chosen = communicator.layout.transports[0] if transport == AUTO else transport
    return chosen in (SHARED, BOTH) and communicator.neighbourhood is not None


def _finished(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if tensor.is_cpu else [tensor.device]
    )
    future.set_result(tensor)
    return future
