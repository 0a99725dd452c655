"""Whether a ratio keeps a promise, by its interval."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.judge.ratios import Ratio
from benchmarks.judge.targets import Target


def make_target(
    text: str,
    found: Mapping[str, Ratio | float | None],
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Target:
    """The target over ratios of rounds, and over values that stand for themselves."""
    ratios = {place: each for place, each in found.items() if isinstance(each, Ratio)}
    values = {
        place: each.estimate if isinstance(each, Ratio) else each for place, each in found.items()
    }
    intervals = {place: ratio.interval for place, ratio in ratios.items()}
    return Target(text, values, at_least, at_most, note, intervals)
