"""Finds the links that are slower than the others, in what all pairs of nodes measured."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common.options import describe_seconds
from benchmarks.common.statistics import quantile

SLOW = 1.5
"""Times the usual seconds, from which on a link is slow."""
USUAL = 0.25
"""Below which share of the pairs the usual one lies: with few nodes, one slow node has most."""

Pair = tuple[int, int]


def list_slow(seconds: Mapping[Pair, float], what: str = "node") -> list[str]:
    """A line for each node all of whose links are slow, and for each other slow link.

    A link is slow if it takes SLOW times as long as a usual one. If there are two ends, there is
    nothing to compare with but the other direction.
    """
    if not seconds:
        return []
    usual = quantile(list(seconds.values()), USUAL)
    slow = {pair: each / usual for pair, each in seconds.items() if each > SLOW * usual}
    ends = sorted({end for pair in seconds for end in pair})
    all_slow = [end for end in ends if all(pair in slow for pair in seconds if end in pair)]
    # If every link is slow, it is because of the others' ends.
    named = all_slow if len(all_slow) < len(ends) else []
    lines = [
        f"slow: {what} {end}, whose links all take "
        f"{min(slow[pair] for pair in slow if end in pair):.1f} times as long as usual, or more"
        for end in named
    ]
    return lines + [
        f"slow: {what} {source} → {what} {target} takes {share:.1f} times as long as usual "
        f"({describe_seconds(seconds[source, target])}, {describe_seconds(usual)})"
        for (source, target), share in sorted(slow.items())
        if source not in named and target not in named
    ]
