"""One model on many ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.sync.hooks import ScheduleHook, Synchronization, attach
from mpiddp.training.config import FRAMEWORK, Configuration


@dataclass(frozen=True)
class Replica:
    """This rank's copy of the model."""

    model: DistributedDataParallel
    hook: ScheduleHook | None
    """What averages its gradients; None where DDP does."""


def replicate(model: nn.Module, device: torch.device, configuration: Configuration) -> Replica:
    """Move the model to this rank's device and wrap it in DDP, over the default process group.

    DDP broadcasts rank 0's parameters now; in every backward pass gradients are averaged, as the
    configuration says. Raises ConfigurationError where they cannot be averaged that way.
    """
    model = model.to(device)
    devices = [device] if device.type == "cuda" else None
    if configuration.sync == FRAMEWORK:
        return Replica(DistributedDataParallel(model, device_ids=devices), None)
    wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    hook = attach(choose_synchronization(configuration), wrapped)
    return Replica(wrapped, hook)


def share_buffers(model: nn.Module) -> None:
    """Give all ranks rank 0's buffers. Collective.

    DDP does so before each forward pass; after the last one every rank has added its own samples to
    its running averages.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def choose_synchronization(configuration: Configuration) -> Synchronization:
    """What the configuration says of gradients that the framework does not average."""
    name = configuration.wire_dtype
    return Synchronization(
        configuration.sync,
        configuration.transport,
        None if name == "auto" else getattr(torch, name),
        configuration.overlap == "on",
    )
