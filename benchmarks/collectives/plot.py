"""Draw times and rates of collectives against the size of the buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.collectives.contenders import (
    BACKEND,
    GLOO,
    MPI,
    NCCL,
    OWN,
    PERSISTENT,
    PREPARED,
    RING,
)
from benchmarks.collectives.findings import Findings
from benchmarks.common.options import describe_seconds
from benchmarks.common.plotting import (
    Line,
    choose_names,
    draw_line,
    finish_sizes,
    label_lines,
    list_scores,
    note_left_out,
    open_figure,
)
from benchmarks.common.records import Cell
from benchmarks.common.statistics import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    GLOO: "PyTorch (Gloo)",
    NCCL: "PyTorch (NCCL)",
    RING: "ring in mpi4py",
    PERSISTENT: "ring in mpi4py, persistent",
    OWN: "mpiddp",
    PREPARED: "mpiddp, prepared",
    BACKEND: "PyTorch over mpiddp",
}
"""Of makers, but for MPI, whose calls have names of their own."""
TICK_SHARE = 0.09
"""How much of an axis a tick with its text needs."""


def draw(path: Path, groups: Sequence[Findings], note: str) -> None:
    """For each number of ranks its times, where small buffers show, and its rates, where large do.

    A type and an operator each have a row. The rates stand on a linear axis, all others are
    logarithmic.
    """
    panels = [(found, cells) for found in groups for cells in found.group(by_size=False)]
    quantities = ", ".join(sorted({cells[0].quantity for _, cells in panels}))
    title = f"{quantities}: the slowest rank's time, median of the rounds, band of their quartiles"
    every = [cell for _, cells in panels for cell in cells]
    always = [
        find_name(each, every) for each in every if each.details["maker"] in (GLOO, NCCL, MPI)
    ]
    medians = {
        (find_name(cell, every), (place, cell.bytes)): cell.summary.median
        for place, (_, cells) in enumerate(panels)
        for cell in cells
    }
    shown, left_out = choose_names(list_scores(medians), always)
    note = note_left_out(left_out, "contender", note)
    with open_figure(path, 14.5, 4.4 * len(panels) + 0.8, title, note) as figure:
        grid = figure.subplots(len(panels), 2, squeeze=False)
        drawn: dict[Axes, list[Line]] = {}
        for (left, right), (found, cells) in zip(grid, panels, strict=True):
            rows = _list_rows(cells, every, shown)
            drawn[left] = [_make_line(name, row, shown.index(name)) for name, row in rows.items()]
            drawn[right] = [
                _make_line(name, row, shown.index(name), is_rate=True) for name, row in rows.items()
            ]
            _draw_panel(left, right, drawn)
            left.set_title(f"{_describe_panel(found, cells[0])}: time", loc="left", fontsize=10)
            right.set_title("bus bandwidth, GB/s", loc="left", fontsize=10)
            left.yaxis.set_major_formatter(lambda seconds, _: describe_seconds(seconds))
            right.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.10g}")
        label_lines(figure, drawn)


def find_name(cell: Cell, others: Sequence[Cell]) -> str:
    """What a reader calls it: of transports and buffers only what tells it from the others."""
    details = cell.details
    like = [other.details for other in others if other.details["maker"] == details["maker"]]
    parts = [NAMES.get(details["maker"], cell.contender)]
    parts += [details["algorithm"]] * (details["algorithm"] != "auto")
    for name in ("transport", "buffer"):
        if len({each[name] for each in like}) > 1:
            parts.append(f"{details[name]} {name}")
    return ", ".join(parts)


def _list_rows(
    cells: Sequence[Cell], every: Sequence[Cell], shown: Sequence[str]
) -> dict[str, list[Cell]]:
    """The cells of each line that is shown, by size."""
    rows: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.bytes):
        rows.setdefault(find_name(cell, every), []).append(cell)
    return {name: row for name, row in rows.items() if name in shown}


def _make_line(name: str, row: Sequence[Cell], style: int, *, is_rate: bool = False) -> Line:
    """Of seconds, or of bus bandwidths."""
    values = [
        [cell.details["busbw"] * cell.summary.median / each for each in cell.samples]
        if is_rate
        else cell.samples
        for cell in row
    ]
    return Line(name, [cell.bytes for cell in row], list(map(summarize, values)), style)


def _describe_panel(found: Findings, cell: Cell) -> str:
    words = [str(value) for name, value in sorted(cell.at.items()) if name != "bytes"]
    return f"{found.ranks} ranks on {found.surroundings.where}: {cell.quantity}, {', '.join(words)}"


def _draw_panel(left: Axes, right: Axes, drawn: Mapping[Axes, Sequence[Line]]) -> None:
    for axis in (left, right):
        for line in drawn[axis]:
            draw_line(axis, line)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    ticks = choose_ticks(sorted({int(size) for line in drawn[left] for size in line.x}))
    for axis in (left, right):
        finish_sizes(axis, ticks, "largest buffer of a rank")


def choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Those of the sizes, in rising order, whose texts have room beside each other."""
    least = TICK_SHARE * math.log(sizes[-1] / sizes[0])
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log(size / ticks[-1]) >= least:
            ticks.append(size)
    return ticks
