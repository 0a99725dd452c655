"""The ring as one would write it by hand: mpi4py's buffers and NumPy's addition in place.

What an all-reduce that is data and is executed by a program is compared with. All that can be
made beforehand is: views of the chunks, room for what arrives, the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from mpi4py import MPI

Pairs = list[tuple[int, int]]
Functions = tuple[Callable[[], None], Callable[[], None]]


def _order(comm: MPI.Intracomm) -> tuple[int, int, Pairs, Pairs]:
    """Neighbours, right and left, and the chunks that go and come in each step, to add and copy."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sums = [((rank - step) % size, (rank - step - 1) % size) for step in range(size - 1)]
    copies = [((rank + 1 - step) % size, (rank - step) % size) for step in range(size - 1)]
    return (rank + 1) % size, (rank - 1) % size, sums, copies


def prepare(comm: MPI.Intracomm, buffer: numpy.ndarray[Any, Any]) -> Functions:
    """Functions: one sums ``buffer`` over all ranks, in place, the other frees what it holds."""
    right, left, sums, copies = _order(comm)
    chunks = numpy.array_split(buffer, comm.Get_size())
    spaces = [numpy.empty_like(chunk) for chunk in chunks]
    bytes_of = [[chunk, MPI.BYTE] for chunk in chunks]
    room_for = [[space, MPI.BYTE] for space in spaces]
    adding = [(bytes_of[a], room_for[b], chunks[b], spaces[b]) for a, b in sums]
    copying = [(bytes_of[a], bytes_of[b]) for a, b in copies]
    add, exchange = numpy.add, comm.Sendrecv

    def all_reduce() -> None:
        for sent, room, mine, arrived in adding:
            exchange(sent, right, 0, room, left, 0)
            add(mine, arrived, mine)
        for sent, room in copying:
            exchange(sent, right, 0, room, left, 0)

    return all_reduce, lambda: None


def prepare_persistent(comm: MPI.Intracomm, buffer: numpy.ndarray[Any, Any]) -> Functions:
    """The same over requests that are made once."""
    right, left, sums, copies = _order(comm)
    chunks = numpy.array_split(buffer, comm.Get_size())
    spaces = [numpy.empty_like(chunk) for chunk in chunks]

    def pair(sent: Any, room: Any) -> list[MPI.Prequest]:
        return [
            comm.Recv_init([room, MPI.BYTE], left, 0),
            comm.Send_init([sent, MPI.BYTE], right, 0),
        ]

    adding = [(pair(chunks[a], spaces[b]), chunks[b], spaces[b]) for a, b in sums]
    copying = [pair(chunks[a], chunks[b]) for a, b in copies]
    add, start, wait = numpy.add, MPI.Prequest.Startall, MPI.Request.Waitall

    def all_reduce() -> None:
        for requests, mine, arrived in adding:
            start(requests)
            wait(requests)
            add(mine, arrived, mine)
        for requests in copying:
            start(requests)
            wait(requests)

    def free() -> None:
        for requests in (*(each for each, _, _ in adding), *copying):
            for request in requests:
                request.Free()

    return all_reduce, free
