"""The framework's all-reduce: torch.distributed over Gloo, or over NCCL where ranks have GPUs.

Its processes are started by torchrun and load no MPI: one that waits in an MPI call would keep
Gloo's threads from their cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed


def prepare(
    buffer: torch.Tensor, group: distributed.ProcessGroup | None = None
) -> Callable[[], object]:
    """A function that sums ``buffer`` over the group's ranks, in place."""
    return partial(distributed.all_reduce, buffer, group=group)


def every_rank_has_a_gpu(local_rank: int) -> bool:
    """Whether a group over NCCL can be made. Collective over the default group."""
    flag = torch.tensor([local_rank < torch.cuda.device_count()], dtype=torch.int32)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    return bool(flag.item())
