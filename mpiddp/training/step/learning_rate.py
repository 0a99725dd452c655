"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.factories import failed
from mpiddp.training.options.groups.optimisation import OptimisationOptions
from mpiddp.training.task.task import RateSchedule
from mpiddp.wording import count_noun

WARM_UP = 0.05
"""Share of all steps in which the learning rate rises to its peak, if nothing else is said."""


@dataclass(frozen=True)
class LearningRate:
    """A linear rise to the peak, then what ``schedule`` says."""

    peak: float
    steps: int
    """Of the whole run."""
    rise: int
    """Steps until the peak; 1 is none."""
    schedule: str
    """``cosine`` (half of one, down to 0), ``constant`` or ``step``."""
    period: float = math.inf
    """Steps between two changes, with ``step``."""
    factor: float = 1.0
    """Multiplies the rate at each of them."""
    own: RateSchedule | None = None
    """A user's, in place of ``schedule``; it multiplies the rise, too."""

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 0; the last step's after the end."""
        step = min(step, self.steps - 1)
        if self.own is not None:
            return self.peak * min(1.0, (step + 1) / self.rise) * self._find_own_share(step)
        if step < self.rise:
            return self.peak * ((step + 1) / self.rise)
        return self.peak * self._find_share(step)

    def _find_own_share(self, step: int) -> float:
        """Raises ConfigurationError for what is no factor."""
        assert self.own is not None
        try:
            found = float(self.own(step, self.steps))
        except Exception as error:  # A user's code.
            what = f"no number in step {step} of {self.steps}"
            raise failed("schedule", what, error) from error
        if not 0 <= found < math.inf:
            raise ConfigurationError(
                f"schedule: expected a factor of the learning rate, 0 or more, found {found} in "
                f"step {step} of {self.steps}"
            )
        return found

    def _find_share(self, step: int) -> float:
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - self.rise) / (self.steps - self.rise)))
        if self.schedule == "step":
            return self.factor ** math.floor(step / self.period)
        return 1.0


def make_learning_rate(
    options: OptimisationOptions, steps_per_epoch: int, batch: int, own: RateSchedule | None = None
) -> LearningRate:
    """The one that the resolved options name. Raises ConfigurationError.

    Args:
        steps_per_epoch: of each worker.
        batch: samples per step of all workers.
        own: a user's schedule; from the step, counted from 0, and the steps of the run.
    """
    assert options.learning_rate is not None
    steps = options.epochs * steps_per_epoch
    epochs = options.warmup_epochs
    rise = WARM_UP * steps if epochs is None else epochs * steps_per_epoch
    found = LearningRate(
        options.learning_rate * find_scale(options, batch),
        steps,
        max(1, round(rise)),
        options.schedule,
        options.step_epochs * steps_per_epoch,
        options.step_factor,
        own,
    )
    for step in (0, steps - 1):
        found(step)
    return found


def find_scale(options: OptimisationOptions, batch: int) -> float:
    """What a global batch of so many samples multiplies the learning rate by.

    Linear scaling: P. Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, 2017.
    """
    return 1.0 if options.base_batch is None else batch / options.base_batch


def describe_scaling(options: OptimisationOptions, batch: int) -> str:
    """The console's line."""
    assert options.learning_rate is not None and options.base_batch is not None
    peak = options.learning_rate * find_scale(options, batch)
    return (
        f"Learning rate: {options.learning_rate:g} x {count_noun(batch, 'sample')} per step / base "
        f"batch {options.base_batch} = {peak:g} at its peak"
    )
