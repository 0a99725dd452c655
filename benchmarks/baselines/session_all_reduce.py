"""The same as ``first_all_reduce.py``, written for mpiddp: its session makes the group."""

import sys
import time

import mpiddp

with mpiddp.init(backend="gloo") as session:
    import torch
    import torch.distributed as distributed

    ones = torch.ones(1)
    distributed.all_reduce(ones)
    finished = time.monotonic()
    if ones.item() != session.world.size:
        raise SystemExit(f"expected {session.world.size}, the all-reduce gave {ones.item()}")
    if session.world.rank == 0 and len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            file.write(f"{finished}\n")
