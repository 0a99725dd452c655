"""A script that holds mpiddp's backend against Gloo: python two_backends.py

Every rank prints what differs. Without a launcher of MPI, as torchrun starts it, messages of
mpiddp's group go over Gloo.
"""

from __future__ import annotations

import itertools
import json

import torch
from torch import distributed

from mpiddp import torch_backend  # registers the backend

COUNTS = (1, 5, 1000, 100_000, 1_500_000)
"""Elements: what fits a mailbox, what does not, and several pieces."""


def call_all(group: distributed.ProcessGroup, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The results of each collective on integers, which every type holds exactly."""
    rank, size = group.rank(), group.size()
    ranks = distributed.get_process_group_ranks(group)
    generator = torch.Generator().manual_seed(17 * rank + count)
    source = torch.randint(-8, 8, (size * count,), generator=generator).to(dtype)
    total, maximum, root = source.clone(), source[:count].clone(), source[:count].clone()
    distributed.all_reduce(total, group=group)
    distributed.all_reduce(maximum, op=distributed.ReduceOp.MAX, group=group)
    distributed.broadcast(root, ranks[-1], group=group)
    part, whole = source.new_empty(count), source.new_empty(size * count)
    distributed.reduce_scatter(part, list(source.chunk(size)), group=group)
    distributed.all_gather(list(whole.chunk(size)), source[:count].clone(), group=group)
    begun = distributed.all_reduce(root, group=group, async_op=True)
    assert begun is not None
    begun.wait()
    distributed.barrier(group=group)
    return [total, maximum, root, part, whole, source]


def main() -> None:
    """Compare them in the group of all ranks, and in one of the first and the last rank."""
    distributed.init_process_group("gloo")
    size = distributed.get_world_size()
    different = []
    own = None
    for ranks in (list(range(size)), [0, size - 1]):
        gloo = distributed.new_group(ranks, backend="gloo")
        own = distributed.new_group(ranks, backend=torch_backend.NAME)
        if distributed.get_rank() not in ranks:
            continue
        for count, dtype in itertools.product(COUNTS, (torch.float32, torch.int64)):
            pairs = zip(call_all(gloo, count, dtype), call_all(own, count, dtype), strict=True)
            good = [torch.equal(one, other) for one, other in pairs]
            if not all(good):
                different.append([ranks, count, str(dtype), good])
    print(json.dumps(different))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
