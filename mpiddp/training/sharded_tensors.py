"""Tensors that may be parts of one that lies on several ranks: torch's DTensor.

Nothing is imported for it, since only FSDP makes them.
"""

from __future__ import annotations

from typing import Any

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def find_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, which shares its memory; the tensor itself where it is whole."""
    found: Any = tensor
    part: torch.Tensor = found.to_local() if is_sharded(tensor) else tensor
    return part


def collect(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The whole tensor on every rank; collective where it is sharded.

    ``device``: where ranks exchange tensors.
    """
    found: Any = tensor
    return found.to(device).full_tensor() if is_sharded(tensor) else tensor
