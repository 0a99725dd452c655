"""Draws pictures on matplotlib's axes: charts, bars, dots and grids.

Each line has its name at its end, and a colour, a marker and dashes that no other line has.
Repetitions are a band between the quartiles, around the median. What is pointed at is said by the
title of its element, which is drawn with an identity that begins with TIP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from string import ascii_uppercase
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks.show.charts import (
    Bar,
    Bars,
    Chart,
    ChartLine,
    Dots,
    Grid,
    Picture,
    Square,
    describe,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#111111", "#56b4e9", "#882255", "#999933",
           "#332288", "#7f7f7f")  # fmt: skip
"""For colour-blind readers: the first six are about Okabe and Ito's, the next three Paul Tol's. Of
black matplotlib writes nothing, so that no page could have another colour for it."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 0.8)), (0, (8, 2)), (0, (3, 1)),
          (0, (8, 2, 1, 2)), (0, (4, 1, 4, 1, 1, 1)))  # fmt: skip
HATCHES = ("", "//", "..")
"""That tell parts of a bar apart in grey."""
INK, QUIET, RULE, ALARM, HOT, PAPER = (
    "#222222", "#595959", "#dddddd", "#a51d1d", "#0b4a99", "#ffffff",
)  # fmt: skip
"""Of texts, what stands behind, rules, what is wrong, the largest value of a grid, the sheet."""
POINTS = 8
"""Size of letters."""
LETTER = 0.56 * POINTS
"""Width of one, in points, on the whole."""
LINE = 1.35 * POINTS
"""Height of a line of text, in points."""
BAR, GAP = 9, 7
"""Height of a bar, and what is left below it, in points."""
DOTS = 1.6 * LINE
"""Height of a row of dots, in points."""
SQUARE = 34, 27
"""Width and height of a square of a grid, in points."""
MOST_TEXTS = 900
"""Squares of a grid with a text in each."""
NAMES_SHARE = 0.36
"""Of the axes' width that names may take on one line."""
NAMES = 1.06
"""Where the names of lines begin, in widths of the axes."""
MOST_MARKERS = 9
"""Of a line."""
MOST_PLACES = 40
"""Of a chart in which each place may have a tick, and says what is there."""
MARGIN = 24
"""What axes leave beside what they show, in points."""
TIP = "tip:"


def measure(picture: Picture, width: float) -> tuple[float, float]:
    """Width and height in points that a picture needs on a sheet that has so much width."""
    if isinstance(picture, Chart):
        return width, max(175.0, min(260.0, 0.68 * width))
    if isinstance(picture, Bars):
        return width, _find_places(picture, width)[-1] + _measure_below(picture)
    if isinstance(picture, Dots):
        return width, DOTS * max(3, len(picture.rows)) + 3 * MARGIN
    labels = LETTER * max(map(len, picture.rows), default=1) + MARGIN
    squares = max(SQUARE[0] * len(picture.columns), _measure_key(picture))
    width = max(width, labels + squares)
    keys = math.ceil(len(picture.kinds) / _count_keys(picture, width - labels))
    return width, SQUARE[1] * len(picture.rows) + 1.5 * MARGIN + 1.5 * LINE * keys


def draw(axis: Axes, picture: Picture, colours: Mapping[str, int]) -> None:
    if isinstance(picture, Chart):
        draw_chart(axis, picture, colours)
    elif isinstance(picture, Bars):
        draw_bars(axis, picture)
    elif isinstance(picture, Dots):
        draw_dots(axis, picture)
    else:
        draw_grid(axis, picture, colours)


# ---- lines --------------------------------------------------------------------------------


