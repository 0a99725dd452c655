"""Tensors that may be parts of one that lies on several ranks: torch's DTensor.

Nothing is imported for it, since only FSDP makes them.
"""

from __future__ import annotations

from typing import Any

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def find_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, which shares its memory; the tensor itself if it is whole."""
    found: Any = tensor
    part: torch.Tensor = found.to_local() if is_sharded(tensor) else tensor
    return part


def collect(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank, where ranks exchange it; collective if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    found: Any = tensor
    whole: torch.Tensor = found.to(found.device_mesh.device_type).full_tensor()
    return whole
