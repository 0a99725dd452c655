"""An exponential moving average of a model's weights, which often predicts better than they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from mpiddp.training.sharded_tensors import find_local


class MovingAverage:
    """The average of a module's parameters over the steps; of each rank's part, with FSDP."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        """The average begins at the present weights. It takes as much memory as they do.

        ``decay``: what is kept of the average in a step, 0 to below 1.
        """
        self._decay = decay
        named = dict(module.named_parameters())
        self.weights = {name: each.detach().clone() for name, each in named.items()}
        """The average, named as the parameters."""
        self._parameters = [find_local(each.detach()) for each in named.values()]
        self._averages = [find_local(each) for each in self.weights.values()]

    def update(self, step: int) -> None:
        """After a step, counted from 0. The first ones forget the initial weights sooner."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._parameters, 1 - decay)

    def begin(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Go on from an average, which has the names and shapes of ``weights``.

        Without one it begins at the parameters.
        """
        if weights is None:
            torch._foreach_copy_(self._averages, self._parameters)
            return
        for name, average in self.weights.items():
            average.copy_(weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the module go by the average."""
        before = [each.clone() for each in self._parameters]
        torch._foreach_copy_(self._parameters, self._averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, before)
