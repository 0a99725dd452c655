"""Draw what rank 0 does in start-up by number of ranks: measured points, models beyond them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.machines import describe_place
from benchmarks.common.plotting import COLOURS, Line, LinePanel, draw_panels
from benchmarks.common.statistics import exact
from benchmarks.startup_scale.measurement import Plan, Starts
from benchmarks.startup_scale.report import (
    OWNERS,
    PREDICTED,
    Models,
    show_value,
    sum_by_owner,
)
from benchmarks.startup_scale.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, starts: Sequence[Starts], models: Models, plan: Plan, note: str) -> None:
    """A panel for each quantity, a line for each owner of stages."""
    title = f"Start-up on rank 0: counted, and predicted for {describe_place(*plan.predicted)}"
    ticks = {each for each in (2, 16, 128, 1024, 8192, plan.predict) if each <= plan.predict}
    panels = [
        LinePanel(
            title=f"{quantity} of rank 0",
            lines=list(_list_lines(models, quantity, plan)),
            label="ranks",
            ticks={each: f"{each:,}" for each in sorted(ticks)},
            describe=partial(show_value, quantity=quantity),
            finish=partial(_draw_counts, quantity=quantity, starts=starts, models=models),
        )
        for quantity in PREDICTED
    ]
    draw_panels(path, [panels[:2], panels[2:]], (12, 7.5), title, note)


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
    low, high = axis.get_ylim()
    axis.set_ylim(low / 2, high * 2)
