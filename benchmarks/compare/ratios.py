"""The ratio of two samples, with an interval and tests that assume no distribution.

Both samples come from runs of their own, so their values are not paired. Under the hypothesis that
the one is ``ratio`` times the other, every order of the values is equally likely, and how many of
all pairs lie above that ratio has a known distribution (Mann & Whitney 1947). The estimate is the
median of the ratios of all pairs (Hodges & Lehmann 1963, on logarithms), and the ends of its
interval are two of those ratios (Moses; Hollander, Wolfe & Chicken, "Nonparametric statistical
methods", 4.3).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeVar

import numpy

from benchmarks.common.statistics import CONFIDENCE, Interval

Key = TypeVar("Key")

MOST_PAIRS = 2500
"""Up to so many pairs the distribution is counted; beyond, it is close to the normal one."""


@dataclass(frozen=True)
class Ratio:
    """Of two samples, the second one over the first."""

    estimate: float
    interval: Interval | None
    """None if the samples are too few for one."""


def estimate_ratio(olds: Sequence[float], news: Sequence[float]) -> Ratio:
    """``news`` over ``olds``; all values are above 0."""
    ratios = numpy.sort(numpy.divide.outer(news, olds), axis=None)
    outside = find_quantile(len(olds), len(news), (1 - CONFIDENCE) / 2)
    interval = None
    if outside is not None:
        interval = Interval(float(ratios[outside]), float(ratios[-1 - outside]), CONFIDENCE)
    return Ratio(float(numpy.median(ratios)), interval)


def find_probability(olds: Sequence[float], news: Sequence[float], ratio: float) -> float:
    """How probable such samples are if ``news`` are at most ``ratio`` times ``olds``.

    Ties count half, rounded against a finding.
    """
    scaled = numpy.multiply(olds, ratio)
    above = numpy.greater.outer(news, scaled).sum() + numpy.equal.outer(news, scaled).sum() / 2
    return tail(len(olds), len(news), math.floor(above))


def tail(count: int, others: int, above: int) -> float:
    """Probability that at least ``above`` of all pairs of two like samples lie above."""
    pairs = count * others
    if pairs > MOST_PAIRS:
        deviation = math.sqrt(pairs * (count + others + 1) / 12)
        return 1 - NormalDist(pairs / 2, deviation).cdf(above - 0.5)
    # By symmetry: as many arrangements have at least so many pairs above as below.
    ways = count_arrangements(*sorted((count, others)))
    return ways[pairs - above] / ways[-1]


@lru_cache
def find_quantile(count: int, others: int, probability: float) -> int | None:
    """The most pairs k of which at most k lie above with ``probability`` or less; None for none.

    Of the sorted ratios of all pairs, those at k and -1 - k, from 0, enclose the true one with
    probability 1 - 2 ``probability`` at least.
    """
    pairs = count * others
    at_most = range(pairs // 2)
    found = bisect.bisect_right(at_most, probability, key=lambda k: tail(count, others, pairs - k))
    return found - 1 if found else None


@lru_cache
def count_arrangements(count: int, others: int) -> tuple[int, ...]:
    """At place k, in how many orders of two samples at most k of all pairs lie above.

    The numbers of exactly k are the coefficients of a Gaussian binomial, the product of
    (1 - x^(others + i)) / (1 - x^i) for i from 1 to ``count``.
    """
    size = count * others + 1
    ways = [1] + [0] * (size - 1)
    for i in range(1, count + 1):
        for k in range(size - 1, others + i - 1, -1):
            ways[k] -= ways[k - others - i]
        for k in range(i, size):
            ways[k] += ways[k - i]
    return tuple(itertools.accumulate(ways))


def adjust(probabilities: Mapping[Key, float]) -> dict[Key, float]:
    """Each probability for the whole family: those at most r hold, all together, with rate r.

    Holm's step-down of Bonferroni's correction (1979), which holds however the tests depend on
    one another.
    """
    adjusted, highest = {}, 0.0
    for place, (key, probability) in enumerate(
        sorted(probabilities.items(), key=lambda item: item[1])
    ):
        highest = max(highest, min(1.0, probability * (len(probabilities) - place)))
        adjusted[key] = highest
    return adjusted
