"""Updates the weights after a backward pass, with this rank's optimizer or parameter servers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mpiddp.training.config import Configuration
from mpiddp.training.divergence import MarkedModel

WARM_UP = 0.05
"""Share of all steps in which the learning rate rises to its peak."""


class Update(Protocol):
    """How a rank updates; ``mpiddp.sync.parameter_server.roles.Serving`` is the other way."""

    def begin_step(self) -> None:
        """Before a backward pass."""

    def finish_step(self) -> object:
        """After it: the weights are new."""

    def finish_epoch(self) -> None:
        """This rank has no more steps. Collective."""

    def settle(self) -> None:
        """Give all ranks the same weights. Collective, between two steps."""

    def close(self) -> None:
        """There are no more steps. Collective."""


class GuardedUpdate(Update, Protocol):
    """An update that can leave out a step, and whose state can be stored."""

    def finish_step(self, *, is_bad: bool = False) -> bool:
        """After a backward pass: whether its gradients were applied.

        ``is_bad``: this rank's loss is not finite.
        """

    def read_state(self) -> tuple[str, Any] | None:
        """What this rank holds beside the weights, between two steps, and its name; or None.

        What has the same name on two ranks is the same. ``mpiddp.training.packing`` can store it.
        """

    def load_state(self, read: Callable[[str], Any], step: int) -> None:
        """Go on from a state: ``read`` returns what ``read_state`` gave, by name.

        The module has its weights already. ``step``: which one is next, for the learning rate.
        """


class LocalUpdate:
    """Every rank makes the same step, with the average of all gradients."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        marked: MarkedModel | None = None,
    ) -> None:
        """
        Args:
            rate: the learning rate of a step, counted from 0.
            marked: says which steps are left out; None for none of them.
        """
        self._optimizer = optimizer
        self._rate = rate
        self._marked = marked
        self._step = 0

    def begin_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._marked is not None:
            self._marked.begin_step()

    def finish_step(self, *, is_bad: bool = False) -> bool:
        if self._marked is not None and self._marked.is_refused():
            self._step += 1
            return False
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self._step)
        self._optimizer.step()
        self._step += 1
        return True

    def finish_epoch(self) -> None:
        """All have as many steps."""

    def settle(self) -> None:
        """They have the same."""

    def close(self) -> None:
        """Nothing to end."""

    def read_state(self) -> tuple[str, Any]:
        return "optimizer", self._optimizer.state_dict()

    def load_state(self, read: Callable[[str], Any], step: int) -> None:
        self._optimizer.load_state_dict(read("optimizer"))
        self._step = step


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
