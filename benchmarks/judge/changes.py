"""What two records say of each cell: slower, faster, or neither, with one error rate for all.

Rounds of one run are more alike than two runs of one program are, and this the rounds cannot show.
Therefore

- a cell is slower if its samples refute that its ratio is within half the tolerance (`ratios`),
  judged together with all cells of the record; the other half is left for the runs;
- a cell that looks slower is measured again, in runs of its own: all runs together must refute
  that, and the median of the runs' ratios must be beyond the tolerance.

A cell that is not measured again because it does not look slower can only be one finding less, so
that the correction holds for what is measured later as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from benchmarks.judge.correlation import find_coefficient
from benchmarks.judge.ratios import Ratio, compare_runs, estimate_ratio, find_probabilities
from benchmarks.records.schema import Cell, Coordinate, Record
from mpiddp.errors import ConfigurationError

Key = tuple[Coordinate, ...]
Measure = Callable[[Sequence[Cell]], Record]
"""Measures cells once more."""

SLOWER, FASTER, SAME, UNKNOWN = "slower", "faster", "same", "unknown"
LOOK = 0.05
"""A cell that is slower than before with this error rate, seen alone, is measured again."""
RUNS_SHARE = 0.5
"""Of the tolerance, for what differs between two runs of one program."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What counts as a change."""

    tolerance: float
    """The share by which a ratio may differ from 1."""
    error_rate: float
    """Probability that any cell of a record without changes is called slower."""

    @property
    def bound(self) -> float:
        """The ratio beyond which a cell has changed."""
        return 1 + self.tolerance

    @property
    def tested(self) -> float:
        """The ratio that a change must refute."""
        return 1 + RUNS_SHARE * self.tolerance


def larger_is_better(unit: str) -> bool:
    """Whether a unit is a rate, as samples/s or GB/s."""
    return unit.endswith("/s")


def index_cells(record: Record) -> dict[Key, Cell]:
    """The cells by their keys. Raises ConfigurationError for one that is there twice."""
    cells: dict[Key, Cell] = {}
    for cell in record.cells:
        if cell.key in cells:
            raise ConfigurationError(
                f"{record.path} has {' '.join(map(str, cell.key))} twice: expected a cell for "
                "each key"
            )
        cells[cell.key] = cell
    return cells


@dataclass(frozen=True)
class Evidence:
    """The samples of a cell."""

    old: Cell
    new: Cell
    runs: tuple[tuple[float, ...], ...]
    """The samples of each run of NEW: the record's own, then those that were measured again."""
    coefficient: float
    """How alike neighbouring rounds are, in all cells together."""

    @property
    def together(self) -> list[float]:
        """The samples of all runs."""
        return [value for run in self.runs for value in run]

    @cached_property
    def ratio(self) -> Ratio:
        """New over old, in the cell's unit, of all runs together."""
        return compare_runs(self.old.samples, self.runs, self.coefficient)

    @cached_property
    def run_ratios(self) -> tuple[float, ...]:
        """Of each run, new over old."""
        return tuple(estimate_ratio(self.old.samples, run) for run in self.runs)

    @property
    def slowdown(self) -> float:
        """The median of the runs' ratios of costs: above 1 is worse."""
        is_rate = larger_is_better(self.new.unit)
        return statistics.median(1 / each if is_rate else each for each in self.run_ratios)

    @cached_property
    def costs(self) -> Ratio:
        """New over old, turned round if larger is better, so that above 1 is worse."""
        return self.ratio.turned if larger_is_better(self.new.unit) else self.ratio

    @property
    def largest(self) -> float:
        """The upper end of the slowdown's interval; infinite for too few rounds to have one."""
        if len({*self.old.samples, *self.together}) == 1:  # Counts and prices have no spread.
            return 1.0
        interval = self.costs.interval
        return interval.high if interval is not None else inf


