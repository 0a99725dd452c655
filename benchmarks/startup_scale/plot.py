"""Draw what rank 0 does in start-up by number of ranks: measured points, models beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import COLOURS, finish_lines, open_figure
from benchmarks.startup_scale.measurement import Plan, Starts
from benchmarks.startup_scale.report import (
    OWNERS,
    PREDICTED,
    Models,
    describe_bytes,
    name_place,
    sum_by_owner,
)
from benchmarks.startup_scale.stages import BYTES, STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, starts: Sequence[Starts], models: Models, plan: Plan, note: str) -> None:
    """A panel for each quantity, a line for each owner of stages."""
    title = f"Start-up on rank 0: counted, and predicted for {name_place(plan.predicted)}"
    with open_figure(path, 11, 7.5, title, note) as figure:
        grid = figure.subplots(2, 2, squeeze=False)
        for axis, quantity in zip(grid.flat, PREDICTED, strict=True):
            _draw_panel(axis, quantity, starts, models, plan)


def _draw_panel(
    axis: Axes, quantity: str, starts: Sequence[Starts], models: Models, plan: Plan
) -> None:
    axis.set_title(f"{quantity} of rank 0", loc="left", fontsize=10)
    most = plan.predict
    ranks = [2**power for power in range(1, most.bit_length())]
    ranks += [most] if ranks[-1:] != [most] else []
    for colour, owner in zip(COLOURS, OWNERS, strict=False):
        values = [
            sum_by_owner(models, quantity, (each, -(-each // plan.ranks_per_node)))[owner]
            for each in ranks
        ]
        if not any(values):
            continue
        axis.plot(ranks, values, color=colour, lw=1.5)
        points = [
            sum(each.find(stage.name, quantity) for stage in STAGES if stage.owner == owner)
            for each in starts
        ]
        axis.scatter([each.place[0] for each in starts], points, s=14, color=colour, zorder=3)
        shown = describe_bytes(values[-1]) if quantity == BYTES else f"{values[-1]:,.3g}"
        axis.annotate(
            f"{owner} {shown}", (ranks[-1], values[-1]), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8, color=colour,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("ranks", fontsize=8)
    axis.set_xlim(ranks[0], ranks[-1] * 16)
    finish_lines(axis)
