"""Draw what a step consists of, a bar for each contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import COLOURS, add_legend, finish_bars, open_figure, write_beside
from benchmarks.training_step.measurement import Group
from benchmarks.training_step.report import find_efficiency, summarize_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 26
"""Letters of a name on one line."""
PARTS = ("compute", "exposed", "update")
NAMES = ("compute", "exposed communication", "update")
ROW_INCHES = 0.34
ROOM = 1.35
"""The axis's length, in the longest bar's: efficiencies stand behind the bars."""


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    """A panel for each model and number of ranks, each with a separate scale that begins at 0."""
    shown = [group for group in groups if group.series]
    rows = list(dict.fromkeys(group.workload for group in shown))
    columns = list(dict.fromkeys(group.ranks for group in shown))
    most = max((len(group.series) for group in shown), default=1)
    width, height = 6.4 * max(1, len(columns)) + 1.6, len(rows) * (ROW_INCHES * most + 0.9) + 1.1
    title = "A training step: medians of its parts on the slowest rank; and efficiency"
    with open_figure(path, width, height, title, note) as figure:
        if shown:
            grid = figure.subplots(len(rows), len(columns), squeeze=False)
            for group in shown:
                _draw_panel(grid[rows.index(group.workload)][columns.index(group.ranks)], group)
            add_legend(figure, grid[0][0])


def _draw_panel(axis: Axes, group: Group) -> None:
    longest = 0.0
    names = []
    for place, contender in enumerate(group.series):
        parts, efficiency = summarize_parts(group, contender), find_efficiency(group, contender)
        assert parts is not None
        end = 0.0
        for part, name, colour in zip(PARTS, NAMES, COLOURS, strict=False):
            length = 1e3 * getattr(parts, part)
            label = name if place == 0 else None
            axis.barh(place, length, left=end, height=0.66, color=colour, alpha=0.8, label=label)
            end += length
        step = 1e3 * parts.seconds.median
        text = f"{step:.3g} ms" if step < 1000 else f"{step:.0f} ms"
        share = f", {efficiency.median:.0%}" if efficiency is not None else ""
        write_beside(axis, text + share, max(end, step), place)
        longest = max(longest, end, step)
        names.append(break_name(contender.name))
    title = f"{group.workload}, {group.ranks} ranks on {group.where}, batch {group.plan.batch_size}"
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlim(0, ROOM * longest)
    axis.set_xlabel("milliseconds", fontsize=8)
    finish_bars(axis, names, size=8)
    axis.tick_params(axis="x", labelsize=8)


def break_name(name: str) -> str:
    """A name on two lines, or three, where one would leave the bars no room."""
    if len(name) <= LONGEST:
        return name
    head, mark, rest = name.partition(":" if ":" in name else " ")
    first, comma, last = rest.partition(",")
    second = f"{first}{comma}\n{last}" if len(rest) > LONGEST else rest
    return f"{head}{mark.strip()}\n{second}"
