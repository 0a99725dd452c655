"""Draw times and rates of collectives against the size of the buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.collectives.contenders import BACKEND, GLOO, MPI, NCCL, OWN, RING, shorten
from benchmarks.collectives.findings import Findings
from benchmarks.common.options import describe_seconds
from benchmarks.common.plotting import (
    COLOURS,
    MOST_LINES,
    Line,
    LinePanel,
    choose_lines,
    draw_panels,
)
from benchmarks.common.records import Cell, group_by
from mpiddp.wording import count_noun, describe_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEANINGS = {
    "Gloo": "torch's all-reduce", "plain ring": "written by hand over mpi4py",
    "mpiddp central": "a parameter server",
}  # fmt: skip
"""Of names that do not say it."""
PAGES = 2
"""Panels for the lines of one type and operator, if one does not have room for all."""
TICK_SHARE = 0.09
"""How much of an axis a tick with its text needs."""


def draw(path: Path, groups: Sequence[Findings], note: str) -> None:
    """For each number of ranks its times, where small buffers show, and its rates, where large do.

    A type and an operator each have a row, or two: first stand the framework's, MPI's and the plain
    ring, and each algorithm once. The rates stand on a linear axis, all others are
    logarithmic.
    """
    panels = [(found, cells) for found in groups for cells in found.group(by_size=False)]
    quantities = ", ".join(sorted({cells[0].quantity for _, cells in panels}))
    title = (
        f"{quantities}: the slowest rank's time, median of the iterations, band of their quartiles"
    )
    every = [cell for _, cells in panels for cell in cells]
    firsts = {(cell.details["maker"], cell.details["algorithm"]): cell for cell in reversed(every)}
    names = shorten(dict.fromkeys(cell.contender for cell in every))
    always = [
        names[cell.contender]
        for (maker, _), cell in firsts.items()
        if maker in (GLOO, NCCL, MPI, RING, OWN, BACKEND)
    ]
    medians = {
        (names[cell.contender], (place, cell.bytes)): cell.summary.median
        for place, (_, cells) in enumerate(panels)
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
        list(_make_panels(found, cells, names, page))
        for found, cells in panels
        for page in pages
        if any(names[cell.contender] in page for cell in cells)
    ]
    draw_panels(path, grid, (14.5, 4.4 * len(grid) + 0.8), title, note, shared="col")


def _make_panels(
    found: Findings, cells: Sequence[Cell], names: Mapping[str, str], styles: Mapping[str, int]
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
    title = f"{found.ranks} ranks on {found.surroundings.where}: {cells[0].quantity}"
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


def draw_scaling(path: Path, cells: Sequence[Cell], names: Mapping[str, str], note: str) -> None:
    """Times over sizes beside times over numbers of ranks, of what `draw` always draws.

    ``names``: of contenders, as they are drawn. A collective, a type and an operator have a row on
    one node, and one for each number of ranks on each of several nodes. The sizes are those of the
    number of ranks that has most of them; ranks are compared at the largest size that all have.
    """
    known = [cell for cell in cells if cell.details.get("maker") in (GLOO, NCCL, MPI, RING, OWN)]
    shown = dict.fromkeys(names[cell.contender] for cell in known)
    styles = {name: place % len(COLOURS) for place, name in enumerate(shown)}
    rows = group_by(known, _find_row)
    grid = [
        list(_compare(group_by(row, lambda cell: cell.ranks), names, styles))
        for row in rows.values()
    ]
    title = "the slowest rank's time, median of the iterations, band of their quartiles"
    meanings = [f"{name}: {text}" for name, text in MEANINGS.items() if name in shown]
    draw_panels(path, grid, (14.5, 4.2 * len(grid) + 0.8), title, "; ".join([*meanings, note]))


def _find_row(cell: Cell) -> tuple[object, ...]:
    return (cell.quantity, *_list_words(cell), cell.ranks // cell.nodes if cell.nodes > 1 else 0)


def _list_words(cell: Cell) -> list[str]:
    return [str(value) for name, value in sorted(cell.at.items()) if name != "bytes"]


def _compare(
    cells: Mapping[int, Sequence[Cell]], names: Mapping[str, str], styles: Mapping[str, int]
) -> Iterator[LinePanel | None]:
    """One panel over sizes, one over ranks, by which the cells are grouped."""
    sizes = {ranks: {cell.bytes for cell in row} for ranks, row in cells.items()}
    ranks = max(cells, key=lambda each: (len(sizes[each]), each))
    first = cells[ranks][0]

    def make_lines(chosen: Iterable[Cell], along: Callable[[Cell], int]) -> list[Line]:
        rows = group_by(sorted(chosen, key=along), lambda cell: names[cell.contender])
        return [
            Line(name, list(map(along, row)), [cell.summary.spread for cell in row], styles[name])
            for name, row in rows.items()
        ]

    yield LinePanel(
        title=f"{count_noun(ranks, 'rank')} on {count_noun(first.nodes, 'node')}: "
        f"{', '.join([first.quantity, *_list_words(first)])}",
        lines=make_lines(cells[ranks], lambda cell: cell.bytes), label="largest buffer of a rank",
        ticks={each: describe_size(each) for each in choose_ticks(sorted(sizes[ranks]))},
        describe=describe_seconds,
    )  # fmt: skip
    size = max(set.intersection(*sizes.values()), default=0)
    if len(cells) == 1 or not size:
        yield None
        return
    each_node = f"{count_noun(ranks // first.nodes, 'rank')} on each node"
    every = (cell for row in cells.values() for cell in row if cell.bytes == size)
    yield LinePanel(
        title=f"{each_node if first.nodes > 1 else 'one node'}: {describe_size(size)}",
        lines=make_lines(every, lambda cell: cell.ranks), label="ranks", base=None,
        describe=describe_seconds, finish=partial(_begin_at_zero, ticks=sorted(cells)),
    )  # fmt: skip


def _begin_at_zero(axis: Axes, ticks: Sequence[int]) -> None:
    axis.set_ylim(bottom=0)
    axis.set_xticks(ticks)


def choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Those of the sizes, in rising order, whose texts have room beside each other."""
    least = TICK_SHARE * math.log(sizes[-1] / sizes[0])
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log(size / ticks[-1]) >= least:
            ticks.append(size)
    return ticks
