"""Draw times of collectives over sizes beside the same over numbers of ranks, from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.records.contenders import GLOO, MPI, NCCL, OWN, RING, shorten
from benchmarks.records.options import describe_seconds
from benchmarks.records.schema import Cell, group_by
from benchmarks.show.plotting import COLOURS, Line, LinePanel, choose_ticks, draw_panels
from mpiddp.errors import ConfigurationError
from mpiddp.wording import count_noun, describe_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEANINGS = {
    "Gloo": "torch's all-reduce", "plain ring": "written by hand over mpi4py",
    "mpiddp central": "a parameter server",
}  # fmt: skip
"""Of names that do not say it."""


def draw(path: Path, cells: Iterable[tuple[str, Cell]], note: str) -> None:
    """The framework, MPI, the plain ring and mpiddp's algorithms, in a row of two panels.

    A collective, a type and an operator have a row on one node, and one for each number of ranks on
    each of several nodes. The sizes are those of the number of ranks that has most of them; ranks
    are compared at the largest size that all have. ``cells``: each with its line's name; wrong
    results are left out. Raises ConfigurationError without such cells.
    """
    known = [
        replace(cell, contender=name)
        for name, cell in cells
        if cell.details.get("maker") in (GLOO, NCCL, MPI, RING, OWN)
        and not cell.details.get("wrong")
    ]
    if not known:
        raise ConfigurationError(
            "expected right results of collectives, such as allreduce records them, found none"
        )
    names = shorten(dict.fromkeys(cell.contender for cell in known))
    shown = dict.fromkeys(names[cell.contender] for cell in known)
    styles = {name: place % len(COLOURS) for place, name in enumerate(shown)}
    rows = group_by(known, _find_row)
    grid = [
        list(_compare(group_by(row, lambda cell: cell.ranks), names, styles))
        for row in rows.values()
    ]
    quantities = ", ".join(dict.fromkeys(cell.quantity for cell in known))
    title = (
        f"{quantities}: the slowest rank's time, median of the iterations, band of their quartiles"
    )
    meanings = [f"{name}: {text}" for name, text in MEANINGS.items() if name in shown]
    draw_panels(path, grid, (11.5, 3.6 * len(grid) + 0.8), title, "; ".join([*meanings, note]))


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
    axis.tick_params(axis="x", labelsize=8)
