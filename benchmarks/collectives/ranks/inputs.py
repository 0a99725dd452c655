"""Inputs whose sum is known exactly, in every type, however it is ordered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy
import torch

PERIOD = 4099
"""Elements after which the values repeat; a prime, so that no chunk's values are another's."""
LARGEST_SUM = 256
"""Up to here bfloat16, whose fraction has 8 bits, holds every integer."""


@cache
def get_pattern(rank: int, size: int) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]:
    """Rank's values: integers that even the sum over ``size`` ranks leaves exact."""
    bound = max(2, min(16, LARGEST_SUM // size))
    return numpy.random.default_rng([rank, size]).integers(0, bound, PERIOD)


@cache
def get_sum(
    size: int, members: Sequence[int] | None = None
) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]:
    total = numpy.zeros(PERIOD, numpy.int64)
    for rank in range(size) if members is None else members:
        total += get_pattern(rank, size)
    return total


def fill(tensor: torch.Tensor, rank: int, size: int) -> None:
    """Give a flat tensor rank's values, repeated to its end."""
    values = torch.from_numpy(get_pattern(rank, size)).to(tensor.device, tensor.dtype)
    whole = tensor.numel() // PERIOD * PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(values)
    tensor[whole:].copy_(values[: tensor.numel() - whole])


def count_wrong(tensor: torch.Tensor, size: int, members: tuple[int, ...] | None = None) -> int:
    """How many elements of a flat tensor are not the sum of all ranks' values.

    ``members`` are those that are summed, where it is not all.
    """
    values = torch.from_numpy(get_sum(size, members)).to(tensor.device, tensor.dtype)
    whole = tensor.numel() // PERIOD * PERIOD
    wrong = (tensor[:whole].view(-1, PERIOD) != values).sum()
    rest = (tensor[whole:] != values[: tensor.numel() - whole]).sum()
    return int(wrong) + int(rest)
