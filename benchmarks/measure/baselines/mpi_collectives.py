"""The MPI library's own collectives, in place, on the memory itself; rank 0 is the root."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
from mpi4py import MPI

Array = numpy.ndarray[Any, Any]
OPERATORS = {"sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


def prepare(
    comm: MPI.Intracomm, buffer: Array, quantity: str = "all-reduce", operator: str = "sum"
) -> Callable[[], None]:
    """A function that makes the collective on ``buffer``, over all ranks.

    After a reduce-scatter a rank's part stands at the beginning of its buffer.
    """
    call, _ = _list_calls(comm)[quantity]
    return partial(call, *_list_arguments(comm, buffer, quantity, operator))


def prepare_start(
    comm: MPI.Intracomm, buffer: Array, quantity: str, operator: str
) -> Callable[[], Callable[[], object]]:
    """A function that starts the collective, and returns what waits for its end."""
    _, begin = _list_calls(comm)[quantity]
    arguments = _list_arguments(comm, buffer, quantity, operator)
    return lambda: begin(*arguments).Wait


def _list_calls(
    comm: MPI.Intracomm,
) -> dict[str, tuple[Callable[..., None], Callable[..., MPI.Request]]]:
    """Of each collective, the call that blocks and the one that does not."""
    return {
        "all-reduce": (comm.Allreduce, comm.Iallreduce),
        "reduce-scatter": (comm.Reduce_scatter, comm.Ireduce_scatter),
        "all-gather": (comm.Allgatherv, comm.Iallgatherv),
        "broadcast": (comm.Bcast, comm.Ibcast),
        "reduce": (comm.Reduce, comm.Ireduce),
    }


def _list_arguments(
    comm: MPI.Intracomm, buffer: Array, quantity: str, operator: str
) -> tuple[Any, ...]:
    """What the calls take, blocking or not."""
    rank, size = comm.Get_rank(), comm.Get_size()
    datatype = MPI.Datatype.fromcode(buffer.dtype.char)
    room = [buffer, datatype]
    if quantity == "broadcast":
        return (room, 0)
    ends = [len(buffer) * part // size for part in range(size + 1)]
    counts = [ends[part + 1] - ends[part] for part in range(size)]
    if quantity == "all-gather":
        return (MPI.IN_PLACE, [buffer, counts, ends[:-1], datatype])
    added = OPERATORS[operator]
    if quantity == "reduce-scatter":
        return (MPI.IN_PLACE, room, counts, added)
    if quantity == "reduce":
        return (MPI.IN_PLACE, room, added, 0) if rank == 0 else (room, None, added, 0)
    return (MPI.IN_PLACE, room, added)
