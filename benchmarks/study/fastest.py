"""Which algorithm is quickest, by ranks and size, and the sizes at which that changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.records.machines import describe_place
from benchmarks.records.options import ITEM, format_rows
from benchmarks.show.axes import COLOURS
from benchmarks.show.progress import show_progress
from benchmarks.show.sheets import add_texts, open_sheet
from benchmarks.study.prices import Place, Question
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.cost import simulate
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice
from mpiddp.wording import describe_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = tuple(1 << bits for bits in range(1, 17))
SIZES = tuple(1 << bits for bits in range(10, 31, 2))
TIE = 1e-9
"""Relative difference up to which two algorithms take as long; then the first one is named."""
WIDEST_LETTER = 0.03
"""Doublings of the size that a letter takes in the picture, for each point of its height."""


@dataclass(frozen=True)
class Range:
    """An algorithm that is quickest from one size to another."""

    name: str
    low: int
    high: int
    """Bytes; the last size, in whole elements, at which it is."""

    @property
    def width(self) -> float:
        """In doublings of the size."""
        return math.log2(self.high + ITEM) - math.log2(self.low)


@dataclass(frozen=True)
class FastestRow:
    """One number of ranks."""

    ranks: int
    nodes: int
    ranges: tuple[Range, ...]
    """In order of size; each begins where the one before it ends."""

    def winner(self, size: int) -> str:
        return next(each.name for each in self.ranges if size <= each.high)


def leaves_nobody_out(choice: Choice) -> bool:
    """Whether all ranks contribute, so that it competes with the others."""
    return len(choice.algorithm.make(3).members) == 3


def make_map(question: Question) -> list[FastestRow]:
    """A row for each place. Raises ConfigurationError if nothing can be priced there."""
    rows = []
    with show_progress(len(question.places), "map") as bar:
        for nodes in question.places:
            prices = _list_prices(question.choices, nodes, question.find_machine(nodes))
            rows.append(
                FastestRow(sum(nodes), len(nodes), tuple(find_ranges(prices, question.sizes)))
            )
            bar.update()
    return rows


def _list_prices(
    choices: Sequence[Choice], nodes: Place, machine: Machine
) -> Mapping[str, Callable[[int], float]]:
    """Each algorithm's seconds by size: of its closed form, or simulated if there is none."""
    found = {}
    for choice in choices:
        price = _find_price(choice, nodes, machine)
        if price is not None:
            found[str(choice)] = cache(price)
    if not found:
        raise ConfigurationError(
            f"no algorithm has a closed form for {sum(nodes)} ranks on {len(nodes)} nodes, and "
            f"more than {LARGEST_SIMULATED} are not simulated"
        )
    return found


