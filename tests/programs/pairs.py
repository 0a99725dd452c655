"""Few rows that hold every pair: each value of a dimension beside each value of every other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
TRIES = 20


def find_pairs(row: Mapping[str, Any]) -> list[tuple[str, Any, str, Any]]:
    """The pairs of values that a row holds, or a part of a row."""
    return [(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)]


def find_all(
    dimensions: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]
) -> list[tuple[str, Any, str, Any]]:
    """Every pair that is possible; ``possible`` is asked about rows and parts of rows."""
    pairs = []
    for a, b in itertools.combinations(sorted(dimensions), 2):
        for x, y in itertools.product(dimensions[a], dimensions[b]):
            if possible({a: x, b: y}):
                pairs.append((a, x, b, y))
    return pairs


def cover(dimensions: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> list[Row]:
    """Rows that hold every possible pair; the same ones in every process.

    Raises ValueError for a pair that no possible row holds.
    """
    choose = random.Random(0)
    # A dict keeps its order, which a set of strings does not between processes.
    missing = dict.fromkeys(find_all(dimensions, possible))
    rows = []
    while missing:
        a, x, b, y = next(iter(missing))
        row = _fill({a: x, b: y}, dimensions, possible, missing, choose)
        for pair in find_pairs(row):
            missing.pop(pair, None)
        rows.append(row)
    choose.shuffle(rows)
    return rows


def _fill(
    begun: Row,
    dimensions: Mapping[str, Sequence[Any]],
    possible: Callable[[Row], bool],
    missing: Mapping[tuple[str, Any, str, Any], None],
    choose: random.Random,
) -> Row:
    for _ in range(TRIES):
        row = dict(begun)
        rest = [name for name in dimensions if name not in row]
        choose.shuffle(rest)
        for name in rest:
            fitting = [value for value in dimensions[name] if possible({**row, name: value})]
            if not fitting:
                break
            choose.shuffle(fitting)
            gains = {value: _gain({**row, name: value}, name, missing) for value in fitting}
            row[name] = max(gains, key=gains.__getitem__)
        else:
            return row
    raise ValueError(f"no row was found with {begun}")


def _gain(row: Row, name: str, missing: Mapping[tuple[str, Any, str, Any], None]) -> int:
    return sum(name in (pair[0], pair[2]) and pair in missing for pair in find_pairs(row))
