"""Measure contenders in turns, and say what the samples say.

Contenders that are measured one after the other meet different machines: caches, clocks and
neighbours change. So every round measures each of them once, in a new random order, and two
contenders are compared round by round. The first rounds warm up and are kept apart. Medians and
intervals make no assumption about the distribution (Hoefler & Belli, "Scientific benchmarking of
parallel computing systems", SC'15).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Key = TypeVar("Key")

CONFIDENCE = 0.95
"""Of intervals."""
BOOTSTRAP_LEAST = 5
CLOSE = 0.05
"""Of a median: how far off its interval's ends may be if it counts as known."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 1000
"""Of a contender whose median is not known."""


@dataclass(frozen=True)
class Series(Generic[T]):
    """What one contender gave, round by round."""

    warm_up: tuple[T, ...]
    samples: tuple[T, ...]
    positions: tuple[int, ...]
    """The contender's place in the order of each round, from 0; warm-up rounds left out."""


def take_turns(
    names: Sequence[Key],
    *,
    rounds: int,
    seed: int,
    is_settled: Callable[[Key], bool] = lambda name: False,
) -> Iterator[tuple[int, Key]]:
    """Each contender's place in its round, and the contender: once per round each.

    The order of a round is drawn from ``seed``. One that is settled before a round takes no part
    in it, nor in later ones.
    """
    generator, left = random.Random(seed), list(names)
    for _ in range(rounds):
        left = [name for name in left if not is_settled(name)]
        order = list(left)
        generator.shuffle(order)
        yield from enumerate(order)


def make_series(visits: Sequence[tuple[int, T]], warm_up: int) -> Series[T]:
    """Of each visit its place in the order of its round, and what was found; in order of rounds."""
    positions, samples = [place for place, _ in visits], tuple(found for _, found in visits)
    return Series(samples[:warm_up], samples[warm_up:], tuple(positions[warm_up:]))


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    confidence: float
    """Probability that such an interval covers the true value; at least what was asked for."""


@dataclass(frozen=True)
class Summary:
    """A sample in a few numbers, in its own unit."""

    count: int
    minimum: float
    low: float
    """Below which 5 % lie."""
    lower_quartile: float
    median: float
    upper_quartile: float
    high: float
    """Below which 95 % lie."""
    maximum: float
    interval: Interval | None
    """Of the median, 95 %; None where the samples are too few for one. Where several values come
    from one round it is narrower than the rounds differ: contenders are compared by the rounds."""
    mean: float | None = None
    """None in records that were made before it was kept."""

    @property
    def spread(self) -> Spread:
        return Spread(self.lower_quartile, self.median, self.upper_quartile)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of the sample lies, interpolated between neighbours.

    NumPy's default ("linear"; type 7 of Hyndman & Fan 1996).
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Confidence interval of the median between two order statistics; None if there is none.

    A value lies below the true median with probability 1/2, so the number of those that do is
    binomial, and the k-th smallest and k-th largest of n values enclose the median unless fewer
    than k lie on one side: confidence 1 - 2 P(B(n, 1/2) < k). The largest k that suffices is
    taken (David & Nagaraja, "Order statistics", 7.1). 95 % need 6 values.
    """
    count = len(values)
    below, chosen = 0.0, None
    # Integers, whose quotient is a number where each of them alone would be too great for one.
    ways = 1
    for k in range(1, count // 2 + 1):
        below += ways / (1 << count)
        ways = ways * (count - k + 1) // k
        if 1 - 2 * below < confidence:
            break
        chosen = (k, 1 - 2 * below)
    if chosen is None:
        return None
    k, reached = chosen
    ordered = sorted(values)
    return Interval(ordered[k - 1], ordered[count - k], reached)


def summarize(values: Sequence[float]) -> Summary:
    """Describe a sample. Raises ValueError if it is empty."""
    return Summary(
        count=len(values),
        minimum=quantile(values, 0),
        low=quantile(values, 0.05),
        lower_quartile=quantile(values, 0.25),
        median=quantile(values, 0.5),
        upper_quartile=quantile(values, 0.75),
        high=quantile(values, 0.95),
        maximum=quantile(values, 1),
        interval=median_interval(values),
        mean=math.fsum(values) / len(values),
    )


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles around it: all that a line of a drawing shows."""

    lower_quartile: float
    median: float
    upper_quartile: float

    def scaled(self, factor: float) -> Spread:
        return Spread(*(each * factor for each in astuple(self)))

    def inverted(self, numerator: float) -> Spread:
        """Of the numerator over each value."""
        return Spread(*(numerator / each for each in reversed(astuple(self))))


def spread(values: Sequence[float]) -> Spread:
    return Spread(*(quantile(values, fraction) for fraction in (0.25, 0.5, 0.75)))


def exact(value: float) -> Spread:
    """Of a value without repetitions."""
    return Spread(value, value, value)


@dataclass(frozen=True)
class StoppingRule:
    """When a contender has been measured often enough."""

    budget: float
    """Seconds, after which it is enough in any case but for LEAST_ROUNDS."""
    rounds: int = 0
    """If not 0, so many, whatever they say."""

    def judge(self, medians: Sequence[float], seconds: float) -> str:
        """Why it is enough: ``rounds``, ``interval`` or ``budget``; empty if it is not.

        Args:
            medians: of each round so far. What counts is the interval of their median, since
                values of one round are more alike than rounds are.
            seconds: that were spent on them.
        """
        if self.rounds:
            return "rounds" if len(medians) >= self.rounds else ""
        if is_known(medians):
            return "interval"
        is_spent = seconds >= self.budget and len(medians) >= LEAST_ROUNDS
        return "budget" if is_spent or len(medians) >= MOST_ROUNDS else ""


def is_known(values: Sequence[float]) -> bool:
    """Whether both ends of the median's interval are within CLOSE of the median."""
    interval = median_interval(values)
    if interval is None:
        return False
    median = quantile(values, 0.5)
    return max(interval.high - median, median - interval.low) <= CLOSE * abs(median)


def slope(samples: Mapping[float, Sequence[float]]) -> float:
    """How much the values grow per unit of what they are sorted by.

    The median of the slopes between any two values of different keys: one odd value in four
    moves it little (Theil 1950; Sen 1968). Raises ValueError for fewer than two keys.
    """
    if len(samples) < 2:
        raise ValueError(f"a slope needs two different keys, found {list(samples)}")
    slopes = [
        (after - before) / (high - low)
        for low, high in itertools.combinations(sorted(samples), 2)
        for before in samples[low]
        for after in samples[high]
    ]
    return quantile(slopes, 0.5)


def slope_interval(
    samples: Mapping[float, Sequence[float]], *, seed: int, draws: int = 1000
) -> Interval | None:
    """Confidence interval of the slope; None where a key has fewer than BOOTSTRAP_LEAST values.

    By the bootstrap's percentiles (Efron 1979): each key's values are resampled,
    ``draws`` times.
    """
    if min(map(len, samples.values())) < BOOTSTRAP_LEAST:
        return None
    generator = random.Random(seed)
    slopes = [
        slope({key: generator.choices(values, k=len(values)) for key, values in samples.items()})
        for _ in range(draws)
    ]
    outside = (1 - CONFIDENCE) / 2
    return Interval(quantile(slopes, outside), quantile(slopes, 1 - outside), CONFIDENCE)
