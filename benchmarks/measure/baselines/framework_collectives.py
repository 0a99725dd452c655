"""The framework's collectives: torch.distributed over Gloo, or over NCCL if ranks have GPUs.

Its processes are started by torchrun and load no MPI: one that waits in an MPI call would keep
Gloo's threads from their cores. Rank 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed

OPERATORS = {
    "sum": distributed.ReduceOp.SUM,
    "average": distributed.ReduceOp.AVG,
    "product": distributed.ReduceOp.PRODUCT,
    "min": distributed.ReduceOp.MIN,
    "max": distributed.ReduceOp.MAX,
}
# Newer names, without which torch 2.13 warns.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


def prepare(
    buffer: torch.Tensor,
    group: distributed.ProcessGroup | None = None,
    quantity: str = "all-reduce",
    operator: str = "sum",
) -> Callable[..., Any]:
    """A function that makes the collective on a flat ``buffer`` over the group's ranks.

    With ``async_op=True`` it starts it, and returns what waits. A reduce-scatter and an all-gather
    work in the rank's own part of the buffer, and need parts of one length.
    """
    if quantity == "broadcast":
        return partial(distributed.broadcast, buffer, 0, group)
    if quantity == "all-gather":
        return partial(_gather, buffer, own_part(buffer), group=group)
    added = OPERATORS[operator]
    if quantity == "reduce-scatter":
        return partial(_scatter, own_part(buffer), buffer, op=added, group=group)
    if quantity == "reduce":
        return partial(distributed.reduce, buffer, 0, added, group)
    return partial(distributed.all_reduce, buffer, added, group)


def own_part(buffer: torch.Tensor) -> torch.Tensor:
    """This rank's part of a buffer; all have one length."""
    length = len(buffer) // distributed.get_world_size()
    rank = distributed.get_rank()
    return buffer[rank * length : (rank + 1) * length]


def every_rank_has_a_gpu(local_rank: int) -> bool:
    """Whether a group over NCCL can be made. Collective over the default group."""
    flag = torch.tensor([local_rank < torch.cuda.device_count()], dtype=torch.int32)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    return bool(flag.item())
