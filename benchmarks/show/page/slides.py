"""Each picture as a PNG for slides: 13.3 by 7.5 inches, with letters that the last row can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from benchmarks.records.options import describe_value
from benchmarks.show.page.page import Report, choose_colours
from benchmarks.show.page.pictures import Bars, Chart, Grid, Section, Square, describe_place
from benchmarks.show.plotting import (
    COLOURS,
    Line,
    LinePanel,
    draw_panel,
    draw_parts,
    finish_bars,
    label_lines,
    open_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, DPI = 13.33, 7.5, 150
ENLARGED = 1.75
"""How many times larger letters and lines are than on paper."""
MOST_TEXTS = 400
"""Squares with a text in each."""
CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "parse_math": False}


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
    size = WIDTH / ENLARGED, HEIGHT / ENLARGED
    with open_figure(path, *size, title, picture.text, dpi=round(DPI * ENLARGED)) as figure:
        axis = figure.subplots()
        if isinstance(picture, Chart):
            panel = _make_panel(picture, colours, shown)
            draw_panel(axis, panel)
            panel.finish(axis)
            label_lines(figure, {axis: panel.lines})
        elif isinstance(picture, Grid):
            _draw_grid(axis, picture, colours)
        else:
            _draw_bars(axis, picture)


def _make_panel(chart: Chart, colours: Mapping[str, int], shown: Sequence[str]) -> LinePanel:
    lines = []
    for number, each in enumerate(chart.lines):
        if each.name in shown and each.points:
            places = sorted(each.points)
            spreads = [each.points[place] for place in places]
            style = colours.get(each.name, number) % len(COLOURS)
            lines.append(Line(each.name, places, spreads, style))
    is_sized = chart.along == "bytes"
    ticks = chart.places[:: max(1, len(chart.places) // 7)] if is_sized else ()
    return LinePanel(
        title="", lines=lines, label="" if is_sized else chart.along,
        ticks={place: describe_place(place, chart.along) for place in ticks},
        describe=partial(describe_value, unit=chart.unit), base=10 if chart.is_log else None,
        mark=chart.mark and chart.mark[0], finish=partial(_finish, chart=chart, shown=shown),
    )  # fmt: skip


def _finish(axis: Axes, chart: Chart, shown: Sequence[str]) -> None:
    axis.tick_params(labelsize=9)
    for line in chart.lines:
        if line.name in shown and line.wrong:
            medians = [line.points[place].median for place in line.wrong]
            axis.plot(line.wrong, medians, "o", mfc="none", mec="#a51d1d", mew=1.5, ms=8)
    if chart.along == "bytes" and not chart.is_log:
        axis.set_ylim(bottom=0)


def _draw_grid(axis: Axes, grid: Grid, colours: Mapping[str, int]) -> None:
    from matplotlib.patches import Rectangle

    has_texts = len(grid.rows) * len(grid.columns) <= MOST_TEXTS
    for row, squares in enumerate(grid.squares):
        for column, square in enumerate(squares):
            if square is not None:
                colour, share = _choose_colour(square, colours)
                edge = "#a51d1d" if square.is_marked and square.kind is None else "white"
                axis.add_patch(
                    Rectangle((column - 0.5, row - 0.5), 1, 1, fc=(colour, share), ec=edge, lw=1)
                )
                if has_texts:
                    short = (square.kind or "").removeprefix("mpiddp ").replace("-", "-\n")
                    text = f"{short}\n{square.text}".strip()
                    points = 5 if square.kind else 7
                    axis.text(column, row, text, fontsize=points, **CENTRED)
    size = 7 if len(grid.rows) <= 16 else 4.5
    axis.set_xticks(range(len(grid.columns)), grid.columns, fontsize=size, rotation=40)
    axis.set_yticks(range(len(grid.rows)), grid.rows, fontsize=size)
    axis.set_xlim(-0.5, len(grid.columns) - 0.5)
    axis.set_ylim(len(grid.rows) - 0.5, -0.5)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def _choose_colour(square: Square, colours: Mapping[str, int]) -> tuple[str, float]:
    """A colour, and how much of it."""
    if square.kind is not None:
        colour = COLOURS[colours[square.kind]] if square.kind in colours else "#8a93a0"
        return colour, 0.12 if square.is_marked else 0.35
    return "#0b4a99", 0.05 + 0.6 * (square.heat or 0.0)


def _draw_bars(axis: Axes, bars: Bars) -> None:
    for place, bar in enumerate(bars.bars):
        parts = {name: max(0.0, value) for name, value in bar.parts.items()}
        total = bar.spread.median if bar.spread is not None else sum(parts.values())
        text = "; ".join(filter(None, [describe_value(total, bars.unit), bar.note]))
        draw_parts(axis, place, parts, bar.spread, text)
    axis.margins(x=0.35)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(lambda value, _: describe_value(value, bars.unit))
    finish_bars(axis, [bar.name for bar in bars.bars], size=8)
    axis.tick_params(axis="x", labelsize=8)
    if len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend(loc="lower right", fontsize=7, frameon=False)
