"""The same as ``first_all_reduce.py``, written for mpiddp: its session makes the group.

With ``-``, rank 0 prints as well how long each phase of start-up took its slowest rank.
"""

import json
import sys
import time

import mpiddp

with mpiddp.init(backend="gloo") as session:
    import torch
    import torch.distributed as distributed

    ones = torch.ones(1)
    distributed.all_reduce(ones)
    finished, time_of_day = time.monotonic(), time.time()
    if ones.item() != session.world.size:
        raise SystemExit(f"expected {session.world.size}, the all-reduce gave {ones.item()}")
    if session.world.rank == 0 and len(sys.argv) > 1:
        if sys.argv[1] == "-":
            report = {"finished": time_of_day, "seconds": session.seconds}
            print("mpiddp-benchmark:", json.dumps(report), flush=True)
        else:
            with open(sys.argv[1], "w") as file:
                file.write(f"{finished}\n")
