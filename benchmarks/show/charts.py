"""Pictures as data: lines, bars, dots and tables of coloured cells. `axes` draws each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from benchmarks.judge.winners import MOST_SHOWN
from benchmarks.records.options import describe_value
from benchmarks.records.statistics import Spread
from mpiddp.wording import count_noun, describe_size

Place = TypeVar("Place")


def describe(value: float, unit: str) -> str:
    """Three figures and the unit; without a unit powers of ten, if need be."""
    if not value:
        return "0"
    if unit or abs(value) >= 0.01:
        return describe_value(value, unit).rstrip()
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


@dataclass(frozen=True)
class ChartLine:
    """One contender in one chart."""

    name: str
    points: Mapping[float, Spread]
    """By place on the axis below."""
    notes: Mapping[float, str] = field(default_factory=dict)
    """What is said of a point beside its figures, such as the algorithm that ran."""
    wrong: Sequence[float] = ()
    """Places where the results are wrong."""
    is_joined: bool = True
    """Whether its points are joined, and its name stands at its end; else they are dots."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over a logarithmic axis of bytes, or a linear one of anything else."""

    title: str
    text: str = ""
    """What it shows, in a sentence, for those who cannot see it."""
    unit: str
    """Of the values."""
    is_log: bool
    """Whether the axis of values is logarithmic; a linear one begins at 0, but over time."""
    lines: Sequence[ChartLine]
    along: str = "bytes"
    """What the axis below shows."""
    label: str = ""
    """What the axis below shows, in words, if more is to be said."""
    is_along_log: bool = False
    """Whether an axis of other things than bytes is logarithmic, too."""
    mark: tuple[float, str] | None = None
    """A value that a line is drawn at, and what it is."""

    @property
    def places(self) -> list[float]:
        return sorted(set().union(*(line.points for line in self.lines)))

    def describe_place(self, place: float) -> str:
        """As at the axis."""
        if self.along == "bytes":
            return describe_size(round(place))
        return f"{place:,.4g} {self.along}" if self.along == "s" else f"{place:,.10g}"

    def describe_point(self, line: ChartLine, place: float) -> str:
        """The median, what lies around it, and what else is said of it; a dash if there is none."""
        if (point := line.points.get(place)) is None:
            return "–"
        ends = [describe(each, self.unit) for each in (point.lower_quartile, point.upper_quartile)]
        spread = f" ({ends[0]} – {ends[1]})" if ends[0] != ends[1] else ""
        note = f", {line.notes[place]}" if place in line.notes else ""
        return f"{describe(point.median, self.unit)}{spread}{note}"


@dataclass(frozen=True)
class Square:
    """One cell of a grid."""

    text: str
    title: str = ""
    """What is said of it at length."""
    heat: float | None = None
    """0 to 1, for grids of values."""
    kind: str | None = None
    """What its colour stands for, in grids of names."""
    is_marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of coloured cells."""

    title: str
    text: str
    corner: str
    """What the rows and the columns are."""
    rows: Sequence[str]
    columns: Sequence[str]
    squares: Sequence[Sequence[Square | None]]
    """By row, then by column."""

    @property
    def kinds(self) -> list[str]:
        """In the order in which they turn up."""
        every = (square for row in self.squares for square in row if square is not None)
        return list(dict.fromkeys(square.kind for square in every if square.kind is not None))


@dataclass(frozen=True)
class Bar:
    """One row of bars: parts that add up, or one value with its quartiles."""

    name: str
    parts: Mapping[str, float]
    spread: Spread | None = None
    note: str = ""
    samples: Sequence[float] = ()
    """A value a round, in their order, of the whole."""

    @property
    def median(self) -> float:
        return self.spread.median if self.spread is not None else sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Bars:
    title: str
    text: str
    unit: str
    bars: Sequence[Bar]

    @property
    def parts(self) -> list[str]:
        return list(dict.fromkeys(name for bar in self.bars for name in bar.parts))

    def describe(self, bar: Bar) -> str:
        """Its value, and what is said of it."""
        return "; ".join(filter(None, [describe(bar.median, self.unit), bar.note]))


@dataclass(frozen=True)
class DotRow:
    """What the contenders take for one thing."""

    name: str
    points: Mapping[str, Spread]
    """By contender."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Rows of medians on one logarithmic axis."""

    title: str
    text: str
    unit: str
    rows: Sequence[DotRow]

    @property
    def names(self) -> list[str]:
        """Of the contenders."""
        return list(dict.fromkeys(name for row in self.rows for name in row.points))


