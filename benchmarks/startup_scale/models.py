"""How a count grows with the ranks and the nodes: which terms, with which residuals.

A model is a sum of few terms. Which terms is decided by leaving out one point after the other and
predicting it from the rest (cross-validation; Stone 1974). One with fewer terms is kept unless
another one predicts clearly better; if they predict alike, a line is preferred to a logarithm.
Squares of residuals are weighed by the count itself, as a count's variance grows with it, or the
largest counts would decide alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy

Place = tuple[int, int]
"""Ranks and nodes."""

TERMS: Mapping[str, Callable[[Place], float]] = {
    "lg ranks": lambda place: math.log2(place[0]),
    "ranks": lambda place: float(place[0]),
    "ranks²": lambda place: float(place[0]) ** 2,
    "lg nodes": lambda place: math.log2(place[1]),
    "nodes": lambda place: float(place[1]),
    "ranks a node": lambda place: place[0] / place[1],
}
BY_RANKS = ((), ("ranks",), ("ranks²",), ("lg ranks",), ("ranks", "ranks²"))
NODES_TERMS = ("nodes", "lg nodes", "ranks a node")
"""They say nothing if the number of nodes was always the same."""
BY_NODES = ((), *((name,) for name in NODES_TERMS), ("nodes", "ranks a node"))
FORMS = tuple(
    (*ranks, *nodes)
    for ranks, nodes in sorted(
        itertools.product(BY_RANKS, BY_NODES), key=lambda pair: len(pair[0] + pair[1])
    )
)
"""The terms that are tried together, beside a constant: fewer first."""
GAIN = 0.8
"""A model must have at most so much of the error of one that was tried before."""
ROUNDING = 1e-9
"""Share of the largest count below which a factor is 0."""
SMALL = 0.005
"""Relative error below which no more terms are looked for."""


@dataclass(frozen=True)
class Model:
    """constant + Σ factor · term."""

    constant: float
    factors: Mapping[str, float]
    residual: float
    """The largest one, relative to its count."""
    error: float
    """Of each point that is predicted from the others, relative to the counts (root mean square);
    infinite if there are too few."""

    @property
    def is_checked(self) -> bool:
        """Whether there were enough points to leave one out."""
        return math.isfinite(self.error)

    def evaluate(self, place: Place) -> float:
        terms = (factor * TERMS[name](place) for name, factor in self.factors.items())
        return self.constant + sum(terms)

    def predict(self, place: Place) -> float:
        """The same, but no less than nothing."""
        return max(0.0, self.evaluate(place))

    def __str__(self) -> str:
        parts = [f"{factor:.3g} {name}" for name, factor in self.factors.items()]
        if not parts or abs(self.constant) >= 0.001 * max(map(abs, self.factors.values())):
            parts.insert(0, f"{self.constant:.3g}")
        return " + ".join(parts).replace("+ -", "− ").replace("-", "−")


def fit(points: Mapping[Place, float], least: float, *, has_squares: bool = True) -> Model:
    """The model of a count by ranks and nodes. Raises ValueError for no point.

    ``has_squares``: whether it may grow with the square of the ranks, which noise imitates.
    ``least``: below which differences are not worth a term; residuals are relative to this where
    the count is smaller.
    """
    if not points:
        raise ValueError("a model needs a point at least")
    points = _choose_points(points)
    several = len({nodes for _, nodes in points}) > 1
    unknown = {*(() if several else NODES_TERMS), *(() if has_squares else ("ranks²",))}
    forms = [form for form in FORMS if unknown.isdisjoint(form)]
    chosen = _fit(points, forms[0], least)
    assert chosen is not None
    for names in forms[1:]:
        if chosen.error <= SMALL:
            break
        model = _fit(points, names, least)
        if model is not None and model.error < GAIN * chosen.error:
            chosen = model
    return chosen


def _choose_points(points: Mapping[Place, float]) -> Mapping[Place, float]:
    """Those of several nodes alone, if they suffice: with one node there is no network."""
    chosen = {place: value for place, value in points.items() if place[1] > 1}
    return chosen if len({nodes for _, nodes in chosen}) > 1 else points


def _fit(points: Mapping[Place, float], names: Sequence[str], least: float) -> Model | None:
    """None if the points do not determine the factors, or one of them is below 0."""
    places = list(points)
    coefficients = _solve(points, places, names, least)
    if coefficients is None:
        return None
    model = Model(coefficients[0], dict(zip(names, coefficients[1:], strict=True)), 0.0, math.inf)
    residuals = [
        abs(model.evaluate(place) - points[place]) / max(points[place], least) for place in places
    ]
    error = _cross_validate(points, names, least)
    return None if error is None else replace(model, residual=max(residuals), error=error)


def _cross_validate(
    points: Mapping[Place, float], names: Sequence[str], least: float
) -> float | None:
    """The error of each point that is predicted from the others; None if they do not suffice.

    Infinite if there are no more points than factors.
    """
    if len(points) <= len(names) + 1:
        return math.inf
    weighed = 0.0
    for place in points:
        others = [each for each in points if each != place]
        coefficients = _solve(points, others, names, least)
        if coefficients is None:
            return None
        left = Model(coefficients[0], dict(zip(names, coefficients[1:], strict=True)), 0.0, 0.0)
        weighed += (left.evaluate(place) - points[place]) ** 2 / max(points[place], least)
    return math.sqrt(weighed / sum(max(value, least) for value in points.values()))


def _solve(
    points: Mapping[Place, float], places: Sequence[Place], names: Sequence[str], least: float
) -> list[float] | None:
    """The constant and the factors; None if the places do not determine them, or one is below 0."""
    rows = numpy.array([[1.0, *(TERMS[name](place) for name in names)] for place in places])
    values = numpy.array([points[place] for place in places])
    weights = 1 / numpy.sqrt(numpy.maximum(values, least))
    scales = numpy.maximum(numpy.abs(rows).max(axis=0), 1e-300)
    found, _, rank, _ = numpy.linalg.lstsq(
        rows / scales * weights[:, None], values * weights, rcond=1e-9
    )
    if rank < rows.shape[1]:
        return None
    if any(found[1:] < -ROUNDING * values.max()):
        return None
    return [float(found[0]), *(float(each) for each in numpy.maximum(found[1:], 0) / scales[1:])]
