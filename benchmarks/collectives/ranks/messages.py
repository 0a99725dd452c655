"""What takes two ranks, or one: messages there and back, and the addition of two buffers.

A round trip is two messages; its time, halved, is that of one of them, latency included. Where two
ranks send at once, both messages are in flight for all of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from mpi4py import MPI

import mpiddp
from benchmarks.collectives.ranks.calls import CallSpec, Prepared
from mpiddp.errors import ConfigurationError

SHORT_BYTES = 64
"""Up to here the answer in a pair is as long as the message, and the time is half of the trip's."""

Array = numpy.ndarray[Any, Any]


def prepare_exchange(comm: MPI.Intracomm, spec: CallSpec) -> Prepared:
    """A message from rank 0 to rank 1 and back, by MPI; or one in each direction at once."""
    source, target = (numpy.zeros(spec.bytes, numpy.uint8) for _ in range(2))
    if spec.is_mutual:
        other = 1 - comm.Get_rank()
        call = partial(comm.Sendrecv, source, other, 0, target, other, 0)
        return Prepared(call, comm.Barrier, ran="send and receive")
    return make_round_trip(comm, comm.Get_rank(), 0, 1, source, target)


def make_round_trip(
    comm: MPI.Intracomm, rank: int, first: int, second: int, source: Array, answer: Array
) -> Prepared:
    """``source`` goes from the first to the second rank, ``answer`` comes back; others wait."""

    def lead() -> None:
        comm.Send(source, second)
        comm.Recv(answer, second)

    def follow() -> None:
        comm.Recv(source, first)
        comm.Send(answer, first)

    calls = {first: lead, second: follow}
    is_even = len(source) == len(answer)
    return Prepared(
        calls.get(rank, lambda: None),
        comm.Barrier,
        ran="send, receive",
        messages=2 if is_even else 1,
    )


def prepare_pairs(comm: MPI.Intracomm, spec: CallSpec) -> Prepared:
    """A message from one rank to another and an answer, in several disjoint pairs at once.

    The answer to more than SHORT_BYTES is empty, so that the time is that of one direction.
    """
    rank = comm.Get_rank()
    mine = next((pair for pair in spec.pairs if rank in pair), (-1, -1))
    source = numpy.zeros(spec.bytes, numpy.uint8)
    answer = numpy.zeros(spec.bytes if spec.bytes <= SHORT_BYTES else 0, numpy.uint8)
    return make_round_trip(comm, rank, *mine, source, answer)


def prepare_transport(spec: CallSpec, barrier: Callable[[], object]) -> Prepared:
    """Messages as mpiddp's collectives send them over a transport, on two ranks.

    A broadcast from one and then one from the other is a message there and one back; an all-gather
    of a buffer of twice the size is a message each way.
    """
    over = {"transport": spec.transport}
    if spec.is_mutual:
        tensor = torch.zeros(2 * spec.bytes, dtype=torch.uint8)
        gather = partial(mpiddp.all_gather, tensor, algorithm="ring", **over)
        return Prepared(gather, barrier, ran="all-gather")
    tensor = torch.zeros(spec.bytes, dtype=torch.uint8)
    sends = [
        partial(mpiddp.broadcast, tensor, root=root, algorithm="binomial-tree", **over)
        for root in (0, 1)
    ]

    def call() -> None:
        for send in sends:
            send()

    return Prepared(call, barrier, ran="broadcast there and back", messages=2)


def prepare_addition(comm: MPI.Intracomm, spec: CallSpec) -> Prepared:
    """Add one buffer to another one, all ranks at once, as reductions on CPUs do."""
    if spec.dtype is torch.bfloat16:
        raise ConfigurationError("NumPy has no bfloat16")
    mine, other = (torch.ones(spec.count, dtype=spec.dtype).numpy() for _ in range(2))
    return Prepared(partial(numpy.add, mine, other, mine), comm.Barrier, ran="NumPy")