Picture = Chart | Bars | Dots | Grid


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The charts of one group of contenders; they show the same lines."""

    name: str
    """What tells it from the other panels of its section."""
    charts: Sequence[Chart]
    shown: Sequence[str]
    """The lines that are drawn, at most MOST_SHOWN."""

    @property
    def drawn(self) -> Iterator[Chart]:
        """The charts with the lines that are drawn, if there are any."""
        for chart in self.charts:
            lines = [line for line in chart.lines if line.name in self.shown and line.points]
            if lines:
                yield replace(chart, lines=lines)

    @property
    def names(self) -> list[str]:
        """Of all lines."""
        return list(dict.fromkeys(line.name for chart in self.charts for line in chart.lines))


@dataclass(frozen=True)
class Link:
    """To the animated explanation of an algorithm."""

    collective: str
    algorithm: str
    ranks: int | None
    """None if the algorithm is not known here, as one's own that was not loaded."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One quantity, or what belongs together of a command."""

    name: str
    """Lower-case, for the address."""
    heading: str
    words: str
    pictures: Sequence[Grid | Bars | Dots] = ()
    panels: Sequence[Panel] = ()
    roles: Mapping[str, int] = field(default_factory=dict)
    """Colours that names have in all sections."""
    links: Sequence[Link] = ()


def choose_colours(sections: Sequence[Section], count: int) -> dict[str, int]:
    """A colour of so many for each name that is coloured, the same in all sections."""
    colours: dict[str, int] = {}
    for section in sections:
        colours.update(section.roles)
    taken = set(colours.values())
    free = [number for number in range(count) if number not in taken]
    grids = [each for section in sections for each in section.pictures if isinstance(each, Grid)]
    shown = (name for section in sections for panel in section.panels for name in panel.shown)
    kinds = (kind for grid in grids for kind in grid.kinds)
    others = (name for name in dict.fromkeys([*kinds, *shown]) if name not in colours)
    return {**colours, **{name: free[at % len(free)] for at, name in enumerate(others)}}


def choose_names(
    scores: Mapping[str, Sequence[float]], always: Sequence[str] = ()
) -> tuple[list[str], int]:
    """At most MOST_SHOWN names to draw, in their order, and how many are left out.

    ``scores``: of each name, its values in the same places, of which less is better; NaN where
    there is none. Those of ``always`` come first; the others are chosen by how many times the best
    value they are, in the geometric mean of the places that they have.
    """
    places = zip(*scores.values(), strict=True)
    best = [min((value for value in place if value > 0), default=math.nan) for place in places]

    def rate(name: str) -> float:
        ratios = [value / least for value, least in zip(scores[name], best, strict=True)]
        known = [math.log(ratio) for ratio in ratios if ratio > 0]
        return sum(known) / len(known) if known else math.inf

    kept = [name for name in scores if name in always]
    kept += sorted((name for name in scores if name not in always), key=rate)
    chosen = kept[:MOST_SHOWN]
    return [name for name in scores if name in chosen], len(scores) - len(chosen)


def choose_lines(
    medians: Mapping[tuple[str, Place], float | None], noun: str, note: str
) -> tuple[list[str], str]:
    """`choose_names` by medians of names in places; and the note, with how many are left out."""
    names = dict.fromkeys(name for name, _ in medians)
    places = dict.fromkeys(place for _, place in medians)
    scores = {name: [medians.get((name, each)) or math.nan for each in places] for name in names}
    shown, count = choose_names(scores)
    left_out = f"{count_noun(count, noun)} left out, slower on the whole" if count else ""
    return shown, "; ".join(filter(None, [left_out, note]))
