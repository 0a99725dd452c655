"""Draw times and rates of all-reduces against the size of the buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.allreduce.contenders import (
    GLOO,
    MPI,
    NCCL,
    PERSISTENT,
    PREPARED,
    RING,
    Cell,
    Contender,
)
from benchmarks.allreduce.measurement import Group
from benchmarks.allreduce.report import find_rates
from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.common.plotting import (
    Line,
    choose_names,
    describe_left_out,
    draw_line,
    finish_lines,
    label_lines,
    open_figure,
)
from benchmarks.common.statistics import quantile, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    GLOO: "PyTorch (Gloo)",
    NCCL: "PyTorch (NCCL)",
    MPI: "MPI_Allreduce",
    RING: "ring in mpi4py",
    PERSISTENT: "ring in mpi4py, persistent",
}
"""Of makers; mpiddp's rows have the names of their algorithms."""
TICK_SHARE = 0.09
"""How much of an axis a tick with its text needs."""


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    """For each number of ranks its times, where small buffers show, and its rates, where large do.

    The rates stand on a linear axis, all others are logarithmic.
    """
    title = "All-reduce: the slowest rank's time, median of the rounds and band of their quartiles"
    shown, left_out = choose_names(_list_scores(groups), [NAMES[GLOO], NAMES[NCCL], NAMES[MPI]])
    note = "; ".join(filter(None, [describe_left_out(left_out, "contenders"), note]))
    with open_figure(path, 14.5, 4.4 * len(groups) + 0.8, title, note) as figure:
        grid = figure.subplots(len(groups), 2, squeeze=False)
        panels: dict[Axes, list[Line]] = {}
        for (left, right), group in zip(grid, groups, strict=True):
            panels |= _draw_panel(left, right, group, shown)
            left.set_title(f"{group.ranks} ranks on {group.where}: time", loc="left", fontsize=10)
            right.set_title("bus bandwidth, GB/s", loc="left", fontsize=10)
            left.yaxis.set_major_formatter(lambda seconds, _: describe_seconds(seconds))
            right.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.10g}")
        label_lines(figure, panels)


def find_name(group: Group, row: Contender) -> str:
    """What a reader calls it: of transports and buffers only what tells it from the others."""
    own = [each for each in group.contenders if each.maker == row.maker]
    parts = [NAMES.get(row.maker, "mpiddp"), *[row.algorithm] * (row.algorithm != "auto")]
    for name in ("transport", "buffer"):
        if len({getattr(each, name) for each in own}) > 1:
            parts.append(f"{getattr(row, name)} {name}")
    return ", ".join([*parts, *["prepared"] * (row.maker == PREPARED)])


def _list_scores(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Of each contender its median at each size of each group; NaN if it was not timed there."""
    places = [(group, size) for group in groups for size in group.plan.sizes]
    rows = {find_name(group, row): row for group in groups for row in group.contenders}
    return {
        name: [quantile(group.seconds(row, size) or [math.nan], 0.5) for group, size in places]
        for name, row in rows.items()
    }


def _draw_panel(
    left: Axes, right: Axes, group: Group, shown: Sequence[str]
) -> dict[Axes, list[Line]]:
    times, rates = [], []
    for row in group.contenders:
        name = find_name(group, row)
        points = {size: group.samples(Cell(row, size)) for size in group.plan.sizes}
        seconds = {
            size: [visit.usual for visit in found] for size, found in points.items() if found
        }
        if name not in shown or not seconds:
            continue
        style = shown.index(name)
        times.append(Line(name, list(seconds), list(map(summarize, seconds.values())), style))
        found = [
            summarize([find_rates(group.ranks, size, each)[1] for each in values])
            for size, values in seconds.items()
        ]
        rates.append(Line(name, list(seconds), found, style))
    for axis, lines in ((left, times), (right, rates)):
        for line in lines:
            draw_line(axis, line)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    ticks = choose_ticks(group.plan.sizes)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [describe_size(size) for size in ticks], fontsize=8)
        axis.set_xlabel("buffer of each rank", fontsize=9)
        axis.minorticks_off()
        axis.tick_params(axis="y", labelsize=8)
        finish_lines(axis)
    return {left: times, right: rates}


def choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Those of the sizes, in rising order, whose texts have room beside each other."""
    least = TICK_SHARE * math.log(sizes[-1] / sizes[0])
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log(size / ticks[-1]) >= least:
            ticks.append(size)
    return ticks
