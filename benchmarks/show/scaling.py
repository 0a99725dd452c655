"""Times of collectives over sizes beside the same over numbers of ranks, from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.records.contenders import GLOO, MPI, NCCL, OWN, RING, shorten
from benchmarks.records.options import SECONDS
from benchmarks.records.schema import Cell, group_by
from benchmarks.show.charts import Chart, ChartLine
from benchmarks.show.sheets import write_sheet
from mpiddp.errors import ConfigurationError
from mpiddp.wording import count_noun, describe_size

MEANINGS = {
    "Gloo": "torch's all-reduce", "plain ring": "written by hand over mpi4py",
    "mpiddp central": "a parameter server",
}  # fmt: skip
"""Of names that do not say it."""


def write_scaling(path: Path, cells: Iterable[tuple[str, Cell]], note: str) -> None:
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
    colours = {name: place for place, name in enumerate(shown)}
    rows = group_by(known, _find_row)
    grid = [list(_compare(group_by(row, lambda cell: cell.ranks), names)) for row in rows.values()]
    quantities = ", ".join(dict.fromkeys(cell.quantity for cell in known))
    title = (
        f"{quantities}: the slowest rank's time, median of the iterations, band of their quartiles"
    )
    meanings = [f"{name}: {text}" for name, text in MEANINGS.items() if name in shown]
    write_sheet(path, grid, colours, title, "; ".join([*meanings, note]), width=414)


def _find_row(cell: Cell) -> tuple[object, ...]:
    return (cell.quantity, *_list_words(cell), cell.ranks // cell.nodes if cell.nodes > 1 else 0)


def _list_words(cell: Cell) -> list[str]:
    return [str(value) for name, value in sorted(cell.at.items()) if name != "bytes"]


def _compare(
    cells: Mapping[int, Sequence[Cell]], names: Mapping[str, str]
) -> Iterator[Chart | None]:
    """One chart over sizes, one over ranks, by which the cells are grouped."""
    sizes = {ranks: {cell.bytes for cell in row} for ranks, row in cells.items()}
    ranks = max(cells, key=lambda each: (len(sizes[each]), each))
    first = cells[ranks][0]

    def make_lines(chosen: Iterable[Cell], along: Callable[[Cell], int]) -> list[ChartLine]:
        rows = group_by(chosen, lambda cell: names[cell.contender])
        return [
            ChartLine(name, {float(along(cell)): cell.summary.spread for cell in row})
            for name, row in rows.items()
        ]

    yield Chart(
        title=f"{count_noun(ranks, 'rank')} on {count_noun(first.nodes, 'node')}: "
        f"{', '.join([first.quantity, *_list_words(first)])}",
        lines=make_lines(cells[ranks], lambda cell: cell.bytes), label="largest buffer of a rank",
        unit=SECONDS, is_log=True,
    )  # fmt: skip
    size = max(set.intersection(*sizes.values()), default=0)
    if len(cells) == 1 or not size:
        yield None
        return
    each_node = f"{count_noun(ranks // first.nodes, 'rank')} on each node"
    every = (cell for row in cells.values() for cell in row if cell.bytes == size)
    yield Chart(
        title=f"{each_node if first.nodes > 1 else 'one node'}: {describe_size(size)}",
        lines=make_lines(every, lambda cell: cell.ranks), along="ranks", unit=SECONDS, is_log=False,
    )  # fmt: skip
