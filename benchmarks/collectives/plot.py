"""Draw times and rates of all-reduces against the size of the buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.collectives.contenders import OWN, PREPARED, Contender
from benchmarks.collectives.measurement import Group
from benchmarks.collectives.report import find_rates
from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.common.plotting import COLOURS, add_legend, finish_lines, open_figure
from benchmarks.common.statistics import Summary, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHERS_DASH, OWN_DASHES = "--", ("-", "-.", ":")
"""Of the others' lines, and of mpiddp's: the next one once the colours are used up."""
TICK_SHARE = 0.09
"""How much of an axis a tick with its text needs."""


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    """For each number of ranks its times, where small buffers show, and its rates, where large do.

    The rates stand on a linear axis, all others are logarithmic.
    """
    title = "All-reduce: medians of the slowest rank's times, and 95 % intervals"
    with open_figure(path, 13.5, 4.4 * len(groups) + 0.8, title, note) as figure:
        grid = figure.subplots(len(groups), 2, squeeze=False)
        for (left, right), group in zip(grid, groups, strict=True):
            _draw_panel(left, right, group)
            left.set_title(f"{group.ranks} ranks on {group.where}: time", loc="left", fontsize=10)
            right.set_title("bus bandwidth, GB/s", loc="left", fontsize=10)
            left.yaxis.set_major_formatter(lambda seconds, _: describe_seconds(seconds))
            right.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.10g}")
        add_legend(figure, grid[0][0])


def _draw_panel(left: Axes, right: Axes, group: Group) -> None:
    own = [row for row in group.contenders if row.maker in (OWN, PREPARED)]
    for row in group.contenders:
        points = _list_points(group, row)
        if points:
            colour, dash = _choose_style(group, row, own)
            style: dict[str, Any] = {"color": colour, "ls": dash, "lw": 1.5, "marker": "o", "ms": 3}
            _draw_times(left, points, {**style, "label": row.label})
            rates = [find_rates(group.ranks, size, each.median)[1] for size, each in points]
            right.plot([size for size, _ in points], rates, **style)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    ticks = choose_ticks(group.plan.sizes)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [describe_size(size) for size in ticks], fontsize=8)
        axis.minorticks_off()
        axis.tick_params(axis="y", labelsize=8)
        finish_lines(axis)


def _choose_style(group: Group, row: Contender, own: Sequence[Contender]) -> tuple[str, str]:
    """Colour and dash: mpiddp's lines are whole, as long as the colours last."""
    if row.maker not in (OWN, PREPARED):
        return COLOURS[group.contenders.index(row) % len(COLOURS)], OTHERS_DASH
    turn, place = divmod(own.index(row), len(COLOURS))
    return COLOURS[place], OWN_DASHES[turn % len(OWN_DASHES)]


def choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Those of the sizes, in rising order, whose texts have room beside each other."""
    least = TICK_SHARE * math.log(sizes[-1] / sizes[0])
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log(size / ticks[-1]) >= least:
            ticks.append(size)
    return ticks


def _list_points(group: Group, row: Contender) -> list[tuple[int, Summary]]:
    known = ((size, group.seconds(row, size)) for size in group.plan.sizes)
    return [(size, summarize(seconds)) for size, seconds in known if seconds]


def _draw_times(axis: Axes, points: Sequence[tuple[int, Summary]], style: dict[str, Any]) -> None:
    sizes = [size for size, _ in points]
    ends = [
        (times.interval.low, times.interval.high) if times.interval else (times.median,) * 2
        for _, times in points
    ]
    axis.plot(sizes, [times.median for _, times in points], **style)
    axis.vlines(sizes, *zip(*ends, strict=True), color=style["color"], lw=3, alpha=0.4)
