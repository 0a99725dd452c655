"""Each picture as a PNG for slides: 13.3 by 7.5 inches, with letters that the last row can read."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from benchmarks.common.options import describe_value
from benchmarks.common.plotting import finish_bars, finish_lines, spread_out
from benchmarks.models.drawing.page import read
from benchmarks.report.page import COLOURS as COUNT
from benchmarks.report.page import Report, choose_colours
from benchmarks.report.pictures import (
    MOST_SHOWN,
    Bars,
    Chart,
    Grid,
    Panel,
    Section,
    Square,
    describe_place,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, DPI = 13.33, 7.5, 150
LETTERS, SMALL = 16, 12
"""Points."""
COLOURS = re.findall(r"--slot-\d: (#[0-9a-f]{6})", read("report.css", __package__))[:COUNT]
"""Those of the page in light mode, which come first."""
PARTS = (2, 1, 3, 4, 5, 6)
"""Colours of the parts of bars."""
TITLE_LETTERS = 72
"""Of a row of a title."""
MOST_TEXTS = 400
"""Squares with a text in each."""


def write_slides(folder: Path, report: Report) -> int:
    """Write all pictures into a directory that exists; returns how many. Raises OSError."""
    colours = choose_colours(report.sections)
    slides = list(_list_slides(report.sections))
    for number, (section, title, picture, shown) in enumerate(
        tqdm(slides, unit="slide", leave=False), start=1
    ):
        name = re.sub(r"[^a-z0-9]+", "-", f"{section.name} {title}".lower()).strip("-")[:80]
        path = folder / f"{number:03}-{name}.png"
        _write_slide(path, f"{section.heading}: {title}", picture, colours, shown)
    return len(slides)


Slide = tuple[Section, str, Chart | Grid | Bars, Sequence[str]]


def _list_slides(sections: Sequence[Section]) -> Iterator[Slide]:
    for section in sections:
        for picture in section.pictures:
            yield section, picture.title, picture, ()
        for panel in section.panels:
            yield from _list_charts(section, panel)


def _list_charts(section: Section, panel: Panel) -> Iterator[Slide]:
    for chart in panel.charts:
        if any(line.points for line in chart.lines if line.name in panel.shown):
            yield section, f"{chart.title}, {panel.name}", chart, panel.shown


def _write_slide(
    path: Path,
    title: str,
    picture: Chart | Grid | Bars,
    colours: Mapping[str, int],
    shown: Sequence[str],
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.25, h_pad=0.2)
    figure = Figure(figsize=(WIDTH, HEIGHT), layout=layout)
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    # A dollar sign would begin a formula.
    heading = textwrap.fill(title, TITLE_LETTERS).replace("$", r"\$")
    figure.suptitle(heading, fontsize=22, x=0.02, ha="left", weight="bold")
    if isinstance(picture, Chart):
        _draw_chart(axis, picture, colours, shown)
    elif isinstance(picture, Grid):
        _draw_grid(axis, picture, colours)
    else:
        _draw_bars(axis, picture)
    figure.savefig(path, dpi=DPI)


def _draw_chart(axis: Axes, chart: Chart, colours: Mapping[str, int], shown: Sequence[str]) -> None:
    lines = [line for line in chart.lines if line.name in shown and line.points]
    if chart.along == "bytes":
        axis.set_xscale("log", base=2)
    if chart.is_log:
        axis.set_yscale("log")
    ends = []
    for number, line in enumerate(lines):
        colour = COLOURS[colours.get(line.name, number % MOST_SHOWN)]
        places = sorted(line.points)
        points = [line.points[place] for place in places]
        dash = "--" if colours.get(line.name) == 0 else "-"
        axis.plot(places, [each.median for each in points], dash, color=colour, lw=3, marker="o")
        axis.fill_between(
            places, [each.low for each in points], [each.high for each in points], color=colour,
            alpha=0.2, lw=0,
        )  # fmt: skip
        ends.append((points[-1].median, places[-1], line.name.replace("$", r"\$"), colour))
    if chart.mark is not None:
        axis.axhline(chart.mark[0], color="#55606e", lw=1.5, ls=":")
    if chart.along == "bytes":
        places = chart.places[:: max(1, len(chart.places) // 7)]
        axis.set_xticks(places, [describe_place(each, chart.along) for each in places])
        axis.minorticks_off()
        if not chart.is_log:
            axis.set_ylim(bottom=0)
    else:
        axis.set_xlabel(chart.along, fontsize=LETTERS)
    axis.yaxis.set_major_formatter(lambda value, _: describe_value(value, chart.unit))
    axis.tick_params(labelsize=LETTERS)
    axis.set_title(chart.text, loc="left", fontsize=SMALL, color="#55606e")
    finish_lines(axis)
    _label_ends(axis, ends)


def _label_ends(axis: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the right, each at its line's height or as near to that as there is room."""
    heights = [
        float(axis.transAxes.inverted().transform(axis.transData.transform((place, value)))[1])
        for value, place, _, _ in ends
    ]
    order = sorted(range(len(ends)), key=lambda each: heights[each])
    places = spread_out([heights[each] for each in order], 0.055)
    for height, each in zip(places, order, strict=True):
        _, _, name, colour = ends[each]
        axis.annotate(
            name, (1.01, height), xycoords="axes fraction", color=colour, fontsize=LETTERS - 1,
            va="center", weight="bold",
        )  # fmt: skip


