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
from benchmarks.baselines import mpi_all_reduce, plain_ring
from benchmarks.collectives import contenders
from benchmarks.collectives.ranks import probes
from benchmarks.collectives.ranks.calls import CallSpec, Prepared
from benchmarks.launching.worker_loop import SessionMember
from mpiddp.collectives.bootstrap import ensure_communicator
from mpiddp.collectives.planner import Request
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import Collective

YIELDS = "OMPI_MCA_mpi_yield_when_idle"
"""1 where Open MPI's ranks yield while they wait."""

Array = numpy.ndarray[Any, Any]


class MpiCalls(SessionMember):
    def __init__(self, session: mpiddp.Session) -> None:
        super().__init__(session)
        self._buffers: dict[tuple[str, str, int], torch.Tensor] = {}
        self._requests: dict[tuple[str, str], Request] = {}
        """Plans are kept for the object: a call is one object."""
        self._makers: dict[str, Callable[[CallSpec], Prepared]] = {
            contenders.MPI: self._prepare_mpi,
            contenders.RING: self._prepare_ring,
            contenders.PERSISTENT: self._prepare_persistent,
            contenders.OWN: self._prepare_own,
            contenders.PREPARED: self._prepare_prepared,
            **probes.list_makers(self._comm, session.world),
        }

    def prepare(self, spec: CallSpec) -> Prepared:
        return self._makers[spec.maker](spec)

    def _find_tensor(self, spec: CallSpec) -> torch.Tensor:
        """The buffer: the same one for all contenders that take one of its kind and size."""
        key = (spec.buffer, spec.type, spec.bytes)
        if key not in self._buffers:
            if spec.buffer == contenders.SHARED:
                self._buffers[key] = mpiddp.shared_empty(spec.count, spec.dtype)
            else:
                device = (
                    self._session.device if spec.buffer == contenders.GPU else torch.device("cpu")
                )
                if device.type == "cpu" and spec.buffer == contenders.GPU:
                    raise ConfigurationError("not every rank has a GPU")
                self._buffers[key] = torch.empty(spec.count, dtype=spec.dtype, device=device)
        return self._buffers[key]

    def _find_array(self, spec: CallSpec) -> tuple[torch.Tensor, Array]:
        if spec.dtype is torch.bfloat16:
            raise ConfigurationError("NumPy has no bfloat16")
        tensor = self._find_tensor(spec)
        return tensor, tensor.numpy()

    def _prepare_mpi(self, spec: CallSpec) -> Prepared:
        tensor, array = self._find_array(spec)
        if spec.dtype is torch.float16:
            raise ConfigurationError("MPI has no float16")
        return Prepared(mpi_all_reduce.prepare(self._comm, array), self._comm.Barrier, tensor)

    def _prepare_ring(self, spec: CallSpec) -> Prepared:
        tensor, array = self._find_array(spec)
        return Prepared(plain_ring.prepare(self._comm, array), self._comm.Barrier, tensor)

    def _prepare_persistent(self, spec: CallSpec) -> Prepared:
        tensor, array = self._find_array(spec)
        call, free = plain_ring.prepare_persistent(self._comm, array)
        return Prepared(call, self._comm.Barrier, tensor, close=free)

    def _prepare_own(self, spec: CallSpec) -> Prepared:
        tensor, members = self._find_tensor(spec), None
        if spec.algorithm != "auto":
            members = parse(spec.algorithm).build(self.size).members
        call: Callable[[], object] = partial(
            mpiddp.all_reduce, tensor, algorithm=spec.algorithm, transport=spec.transport
        )
        if members is not None and len(members) < self.size:
            # mpiddp.all_reduce refuses what leaves ranks out; here that is measured.
            key = (spec.algorithm, spec.transport)
            if key not in self._requests:
                self._requests[key] = Request(Collective.ALL_REDUCE, *key, allows_servers=True)
            call = partial(ensure_communicator().run, self._requests[key], tensor)
        if tensor.is_cuda:
            from benchmarks.collectives.ranks.torch_calls import finish_with

            call = finish_with(call)
        barrier = self._choose_barrier(spec.transport)
        return Prepared(call, barrier, tensor, members)

    def _prepare_prepared(self, spec: CallSpec) -> Prepared:
        tensor = self._find_tensor(spec)
        call = mpiddp.prepare_all_reduce(tensor, spec.algorithm, spec.transport)
        return Prepared(call, self._choose_barrier(spec.transport), tensor)

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

    def describe(self) -> dict[str, Any]:
        return dict(mpiddp.describe_collectives())
