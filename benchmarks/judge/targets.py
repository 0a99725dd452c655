"""What the project promises of its speed, and whether a measurement keeps it (``--targets``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.records.statistics import Interval

WORDS = {True: "met", False: "missed", None: "cannot be judged from these rounds"}


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
    intervals: Mapping[str, Interval | None] = field(default_factory=dict)
    """Of the values that are ratios of rounds, by the same places; None if the rounds tell nothing.
    """

    def judge(self, place: str) -> bool | None:
        """Whether it is met there; None if the rounds do not tell the value from a bound."""
        bounds = [bound for bound in (self.at_least, self.at_most) if bound is not None]
        if place in self.intervals:
            interval = self.intervals[place]
            if interval is None or any(interval.low < each < interval.high for each in bounds):
                return None
        value = self.found[place]
        return (
            value is not None
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    @property
    def met(self) -> bool | None:
        """Everywhere; None if it is missed nowhere, and somewhere cannot be judged."""
        verdicts = set(map(self.judge, self.found))
        return False if False in verdicts else None if None in verdicts else True

    def __str__(self) -> str:
        # A single value is what the last word is about.
        marks = len(self.found) > 1
        shown = [
            f"{place} {'never reached' if value is None else f'{value:.3f}'}".strip()
            + (f" ({WORDS[self.judge(place)]})" if marks and not self.judge(place) else "")
            for place, value in self.found.items()
        ]
        note = self.note and f"; {self.note}"
        return f"{self.text}: {', '.join(shown)}: {WORDS[self.met]}{note}"
