"""Options of the optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mpiddp.training.options.checks import check, is_positive

LEARNING_RATES = {"sgd": 0.05, "adamw": 0.003}
"""What ``learning_rate`` becomes where it is not given, per optimizer."""


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions:
    """How long and how it is trained."""

    epochs: int = 15
    """Passes over the training data, in epochs."""

    learning_rate: float | None = None
    """Peak learning rate, after a short warm-up (default: 0.05 with sgd, 0.003 with adamw)."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""

    momentum: float = 0.9
    """Nesterov momentum of sgd, or adamw's first beta; 0 to below 1."""

    weight_decay: float = 0.0005
    """Weight decay, per step and unit of learning rate."""

    seed: int = 0
    """Seed of initial parameters, order of samples and made-up data."""

    evaluate_every: int = 5
    """Epochs between two evaluations; the last epoch is always evaluated."""

    on_nan: Literal["stop", "skip"] = "stop"
    """Where a rank's loss is not finite: end the run, or leave out the step on all ranks."""

    def __post_init__(self) -> None:
        for name in ("epochs", "evaluate_every"):
            check(name, getattr(self, name) >= 1, "1 or more", getattr(self, name))
        rate = self.learning_rate
        check("learning_rate", rate is None or is_positive(rate), "above 0", rate)
        check("momentum", 0 <= self.momentum < 1, "0 to below 1", self.momentum)
        decay = self.weight_decay
        check("weight_decay", decay >= 0 and math.isfinite(decay), "0 or more", decay)
        check("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1", self.seed)
