"""A model's parameters, and their gradients, each in one piece of memory."""

from __future__ import annotations

import torch
from torch import nn

from mpiddp.errors import ConfigurationError


class FlatModel:
    """Owns the memory of a module's trained parameters and of their gradients.

    The parameters and their ``grad`` are views from then on, so that whoever writes into
    ``parameters`` changes the model, and a backward pass fills ``gradients``.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises ConfigurationError for parameters of several types or devices."""
        trained = [each for each in module.parameters() if each.requires_grad]
        kinds = {(each.dtype, each.device) for each in trained}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ConfigurationError(
                f"expected parameters of one type on one device, found {found or 'none'}"
            )
        ((dtype, device),) = kinds
        count = sum(each.numel() for each in trained)
        self.module = module
        self._lengths = [each.numel() for each in trained]
        self.parameters = torch.empty(count, dtype=dtype, device=device)
        """Flat, in the order of ``module.parameters()``."""
        self.gradients = torch.zeros_like(self.parameters)
        """Likewise."""
        start = 0
        for each in trained:
            stop = start + each.numel()
            room = self.parameters[start:stop].view_as(each)
            room.copy_(each.detach())
            each.data = room
            each.grad = self.gradients[start:stop].view_as(each)
            start = stop

    def shards(self, count: int) -> list[slice]:
        """The elements cut into so many parts of equal length, up to one."""
        total = self.parameters.numel()
        return [slice(total * k // count, total * (k + 1) // count) for k in range(count)]

    def pieces(self, shard: slice) -> list[int]:
        """How many elements of each parameter lie in a shard, in order; of those that do at all."""
        lengths, start = [], 0
        for length in self._lengths:
            stop = start + length
            inside = min(stop, shard.stop) - max(start, shard.start)
            if inside > 0:
                lengths.append(inside)
            start = stop
        return lengths

    def zero_gradients(self) -> None:
        """Before a backward pass, which adds to them. ``zero_grad`` would let go of the memory."""
        self.gradients.zero_()
