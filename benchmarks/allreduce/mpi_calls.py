"""The ranks that MPI starts: its own all-reduce, the plain ring, mpiddp's, and the probes.

Importing this starts MPI, unless a session has done so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch

import mpiddp
from benchmarks.allreduce import contenders, probes
from benchmarks.allreduce.calls import Order, Prepared
from benchmarks.baselines import mpi_all_reduce, plain_ring
from benchmarks.launching.members import SessionMember
from mpiddp.collectives.bootstrap import find_communicator
from mpiddp.collectives.planner import Request
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import Collective

YIELDS = "OMPI_MCA_mpi_yield_when_idle"
"""1 where Open MPI's ranks yield while they wait."""

Array = numpy.ndarray[Any, Any]


class MpiCalls(SessionMember):
    """A rank of a session."""

    def __init__(self, session: mpiddp.Session) -> None:
        super().__init__(session)
        self._buffers: dict[tuple[str, str, int], torch.Tensor] = {}
        self._makers: dict[str, Callable[[Order], Prepared]] = {
            contenders.MPI: self._prepare_mpi,
            contenders.RING: self._prepare_ring,
            contenders.PERSISTENT: self._prepare_persistent,
            contenders.OWN: self._prepare_own,
            contenders.PREPARED: self._prepare_prepared,
            **probes.list_makers(self._comm, session.world),
        }

    def prepare(self, order: Order) -> Prepared:
        return self._makers[order.maker](order)

    def _find_tensor(self, order: Order) -> torch.Tensor:
        """The buffer: the same one for all contenders that take one of its kind and size."""
        key = (order.buffer, order.type, order.bytes)
        if key not in self._buffers:
            if order.buffer == contenders.SHARED:
                self._buffers[key] = mpiddp.shared_empty(order.count, order.dtype)
            else:
                device = (
                    self._session.device if order.buffer == contenders.GPU else torch.device("cpu")
                )
                if device.type == "cpu" and order.buffer == contenders.GPU:
                    raise ConfigurationError("not every rank has a GPU")
                self._buffers[key] = torch.empty(order.count, dtype=order.dtype, device=device)
        return self._buffers[key]

    def _find_array(self, order: Order) -> tuple[torch.Tensor, Array]:
        if order.dtype is torch.bfloat16:
            raise ConfigurationError("NumPy has no bfloat16")
        tensor = self._find_tensor(order)
        return tensor, tensor.numpy()

    def _prepare_mpi(self, order: Order) -> Prepared:
        tensor, array = self._find_array(order)
        if order.dtype is torch.float16:
            raise ConfigurationError("MPI has no float16")
        return Prepared(mpi_all_reduce.prepare(self._comm, array), self._comm.Barrier, tensor)

    def _prepare_ring(self, order: Order) -> Prepared:
        tensor, array = self._find_array(order)
        return Prepared(plain_ring.prepare(self._comm, array), self._comm.Barrier, tensor)

    def _prepare_persistent(self, order: Order) -> Prepared:
        tensor, array = self._find_array(order)
        call, free = plain_ring.prepare_persistent(self._comm, array)
        return Prepared(call, self._comm.Barrier, tensor, close=free)

    def _prepare_own(self, order: Order) -> Prepared:
        tensor, members = self._find_tensor(order), self._find_members(order.algorithm)
        call: Callable[[], object] = partial(
            mpiddp.all_reduce, tensor, algorithm=order.algorithm, transport=order.transport
        )
        if members is not None and len(members) < self.size:
            # mpiddp.all_reduce refuses what leaves ranks out; here that is measured.
            wish = Request(
                Collective.ALL_REDUCE, order.algorithm, order.transport, allows_servers=True
            )
            call = partial(find_communicator().run, wish, tensor)
        if tensor.is_cuda:
            from benchmarks.allreduce.torch_calls import finish_with

            call = finish_with(call)
        barrier = self._choose_barrier(order.transport)
        return Prepared(call, barrier, tensor, members)

    def _prepare_prepared(self, order: Order) -> Prepared:
        tensor = self._find_tensor(order)
        call = mpiddp.prepare_all_reduce(tensor, order.algorithm, order.transport)
        return Prepared(call, self._choose_barrier(order.transport), tensor)

    def _choose_barrier(self, transport: str) -> Callable[[], object]:
        """The barrier that goes with a transport.

        MPI's, which its own contenders stand behind, too, and which ranks leave at almost the same
        time; but not where it spins and keeps Gloo's threads, or ranks that yield or sleep, from
        their cores.
        """
        if transport == "torch":
            return torch.distributed.barrier
        policy = mpiddp.describe_collectives()["wait"]
        yields = os.environ.get(YIELDS) == "1" or transport == "mpi"
        like_mpi = policy == "spin" or (policy == "yield" and yields)
        return self._comm.Barrier if like_mpi else mpiddp.barrier

    def _find_members(self, algorithm: str) -> tuple[int, ...] | None:
        """Whose buffers are summed: not a dedicated server's."""
        return None if algorithm == "auto" else parse(algorithm).build(self.size).members

    def describe(self) -> dict[str, Any]:
        return dict(mpiddp.describe_collectives())
