"""Draw every run of each contender, and the phases of mpiddp's start-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure.startup import phases
from benchmarks.measure.startup.report import Group
from benchmarks.records.statistics import summarize
from benchmarks.show.plotting import COLOURS, draw_bar, draw_parts, finish_bars, open_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_INCHES = 0.42
BLUE, ORANGE, GREY = *COLOURS[:2], "#7f7f7f"
BY_KIND = {"mpiddp": BLUE, "torchrun": ORANGE, "floor": GREY, "help": BLUE}
TITLE = "From launch to end, with one all-reduce: medians, quartiles, each run"


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    """A panel for each number of ranks, on one scale that begins at 0; the phases last."""
    shown, timed = [group for group in groups if group.ranks], phases.measured(groups)
    heights = [len(group.contenders) for group in shown] + [len(timed) + 1] * bool(timed)
    inches = ROW_INCHES * (sum(heights) + 2 * len(heights)) + 0.9
    with open_figure(path, 9, inches, TITLE, note) as figure:
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
        values = group.seconds(contender.name)
        text = f"{summarize(values).median:.2f} s"
        draw_bar(axis, place, values, BY_KIND[contender.kind], text)
    finish_bars(axis, [contender.name for contender in group.contenders])


def _draw_phases(axis: Axes, groups: Sequence[Group]) -> None:
    title = "mpiddp's own phases, on the slowest ranks: medians; of their sums: quartiles, each run"
    axis.set_title(title, loc="left", fontsize=10)
    for place, group in enumerate(groups):
        seconds = phases.phase_seconds(group)
        parts = {name: 1e3 * summarize(seconds[name]).median for name in phases.OWN}
        sums = [1e3 * value for value in phases.own_seconds(group)]
        whole = summarize(sums)
        draw_parts(axis, place, parts, whole, f"{whole.median:.0f} ms")
        axis.scatter(sums, [place] * len(sums), s=12, color="black", linewidths=0)
    axis.set_xlim(0, 1.3 * axis.dataLim.x1)  # The legend is on the right.
    axis.set_xlabel("milliseconds")
    finish_bars(axis, [group.title for group in groups])
    axis.legend(loc="lower right", fontsize=7, frameon=False)
