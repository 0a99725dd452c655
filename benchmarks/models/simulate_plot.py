"""Draw the time of algorithms over the lower bound, by the size of the buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.options import describe_size
from benchmarks.common.plotting import COLOURS, add_legend, finish_lines, open_figure
from benchmarks.models.prices import Table, get_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":")


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
