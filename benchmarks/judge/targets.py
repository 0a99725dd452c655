"""What the project promises of its speed, and whether a measurement keeps it (``--targets``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.judge.ratios import Ratio, find_greater
from benchmarks.records.statistics import Interval

WORDS = {True: "met", False: "missed", None: "cannot be judged from these rounds"}


@dataclass(frozen=True)
class Target:
    text: str
    measured: Mapping[str, Ratio | float | None]
    """By where it was measured, such as a buffer's size; ``""`` for a single value. A number stands
    for itself; None for what was never reached."""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    """What else was measured, after the verdict."""

    @property
    def found(self) -> dict[str, float | None]:
        """The values, by the same places."""
        return {
            place: each.estimate if isinstance(each, Ratio) else each
            for place, each in self.measured.items()
        }

    @property
    def ratios(self) -> dict[str, Ratio]:
        return {place: each for place, each in self.measured.items() if isinstance(each, Ratio)}

    @property
    def intervals(self) -> dict[str, Interval | None]:
        """Of the ratios; None if the rounds tell nothing."""
        return {place: ratio.interval for place, ratio in self.ratios.items()}

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"expected a bound for the target {self.text!r}, found none")

    def _list_excesses(self, ratio: Ratio) -> list[Ratio]:
        """How far beyond each bound it is: above 1 if it misses it."""
        found = []
        if self.at_least is not None:
            found.append(ratio.over(self.at_least).turned)
        if self.at_most is not None:
            found.append(ratio.over(self.at_most))
        return found

    def judge(self, place: str) -> bool | None:
        """Whether it is met there; None if the rounds do not tell the value from a bound."""
        value = self.measured[place]
        if isinstance(value, Ratio):
            excesses = self._list_excesses(value)
            if any(find_greater({place: excess}) for excess in excesses):
                return False
            intervals = [excess.interval for excess in excesses]
            return all(each is not None and each.high <= 1 for each in intervals) or None
        return (
            value is not None
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    @property
    def met(self) -> bool | None:
        """Everywhere; None if it is missed nowhere, and somewhere cannot be judged."""
        verdicts = set(map(self.judge, self.measured))
        return False if False in verdicts else None if None in verdicts else True

    def describe(self) -> dict[str, Any]:
        """The target for a record."""
        return {
            "text": self.text,
            "found": self.found,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "note": self.note,
            "intervals": {place: each and asdict(each) for place, each in self.intervals.items()},
            "met": self.met,
        }

    def __str__(self) -> str:
        # A single value is what the last word is about.
        marks = len(self.measured) > 1
        shown = [
            f"{place} {'never reached' if value is None else f'{value:.3f}'}".strip()
            + (f" ({WORDS[self.judge(place)]})" if marks and not self.judge(place) else "")
            for place, value in self.found.items()
        ]
        note = self.note and f"; {self.note}"
        return f"{self.text}: {', '.join(shown)}: {WORDS[self.met]}{note}"
