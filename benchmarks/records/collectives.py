"""Cells as tables that other programs read: comma-separated values, nccl-tests' own columns."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from benchmarks.records.schema import Cell, Coordinate
from mpiddp.files import write_whole
from mpiddp.options.outputs import TABLE, Kind, Outputs, find
from mpiddp.schedules.schedule import Collective

NCCL_TESTS = Kind("columns of nccl-tests", (".txt",))
COLLECTIVES = {kind.value: kind for kind in Collective}
"""The quantities that are collectives; others have no table of nccl-tests."""
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
"""Of an element, by the names of types in torch and in records."""
WHERE = ("quantity", "contender", "ranks", "nodes")
SUMMARY = {
    "count": "count",
    "mean": "mean",
    "minimum": "minimum",
    "p5": "low",
    "p25": "lower_quartile",
    "median": "median",
    "p75": "upper_quartile",
    "p95": "high",
    "maximum": "maximum",
}
"""Fields of a summary, by their names in the table."""


def format_csv(cells: Sequence[Cell]) -> str:
    """A row a cell; a coordinate that a cell does not have is empty."""
    names = sorted({name for cell in cells for name in cell.at})
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*WHERE, *names, "unit", *SUMMARY, "median_low", "median_high"])
    for cell in cells:
        interval = cell.summary.interval
        writer.writerow(
            [
                *(getattr(cell, name) for name in WHERE),
                *(cell.at.get(name, "") for name in names),
                cell.unit,
                *(getattr(cell.summary, name) for name in SUMMARY.values()),
                *((interval.low, interval.high) if interval else ("", "")),
            ]
        )
    return table.getvalue()


# ---- nccl-tests ---------------------------------------------------------------------------

TYPES = {"float32": "float", "float64": "double", "float16": "half"}
OPERATORS = {"product": "prod", "average": "avg"}
SHARED = ("reduce-scatter", "all-gather")
"""Their count is that of one rank's share: of the largest one, if the shares differ. nccl-tests
shortens a size that it cannot share evenly, to 0 if it must, and writes what is left."""
ROOTED = ("broadcast", "reduce")
COPYING = ("all-gather", "broadcast")
HALF = ("time", "algbw", "busbw", "#wrong")
UNITS = ("(us)", "(GB/s)", "(GB/s)", "")
FORM = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}" + 2 * "  {:>7}  {:>6}  {:>6}  {:>6}"
"""Widths as in nccl-tests' src/util.cu (version 2.19)."""


def format_nccl_tests(cells: Sequence[Cell]) -> str:
    """What nccl-tests would print, a table for each contender and place.

    Both halves show the one measurement: nothing was timed twice for the two.
    """
    known = [cell for cell in cells if cell.quantity in COLLECTIVES]
    tables = groupby(sorted(known, key=_find_table), key=_find_table)
    return "".join(f"{line}\n" for _, rows in tables for line in _format_table(list(rows)))


def _find_table(cell: Cell) -> tuple[str, ...]:
    where = (value for name, value in sorted(cell.at.items()) if name != "bytes")
    return (cell.quantity, cell.contender, f"{cell.ranks:9}", f"{cell.nodes:9}", *map(str, where))


def _format_table(cells: Sequence[Cell]) -> Iterator[str]:
    first = cells[0]
    program = f"{first.quantity.replace('-', '_')}_perf"
    places = {"ranks": first.ranks, "nodes": first.nodes, **first.at}
    where = (f"{name} {value}" for name, value in places.items() if name != "bytes")
    yield f"# Collective test starting: {program}"
    yield f"# {first.contender}: {', '.join(where)}"
    yield "# measured once: both halves show it; times are medians"
    yield "#"
    halves = "           out-of-place                       in-place          "
    yield "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}".format(*5 * [""]) + halves
    yield FORM.format("#       size", "count", "type", "redop", "root", *HALF, *HALF)
    yield FORM.format("#        (B)", "(elements)", "", "", "", *UNITS, *UNITS)
    for cell in sorted(cells, key=lambda cell: cell.bytes):
        yield FORM.format(*_describe_place(cell), *2 * _describe_half(cell))
    wrong = sum(cell.details.get("wrong") or 0 for cell in cells)
    mean = sum(_find_rates(cell)[1] for cell in cells) / len(cells)
    yield f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Avg bus bandwidth':<20} : {mean:g} "
    yield "#"
    yield f"# Collective test concluded: {program}"
    yield "#"


def _describe_place(cell: Cell) -> list[Coordinate]:
    size, kind = cell.bytes, str(cell.at["type"])
    shares = cell.ranks if cell.quantity in SHARED else 1
    operator = "none" if cell.quantity in COPYING else str(cell.at.get("operator", "sum"))
    return [
        size,
        math.ceil(size // ITEM_BYTES[kind] / shares),
        TYPES.get(kind, kind),
        OPERATORS.get(operator, operator),
        0 if cell.quantity in ROOTED else -1,
    ]


def _describe_half(cell: Cell) -> list[str]:
    microseconds = 1e6 * cell.summary.median
    rates = [format_number(rate, 6) for rate in _find_rates(cell)]
    wrong = cell.details.get("wrong")
    return [format_number(microseconds, 7), *rates, "N/A" if wrong is None else f"{wrong:g}"]


def _find_rates(cell: Cell) -> tuple[float, float]:
    return find_rates(cell.quantity, cell.ranks, cell.bytes, cell.summary.median)


def find_rates(quantity: str, ranks: int, size: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw in GB/s (1e9 bytes); algbw is S/t."""
    rate = 1e-9 * size / max(seconds, 1e-12)
    return rate, rate * find_bus_factor(quantity, ranks)


def find_bus_factor(quantity: str, ranks: int) -> float:
    """busbw by algbw: the share of the buffer that each rank must send and receive at least.

    As in nccl-tests' doc/PERFORMANCE.md.
    """
    share = (ranks - 1) / ranks
    factors = {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share}
    return factors.get(quantity, 1.0)


def format_number(value: float, width: int) -> str:
    """With as many digits behind the point, up to two, as fit into so many letters."""
    for digits in (2, 1, 0):
        text = f"{value:.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:.{1 if width >= 7 else 0}e}"


def write_tables(cells: Sequence[Cell], outputs: Outputs) -> None:
    """Write those of the outputs that are tables."""
    for kind, form in ((TABLE, format_csv), (NCCL_TESTS, format_nccl_tests)):
        for path in find(outputs, kind):
            write_whole(path, form(cells))