def _draw_grid(axis: Axes, grid: Grid, colours: Mapping[str, int]) -> None:
    from matplotlib.patches import Rectangle

    has_texts = len(grid.rows) * len(grid.columns) <= MOST_TEXTS
    for row, squares in enumerate(grid.squares):
        for column, square in enumerate(squares):
            if square is not None:
                colour, share = _choose_colour(square, colours)
                edge = "#a51d1d" if square.is_marked and square.kind is None else "white"
                axis.add_patch(
                    Rectangle((column - 0.5, row - 0.5), 1, 1, fc=(colour, share), ec=edge, lw=2)
                )
                if has_texts:
                    short = (square.kind or "").removeprefix("mpiddp ").replace("-", "-\n")
                    text = f"{short}\n{square.text}".strip().replace("$", r"\$")
                    axis.text(column, row, text, ha="center", va="center", fontsize=9)
    size = SMALL if len(grid.rows) <= 16 else 8
    axis.set_xticks(range(len(grid.columns)), grid.columns, fontsize=size, rotation=40)
    axis.set_yticks(range(len(grid.rows)), grid.rows, fontsize=size)
    axis.set_xlim(-0.5, len(grid.columns) - 0.5)
    axis.set_ylim(len(grid.rows) - 0.5, -0.5)
    axis.set_title(grid.text, loc="left", fontsize=SMALL, color="#55606e", wrap=True)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def _choose_colour(square: Square, colours: Mapping[str, int]) -> tuple[str, float]:
    """A colour, and how much of it."""
    if square.kind is not None:
        colour = COLOURS[colours[square.kind]] if square.kind in colours else "#8a93a0"
        return colour, 0.12 if square.is_marked else 0.35
    return "#0b4a99", 0.05 + 0.6 * (square.heat or 0.0)


def _draw_bars(axis: Axes, bars: Bars) -> None:
    names = list(dict.fromkeys(name for bar in bars.bars for name in bar.parts))
    for place, bar in enumerate(bars.bars):
        begin = 0.0
        for name, value in bar.parts.items():
            colour = COLOURS[PARTS[names.index(name) % len(PARTS)]]
            length = max(0.0, value)
            axis.barh(place, length, left=begin, height=0.62, color=colour, alpha=0.85)
            begin += length
        total = bar.spread.median if bar.spread is not None else begin
        if bar.spread is not None:
            axis.hlines(place, bar.spread.low, bar.spread.high, color="black", lw=2, zorder=5)
            begin = max(begin, bar.spread.high)
        text = "; ".join(filter(None, [describe_value(total, bars.unit), bar.note]))
        axis.annotate(
            text.replace("$", r"\$"), (begin, place), xytext=(8, 0), textcoords="offset points",
            va="center", fontsize=SMALL,
        )  # fmt: skip
    axis.margins(x=0.35)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(lambda value, _: describe_value(value, bars.unit))
    finish_bars(axis, [bar.name.replace("$", r"\$") for bar in bars.bars], size=LETTERS - 2)
    axis.tick_params(axis="x", labelsize=SMALL)
    if len(names) > 1:
        handles = [
            axis.barh(0, 0, color=COLOURS[PARTS[at % len(PARTS)]], alpha=0.85)
            for at in range(len(names))
        ]
        axis.legend(handles, names, loc="lower right", fontsize=SMALL, frameon=False)
