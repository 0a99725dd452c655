"""What algorithms take on a machine, beside the lower bound: as tables, a picture and cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records.machines import describe_place
from benchmarks.records.options import SPEED, describe_number, describe_seconds, format_rows
from benchmarks.records.schema import RecordWriter, make_cell
from benchmarks.records.statistics import exact
from benchmarks.show.charts import Chart, ChartLine, choose_lines
from benchmarks.show.progress import show_progress
from benchmarks.show.sheets import write_sheet
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.cost import Bounds, bound
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import Choice, Price
from mpiddp.wording import describe_size

QUANTITY = "predicted all-reduce"
SIMULATED = "simulated"
Place = tuple[int, ...]
"""The ranks of each node."""


@dataclass(frozen=True)
class Question:
    """What is priced."""

    choices: Sequence[Choice]
    places: Sequence[Place]
    sizes: Sequence[int]
    find_machine: Callable[[Place], Machine]
    """The machine that has these nodes."""


@dataclass(frozen=True)
class PriceRow:
    """An algorithm on one number of ranks."""

    name: str
    prices: tuple[Price, ...]
    """For each size; empty if it can neither be simulated nor has a closed form."""
    obstacle: str = ""
    """Why it could not be priced."""

    @property
    def steps(self) -> int:
        """Of the simulation, or else of the formula."""
        price = self.prices[0]
        if price.simulation is not None:
            return len(price.simulation.steps)
        return price.form.steps if price.form is not None else 0


@dataclass(frozen=True)
class Table:
    """One number of ranks."""

    ranks: int
    nodes: int
    rows: tuple[PriceRow, ...]
    bounds: tuple[Bounds, ...]
    """For each size."""

    @property
    def title(self) -> str:
        return describe_place(self.ranks, self.nodes)

    def list_ratios(self, row: PriceRow) -> list[float]:
        """How many times the lower bound each price is; NaN if that is nothing."""
        pairs = zip(row.prices, self.bounds, strict=True)
        return [
            price.seconds / least.seconds if least.seconds else math.nan for price, least in pairs
        ]


def price_all(question: Question) -> list[Table]:
    """A table for each place. Raises ConfigurationError if nothing can be priced."""
    tables, choices, sizes = list[Table](), question.choices, question.sizes
    with show_progress(len(question.places) * len(choices), "price") as bar:
        for nodes in question.places:
            machine, rows = question.find_machine(nodes), []
            for choice in choices:
                rows.append(_price(choice, nodes, sizes, machine))
                bar.update()
            bounds = tuple(bound(size, machine, nodes) for size in sizes)
            tables.append(Table(sum(nodes), len(nodes), tuple(rows), bounds))
    if not any(row.prices for table in tables for row in table.rows):
        raise ConfigurationError(tables[0].rows[0].obstacle)
    return tables


def _price(choice: Choice, nodes: Place, sizes: Sequence[int], machine: Machine) -> PriceRow:
    try:
        return PriceRow(str(choice), tuple(choice.prices(sizes, machine, nodes)))
    except ConfigurationError as error:
        return PriceRow(str(choice), (), str(error))


def record_table(record: RecordWriter, table: Table, sizes: Sequence[int]) -> None:
    """A cell for each price, with the steps and the lower bound, in seconds."""
    for row in table.rows:
        if row.obstacle:
            record.refuse(QUANTITY, row.name, row.obstacle, ranks=table.ranks)
        for size, price, least in zip(sizes, row.prices, table.bounds, strict=False):
            details = {"source": price.source, "steps": row.steps, "bound": least.seconds}
            cell = make_cell(
                [price.seconds], quantity=QUANTITY, contender=row.name, ranks=table.ranks,
                nodes=table.nodes, at={"bytes": size, "type": "float32"}, details=details,
            )  # fmt: skip
            record.add(cell)


# ---- in words -----------------------------------------------------------------------------


def describe(sizes: Sequence[int], shown: Sequence[int], tables: Sequence[Table]) -> Iterator[str]:
    """The tables of the ``shown`` sizes: seconds, and in brackets times the lower bound."""
    yield "time; in brackets, how many times the lower bound of summing over all ranks that is"
    places = [sizes.index(size) for size in shown]
    heads = [text for size in shown for text in (describe_size(size), "")]
    for table in tables:
        least = [describe_seconds(table.bounds[place].seconds) for place in places]
        rows = [
            ["algorithm", "steps", *heads],
            *(_describe_row(row, table, places) for row in table.rows),
            ["lower bound", "", *(text for each in least for text in (each, ""))],
        ]
        yield from ("", table.title, *(line.rstrip() for line in format_rows(rows)))
    every = [row for table in tables for row in table.rows]
    obstacles = [row.obstacle for row in every if row.obstacle]
    if obstacles:
        yield from ("", "— could not be priced:", *(f"  {text}" for text in obstacles))
    if any(price.source != SIMULATED for row in every for price in row.prices):
        yield (
            "~ is the algorithm's closed form, for chunks of equal size; "
            "all else is simulated step by step"
        )


def _describe_row(row: PriceRow, table: Table, places: Sequence[int]) -> list[str]:
    if not row.prices:
        return [row.name, "", *["—", ""] * len(places)]
    cells, ratios = [], table.list_ratios(row)
    for place in places:
        price, ratio = row.prices[place], ratios[place]
        mark = "" if price.source == SIMULATED else "~"
        share = f"({describe_number(ratio)})"
        cells += [mark + describe_seconds(price.seconds), "" if math.isnan(ratio) else share]
    return [row.name, f"{row.steps:,}", *cells]


# ---- the picture --------------------------------------------------------------------------


def draw_prices(path: Path, sizes: Sequence[int], tables: Sequence[Table], note: str) -> None:
    """A chart for each number of ranks; of all algorithms those that are best on the whole."""
    priced = {
        (row.name, (place, size)): price.seconds
        for place, table in enumerate(tables)
        for row in table.rows
        for size, price in zip(sizes, row.prices, strict=False)
    }
    shown, note = choose_lines(priced, "algorithm", note)
    charts = [_make_chart(sizes, table, shown) for table in tables]
    grid = [charts[start : start + 2] for start in range(0, len(charts), 2)]
    title = "All-reduce on a modelled machine: how many times the lower bound it takes"
    colours = {name: number for number, name in enumerate(shown)}
    write_sheet(path, grid, colours, title, note)


def _make_chart(sizes: Sequence[int], table: Table, shown: Sequence[str]) -> Chart:
    sources = {row.prices[0].source for row in table.rows if row.prices}
    lines = [
        ChartLine(row.name, dict(zip(sizes, map(exact, table.list_ratios(row)), strict=True)))
        for row in table.rows
        if row.prices and row.name in shown and table.ranks > 1
    ]
    return Chart(
        title=f"{table.title}, {' and '.join(sorted(sources))}", lines=lines, unit=SPEED,
        is_log=True, label="buffer of each rank", mark=(1.0, "the lower bound"),
    )  # fmt: skip
