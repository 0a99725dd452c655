"""Data-parallel training as the framework's own tutorials have it; torchrun starts its processes.

DistributedDataParallel with its own settings, SGD with Nesterov's momentum, over Gloo on CPUs and
over NCCL on GPUs. Nothing in it knows of mpiddp.
"""

from __future__ import annotations

import os

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def join() -> torch.device:
    """Join the group that torchrun describes; returns this process's device.

    GPUs where every process of its node has one: nodes are taken to be alike.
    """
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_size:
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    distributed.init_process_group("nccl", device_id=device)
    return device


def wrap(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model, on its device, whose gradients DDP averages."""
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=devices)


def finish(device: torch.device) -> None:
    """Wait for all that was begun on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_optimizer(
    model: nn.Module,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    *,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """SGD with Nesterov's momentum; ``fused`` is torch's, which leaves it to itself by default."""
    return torch.optim.SGD(
        model.parameters(),
        lr=learning_rate,
        momentum=momentum,
        nesterov=True,
        weight_decay=weight_decay,
        fused=fused,
    )


class Step:
    """What a plain training loop does around a backward pass."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def begin_step(self) -> None:
        """Before it."""
        self.optimizer.zero_grad()

    def finish_step(self) -> None:
        """After it."""
        self.optimizer.step()

    def finish_epoch(self) -> None:
        """All have as many steps."""

    def settle(self) -> None:
        """All have the same weights."""

    def close(self) -> None:
        """Nothing to end."""
