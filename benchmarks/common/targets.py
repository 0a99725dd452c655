"""What the project promises of its speed, and whether a measurement keeps it (``--targets``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    text: str
    found: Mapping[str, float | None]
    """By where it was measured, such as a buffer's size; ``""`` for a single value. None for what
    was never reached."""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    """What else was measured, after the verdict."""

    def is_met_by(self, value: float | None) -> bool:
        return (
            value is not None
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    @property
    def met(self) -> bool:
        return all(map(self.is_met_by, self.found.values()))

    def __str__(self) -> str:
        # A single value is what the last word is about.
        marks = len(self.found) > 1
        shown = [
            f"{place} {'never reached' if value is None else f'{value:.3f}'}".strip()
            + (" (missed)" if marks and not self.is_met_by(value) else "")
            for place, value in self.found.items()
        ]
        verdict = "met" if self.met else "missed"
        return f"{self.text}: {', '.join(shown)}: {verdict}{self.note and f'; {self.note}'}"
