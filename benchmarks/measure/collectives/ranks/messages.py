"""What takes two ranks, or one: messages there and back, and the addition of two buffers.

A round trip is two messages; its time, halved, is that of one of them, latency included. Where two
ranks send at once, both messages are in flight for all of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

import mpiddp
from benchmarks.measure.collectives.ranks.calls import CallSpec, Exchange, Prepared, do_nothing
from benchmarks.measure.collectives.ranks.inputs import find_part
from benchmarks.records.contenders import ALL_PAIRS, POINT_TO_POINT, REDUCTION

if TYPE_CHECKING:
    from mpi4py import MPI

SHORT_BYTES = 64
"""Up to here the answer in a pair is as long as the message, and the time is half of the trip's."""

Array = numpy.ndarray[Any, Any]


def prepare_exchange(comm: MPI.Intracomm, spec: CallSpec) -> Prepared:
    """A message from rank 0 to rank 1 and back, by MPI; or one in each direction at once."""
    source, target = (numpy.zeros(spec.bytes, numpy.uint8) for _ in range(2))
    if spec.is_mutual:
        other = 1 - comm.Get_rank()
        call = partial(comm.Sendrecv, source, other, 0, target, other, 0)
        exchange = _make_exchange(source, target, other)
        return Prepared(call, comm.Barrier, exchange=exchange, ran="send and receive")
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
    exchanges = {
        first: _make_exchange(source, answer, second),
        second: _make_exchange(answer, source, first),
    }
    is_even = len(source) == len(answer)
    return Prepared(
        calls.get(rank, do_nothing),
        comm.Barrier,
        exchange=exchanges.get(rank),
        ran="send, receive",
        messages=2 if is_even else 1,
    )


def _make_exchange(sent: Array, received: Array, sender: int) -> Exchange:
    return Exchange(torch.from_numpy(sent), torch.from_numpy(received), sender)


def prepare_pairs(comm: MPI.Intracomm, spec: CallSpec) -> Prepared:
    """A message from one rank to another and an answer, in several disjoint pairs at once.

    The answer to more than SHORT_BYTES is empty, so that the time is that of one direction.
    """
    rank = comm.Get_rank()
    mine = next((pair for pair in spec.pairs if rank in pair), (-1, -1))
    source = numpy.zeros(spec.bytes, numpy.uint8)
    answer = numpy.zeros(spec.bytes if spec.bytes <= SHORT_BYTES else 0, numpy.uint8)
    return make_round_trip(comm, rank, *mine, source, answer)


def prepare_transport(spec: CallSpec, rank: int, barrier: Callable[[], object]) -> Prepared:
    """Messages as mpiddp's collectives send them over a transport, on two ranks.

    A broadcast from one and then one from the other is a message there and one back; an all-gather
    of a buffer of twice the size is a message each way.
    """
    tensor, other = torch.zeros(2 * spec.bytes, dtype=torch.uint8), 1 - rank
    parts = [tensor[find_part(len(tensor), each, 2)] for each in (0, 1)]
    exchange = Exchange(parts[rank], parts[other], other)
    over = {"transport": spec.transport}
    if spec.is_mutual:
        gather = partial(mpiddp.all_gather, tensor, algorithm="ring", **over)
        return Prepared(gather, barrier, exchange=exchange, ran="all-gather")
    there, back = (
        partial(mpiddp.broadcast, part, src=root, algorithm="binomial-tree", **over)
        for root, part in enumerate(parts)
    )

    def call() -> None:
        there()
        back()

    ran = "broadcast there and back"
    return Prepared(call, barrier, exchange=exchange, ran=ran, messages=2)


def prepare_addition(comm: MPI.Intracomm, spec: CallSpec) -> Prepared:
    """The sum of two buffers, into the first one; all ranks add at the same time.

    NumPy adds, as in reductions on CPUs.
    """
    mine, other = (torch.ones(spec.count, dtype=spec.dtype).numpy() for _ in range(2))
    return Prepared(partial(numpy.add, mine, other, mine), comm.Barrier, ran="NumPy")


MAKERS = {POINT_TO_POINT: prepare_exchange, ALL_PAIRS: prepare_pairs, REDUCTION: prepare_addition}
"""What MPI's ranks do, by quantity."""
