"""Options of the parallelism: how the ranks share a model, and how a step is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpiddp.training.options.checks import check


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions:
    """How a step is computed."""

    accumulation_steps: int = 1
    """Forward and backward passes that a step's batch is cut into: less memory, the same step."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of forward passes; parameters stay in fp32. fp16 needs GPUs."""

    def __post_init__(self) -> None:
        check("accumulation_steps", self.accumulation_steps >= 1, "1 or more",
              self.accumulation_steps)  # fmt: skip
