"""How alike neighbouring rounds are, and how many times wider that makes what they say.

A neighbour on the machine stays for several rounds, and a clock or a page cache changes slowly. Ten
rounds then say less than ten independent ones, and their spread does not show it. So blocks of
rounds are looked at: the autocorrelations of a series up to the length of a block, weighted as in
the variance of a block's mean (Bartlett 1946). What that should be in an AR(1) process of as many
rounds, with the bias that a mean taken from the same few rounds brings, is computed, and gives the
process's coefficient; the coefficient gives the standard error of a mean over the one that
independent rounds would have.

A few rounds tell little about it. All series of a record are put together, with a margin of
a standard error, in which series that move together count as one. A series that is more alike than
that, by more than its own standard error, counts by itself. States that last longer than a run are
not seen in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy
from numpy.typing import NDArray

from benchmarks.records.statistics import quantile

Array = NDArray[numpy.float64]

FEWEST_ROUNDS = 3
LONGEST_BLOCK = 8
MOST_ROUNDS = 64
"""Longer series are as these."""
COEFFICIENTS = numpy.linspace(0, 0.96, 49)
"""Beyond the last one rounds tell nothing."""
FENCES = 1.5
"""Quartile ranges beyond the quartiles, from where on a value counts as if it were there."""


def find_coefficient(runs: Iterable[Sequence[Sequence[float]]]) -> float:
    """Of the AR(1) process, of all series together; 1 if they are too few or too short to tell.

    ``runs``: series of positive values, in order of rounds. Those of one run may have met the same
    states of the machine.
    """
    known = [[series for series in run if len(series) >= FEWEST_ROUNDS] for run in runs]
    if not any(known):
        return 1.0
    scaled = [[each for each in map(_standardize, run) if each.any()] for run in known]
    found = [each for run in scaled for each in run]
    # Of values that never change there is no noise.
    return _solve(found, sum(map(_count_independent, scaled)), margin=1.0) if found else 0.0


def find_widening(series: Iterable[Sequence[float]], coefficient: float) -> float:
    """How many times wider their intervals are than those of independent rounds; may be infinite.

    ``coefficient``: of the record that the series are from.
    """
    found = [each for each in map(_standardize, series) if len(each) >= FEWEST_ROUNDS]
    found = [each for each in found if each.any()]
    if not found:
        return 1.0 if coefficient < 1 else math.inf
    own = _solve(found, sum(map(len, found)), margin=-1.0)
    largest = max(own, coefficient)
    if largest > COEFFICIENTS[-1]:
        return math.inf
    factors = [numpy.interp(largest, COEFFICIENTS, _expect(len(each))[1]) for each in found]
    return float(numpy.average(factors, weights=list(map(len, found))))


def _standardize(series: Sequence[float]) -> Array:
    """Logarithms with the mean 0 and squares that add up to 1; zeros for equal values."""
    values = numpy.log(series)
    # NumPy's own takes ten times as long for a few.
    ordered = values.tolist()
    low, high = quantile(ordered, 0.25), quantile(ordered, 0.75)
    # Where most values are equal, the others are all that changes.
    reach = FENCES * (high - low) or math.inf
    values = values.clip(low - reach, high + reach)
    values -= values.mean()
    length = math.sqrt(values @ values)
    return values / length if length > 1e-12 * len(values) else numpy.zeros(len(values))


def _count_independent(run: Sequence[Array]) -> float:
    """Rounds of as many independent series as these are worth."""
    count, rounds = len(run), sum(map(len, run))
    if count < 2:
        return float(rounds)
    longest = max(map(len, run))
    table = numpy.array([numpy.pad(each, (0, longest - len(each))) for each in run])
    # Two series have the square of their correlation in common. The sum of the squares of all pairs
    # is that of the smaller product's; by chance alone each is one over the rounds less 1.
    product = table.T @ table if count > longest else table @ table.T
    pairs = (float((product**2).sum()) - count) / (count * (count - 1))
    usual = rounds / count
    common = max(0.0, ((usual - 1) * pairs - 1) / (usual - 2))
    return rounds / (1 + (count - 1) * common)


def _solve(series: Sequence[Array], independent: float, margin: float) -> float:
    """The coefficient of which such blocks, ``margin`` standard errors off, are expected."""
    weights = numpy.array(list(map(len, series)), dtype=float)
    errors = [numpy.sum(_weigh(len(each)) ** 2) for each in series]
    blocks = numpy.average(list(map(_measure, series)), weights=weights)
    blocks += margin * math.sqrt(numpy.average(errors, weights=weights) / independent)
    expected = numpy.average([_expect(len(each))[0] for each in series], axis=0, weights=weights)
    return float(numpy.interp(blocks, expected, COEFFICIENTS, right=1.0))


def _weigh(rounds: int) -> Array:
    """Of the autocorrelations, from that of neighbours on."""
    block = max(2, min(rounds // 2, LONGEST_BLOCK))
    return 1 - numpy.arange(1, block) / block


def _measure(scaled: Array) -> float:
    weights = _weigh(len(scaled))
    return float(
        sum(weight * (scaled[lag:] @ scaled[:-lag]) for lag, weight in enumerate(weights, 1))
    )


def _expect(rounds: int) -> tuple[Array, Array]:
    """By coefficient: what `_measure` gives, and the widening."""
    return _simulate(min(rounds, MOST_ROUNDS))


@lru_cache
def _simulate(rounds: int) -> tuple[Array, Array]:
    places = numpy.arange(rounds)
    centring = numpy.eye(rounds) - 1 / rounds
    found = []
    for coefficient in COEFFICIENTS:
        covariance = coefficient ** numpy.abs(numpy.subtract.outer(places, places))
        # Of values less their mean.
        centred = centring @ covariance @ centring
        variance = numpy.trace(centred)
        blocks = sum(
            weight * numpy.trace(centred, lag) for lag, weight in enumerate(_weigh(rounds), 1)
        )
        error = covariance.mean() / (variance / (rounds - 1) / rounds)
        freedom = variance**2 / float((centred**2).sum())
        found.append((blocks / variance, math.sqrt(error) * _stretch(2 * freedom)))
    expected, widths = numpy.array(found).T
    return expected, widths / widths[0]


def _stretch(freedom: float) -> float:
    """Student's quantile of 0.001 over the normal one: his expansion by Fisher (1925)."""
    return 1 + 2.64 / freedom + 6.34 / freedom**2
