"""Finds the rank that the others wait for, in what all ranks measured.

Two things make a rank slow, and each shows elsewhere. A rank that comes late to a collective in
which none is done before all have come waits least in it: its own time is the shortest. A rank
whose core is slow, or shared, makes fewer loops in the time in which all compute before each visit.

Ranks that are alike take turns in being last. So a rank is named only if it stands out in nearly
all visits, and by more than clocks and wake-ups differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.records.statistics import quantile

FEWEST_VISITS = 12
MOST_VISITS_SHARE = 0.8
"""Of the visits in which it must stand out."""
LATE_SHARE, LATE_SECONDS = 0.2, 20e-6
"""How much less it waits than the next one: of the time, and at least."""
SLOW_SHARE = 0.75
"""Of the next slowest core's speed."""


@dataclass(frozen=True)
class SlowRank:
    rank: int
    reason: str


def find_late_rank(visits: Sequence[Sequence[Sequence[float]]]) -> SlowRank | None:
    """The rank that comes late.

    Args:
        visits: seconds of each visit, by rank: of each iteration.
    """
    gaps: list[tuple[int, float]] = []
    for by_rank in visits:
        usual = [quantile(times, 0.5) for times in by_rank]
        first, second, *_ = sorted(range(len(usual)), key=usual.__getitem__)
        gap = usual[second] - usual[first]
        if gap >= max(LATE_SECONDS, LATE_SHARE * max(usual)):
            gaps.append((first, gap))
    return _find_usual(gaps, len(visits), lambda late: f"comes late, by {1e6 * late:,.0f} µs")


def find_slow_core(visits: Sequence[Sequence[float]]) -> SlowRank | None:
    """The rank whose core is slow.

    Args:
        visits: loops per second of each visit, by rank.
    """
    shares: list[tuple[int, float]] = []
    for speeds in visits:
        slowest, second, *_ = sorted(range(len(speeds)), key=speeds.__getitem__)
        share = speeds[slowest] / speeds[second]
        if share <= SLOW_SHARE:
            shares.append((slowest, share))
    what = "has a slow core, at {:.2f} of the next slowest one's speed"
    return _find_usual(shares, len(visits), what.format)


def _find_usual(
    found: Sequence[tuple[int, float]], visits: int, describe: Callable[[float], str]
) -> SlowRank | None:
    """The rank that was found in most visits, with the median of how much it stood out in words;
    None if there is none, or there were few visits."""
    if visits < FEWEST_VISITS or not found:
        return None
    ((rank, count),) = Counter(rank for rank, _ in found).most_common(1)
    if count < MOST_VISITS_SHARE * visits:
        return None
    return SlowRank(rank, describe(quantile([value for each, value in found if each == rank], 0.5)))
