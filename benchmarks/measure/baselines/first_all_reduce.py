"""A plain torch.distributed script: make the group, sum one float over all ranks, leave.

Nothing in it knows of mpiddp: torchrun and ``python -m mpiddp`` run the same file. With an
argument, rank 0 writes there when the sum was known, in seconds of the machine's monotonic
clock, which all processes of a machine share. With ``-`` it prints the time of day instead,
which machines share as far as their clocks are set alike.
"""

import json
import sys
import time

import torch
import torch.distributed as distributed

distributed.init_process_group("gloo")
ones = torch.ones(1)
distributed.all_reduce(ones)
finished, time_of_day = time.monotonic(), time.time()
if ones.item() != distributed.get_world_size():
    raise SystemExit(f"expected {distributed.get_world_size()}, the all-reduce gave {ones.item()}")
if distributed.get_rank() == 0 and len(sys.argv) > 1:
    if sys.argv[1] == "-":
        print("mpiddp-benchmark:", json.dumps({"finished": time_of_day}), flush=True)
    else:
        with open(sys.argv[1], "w") as file:
            file.write(f"{finished}\n")
distributed.destroy_process_group()
