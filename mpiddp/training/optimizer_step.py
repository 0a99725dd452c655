"""Updates the weights after a backward pass, with this rank's optimizer or parameter servers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from mpiddp.training.config import Configuration

WARM_UP = 0.05
"""Share of all steps in which the learning rate rises to its peak."""


class Update(Protocol):
    """How a rank updates; ``mpiddp.sync.parameter_server.roles.Serving`` is the other way."""

    def begin_step(self) -> None:
        """Before a backward pass."""

    def finish_step(self) -> None:
        """After it: the weights are new."""

    def finish_epoch(self) -> None:
        """This rank has no more steps. Collective."""

    def settle(self) -> None:
        """Give all ranks the same weights. Collective, between two steps."""

    def close(self) -> None:
        """There are no more steps. Collective."""


class LocalUpdate:
    """Every rank makes the same step, with the average of all gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> None:
        """``rate``: the learning rate of a step, counted from 0."""
        self._optimizer = optimizer
        self._rate = rate
        self._step = 0

    def begin_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def finish_step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self._step)
        self._optimizer.step()
        self._step += 1

    def finish_epoch(self) -> None:
        """All have as many steps."""

    def settle(self) -> None:
        """They have the same."""

    def close(self) -> None:
        """Nothing to end."""


def make_optimizer(
    configuration: Configuration, parameters: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """The one that the configuration names, for these parameters.

    The fused form reads and writes each number once. With momentum and decay on a CPU it took a
    quarter of the plain form's time, which is longer than a large model's backward pass.
    """
    rate, decay = configuration.learning_rate, configuration.weight_decay
    assert rate is not None
    momentum = configuration.momentum
    if configuration.optimizer == "adamw":
        betas = (momentum, 0.999)
        return torch.optim.AdamW(parameters, rate, betas, weight_decay=decay, fused=True)
    return torch.optim.SGD(
        parameters, rate, momentum, weight_decay=decay, nesterov=momentum > 0, fused=True
    )


def learning_rate_factor(step: int, total_steps: int) -> float:
    """The share of the peak at a step, counted from 0: a linear rise, then half a cosine."""
    rise = max(1, round(WARM_UP * total_steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (total_steps - rise)))