def draw_chart(axis: Axes, chart: Chart, colours: Mapping[str, int]) -> None:
    """All but the names of the lines, which `label_lines` writes once the axes have their size."""
    for number, line in enumerate(chart.lines):
        _draw_line(axis, line, _find_style(colours, line, number))
    if chart.mark is not None:
        value, text = chart.mark
        axis.axhline(value, color=QUIET, lw=1, ls=":", zorder=1)
        side = _find_free_side(chart, value)
        axis.annotate(
            text, (side, value), (3 - 6 * side, 2), xycoords=axis.get_yaxis_transform(),
            textcoords="offset points", ha="right" if side else "left", color=QUIET,
            fontsize=POINTS - 1,
        )  # fmt: skip
    _set_scales(axis, chart)
    axis.set_xlabel(chart.label or ("" if chart.along in ("bytes", "s") else chart.along))
    axis.grid(color=RULE, lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    _add_tips(axis, chart)


def _find_free_side(chart: Chart, value: float) -> int:
    """0 for the left, 1 for the right: where lines are farther from a value."""

    def measure_gap(place: float) -> float:
        medians = [line.points[place].median for line in chart.lines if place in line.points]
        gaps = [abs(math.log(m / value)) if chart.is_log else abs(m - value) for m in medians]
        return min(gaps, default=math.inf)

    places = chart.places or [0.0]
    left, right = map(measure_gap, (places[0], places[-1]))
    return int(right > left)


def _find_style(colours: Mapping[str, int], line: ChartLine, number: int) -> int:
    return colours.get(line.name, number) % len(COLOURS)


def _draw_line(axis: Axes, line: ChartLine, style: int) -> None:
    places = sorted(line.points)
    points = [line.points[place] for place in places]
    medians = [point.median for point in points]
    colour = COLOURS[style]
    if not line.is_joined:
        axis.plot(places, medians, "o", ms=3, mfc="none", color=QUIET, alpha=0.8)
        return
    axis.plot(
        places, medians, color=colour, ls=DASHES[style], lw=1.6,
        marker=MARKERS[style], ms=4, mec=PAPER, mew=0.4, markevery=-(-len(places) // MOST_MARKERS),
    )  # fmt: skip
    low, high = [each.lower_quartile for each in points], [each.upper_quartile for each in points]
    if (low, high) != (medians, medians):
        axis.fill_between(places, low, high, color=colour, alpha=0.2, lw=0)
    wrong = [line.points[place].median for place in line.wrong]
    axis.plot(line.wrong, wrong, "o", mfc="none", mec=ALARM, mew=1.5, ms=8)


def _set_scales(axis: Axes, chart: Chart) -> None:
    places = chart.places
    width = 0.6 * axis.get_window_extent().width
    if chart.along == "bytes" or chart.is_along_log:
        axis.set_xscale("log", base=2)
        if len(places) > MOST_PLACES:
            powers = (4.0**power for power in range(31))
            places = [each for each in powers if places[0] <= each <= places[-1]]
        ticks: Sequence[float] = choose_ticks(places, 40 / width)
        axis.set_xticks(ticks, [chart.describe_place(tick) for tick in ticks])
    elif chart.along == "s":
        axis.xaxis.set_major_formatter(lambda place, _: chart.describe_place(place))
        axis.locator_params(axis="x", nbins=max(3, int(width / 40)))
    else:
        axis.set_xticks(places)
    if chart.is_log:
        axis.set_yscale("log")
        axis.autoscale_view()
        ticks = choose_values(*axis.get_ylim())
        texts = [describe(tick, chart.unit) for tick in ticks]
        if len(set(texts)) < len(texts):
            texts = [f"{tick:,.6g} {chart.unit}" for tick in ticks]
        axis.set_yticks(ticks, texts)
    else:
        if chart.along != "s":
            axis.set_ylim(bottom=0)
        axis.locator_params(axis="y", nbins=6)
        axis.yaxis.set_major_formatter(lambda value, _: describe(value, chart.unit))
    axis.minorticks_off()


def choose_ticks(places: Sequence[float], share: float) -> list[float]:
    """Those of the places, in rising order, that have room beside each other on a logarithmic axis,
    of which a tick with its text needs such a share."""
    least = share * math.log(places[-1] / places[0]) if places else 0.0
    ticks: list[float] = []
    for place in places:
        if not ticks or math.log(place / ticks[-1]) >= least:
            ticks.append(place)
    return ticks


def choose_values(low: float, high: float) -> list[float]:
    """Round values in a range, for a logarithmic axis: at least three, if there are, and at most
    about seven."""
    from matplotlib.ticker import MaxNLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [digit * 10.0**power for power in powers for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found[:: -(-len(found) // 7)]
    return [each for each in MaxNLocator(5).tick_values(low, high) if low <= each <= high]


def _add_tips(axis: Axes, chart: Chart) -> None:
    """What all lines have at a place is said of the stripe around it."""
    places, (left, right) = chart.places, axis.get_xlim()
    is_log = axis.get_xscale() == "log"
    middles = [
        math.sqrt(one * other) if is_log else (one + other) / 2 for one, other in pairwise(places)
    ]
    if not 0 < len(places) <= MOST_PLACES:
        return
    for place, low, high in zip(places, [left, *middles], [*middles, right], strict=True):
        known = [line for line in chart.lines if place in line.points]
        known.sort(key=lambda line: -line.points[place].median)
        rows = [f"{line.name}: {chart.describe_point(line, place)}" for line in known]
        stripe = axis.axvspan(low, high, color=PAPER, alpha=0, lw=0, zorder=9)
        stripe.set_gid(TIP + "\n".join([chart.describe_place(place), *rows]))
    axis.set_xlim(left, right)


def label_lines(axis: Axes, chart: Chart, colours: Mapping[str, int]) -> None:
    """Write each line's name at its end, to the right of the axes, which must have their size."""
    box = axis.get_window_extent()
    letters = max(12, int(NAMES_SHARE * box.width / LETTER))
    names: dict[int, str] = {}
    ends: dict[int, tuple[float, float]] = {}
    for number, line in enumerate(chart.lines):
        known = [place for place in sorted(line.points) if math.isfinite(line.points[place].median)]
        if line.is_joined and known:
            names[number] = break_name(line.name, letters)
            ends[number] = known[-1], line.points[known[-1]].median
    rows = max((name.count("\n") + 1 for name in names.values()), default=1)
    least = LINE * rows / box.height
    to_place = axis.transData + axis.transAxes.inverted()
    heights = {number: float(to_place.transform(end)[1]) for number, end in ends.items()}
    # Of ends at one height the last is the lowest, so that what leads to the names does not cross.
    order = sorted(ends, key=lambda n: (round(heights[n] / least), -ends[n][0], heights[n]))
    # So that no name goes beyond the axes.
    edge = min(0.4, least / 2)
    inside = [min(max(heights[number], edge), 1 - edge) for number in order]
    spread = spread_out([(each - edge) / (1 - 2 * edge) for each in inside], least / (1 - 2 * edge))
    for number, share in zip(order, spread, strict=True):
        place = edge + (1 - 2 * edge) * share
        colour = COLOURS[_find_style(colours, chart.lines[number], number)]
        begin = float(to_place.transform(ends[number])[0])
        axis.plot(
            [begin, NAMES], [heights[number], place], color=colour, lw=0.9, clip_on=False,
            transform=axis.transAxes, scalex=False, scaley=False, zorder=1.5,
        )  # fmt: skip
        axis.text(
            NAMES + 0.01, place, names[number], va="center", linespacing=1.0,
            transform=axis.transAxes,
        )  # fmt: skip


def break_name(name: str, letters: int) -> str:
    """On lines of at most so many letters, if its words allow it."""
    words = name.replace(":", ":\0").replace(",", ",\0").replace("\0 ", " ").replace("\0", " \0")
    text = fill(words, letters, break_long_words=False)
    # Where no line ends behind it, a colon or a comma is followed by what followed it.
    return text.replace(" \0", "").replace("\0", "")


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


# ---- bars and dots ------------------------------------------------------------------------


def _break_text(bars: Bars, bar: Bar, width: float) -> str:
    """What stands above a bar."""
    return break_name(f"{bar.name}: {bars.describe(bar)}", int((width - MARGIN) / LETTER))


def _find_places(bars: Bars, width: float) -> list[float]:
    """Where each bar begins and the last one ends, in points from the top."""
    places = [0.0]
    for bar in bars.bars:
        rows = _break_text(bars, bar, width).count("\n") + 1
        places.append(places[-1] + LINE * rows + BAR + GAP)
    return places


def _measure_below(bars: Bars) -> float:
    """The height of what stands below the bars, in points."""
    return MARGIN + LINE * math.ceil(len(bars.parts) / 2) * (len(bars.parts) > 1)


def draw_bars(axis: Axes, bars: Bars) -> None:
    """From 0, each below its name and its value; points in the order of rounds, so that a drift
    shows as a slope."""
    width, room = axis.get_window_extent().size
    places = _find_places(bars, width)
    for bar, bottom in zip(bars.bars, places[1:], strict=True):
        place = bottom - GAP - BAR / 2
        _draw_bar(axis, bars, bar, place)
        text = _break_text(bars, bar, width)
        axis.text(0, place - BAR / 2 - 1, text, va="bottom", linespacing=1.2)
    # Bars are as high beside others that are more.
    height = max(places[-1], room - _measure_below(bars))
    axis.set_ylim(height, 0)
    axis.set_xlim(left=0)
    axis.locator_params(axis="x", nbins=max(3, int(width / 60)))
    axis.xaxis.set_major_formatter(lambda value, _: describe(value, bars.unit))
    axis.grid(axis="x", color=RULE, lw=0.6)
    axis.set_axisbelow(True)
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
    if len(bars.parts) > 1:
        _add_legend(axis, height)


def _add_legend(axis: Axes, height: float) -> None:
    """Below axes of so many points."""
    axis.legend(
        loc="upper left", bbox_to_anchor=(0, -0.8 * MARGIN / height), frameon=False, ncols=2,
        fontsize=POINTS, borderpad=0, handlelength=1.2, columnspacing=1.2, borderaxespad=0,
    )  # fmt: skip


def _draw_bar(axis: Axes, bars: Bars, bar: Bar, place: float) -> None:
    end = 0.0
    for name, value in bar.parts.items():
        number, length = bars.parts.index(name), max(0.0, value)
        is_known = name in axis.get_legend_handles_labels()[1]
        (patch,) = axis.barh(
            place, length, left=end, height=BAR, color=COLOURS[number % len(COLOURS)],
            alpha=0.35 if bar.samples else 0.75, hatch=HATCHES[number % len(HATCHES)],
            edgecolor=PAPER, linewidth=0, label=name if name and not is_known else None,
        )  # fmt: skip
        text = ": ".join(filter(None, [name or bar.name, describe(value, bars.unit)]))
        patch.set_gid(TIP + text)
        end += length
    if bar.spread is not None:
        low, high = bar.spread.lower_quartile, bar.spread.upper_quartile
        axis.hlines(place, low, high, color=INK, linewidth=2, zorder=5)
        axis.vlines(bar.spread.median, place - BAR / 2, place + BAR / 2, color=INK, linewidth=1.4)
    steps = max(1, len(bar.samples) - 1)
    heights = [place + BAR * (0.35 - 0.7 * at / steps) for at in range(len(bar.samples))]
    axis.scatter(bar.samples, heights, s=6, color=INK, linewidths=0, zorder=3)


def draw_dots(axis: Axes, dots: Dots) -> None:
    """A row for each thing, with a dot for each contender, and its quartiles."""
    for place, row in enumerate(dots.rows):
        medians = [point.median for point in row.points.values()]
        axis.hlines(place, min(medians), max(medians), color=RULE, linewidth=1.4, zorder=1)
        for name, point in row.points.items():
            style = dots.names.index(name) % len(COLOURS)
            axis.hlines(
                place, point.lower_quartile, point.upper_quartile, color=COLOURS[style],
                linewidth=6, alpha=0.3,
            )  # fmt: skip
            is_known = name in axis.get_legend_handles_labels()[1]
            (dot,) = axis.plot(
                point.median, place, color=COLOURS[style], marker=MARKERS[style], ls="", ms=6,
                label=None if is_known else name,
            )  # fmt: skip
            dot.set_gid(f"{TIP}{row.name}, {name}: {describe(point.median, dots.unit)}")
        end = max(point.upper_quartile for point in row.points.values())
        axis.annotate(row.note, (end, place), (7, 0), textcoords="offset points", va="center")
    axis.set_xscale("log")
    axis.margins(x=0.2)
    axis.minorticks_off()
    ticks = choose_values(*axis.get_xlim())
    width = 0.5 * axis.get_window_extent().width
    ticks = choose_ticks(ticks, 40 / width)
    axis.set_xticks(ticks, [describe(tick, dots.unit) for tick in ticks])
    axis.set_yticks(range(len(dots.rows)), [break_name(row.name, 26) for row in dots.rows])
    axis.set_ylim(len(dots.rows) - 0.5, -0.5)
    axis.grid(axis="x", color=RULE, lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    _add_legend(axis, DOTS * max(3, len(dots.rows)))


# ---- grids --------------------------------------------------------------------------------


def _measure_key(grid: Grid) -> float:
    """The width of a kind's name below the grid, in points."""
    return LETTER * (max(map(len, grid.kinds), default=0) + 8)


def _count_keys(grid: Grid, width: float) -> int:
    """How many of them have room beside each other."""
    return max(1, int(width / _measure_key(grid)))


def draw_grid(axis: Axes, grid: Grid, colours: Mapping[str, int]) -> None:
    """A square for each cell. The name of a kind stands over the neighbours that have it, if it is
    short enough, and below the grid beside the letter that stands in each square."""
    from matplotlib.patches import Patch, Rectangle

    letters = dict(zip(grid.kinds, ascii_uppercase, strict=False)) if len(grid.kinds) > 1 else {}
    has_texts = len(grid.rows) * len(grid.columns) <= MOST_TEXTS
    for row, squares in enumerate(grid.squares):
        for column, square in enumerate(squares):
            if square is not None:
                colour, share = _choose_colour(square, colours)
                edge = ALARM if square.is_marked and square.kind is None else PAPER
                patch = Rectangle(
                    (column - 0.5, row - 0.5), 1, 1, fc=(colour, share), ec=edge, lw=1.2,
                    zorder=2 if edge == ALARM else 1,
                )  # fmt: skip
                patch.set_gid(TIP + (square.title or square.text))
                axis.add_patch(patch)
                text = f"{letters.get(square.kind or '', '')} {square.text}".strip()
                if has_texts:
                    _write(axis, column, row + 0.16 * (square.kind is not None), text)
        for middle, name in _find_runs(squares):
            _write(axis, middle, row - 0.22, name)
    axis.set_xticks(range(len(grid.columns)), grid.columns)
    axis.set_yticks(range(len(grid.rows)), grid.rows)
    axis.set_xlim(-0.5, len(grid.columns) - 0.5)
    axis.set_ylim(len(grid.rows) - 0.5, -0.5)
    axis.tick_params(labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    if grid.kinds:
        labels = LETTER * max(map(len, grid.rows)) + MARGIN
        width = axis.get_window_extent().width - labels
        shown = [Square("", kind=kind) for kind in grid.kinds]
        patches = [
            Patch(color=_choose_colour(each, colours), label=f"{letters.get(kind, '')} {kind}")
            for each, kind in zip(shown, grid.kinds, strict=True)
        ]
        axis.legend(
            handles=patches, loc="upper left", bbox_to_anchor=(0, 0), frameon=False,
            ncols=_count_keys(grid, width), fontsize=POINTS, handlelength=1.2,
        )  # fmt: skip


def _write(axis: Axes, x: float, y: float, text: str) -> None:
    """Letters that what is pointed at shines through."""
    axis.text(x, y, text, ha="center", va="center", fontsize=POINTS - 1, color=INK)


def _find_runs(squares: Sequence[Square | None]) -> Iterator[tuple[float, str]]:
    """The middle of each row of neighbours of a kind, and its name, if that has room there."""
    column = 0
    for kind, group in groupby(square.kind if square else None for square in squares):
        length = len(list(group))
        name = (kind or "").removeprefix("mpiddp ")
        if name and len(name) * LETTER < length * SQUARE[0]:
            yield column + (length - 1) / 2, name
        column += length


def _choose_colour(square: Square, colours: Mapping[str, int]) -> tuple[str, float]:
    """A colour, and how much of it."""
    if square.kind is not None:
        colour = COLOURS[colours[square.kind]] if square.kind in colours else QUIET
        return colour, 0.1 if square.is_marked else 0.27
    return HOT, 0.05 + 0.45 * (square.heat or 0.0)
