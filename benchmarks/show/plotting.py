"""What all drawings share: the sheet, panels of lines with their names, bars, bands.

Each line has its name at its end, and a colour, a marker and dashes that no other line has.
Repetitions are a band between the quartiles, around the median.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Literal, TypeVar

from benchmarks.records.statistics import Spread, Summary, summarize
from mpiddp.files import write_whole
from mpiddp.wording import count_noun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Key = TypeVar("Key")

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#882255", "#999933",
           "#332288", "#7f7f7f")  # fmt: skip
"""For colour-blind readers: the first six are Okabe and Ito's, the next three Paul Tol's."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 0.8)), (0, (8, 2)), (0, (3, 1)),
          (0, (8, 2, 1, 2)), (0, (4, 1, 4, 1, 1, 1)))  # fmt: skip
HATCHES = ("", "//", "..")
"""That tell parts of a bar apart in grey."""
MOST_LINES = 6
"""In a panel: more cannot be told apart."""
INK = "#222222"
NOTE_POINTS, LABEL_POINTS = 7, 8.5
"""Sizes of the note below, and of the names at lines, which are so far apart and a third."""


@dataclass(frozen=True, eq=False)
class Line:
    name: str
    x: Sequence[float]
    summaries: Sequence[Summary | Spread]
    """Of the repetitions at each x."""
    style: int
    """Number of its colour, marker and dashes."""

    @property
    def end(self) -> tuple[float, float] | None:
        """The last median that is a number, and its x."""
        known = zip(self.x, (each.median for each in self.summaries), strict=True)
        return next((point for point in reversed(list(known)) if math.isfinite(point[1])), None)


@dataclass(frozen=True, kw_only=True)
class LinePanel:
    """Lines over one axis, and how they are shown."""

    title: str
    lines: Sequence[Line]
    label: str
    """What the axis below shows."""
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Places on that axis, which is logarithmic if there are any, and their names."""
    describe: Callable[[float], str]
    """A value in words."""
    base: float | None = 10
    """Of the logarithmic axis of values; None for a linear one."""
    mark: float | None = None
    """A value at which there is a dotted line."""
    finish: Callable[[Axes], object] = lambda axis: None
    """Draws what else is in the panel, and sets its limits."""


def draw_panels(
    path: Path,
    grid: Sequence[Sequence[LinePanel | None]],
    size: tuple[float, float],
    title: str,
    note: str,
    shared: Literal["none", "row", "col"] = "none",
) -> None:
    """Write a figure of so many inches, with a row of panels for each of ``grid``; None leaves a
    place empty. ``shared``: which panels have one axis of values."""
    with open_figure(path, *size, title, note) as figure:
        rows = figure.subplots(len(grid), len(grid[0]), squeeze=False, sharey=shared)
        drawn = {}
        for axis, panel in zip(rows.flat, (each for row in grid for each in row), strict=True):
            if panel is None:
                axis.axis("off")
            else:
                draw_panel(axis, panel)
                drawn[axis] = panel
        # Limits that are set hold for all panels of the axis, also those that were empty then.
        for axis, panel in drawn.items():
            panel.finish(axis)
        label_lines(figure, {axis: panel.lines for axis, panel in drawn.items()})


def draw_panel(axis: Axes, panel: LinePanel) -> None:
    """All but the names of the lines, and what ``finish`` does."""
    axis.set_title(panel.title, loc="left", fontsize=10)
    for line in panel.lines:
        draw_line(axis, line)
    if panel.mark is not None:
        axis.axhline(panel.mark, color="#777777", lw=1, ls=":", zorder=1)
    if panel.ticks:
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(panel.ticks), list(panel.ticks.values()), fontsize=8)
    if panel.base is not None:
        axis.set_yscale("log", base=panel.base)
    axis.minorticks_off()
    axis.set_xlabel(panel.label, fontsize=9)
    axis.yaxis.set_major_formatter(lambda value, _: panel.describe(value))
    axis.tick_params(axis="y", labelsize=8)
    finish_lines(axis)


@contextlib.contextmanager
def open_figure(
    path: Path, width: float, height: float, title: str, note: str = "", dpi: int = 150
) -> Iterator[Figure]:
    """An empty figure of so many inches, which is written to ``path`` at the end of the block."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    heading = fill(title, int(9 * width), break_on_hyphens=False)
    figure.suptitle(heading, fontsize=12, parse_math=False)
    if note:
        text = wrap_note(note, width)
        figure.supxlabel(text, fontsize=NOTE_POINTS, color="#555555", parse_math=False)
    yield figure
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".") or None, dpi=dpi)
    write_whole(path, picture.getvalue())


def wrap_note(note: str, width: float) -> str:
    """A text of NOTE_POINTS in lines for a sheet of so many inches."""
    return fill(note, int(17 * width), break_on_hyphens=False)


