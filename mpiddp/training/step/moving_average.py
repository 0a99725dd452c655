"""An exponential moving average of a model's weights, which often predicts better than they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpiddp.checkpoints.state import clean_name
from mpiddp.training.step.sharded_tensors import find_local


class MovingAverage:
    """The average of a module's parameters over the steps; of each rank's part, with FSDP.

    It is a part of checkpoints.
    """

    is_replicated = is_copied = True
    is_optional = True

    def __init__(self, module: nn.Module, decay: float) -> None:
        """The average begins at the present weights. It takes as much memory as they do.

        ``decay``: what is kept of the average in a step, 0 to below 1.
        """
        self._decay = decay
        averages = {each: each.detach().clone() for each in module.parameters()}
        # A parameter that modules share is in a state_dict under each of its names.
        named = module.named_parameters(remove_duplicate=False)
        self.weights = {clean_name(name): averages[each] for name, each in named}
        """The average, named as the parameters in a checkpoint."""
        self._parameters = [find_local(each.detach()) for each in averages]
        self._averages = [find_local(each) for each in averages.values()]
        moving = [
            (average, each)
            for average, each in zip(self._averages, self._parameters, strict=True)
            if each.is_floating_point() or each.is_complex()
        ]
        self._moving = [average for average, _ in moving], [each for _, each in moving]
        """Averages and parameters, without whole numbers, which do not change."""

    def update(self, step: int, steps: int = 1) -> None:
        """After a step, counted from 0, the last of so many since the last call.

        The first ones forget the initial weights sooner.
        """
        decay = min(self._decay, (1 + step) / (10 + step)) ** steps
        torch._foreach_lerp_(*self._moving, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an average; from an empty state it begins at the parameters."""
        if not state:
            torch._foreach_copy_(self._averages, self._parameters)
            return
        for name, average in self.weights.items():
            average.copy_(state["weights"][name])

    def apply(self) -> None:
        """Give the module the average for good."""
        torch._foreach_copy_(self._parameters, self._averages)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the module go by the average."""
        before = [each.clone() for each in self._parameters]
        self.apply()
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, before)
