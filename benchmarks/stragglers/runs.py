"""What ``python -m benchmarks stragglers`` runs, and what a run came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpiddp.training.config import UNLIMITED

IN_STEP = "0"
"""The staleness that the others are compared with."""


@dataclass(frozen=True)
class Cell:
    """A way to train, with a straggler."""

    straggler: str
    staleness: str | None
    """None for the framework's all-reduce."""

    @property
    def way(self) -> str:
        """For people."""
        usual = {None: "framework", IN_STEP: "server, in step", UNLIMITED: "server, no bound"}
        return usual.get(self.staleness, f"server, {self.staleness} steps")

    @property
    def name(self) -> str:
        """Of its own."""
        return f"{self.way}, {self.straggler}"


@dataclass(frozen=True)
class Point:
    """A run after one of its epochs."""

    seconds: float
    """Of training, up to here."""
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    points: tuple[Point, ...]
    staleness: Mapping[int, int]

    def find_time(self, accuracy: float) -> float | None:
        """Seconds of training until an evaluation reached the accuracy; None if none did."""
        return next((each.seconds for each in self.points if each.accuracy >= accuracy), None)


def read_outcome(rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """From the rows of ``metrics.jsonl``."""
    points, seconds = [], 0.0
    for row in rows:
        seconds += row["seconds"]
        points.append(Point(seconds, row["test_accuracy"]))
    counts = rows[-1]["staleness"] or {}
    return Outcome(tuple(points), {int(late): count for late, count in counts.items()})
