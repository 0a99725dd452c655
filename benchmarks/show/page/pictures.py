"""Pictures as data: lines by size, a table of coloured cells, bars. Pages and slides draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.records.statistics import Spread
from mpiddp.wording import describe_size


@dataclass(frozen=True)
class Line:
    """One contender in one chart."""

    name: str
    points: Mapping[float, Spread]
    """By place on the axis below."""
    notes: Mapping[float, str] = field(default_factory=dict)
    """What is said of a point beside its figures, such as the algorithm that ran."""
    wrong: Sequence[float] = ()
    """Places where the results are wrong."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over a logarithmic axis of bytes, or a linear one of anything else."""

    title: str
    text: str
    """What it shows, in a sentence, for those who cannot see it."""
    unit: str
    """Of the values."""
    is_log: bool
    lines: Sequence[Line]
    along: str = "bytes"
    """What the axis below shows."""
    mark: tuple[float, str] | None = None
    """A value that a line is drawn at, and what it is."""

    @property
    def places(self) -> list[float]:
        return sorted(set().union(*(line.points for line in self.lines)))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The charts of one group of contenders; they show the same lines."""

    name: str
    """What tells it from the other panels of its section."""
    charts: Sequence[Chart]
    shown: Sequence[str]
    """The lines to begin with, at most MOST_SHOWN."""


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


@dataclass(frozen=True)
class Bar:
    """One row of bars: parts that add up, or one value with its quartiles."""

    name: str
    parts: Mapping[str, float]
    spread: Spread | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars:
    title: str
    text: str
    unit: str
    bars: Sequence[Bar]


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
    pictures: Sequence[Grid | Bars] = ()
    panels: Sequence[Panel] = ()
    start: int = 0
    """Number of the panel to begin with."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Colours that names have in all sections."""
    links: Sequence[Link] = ()


@dataclass(frozen=True, kw_only=True)
class Highlight:
    """A result that is worth large letters."""

    title: str
    value: str
    text: str
    section: str


@dataclass(frozen=True)
class Fact:
    """What is known of each record's machine."""

    name: str
    texts: Sequence[str]
    must_agree: bool
    """Whether times cannot be compared if it differs."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """What a reader must know first."""

    text: str
    lines: Sequence[str] = ()
    is_bad: bool = True
    """A wrong result or a refusal; else a warning."""


def describe_place(value: float, along: str) -> str:
    return describe_size(int(value)) if along == "bytes" else f"{value:g} {along}"
