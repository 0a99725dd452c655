"""Draw times and rates of collectives against the size of the buffer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records.contenders import BACKEND, GLOO, MPI, NCCL, OWN, PROBE, RING, shorten
from benchmarks.records.options import describe_seconds
from benchmarks.records.schema import Cell, group_by
from benchmarks.show.plotting import (
    COLOURS,
    MOST_LINES,
    Line,
    LinePanel,
    choose_lines,
    choose_ticks,
    draw_panels,
)
from mpiddp.wording import count_noun, describe_size

PAGES = 2
"""Panels for the lines of one type and operator, if one does not have room for all."""


def draw(path: Path, cells: Iterable[Cell], note: str) -> None:
    """For each number of ranks its times, where small buffers show, and its rates, where large do.

    A type and an operator each have a row, or two: first stand the framework's, MPI's and the plain
    ring, and each algorithm once. The rates stand on a linear axis, all others are
    logarithmic.
    """
    measured = (cell for cell in cells if cell.quantity != PROBE)
    panels = list(group_by(measured, _find_panel).values())
    quantities = ", ".join(sorted({cells[0].quantity for cells in panels}))
    title = (
        f"{quantities}: the slowest rank's time, median of the iterations, band of their quartiles"
    )
    every = [cell for cells in panels for cell in cells]
    firsts = {(cell.details["maker"], cell.details["algorithm"]): cell for cell in reversed(every)}
    names = shorten(dict.fromkeys(cell.contender for cell in every))
    always = [
        names[cell.contender]
        for (maker, _), cell in firsts.items()
        if maker in (GLOO, NCCL, MPI, RING, OWN, BACKEND)
    ]
    medians = {
        (names[cell.contender], (place, cell.bytes)): cell.summary.median
        for place, cells in enumerate(panels)
        for cell in cells
    }
    chosen, note = choose_lines(medians, always, "contender", note, PAGES * MOST_LINES)
    shown = sorted(chosen, key=lambda name: name not in always)
    styles = {name: place % len(COLOURS) for place, name in enumerate(shown)}
    pages = [
        {name: styles[name] for name in shown[begin : begin + MOST_LINES]}
        for begin in range(0, len(shown), MOST_LINES)
    ]
    grid = [
        list(_make_panels(cells, names, page))
        for cells in panels
        for page in pages
        if any(names[cell.contender] in page for cell in cells)
    ]
    draw_panels(path, grid, (14.5, 4.4 * len(grid) + 0.8), title, note, shared="col")


def _find_panel(cell: Cell) -> Hashable:
    words = sorted(each for each in cell.at.items() if each[0] != "bytes")
    return (cell.ranks, cell.nodes, cell.quantity, *words)


def _make_panels(
    cells: Sequence[Cell], names: Mapping[str, str], styles: Mapping[str, int]
) -> Iterator[LinePanel]:
    """The times and the rates of the lines that have a style."""
    rising = sorted(cells, key=lambda cell: cell.bytes)
    named = group_by(rising, lambda cell: names[cell.contender])
    rows = {name: row for name, row in named.items() if name in styles}
    ticks = choose_ticks(sorted({cell.bytes for row in rows.values() for cell in row}))
    below: dict[str, Any] = {
        "label": "largest buffer of a rank", "ticks": {each: describe_size(each) for each in ticks},
    }  # fmt: skip

    def make_lines(*, is_rate: bool = False) -> list[Line]:
        return [_make_line(name, row, styles[name], is_rate) for name, row in rows.items()]

    words = [str(value) for name, value in sorted(cells[0].at.items()) if name != "bytes"]
    title = f"{cells[0].ranks} ranks on {count_noun(cells[0].nodes, 'node')}: {cells[0].quantity}"
    yield LinePanel(
        title=f"{title}, {', '.join(words)}: time", lines=make_lines(), describe=describe_seconds,
        **below,
    )  # fmt: skip
    yield LinePanel(
        title="bus bandwidth, GB/s", lines=make_lines(is_rate=True), base=None,
        describe=lambda rate: f"{rate:,.10g}", finish=lambda axis: axis.set_ylim(bottom=0), **below,
    )  # fmt: skip


def _make_line(name: str, row: Sequence[Cell], style: int, is_rate: bool) -> Line:
    """Of seconds, or of bus bandwidths."""
    times = [cell.summary.spread for cell in row]
    rates = [
        each.inverted(cell.details["busbw"] * each.median)
        for cell, each in zip(row, times, strict=True)
    ]
    return Line(name, [cell.bytes for cell in row], rates if is_rate else times, style)
