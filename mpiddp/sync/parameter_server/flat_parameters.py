"""A model's parameters, and their gradients, each in one piece of memory."""

from __future__ import annotations

import torch
from torch import nn


class FlatModel:
    """Owns the memory of a module's trained parameters, and room for their gradients.

    The parameters become views of ``parameters``. Gradients are copied instead: a backward pass
    that adds to existing gradients takes longer than one that stores new ones, and a copy.
    """

    def __init__(self, module: nn.Module) -> None:
        """``module``: its trained parameters have one type, not a complex one, and one device."""
        self._trained = [each for each in module.parameters() if each.requires_grad]
        ((dtype, device),) = {(each.dtype, each.device) for each in self._trained}
        self._lengths = [each.numel() for each in self._trained]
        self.parameters = torch.empty(sum(self._lengths), dtype=dtype, device=device)
        """Flat, in the order of ``module.parameters()``."""
        self.gradients = torch.zeros_like(self.parameters)
        """Likewise."""
        for each, room in zip(self._trained, self._split(self.parameters), strict=True):
            room = room.view_as(each)
            room.copy_(each.detach())
            each.data = room

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(flat, self._lengths)

    def let_go_of_gradients(self) -> None:
        """Before a backward pass, which stores new ones."""
        for each in self._trained:
            each.grad = None

    def collect_gradients(self) -> None:
        """After it: copy them into ``gradients``; zeros for parameters without a gradient."""
        for each, room in zip(self._trained, self._split(self.gradients), strict=True):
            if each.grad is None:
                room.zero_()
            else:
                room.copy_(each.grad.to_dense().flatten())

    def shards(self, count: int) -> list[slice]:
        """The elements in ``count`` parts, whose lengths differ by at most one."""
        total = self.parameters.numel()
        return [slice(total * k // count, total * (k + 1) // count) for k in range(count)]

    def pieces(self, shard: slice) -> list[int]:
        """How many elements of each parameter lie in a shard; without parameters that have none."""
        lengths, start = [], 0
        for length in self._lengths:
            stop = start + length
            inside = min(stop, shard.stop) - max(start, shard.start)
            if inside > 0:
                lengths.append(inside)
            start = stop
        return lengths
