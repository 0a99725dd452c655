"""Lines through times by size, with the sizes found from which another line holds.

Messages of small and large sizes take different protocols, and buffers fit into different caches.
So times are fitted by several lines, each for a range of sizes. For each number of lines, dynamic
programming finds those with the least sum of squared relative errors (Bellman and Roth 1969), each
weighted by how exactly that time is known; the
Bayesian information criterion (Schwarz 1978) says how many of them the data support. That break
points are found, and not asked for, is as in Ezibenroc's platform-calibration for SimGrid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEWEST = 3
"""Sizes on a line: two of them fit any line."""
MOST_LINES = 6
NEGLIGIBLE = 0.02
"""Relative error that is not worth another line."""
DOUBTFUL = 0.2
"""No time weighs less than one that is known up to so much: even those count in numbers."""
LEAST_RATIO = 1e-3
"""Of fitted to measured time, so that it has a logarithm."""
PARAMETERS = 3
"""Of a line: its α, its β and where it begins."""


class Point(NamedTuple):
    """What was measured of one size."""

    size: float
    """In bytes."""
    seconds: float
    error: float = 0.0
    """Relative: how far from it the true value may be."""


@dataclass(frozen=True)
class Segment:
    """A line, and how well it fits."""

    start: float
    """Bytes from which on it holds."""
    latency: float
    """α in seconds; of a later segment where its line meets 0 bytes."""
    seconds_per_byte: float
    break_between: tuple[float, float] | None
    """The measured sizes between which it begins; None for the first."""
    largest: float
    """Of its measured sizes, in bytes."""
    points: int
    error: float
    """Median of the relative errors."""
    largest_error: float


def fit_segments(points: Sequence[Point]) -> tuple[Segment, ...]:
    """The lines that fit best; of equal sizes the least time counts, as what disturbs adds to it.

    Raises ValueError for fewer than FEWEST different sizes, or times of 0 or less.
    """
    if min((point.seconds for point in points), default=1.0) <= 0:
        raise ValueError("times must be above 0")
    chosen: dict[float, Point] = {}
    for point in sorted(points):
        chosen.setdefault(point.size, point)
    if len(chosen) < FEWEST:
        raise ValueError(f"expected {FEWEST} sizes or more, found {len(chosen)}")
    size, time, error = np.array(list(chosen.values()), dtype=np.float64).T
    weight = NEGLIGIBLE / np.hypot(NEGLIGIBLE, np.minimum(error, DOUBTFUL))
    latency, per_byte, squares = _fit_all(size, time, weight)
    bounds = _choose(squares)
    lines = [(latency[low, high - 1], per_byte[low, high - 1]) for low, high in bounds]
    return tuple(_describe(place, bounds, lines, size, time) for place in range(len(bounds)))


def _fit_all(size: Floats, time: Floats, weight: Floats) -> tuple[Floats, Floats, Floats]:
    """α, β and the sum of squares of what each line from point i to point j is off by, weighted.

    Shape (points, points); the sum is infinite for too few points. β is never below 0, nor is
    the first line's α.
    """
    count = len(size)
    latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
    squares = np.full((count, count), np.inf)
    for low in range(count - FEWEST + 1):
        # Sums from here on, not differences of sums from 0 on: those of small sizes are far larger.
        own = weight[low:]
        near, far = own / time[low:], own * size[low:] / time[low:]
        sums = [own * near, own * far, near * near, near * far, far * far]
        y_n, y_f, n_n, n_f, f_f = (np.cumsum(each) for each in sums)
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = (n_n * y_f - n_f * y_n) / (n_n * f_f - n_f * n_f)
        slope = np.where(np.isfinite(slope) & (slope > 0), slope, 0.0)
        level = (y_n - slope * n_f) / n_n
        if low == 0:
            slope = np.where(level < 0, y_f / np.maximum(f_f, 1e-300), slope)
            level = np.maximum(level, 0.0)
        latency[low, low:], per_byte[low, low:] = level, slope
        # Of ratios: a line far below is as wrong as one far above.
        ratios = (level[:, None] + slope[:, None] * size[low:]) / time[low:]
        errors = np.tril((own * np.log(np.maximum(ratios, LEAST_RATIO))) ** 2).sum(axis=1)
        squares[low, low + FEWEST - 1 :] = errors[FEWEST - 1 :]
    return latency, per_byte, squares


def _choose(squares: Floats) -> list[tuple[int, int]]:
    """The first point of each line, and the one after its last."""
    count = len(squares)
    best, before = [squares[0]], [np.zeros(count, np.int64)]
    for _ in range(1, min(MOST_LINES, count // FEWEST)):
        # One more line, from i to j, behind the best lines up to i - 1.
        sums = np.full((count, count), np.inf)
        sums[1:] = best[-1][:-1, None] + squares[1:]
        best.append(sums.min(axis=0))
        before.append(sums.argmin(axis=0))
    prices = [_price(total[-1], lines, count) for lines, total in enumerate(best, start=1)]
    end, bounds = count, []
    for starts in reversed(before[: int(np.argmin(prices)) + 1]):
        start = int(starts[end - 1])
        bounds.append((start, end))
        end = start
    return bounds[::-1]


def _price(squares: float, lines: int, count: int) -> float:
    """The criterion, corrected for few points as Hurvich and Tsai 1989 do for Akaike's."""
    parameters = PARAMETERS * lines
    error = count * math.log(max(squares / count, NEGLIGIBLE**2))
    spare = count - parameters - 1
    return error + parameters * math.log(count) * count / spare if spare > 0 else math.inf


def _describe(
    place: int,
    bounds: Sequence[tuple[int, int]],
    lines: Sequence[tuple[float, float]],
    size: Floats,
    time: Floats,
) -> Segment:
    (low, high), (latency, per_byte) = bounds[place], lines[place]
    errors = np.abs((latency + per_byte * size[low:high]) / time[low:high] - 1)
    start, between = 0.0, None
    if place:
        start = _find_break(lines[place - 1], lines[place], size[low - 1 : low + 1])
        between = (float(size[low - 1]), float(size[low]))
    return Segment(
        start=start,
        latency=float(latency),
        seconds_per_byte=float(per_byte),
        break_between=between,
        largest=float(size[high - 1]),
        points=high - low,
        error=float(np.median(errors)),
        largest_error=float(errors.max()),
    )


def _find_break(before: tuple[float, float], after: tuple[float, float], between: Floats) -> float:
    """Where the lines meet, if they do between these sizes, and else in the middle."""
    low, high = (float(size) for size in between)
    if before[1] != after[1]:
        meeting = (after[0] - before[0]) / (before[1] - after[1])
        if low <= meeting <= high:
            return meeting
    return math.sqrt(low * high)
