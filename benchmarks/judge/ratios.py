"""Is A slower than B: the one answer, with one error rate, by tests that assume no distribution.

`find_greater` answers for all ratios that are judged together. What these are, each command says in
docs/benchmarks.md.

Two contenders that were measured in the same rounds are compared round by round. If neither is the
slower one, each of the ratios lies above 1 with probability 1/2: the sign test, and the interval of
their median that belongs to it. The values of two runs are not paired. If neither is the slower
one, every order of the values is equally likely, and how many of all pairs lie above 1 has a known
distribution (Mann & Whitney 1947). The estimate is the median of the ratios of all pairs
(Hodges & Lehmann 1963, on logarithms), and the ends of its interval are two of those ratios (Moses;
Hollander, Wolfe & Chicken, "Nonparametric statistical methods", 4.3).

Both suppose that rounds are independent. If neighbouring rounds are alike (`correlation`), the
interval is widened around the estimate, and a bound counts as so much nearer to it.

The distributions are counted here: SciPy gives that of Mann & Whitney for given samples only, and
takes longer to import than a comparison takes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import TypeVar

import numpy
from numpy.typing import NDArray

from benchmarks.judge.correlation import find_coefficient, find_widening
from benchmarks.records.statistics import CONFIDENCE, Interval

Key = TypeVar("Key")

ERROR_RATE = 1 - CONFIDENCE
"""The probability of a wrong answer among equal contenders that are judged together: one half that
some contender is called slower, the other half that one is called faster."""
MOST_PAIRS = 2500
"""Up to so many pairs the distribution is counted; beyond, it is close to the normal one."""
LARGEST_LOGARITHM = 700.0


@dataclass(frozen=True)
class Ratio:
    """Of two contenders' values, the second one's over the first one's."""

    ratios: NDArray[numpy.float64]
    """Of rounds or of all pairs, in rising order."""
    counts: tuple[int, int]
    """Of the values of each, if pairs of all are counted; of the rounds and 0, if rounds are."""
    widening: float
    """Of the interval, for rounds that are alike; infinite if they tell nothing."""

    @cached_property
    def estimate(self) -> float:
        return _find_middle(self.ratios)

    @property
    def turned(self) -> Ratio:
        """The first one's values over the second one's."""
        return replace(self, ratios=1 / self.ratios[::-1])

    def over(self, factor: float) -> Ratio:
        """The ratio by ``factor``."""
        return replace(self, ratios=self.ratios / factor)

    @property
    def interval(self) -> Interval | None:
        return self.find_interval(CONFIDENCE)

    def find_interval(self, confidence: float) -> Interval | None:
        """None if the values are too few for one, or tell nothing."""
        outside = find_quantile(*self.counts, (1 - confidence) / 2)
        if outside is None or self.widening == math.inf:
            return None
        ends = (float(self.ratios[outside]), float(self.ratios[-1 - outside]))
        low, high = map(self._widen, ends)
        return Interval(low, high, confidence)

    def _widen(self, end: float) -> float:
        distance = math.log(end / self.estimate)
        if distance == 0:
            return end
        moved = math.log(self.estimate) + self.widening * distance
        return math.exp(min(LARGEST_LOGARITHM, moved))

    def find_probability(self, bound: float) -> float:
        """How probable such values are if the ratio is at most ``bound``.

        Ties count half, rounded against a finding.
        """
        near = bound * (self.estimate / bound) ** (1 - 1 / self.widening)
        above = (self.ratios > near).sum() + (self.ratios == near).sum() / 2
        return tail(*self.counts, math.floor(above))


def compare_rounds(olds: Sequence[float], news: Sequence[float], coefficient: float) -> Ratio:
    """``news`` over ``olds``, round by round, as far as both have rounds; all are above 0.

    ``coefficient``: of the ratios of all that is judged together (`find_common`).
    """
    ratios = divide_rounds(olds, news)
    widening = find_widening([ratios], coefficient)
    return Ratio(numpy.sort(ratios), (len(ratios), 0), widening)


def find_common(runs: Iterable[Sequence[Sequence[float]]]) -> float:
    """The coefficient of ratios, round by round: of all series of a run by its first one."""
    return find_coefficient(
        [divide_rounds(first, each) for each in rest] for first, *rest in filter(None, runs)
    )


def estimate_rounds(olds: Sequence[float], news: Sequence[float]) -> float:
    """The estimate alone, round by round."""
    return _find_middle(numpy.sort(divide_rounds(olds, news)))


def divide_rounds(olds: Sequence[float], news: Sequence[float]) -> list[float]:
    return [new / old for old, new in zip(olds, news, strict=False)]


def compare_runs(
    olds: Sequence[float], runs: Sequence[Sequence[float]], coefficient: float
) -> Ratio:
    """The values of ``runs``, all together, over ``olds``; all are above 0.

    ``coefficient``: of the values of all that is judged together.
    """
    news = [value for run in runs for value in run]
    widening = find_widening([olds, *runs], coefficient)
    return Ratio(divide_all(olds, news), (len(olds), len(news)), widening)


def estimate_ratio(olds: Sequence[float], news: Sequence[float]) -> float:
    """The estimate alone, of two runs."""
    return _find_middle(divide_all(olds, news))


def divide_all(olds: Sequence[float], news: Sequence[float]) -> NDArray[numpy.float64]:
    return numpy.sort(numpy.divide.outer(news, olds), axis=None)


def _find_middle(ratios: NDArray[numpy.float64]) -> float:
    """The median; of two in the middle their geometric mean, so that it can be turned round."""
    middle = len(ratios) // 2
    return math.sqrt(float(ratios[middle]) * float(ratios[-1 - middle]))


@lru_cache
def tail(count: int, others: int, above: int) -> float:
    """Probability that at least ``above`` of all pairs of two like samples lie above 1.

    Of ``count`` rounds, if there are no ``others``.
    """
    if not others:
        return sum(math.comb(count, k) for k in range(above, count + 1)) / (1 << count)
    pairs = count * others
    if pairs > MOST_PAIRS:
        deviation = math.sqrt(pairs * (count + others + 1) / 12)
        return 1 - NormalDist(pairs / 2, deviation).cdf(above - 0.5)
    # By symmetry: as many arrangements have at least so many pairs above as below.
    ways = count_arrangements(*sorted((count, others)))
    return ways[pairs - above] / ways[-1]


@lru_cache
def find_quantile(count: int, others: int, probability: float) -> int | None:
    """The most pairs k of which at most k lie above 1 with ``probability`` or less; None for none.

    Of the sorted ratios, those at k and -1 - k, from 0, enclose the true one with probability
    1 - 2 ``probability`` at least.
    """
    pairs = count * (others or 1)
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


# ---- the answer ---------------------------------------------------------------------------


def find_greater(ratios: Mapping[Key, Ratio]) -> set[Key]:
    """Which ratios are above 1; half of ERROR_RATE is for all of them together."""
    return {key for key, found in find_probabilities(ratios).items() if found <= ERROR_RATE / 2}


def find_probabilities(ratios: Mapping[Key, Ratio], bound: float = 1.0) -> dict[Key, float]:
    """How probable it is, if none is above ``bound``, that any looks as this one does (Holm)."""
    return adjust({key: ratio.find_probability(bound) for key, ratio in ratios.items()})


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
