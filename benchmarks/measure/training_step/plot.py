"""Draw what a step consists of, a bar for each contender."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks.measure.training_step.measurement import Group
from benchmarks.measure.training_step.report import PARTS, find_efficiency, summarize_parts
from benchmarks.records.statistics import spread
from benchmarks.show.plotting import (
    NOTE_POINTS,
    draw_parts,
    finish_bars,
    open_figure,
    wrap_note,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = ("forward and backward", "communication that nothing hides", "optimizer")
"""Of a step's parts."""
LONGEST = 33
"""Letters of a name on one line."""
ROW_INCHES = 0.34
ROOM = 1.5
"""The axis's length, in the longest bar's: efficiencies stand behind the bars."""


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    """A panel for each model and number of ranks, each with a separate scale that begins at 0."""
    shown = [group for group in groups if group.series]
    rows = list(dict.fromkeys(group.workload for group in shown))
    columns = list(dict.fromkeys(group.ranks for group in shown))
    most = max((len(group.series) for group in shown), default=1)
    width, height = 6.4 * max(1, len(columns)) + 1.6, len(rows) * (ROW_INCHES * most + 0.9) + 1.1
    title = (
        "A training step of the slowest rank: medians of its parts; line: quartiles of the whole"
    )
    with open_figure(path, width, height, title) as figure:
        if shown:
            grid = figure.subplots(len(rows), len(columns), squeeze=False)
            for group in shown:
                _draw_panel(grid[rows.index(group.workload)][columns.index(group.ranks)], group)
            figure.legend(
                *grid[0][0].get_legend_handles_labels(),
                loc="outside lower center",
                ncols=3,
                fontsize=9,
                frameon=False,
                title=wrap_note(note, width),
                title_fontsize=NOTE_POINTS,
            )


def _draw_panel(axis: Axes, group: Group) -> None:
    for place, contender in enumerate(group.series):
        parts, efficiency = summarize_parts(group, contender), find_efficiency(group, contender)
        assert parts is not None
        lengths = {
            title: 1e3 * getattr(parts, part) for title, part in zip(TITLES, PARTS, strict=True)
        }
        step = spread([1e3 * visit.seconds for visit in group.samples(contender)])
        text = f"{step.median:.3g} ms" if step.median < 1000 else f"{step.median:.0f} ms"
        share = f", efficiency {efficiency.estimate:.0%}" if efficiency is not None else ""
        draw_parts(axis, place, lengths, step, text + share)
    title = f"{group.workload}, {group.ranks} ranks on {group.where}, batch {group.plan.batch_size}"
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlim(0, ROOM * axis.dataLim.x1)
    axis.set_xlabel("milliseconds", fontsize=8)
    finish_bars(axis, [break_name(contender.name) for contender in group.series], size=8)
    axis.tick_params(axis="x", labelsize=8)


def break_name(name: str) -> str:
    """On lines that leave the bars their room."""
    parts = re.sub("[:,]", r"\g<0> ", name)
    return fill(parts, LONGEST, break_long_words=False, break_on_hyphens=False).replace(": ", ":")
