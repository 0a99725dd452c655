"""Finds the links that are slower than the others, in what all pairs of nodes measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.common.options import describe_seconds
from benchmarks.common.statistics import quantile

SLOW = 1.5
"""Times the usual seconds, from which on a link is slow."""
QUICK_SHARE = 3
"""The quickest pairs, one in so many, are what is usual: one slow node of three has two thirds of
the pairs."""
FEWEST_ROUNDS = 3

Pair = tuple[int, int]


def list_slow(rounds: Mapping[Pair, Sequence[float]], what: str = "node") -> list[str]:
    """A line for each node all of whose links are slow, and for each other slow link.

    A link is slow if it takes SLOW times as long as a usual one in every round, and longer than
    nearly all rounds of those: on a busy machine, latencies of equal links differ by more. If there
    are two ends, there is nothing to compare with but the other direction.

    Args:
        rounds: seconds of each round, by the ends of each ordered pair.
        what: the ends are.
    """
    if not rounds:
        return []
    ordered = sorted(rounds.values(), key=lambda each: quantile(each, 0.5))
    quick = [value for each in ordered[: -(-len(ordered) // QUICK_SHARE)] for value in each]
    usual = quantile(quick, 0.5)
    bound = max(SLOW * usual, quantile(quick, 0.95))
    slow = {
        pair: quantile(each, 0.5)
        for pair, each in rounds.items()
        if len(each) >= FEWEST_ROUNDS and min(each) > bound
    }
    ends = sorted({end for pair in rounds for end in pair})
    named = [end for end in ends if all(pair in slow for pair in rounds if end in pair)]
    lines = [
        f"slow: {what} {end}, whose links all take "
        f"{min(slow[pair] for pair in slow if end in pair) / usual:.1f} times as long as usual "
        f"({describe_seconds(usual)}), or more"
        for end in named
    ]
    return lines + [
        f"slow: {what} {source} → {what} {target} takes {seconds / usual:.1f} times as long as "
        f"usual ({describe_seconds(seconds)}, not {describe_seconds(usual)})"
        for (source, target), seconds in sorted(slow.items())
        if source not in named and target not in named
    ]
