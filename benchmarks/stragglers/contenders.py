"""What ``python -m benchmarks stragglers`` compares."""

from __future__ import annotations

from dataclasses import dataclass

from mpiddp.training.config import UNLIMITED

IN_STEP = "0"
"""The staleness that the others are compared with."""


@dataclass(frozen=True)
class Contender:
    """A way to train, with a straggler."""

    straggler: str
    staleness: str | None
    """None for the framework's all-reduce."""

    @property
    def way(self) -> str:
        usual = {None: "framework", IN_STEP: "server, in step", UNLIMITED: "server, no bound"}
        return usual.get(self.staleness, f"server, {self.staleness} steps")

    @property
    def name(self) -> str:
        return f"{self.way}, {self.straggler}"