def choose_names(
    scores: Mapping[str, Sequence[float]], always: Sequence[str] = (), most: int = MOST_LINES
) -> tuple[list[str], int]:
    """The names to draw, in their order, and how many are left out.

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
    chosen = kept[:most]
    return [name for name in scores if name in chosen], len(scores) - len(chosen)


def choose_lines(
    medians: Mapping[tuple[str, Key], float | None],
    always: Sequence[str],
    noun: str,
    note: str,
    most: int = MOST_LINES,
) -> tuple[list[str], str]:
    """`choose_names` by medians of names in places; and the note, with how many are left out."""
    names = dict.fromkeys(name for name, _ in medians)
    places = dict.fromkeys(place for _, place in medians)
    scores = {name: [medians.get((name, each)) or math.nan for each in places] for name in names}
    shown, count = choose_names(scores, always, most)
    left_out = f"{count_noun(count, noun)} left out, slower on the whole" if count else ""
    return shown, "; ".join(filter(None, [left_out, note]))


def draw_line(axis: Axes, line: Line) -> None:
    medians = [each.median for each in line.summaries]
    colour = COLOURS[line.style]
    axis.plot(
        line.x, medians, color=colour, ls=DASHES[line.style], marker=MARKERS[line.style],
        lw=1.6, ms=4, markeredgecolor="white", markeredgewidth=0.4,
    )  # fmt: skip
    low = [each.lower_quartile for each in line.summaries]
    high = [each.upper_quartile for each in line.summaries]
    if (low, high) != (medians, medians):
        axis.fill_between(line.x, low, high, color=colour, alpha=0.2, lw=0)


def label_lines(figure: Figure, panels: Mapping[Axes, Sequence[Line]]) -> None:
    """Write each line's name at its end, to the right of its panel. Axes must have their limits."""
    figure.draw_without_rendering()
    for axis, lines in panels.items():
        ends = {line: line.end for line in lines}
        _label_panel(axis, {line: end for line, end in ends.items() if end is not None})


def _label_panel(axis: Axes, ends: Mapping[Line, tuple[float, float]]) -> None:
    height = axis.get_window_extent().height / axis.figure.dpi * 72
    rows = max((line.name.count("\n") + 1 for line in ends), default=1)
    least = 1.33 * LABEL_POINTS * rows / height
    to_place = axis.transData + axis.transAxes.inverted()
    heights = {line: float(to_place.transform(end)[1]) for line, end in ends.items()}
    # Of ends at one height the last is the lowest, so that what leads to the names does not cross.
    order = sorted(
        ends, key=lambda line: (round(heights[line] / least), -ends[line][0], heights[line])
    )
    places = spread_out([heights[line] for line in order], least)
    for line, place in zip(order, places, strict=True):
        arrow = {"arrowstyle": "-", "color": COLOURS[line.style], "lw": 0.8, "relpos": (0, 0.5)}
        axis.annotate(
            line.name, ends[line], (1.05, place), textcoords="axes fraction", va="center",
            color=INK, fontsize=LABEL_POINTS, annotation_clip=False, arrowprops=arrow,
            parse_math=False,
        )  # fmt: skip


def spread_out(places: Sequence[float], least: float) -> list[float]:
    """The places, moved until each is at least so far above the one before, as little as will do;
    from 0 to 1, as they were, if there is room."""
    groups: list[tuple[float, Sequence[float]]] = []
    for place in places:
        middle, group = place, [place]
        while groups and middle - groups[-1][0] < least * (len(groups[-1][1]) + len(group)) / 2:
            group = [*groups.pop()[1], *group]
            half = least * (len(group) - 1) / 2
            middle = max(half, min(1 - half, sum(group) / len(group))) if 2 * half <= 1 else 0.5
        groups.append((middle, group))
    return [
        middle + least * (number - (len(group) - 1) / 2)
        for middle, group in groups
        for number in range(len(group))
    ]


def draw_bar(axis: Axes, place: int, values: Sequence[float], colour: str, text: str) -> None:
    """A bar to the median, a band between the quartiles, a point for each value, and a text.

    Points stand over the bar's height in order of rounds: a drift shows as a slope.
    """
    summary, steps = summarize(values), max(1, len(values) - 1)
    low, high = summary.lower_quartile, summary.upper_quartile
    axis.barh(place, summary.median, height=0.62, color=colour, alpha=0.3)
    axis.barh(place, high - low, left=low, height=0.62, color=colour, alpha=0.5)
    axis.vlines(summary.median, place - 0.31, place + 0.31, color=INK, linewidth=1.6, zorder=4)
    heights = [place - 0.2 + 0.4 * index / steps for index in range(len(values))]
    axis.scatter(values, heights, s=9, color=INK, linewidths=0, zorder=3)
    write_beside(axis, text, max(values), place)


def draw_parts(
    axis: Axes, place: int, parts: Mapping[str, float], whole: Summary | Spread | None, text: str
) -> None:
    """A bar of parts one behind the other, for the legend; a line between the quartiles of the
    whole, if they are known, and a text."""
    end = 0.0
    for name, length in parts.items():
        known = axis.get_legend_handles_labels()[1]
        number = known.index(name) if name in known else len(known)
        axis.barh(
            place, length, left=end, height=0.66, color=COLOURS[number % len(COLOURS)], alpha=0.75,
            hatch=HATCHES[number % len(HATCHES)], edgecolor="white", linewidth=0,
            label=None if name in known else name,
        )  # fmt: skip
        end += length
    if whole is not None:
        low, high = whole.lower_quartile, whole.upper_quartile
        axis.hlines(place, low, high, color=INK, linewidth=2, zorder=5)
        end = max(end, high)
    write_beside(axis, text, end, place)


def finish_lines(axis: Axes) -> None:
    axis.grid(color="#eeeeee", lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def finish_bars(axis: Axes, names: Sequence[str], size: float = 9) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=size, parse_math=False)
    axis.invert_yaxis()
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def write_beside(axis: Axes, text: str, x: float, place: int) -> None:
    axis.annotate(
        text, (x, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8,
        parse_math=False,
    )  # fmt: skip


TICK_SHARE = 0.09
"""How much of an axis a tick with its text needs."""


def choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Those of the sizes, in rising order, whose texts have room beside each other."""
    least = TICK_SHARE * math.log(sizes[-1] / sizes[0])
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log(size / ticks[-1]) >= least:
            ticks.append(size)
    return ticks
