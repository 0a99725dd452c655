"""A training of one's own with DDP, whose gradients mpiddp averages with a ring.

python -m mpiddp -n 2 examples/comm_hook.py
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp

with mpiddp.init() as session:
    rank = session.world.rank
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    targets = inputs.square().sum(dim=1, keepdim=True)
    mine = slice(rank, None, session.world.size)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(session.device)
    model = DistributedDataParallel(net)
    mpiddp.register_comm_hook(model, "ring:segments=2")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, 201):
        features, wanted = inputs[mine].to(session.device), targets[mine].to(session.device)
        loss = nn.functional.mse_loss(model(features), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"Step {step}: loss {loss.item():.4f}")
