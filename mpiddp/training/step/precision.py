"""The number format of forward passes: `torch.amp`_, with a loss scaler if fp16 needs one.

.. _torch.amp: https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

import torch

from mpiddp.errors import ConfigurationError

Name: TypeAlias = Literal["fp32", "bf16", "fp16"]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Parameters and optimizer state stay in float32; ``autocast`` narrows what may be narrow."""

    def __init__(self, name: Name, device: torch.device) -> None:
        """Raises ConfigurationError for fp16 on a CPU."""
        if name == "fp16" and device.type == "cpu":
            raise ConfigurationError(
                "precision: fp16 needs GPUs, found CPUs: use --precision bf16 or fp32"
            )
        self.dtype = TYPES[name]
        """In which most of a forward pass is computed."""
        self._device = device.type
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        """Multiplies the loss, so that small gradients do not become 0 in fp16."""

    def autocast(self) -> AbstractContextManager[object]:
        """Around a forward pass and its loss."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device, self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose backward pass is taken."""
        return loss if self.scaler is None else self.scaler.scale(loss)
