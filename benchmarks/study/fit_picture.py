"""Draws a fit: what was measured, the lines through it, and how far they are off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.judge.fit.fitted import Curve, Fit, describe_line, list_curves
from benchmarks.records.options import describe_seconds
from benchmarks.show.plotting import COLOURS, finish_lines, open_figure
from mpiddp.wording import describe_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDEST = 10.0
"""The largest ratio by the smallest, up to which ratios stand on a linear axis."""


def draw(path: Path, fit: Fit) -> None:
    curves = list_curves(fit)
    title = f"Messages of {fit.contender}: measured, and the fitted model"
    note = "below: measured over fitted time; dotted lines: sizes at which another line begins"
    width = 4.6 * len(curves) + 0.6
    with open_figure(path, width, 5.4, title, note) as figure:
        grid = figure.subplots(2, len(curves), squeeze=False, sharex="col", height_ratios=(3, 1))
        for place, (name, curve) in enumerate(curves.items()):
            _draw_times(grid[0, place], name, curve)
            _draw_errors(grid[1, place], curve)


def _draw_times(axis: Axes, name: str, curve: Curve) -> None:
    axis.set_title(name, loc="left", fontsize=10)
    sizes, seconds, _ = zip(*curve.points, strict=True)
    axis.plot(sizes, seconds, "o", ms=3, mfc="none", color="#777777", alpha=0.7)
    ends = [*(each.start for each in curve.segments[1:]), sizes[-1]]
    for place, (segment, end) in enumerate(zip(curve.segments, ends, strict=True)):
        start = max(segment.start, sizes[0])
        line = np.geomspace(start, end, 50)
        times = segment.latency + line * segment.seconds_per_byte
        colour = COLOURS[place % len(COLOURS)]
        axis.plot(line, times, color=colour, lw=2)
        middle = len(line) // 2
        axis.annotate(
            ", ".join(describe_line(segment)), (line[middle], times[middle]), xytext=(-5, 7),
            textcoords="offset points", ha="right", color=colour, fontsize=8,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda seconds, _: describe_seconds(seconds))
    _finish(axis, curve)


def _draw_errors(axis: Axes, curve: Curve) -> None:
    found, seconds, _ = np.array(curve.points).T
    ratios = seconds / curve.cost.seconds(found)
    axis.axhline(1, color="#888888", lw=1)
    axis.plot(found, ratios, "o", ms=3, color="#555555")
    if ratios.max() > WIDEST * ratios.min():
        axis.set_yscale("log")
    axis.set_ylim(min(0.95, 0.98 * ratios.min()), max(1.05, 1.02 * ratios.max()))
    axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:,.10g} ×")
    axis.set_xscale("log", base=2)
    sizes = [4**power for power in range(31) if found[0] <= 4**power <= found[-1]]
    shown = sizes[:: -(-len(sizes) // 5)]
    axis.set_xticks(shown, [describe_size(size) for size in shown], fontsize=8)
    _finish(axis, curve)


def _finish(axis: Axes, curve: Curve) -> None:
    for segment in curve.segments[1:]:
        axis.axvline(segment.start, color="#555555", lw=0.8, ls=":")
    axis.minorticks_off()
    axis.tick_params(labelsize=8)
    finish_lines(axis)
