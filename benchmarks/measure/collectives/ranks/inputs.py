"""Inputs whose result is known exactly, in every type, however it is ordered."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch

from benchmarks.measure.collectives.ranks.calls import Exchange
from benchmarks.records.contenders import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER

PERIOD = 4099
"""Elements after which the values repeat; a prime, so that no chunk's values are another's."""
LARGEST_SUM = 256
"""Up to here bfloat16, whose fraction has 8 bits, holds every integer."""
BYTES = "max"
"""The operator whose values are all that a byte can hold."""
UFUNCS = {
    "sum": numpy.add,
    "average": numpy.add,
    "product": numpy.multiply,
    "min": numpy.minimum,
    "max": numpy.maximum,
}

Pattern = numpy.ndarray[tuple[int, ...], numpy.dtype[Any]]


@cache
def get_pattern(rank: int, size: int, operator: str = "sum") -> Pattern:
    """The values of ``rank``: integers that leave even the result over ``size`` ranks exact.

    Of a product, each element has one factor of 2 or -2; the others are 1 or -1.
    """
    generator = numpy.random.default_rng([rank, size])
    if operator == "product":
        signs: Pattern = generator.integers(0, 2, PERIOD) * 2 - 1
        return numpy.where(numpy.arange(PERIOD) % size == rank, 2 * signs, signs)
    bound = max(2, min(16, LARGEST_SUM // size))
    if operator in ("min", "max"):
        bound = LARGEST_SUM
    return generator.integers(0, bound, PERIOD)


@cache
def get_result(size: int, members: tuple[int, ...] | None = None, operator: str = "sum") -> Pattern:
    """What the members' values become; ``members`` None for all ranks."""
    ranks = range(size) if members is None else members
    values = [get_pattern(rank, size, operator) for rank in ranks]
    total: Pattern = UFUNCS[operator].reduce(values)
    return total / len(values) if operator == "average" else total


def fill(tensor: torch.Tensor, rank: int, size: int, operator: str = "sum") -> None:
    """Give a flat tensor the values of ``rank``, repeated to its end."""
    values = torch.from_numpy(get_pattern(rank, size, operator)).to(tensor.device, tensor.dtype)
    whole = tensor.numel() // PERIOD * PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(values)
    tensor[whole:].copy_(values[: tensor.numel() - whole])


def count_wrong(
    quantity: str,
    tensor: torch.Tensor,
    rank: int,
    size: int,
    operator: str = "sum",
    members: tuple[int, ...] | None = None,
    part: torch.Tensor | None = None,
) -> int:
    """How many elements are wrong on this rank after a collective on ``fill``'s values.

    Args:
        members: the ranks that are summed, and know the sum, if it is not all; others, servers
            that only serve, end with anything.
        part: the result of a reduce-scatter, unless it is in its place in the tensor.
    """
    if members is not None and rank not in members:
        return 0
    if quantity == ALL_REDUCE or (quantity == REDUCE and rank == 0):
        return _count_others(tensor, get_result(size, members, operator))
    if quantity == REDUCE_SCATTER:
        own = find_part(tensor.numel(), rank, size)
        found = tensor[own] if part is None else part
        return _count_others(found, get_result(size, members, operator), own.start)
    if quantity == BROADCAST:
        return _count_others(tensor, get_pattern(0, size, operator))
    if quantity == ALL_GATHER:
        places = [find_part(tensor.numel(), each, size) for each in range(size)]
        return sum(
            _count_others(tensor[place], get_pattern(each, size, operator), place.start)
            for each, place in enumerate(places)
        )
    return 0


def find_part(count: int, rank: int, size: int) -> slice:
    """The part of a buffer that belongs to ``rank`` in a reduce-scatter or all-gather.

    `mpiddp.reduce_scatter` and the counts that MPI gets here divide it in the same way.
    """
    return slice(count * rank // size, count * (rank + 1) // size)


def _count_others(tensor: torch.Tensor, pattern: Pattern, start: int = 0) -> int:
    """How many elements differ from a buffer of the pattern, in which they begin at ``start``."""
    values = torch.from_numpy(numpy.roll(pattern, -(start % PERIOD)))
    is_exact = pattern.dtype.kind == "i"
    values = values.to(tensor.device, tensor.dtype)

    def count(found: torch.Tensor, expected: torch.Tensor) -> int:
        if is_exact:
            return int((found != expected).sum())
        # An average is rounded, in a way of each contender's own.
        return int((~torch.isclose(found, expected, rtol=2 * torch.finfo(found.dtype).eps)).sum())

    whole = tensor.numel() // PERIOD * PERIOD
    wrong = count(tensor[:whole].view(-1, PERIOD), values)
    rest = count(tensor[whole:], values[: tensor.numel() - whole])
    return wrong + rest


def fill_exchange(exchange: Exchange, rank: int, size: int) -> None:
    """Give what is sent this rank's bytes, and make each byte to be received a wrong one."""
    fill(exchange.sent, rank, size, BYTES)
    fill(exchange.received, exchange.sender, size, BYTES)
    exchange.received.bitwise_not_()


def count_wrong_bytes(exchange: Exchange, size: int) -> int:
    """How many of the received bytes are not those that ``fill_exchange`` gave the sender."""
    return _count_others(exchange.received, get_pattern(exchange.sender, size, BYTES))