@dataclass(frozen=True)
class Change(Evidence):
    """A cell's evidence, judged together with all others'."""

    probability: float
    """That samples like these are met in a record without changes (Holm)."""
    word: str
    """SLOWER, FASTER, SAME, or UNKNOWN: the rounds are too few, or differ too much, to exclude a
    change of twice the tolerance."""


def is_comparable(old: Cell, new: Cell) -> bool:
    """Whether a ratio of the two makes sense: values above 0, in one unit."""
    values = (*old.samples, *new.samples)
    return old.unit == new.unit and min(values) > 0


@dataclass(frozen=True)
class Matched:
    """The cells of two records."""

    pairs: Mapping[Key, tuple[Cell, Cell]]
    incomparable: tuple[Cell, ...]
    """In both records, but in other units or with values that have no ratio."""
    gone: tuple[Cell, ...]
    """In the old record only."""
    added: tuple[Cell, ...]
    """In the new record only."""


def match(old: Record, new: Record) -> Matched:
    """Raises ConfigurationError if the records have no cell in common."""
    if old.benchmark != new.benchmark:
        raise ConfigurationError(
            f"{old.path} is a record of {old.benchmark}, {new.path} one of {new.benchmark}: "
            "expected two of the same command"
        )
    olds, news = index_cells(old), index_cells(new)
    common = {key: (olds[key], news[key]) for key in news if key in olds}
    if not common:
        raise ConfigurationError(
            f"{old.path} and {new.path} have no cell in common: expected the same contenders, "
            "ranks and sizes in both"
        )
    pairs = {key: pair for key, pair in common.items() if is_comparable(*pair)}
    return Matched(
        pairs,
        tuple(new for key, (_, new) in common.items() if key not in pairs),
        tuple(cell for key, cell in olds.items() if key not in news),
        tuple(cell for key, cell in news.items() if key not in olds),
    )


def judge(
    pairs: Mapping[Key, tuple[Cell, Cell]],
    rule: Rule,
    measure: Measure | None = None,
    again: int = 0,
) -> list[Change]:
    """A verdict for each pair of comparable cells, old and new.

    ``measure`` is called ``again`` times with the cells that look slower; not at all for none.
    """
    coefficient = _find_coefficient(pairs)
    found = {
        key: Evidence(old, new, (new.samples,), coefficient) for key, (old, new) in pairs.items()
    }
    suspects = [key for key, each in found.items() if _is_suspect(each, rule)]
    for _ in range(again if measure is not None and suspects else 0):
        assert measure is not None
        measured = index_cells(measure([found[key].new for key in suspects]))
        for key in suspects:
            each = found[key]
            if key in measured and is_comparable(each.old, measured[key]):
                found[key] = replace(each, runs=(*each.runs, measured[key].samples))
    return _decide(found, rule)


def _find_coefficient(pairs: Mapping[Key, tuple[Cell, Cell]]) -> float:
    """How alike neighbouring rounds are, in both records together."""
    sides = zip(*pairs.values(), strict=True)
    return find_coefficient([each.samples for each in side] for side in sides)


def _is_suspect(each: Evidence, rule: Rule) -> bool:
    return each.slowdown > rule.bound or each.costs.find_probability(1.0) <= LOOK


def _decide(found: Mapping[Key, Evidence], rule: Rule) -> list[Change]:
    costs = {key: each.costs for key, each in found.items()}
    slower = find_probabilities(costs, rule.tested)
    faster = find_probabilities({key: each.turned for key, each in costs.items()}, rule.tested)
    changes = []
    for key, each in found.items():
        slowdown, word = each.slowdown, SAME
        if slower[key] <= rule.error_rate and slowdown > rule.bound:
            word = SLOWER
        elif faster[key] <= rule.error_rate and slowdown < 1 / rule.bound:
            word = FASTER
        elif each.largest > rule.bound**2:
            word = UNKNOWN
        probability = min(slower[key], faster[key])
        changes.append(Change(each.old, each.new, each.runs, each.coefficient, probability, word))
    return changes
