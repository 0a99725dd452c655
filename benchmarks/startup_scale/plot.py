"""Draw what rank 0 does in start-up by number of ranks: measured points, models beyond them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import (
    COLOURS,
    Line,
    draw_line,
    finish_lines,
    label_lines,
    open_figure,
)
from benchmarks.common.statistics import exact
from benchmarks.startup_scale.measurement import Plan, Starts
from benchmarks.startup_scale.report import (
    OWNERS,
    PREDICTED,
    Models,
    name_place,
    show_value,
    sum_by_owner,
)
from benchmarks.startup_scale.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, starts: Sequence[Starts], models: Models, plan: Plan, note: str) -> None:
    """A panel for each quantity, a line for each owner of stages."""
    title = f"Start-up on rank 0: counted, and predicted for {name_place(plan.predicted)}"
    with open_figure(path, 12, 7.5, title, note) as figure:
        grid = figure.subplots(2, 2, squeeze=False)
        panels = {}
        for axis, quantity in zip(grid.flat, PREDICTED, strict=True):
            panels[axis] = list(_list_lines(models, quantity, plan))
            axis.set_title(f"{quantity} of rank 0", loc="left", fontsize=10)
            _draw_counts(axis, quantity, starts, models)
            _draw_panel(axis, quantity, panels[axis], plan)
        label_lines(figure, panels)


def _list_lines(models: Models, quantity: str, plan: Plan) -> Iterator[Line]:
    """What is predicted; the name says where it ends."""
    ranks = sorted({*(2**power for power in range(1, plan.predict.bit_length())), plan.predict})
    places = [(each, -(-each // plan.ranks_per_node)) for each in ranks]
    sums = [sum_by_owner(models, quantity, place) for place in places]
    for style, owner in enumerate(OWNERS):
        values = [each[owner] for each in sums]
        if any(values):
            name = f"{owner} {show_value(values[-1], quantity)}"
            # Nothing has no place on a logarithmic axis.
            yield Line(name, ranks, [exact(value or math.nan) for value in values], style)


def _draw_counts(axis: Axes, quantity: str, starts: Sequence[Starts], models: Models) -> None:
    for colour, owner in zip(COLOURS, OWNERS, strict=False):
        names = [each.name for each in STAGES if each.owner == owner]
        for each in starts:
            known = [name for name in names if (name, quantity) in models]
            count = sum(each.find(name, quantity) for name in known)
            if count:
                axis.scatter(each.place[0], count, s=30, color=colour, zorder=3)


def _draw_panel(axis: Axes, quantity: str, lines: Sequence[Line], plan: Plan) -> None:
    for line in lines:
        draw_line(axis, line)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(low / 2, high * 2)
    ticks = sorted({2, 16, 128, 1024, 8192, plan.predict})
    ticks = [each for each in ticks if each <= plan.predict]
    axis.set_xticks(ticks, [f"{each:,}" for each in ticks], fontsize=8)
    axis.yaxis.set_major_formatter(lambda value, _: show_value(value, quantity))
    axis.tick_params(axis="y", labelsize=8)
    axis.minorticks_off()
    axis.set_xlabel("ranks", fontsize=8)
    finish_lines(axis)
