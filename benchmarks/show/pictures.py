"""A picture of what a record holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.records.options import describe_value
from benchmarks.records.schema import Cell, group_by
from benchmarks.show.plotting import COLOURS, draw_bar, finish_bars, open_figure
from mpiddp.wording import count_noun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_INCHES = 0.42
TITLE = "Medians, band of the quartiles, a point a round"
"""Of a picture; its note says where it was measured."""


def write_picture(path: Path, cells: Sequence[Cell], note: str) -> None:
    """A panel for each quantity, with a bar for each cell."""
    groups = group_by(cells, lambda cell: (cell.quantity, cell.unit))
    heights = [len(each) for each in groups.values()]
    inches = ROW_INCHES * (sum(heights) + 2 * len(heights)) + 1
    with open_figure(path, 12, inches, TITLE, note) as figure:
        ratios = {"height_ratios": heights}
        axes = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw=ratios)[:, 0]
        for axis, ((quantity, unit), found) in zip(axes, groups.items(), strict=True):
            axis.set_title(quantity, loc="left", fontsize=10)
            axis.set_xlabel(unit, fontsize=8)
            _draw_panel(axis, found)


def _draw_panel(axis: Axes, cells: Sequence[Cell]) -> None:
    for place, cell in enumerate(cells):
        text = describe_value(cell.summary.median, cell.unit)
        draw_bar(axis, place, cell.samples, COLOURS[0], text)
    finish_bars(axis, [_name(cell) for cell in cells])


def _name(cell: Cell) -> str:
    places = (f"{name} {value}" for name, value in cell.at.items())
    return ", ".join([cell.contender, count_noun(cell.ranks, "rank"), *places])