def _find_price(choice: Choice, nodes: Place, machine: Machine) -> Callable[[int], float] | None:
    form = choice.closed_form(nodes)
    if form is not None:
        return lambda size: form.seconds(size, machine)
    if sum(nodes) > LARGEST_SIMULATED:
        return None
    schedule = choice.build(sum(nodes), nodes)
    return lambda size: simulate(schedule, size // ITEM, machine, nodes, item=ITEM).seconds


def find_ranges(
    prices: Mapping[str, Callable[[int], float]], sizes: Sequence[int]
) -> Iterator[Range]:
    """Who is quickest from the first size to the last; each change is found by bisection.

    Between two of ``sizes`` with the same winner no change is looked for.
    """

    def find_winner(size: int) -> str:
        seconds = {name: price(size) for name, price in prices.items()}
        least = min(seconds.values()) * (1 + TIE)
        return next(name for name, value in seconds.items() if value <= least)

    start, name = sizes[0], find_winner(sizes[0])
    for low, high in itertools.pairwise(sizes):
        while (last := find_winner(high)) != name:
            change = _bisect(find_winner, name, low, high)
            yield Range(name, start, change - ITEM)
            start, low, name = change, change, find_winner(change)
            if name == last:
                break
    yield Range(name, start, sizes[-1])


def _bisect(find_winner: Callable[[int], str], name: str, low: int, high: int) -> int:
    """A size, in whole elements, at which ``name`` has just stopped to win."""
    while high - low > ITEM:
        middle = (low + high) // 2 // ITEM * ITEM
        low, high = (middle, high) if find_winner(middle) == name else (low, middle)
    return high


# ---- in words -----------------------------------------------------------------------------


def describe_map(rows: Sequence[FastestRow], sizes: Sequence[int]) -> Iterator[str]:
    """A table of letters, what they mean, and the sizes at which the winner changes."""
    names = list_names(rows)
    letters = {name: chr(ord("A") + place) for place, name in enumerate(names)}
    yield "the quickest algorithm, by ranks and bytes"
    table = [("ranks", *(describe_size(size).replace("iB", "").replace(" ", "") for size in sizes))]
    table += [(f"{row.ranks:,}", *(letters[row.winner(size)] for size in sizes)) for row in rows]
    yield from format_rows(table)
    yield ""
    yield from (f"{letter}  {name}" for name, letter in letters.items())
    yield ""
    yield "crossovers"
    for row in rows:
        changes = [
            f"{each.name} below {describe_size(each.high + ITEM)}" for each in row.ranges[:-1]
        ]
        place = describe_place(row.ranks, row.nodes)
        yield f"  {place}: {', '.join([*changes, row.ranges[-1].name])}"
    yield "by closed forms, for chunks of equal size; simulated step by step if there is none"


def list_names(rows: Sequence[FastestRow]) -> list[str]:
    """Those that win anywhere, in the order in which they turn up."""
    return list(dict.fromkeys(each.name for row in rows for each in row.ranges))


# ---- the picture --------------------------------------------------------------------------


def draw_map(path: Path, rows: Sequence[FastestRow], note: str) -> None:
    """A bar for each number of ranks, coloured by who wins; names stand in their regions."""
    names = list_names(rows)
    title = "The quickest all-reduce, by ranks and size"
    with open_sheet(path, 650, 25 * len(rows) + 130) as figure:
        add_texts(figure, title, note)
        axis = figure.add_subplot()
        for place, row in enumerate(rows):
            for each in row.ranges:
                colour = COLOURS[names.index(each.name) % len(COLOURS)]
                axis.barh(place, each.width, 1.0, math.log2(each.low), color=colour, alpha=0.4)
        for region in find_regions(rows):
            _write_name(axis, region)
        ranges = rows[0].ranges
        low, high = ranges[0].low, ranges[-1].high
        ticks = [1 << bits for bits in range(0, 60, 2) if low <= 1 << bits <= high]
        places = [math.log2(tick) for tick in ticks]
        axis.set_xticks(places, [describe_size(tick) for tick in ticks])
        axis.set_yticks(range(len(rows)), [f"{row.ranks:,}" for row in rows])
        axis.set_xlim(math.log2(low), math.log2(high))
        axis.set_ylim(-0.5, len(rows) - 0.5)
        axis.set_xlabel("buffer")
        axis.set_ylabel("ranks")
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)


Region = list[tuple[int, Range]]
"""Neighbouring rows, by place, with the sizes at which one algorithm wins there."""


def find_regions(rows: Sequence[FastestRow]) -> list[Region]:
    """The parts of the map that one algorithm has in one piece."""
    regions: list[Region] = []
    for place, row in enumerate(rows):
        for each in row.ranges:
            below = next((region for region in regions if _touches(region[-1], place, each)), None)
            if below is None:
                regions.append([(place, each)])
            else:
                below.append((place, each))
    return regions


def _touches(last: tuple[int, Range], place: int, each: Range) -> bool:
    under = last[1]
    meet = under.low <= each.high and each.low <= under.high
    return last[0] == place - 1 and under.name == each.name and meet


def _write_name(axis: Axes, region: Region) -> None:
    """In the middle of the rows that are about as wide as the widest one."""
    widest = max(each.width for _, each in region)
    wide = [(place, each) for place, each in region if each.width >= 0.8 * widest]
    place, each = wide[len(wide) // 2]
    centre = math.log2(each.low) + each.width / 2
    size = max(7.0, min(9.0, widest / (WIDEST_LETTER * len(each.name))))
    axis.text(centre, place, each.name, ha="center", va="center", fontsize=size)
