"""Local SGD: ranks take steps with their own gradients, and average their weights now and then.

S. U. Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767; T. Lin
et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217, who keep momentum
local as well. torch's PeriodicModelAverager averages parameters alone, and by its own all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from mpiddp.training.step.moving_average import MovingAverage
from mpiddp.training.step.optimizer_step import LocalUpdate, Treatment
from mpiddp.training.step.stages import StageClock, StepStage

Mean: TypeAlias = Callable[[torch.Tensor], float]
"""Replaces a flat tensor by its mean over all ranks, and returns the bytes that this rank sends.
Collective."""


class Weights:
    """The trained parameters of a rank's module, and its running averages."""

    def __init__(self, module: nn.Module, mean: Mean, every: int, clock: StageClock) -> None:
        """``every``: steps between two averages. A copy takes as much memory as they do."""
        self.every, self._clock = every, clock
        trained = [each.detach() for each in module.parameters() if each.requires_grad]
        self._tensors = [*trained, *(each for each in module.buffers() if each.is_floating_point())]
        self._mean = mean
        self._groups = []
        for kind in dict.fromkeys(each.dtype for each in self._tensors):
            group = [each for each in self._tensors if each.dtype == kind]
            sizes = [each.numel() for each in group]
            flat = torch.empty(sum(sizes), dtype=kind, device=group[0].device)
            parts = zip(torch.split(flat, sizes), group, strict=True)
            self._groups.append((flat, [part.view(each.shape) for part, each in parts], group))

    def average(self) -> float:
        """Give all ranks the mean. Returns the bytes that this rank sends. Collective."""
        sent = 0.0
        for flat, copies, group in self._groups:
            torch._foreach_copy_(copies, group)
            sent += self._mean(torch.view_as_real(flat) if flat.is_complex() else flat)
            torch._foreach_copy_(group, copies)
        return sent

    def exchange(self) -> None:
        """As ``average``, as a part of the step or the epoch that has just ended."""
        self._clock.end(StepStage.UPDATE)
        self._clock.costs.count_exchange(self.average())
        self._clock.end(StepStage.COMMUNICATION)

    def copy(self) -> list[torch.Tensor]:
        return [each.clone() for each in self._tensors]

    def write(self, copy: list[torch.Tensor]) -> None:
        for tensor, each in zip(self._tensors, copy, strict=True):
            tensor.copy_(each)


class AveragingUpdate(LocalUpdate):
    """Every rank makes its own steps; after every so many all get the mean of their weights.

    Periods end after steps whose number is a multiple, and with an epoch. The loss of a step with
    few samples is weighted as for gradients that are averaged, and the mean is plain: with plain
    SGD, a period of one step is one with the average of all gradients. Within a period it is a part
    of checkpoints that holds this rank's weights.
    """

    is_replicated = False
    averages_weights = True
    is_of_rank = True
    is_optional = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        treatment: Treatment,
        weights: Weights,
    ) -> None:
        super().__init__(module, optimizer, rate, treatment)
        self._weights = weights
        self._since = 0
        """Steps since all ranks had the same weights."""
        self._own: list[torch.Tensor] | None = None
        """This rank's weights while the module has the mean, or was not given them yet."""

    def _follow(self, average: MovingAverage, step: int) -> None:
        """The moving average follows the mean alone, and so is the same on all ranks."""

    def exchange_weights(self, *, is_due: bool = False) -> None:
        self._since += not is_due
        if not self._since or not (is_due or self._step % self._weights.every == 0):
            return
        self._weights.exchange()
        if self.average is not None:
            self.average.update(self._step - 1, self._since)
        self._since = 0

    @contextmanager
    def united(self) -> Iterator[None]:
        if not self._since:
            yield
            return
        self._own = self._weights.copy()
        self._weights.average()
        try:
            yield
        finally:
            self._weights.write(self._own)
            self._own = None

    def list_parts(self, step: int) -> dict[str, Any]:
        return {**super().list_parts(step), "local": self}

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        if self._own is not None:
            self._weights.write(self._own)
            self._own = None

    def state_dict(self) -> dict[str, Any]:
        """While the module has the mean."""
        return {} if self._own is None else {"since": self._since, "weights": self._own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The module gets them once it has all of its state."""
        self._since, self._own = state.get("since", 0), state.get("weights")
