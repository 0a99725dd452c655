"""Draw times and rates of collectives against the size of the buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.collectives.contenders import OWN, PREPARED
from benchmarks.collectives.findings import Findings
from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.common.plotting import COLOURS, add_legend, finish_lines, open_figure
from benchmarks.common.records import Cell, Coordinate
from benchmarks.common.statistics import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHERS_DASH, OWN_DASHES = "--", ("-", "-.", ":")
"""Of the others' lines, and of mpiddp's: the next one once the colours are used up."""
TICK_SHARE = 0.09
"""How much of an axis a tick with its text needs."""


def draw(path: Path, groups: Sequence[Findings], note: str) -> None:
    """For each number of ranks its times, where small buffers show, and its rates, where large do.

    A type and an operator each have a row. The rates stand on a linear axis, all others are
    logarithmic.
    """
    panels = [(found, cells) for found in groups for cells in _split(found)]
    quantities = sorted({cells[0].quantity for _, cells in panels})
    title = f"{', '.join(quantities)}: medians of the slowest rank's times, and 95 % intervals"
    with open_figure(path, 13.5, 4.4 * len(panels) + 0.8, title, note) as figure:
        grid = figure.subplots(len(panels), 2, squeeze=False)
        for (left, right), (found, cells) in zip(grid, panels, strict=True):
            _draw_panel(left, right, cells)
            what = _describe_panel(found, cells[0])
            left.set_title(f"{what}: time", loc="left", fontsize=10)
            right.set_title("bus bandwidth, GB/s", loc="left", fontsize=10)
            left.yaxis.set_major_formatter(lambda seconds, _: describe_seconds(seconds))
            right.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.10g}")
        add_legend(figure, grid[0][0])


def _split(found: Findings) -> list[list[Cell]]:
    """The cells of each panel: all sizes of a quantity, a type and an operator."""
    panels: dict[tuple[Coordinate, ...], list[Cell]] = {}
    for cell in found.measured:
        key = tuple(value for name, value in sorted(cell.at.items()) if name != "bytes")
        panels.setdefault((cell.quantity, *key), []).append(cell)
    return list(panels.values())


def _describe_panel(found: Findings, cell: Cell) -> str:
    words = [str(value) for name, value in sorted(cell.at.items()) if name != "bytes"]
    return f"{found.ranks} ranks on {found.surroundings.where}: {cell.quantity}, {', '.join(words)}"


def _draw_panel(left: Axes, right: Axes, cells: Sequence[Cell]) -> None:
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.contender, []).append(cell)
    own = [name for name, row in rows.items() if row[0].details["maker"] in (OWN, PREPARED)]
    for name, row in rows.items():
        colour, dash = _choose_style(name, list(rows), own)
        style: dict[str, Any] = {"color": colour, "ls": dash, "lw": 1.5, "marker": "o", "ms": 3}
        ordered = sorted(row, key=lambda each: each.at["bytes"])
        points = [(int(cell.at["bytes"]), cell.summary) for cell in ordered]
        _draw_times(left, points, {**style, "label": name})
        rates = [cell.details["busbw"] for cell in ordered]
        right.plot([size for size, _ in points], rates, **style)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    ticks = choose_ticks(sorted({int(cell.at["bytes"]) for cell in cells}))
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [describe_size(size) for size in ticks], fontsize=8)
        axis.minorticks_off()
        axis.tick_params(axis="y", labelsize=8)
        finish_lines(axis)


def _choose_style(name: str, names: Sequence[str], own: Sequence[str]) -> tuple[str, str]:
    """Colour and dash: mpiddp's lines are whole, as long as the colours last."""
    if name not in own:
        return COLOURS[names.index(name) % len(COLOURS)], OTHERS_DASH
    turn, place = divmod(own.index(name), len(COLOURS))
    return COLOURS[place], OWN_DASHES[turn % len(OWN_DASHES)]


def choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Those of the sizes, in rising order, whose texts have room beside each other."""
    least = TICK_SHARE * math.log(sizes[-1] / sizes[0])
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log(size / ticks[-1]) >= least:
            ticks.append(size)
    return ticks


def _draw_times(axis: Axes, points: Sequence[tuple[int, Summary]], style: dict[str, Any]) -> None:
    sizes = [size for size, _ in points]
    ends = [
        (times.interval.low, times.interval.high) if times.interval else (times.median,) * 2
        for _, times in points
    ]
    axis.plot(sizes, [times.median for _, times in points], **style)
    axis.vlines(sizes, *zip(*ends, strict=True), color=style["color"], lw=3, alpha=0.4)
