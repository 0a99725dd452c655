"""Draw every run of each contender, and the phases of mpiddp's start-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import finish_bars, open_figure, write_beside
from benchmarks.common.statistics import summarize
from benchmarks.startup import phases
from benchmarks.startup.report import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_INCHES = 0.42
BLUE, ORANGE, GREY = "#1f77b4", "#d95f02", "#7f7f7f"
"""Colour-blind eyes can tell them apart, too."""
COLOURS = {"mpiddp": BLUE, "torchrun": ORANGE, "floor": GREY}


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    """A panel for each number of ranks, on one scale that begins at 0; the phases last."""
    shown, timed = [group for group in groups if group.ranks], phases.measured(groups)
    heights = [len(group.contenders) for group in shown] + [len(timed) + 1] * bool(timed)
    inches = ROW_INCHES * (sum(heights) + 2 * len(heights)) + 0.9
    with open_figure(path, 9, inches, "Launch to first all-reduce and back", note) as figure:
        grid = figure.subplots(
            len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        axes = list(grid[:, 0])
        longest = max(max(g.seconds(each.name)) for g in shown for each in g.contenders)
        for axis, group in zip(axes, shown, strict=False):
            _draw_runs(axis, group)
            axis.set_xlim(0, 1.1 * longest)
            axis.tick_params(axis="x", labelbottom=group is shown[-1])
        axes[len(shown) - 1].set_xlabel("seconds of the whole process")
        if timed:
            _draw_phases(axes[-1], timed)


def _draw_runs(axis: Axes, group: Group) -> None:
    axis.set_title(group.title, loc="left", fontsize=10)
    for place, contender in enumerate(group.contenders):
        values, colour = group.seconds(contender.name), COLOURS[contender.kind]
        summary = summarize(values)
        axis.barh(place, summary.median, height=0.62, color=colour, alpha=0.25)
        # Spread over the bar's height, in order of rounds: a drift shows as a slope.
        steps = max(1, len(values) - 1)
        heights = [place - 0.22 + 0.44 * index / steps for index in range(len(values))]
        axis.scatter(values, heights, s=12, color=colour, linewidths=0, zorder=3)
        axis.vlines(summary.median, place - 0.31, place + 0.31, color=colour, linewidth=2, zorder=4)
        if summary.interval is not None:
            ends = (summary.interval.low, summary.interval.high)
            axis.hlines(place, *ends, color="black", linewidth=1, zorder=5)
        write_beside(axis, f"{summary.median:.2f}", max(values), place)
    finish_bars(axis, [contender.name for contender in group.contenders])


def _draw_phases(axis: Axes, groups: Sequence[Group]) -> None:
    title = "mpiddp's own phases, each its slowest rank's: medians; points: sums by run"
    axis.set_title(title, loc="left", fontsize=10)
    longest = 0.0
    for place, group in enumerate(groups):
        begin, seconds = 0.0, phases.phase_seconds(group)
        for colour, name in zip((BLUE, ORANGE, GREY), phases.OWN, strict=True):
            length, label = 1e3 * summarize(seconds[name]).median, name if place == 0 else None
            axis.barh(place, length, left=begin, height=0.62, color=colour, alpha=0.45, label=label)
            begin += length
        sums = [1e3 * value for value in phases.own_seconds(group)]
        axis.scatter(sums, [place] * len(sums), s=12, color="black", linewidths=0)
        median = summarize(sums).median
        axis.vlines(median, place - 0.31, place + 0.31, color="black", linewidth=2)
        write_beside(axis, f"{median:.0f}", max(begin, *sums), place)
        longest = max(longest, *sums)
    axis.set_xlim(0, 1.1 * longest)
    axis.set_xlabel("milliseconds")
    finish_bars(axis, [group.title for group in groups])
    axis.legend(loc="best", fontsize=8, frameon=False)
