"""A script with a checkpointer: it counts steps until a signal preempts it."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpiddp

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
last = int(sys.argv[1])
with mpiddp.Checkpointer("checkpoints", model, optimizer) as checkpointer:
    state = checkpointer.restore() or {"step": 0}
    print(f"rank {dist.get_rank()} begins after step {state['step']}", flush=True)
    for step in range(state["step"] + 1, last + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        time.sleep(0.005)
        if checkpointer.preempted:
            checkpointer.save(step)
            checkpointer.close()
            print(f"rank {dist.get_rank()} stops after step {step}", flush=True)
            raise SystemExit(75)
        if step == 1:
            print(f"rank {dist.get_rank()} looks", flush=True)
print(f"rank {dist.get_rank()} ends", flush=True)
