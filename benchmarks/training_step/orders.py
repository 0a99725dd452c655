"""What ranks are told to measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.training_step.contenders import Contender
from benchmarks.training_step.workloads import Workload


@dataclass(frozen=True)
class Order:
    """One contender and what it trains; it comes as JSON."""

    contender: Contender
    workload: Workload
    batch_size: int
    """Samples per worker and step."""
    seed: int
    straggler: str | None = None

    def describe(self) -> dict[str, Any]:
        """As `read_order` takes it."""
        return asdict(self)


def read_order(found: Mapping[str, Any]) -> Order:
    """From JSON."""
    contender, workload = Contender(**found["contender"]), Workload(**found["workload"])
    return Order(**{**found, "contender": contender, "workload": workload})
