"""Options of the optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from mpiddp.options.checks import REFERENCE, check, check_reference, is_positive
from mpiddp.options.fields import one_of
from mpiddp.training.options.groups.effects import FIXED, FREE

LEARNING_RATES = {"sgd": 0.05, "adamw": 0.003}
"""The default of ``learning_rate``, per optimizer."""
SCHEDULES = ("cosine", "constant", "step")


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions:
    """How long and how it is trained."""

    epochs: int = 15
    """Passes over the training data, in epochs."""

    learning_rate: float | None = None
    """Peak learning rate, after a short warm-up (default: 0.05 with sgd, 0.003 with adamw)."""

    optimizer: Annotated[str, one_of([*LEARNING_RATES, REFERENCE]), FIXED] = "sgd"
    """Optimizer; of your own, a function of parameters and learning_rate that returns one."""

    base_batch: int | None = None
    """Samples per step of all ranks for which learning_rate is meant: it is multiplied by their
    actual number divided by this one (default: it is taken as it is)."""

    schedule: Annotated[str, one_of([*SCHEDULES, REFERENCE])] = "cosine"
    """Learning rate after the warm-up: half a cosine to 0, constant, or times step_factor every
    step_epochs; or a function of step and steps that returns a factor of it, also in the
    warm-up."""

    warmup_epochs: float | None = None
    """Epochs in which the learning rate rises to its peak (default: a twentieth of all)."""

    step_epochs: float = 30
    """Epochs between two changes of the learning rate, with schedule step."""

    step_factor: float = 0.1
    """Factor of each such change, 0 to 1."""

    clip_norm: float | None = None
    """Maximum 2-norm of the gradient over all parameters; a larger gradient is scaled to it."""

    ema: float | None = None
    """Decay per step of an exponential moving average of the weights, 0 to below 1: evaluated and
    exported in place of the weights. It is less at first: (1 + step) / (10 + step)."""

    label_smoothing: float = 0.0
    """Share of each training label that is spread over all classes, 0 to below 1."""

    momentum: float = 0.9
    """Nesterov momentum of sgd, or adamw's first beta; 0 to below 1."""

    weight_decay: float = 0.0005
    """Weight decay, per step and unit of learning rate."""

    seed: Annotated[int, FIXED] = 0
    """Seed of initial parameters, order of samples and made-up data."""

    evaluate_every: Annotated[int, FREE] = 5
    """Epochs between two evaluations; the last epoch is always evaluated."""

    on_nan: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """If a rank's loss is not finite: end the run, or skip the step, on all ranks unless each has
    its own weights (average_every)."""

    def __post_init__(self) -> None:
        for name in ("epochs", "evaluate_every"):
            check(name, getattr(self, name) >= 1, "1 or more", getattr(self, name))
        rate = self.learning_rate
        check("learning_rate", rate is None or is_positive(rate), "above 0", rate)
        check_reference("optimizer", self.optimizer, list(LEARNING_RATES))
        check_reference("schedule", self.schedule, SCHEDULES)
        check("momentum", 0 <= self.momentum < 1, "0 to below 1", self.momentum)
        decay = self.weight_decay
        check("weight_decay", decay >= 0 and math.isfinite(decay), "0 or more", decay)
        self._check_schedule()
        clip = self.clip_norm
        check("clip_norm", clip is None or is_positive(clip), "above 0", clip)
        check("ema", self.ema is None or 0 <= self.ema < 1, "0 to below 1", self.ema)
        smoothing = self.label_smoothing
        check("label_smoothing", 0 <= smoothing < 1, "0 to below 1", smoothing)
        check("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1", self.seed)

    def _check_schedule(self) -> None:
        base, rise = self.base_batch, self.warmup_epochs
        check("base_batch", base is None or base >= 1, "1 or more samples", base)
        good = rise is None or 0 <= rise <= self.epochs
        check("warmup_epochs", good, f"0 to epochs = {self.epochs}", rise)
        check("step_epochs", is_positive(self.step_epochs), "above 0 epochs", self.step_epochs)
        check("step_factor", 0 <= self.step_factor <= 1, "0 to 1", self.step_factor)
