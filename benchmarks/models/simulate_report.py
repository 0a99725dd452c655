"""The prices of all-reduces: a table for each number of ranks, and a plot over the lower bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.common.plotting import COLOURS, add_legend, finish_lines, open_figure
from mpiddp.schedules.cost import Bounds
from mpiddp.schedules.registry import Price

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":")


@dataclass(frozen=True)
class Row:
    """One algorithm on one number of ranks."""

    name: str
    prices: tuple[Price, ...] | None
    """For each size; None where it can neither be simulated nor has a closed form."""
    obstacle: str = ""


@dataclass(frozen=True)
class Table:
    """All algorithms on one number of ranks."""

    ranks: int
    nodes: int
    rows: tuple[Row, ...]
    bounds: tuple[Bounds, ...]

    @property
    def title(self) -> str:
        """Ranks and, where several share one, nodes."""
        nodes = f" on {self.nodes:,} node{'s' if self.nodes > 1 else ''}"
        ranks = f"{self.ranks:,} rank{'s' if self.ranks > 1 else ''}"
        return ranks + (nodes if self.nodes != self.ranks else "")


def get_ratio(price: Price, least: Bounds) -> float | None:
    """How many times the lower bound; None where that is nothing."""
    return price.seconds / least.seconds if least.seconds else None


def describe(
    machine: str, sizes: Sequence[int], shown: Sequence[int], tables: Sequence[Table]
) -> Iterator[str]:
    """The tables of the ``shown`` sizes: seconds, and in brackets times the lower bound."""
    yield machine
    yield "time; in brackets, how many times the lower bound of summing over all ranks that is"
    width = max(len(row.name) for table in tables for row in table.rows) + 2
    places = [sizes.index(count) for count in shown]
    for table in tables:
        yield ""
        yield table.title
        heads = "".join(f"{describe_size(count):>13}{'':10}" for count in shown)
        yield f"{'algorithm':<{width}}{'steps':>7}{heads}".rstrip()
        for row in table.rows:
            yield _describe_row(row, table, width, places)
        least = [describe_seconds(table.bounds[place].seconds) for place in places]
        floor = "".join(f"{text:>13}{'':10}" for text in least)
        yield f"{'lower bound':<{width}}{'':7}{floor}".rstrip()
    obstacles = [row.obstacle for table in tables for row in table.rows if row.obstacle]
    if obstacles:
        yield from ("", "— could not be priced:", *(f"  {text}" for text in obstacles))
    if any(row.prices and row.prices[0].source != "simulated" for t in tables for row in t.rows):
        yield (
            "~ is the algorithm's closed form, for chunks of equal size; "
            "all else is simulated step by step"
        )


def _describe_row(row: Row, table: Table, width: int, places: Sequence[int]) -> str:
    if row.prices is None:
        return f"{row.name:<{width}}{'':>7}{'—':>13}"
    cells = [_describe_price(row.prices[place], table.bounds[place]) for place in places]
    steps = count_steps(row.prices[0])
    return f"{row.name:<{width}}{steps:>7,}{''.join(cells)}".rstrip()


def count_steps(price: Price) -> int:
    """Of the simulation, or else of the formula."""
    if price.simulation is not None:
        return len(price.simulation.steps)
    return price.form.steps if price.form is not None else 0


def _describe_price(price: Price, least: Bounds) -> str:
    mark = "" if price.source == "simulated" else "~"
    ratio = get_ratio(price, least)
    if ratio is None:
        return f"{mark}{describe_seconds(price.seconds)}".rjust(13) + " " * 10
    share = f" ({ratio:,.0f})" if ratio >= 100 else f" ({ratio:.3g})"
    return f"{mark}{describe_seconds(price.seconds)}".rjust(13) + share.ljust(10)


def draw(path: Path, sizes: Sequence[int], tables: Sequence[Table], note: str) -> None:
    """One panel for each number of ranks, both axes logarithmic."""
    columns = min(2, len(tables))
    rows = -(-len(tables) // columns)
    title = "All-reduce on a modelled machine: time as a multiple of the lower bound"
    with open_figure(path, 6.2 * columns + 1.2, 4.4 * rows + 0.8, title, note) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for axis, table in zip(grid.flat, tables, strict=False):
            _draw_panel(axis, sizes, table)
        for axis in list(grid.flat)[len(tables) :]:
            axis.set_visible(False)
        add_legend(figure, grid.flat[0])


def _draw_panel(axis: Axes, sizes: Sequence[int], table: Table) -> None:
    sources = {row.prices[0].source for row in table.rows if row.prices}
    axis.set_title(f"{table.title}, {' and '.join(sorted(sources))}", loc="left", fontsize=10)
    axis.axhline(1, color="#888888", lw=3, label="lower bound")
    for place, row in enumerate(table.rows):
        if row.prices is not None:
            ratios = [
                get_ratio(price, least) or math.nan
                for price, least in zip(row.prices, table.bounds, strict=True)
            ]
            colour, dash = (
                COLOURS[place % len(COLOURS)],
                DASHES[place // len(COLOURS) % len(DASHES)],
            )
            axis.plot(sizes, ratios, color=colour, ls=dash, lw=1.5, label=row.name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes[::2], [describe_size(size) for size in sizes[::2]], fontsize=8)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:,.10g} ×")
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlim(sizes[0], sizes[-1])
    axis.set_ylim(bottom=0.9)
    finish_lines(axis)
