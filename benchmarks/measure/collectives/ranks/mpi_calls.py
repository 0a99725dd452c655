"""The ranks that MPI starts: its own collectives, the plain ring, mpiddp's, and the probes.

Importing this starts MPI, unless a session has done so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mpiddp
from benchmarks.measure.baselines import mpi_collectives, plain_ring
from benchmarks.measure.collectives.ranks import inputs, messages, probes
from benchmarks.measure.collectives.ranks.calls import Buffers, CallSpec, Prepared
from benchmarks.measure.collectives.ranks.messages import Array
from benchmarks.measure.launching.worker_loop import SessionMember
from benchmarks.records import contenders
from mpiddp.collectives.bootstrap import ensure_communicator
from mpiddp.collectives.planner import CallRequest, select
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import Collective

YIELDS = "OMPI_MCA_mpi_yield_when_idle"
"""1 if Open MPI's ranks yield while they wait."""


class MpiCalls(SessionMember):
    def __init__(self, session: mpiddp.Session) -> None:
        super().__init__(session)
        self._buffers = Buffers(self._allocate)
        self._requests: dict[tuple[str, ...], CallRequest] = {}
        """Plans are kept for the object: a call is one object."""
        self._makers: dict[str, Callable[[CallSpec], Prepared]] = {
            contenders.MPI: self._prepare_mpi,
            contenders.RING: partial(self._prepare_ring, plain_ring.prepare),
            contenders.PERSISTENT: partial(self._prepare_ring, plain_ring.prepare_persistent),
            contenders.OWN: self._prepare_own,
            contenders.PREPARED: self._prepare_prepared,
            **probes.list_makers(self._comm, session.world),
        }

    def prepare(self, spec: CallSpec) -> Prepared:
        if spec.quantity == contenders.POINT_TO_POINT and spec.maker == contenders.OWN:
            barrier = self._choose_barrier(spec.transport)
            return messages.prepare_transport(spec, self.rank, barrier)
        prepare = messages.MAKERS.get(spec.quantity)
        return prepare(self._comm, spec) if prepare else self._makers[spec.maker](spec)

    def _allocate(self, spec: CallSpec) -> torch.Tensor:
        if spec.buffer == contenders.SHARED:
            return mpiddp.shared_empty(spec.count, spec.dtype)
        if spec.buffer == contenders.GPU and self._session.device.type == "cpu":
            raise ConfigurationError("not every rank has a GPU")
        device = self._session.device if spec.buffer == contenders.GPU else torch.device("cpu")
        return torch.empty(spec.count, dtype=spec.dtype, device=device)

    def _find_array(self, spec: CallSpec) -> tuple[torch.Tensor, Array]:
        if spec.dtype is torch.bfloat16:
            raise ConfigurationError("NumPy has no bfloat16")
        tensor = self._buffers.find(spec)
        return tensor, tensor.numpy()

    def _prepare_mpi(self, spec: CallSpec) -> Prepared:
        tensor, array = self._find_array(spec)
        if spec.dtype is torch.float16:
            raise ConfigurationError("MPI has no float16")
        if spec.operator and spec.operator not in mpi_collectives.OPERATORS:
            raise ConfigurationError(f"MPI has no {spec.operator}")
        arguments = (self._comm, array, spec.quantity, spec.operator or "sum")
        own = inputs.find_part(spec.count, self.rank, self.size)
        is_scattered = spec.quantity == contenders.REDUCE_SCATTER
        return Prepared(
            mpi_collectives.prepare(*arguments),
            self._comm.Barrier,
            tensor,
            part=tensor[: own.stop - own.start] if is_scattered else None,
            start=mpi_collectives.prepare_start(*arguments),
        )

    def _prepare_ring(
        self, prepare: Callable[..., plain_ring.Functions], spec: CallSpec
    ) -> Prepared:
        tensor, array = self._find_array(spec)
        if spec.operator != "sum":
            raise ConfigurationError("the plain ring only adds")
        call, free = prepare(self._comm, array)
        return Prepared(call, self._comm.Barrier, tensor, close=free, ran="ring")

    def _prepare_own(self, spec: CallSpec) -> Prepared:
        tensor, request, members = self._buffers.find(spec), self._find_request(spec), None
        options = {"algorithm": spec.algorithm, "transport": spec.transport}
        if spec.quantity in contenders.REDUCING:
            options["op"] = spec.operator
        function = getattr(mpiddp, spec.quantity.replace("-", "_"))
        call: Callable[..., Any] = partial(function, tensor, **options)
        can_start = spec.quantity == contenders.ALL_REDUCE
        if can_start and spec.algorithm != "auto":
            members = parse(spec.algorithm).build(self.size).members
            if len(members) < self.size:
                # mpiddp.all_reduce refuses what leaves ranks out; here that is measured.
                call, can_start = partial(ensure_communicator().run, request, tensor), False
        return Prepared(
            call,
            self._choose_barrier(spec.transport),
            tensor,
            members,
            ran=_describe_selection(request, tensor),
            start=(lambda: call(async_op=True).wait) if can_start else None,
            device=tensor.device if tensor.is_cuda else None,
        )

    def _find_request(self, spec: CallSpec) -> CallRequest:
        """What the call asks for; it may leave out the buffers of servers."""
        key = (spec.quantity, spec.algorithm, spec.transport, spec.operator)
        if key not in self._requests:
            kind, operator = Collective(spec.quantity), spec.operator or "sum"
            self._requests[key] = CallRequest(
                kind, spec.algorithm, spec.transport, operator=operator, allows_servers=True
            )
        return self._requests[key]

    def _prepare_prepared(self, spec: CallSpec) -> Prepared:
        tensor = self._buffers.find(spec)
        call = mpiddp.prepare_all_reduce(tensor, spec.algorithm, spec.transport, spec.operator)
        ran = _describe_selection(self._find_request(spec), tensor)
        return Prepared(call, self._choose_barrier(spec.transport), tensor, ran=ran)

    def _choose_barrier(self, transport: str) -> Callable[[], object]:
        """The barrier that goes with a transport.

        MPI's, which its own contenders stand behind, too, and which ranks leave at almost the same
        time; but not if it spins and keeps Gloo's threads, or ranks that yield or sleep, from
        their cores.
        """
        if transport == "torch":
            return torch.distributed.barrier
        policy = mpiddp.describe_collectives()["wait"]
        yields = os.environ.get(YIELDS) == "1" or transport == "mpi"
        like_mpi = policy == "spin" or (policy == "yield" and yields)
        return self._comm.Barrier if like_mpi else mpiddp.barrier

    def describe(self) -> dict[str, Any]:
        world = self._session.world
        place = {"node": world.node_rank, "local_rank": world.local_rank}
        return {**mpiddp.describe_collectives(), **place}


def _describe_selection(request: CallRequest, tensor: torch.Tensor) -> str:
    """The algorithm and the transport that mpiddp takes for a call."""
    size, layout = tensor.numel() * tensor.element_size(), ensure_communicator().layout
    found = select(request, size, layout, tensor.dtype, on_gpu=tensor.is_cuda)
    return f"{found.name} over {found.transport}"
