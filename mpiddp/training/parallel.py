"""One model on many ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Move the model to this rank's device and wrap it in DDP, over the default process group.

    DDP broadcasts rank 0's parameters now, and averages gradients in every backward pass.
    """
    model = model.to(device)
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
