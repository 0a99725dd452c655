"""Draw times and rates of all-reduces against the size of the buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.allreduce.contenders import OWN, PREPARED, Contender
from benchmarks.allreduce.report import Times, find_rates, summarize
from benchmarks.allreduce.visits import Group
from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.common.palette import COLOURS

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.4 * len(groups) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(groups), 2, squeeze=False)
    for (left, right), group in zip(grid, groups, strict=True):
        where = "this machine" if group.nodes is None else f"{group.nodes} nodes"
        _draw_panel(left, right, group)
        left.set_title(f"{group.ranks} ranks on {where}: time", loc="left", fontsize=10)
        right.set_title("bus bandwidth, GB/s", loc="left", fontsize=10)
        left.yaxis.set_major_formatter(lambda seconds, _: describe_seconds(seconds))
        right.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.10g}")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle("All-reduce: medians of the slowest rank's times, and 95 % intervals")
    figure.supxlabel(note, fontsize=7, color="#555555")
    figure.savefig(path, dpi=150)


def _draw_panel(left: Axes, right: Axes, group: Group) -> None:
    own = [row for row in group.contenders if row.maker in (OWN, PREPARED)]
    for row in group.contenders:
        points = _list_points(group, row)
        if points:
            _draw_line(left, right, group.ranks, row.label, points, *_choose_style(group, row, own))
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    ticks = choose_ticks(group.plan.sizes)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [describe_size(size) for size in ticks], fontsize=8)
        axis.minorticks_off()
        axis.tick_params(axis="y", labelsize=8)
        axis.grid(color="#eeeeee", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)


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


def _list_points(group: Group, row: Contender) -> list[tuple[int, Times]]:
    known = ((size, group.seconds(row, size)) for size in group.plan.sizes)
    return [(size, summarize(seconds)) for size, seconds in known if seconds]


def _draw_line(
    left: Axes,
    right: Axes,
    ranks: int,
    label: str,
    points: Sequence[tuple[int, Times]],
    colour: str,
    dash: str,
) -> None:
    sizes = [size for size, _ in points]
    ends = [
        (times.interval.low, times.interval.high) if times.interval else (times.median,) * 2
        for _, times in points
    ]
    medians = [times.median for _, times in points]
    style: dict[str, Any] = {"color": colour, "ls": dash, "lw": 1.5, "marker": "o", "ms": 3}
    left.plot(sizes, medians, label=label, **style)
    left.vlines(sizes, *zip(*ends, strict=True), color=colour, lw=3, alpha=0.4)
    if ranks > 1:
        pairs = zip(sizes, medians, strict=True)
        right.plot(sizes, [find_rates(ranks, size, value)[1] for size, value in pairs], **style)
