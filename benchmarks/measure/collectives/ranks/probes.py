"""What the machine itself can do, timed in the ranks as if it were a contender."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from mpi4py import MPI

from benchmarks.measure.collectives.ranks.calls import CallSpec, Prepared, do_nothing
from benchmarks.measure.collectives.ranks.messages import Array, make_round_trip
from benchmarks.records.contenders import (
    COPIES,
    COPY_MEMMOVE,
    COPY_NUMPY,
    COPY_TORCH,
    EMPTY,
    LINK,
    PEER_READ,
)
from mpiddp.errors import ConfigurationError
from mpiddp.launch.mpi.world import World


def list_makers(comm: MPI.Intracomm, world: World) -> dict[str, Callable[[CallSpec], Prepared]]:
    return {
        **{name: partial(prepare_copy, comm) for name in COPIES},
        PEER_READ: partial(prepare_peer_read, comm, world),
        LINK: partial(prepare_link, comm, world),
        EMPTY: lambda spec: Prepared(do_nothing, do_nothing),
    }


def prepare_copy(comm: MPI.Intracomm, spec: CallSpec) -> Prepared:
    """Read and write so many bytes, all ranks at once."""
    source, target = (numpy.ones(spec.bytes, numpy.uint8) for _ in range(2))
    # Pointers of this kind keep the arrays alive, which addresses do not.
    to, of = (each.ctypes.data_as(ctypes.c_void_p) for each in (target, source))
    copies: dict[str, Callable[[], object]] = {
        COPY_NUMPY: partial(numpy.copyto, target, source),
        COPY_TORCH: partial(torch.from_numpy(target).copy_, torch.from_numpy(source)),
        COPY_MEMMOVE: partial(ctypes.memmove, to, of, source.nbytes),
    }
    return Prepared(copies[spec.maker], comm.Barrier)


def prepare_peer_read(comm: MPI.Intracomm, world: World, spec: CallSpec) -> Prepared:
    """Local rank 0 writes, local rank 1 copies what was written; the other ranks do nothing."""
    if world.local_size < 2:
        raise ConfigurationError("there is one rank per node")
    node: Any = comm.Split(world.node_rank, world.local_rank)
    window = MPI.Win.Allocate_shared(spec.bytes if world.local_rank == 0 else 0, comm=node)
    shared: Any = window.Shared_query(0)[0]
    memory: Array = numpy.frombuffer(shared, numpy.uint8)
    own = numpy.ones(spec.bytes, numpy.uint8)
    reads, writes = world.local_rank == 1, world.local_rank == 0

    def meet() -> None:
        comm.Barrier()  # No rank still reads.
        if writes:
            memory[:] = own
        comm.Barrier()

    def read() -> None:
        if reads:
            numpy.copyto(own, memory)

    def free() -> None:
        window.Free()
        node.Free()

    return Prepared(read, meet, close=free)


def prepare_link(comm: MPI.Intracomm, world: World, spec: CallSpec) -> Prepared:
    """Rank 0 sends to the first rank of the next node, and waits for an answer."""
    nodes = comm.allgather(world.node_rank)
    if 1 not in nodes:
        raise ConfigurationError("there is one node")
    other = nodes.index(1)
    memory, word = numpy.ones(spec.bytes, numpy.uint8), numpy.zeros(1, numpy.uint8)
    return make_round_trip(comm, world.rank, 0, other, memory, word)
