"""Statistics of measurements, the order of contenders, and slopes."""

from __future__ import annotations

import math
import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.records import statistics

times = st.floats(min_value=1e-3, max_value=1e3)
samples = st.lists(times, min_size=1, max_size=40)
values = st.floats(min_value=-1e3, max_value=1e3)


# Statistics


@given(samples)
def test_summary_is_numpys(values):
    summary = statistics.summarize(values)
    expected = numpy.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    found = [summary.minimum, summary.lower_quartile, summary.median]
    found += [summary.upper_quartile, summary.maximum]
    assert found == pytest.approx(expected)
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(numpy.mean(values))


def _coverage(count: int, k: int) -> float:
    """Of all ways in which values can fall below or above the median, the share in which the
    k-th smallest lies below it and the k-th largest above."""
    return sum(math.comb(count, below) for below in range(k, count - k + 1)) / 2**count


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_median_interval_is_the_narrowest_that_suffices(confidence):
    for count in range(1, 15):
        enough = [k for k in range(1, count // 2 + 1) if _coverage(count, k) >= confidence]
        interval = statistics.median_interval([float(value) for value in range(count)], confidence)
        assert (interval is None) == (not enough)
        if enough:
            k = max(enough)
            assert (interval.low, interval.high) == (k - 1, count - k)
            assert interval.confidence == pytest.approx(_coverage(count, k))
    interval = statistics.median_interval([float(value) for value in range(2500)], confidence)
    k = int(interval.low) + 1
    assert interval.high == 2500 - k
    assert confidence <= _coverage(2500, k) <= confidence + 0.03


# Order


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 3), st.integers(0, 2**31))
def test_each_contender_has_a_turn_in_each_round(count, rounds, warm_up, seed):
    names = [f"contender {index}" for index in range(count)]
    turns = list(statistics.take_turns(names, rounds=rounds, seed=seed))
    assert turns == list(statistics.take_turns(names, rounds=rounds, seed=seed))
    for start in range(0, len(turns), count):
        places, found = zip(*turns[start : start + count], strict=True)
        assert places == tuple(range(count)) and sorted(found) == names
    own = [(place, at) for at, (place, name) in enumerate(turns) if name == names[0]]
    series = statistics.make_series(own, warm_up)
    assert (*series.warm_up, *series.samples) == tuple(at for _, at in own)
    assert series.positions == tuple(place for place, _ in own)[warm_up:]


def test_the_order_differs_by_round_and_by_seed():
    orders = [list(statistics.take_turns("abcd", rounds=20, seed=seed)) for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert all({place for place, name in orders[0] if name == each} == {0, 1, 2, 3}
               for each in "abcd")  # fmt: skip


# Slopes


@given(
    st.dictionaries(st.integers(1, 64), st.integers(1, 5), min_size=2, max_size=5),
    st.floats(min_value=-50, max_value=50),
    values,
)
def test_a_straight_line_has_its_slope(counts, slope, start):
    samples = {key: [start + slope * key] * count for key, count in counts.items()}
    assert statistics.slope(samples) == pytest.approx(slope, abs=1e-6)


def test_the_interval_of_a_slope_covers_it_about_as_often_as_it_says():
    generator, covered = random.Random(1), 0
    for trial in range(100):
        samples = {n: [3 * n + generator.gauss(0, 5) for _ in range(12)] for n in (4, 8, 16)}
        interval = statistics.slope_interval(samples, seed=trial, draws=200)
        covered += interval.low <= 3 <= interval.high
    assert covered >= 85


def test_one_odd_value_hardly_moves_a_slope():
    samples = {4: [1.0] * 5, 8: [2.0] * 5, 16: [4.0, 4.0, 4.0, 4.0, 400.0]}
    assert statistics.slope(samples) == pytest.approx(0.25)


def test_statistics_refuse_what_means_nothing():
    with pytest.raises(ValueError, match="at least one value"):
        statistics.summarize([])
    with pytest.raises(ValueError, match="two different keys"):
        statistics.slope({4: [1.0, 2.0]})
    assert statistics.slope_interval({4: [1.0] * 5, 8: [2.0] * 4}, seed=0) is None
