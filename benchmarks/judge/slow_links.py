"""Finds the links that are slower than the others, in what all pairs of nodes measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.records.options import describe_seconds
from benchmarks.records.statistics import quantile

SLOW = 1.5
"""Times the usual seconds, from which on a link is slow."""
QUICK_SHARE = 3
"""The quickest pairs, one in so many, are what is usual: one slow node of three has two thirds of
the pairs."""
FEWEST_ROUNDS = 3

Pair = tuple[int, int]


def find_slow(rounds: Mapping[Pair, Sequence[float]]) -> tuple[float, dict[Pair, float]]:
    """The usual seconds, and how many times those each slow link takes, the slowest first.

    A link is slow if it takes SLOW times as long as a usual one in every round, and longer than
    nearly all rounds of those: on a busy machine, latencies of equal links differ by more. If there
    are two ends, there is nothing to compare with but the other direction.

    ``rounds``: seconds of each round, by the ends of each ordered pair; not empty.
    """
    seconds = {pair: quantile(each, 0.5) for pair, each in rounds.items()}
    order = sorted(seconds, key=lambda pair: seconds[pair])
    quick = [value for pair in order[: -(-len(order) // QUICK_SHARE)] for value in rounds[pair]]
    usual = quantile(quick, 0.5)
    bound = max(SLOW * usual, quantile(quick, 0.95))
    slow = {
        pair: seconds[pair] / usual
        for pair in reversed(order)
        if len(rounds[pair]) >= FEWEST_ROUNDS and min(rounds[pair]) > bound
    }
    return usual, slow


def list_slow(rounds: Mapping[Pair, Sequence[float]], what: str = "node") -> list[str]:
    """A line for each node all of whose links are slow, and for each other slow link.

    ``what``: the ends are.
    """
    if not rounds:
        return []
    usual, slow = find_slow(rounds)
    ends = sorted({end for pair in rounds for end in pair})
    named = [end for end in ends if all(pair in slow for pair in rounds if end in pair)]
    lines = [
        f"slow: {what} {end}, whose links all take "
        f"{min(slow[pair] for pair in slow if end in pair):.1f} times as long as usual "
        f"({describe_seconds(usual)}), or more"
        for end in named
    ]
    return lines + [
        f"slow: {what} {source} → {what} {target} takes {factor:.1f} times as long as "
        f"usual ({describe_seconds(factor * usual)}, not {describe_seconds(usual)})"
        for (source, target), factor in sorted(slow.items())
        if source not in named and target not in named
    ]
